"""Small models made of large ones."""

from tunix_progdistill.students.layers import from_layers
from tunix_progdistill.students.layers import num_parameters

__all__ = ["from_layers", "num_parameters"]
