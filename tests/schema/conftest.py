"""A folder to stand in, with a way to write a YAML and to resolve one."""

import os

import pytest

from tunix_progdistill import schema


@pytest.fixture(autouse=True)
def _apart(monkeypatch, tmp_path):
  """No variable of the environment sets a key, and files are in tmp_path."""
  for name in list(os.environ):
    if name.startswith("T_"):
      monkeypatch.delenv(name)
  monkeypatch.chdir(tmp_path)


@pytest.fixture
def resolve(tmp_path):
  """Resolves a YAML's text with overrides; its file is run.yaml."""

  def resolved(text, *overrides):
    (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
    return schema.resolve(["run.yaml", *overrides])

  return resolved
