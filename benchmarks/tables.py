"""Prints the tables of README.md and docs/kernels.md from the results.

  python benchmarks/tables.py [--write]

With --write each also takes the place of the table that has its first line.
Of every row the newest measurement in benchmarks/results counts.
"""

import argparse
import csv
import pathlib
import re

RESULTS = pathlib.Path(__file__).parent / "results"
_ROOT = pathlib.Path(__file__).parent.parent
_NAMES = {
    "drop-in": "one changed line, one-hot labels",
    "chunked": "our trainer, integer labels",
    "torch": "chunked PyTorch",
}


def newest(file: str, *keys: str) -> dict[tuple[str, ...], dict[str, str]]:
  """The last row of a file for each value of `keys`."""
  with open(RESULTS / file, encoding="utf-8", newline="") as f:
    return {
        tuple(row[k] for k in keys): row
        for row in csv.DictReader(f) if row["platform"] == "cpu"
    }


def speed() -> str:
  """CPU time and memory of value and gradient, by shape."""
  rows = newest("kernels.csv", "kind", "vocabulary", "dtype", "variant")
  shapes = sorted({
      (int(v), d) for kind, v, d, _ in rows if kind == "logits"
  }, key=lambda x: (x[0], x[1] != "float32"))
  lines = [
      "| 512 tokens x vocabulary | "
      + " | ".join(_NAMES[n] for n in ("drop-in", "chunked"))
      + " | temporaries | resident memory |",
      "|---|---|---|---|---|",
  ]
  for vocabulary, dtype in shapes:
    cell = lambda name, column, v=vocabulary, d=dtype: float(
        rows["logits", str(v), d, name][column]
    )
    lines.append(
        f"| {vocabulary:,} {dtype} | {cell('drop-in', 'cpu_ratio'):.1f}x "
        f"| {cell('chunked', 'cpu_ratio'):.1f}x "
        f"| {cell('chunked', 'temp_ratio'):.4f}x "
        f"| {cell('chunked', 'resident_ratio'):.2f}x |"
    )
  return "\n".join(lines)


def heads() -> str:
  """The loss from hidden states and heads."""
  rows = newest("kernels.csv", "kind", "tokens", "vocabulary", "variant")
  lines = ["| tokens x vocabulary | CPU time | temporaries |", "|---|---|---|"]
  for (kind, tokens, vocabulary, variant), row in rows.items():
    if kind != "heads" or variant != "linear_head":
      continue
    time = f"{float(row['cpu_ratio']):.1f}x" if row["cpu_ratio"] else "-"
    size = float(row["temp_bytes"])
    base = float(rows[kind, tokens, vocabulary, "tunix"]["temp_bytes"])
    lines.append(
        f"| {int(tokens):,} x {int(vocabulary):,} | {time} "
        f"| {size / 1e9:.2f} GB instead of {base / 1e9:.1f} GB |"
    )
  return "\n".join(lines)


def memory() -> str:
  """Peak memory of a training step."""
  rows = newest("memory.csv", "dtype", "variant")
  names = {
      "tunix": "Tunix", "logits": "ours", "fused": "ours, `fused_head`",
      "fused, stage 1": "ours, `fused_head`, 80 % frozen",
  }
  kinds = ("float32", "bfloat16")
  lines = ["| variant | " + " | ".join(kinds) + " |", "|---|---|---|"]
  for variant, name in names.items():
    cells = [
        f"{float(rows[k, variant]['peak_bytes']) / 1e9:.1f} GB "
        f"({float(rows[k, variant]['peak_ratio']):.2f}x)" for k in kinds
    ]
    lines.append(f"| {name} | " + " | ".join(cells) + " |")
  return "\n".join(lines)


def write(path: pathlib.Path, table: str) -> None:
  """Puts `table` where `path` has one with the same first line.

  Raises:
    ValueError: it has none.
  """
  text = path.read_text(encoding="utf-8")
  head = re.escape(table.splitlines()[0])
  new, found = re.subn(
      rf"^{head}\n(?:\|.*\n)*", lambda _: table + "\n", text, flags=re.M
  )
  if not found:
    raise ValueError(f"{path.name} must have a table that begins with "
        f"{table.splitlines()[0]}")
  path.write_text(new, encoding="utf-8")


def main() -> None:
  parser = argparse.ArgumentParser()
  parser.add_argument(
      "--write", action="store_true", help="put the tables in their places"
  )
  options = parser.parse_args()
  places = (
      (speed(), "README.md"), (heads(), "docs/kernels.md"),
      (memory(), "README.md"),
  )
  print("\n\n".join(table for table, _ in places))
  if options.write:
    for table, name in places:
      write(_ROOT / name, table)


if __name__ == "__main__":
  main()
