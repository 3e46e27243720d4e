"""What a run is watched by."""

from tunix_progdistill.monitor import records

__all__ = ["records"]
