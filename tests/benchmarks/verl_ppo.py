"""The same PPO work in verl 0.9, for `ppo_step.py --peer verl`: actor, critic, reference and engines on the same
GPUs, with a function in place of the reward model, so that verl has one model less to score with."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import time
from pathlib import Path

from openrlhf_ppo import run_child
from verl_grpo import as_words, settings

# our phases, and verl's timers in them
PHASES = {
    "generate": ("gen",),
    "score": ("reward", "old_log_prob", "ref", "values"),
    "train": ("update_critic", "update_actor"),
    "sync": ("update_weights",),
    "step": ("step",),
}
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **others):
    return sum(map(ord, solution_str)) % 101 / 50 - 1
"""
# messages as they are; a tokenizer of single letters has no template
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
STEP = re.compile(r"step:\d+ .*timing_s/step:.*")
TIMER = re.compile(r"timing_s/(\w+):([0-9.]+(?:e[-+]?\d+)?)")


def missing() -> str | None:
    """Why it cannot run here."""
    return None if importlib.util.find_spec("verl") else "verl is not installed: the peer is left out"


def run(arguments: argparse.Namespace, gpus: int) -> tuple[list[dict[str, float]], float]:
    """Runs it on `gpus` GPUs. Seconds of each phase, a dict a step, under our names for them, and 0: how long
    an unfinished step took is not in its log."""
    folder = (arguments.out / "verl").absolute()
    folder.mkdir()
    (folder / "reward.py").write_text(REWARD)
    write_prompts(arguments.out / "prompts.jsonl", folder / "train.parquet")
    model = with_template(arguments.model, folder / "model")
    log = folder / "log.txt"
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "HYDRA_FULL_ERROR": "1"}
    start = time.monotonic()
    with log.open("wb") as out:
        code = run_child(
            "-m", "verl.trainer.main_ppo", *as_words(ppo_settings(arguments, folder, model, gpus)),
            timeout=arguments.peer_seconds, cwd=folder, env=environment, stdout=out, stderr=out,
        )  # fmt: skip
    ending = "was cut off" if code is None else f"ended with exit code {code}"
    print(f"verl {ending} after {time.monotonic() - start:.0f} s: {log}")
    return read_phases(log.read_text(errors="replace")), 0.0


def read_phases(log: str) -> list[dict[str, float]]:
    """The steps of a log, without phases that it has no timer of."""
    steps = []
    for line in STEP.findall(log):
        timers = {name: float(seconds) for name, seconds in TIMER.findall(line)}
        steps.append(
            {
                ours: sum(timers.get(name, 0.0) for name in theirs)
                for ours, theirs in PHASES.items()
                if timers.keys() & set(theirs)
            }
        )
    return steps


def write_prompts(prompts: Path, file: Path) -> None:
    """Writes our prompts with the columns that verl reads."""
    import pandas

    rows = [json.loads(line)["prompt"] for line in prompts.read_text().splitlines()]
    columns = {
        "data_source": ["letters"] * len(rows),
        "prompt": [[{"role": "user", "content": row}] for row in rows],
        "ability": ["letters"] * len(rows),
        "reward_model": [{"style": "rule", "ground_truth": ""}] * len(rows),
        "extra_info": [{"index": i} for i in range(len(rows))],
    }
    pandas.DataFrame(columns).to_parquet(file)


def with_template(model: Path, out: Path) -> Path:
    """Makes `out`: the model's files, linked, and a chat template that adds nothing to the messages."""
    out.mkdir()
    for file in model.iterdir():
        if file.name != "chat_template.jinja":
            (out / file.name).symlink_to(file.resolve())
    (out / "chat_template.jinja").write_text(TEMPLATE)
    return out


def ppo_settings(arguments: argparse.Namespace, folder: Path, model: Path, gpus: int) -> dict[str, object]:
    """verl's settings for the work of ppo_step.py's `arguments`."""
    work = argparse.Namespace(
        prompts=arguments.prompts, answers=1, steps=arguments.steps, learning_rate=5e-7, warmup_steps=0
    )
    shared = settings(work, folder, model, arguments.prompt_len, arguments.generate_len)
    batch = min(128, arguments.prompts)
    tokens = max(arguments.micro_tokens, arguments.prompt_len + arguments.generate_len)
    of_passes = {
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": tokens,
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": tokens,
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": tokens,
        "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": True,
        "critic.ppo_max_token_len_per_gpu": tokens,
        "critic.ppo_mini_batch_size": batch,
        "critic.use_dynamic_bsz": True,
    }
    of_critic = {
        "critic.model.path": model,
        "critic.model.use_remove_padding": True,
        "critic.model.enable_gradient_checkpointing": True,
        "critic.optim.lr": 9e-6,
    }
    return {
        **shared,
        **of_passes,
        **of_critic,
        "algorithm.adv_estimator": "gae",
        "algorithm.use_kl_in_reward": True,
        "algorithm.kl_ctrl.kl_coef": 0.01,
        "actor_rollout_ref.model.enable_gradient_checkpointing": True,
        "actor_rollout_ref.actor.ppo_mini_batch_size": batch,
        "actor_rollout_ref.rollout.agent.num_workers": 4 if gpus == 1 else 8,
        "actor_rollout_ref.rollout.gpu_memory_utilization": 0.4,
        "data.val_batch_size": min(8, arguments.prompts),
        "trainer.n_gpus_per_node": gpus,
    }
