"""How long a stage waits for its ranks: as long as they make progress, and `timeout` seconds longer. With the
real roles of PPO."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from rlhf_core.runs.metrics_log import read_metrics
from rlhf_core.runs.run_dir import RunDir
from tests.support.host_stages import CLOSE, COMMAND, log, prepare
from tests.support.hosts import ROOT
from tests.support.micro import wait_until
from tests.support.programs import logged

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]
TIMEOUT = 40.0  # seconds; the roles' imports are to take less
# What each process of the stage imports first: the model is copied to its place as by a slow disk, in more
# than 3 x TIMEOUT seconds.
SLOW = """
import importlib.abc, importlib.machinery, shutil, sys, time
from pathlib import Path

def slowly(save):
    def slow(model, state, source, folder, *rest):
        made = Path(f"{folder}.made")
        save(model, state, source, made, *rest)
        folder.mkdir(parents=True)
        for file in made.iterdir():
            data = file.read_bytes()
            parts = 125 if file.suffix == ".safetensors" else 1
            with (folder / file.name).open("wb") as out:
                for i in range(parts):
                    out.write(data[len(data) * i // parts : len(data) * (i + 1) // parts])
                    out.flush()
                    time.sleep(1.0 if parts > 1 else 0.0)
        shutil.rmtree(made)
    return slow

class Hook(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "rlhf_core.training.ranks":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module
        def exec_module(module):
            execute(module)
            module.save_model = slowly(module.save_model)
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Hook())
"""


def start(folder: Path, *paths: Path) -> subprocess.Popen[bytes]:
    path = {"PYTHONPATH": os.pathsep.join(map(str, [*paths, ROOT]))}
    return logged([*COMMAND, str(folder)], folder / "log.txt", env=os.environ | path)


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends the stage's process and all that it started."""
    started = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    for each in [*started, process]:
        each.kill()
    process.wait()


def test_an_export_that_takes_longer_than_three_timeouts_ends_well_and_shows_its_work(
    material: Path, tmp_path: Path
) -> None:
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "sitecustomize.py").write_text(SLOW)
    folder = tmp_path / "ppo"
    prepare(folder, material, CLOSE, steps=2, timeout=TIMEOUT)
    process = start(folder, tmp_path / "slow")
    try:
        wait_until(
            lambda: len(read_metrics(folder)) == 2 or process.poll() is not None,
            "training",
            150,
            lambda: log(folder)[-3000:],
        )
        begun = time.monotonic()
        assert process.wait(timeout=200) == 0, log(folder)[-3000:]
        assert time.monotonic() - begun > 3 * TIMEOUT
    finally:
        end(process)
    assert RunDir(folder).result() is not None
    assert re.search(
        r"^actor in 'export': \d+ parts of work(, .* MiB written)? in 6\d s$", log(folder), re.MULTILINE
    )


def test_a_rank_that_is_stopped_is_named_within_the_timeout(material: Path, tmp_path: Path) -> None:
    folder = tmp_path / "ppo"
    prepare(folder, material, CLOSE, steps=60, timeout=TIMEOUT)
    process = start(folder)
    try:
        wait_until(
            lambda: len(read_metrics(folder)) >= 3 or process.poll() is not None,
            "iterations",
            150,
            lambda: log(folder)[-3000:],
        )
        found = re.search(r"sampler is up, process (\d+)", log(folder))
        assert found is not None, log(folder)[-3000:]
        os.kill(int(found[1]), signal.SIGSTOP)
        assert process.wait(timeout=TIMEOUT + 20) == 1
    finally:
        end(process)
    assert re.search(
        rf"sampler: ranks \[0\] made no progress in '.+' for {TIMEOUT:.0f} s; raise `timeout`", log(folder)
    )
