"""The page: it parses, loads nothing, and says what happened."""

import pathlib
import time

import pytest

from tests.report import html
from tests.report import runs
from tunix_progdistill import report
from tunix_progdistill.report import read
from tunix_progdistill.report import results

_NASTY = (
    "</script><img src=x onerror=alert(1)> \x00\x1b[31m\ud800 {{ 7*7 }} &amp;"
)


def _page(folder):
  path = report.write(folder)
  text = path.read_text(encoding="utf-8")
  return html.check(text), text


def test_a_whole_run(tmp_path):
  page, text = _page(runs.write(tmp_path / "run"))
  for words in (
      "Held-out KL fell from 15.578 to 1.985 nats in 80 updates (7.85 times"
      " smaller), below the 4.031 of a unigram model; the target of 0.1 is"
      " not met.",
      "1.67e8", "33,111,680", "6 min 42 s", "nothing frozen", "133.8",
      "said on Monday", "162,529,280", "tunix-progdistill train",
      "update 27: learning rate \N{MULTIPLICATION SIGN} 0.5",
      "update 52: resumed from update 50",
  ):
    assert words in " ".join(page.text.split()), words
  assert page.count("svg", role="img") == 8  # seven charts, one of them twice
  # three stages, two events, in each drawing; a target for KL and correlation
  assert page.count("g", class_="stage") == 24
  assert page.count("g", class_="event") == 16
  assert page.count("g", class_="target") == 3
  assert page.count("g", class_="floor") == 2
  assert page.count("meta", name="viewport") == 1
  assert "prefers-color-scheme:dark" in text
  assert len(text) < 150_000


def test_texts_of_a_model_are_escaped(tmp_path):
  summary = runs.summary(
      title=_NASTY, status="failed", cause=_NASTY, notes=[_NASTY],
      samples=[{"prompt": _NASTY, "continuations": {_NASTY: _NASTY}}],
      models=[{"name": _NASTY, "cross_entropy": 1.0}],
      stages=[{"name": _NASTY, "first_update": 0, "end_update": 80}],
  )
  lines = [*runs.train_lines(), *runs.eval_lines(),
           *runs.event_lines([(3, _NASTY, 1.0)])]
  runs.write(tmp_path, summary_json=summary, lines=lines,
             config=f"a: '{_NASTY[:40]}'\n")
  page, text = _page(tmp_path)  # no img, no script, no on... attribute
  assert "<img" not in text and "</script" not in text
  assert page.text.count("<img src=x onerror=alert(1)>") >= 6
  assert "{{ 7*7 }}" in page.text and "\x00" not in text


def test_a_failed_run_says_why(tmp_path):
  runs.write(tmp_path, summary_json=runs.summary(
      status="failed", cause="loss is not finite at update 80"))
  page, _ = _page(tmp_path)
  top = page.text[: page.text.index("Over updates")]
  assert "failed after update 80" in top
  assert "loss is not finite at update 80" in top


def test_a_running_run_says_so(tmp_path):
  lines = [*runs.train_lines(30), *runs.eval_lines(30)]
  runs.write(tmp_path, lines=lines, summary_json=runs.summary(
      status="running", updates=30, models=[], samples=[], wall_sec=None))
  page, _ = _page(tmp_path)
  assert "still going on" in page.text and "student so far" in page.text
  assert "No cause" not in page.text


def test_parameters_of_a_student_that_is_not_done(tmp_path):
  runs.write(tmp_path, summary_json=runs.summary(
      status="running", models=list(runs.MODELS)[:2]))
  run = read.run_folder(tmp_path)
  assert [(m.name, m.parameters) for m in results.models(run)] == [
      ("teacher", 105568896), ("student before", 33111680),
      ("student so far", 33111680),
  ]


def test_killed_without_summary(tmp_path):
  runs.write(tmp_path, summary_json=None, tail=b'{"kind":"tr')
  page, _ = _page(tmp_path)
  assert "no summary yet" in page.text and "cut off" in page.text
  assert "stage 3" in page.text
  assert "Held-out KL fell from 15.578 to 1.985" in page.text


def test_an_empty_run(tmp_path):
  (tmp_path / "config.yaml").write_text("a: 1\n")
  page, _ = _page(tmp_path)
  assert "No held-out KL yet, after 0 updates." in page.text
  assert "No update and no evaluation yet." in page.text
  assert page.count("svg", role="img") == 0


def test_no_evaluation_yet(tmp_path):
  runs.write(tmp_path, lines=runs.train_lines(5), summary_json=None)
  page, _ = _page(tmp_path)
  assert "No held-out KL yet, after 5 updates." in page.text
  assert page.count("svg", role="img") == 5


def test_one_update_only(tmp_path):
  lines = [*runs.eval_lines(1), *runs.train_lines(1)]
  runs.write(tmp_path, lines=lines, summary_json=None)
  page, _ = _page(tmp_path)
  assert "in 1 update (" in page.text
  assert page.count("svg", role="img") == 8


def test_gaps_everywhere(tmp_path):
  lines = [
      {**line, **{k: None for k in line if k.startswith("distill/")}}
      if line["update"] % 3 else line
      for line in [*runs.train_lines(), *runs.eval_lines()]
  ]
  runs.write(tmp_path, lines=lines, summary_json=runs.summary(models=[]))
  page, _ = _page(tmp_path)
  assert "nan" not in page.text.lower() and "None" not in page.text
  # the last evaluation, at 80, is one of those without a value
  assert "there is no later value" in page.text


def test_a_hundred_thousand_updates(tmp_path):
  lines = [*runs.train_lines(100_000), *runs.eval_lines(100_000, every=100)]
  runs.write(tmp_path, lines=lines, updates=100_000)
  start = time.perf_counter()
  page, text = _page(tmp_path)
  assert len(text) < 2_000_000
  assert time.perf_counter() - start < 60
  assert page.text.count("\n") < 3000


def test_nothing_is_left_beside_and_the_same_run_is_the_same_page(tmp_path):
  runs.write(tmp_path)
  before = set(tmp_path.iterdir())
  path = report.write(tmp_path)
  first = path.read_bytes()
  assert set(tmp_path.iterdir()) - before == {path}
  assert report.write(str(tmp_path)).read_bytes() == first


def test_the_page_comes_in_one_move(tmp_path, monkeypatch):
  runs.write(tmp_path)
  path = report.write(tmp_path)
  path.write_text("old")

  def full(source, target):
    assert pathlib.Path(source).stat().st_size > 50_000
    raise OSError("disk full")

  monkeypatch.setattr("os.replace", full)
  before = set(tmp_path.iterdir())
  with pytest.raises(OSError, match="disk full"):
    report.write(tmp_path)
  assert path.read_text() == "old" and set(tmp_path.iterdir()) == before


def test_a_failure_leaves_the_old_page(tmp_path):
  runs.write(tmp_path)
  old = report.write(tmp_path).read_bytes()
  (tmp_path / "summary.json").write_text("{")
  with pytest.raises(ValueError, match=r"summary\.json"):
    report.write(tmp_path)
  assert (tmp_path / "report.html").read_bytes() == old


@pytest.mark.parametrize("last,target,words", [
    (0.05, 0.1, "fell from 15.578 to 0.050 nats"),
    (0.05, 0.1, "the target of 0.1 is met"),
    (20.0, 0.1, "rose from 15.578 to 20.000 nats"),
    (20.0, 0.1, "not below the 4.031"),
    (15.578, 0.1, "stayed at 15.578"),
])
def test_the_sentence(tmp_path, last, target, words):
  models = [dict(m) for m in runs.MODELS]
  models[2]["kl_div_tau1"] = last
  runs.write(tmp_path, summary_json=runs.summary(
      models=models, targets={"distill/kl_div_tau1": target}))
  assert words in results.sentence(read.run_folder(tmp_path))


def test_targets_of_a_correlation_are_floors(tmp_path):
  runs.write(tmp_path, summary_json=runs.summary(
      targets={"distill/correlation": 0.7, "distill/kl_div_tau1": 1.0}))
  met = {t.label: t.met for t in results.tiles(read.run_folder(tmp_path))}
  assert met["Correlation"] is True and met["Held-out KL"] is False
