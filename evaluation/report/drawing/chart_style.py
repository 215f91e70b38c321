"""Sets the style of the report's charts, and renders matplotlib figures as inline SVG.

The `<svg>` element has no size (the report's CSS sets the width), its text is kept as text, and its ids are
salted with the chart's name, so that one HTML file can contain many charts. Avoids pyplot, which has global
state, so any thread may draw.
"""

from __future__ import annotations

import html
import io
import re
from typing import Any

import matplotlib
from matplotlib.figure import Figure

COLOURS = ("#2563a8", "#d9822b", "#2e8b6f", "#a8437a", "#6f5bb0", "#7a8794", "#b8a11f", "#3aa0b8")
INK = "#3c4650"
RED = "#c0392b"
WIDTH = 10.95  # inches: a figure as wide as the page
# for lines that mean "no difference"
DASHED: dict[str, Any] = {"color": "#8a949e", "linewidth": 0.9, "linestyle": (0, (4, 3))}
STYLE: dict[Any, Any] = {  # matplotlib types its keys as one long Literal
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 8,
    "text.color": INK,
    "axes.edgecolor": "#b9c2cb",
    "axes.labelcolor": INK,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "grid.color": "#edf0f3",
    "grid.linewidth": 0.7,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 7.5,
}


def short(label: str, limit: int = 28) -> str:
    """Returns a label truncated with an ellipsis to at most `limit` characters."""
    return label if len(label) <= limit else label[: limit - 1] + "…"


def svg(figure: Figure, name: str) -> str:
    """Returns the figure as an `<svg>` element; `name` is its description for screen readers."""
    file = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": f"alignflow {name}"}):
        figure.savefig(
            file,
            format="svg",
            transparent=True,
            metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")),
        )
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r' (width|height)="[\d.]+pt"', "", text, count=2)
    text = re.sub(r'<g id="[^"]*"', "<g", text)  # these ids are the same in every chart and are not used
    text = re.sub(r"font: ([^;\"']*?px) [^;\"]*", r"font: \1 system-ui, sans-serif", text)
    return text.replace("<svg ", f'<svg role="img" aria-label="{html.escape(name)}" ', 1)
