"""Faults by night, read from a YAML file (faults.yaml, faults-long.yaml): other ones can be planted by writing another file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import yaml
from pydantic import Field

from rlhf_core.records import Config, Positive, Share, check

Kind = Literal["poisoned", "length_judge", "drift", "full_disk", "killed", "hub_outage", "silent_approver"]


class Fault(Config):
    """What goes wrong in a night.

    poisoned: `share` of the day's people say the opposite of their taste. length_judge: the judge prefers the longer answer. drift: from
    this day on people ask about other topics. full_disk: the disk has `free_mib` left. killed: the night's process is killed with -9 while
    it works on `stage`. hub_outage: the Hub answers 503. silent_approver: nobody approves.
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
    faults: tuple[Fault, ...] = Field((), description="in any order; a night may have several")

    @check
    def _check_nights(self) -> Iterator[str]:
        for fault in self.faults:
            if fault.night > self.nights:
                yield f"{fault.fault} is planted in night {fault.night}, and there are {self.nights}: correct the number"
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
