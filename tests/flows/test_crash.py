"""Six points of the crash matrix (tests/crash/run_all.py has the others): kill -9 of the flow or of the stage's process, at its start, in
its middle and just before its end. The next run ends with the digests and contents of a run that nobody disturbed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests import micro

pytestmark = pytest.mark.timeout(300)
CALL = "from flows.alignment import alignment\nalignment('recipe.yaml')"
STAGES = {"start": "sft", "middle": "loop.round1.preferences", "end": "loop.round1.dpo"}  # where it is killed
Start = Callable[[Path], "subprocess.Popen[bytes]"]


@pytest.fixture(scope="module")
def start(prefect: str) -> Start:
    def call(folder: Path) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PYTHONPATH": f"{folder / 'modules'}{os.pathsep}{micro.ROOT}", "PREFECT_API_URL": prefect}
        with (folder / "out.txt").open("ab") as out:
            return subprocess.Popen([sys.executable, "-c", CALL], cwd=folder, env=environment, stdout=out, stderr=out)

    return call


def results(folder: Path) -> dict[str, str]:
    """Every file that a finished stage made, by name; but for times and the path of the folder."""
    found = {}
    for manifest in (folder / "artifacts" / "stages").glob("*/result.json"):
        files = json.loads(manifest.read_text())["files"]
        found |= {f"{manifest.parent.name}/{name}": info["sha256"] for name, info in files.items()}
    return found


@pytest.fixture(scope="module")
def undisturbed(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "here"
    micro.build(folder)
    assert start(folder).wait(120) == 0, (folder / "out.txt").read_text()[-3000:]
    assert len(results(folder)) == 4
    return folder


@pytest.mark.parametrize("who", ["flow", "stage"])
@pytest.mark.parametrize("when", ["start", "middle", "end"])
def test_killed_and_run_again(start: Start, undisturbed: Path, tmp_path: Path, who: str, when: str) -> None:
    folder, stage = tmp_path / "here", STAGES[when]
    micro.build(folder)
    for done in (undisturbed / "artifacts" / "stages").iterdir():  # what came before it is prebuilt
        if list(STAGES.values()).index(stage) > 0 and done.name.startswith(
            tuple(list(STAGES.values())[: list(STAGES.values()).index(stage)])
        ):
            shutil.copytree(done, folder / "artifacts" / "stages" / done.name)
    (folder / "slow.json").write_text(json.dumps({stage: when}))
    flow = start(folder)
    micro.wait_until(lambda: stage in micro.begun(folder), "the stage to begin", 60, lambda: (folder / "out.txt").read_text()[-2000:])
    process = psutil.Process(micro.attempts(folder)[-1][2])
    micro.wait_until(process.children, "the stage to get there")
    (folder / "slow.json").unlink()
    everything = [psutil.Process(flow.pid), *psutil.Process(flow.pid).children(recursive=True)]
    if who == "flow":
        flow.kill()
    else:
        process.send_signal(signal.SIGKILL)  # the flow itself tries again
    assert (flow.wait(120) == 0) == (who == "stage"), (folder / "out.txt").read_text()[-3000:]
    micro.wait_until(lambda: not [p for p in everything if p.is_running() and p.status() != "zombie"], "all to end", 40)
    if who == "flow":
        assert not list((folder / "artifacts" / "stages").glob(f"{stage}-*/result.json")), "nothing half done is marked done"
        assert start(folder).wait(120) == 0, (folder / "out.txt").read_text()[-3000:]
    assert results(folder) == results(undisturbed)
    begun = micro.begun(folder)
    assert begun.count(stage) == 2 and len(begun) == len(set(begun)) + 1, "no other stage was done twice"
