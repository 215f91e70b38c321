"""A small PPO stage for tests on hosts (hosts.py): two actor ranks, an engine, and a function as the
reward."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rlhf_core.config import PPO, Data, EngineConfig, Ranks
from rlhf_core.runs.metrics_log import read_metrics
from rlhf_core.runs.run_dir import RunDir
from tests.support.hosts import Host
from tests.support.micro import wait_until
from tests.support.stage_request import stage_request

SAVED = 2  # iterations
SPREAD = 0.6
CLOSE = 0.25  # CPUs of an actor rank: two hosts of one CPU have room for one each, or one host for both
COMMAND = (sys.executable, "-P", "-m", "rlhf_core")
FUNCTION = """
import os, time
from pathlib import Path

def odd(responses):
    time.sleep(0.3)
    (Path(__file__).parent / "namespaces" / os.readlink("/proc/self/ns/net").strip("net:[]")).touch()
    return [len(response) % 2 for response in responses]
"""


def config_of(
    folder: Path,
    material: Path,
    cpus: float = SPREAD,
    steps: int = 60,
    timeout: float = 200.0,
    stages: int = 1,
) -> PPO:
    """Returns the stage; its engine has `stages` of layers. A call of its reward function, which is written
    to the folder, takes 0.3 s: a fault finds it at work."""
    (folder / "namespaces").mkdir(parents=True, exist_ok=True)
    (folder / "reward.py").write_text(FUNCTION)
    return PPO(
        actor="base",
        prompts=Data(sources=str(material / "prompts.jsonl")),
        reward={"function": f"{folder / 'reward.py'}:odd", "batch_size": 2, "concurrency": 4},
        advantage_estimator="grpo",
        init_kl_coef=0.0,
        rollout_batch_size=4,
        n_samples_per_prompt=2,
        train_batch_size=8,
        micro_train_batch_size=4,
        micro_rollout_batch_size=4,
        max_steps=steps,
        prompt_max_len=64,
        generate_max_len=16,
        actor_learning_rate=1e-3,
        save_steps=SAVED,
        timeout=timeout,
        actor_ranks=Ranks(num_nodes=2, cpus=cpus),
        engine=EngineConfig(cpus=0.3, kv_cache_gib=0.5, pipeline_parallel_size=stages),
    )


def prepare(folder: Path, material: Path, *how: float, **named: Any) -> None:
    """Writes a run directory, or changes how its stage is placed, as `config_of` does."""
    config = config_of(folder, material, *how, **named)
    RunDir(folder).prepare(stage_request(config, material / "base", seed=7))


def log(folder: Path) -> str:
    return (folder / "log.txt").read_text() if (folder / "log.txt").exists() else ""


def start(host: Host, folder: Path, ray_address: str = "") -> subprocess.Popen[bytes]:
    """Starts the stage on a host, with a cluster or, without an address, on the host alone."""
    given = {"RAY_ADDRESS": ray_address} if ray_address else {}
    return host.start(*COMMAND, str(folder), log=folder / "log.txt", **given)


def finish(host: Host, folder: Path, ray_address: str = "") -> None:
    code = start(host, folder, ray_address).wait(timeout=240)
    assert code == 0, log(folder)[-3000:]


def wait_for_work(process: subprocess.Popen[bytes], folder: Path, iterations: int = SAVED + 1) -> None:
    """Waits until so many iterations are done."""
    wait_until(
        lambda: len(read_metrics(folder)) >= iterations or process.poll() is not None,
        "iterations",
        200,
        lambda: log(folder)[-3000:],
    )
    assert process.poll() is None, log(folder)[-3000:]


def seconds_until(sentence: str, folder: Path, since: float) -> float:
    """Waits until the log has a line, a minute at most; returns the seconds since a moment."""
    left = 60 - (time.monotonic() - since)
    wait_until(
        lambda: re.search(sentence, log(folder), re.MULTILINE), sentence, left, lambda: log(folder)[-3000:]
    )
    return time.monotonic() - since
