"""Progressive distillation for Google's Tunix.

Stages that freeze fewer and fewer layers of a student, temperature and alpha
that follow the count of updates, token-weighted losses, exact resume.
"""

from tunix_progdistill import kernels
from tunix_progdistill import students
from tunix_progdistill.config import ProgressiveConfig
from tunix_progdistill.config import TrainingConfig
from tunix_progdistill.families import causal_lm
from tunix_progdistill.hook import ProgressiveFreezingHook
from tunix_progdistill.plan import Stage
from tunix_progdistill.plan import StagePlan
from tunix_progdistill.plan import anneal
from tunix_progdistill.registry import register
from tunix_progdistill.strategy import ProgressiveLogitStrategy
from tunix_progdistill.trainer import ProgressiveDistillationTrainer
from tunix_progdistill.trainer import make_trainer

__version__ = "0.1.0"

__all__ = [
    "ProgressiveConfig",
    "ProgressiveDistillationTrainer",
    "ProgressiveFreezingHook",
    "ProgressiveLogitStrategy",
    "Stage",
    "StagePlan",
    "TrainingConfig",
    "anneal",
    "causal_lm",
    "kernels",
    "make_trainer",
    "register",
    "students",
]
