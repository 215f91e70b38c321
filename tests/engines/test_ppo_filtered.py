"""Dynamic filtering with real engines that answer while models work: asynchronous training, killed and resumed,
and scores that begin early."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config import PPO, Ranks
from rlhf_core.runs.metrics_log import read_metrics
from rlhf_core.stages.ppo.sampling.stored import read_collected
from tests.engines.test_ppo import (
    ODD,
    SHARE,
    common,
    finish,
    kill_past_checkpoint,
    kill_with_workers,
    start,
    write_request,
)
from tests.engines.test_ppo_asynchronous import order_of
from tests.support.micro import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
ITERATIONS = 6
BATCH = 4
SAVED = 2


def prepare(folder: Path, material: Path, **fields: Any) -> Path:
    (folder.parent / "checks.py").write_text(ODD)
    sizes = {"rollout_batch_size": BATCH, "n_samples_per_prompt": 2, "num_episodes": ITERATIONS}
    steps = {"max_steps": ITERATIONS, "save_steps": SAVED, "logging_steps": 1, "export_at": ()}
    config = PPO(
        **{
            **common(material),
            **sizes,
            **steps,
            "advantage_estimator": "grpo",
            "init_kl_coef": 0.0,
            "max_epochs": 1,
            "reward": {"function": f"{folder.parent / 'checks.py'}:odd", "normalize": "running"},
            "dynamic_filtering": True,
            "actor_ranks": Ranks(cpus=SHARE),
            **fields,
        }
    )
    write_request(folder, config, {"base": str(material / "base")})
    return folder


def looked_at(lines: Sequence[Mapping[str, float]]) -> int:
    """The groups that these iterations have looked at."""
    return int(sum(line["filter/looked_at"] for line in lines))


def assert_every_prompt_once(run: Path, states: Path) -> None:
    """`states`: the run's resume states when it was killed."""
    order = order_of(run)
    step = max(int(folder.name.removeprefix("step-")) for folder in states.glob("step-*"))
    state = states / f"step-{step}"
    collected = read_collected(state, order)
    lines = read_metrics(run)
    new = collected.ready.keys() - set(collected.counted)
    waiting = len(collected.open) + len(new) + len(collected.dropped)
    assert looked_at(lines[:step]) + waiting == collected.next, "each is in one place"
    rows = [
        json.loads(row)
        for number in range(1, ITERATIONS + 1)
        for row in (run / "rollouts" / f"iteration{number}.jsonl").read_text().splitlines()
    ]
    trained = Counter(row["prompt"][-1]["content"] for row in rows)
    asked = Counter(prompt.messages[-1]["content"] for prompt, _ in order.take(0, looked_at(lines)))
    assert sum(trained.values()) == 2 * BATCH * ITERATIONS
    assert all(times <= 2 * asked[text] for text, times in trained.items())


def test_asynchronous_filtering_fills_each_iteration_and_resumes(material: Path, tmp_path: Path) -> None:
    run = prepare(tmp_path / "run", material, max_staleness=1)
    kill_past_checkpoint(run)
    shutil.copytree(run / "state", tmp_path / "state")
    finish(run)
    assert "resumed after iteration" in (run / "log.txt").read_text()
    lines = read_metrics(run)
    assert len(lines) == ITERATIONS
    assert all(line["filter/groups"] == BATCH and line["rollout/age_max"] <= 1 for line in lines)
    assert any(line["filter/accepted"] < 1 for line in lines)
    # an odd length is 1 and an even one 0, so that a group with a signal has the mean 0.5
    assert all(line["filter/reward_mean"] == 0.5 for line in lines)
    assert all(line["sync/probe_gap"] < 1e-3 for line in lines)
    assert max(line["rollout/age"] for line in lines) > 0
    assert_every_prompt_once(run, tmp_path / "state")


def kill_at(run: Path, what: str, reached: Callable[[Path], bool]) -> None:
    """Starts the run and kills its process with SIGKILL when `reached`."""
    process = start(run)
    wait_until(lambda: reached(run) or process.poll() is not None, what, 600)
    kill_with_workers(run, process)


@pytest.mark.long
def test_asynchronous_filtering_is_killed_at_five_points(material: Path, tmp_path: Path) -> None:
    run = prepare(tmp_path / "run", material, max_staleness=1)
    log = run / "log.txt"

    def writes_a_state(folder: Path) -> bool:
        return any((folder / "state").glob(".step-*")) or (folder / "state" / f"step-{SAVED}").is_dir()

    kill_at(run, "the first answers", lambda _: log.is_file() and "iteration 1 of" in log.read_text())
    kill_at(run, "the first iteration's end", lambda folder: len(read_metrics(folder)) == 1)
    assert not list((run / "state").glob("step-*")), "there was nothing to resume from"
    kill_at(run, "the first resume state", writes_a_state)
    kill_at(run, "an iteration past a state", lambda folder: len(read_metrics(folder)) == SAVED + 1)
    kill_at(run, "the last iteration", lambda folder: len(read_metrics(folder)) == ITERATIONS)
    shutil.copytree(run / "state", tmp_path / "state", ignore=shutil.ignore_patterns(".*"))
    finish(run)
    lines = read_metrics(run)
    assert "resumed after iteration 4" in log.read_text()
    assert [line["step"] for line in lines] == list(range(1, ITERATIONS + 1))
    assert all(line["filter/groups"] == BATCH and line["rollout/age_max"] <= 1 for line in lines)
    assert_every_prompt_once(run, tmp_path / "state")


def test_streamed_filtering_has_the_curve_of_filtering_in_turn(material: Path, tmp_path: Path) -> None:
    how = {"max_steps": 3}
    runs = {
        part: prepare(tmp_path / f"part{part}", material, stream_batch_size=part, **how) for part in (None, 3)
    }
    for run in runs.values():
        finish(run)
    in_turn, streamed = (read_metrics(run) for run in runs.values())
    assert any(line["filter/rounds"] > 1 for line in in_turn)
    for one, other in zip(in_turn, streamed, strict=True):
        for name in ("filter/rounds", "filter/groups", "filter/accepted", "reward/mean", "response/length"):
            assert other[name] == one[name]
        assert other["policy/loss"] == pytest.approx(one["policy/loss"], abs=1e-4)
