"""From matplotlib's SVG to one that stands in a page.

Colours become CSS variables (so that one drawing serves light and dark), fonts
the page's, ids unique within the page, and what a browser does not need goes.
Artists drawn with `gid=role(...)` become groups of that class.
"""

from collections.abc import Mapping
import re
from xml.etree import ElementTree

# Drawn with these colours, shown with the page's.
SERIES = tuple(f"#01000{i}" for i in range(8))
INK = "#010010"
MUTED = "#010011"
GRID = "#010012"
SHADE = "#010013"
TARGET = "#010014"
EVENT = "#010015"
_NAMES = {colour: f"c{i}" for i, colour in enumerate(SERIES)} | {
    INK: "ink", MUTED: "muted", GRID: "grid", SHADE: "shade",
    TARGET: "target", EVENT: "event",
}
_COLOUR = re.compile(r"#0100[01][0-9a-f]")
_NUMBER = re.compile(r"-?\d+\.\d+")
_ROLE = "role-"
_DROPPED = ("metadata", "style")
_LINK = "{http://www.w3.org/1999/xlink}href"


def role(name: str, number: int = 0) -> str:
  """The gid of an artist that belongs to a class `name`."""
  return f"{_ROLE}{name}-{number}"


def variable(colour: str) -> str:
  """The CSS value that a colour of this module becomes."""
  return f"var(--{_NAMES[colour]})"


def inline(
    source: str, *, prefix: str, title: str, description: str,
    hints: Mapping[str, str],
) -> str:
  """The drawing as an element of an HTML page.

  Args:
    source: written by matplotlib's SVG backend.
    prefix: of every id; unique within the page.
    title: read out, and shown by some browsers.
    description: read out.
    hints: gid -> what a browser shows when it is pointed at.

  Returns:
    An `<svg>` element without a namespace, as HTML has it.
  """
  old = ElementTree.fromstring(source)
  width, height = old.get("viewBox", "0 0 1 1").split()[2:]
  new = ElementTree.Element(
      "svg",
      {
          "viewBox": f"0 0 {width} {height}",
          "role": "img",
          "aria-labelledby": f"{prefix}-title {prefix}-desc",
      },
  )
  for tag, words in (("title", title), ("desc", description)):
    element = ElementTree.SubElement(new, tag, {"id": f"{prefix}-{tag}"})
    element.text = words
  linked = set(re.findall(r"(?:url\(|href=\")#([^)\"]+)", source))
  names = {
      name: f"{prefix}-{i}" for i, name in enumerate(sorted(linked), start=1)
  }
  for child in old:
    _copy(child, new, names, hints)
  return ElementTree.tostring(new, encoding="unicode")


def _copy(
    old: ElementTree.Element, parent: ElementTree.Element,
    names: Mapping[str, str], hints: Mapping[str, str],
) -> None:
  tag = _local(old.tag)
  if tag in _DROPPED:
    return
  attributes = _attributes(old, names)
  bare = tag == "g" and not attributes
  into = parent if bare else ElementTree.SubElement(parent, tag, attributes)
  hint = hints.get(old.get("id", ""))
  if hint is not None:
    ElementTree.SubElement(into, "title").text = hint
  if not bare and old.text and old.text.strip():
    into.text = old.text
  for child in old:
    _copy(child, into, names, hints)
  if tag in ("defs", "g") and into is not parent and not len(into):
    parent.remove(into)


def _attributes(
    old: ElementTree.Element, names: Mapping[str, str]
) -> dict[str, str]:
  found = {}
  for key, value in old.attrib.items():
    if key == "id":
      if value in names:
        found["id"] = names[value]
      elif value.startswith(_ROLE):
        found["class"] = value.removeprefix(_ROLE).rsplit("-", 1)[0]
    elif key == _LINK:
      found["href"] = "#" + names[value.removeprefix("#")]
    elif key == "style":
      found["style"] = _style(value)
    elif key == "clip-path":
      found[key] = f"url(#{names[value[5:-1]]})"
    elif key == "transform" and value.startswith("rotate(-0 "):
      continue
    elif key in ("d", "x", "y", "width", "height", "transform"):
      found[key] = _shorter(value)
    elif not key.startswith("{"):
      found[key] = value
  return found


def _shorter(value: str) -> str:
  """Coordinates to a tenth of a pixel, and a polyline without its L's."""
  value = _NUMBER.sub(lambda m: f"{float(m[0]):.1f}", value)
  value = " ".join(value.split()).replace(".0 ", " ")
  return value if re.search("[CQMz].*[CQMz]", value) else value.replace(
      " L ", " "
  )


def _style(value: str) -> str:
  """Declarations with the page's colours and without a font of their own."""
  kept = []
  for declaration in value.split(";"):
    name, _, what = declaration.strip().partition(":")
    what = what.strip()
    if name == "font":
      size = re.search(r"([\d.]+)px", what)
      name, what = "font-size", f"{size[1]}px" if size else ""
    if name in ("", "font-family", "stroke-linejoin", "stroke-linecap"):
      continue
    what = _COLOUR.sub(lambda m: variable(m[0]), what)
    kept.append(f"{name}:{what}")
  return ";".join(kept)


def _local(tag: str) -> str:
  return tag.rpartition("}")[2]
