"""Small models made of large ones."""

from tunix_progdistill.students.adapters import add as add_lora
from tunix_progdistill.students.adapters import merged
from tunix_progdistill.students.layers import from_layers
from tunix_progdistill.students.layers import num_parameters

__all__ = ["add_lora", "from_layers", "merged", "num_parameters"]
