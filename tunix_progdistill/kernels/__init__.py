"""The mathematics of the distillation loss, on arrays only.

  reference    one token, vmapped: to be read, and to be compared with
  chunked      a block of tokens at a time: what the trainer uses
  linear_head  from hidden states and head matrices, without any logits
  sharded      batch and vocabulary spread over a mesh
  pmapped      rows spread over devices by `jax.pmap`
  topk         over a teacher's k largest entries
  similarity   correlation and agreement
  labels       one-hot rows, told by their ids
  reduce       from values per token to (sum, count)
"""

from tunix_progdistill.kernels import chunked
from tunix_progdistill.kernels import closed_form
from tunix_progdistill.kernels import labels
from tunix_progdistill.kernels import linear_head
from tunix_progdistill.kernels import pmapped
from tunix_progdistill.kernels import reduce
from tunix_progdistill.kernels import reference
from tunix_progdistill.kernels import sharded
from tunix_progdistill.kernels import similarity
from tunix_progdistill.kernels import topk

__all__ = [
    "chunked", "closed_form", "labels", "linear_head", "pmapped", "reduce",
    "reference", "sharded", "similarity", "topk",
]
