"""Answers as PPO's iterations record them for readers, written by the stage's own code, with invented
numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rlhf_core.data.documents import Document, Message, Prompt
from rlhf_core.rewards.clients import Rewards
from rlhf_core.runs.run_dir import ROLLOUTS
from rlhf_core.stages.ppo.rewards.texts import TokenTexts
from rlhf_core.stages.ppo.rollout_records import Own, Rollout
from rlhf_core.stages.ppo.sampling.validation import write_rollouts
from rlhf_core.stages.ppo.token_records import TokenRecord, readable

END = 0  # id of the end token


class Words:
    """A vocabulary that grows: one token for each word."""

    def __init__(self) -> None:
        self.words = ["<|end|>"]

    def ids(self, text: str) -> list[int]:
        found = []
        for word in text.split(" "):
            if f"{word} " not in self.words:
                self.words.append(f"{word} ")
            found.append(self.words.index(f"{word} "))
        return found

    def decode(self, tokens: Sequence[int], skip: bool) -> str:
        return "".join(self.words[token] for token in tokens if token != END or not skip)

    def texts(self, tokens: Sequence[int]) -> TokenTexts:
        texts = [self.words[token] for token in tokens]
        return TokenTexts(texts, [at for at, token in enumerate(tokens) if token == END])


def answered(words: Words, number: int, text: str, cut: bool = False) -> Rollout:
    """A single answer to the prompt `Question NUMBER?`; the engine's log-probs fall from -0.1."""
    prompt_ids = words.ids(f"Question {number}?")
    prompt = Prompt(({"role": "user", "content": f"Question {number}?"},), prompt_ids, {"n": number}, False)
    tokens = words.ids(text) + ([] if cut else [END])
    document = Document(prompt_ids + tokens, [False] * len(prompt_ids) + [True] * len(tokens))
    logprobs = np.concatenate([np.zeros(len(prompt_ids)), -0.1 * np.arange(1, 1 + len(tokens))])
    return Rollout(prompt, document, logprobs.astype(np.float32), not cut)


def episode(words: Words, number: int, call: str, result: str, text: str) -> Rollout:
    """An episode of two answers, the first of which calls the tool `search`."""
    prompt_ids = words.ids(f"Question {number}?")
    prompt = Prompt(({"role": "user", "content": f"Question {number}?"},), prompt_ids, {"n": number}, False)
    parts = [
        (prompt_ids, False),
        ([*words.ids(call), END], True),
        (words.ids(result), False),
        ([*words.ids(text), END], True),
    ]
    tokens = [token for ids, _ in parts for token in ids]
    mask = [sampled for ids, sampled in parts for _ in ids]
    calls = [{"type": "function", "id": "call00000", "function": {"name": "search", "arguments": "{}"}}]
    talk: tuple[Message, ...] = (
        *prompt.messages,
        {"role": "assistant", "content": call, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call00000", "content": result},
        {"role": "assistant", "content": text},
    )
    logprobs = np.where(mask, np.float32(-0.5), np.float32(0))
    own = Own(1.0, None, "", 2, 1, 0.1)
    return Rollout(prompt, Document(tokens, mask), logprobs, True, talk, own)


def write(
    run_dir: Path,
    iteration: int,
    words: Words,
    rollouts: Sequence[Rollout],
    advantages: Sequence[float],
    gap: float = 0.05,
    trained: bool = True,
) -> Path:
    """Writes the answers of an iteration. `advantages`: of each answer's first token; the others fall to 0;
    `gap`: trainer minus engine, growing by itself from token to token."""
    records = {}
    for i, (rollout, first) in enumerate(zip(rollouts, advantages, strict=True)):
        mask = rollout.document.mask_array
        steps = np.arange(int(mask.sum()))
        falling = (first * (1 - steps / max(1, len(steps)))).astype(np.float32)
        engine = rollout.sampler_logprobs[mask]
        trainer = (engine + gap * steps).astype(np.float32)
        parts = {"sum": first, "clipped": first, "shaped": first, "kl": 0.25, "kl_coef": 0.1}
        records[i] = TokenRecord(falling, trainer, engine - 1, None, trained, parts, (0, iteration - 1))
    rewards = Rewards({"judge": np.array(advantages), "length": np.full(len(rollouts), np.nan)}, {})
    file = run_dir / ROLLOUTS / f"iteration{iteration}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_rollouts(file, readable(rollouts, rewards, records, words.decode, words.texts))
    return file
