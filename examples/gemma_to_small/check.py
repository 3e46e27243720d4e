"""Says whether the run of this example reached what it should.

  python examples/gemma_to_small/check.py runs/gemma3_270m
"""

import argparse
import json
import pathlib
import sys

MAX_PARAMETERS_RATIO = 0.35  # of the teacher that the student learns from
MAX_KL_RATIO = 0.3  # of the untrained student's


def problems(summary: dict) -> list[str]:
  """What a run's summary falls short of; empty if nothing."""
  models = {m["name"]: m for m in summary["models"]}
  found = []
  size = models["student after"]["parameters"] / models["teacher"]["parameters"]
  if size > MAX_PARAMETERS_RATIO:
    found.append(f"the student has {size:.1%} of the teacher's parameters")
  before, after, floor = (
      models[name]["kl_div_tau1"]
      for name in ("student before", "student after", "unigram floor")
  )
  print(
      f"held-out KL {before:.3f} -> {after:.3f}: {after / before:.3f}x of the "
      f"untrained student's (at most {MAX_KL_RATIO}), and the unigram floor's "
      f"is {floor:.3f}"
  )
  if after > MAX_KL_RATIO * before or after >= floor:
    found.append(f"the held-out KL is {after:.3f}")
  for stage in summary["stages"]:
    if stage["compiles"] != 1:
      found.append(f"{stage['name']} was compiled {stage['compiles']} times")
  return found


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("run", type=pathlib.Path, help="folder of the run")
  summary = (parser.parse_args().run / "summary.json").read_text()
  found = problems(json.loads(summary))
  for problem in found:
    print(f"not reached: {problem}", file=sys.stderr)
  return bool(found)


if __name__ == "__main__":
  sys.exit(main())
