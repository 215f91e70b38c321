"""Measures the style of answers as arena-hard-auto does: length, and markdown outside code blocks.
Torch-free; all functions are pure.

A battle's features compare the model's answer (m) with the baseline's (b), as in `show_result.py` and
`add_markdown_info.py`. Length, in tokens: (Lm - Lb) / (Lm + Lb). Headers, lists and bold, with densities d =
count / (tokens + 1): (dm - db) / (dm + db + 1). Two empty answers differ by 0 in length, where the original
divides by zero.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Control = Literal["length", "markdown"]

FEATURES = ("length", "headers", "lists", "bold")
COLUMNS: dict[Control, tuple[int, ...]] = {"length": (0,), "markdown": (1, 2, 3)}
CODE = re.compile(r"```[^`]*```")


class Style(NamedTuple):
    """Counts of tokens, headers, list items and bold spans in one answer."""

    tokens: float
    headers: float
    lists: float
    bold: float


def columns(controls: Sequence[Control]) -> list[int]:
    """Returns the columns of `features` that the controls use, sorted."""
    return sorted({column for control in controls for column in COLUMNS[control]})


def style_of(metadata: Mapping[str, Any]) -> Style:
    """Returns the style from an answer's metadata, in which counts are numbers or mappings to numbers. Raises
    KeyError when a count is missing."""
    counts = (metadata[name] for name in ("token_len", "header_count", "list_count", "bold_count"))
    return Style(*(float(sum(count.values()) if isinstance(count, Mapping) else count) for count in counts))


def features(models: Sequence[Style], baselines: Sequence[Style]) -> Floats:
    """Returns (N, 4) features of N battles, in the order of FEATURES, each in [-1, 1]; 0 means the same
    style."""
    ours, theirs = (np.array(styles, np.float64).reshape(-1, len(FEATURES)) for styles in (models, baselines))
    length = (ours[:, :1] - theirs[:, :1]) / np.maximum(ours[:, :1] + theirs[:, :1], 1)
    density, other = (counts[:, 1:] / (counts[:, :1] + 1) for counts in (ours, theirs))
    return np.hstack([length, (density - other) / (density + other + 1)])


def scaled(values: Floats) -> Floats:
    """Returns values divided by each column's root mean square. They are not centred, so 0 still means the
    same style. A column of zeros is left unchanged.

    The original subtracts the mean over all rows. With a single model, the strength then belongs to the
    model's own average style, and there is no control for style.
    """
    size = np.sqrt((values**2).mean(0))
    return values / np.where(size > 1e-12, size, 1)


def markdown(text: str) -> dict[str, dict[str, int]]:
    """Counts headers, list items and bold spans outside fenced code blocks, under arena-hard-auto's names."""
    text = CODE.sub("", text)
    return {
        "header_count": {f"h{level}": _count(rf"^#{{{level}}}\s", text) for level in range(1, 7)},
        "list_count": {"ordered": _count(r"^\s*\d+\.\s", text), "unordered": _count(r"^\s*[-*+]\s", text)},
        "bold_count": {"**": _count(r"\*\*[^*\n]+\*\*", text), "__": _count(r"__[^_\n]+__", text)},
    }


def _count(pattern: str, text: str) -> int:
    return len(re.findall(pattern, text, re.MULTILINE))
