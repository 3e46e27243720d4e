"""Gemma: embedding under `embedder`, decoder layers under `layers`."""

from tunix_progdistill.families import base

FAMILY = base.Family(
    name="gemma",
    class_names=("Gemma",),
    package="tunix.models.gemma.",
)
