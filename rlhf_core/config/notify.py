"""Whom to tell how a run goes. In no digest: it changes no result."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import Field

from rlhf_core.types import Frozen, Rate

Event = Literal["scheduled", "running", "completed", "failed", "crashed", "cancelled", "stage", "gate"]
EVENTS: tuple[Event, ...] = get_args(Event)


class Notify(Frozen):
    """A webhook: one POST of a small JSON object for each event (docs/runs.md), sent in the background; nothing waits for it."""

    url_env: str = Field(
        description="environment variable that holds the webhook's URL, which stays out of recipes, logs and artifacts",
        pattern=r"^[A-Za-z_]\w*$",
    )
    events: tuple[Event, ...] = Field(
        EVENTS, description="states of the run, and `stage` and `gate` for each stage that ends and each gate", min_length=1
    )
    timeout: Rate = Field(10.0, description="seconds the receiver may take for one message")
