"""Who has not the token of a run's Ray cluster, or is another user of the machine, gets nowhere. Ray alone,
no models."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray

from rlhf_core.cluster.ray_cluster import connect
from tests.support.programs import captured
from tests.support.sockets import beyond_loopback, listening
from tests.support.strangers import as_nobody, as_root

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
JOIN = "import ray, sys; ray.init(sys.argv[1], log_to_driver=False); print('joined', ray.cluster_resources())"


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Yields the address of a cluster of this process."""
    connect()
    yield str(ray.get_runtime_context().gcs_address)
    ray.shutdown()


@pytest.fixture
def raylet(cluster: str) -> psutil.Process:
    return next(
        process for process in psutil.Process().children(recursive=True) if process.name() == "raylet"
    )


@pytest.mark.parametrize("token", [None, "0" * 64])
def test_a_client_without_the_token_cannot_join(cluster: str, token: str | None) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    if token:
        environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    done = captured([sys.executable, "-c", JOIN, cluster], env=environment, timeout=300)
    assert done.returncode != 0 and "joined" not in done.stdout
    assert "ConnectionError" in done.stderr or "Authentication" in done.stderr, done.stderr[-2000:]


def test_who_has_the_token_joins(cluster: str) -> None:
    done = captured([sys.executable, "-c", JOIN, cluster], env=os.environ, timeout=300)
    assert done.returncode == 0 and "joined" in done.stdout, done.stderr[-2000:]


def test_it_listens_on_loopback_alone(cluster: str) -> None:
    assert listening(os.getpid()) and not beyond_loopback(os.getpid())


@as_root
def test_another_user_reads_no_token_and_reaches_no_socket(raylet: psutil.Process) -> None:
    sockets = Path(ray._private.worker._global_node.get_sockets_dir_path())  # type: ignore[attr-defined]
    assert as_nobody("open('/proc/self/status')") == "allowed"
    assert as_nobody("open('/nowhere')") == "FileNotFoundError"
    assert as_nobody(f"open('/proc/{raylet.pid}/environ').read()") == "PermissionError"
    assert (sockets / "raylet").exists()
    assert as_nobody("import os; os.stat(sys.argv[1])", str(sockets / "raylet")) == "PermissionError"
    assert as_nobody("open(sys.argv[1], 'w')", str(sockets / "mine")) == "PermissionError"
