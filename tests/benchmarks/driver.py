"""Times what PPO's driver does with an iteration's answers, beside the work of models and engines: without
GPUs, on made-up answers.

    python tests/benchmarks/driver.py --answers 1024 --tokens 16384 --model FOLDER

FOLDER holds a tokenizer. Answers come from an engine's process, texts go to a function reward, arrays come
from three models' processes, and experience goes to the actor's. Prints the seconds of each part on the
driver, and what all tokens would take at 1 GB/s.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from record import add_options, figure, save

from rlhf_core.cluster import ray_cluster
from rlhf_core.cluster.worker_group import in_order, put_on_nodes
from rlhf_core.config import PPO
from rlhf_core.data.chat import load_tokenizer
from rlhf_core.data.documents import Document, Prompt
from rlhf_core.rewards.clients import Rewards
from rlhf_core.rewards.combine import Term
from rlhf_core.rollout.engine_contract import SampledAnswer, answer_of
from rlhf_core.stages.ppo.by_reference import by_reference, joined, read_by
from rlhf_core.stages.ppo.iteration import IterationSchedule, minibatches
from rlhf_core.stages.ppo.rewards.credit import credit, divergence
from rlhf_core.stages.ppo.rewards.texts import decoder, samples
from rlhf_core.stages.ppo.rollout_records import Experience, Scores, StoredColumn
from rlhf_core.stages.ppo.sampling.rollout_group import rollout

SECONDS: dict[str, float] = {}
# while models score, and while they train
BESIDE = ("texts for a function", "sampler's log-probs go to nodes", "divergence")


@contextmanager
def timed(name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    SECONDS[name] = time.perf_counter() - start
    print(f"{name:40} {SECONDS[name]:7.2f} s", flush=True)


def answer(count: int, tokens: int, vocabulary: int) -> list[tuple[int, list[SampledAnswer]]]:
    """An engine's answers, four to a prompt."""
    numbers = np.random.default_rng(0)
    groups = [
        [answer_of(numbers.integers(5, vocabulary, tokens).tolist(), [-1.0] * tokens, True) for _ in range(4)]
        for _ in range(count // 4)
    ]
    return list(enumerate(groups))


def score(documents: Sequence[Document]) -> tuple[list[tuple[int, np.ndarray]], float]:
    """A model's log-probs, and seconds: as `Worker.call`."""
    return [
        (i, np.where(document.mask_array, np.float32(-1), np.float32(0)))
        for i, document in enumerate(documents)
    ], 0.0


def train(experience: Sequence[Experience], places: Sequence[StoredColumn], *stored: object) -> int:
    return len(joined(experience, places, stored))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--answers", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--model", type=Path, required=True)
    add_options(parser, "driver")
    arguments = parser.parse_args()
    count = arguments.answers
    length = arguments.tokens
    tokenizer = load_tokenizer(str(arguments.model))
    import ray  # not before rlhf_core.cluster has set what it reads

    ray_cluster.OBJECT_STORE_BYTES = ray_cluster.GPU_OBJECT_STORE_BYTES  # as on hosts that sample so much
    ray_cluster.connect()
    answering, scoring, training = (ray.remote(function) for function in (answer, score, train))
    prompts = [
        Prompt((), [5 + (i + j) % 50 for j in range(arguments.prompt_len)], {}, False)
        for i in range(count // 4)
    ]
    config = PPO.model_validate(
        {
            "prompts": {"sources": "p.jsonl"},
            "advantage_estimator": "grpo",
            "n_samples_per_prompt": 4,
            "rollout_batch_size": count // 4,
            "train_batch_size": count // 4,
            "generate_max_len": length,
            "reward": "checks.py:score",
        }
    )
    sampled = answering.remote(count, length, len(tokenizer))
    ray.wait([sampled], fetch_local=False)
    with timed("answers arrive"):
        groups = in_order([ray.get(sampled)])
    with timed("rollouts"):
        rollouts = [
            rollout(prompt, each) for prompt, group in zip(prompts, groups, strict=True) for each in group
        ]
    with timed("texts for a function"):
        texts = samples(rollouts, decoder(tokenizer), {"responses"})
    assert len(texts) == count
    with timed("documents go to nodes"):
        documents = put_on_nodes([each.document for each in rollouts])
    pending = [scoring.remote(documents) for _ in range(2)]
    ray.wait(pending, num_returns=2, fetch_local=False)
    with timed("sampler's log-probs go to nodes"):
        sampler = put_on_nodes([each.sampler_logprobs for each in rollouts])
    stored = [
        StoredColumn("document", 0, False, documents),
        StoredColumn("sampler_logprobs", 0, False, sampler),
        StoredColumn("old_logprobs", 0, True, pending[0]),
        StoredColumn("ref_logprobs", 0, True, pending[1]),
    ]
    with timed("scores arrive"):
        (first, _), (second, _) = ray.get(pending)
        logprobs = in_order([first])
        references = in_order([second])
    rewards = Rewards({"score": np.random.default_rng(0).normal(size=count)}, {})
    with timed("credit"):
        found = credit(
            rollouts,
            Scores(logprobs, references, None, rewards),
            0.01,
            {},
            config,
            [Term("score", 1.0, "none", None)],
        )
    minibatches(found.usable, IterationSchedule(4, 1, {}, "0"))
    with timed("experience goes to nodes"):
        left, columns = by_reference(found.experience, stored, 1)
        shared = put_on_nodes(left)
        places, held = read_by("actor", columns)
    with timed("divergence"):
        divergence(rollouts, logprobs, references, found.usable, 0.01, config)
    with timed("a rank has the experience"):
        ray.get(training.remote(shared, places, *held))
    ray.shutdown()
    whole = sum(seconds for name, seconds in SECONDS.items() if not name.startswith("a rank"))
    waited = whole - sum(SECONDS[name] for name in BESIDE)
    print(f"{'in all':40} {whole:7.2f} s for {count * length:,} tokens; {waited:.2f} s that models wait for")
    measured = {
        **{name: figure(round(seconds, 3), "s") for name, seconds in SECONDS.items()},
        "in all": figure(round(whole, 2), "s"),
    }
    measured |= {"models wait": figure(round(waited, 2), "s")}
    save(
        arguments,
        "What PPO's driver does with an iteration's answers",
        measured | {"tokens": figure(count * length, "tokens")},
    )


if __name__ == "__main__":
    main()
