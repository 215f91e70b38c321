"""Learning beside a peer: GRPO from one checkpoint in ours and in TRL or verl, over steps and over seconds.

    python tests/benchmarks/learning.py --out FOLDER --peer trl --json FILE
    python tests/benchmarks/learning.py --out FOLDER --cpu --sft-rows 8000 --steps 10   # tries it, without a peer

A small model is trained from scratch on sums of reasoning-gym (chain_sum) until it answers a fifth to two
fifths of them; `--sft-rows` says on how many. Then both sides train from this checkpoint on the same prompts in
the same order, with the same number of answers, batches, rates and steps; an answer that equals the sum has
reward 1, others 0. Without `--peer` the checkpoint, the prompts and our run alone are made; a second call with
`--peer` and the same `--out` and options adds what is missing. So does a call with prompts.jsonl and
talks.jsonl made elsewhere, on a host without reasoning-gym. Prints and records the rewards by tenths of the
run, and the seconds from the start of each run, and from its first step's end, until the mean of five steps is
20 points above the start.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from openrlhf_ppo import run_child
from record import add_options, figure, save
from shapes import letters
from trl_grpo import run_trl
from verl_grpo import PASS_TOKENS, SEED, run_verl

from rlhf_core.config import PPO, SFT, Data, StageConfig
from rlhf_core.data.rows.mixture import load_rows
from rlhf_core.runs.metrics_log import read_metrics
from rlhf_core.runs.run_dir import RunDir
from tests.support.stage_request import stage_request

CORRECT = '''
def correct(responses, rows):
    """1 for an answer that equals the row's, else 0."""
    return [float(response.strip() == row["answer"]) for response, row in zip(responses, rows, strict=True)]
'''
TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
LAYERS = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
SMALL = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4}
VOCABULARY = 320
SUM = {"min_terms": 2, "max_terms": 2, "min_digits": 1}
PROMPT_LEN = 64
ANSWER_LEN = 8
SFT_BATCH = 32
RISE = 0.2
WINDOW = 5
TENTHS = 10
BEGAN = "began.txt"
PEERS = {"trl": run_trl, "verl": run_verl}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cpu", action="store_true", help="a model of two layers, in float32")
    parser.add_argument("--peer", choices=PEERS, help="runs after ours")
    parser.add_argument("--peer-path", default="", help="a folder of packages that the peer alone imports")
    parser.add_argument("--peer-seconds", type=float, default=580.0, help="the peer is ended after these")
    parser.add_argument("--digits", type=int, default=2, help="most digits of a term")
    parser.add_argument("--sft-rows", type=int, default=100_000)
    parser.add_argument("--sft-learning-rate", type=float, default=3e-4)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--prompts", type=int, default=64, help="prompts of a step")
    parser.add_argument("--answers", type=int, default=8, help="answers to a prompt")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--warmup-steps", type=int, default=0, help="optimiser steps; two an iteration")
    add_options(parser, "learning")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "correct.py").write_text(CORRECT)
    if not (arguments.out / "prompts.jsonl").exists():
        count = arguments.steps * arguments.prompts
        write_sums(arguments.out / "prompts.jsonl", count, arguments.digits, seed=1)
    if not (arguments.out / "model").is_dir():
        write_model(arguments.out / "model", arguments.cpu)
    start = stage(arguments, "sft", sft(arguments), arguments.out / "model") / "checkpoint"
    ours = stage(arguments, "grpo", grpo(arguments), start)
    began = float((ours / BEGAN).read_text())
    lines = read_metrics(ours)
    show_phases(lines)
    found = figures("ours", [(line["reward/mean"], line["time"] - began) for line in lines], arguments.steps)
    if arguments.peer:
        steps = PEERS[arguments.peer](arguments, start, PROMPT_LEN, ANSWER_LEN)
        found |= figures(arguments.peer, steps, arguments.steps)
    save(arguments, "GRPO on sums from one checkpoint, learning over steps and over seconds", found)


def write_model(folder: Path, cpu: bool) -> None:
    """Writes random weights (seed 0) and a tokenizer of letters."""
    torch.manual_seed(0)
    sizes = SMALL if cpu else LAYERS
    ends = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    heads = sizes["num_attention_heads"]
    config = transformers.Qwen3Config(
        **sizes,
        **ends,
        num_key_value_heads=heads,
        head_dim=sizes["hidden_size"] // heads,
        vocab_size=VOCABULARY,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        dtype="float32" if cpu else "bfloat16",
    )
    transformers.Qwen3ForCausalLM(config).to(config.dtype).save_pretrained(folder)
    tokenizer = letters(VOCABULARY)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


def sums(count: int, digits: int, seed: int) -> list[dict[str, str]]:
    """Questions `12 + 7 =` and their answers."""
    tasks = {
        "tasks": {"chain_sum": SUM | {"max_digits": digits}},
        "size": count,
        "seed": seed,
        "instruction": "",
    }
    rows = load_rows(Data.model_validate({"sources": {"reasoning_gym": tasks}}), 0)
    questions = [row["prompt"][-1]["content"] for row in rows]
    parts = [question.partition(":")[2].strip().replace("?", "") for question in questions]
    return [{"question": part, "answer": row["answer"]} for part, row in zip(parts, rows, strict=True)]


def write_sums(file: Path, count: int, digits: int, seed: int) -> None:
    asked = [
        {"prompt": [{"role": "user", "content": row["question"]}], "answer": row["answer"]}
        for row in sums(count, digits, seed)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in asked))


def write_talks(file: Path, count: int, digits: int) -> None:
    talks = [
        [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
        for row in sums(count, digits, seed=0)
    ]
    file.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))


def sft(arguments: argparse.Namespace) -> SFT:
    file = arguments.out / "talks.jsonl"
    if not file.exists():
        write_talks(file, arguments.sft_rows, arguments.digits)
    return SFT.model_validate(
        {
            "data": {"sources": str(file)},
            "model": "base",
            "max_len": PROMPT_LEN + ANSWER_LEN,
            "train_batch_size": SFT_BATCH,
            "micro_train_tokens": PASS_TOKENS,
            "max_epochs": 1,
            "learning_rate": arguments.sft_learning_rate,
            **placed(arguments, ("ranks",)),
        }
    )


def grpo(arguments: argparse.Namespace) -> PPO:
    engine: dict[str, Any] = {"gpus": 1, "gpu_memory_utilization": 0.3}
    together = {"colocate_all": True, "engine": engine}
    apart = {"engine": {"cpus": 0.5, "kv_cache_gib": 0.5}}
    return PPO.model_validate(
        {
            "actor": "base",
            "prompts": {"sources": str(arguments.out / "prompts.jsonl")},
            "reward": f"{arguments.out / 'correct.py'}:correct",
            "advantage_estimator": "grpo",
            "init_kl_coef": 0.0,
            "loss_aggregation": "token",
            "rollout_batch_size": arguments.prompts,
            "n_samples_per_prompt": arguments.answers,
            "train_batch_size": arguments.prompts * arguments.answers // 2,
            "micro_train_tokens": PASS_TOKENS,
            "micro_rollout_tokens": PASS_TOKENS,
            "max_epochs": 1,
            "max_steps": arguments.steps,
            "prompt_max_len": PROMPT_LEN,
            "generate_max_len": ANSWER_LEN,
            "actor_learning_rate": arguments.learning_rate,
            "schedule": "constant",
            "warmup_steps": arguments.warmup_steps,
            # as verl has them by default
            "betas": (0.9, 0.999),
            "dual_clip": 3.0,
            "sampler_is": "off",
            "save_steps": 10**6,
            **placed(arguments, ("actor_ranks",)),
            **(apart if arguments.cpu else together),
        }
    )


def placed(arguments: argparse.Namespace, roles: tuple[str, ...]) -> dict[str, Any]:
    ranks = {"cpus": 0.5} if arguments.cpu else {"gpus": 1}
    return {"dtype": "float32" if arguments.cpu else "bfloat16", **dict.fromkeys(roles, ranks)}


def stage(arguments: argparse.Namespace, name: str, config: StageConfig, model: Path) -> Path:
    """Runs a stage unless it has ended before with the same fields; returns its folder."""
    run = RunDir(arguments.out / name)
    if run.result() is not None and run.request().config != config:
        sys.exit(f"{run.path} has other settings: give the same options, or another --out")
    if run.result() is None:
        run.prepare(stage_request(config, model, seed=SEED))
        (run / BEGAN).write_text(str(time.time()))
        code = run_child("-m", "rlhf_core", str(run.path))
        if code:
            sys.exit(f"{name}: exit code {code}")
    return run.path


def show_phases(lines: list[dict[str, float]]) -> None:
    """Prints the median seconds of each phase, and between two lines, of the second half of the run."""
    later = lines[len(lines) // 2 :]
    medians = {
        name: round(statistics.median(line[name] for line in later), 3)
        for name in later[-1]
        if name.startswith("phase/")
    }
    between = [after["time"] - before["time"] for before, after in pairwise(later)]
    print(f"ours: {statistics.median(between):.3f} s an iteration, {medians}", flush=True)


def figures(name: str, steps: list[tuple[float, float]], planned: int) -> dict[str, dict[str, Any]]:
    """`steps`: mean reward, and seconds since the run's start at its end; those of a run that was cut off are
    fewer than `planned`, and tenths that it did not reach are left out."""
    rewards = [reward for reward, _ in steps]
    edges = [planned * i // TENTHS for i in range(TENTHS + 1)]
    tenths = [statistics.fmean(rewards[a:b]) for a, b in pairwise(edges) if a < b <= len(rewards)]
    print(f"{name}: reward by tenths {[round(value, 3) for value in tenths]}", flush=True)
    found = {
        f"{name} reward, tenth {i}": figure(round(value, 4), "reward", "higher")
        for i, value in enumerate(tenths, 1)
    }
    found[f"{name} steps"] = figure(len(steps), "steps", None)
    reached = risen(rewards)
    if reached is not None:
        found[f"{name} steps to +20 points"] = figure(reached + 1, "steps")
        found[f"{name} seconds to +20 points"] = figure(round(steps[reached][1], 1), "s")
        after = steps[reached][1] - steps[0][1]
        found[f"{name} seconds to +20 points after the first step"] = figure(round(after, 1), "s")
    return found


def risen(rewards: list[float]) -> int | None:
    """The first step at which the mean of `WINDOW` steps is `RISE` above that of the first ones."""
    means = [statistics.fmean(rewards[i - WINDOW : i]) for i in range(WINDOW, len(rewards) + 1)]
    return next((i + WINDOW - 1 for i, mean in enumerate(means) if mean >= means[0] + RISE), None)


if __name__ == "__main__":
    main()
