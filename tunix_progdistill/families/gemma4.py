"""Gemma4: embedding under `embedder`, decoder layers under `layers`."""

from tunix_progdistill.families import base

FAMILY = base.Family(
    name="gemma4",
    class_names=("Gemma4",),
    package="tunix.models.gemma4.",
)
