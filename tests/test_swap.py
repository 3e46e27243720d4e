"""The one-line swap: our strategy in an unmodified script and trainer."""

import logging as std_logging

from absl import logging
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from tunix.distillation.strategies import logit

from tests import toys
import tunix_progdistill as tpd

_OPTIONS = {"temperature": 1.5, "alpha": 0.3}


def _labels(input_tokens, input_mask):
  """One-hot rows, all-zero where the next token is padding."""
  ahead = jnp.roll(jnp.asarray(input_mask), -1, axis=1).at[:, -1].set(0)
  return toys.one_hot(input_tokens) * ahead[..., None]


def _all_labels(input_tokens, input_mask):
  del input_mask
  return toys.one_hot(input_tokens)


def _made(kind, *, labels_fn=_all_labels, options=None, **kwargs):
  strategy = kind(
      toys.forward, toys.forward, labels_fn,
      **(_OPTIONS if options is None else options),
  )
  kwargs.setdefault("optimizer", optax.sgd(0.1))
  return toys.stock(strategy_fn=lambda: strategy, **kwargs)


def _ours(**more):
  return lambda *args, **kwargs: tpd.ProgressiveLogitStrategy(
      *args, **kwargs, **more
  )


def _run(kind, data, **kwargs):
  trainer = _made(kind, **kwargs)
  trainer.train(data, data[:2])
  return trainer


@pytest.mark.parametrize("options", [
    {}, _OPTIONS, {"distill_top_k": 5}, {"alpha": 1.0}, {"alpha": 0.0},
])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("accumulation", [None, 2])
def test_kernel_tunix_is_tunix_bit_for_bit(options, ragged, accumulation):
  """With padding too: that is the switch that restores Tunix's mean."""
  data = toys.batches(4, ragged=ragged)
  kwargs = {
      "labels_fn": _labels, "options": options,
      "optimizer": optax.adam(1e-2), "eval_every_n_steps": 1,
      "gradient_accumulation_steps": accumulation,
  }
  stock = _run(logit.LogitStrategy, data, **kwargs)
  ours = _run(_ours(kernel="tunix"), data, **kwargs)
  for mode in ("train", "eval"):
    np.testing.assert_array_equal(
        toys.history(ours, "loss", mode), toys.history(stock, "loss", mode)
    )
  expected = toys.parameters(stock.model)
  for name, value in toys.parameters(ours.model).items():
    np.testing.assert_array_equal(value, expected[name], err_msg=name)


@pytest.mark.parametrize("options", [{}, _OPTIONS, {"distill_top_k": 5}])
@pytest.mark.parametrize("accumulation", [None, 2])
def test_default_equals_tunix_without_padding(options, accumulation):
  """Losses and, under SGD, weights to 1e-6."""
  data = toys.batches(6)
  kwargs = {
      "options": options, "eval_every_n_steps": 2,
      "gradient_accumulation_steps": accumulation,
  }
  stock = _run(logit.LogitStrategy, data, **kwargs)
  ours = _run(_ours(), data, **kwargs)
  for mode in ("train", "eval"):
    np.testing.assert_allclose(
        toys.history(ours, "loss", mode), toys.history(stock, "loss", mode),
        rtol=1e-6,
    )
  expected = toys.parameters(stock.model)
  for name, value in toys.parameters(ours.model).items():
    np.testing.assert_allclose(value, expected[name], atol=1e-6, err_msg=name)


def test_default_is_the_masked_mean_with_padding():
  """Trap 3: three more columns of padding change neither loss nor weights."""
  data = toys.batches(3, ragged=True)
  padded = [
      toys.batch(
          np.pad(b.input_tokens, ((0, 0), (0, 3)), constant_values=7),
          np.pad(b.input_mask, ((0, 0), (0, 3))),
      ) for b in data
  ]
  runs = {
      (kernel, wide): _run(
          _ours(kernel=kernel), padded if wide else data, labels_fn=_labels
      )
      for kernel in ("chunked", "tunix") for wide in (False, True)
  }
  losses = {k: toys.history(t, "loss") for k, t in runs.items()}
  np.testing.assert_allclose(
      losses["chunked", True], losses["chunked", False], rtol=1e-5
  )
  for name, value in toys.parameters(runs["chunked", True].model).items():
    np.testing.assert_allclose(
        value, toys.parameters(runs["chunked", False].model)[name], atol=1e-6
    )
  assert np.all(losses["tunix", True] < 0.9 * losses["tunix", False])


@pytest.mark.parametrize("kernel", ["chunked", "tunix"])
@pytest.mark.parametrize("options", [
    _OPTIONS,
    {"temperature": tpd.anneal(3, 1, "linear", updates=4), "alpha": 0.5},
])
def test_one_compile(kernel, options):
  """Constants and schedules alike, in an unmodified trainer."""
  trainer = _run(_ours(kernel=kernel), toys.batches(5), options=options)
  step, _ = trainer.jit_train_and_eval_step(cache_nnx_graph=True)
  assert step.func.jitted_fn._cache_size() == 1


@pytest.mark.parametrize("kernel", ["chunked", "tunix"])
def test_schedule_is_the_same_in_every_kernel(kernel):
  """Each update's loss is Tunix's at that update's temperature and alpha."""
  tau = tpd.anneal(3, 1, "linear", updates=3)
  alpha = optax.linear_schedule(1.0, 0.25, 2)
  data = toys.batches(3)
  trainer = _run(
      _ours(kernel=kernel), data, optimizer=optax.sgd(0.0),
      options={"temperature": tau, "alpha": alpha},
  )
  expected = [
      _run(
          logit.LogitStrategy, data[u:u + 1], optimizer=optax.sgd(0.0),
          options={"temperature": tau(u), "alpha": float(alpha(u))},
      ).metrics_logger.get_metric("", "loss", "train")
      for u in range(3)
  ]
  np.testing.assert_allclose(
      toys.history(trainer, "loss"), expected, rtol=1e-6
  )


def _scheduled(folder, **kwargs):
  trainer = _made(
      _ours(), optimizer=optax.sgd(0.05),
      options={"temperature": tpd.anneal(4, 1, "linear", updates=6)},
      checkpoint_root_directory=str(folder),
      checkpointing_options=ocp.CheckpointManagerOptions(save_interval_steps=1),
      **kwargs,
  )
  trainer.strategy.bind(trainer)
  return trainer


@pytest.mark.parametrize("accumulation", [None, 2])
def test_bound_strategy_resumes_exactly(tmp_path, accumulation):
  """The schedule goes on where the trainer's own count stands."""
  every = accumulation or 1
  data = toys.batches(6 * every)
  kwargs = {"gradient_accumulation_steps": accumulation}
  straight = _scheduled(tmp_path / "straight", **kwargs)
  straight.train(data)
  first = _scheduled(tmp_path / "cut", max_steps=2, **kwargs)
  first.train(data)
  second = _scheduled(tmp_path / "cut", **kwargs)
  assert second.train_steps == 2
  second.train(data)
  np.testing.assert_array_equal(
      toys.history(second, "loss"), toys.history(straight, "loss")[2:]
  )
  expected = toys.parameters(straight.model)
  for name, value in toys.parameters(second.model).items():
    np.testing.assert_array_equal(value, expected[name], err_msg=name)


def test_bound_strategy_lets_its_trainer_go():
  """No cycle keeps a trainer's arrays alive."""
  import gc
  import weakref

  trainer = _made(_ours())
  strategy = trainer.strategy.bind(trainer)
  gone = weakref.ref(trainer)
  gc.disable()
  try:
    del trainer
    assert strategy._trainer() is None or gc.collect() is not None
  finally:
    gc.enable()
  gc.collect()
  assert gone() is None


def test_unbound_schedule_warns_once(caplog):
  trainer = _made(_ours(), options={
      "temperature": tpd.anneal(4, 1, "linear", updates=6)
  })
  logging._log_counter_per_token.clear()
  with caplog.at_level(std_logging.WARNING, logger="absl"):
    trainer.train(toys.batches(3))
  said = [r.getMessage() for r in caplog.records if "bind" in r.getMessage()]
  assert len(said) == 1
  assert "resumed" in said[0] and "initial_update=0" in said[0]


@pytest.mark.parametrize("kernel", ["chunked", "tunix"])
def test_kernel_in_our_trainer(kernel):
  """The switch holds there as well: Tunix's mean, with stages and records."""
  data = toys.batches(2, ragged=True)
  trainer = toys.trainer(
      optimizer=optax.sgd,
      progressive={
          "stages": [{"learning_rate": 0.1}], "log_kl_div_tau1": True,
      },
      strategy_fn=lambda: tpd.ProgressiveLogitStrategy(
          toys.forward, toys.forward, _labels, kernel=kernel, **_OPTIONS
      ),
  )
  trainer.train(data)
  same = logit.LogitStrategy if kernel == "tunix" else _ours()
  stock = _run(same, data, labels_fn=_labels)
  np.testing.assert_allclose(
      toys.history(trainer, "loss"), toys.history(stock, "loss"), rtol=1e-6
  )
  expected = toys.parameters(stock.model)
  for name, value in toys.parameters(trainer.model).items():
    np.testing.assert_allclose(value, expected[name], atol=1e-6, err_msg=name)
  counted = toys.history(trainer, "distill/valid_tokens")[0]
  valid = np.sum(data[0].input_mask[:, 1:])
  assert counted == (data[0].input_mask.size if kernel == "tunix" else valid)
  assert toys.history(trainer, "distill/kl_div_tau1")[0] > 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: toys.strategy(kernel="fast"),
         "kernel must be chunked or tunix, got 'fast'"),
        (lambda: toys.strategy(
            kernel="tunix", loss_mask_fn=lambda **_: jnp.ones((1, 1))
        ), "loss_mask_fn must be left out with kernel='tunix'"),
        (lambda: toys.strategy(kernel="tunix").compute_loss(
            jnp.zeros((2, 3)), jnp.zeros((2, 3)), jnp.zeros(2, jnp.int32)
        ), "labels_fn must give rows [B, T, V] with kernel='tunix'"),
        (lambda: toys.trainer(
            strategy_fn=lambda: toys.strategy(kernel="tunix"),
            progressive=tpd.ProgressiveConfig(
                plan=toys.plan(), fused_head=True
            ),
        ), "fused_head"),
        (lambda: toys.strategy().bind(toys.stock()),
         "trainer must have been made with this strategy"),
        (lambda: toys.strategy().bind(None),
         "trainer must have been made with this strategy"),
    ],
)
def test_refused(make, message):
  with pytest.raises(ValueError) as e:
    make()
  assert message in str(e.value) and "\n" not in str(e.value)


def test_gradient_of_the_swap_is_tunix_s():
  """Also through `nnx.value_and_grad` with the metrics as aux."""
  rng = np.random.default_rng(0)
  s, t = (jnp.asarray(rng.normal(size=(2, 3, 7)), jnp.float32) for _ in "st")
  labels = jax.nn.one_hot(jnp.array([[0, 1, 2], [6, 5, 4]]), 7)
  results = []
  for kind in (logit.LogitStrategy, _ours()):
    strategy = kind(None, None, None, **_OPTIONS)
    (loss, metrics), gradient = jax.value_and_grad(
        lambda s: strategy.compute_loss(s, t, labels), has_aux=True
    )(s)
    results.append((loss, gradient, metrics))
  (loss, gradient, metrics), (ours, our_gradient, our_metrics) = results
  np.testing.assert_allclose(ours, loss, rtol=1e-6)
  np.testing.assert_allclose(our_gradient, gradient, atol=1e-7)
  assert our_metrics.keys() == metrics.keys()
  for name, value in metrics.items():
    np.testing.assert_allclose(our_metrics[name], value, rtol=1e-6)
