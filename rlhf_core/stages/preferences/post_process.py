"""What a round's sampled answers become, by post-processor: pairs, labelled answers, the best, or all of them. Pure and torch-free.

Arguments are per prompt: the prompt, its n answers as texts, and their rewards. A prompt that teaches nothing is dropped and counted.
Answers whose reward failed (nan) are left out.
Answers that the length limit cut take part in pairs, which say so: training puts no end after them. Elsewhere they are left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from rlhf_core.config import PostProcessor
from rlhf_core.data.documents import Message
from rlhf_core.records import LabelledAnswer, PreferencePair, ScoredAnswer

Prompts = Sequence[tuple[Message, ...]]
Texts = Sequence[Sequence[str]]
Rewards = Sequence[Sequence[float]]
Finished = Sequence[Sequence[bool]]
T = TypeVar("T")


class Made(NamedTuple):
    """Rows for training, and how many prompts gave none, by reason."""

    rows: Sequence[PreferencePair | ScoredAnswer]
    dropped: dict[str, int]


def post_process(
    post_processor: PostProcessor, prompts: Prompts, texts: Texts, rewards: Rewards, finished: Finished, min_reward: float | None
) -> Made:
    """The rows of one round. `finished` is False for a cut answer, `min_reward` rejection sampling's threshold.

    A prompt is dropped as `no_reward` when fewer of its answers have a reward than it takes: two where answers are compared, else one.
    """
    given = [[not math.isnan(value) for value in group] for group in rewards]
    needed = 2 if post_processor in ("dpo", "kto") else 1
    enough = [i for i, group in enumerate(given) if sum(group) >= needed]
    no_reward = {"no_reward": len(prompts) - len(enough)}
    prompts, given = [prompts[i] for i in enough], [given[i] for i in enough]
    texts, rewards = where([texts[i] for i in enough], given), where([rewards[i] for i in enough], given)
    finished = where([finished[i] for i in enough], given)
    if post_processor == "dpo":
        made = best_and_worst(prompts, texts, rewards, finished)
        return Made(made.rows, {**made.dropped, **no_reward})
    texts, rewards = where(texts, finished), where(rewards, finished)
    kept = [i for i, group in enumerate(texts) if group]
    prompts_of, texts_of, rewards_of = [prompts[i] for i in kept], [texts[i] for i in kept], [rewards[i] for i in kept]
    if post_processor == "kto":
        made = labelled(prompts_of, texts_of, rewards_of)
    elif post_processor == "rejection_sampling":
        made = best(prompts_of, texts_of, rewards_of, min_reward)
    else:
        made = everything(prompts_of, texts_of, rewards_of)
    return Made(made.rows, {**made.dropped, **no_reward, "no_whole_answer": len(prompts) - len(kept)})


def where(values: Sequence[Sequence[T]], keep: Sequence[Sequence[bool]]) -> list[list[T]]:
    """What belongs to the answers to keep."""
    return [[value for value, kept in zip(*groups, strict=True) if kept] for groups in zip(values, keep, strict=True)]


def best_and_worst(prompts: Prompts, texts: Texts, rewards: Rewards, finished: Finished) -> Made:
    """The best answer of each prompt against its worst; prompts without a difference in score and text are dropped."""
    pairs: list[PreferencePair] = []
    dropped = {"equal_score": 0, "equal_text": 0}
    for prompt, group, values, whole in zip(prompts, texts, rewards, finished, strict=True):
        top, low = max(range(len(values)), key=values.__getitem__), min(range(len(values)), key=values.__getitem__)
        if values[top] == values[low]:
            dropped["equal_score"] += 1
        elif group[top] == group[low]:
            dropped["equal_text"] += 1
        else:
            best, worst = {"chosen": group[top], "chosen_score": values[top]}, {"rejected": group[low], "rejected_score": values[low]}
            pairs.append(PreferencePair(prompt=prompt, **best, **worst, chosen_cut=not whole[top], rejected_cut=not whole[low]))
    return Made(pairs, dropped)


def labelled(prompts: Prompts, texts: Texts, rewards: Rewards) -> Made:
    """Every answer, desirable when it scores above the mean of the answers to its prompt, undesirable below it.

    A prompt's own mean, because some prompts are easier than others. Answers at the mean are left out; prompts whose answers all
    score the same are dropped.
    """
    answers: list[LabelledAnswer] = []
    dropped = {"equal_score": 0}
    for prompt, group, values in zip(prompts, texts, rewards, strict=True):
        if max(values) == min(values):
            dropped["equal_score"] += 1
            continue
        mean = sum(values) / len(values)
        answers += [
            LabelledAnswer(prompt=prompt, response=text, reward=value, label=value > mean)
            for text, value in zip(group, values, strict=True)
            if value != mean
        ]
    return Made(answers, dropped)


def best(prompts: Prompts, texts: Texts, rewards: Rewards, min_reward: float | None) -> Made:
    """The best of n (the first of equals); a prompt whose best answer scores below `min_reward` is dropped."""
    answers: list[ScoredAnswer] = []
    dropped = {"min_reward": 0}
    for prompt, group, values in zip(prompts, texts, rewards, strict=True):
        top = max(range(len(values)), key=values.__getitem__)
        if min_reward is not None and values[top] < min_reward:
            dropped["min_reward"] += 1
        else:
            answers.append(ScoredAnswer(prompt=prompt, response=group[top], reward=values[top]))
    return Made(answers, dropped)


def everything(prompts: Prompts, texts: Texts, rewards: Rewards) -> Made:
    """Every answer with its reward: conditional SFT writes it into the prompt."""
    return Made(
        [
            ScoredAnswer(prompt=prompt, response=text, reward=value)
            for prompt, group, values in zip(prompts, texts, rewards, strict=True)
            for text, value in zip(group, values, strict=True)
        ],
        {},
    )
