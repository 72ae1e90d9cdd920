"""Numbers as people write them, read exactly and without ever computing anything large.

``parse`` understands integers with separators, decimals, fractions in LaTeX or with a slash, mixed numbers, percents, currency, scientific
notation and units. Digits and exponents are bounded, so that ``1e999999999`` costs nothing.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

MAX_DIGITS = 200
MAX_EXPONENT = 200


class Number(NamedTuple):
    """A value with how it was written."""

    value: Fraction
    decimal: bool  # written with a decimal point or a power of ten: may be rounded
    percent: bool  # ``value`` is the number before the percent sign
    unit: str  # normalised, "" when there was none


_DIGITS = r"(?:\d{1,3}(?:,\d{3}){1,60}|\d+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.\d*)?|\.\d+)"
_SIGN = r"(?P<sign>[-+]?)"
_FRAC = r"\\frac\{(?P<num>-?\d+)\}\{(?P<den>-?\d+)\}"
_PLAIN = re.compile(rf"{_SIGN}(?P<dec>{_DECIMAL})(?:(?:[eE]|(?:\\times|\\cdot|[*x×])10\^)\{{?(?P<exp>[-+]?\d{{1,300}})\}}?)?")
_POWER = re.compile(rf"{_SIGN}10\^\{{?(?P<exp>[-+]?\d{{1,300}})\}}?")
_SLASH = re.compile(rf"{_SIGN}(?P<num>{_DIGITS})/(?P<den>{_DIGITS})")
_LATEX = re.compile(rf"{_SIGN}(?P<whole>\d+)?{_FRAC}")
_MIXED = re.compile(rf"{_SIGN}(?P<whole>\d+) (?P<num>\d+)/(?P<den>\d+)")
_REPEATING = re.compile(
    rf"{_SIGN}(?P<whole>\d{{0,50}})\.(?P<once>\d{{0,50}})"
    r"(?:\\(?:overline|bar)\{?(?P<bar>\d{1,50})\}?|\\dot\{?(?P<dot>\d)\}?(?:(?P<between>\d{0,50})\\dot\{?(?P<last>\d)\}?)?)"
)
ELLIPSIS = re.compile(r"(?<=\d)\s*(?:\.\.\.+|…|\\[lc]?dots)$")
_GOES_ON = re.compile(r"(?P<sign>[-+]?)(?P<whole>\d{0,50})\.(?P<once>\d{0,50}?)(?P<bar>\d{1,12}?)(?P<more>(?P=bar){1,20})")
_SIMPLE = re.compile(r"-?\d{1,15}")

# LaTeX that changes how a number looks and not what it is.
_SPACES = re.compile(r"\\[,!;:> ]|~|\\q?quad\b|[\u00a0\u2009\u202f\u200b]")
_FRAC_SHORT = re.compile(r"\\[dtc]?frac\s*(?:(\d)\s*(\d)|(\d)\s*\{(\d+)\}|\{(\d+)\}\s*(\d))")
_TEXT = re.compile(r"\\(?:text|mathrm|textrm|mbox|operatorname|textbf|mathbf|textit|rm)\s*\{([^{}]*)\}")
_DEGREE = re.compile(r"\^\{?\\?(?:circ|degree)\}?|\\degree|°|\bdegrees?\b")
_WORD = re.compile(r"\\[A-Za-z]+|[eExX](?=[-+^{]?\d)|[A-Za-zµμΩ一-鿿℃]+")
_UNIT = re.compile(r"[A-Za-zµμΩ一-鿿℃.\s/*·^{}()²³0-9-]+")
_SECOND = re.compile(r"[A-Za-z.]\s+\d")  # "12 apples and 3 pears" is more than 12
_LIST = re.compile(r"\d, +\d")  # "40, 200" is two numbers
_TERM = re.compile(r"(?<![\^{])-\s*\d|\s-\s")  # "n - 2" goes on with a term, "m^{-2}" is a unit

_SCALE = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_ALIASES = {
    "centimeters": "cm", "centimeter": "cm", "centimetres": "cm", "meters": "m", "meter": "m", "metres": "m", "metre": "m",
    "kilometers": "km", "kilometer": "km", "kilometres": "km", "millimeters": "mm", "inches": "in", "inch": "in", "feet": "ft",
    "foot": "ft", "yards": "yd", "miles": "mi", "grams": "g", "gram": "g", "kilograms": "kg", "kilogram": "kg", "seconds": "s",
    "second": "s", "sec": "s", "secs": "s", "minutes": "min", "minute": "min", "mins": "min", "hours": "h", "hour": "h", "hr": "h",
    "hrs": "h", "liters": "l", "liter": "l", "litres": "l", "dollars": "$", "dollar": "$", "usd": "$", "cents": "cent",
    "days": "day", "weeks": "week", "months": "month", "years": "year",
}  # fmt: skip
_NOT_UNITS = {"i", "e", "x", "y", "z", "n", "k", "a", "b", "c", "t", "r", "pi", "sqrt", "or", "and", "to"}


@lru_cache(maxsize=8192)
def parse(text: str) -> Number | None:
    """The number that ``text`` is, or None when it is anything else or out of bounds."""
    if _SIMPLE.fullmatch(text):
        return Number(Fraction(int(text)), False, False, "")
    if len(text) > 4 * MAX_DIGITS:
        return None
    if _LIST.search(text):
        return None
    text = text.replace("−", "-").replace("–", "-").replace("{,}", ",").replace("，", ",")
    text = _FRAC_SHORT.sub(_full_frac, _SPACES.sub(" ", text)).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    unit = ""
    if "\\text" in text or "\\m" in text or "\\rm" in text or "\\operatorname" in text:
        text = _TEXT.sub(r" \1 ", text)
    text, degrees = _DEGREE.subn("", text)
    text = text.replace("\\left", "").replace("\\right", "").strip()
    for sign in ("\\$", "$", "€", "£", "¥", "￥"):
        if sign in text:
            if text.count(sign) > 1:
                return None
            text, unit = text.replace(sign, "", 1), "$" if "$" in sign else sign
    percent = False
    for sign in ("\\%", "%", "％", "percent"):
        if text.rstrip().endswith(sign):
            text, percent = text.rstrip()[: -len(sign)], True
            break
    text, goes_on = ELLIPSIS.subn("", text.strip())
    text = text.rstrip(".").strip()
    if text.startswith("(") and text.endswith(")") and text.count("(") == 1 and "," not in text:
        text = text[1:-1].strip()
    if text[:1] == "{" and text[-1:] == "}" and text.count("{") == 1:
        text = text[1:-1].strip()
    scale = 0
    if text and (text[-1].isalpha() or text[-1] in "})²³0123456789") and any(c.isalpha() for c in text):
        cut = _split_unit(text)
        if cut is not None:
            text, word = cut
            first = word.split(" ", 1)
            if first[0] in _SCALE:
                scale, word = _SCALE[first[0]], first[1] if len(first) > 1 else ""
            unit = unit or word
    found = (_repeating(text) if goes_on else None) or _value(text)
    if found is None:
        return None
    value, decimal = found
    return Number(value * 10**scale, decimal or scale > 0, percent, unit or ("°" if degrees else ""))


def out_of_bounds(text: str) -> bool:
    """Whether the text is a plain numeral or a power of ten with more digits or a larger exponent than are handled exactly."""
    text = text.replace(" ", "").replace("−", "-")
    return parse(text) is None and (_PLAIN.fullmatch(text) or _POWER.fullmatch(text)) is not None


def _full_frac(m: re.Match[str]) -> str:
    num, den = [g for g in m.groups() if g is not None]
    return f"\\frac{{{num}}}{{{den}}}"


def _split_unit(text: str) -> tuple[str, str] | None:
    """("5 cm") -> ("5", "cm"); None when what follows the number is not a unit."""
    for word in _WORD.finditer(text):
        if word.group()[0] != "\\" and (word.group() not in "eExX" or not text[word.end() : word.end() + 1].strip("-+^{").isdigit()):
            break
    else:
        return None
    at = word.start()
    body, raw = text[:at].strip(" *·"), text[at:]
    if not body or _UNIT.fullmatch(raw) is None or _TERM.search(raw) or _SECOND.search(raw) or _value(body) is None:
        return None
    words = raw.replace("(s)", "").replace("{", "").replace("}", "").strip(" .").lower().split()
    if not words:
        return None
    head = re.split(r"[-/*·^²³]", words[0], maxsplit=1)[0]
    if head in _NOT_UNITS or (len(head) == 1 and head.isascii() and not text[at - 1].isspace()):
        return None
    return body, " ".join(_ALIASES.get(w, w) for w in words)


def _value(text: str) -> tuple[Fraction, bool] | None:
    if (m := _MIXED.fullmatch(text)) is not None:
        return _ratio(m["sign"], m["whole"], m["num"], m["den"])
    text = text.replace(" ", "")
    if (m := _PLAIN.fullmatch(text)) is not None:
        digits = m["dec"].replace(",", "")
        exponent = int(m["exp"] or 0)
        if len(digits) > MAX_DIGITS or abs(exponent) > MAX_EXPONENT:
            return None
        value = Fraction(digits if digits[-1] != "." else digits[:-1]) * Fraction(10) ** exponent
        return (-value if m["sign"] == "-" else value), "." in digits or m["exp"] is not None
    if (m := _SLASH.fullmatch(text)) is not None:
        return _ratio(m["sign"], None, m["num"].replace(",", ""), m["den"].replace(",", ""))
    if (m := _LATEX.fullmatch(text)) is not None:
        return _ratio(m["sign"], m["whole"], m["num"], m["den"])
    if (m := _REPEATING.fullmatch(text)) is not None:
        return _periodic(m, m["bar"] or m["dot"] + (m["between"] or "") + (m["last"] or "")), False
    if (m := _POWER.fullmatch(text)) is not None and abs(int(m["exp"])) <= MAX_EXPONENT:
        value = Fraction(10) ** int(m["exp"])
        return (-value if m["sign"] == "-" else value), False
    return None


def _repeating(text: str) -> tuple[Fraction, bool] | None:
    """``0.333`` and ``0.1666``, where the digits were said to go on; None where they do not repeat often enough to tell how."""
    m = _GOES_ON.fullmatch(text.replace(" ", ""))
    if m is None or (len(m["bar"]) == 1 and len(m["more"]) < 2 and m["once"]):
        return None
    return _periodic(m, m["bar"]), True


def _periodic(m: re.Match[str], period: str) -> Fraction:
    once, nines = m["once"], 10 ** len(period) - 1
    value = int(m["whole"] or 0) + (int(once or 0) + Fraction(int(period), nines)) / 10 ** len(once)
    return -value if m["sign"] == "-" else value


def _ratio(sign: str, whole: str | None, num: str, den: str) -> tuple[Fraction, bool] | None:
    if max(len(num), len(den), len(whole or "")) > MAX_DIGITS or int(den) == 0:
        return None
    value = Fraction(int(num), int(den)) + int(whole or 0)
    return (-value if sign == "-" else value), False


def same(a: Number, b: Number, rel_tol: float) -> bool:
    """Whether two numbers are the same answer.

    Exact, except that a number written as a decimal may be rounded: then they may differ by ``rel_tol`` of the larger. A percent sign on
    one side only is read both as a percent and as decoration (``50%`` is ``0.5`` and ``50``). Units that contradict each other differ.
    """
    if contradict(a.unit, b.unit) or (a.percent and measure(b.unit)) or (b.percent and measure(a.unit)):
        return False
    if _close(a.value, b.value, a.decimal or b.decimal, rel_tol):
        return True
    if a.percent != b.percent:
        x, y = (a, b) if a.percent else (b, a)
        return _close(x.value / 100, y.value, a.decimal or b.decimal, rel_tol)
    return False


def _close(a: Fraction, b: Fraction, inexact: bool, rel_tol: float) -> bool:
    if a == b:
        return True
    if not inexact or (a.denominator == 1 and b.denominator == 1):
        return False
    return abs(a - b) <= Fraction(rel_tol) * max(abs(a), abs(b))


_MEASURES = {*_ALIASES.values(), "mg", "lb", "oz", "ml", "°", "€", "£", "¥"}
_COMPOUNDS = {"mph": "mi/h", "kmh": "km/h", "kph": "km/h", "kmph": "km/h", "fps": "ft/s", "mps": "m/s"}
_ABBREVIATED = {"yr": "year", "yrs": "year", "lbs": "lb", "pounds": "lb", "mile": "mi", "yard": "yd", "pound": "lb", "￥": "¥"}
_UNIT_TOKEN = re.compile(r"[a-z]+|[°$€£¥￥]|\^?\s*-?\d+|[²³/]|\S")


def contradict(a: str, b: str) -> bool:
    """Whether two units measure different things, or in different steps. "apples" and "red apples" do not; nor does no unit at all."""
    x, y = measure(a), measure(b)
    return x is not None and y is not None and x != y


@lru_cache(maxsize=1024)
def measure(unit: str) -> tuple[tuple[str, int], ...] | None:
    """The measures in a unit with their exponents, as m and s^-1 for "meters per second"; None when it holds any other word."""
    powers: dict[str, int] = {}
    sign, power, last, last_sign = 1, 1, "", 1
    for token in _UNIT_TOKEN.findall(_COMPOUNDS.get(unit.strip(), unit).replace("{", "").replace("}", "").lower()):
        if token in ("/", "per"):
            sign = -1
        elif token in ("square", "sq", "cubic"):
            power = 3 if token == "cubic" else 2
        elif token in (".", "*", "·"):
            continue
        elif (exponent := {"²": "2", "³": "3", "squared": "2", "cubed": "3"}.get(token, token.strip("^ "))).lstrip("-").isdigit():
            if not last or len(exponent) > 3:
                return None
            powers[last] += last_sign * (int(exponent) - 1)
        else:
            last = _ALIASES.get(token, _ABBREVIATED.get(token, token))
            if last not in _MEASURES:
                return None
            powers[last] = powers.get(last, 0) + sign * power
            last_sign, sign, power = sign, 1, 1
    return tuple(sorted(powers.items())) or None
