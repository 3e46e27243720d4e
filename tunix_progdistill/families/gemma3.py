"""Gemma 3: tied embedding; five local layers, then a global one, by position.

The text model's head is its embedding. Images enter before the first layer,
so the vision tower counts as an input.
"""

from tunix_progdistill.families import base

FAMILY = base.Family(
    name="gemma3",
    class_names=("Gemma3",),
    package="tunix.models.gemma3.",
    inputs=(r"embedder/.*", r"vision_encoder/.*"),
)
