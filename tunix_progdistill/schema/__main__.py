"""Writes base_config.yaml and docs/configuration.md from the schema."""

import pathlib

from tunix_progdistill.schema import grammar
from tunix_progdistill.schema import reference

_DOCUMENT = (
    pathlib.Path(__file__).parents[2] / "docs" / "configuration.md"
)


def main() -> None:
  """Rewrites both."""
  _DOCUMENT.parent.mkdir(exist_ok=True)
  for path, text in (
      (grammar.BASE_FILE, reference.base_yaml()),
      (_DOCUMENT, reference.document()),
  ):
    path.write_text(text, encoding="utf-8")
    print(path)


if __name__ == "__main__":
  main()
