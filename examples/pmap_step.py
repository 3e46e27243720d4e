"""Two stages of distillation under `jax.pmap`, on eight simulated CPU devices.

  python examples/pmap_step.py

The first stage trains the last of five layers and what follows it, the second
one everything. Ends with code 1 unless each stage lowers the held-out KL and
leaves the frozen parameters what they were on all devices.
"""

import os
import sys

# Of two flags the last one counts: yours.
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 "
    + os.environ.get("XLA_FLAGS", "")
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from tunix_progdistill.engine import pmap_step
from tunix_progdistill.kernels import chunked

VOCABULARY, WIDTH, ROWS, LENGTH, LAYERS = 64, 32, 21, 16, 5


class Model(nnx.Module):
  """Embedding, residual layers, head."""

  def __init__(self, seed: int):
    rngs = nnx.Rngs(seed)
    self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
    self.layers = nnx.List(
        [nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(LAYERS)]
    )
    self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

  def __call__(self, tokens):
    x = self.embed(tokens)
    for layer in self.layers:
      x = x + jnp.tanh(layer(x))
    return self.head(x)


def batch(rng):
  """Tokens, next tokens, and weights: rows of different lengths."""
  tokens = rng.integers(0, VOCABULARY, (ROWS, LENGTH + 1))
  lengths = rng.integers(1, LENGTH + 1, ROWS)
  return tokens[:, :-1], tokens[:, 1:], np.arange(LENGTH) < lengths[:, None]


def same(state, start) -> bool:
  """Whether the frozen leaves of all devices are the stage's first ones."""
  return all(
      bool((np.asarray(x) == np.asarray(start[k])).all())
      for k, x in state.frozen.items()
  )


def main() -> int:
  forward = lambda model, tokens: model(tokens)
  student_fn, student = pmap_step.pure(Model(seed=1), forward)
  teacher_fn, teacher = pmap_step.pure(Model(seed=0), forward)
  everything = frozenset(student)
  last = frozenset(k for k in student if k.startswith(("layers/4", "head")))
  rng, good = np.random.default_rng(0), True
  tokens, _, weights = batch(rng)
  kl = jax.jit(lambda values: jnp.sum(chunked.forward_kl(
      student_fn(values, tokens), teacher_fn(teacher, tokens), where=weights
  )) / weights.sum())
  print(f"{len(jax.local_devices())} devices, held-out KL {kl(student):.4f}")
  for name, paths in (("80 % frozen", last), ("all trained", everything)):
    step = pmap_step.make_pmap_step(
        student_fn, teacher_fn, optax.adamw, trainable=paths
    )
    state, constant = step.init(student), step.replicate(teacher)
    for i in range(10):
      state, _ = step(
          state, constant, *batch(rng), temperature=2.0 - 0.1 * i, alpha=0.9,
          learning_rate=2e-2,
      )
    equal, before, after = same(state, student), kl(student), kl(state.values())
    print(
        f"{name}: KL {before:.4f} -> {after:.4f}; {len(state.frozen)} frozen "
        f"parameters, the same on all devices: {equal}"
    )
    good &= equal and bool(after < before)
    student = state.values()
  return 0 if good else 1


if __name__ == "__main__":
  sys.exit(main())
