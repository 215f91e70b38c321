"""PPO over two hosts, each a namespace with a Ray node: a cable that is cut, a raylet, a node and the head
that die.

Each is named by a sentence within a minute, no process of the stage is left on either host, and the next run
resumes on what is left. The seconds are properties of the test report (`record_property`), and printed.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.host_stages import (
    CLOSE,
    SAVED,
    SPREAD,
    config_of,
    finish,
    log,
    prepare,
    seconds_until,
    start,
    wait_for_work,
)
from tests.support.hosts import Cluster, Host, cluster, unavailable
from tests.support.micro import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "there are hosts"),
]
LEFT_SECONDS = 90  # until nothing of the stage is left: a host that is cut off finds out by itself


class Fault(NamedTuple):
    """`driver`: the host of the stage's own process, whose run again is there; `victim`: the host of the
    fault."""

    driver: int
    victim: int
    do: Callable[[Cluster, Host], None]
    sentence: str


def kill(name: str) -> Callable[[Cluster, Host], None]:
    def do(made: Cluster, host: Host) -> None:
        for process in host.named(name):
            process.kill()

    return do


SECOND = r"^the Ray node 10\.83\.0\.2 gave no answer "
HEAD = r"^the head of the Ray cluster \(10\.83\.0\.1\).* gave no answer "
FAULTS = {
    "the cable is cut for good": Fault(1, 2, Cluster.cut, SECOND),
    "a raylet is killed": Fault(
        1, 2, kill("raylet/raylet"), rf"{SECOND}|^a Ray node \(10\.83\.0\.2\) ended during "
    ),
    "a node loses its power": Fault(
        1, 2, lambda made, host: host.kill(), rf"{SECOND}|^a Ray node \(10\.83\.0\.2\) ended during "
    ),
    "the cable of the head is cut": Fault(2, 1, Cluster.cut, HEAD),
    "the head's server is killed": Fault(2, 1, kill("gcs_server"), HEAD),
    "the head loses its power": Fault(2, 1, lambda made, host: host.kill(), HEAD),
}


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Cluster]:
    with cluster(2, tmp_path / "hosts") as made:
        made.join([1, 1])
        yield made


@pytest.mark.parametrize("name", FAULTS)
def test_is_named_leaves_nothing_and_the_next_run_finishes(
    name: str, two: Cluster, material: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    fault = FAULTS[name]
    folder = tmp_path / "ppo"
    driver = two.hosts[fault.driver - 1]
    victim = two.hosts[fault.victim - 1]
    clusters_own = {process.pid for host in two.hosts for process in host.processes()}
    prepare(folder, material)
    process = start(driver, folder, two.ray_address)
    wait_for_work(process, folder)
    assert "on 2 node(s)" in log(folder)
    begun = time.monotonic()
    fault.do(two, victim)
    seconds = seconds_until(fault.sentence, folder, begun)
    assert process.wait(timeout=60) == 1
    assert "Traceback" not in log(folder), "the sentence is all it says"
    record_property("seconds to the sentence", seconds)
    print(f"{name}: named after {seconds:.0f} s")

    def left() -> list[str]:
        found = [
            process for host in two.hosts for process in host.processes() if process.pid not in clusters_own
        ]
        return [" ".join(process.cmdline()) for process in found if process.is_running()]

    wait_until(lambda: not left(), "the stage's processes to end", LEFT_SECONDS, lambda: str(left()))
    record_property("seconds until nothing is left", time.monotonic() - begun)
    prepare(folder, material, CLOSE, steps=SAVED + 4)
    finish(driver, folder, two.ray_address if fault.driver == 1 else "")
    assert "resumed after iteration" in log(folder)


def test_a_cable_that_is_out_for_ten_seconds_is_named_and_the_run_goes_on(
    two: Cluster, material: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    folder = tmp_path / "ppo"
    prepare(folder, material, steps=12)
    process = start(two.head, folder, two.ray_address)
    wait_for_work(process, folder)
    begun = time.monotonic()
    two.cut(two.hosts[1])
    seconds = seconds_until(
        r"^the Ray node 10\.83\.0\.2 gives no answer; the stage waits 30 s for it$", folder, begun
    )
    record_property("seconds to the sentence", seconds)
    print(f"ten seconds without a cable: named after {seconds:.0f} s")
    time.sleep(max(0.0, 10 - (time.monotonic() - begun)))
    two.mend(two.hosts[1])
    assert process.wait(timeout=200) == 0, log(folder)[-3000:]
    assert "the Ray node 10.83.0.2 answers again after " in log(folder)


def test_alignflow_run_says_it_and_finishes_when_it_is_run_again(
    two: Cluster, material: Path, tmp_path: Path
) -> None:
    """By itself it tries once more, on what is left, and says what that lacks."""

    def run(cpus: float) -> int:
        stage = config_of(tmp_path, material, cpus).model_dump(mode="json", exclude_defaults=True)
        recipe = dict(
            name="nodes", base_model=str(material / "base"), artifacts="artifacts", stages={"ppo": stage}
        )
        (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))  # which is YAML too
        command = (sys.executable, "-P", "-m", "flows.cli", "run", "recipe.yaml")
        given = {
            "RAY_ADDRESS": two.ray_address,
            "PREFECT_HOME": str(tmp_path / "prefect"),
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        }
        process = two.head.start(*command, log=tmp_path / "log.txt", folder=tmp_path, **given)
        if cpus == SPREAD:
            wait_until(
                lambda: "step 3/" in log(tmp_path) or process.poll() is not None,
                "iterations",
                240,
                lambda: log(tmp_path)[-3000:],
            )
            kill("raylet/raylet")(two, two.hosts[1])
        return process.wait(timeout=240)

    assert run(SPREAD) != 0
    told = log(tmp_path)
    assert re.search(
        r"the Ray node 10\.83\.0\.2 gave no answer |a Ray node \(10\.83\.0\.2\) ended during ", told
    ), told[-3000:]
    assert "the cluster lacks CPUs (requested 1.5, available 1)" in told
    assert run(CLOSE) == 0, log(tmp_path)[-3000:]
    assert "resumed after iteration" in log(tmp_path).removeprefix(told)
