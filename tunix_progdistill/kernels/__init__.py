"""The mathematics of the distillation loss, on arrays only."""

from tunix_progdistill.kernels import chunked
from tunix_progdistill.kernels import closed_form
from tunix_progdistill.kernels import reduce
from tunix_progdistill.kernels import reference
from tunix_progdistill.kernels import similarity

__all__ = ["chunked", "closed_form", "reduce", "reference", "similarity"]
