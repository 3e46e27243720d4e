"""What the command says while it works: its own lines, others' warnings."""

import logging as standard
import pathlib
import sys
import warnings

from absl import logging

_PACKAGE = str(pathlib.Path(__file__).parent.parent)


class _Ours(standard.Filter):
  """Lets this package speak, and everybody warn."""

  def filter(self, record: standard.LogRecord) -> bool:
    return (
        record.levelno >= standard.WARNING
        or record.pathname.startswith(_PACKAGE)
    )


class _Line(standard.Formatter):
  """`12:34:56 what happens`, with the level where it is a warning."""

  def format(self, record: standard.LogRecord) -> str:
    text = f"{self.formatTime(record, '%H:%M:%S')} {record.getMessage()}"
    if record.levelno >= standard.WARNING:
      text = f"{text[:8]} {record.levelname.lower()}:{text[8:]}"
    return text


def configure() -> None:
  """Sends absl's log to stderr, in a form for a terminal or a file."""
  handler = standard.StreamHandler(sys.stderr)
  handler.addFilter(_Ours())
  handler.setFormatter(_Line())
  logger = logging.get_absl_logger()
  logger.handlers = [handler]
  logger.propagate = False
  logging.set_verbosity(logging.INFO)
  # What is not finite is said once, by us, and is no event of TensorBoard's.
  standard.getLogger("tensorboardX.x2num").setLevel(standard.ERROR)
  # Deprecations inside other packages are not the user's to mend.
  warnings.filterwarnings("ignore", category=DeprecationWarning)
