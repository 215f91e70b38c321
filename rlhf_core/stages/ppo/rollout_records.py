"""Defines the records of PPO. A Rollout is one sampled answer, Scores are the results of all models, and
Experience is the data that training reads.

`stored` and `restored`, and their counterparts for rewards, serve resume states. `shown` is for human
readers.
"""

from __future__ import annotations

import base64
import os
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from rlhf_core.data.documents import Document, Message, Prompt
from rlhf_core.data.pictures.picture_source import EncodedPicture, PictureSource
from rlhf_core.rewards.clients import Rewards, join


class Own(NamedTuple):
    """Holds an environment's report on an episode.

    `reward` is for all answers, or nan if every attempt failed; `failure` then describes the last failure.
    `early` (T,) holds the parts of the reward for answers before the last, each at the answer's last token;
    None if there are no such parts. `ended` says whether the last answer is complete, even if a limit
    truncated the episode after it. `ended_by` is the limit that ended the episode: turns, tokens or time.
    """

    reward: float
    early: np.ndarray | None
    failure: str
    turns: int
    attempts: int
    seconds: float
    ended: bool = True
    conversations: int = 1
    ended_by: str | None = None


@dataclass(frozen=True)
class Rollout:
    """Holds one answer, or one episode of an environment.

    `sampler_logprobs` (T,) is aligned with the document's tokens and is 0 outside the mask. `finished` means
    that no limit of tokens, turns or time truncated the answer. `versions` holds pairs (first token, version
    of the weights from there on) if the weights may change during an answer. For an episode, `messages` is
    the whole conversation, and `own` is the environment's report.
    """

    prompt: Prompt
    document: Document
    sampler_logprobs: np.ndarray
    finished: bool
    messages: Sequence[Message] = ()
    own: Own | None = None
    versions: Sequence[tuple[int, int]] = ()

    @property
    def answer(self) -> list[int]:
        """Returns the sampled tokens."""
        return list(self.document.token_array[self.document.mask_array].tolist())

    def ages(self, version: int) -> np.ndarray:
        """Returns, for each sampled token, how many updates behind `version` its weights are."""
        starts = [start for start, _ in self.versions]
        sampled = np.flatnonzero(self.document.mask)
        which = np.searchsorted(starts, sampled, side="right") - 1
        return version - np.array([known for _, known in self.versions])[which]


def stored(rollout: Rollout) -> dict[str, Any]:
    """Returns a rollout as JSON, without its expert choices and with log-probs only for tokens in the
    mask."""
    mask = rollout.document.mask_array
    borders = np.flatnonzero(np.diff(mask, prepend=False, append=False))  # where answers begin and end
    row = {"tokens": list(rollout.document.tokens), "answers": borders.tolist(), "finished": rollout.finished}
    row |= {
        "prompt": len(rollout.prompt.tokens),
        "logprobs": rollout.sampler_logprobs[mask].tolist(),
        "versions": list(rollout.versions),
    }
    if rollout.document.starts:
        row["starts"] = list(rollout.document.starts)
    if rollout.own is None:
        return row | ({"pictures": picture_names(rollout.prompt)} if rollout.document.pictures else {})
    if rollout.document.pictures:
        row["images"] = [_stored_picture(picture) for picture in rollout.document.pictures]
    early = None if rollout.own.early is None else rollout.own.early.tolist()
    given = {"early": early, "reward": None if np.isnan(rollout.own.reward) else rollout.own.reward}
    of_prompt = {"prompt_messages": rollout.prompt.messages, "truncated": rollout.prompt.truncated}
    return row | of_prompt | {"messages": rollout.messages, "own": rollout.own._asdict() | given}


def _stored_picture(picture: EncodedPicture) -> dict[str, Any]:
    """Returns an image of an episode as JSON: its tokens, and either its file or its content in base64."""
    source = picture.source
    place = {"start": picture.start, "stop": picture.stop}
    if not len(source.data):
        return place | {"path": source.file}
    return place | {"name": source.name, "base64": base64.b64encode(source.data).decode()}


def _restored_picture(row: Mapping[str, Any]) -> EncodedPicture:
    if "bytes" in row:
        source = PictureSource(row["name"], None, row["bytes"])
    elif "base64" in row:
        source = PictureSource(row["name"], None, base64.b64decode(row["base64"]))
    else:
        folder, name = os.path.split(row["path"])
        source = PictureSource(name, folder)
    return EncodedPicture(row["start"], row["stop"], source)


def picture_names(prompt: Prompt) -> list[str]:
    """Returns a name for each image: its file name, or a digest of its bytes."""
    sources = [picture.source for picture in prompt.pictures]
    return [source.identity if len(source.data) else source.name for source in sources]


def restored(row: Mapping[str, Any], prompt: Prompt, experts: np.ndarray | None) -> Rollout:
    """Returns the rollout that `stored` wrote, bit for bit. `prompt` is the prompt from the data."""
    mask = np.zeros(len(row["tokens"]), dtype=bool)
    for start, end in zip(row["answers"][::2], row["answers"][1::2], strict=True):
        mask[start:end] = True
    logprobs = np.zeros(len(mask), np.float32)
    logprobs[mask] = row["logprobs"]
    starts = tuple(row.get("starts", ()))
    document = Document(array("i", row["tokens"]), array("b", mask.tobytes()), experts=experts, starts=starts)
    versions = [(start, version) for start, version in row["versions"]]
    if "own" not in row:
        document = replace(document, pictures=prompt.pictures)
        return Rollout(prompt, document, logprobs, row["finished"], versions=versions)
    own = Own(**row["own"])
    pictures = tuple(_restored_picture(image) for image in row.get("images", ()))
    document = replace(document, pictures=pictures)
    early = None if own.early is None else np.array(own.early, np.float32)
    own = own._replace(early=early, reward=np.nan if own.reward is None else own.reward)
    prompt = Prompt(
        tuple(row["prompt_messages"]),
        row["tokens"][: row["prompt"]],
        prompt.row,
        row["truncated"],
        tuple(picture for picture in pictures if picture.stop <= row["prompt"]),
    )
    return Rollout(prompt, document, logprobs, row["finished"], row["messages"], own, versions)


def stored_rewards(rewards: Rewards) -> dict[str, Any]:
    """Returns rewards as JSON."""
    sources = {
        title: [None if value != value else value for value in values.tolist()]
        for title, values in rewards.by_source.items()
    }
    steps = {title: list(by.items()) for title, by in rewards.steps.items()}
    return {"sources": sources, "errors": rewards.errors, "steps": steps}


def restored_rewards(row: Mapping[str, Any]) -> Rewards:
    """Returns the rewards that `stored_rewards` wrote, bit for bit."""
    sources = {title: np.array(values, np.float64) for title, values in row["sources"].items()}
    steps = {
        title: {index: [(end, reward) for end, reward in found] for index, found in by}
        for title, by in row["steps"].items()
    }
    return Rewards(sources, row["errors"], steps)


def shown(
    rollouts: Sequence[Rollout], rewards: Rewards, decode: Callable[[Sequence[int], bool], str]
) -> Iterator[dict[str, Any]]:
    """Yields rollouts in readable form, as `shown_one` returns them."""
    for i, found in enumerate(rollouts):
        given = {title: float(values[i]) for title, values in rewards.by_source.items()}
        yield shown_one(found, given, decode)


def shown_one(
    found: Rollout, rewards: Mapping[str, float], decode: Callable[[Sequence[int], bool], str]
) -> dict[str, Any]:
    """Returns a rollout in readable form: its texts and rewards; a failed reward is None."""
    row: dict[str, Any]
    if found.own is not None:
        row = {"messages": list(found.messages), "turns": found.own.turns}
        if found.own.failure:
            row["failure"] = found.own.failure
    else:
        row = {"prompt": list(found.prompt.messages), "response": decode(found.answer, True)}
    row["finished"] = found.finished
    return row | {"rewards": {title: None if value != value else value for title, value in rewards.items()}}


class StoredColumn(NamedTuple):
    """Holds a reference to data on the nodes: one field of Experience, for the rollouts from index `start`
    on. The data is a list in the rollouts' order. If `scored`, it is a rank's result: pairs (index after
    `start`, array), and the seconds of the work."""

    field: str
    start: int
    scored: bool
    reference: Any


class TeacherTokens(NamedTuple):
    """Holds a teacher's results for a document. The log-probs of the document's tokens are (T,), as in
    `Scores.ref_logprobs`. For each of the answer's n tokens, it also holds the ids of the k most probable
    tokens, int32 (n, k). Their log-probs, followed by the log-prob of all other tokens together, are fp32 (n,
    k + 1)."""

    own: np.ndarray
    ids: np.ndarray
    logprobs: np.ndarray


@dataclass(frozen=True)
class Scores:
    """Holds the results of models and reward sources for each rollout: one per-token array (T,) for each
    document, or None without that model. `logprobs` are the log-probs of the old policy: from the actor, or
    from the sampler with `sampler_is: in_ratio`, or None if the training pass computes them.

    `stored` holds references to the nodes' data for the rollouts. `end_values` (N,) is the critic's value of
    each whole document that a limit truncated, and 0 for the others. It is None unless the recipe requires it
    (`bootstrap_truncated`). `teacher` is set with `teacher_top_k`.
    """

    logprobs: list[np.ndarray] | None
    ref_logprobs: list[np.ndarray] | None
    values: list[np.ndarray] | None
    rewards: Rewards
    stored: Sequence[StoredColumn] = ()
    end_values: np.ndarray | None = None
    teacher: list[TeacherTokens] | None = None


def join_scores(parts: Sequence[Scores], allowed_failures: int) -> Scores:
    """Returns the scores of all parts, joined in order. Raises RewardsFailed if a source left more than
    `allowed_failures` answers without a reward."""
    rewards = join([part.rewards for part in parts])
    rewards.check(allowed_failures)
    logprobs, references, values, teacher = (
        [array for part in parts for array in getattr(part, name) or ()] or None
        for name in ("logprobs", "ref_logprobs", "values", "teacher")
    )
    ends = [part.end_values for part in parts if part.end_values is not None]
    starts = accumulate((len(part.rewards) for part in parts), initial=0)
    stored = [
        column._replace(start=start + column.start)
        for start, part in zip(starts, parts, strict=False)
        for column in part.stored
    ]
    end_values = np.concatenate(ends) if ends else None
    return Scores(logprobs, references, values, rewards, stored, end_values, teacher)


@dataclass(frozen=True)
class Experience:
    """Holds one rollout to train on. Arrays (T,) are aligned with the document's tokens.

    `advantages` may be one number for all response tokens. Without `old_logprobs`, the training pass computes
    them. `values` and `returns` are None without a critic. `ref_logprobs` is None if the loss contains no KL,
    or if `teacher` takes its place. `sampler_logprobs` is None without importance weights.
    """

    document: Document
    old_logprobs: np.ndarray | None
    sampler_logprobs: np.ndarray | None
    ref_logprobs: np.ndarray | None
    values: np.ndarray | None
    advantages: np.ndarray | float
    returns: np.ndarray | None
    teacher: TeacherTokens | None = None
