"""The command's entry: its words in, its exit code out.

Codes: 0 done, 1 the run failed, 2 what was asked for cannot work, 130 stopped
by Ctrl-C. What goes wrong is one line on stderr.
"""

from collections.abc import Sequence
import pathlib
import shutil
import sys

from tunix_progdistill import errors
from tunix_progdistill import schema
from tunix_progdistill.cli import arguments
from tunix_progdistill.cli import logs

_COMPARISON = "comparison.html"


def main(argv: Sequence[str] | None = None) -> int:
  """Runs one command.

  Args:
    argv: its words, without the program's name; None takes the process's.

  Returns:
    The exit code.
  """
  try:
    options = arguments.parse(argv)
  except SystemExit as e:  # argparse has said why
    return e.code if isinstance(e.code, int) else 2
  logs.configure()
  try:
    if options.command == "train":
      _train(options)
    else:
      _report(options)
  except (ValueError, ModuleNotFoundError, FileNotFoundError) as e:
    return _failed(e, 2)
  except (RuntimeError, OSError) as e:
    return _failed(e, 1)
  except KeyboardInterrupt as e:
    return _failed(str(e) or "stopped", 130)
  return 0


def _train(options) -> None:
  config = schema.resolve(options.words)
  from tunix_progdistill.run import pipeline  # only once the words are right

  pipeline.train(config, command=config.command(), restart=options.restart)


def _report(options) -> None:
  from tunix_progdistill import report

  folders = [pathlib.Path(r) for r in options.runs]
  if options.output is not None:
    _check_output(pathlib.Path(options.output))
  if len(folders) > 1:
    path = report.compare(folders, pathlib.Path(options.output or _COMPARISON))
  else:
    path = report.write(folders[0])
    if options.output is not None:
      path = pathlib.Path(shutil.copyfile(path, options.output))
  print(path)


def _check_output(path: pathlib.Path) -> None:
  if path.is_dir() or not path.absolute().parent.is_dir():
    raise errors.invalid(
        "--output", "must be a file in a folder that is there", str(path),
        f"write e.g. {path / 'report.html' if path.is_dir() else path.name}",
    )


def _failed(error: Exception | str, code: int) -> int:
  text = " ".join(str(error).split()) or type(error).__name__
  print(f"tunix-progdistill: error: {text}", file=sys.stderr)
  return code
