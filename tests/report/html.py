"""A page taken apart by the standard library's parser."""

import collections
import html.parser
import re

_VOID = {
    "area", "base", "br", "col", "embed", "hr", "img", "input", "link",
    "meta", "source", "track", "wbr",
}


class Page(html.parser.HTMLParser):
  """Tags, classes, ids and text; raises where tags do not pair.

  Attributes:
    tags: (name, attributes) in order.
    text: everything that is no tag and no style.
    open: names of the tags that are open.
  """

  def __init__(self, text: str):
    super().__init__(convert_charrefs=True)
    self.tags: list[tuple[str, dict[str, str]]] = []
    self.text = ""
    self.open: list[str] = []
    self.feed(text)
    self.close()
    assert not self.open, f"never closed: {self.open}"

  def handle_starttag(self, tag, attrs):
    self.tags.append((tag, {k: v or "" for k, v in attrs}))
    if tag not in _VOID:
      self.open.append(tag)

  def handle_startendtag(self, tag, attrs):
    self.tags.append((tag, {k: v or "" for k, v in attrs}))

  def handle_endtag(self, tag):
    assert self.open, f"</{tag}> closes nothing"
    assert self.open.pop() == tag, f"</{tag}> closes another tag"
    if tag in ("td", "th"):
      self.text += " "

  def handle_data(self, data):
    if "style" not in self.open:
      self.text += data

  def count(self, tag, **attributes):
    """How many tags have these attributes; `class_` for class."""
    wanted = {k.rstrip("_"): v for k, v in attributes.items()}
    return sum(
        name == tag and all(found.get(k) == v for k, v in wanted.items())
        for name, found in self.tags
    )

  @property
  def ids(self):
    return [a["id"] for _, a in self.tags if "id" in a]


def check(text: str) -> Page:
  """Asserts what must hold of every page, and returns it."""
  page = Page(text)
  repeated = [
      i for i, n in collections.Counter(page.ids).items() if n > 1
  ]
  assert not repeated
  # Nothing is loaded: every reference stays in the page.
  for tag, attributes in page.tags:
    assert tag not in ("script", "img", "iframe", "object", "embed", "base")
    for name, value in attributes.items():
      assert not name.startswith("on"), (tag, name)
      if name in ("src", "href", "xlink:href", "srcset", "poster"):
        assert value.startswith(("#", "data:")), (tag, value)
        if value.startswith("#"):
          assert value[1:] in page.ids
  for target in re.findall(r"url\(([^)]*)\)", text):
    assert target.startswith("#") and target[1:] in page.ids, target
  assert "@import" not in text
  for named in re.findall(r'aria-labelledby="([^"]*)"', text):
    assert set(named.split()) <= set(page.ids)
  return page
