"""Folders that are made once, whole or not at all."""

import json
import os
import pathlib

import pytest

from tunix_progdistill.weights import cache


class TestCache:

  @pytest.fixture(autouse=True)
  def _root(self, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    self.calls = 0

  def _build(self, folder: pathlib.Path) -> None:
    self.calls += 1
    (folder / "a.bin").write_bytes(b"12345")

  def test_built_once(self, tmp_path):
    a = cache.get("x", {"k": 1}, self._build)
    b = cache.get("x", {"k": 1}, self._build)
    assert a == b and self.calls == 1
    assert a.parent == tmp_path / "tunix-progdistill"
    assert (a / "a.bin").read_bytes() == b"12345"

  def test_another_key_is_another_folder(self):
    a = cache.get("x", {"k": 1}, self._build)
    assert a != cache.get("x", {"k": 2}, self._build)
    assert self.calls == 2

  @pytest.mark.parametrize("damage", ["cut", "lost", "manifest", "key"])
  def test_a_damaged_folder_is_rebuilt(self, damage):
    folder = cache.get("x", {"k": 1}, self._build)
    if damage == "cut":
      (folder / "a.bin").write_bytes(b"12")
    elif damage == "lost":
      (folder / "a.bin").unlink()
    elif damage == "manifest":
      (folder / "manifest.json").write_text('{"key": ')
    else:
      manifest = json.loads((folder / "manifest.json").read_text())
      manifest["key"] = {"k": 0}
      (folder / "manifest.json").write_text(json.dumps(manifest))
    assert cache.get("x", {"k": 1}, self._build) == folder
    assert self.calls == 2
    assert (folder / "a.bin").read_bytes() == b"12345"

  def test_a_failed_build_leaves_nothing(self):
    def fail(folder):
      (folder / "half").touch()
      raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
      cache.get("x", {"k": 1}, fail)
    assert not list(cache.root().iterdir())

  def test_two_at_once(self, monkeypatch):
    """Another process puts its folder there at the last moment."""
    replace = os.replace

    def late(partial, folder):
      monkeypatch.setattr(os, "replace", replace)
      cache.get("x", {"k": 1}, self._build)
      replace(partial, folder)

    monkeypatch.setattr(os, "replace", late)
    folder = cache.get("x", {"k": 1}, self._build)
    assert cache.is_complete(folder, {"k": 1})
    assert [f.name for f in cache.root().iterdir()] == [folder.name]

  def test_home_is_the_default(self, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache.root() == pathlib.Path(
        "/home/someone/.cache/tunix-progdistill"
    )
