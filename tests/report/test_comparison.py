"""Several runs on one page."""

import pytest

from tests.report import html
from tests.report import runs
from tunix_progdistill import report
from tunix_progdistill.report import comparison
from tunix_progdistill.report import read


def _pair(tmp_path):
  one = runs.write(tmp_path / "a" / "run")
  models = [dict(m) for m in runs.MODELS]
  models[2]["kl_div_tau1"] = 3.25
  two = runs.write(
      tmp_path / "b" / "run",
      lines=[*runs.train_lines(seed=1), *runs.eval_lines(last_kl=3.25)],
      config=runs.CONFIG.replace("8192", "16384").replace("  seed: 0\n", ""),
      summary_json=runs.summary(models=models),
  )
  return one, two


def test_two_runs(tmp_path):
  out = report.compare(_pair(tmp_path), tmp_path / "new" / "compare.html")
  page = html.check(out.read_text(encoding="utf-8"))
  words = " ".join(page.text.split())
  for shown in ("a/run", "b/run", "1.985", "3.250"):
    assert shown in words
  assert "teacher_model_config.vocabulary_size 8192 16384" in words
  assert "progressive.seed 0 not set" in words
  assert "opt_type" not in words  # the same in both
  # KL twice, correlation, top 32, agreement: two lines and three stages each
  assert page.count("svg", role="img") == 5
  assert page.count("g", class_="line") == 10
  assert page.count("g", class_="stage") == 15
  assert page.count("g", class_="target") == 3


def test_stages_that_differ_are_not_drawn(tmp_path):
  one = runs.write(tmp_path / "one")
  two = runs.write(tmp_path / "two", summary_json=runs.summary(
      stages=[{"name": "all", "first_update": 0, "end_update": 80}],
      targets={"distill/kl_div_tau1": 0.5}))
  out = report.compare([one, two], tmp_path / "c.html")
  page = html.check(out.read_text(encoding="utf-8"))
  assert page.count("g", class_="stage") == 0
  assert page.count("g", class_="target") == 0


def test_a_run_without_anything_beside_one_with_everything(tmp_path):
  one = runs.write(tmp_path / "one")
  (tmp_path / "two").mkdir()
  (tmp_path / "two" / "metrics.jsonl").write_text("")
  out = report.compare([one, tmp_path / "two"], tmp_path / "c.html")
  page = html.check(out.read_text(encoding="utf-8"))
  assert "Without a config.yaml: two." in " ".join(page.text.split())
  assert page.count("g", class_="line") == 5


def test_twelve_runs(tmp_path):
  folders = [runs.write(tmp_path / f"run{i}") for i in range(12)]
  out = report.compare(folders, tmp_path / "c.html")
  page = html.check(out.read_text(encoding="utf-8"))
  assert page.count("g", class_="line") == 60


def test_an_exponent_is_a_number_to_every_yaml(tmp_path):
  folders = []
  for name, value in (("one", "1e-4"), ("two", "0.0001"), ("three", "2e-4")):
    folders.append(
        runs.write(tmp_path / name, config=f"rate: {value}\nlist: [1, 2]\n")
    )
  found = [read.run_folder(f) for f in folders]
  assert comparison.differences(found[:2]) == []
  (difference,) = comparison.differences(found)
  assert difference.key == "rate"
  assert difference.values == ("0.0001", "0.0001", "0.0002")


def test_lists_empty_sections_and_missing_keys(tmp_path):
  one = runs.write(tmp_path / "one", config="l: [1, 2]\ne: {}\nn: null\n")
  two = runs.write(tmp_path / "two", config="l: [1, 3, 4]\ne: []\nn: false\n")
  found = {
      d.key: d.values
      for d in comparison.differences(
          [read.run_folder(one), read.run_folder(two)]
      )
  }
  assert found == {
      "l.1": ("2", "3"), "l.2": ("not set", "4"), "e": ("{}", "[]"),
      "n": ("null", "false"),
  }


def test_wrong_arguments_are_one_line(tmp_path):
  for folders in ([], "run", tmp_path):
    with pytest.raises(ValueError, match="run_folders must list") as e:
      report.compare(folders, tmp_path / "c.html")
    assert "\n" not in str(e.value)
  one = runs.write(tmp_path / "one", config="a: [1\nb: }")
  with pytest.raises(ValueError, match=r"config\.yaml must be YAML") as e:
    report.compare([one], tmp_path / "c.html")
  assert "\n" not in str(e.value)
  assert not (tmp_path / "c.html").exists()
