"""The student's graph, the loop's view of the step, and the hooks."""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import toys
from tests.traps import test_evaluation
from tunix_progdistill.engine import dispatch


class Hooks(test_evaluation.Hooks):
  """Writes down every call."""

  def __init__(self):
    super().__init__()
    self.calls = []
    self.ended = []

  def on_train_start(self, train_ctx):
    self.calls.append("start")

  def on_train_end(self, train_ctx):
    self.calls.append("end")

  def on_train_step_start(self, train_ctx):
    self.calls.append(("step", train_ctx.train_steps, train_ctx.engine.stage))

  def on_train_step_end(self, train_ctx, train_step, train_loss):
    self.ended.append((train_step, float(train_loss)))


def test_graph_never_changes():
  """Trap 9: Tunix's evaluation holds the graph that it was made with."""
  student = toys.Toy(seed=1, tied=False, dropout=0.2)
  before, seen = nnx.graphdef(student), []
  modules = [id(m) for _, m in nnx.iter_graph(student)
             if isinstance(m, nnx.Module)]
  trainer = toys.trainer(student=student, eval_every_n_steps=2)

  def data():
    for batch in toys.batches(6):
      seen.append(nnx.graphdef(student))
      yield batch

  trainer.train(data(), toys.batches(1))
  assert all(graph == before for graph in seen)
  assert nnx.graphdef(student) == before
  assert trainer.model is student
  assert modules == [id(m) for _, m in nnx.iter_graph(student)
                     if isinstance(m, nnx.Module)]


def test_teacher_never_changes():
  """Trap 9: neither its graph, nor its weights, nor its mode."""
  teacher = toys.Toy(dropout=0.5)
  before, weights = nnx.graphdef(teacher), toys.parameters(teacher)
  trainer = toys.trainer(teacher=teacher)
  trainer.train(toys.batches(3))
  assert nnx.graphdef(teacher) == before
  for path, value in toys.parameters(teacher).items():
    np.testing.assert_array_equal(value, weights[path], err_msg=path)


def test_student_may_share_arrays_with_the_teacher():
  """Trap 9: donated buffers must not be the teacher's, nor the caller's."""
  teacher = toys.Toy()
  graph, state = nnx.split(teacher)
  # Variables of its own, round the same arrays.
  student = nnx.merge(graph, jax.tree.map(lambda x: x, state))
  before = toys.parameters(teacher)
  kept = {
      path: variable.get_value()
      for path, variable in nnx.to_flat_state(nnx.state(student, nnx.Param))
  }
  trainer = toys.trainer(student=student, teacher=teacher)
  trainer.train(toys.batches(6))
  # The caller's references can still be read, and hold the old weights.
  for path, old in kept.items():
    new = dict(nnx.to_flat_state(nnx.state(student, nnx.Param)))[path]
    assert np.any(np.asarray(old) != np.asarray(new.get_value())), path
  for path, value in toys.parameters(teacher).items():
    np.testing.assert_array_equal(value, before[path], err_msg=path)


def test_student_that_is_the_teacher_is_refused():
  """Trap 9: with shared variables the teacher would be trained as well."""
  teacher = toys.Toy()
  for student in (teacher, nnx.merge(*nnx.split(teacher))):
    with pytest.raises(ValueError, match="must not share variables") as e:
      toys.trainer(student=student, teacher=teacher)
    assert "\n" not in str(e.value)


def test_loop_reads_the_number_of_programs():
  """Trap 9: Tunix's loop asks the step it fetched once for its cache."""
  trainer = toys.trainer()
  step, _ = trainer.jit_train_and_eval_step()
  assert step.func.jitted_fn._cache_size() == 0
  trainer.train(toys.batches(6))
  assert step.func.jitted_fn._cache_size() == 3


def test_hooks_fire():
  """Trap 9: training hooks see every update of every stage."""
  trainer = toys.trainer()
  hooks = Hooks()
  trainer.with_training_hooks(hooks)
  trainer.train(toys.batches(6))
  assert hooks.calls[0] == "start"
  assert hooks.calls[-1] == "end"
  # The hook fires before the step: a switch of stage is yet to come.
  assert hooks.calls[1:-1] == [
      ("step", 0, 0), ("step", 1, 0), ("step", 2, 0),
      ("step", 3, 1), ("step", 4, 1), ("step", 5, 2),
  ]
  assert [step for step, _ in hooks.ended] == [1, 2, 3, 4, 5, 6]
  np.testing.assert_allclose(
      [loss for _, loss in hooks.ended], toys.history(trainer, "loss"),
      rtol=1e-6,
  )


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda d: d("x"), ("x", "asked")),
        (lambda d: d("x", is_update_step=jnp.array(True)), ("x", True)),
        (lambda d: d("x", is_update_step=jnp.array(False)), ("x", False)),
        (lambda d: d("x", is_update_step=False), ("x", False)),
    ],
    ids=["plain", "true", "false", "bool"],
)
def test_both_calls_of_the_step(call, expected):
  """Trap 26: the older loop passes the batch, the newer one a flag as well."""
  dispatcher = dispatch.Dispatcher(
      lambda batch, is_update: (batch, is_update), lambda: "asked", lambda: 0
  )
  assert call(dispatcher) == expected
  assert dispatcher.func.jitted_fn._cache_size() == 0


@pytest.mark.parametrize("with_flag", [False, True])
def test_window_ends_alike_under_both_calls(with_flag):
  """Trap 26: three micro-batches an update, with and without the flag."""
  trainer = toys.trainer(gradient_accumulation_steps=3)
  step, _ = trainer.jit_train_and_eval_step()
  norms = []
  for i, batch in enumerate(toys.batches(3)):
    extra = {"is_update_step": jnp.array(i == 2)} if with_flag else {}
    # What the older loop does around the call.
    trainer._iter_steps = i
    _, _, norm = step(trainer._prepare_inputs(batch), **extra)
    norms.append(float(norm))
  assert norms[:2] == [0.0, 0.0]
  assert norms[2] > 0
  assert int(trainer.optimizer.step[...]) == 1
