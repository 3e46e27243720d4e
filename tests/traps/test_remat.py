"""Trap 22: remat is on wherever it was asked for, or the gradient tells."""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.weights import tiny
from tunix_progdistill import families
from tunix_progdistill.families import causal_lm
from tunix_progdistill.families import remat

TOKENS = jnp.asarray(tiny.TOKENS)


def gradient_of(model, compute):
  """(jaxpr, gradient) of a loss over the parameters of `model`."""
  graph, params, rest = nnx.split(model, nnx.Param, ...)

  def loss(params):
    made = nnx.merge(graph, params, rest)
    with families.tracing(made):
      logits = causal_lm.forward(made, TOKENS, jnp.ones_like(TOKENS))
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) ** 2)

  return str(jax.make_jaxpr(jax.grad(loss))(params)), (
      jax.jit(jax.grad(loss))(params) if compute else None
  )


@pytest.mark.parametrize(
    "name", ["gemma", "gemma3", "gemma4", "llama3", "qwen2", "qwen3"]
)
def test_trap_22_remat_is_in_the_jaxpr_and_changes_no_gradient(name):
  fewer = {} if name == "gemma4" else {"num_hidden_layers": 2}
  raw = tiny.config(name, **fewer)
  model, layers = tiny.model(raw), raw["num_hidden_layers"]
  compute = name in ("gemma3", "llama3")  # the others differ in names only
  plain, expected = gradient_of(model, compute)
  assert plain.count("remat2[") + plain.count("checkpoint[") == 0
  for choice, at_least in (("block", 2 * layers), (3, layers)):
    assert remat.set_remat(model, choice) > 0
    text, found = gradient_of(model, compute)
    assert text.count("remat2[") + text.count("checkpoint[") >= at_least
    for a, b in zip(
        jax.tree.leaves(expected), jax.tree.leaves(found), strict=True
    ):
      np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5)
  remat.set_remat(model, "none")
  assert gradient_of(model, False)[0] == plain


def test_a_model_without_remat_is_told_apart():
  class Plain(nnx.Module):
    def __init__(self):
      self.w = nnx.Param(jnp.ones(2))

  assert remat.set_remat(Plain(), "block") == 0
  with pytest.raises(ValueError, match="remat_config must be one of none, b"):
    remat.set_remat(Plain(), "attention")
