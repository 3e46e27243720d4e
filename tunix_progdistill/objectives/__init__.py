"""What is minimised: each term gives (sum, count) over the valid tokens."""

from tunix_progdistill.objectives import foreign
from tunix_progdistill.objectives import logits
from tunix_progdistill.objectives import terms

__all__ = ["foreign", "logits", "terms"]
