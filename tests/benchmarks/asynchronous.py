"""Times asynchronous training beside the loop in turns, in one run: GRPO on episodes of very different
lengths, on random weights.

    python tests/benchmarks/asynchronous.py --model FOLDER --out FOLDER --staleness 0 1 4 --engine-gpus 1
    --actor-gpus 1

The number of turns of an episode is lognormal (the longest of a hundred has ten times the median's), so one
long episode keeps the loop in turns waiting. With --wait each turn also waits for a tool, for lognormal
seconds of that median. Prints, for each staleness, seconds of an iteration without the first quarter of them,
episodes and tokens per second, and the mean and largest age of tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from openrlhf_ppo import run_child
from record import add_options, figure, save

from rlhf_core.config import PPO
from rlhf_core.runs.metrics_log import read_metrics
from rlhf_core.runs.run_dir import RunDir
from tests.support.stage_request import stage_request

WORLD = """
import asyncio, random

class World:
    def __init__(self, wait, longest):
        self.wait, self.longest, self.count = wait, longest, 0

    async def rollout(self, task, model):
        self.count += 1
        rng = random.Random(f"{task['number']}-{self.count}")
        turns = min(self.longest, max(1, round(2 * rng.lognormvariate(0, 1.0))))
        answer = await model.answer()
        for _ in range(turns - 1):
            if self.wait:
                await asyncio.sleep(self.wait * rng.lognormvariate(0, 1.0))
            answer = await model.answer("more")
        return sum(map(ord, answer.text)) % 101 / 100
"""


def stage_config(arguments: argparse.Namespace, staleness: int) -> PPO:
    sizes = {
        "rollout_batch_size": arguments.prompts,
        "n_samples_per_prompt": 8,
        "train_batch_size": arguments.prompts * 8,
    }
    environment = {
        "path": f"{arguments.out / 'world.py'}:World",
        "options": {"wait": arguments.wait, "longest": arguments.longest},
        "max_turns": arguments.longest,
        "answer_max_len": arguments.answer_len,
    }
    engines = dict(num_engines=max(1, arguments.engine_gpus), gpus=float(arguments.engine_gpus > 0), cpus=1.0)
    actor = {
        "num_ranks_per_node": max(1, arguments.actor_gpus),
        "gpus": float(arguments.actor_gpus > 0),
        "cpus": 1.0,
    }
    fields: dict[str, Any] = {
        **sizes,
        "actor": "base",
        "prompts": {"sources": str(arguments.out / "prompts.jsonl")},
        "environment": environment,
        "advantage_estimator": "grpo",
        "init_kl_coef": 0.0,
        "max_epochs": 1,
        "max_steps": arguments.steps,
        "num_episodes": arguments.steps,
        "prompt_max_len": 128,
        "generate_max_len": arguments.longest * (arguments.answer_len + 16),
        "max_staleness": staleness,
        "dtype": "bfloat16" if arguments.actor_gpus else "float32",
        "micro_train_tokens": arguments.micro_tokens,
        "micro_rollout_tokens": arguments.micro_tokens,
        "actor_ranks": actor,
        "engine": engines,
        "save_steps": 10**6,
    }
    return PPO.model_validate(fields)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 4])
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--answer-len", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--longest", type=int, default=24, help="turns of the longest episode")
    parser.add_argument("--wait", type=float, default=0.0, help="median seconds of a tool")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--micro-tokens", type=int, default=32768)
    parser.add_argument("--engine-gpus", type=int, default=0)
    parser.add_argument("--actor-gpus", type=int, default=0)
    add_options(parser, "asynchronous")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True)
    (arguments.out / "world.py").write_text(WORLD)
    rows = [{"prompt": f"question {i}", "number": i} for i in range(arguments.prompts * arguments.steps)]
    (arguments.out / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    measured: dict[str, dict[str, Any]] = {}
    for staleness in arguments.staleness:
        run = RunDir(arguments.out / f"staleness{staleness}")
        config = stage_config(arguments, staleness)
        run.prepare(stage_request(config, arguments.model))
        code = run_child("-m", "rlhf_core", str(run.path))
        if code:
            sys.exit(code)
        lines = read_metrics(run.path)[arguments.steps // 4 :]
        seconds = (lines[-1]["time"] - lines[0]["time"]) / (len(lines) - 1)
        found = {
            "seconds": figure(seconds, "s an iteration"),
            "episodes": figure(8 * arguments.prompts / seconds, "1/s", "higher"),
            "tokens": figure(
                sum(line["tokens"] for line in lines[1:]) / (len(lines) - 1) / seconds, "1/s", "higher"
            ),
            "age": figure(sum(line.get("rollout/age", 0.0) for line in lines) / len(lines), "updates", None),
            "oldest": figure(
                max(line.get("rollout/age_max", line.get("rollout/age", 0.0)) for line in lines),
                "updates",
                None,
            ),
        }
        for phase in ("generate", "score", "train", "sync"):
            found[phase] = figure(sum(line[f"phase/{phase}"] for line in lines) / len(lines), "s", None)
        print(staleness, {name: round(value["value"], 3) for name, value in found.items()}, flush=True)
        measured |= {f"staleness {staleness}, {name}": value for name, value in found.items()}
    save(arguments, "GRPO on episodes of lognormal length, asynchronous beside in turns", measured)


if __name__ == "__main__":
    main()
