"""Seconds to sample fixed lengths with plain `vllm.LLM.generate` and with our sampler on the same prompts,
each in a process of its own.

    python tests/benchmarks/rollout.py --model FOLDER --prompts 128 --prompt-len 256 --generate-len 512

Plain vLLM: CUDA graphs, 0.9 of the memory, one seed for the engine, no log-probs. Ours: what PPO asks for, a
seed for each answer and the sampler's log-prob of each token; `whole`: with one seed for the whole batch;
`fp8`: `whole` with FP8 weights, keys and values.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from record import add_options, figure, save

ROUNDS = 3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--prompt-len", type=int, default=256)
    parser.add_argument("--generate-len", type=int, default=512)
    parser.add_argument("--memory", type=float, default=0.9)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--side", choices=("plain", "ours", "whole", "fp8", "greedy", "answers"))
    parser.add_argument(
        "--sides",
        nargs="+",
        default=["plain", "ours", "whole"],
        help="greedy, answers: the same for an evaluation; named twice: the better of two",
    )
    parser.add_argument(
        "--profile", type=int, default=0, help="functions named, of the start and of a round; of our sides"
    )
    add_options(parser, "rollout")
    arguments = parser.parse_args()
    if arguments.side is None:
        found: dict[str, int] = {}
        for side in arguments.sides:
            done = subprocess.run(
                [sys.executable, *sys.argv, "--side", side], check=True, stdout=subprocess.PIPE, text=True
            )
            print(done.stdout, end="", flush=True)
            rate = re.findall(rf"^{side}: .*?([\d,]+) tokens/s", done.stdout, re.M)[-1].replace(",", "")
            found[side] = max(found.get(side, 0), int(rate))
        save(
            arguments,
            "Sampling, ours beside plain vLLM",
            {side: figure(rate, "tokens/s", "higher") for side, rate in found.items()},
        )
        return
    rng = random.Random(0)
    prompts = [
        [[rng.randrange(100, 200) for _ in range(arguments.prompt_len)] for _ in range(arguments.prompts)]
        for _ in range(ROUNDS + 1)
    ]
    with profiled(arguments.profile, "the start"):
        generate = plain(arguments) if arguments.side in ("plain", "greedy") else ours(arguments)
    seconds = []
    for batch in prompts:
        start = time.perf_counter()
        tokens = generate(batch)
        seconds.append(time.perf_counter() - start)
        assert tokens > 0.98 * arguments.prompts * arguments.generate_len, tokens
    if arguments.profile:
        with profiled(arguments.profile, "a round"):
            generate(prompts[0])
    best = min(seconds[1:])
    print(
        f"{arguments.side}: {best:.2f} s, {tokens / best:,.0f} tokens/s; all rounds"
        f" {[round(s, 2) for s in seconds]}",
        flush=True,
    )


@contextmanager
def profiled(count: int, what: str) -> Iterator[None]:
    """Prints the `count` functions of this thread that took longest, with what they call; 0: nothing."""
    if not count:
        yield
        return
    with cProfile.Profile() as profile:
        yield
    print(f"profile of {what}:", flush=True)
    pstats.Stats(profile).sort_stats("cumulative").print_stats(count)


def plain(arguments: argparse.Namespace):  # type: ignore[no-untyped-def]
    import vllm

    from rlhf_core.hub.model_config import wraps_text_by_config
    from rlhf_core.rollout.vllm.environment import config_of, delta_rule

    length = arguments.prompt_len + arguments.generate_len
    options = {"dtype": arguments.dtype, "gpu_memory_utilization": arguments.memory}
    options |= {
        "language_model_only": wraps_text_by_config(config_of(arguments.model)),
        **delta_rule(arguments.model),
    }
    llm = vllm.LLM(arguments.model, max_model_len=length, seed=0, **options)
    temperature = 0.0 if arguments.side == "greedy" else 1.0
    params = vllm.SamplingParams(
        temperature=temperature, max_tokens=arguments.generate_len, ignore_eos=True, detokenize=False
    )

    def generate(batch: list[list[int]]) -> int:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in batch], params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return generate


def ours(arguments: argparse.Namespace):  # type: ignore[no-untyped-def]
    from rlhf_core.config import EngineConfig
    from rlhf_core.rollout.engine_contract import Sampling
    from rlhf_core.rollout.vllm.vllm_engine import VllmEngine

    length = arguments.prompt_len + arguments.generate_len
    formats = {"quantization": "fp8", "kv_cache_dtype": "fp8"} if arguments.side == "fp8" else {}
    vllm = EngineConfig(gpus=1, gpu_memory_utilization=arguments.memory, options=formats)
    sampler = VllmEngine(arguments.model, seed=0, max_model_len=length, dtype=arguments.dtype, config=vllm)
    rng = random.Random(1)

    def generate(batch: list[list[int]]) -> int:
        seeds = [rng.getrandbits(48) for _ in batch]
        # Random weights end an answer once in as many tokens as the vocabulary has.
        answers = sampler.generate(
            batch,
            seeds,
            Sampling(
                n=1,
                temperature=0.0 if arguments.side == "answers" else 1.0,
                max_new_tokens=arguments.generate_len,
                stop_token_ids=[],
                seed_whole=arguments.side in ("whole", "fp8"),
                logprobs=arguments.side != "answers",
            ),
        )
        return sum(len(answer.tokens) for group in answers for answer in group)

    return generate


if __name__ == "__main__":
    main()
