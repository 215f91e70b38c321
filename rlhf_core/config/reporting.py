"""Receivers of the events and metrics of a run. They change no result, so no digest has them."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import Field

from rlhf_core.records import Config, Rate

Event = Literal["scheduled", "running", "completed", "failed", "crashed", "cancelled", "stage", "gate"]
EVENTS: tuple[Event, ...] = get_args(Event)


class Notify(Config):
    """A webhook: one POST of a small JSON object for each event (docs/how-to/monitoring.md), sent in the background."""

    url_env: str = Field(
        description="environment variable that holds the webhook's URL, which stays out of recipes, logs and artifacts",
        pattern=r"^[A-Za-z_]\w*$",
    )
    events: tuple[Event, ...] = Field(
        EVENTS, description="states of the run, and `stage` and `gate` for each stage that ends and each gate", min_length=1
    )
    timeout: Rate = Field(10.0, description="seconds the receiver may take for one message")


class Wandb(Config):
    """A run in Weights & Biases for each stage that writes metrics; it gets the lines of `metrics.jsonl` (docs/how-to/monitoring.md). The
    key is that of the environment variable WANDB_API_KEY."""

    project: str = Field(description="project of the runs", pattern=r"^[^/\\#?%:]{1,128}$")
    entity: str | None = Field(None, description="user or team of the project; default: the key's own", min_length=1)
    group: str | None = Field(None, description="group of the runs; default: the recipe's name", min_length=1, max_length=128)
