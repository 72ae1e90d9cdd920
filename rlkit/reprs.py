"""Small pieces for text and HTML reprs. They format what they are given and call nothing."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any


class Shown:
    """Base of what a notebook shows as the text of its repr: with this, its output has an HTML part as well."""

    def _repr_html_(self) -> str:
        return f"<code style='white-space:pre-wrap'>{html.escape(repr(self))}</code>"


def number(value: float) -> str:
    """A number for people: ``0.000123`` -> ``1.23e-04``, ``15300`` -> ``15,300``."""
    if value == 0:
        return "0"
    if abs(value) >= 999.5:  # three digits would round up to four
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 1e-3 else f"{value:.2e}"


def gib(n_bytes: float) -> str:
    """Bytes as GiB, one decimal."""
    return f"{n_bytes / 2**30:.1f} GiB"


def duration(seconds: float) -> str:
    """``0.83 s``, ``12 s``, ``3 min 20 s``, ``2 h 5 min``."""
    if seconds < 9.95:
        return f"{seconds:.1f} s" if seconds >= 0.95 else f"{seconds:.2f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min" + (f" {whole % 60} s" if whole % 60 else "")
    minutes = round(seconds / 60)
    return f"{minutes // 60} h" + (f" {minutes % 60} min" if minutes % 60 else "")


def html_table(header: Sequence[str], rows: Iterable[Sequence[Any]], caption: str = "") -> str:
    """A plain table; every cell is escaped."""
    head = "".join(f"<th style='text-align:left'>{html.escape(str(h))}</th>" for h in header)
    body = "".join(
        "<tr>" + "".join(f"<td style='text-align:left;white-space:pre-wrap'>{html.escape(str(c))}</td>" for c in row) + "</tr>"
        for row in rows
    )
    title = f"<caption style='text-align:left'>{html.escape(caption)}</caption>" if caption else ""
    return f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
