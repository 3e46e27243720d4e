"""What a run writes down: the data's position, and each record once."""

import json

import grain
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from tests import toys
from tests.cases import common
import tunix_progdistill as tpd
from tunix_progdistill.monitor import metrics_file

ROWS = np.random.default_rng(5).normal(size=(2, 10, 4)).astype(np.float32)


class Counting:
  """Batch i consists of token i; counts what is read."""

  def __init__(self):
    self.read = []

  def __len__(self):
    return 10

  def __getitem__(self, i):
    self.read.append(int(i))
    return common.batch(np.full((2, 3), int(i)))


def data(source, *, shuffle):
  ds = grain.MapDataset.source(source)
  if shuffle:
    ds = ds.shuffle(seed=3)
  return ds.repeat(2).to_iter_dataset(
      grain.ReadOptions(num_threads=0, prefetch_buffer_size=1)
  )


def make(root, *, max_steps=None, accumulation=1, every=1, updates=20):
  trainer = toys.trainer(
      student=toys.Table(ROWS[0]), teacher=toys.Table(ROWS[1]),
      optimizer=optax.adamw,
      progressive=tpd.StagePlan(
          stages=(
              tpd.Stage(updates=updates // 2, learning_rate=0.1),
              tpd.Stage(updates=updates - updates // 2, learning_rate=0.05),
          ),
          temperature=tpd.anneal(3.0, 1.0, "linear"),
      ),
      strategy_fn=lambda: common.strategy(alpha=0.5), max_steps=max_steps,
      gradient_accumulation_steps=accumulation, eval_every_n_steps=4,
      checkpoint_root_directory=None if root is None else str(root),
      checkpointing_options=ocp.CheckpointManagerOptions(
          save_interval_steps=every, max_to_keep=3
      ),
  )
  return trainer.with_gen_model_input_fn(common.everything)


def weights(trainer):
  return toys.parameters(trainer.model)["rows"]


@pytest.mark.parametrize(("stop", "shuffle"), [
    (4, True), (14, False),
    pytest.param(4, False, marks=pytest.mark.slow),
    pytest.param(14, True, marks=pytest.mark.slow),
])
def test_k26_1_a_restored_iterator_reads_nothing_twice(tmp_path, stop, shuffle):
  whole = Counting()
  straight = make(None)
  straight.train(data(whole, shuffle=shuffle))
  assert len(whole.read) >= 20

  first, second = Counting(), Counting()
  make(tmp_path, max_steps=stop).train(data(first, shuffle=shuffle))
  resumed = make(tmp_path)
  assert resumed.train_steps == stop
  resumed.train(data(second, shuffle=shuffle))
  assert resumed.train_steps == 20
  assert second.read[: 20 - stop] == whole.read[stop:20]
  np.testing.assert_array_equal(weights(resumed), weights(straight))


def test_fillers_and_a_restored_iterator(tmp_path):
  """20 batches in windows of 3: the last window is filled up by one."""
  straight = make(None, accumulation=3, updates=7)
  straight.train(data(Counting(), shuffle=True))
  assert straight.train_steps == 7
  make(tmp_path, accumulation=3, updates=7, max_steps=3).train(
      data(Counting(), shuffle=True)
  )
  resumed = make(tmp_path, accumulation=3, updates=7)
  resumed.train(data(Counting(), shuffle=True))
  assert resumed.train_steps == 7
  np.testing.assert_array_equal(weights(resumed), weights(straight))
  again = make(tmp_path, accumulation=3, updates=7)
  again.train(data(Counting(), shuffle=True))  # nothing is left to do
  np.testing.assert_array_equal(weights(again), weights(straight))


def test_data_that_cannot_tell_are_skipped_by_count(tmp_path):
  """A run begun with grain goes on with a list of the same batches."""
  batches = [common.batch(np.full((2, 3), i)) for i in range(10)] * 2
  straight = make(None)
  straight.train(batches)
  make(tmp_path, max_steps=7).train(data(Counting(), shuffle=False))
  resumed = make(tmp_path)
  resumed.train(batches)
  np.testing.assert_array_equal(weights(resumed), weights(straight))


def lines(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_update_is_one_line_before_its_checkpoint(tmp_path):
  path = tmp_path / "metrics.jsonl"
  held_out = [common.batch(np.full((2, 3), 1))]
  trainer = make(tmp_path / "c", max_steps=7, every=3)
  file = metrics_file.MetricsFile(path)
  seen = []
  save = trainer.checkpoint_manager._manager.save

  def spy(step, **kwargs):
    seen.append((step, [r["update"] for r in lines(path)
                        if r["kind"] == "train"][-1]))
    return save(step, **kwargs)

  trainer.checkpoint_manager._manager.save = spy
  trainer.with_record_sink(file.write)
  trainer.train(data(Counting(), shuffle=False), held_out)
  assert seen and all(step == last for step, last in seen)

  # A kill lost update 7's checkpoint and cut a line short.
  with open(path, "a", encoding="utf-8") as f:
    f.write('{"kind": "train", "upd')
  resumed = make(tmp_path / "c", every=3)
  file = metrics_file.MetricsFile(path)
  file.rewind(resumed.train_steps)
  resumed.with_record_sink(file.write)
  resumed.train(data(Counting(), shuffle=False), held_out)
  records = lines(path)
  trained = [r["update"] for r in records if r["kind"] == "train"]
  assert trained == list(range(1, 21))
  evaluated = [r["update"] for r in records if r["kind"] == "eval"]
  # 0, then every fourth; and once more where the run went on.
  assert evaluated == [0, 4, 7, 8, 12, 16, 20]
  one = next(r for r in records if r["update"] == 20 and r["kind"] == "train")
  assert one["learning_rate"] == pytest.approx(0.05)
  assert one["distill/temperature"] == pytest.approx(1.0)
  assert one["progressive/stage"] == 1


def test_rewind_drops_what_comes_again(tmp_path):
  file = metrics_file.MetricsFile(tmp_path / "m.jsonl")
  for update in (1, 2, 3):
    file.write("train", update, {"loss": float("nan") if update == 2 else 1.0})
  file.write("eval", 3, {"loss": 2.0})
  file.write("event", 2, {"event": "scale_rate", "value": 0.5})
  again = metrics_file.MetricsFile(tmp_path / "m.jsonl")
  again.rewind(2)
  kept = lines(tmp_path / "m.jsonl")
  assert [(r["kind"], r["update"]) for r in kept] == [
      ("train", 1), ("train", 2), ("event", 2)
  ]
  assert kept[1]["loss"] is None
  again.write("train", 2, {"loss": 9.0})  # stands there already
  again.write("train", 3, {"loss": 9.0})
  assert [r["update"] for r in lines(tmp_path / "m.jsonl")][-1] == 3
  assert len(lines(tmp_path / "m.jsonl")) == 4


def test_evaluate_gives_what_the_evaluation_logs():
  held_out = [common.batch(np.full((2, 3), i)) for i in (1, 4)]
  trainer = make(None, max_steps=4)
  trainer.train(data(Counting(), shuffle=False), held_out)
  found = trainer.evaluate(held_out)
  for name in ("loss", "distill/kl_div_tau1", "distill/correlation"):
    logged = trainer.metrics_logger.get_metric_history("", name, "eval")[-1]
    assert found[name] == pytest.approx(float(logged), rel=1e-6)
  with pytest.raises(ValueError, match="eval_ds must hold at least one batch"):
    trainer.evaluate([])


def _line(kind, update, **values):
  return json.dumps({"kind": kind, "update": update, **values}) + "\n"


def test_rewind_mends_what_breaks_the_invariants(tmp_path, caplog):
  """Doubled, reordered and missing lines, and lines that are no records."""
  path = tmp_path / "m.jsonl"
  path.write_text("".join((
      _line("eval", 0), _line("train", 2, loss=2.0), _line("train", 1),
      '{"update": 2}\n', '{"kind": "train", "update": true}\n',
      _line("train", 2, loss=9.0), _line("event", 2, event="resume"),
      _line("eval", 2), _line("eval", 2), _line("train", 5),
      _line("train", 7),
  )))
  file = metrics_file.MetricsFile(path)
  file.rewind(6)
  kept = [(r["kind"], r["update"]) for r in lines(path)]
  assert kept == [
      ("eval", 0), ("train", 1), ("train", 2), ("event", 2), ("eval", 2),
      ("train", 5),
  ]
  assert lines(path)[2]["loss"] == 2.0
  said = caplog.text
  assert "line 4 is no record" in said and "line 5 is no record" in said
  assert "2 doubled lines" in said and "out of order" in said
  assert "no line of 3 updates, of which 3 is the first" in said
  file.write("train", 6, {})  # stood there in the checkpoint already
  file.write("train", 7, {})
  assert [r["update"] for r in lines(path)][-2:] == [5, 7]


def test_rewind_of_a_whole_file_changes_and_says_nothing(tmp_path, caplog):
  path = tmp_path / "m.jsonl"
  file = metrics_file.MetricsFile(path)
  for update in (1, 2, 3):
    file.write("train", update, {"loss": 1.0})
    file.write("eval", update, {"loss": 1.0})
  before = path.read_text()
  metrics_file.MetricsFile(path).rewind(3)
  assert path.read_text() == before
  assert not caplog.records
