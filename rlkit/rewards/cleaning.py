"""A final answer without what only changes its looks."""

from __future__ import annotations

import re
from functools import lru_cache

_WRAP = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))
_PUNCTUATION = str.maketrans("，：；（）【】［］｛｝。％＝＋－、！＜＞０１２３４５６７８９", ",:;()[][]{}.%=+-,!<>0123456789")
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|rm|bf|operatorname|bm|boldsymbol)\s*\{([^{}]*)\}")
_DROP = re.compile(
    r"\\left(?![a-zA-Z])|\\right(?![a-zA-Z])|\\[,!;:>]|(?<!\\)\\(?=\s)|\\q?quad\b|\\displaystyle|\\bigl?|\\bigr|\\Bigl?|\\Bigr|[\u200b\u200e\ufeff]"
)
_LISTED = re.compile(r"^([A-Ja-j])、(?!\s*[A-Ja-j]\s*(?:[、和或]|$))\s*")
OPEN, CLOSE = "([{", ")]}"
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
        if c in OPEN:
            level += 1
            deepest = max(deepest, level)
        elif c in CLOSE:
            level -= 1
    return deepest
