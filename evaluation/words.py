"""Numbers as the page says them, and texts that may be shown."""

from __future__ import annotations

import math

from rlhf_core.types import WinRate


def percent(value: float | None, digits: int = 0) -> str:
    """A share in [0, 1] as a percentage."""
    return "–" if value is None or not math.isfinite(value) else f"{100 * value:.{digits}f} %"


def controlled(rate: WinRate, digits: int = 0) -> str:
    """The length-controlled win rate with its 95 % interval."""
    if rate.length_controlled is None or rate.lc_low is None or rate.lc_high is None:
        return "–"
    return f"{percent(rate.length_controlled, digits)} ({100 * rate.lc_low:.{digits}f}–{100 * rate.lc_high:.{digits}f})"


def interval(rate: WinRate, digits: int = 0) -> str:
    """The win rate's 95 % interval."""
    return f"{100 * rate.ci_low:.{digits}f}–{100 * rate.ci_high:.{digits}f} %"


def number(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 or value == round(value) else f"{value:.3g}"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
