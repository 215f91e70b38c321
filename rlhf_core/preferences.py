"""One round of self-made preferences: sample n answers a prompt, score them, pair the best with the worst.

Sampling and scoring follow each other in one process, so that each has the device to itself.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import NamedTuple, cast

from rlhf_core.config import Preferences
from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.data.documents import Document, Prompt
from rlhf_core.data.sources import prompts as load_prompts
from rlhf_core.models.scoring import RewardScorer
from rlhf_core.rollout.engine import Answer, Sampler
from rlhf_core.stage import Outcome, RunDir, StageRequest, write_text
from rlhf_core.types import PreferencePair

PAIRS = "pairs.jsonl"


class Paired(NamedTuple):
    """Pairs, and how many prompts gave none: all answers equal in score, or best and worst equal in text."""

    pairs: list[PreferencePair]
    equal_score: int
    equal_text: int


def run(request: StageRequest, run: RunDir) -> Outcome:
    """Writes `pairs.jsonl` (prompt, chosen, rejected, scores)."""
    config = cast(Preferences, request.config)
    policy = request.inputs[config.policy]
    tokenizer = load_tokenizer(policy, request.trust_remote_code)
    renderer = Renderer(tokenizer, config.prompts.template)
    data = load_prompts(config.prompts, renderer, config.prompt_max_len, request.seed)
    prompts = slice_of_round(data.items, config.first_prompt, config.num_prompts, request.seed)
    print(f"sampling {config.n_samples_per_prompt} answers to each of {len(prompts)} prompts", flush=True)
    answers = sample(config, policy, prompts, renderer, request)
    texts = [[tokenizer.decode(answer.tokens, skip_special_tokens=True) for answer in group] for group in answers]

    print("scoring the answers", flush=True)
    scorer = RewardScorer(request.inputs[config.reward], "float32", config.micro_rollout_batch_size, request.trust_remote_code)
    documents = [_document(prompt, answer) for prompt, group in zip(prompts, answers, strict=True) for answer in group]
    flat = scorer.score(documents)
    n = config.n_samples_per_prompt
    scores = [flat[i : i + n] for i in range(0, len(flat), n)]

    paired = best_and_worst(prompts, texts, scores)
    if not paired.pairs:
        raise ValueError(f"all {len(prompts)} prompts gave answers of equal score or text: raise temperature or n_samples_per_prompt")
    write_text(run / PAIRS, "".join(pair.model_dump_json() + "\n" for pair in paired.pairs))
    metrics = {
        "prompts": float(len(prompts)),
        "pairs": float(len(paired.pairs)),
        "dropped/equal_score": float(paired.equal_score),
        "dropped/equal_text": float(paired.equal_text),
        "reward/mean": sum(flat) / len(flat),
        "reward/best": sum(max(group) for group in scores) / len(scores),
        "reward/worst": sum(min(group) for group in scores) / len(scores),
        "response/length": sum(len(a.tokens) for group in answers for a in group) / len(flat),
        "response/truncated": sum(not a.finished for group in answers for a in group) / len(flat),
        "prompt/truncated": sum(prompt.truncated for prompt in prompts) / len(prompts),
    }
    write_text(run / "metrics.jsonl", json.dumps({"step": 1, **metrics}) + "\n")
    return Outcome(metrics | data.report.metrics("data"), {"pairs": PAIRS})


def slice_of_round(prompts: Sequence[Prompt], first: int, count: int | None, seed: int) -> list[Prompt]:
    """`count` prompts from position `first` of one seeded shuffle; a round beyond the end starts again at the front."""
    order = list(range(len(prompts)))
    random.Random(seed).shuffle(order)
    return [prompts[order[(first + i) % len(order)]] for i in range(min(count or len(order), len(order)))]


def sample(config: Preferences, policy: str, prompts: Sequence[Prompt], renderer: Renderer, request: StageRequest) -> list[list[Answer]]:
    """Answers by a vLLM engine that lives for this call. Seeds are a function of run, round and prompt."""
    sampler = Sampler(
        policy,
        seed=request.seed,
        max_model_len=config.prompt_max_len + config.generate_max_len,
        kv_cache_gib=config.vllm.kv_cache_gib,
        gpu_memory_utilization=config.vllm.gpu_memory_utilization,
        trust_remote_code=request.trust_remote_code,
    )
    answers = sampler.generate(
        [prompt.tokens for prompt in prompts],
        seeds=[random.Random(f"{request.seed}-{config.first_prompt}-{i}").getrandbits(48) for i in range(len(prompts))],
        temperature=config.temperature,
        max_new_tokens=config.generate_max_len,
        stop_token_ids=renderer.stop_token_ids,
        n=config.n_samples_per_prompt,
    )
    sampler.close()
    return answers


def best_and_worst(prompts: Sequence[Prompt], texts: Sequence[Sequence[str]], scores: Sequence[Sequence[float]]) -> Paired:
    """The best answer of each prompt against its worst; prompts without a difference in score and text are dropped and counted."""
    pairs: list[PreferencePair] = []
    equal_score = equal_text = 0
    for prompt, group, values in zip(prompts, texts, scores, strict=True):
        best, worst = max(range(len(values)), key=values.__getitem__), min(range(len(values)), key=values.__getitem__)
        if values[best] == values[worst]:
            equal_score += 1
        elif group[best] == group[worst]:
            equal_text += 1
        else:
            pairs.append(
                PreferencePair(
                    prompt=prompt.messages,
                    chosen=group[best],
                    rejected=group[worst],
                    chosen_score=values[best],
                    rejected_score=values[worst],
                )
            )
    return Paired(pairs, equal_score, equal_text)


def _document(prompt: Prompt, answer: Answer) -> Document:
    return Document(prompt.tokens + answer.tokens, [False] * len(prompt.tokens) + [True] * len(answer.tokens))
