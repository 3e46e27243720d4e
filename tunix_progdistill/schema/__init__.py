"""What a config may hold, and how a command line becomes one."""

from tunix_progdistill.schema.grammar import resolve
from tunix_progdistill.schema.grammar import to_yaml
from tunix_progdistill.schema.optimizer import OptimizerConfig
from tunix_progdistill.schema.reference import base_yaml
from tunix_progdistill.schema.reference import document
from tunix_progdistill.schema.reference import help_text
from tunix_progdistill.schema.run_config import RunConfig
from tunix_progdistill.schema.run_config import Source
from tunix_progdistill.schema.sections import Targets
from tunix_progdistill.schema.sections import TokenizerConfig
from tunix_progdistill.schema.training import MetricsLoggingOptions
from tunix_progdistill.schema.training import TrainingSection

__all__ = [
    "MetricsLoggingOptions",
    "OptimizerConfig",
    "RunConfig",
    "Source",
    "Targets",
    "TokenizerConfig",
    "TrainingSection",
    "base_yaml",
    "document",
    "help_text",
    "resolve",
    "to_yaml",
]
