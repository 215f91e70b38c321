"""Renders the HTML templates of this folder and formats numbers for them. All values are escaped; a missing
value is an error."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import jinja2

from rlhf_core.records import WinRate
from rlhf_core.system.redaction import plain, without_passwords

MAX_TEXT = 1500  # characters of a prompt or an answer


def fill(template: str, **values: object) -> str:
    """Returns a template rendered with values. Raises jinja2.UndefinedError when a value is missing."""
    page = environment(Path(__file__).parent / "templates").get_template(template).render(**values)
    return page.encode("utf-8", "replace").decode()  # replaces unpaired surrogates in answers


@cache
def environment(folder: Path) -> jinja2.Environment:
    """Returns the Jinja environment for a folder's templates, which can use the functions below as
    filters."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = (percent, duration, number, interval, controlled, without_passwords, cut, plain)
    made.filters.update({function.__name__: function for function in filters})
    return made


def percent(value: float | None, digits: int = 0) -> str:
    """Formats a fraction in [0, 1] as a percentage. Returns – when it is missing or not finite."""
    return "–" if value is None or not math.isfinite(value) else f"{100 * value:.{digits}f} %"


def controlled(rate: WinRate, digits: int = 0) -> str:
    """Formats the length-controlled win rate with its 95 % interval. Returns – when it is missing."""
    if rate.length_controlled is None or rate.lc_low is None or rate.lc_high is None:
        return "–"
    return (
        f"{percent(rate.length_controlled, digits)}"
        f" ({100 * rate.lc_low:.{digits}f}–{100 * rate.lc_high:.{digits}f})"
    )


def interval(rate: WinRate, digits: int = 0) -> str:
    """Formats the win rate's 95 % interval."""
    return f"{100 * rate.ci_low:.{digits}f}–{100 * rate.ci_high:.{digits}f} %"


def cut(text: str) -> str:
    """Returns at most MAX_TEXT characters of a prompt or answer, followed by the number of characters left
    out."""
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} … ({len(text) - MAX_TEXT} more characters)"


def number(value: float | None) -> str:
    """Formats a number with three significant digits, or without decimals if it is whole or at least 1,000.
    Returns – when it is missing or not finite."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 or value == round(value) else f"{value:.3g}"


def duration(seconds: float | None) -> str:
    """Formats seconds like `9.9 s`, `2 min 03 s` or `1 h 02 min`; returns – when they are missing."""
    if seconds is None:
        return "–"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
