"""Small models made of large ones."""

from tunix_progdistill.students.layers import from_layers

__all__ = ["from_layers"]
