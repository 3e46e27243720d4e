"""What is read of a run folder, whole or not."""

import json
import math

import numpy as np
import pytest

from tests.report import runs
from tunix_progdistill.report import read


def test_a_whole_run(tmp_path):
  run = read.run_folder(runs.write(tmp_path / "run"))
  assert (run.title, run.status, run.updates) == (
      "gemma_to_small", "finished", 80
  )
  loss = run.train["loss"]
  np.testing.assert_array_equal(loss.updates, np.arange(1, 81))
  wanted = [r["loss"] for r in runs.train_lines()]
  np.testing.assert_array_equal(loss.values, wanted)
  kl = run.evaluations["distill/kl_div_tau1"]
  np.testing.assert_array_equal(kl.updates, np.arange(0, 81, 10))
  assert "stage" not in run.train and "time_sec" not in run.train
  assert [(e.update, e.name, e.value) for e in run.events] == list(runs.EVENTS)
  assert [(s.name, s.first_update, s.end_update) for s in run.stages] == [
      ("80 % frozen", 0, 20), ("50 % frozen", 20, 40),
      ("nothing frozen", 40, 80),
  ]
  assert run.stages[1].optimizer_bytes == 133.8e6
  assert run.model("student after").perplexity == pytest.approx(174.16, 1e-3)
  assert run.model("unigram floor").correlation is None
  assert run.samples[0].continuations[0][0] == "teacher"
  assert run.targets == runs.TARGETS
  assert dict(run.versions) == runs.VERSIONS
  assert "vocabulary_size: 8192" in run.config_text


@pytest.mark.parametrize("tail", [
    b'{"kind":"train","upda', b'{"kind":"train","update":81,"loss":"\xc3',
    b"\0\0\0\0", b'{"kind":"train"}',
])
def test_a_last_line_cut_off_is_left_out_and_said(tmp_path, tail):
  run = read.run_folder(runs.write(tmp_path, tail=tail))
  assert run.train["loss"].updates[-1] == 80
  assert any("cut off" in note for note in run.notes)


def test_a_whole_folder_has_no_such_note(tmp_path):
  run = read.run_folder(runs.write(tmp_path, tail=b"\n\n"))
  assert not any("cut off" in note for note in run.notes)


@pytest.mark.parametrize("damage", ["{", "[]", "7", '{"update": 1}', "null"])
def test_a_damaged_line_in_the_middle_names_file_and_line(tmp_path, damage):
  runs.write(tmp_path)
  path = tmp_path / "metrics.jsonl"
  lines = path.read_text().splitlines()
  lines[4] = damage
  path.write_text("\n".join(lines) + "\n")
  with pytest.raises(ValueError, match=r"metrics\.jsonl:5 must be") as e:
    read.run_folder(tmp_path)
  assert "\n" not in str(e.value)


def test_no_run_folder_is_one_line(tmp_path):
  for folder in (tmp_path, tmp_path / "none"):
    with pytest.raises(ValueError, match="run_folder must hold") as e:
      read.run_folder(folder)
    assert str(folder) in str(e.value) and "\n" not in str(e.value)


def test_damaged_summary_names_the_file(tmp_path):
  runs.write(tmp_path)
  (tmp_path / "summary.json").write_text('{"status": "fini')
  with pytest.raises(ValueError, match=r"summary\.json must be JSON"):
    read.run_folder(tmp_path)
  (tmp_path / "summary.json").write_text("[1]")
  with pytest.raises(ValueError, match=r"summary\.json must hold an object"):
    read.run_folder(tmp_path)


def test_without_summary_the_stages_are_those_seen(tmp_path):
  run = read.run_folder(runs.write(tmp_path / "night", summary_json=None))
  assert (run.status, run.title, run.updates) == (None, "night", 80)
  assert [(s.first_update, s.end_update) for s in run.stages] == [
      (0, 20), (20, 40), (40, 80)
  ]
  assert run.stages[0].update_sec == pytest.approx(3.4)
  assert run.stages[2].trainable_parameters == 33111680


def test_only_a_config(tmp_path):
  (tmp_path / "config.yaml").write_text("a: 1\n")
  run = read.run_folder(tmp_path)
  assert run.updates == 0 and not run.train and not run.evaluations


def test_null_and_not_finite_are_gaps(tmp_path):
  lines = [
      {"kind": "train", "update": 1, "loss": 1.0},
      {"kind": "train", "update": 2, "loss": None},
      {"kind": "train", "update": 3, "loss": math.nan},
      {"kind": "train", "update": 4, "loss": math.inf},
      {"kind": "train", "update": 5, "loss": True, "note": "text"},
      {"kind": "train", "update": 6, "loss": 10**400},
      {"kind": "train", "update": 7, "loss": 2, "late": 3},
      {"kind": "of the future", "update": 8},
  ]
  run = read.run_folder(runs.write(tmp_path, lines=lines, summary_json=None))
  loss = run.train["loss"].values
  assert (loss[0], loss[6]) == (1, 2) and np.isnan(loss[1:6]).all()
  np.testing.assert_array_equal(run.train["late"].finite, [3])


def test_the_last_record_of_an_update_counts(tmp_path):
  lines = [
      {"kind": "train", "update": u, "loss": v}
      for u, v in ((1, 1.0), (2, 2.0), (3, 3.0), (2, 20.0))
  ]
  run = read.run_folder(runs.write(tmp_path, lines=lines))
  np.testing.assert_array_equal(run.train["loss"].updates, [1, 2, 3])
  np.testing.assert_array_equal(run.train["loss"].values, [1, 20, 3])


def test_a_summary_of_nulls_and_wrong_types(tmp_path):
  broken = {
      "status": "running", "stages": [{"name": "s", "first_update": 0,
                                       "end_update": None, "flops": None},
                                      {"name": "no place"}, 3],
      "models": [None, {"name": "teacher", "cross_entropy": None}, {}],
      "samples": "none", "targets": {"distill/kl_div_tau1": None},
      "notes": None, "updates": None, "wall_sec": "long",
  }
  runs.write(tmp_path)
  (tmp_path / "summary.json").write_text(json.dumps(broken))
  run = read.run_folder(tmp_path)
  assert len(run.stages) == 1 and run.stages[0].end_update is None
  assert [m.name for m in run.models] == ["teacher"]
  assert run.models[0].perplexity is None
  assert run.samples == () and run.targets == {} and run.wall_sec is None
