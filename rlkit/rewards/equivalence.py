"""Decide whether two final answers are the same, structure first: text, number, choice, inequality, then list, tuple, interval, set,
union or matrix by elements.

What is left are single expressions and equations. `rlkit.rewards.values` compares them by value. Those that it cannot read go to a
``leaf`` function: in the calling process it is absent (the answer is then "not decided here"), in a worker process of the pool it is
math-verify's symbolic comparison, which may hang and is killed then.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rlkit.rewards import expression, numeric, values
from rlkit.rewards.cleaning import clean, depth
from rlkit.rewards.ranges import RELATION, UNKNOWN, as_ranges, as_relations, difference, plain_name
from rlkit.rewards.structure import bracket, elements, matrices, split, unions

MAX_LENGTH = 300  # characters of an answer, or 8 times the gold answer's when that is more: a right one is not that much longer
MAX_DEPTH = 40  # nested brackets
Leaf = Callable[[str, str], bool]


class Decision(NamedTuple):
    """``equal`` is None when only the symbolic comparison can tell."""

    equal: bool | None
    rule: str


_LHS = re.compile(
    r"\([A-Za-z],\s*[A-Za-z](?:,\s*[A-Za-z])?\)|"
    r"\\?[A-Za-z]\w{0,8}(?:_\{?\w{1,8}\}?)?'*(?:\s*\(\\?\w{1,8}(?:,\s*\w{1,8}){0,3}\))?|(?:[A-Za-z]{1,20} ){0,6}[A-Za-z]{1,20}"
)
_CHOICE = re.compile(r"\(?\s*([A-Ja-j])\)?(?:[.:)、]\s*.*|\s*\)|)", re.DOTALL)
_WORDS = re.compile(r"[A-Za-z][A-Za-z'’\-]*(?:[ ,.&-]+[A-Za-z][A-Za-z'’\-]*)*\.?")
_FUNCTIONS = {"sin", "cos", "tan", "cot", "sec", "csc", "log", "exp", "sqrt", "arcsin", "arccos", "arctan", "frac", "sinh", "cosh", "tanh"}


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
    if (relations := as_relations(a, g)) is not None:
        return _compare(*relations, rel_tol, leaf) if relations else Decision(False, "kind")
    if (ranges := as_ranges(a, g)) is not None:
        return _compare(*ranges, rel_tol, leaf)
    if (equation := _sides(a, g)) is not None:
        return _compare(*equation, rel_tol, leaf)
    if _other_unknowns(a, g):
        return Decision(False, "kind")
    text = _as_text(a, g)
    if text is not None:
        return text
    parts = matrices(a, g) or unions(a, g) or elements(a, g)
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
    if RELATION.search(text):
        return "relation"
    if text.startswith(_BRACKETS) and ("\\cup" in text or "∪" in text):
        return "union"
    opening, inside, _ = bracket(text)
    if opening in ("(", "[") and len(split(inside, True)) > 1:
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
        said, commands = plain_name(_COMMAND.sub(" ", other)), set(_COMMAND.findall(other))
        for side in sides:
            if None in sides or side is None:
                break
            names = side.names - values.CONSTANTS
            if any((name not in commands if name[0] == "\\" else name.lower() not in said) for name in names if "\\" not in name[1:]):
                return True
    return False


def _by_value(a: str, g: str, rel_tol: float) -> bool | None:
    """As `_same_value`, and False where one side has a variable that the other lacks."""
    found = _same_value(a, g, rel_tol)
    return False if found is None and _lacks_a_variable(a, g) else found


def _same_value(a: str, g: str, rel_tol: float) -> bool | None:
    """The verdict on two expressions, or on two equations that are multiples of each other; None when it takes a symbolic comparison."""
    if RELATION.search(a) or RELATION.search(g):
        x, y = difference(a), difference(g)
        if x is None or y is None:
            return None
        return x[1] == y[1] and values.proportional(x[0], y[0], positive=x[1] != "!=")
    if "=" not in a and "=" not in g:
        return values.same(a, g, rel_tol)
    left_a, sign_a, right_a = a.partition("=")
    left_g, sign_g, right_g = g.partition("=")
    if bool(sign_a) != bool(sign_g):  # the equation of a curve is no value; "AB = 5" may be one
        left = left_a if sign_a else left_g
        return False if "^" in left and expression.parse(left) is not None else None
    if "=" in right_a or "=" in right_g or left_a[-1:] in tuple("<>!\\") or left_g[-1:] in tuple("<>!\\"):
        return None
    found = values.proportional(f"({left_a})-({right_a})", f"({left_g})-({right_g})")
    if found is None and not any((e := expression.parse(t)) is None or e.names for t in (right_a, right_g)):
        return False if values.same(right_a, right_g, rel_tol) is False else None  # "|A| = -6": what the left is worth differs
    return found


def _sides(a: str, g: str) -> tuple[str, str] | None:
    """``x = 5`` against ``5``, or against ``x = 5`` written otherwise: the right-hand sides."""
    left_a, right_a = _split_equation(a)
    left_g, right_g = _split_equation(g)
    if left_a is not None and left_g is not None:
        x, y = plain_name(left_a), plain_name(left_g)
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
    x, y = plain_name(left_a), plain_name(left_g)
    return x != y and x not in plain_name(_COMMAND.sub(" ", right_g)) and y not in plain_name(_COMMAND.sub(" ", right_a))


def _split_equation(text: str) -> tuple[str | None, str]:
    """(left-hand side, right-hand side) when the left is a name, such as ``x``, ``f(x)``, ``S_n`` or words; else (None, text)."""
    left, sign, right = text.partition("=")
    left, right = left.strip(), right.strip()
    if not sign or not right or "=" in right or left.endswith(("<", ">", "!", "\\")):
        return None, text
    if _LHS.fullmatch(left) is None:
        if UNKNOWN.fullmatch(right) and numeric.parse(left) is not None:  # "5 = x"
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
