"""What crosses from a teacher to the objective, where it is no plain logits."""

import flax
from jaxtyping import Array
from jaxtyping import Float


@flax.struct.dataclass
class Hidden:
  """A teacher's hidden states, for the output heads to be fused with the loss.

  Attributes:
    states: what the teacher's head is applied to.
  """

  states: Float[Array, "B T D"]
