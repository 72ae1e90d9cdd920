"""Decide whether two final answers are the same, structure first: text, number, choice, inequality, then list, tuple, interval, set,
union or matrix by elements.

What is left are single expressions and equations. `rlkit.rewards.expression` compares them by value. Those that it cannot read go to a
``leaf`` function: in the calling process it is absent (the answer is then "not decided here"), in a worker process of the pool it is
math-verify's symbolic comparison, which may hang and is killed then.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from rlkit.rewards import expression, numeric

MAX_LENGTH = 300  # characters of an answer, or 8 times the gold answer's when that is more: a right one is not that much longer
MAX_DEPTH = 40  # nested brackets

Leaf = Callable[[str, str], bool]


class Decision(NamedTuple):
    """``equal`` is None when only the symbolic comparison can tell."""

    equal: bool | None
    rule: str


_WRAP = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))
_PUNCTUATION = str.maketrans("，：；（）【】［］｛｝。％＝＋－、！＜＞０１２３４５６７８９", ",:;()[][]{}.%=+-,!<>0123456789")
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|rm|bf|operatorname|bm|boldsymbol)\s*\{([^{}]*)\}")
_DROP = re.compile(
    r"\\left(?![a-zA-Z])|\\right(?![a-zA-Z])|\\[,!;:>]|(?<!\\)\\(?=\s)|\\q?quad\b|\\displaystyle|\\bigl?|\\bigr|\\Bigl?|\\Bigr|[\u200b\u200e\ufeff]"
)
_LHS = re.compile(
    r"\([A-Za-z],\s*[A-Za-z](?:,\s*[A-Za-z])?\)|"
    r"\\?[A-Za-z]\w{0,8}(?:_\{?\w{1,8}\}?)?'*(?:\s*\(\\?\w{1,8}(?:,\s*\w{1,8}){0,3}\))?|(?:[A-Za-z]{1,20} ){0,6}[A-Za-z]{1,20}"
)
_CHOICE = re.compile(r"\(?\s*([A-Ja-j])\)?(?:[.:)、]\s*.*|\s*\)|)", re.DOTALL)
_LISTED = re.compile(r"^([A-Ja-j])、(?!\s*[A-Ja-j]\s*(?:[、和或]|$))\s*")
_WORDS = re.compile(r"[A-Za-z][A-Za-z'’\-]*(?:[ ,.&-]+[A-Za-z][A-Za-z'’\-]*)*\.?")
_FUNCTIONS = {"sin", "cos", "tan", "cot", "sec", "csc", "log", "exp", "sqrt", "arcsin", "arccos", "arctan", "frac", "sinh", "cosh", "tanh"}
_OPEN, _CLOSE = "([{", ")]}"
_SCRIPTS = re.compile("[⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_SCRIPT_DIGITS = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
_VULGAR = {
    c: f"\\frac{{{n}}}{{{d}}}"
    for c, n, d in (
        ("½", 1, 2), ("⅓", 1, 3), ("⅔", 2, 3), ("¼", 1, 4), ("¾", 3, 4), ("⅕", 1, 5), ("⅖", 2, 5), ("⅗", 3, 5), ("⅘", 4, 5), ("⅙", 1, 6),
        ("⅚", 5, 6), ("⅛", 1, 8), ("⅜", 3, 8), ("⅝", 5, 8), ("⅞", 7, 8),
    )
}  # fmt: skip
_PRECOMPOSED = re.compile(f"[{''.join(_VULGAR)}]")
_CHINESE_AND = re.compile(r"(?<=[^一-鿿\s])\s*(?:或者|以及|或|和|、)\s*(?=[^一-鿿\s])")
_LEAD = re.compile(r"(?:(?:so|thus|therefore|hence),? )?the (?:final |correct )?answer is:? (?=\S)", re.IGNORECASE)
_DOLLARS = re.compile(r"\$[^$]+\$(?:\s*(?:, (?:and|or)|,|and|or)\s*\$[^$]+\$)+")
_PM = re.compile(r"\\pm|±|\+/-|\+-")


@lru_cache(maxsize=8192)
def clean(text: str) -> str:
    """The answer without what only changes its looks: delimiters, spacing, full-width punctuation, ``\\text``, bold, a final stop."""
    text = _LISTED.sub(r"\1. ", text.strip()).translate(_PUNCTUATION)
    if not text.isascii():
        text = _SCRIPTS.sub(lambda m: f"^{{{m.group().translate(_SCRIPT_DIGITS)}}}", text)
        text = _CHINESE_AND.sub(", ", _PRECOMPOSED.sub(lambda m: _VULGAR[m.group()], text))
    for _ in range(4):
        before = text
        text = text.strip("*` \t\r\n").rstrip(".") if not text.endswith("...") else text.strip()
        for left, right in _WRAP:
            if text.startswith(left) and text.endswith(right) and len(text) >= len(left) + len(right):
                inner = text[len(left) : -len(right)]
                if left not in inner:
                    text = inner.strip()
        if text.startswith("$") and text.count("$") == 2 and len(text) > 2:  # "$5$ ft"
            text = text.replace("$", "")
        if text.startswith(("\\boxed{", "\\fbox{")) and text.endswith("}"):
            text = text[text.index("{") + 1 : -1]
        if text == before:
            break
    if "$" in text and _DOLLARS.fullmatch(text):
        text = text.replace("$", "")
    text = _DROP.sub(" ", text) if "\\" in text or "\u200b" in text else text
    if "{" in text:
        text = _TEXT.sub(r" \1 ", text)
    text = text.replace("dfrac", "frac").replace("tfrac", "frac").replace("\\lbrace", "\\{").replace("\\rbrace", "\\}")
    text = _LEAD.sub("", " ".join(text.split()), count=1) if text[:1].isalpha() or text[:1] == " " else " ".join(text.split())
    if text.startswith("\\langle") and text.endswith("\\rangle") and "," in text and text.count("\\langle") == 1:
        text = f"({text[7:-7].strip()})"
    return text


def depth(text: str) -> int:
    """The deepest nesting of brackets."""
    level = deepest = 0
    for c in text:
        if c in _OPEN:
            level += 1
            deepest = max(deepest, level)
        elif c in _CLOSE:
            level -= 1
    return deepest


_RELATION_TEXT = r"\\(?:leqslant|leq|le|geqslant|geq|ge|lt|gt|neq|ne)(?![A-Za-z])|<=|>=|[<>≤≥≠]"
_RELATION = re.compile(_RELATION_TEXT)
_UNEQUAL = re.compile(r"\\neq?(?![A-Za-z])|≠")


def compare(answer: str, gold: str, *, rel_tol: float = 1e-4, leaf: Leaf | None = None, options: Sequence[str] | None = None) -> Decision:
    """Whether ``answer`` is the same final answer as ``gold``, and the rule that decided. ``options``: the texts of A, B, C, ..."""
    if options and (chosen := _choose(answer, _as_letter(gold, options), options, rel_tol, leaf)) is not None:
        return chosen
    if answer == gold:
        return Decision(True, "exact")
    if (numbers := _numbers(answer, gold, rel_tol)) is not None:
        return numbers
    if len(answer) > max(MAX_LENGTH, 8 * len(gold)):
        return Decision(False, "too_long")
    a, g = clean(answer), clean(gold)
    if depth(a) > MAX_DEPTH:
        return Decision(False, "too_deep")
    return _compare(a, g, rel_tol, leaf)


def _compare(a: str, g: str, rel_tol: float, leaf: Leaf | None) -> Decision:
    if a == g or a.replace(" ", "") == g.replace(" ", ""):
        return Decision(bool(a), "exact")
    if not a:
        return Decision(False, "empty")
    if (numbers := _numbers(a, g, rel_tol)) is not None:
        return numbers
    number, target = numeric.parse(a), numeric.parse(g)
    if len(g) <= 3 and (want := _CHOICE.fullmatch(g)) and want[1].isupper() and g.strip("().: ") == want[1]:
        got = _CHOICE.fullmatch(a)
        if got is not None:
            return Decision(got[1].upper() == want[1], "choice")
    if (letters := _several_letters(a, g)) is not None:
        return Decision(letters, "choice")
    if (labelled := _labelled(a, g)) is not None:
        return _compare(*labelled, rel_tol, leaf) if labelled else Decision(False, "choice")
    if (based := _in_base(a, g)) is not None:
        return Decision(based, "base")
    if any(kind.fullmatch(a) and kind.fullmatch(g) for kind in (_NONE, _ALL)):
        return Decision(True, "text")
    if (relations := _relations(a, g)) is not None:
        return _compare(*relations, rel_tol, leaf) if relations else Decision(False, "kind")
    if (ranges := _as_ranges(a, g)) is not None:
        return _compare(*ranges, rel_tol, leaf)
    if (equation := _sides(a, g)) is not None:
        return _compare(*equation, rel_tol, leaf)
    if _other_unknowns(a, g):
        return Decision(False, "kind")
    text = _as_text(a, g)
    if text is not None:
        return text
    parts = _matrices(a, g) or _unions(a, g) or _elements(a, g)
    if parts is not None:
        return _compare_elements(*parts, rel_tol, leaf)
    if (target is not None and _is_words(a)) or (number is not None and _is_words(g)):
        return Decision(False, "text")
    if sum(word not in _FUNCTIONS for word in _PROSE.findall(g)) >= 3:  # a formula inside of a sentence is not the answer, the sentence is
        return Decision(_letters(a) == _letters(g), "text")
    kinds = {_kind(a), _kind(g)}
    if len(kinds) == 2 and None not in kinds and not kinds <= _RANGES:
        return Decision(False, "kind")
    if numeric.out_of_bounds(a) and (target is not None or numeric.out_of_bounds(g)):
        return Decision(False, "numeric")
    if (units := _without_units(a, g)) is not None:
        return _compare(*units, rel_tol, leaf) if units else Decision(False, "unit")
    found = _by_value(a, g, rel_tol)
    if found is not None:
        return Decision(found, "value")
    if leaf is None:
        return Decision(None, "symbolic")
    return Decision(leaf(a, g), "symbolic")


def _numbers(a: str, g: str, rel_tol: float) -> Decision | None:
    """The verdict on two numbers; None where one of them is none."""
    number, target = numeric.parse(a), numeric.parse(g)
    if number is None or target is None:
        return None
    same = numeric.same(number, target, rel_tol)
    if not same and (cut := [numeric.ELLIPSIS.sub("", t.strip()) for t in (a, g)]) != [a.strip(), g.strip()]:
        same = cut[0] == cut[1]  # "0.333..." for 0.333
    return Decision(same, "numeric")


_NONE = re.compile(
    r"(?:there (?:is|are) )?no (?:real )?solutions?(?: exists?)?|(?:the )?empty set|\\emptyset|\\varnothing|∅|\\\{ ?\\\}|无解|无实数解",
    re.IGNORECASE,
)
_ALL = re.compile(
    r"(?:all (?:of )?(?:the )?real numbers|all reals|(?:[A-Za-z] ?(?:\\in|∈) ?)?"
    r"(?:\\mathbb ?\{? ?R ?\}?|ℝ|\( ?- ?(?:\\infty|∞) ?, ?\+? ?(?:\\infty|∞) ?\)))",
    re.IGNORECASE,
)
_SEVERAL = re.compile(r"\(?[A-H]\)?(?:(?: ?(?:, and|[,;&]|and) ?| ?)\(?[A-H]\)?){1,7}")


def _several_letters(a: str, g: str) -> bool | None:
    """Whether two choices of several letters agree, where one is written ``AC`` and the other ``A, C``."""
    if _SEVERAL.fullmatch(a) is None or _SEVERAL.fullmatch(g) is None or (a.isalpha() == g.isalpha()):
        return None
    x, y = sorted(re.findall("[A-H]", a)), sorted(re.findall("[A-H]", g))
    return x == y if len(set(x)) == len(x) and len(set(y)) == len(y) else None


_LABEL = re.compile(r"\(\s*([A-H])\s*\) (?=\S)(?![+*/^=!_]|- )")


def _labelled(a: str, g: str) -> tuple[str, str] | tuple[()] | None:
    """Both without the letter of an option before them, as in ``(D) 8``; () when the letters differ, None when there are none."""
    x, y = _LABEL.match(a), _LABEL.match(g)
    if y is not None and x is None:
        if (letter := _CHOICE.fullmatch(a)) is not None:
            return (y[1], y[1]) if letter[1].upper() == y[1] else ()
        return None if y[1] in a else (a, g[y.end() :])
    if x is not None and y is not None:
        return (a[x.end() :], g[y.end() :]) if x[1] == y[1] else ()
    return (a[x.end() :], g) if x is not None and x[1] not in g else None


_BARE = re.compile(rf"(?:{_RELATION_TEXT})\s*[^\s<>=≤≥≠].*")
_UNKNOWN = re.compile(r"(?:[A-Za-z]|\\[A-Za-z]+)(?:_\{?\w{1,4}\}?)?")


def _relations(a: str, g: str) -> tuple[str, str] | tuple[()] | None:
    """``\\ge 3`` and ``\\{x | x \\ne 2\\}`` as relations of an unknown; () when these are of two unknowns, None when nothing changes."""
    if not (_RELATION.search(a) or _RELATION.search(g)):
        return None
    x, y = (b[2].strip() if (b := _BUILDER.fullmatch(t)) and _UNEQUAL.search(t) else t for t in (a, g))
    name_x, name_y = _unknown(x), _unknown(y)
    x = f"{name_y or 'x'} {x}" if _BARE.fullmatch(x) else x
    y = f"{name_x or 'x'} {y}" if _BARE.fullmatch(y) else y
    if (x, y) != (a, g):
        return x, y
    return () if name_x and name_y and _name(name_x) != _name(name_y) else None


def _unknown(text: str) -> str | None:
    """The unknown of one inequality, when it stands alone on its side."""
    found = _inequality(text)
    return found[0] if found is not None and _UNKNOWN.fullmatch(found[0]) else None


def _as_letter(gold: str, options: Sequence[str]) -> str:
    """The letter of a gold answer that is written as the text of one of the options; else the gold itself."""
    texts, text = [clean(o) for o in options], clean(gold)
    if _letter(text, len(options)) is not None or texts.count(text) != 1:
        return gold
    return chr(ord("A") + texts.index(text))


def _choose(answer: str, gold: str, options: Sequence[str], rel_tol: float, leaf: Leaf | None) -> Decision | None:
    """The verdict where ``gold`` is the letter of one of the options; None when it is not.

    An answer that names a letter is judged by the letter. Any other must be the text of exactly one option, that of the gold: as it is
    written, or else as `compare` sees it.
    """
    want = _letter(clean(gold), len(options))
    if want is None or len(clean(gold).strip("().: ")) != 1:
        return None
    a = clean(answer)
    if len(a) > max(MAX_LENGTH, *(8 * len(o) for o in options)):
        return Decision(False, "too_long")
    if depth(a) > MAX_DEPTH:
        return Decision(False, "too_deep")
    texts = [clean(o) for o in options]
    if a not in texts and (got := _letter(a, len(options))) is not None:
        return Decision(got == want, "choice")
    exact = [i for i, text in enumerate(texts) if text.replace(" ", "").lower() == a.replace(" ", "").lower()]
    if exact:
        return Decision(exact == [want], "option")
    found = [_compare(a, text, rel_tol, leaf).equal for text in texts]
    if None in found:
        return Decision(None, "option")
    return Decision([i for i, equal in enumerate(found) if equal] == [want], "option")


def _letter(text: str, count: int) -> int | None:
    """The index of the option that ``text`` names (``B``, ``(b)``, ``B. 12``), when there are that many."""
    named = _CHOICE.fullmatch(re.sub(r"^(?:option|choice|answer)\s+", "", text, flags=re.IGNORECASE))
    index = ord(named[1].upper()) - ord("A") if named else count
    return index if index < count else None


_BASE = re.compile(r"([0-9A-Fa-f]+)(?:_\{?\(?(\d{1,2})\)?\}?)?")


def _in_base(a: str, g: str) -> bool | None:
    """Two numerals of which at least one names its base (``1011_2``): the digits decide, and the bases where both are named."""
    x, y = (_BASE.fullmatch(t.replace(" ", "")) for t in (a, g))
    if x is None or y is None or not (x[2] or y[2]):
        return None
    return x[1].lower() == y[1].lower() and (x[2] is None or y[2] is None or x[2] == y[2])


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


def _as_ranges(a: str, g: str) -> tuple[str, str] | None:
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
    if _RELATION.search(text) is None:
        return None
    pieces = [_inequality(part.strip()) for part in re.split(r"\s+or\s+|\\vee|\\lor(?![a-z])|,", text)]
    if None in pieces:
        return None
    if len({p[0] for p in pieces if p}) != 1:
        return None
    return "\\cup ".join(p[1] for p in pieces if p)


def _inequality(text: str) -> tuple[str, str] | None:
    """(variable, interval) of one inequality or a chain of two, with the variable alone on its side."""
    signs = [_RELATIONS.get(m.group().lstrip("\\"), m.group()) for m in _RELATION.finditer(text)]
    sides = [side.strip() for side in _RELATION.split(text)]
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


_MATRIX = re.compile(r"\\begin\{([pbvBV]?matrix|array)\}(?:\{[lcr|]*\})?(.*?)\\end\{\1\}")


def _matrices(a: str, g: str) -> tuple[str, list[str], list[str]] | None:
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


def _unions(a: str, g: str) -> tuple[str, list[str], list[str]] | None:
    """The parts of two unions of intervals or sets, in any order."""
    x, y = (re.split(r"\s*(?:\\cup(?![a-z])|∪|(?<=[)\]])\s*U\s*(?=[(\[]))\s*", t) for t in (a, g))
    return ("set", x, y) if len(x) == len(y) > 1 else None


_UNIT_WORDS = "|".join(
    sorted(
        {*(w for w in numeric._ALIASES if len(w) > 1), *(w for w in numeric._ALIASES.values() if len(w) > 1), "mph", "units?", "unit"}
        - {"in", "s", "sec"},
        key=len,
        reverse=True,
    )
)
_UNIT_AT_END = re.compile(
    rf"(?<=[\d}})\s])\s*(?:(?:square|sq|cubic)\.? )?({_UNIT_WORDS})\.?\s*(?:\^\s*\{{?[23]\}}?|²|³)?(?:/[a-z]{{1,6}})?$"
)


def _without_units(a: str, g: str) -> tuple[str, str] | tuple[()] | None:
    """Both without a measure's name at the end; () when these contradict each other, None when there is none."""
    x, y = _UNIT_AT_END.search(a), _UNIT_AT_END.search(g)
    if x is None and y is None:
        return None
    if x and y and (numeric.contradict(x.group(), y.group()) or numeric._ALIASES.get(x[1], x[1]) != numeric._ALIASES.get(y[1], y[1])):
        return ()
    return a[: x.start()].strip() if x else a, g[: y.start()].strip() if y else g


_PROSE = re.compile(r"(?<![\\\\A-Za-z{])[A-Za-z]{3,}(?![A-Za-z}])")


_RANGES = {"relation", "union", "tuple"}  # ways to write the same range
_MATRIX_OPENS = re.compile(r"\\begin\{(?:[pbB]?matrix|array)\}")
_BINOMIAL = re.compile(
    r"\( ?\\begin\{array\}(?:\{\w+\})? ?\w+ ?\\\\ ?\w+ ?\\end|\\begin\{(?:cases|aligned|[vV]matrix)|\\\{ ?\\begin|\| ?\\begin"
)
_BRACKETS = ("(", "[", "\\{")


def _kind(text: str) -> str | None:
    """What a final answer is, as far as its outside tells: answers of two kinds are never the same. None when it may be several."""
    if "\\begin{" in text:
        return "matrix" if _MATRIX_OPENS.search(text) and _BINOMIAL.search(text) is None else None
    if _is_words(text):
        return None if "infinity" in text.lower() or "empty" in text.lower() else "words"
    if _RELATION.search(text):
        return "relation"
    if text.startswith(_BRACKETS) and ("\\cup" in text or "∪" in text):
        return "union"
    opening, inside, _ = _bracket(text)
    if opening in ("(", "[") and len(_split(inside, True)) > 1:
        return "tuple"
    if _split_equation(text)[0] is not None:
        return "equation"
    if "=" not in text and expression.parse(text) is not None:
        return "expression"
    return None


_COMMAND = re.compile(r"\\[A-Za-z]+")


def _lacks_a_variable(a: str, g: str) -> bool:
    """Whether one side has a variable that the other, which the grammar may not read, does not mention at all."""
    for text, other in ((a, g), (g, a)):
        sides = [expression.parse(side.strip()) for side in text.split("=")]
        said, commands = _name(_COMMAND.sub(" ", other)), set(_COMMAND.findall(other))
        for side in sides:
            if None in sides or side is None:
                break
            names = side.names - expression.CONSTANTS
            if any((name not in commands if name[0] == "\\" else name.lower() not in said) for name in names if "\\" not in name[1:]):
                return True
    return False


def _by_value(a: str, g: str, rel_tol: float) -> bool | None:
    """As `_same_value`, and False where one side has a variable that the other lacks."""
    found = _same_value(a, g, rel_tol)
    return False if found is None and _lacks_a_variable(a, g) else found


def _same_value(a: str, g: str, rel_tol: float) -> bool | None:
    """The verdict on two expressions, or on two equations that are multiples of each other; None when it takes a symbolic comparison."""
    if _RELATION.search(a) or _RELATION.search(g):
        x, y = _difference(a), _difference(g)
        if x is None or y is None:
            return None
        return x[1] == y[1] and expression.proportional(x[0], y[0], positive=x[1] != "!=")
    if "=" not in a and "=" not in g:
        return expression.same(a, g, rel_tol)
    left_a, sign_a, right_a = a.partition("=")
    left_g, sign_g, right_g = g.partition("=")
    if bool(sign_a) != bool(sign_g):  # the equation of a curve is no value; "AB = 5" may be one
        left = left_a if sign_a else left_g
        return False if "^" in left and expression.parse(left) is not None else None
    if "=" in right_a or "=" in right_g or left_a[-1:] in tuple("<>!\\") or left_g[-1:] in tuple("<>!\\"):
        return None
    found = expression.proportional(f"({left_a})-({right_a})", f"({left_g})-({right_g})")
    if found is None and not any((e := expression.parse(t)) is None or e.names for t in (right_a, right_g)):
        return False if expression.same(right_a, right_g, rel_tol) is False else None  # "|A| = -6": what the left is worth differs
    return found


def _difference(text: str) -> tuple[str, str] | None:
    """(expression, "<", "<=" or "!=") of one inequality, brought to the form that the expression is below 0, or is not 0."""
    sides, signs = _RELATION.split(text), _RELATION.findall(text)
    if len(signs) != 1 or "=" in "".join(sides):
        return None
    sign = _RELATIONS.get(signs[0].lstrip("\\"), signs[0])
    if sign[0] in "<!":
        return f"({sides[0]})-({sides[1]})", sign
    return (f"({sides[1]})-({sides[0]})", sign.replace(">", "<")) if sign[0] == ">" else None


def _sides(a: str, g: str) -> tuple[str, str] | None:
    """``x = 5`` against ``5``, or against ``x = 5`` written otherwise: the right-hand sides."""
    left_a, right_a = _split_equation(a)
    left_g, right_g = _split_equation(g)
    if left_a is not None and left_g is not None:
        x, y = _name(left_a), _name(left_g)
        alike = x == y or (_GRAPH.fullmatch(x) and _GRAPH.fullmatch(y)) or (_is_words(left_a) or _is_words(left_g))
        return (right_a, right_g) if alike else None
    if left_a is not None and "=" not in g:
        return right_a, g
    if left_g is not None and "=" not in a:
        return a, right_g
    return None


_GRAPH = re.compile(r"y|[fgh]\(x\)")  # names for the same function of x


def _other_unknowns(a: str, g: str) -> bool:
    """Whether both say what one unknown is, another one each, and neither speaks of the other's: ``x = 5`` and ``y = 5``."""
    left_a, right_a = _split_equation(a)
    left_g, right_g = _split_equation(g)
    if left_a is None or left_g is None:
        return False
    x, y = _name(left_a), _name(left_g)
    return x != y and x not in _name(_COMMAND.sub(" ", right_g)) and y not in _name(_COMMAND.sub(" ", right_a))


def _name(text: str) -> str:
    """``a_{n}`` and ``A_n`` alike."""
    return text.translate(str.maketrans("", "", " {}")).lower()


def _split_equation(text: str) -> tuple[str | None, str]:
    """(left-hand side, right-hand side) when the left is a name, such as ``x``, ``f(x)``, ``S_n`` or words; else (None, text)."""
    left, sign, right = text.partition("=")
    left, right = left.strip(), right.strip()
    if not sign or not right or "=" in right or left.endswith(("<", ">", "!", "\\")):
        return None, text
    if _LHS.fullmatch(left) is None:
        if _UNKNOWN.fullmatch(right) and numeric.parse(left) is not None:  # "5 = x"
            return right, left
        return None, text
    return left, right


def _is_words(text: str) -> bool:
    """Prose rather than a formula: letters only, with a word of three letters or more that is no function."""
    if _WORDS.fullmatch(text) is None:
        return False
    words = re.split(r"[^A-Za-z]+", text.lower())
    return any(len(w) >= 3 and w not in _FUNCTIONS for w in words)


def _as_text(a: str, g: str) -> Decision | None:
    if a.isalpha() and len(a) > 1 and a.lower() == g.lower():
        return Decision(True, "text")
    if not (_is_words(g) and (_is_words(a) or not any(c in a for c in "\\^_{}="))):
        return None
    if "," in a and "," in g:  # names in any order
        return Decision(sorted(map(_letters, a.split(","))) == sorted(map(_letters, g.split(","))), "text")
    return Decision(_letters(a) == _letters(g), "text")


def _letters(text: str) -> str:
    words = re.findall(r"[a-z0-9]+", text.lower().replace("’", "").replace("'", ""))
    return " ".join(w for w in words if w not in ("the", "a", "an"))


def _elements(a: str, g: str) -> tuple[str, list[str], list[str]] | None:
    """(kind, elements of a, elements of g) when both are of one structure; kind is "ordered" or "set". ("differ", [], []) when not."""
    a, g = _expand_pm(a), _expand_pm(g)
    left_a, inside_a, right_a = _bracket(a)
    left_g, inside_g, right_g = _bracket(g)
    items_a, items_g = _split(inside_a, bool(left_a)), _split(inside_g, bool(left_g))
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


def _bracket(text: str) -> tuple[str, str, str]:
    """(opening, inside, closing) when one pair of brackets encloses the whole text, else ("", text, "")."""
    opening = "\\{" if text.startswith("\\{") else text[:1]
    closing = "\\}" if text.endswith("\\}") else text[-1:]
    if opening not in ("(", "[", "\\{", "{") or closing not in (")", "]", "\\}", "}") or len(text) < 2:
        return "", text, ""
    inside = text[len(opening) : -len(closing)]
    level = 0
    for c in inside.replace("\\{", "{").replace("\\}", "}"):
        level += (c in _OPEN) - (c in _CLOSE)
        if level < 0:  # "(1) + (2)", "[1,2] and (3,4]"
            return "", text, ""
    if level != 0:
        return "", text, ""
    if opening == "{":
        opening, closing = "\\{", "\\}"
    return opening, inside.strip(), closing


def _split(text: str, bracketed: bool = False) -> list[str]:
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
        if c in _OPEN:
            level += 1
        elif c in _CLOSE:
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


def _compare_elements(kind: str, a: Sequence[str], g: Sequence[str], rel_tol: float, leaf: Leaf | None) -> Decision:
    rule = "elements"
    if len(a) != len(g):
        return Decision(False, rule)
    if kind == "ordered":
        found = [_compare(x, y, rel_tol, leaf).equal for x, y in zip(a, g, strict=True)]
        if False in found:
            return Decision(False, rule)
        return Decision(None if None in found else True, rule)
    left, unsure = list(g), False
    for x in a:
        answers = [_compare(x, y, rel_tol, leaf).equal for y in left]
        if True in answers:
            del left[answers.index(True)]
        elif None in answers:
            unsure = True
        else:
            return Decision(False, rule)
    return Decision(None if unsure else True, rule)
