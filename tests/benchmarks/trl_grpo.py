"""The same GRPO in TRL 1.16, for `learning.py --peer trl`: trainer and engine in one process on one GPU, no
reference.

    python tests/benchmarks/trl_grpo.py SETTINGS.json      # what `run_trl` starts
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from openrlhf_ppo import run_child
from verl_grpo import SEED, in_asked_order

STEPS = "steps.jsonl"


def run_trl(
    arguments: argparse.Namespace, model: Path, prompt_len: int, answer_len: int
) -> list[tuple[float, float]]:
    """Trains with TRL; returns the mean reward of each iteration, and the seconds until it was logged."""
    folder = (arguments.out / "trl").absolute()
    folder.mkdir(exist_ok=True)
    rows = [{"prompt": row["prompt"], "answer": row["answer"]} for row in in_asked_order(arguments.out)]
    settings = folder / "settings.json"
    settings.write_text(
        json.dumps(
            {
                "model": str(model.absolute()),
                "folder": str(folder),
                "rows": rows,
                "config": config(arguments, folder, prompt_len, answer_len),
            }
        )
    )
    (folder / STEPS).write_text("")
    path = os.pathsep.join(filter(None, [arguments.peer_path, os.environ.get("PYTHONPATH")]))
    log = folder / "log.txt"
    began = time.time()
    with log.open("wb") as out:
        code = run_child(
            __file__, str(settings), timeout=arguments.peer_seconds, cwd=folder,
            env=os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}, stdout=out, stderr=out,
        )  # fmt: skip
    if code:
        sys.exit(f"TRL ended with exit code {code}: see {log}")
    steps = [json.loads(line) for line in (folder / STEPS).read_text().splitlines()]
    return [(step["reward"], step["time"] - began) for step in steps]


def config(arguments: argparse.Namespace, folder: Path, prompt_len: int, answer_len: int) -> dict[str, Any]:
    """Fields of GRPOConfig: two optimiser steps an iteration, float32 weights and autocast, as ours."""
    answers = arguments.prompts * arguments.answers
    engine = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.3,
        "vllm_max_model_length": prompt_len + answer_len,
        "vllm_importance_sampling_correction": False,
    }
    return {
        "output_dir": str(folder / "out"),
        "seed": SEED,
        "bf16": not arguments.cpu,
        "use_cpu": arguments.cpu,
        "gradient_checkpointing": False,
        "learning_rate": arguments.learning_rate,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": arguments.warmup_steps,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "max_steps": 2 * arguments.steps,
        "per_device_train_batch_size": answers // 2,
        "gradient_accumulation_steps": 1,
        "steps_per_generation": 2,
        "num_generations": arguments.answers,
        "max_completion_length": answer_len,
        "shuffle_dataset": False,
        "loss_type": "dapo",
        "epsilon": 0.2,
        "delta": 3.0,
        "beta": 0.0,
        "scale_rewards": "group",
        "logging_steps": 2,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "model_init_kwargs": {"dtype": "float32", "attn_implementation": "sdpa"},
        **({} if arguments.cpu else engine),
    }


def train(settings: dict[str, Any]) -> None:
    """Runs TRL's trainer in this process and writes the mean reward of each iteration with the time."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    steps = Path(settings["folder"]) / STEPS

    class Rewards(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
            if logs is not None and "reward" in logs:
                with steps.open("a") as file:
                    file.write(json.dumps({"reward": float(logs["reward"]), "time": time.time()}) + "\n")

    def correct(completions: list[Any], answer: list[str], **others: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        return [float(text.strip() == right) for text, right in zip(texts, answer, strict=True)]

    torch.manual_seed(SEED)
    trainer = GRPOTrainer(
        model=settings["model"],
        reward_funcs=correct,
        args=GRPOConfig(**settings["config"]),
        train_dataset=Dataset.from_list(settings["rows"]),
        processing_class=AutoTokenizer.from_pretrained(settings["model"]),
        callbacks=[Rewards()],
    )
    trainer.train()


if __name__ == "__main__":
    train(json.loads(Path(sys.argv[1]).read_text()))
