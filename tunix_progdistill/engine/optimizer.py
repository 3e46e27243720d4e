"""The optimizer of a stage: groups of leaves, each with a state of its own.

Three kinds of argument are taken:
  factory   `learning_rate -> GradientTransformation` (`optax.adamw` itself, or
            `lambda lr: optax.adamw(lr, weight_decay=0.1)`)
  injected  made by `optax.inject_hyperparams`, as Tunix's own CLI makes it
  plain     any other `GradientTransformation`; it keeps its own rate

With a factory, the leaves that a stage unfreezes form a new group with fresh
moments and a fresh count, while those that go on keep theirs: Adam's bias
correction would make the first updates of a fresh leaf several times too large
if it inherited an old count. The other kinds start anew at a stage's start.

Learning rates come from the count of updates, as an argument of the step, and
never from a group's own count.
"""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
import re
from typing import Any
from typing import TypeAlias

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from tunix_progdistill import errors
from tunix_progdistill import freezing
from tunix_progdistill import modules

FACTORY, INJECTED, PLAIN = "factory", "injected", "plain"

Groups: TypeAlias = Mapping[str, frozenset[str]]
Argument: TypeAlias = (
    optax.GradientTransformation | Callable[..., optax.GradientTransformation]
)


@dataclasses.dataclass(frozen=True)
class Spec:
  """A user's optimizer argument, understood.

  Attributes:
    kind: one of "factory", "injected", "plain".
    argument: what was given.
  """

  kind: str
  argument: Argument

  def at(self, learning_rate: Any) -> optax.GradientTransformationExtraArgs:
    """The transformation; only a factory looks at `learning_rate`."""
    if self.kind == FACTORY:
      tx = self.argument(learning_rate)
    else:
      tx = self.argument
    return optax.with_extra_args_support(tx)


def parts(spec: Spec) -> list[str]:
  """The names of the states that an optimizer keeps, in order.

  They tell adamw from lion, not one decay from another.
  """
  state = jax.eval_shape(spec.at(jnp.float32(0.0)).init, _probe())
  return re.findall(r"\w+State\b", str(jax.tree.structure(state)))


def understand(argument: Argument, *, stages_with_rate: list[bool]) -> Spec:
  """Classifies the optimizer argument and checks it against the plan.

  Args:
    argument: see the module's docstring.
    stages_with_rate: for each stage, whether the plan sets its learning rate.

  Raises:
    ValueError: a combination that could not do what was asked.
  """
  plan_names_rate = any(stages_with_rate)
  if isinstance(argument, optax.MultiSteps):
    raise _accumulates()
  if isinstance(argument, optax.GradientTransformation):
    state = jax.eval_shape(argument.init, _probe())
    if _accumulating(argument):
      raise _accumulates()
    injected = _find(state, _injects_rate)
    spec = Spec(INJECTED if injected else PLAIN, argument)
    if plan_names_rate and not injected:
      raise errors.invalid(
          "optimizer",
          "must let the plan set its rate, for a stage names learning_rate",
          "a finished transformation",
          "pass a factory such as optax.adamw or lambda lr: optax.adamw(lr)",
      )
    scheduled = [getattr(s, "hyperparams_states", {}) for s in injected]
    if plan_names_rate and any("learning_rate" in s for s in scheduled):
      raise errors.invalid(
          "optimizer", "must not schedule a rate that the plan sets",
          "inject_hyperparams(...)(learning_rate=schedule)",
          "keep one: drop the plan's learning_rate, or pass a factory",
      )
    return spec
  if not callable(argument):
    raise errors.invalid(
        "optimizer", "must be a factory or a GradientTransformation",
        argument, "pass optax.adamw, or optax.adamw(1e-4)",
    )
  for i, has_rate in enumerate(stages_with_rate):
    if not has_rate:
      raise errors.invalid(
          f"stages[{i}].learning_rate",
          "must be set, by the stage or the plan, for the optimizer is a "
          "factory", None, "set it, or pass a finished optimizer",
      )
  spec = Spec(FACTORY, argument)
  made = spec.argument(1.0)
  if isinstance(made, optax.MultiSteps):
    raise _accumulates()
  if not isinstance(made, optax.GradientTransformation):
    raise errors.invalid(
        "optimizer", "must return a GradientTransformation",
        type(made).__name__, "pass a factory such as optax.adamw",
    )
  if _accumulating(made):
    raise _accumulates()
  if _ignores_rate(spec):
    raise errors.invalid(
        "optimizer", "must use the learning rate that it is given",
        "a factory with a rate of its own",
        "write lambda lr: optax.adamw(lr), or pass the transformation itself",
    )
  if len(stages_with_rate) > 1 and _couples_leaves(spec):
    raise errors.invalid(
        "optimizer", "must treat every parameter by itself",
        "a factory whose update of one parameter depends on the others",
        "clip by max_grad_norm in the progressive section, not in the factory",
    )
  return spec


def _accumulates() -> ValueError:
  return errors.invalid(
      "optimizer", "must not accumulate gradients itself", "optax.MultiSteps",
      "set gradient_accumulation_steps in TrainingConfig",
  )


def _accumulating(tx: optax.GradientTransformation) -> bool:
  state = jax.eval_shape(tx.init, _probe())
  return bool(_find(state, lambda x: isinstance(x, optax.MultiStepsState)))


def _probe(**sizes: float) -> nnx.State:
  """Two small parameters, of the kind that a factory is given; or fewer."""
  sizes = sizes or {"a": 0.5, "b": 0.25}
  return nnx.from_flat_state(
      [((name, "kernel"), jnp.full((2, 2), v)) for name, v in sizes.items()]
  )


def _ignores_rate(spec: Spec) -> bool:
  """Whether a factory's update is the same at two rates."""
  params = _probe()
  updates = []
  for rate in (1.0, 0.25):
    tx, rate = spec.at(jnp.float32(rate)), jnp.float32(rate)
    state = _set_rate(tx.init(params), rate)
    updates.append(tx.update(params, state, params)[0])
  return all(
      np.array_equal(a, b)
      for a, b in zip(*map(jax.tree.leaves, updates), strict=True)
  )


def _couples_leaves(spec: Spec) -> bool:
  """Whether two leaves together are updated otherwise than each alone.

  A clip by global norm inside a factory would become one clip per group. Two
  updates are compared, for Adam's first one forgets the gradient's scale.
  """
  tx = spec.at(jnp.float32(1.0))

  def last_update(*names):
    p = _probe(**{k: {"a": 0.5, "b": 0.25}[k] for k in names})
    state = _set_rate(tx.init(p), jnp.float32(1.0))
    updates = p
    for sizes in ({"a": 300.0, "b": 4.0}, {"a": 1e-3, "b": 4.0}):
      grads = _probe(**{k: sizes[k] for k in names})
      updates, state = tx.update(grads, state, p)
    return named_leaves(updates)

  both = last_update("a", "b")
  alone = last_update("a") | last_update("b")
  return any(
      not np.allclose(both[k], alone[k], rtol=1e-4, atol=1e-7) for k in both
  )


def _find(tree: Any, test: Callable[[Any], bool]) -> list[Any]:
  leaves = jax.tree.leaves(tree, is_leaf=test)
  return [x for x in leaves if test(x)]


def _injects_rate(node: Any) -> bool:
  return "learning_rate" in getattr(node, "hyperparams", {})


def _map_nodes(
    function: Callable[[Any], Any], tree: Any, test: Callable[[Any], bool]
) -> Any:
  return jax.tree.map(
      lambda x: function(x) if test(x) else x, tree, is_leaf=test
  )


def named_leaves(tree: Any) -> dict[str, Any]:
  """Path -> array, for a State or nested dict of parameters."""
  out = {}
  for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
    name = "/".join(
        str(k.key) for k in keys if isinstance(k, jax.tree_util.DictKey)
    )
    out[name] = leaf
  return out


# -- groups


def first_group(paths: frozenset[str]) -> dict[str, frozenset[str]]:
  """The groups of the first stage."""
  return {"stage0": paths}


def next_groups(
    spec: Spec, groups: Groups, paths: frozenset[str], stage: int
) -> dict[str, frozenset[str]]:
  """The groups of `stage`, which trains `paths`, after those of the one before.

  Leaves that go on stay in their group; new ones form `stage{n}`; empty groups
  go. For optimizers that start anew there is one group.
  """
  if spec.kind != FACTORY:
    return {f"stage{stage}": paths}
  kept = {g: p & paths for g, p in groups.items() if p & paths}
  fresh = paths - frozenset().union(*groups.values())
  if fresh:
    kept[f"stage{stage}"] = fresh
  return kept


def carried_states(
    old_state: Mapping[str, Any], old: Groups, new: Groups
) -> dict[str, Any]:
  """The states of the groups that go on, cut to the leaves that they keep."""
  out = {}
  for group, paths in new.items():
    if group not in old:
      continue
    everything = set(old[group])
    out[group] = _map_nodes(
        lambda x: nnx.from_flat_state(
            [v for n, v in _flat(x).items() if n in paths]
        ),
        old_state[group],
        lambda x: isinstance(x, nnx.State) and set(_flat(x)) == everything,
    )
  return out


def _flat(state: nnx.State) -> dict[str, tuple[Any, Any]]:
  """Name -> (path, value); a masked leaf is a value."""
  return {modules.path_name(p): (p, v) for p, v in nnx.to_flat_state(state)}


def grouped(
    spec: Spec,
    groups: Groups,
    *,
    paths: Mapping[str, Any],
    carried: Mapping[str, Any] | None = None,
    update: int = 0,
) -> optax.GradientTransformationExtraArgs:
  """One transformation over all groups; its state is {group: inner state}.

  Each inner transformation sees a nested `nnx.State` of its group's leaves, as
  `nnx.Optimizer` would give it, so that a mask by path chooses the same leaves.

  `update(grads, state, params, learning_rate=...)` needs the rate of this
  update, unless the optimizer keeps its own.

  Args:
    spec: the optimizer.
    groups: group -> names of its leaves.
    paths: name -> path of each leaf.
    carried: states of groups that go on.
    update: the run's count, for schedules inside an optimizer that starts anew.
  """
  carried = carried or {}

  def nest(leaves, group):
    return nnx.from_flat_state(
        [(paths[n], leaves[n]) for n in sorted(groups[group])]
    )

  def init(params):
    leaves = named_leaves(params)
    state = {}
    for group in sorted(groups):
      if group in carried:
        state[group] = carried[group]
      else:
        fresh = spec.at(jnp.float32(0.0)).init(
            nest(leaves, group)
        )
        if spec.kind != FACTORY:
          fresh = _set_schedule_counts(fresh, update)
        state[group] = fresh
    return state

  def apply(grads, state, params=None, *, learning_rate=None, **extra):
    tx = spec.at(learning_rate)
    g, p = named_leaves(grads), named_leaves(params)
    updates: dict[str, Any] = {}
    new_state: dict[str, Any] = {}
    for group in sorted(groups):
      inner = state[group]
      if learning_rate is not None:
        inner = _set_rate(inner, learning_rate)
      out, new_state[group] = tx.update(
          nest(g, group), inner, nest(p, group), **extra
      )
      updates |= named_leaves(out)
    names = list(g)
    treedef = jax.tree.structure(grads)
    return jax.tree.unflatten(treedef, [updates[n] for n in names]), new_state

  return optax.GradientTransformationExtraArgs(init, apply)


def _set_rate(state: Any, learning_rate: jax.Array) -> Any:
  def put(node):
    old = node.hyperparams["learning_rate"]
    new = jnp.asarray(learning_rate, jnp.asarray(old).dtype)
    return node._replace(hyperparams={**node.hyperparams, "learning_rate": new})

  return _map_nodes(put, state, _injects_rate)


def _set_schedule_counts(state: Any, update: int) -> Any:
  """Schedules go on by the run's updates where the moments start anew."""
  if update == 0:
    return state
  count = jnp.asarray(update, jnp.int32)
  is_schedule = lambda x: isinstance(x, optax.ScaleByScheduleState)
  state = _map_nodes(
      lambda x: x._replace(count=count), state, is_schedule
  )
  injects = lambda x: hasattr(x, "hyperparams") and hasattr(x, "count")

  def put(node):
    node = node._replace(count=count)
    if getattr(node, "hyperparams_states", None):
      states = jax.tree.map(
          lambda c: count if c.ndim == 0 and c.dtype == jnp.int32 else c,
          node.hyperparams_states,
      )
      node = node._replace(hyperparams_states=states)
    return node

  return _map_nodes(put, state, injects)


def current_rate(state: Any) -> jax.Array | None:
  """The rate that an injected optimizer last used, if there is one."""
  found = _find(state, _injects_rate)
  return found[0].hyperparams["learning_rate"] if found else None


def make(
    model: nnx.Module,
    spec: Spec,
    groups: Groups,
    *,
    wrt: nnx.filterlib.Filter,
    carried: Mapping[str, Any] | None = None,
    update: int = 0,
) -> nnx.Optimizer:
  """The `nnx.Optimizer` over the leaves of `groups`, and over no others.

  Args:
    model: the student.
    spec: the optimizer.
    groups: group -> paths of its leaves.
    wrt: the type of leaf that trains.
    carried: see `grouped`.
    update: see `grouped`.
  """
  leaves = frozenset().union(*groups.values())
  which = nnx.All(wrt, freezing.filter_of(leaves))
  paths = {
      modules.path_name(p): p
      for p, _ in nnx.to_flat_state(nnx.state(model, which))
  }
  tx = grouped(spec, groups, paths=paths, carried=carried, update=update)
  optimizer = nnx.Optimizer(model, tx, wrt=which)
  # A state that holds one array twice, or a parameter, cannot be donated.
  seen = {id(x) for x in jax.tree.leaves(nnx.state(model))}
  for variable in jax.tree.leaves(
      optimizer.opt_state, is_leaf=lambda x: isinstance(x, nnx.Variable)
  ):
    value = variable.get_value()
    if id(value) in seen:
      variable.set_value(jnp.array(value, copy=True))
    seen.add(id(value))
  return optimizer
