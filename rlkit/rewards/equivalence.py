"""Decide whether two final answers are the same, structure first: text, number, choice, then list, tuple, interval or set by elements.

What is left are single expressions, which go to a ``leaf`` function: in the calling process it is absent (the answer is then "not
decided here"), in a worker process of the pool it is math-verify's symbolic comparison, which may hang and is killed then.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from rlkit.rewards import numeric

MAX_LENGTH = 300  # characters of an answer, or 8 times the gold answer's when that is more: a right one is not that much longer
MAX_DEPTH = 40  # nested brackets

Leaf = Callable[[str, str], bool]


class Decision(NamedTuple):
    """``equal`` is None when only the symbolic comparison can tell."""

    equal: bool | None
    rule: str


_WRAP = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))
_PUNCTUATION = str.maketrans("，：；（）【】［］｛｝。％＝＋－、！", ",:;()[][]{}.%=+-,!")
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|rm|bf|operatorname|bm|boldsymbol)\s*\{([^{}]*)\}")
_DROP = re.compile(
    r"\\left(?![a-zA-Z])|\\right(?![a-zA-Z])|\\[,!;:>]|\\q?quad\b|\\displaystyle|\\bigl?|\\bigr|\\Bigl?|\\Bigr|[\u200b\u200e\ufeff]"
)
_LHS = re.compile(
    r"\\?[A-Za-z]\w{0,8}(?:_\{?\w{1,8}\}?)?'*(?:\s*\(\\?\w{1,8}(?:,\s*\w{1,8}){0,3}\))?|(?:[A-Za-z]{1,20} ){0,6}[A-Za-z]{1,20}"
)
_CHOICE = re.compile(r"\(?([A-Ja-j])\)?(?:[.:)、]\s*.*|\s*\)|)", re.DOTALL)
_WORDS = re.compile(r"[A-Za-z][A-Za-z'’\-]*(?:[ ,.&-]+[A-Za-z][A-Za-z'’\-]*)*\.?")
_FUNCTIONS = {"sin", "cos", "tan", "cot", "sec", "csc", "log", "exp", "sqrt", "arcsin", "arccos", "arctan", "frac", "sinh", "cosh", "tanh"}
_OPEN, _CLOSE = "([{", ")]}"
_PM = re.compile(r"\\pm|±|\+/-|\+-")


@lru_cache(maxsize=8192)
def clean(text: str) -> str:
    """The answer without what only changes its looks: delimiters, spacing, full-width punctuation, ``\\text``, bold, a final stop."""
    text = text.translate(_PUNCTUATION).strip()
    for _ in range(4):
        before = text
        text = text.strip("*` \t\r\n").rstrip(".") if not text.endswith("...") else text.strip()
        for left, right in _WRAP:
            if text.startswith(left) and text.endswith(right) and len(text) >= len(left) + len(right):
                inner = text[len(left) : -len(right)]
                if left not in inner:
                    text = inner.strip()
        if text.startswith(("\\boxed{", "\\fbox{")) and text.endswith("}"):
            text = text[text.index("{") + 1 : -1]
        if text == before:
            break
    text = _DROP.sub(" ", text) if "\\" in text or "\u200b" in text else text
    if "{" in text:
        text = _TEXT.sub(r" \1 ", text)
    text = text.replace("dfrac", "frac").replace("tfrac", "frac").replace("\\lbrace", "\\{").replace("\\rbrace", "\\}")
    return " ".join(text.split())


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


def compare(answer: str, gold: str, *, rel_tol: float = 1e-4, leaf: Leaf | None = None) -> Decision:
    """Whether ``answer`` is the same final answer as ``gold``, and the rule that decided."""
    if answer == gold:
        return Decision(True, "exact")
    number, target = numeric.parse(answer), numeric.parse(gold)
    if number is not None and target is not None:
        return Decision(numeric.same(number, target, rel_tol), "numeric")
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
    number, target = numeric.parse(a), numeric.parse(g)
    if number is not None and target is not None:
        return Decision(numeric.same(number, target, rel_tol), "numeric")
    if len(g) <= 3 and (want := _CHOICE.fullmatch(g)) and want[1].isupper() and g.strip("().: ") == want[1]:
        got = _CHOICE.fullmatch(a)
        if got is not None:
            return Decision(got[1].upper() == want[1], "choice")
    if (equation := _sides(a, g)) is not None:
        return _compare(*equation, rel_tol, leaf)
    text = _as_text(a, g)
    if text is not None:
        return text
    parts = _elements(a, g)
    if parts is not None:
        return _compare_elements(*parts, rel_tol, leaf)
    if target is not None and _is_words(a):
        return Decision(False, "text")
    if numeric.out_of_bounds(a) and (target is not None or numeric.out_of_bounds(g)):
        return Decision(False, "numeric")
    if leaf is None:
        return Decision(None, "symbolic")
    return Decision(leaf(a, g), "symbolic")


def _sides(a: str, g: str) -> tuple[str, str] | None:
    """``x = 5`` against ``5``, or against ``x = 5`` written otherwise: the right-hand sides."""
    left_a, right_a = _split_equation(a)
    left_g, right_g = _split_equation(g)
    if left_a is not None and left_g is not None:
        same = left_a.replace(" ", "").lower() == left_g.replace(" ", "").lower()
        return (right_a, right_g) if same else None
    if left_a is not None and "=" not in g:
        return right_a, g
    if left_g is not None and "=" not in a:
        return a, right_g
    return None


def _split_equation(text: str) -> tuple[str | None, str]:
    """(left-hand side, right-hand side) when the left is a name, such as ``x``, ``f(x)``, ``S_n`` or words; else (None, text)."""
    left, sign, right = text.partition("=")
    left, right = left.strip(), right.strip()
    if not sign or not right or "=" in right or left.endswith(("<", ">", "!", "\\")) or _LHS.fullmatch(left) is None:
        return None, text
    return left, right


def _is_words(text: str) -> bool:
    """Prose rather than a formula: letters only, with a word of three letters or more that is no function."""
    if _WORDS.fullmatch(text) is None:
        return False
    words = re.split(r"[^A-Za-z]+", text.lower())
    return any(len(w) >= 3 and w not in _FUNCTIONS for w in words)


def _as_text(a: str, g: str) -> Decision | None:
    if not (_is_words(g) and (_is_words(a) or not any(c in a for c in "\\^_{}="))):
        return None
    return Decision(_letters(a) == _letters(g), "text")


def _letters(text: str) -> str:
    words = re.findall(r"[a-z0-9]+", text.lower().replace("’", "").replace("'", ""))
    return " ".join(w for w in words if w not in ("the", "a", "an"))


def _elements(a: str, g: str) -> tuple[str, list[str], list[str]] | None:
    """(kind, elements of a, elements of g) when both are of one structure; kind is "ordered" or "set". ("differ", [], []) when not."""
    a, g = _expand_pm(a), _expand_pm(g)
    left_a, inside_a, right_a = _bracket(a)
    left_g, inside_g, right_g = _bracket(g)
    items_a, items_g = _split(inside_a), _split(inside_g)
    if len(items_a) < 2 and len(items_g) < 2:
        if left_a == left_g == "\\{":
            return "set", items_a, items_g
        return None
    if "\\cup" in a or "\\cup" in g or "\\begin" in a or "\\begin" in g or "∪" in a or "∪" in g:
        return None
    if "" in items_a or "" in items_g:
        return None
    unordered = ("", "\\{")
    if left_a in unordered and left_g in unordered:
        return "set", items_a, items_g
    if (left_a, right_a) == (left_g, right_g):
        return "ordered", items_a, items_g
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


def _split(text: str) -> list[str]:
    """Cut at commas and semicolons (and "and", "or") outside of brackets; a comma inside of a number such as 1,234 does not cut."""
    if numeric.parse(text) is not None:
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
