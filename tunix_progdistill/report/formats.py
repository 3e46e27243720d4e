"""Numbers and texts as a reader wants them; None is an en dash."""

import datetime
import math
import re

NONE = "\N{EN DASH}"

# What HTML and SVG may not hold: control characters and lone surrogates.
_CONTROLS = {c: 0x2400 + c for c in range(32) if chr(c) not in "\n\t"}
_CONTROLS |= dict.fromkeys(range(0x7F, 0xA0), 0xFFFD)
_UNPRINTABLE = re.compile("[\ud800-\udfff\ufffe\uffff]")


def text(value: str) -> str:
  """The text with characters that no page may hold made visible.

  >>> text("a\\x00b\\ud800")
  'a␀b�'
  """
  value = value.replace("\r\n", "\n").translate(_CONTROLS)
  return _UNPRINTABLE.sub("\ufffd", value)


def one_line(value: str) -> str:
  return text(" ".join(value.split()))


def fixed(value: float | None, decimals: int = 3) -> str:
  """A measure near one, such as a KL or a correlation.

  >>> fixed(1.98512), fixed(0.00012), fixed(2.5e7), fixed(0.0)
  ('1.985', '1.2e-4', '2.50e7', '0.000')
  """
  if value is None or math.isnan(value):
    return NONE
  if math.isinf(value) or abs(value) >= 1e5:
    return significant(value)
  if value and abs(value) < 5 * 10 ** -(decimals + 1):
    return _exponent(value, 1)
  return _minus(f"{value:,.{decimals}f}")


def significant(value: float | None) -> str:
  """A number of any size.

  >>> significant(174.17), significant(1109.7), significant(167228495.8)
  ('174.2', '1,110', '1.67e8')
  >>> significant(2.417), significant(44.6), significant(107.0), significant(0)
  ('2.42', '44.6', '107', '0')
  """
  if value is None or math.isnan(value):
    return NONE
  if math.isinf(value):
    return "∞" if value > 0 else "\N{MINUS SIGN}∞"
  size = abs(value)
  if size >= 1e5 or 0 < size < 1e-3:
    return _exponent(value, 2)
  if size >= 1000:
    return _minus(f"{value:,.0f}")
  if size >= 10:
    return _minus(f"{value:.1f}".removesuffix(".0"))
  return _minus(f"{value:.3g}")


def count(value: float | None) -> str:
  """
  >>> count(33111680)
  '33,111,680'
  """
  return NONE if value is None else _minus(f"{value:,.0f}")


def scaled(value: float | None, unit: float) -> str:
  """In units, such as 1e6 for MB.

  >>> scaled(44_600_000, 1e6), scaled(5.3e10, 1e9)
  ('44.6', '53')
  """
  return NONE if value is None else significant(value / unit)


def parameters(value: float | None) -> str:
  """
  >>> parameters(33111680), parameters(8192), parameters(1.5e9)
  ('33.1 M', '8.19 k', '1.5 G')
  """
  if value is None:
    return NONE
  for unit, name in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
    if value >= unit:
      return f"{value / unit:.3g}{name}"
  return f"{value:.0f}"


def duration(seconds: float | None) -> str:
  """
  >>> duration(7.2), duration(312), duration(3 * 3600 + 125)
  ('7.2 s', '5 min 12 s', '3 h 2 min')
  """
  if seconds is None:
    return NONE
  if seconds < 60:
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
  minutes, rest = divmod(round(seconds), 60)
  if minutes < 60:
    return f"{minutes} min {rest} s"
  return f"{minutes // 60:,} h {minutes % 60} min"


def moment(time_sec: float | None) -> str:
  """
  >>> moment(1790000000.0)
  '2026-09-21 14:13 UTC'
  """
  if time_sec is None:
    return NONE
  try:
    when = datetime.datetime.fromtimestamp(time_sec, datetime.UTC)
  except (ValueError, OverflowError, OSError):
    return NONE
  return when.strftime("%Y-%m-%d %H:%M UTC")


def tick(value: float) -> str:
  """A number at an axis: short.

  >>> [tick(v) for v in (0, 0.25, 20, 1500, 25000, 3e6, 5e-5, 1e12)]
  ['0', '0.25', '20', '1,500', '25k', '3M', '5e-5', '1e12']
  """
  size = abs(value)
  if size == 0:
    return "0"
  if size < 1e-2 * (1 - 1e-9) or size >= 1e9:
    mantissa, power = f"{value:.2e}".split("e")
    return _minus(f"{float(mantissa):g}e{int(power)}")
  for unit, name in ((1e6, "M"), (1e4, "k")):
    if size >= unit:
      value = value / (1e3 if name == "k" else unit)
      return _minus(f"{value:.4g}{name}")
  return _minus(f"{value:,.4g}" if size < 1000 else f"{value:,.0f}")


def _exponent(value: float, decimals: int) -> str:
  mantissa, power = f"{value:.{decimals}e}".split("e")
  sign, power = power[0].replace("+", ""), power[1:].lstrip("0") or "0"
  return _minus(mantissa) + f"e{sign}{power}"


def _minus(shown: str) -> str:
  return "\N{MINUS SIGN}" + shown[1:] if shown.startswith("-") else shown
