"""Faults by night, read from a YAML file (faults.yaml, faults-long.yaml), and where each kind must be named:
on the run's report or on the live page."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import yaml
from pydantic import Field

from rlhf_core.records import Config, Positive, Share, check

Kind = Literal["poisoned", "length_judge", "drift", "full_disk", "killed", "hub_outage", "silent_approver"]


class Fault(Config):
    """What goes wrong in a night.

    poisoned: `share` of the day's people say the opposite of their taste. length_judge: the judge prefers the
    longer answer. drift: from this day on people ask about other topics. full_disk: the disk has `free_mib`
    left. killed: the night's process is killed with -9 while it works on `stage`. hub_outage: the Hub answers
    503. silent_approver: nobody approves. The last three wait for the first night from theirs on that works
    on the stage, asks the Hub, or asks for an approval.
    """

    night: Positive = Field(description="the first is 1")
    fault: Kind = Field(description="what goes wrong")
    share: Share = Field(0.8, description="poisoned: of the people")
    stage: str = Field("evaluation", description="killed: the stage that works then; of a loop, its round's")
    free_mib: float = Field(2.0, ge=0, description="full_disk: space that is left")


class Faults(Config):
    """The nights, the seed of everything that is drawn, and the faults."""

    nights: Positive = Field(description="how many")
    seed: int = Field(0, description="of people, answers and labels")
    questions: Positive = Field(
        600, le=2000, description="of the evaluation: more find smaller gains; there are not many sums to ask"
    )
    faults: tuple[Fault, ...] = Field((), description="in any order; a night may have several")

    @check
    def _check_nights(self) -> Iterator[str]:
        for fault in self.faults:
            if fault.night > self.nights:
                yield (
                    f"{fault.fault} is planted in night {fault.night}, and there are {self.nights}: correct"
                    " the number"
                )
        if sum(fault.fault == "drift" for fault in self.faults) > 1:
            yield "drift: topics drift once, from its night on: leave the others out"

    def of(self, night: int) -> dict[Kind, Fault]:
        """The faults of a night by their kinds; a drift is of its first night alone."""
        return {fault.fault: fault for fault in self.faults if fault.night == night}

    def drifted(self, night: int) -> bool:
        """Whether people ask about other topics by then."""
        return any(fault.fault == "drift" and fault.night <= night for fault in self.faults)

    @property
    def none(self) -> Faults:
        """The same nights without faults: the control."""
        return self.model_copy(update={"faults": ()})


def read_faults(file: Path) -> Faults:
    """Reads a file of faults. Raises ValueError that says what is wrong in it."""
    return Faults.model_validate(yaml.safe_load(file.read_text()))


class Sign(NamedTuple):
    """Words that name a fault. `place`: beginnings of the names of pages that may have them; `pattern`: the
    words, with {round} for the number of the night's round; `later`: they may come with the next night."""

    place: str | tuple[str, ...]
    pattern: str
    later: bool = False


SIGNS: Mapping[Kind, Sign] = dict(
    poisoned=Sign("report", r"evaluation ci_low(_vs_parent)?/nights\.round{round} \S+ at least 0\.5 failed"),
    length_judge=Sign(
        "report", r"calibration (kappa/ci_low|length_bias/ci_high) \S+ at (least|most) \S+ failed"
    ),
    drift=Sign("report", r"drift prompts/divergence_p \S+ at least 0\.01 failed"),
    full_disk=Sign(("stage page", "run page"), r"[Nn]o space left on (the )?(device|disk)|disk (is )?full"),
    killed=Sign("run page", r"killed"),
    hub_outage=Sign(
        "stage page publication", r"\b503\b|Hub (cannot|could not) be reached|the Hub did not answer"
    ),
    silent_approver=Sign("start page", r"refused: stage evaluation: nobody approved it until", later=True),
)


def named(
    kind: Kind, number: int, nights: Sequence[Mapping[str, str]], before: Sequence[Mapping[str, str]] = ()
) -> str:
    """Returns where the pages of a night, whose round has this number, or of the next one name a fault, with
    the words; '' when they do not. `nights`: the pages of both; `before`: those of earlier nights, whose
    stages may have had the same fault."""
    sign = SIGNS[kind]
    pattern = sign.pattern.replace("{round}", str(number))
    for pages in nights[: 2 if sign.later else 1]:
        for place, text in pages.items():
            same = [earlier[place] for earlier in before if place in earlier]
            old = text in same or (
                place.startswith("stage page") and any(re.search(pattern, known) for known in same)
            )
            if place.startswith(sign.place) and not old and (found := re.search(pattern, text)):
                return f"{place}: {found[0]}"
    return ""
