"""Lets the tests import an example's modules as its scripts do."""

import pathlib
import sys

_ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(_ROOT / "examples" / "gemma_to_small"))
