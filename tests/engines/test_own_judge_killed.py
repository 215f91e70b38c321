"""A run with a judge on its own engines is killed while the judge works, and started again: it has the curve and
weights of an undisturbed run, and every verdict is asked for once."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlhf_core.config import PPO, Ranks
from rlhf_core.judging.record_lines import records_of
from rlhf_core.rewards.judge.judge_client import StoredVerdict
from rlhf_core.rewards.judge.label_agreement import JUDGE_CACHE
from rlhf_core.runs.metrics_log import read_metrics
from rlhf_core.runs.run_dir import RunDir
from tests.engines.test_own_judge import LIKED, rewarded
from tests.engines.test_ppo import SAVED, SHARE, assert_same_end, common, finish, start, write_request
from tests.support.judge_model import save_judge
from tests.support.micro import wait_until
from tests.support.programs import alive

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
PROMPTS = 8  # of an iteration, with four answers each
REQUESTS = "reward/grm/requests"
AT_ONCE = {"transformers": {"batch_size": 1}, "vllm": {"max_num_seqs": 1}}  # so that judging takes a while


def verdicts(run: Path) -> list[StoredVerdict]:
    """Returns what a run has cached; a line that is being written does not count."""
    return list(records_of(run / JUDGE_CACHE / "grm.jsonl", StoredVerdict))


def prepare(run: Path, material: Path, judge: Path, kind: str, how: dict[str, Any]) -> None:
    reward = rewarded(kind)
    reward["judge"]["engine"] |= {"options": AT_ONCE[kind]}
    config = PPO(
        **common(material)
        | {"n_samples_per_prompt": 4, "train_batch_size": 32, "micro_train_batch_size": 8, "max_epochs": 1},
        reward=reward,
        actor_ranks=Ranks(cpus=SHARE),
        **how,
    )
    write_request(run, config, {"base": str(material / "base"), "grm": str(judge)})


def judges_of(run: Path, started: list[psutil.Process]) -> list[psutil.Process]:
    """Returns the judge's process, which the log names, and those that it started."""
    told = re.findall(r"judge:grm is up, process (\d+)", (run / "log.txt").read_text())
    process = next(process for process in started if process.pid == int(told[-1]))
    return [process, *process.children(recursive=True)]


def kill_while_judging(run: Path, process: subprocess.Popen[bytes], known: int) -> list[StoredVerdict]:
    """Kills the stage's process once its judge has given some verdicts on the iteration after the resume
    state, and more are due. Returns the verdicts of all iterations at the kill."""

    def judges() -> bool:
        done = len(read_metrics(run)) >= SAVED and (run / "state" / f"step-{SAVED}" / "loop.json").is_file()
        return done and len(verdicts(run)) > known

    wait_until(lambda: judges() or process.poll() is not None, "verdicts after the resume state", 600)
    started = psutil.Process(process.pid).children(recursive=True)
    engines = judges_of(run, started)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    wait_until(lambda: not any(map(alive, engines)), "the judge's processes to end by themselves", 90)
    for survivor in psutil.wait_procs(started, timeout=5)[1]:  # Ray's agents would stay for a minute
        survivor.kill()
    assert RunDir(run).result() is None and len(read_metrics(run)) == SAVED, "killed too late"
    return verdicts(run)


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("transformers", {"advantage_estimator": "grpo"}),
        pytest.param("vllm", {"advantage_estimator": "grpo"}, marks=pytest.mark.long),
        pytest.param(
            "transformers", {"critic": "base", "critic_ranks": {"cpus": SHARE}}, marks=pytest.mark.long
        ),
    ],
)
def test_a_run_that_is_killed_while_its_judge_works_asks_for_each_verdict_once(
    kind: str, how: dict[str, Any], material: Path, tmp_path: Path
) -> None:
    judge = save_judge(tmp_path / "grm", LIKED, 700)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for run in (whole, killed):
        prepare(run, material, judge, kind, how)
    finish(whole)
    lines = read_metrics(whole)
    before = int(sum(line[REQUESTS] for line in lines[:SAVED]))
    third = int(lines[SAVED][REQUESTS])
    assert third > 8 and len(verdicts(whole)) == sum(line[REQUESTS] for line in lines)

    at_kill = kill_while_judging(killed, start(killed), before)
    assert before < len(at_kill) < before + third, "it was judging"
    finish(killed)
    asked = read_metrics(killed)[SAVED][REQUESTS]
    assert asked == third - (len(at_kill) - before), "the cached verdicts are used, and no other is missing"
    found = verdicts(killed)
    assert found[: len(at_kill)] == at_kill
    assert max(Counter(verdict.key for verdict in found).values()) == 1
    assert {v.key: v.verdict for v in found} == {v.key: v.verdict for v in verdicts(whole)}
    assert_same_end(whole, killed, but=(REQUESTS, "reward/grm/input_tokens", "reward/grm/output_tokens"))
