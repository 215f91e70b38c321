"""Writes answers that wait for training into a resume state, and reads them back, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_core.stages.ppo.rollout_records import (
    Rollout,
    restored,
    restored_rewards,
    stored,
    stored_rewards,
)
from rlhf_core.stages.ppo.sampling.collector import Collected
from rlhf_core.stages.ppo.sampling.sampled_answers import MeasuredGroups, PromptOrder, Sampled
from rlhf_core.system.files import write_text

AHEAD = "ahead.jsonl"
EXPERTS = "ahead.npz"
COLLECTED = "collected.jsonl"


def write_ahead(folder: Path, ahead: Sampled) -> None:
    """Writes an iteration's answers that were sampled ahead, with their log-probs, experts and age."""
    _write(folder / AHEAD, {"age": ahead.age, "position": ahead.position}, ahead.rollouts)


def read_ahead(folder: Path, order: PromptOrder, n: int) -> Sampled | None:
    """Reads the data of `write_ahead`, `n` answers per prompt; None if there is none."""
    if not (folder / AHEAD).is_file():
        return None
    head, rows, experts = _read(folder / AHEAD)
    places = range(head["position"] - order.batch, head["position"])
    prompts = [prompt for prompt, _ in order.take(places.start, order.batch) for _ in range(n)]
    rollouts = [restored(row, prompt, e) for prompt, row, e in zip(prompts, rows, experts, strict=True)]
    return Sampled(rollouts, None, places.stop, {}, head["age"], measured=MeasuredGroups(places))


def write_collected(folder: Path, collected: Collected) -> None:
    """Writes a collector's state: finished groups, dropped groups, and the places of prompts being
    answered."""
    groups = [
        {"place": place, "begun": collected.begun[place], "answers": len(rollouts)}
        for place, rollouts in collected.ready.items()
    ]
    dropped = [{"place": place, "answers": len(rollouts)} for place, rollouts in collected.dropped.items()]
    head = {
        "next": collected.next,
        "open": list(collected.open),
        "groups": groups,
        "dropped": dropped,
        "counted": list(collected.counted),
        "looked_at": dict(collected.looked_at),
        "rewards": [[place, stored_rewards(rewards)] for place, rewards in collected.rewards.items()],
    }
    of_groups = [*collected.ready.values(), *collected.dropped.values()]
    _write(folder / COLLECTED, head, [rollout for rollouts in of_groups for rollout in rollouts])


def read_collected(folder: Path, order: PromptOrder) -> Collected:
    """Reads the data of `write_collected`; an empty state if there is none."""
    if not (folder / COLLECTED).is_file():
        return Collected()
    head, rows, experts = _read(folder / COLLECTED)
    answers = zip(rows, experts, strict=True)

    def groups(entries: Sequence[Mapping[str, int]]) -> dict[int, list[Rollout]]:
        found = {}
        for entry in entries:
            ((prompt, _),) = order.take(entry["place"], 1)
            of_group = islice(answers, entry["answers"])
            found[entry["place"]] = [restored(row, prompt, e) for row, e in of_group]
        return found

    ready = groups(head["groups"])
    begun = {group["place"]: group["begun"] for group in head["groups"]}
    return Collected(
        head["next"],
        head["open"],
        begun,
        ready,
        groups(head.get("dropped", ())),
        {place: restored_rewards(row) for place, row in head.get("rewards", ())},
        tuple(head.get("counted", ())),
        head.get("looked_at", {}),
    )


def _write(file: Path, head: Mapping[str, Any], rollouts: Sequence[Rollout]) -> None:
    experts = {
        str(i): found.document.experts
        for i, found in enumerate(rollouts)
        if found.document.experts is not None
    }
    np.savez(file.with_suffix(".npz"), allow_pickle=False, **experts)
    write_text(file, "\n".join([json.dumps(head), *(json.dumps(stored(found)) for found in rollouts)]) + "\n")


def _read(file: Path) -> tuple[dict[str, Any], list[dict[str, Any]], list[np.ndarray | None]]:
    """Returns the head, the rollouts in the form of `stored`, and their experts."""
    head, *rows = map(json.loads, file.read_text().splitlines())
    arrays = file.with_suffix(".npz")
    known: Mapping[str, np.ndarray] = np.load(arrays, allow_pickle=False) if arrays.is_file() else {}
    return head, rows, [known[str(i)] if str(i) in known else None for i in range(len(rows))]
