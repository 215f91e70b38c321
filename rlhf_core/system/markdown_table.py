"""Writes tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable


def table(header: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    """Returns a Markdown table that ends with a line break, with a line per row. Numbers have six digits, and
    None becomes an empty cell."""
    cells = [[_cell(value) for value in row] for row in (header, *rows)]
    first, *rest = ("| " + " | ".join(row) + " |\n" for row in cells)
    return "".join([first, "|" + "---|" * len(cells[0]) + "\n", *rest])


def _cell(value: object) -> str:
    if value is None:
        return ""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")
