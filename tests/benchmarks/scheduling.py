"""Milliseconds in which each step of an engine is scheduled and its output is read, by alignflow's scheduler
and by vLLM's own.

    python tests/benchmarks/scheduling.py --model FOLDER [--requests 256] [--tokens 128] [--rounds 3] [--json
    OUT]

The engine runs in this process, on the GPU or on CPUs. The two schedulers take turns on the same requests; a
figure is the median of all steps that decode one token of at least three quarters of them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from record import add_options, figure, save

from rlhf_core.config import EngineConfig
from rlhf_core.rollout.contract import Sampling
from rlhf_core.rollout.vllm.vllm_engine import VllmEngine

PROMPT = 16


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    add_options(parser, "scheduling")
    arguments = parser.parse_args()
    wanted = EngineConfig(kv_cache_gib=2, options={"max_num_seqs": arguments.requests})
    found: dict[bool, list[float]] = {True: [], False: []}
    with closing(
        VllmEngine(str(arguments.model), seed=0, max_model_len=PROMPT + arguments.tokens, config=wanted)
    ) as sampler:
        engine: Any = sampler.llm.llm_engine
        scheduler = engine.engine_core.engine_core.scheduler
        steps = measured(scheduler, arguments.requests)
        sampling = Sampling(1, 1.0, arguments.tokens, [])
        for turn in range(-1, 2 * arguments.rounds):  # the first one warms up
            scheduler._plain = turn % 2 == 0
            steps.clear()
            sampler.generate(
                [list(range(5, 5 + PROMPT))] * arguments.requests, range(arguments.requests), sampling
            )
            found[scheduler._plain] += steps if turn >= 0 else []
    quick, own = (1e3 * statistics.median(found[plain]) for plain in (True, False))
    figures = {
        "schedule and read a step": figure(round(quick, 2), "ms"),
        "vLLM's own scheduler": figure(round(own, 2), "ms", None),
        "ratio": figure(round(own / quick, 2), "times", "higher"),
        "steps": figure(min(map(len, found.values())), "steps", None),
    }
    for name, value in figures.items():
        print(f"{name}: {value['value']} {value['unit']}")
    save(
        arguments,
        f"Scheduling {arguments.requests} requests, a token each a step, beside vLLM's own scheduler",
        figures,
    )


def measured(scheduler: Any, requests: int) -> list[float]:
    """Wraps the two methods of a scheduler that an engine calls each step; returns the list to which their
    seconds go."""
    seconds = list[float]()
    scheduled = [0.0]
    schedule = scheduler.schedule
    read = scheduler.update_from_output

    def timed_schedule(*given: Any, **named: Any) -> Any:
        start = time.perf_counter()
        out = schedule(*given, **named)
        scheduled[0] = time.perf_counter() - start
        return out

    def timed_read(output: Any, *given: Any, **named: Any) -> Any:
        start = time.perf_counter()
        found = read(output, *given, **named)
        if 0.75 * requests <= output.total_num_scheduled_tokens <= requests:
            seconds.append(scheduled[0] + time.perf_counter() - start)
        return found

    scheduler.schedule = timed_schedule
    scheduler.update_from_output = timed_read
    return seconds


if __name__ == "__main__":
    main()
