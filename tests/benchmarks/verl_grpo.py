"""The same GRPO in verl 0.9, for `learning.py --peer`: actor and engine on one GPU, no reference."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

from openrlhf_ppo import run_child

from rlhf_core.training.train_loop import order_of_epoch

SEED = 0
PASS_TOKENS = 24576
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **others):
    return float(solution_str.strip() == ground_truth)
"""
STEP = re.compile(r"step:(\d+) .*?critic/score/mean:([-0-9.e]+)")


def run_verl(
    arguments: argparse.Namespace, model: Path, prompt_len: int, answer_len: int
) -> list[tuple[float, float]]:
    """Trains with verl; returns each step's mean reward and the seconds from the start until it was logged."""
    folder = (arguments.out / "verl").absolute()
    folder.mkdir(exist_ok=True)
    (folder / "reward.py").write_text(REWARD)
    write_parquet(arguments.out, folder / "train.parquet")
    log = folder / "log.txt"
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "HYDRA_FULL_ERROR": "1"}
    began = time.time()
    with log.open("wb") as out:
        code = run_child(
            "-c", STAMPED, "verl.trainer.main_ppo", *options(arguments, folder, model, prompt_len, answer_len),
            timeout=arguments.peer_seconds, cwd=folder, env=environment, stdout=out, stderr=out,
        )  # fmt: skip
    if code:
        sys.exit(f"verl ended with exit code {code}: see {log}")
    return read_steps(log.read_text(errors="replace"), began)


# writes the time before each line that the module prints
STAMPED = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-m", *sys.argv[1:]], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
for line in child.stdout:
    sys.stdout.buffer.write(f"{time.time():.3f} ".encode() + line)
    sys.stdout.buffer.flush()
sys.exit(child.wait())
"""


def read_steps(log: str, began: float) -> list[tuple[float, float]]:
    """The steps that a log with a time before each line tells of."""
    found = {}
    for line in log.splitlines():
        step = STEP.search(line)
        if step is not None:
            found[int(step[1])] = (float(step[2]), float(line.partition(" ")[0]) - began)
    return [found[number] for number in sorted(found)]


def in_asked_order(folder: Path) -> list[dict[str, Any]]:
    """The prompts of `folder` in the order in which our stage asks them."""
    lines = (folder / "prompts.jsonl").read_text().splitlines()
    return [json.loads(lines[i]) for i in order_of_epoch(len(lines), 0, SEED)]


def write_parquet(folder: Path, file: Path) -> None:
    """Writes the prompts with the columns that verl reads."""
    import pandas

    rows = in_asked_order(folder)
    columns = {
        "data_source": ["sums"] * len(rows),
        "prompt": [row["prompt"] for row in rows],
        "ability": ["sums"] * len(rows),
        "reward_model": [{"style": "rule", "ground_truth": row["answer"]} for row in rows],
        "extra_info": [{"index": i} for i in range(len(rows))],
    }
    pandas.DataFrame(columns).to_parquet(file)


def options(
    arguments: argparse.Namespace, folder: Path, model: Path, prompt_len: int, answer_len: int
) -> list[str]:
    return as_words(settings(arguments, folder, model, prompt_len, answer_len))


def as_words(given: dict[str, object]) -> list[str]:
    """verl's settings as the words of its command line."""
    return [f"{name}={value}" for name, value in given.items()]


def settings(
    arguments: argparse.Namespace, folder: Path, model: Path, prompt_len: int, answer_len: int
) -> dict[str, object]:
    """verl's settings for the prompts and the reward in `folder`, by their names."""
    batch = arguments.prompts
    return {
        "algorithm.adv_estimator": "grpo",
        "algorithm.use_kl_in_reward": False,
        "data.train_files": folder / "train.parquet",
        "data.val_files": folder / "train.parquet",
        "data.train_batch_size": batch,
        "data.val_batch_size": batch,
        "data.max_prompt_length": prompt_len,
        "data.max_response_length": answer_len,
        "data.shuffle": False,
        "data.dataloader_num_workers": 0,
        "data.filter_overlong_prompts": False,
        "actor_rollout_ref.model.path": model.absolute(),
        "actor_rollout_ref.model.use_remove_padding": True,
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        "actor_rollout_ref.actor.optim.lr": arguments.learning_rate,
        "actor_rollout_ref.actor.optim.lr_warmup_steps": arguments.warmup_steps,
        "actor_rollout_ref.actor.optim.weight_decay": 0.0,
        "actor_rollout_ref.actor.clip_ratio_c": 3.0,
        "actor_rollout_ref.actor.optim.betas": "[0.9,0.999]",
        "actor_rollout_ref.actor.use_kl_loss": False,
        "actor_rollout_ref.actor.loss_agg_mode": "token-mean",
        "actor_rollout_ref.actor.ppo_mini_batch_size": batch // 2,
        "actor_rollout_ref.actor.use_dynamic_bsz": True,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": PASS_TOKENS,
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.n": arguments.answers,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
        "actor_rollout_ref.rollout.gpu_memory_utilization": 0.3,
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz": True,
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": PASS_TOKENS,
        "actor_rollout_ref.rollout.agent.num_workers": 4,
        "reward.custom_reward_function.path": folder / "reward.py",
        "reward.num_workers": 2,
        "trainer.n_gpus_per_node": 1,
        "trainer.nnodes": 1,
        "trainer.logger": '["console"]',
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "trainer.total_epochs": 1,
        "trainer.total_training_steps": arguments.steps,
        "trainer.use_v1": True,
        "trainer.resume_mode": "disable",
    }
