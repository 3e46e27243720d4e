"""What is trained when, and with which scalars: pure, and free of models."""

from tunix_progdistill.plan.run import RunPlan
from tunix_progdistill.plan.run import Scalars
from tunix_progdistill.plan.schedules import Anneal
from tunix_progdistill.plan.schedules import anneal
from tunix_progdistill.plan.stages import Stage
from tunix_progdistill.plan.stages import StagePlan
from tunix_progdistill.plan.state import Event
from tunix_progdistill.plan.state import RunState

__all__ = [
    "Anneal",
    "Event",
    "RunPlan",
    "RunState",
    "Scalars",
    "Stage",
    "StagePlan",
    "anneal",
]
