"""Parameters of a test as a table in a text: one row a line, its cells divided by ` | `."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import yaml


def rows_of_text(text: str, yaml_columns: Collection[int] = ()) -> list[tuple[Any, ...]]:
    """Returns the cells of each line. A cell of `yaml_columns`, or in braces or brackets, is YAML, any other
    one is text."""
    rows = []
    for line in text.strip().splitlines():
        cells = [cell.strip() for cell in line.split(" | ")]
        is_yaml = [column in yaml_columns or cell.startswith(("{", "[")) for column, cell in enumerate(cells)]
        rows.append(tuple(yaml.safe_load(c) if y else c for c, y in zip(cells, is_yaml, strict=True)))
    return rows
