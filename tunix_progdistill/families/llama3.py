"""Llama3: tied or separate head; Tunix's attention ignores its rope_theta."""

from tunix_progdistill.families import base
from tunix_progdistill.families import rope

FAMILY = base.Family(
    name="llama3",
    class_names=("Llama3",),
    package="tunix.models.llama3.",
    mend=rope.theta_of_config,
)
