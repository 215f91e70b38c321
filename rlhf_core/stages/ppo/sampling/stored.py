"""Writes answers that wait for training into a resume state, and reads them back bit for bit. Does the same
for an iteration's answers and rewards, for a run that trains only on them."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_core.config import PPO
from rlhf_core.data.documents import Prompt
from rlhf_core.rewards.clients import Rewards
from rlhf_core.rewards.combine import Running
from rlhf_core.stages.ppo.rollout_records import (
    Rollout,
    picture_names,
    restored,
    restored_rewards,
    stored,
    stored_rewards,
)
from rlhf_core.stages.ppo.sampling.collector import Collected
from rlhf_core.stages.ppo.sampling.sampled_answers import MeasuredGroups, PromptOrder, Sampled, Setup
from rlhf_core.system.files import digest, write_text

AHEAD = "ahead.jsonl"
EXPERTS = "ahead.npz"
COLLECTED = "collected.jsonl"
CONTENTS = "images"  # key in the header


def write_ahead(folder: Path, ahead: Sampled) -> None:
    """Writes the answers of an iteration that was sampled ahead, with their log-probs, expert choices and
    age."""
    _write(folder / AHEAD, {"age": ahead.age, "position": ahead.position}, ahead.rollouts)


def read_ahead(folder: Path, order: PromptOrder, n: int) -> Sampled | None:
    """Reads the data written by `write_ahead`, `n` answers per prompt. Returns None if there is none."""
    if not (folder / AHEAD).is_file():
        return None
    head, rows, experts = _read(folder / AHEAD)
    places = range(head["position"] - order.batch, head["position"])
    prompts = [prompt for prompt, _ in order.take(places.start, order.batch) for _ in range(n)]
    rollouts = [restored(row, prompt, e) for prompt, row, e in zip(prompts, rows, experts, strict=True)]
    return Sampled(rollouts, None, places.stop, {}, head["age"], measured=MeasuredGroups(places))


def write_collected(folder: Path, collected: Collected) -> None:
    """Writes a collector's state: finished groups, dropped groups, and the places of prompts that are being
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
    """Reads the data written by `write_collected`. Returns an empty state if there is none."""
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


def write_kept(
    folder: Path,
    iteration: int,
    setup: Setup,
    rollouts: Sequence[Rollout],
    rewards: Rewards,
    statistics: Mapping[str, Running],
) -> None:
    """Writes the answers and rewards of an iteration's training; iterations count from 1. `statistics` are
    the running statistics of rewards that the iteration used."""
    folder.mkdir(exist_ok=True)
    place = {id(prompt.row): index for index, prompt in enumerate(setup.order.prompts)}
    head = {
        "prompts": [place[id(rollout.prompt.row)] for rollout in rollouts],
        "rows": [None if rollout.own is None else digest_of_row(rollout.prompt) for rollout in rollouts],
        "kept_by": kept_by(setup),
        "actor": setup.actor,
        "rewards": stored_rewards(rewards),
        "statistics": {title: list(known) for title, known in statistics.items()},
    }
    _write(folder / f"iteration{iteration}.jsonl", head, rollouts)


def read_kept(folder: Path, iteration: int, setup: Setup) -> Sampled:
    """Reads the data written by `write_kept`. The position is the iteration's number. For the first
    iteration, prints a note if another actor sampled the rollouts. Raises ValueError for rollouts that do not
    match the recipe."""
    file = folder / f"iteration{iteration}.jsonl"
    head, rows, experts = _read(file)
    unlike = unlike_recipe(head, rows, setup)
    if unlike:
        raise ValueError(
            f"train_only: {file} does not fit the recipe, it was kept with {', '.join(unlike)}: take the"
            " values of that run, or keep rollouts with these"
        )
    if iteration == 1 and head["actor"] != setup.actor:
        print(f"note: {file} was kept by a run of the actor {head['actor']}, not {setup.actor}", flush=True)
    prompts = [setup.order.prompts[index] for index in head["prompts"]]
    rollouts = [restored(row, prompt, e) for prompt, row, e in zip(prompts, rows, experts, strict=True)]
    statistics = {title: Running(*known) for title, known in head["statistics"].items()}
    return Sampled(rollouts, restored_rewards(head["rewards"]), iteration, {}, statistics=statistics)


def kept_by(setup: Setup) -> dict[str, Any]:
    """Returns, as JSON, the settings that must be equal in the run that keeps rollouts and the run that
    trains on them."""
    config = setup.config
    return {
        "n_samples_per_prompt": config.n_samples_per_prompt,
        "rollout_batch_size": config.rollout_batch_size,
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k,
        "rewards": sorted(term.title for term in setup.terms),
    }


def unlike_recipe(head: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], setup: Setup) -> list[str]:
    """Returns phrases that describe how kept rollouts differ from the recipe; empty if they match."""
    known = head.get("kept_by", {})
    told = [
        f"{name} {known.get(name)} (here {value})"
        for name, value in kept_by(setup).items()
        if known.get(name) != value
    ]
    without = head["rewards"]["sources"].keys() - head["statistics"].keys()
    told += [
        f"another normalize of {term.title} than running"
        for term in setup.terms
        if term.normalize == "running" and term.title in without
    ]
    prompts = setup.order.prompts
    found = [prompts[index] if index < len(prompts) else None for index in head["prompts"]]
    answered = zip(rows, found, head.get("rows", [None] * len(rows)), strict=True)
    if not all(answers_prompt(row, prompt, of_row) for row, prompt, of_row in answered):
        told.append("other prompts")
    return told


def answers_prompt(row: Mapping[str, Any], prompt: Prompt | None, of_row: str | None) -> bool:
    """Returns whether a kept rollout answers a prompt; a `prompt` of None means that the data has too few
    prompts. `of_row` is the digest of the prompt's row, for an episode whose environment may write the
    prompt."""
    if prompt is None:
        return False
    if "own" in row:
        return digest_of_row(prompt) == of_row
    same_images = picture_names(prompt) == row.get("pictures", [])
    return same_images and list(prompt.tokens) == row["tokens"][: row["prompt"]]


def digest_of_row(prompt: Prompt) -> str:
    """Returns a digest of a prompt's row in the data. Values that JSON does not support count as their
    text."""
    return digest(json.dumps(prompt.row, sort_keys=True, default=str))


def remove_kept(folder: Path, after: int) -> None:
    """Removes the kept rollouts of iteration `after` + 1 and all later iterations, which an attempt before
    the resume has written."""
    for file in folder.glob("iteration*"):
        number = file.stem.removeprefix("iteration")
        if number.isdigit() and int(number) > after:
            file.unlink()


def kept_iterations(config: PPO, most: int) -> int:
    """Returns how many iterations, counted from the first, are in the folder of `train_only`, at most `most`.
    Raises ValueError if the folder has no iterations."""
    assert config.train_only is not None
    folder = Path(config.train_only)
    count = 0
    while count < most and (folder / f"iteration{count + 1}.jsonl").is_file():
        count += 1
    if not count:
        raise ValueError(
            f"train_only: {folder} has no iteration1.jsonl: name the folder kept_rollouts of a run with"
            " keep_rollouts or rollouts_only"
        )
    return count


def _write(file: Path, head: Mapping[str, Any], rollouts: Sequence[Rollout]) -> None:
    """Writes the header, which holds the content of each image once, and a line for each rollout."""
    experts = {
        str(i): found.document.experts
        for i, found in enumerate(rollouts)
        if found.document.experts is not None
    }
    np.savez(file.with_suffix(".npz"), allow_pickle=False, **experts)
    rows = [stored(found) for found in rollouts]
    contents = _taken_out(rows)
    whole = {**head, CONTENTS: contents} if contents else head
    write_text(file, "\n".join(map(json.dumps, [whole, *rows])) + "\n")


def _taken_out(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Replaces the content of images in rollouts by a digest. Returns each content, in base64, by its
    digest."""
    found = dict[str, str]()
    for row in rows:
        for image in row.get("images", ()):
            if "base64" in image:
                content = image.pop("base64")
                image["digest"] = hashlib.blake2b(content.encode(), digest_size=16).hexdigest()
                found.setdefault(image["digest"], content)
    return found


def _put_back(rows: Sequence[Mapping[str, Any]], contents: Mapping[str, str]) -> None:
    """Puts the content of images, as bytes that equal images share, into rollouts (`_taken_out`)."""
    decoded = {key: base64.b64decode(content) for key, content in contents.items()}
    for row in rows:
        for image in row.get("images", ()):
            if "digest" in image:
                image["bytes"] = decoded[image.pop("digest")]


def _read(file: Path) -> tuple[dict[str, Any], list[dict[str, Any]], list[np.ndarray | None]]:
    """Returns the header, the rollouts in the form of `stored`, and their expert choices (None if not
    stored)."""
    head, *rows = map(json.loads, file.read_text().splitlines())
    _put_back(rows, head.pop(CONTENTS, {}))
    arrays = file.with_suffix(".npz")
    known: Mapping[str, np.ndarray] = np.load(arrays, allow_pickle=False) if arrays.is_file() else {}
    return head, rows, [known[str(i)] if str(i) in known else None for i in range(len(rows))]
