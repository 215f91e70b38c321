"""PPO with all its engines: four models and vLLM on Ray workers, DeepSpeed ZeRO-3 on two actor ranks.

One undisturbed run over two Ray nodes and one whose engine is killed, started again; what must hold is read
from their metrics and weights. One with all groups in the same slots, sent to a cluster by `ray job submit`.
Then dynamic filtering, whose place on the line of prompts is no function of the iteration: GRPO, a function
as the only reward, the stage's own process killed.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch
from ray.cluster_utils import Cluster
from safetensors.torch import load_file

from rlhf_core.config import PPO, Data, EngineConfig, Ranks
from rlhf_core.runs.metrics_log import read_metrics
from rlhf_core.runs.run_dir import RunDir
from tests.support.micro import wait_until
from tests.support.programs import logged
from tests.support.sockets import beyond_loopback, listening
from tests.support.stage_request import stage_request
from tests.support.stage_work import train_reward_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
ITERATIONS = 4
SAVED = 2
FROZEN = 1
# seconds and shares of them, never the same twice
TIMES = ("phase/", "work/", "wait/", "floor/", "environment/seconds")
SHARE = 0.25  # of a CPU, for each role
# One in two groups of two answers has one reward for both.
ODD = "def odd(responses): return [len(response) % 2 for response in responses]\n"


class Runs(NamedTuple):
    """The same run undisturbed and with its engine killed, with two actor ranks; and the reward model's
    folder."""

    whole: Path
    killed: Path
    reward_model: Path


def common(material: Path) -> dict[str, Any]:
    return {
        "actor": "base",
        "prompts": Data(sources=str(material / "prompts.jsonl")),
        "rollout_batch_size": 8,
        "n_samples_per_prompt": 2,
        "train_batch_size": 8,
        "micro_train_batch_size": 2,
        "micro_rollout_batch_size": 4,
        "max_steps": ITERATIONS,
        "max_epochs": 2,
        "prompt_max_len": 64,
        "generate_max_len": 16,
        "actor_learning_rate": 1e-3,
        "save_steps": SAVED,
        "export_at": (SAVED, ITERATIONS),
        "timeout": 200,
        "reference_ranks": Ranks(cpus=SHARE),
        "engine": EngineConfig(cpus=SHARE, kv_cache_gib=0.5),
    }


def prepare(folder: Path, material: Path, reward_model: Path, actor_ranks: int, **placement: Any) -> None:
    config = PPO(
        **common(material),
        critic_learning_rate=1e-3,
        freezing_actor_steps=FROZEN,
        kl_target=0.01,
        kl_horizon=100,
        normalize_reward=True,
        actor_ranks=Ranks(num_ranks_per_node=actor_ranks, cpus=SHARE),
        critic_ranks=Ranks(cpus=SHARE),
        reward_ranks=Ranks(cpus=SHARE),
        **placement,
    )
    write_request(
        folder, config, {"base": str(material / "base"), "reward_model": str(reward_model / "checkpoint")}
    )


def prepare_filtered(folder: Path, material: Path, function: Path) -> None:
    reward = {"function": f"{function}:odd", "normalize": "running"}
    config = PPO(
        **common(material),
        advantage_estimator="grpo",
        reward=reward,
        dynamic_filtering=True,
        actor_ranks=Ranks(cpus=SHARE),
    )
    write_request(folder, config, {"base": str(material / "base")})


def write_request(folder: Path, config: PPO, inputs: dict[str, str]) -> None:
    RunDir(folder).prepare(stage_request(config, inputs, seed=7))


def start(folder: Path, **environment: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "rlhf_core", str(folder)]
    return logged(command, folder / "log.txt", start_new_session=True, env=os.environ | environment)


def finish(folder: Path, **environment: str) -> None:
    code = start(folder, **environment).wait(timeout=900)
    assert code == 0, (folder / "log.txt").read_text()[-3000:]


def finish_on_two_nodes(folder: Path) -> None:
    """On a cluster of two raylets, each too small for all roles."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 200 << 20})
    try:
        cluster.add_node(num_cpus=1, object_store_memory=200 << 20)
        finish(folder, RAY_ADDRESS=cluster.address)
    finally:
        cluster.shutdown()


def finish_as_a_job(folder: Path) -> None:
    """As `ray job submit` starts it: the stage's process runs inside the cluster."""
    # free ones: other tests have clusters too
    ports = {"dashboard_port": 0, "dashboard_agent_listen_port": 0}
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": True, **ports}
    )
    try:
        where = f"http://{cluster.head_node.webui_url}"
        command = [sys.executable, "-m", "rlhf_core", str(folder)]
        submit = [
            str(Path(sys.executable).with_name("ray")),
            "job",
            "submit",
            "--address",
            where,
            "--",
            *command,
        ]
        done = subprocess.run(submit, capture_output=True, text=True, timeout=900, stdin=subprocess.DEVNULL)
        assert done.returncode == 0 and "succeeded" in done.stdout, (done.stdout + done.stderr)[-3000:]
    finally:
        cluster.shutdown()


def kill_the_engine_and_finish(folder: Path) -> None:
    """Kills vLLM's process past a checkpoint: the run ends by itself, says who died, leaves nothing behind,
    and can be started again. Before that it listens at loopback addresses alone."""
    process = start(folder)
    log = folder / "log.txt"
    wait_until(
        lambda: "all roles are up" in log.read_text() or process.poll() is not None, "the roles to be up", 600
    )
    assert listening(process.pid), "Ray's processes listen"
    assert not beyond_loopback(process.pid)
    wait_for_checkpoint(folder, process)
    workers = psutil.Process(process.pid).children(recursive=True)
    engine = re.search(r"sampler is up, process (\d+)", log.read_text())
    assert engine is not None
    os.kill(int(engine[1]), signal.SIGKILL)
    assert process.wait(timeout=150) != 0  # sooner than `timeout`
    assert re.search(r"a rank of sampler died during '\w+|sampler.* failed", log.read_text())
    alive = psutil.wait_procs(workers, timeout=45)[1]
    assert not alive, [worker.cmdline() for worker in alive]
    finish(folder)


def wait_for_checkpoint(folder: Path, process: subprocess.Popen[bytes]) -> None:
    """Waits for the resume state and for a line after it."""
    deadline = time.monotonic() + 600
    state = folder / "state" / f"step-{SAVED}" / "loop.json"

    def waits() -> bool:
        return len(read_metrics(folder)) <= SAVED or not state.is_file()

    while waits() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)


def kill_and_finish(folder: Path) -> None:
    """Kills a run with SIGKILL once it is past its checkpoint, and starts it again."""
    kill_past_checkpoint(folder)
    finish(folder)


def finish_and_keep(folder: Path, cut_off: Path) -> None:
    """Runs to the end; `cut_off` is what a kill past the checkpoint would have left of it."""
    process = start(folder)
    wait_for_checkpoint(folder, process)
    process.send_signal(signal.SIGSTOP)
    shutil.copytree(folder, cut_off, ignore=shutil.ignore_patterns(".*"))  # not what is being written
    process.send_signal(signal.SIGCONT)
    assert RunDir(cut_off).result() is None, "the run ended before it could be cut off"
    assert process.wait(timeout=900) == 0, (folder / "log.txt").read_text()[-3000:]


def kill_past_checkpoint(folder: Path) -> None:
    process = start(folder)
    wait_for_checkpoint(folder, process)
    kill_with_workers(folder, process)


def kill_with_workers(folder: Path, process: subprocess.Popen[bytes]) -> None:
    workers = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    for survivor in psutil.wait_procs(workers, timeout=5)[1]:  # Ray's agents would stay for a minute
        survivor.kill()
    assert RunDir(folder).result() is None, "the run ended before it could be killed"


def assert_same_end(whole: Path, killed: Path, but: Sequence[str] = ()) -> None:
    """The same curve and weights, bit for bit; and the second half of the killed run was a resumed one. `but`:
    metrics that may differ."""

    def curve(folder: Path) -> list[dict[str, float]]:
        return [
            {k: v for k, v in line.items() if k not in ("time", *but) and not k.startswith(TIMES)}
            for line in read_metrics(folder)
        ]

    assert curve(killed) == curve(whole)
    weights, again = (load_file(folder / "checkpoint" / "model.safetensors") for folder in (whole, killed))
    assert all(torch.equal(again[name], weight) for name, weight in weights.items())
    assert f"resumed after iteration {SAVED}" in (killed / "log.txt").read_text()


@pytest.fixture(scope="module")
def runs(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    root = tmp_path_factory.mktemp("ppo")
    train_reward_model(material, root / "reward_model")
    runs = Runs(root / "whole", root / "killed", root / "reward_model")
    for folder in (runs.whole, runs.killed):
        prepare(folder, material, runs.reward_model, actor_ranks=2, colocate_critic_reward=True)
    finish_on_two_nodes(runs.whole)
    kill_the_engine_and_finish(runs.killed)
    return runs


def test_the_first_optimiser_step_is_on_policy(runs: Runs) -> None:
    lines = read_metrics(runs.whole)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[0]["kl/mean"] == pytest.approx(0, abs=1e-5), "actor and reference are the same model"
    for line in lines:
        assert line["sampler/gap"] < 1e-3, "vLLM and the trainer disagree on the same weights"
    for line in lines[FROZEN:]:
        assert line["policy/first_ratio_gap"] < 1e-5
        assert line["sync/probe_gap"] < 1e-3
    assert lines[-1]["kl/mean"] != 0
    told = "each episode leaves out 4 of 300 prompts, which fill no iteration of 8 (rollout_batch_size)\n"
    assert (runs.whole / "log.txt").read_text().count(told) == 1


def test_the_actor_is_frozen_for_exactly_the_requested_iterations(runs: Runs) -> None:
    lines = read_metrics(runs.whole)
    assert ["policy/loss" in line for line in lines] == [False] * FROZEN + [True] * (ITERATIONS - FROZEN)
    assert all(line["value/grad_norm"] > 0 for line in lines)
    assert lines[FROZEN]["kl/mean"] == pytest.approx(0, abs=1e-5), (
        "the rollout after the warm-up still comes from the start"
    )


def test_the_kl_coefficient_adapts(runs: Runs) -> None:
    coefficients = [line["kl/coef"] for line in read_metrics(runs.whole)]
    frozen = coefficients[: FROZEN + 2]  # also after the iteration whose answers no update has changed yet
    assert frozen == [coefficients[0]] * len(frozen)
    # 16 answers over a horizon of 100, by 0.2 either way at the most.
    growth = coefficients[FROZEN + 2] / coefficients[0]
    assert growth != 1
    assert (1 - 0.2 / 100) ** 16 <= growth * (1 + 1e-9)
    assert growth <= (1 + 0.2 / 100) ** 16 * (1 + 1e-9)


def test_phases_stand_beside_their_floors_and_work_beside_waiting(runs: Runs) -> None:
    for line in read_metrics(runs.whole):
        for phase in ("generate", "score", "train"):
            # a processor's ceilings are rough, not made up
            assert 0 < line[f"floor/{phase}"] < 10 * line[f"phase/{phase}"]
        for role in ("actor", "critic", "reference", "reward:reward_model", "sampler"):
            assert 0 <= line[f"wait/{role}"] <= 1
        assert 0 < line["work/sampler/generate"] <= line["phase/generate"] + 0.1
        assert {"work/actor/score", "work/reference/score", "work/critic/train"} <= line.keys()


def test_roles_are_spread_over_two_nodes(runs: Runs) -> None:
    assert "on 2 node(s)" in (runs.whole / "log.txt").read_text()


def test_a_killed_run_ends_with_the_same_curve_and_weights(runs: Runs) -> None:
    assert_same_end(runs.whole, runs.killed)


@pytest.mark.long
def test_so_does_one_with_dynamic_filtering(material: Path, tmp_path: Path) -> None:
    (tmp_path / "checks.py").write_text(ODD)
    whole = tmp_path / "whole"
    killed = tmp_path / "killed"
    for folder in (whole, killed):
        prepare_filtered(folder, material, tmp_path / "checks.py")
    finish(whole)
    lines = read_metrics(whole)
    assert len(lines) == ITERATIONS and all(line["filter/groups"] == 8 for line in lines)
    # groups are to be dropped before the checkpoint
    assert any(line["filter/accepted"] < 1 for line in lines[:SAVED])
    kill_and_finish(killed)
    assert_same_end(whole, killed)


@pytest.mark.long
def test_one_actor_rank_trains_as_two_do(runs: Runs, material: Path, tmp_path: Path) -> None:
    one_rank = tmp_path / "one_rank"
    prepare(one_rank, material, runs.reward_model, actor_ranks=1, colocate_all=True)
    finish_as_a_job(one_rank)
    # Up to the first actor update both sample the same answers; the update's own metrics are those of the
    # same gradient.
    one, two = (read_metrics(folder)[: FROZEN + 1] for folder in (one_rank, runs.whole))
    for a, b in zip(one, two, strict=True):
        names = [name for name in a if not name.startswith((*TIMES, "sampler/", "sync/")) and name != "time"]
        assert {name: b[name] for name in names} == pytest.approx(
            {name: a[name] for name in names}, rel=2e-3, abs=1e-5
        )
    assert "policy/grad_norm" in one[-1]
    # one rank shares its place: in turn
    assert "work/critic/release_memory" in one[-1] and "work/critic/release_memory" not in two[-1]


def test_the_actor_is_exported_on_its_way_and_the_run_goes_on_as_before(runs: Runs) -> None:
    for folder in (runs.whole, runs.killed):
        end = load_file(folder / "checkpoint" / "model.safetensors")
        early, late = (
            load_file(folder / "exports" / f"iteration{step}" / "model.safetensors")
            for step in (SAVED, ITERATIONS)
        )
        assert all(torch.equal(late[name], weight) for name, weight in end.items())
        assert early.keys() == end.keys()
        assert any(not torch.equal(early[name], weight) for name, weight in end.items())
    whole, killed = (
        load_file(folder / "exports" / f"iteration{SAVED}" / "model.safetensors")
        for folder in (runs.whole, runs.killed)
    )
    assert all(torch.equal(killed[name], weight) for name, weight in whole.items())


def test_states_are_removed_when_the_stage_is_done(runs: Runs) -> None:
    for folder in (runs.whole, runs.killed):
        assert RunDir(folder).result() is not None and not (folder / "state").exists()


@pytest.mark.long
def test_wrong_input_found_beside_the_starting_roles_is_the_last_thing_said(
    material: Path, tmp_path: Path
) -> None:
    """The engine prints while it starts, and the flow takes its sentence from the end of the log."""
    (tmp_path / "checks.py").write_text(ODD)
    fields = common(material) | {"prompts": Data(sources=str(material / "prompts.jsonl"), max_samples=4)}
    config = PPO(
        **fields,
        actor_ranks=Ranks(cpus=SHARE),
        advantage_estimator="rloo",
        reward=f"{tmp_path / 'checks.py'}:odd",
    )
    write_request(tmp_path, config, {"base": str(material / "base")})
    assert start(tmp_path).wait(timeout=600) == 2
    assert (
        (tmp_path / "log.txt")
        .read_text()
        .splitlines()[-1]
        .startswith("ppo needs rollout_batch_size=8 prompts, but the data has 4")
    )
