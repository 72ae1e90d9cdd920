"""Single LaTeX expressions, read by a small grammar into trees. `rlkit.rewards.values` computes and compares them.

`parse` says None whenever the grammar does not know something or a reading is ambiguous. Text is never evaluated as code.
"""

from __future__ import annotations

import cmath
import math
import re
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

MAX_TOKENS = 250
MAX_NESTING = 40

Node = tuple[Any, ...]


class Unsure(Exception):
    """The expression is none that this module reads, or its value cannot be computed here."""


class Expression(NamedTuple):
    """What `parse` reads: the tree, its variables, and how it was written."""

    tree: Node
    names: frozenset[str]
    decimal: bool  # holds a number with a decimal point
    imaginary: bool
    log: bool  # holds a logarithm without a base, which may mean 10 or e


_GREEK = {
    "alpha", "beta", "gamma", "delta", "epsilon", "varepsilon", "zeta", "eta", "theta", "vartheta", "kappa", "lambda", "mu", "nu", "xi",
    "rho", "sigma", "tau", "phi", "varphi", "chi", "psi", "omega", "Gamma", "Delta", "Theta", "Lambda", "Sigma", "Phi", "Psi", "Omega",
    "ell", "hbar",
}  # fmt: skip
FUNCTIONS: dict[str, Callable[[complex], complex]] = {
    "sin": cmath.sin, "cos": cmath.cos, "tan": cmath.tan, "sinh": cmath.sinh, "cosh": cmath.cosh, "tanh": cmath.tanh,
    "arcsin": cmath.asin, "arccos": cmath.acos, "arctan": cmath.atan, "ln": cmath.log, "log": cmath.log, "exp": cmath.exp,
    "lg": cmath.log10, "cot": lambda z: 1 / cmath.tan(z), "sec": lambda z: 1 / cmath.cos(z), "csc": lambda z: 1 / cmath.sin(z),
}  # fmt: skip
_INVERSE = {"sin": "arcsin", "cos": "arccos", "tan": "arctan"}
_TOKEN = re.compile(
    r"\s+|(?P<number>\d{1,3}(?:(?:,|\{,\})\d{3})+(?!\d)|\d+(?:\.\d+)?|\.\d+)"
    r"|\\(?P<command>[A-Za-z]+)|(?P<word>[A-Za-z]+)|(?P<sign>[-+*/^_!|(){}\[\]°×÷·√π−])|(?P<bad>.)",
    re.DOTALL,
)
_SIGNS = {"×": "*", "÷": "/", "·": "*", "−": "-"}
_COMMANDS = {"cdot": "*", "times": "*", "div": "/", "ast": "*", "lvert": "|", "rvert": "|", "vert": "|", "lbrack": "[", "rbrack": "]"}
_IGNORED = {"left", "right", "displaystyle", "limits", "quad", "qquad", "big", "Big", "bigl", "bigr", "Bigl", "Bigr"}
_DEGREES = re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))|\\degree(?![A-Za-z])")
_TAKE_DEGREES = {"sin", "cos", "tan", "cot", "sec", "csc"}
_PAIRS = {"(": ")", "[": "]", "{": "}"}


def _tokens(text: str) -> list[tuple[str, str]]:
    """(kind, text) of each token; kinds: number, name, function, command, sign.

    Raises:
        Unsure: a character or a command that the grammar does not have, or too many of them.
    """
    out: list[tuple[str, str]] = []
    text = _DEGREES.sub("°", text) if "\\" in text else text
    for m in _TOKEN.finditer(text):
        kind, value = m.lastgroup, m.group()
        if kind is None:
            continue
        if len(out) > MAX_TOKENS or kind == "bad":
            raise Unsure
        if kind == "number":
            out.append((kind, value.replace("{,}", "").replace(",", "")))
        elif kind == "sign":
            out.append(("command", "pi") if value == "π" else ("command", "sqrt") if value == "√" else (kind, _SIGNS.get(value, value)))
        elif kind == "word":
            out.extend(_word(value))
        else:
            name = m["command"]
            if name in _COMMANDS:
                out.append(("sign", _COMMANDS[name]))
            elif name in FUNCTIONS:
                out.append(("function", name))
            elif name in _GREEK:
                out.append(("name", "\\" + name))
            elif name in ("frac", "dfrac", "tfrac", "cfrac", "sqrt", "binom", "dbinom", "pi"):
                out.append(("command", name.lstrip("dtc") if name.endswith("frac") else name.removeprefix("d")))
            elif name not in _IGNORED:
                raise Unsure
    return out


def _word(word: str) -> list[tuple[str, str]]:
    """Letters without a backslash: a function's name, ``pi``, ``sqrt``, or up to three variables side by side."""
    if word in FUNCTIONS:
        return [("function", word)]
    if word in ("pi", "sqrt"):
        return [("command", word)]
    if len(word) > 3:
        raise Unsure
    return [("name", letter) for letter in word]


class _Parser:
    """Recursive descent over the tokens of one expression. Every method raises `Unsure` at what it does not know."""

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self.tokens, self.at, self.level, self.bars, self.angle = tokens, 0, 0, 0, False
        self.names: set[str] = set()
        self.decimal = self.imaginary = self.log = False

    def peek(self) -> tuple[str, str]:
        return self.tokens[self.at] if self.at < len(self.tokens) else ("end", "")

    def take(self, sign: str) -> bool:
        if self.peek() != ("sign", sign):
            return False
        self.at += 1
        return True

    def need(self, sign: str) -> None:
        if not self.take(sign):
            raise Unsure

    def sum(self) -> Node:
        self.level += 1
        if self.level > MAX_NESTING:
            raise Unsure
        node = self.product()
        while self.peek() in (("sign", "+"), ("sign", "-")):
            minus = self.peek()[1] == "-"
            self.at += 1
            right = self.product()
            node = ("+", node, ("neg", right) if minus else right)
        self.level -= 1
        return node

    def product(self) -> Node:
        negative = False
        while self.peek() in (("sign", "+"), ("sign", "-")):
            negative ^= self.peek()[1] == "-"
            self.at += 1
        node = self.power()
        divided = False
        while True:
            if self.take("*"):
                node, divided = ("*", node, self.signed()), False
            elif self.take("/"):
                node, divided = ("/", node, self.signed()), True
            elif self.starts_factor():
                if divided:  # 1/2x: half of x, or one over 2x
                    raise Unsure
                node = ("*", node, self.power())
            else:
                return ("neg", node) if negative else node

    def signed(self) -> Node:
        return ("neg", self.power()) if self.take("-") else self.power()

    def starts_factor(self) -> bool:
        kind, text = self.peek()
        if kind == "number":
            before = self.tokens[self.at - 1]
            if before[0] == "number":  # "2 3"
                raise Unsure
            return True
        return kind in ("name", "function", "command") or (kind == "sign" and (text in "([{" or (text == "|" and not self.bars)))

    def power(self) -> Node:
        node = self.atom()
        while self.take("!"):
            node = ("!", node)
        if self.angle and self.take("°"):  # elsewhere a degree sign may be a unit
            return ("*", node, ("number", math.pi / 180))
        if self.take("^"):
            node = ("^", node, self.exponent())
            if self.peek() in (("sign", "^"), ("sign", "!")):
                raise Unsure
        return node

    def exponent(self) -> Node:
        """What follows ``^`` (or ``_``, for a base): a group, a letter, or a whole number as people write."""
        if self.take("-"):
            return ("neg", self.exponent())
        if self.peek()[0] == "number" and len(self.peek()[1]) > 1:  # 2^10: LaTeX reads 2^1 0
            node = self.atom()
            if self.starts_factor():
                raise Unsure
            return node
        return self.atom()

    def group(self) -> Node:
        """``{...}``, or one token as in ``\\frac12``."""
        if self.take("{"):
            node = self.sum()
            self.need("}")
            return node
        kind, text = self.peek()
        if kind == "number" and text.isdigit():
            self.at += 1
            if len(text) > 1:
                self.tokens.insert(self.at, ("number", text[1:]))
            return ("number", Fraction(text[0]))
        if kind in ("name", "command"):
            return self.atom()
        raise Unsure

    def atom(self) -> Node:
        self.level += 1
        if self.level > MAX_NESTING:
            raise Unsure
        node = self._atom()
        self.level -= 1
        return node

    def _atom(self) -> Node:
        kind, text = self.peek()
        self.at += 1
        if kind == "number":
            if len(text) > 500:
                raise Unsure
            self.decimal |= "." in text
            if "." not in text and self._fraction_of_digits():  # 2\frac{1}{2}: two and a half, or a product
                raise Unsure
            return ("number", Fraction(text))
        if kind == "name":
            return self._name(text)
        if kind == "function":
            return self._function(text)
        if kind == "command":
            return self._command(text)
        if kind == "sign" and text in _PAIRS:
            bars, self.bars = self.bars, 0
            node = self.sum()
            self.need(_PAIRS[text])
            self.bars = bars
            return node
        if kind == "sign" and text == "|" and not self.bars:
            self.bars += 1
            node = self.sum()
            self.need("|")
            self.bars -= 1
            return ("abs", node)
        raise Unsure

    def _fraction_of_digits(self) -> bool:
        if self.peek() != ("command", "frac"):
            return False
        rest = [t for t in self.tokens[self.at + 1 : self.at + 7] if t not in (("sign", "{"), ("sign", "}"))]
        return len(rest) > 0 and all(kind == "number" for kind, _ in rest[:2])

    def _name(self, name: str) -> Node:
        if self.take("_"):
            if self.take("{"):
                inside = []
                while self.peek()[0] in ("number", "name"):
                    inside.append(self.peek()[1])
                    self.at += 1
                self.need("}")
                name = f"{name}_{''.join(inside)}"
            elif self.peek()[0] in ("number", "name"):
                name = f"{name}_{self.peek()[1]}"
                self.at += 1
            else:
                raise Unsure
        elif name == "e":
            return ("number", math.e)
        elif name == "i":
            self.imaginary = True
            return ("number", 1j)
        if self.peek() == ("sign", "(") and self.tokens[self.at + 2 : self.at + 3] == [("sign", ")")]:  # f(0): a function's value
            raise Unsure
        self.names.add(name)
        return ("name", name)

    def _command(self, name: str) -> Node:
        if name == "pi":
            return ("number", math.pi)
        if name == "sqrt":
            degree: Node = ("number", Fraction(2))
            if self.take("["):
                degree = self.sum()
                self.need("]")
            if self.take("("):  # sqrt(2)
                inside = self.sum()
                self.need(")")
                return ("root", inside, degree)
            return ("root", self.group(), degree)
        top = self.group()
        return ("/" if name == "frac" else "binom", top, self.group())

    def _function(self, name: str) -> Node:
        base = power = None
        if self.take("_"):
            if name != "log":
                raise Unsure
            base = self.exponent() if self.peek() != ("sign", "{") else self.group()
        if self.take("^"):
            power = self.exponent()
            if power == ("neg", ("number", Fraction(1))):
                if name not in _INVERSE:
                    raise Unsure
                name, power = _INVERSE[name], None
        if name == "log" and base is None:
            self.log = True
        outside, self.angle = self.angle, name in _TAKE_DEGREES
        node: Node = ("call", name, self._argument())
        self.angle = outside
        if base is not None:
            node = ("/", node, ("call", "log", base))
        return ("^", node, power) if power is not None else node

    def _argument(self) -> Node:
        if self.peek() in (("sign", "("), ("sign", "[")):
            node = self.atom()
            if self.peek() in (("sign", "^"), ("sign", "!")):  # sin(x)^2
                raise Unsure
            return node
        node = self.power()
        while self.starts_factor() and self.peek()[0] != "function":
            if self.peek() in (("sign", "("), ("sign", "[")):  # sin x(1 + y)
                raise Unsure
            node = ("*", node, self.power())
        if self.peek() == ("sign", "/"):  # sin x/2
            raise Unsure
        return node


@lru_cache(maxsize=8192)
def parse(text: str) -> Expression | None:
    """The expression that ``text`` is, or None when the grammar does not read it in exactly one way."""
    try:
        parser = _Parser(_tokens(text))
        tree = parser.sum()
    except (Unsure, RecursionError):  # RecursionError: the caller's own stack was deep already
        return None
    if parser.at < len(parser.tokens):
        return None
    return Expression(tree, frozenset(parser.names), parser.decimal, parser.imaginary, parser.log)
