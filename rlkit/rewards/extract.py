"""Find the final answer in a response. Linear in the length of the text, with no backtracking, so it cannot hang."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rlkit.errors import ConfigError, nearest

RULES = ("boxed", "answer_tag", "hash", "phrase", "last_number")
"""In this order: the last ``\\boxed{...}``, the last ``<answer>...</answer>``, what follows the last ``####``, what follows the last "the
answer is", the last plain number."""

TAIL = 1 << 16  # characters at the end of a response that are searched: a final answer stands at the end

_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\[\s\S]|[{}]")
_UNBRACED = re.compile(r"\\(?:[A-Za-z]+|.)|[^\s\\$.,;]+")
_PHRASE = re.compile(
    r"answer\s{0,3}(?:is\b|are\b|=|:)|correct (?:option|choice)\s{0,3}(?:is\b|:)|答案\s{0,3}(?:是|为|應為|应为|:|：)|故选择?", re.IGNORECASE
)
_SENTENCE_END = re.compile(r"\n|[.。!?！？;；](?=\s|$)|[。！？；]")
_REASON = re.compile(r"(?<=\S)[,，]?\s+(?:since|because)\s|(?<=\S)[,，]?\s*因为")
_BEFORE_REASON = re.compile(r"\d|^\W{0,4}[A-J]\W{0,4}$")  # "yes, since ..." stays whole
_DISPLAY = re.compile(r"\\\[((?:(?!\\\]).)*)\\\]|\$\$([^$]*)\$\$", re.DOTALL)
_NUMBER = re.compile(r"(?<![\w.])[-+−]?\$?(?:\d{1,3}(?:,\d{3}){1,20}|\d+)(?:\.\d+)?(?:/\d+)?%?(?!\w)|(?<![\w.])[-+−]?\.\d+%?")


def check_rules(rules: Sequence[str]) -> tuple[str, ...]:
    """The rules as a tuple, in the order in which they are tried.

    Raises:
        ConfigError: an unknown rule, or none.
    """
    rules = (rules,) if isinstance(rules, str) else tuple(rules)
    for rule in rules:
        if rule not in RULES:
            raise ConfigError(f"There is no extraction rule {rule!r}{nearest(str(rule), RULES) or '.'} Known: {', '.join(RULES)}.")
    if not rules:
        raise ConfigError(f"rules is empty; name at least one of {', '.join(RULES)}.")
    return tuple(r for r in RULES if r in rules)


def extract(response: str, rules: Sequence[str] = RULES) -> tuple[str, str] | None:
    """(answer, rule that found it) by the first rule that finds something, or None. The answer is stripped and never empty."""
    text = response if len(response) <= TAIL else response[-TAIL:]
    for rule in rules:
        found = _FINDERS[rule](text)
        if found:
            return found, rule
    return None


def boxed(text: str) -> str | None:
    """The content of the last complete box: ``\\boxed{...}`` with nested braces, or ``\\boxed 5``."""
    last = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if last < 0:
        return None
    opened = _BOX.match(text, last)
    if opened is None:
        return None
    start = opened.end()
    if not text.startswith("{", start):
        token = _UNBRACED.match(text, start)
        return token.group().strip() if token else None
    end = _closing(text, start)
    if end is not None:
        return text[start + 1 : end].strip() or None
    return _last_closed_box(text)


def _closing(text: str, start: int) -> int | None:
    """Index of the brace that closes the one at ``start``; escaped braces do not count."""
    depth, i, n = 0, start, len(text)
    while i < n:
        c = text[i]
        if c == "\\":
            i += 2
            continue
        if c == "{":
            depth += 1
        elif c == "}":
            depth -= 1
            if depth == 0:
                return i
        i += 1
    return None


def _last_closed_box(text: str) -> str | None:
    """The box that was closed last, in one pass; the response was cut inside a later one."""
    stack: list[int] = []  # where each open brace's content starts, negative unless it belongs to a box
    span = None
    for m in _BRACE.finditer(text):
        token = m.group()
        if token == "}":
            if stack and (start := stack.pop()) > 0:
                span = (start, m.start())
        elif token.endswith("{") and len(token) != 2:  # "\{" is a printed brace
            stack.append(m.end() if len(token) > 1 else -1)
    return (text[slice(*span)].strip() or None) if span else None


def answer_tag(text: str) -> str | None:
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    return text[start + 8 : end].strip() or None if start >= 0 else None


def after_hash(text: str) -> str | None:
    at = text.rfind("####")
    if at < 0:
        return None
    return _trim(text[at + 4 :].lstrip().split("\n", 1)[0])


def after_phrase(text: str) -> str | None:
    found = None
    for found in _PHRASE.finditer(text):  # noqa: B007 - the last one
        pass
    if found is None:
        return None
    rest = text[found.end() : found.end() + 2000].lstrip(" :：*=\n")
    shown = _DISPLAY.match(rest)
    if shown is not None:
        return (shown[1] if shown[1] is not None else shown[2]).strip() or None
    end = _SENTENCE_END.search(rest)
    rest = rest[: end.start()] if end else rest
    reason = _REASON.search(rest)
    if reason and _BEFORE_REASON.search(head := rest[: reason.start()]) and head.count("(") == head.count(")"):
        rest = head
    return _trim(rest)


def last_number(text: str) -> str | None:
    for size in (200, TAIL):  # it is nearly always in the last line
        found = None
        start = max(0, len(text) - size)
        for found in _NUMBER.finditer(text, start):  # noqa: B007 - the last one
            pass
        if found is not None and (found.start() > start or start == 0):
            return found.group()
    return None


def _trim(answer: str) -> str | None:
    return answer.strip().strip("*").strip().rstrip(".。").strip() or None


_FINDERS = {"boxed": boxed, "answer_tag": answer_tag, "hash": after_hash, "phrase": after_phrase, "last_number": last_number}
