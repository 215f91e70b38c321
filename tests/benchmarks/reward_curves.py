"""Compares reward curves of one GRPO stage under several settings, each trained from the same random weights.

    python tests/benchmarks/reward_curves.py --out FOLDER --variants '{"bf16": {}, "fp8": {"float8": true}}'

The model is wide and shallow, so that its layers are large enough for FP8; with `--cpu` it is small, and actor
and engine have processes of their own. The reward is the share of vowels in an answer of letters: a random model
has 5 of 26, and a few hundred iterations reach nearly all. With `--pass-share` it is 1 for answers with at least
that share and 0 for others, so that groups without a signal occur. Variants take turns; for each seed all see
the same prompts in the same order. Prints and records for each variant the mean reward of tenths of the run and
of all of it (of all answers, where groups are filtered), standard errors over seeds, the seconds of an
iteration, trained answers a second, the gap to the sampler and the share of clipped tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from openrlhf_ppo import run_child
from record import add_options, figure, save
from shapes import letters

from rlhf_core.config import PPO
from rlhf_core.runs.metrics_log import read_metrics
from rlhf_core.runs.run_dir import RunDir
from tests.support.stage_request import stage_request

VOWELS = '''
def vowels(responses):
    """The share of vowels among an answer's letters."""
    shares = [sum(letter in "aeiou" for letter in text) / max(1, len(text)) for text in responses]
    return [float(share >= PASS) for share in shares] if PASS else shares
'''
SIZES = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 320,
    "max_position_embeddings": 1024,
}
CPU_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
CPU_STAGE = {
    "dtype": "float32",
    "actor_ranks": {"cpus": 0.5},
    "reference_ranks": {"cpus": 0.5},
    "colocate_all": False,
    "engine": {"cpus": 0.5, "kv_cache_gib": 0.5},
    "generate_max_len": 16,
    "save_steps": 10**6,
}
PROMPTS = 32
ANSWERS = 8
TENTHS = 10


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--variants", required=True, help="JSON: name -> fields of the stage")
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--cpu", action="store_true", help="a small model, in float32")
    parser.add_argument("--pass-share", type=float, default=0.0, help="share of vowels of a good answer")
    add_options(parser, "reward-curves")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True)
    model = write_model(arguments.out / "model", SIZES | (CPU_SIZES if arguments.cpu else {}))
    (arguments.out / "vowels.py").write_text(f"PASS = {arguments.pass_share}\n{VOWELS}")
    write_prompts(arguments.out / "prompts.jsonl", 4 * arguments.iterations * PROMPTS)
    variants = json.loads(arguments.variants)
    curves: dict[str, list[list[dict[str, float]]]] = {name: [] for name in variants}
    for seed in range(arguments.seeds):
        for name, fields in variants.items():
            curves[name].append(curve(arguments, model, name, fields, seed))
            print(f"{name}, seed {seed}: ends with {final_reward(curves[name][-1]):.3f}", flush=True)
    found: dict[str, dict[str, Any]] = {}
    for name, lines in curves.items():
        found |= figures(name, lines)
    save(arguments, "reward curves of GRPO under several settings", found)


def write_model(folder: Path, sizes: dict[str, Any]) -> Path:
    """Writes random weights (seed 0) and a tokenizer of letters; returns the folder."""
    torch.manual_seed(0)
    ends = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    config = transformers.Qwen3Config(**sizes, **ends, tie_word_embeddings=False, dtype="bfloat16")
    transformers.Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    letters(sizes["vocab_size"]).save_pretrained(folder)
    return folder


def write_prompts(file: Path, count: int) -> None:
    rng = random.Random(0)
    prompts = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=16)) for _ in range(count)]
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))


def curve(
    arguments: argparse.Namespace, model: Path, name: str, fields: dict[str, Any], seed: int
) -> list[dict[str, float]]:
    """Runs the stage and returns the metrics of its iterations."""
    shared = {"gpus": 1}
    stage = {
        "actor": "base",
        "prompts": {"sources": str(arguments.out / "prompts.jsonl"), "template": "{}"},
        "reward": f"{arguments.out / 'vowels.py'}:vowels",
        "dtype": "bfloat16",
        "advantage_estimator": "grpo",
        "rollout_batch_size": PROMPTS,
        "n_samples_per_prompt": ANSWERS,
        "train_batch_size": 128,
        "micro_train_tokens": 24576,
        "micro_rollout_tokens": 24576,
        "prompt_max_len": 32,
        "generate_max_len": 64,
        "max_steps": arguments.iterations,
        "actor_learning_rate": arguments.learning_rate,
        "actor_ranks": shared,
        "reference_ranks": shared,
        "colocate_all": True,
        "engine": {"gpus": 1, "gpu_memory_utilization": 0.3, "sleep": True},
    }
    run = RunDir(arguments.out / f"{name}-{seed}")
    here = CPU_STAGE if arguments.cpu else {}
    config = PPO.model_validate(stage | here | fields)
    run.prepare(stage_request(config, model, seed=seed))
    code = run_child("-m", "rlhf_core", str(run.path))
    if code:
        sys.exit(f"{name}, seed {seed}: exit code {code}")
    return read_metrics(run.path)


def final_reward(lines: list[dict[str, float]]) -> float:
    """The mean reward of the last tenth of a run."""
    return statistics.fmean(line["reward/mean"] for line in lines[-max(1, len(lines) // TENTHS) :])


def figures(name: str, curves: list[list[dict[str, float]]]) -> dict[str, dict[str, Any]]:
    """Returns what the record holds of a variant: means over seeds, with standard errors where there are
    several."""
    lines = [line for one in curves for line in one]
    count = len(curves[0])
    edges = [count * i // TENTHS for i in range(TENTHS + 1)]
    told = {
        f"{name} reward, tenth {number}": over_seeds(curves, start, end)
        for number, (start, end) in enumerate(pairwise(edges), 1)
    }
    told[f"{name} reward, all"] = over_seeds(curves, 0, count)
    print(f"{name}: reward by tenths {[told[part]['value'] for part in told]}", flush=True)
    if len(curves) > 1:
        for part, (start, end) in {"tenth 10": (edges[-2], count), "all": (0, count)}.items():
            means = [statistics.fmean(line["reward/mean"] for line in one[start:end]) for one in curves]
            error = statistics.stdev(means) / len(means) ** 0.5
            told[f"{name} standard error, {part}"] = figure(round(error, 4), "reward", None)
    seconds = [later["time"] - line["time"] for one in curves for line, later in pairwise(one[count // 4 :])]
    told[f"{name} iteration"] = figure(round(statistics.median(seconds), 3), "s")
    timed = [line.get("filter/groups", PROMPTS) for one in curves for line in one[count // 4 + 1 :]]
    rate = ANSWERS * statistics.fmean(timed) / statistics.fmean(seconds)
    told[f"{name} trained answers"] = figure(round(rate, 1), "1/s", "higher")
    for metric in (
        "sampler/gap",
        "policy/first_ratio_gap",
        "policy/clip_share",
        "sampler/ess",
        "rollout/age",
    ):
        known = [line[metric] for line in lines if metric in line]
        if known:
            told[f"{name} {metric}"] = figure(round(statistics.fmean(known), 5), "mean", None)
    return told


def over_seeds(curves: list[list[dict[str, float]]], start: int, end: int) -> dict[str, Any]:
    rewards = [line["reward/mean"] for one in curves for line in one[start:end]]
    return figure(round(statistics.fmean(rewards), 4), "reward", "higher")


if __name__ == "__main__":
    main()
