"""Qwen3: tied or separate head; Tunix's attention ignores its rope_theta."""

from tunix_progdistill.families import base
from tunix_progdistill.families import rope

FAMILY = base.Family(
    name="qwen3",
    class_names=("Qwen3",),
    package="tunix.models.qwen3.",
    mend=rope.theta_of_config,
)
