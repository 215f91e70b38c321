"""Chooses the requests to a judge about answers, and turns its verdicts into rewards. Sends nothing.

An opinion on an answer is based on the verdicts of one or two requests: a rating, or the two games of a pair.
The second game swaps the answers, so that both get one half from a judge that always prefers the first place.
An opinion that lacks a verdict does not count. An answer's reward is the mean of its opinions; with
`compare`, this is the fraction of its pairs that it wins, with ties counting a half.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from rlhf_core.config.rewarding.judge_reward import JudgeReward
from rlhf_core.rewards.judge.comparison_prompt import comparison_prompt
from rlhf_core.rewards.judge.rating_prompt import Messages, rating_prompt, reference_of, texts_of
from rlhf_core.rewards.judge.rating_reply import Rating, reward_of
from rlhf_core.rewards.reward_contract import Sample


class JudgeRequest(NamedTuple):
    """A request to a judge. `texts`: the texts that the judge reads, which its reply may quote."""

    messages: Messages
    texts: Sequence[str]


class NeededVerdict(NamedTuple):
    """A request, identified by its key. `second`: whether the answer is the second of the two that it
    compares."""

    key: str
    second: bool = False


Opinion = Sequence[
    NeededVerdict
]  # the requests on which it rests; if empty, the answers are equal, which is a tie


class JudgingPlan(NamedTuple):
    """The requests about N answers by key, and the opinions on each answer (N,). `problem`: the reason why an
    answer has no opinion; '' if all have one."""

    requests: dict[str, JudgeRequest]
    opinions: list[list[Opinion]]
    problem: str

    def without(self, failed: Collection[str]) -> int:
        """Returns how many answers are left without an opinion if these requests get no verdict."""
        return sum(
            all(any(asked.key in failed for asked in opinion) for opinion in opinions)
            for opinions in self.opinions
        )


def plan_of(
    source: JudgeReward, samples: Sequence[Sample], group: int, key_of: Callable[[Messages], str]
) -> JudgingPlan:
    """Returns the requests to make about answers, with `group` consecutive answers per prompt, and the
    opinions that the requests give."""
    requests: dict[str, JudgeRequest] = {}
    opinions: list[list[Opinion]] = [[] for _ in samples]
    problem = ""
    for places in subjects_of(source, len(samples), group):
        try:
            asked = requests_about(source, [samples[place] for place in places])
        except ValueError as error:
            problem = str(error)
            continue
        keys = [key_of(request.messages) for request in asked]
        requests |= zip(keys, asked, strict=True)
        for second, place in enumerate(places):
            opinions[place].append([NeededVerdict(key, game != second) for game, key in enumerate(keys)])
    return JudgingPlan(requests, opinions, problem)


def subjects_of(source: JudgeReward, count: int, group: int) -> list[tuple[int, ...]]:
    """Returns the indices of the answers in each question: single answers out of `count`, or pairs within
    each group."""
    if source.compare != "group":
        return [(place,) for place in range(count)]
    return [
        (start + one, start + other)
        for start in range(0, count, group)
        for one, other in circle(min(group, count - start), source.pairs_per_answer)
    ]


def requests_about(source: JudgeReward, subject: Sequence[Sample]) -> list[JudgeRequest]:
    """Returns the request to rate an answer, or the two games of a pair, the second of which has the answers
    swapped. Returns no requests for equal answers, because they tie. Raises ValueError when the row lacks a
    required reference answer."""
    first = subject[0]
    if source.compare == "none":
        texts = [text for _, text in texts_of(source, first)]
        return [JudgeRequest(rating_prompt(source, first), texts)]
    if source.compare == "reference":
        assert source.reference is not None, "checked by the config"
        second = reference_of(source.reference, first)
    else:
        second = subject[1].response
    if first.response == second:
        return []
    pair = first.response, second
    return [JudgeRequest(*comparison_prompt(source, first, answers)) for answers in (pair, pair[::-1])]


def circle(count: int, most: int) -> list[tuple[int, int]]:
    """Returns pairs of each of `count` answers with its nearest neighbours on a circle. Each answer is in
    `most` pairs, or in all possible pairs if there are fewer. If both numbers are odd, each answer is in one
    more pair."""
    most = min(most, count - 1)
    if most % 2 and count % 2:
        most += 1
    pairs = [(one, (one + far) % count) for far in range(1, most // 2 + 1) for one in range(count)]
    if most % 2:
        pairs += [(one, one + count // 2) for one in range(count // 2)]
    return pairs


def rewards_of(source: JudgeReward, plan: JudgingPlan, verdicts: Mapping[str, Rating]) -> np.ndarray:
    """Returns the rewards (N,) from the verdicts by request, nan for an answer without an opinion."""
    values = {key: value_of(source, verdicts[key]) for key in plan.requests if key in verdicts}

    def mean(opinion: Opinion) -> float:
        if not opinion:
            return 0.5
        points = [1 - values[asked.key] if asked.second else values[asked.key] for asked in opinion]
        return sum(points) / len(points)

    rewards = np.full(len(plan.opinions), np.nan)
    for place, opinions in enumerate(plan.opinions):
        given = [mean(opinion) for opinion in opinions if all(asked.key in values for asked in opinion)]
        if given:
            rewards[place] = sum(given) / len(given)
    return rewards


def value_of(source: JudgeReward, verdict: Rating) -> float:
    """Returns a verdict on the (first) answer as a number from 0 to 1: its rating on the scale, or its
    points."""
    return reward_of(source, verdict) if source.compare == "none" else verdict[0]
