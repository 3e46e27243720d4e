"""`Engine`: stages, optimizer and compiled steps of one student."""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
from typing import Any

from absl import logging
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import tqdm

from tunix_progdistill import freezing
from tunix_progdistill import modules
from tunix_progdistill.engine import batches
from tunix_progdistill.engine import optimizer as optimizer_lib
from tunix_progdistill.engine import step as step_lib
from tunix_progdistill.objectives import terms
from tunix_progdistill.plan import run
from tunix_progdistill.plan import state as state_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageCost:
  """What one compiled train step costs.

  Attributes:
    stage: its number.
    trainable_parameters: entries of the leaves that train.
    optimizer_bytes: of the optimizer's state.
    flops: of loss, gradient and update, by XLA's count (a loop's body once);
      the teacher is not part of the step.
    temp_bytes: of XLA's temporary buffers.
    compiles: how often this stage's step was compiled.
  """

  stage: int
  trainable_parameters: int
  optimizer_bytes: int
  flops: float
  temp_bytes: int
  compiles: int


class Engine:
  """Trains one student by a plan.

  Invariants:
    stage, temperature, alpha, rate = f(update, events)
    the optimizer's leaves = the leaves that the current stage trains
    one compiled step per (stage, shapes of the batch)

  Args:
    model: the student; its graph never changes here.
    plan: the resolved plan.
    optimizer: the optimizer argument, understood.
    objective: gives the loss as sums.
    wrt: the type of leaf that trains (`nnx.Param`, or `nnx.LoRAParam`).
    accumulation: micro-batches per update.
    max_grad_norm: clip by the global norm over all trainable leaves, or None.
    constant: reads the array that the objective needs beside each batch.
  """

  def __init__(
      self,
      *,
      model: nnx.Module,
      plan: run.RunPlan,
      optimizer: optimizer_lib.Spec,
      objective: terms.Objective,
      wrt: nnx.filterlib.Filter,
      accumulation: int,
      max_grad_norm: float | None,
      constant: Callable[[], Any] = lambda: None,
  ):
    self.model = model
    self.plan = plan
    self.run_state = state_lib.RunState()
    self.objective = objective
    self._spec = optimizer
    self._wrt = wrt
    self._accumulation = accumulation
    self._max_grad_norm = max_grad_norm
    self._constant = constant
    modules.let_go_of_small_types(model)
    # Every stage's rules are judged now, not after hours of the first stage.
    self._paths = []
    sizes = freezing.parameter_sizes(model, wrt)
    self._trainable_parameters = []
    for i, stage in enumerate(plan.stages):
      try:
        paths = freezing.trainable_paths(model, stage.stage, wrt)
      except ValueError as e:
        raise ValueError(f"stages[{i}]: {e}") from None
      self._paths.append(paths)
      self._trainable_parameters.append(sum(sizes[p] for p in paths))
    self._stage = -1
    self._groups: dict[str, frozenset[str]] = {}
    self._written: dict[str, jax.Array] = {}
    self._live: _Live | None = None
    self._window: step_lib.Window | None = None
    self._steps: dict[Any, Any] = {}
    self._compiles = [0] * len(plan.stages)
    self._eval_step: Any = None
    self.optimizer: Any = None  # an nnx.Optimizer, once started

  # -- stages

  @property
  def optimizer_spec(self) -> optimizer_lib.Spec:
    """The optimizer argument, understood."""
    return self._spec

  @property
  def stage(self) -> int:
    """The number of the stage that the optimizer stands for."""
    return self._stage

  def trainable_parameters(self, stage: int) -> int:
    """The number of entries that a stage trains."""
    return self._trainable_parameters[stage]

  def start(self, update: int) -> None:
    """Builds the optimizer that a checkpoint at `update` was written with.

    That checkpoint belongs to the stage of the update before it.
    """
    stage = self.plan.stage_at(max(update - 1, 0), self.run_state.events)
    groups = optimizer_lib.first_group(self._paths[0])
    for i in range(1, stage + 1):
      groups = optimizer_lib.next_groups(
          self._spec, groups, self._paths[i], i
      )
    self._install(stage, groups, carried={}, update=update)

  def _advance(self, stage: int, update: int) -> None:
    """Moves on to `stage`; leaves that go on keep their moments."""
    for i in range(self._stage + 1, stage + 1):
      groups = optimizer_lib.next_groups(
          self._spec, self._groups, self._paths[i], i
      )
      carried = optimizer_lib.carried_states(
          nnx.as_pure(self.optimizer.opt_state), self._groups, groups
      )
      self._install(i, groups, carried=carried, update=update)
    name = self.plan.stages[stage].stage.name
    logging.info(
        "Update %d: stage %d of %d%s begins; %s parameters train.",
        update, stage + 1, len(self.plan.stages), f" ({name})" if name else "",
        f"{self.trainable_parameters(stage):,}",
    )

  def _install(
      self, stage: int, groups: Mapping[str, frozenset[str]], *,
      carried: Mapping[str, Any], update: int,
  ) -> None:
    self.optimizer = optimizer_lib.make(
        self.model, self._spec, groups, wrt=self._wrt, carried=carried,
        update=update,
    )
    self.optimizer.step[...] = jnp.asarray(
        update, self.optimizer.step.get_value().dtype
    )
    _place_like(self.optimizer, self.model)
    self._stage, self._groups = stage, dict(groups)
    self._window = None
    self._live = None
    self._steps = {}  # other stages' programs hold memory and end here

  def forget_programs(self) -> None:
    """Compiles anew at the next step: the objective's functions changed."""
    self._steps, self._eval_step = {}, None

  def record(self, event: state_lib.Event) -> None:
    """Appends an event to the run's state; it takes effect at its update."""
    self.run_state = self.run_state.append(event)

  # -- the train step

  @property
  def _filter(self) -> nnx.filterlib.Filter:
    return nnx.All(self._wrt, freezing.filter_of(self._paths[self._stage]))

  def train_step(
      self, batch: batches.Prepared, update: int, is_update: bool,
      *, jit: bool = True,
  ) -> step_lib.Report:
    """Runs one micro-batch of the update with number `update` (from 0).

    Args:
      batch: the micro-batch.
      update: how many updates are done.
      is_update: whether this micro-batch ends its window.
      jit: False runs the step operation by operation, for debugging.
    """
    values = self.plan.scalars(update, self.run_state.events)
    if values.stage != self._stage:
      self._advance(values.stage, update)
    # numpy scalars: a Python float would be weakly typed and compile anew.
    scalars = terms.StepScalars(
        temperature=np.float32(values.temperature),
        alpha=np.float32(values.alpha),
        learning_rate=np.float32(values.learning_rate or 0.0),
    )
    self._join_mesh_of(batch)
    parts = self._variables()
    self._own(parts)
    blueprint = step_lib.Blueprint(
        graph=parts.graph,
        paths=parts.paths,
        optimizer=self.optimizer.tx,
        objective=self.objective,
        max_grad_norm=self._max_grad_norm,
        sets_rate=values.learning_rate is not None,
    )
    state = step_lib.StepState(
        trainable=parts.trainable.read(),
        mutable=parts.mutable.read(),
        optimizer=parts.read_optimizer(),
        window=None,
    )
    frozen, constant = parts.frozen.read(), self._constant()
    if self._accumulation > 1:
      if self._window is None:
        self._window = _like_placed(
            step_lib.empty_window(
                blueprint, state, frozen, batch, scalars, constant
            ),
            self.model,
        )
      state = dataclasses.replace(state, window=self._window)
    args = (state, frozen, batch, scalars, np.bool_(is_update), constant)
    if jit:
      new, report = self._run_compiled(blueprint, args)
    else:
      new, report = step_lib.make_train_step(blueprint)(*args)
    self._put_back(new)
    if is_update:
      self.optimizer.step.set_value(
          jnp.asarray(update + 1, self.optimizer.step.get_value().dtype)
      )
    return report

  def _join_mesh_of(self, batch: batches.Prepared) -> None:
    """Replicates a student made outside a mesh over the one of its batches."""
    if self._live is not None or _mesh_of(self.model) is not None:
      return
    mesh = _mesh(batch)
    if mesh is not None:
      for node in (self.model, self.optimizer):
        nnx.update(node, _over(mesh, nnx.state(node)))

  def _variables(self) -> "_Live":
    """The student's variables in this stage."""
    if self._live is None:
      self._live = _Live(self.model, self._filter, self.optimizer)
    return self._live

  def _put_back(self, state: step_lib.StepState) -> None:
    parts = self._variables()
    parts.trainable.write(state.trainable)
    parts.mutable.write(state.mutable)
    self._written = {**state.trainable, **state.mutable}
    parts.write_optimizer(state.optimizer)
    self._window = state.window

  def _run_compiled(self, blueprint: step_lib.Blueprint, args: tuple[Any, ...]):
    key = _signature((args[2], blueprint.sets_rate))
    compiled = self._steps.get(key)
    if compiled is not None:
      return compiled(*args)
    compiled = self._compile(blueprint, args)
    # The step's buffers are donated: should its first run fail (memory, most
    # likely), the weights must not be lost with it.
    backup = None
    if _has_own_memory():
      backup = _Backup(args[0])
    else:
      _check_room(compiled)
    try:
      new, report = compiled(*args)
      jax.block_until_ready(report)
    except jax.errors.JaxRuntimeError:
      if backup is not None:
        self._put_back(backup.restored())
      raise
    self._steps[key] = compiled
    return new, report

  def _compile(self, blueprint: step_lib.Blueprint, args: tuple[Any, ...]):
    shardings = jax.tree.map(lambda x: x.sharding, args[0])
    spread = any(len(s.device_set) > 1 for s in jax.tree.leaves(shardings))
    step = jax.jit(
        step_lib.make_train_step(blueprint),
        donate_argnums=0,
        out_shardings=(shardings, None) if spread else None,
    )
    self._compiles[self._stage] += 1
    with tqdm.tqdm(
        total=1, desc=f"compile stage {self._stage + 1}", leave=False,
        bar_format="{desc} [{elapsed}]", disable=None,
    ):
      return step.lower(*args).compile()

  def _own(self, parts: "_Live") -> None:
    """Copies leaves that somebody else may hold, before they are donated.

    The teacher may share arrays with the student, two leaves may be one array,
    the caller may have kept the initial weights, and a hook may have set some:
    only what the last step wrote is known to be the engine's alone.
    """
    for variables in (parts.trainable, parts.mutable):
      copies = {
          n: _copy(v, self._written.get(n))
          for n, v in variables.read().items()
          if v is not self._written.get(n)
      }
      variables.write(copies)
      self._written |= copies

  # -- evaluation

  def eval_step(self, batch: batches.Prepared) -> terms.LossTerms:
    """The evaluation's sums over one batch."""
    if self._eval_step is None:
      everything = modules.LiveVariables(self.model)
      step = step_lib.make_eval_step(
          self.objective, nnx.graphdef(self.model), everything.paths
      )
      self._eval_step = (everything, jax.jit(step))
    everything, compiled = self._eval_step
    return compiled(everything.read(), batch, self._constant())

  # -- what it costs

  @property
  def compiles(self) -> tuple[int, ...]:
    """Compilations of the train step, by stage."""
    return tuple(self._compiles)

  def cost(self) -> StageCost | None:
    """The cost of the current stage's step; None before its first update."""
    if not self._steps:
      return None
    compiled = next(iter(self._steps.values()))
    analysis = compiled.cost_analysis() or {}
    memory = compiled.memory_analysis()
    state = nnx.state(self.optimizer, nnx.optimizer.OptState)
    return StageCost(
        stage=self._stage,
        trainable_parameters=self.trainable_parameters(self._stage),
        optimizer_bytes=sum(x.nbytes for x in jax.tree.leaves(state)),
        flops=float(analysis.get("flops", float("nan"))),
        temp_bytes=int(getattr(memory, "temp_size_in_bytes", 0)),
        compiles=self._compiles[self._stage],
    )


class _Live:
  """The student's variables, in the three parts that a step tells apart."""

  def __init__(
      self, model: nnx.Module, trainable: nnx.filterlib.Filter, optimizer: Any
  ):
    self.graph = nnx.graphdef(model)
    rest = nnx.Not(trainable)
    self.trainable = modules.LiveVariables(model, trainable)
    self.frozen = modules.LiveVariables(model, nnx.All(nnx.Param, rest))
    self.mutable = modules.LiveVariables(
        model, nnx.All(nnx.Not(nnx.Param), rest)
    )
    self.paths = {
        **self.trainable.paths, **self.frozen.paths, **self.mutable.paths
    }
    is_variable = lambda x: isinstance(x, nnx.Variable)
    self._optimizer, self._optimizer_tree = jax.tree.flatten(
        optimizer.opt_state, is_leaf=is_variable
    )

  def read_optimizer(self) -> Any:
    """The optimizer's state as plain arrays."""
    return jax.tree.unflatten(
        self._optimizer_tree, [v.get_value() for v in self._optimizer]
    )

  def write_optimizer(self, state: Any) -> None:
    """Puts new arrays into the optimizer's variables."""
    for variable, value in zip(
        self._optimizer, jax.tree.leaves(state), strict=True
    ):
      variable.set_value(value)


class _Backup:
  """A copy of a step's state in the host's memory."""

  def __init__(self, state: Any):
    raw = modules.raw_keys(state)
    self._like = state
    self._shardings = jax.tree.map(lambda x: x.sharding, raw)
    self._copy = jax.device_get(raw)

  def restored(self) -> Any:
    """The state, on its devices again."""
    return modules.typed_keys(
        jax.device_put(self._copy, self._shardings), self._like
    )


def _has_own_memory() -> bool:
  """Whether the devices have memory beside the host's."""
  return jax.default_backend() != "cpu"


def _check_room(compiled: Any) -> None:
  """Raises MemoryError where the host cannot have the memory of a step.

  Where the host's memory is the device's, a backup would take what it is to
  save. What is plainly too much is told before the step takes its buffers.
  """
  need = int(getattr(compiled.memory_analysis(), "temp_size_in_bytes", 0))
  try:
    np.empty(need, np.uint8)  # reserved, never touched
  except MemoryError:
    raise MemoryError(
        f"the train step must find {need / 1e9:.1f} GB of memory, got less; "
        "take a smaller batch with gradient accumulation, or fused_head=True"
    ) from None


def _signature(tree: Any) -> Any:
  leaves, treedef = jax.tree.flatten(tree)
  return treedef, tuple(
      (np.shape(x), jnp.result_type(x), getattr(x, "sharding", None))
      for x in leaves
  )


def _copy(x: Any, before: jax.Array | None) -> jax.Array:
  """An array of its own, also of a numpy array, placed as the one before."""
  copy = jnp.array(x, copy=True)
  if before is None or copy.sharding == before.sharding:
    return copy
  return jax.device_put(copy, before.sharding)


def _mesh(tree: Any) -> Any:
  """The mesh that an array of `tree` is spread over; None without one."""
  for leaf in jax.tree.leaves(tree):
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, jax.sharding.NamedSharding) and (
        len(sharding.device_set) > 1
    ):
      return sharding.mesh
  return None


def _mesh_of(model: nnx.Module) -> Any:
  return _mesh(nnx.state(model))


def _over(mesh: Any, tree: Any) -> Any:
  """Replicates over `mesh` what does not lie on it yet.

  A scalar that starts on one device and comes back on all of them would make
  the step compile twice.
  """
  everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  put = lambda x: x if len(x.sharding.device_set) == mesh.size else (
      jax.device_put(x, everywhere)
  )
  return jax.tree.map(put, tree)


def _like_placed(tree: Any, model: nnx.Module) -> Any:
  """`tree` over the model's mesh, if it has one."""
  mesh = _mesh_of(model)
  return tree if mesh is None else _over(mesh, tree)


def _place_like(node: Any, model: nnx.Module) -> None:
  nnx.update(node, _like_placed(nnx.state(node), model))
