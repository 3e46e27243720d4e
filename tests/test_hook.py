"""A hook on a stock trainer does what our trainer does, by the same engine."""

from flax import nnx
import jax
import numpy as np
import optax
import pytest
from tunix.distillation import distillation_trainer
from tunix.distillation.strategies import logit

from tests import resume_worker
from tests import toys
import tunix_progdistill as tpd
from tunix_progdistill.engine import loop

_Stock = distillation_trainer.DistillationTrainer


def _same(found, expected):
  assert sorted(found) == sorted(expected)
  for name in expected:
    np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_hook_is_trainer(accumulation):
  """Three stages: weights, records, FLOPs, evaluation, compilations."""
  data = toys.batches(6 * accumulation, ragged=True)
  held_out = toys.batches(2, seed=5)
  made = []
  for make in (toys.trainer, toys.hooked):
    costs = []
    trainer = make(
        gradient_accumulation_steps=accumulation, eval_every_n_steps=2,
        progressive=toys.plan(temperature=tpd.anneal(3.0, 1.0, "linear")),
    )
    engine = trainer.engine
    trainer.with_record_sink(lambda *_: costs.append(engine.cost()))
    trainer.train(data, held_out)
    made.append((trainer, engine, costs))
  (ours, engine, costs), (stock, lent, lent_costs) = made
  assert type(stock) is _Stock and stock.train_steps == 6
  _same(toys.parameters(stock.model), toys.parameters(ours.model))
  assert engine.compiles == lent.compiles == (1, 1, 1)
  assert [c.flops for c in costs if c] == [c.flops for c in lent_costs if c]
  for name, mode in (
      ("loss", "train"), ("distill/temperature", "train"),
      ("learning_rate", "train"), ("distill/kl_div_tau1", "eval"),
  ):
    np.testing.assert_array_equal(
        toys.history(stock, name, mode), toys.history(ours, name, mode)
    )


def test_attached_records_as_our_trainer():
  """`evaluate` and `record_event` are there; the count is Tunix's."""
  trainer = toys.hooked()
  before = trainer.evaluate(toys.batches(2, seed=5))
  trainer.record_event("advance")
  trainer.train(toys.batches(6))
  assert before["distill/kl_div_tau1"] > 0
  assert toys.history(trainer, "progressive/stage").tolist() == [
      1, 1, 2, 2, 2, 2
  ]


@pytest.mark.parametrize("stop", [1, 2, 5])
def test_stock_constructor_and_attach_again(tmp_path, stop):
  """Constructor, attach, end in the middle, constructor, attach: bit-equal."""
  straight = resume_worker.make(tmp_path / "straight", 1)
  straight.train(resume_worker.data(1))

  def cut():
    yield from resume_worker.data(1)[:stop]
    raise RuntimeError("ends here")

  first = resume_worker.make(tmp_path / "cut", 1, "hook")
  with pytest.raises(RuntimeError, match="ends here"):
    first.train(cut())
  first.checkpoint_manager.close()
  second = resume_worker.make(tmp_path / "cut", 1, "hook")
  assert second.train_steps == stop
  second.train(resume_worker.data(1))
  _same(toys.parameters(second.model), toys.parameters(straight.model))


def _anatomy(trainer):
  return {
      k: v for k, v in vars(trainer).items()
      if k not in ("_train_steps", "_iter_steps", "_restored_custom_metadata")
  }


@pytest.mark.parametrize("end", ["detach", "close", "refused"])
def test_instance_is_as_it_was(tmp_path, end):
  """Every attribute is the very object again; the class too."""
  strategy = logit.LogitStrategy(
      toys.forward, toys.forward,
      lambda input_tokens, input_mask: toys.one_hot(input_tokens),
  )
  trainer = toys.stock(
      strategy_fn=lambda: strategy, max_steps=9,
      checkpoint_root_directory=str(tmp_path), optimizer=optax.sgd(0.1),
  )
  other = toys.stock()
  before = _anatomy(trainer)
  hook = tpd.ProgressiveFreezingHook(toys.plan(), optimizer=optax.adamw)
  if end == "refused":
    wrong = toys.trainer(
        progressive=toys.plan(updates=(1, 1, 1)),
        checkpoint_root_directory=str(tmp_path / "progressive"),
    )
    wrong.train(toys.batches(3))
    with pytest.raises(ValueError, match="the plan must be the one"):
      hook.attach(trainer)
  else:
    hook.attach(trainer)
    assert isinstance(trainer, _Stock) and type(trainer) is not _Stock
    assert type(other) is _Stock
    assert trainer.strategy is not strategy
    assert isinstance(trainer.optimizer, nnx.Optimizer)
    if end == "detach":
      hook.detach()
      hook.detach()
    else:
      trainer.train(toys.batches(6))
  assert type(trainer) is _Stock
  after = _anatomy(trainer)
  assert after.keys() == before.keys()
  assert [k for k in before if after[k] is not before[k]] == []


def test_detached_trains_as_tunix():
  """What was attached and detached trains on exactly as a stock trainer."""
  data = toys.batches(3)
  results = []
  for attach in (False, True):
    strategy = logit.LogitStrategy(
        toys.forward, toys.forward,
        lambda input_tokens, input_mask: toys.one_hot(input_tokens),
    )
    trainer = toys.stock(
        strategy_fn=lambda s=strategy: s, optimizer=optax.adam(1e-2)
    )
    if attach:
      hook = tpd.ProgressiveFreezingHook(toys.plan(), optimizer=optax.adamw)
      hook.attach(trainer)
      hook.detach()
    trainer.train(data)
    results.append(toys.parameters(trainer.model))
  _same(results[1], results[0])


def test_stock_strategy_is_taken_over():
  """Functions, temperature and alpha of a stock LogitStrategy."""
  labels = lambda input_tokens, input_mask: toys.one_hot(input_tokens)
  stock = lambda: logit.LogitStrategy(
      toys.forward, toys.forward, labels, temperature=1.5, alpha=0.25
  )
  ours = toys.trainer(strategy_fn=lambda: toys.strategy(
      labels_fn=labels, temperature=1.5, alpha=0.25
  ))
  trainer = toys.hooked(strategy_fn=stock)
  for t in (ours, trainer):
    t.train(toys.batches(6))
  assert toys.history(trainer, "distill/temperature").tolist() == [1.5] * 6
  _same(toys.parameters(trainer.model), toys.parameters(ours.model))


@pytest.mark.parametrize("accumulation", [None, 2])
def test_own_optimizer(accumulation):
  """The instance's own, out of MultiSteps, with the plan's rates."""
  own = optax.inject_hyperparams(optax.adamw)(learning_rate=0.5)
  trainer = toys.stock(
      optimizer=own, gradient_accumulation_steps=accumulation
  )
  tpd.ProgressiveFreezingHook(toys.plan()).attach(trainer)
  ours = toys.trainer(optimizer=own, gradient_accumulation_steps=accumulation)
  for t in (trainer, ours):
    t.train(toys.batches(6 * (accumulation or 1)))
  np.testing.assert_allclose(
      toys.history(trainer, "learning_rate"),
      [1e-2] * 2 + [5e-3] * 2 + [1e-3] * 2, rtol=1e-6,
  )
  _same(toys.parameters(trainer.model), toys.parameters(ours.model))


# -- what is refused


def test_unattached_hook_raises():
  trainer = toys.stock()
  hook = tpd.ProgressiveFreezingHook(toys.plan(), optimizer=optax.adamw)
  trainer.with_training_hooks(hook)
  with pytest.raises(ValueError, match=r"hook\.attach\(trainer\)"):
    trainer.train(toys.batches(1))
  hook.attach(toys.stock())
  with pytest.raises(ValueError, match="must be attached to the trainer that"):
    trainer.train(toys.batches(1))


def test_registered_and_attached_hook_runs():
  trainer = toys.stock()
  hook = tpd.ProgressiveFreezingHook(toys.plan(), optimizer=optax.adamw)
  trainer.with_training_hooks(hook.attach(trainer))
  trainer.train(toys.batches(6), toys.batches(1))
  assert trainer.train_steps == 6


class _OwnStep(_Stock):

  def _prepare_inputs(self, input_data):
    return super()._prepare_inputs(input_data)


def _started():
  trainer = toys.stock(optimizer=optax.sgd(0.1))
  trainer.train(toys.batches(1))
  return trainer


def _own_step():
  return _OwnStep(
      toys.Toy(seed=1), toys.Toy(), toys.strategy(), optax.sgd(0.1),
      distillation_trainer.TrainingConfig(eval_every_n_steps=1),
  )


@pytest.mark.parametrize(
    ("trainer", "kwargs", "message"),
    [
        (lambda: 3, {}, "trainer must be a Tunix trainer, got 'int'"),
        (toys.trainer, {}, "trainer must have no engine yet"),
        (toys.hooked, {}, "trainer must have no engine yet"),
        (_started, {}, "must be attached to before its first update, got "
         "'1 updates'"),
        (_own_step, {}, "must not have a _prepare_inputs of its own"),
        (toys.stock, {"strategy": toys.strategy()},
         "strategy and teacher_model must be left out"),
        (toys.plain, {"teacher_model": toys.Toy()},
         "strategy and teacher_model must be given together"),
        (toys.stock, {"optimizer": None},
         "optimizer must let the plan set its rate"),
        (toys.stock, {"progressive": None}, "progressive must be given"),
        (toys.plain, {"progressive": toys.plan(temperature=2.0)},
         "temperature must not be set, for the trainer's own loss"),
    ],
)
def test_refused(trainer, kwargs, message):
  made = trainer()
  kind = type(made)
  arguments = {"progressive": toys.plan(), "optimizer": optax.adamw} | kwargs
  with pytest.raises(ValueError) as e:
    tpd.ProgressiveFreezingHook(**arguments).attach(made)
  assert message in str(e.value) and "\n" not in str(e.value)
  assert type(made) is kind


def test_one_hook_for_one_trainer():
  hook = tpd.ProgressiveFreezingHook(toys.plan(), optimizer=optax.adamw)
  hook.attach(toys.stock())
  with pytest.raises(ValueError, match="the hook's only one"):
    hook.attach(toys.stock())
  hook.detach()
  trainer = toys.stock()
  hook.attach(trainer)
  assert isinstance(trainer, loop.StagedLoop)


# -- the flag


def test_flag_is_read_by_attach():
  config = toys.config(toys.plan())
  trainer = _Stock(
      toys.Toy(seed=1), toys.Toy(), toys.strategy(), optax.set_to_zero(),
      config,
  )
  hook = tpd.ProgressiveFreezingHook(optimizer=optax.adamw).attach(trainer)
  assert len(hook.engine.plan.stages) == 3


def _stock_strategy():
  return logit.LogitStrategy(
      toys.forward, toys.forward,
      lambda input_tokens, input_mask: toys.one_hot(input_tokens),
  )


@pytest.mark.parametrize("how", ["make_trainer", "hook", "no section"])
def test_disabled_is_tunix_itself(how):
  """`enabled: false` is the plain trainer, bit-equal, whatever the plan."""
  stock = toys.stock(strategy_fn=_stock_strategy, optimizer=optax.adam(1e-2))
  off = {"enabled": False, "stages": [{"freeze_fraction": 0.5}]}
  parts = (toys.Toy(seed=1), toys.Toy(), _stock_strategy(), optax.adam(1e-2))
  if how == "hook":
    trainer = _Stock(*parts, toys.config(off))
    hook = tpd.ProgressiveFreezingHook().attach(trainer)
    trainer.with_training_hooks(hook)
    assert hook.engine is None
  else:
    trainer = tpd.make_trainer(
        *parts, toys.config(None if how == "no section" else off)
    )
  assert type(trainer) is _Stock
  for t in (stock, trainer):
    t.train(toys.batches(3, ragged=True))
  _same(toys.parameters(trainer.model), toys.parameters(stock.model))
  np.testing.assert_array_equal(
      toys.history(trainer, "loss"), toys.history(stock, "loss")
  )


def test_make_trainer_with_stages():
  trainer = tpd.make_trainer(
      toys.Toy(seed=1), toys.Toy(), toys.strategy(), optax.adamw,
      toys.config({"enabled": True, "stages": [{"learning_rate": 1e-3}]}),
  )
  assert isinstance(trainer, tpd.ProgressiveDistillationTrainer)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tpd.make_trainer(
            toys.Toy(seed=1), toys.Toy(), toys.strategy(), optax.adamw,
            toys.config({"enabled": False}),
        ), "optimizer must be a GradientTransformation"),
        (lambda: toys.trainer(progressive={"enabled": False}),
         "progressive.enabled must be true for this class"),
        (lambda: toys.config({"enabled": "no", "stages": [{}]}),
         "progressive.enabled must be true or false, got 'no'"),
        (lambda: toys.config({"enabled": 1, "stages": [{}]}),
         "progressive.enabled must be true or false, got 1"),
    ],
)
def test_wrong_flag(make, message):
  with pytest.raises(ValueError) as e:
    make()
  assert message in str(e.value)


def test_mesh_of_eight_devices():
  """The attached trainer shards as ours does."""
  mesh = jax.sharding.Mesh(np.array(jax.devices()), ("fsdp",))
  results = []
  for make in (toys.trainer, toys.hooked):
    with mesh:
      trainer = make()
      trainer.train(toys.batches(6, rows=8))
    results.append(toys.parameters(trainer.model))
  _same(results[1], results[0])
