"""Says where each planted fault must be named: on the run's report or on the live page."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tests.nights.faults import Kind


class Sign(NamedTuple):
    """Words that name a fault. `place`: beginning of the name of the page that must have them; `pattern`: the words, with {round} for the
    number of the night's round; `later`: they may come with the next night."""

    place: str
    pattern: str
    later: bool = False


SIGNS: Mapping[Kind, Sign] = {
    "poisoned": Sign("report", r"evaluation ci_low(_vs_parent)?/nights\.round{round} \S+ at least 0\.5 failed"),
    "length_judge": Sign("report", r"calibration (kappa/ci_low|length_bias/ci_high) \S+ at (least|most) \S+ failed"),
    "drift": Sign("report", r"drift prompts/divergence_p \S+ at least 0\.01 failed"),
    "full_disk": Sign("stage page", r"[Nn]o space left on (the )?(device|disk)|disk (is )?full"),
    "killed": Sign("run page", r"killed"),
    "hub_outage": Sign("stage page publication", r"\b503\b|Hub (cannot|could not) be reached|the Hub did not answer"),
    "silent_approver": Sign("start page", r"refused: stage evaluation: nobody approved it until", later=True),
}


def named(kind: Kind, number: int, nights: Sequence[Mapping[str, str]]) -> str:
    """Returns where the pages of a night, whose round has this number, or of the next one name a fault, with the words; '' when they do
    not. `nights`: the pages of both."""
    sign = SIGNS[kind]
    for pages in nights[: 2 if sign.later else 1]:
        for place, text in pages.items():
            if place.startswith(sign.place) and (found := re.search(sign.pattern.replace("{round}", str(number)), text)):
                return f"{place}: {found[0]}"
    return ""
