"""Stores answers sampled one iteration ahead: the engines generate them while the previous iteration trains.

The first iteration's answers come from the initial weights. After that, iteration k trains on answers of the weights before update k - 1
(Noukhovitch et al. 2024, "Asynchronous RLHF", arXiv:2410.18252). The clip is around the trainer's log-probs at the iteration's start, and
the importance weights cover the difference to the sampler's (Hilton et al. 2021, arXiv:2110.00641, the decoupled objective).
A resume state keeps these answers, since a resumed engine has newer weights.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from rlhf_core.rollout.engine import Answer
from rlhf_core.stages.ppo.sampling import PromptOrder, Sampled, rollout
from rlhf_core.system.files import write_text

AHEAD, EXPERTS = "ahead.jsonl", "ahead.npz"


def write_ahead(folder: Path, ahead: Sampled) -> None:
    """Writes the answers, their log-probs, their experts and their age into a resume state."""
    lines = [json.dumps({"age": ahead.age, "position": ahead.position})]
    for found in ahead.rollouts:
        start = len(found.prompt.tokens)
        tokens, logprobs = found.document.tokens[start:], found.sampler_logprobs[start:].tolist()
        lines.append(json.dumps({"tokens": tokens, "logprobs": logprobs, "finished": found.finished}))
    experts = {str(i): found.document.experts for i, found in enumerate(ahead.rollouts) if found.document.experts is not None}
    np.savez(folder / EXPERTS, allow_pickle=False, **experts)
    write_text(folder / AHEAD, "\n".join(lines) + "\n")


def read_ahead(folder: Path, order: PromptOrder, n: int) -> Sampled | None:
    """Reads what `write_ahead` wrote, bit for bit, `n` answers to each prompt; None when it wrote nothing."""
    if not (folder / AHEAD).is_file():
        return None
    head, *answers = map(json.loads, (folder / AHEAD).read_text().splitlines())
    prompts = [prompt for prompt, _ in order.take(head["position"] - order.batch, order.batch) for _ in range(n)]
    stored = np.load(folder / EXPERTS, allow_pickle=False) if (folder / EXPERTS).is_file() else {}
    experts = [stored[str(i)] if str(i) in stored else None for i in range(len(answers))]
    rollouts = [rollout(p, Answer(**answer, experts=e)) for p, answer, e in zip(prompts, answers, experts, strict=True)]
    return Sampled(rollouts, None, head["position"], {}, head["age"])
