"""Inequalities, membership and set-builders as intervals, and relations of one unknown."""

from __future__ import annotations

import re

_RELATION_TEXT = r"\\(?:leqslant|leq|le|geqslant|geq|ge|lt|gt|neq|ne)(?![A-Za-z])|<=|>=|[<>≤≥≠]"
RELATION = re.compile(_RELATION_TEXT)
_UNEQUAL = re.compile(r"\\neq?(?![A-Za-z])|≠")
_BARE = re.compile(rf"(?:{_RELATION_TEXT})\s*[^\s<>=≤≥≠].*")
UNKNOWN = re.compile(r"(?:[A-Za-z]|\\[A-Za-z]+)(?:_\{?\w{1,4}\}?)?")


def as_relations(a: str, g: str) -> tuple[str, str] | tuple[()] | None:
    """``\\ge 3`` and ``\\{x | x \\ne 2\\}`` as relations of an unknown; () when these are of two unknowns, None when nothing changes."""
    if not (RELATION.search(a) or RELATION.search(g)):
        return None
    x, y = (b[2].strip() if (b := _BUILDER.fullmatch(t)) and _UNEQUAL.search(t) else t for t in (a, g))
    name_x, name_y = _unknown(x), _unknown(y)
    x = f"{name_y or 'x'} {x}" if _BARE.fullmatch(x) else x
    y = f"{name_x or 'x'} {y}" if _BARE.fullmatch(y) else y
    if (x, y) != (a, g):
        return x, y
    return () if name_x and name_y and plain_name(name_x) != plain_name(name_y) else None


def _unknown(text: str) -> str | None:
    """The unknown of one inequality, when it stands alone on its side."""
    found = _inequality(text)
    return found[0] if found is not None and UNKNOWN.fullmatch(found[0]) else None


_RELATIONS = {
    "leqslant": "<=",
    "leq": "<=",
    "le": "<=",
    "geqslant": ">=",
    "geq": ">=",
    "ge": ">=",
    "lt": "<",
    "gt": ">",
    "≤": "<=",
    "≥": ">=",
    "ne": "!=",
    "neq": "!=",
    "≠": "!=",
}
_MEMBER = re.compile(r"^\(?\\?[A-Za-z]\w{0,8}\)?\s*(?:\\in(?![a-z])|∈)\s*")
_BUILDER = re.compile(r"\\\{\s*([A-Za-z])\s*(?:\\in(?![a-z])\s*(?:\\mathbb\s*\{?R\}?|R)\s*)?(?:\||\\mid|:|\\vert)(.*)\\\}")
_VARIABLE = re.compile(r"\\?[A-Za-z]+(?:_\{?\w{1,4}\}?)?")
_INTERVAL = re.compile(r"[(\[].*,.*[)\]]")


def as_ranges(a: str, g: str) -> tuple[str, str] | None:
    """Both as unions of intervals, when at least one is written as an inequality, with ``\\in`` or as ``\\{x | ...\\}``."""
    x, y = _range(a), _range(g)
    if x is None and y is None:
        return None
    x, y = x or a, y or g
    return (
        (x, y)
        if (x, y) != (a, g) and all(_INTERVAL.fullmatch(t.split("\\cup")[0].strip()) or t.startswith("\\{") for t in (x, y))
        else None
    )


def _range(text: str) -> str | None:
    """``x < 3`` as ``(-\\infty,3)``, ``1 \\le x < 2 or x > 5`` as a union; None when it is no such thing."""
    member = _MEMBER.match(text)
    if member:
        return text[member.end() :].strip() or None
    builder = _BUILDER.fullmatch(text)
    if builder is not None:
        text = builder[2].strip()
    if RELATION.search(text) is None:
        return None
    pieces = [_inequality(part.strip()) for part in re.split(r"\s+or\s+|\\vee|\\lor(?![a-z])|,", text)]
    if None in pieces:
        return None
    if len({p[0] for p in pieces if p}) != 1:
        return None
    return "\\cup ".join(p[1] for p in pieces if p)


def _inequality(text: str) -> tuple[str, str] | None:
    """(variable, interval) of one inequality or a chain of two, with the variable alone on its side."""
    signs = [_RELATIONS.get(m.group().lstrip("\\"), m.group()) for m in RELATION.finditer(text)]
    sides = [side.strip() for side in RELATION.split(text)]
    if len(signs) not in (1, 2) or "" in sides or any(s not in ("<", ">", "<=", ">=") for s in signs):
        return None
    names = [bool(_VARIABLE.fullmatch(side)) and "infty" not in side and side != "\\pi" for side in sides]
    if len(signs) == 1 and names[0] != names[1]:
        if not names[0]:
            sides, signs = sides[::-1], [signs[0].translate(str.maketrans("<>", "><"))]
        bracket = "]" if "=" in signs[0] else ")"
        if signs[0].startswith("<"):
            return sides[0], f"(-\\infty,{sides[1]}{bracket}"
        return sides[0], f"{'[' if bracket == ']' else '('}{sides[1]},\\infty)"
    if len(signs) == 2 and names == [False, True, False] and signs[0][0] == signs[1][0]:
        if signs[0].startswith(">"):
            sides, signs = sides[::-1], signs[::-1]
        return sides[1], f"{'[' if '=' in signs[0] else '('}{sides[0]},{sides[2]}{']' if '=' in signs[1] else ')'}"
    return None


def difference(text: str) -> tuple[str, str] | None:
    """(expression, "<", "<=" or "!=") of one inequality, brought to the form that the expression is below 0, or is not 0."""
    sides, signs = RELATION.split(text), RELATION.findall(text)
    if len(signs) != 1 or "=" in "".join(sides):
        return None
    sign = _RELATIONS.get(signs[0].lstrip("\\"), signs[0])
    if sign[0] in "<!":
        return f"({sides[0]})-({sides[1]})", sign
    return (f"({sides[1]})-({sides[0]})", sign.replace(">", "<")) if sign[0] == ">" else None


def plain_name(text: str) -> str:
    """``a_{n}`` and ``A_n`` alike."""
    return text.translate(str.maketrans("", "", " {}")).lower()
