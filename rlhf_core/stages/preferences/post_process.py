"""Turns a round's sampled answers into rows. The post-processor decides whether these are pairs, labelled
answers, the best answers, or all answers. Pure and torch-free.

Drops and counts a prompt that yields no row. Leaves out answers whose reward failed (nan). Answers truncated
at the length limit are used only in pairs; these are marked, and training adds no end token to them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

from rlhf_core.config import PostProcessor
from rlhf_core.data.documents import Message
from rlhf_core.records import LabelledAnswer, PreferencePair, ScoredAnswer

REWARD = attrgetter("reward")
ROUNDING = 1e-6  # error of rewards in float32, as a fraction of the largest reward


class Scored(NamedTuple):
    """Holds an answer and its reward. `finished` is False if the length limit truncated the answer."""

    text: str
    reward: float
    finished: bool


class AnsweredPrompt(NamedTuple):
    """Holds a prompt and its answers."""

    prompt: tuple[Message, ...]
    answers: list[Scored]


class TrainingRows(NamedTuple):
    """Holds rows for training, and the number of prompts that yielded no row, by reason."""

    rows: Sequence[PreferencePair | ScoredAnswer]
    dropped: dict[str, int]


def post_process(
    post_processor: PostProcessor,
    prompts: Sequence[tuple[Message, ...]],
    texts: Sequence[Sequence[str]],
    rewards: Sequence[Sequence[float]],
    finished: Sequence[Sequence[bool]],
    min_reward: float | None,
) -> TrainingRows:
    """Returns the rows of one round. `finished` is False for a truncated answer. `min_reward` is the
    threshold of rejection sampling.

    Drops a prompt as `no_reward` if too few of its answers have a reward: fewer than two if answers are
    compared, otherwise none.
    """
    answers = [
        [Scored(*answer) for answer in zip(*group, strict=True)]
        for group in zip(texts, rewards, finished, strict=True)
    ]
    scored = [
        AnsweredPrompt(p, [a for a in group if not math.isnan(a.reward)])
        for p, group in zip(prompts, answers, strict=True)
    ]
    needed = 2 if post_processor in ("dpo", "kto") else 1
    enough = [group for group in scored if len(group.answers) >= needed]
    dropped = {"no_reward": len(scored) - len(enough)}
    if post_processor == "dpo":
        made = best_and_worst(enough)
    else:
        whole = [
            AnsweredPrompt(group.prompt, [answer for answer in group.answers if answer.finished])
            for group in enough
        ]
        kept = [group for group in whole if group.answers]
        dropped["no_whole_answer"] = len(enough) - len(kept)
        if post_processor == "kto":
            made = labelled(kept)
        elif post_processor == "rejection_sampling":
            made = best(kept, min_reward)
        else:  # conditional SFT writes every answer's reward into its prompt
            made = TrainingRows(
                [
                    ScoredAnswer(prompt=group.prompt, response=a.text, reward=a.reward)
                    for group in kept
                    for a in group.answers
                ],
                {},
            )
    return TrainingRows(made.rows, made.dropped | dropped)


def best_and_worst(groups: Sequence[AnsweredPrompt]) -> TrainingRows:
    """Returns pairs of the best and the worst answer to each prompt. Drops prompts whose answers do not
    differ in both score and text."""
    pairs: list[PreferencePair] = []
    dropped = {"equal_score": 0, "equal_text": 0}
    for prompt, answers in groups:
        top = max(answers, key=REWARD)
        low = min(answers, key=REWARD)
        if top.reward == low.reward:
            dropped["equal_score"] += 1
        elif top.text == low.text:
            dropped["equal_text"] += 1
        else:
            chosen = {"chosen": top.text, "chosen_score": top.reward, "chosen_cut": not top.finished}
            rejected = {"rejected": low.text, "rejected_score": low.reward, "rejected_cut": not low.finished}
            pairs.append(PreferencePair.model_validate({"prompt": prompt, **chosen, **rejected}))
    return TrainingRows(pairs, dropped)


def labelled(groups: Sequence[AnsweredPrompt]) -> TrainingRows:
    """Labels complete answers desirable if they score above the mean of the complete answers to the same
    prompt, and undesirable if they score below it.

    The mean is per prompt, because some prompts are easier than others. Leaves out answers at the mean, up to
    float32 rounding, and drops prompts whose answers all score the same.
    """
    rows: list[LabelledAnswer] = []
    equal = 0
    for prompt, answers in groups:
        rewards = [answer.reward for answer in answers]
        if max(rewards) == min(rewards):
            equal += 1
            continue
        mean = sum(rewards) / len(rewards)
        rounding = ROUNDING * max(map(abs, rewards))
        above = [(answer, answer.reward > mean) for answer in answers if abs(answer.reward - mean) > rounding]
        rows += [
            LabelledAnswer(prompt=prompt, response=a.text, reward=a.reward, label=label) for a, label in above
        ]
    return TrainingRows(rows, {"equal_score": equal})


def best(groups: Sequence[AnsweredPrompt], min_reward: float | None) -> TrainingRows:
    """Returns the best answer to each prompt, or the first of several equally good answers. Drops a prompt
    whose best answer scores below `min_reward`."""
    tops = [(prompt, max(answers, key=REWARD)) for prompt, answers in groups]
    kept = [(prompt, top) for prompt, top in tops if min_reward is None or top.reward >= min_reward]
    rows = [ScoredAnswer(prompt=prompt, response=top.text, reward=top.reward) for prompt, top in kept]
    return TrainingRows(rows, {"min_reward": len(tops) - len(kept)})
