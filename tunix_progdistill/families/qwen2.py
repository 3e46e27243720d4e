"""Qwen2: embedding under `embedder`, decoder layers under `layers`."""

from tunix_progdistill.families import base

FAMILY = base.Family(
    name="qwen2",
    class_names=("Qwen2",),
    package="tunix.models.qwen2.",
)
