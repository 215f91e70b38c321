"""What the nights must have shown at their end, from their records alone. Truth is the probability of the
right answer, by question.

A model is better than another when, over the held-out questions, the mean difference of these probabilities
is at least MARGIN and the lower end of its 95 % interval (normal, paired by question) is above 0; worse is
the same the other way round. There is no noise of sampling in it: the probabilities are computed, not
counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any, NamedTuple

MARGIN = 0.01
HELD_OUT = 1400


class Check(NamedTuple):
    """One of the things to be shown. `found`: the numbers, in words."""

    name: str
    passed: bool
    found: str


class Gain(NamedTuple):
    """The mean difference of two models, with its 95 % interval."""

    mean: float
    low: float
    high: float

    @property
    def better(self) -> bool:
        return self.mean >= MARGIN and self.low > 0

    @property
    def worse(self) -> bool:
        return self.mean <= -MARGIN and self.high < 0


def gain(model: Sequence[float], other: Sequence[float]) -> Gain:
    """The difference of two models' probabilities of the right answer, paired by question."""
    differences = [a - b for a, b in zip(model, other, strict=True)]
    half = 1.96 * stdev(differences) / math.sqrt(len(differences))
    return Gain(fmean(differences), fmean(differences) - half, fmean(differences) + half)


def verdicts(run: Mapping[str, Any], control: Mapping[str, Any] | None) -> list[Check]:
    """Returns all checks of a run, and of its control run without faults. `run`: as record.py makes it."""
    nights = run["nights"]
    rounds = run["rounds"]
    reigns = run["champions"]
    shares = [run["base"], *(reign["right"] for reign in reigns)]
    better = [one for one in rounds if one["better"]]
    promoted = [one for one in better if one["promoted"]]
    worse = [f"{reign['model']} ({reign['worse_than']})" for reign in reigns if reign["worse_than"]]
    unnamed = [
        f"{fault} of night {night['number']}"
        for night in nights
        for fault, where in night["named"].items()
        if not where
    ]
    planted = sum(len(night["named"]) for night in nights)
    path = " -> ".join(f"{100 * share:.1f}" for share in (shares[0], shares[-1]))
    checks = [
        Check(
            "the share of right answers rises",
            len(shares) > 1 and shares[-1] - shares[0] >= MARGIN,
            f"{path} %",
        ),
        Check("no worse model was ever champion", not worse, "; ".join(worse) or f"{len(reigns)} champions"),
        Check(
            "of the better candidates at least half were promoted",
            2 * len(promoted) >= len(better),
            f"{len(promoted)} of {len(better)}",
        ),
        Check(
            "nothing is lost, nothing done twice",
            not run["books"],
            "; ".join(run["books"]) or "feedback, rounds, commits, champions",
        ),
        Check(
            "every planted fault is named",
            not unnamed,
            f"not named: {', '.join(unnamed)}" if unnamed else f"{planted} of {planted}",
        ),
    ]
    if control is not None:
        alarms = [
            f"night {night['number']}: {alarm}" for night in control["nights"] for alarm in night["alarms"]
        ]
        checks.append(
            Check("the control raises at most one false alarm", len(alarms) <= 1, "; ".join(alarms) or "none")
        )
        checks.append(
            Check(
                "the control's feedback, rounds and commits agree",
                not control["books"],
                "; ".join(control["books"]) or "in order",
            )
        )
    return checks
