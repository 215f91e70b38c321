"""Compares reward curves of one GRPO stage under several settings, each trained from the same random weights.

    python tests/benchmarks/reward_curves.py --out FOLDER --variants '{"bf16": {}, "fp8": {"float8": true}}'

The model is wide and shallow, so that its layers are large enough for FP8. The reward is the share of vowels in
an answer of letters: a random model has 5 of 26, and a few hundred iterations reach nearly all. All variants see
the same prompts in the same order; seeds differ by `--seeds`. Prints and records for each variant the mean
reward of tenths of the run, the seconds of an iteration, the gap to the sampler and the share of clipped tokens.
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
    return [sum(letter in "aeiou" for letter in text) / max(1, len(text)) for text in responses]
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
PROMPTS = 32
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
    add_options(parser, "reward-curves")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True)
    model = write_model(arguments.out / "model")
    (arguments.out / "vowels.py").write_text(VOWELS)
    write_prompts(arguments.out / "prompts.jsonl", arguments.iterations * PROMPTS)
    found: dict[str, dict[str, Any]] = {}
    for name, fields in json.loads(arguments.variants).items():
        curves = [curve(arguments, model, name, fields, seed) for seed in range(arguments.seeds)]
        found |= figures(name, curves)
    save(arguments, "reward curves of GRPO under several settings", found)


def write_model(folder: Path) -> Path:
    """Writes random weights (seed 0) and a tokenizer of letters; returns the folder."""
    torch.manual_seed(0)
    ends = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    config = transformers.Qwen3Config(**SIZES, **ends, tie_word_embeddings=False, dtype="bfloat16")
    transformers.Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    letters(SIZES["vocab_size"]).save_pretrained(folder)
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
        "n_samples_per_prompt": 8,
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
    config = PPO.model_validate(stage | fields)
    run.prepare(stage_request(config, model, seed=seed))
    code = run_child("-m", "rlhf_core", str(run.path))
    if code:
        sys.exit(f"{name}, seed {seed}: exit code {code}")
    return read_metrics(run.path)


def figures(name: str, curves: list[list[dict[str, float]]]) -> dict[str, dict[str, Any]]:
    """Returns what the record holds of a variant: means over seeds."""
    lines = [line for one in curves for line in one]
    rewards = [statistics.fmean(line["reward/mean"] for line in at) for at in zip(*curves, strict=True)]
    edges = [len(rewards) * i // TENTHS for i in range(TENTHS + 1)]
    tenths = [statistics.fmean(rewards[start:end]) for start, end in pairwise(edges)]
    print(f"{name}: reward by tenths {[round(value, 3) for value in tenths]}", flush=True)
    told = {
        f"{name} reward, tenth {number}": figure(round(value, 4), "reward", "higher")
        for number, value in enumerate(tenths, 1)
    }
    seconds = [sum(value for key, value in line.items() if key.startswith("phase/")) for line in lines]
    told[f"{name} iteration"] = figure(round(statistics.median(seconds), 3), "s")
    for metric in ("sampler/gap", "policy/first_ratio_gap", "policy/clip_share", "sampler/ess"):
        known = [line[metric] for line in lines if metric in line]
        told[f"{name} {metric}"] = figure(round(statistics.fmean(known), 5), "mean", None)
    return told


if __name__ == "__main__":
    main()
