"""What expressions are worth, and whether two are worth the same, with bounded arithmetic: nothing here can hang.

`same` says None whenever `rlkit.rewards.expression` does not read one of them, or floating point cannot tell. Numbers are exact fractions
up to `MAX_BITS` bits and floats beyond.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Mapping
from fractions import Fraction

from rlkit.rewards.expression import FUNCTIONS, Expression, Node, Unsure, parse

MAX_BITS = 8192  # of an exact numerator or denominator
SAME, DIFFERENT = 1e-10, 1e-7  # relative differences below which floats are the same, above which they are not
CONSTANTS = frozenset(("c", "C", "k", "K"))  # names of arbitrary constants
_POSITIVE = (0.7310585, 1.3862943, 2.2360679, 3.6056931, 5.1961524)
_MIXED_SIGNS = (-1.2345678, 0.4567891, -2.7453921)

Value = Fraction | float | complex


class Undefined(Exception):
    """The expression has no value at this point: a division by zero, the logarithm of zero."""


def evaluate(node: Node, at: Mapping[str, float]) -> Value:
    """The value of a tree where its variables are ``at``.

    Raises:
        Undefined: there is none.
        Unsure: it is out of the range of floats, or of bounded factorials and binomials.
    """
    try:
        return _bounded(_evaluate(node, at))
    except ZeroDivisionError:
        raise Undefined from None
    except (OverflowError, ValueError, RecursionError):  # ValueError: cmath's domain errors
        raise Unsure from None


def _evaluate(node: Node, at: Mapping[str, float]) -> Value:
    kind = node[0]
    if kind == "number":
        return node[1]
    if kind == "name":
        return at[node[1]]
    if kind == "call":
        return _real(FUNCTIONS[node[1]](complex(_nonzero_for_log(node[1], _evaluate(node[2], at)))))
    values = [_bounded(_evaluate(child, at)) for child in node[1:]]
    if kind == "neg":
        return -values[0]
    if kind == "+":
        return values[0] + values[1]
    if kind == "*":
        return values[0] * values[1]
    if kind == "/":
        return values[0] / values[1]
    if kind == "^":
        return _power(*values)
    if kind == "root":
        return _root(*values)
    if kind == "abs":
        return values[0] if not isinstance(values[0], complex) and values[0] >= 0 else _modulus(values[0])
    return _factorial(values[0]) if kind == "!" else _binomial(*values)


def _modulus(value: Value) -> Value:
    return abs(value) if isinstance(value, complex) else -value


def _bounded(value: Value) -> Value:
    """The value, as a float when it is an exact number of too many bits."""
    if isinstance(value, Fraction):
        if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
            return float(value)
    elif cmath.isnan(value) or cmath.isinf(value):
        raise Unsure
    return value


def _real(value: complex) -> Value:
    return value.real if value.imag == 0 else value


def _nonzero_for_log(name: str, value: Value) -> Value:
    if value == 0 and name in ("ln", "log", "lg"):
        raise Undefined
    return value


def _power(base: Value, exponent: Value) -> Value:
    if isinstance(exponent, Fraction) and exponent.denominator == 1 and isinstance(base, Fraction):
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if bits * abs(exponent.numerator) <= MAX_BITS or abs(base) <= 1 == base.denominator:
            return base ** int(exponent) if abs(base) != 1 else (base if exponent.numerator % 2 else Fraction(1))
    if base == 0 and not isinstance(exponent, complex) and exponent <= 0:
        raise Undefined
    if isinstance(exponent, Fraction) and isinstance(base, Fraction) and base >= 0:
        return (
            _root(_power(base, Fraction(exponent.numerator)), Fraction(exponent.denominator))
            if exponent.denominator > 1
            else float(base) ** float(exponent)
        )
    return _real(complex(base) ** complex(exponent))


def _root(value: Value, degree: Value) -> Value:
    if not isinstance(degree, Fraction) or degree.denominator != 1 or not 1 <= degree <= 100:
        raise Unsure
    n = int(degree)
    if isinstance(value, complex):
        return value ** (1 / n)
    if isinstance(value, Fraction):
        top, bottom = _exact_root(abs(value.numerator), n), _exact_root(value.denominator, n)
        if top is not None and bottom is not None and (value >= 0 or n % 2):
            return Fraction(top if value >= 0 else -top, bottom)
    size = abs(float(value)) ** (1 / n)
    if value >= 0:
        return size
    return -size if n % 2 else _real(complex(float(value)) ** (1 / n))


def _exact_root(value: int, n: int) -> int | None:
    guess = math.isqrt(value) if n == 2 else round(float(value) ** (1 / n)) if value.bit_length() < 500 else -1
    return guess if guess >= 0 and guess**n == value else None


def _factorial(value: Value) -> Value:
    if not isinstance(value, Fraction) or value.denominator != 1 or not 0 <= value <= 150:
        raise Unsure
    return Fraction(math.factorial(int(value)))


def _binomial(n: Value, k: Value) -> Value:
    if not (isinstance(n, Fraction) and isinstance(k, Fraction) and n.denominator == k.denominator == 1 and 0 <= k <= n <= 1000):
        raise Unsure
    return Fraction(math.comb(int(n), int(k)))


def same(a: str, b: str, rel_tol: float = 0.0) -> bool | None:
    """Whether two expressions are equal; None when this module cannot tell.

    Without variables the values are compared: exactly when both are rational, to `rel_tol` when one side holds a decimal. With variables
    the values at fixed points are. A difference where a variable is negative makes the answer None rather than False, since it may come
    from the choice of a branch; where both sides leave the reals it does not count.
    """
    x, y = parse(a), parse(b)
    if x is None or y is None or x.log != y.log:
        return None
    names = sorted(x.names | y.names)
    if not names:
        return _same_at(x, y, {}, rel_tol if x.decimal or y.decimal else 0.0)[0]
    hard, renamed = 0, _renamed_constant(x.names, y.names)
    for k, point in enumerate((*_POSITIVE, *_MIXED_SIGNS)):
        at = {name: point * (1 + 0.37 * j) for j, name in enumerate(names)}
        if renamed is not None:
            at[renamed[1]] = at[renamed[0]]
        found, real = _same_at(x, y, at, 0.0)
        if found is None:
            continue
        firm = k < len(_POSITIVE) and (real or x.imaginary or y.imaginary)
        if not found and firm:
            return False
        if not found and (real is not None or x.imaginary or y.imaginary):
            return None
        hard += bool(firm)
    return True if hard >= 3 else None


def _renamed_constant(x: frozenset[str], y: frozenset[str]) -> tuple[str, str] | None:
    """The one arbitrary constant that has another name on the other side: ``x^2 + C`` and ``x^2 + c``."""
    only_x, only_y = x - y, y - x
    if len(only_x) == len(only_y) == 1 and only_x | only_y <= CONSTANTS:
        return next(iter(only_x)), next(iter(only_y))
    return None


def _same_at(x: Expression, y: Expression, at: Mapping[str, float], rel_tol: float) -> tuple[bool | None, bool | None]:
    """(same at this point or None, whether both values are real); the second is None where neither is."""
    try:
        u, v = evaluate(x.tree, at), evaluate(y.tree, at)
    except (Undefined, Unsure):
        return None, False
    outside = isinstance(u, complex) + isinstance(v, complex)
    real = None if outside == 2 else outside == 0
    if isinstance(u, Fraction) and isinstance(v, Fraction):
        return u == v or abs(u - v) <= Fraction(rel_tol) * max(abs(u), abs(v)), real
    try:
        p, q = complex(u), complex(v)
    except OverflowError:  # an exact number beyond the floats
        return None, False
    difference, size = abs(p - q), max(abs(p), abs(q))
    if difference <= max(SAME, rel_tol) * size:
        return True, real
    return (None if difference <= DIFFERENT * size or size < 1e-12 else False), real


def proportional(a: str, b: str, *, positive: bool = False) -> bool | None:
    """Whether two expressions with variables differ by a constant factor only, which must be above 0 when ``positive``."""
    x, y = parse(a), parse(b)
    if x is None or y is None or x.log != y.log or not x.names:
        return None
    if x.names != y.names:
        return None if _renamed_constant(x.names, y.names) else False
    names, ratios = sorted(x.names), list[float]()
    for point in (*_POSITIVE, *_MIXED_SIGNS):
        try:
            at = {name: point * (1 + 0.37 * j * (1 + point / 7)) for j, name in enumerate(names)}
            p, q = complex(evaluate(x.tree, at)), complex(evaluate(y.tree, at))
        except (Undefined, Unsure, OverflowError):
            continue
        if not p.imag and not q.imag and abs(p) > 1e-9 and abs(q) > 1e-9:
            ratios.append(p.real / q.real)
    if len(ratios) < 4:
        return None
    spread, size = max(ratios) - min(ratios), max(abs(r) for r in ratios)
    if spread > DIFFERENT * size:
        return False
    return (ratios[0] > 0 or not positive) if spread <= 1e-9 * size else None
