"""The same PPO work in OpenRLHF 0.11, for `ppo_step.py --peer`: everything on the same cards, engine and
models asleep in turn, ZeRO-3."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

PHASES = {
    "generate": "generation",
    "score": "make_experience",
    "train": "ppo_train",
    "sync": "broadcast",
    "step": "step_total",
}  # ours: its
BEGINS = re.compile(r"Generate samples:\s+0%\|\s*\| 0/\d+ \[00:00<")
MEASURED = re.compile(r"'timing/(\w+)': ([0-9.]+)")


def missing() -> str | None:
    """Why it cannot run here."""
    return None if importlib.util.find_spec("openrlhf") else "openrlhf is not installed: the peer is left out"


def start_child(*arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    """This Python with `arguments`, whose processes, those that it detaches too, end with it and with this
    process."""
    command = [
        sys.executable,
        "-m",
        "rlhf_core.system.reaper",
        str(os.getpid()),
        "10",
        sys.executable,
        *arguments,
    ]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, **options)


def run_child(*arguments: str, timeout: float | None = None, **options: Any) -> int | None:
    """`start_child` and a wait, ended on Ctrl-C and after `timeout` seconds. The exit code; None after the
    timeout."""
    child = start_child(*arguments, **options)
    try:
        return child.wait(timeout)
    except subprocess.TimeoutExpired:
        return None
    finally:
        child.terminate()
        child.wait()


def run(arguments: argparse.Namespace, cards: int) -> tuple[list[dict[str, float]], float]:
    """Seconds of each phase, a dict a step, under our names for them, and the seconds of a step that its
    limit cut off, 0 when none was."""
    log = arguments.out / "openrlhf.log"
    log.touch()
    start = time.monotonic()
    ended = threading.Event()
    begun = [0.0]
    watcher = threading.Thread(target=watch, args=(log, begun, ended), daemon=True)
    watcher.start()
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with log.open("wb") as out:
        code = run_child(
            "-m", "openrlhf.cli.train_ppo_ray", *flags(arguments, cards),
            timeout=arguments.peer_seconds, cwd=arguments.out, env=environment, stdout=out, stderr=out,
        )  # fmt: skip
    ended.set()
    watcher.join()
    # ending its processes takes time too
    end = start + arguments.peer_seconds if code is None else time.monotonic()
    unfinished = end - begun[-1] if code is None and len(begun) > 1 + len(read(log)) else 0.0
    told = ", ".join(f"{moment - start:.0f}" for moment in begun[1:])
    print(
        f"the peer {'was cut off' if code is None else 'ended'} after {end - start:.0f} s; rollouts began"
        f" after {told} s"
    )
    return read(log), unfinished


def watch(log: Path, begun: list[float], ended: threading.Event) -> None:
    """Appends the moment at which each rollout begins, by the bar that the peer then draws."""
    while not ended.wait(0.5):
        rollouts = len(BEGINS.findall(log.read_text(errors="replace")))
        begun += [time.monotonic()] * (rollouts + 1 - len(begun))


def read(log: Path) -> list[dict[str, float]]:
    """The steps that a log tells of."""
    lines = [
        dict(MEASURED.findall(line))
        for line in log.read_text(errors="replace").splitlines()
        if "timing/step_total" in line
    ]
    return [{ours: float(line[its]) for ours, its in PHASES.items() if its in line} for line in lines]


def flags(arguments: argparse.Namespace, cards: int) -> list[str]:
    model = str(arguments.model.absolute())
    given: dict[str, object] = {
        f"{role}.num_gpus_per_node": cards for role in ("actor", "critic", "ref", "reward")
    }
    given |= {f"{role}.num_nodes": 1 for role in ("actor", "critic", "ref", "reward")}
    given |= {f"{role}.model_name_or_path": model for role in ("actor", "critic", "reward")}
    given |= {
        "engine.num_engines": cards,
        "engine.tensor_parallel_size": 1,
        "engine.gpu_memory_utilization": 0.5,
        "vllm.sync_backend": "nccl",
        "train.batch_size": min(128, arguments.prompts),
        "train.max_epochs": 1,
        "train.max_tokens_per_gpu": min(16384, arguments.micro_tokens),
        "rollout.batch_size": arguments.prompts,
        "rollout.n_samples_per_prompt": 1,
        "rollout.max_new_tokens": arguments.generate_len,
        "data.max_len": arguments.prompt_len + arguments.generate_len,
        "data.max_samples": arguments.prompts * arguments.steps,
        "data.prompt_dataset": str((arguments.out / "prompts.jsonl").absolute()),
        "data.input_key": "prompt",
        "ds.zero_stage": 3,
        "ds.param_dtype": "bf16",
        "actor.adam.lr": 5e-7,
        "critic.adam.lr": 9e-6,
        "algo.advantage.estimator": "reinforce" if arguments.no_critic else "gae",
        "algo.kl.init_coef": 0.01,
        "algo.advantage.is_correction_level": "token",
        "ckpt.output_dir": "peer-out",
        "ckpt.path": "peer-states",
        "logger.logging_steps": 1,
    }
    switches = (
        "train.colocate_all",
        "train.dynamic_batch_enable",
        "vllm.enable_sleep",
        "ds.enable_sleep",
        "ds.packing_samples",
        "actor.gradient_checkpointing_enable",
        "reward.normalize_enable",
    )
    return [word for name, value in given.items() for word in (f"--{name}", str(value))] + [
        f"--{name}" for name in switches
    ]
