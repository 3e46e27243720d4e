"""From a trainer's arguments to the engine and what stands round it."""

from collections.abc import Callable
import copy
import dataclasses
import functools
from typing import Any

from absl import logging
from flax import nnx
from tunix.distillation import strategies
from tunix.distillation.strategies import logit
from tunix.sft import peft_trainer
from tunix.sft import utils as sft_utils

from tunix_progdistill import config as config_lib
from tunix_progdistill import errors
from tunix_progdistill import families
from tunix_progdistill import modules
from tunix_progdistill import strategy as strategy_lib
from tunix_progdistill.engine import checkpoints
from tunix_progdistill.engine import engine as engine_lib
from tunix_progdistill.engine import optimizer as optimizer_lib
from tunix_progdistill.engine import resume
from tunix_progdistill.objectives import adapter
from tunix_progdistill.objectives import foreign
from tunix_progdistill.plan import stages
from tunix_progdistill.teachers import online


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assembly:
  """All that an adapter to a Tunix trainer needs.

  Attributes:
    student_model: as the strategy pre-processed it.
    teacher_model: likewise; None where a loss needs none.
    strategy: ours where it could be made ours, else the one handed in.
    config: checked, with the plan's length as `max_steps` where it had none.
    engine: over the student.
    teacher: gives the teacher's outputs for a batch; None without a teacher.
    accumulation: micro-batches per update.
    fingerprint: of the plan, for checkpoints.
    reads_scalars: whether the objective uses temperature and alpha.
  """

  student_model: nnx.Module
  teacher_model: nnx.Module | None
  strategy: strategies.BaseStrategy | None
  config: peft_trainer.TrainingConfig
  engine: engine_lib.Engine
  teacher: online.OnlineTeacher | None
  accumulation: int
  fingerprint: dict[str, Any]
  reads_scalars: bool


class Processed:
  """Stands for a strategy that has pre-processed its models already."""

  def pre_process_models(self, student: Any, teacher: Any) -> tuple[Any, Any]:
    return student, teacher


def section_of(config: Any) -> config_lib.ProgressiveConfig:
  """The config's progressive section; without one, everything in one stage."""
  section = config_lib.as_progressive(getattr(config, "progressive", None))
  return section or config_lib.ProgressiveConfig()


def assemble(
    student_model: nnx.Module,
    teacher_model: nnx.Module,
    strategy: strategies.BaseStrategy,
    optimizer: optimizer_lib.Argument,
    training_config: peft_trainer.TrainingConfig,
    section: config_lib.ProgressiveConfig,
    *,
    processed: bool = False,
) -> Assembly:
  """Checks a trainer's arguments and wires the engine for distillation.

  Args:
    student_model: see the trainer.
    teacher_model: likewise.
    strategy: likewise.
    optimizer: likewise.
    training_config: likewise.
    section: its progressive section.
    processed: whether the strategy has pre-processed the models.

  Raises:
    ValueError: arguments that cannot work, alone or together.
  """
  for name, value, kind in (
      ("student_model", student_model, nnx.Module),
      ("teacher_model", teacher_model, nnx.Module),
      ("strategy", strategy, strategies.BaseStrategy),
      ("training_config", training_config, peft_trainer.TrainingConfig),
  ):
    if not isinstance(value, kind):
      raise errors.invalid(
          name, f"must be a {kind.__name__}", type(value).__name__,
          "see the class's docstring",
      )
  config = _checked(training_config)
  wrt = _wrt(student_model)
  _check_apart(student_model, teacher_model, wrt)
  # Before the engine looks at the student: a strategy may wrap its modules.
  if not processed:
    student_model, teacher_model = strategy.pre_process_models(
        student_model, teacher_model
    )
  families.check_pair(student_model, teacher_model)
  if type(strategy) is logit.LogitStrategy:  # a subclass has its own loss
    strategy = strategy_lib.ProgressiveLogitStrategy.adopt(strategy)
  if isinstance(strategy, strategy_lib.ProgressiveLogitStrategy):
    defaults = {"temperature": strategy.temperature, "alpha": strategy.alpha}
    heads = _heads(strategy, student_model, teacher_model, section.fused_head)
    objective: Any = adapter.LogitObjective(
        strategy, kl_div_tau1=section.log_kl_div_tau1, heads=heads
    )
    teacher = online.OnlineTeacher(
        functools.partial(strategy.teacher_output, heads=heads),
        constant=None if heads is None else heads.teacher.path,
    )
  else:
    _check_no_scalars(section.plan, type(strategy).__name__)
    defaults = {}
    objective = foreign.ForeignObjective(strategy)
    teacher = online.OnlineTeacher(foreign.teacher_outputs(strategy))
  return _wire(
      student_model, objective, optimizer, config, section, defaults,
      wrt=wrt, teacher_model=teacher_model, strategy=strategy, teacher=teacher,
  )


def assemble_loss(
    model: nnx.Module,
    functions: Callable[[], foreign.Functions],
    optimizer: optimizer_lib.Argument,
    training_config: peft_trainer.TrainingConfig,
    section: config_lib.ProgressiveConfig,
) -> Assembly:
  """Wires the engine for a plain trainer's own loss, which has no teacher.

  Args:
    model: is trained.
    functions: gives the trainer's loss functions, as they are when traced.
    optimizer: see the trainer.
    training_config: likewise.
    section: the progressive section.

  Raises:
    ValueError: arguments that cannot work, alone or together.
  """
  _check_no_scalars(section.plan, "the trainer's own loss")
  return _wire(
      model, foreign.LossFunction(functions), optimizer,
      _checked(training_config), section, {}, wrt=_wrt(model),
      teacher_model=None, strategy=None, teacher=None,
  )


def _wrt(model: nnx.Module) -> Any:
  return nnx.LoRAParam if sft_utils.is_lora_enabled(model) else nnx.Param


def _wire(
    model, objective, optimizer, config, section, defaults, *, wrt,
    teacher_model, strategy, teacher,
) -> Assembly:
  """The engine, and what stands round it."""
  checkpoints.check_writable(config.checkpoint_root_directory)
  accumulation = config.get_with_default("gradient_accumulation_steps", 1)
  plan = section.plan.resolve(
      updates_per_epoch=section.epoch_updates(accumulation),
      max_steps=config.max_steps,
      **defaults,
  )
  engine = engine_lib.Engine(
      model=model,
      plan=plan,
      optimizer=optimizer_lib.understand(
          optimizer,
          stages_with_rate=[s.learning_rate is not None for s in plan.stages],
      ),
      objective=objective,
      wrt=wrt,
      accumulation=accumulation,
      max_grad_norm=section.max_grad_norm,
      constant=(lambda: None) if teacher is None else teacher.constant,
  )
  return Assembly(
      student_model=model,
      teacher_model=teacher_model,
      strategy=strategy,
      config=_with_length(config, plan.updates),
      engine=engine,
      teacher=teacher,
      accumulation=accumulation,
      fingerprint=resume.fingerprint(
          plan,
          accumulation=accumulation,
          max_grad_norm=section.max_grad_norm,
          optimizer=engine.optimizer_spec,
      ),
      reads_scalars=isinstance(
          strategy, strategy_lib.ProgressiveLogitStrategy
      ),
  )


def _heads(
    strategy: strategy_lib.ProgressiveLogitStrategy, student: nnx.Module,
    teacher: nnx.Module, wanted: bool | None,
) -> Any:
  """The models' output heads; None where they are never fused with the loss."""
  if wanted is False:
    return None
  try:
    return strategy.heads(student, teacher, always=bool(wanted))
  except ValueError:
    if wanted:
      raise
    return None


def _check_no_scalars(plan: stages.StagePlan, reader: str) -> None:
  """Raises ValueError where the plan sets what its reader cannot read."""
  for owner, where in (
      (plan, ""), *((s, f"stages[{i}].") for i, s in enumerate(plan.stages))
  ):
    for field in ("temperature", "alpha"):
      if (value := getattr(owner, field)) is not None:
        raise errors.invalid(
            f"{where}{field}",
            f"must not be set, for {reader} does not read it",
            value, "leave it out, or pass a ProgressiveLogitStrategy",
        )


def _check_apart(
    student: nnx.Module, teacher: nnx.Module, wrt: nnx.filterlib.Filter
) -> None:
  """Raises ValueError where training the student would change the teacher.

  Sharing arrays is fine, and so are variables that never train (the base of a
  LoRA student).
  """
  moving = nnx.Any(wrt, nnx.Not(nnx.Param))
  ours = {id(v): n for n, v in modules.LiveVariables(student, moving)}
  shared = [ours[id(v)] for _, v in modules.LiveVariables(teacher)
            if id(v) in ours]
  if shared:
    raise errors.invalid(
        "teacher_model", "must not share variables with student_model",
        shared[:3], "pass a copy: nnx.clone(teacher_model)",
    )


def _checked(
    config: peft_trainer.TrainingConfig,
) -> peft_trainer.TrainingConfig:
  """The config with its counts as Python ints.

  Raises:
    ValueError: a count that is none.
  """
  config = copy.copy(config)
  for field, optional in (
      ("max_steps", True), ("gradient_accumulation_steps", True),
      ("eval_every_n_steps", False),
  ):
    value = errors.plain(getattr(config, field))
    setattr(config, field, value)
    if value is None and optional:
      continue
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
      raise errors.invalid(
          field, "must be >= 1 and a whole number", value,
          "leave it out" if optional else "evaluate e.g. every 100 updates",
      )
  if config.checkpoint_root_directory == "":
    raise errors.invalid(
        "checkpoint_root_directory", "must name a folder", "", "leave it out"
    )
  return config


def _with_length(
    config: peft_trainer.TrainingConfig, planned: int | None
) -> peft_trainer.TrainingConfig:
  """The config with the plan's length as `max_steps`, where it has none."""
  if planned is None:
    return config
  if config.max_steps is None:
    config = copy.copy(config)
    config.max_steps = planned
  elif config.max_steps < planned:
    logging.warning(
        "max_steps=%d ends the run before the plan's %d updates.",
        config.max_steps, planned,
    )
  elif config.max_steps > planned:
    logging.warning(
        "max_steps=%d is more than the plan's %d updates: its last stage goes "
        "on.", config.max_steps, planned,
    )
  return config
