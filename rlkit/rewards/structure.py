"""What an answer is made of: lists, tuples, sets, matrices and unions, and their elements."""

from __future__ import annotations

import re

from rlkit.rewards import numeric
from rlkit.rewards.cleaning import CLOSE, OPEN

_PM = re.compile(r"\\pm|±|\+/-|\+-")
_MATRIX = re.compile(r"\\begin\{([pbvBV]?matrix|array)\}(?:\{[lcr|]*\})?(.*?)\\end\{\1\}")


def matrices(a: str, g: str) -> tuple[str, list[str], list[str]] | None:
    """The entries of two matrices; matrices of different shapes give lists of different lengths."""
    x, y = _rows(a), _rows(g)
    if x is None or y is None:
        return None
    if [len(r) for r in x] != [len(r) for r in y]:
        return "ordered", [], [""]
    return "ordered", [cell for row in x for cell in row], [cell for row in y for cell in row]


def _rows(text: str) -> list[list[str]] | None:
    """The cells of a matrix in round or square brackets, row by row; None for all else, as a determinant."""
    for opening, closing in (("(", ")"), ("[", "]")):
        if text.startswith(opening) and text.endswith(closing) and "\\begin{" in text[:10]:
            text = text[1:-1].strip()
    m = _MATRIX.fullmatch(text)
    if m is None or m[1] in ("vmatrix", "Vmatrix") or "\\begin" in m[2]:
        return None
    rows = [row for row in re.split(r"\\\\(?:\[[^\]]*\])?", m[2]) if row.strip()]
    return [[cell.strip() for cell in row.split("&")] for row in rows]


def unions(a: str, g: str) -> tuple[str, list[str], list[str]] | None:
    """The parts of two unions of intervals or sets, in any order."""
    x, y = (re.split(r"\s*(?:\\cup(?![a-z])|∪|(?<=[)\]])\s*U\s*(?=[(\[]))\s*", t) for t in (a, g))
    return ("set", x, y) if len(x) == len(y) > 1 else None


def elements(a: str, g: str) -> tuple[str, list[str], list[str]] | None:
    """(kind, elements of a, elements of g) when both are of one structure; kind is "ordered" or "set". ("differ", [], []) when not."""
    a, g = _expand_pm(a), _expand_pm(g)
    left_a, inside_a, right_a = bracket(a)
    left_g, inside_g, right_g = bracket(g)
    items_a, items_g = split(inside_a, bool(left_a)), split(inside_g, bool(left_g))
    if len(items_a) < 2 and len(items_g) < 2:
        if left_a == left_g == "\\{":
            return "set", items_a, items_g
        return None
    if any(sign in text for sign in ("\\cup", "\\begin", "∪") for text in (a, g)):
        return None
    if "" in items_a or "" in items_g:
        return None
    unordered = ("", "\\{")
    if left_a == left_g == "\\{":
        items_a, items_g = list(dict.fromkeys(items_a)), list(dict.fromkeys(items_g))  # a set has no repetitions
    if left_a in unordered and left_g in unordered:
        return "set", items_a, items_g
    if (left_a, right_a) == (left_g, right_g) or (len(items_a) > 2 and {left_a, left_g} == {"(", "["}):
        return "ordered", items_a, items_g
    if {left_a, left_g} <= {"(", "["} and len(items_a) == len(items_g) == 2:  # an interval's ends belong to it or do not
        return "ordered", [], [""]
    return None


def _expand_pm(text: str) -> str:
    """``1 \\pm \\sqrt{2}`` as the list of both values."""
    if len(_PM.findall(text)) != 1 or "," in text:
        return text
    return f"{_PM.sub('+', text)}, {_PM.sub('-', text)}".removeprefix("+")


def bracket(text: str) -> tuple[str, str, str]:
    """(opening, inside, closing) when one pair of brackets encloses the whole text, else ("", text, "")."""
    opening = "\\{" if text.startswith("\\{") else text[:1]
    closing = "\\}" if text.endswith("\\}") else text[-1:]
    if opening not in ("(", "[", "\\{", "{") or closing not in (")", "]", "\\}", "}") or len(text) < 2:
        return "", text, ""
    inside = text[len(opening) : -len(closing)]
    level = 0
    for c in inside.replace("\\{", "{").replace("\\}", "}"):
        level += (c in OPEN) - (c in CLOSE)
        if level < 0:  # "(1) + (2)", "[1,2] and (3,4]"
            return "", text, ""
    if level != 0:
        return "", text, ""
    if opening == "{":
        opening, closing = "\\{", "\\}"
    return opening, inside.strip(), closing


def split(text: str, bracketed: bool = False) -> list[str]:
    """Cut at commas and semicolons (and "and", "or") outside of brackets. A number such as 1,234 is one, but two where ``bracketed``."""
    if not bracketed and numeric.parse(text) is not None:
        return [text]
    out, level, start, i = [], 0, 0, 0
    while i < len(text):
        c = text[i]
        if c == "\\" and text[i + 1 : i + 2] in ("{", "}"):
            level += 1 if text[i + 1] == "{" else -1
            i += 2
            continue
        if c in OPEN:
            level += 1
        elif c in CLOSE:
            level -= 1
        elif level == 0 and c in ",;":
            out.append(text[start:i].strip())
            start = i + 1
        elif level == 0 and c == " " and (m := _AND.match(text, i)):
            if text[start:i].strip():
                out.append(text[start:i].strip())
            start = i = m.end()
            continue
        i += 1
    out.append(text[start:].strip())
    return out


_AND = re.compile(r" (?:and|or) ")
