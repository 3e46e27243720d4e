"""Eight simulated devices, one shared compilation cache, no network."""

import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8"
)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "disabled")

# In the environment, so that every process that a test starts shares it.
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(
    pathlib.Path(__file__).parent.parent / ".jax_cache"
)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "0"

from absl import logging
import pytest


@pytest.fixture(autouse=True)
def plain_log():
  """The command's own handler, on a stream that is closed by now, goes."""
  logger = logging.get_absl_logger()
  logger.handlers.clear()
  logger.propagate = True
