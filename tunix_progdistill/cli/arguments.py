"""What stands on the command line, before the config's own grammar."""

import argparse
from collections.abc import Sequence
import importlib.metadata
import shutil

from tunix_progdistill import schema

_EXAMPLES = """\
examples:
  tunix-progdistill train run.yaml
  tunix-progdistill train run.yaml training_config.max_steps=100 batch_size=8
  tunix-progdistill train run.yaml progressive.stages.0.learning_rate=3e-4
  tunix-progdistill train run.yaml 'model_config.layers=[0, 2, 5]'
  tunix-progdistill train run.yaml override_config_file=small.yaml
  T_BATCH_SIZE=8 tunix-progdistill train run.yaml --restart
"""


class _Parser(argparse.ArgumentParser):
  """One whose errors are one line, and whose long help is made when asked."""

  with_keys = False

  def error(self, message):
    self.exit(2, f"tunix-progdistill: error: {message}\n")

  def format_help(self):
    text = super().format_help()
    if not self.with_keys:
      return text
    width = min(shutil.get_terminal_size().columns, 100)
    return f"{text}\n{schema.help_text(width)}"


class _TrainParser(_Parser):
  with_keys = True


def parser() -> argparse.ArgumentParser:
  """The parser of the whole command."""
  top = _Parser(
      prog="tunix-progdistill",
      description="Distils a language model in stages.",
  )
  version = importlib.metadata.version("tunix-progdistill")
  top.add_argument("--version", action="version", version=version)
  commands = top.add_subparsers(
      dest="command", metavar="COMMAND", required=True,
      parser_class=_Parser,
  )
  _add_train(commands)
  report = commands.add_parser(
      "report", help="make a run's report again, or compare runs",
      description=(
          "Makes report.html of a run again, or one page that compares several."
      ),
  )
  report.add_argument(
      "runs", nargs="+", metavar="RUN", help="folder of a run"
  )
  report.add_argument(
      "--output", metavar="FILE", default=None,
      help=(
          "file of the page; without it report.html in the run's folder, for "
          "several runs comparison.html in the current one"
      ),
  )
  return top


def _add_train(commands) -> None:
  made = commands.add_parser(
      "train", help="distil a model as a YAML says",
      description=(
          "Distils a model as a YAML says. The same command again goes on "
          "where the run was stopped. Every key is described below."
      ),
      epilog=_EXAMPLES,
      formatter_class=argparse.RawDescriptionHelpFormatter,
      usage=(
          "tunix-progdistill train CONFIG.yaml [override_config_file=F] "
          "[key=value ...] [--restart]"
      ),
  )
  made.__class__ = _TrainParser
  made.add_argument(
      "words", metavar="CONFIG.yaml key=value", nargs="*",
      help=(
          "the YAML of the run, then changes of single keys; "
          "override_config_file=F reads a second YAML"
      ),
  )
  made.add_argument(
      "--restart", action="store_true",
      help="forget the run that is in the run folder, and start anew",
  )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
  """The words of a command line; changes of keys may follow an option.

  Raises:
    SystemExit: help or version was asked for, or a word is not known.
  """
  made = parser()
  options, rest = made.parse_known_args(argv)
  unknown = [w for w in rest if w.startswith("-") or "=" not in w]
  if unknown or (rest and options.command != "train"):
    made.error(f"unknown argument {(unknown or rest)[0]!r}; see --help")
  if rest:
    options.words += rest
  return options
