"""Ray workers of a stage import our packages, not modules of the same names in the working directory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from tests.support import hostile

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DRIVER = """
import json
from rlhf_core.cluster.layout import arrange
from rlhf_core.cluster.ray_cluster import connect, leave, reserve
from rlhf_core.cluster.worker_group import WorkerGroup
from rlhf_core.config import Ranks

class Role:  # of `__main__`, so that Ray sends it by value
    def files(self):
        import evaluation, flows, rlhf_core, sys, tasks, tokenize
        return [m.__file__ for m in (evaluation, flows, rlhf_core, tasks, tokenize)], DRIVERS_FOLDER in sys.path

connect()
group = WorkerGroup("actor", reserve(arrange({"actor": Ranks(num_ranks_per_node=2, cpus=0.25)}), 30), 1)
group.build(Role).wait(300)
print(json.dumps(group.call("look", Role.files).wait(300)))
leave()
"""


@pytest.fixture(params=["a cluster of its own", "a cluster that runs already"])
def environment(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """The driver's environment."""
    if request.param == "a cluster of its own":
        yield hostile.environment()
        return
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "object_store_memory": 100 << 20})
    yield hostile.environment() | {"RAY_ADDRESS": cluster.address}
    cluster.shutdown()


def test_workers_import_our_packages(environment: dict[str, str], tmp_path: Path) -> None:
    hostile.write(tmp_path)
    command = [sys.executable, "-P", "-c", DRIVER.replace("DRIVERS_FOLDER", repr(str(tmp_path)))]
    # As a stage is started; a Ray cluster of its own inherits the environment.
    safe = environment | {"PYTHONSAFEPATH": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=safe, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    for files, on_path in json.loads(done.stdout.splitlines()[-1]):
        assert all(file.startswith((str(hostile.ROOT), sys.base_prefix)) for file in files) and not on_path
    assert hostile.imported(tmp_path) == ""
