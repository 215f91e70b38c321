"""SFT, DPO and PPO over two hosts, each a namespace with a Ray node; what is left of hosts when their maker
is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import rlhf_core.stages.dpo
import rlhf_core.stages.sft
from rlhf_core.config import DPO, SFT, Data, Ranks
from rlhf_core.runs.metrics_log import read_metrics
from rlhf_core.runs.run_dir import RunDir, StageRequest
from tests.support import host_stages
from tests.support.host_stages import COMMAND, log, prepare
from tests.support.hosts import ROOT, Cluster, cluster, unavailable
from tests.support.micro import wait_until
from tests.support.stage_request import stage_request

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "there are hosts"),
]
DASHBOARD = ("--include-dashboard=true", "--dashboard-port=8265", "--dashboard-host=0.0.0.0")
FIELDS = {"train_batch_size": 12, "micro_train_batch_size": 2, "max_len": 64, "learning_rate": 1e-3}
HOLDER = """
import sys, time
from pathlib import Path
from tests.support.hosts import cluster
with cluster(2, Path(sys.argv[1])) as made:
    made.head.start("sleep", "300", log=Path(sys.argv[1]) / "log")
    print(*(host.first for host in made.hosts), flush=True)
    time.sleep(300)
"""


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(2, tmp_path_factory.mktemp("hosts")) as made:
        made.join([1, 1], *DASHBOARD)
        yield made


def test_hosts_end_with_their_maker_however_it_ends(tmp_path: Path) -> None:
    """Also killed by -9: no process, namespace or cable is left."""
    cables = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    maker = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, cwd=ROOT, text=True
    )
    assert maker.stdout is not None
    firsts = [psutil.Process(int(number)) for number in maker.stdout.readline().split()]
    assert len(firsts) == 2
    maker.send_signal(signal.SIGKILL)
    maker.wait()
    wait_until(lambda: not any(first.is_running() for first in firsts), "the hosts to end", 20)
    assert subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout == cables


@pytest.mark.long
@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_training_over_two_hosts_is_that_of_one_rank(
    kind: str, two: Cluster, material: Path, tmp_path: Path
) -> None:
    def request(**more: object) -> StageRequest:
        data = Data(
            sources=str(material / ("sft.jsonl" if kind == "sft" else "preferences.jsonl")), max_samples=43
        )
        fields = {**FIELDS, "data": data, **more}
        config = SFT(model="base", **fields) if kind == "sft" else DPO(policy="base", **fields)
        return stage_request(config, material / "base", name=kind, seed=5)

    one = tmp_path / "one"
    over_two = tmp_path / "two"
    one.mkdir()
    {"sft": rlhf_core.stages.sft.run, "dpo": rlhf_core.stages.dpo.run}[kind](request(), RunDir(one))
    RunDir(over_two).prepare(request(zero_stage=3, ranks=Ranks(num_nodes=2, cpus=0.6)))
    host_stages.finish(two.head, over_two, two.ray_address)
    assert "on 2 node(s)" in log(over_two)
    expected = read_metrics(one)
    found = read_metrics(over_two)
    assert len(expected) == len(found) == 4
    for a, b in zip(expected, found, strict=True):
        assert {name: b[name] for name in ("loss", "grad_norm")} == pytest.approx(
            {n: a[n] for n in ("loss", "grad_norm")}, rel=2e-4, abs=1e-6
        )


@pytest.mark.long
def test_ppo_as_a_job_of_a_cluster_that_exists_uses_both_hosts(
    two: Cluster, material: Path, tmp_path: Path
) -> None:
    """Submitted from the other host; the reward function runs on both."""
    folder = tmp_path / "ppo"
    prepare(folder, material, steps=4)
    ray = str(Path(sys.executable).with_name("ray"))
    told = two.hosts[1].run(
        ray, "job", "submit", "--address", f"http://{two.head.address}:8265", "--", *COMMAND, str(folder)
    )
    assert "succeeded" in told
    assert "on 2 node(s)" in told
    assert "the reward function odd runs here and on 10.83.0." in told
    assert RunDir(folder).result() is not None and len(read_metrics(folder)) == 4
    assert len(list((folder / "namespaces").iterdir())) == 2


@pytest.mark.long
def test_an_engine_over_two_hosts_samples_what_one_process_samples(
    two: Cluster, material: Path, tmp_path: Path
) -> None:
    """Each host has a half of its layers. The probe after each update compares its log-probs with the
    trainer's."""
    rewards = []
    for stages in (1, 2):
        prepare(folder := tmp_path / str(stages), material, steps=4, stages=stages)
        host_stages.finish(two.head, folder, two.ray_address)
        assert f"weights go to {stages} engine processes by gloo" in log(folder)
        lines = read_metrics(folder)
        assert len(lines) == 4 and all(line["sync/probe_gap"] <= line["sync/probe_bound"] for line in lines)
        rewards.append([line["reward/mean"] for line in lines])
    assert rewards[0] == rewards[1], "answers differ"
