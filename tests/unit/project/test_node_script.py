"""The script of a Ray node in Kubernetes: whom it awaits, when it gives up, and how it ends."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

from tests.unit.project.test_kubernetes import NODE, Nodes, node

__all__ = ["node"]


def test_a_worker_gives_up_after_its_attempts_and_says_what_it_awaited(node: Nodes, tmp_path: Path) -> None:
    start = time.monotonic()
    done = node("train", RAY_NODE_RANK="2", JOIN_PAUSE="1", JOIN_ATTEMPTS="2")
    assert done.returncode == 3 and 1 <= time.monotonic() - start < 50
    assert "waited 2 s for the Ray head at head:6379, in 2 attempts, and it never answered: is" in done.stderr
    assert (tmp_path / "log").read_text().splitlines() == ["health-check --address head:6379"] * 2


def test_a_worker_joins_late_and_ends_with_the_head(node: Nodes, tmp_path: Path) -> None:
    done = node("train", JOB_COMPLETION_INDEX="1", HEALTHY="2", RAY_PORT="6400")
    assert done.returncode == 0, done.stderr
    assert "no Ray head answers at head:6400 yet (attempt 1 of 3)" in done.stderr
    assert "has ended, and so does this worker" in done.stderr
    assert "start --address=head:6400 --block" in (tmp_path / "log").read_text()


def test_a_worker_that_cannot_stay_gives_up(node: Nodes) -> None:
    done = node("train", RAY_NODE_RANK="1", HEALTHY="1 2 3")
    assert done.returncode == 3 and "left the cluster at head:6379 again and again, 3 times" in done.stderr


def test_the_head_waits_for_all_nodes_and_returns_the_commands_code(node: Nodes, tmp_path: Path) -> None:
    done = node(
        "bash", "-c", 'echo "at $RAY_ADDRESS"; exit 5', RAY_NODE_RANK="0", RAY_NODES="4", COUNTS="1 3 4"
    )
    assert done.returncode == 5 and done.stdout.endswith("at 127.0.0.1:6379\n"), done.stderr
    assert "3 of 4 nodes are there (look 2 of 3)" in done.stderr
    assert (tmp_path / "log").read_text().splitlines() == [
        "start --head --port=6379 --dashboard-host=0.0.0.0",
        *["count"] * 3,
        "stop",
    ]


def test_the_head_gives_up_on_missing_workers(node: Nodes) -> None:
    done = node("echo", "never", RAY_NODE_RANK="0", RAY_NODES="4", COUNTS="1 2")
    assert done.returncode == 3 and "for 4 nodes and 2 came" in done.stderr and "never" not in done.stdout


def test_a_node_that_does_not_know_its_number(node: Nodes) -> None:
    done = node("train")
    assert done.returncode == 3 and "set RAY_NODE_RANK or JOB_COMPLETION_INDEX" in done.stderr


def test_nodes_without_a_token_do_not_start(node: Nodes, tmp_path: Path) -> None:
    done = node("train", RAY_NODE_RANK="0", RAY_AUTH_TOKEN="")
    assert done.returncode == 3 and "set RAY_AUTH_TOKEN to one secret on all nodes" in done.stderr
    assert not (tmp_path / "log").read_text(), "Ray was not started"


def test_the_node_script_is_sound_shell() -> None:
    assert os.access(NODE, os.X_OK)
    subprocess.run(["bash", "-n", str(NODE)], check=True, timeout=10)
    checker = shutil.which("shellcheck")
    if checker:
        done = subprocess.run([checker, str(NODE)], capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stdout
