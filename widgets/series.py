"""Columns of numbers that grow by rows, and how they cross to the browser.

A `Table` holds one float64 array a column. Two values that are no numbers mean different things: NaN is "not there" (a metric that this
step did not log), infinity is "was not finite" (NaN or infinite where it was computed). Both are drawn as gaps, the second is flagged.

On the wire a whole column is packed once (`pack`), later rows come as plain float64 (`Table.rows`).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence

import numpy as np

NOT_FINITE = math.inf
FIRST_ROWS = 256


class Table:
    """Rows of a few named columns. ``x`` names the column that orders the rows."""

    def __init__(self, columns: Sequence[str] = (), labels: Sequence[str] = ()) -> None:
        self._data: dict[str, np.ndarray] = {name: np.full(FIRST_ROWS, np.nan) for name in columns}
        self.labels = list(labels)  # what the numbers of a column that holds codes stand for
        self.n = 0
        self.told = 0  # rows that the browser has and that still count
        self._cut = False  # it has more than those
        self.not_finite: dict[str, int] = {}  # column -> how many of its values are flagged so; columns without are left out

    @property
    def names(self) -> list[str]:
        return list(self._data)

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, name: str) -> np.ndarray:
        """(n,) float64, a view. A column that was never there is all NaN."""
        return self._data[name][: self.n] if name in self._data else np.full(self.n, np.nan)

    @property
    def news(self) -> bool:
        """Whether the browser has other rows than this."""
        return self._cut or self.told != self.n

    def tell(self) -> None:
        """The browser has been told everything."""
        self.told, self._cut = self.n, False

    def append(self, row: Mapping[str, float]) -> None:
        """Add a row; columns that it names for the first time are NaN before it."""
        if self._data and self.n == len(next(iter(self._data.values()))):
            self._data = {name: np.concatenate([old, np.full(len(old), np.nan)]) for name, old in self._data.items()}
        room = len(next(iter(self._data.values()), np.empty(FIRST_ROWS)))
        for name, value in row.items():
            if name not in self._data:
                self._data[name] = np.full(room, np.nan)
            self._data[name][self.n] = value
            if value == NOT_FINITE:
                self.not_finite[name] = self.not_finite.get(name, 0) + 1
        self.n += 1

    def cut(self, n: int) -> None:
        """Keep the first ``n`` rows."""
        if n >= self.n:
            return
        for name, column in self._data.items():
            if name in self.not_finite:
                self.not_finite[name] -= int(np.isposinf(column[n : self.n]).sum())
            column[n : self.n] = np.nan
        self.not_finite = {name: count for name, count in self.not_finite.items() if count}
        self.n = min(self.n, n)
        self._cut |= self.told > self.n
        self.told = min(self.told, self.n)

    def thin(self, limit: int) -> None:
        """When there are more than ``limit`` rows, keep every second of the older three quarters."""
        if self.n <= limit:
            return
        old = self.n * 3 // 4
        kept = np.concatenate([np.arange(0, old, 2), np.arange(old, self.n)])
        self._data = {name: np.concatenate([column[kept], np.full(FIRST_ROWS, np.nan)]) for name, column in self._data.items()}
        self.n, self.told = len(kept), 0

    def rows(self, since: int) -> bytes:
        """Rows from ``since`` on, row by row, as little-endian float64: (rows, columns)."""
        return np.stack([column[since : self.n] for column in self._data.values()], axis=1).astype("<f8").tobytes()


def finite(value: object) -> float:
    """A metric's value as a `Table` holds it. Null in the log is a value that was not finite."""
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return NOT_FINITE


def pack(values: np.ndarray, exact: bool = False) -> bytes:
    """A column for the wire, bytes of equal weight side by side and deflated.

    ``exact`` keeps all eight bytes of a float64 (times, steps). Else the upper three of a float32, rounded to nearest: 16 significant bits,
    a relative error of at most 2^-17, which is less than a curve or a label shows. NaN and infinity stay what they are.
    """
    if exact:
        planes = values.astype("<f8").view(np.uint8).reshape(-1, 8)
    else:
        with np.errstate(over="ignore"):
            words = values.astype("<f4").view(np.uint32)
        special = (words & 0x7F800000) == 0x7F800000  # NaN and infinity: rounding must not carry into their sign
        words = np.where(special, words, words + 0x80)
        planes = words.astype("<u4").view(np.uint8).reshape(-1, 4)[:, 1:]
    return zlib.compress(np.ascontiguousarray(planes.T).tobytes(), 1)


def unpack(raw: bytes, n: int, exact: bool = False) -> np.ndarray:
    """The inverse of `pack`, as the browser does it: (n,) float64."""
    width = 8 if exact else 3
    planes = np.frombuffer(zlib.decompress(raw), np.uint8).reshape(width, n).T
    if exact:
        return np.ascontiguousarray(planes).view("<f8").reshape(n)
    words = np.zeros((n, 4), np.uint8)
    words[:, 1:] = planes
    return words.view("<f4").reshape(n).astype(np.float64)
