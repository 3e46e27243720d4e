"""Logging back ends, by the names in the config."""

from collections.abc import Sequence
from typing import Any

from tunix.sft import metrics_logger


def tunix_options(
    names: Sequence[str], *, log_dir: str, project: str, run: str,
    flush_every_n_steps: int,
) -> metrics_logger.MetricsLoggerOptions | None:
  """Tunix's options for the back ends that Tunix drives; None for none.

  Left to itself, Tunix starts W&B wherever it can be imported: here only what
  is named starts.

  Args:
    names: back ends; those that are not Tunix's are passed over.
    log_dir: of TensorBoard's events.
    project: of the run, for W&B.
    run: its name there.
    flush_every_n_steps: updates between two writes of events.
  """
  factories: list[Any] = []
  if "tensorboard" in names:
    factories.append(
        lambda: metrics_logger.TensorboardBackend(
            log_dir=log_dir, flush_every_n_steps=flush_every_n_steps
        )
    )
  if "wandb" in names:
    factories.append(
        lambda: metrics_logger.WandbBackend(project=project, name=run)
    )
  if not factories:
    return None
  return metrics_logger.MetricsLoggerOptions(
      log_dir=log_dir,
      project_name=project,
      run_name=run,
      flush_every_n_steps=flush_every_n_steps,
      backend_kwargs={"custom_backend": factories},
  )
