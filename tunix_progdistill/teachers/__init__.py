"""Where the teacher's outputs come from."""

from tunix_progdistill.teachers import online

__all__ = ["online"]
