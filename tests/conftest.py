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

from absl import logging
import jax
import pytest

_CACHE = pathlib.Path(__file__).parent.parent / ".jax_cache"
jax.config.update("jax_compilation_cache_dir", str(_CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


@pytest.fixture(autouse=True)
def plain_log():
  """The command's own handler, on a stream that is closed by now, goes."""
  logger = logging.get_absl_logger()
  logger.handlers.clear()
  logger.propagate = True
