"""Declares metrics: their names, meanings and units, which configurations have them, and what a failed gate
on them usually means."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

PLACE = re.compile("[A-Z]+")


class Condition(NamedTuple):
    """A condition for which configurations have a metric. `said`: the condition in words, for the page."""

    said: str
    holds: Callable[[Any], bool]

    def also(self, other: Condition) -> Condition:
        """Returns the condition that both conditions hold."""
        said = f"{self.said} and {other.said}"
        return Condition(said, lambda config: self.holds(config) and other.holds(config))


class Metric(NamedTuple):
    """A metric of a stage's result, or several metrics that share a meaning.

    `names` are separated by spaces. Capitals in a name (`tax/TASK/MODEL`) stand for names of the recipe,
    which `of` returns as tuples for a configuration; `*` stands for a name that is known only after the run.
    `failed`: what a failed gate on these metrics usually means.
    """

    names: str
    meaning: str
    unit: str = ""
    when: Condition | None = None
    of: Callable[[Any], Iterable[tuple[str, ...]]] | None = None
    failed: str = ""

    def of_config(self, config: Any) -> list[str]:
        """Returns the names for a configuration; an empty list if it does not have these metrics."""
        if self.when is not None and not self.when.holds(config):
            return []
        if self.of is None:
            return self.names.split()
        return [_filled(name, places) for places in self.of(config) for name in self.names.split()]

    def has(self, name: str) -> bool:
        """Returns whether a name may be one of these metrics in some configuration."""
        return any(fnmatchcase(name, PLACE.sub("*", one)) for one in self.names.split())


def _filled(name: str, places: tuple[str, ...]) -> str:
    left = iter(places)
    return PLACE.sub(lambda place: next(left), name)


class Panel(NamedTuple):
    """A small chart. `lines`: label by metric; `band`: the metric drawn as +- around the first line; `level`:
    the height of a dashed line."""

    title: str
    lines: dict[str, str]
    band: str | None = None
    level: float | None = None


def after_run(config: Any) -> list[tuple[str, ...]]:
    """Returns a wildcard for metrics whose last name part is known only after the run (such as a judge or a
    reason)."""
    return [("*",)]


def each(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Returns names of the recipe in the form that `of` must return for a metric with one placeholder."""
    return [(name,) for name in names]


def names_for(metrics: Iterable[Metric], config: Any) -> list[str]:
    """Returns the names of the metrics that the result of a stage with this configuration can have."""
    return [name for metric in metrics for name in metric.of_config(config)]


def meaning_of_failure(metrics: Sequence[Metric], name: str) -> str:
    """Returns what a failed gate on a metric usually means; "" when no general reason is known."""
    exact = [metric for metric in metrics if name in metric.names.split()]
    return next((metric.failed for metric in (*exact, *metrics) if metric.has(name)), "")
