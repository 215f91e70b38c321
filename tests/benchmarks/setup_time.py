"""Time of `make setup` in a fresh clone with empty caches: `python tests/benchmarks/setup_time.py --runs 5
--json setup.json`.

CPU seconds are those of the command and all that it started; they differ less than the wall clock where other
work runs or the network is slow. Each run has a clone and caches of its own; all are removed at the end,
since ext4 takes longer to make files in the minutes after a large deletion. Variables that keep a cache of
uv, or keep Python from writing what it compiles, are left out.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

from record import add_options, figure, save

ROOT = Path(__file__).parents[2]
RUN_GB = 6
LEFT_OUT = ("UV_CACHE_DIR", "PYTHONDONTWRITEBYTECODE")


class Run(NamedTuple):
    """Seconds of one setup, and bytes of its .venv."""

    wall: float
    cpu: float
    environment: int


def cpu_seconds() -> float:
    """Returns the CPU seconds of all children that ended, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def size(folder: Path) -> int:
    """Returns the bytes that `folder` takes on the disk; a file of several names counts once."""
    found = subprocess.run(
        ["du", "--summarize", "--block-size=1", str(folder)], capture_output=True, text=True, check=True
    )
    return int(found.stdout.split()[0])


def measure(folder: Path, source: Path, commit: str, target: str) -> Run:
    """Runs `make TARGET` in a clone of `source` at `commit`, in `folder`. Raises CalledProcessError when it
    fails."""
    clone = folder / "clone"
    caches = folder / "caches"
    caches.mkdir(parents=True)
    subprocess.run(["git", "clone", "--quiet", str(source), str(clone)], check=True)
    subprocess.run(["git", "checkout", "--quiet", commit], cwd=clone, check=True)
    environment = {name: value for name, value in os.environ.items() if name not in LEFT_OUT}
    environment |= {"PIP_CACHE_DIR": str(caches / "pip"), "XDG_CACHE_HOME": str(caches)}
    started = time.monotonic()
    cpu_before = cpu_seconds()
    subprocess.run(["make", target], cwd=clone, env=environment, check=True)
    wall = time.monotonic() - started
    cpu = cpu_seconds() - cpu_before
    return Run(wall, cpu, size(clone / ".venv"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--runs", type=int, default=1, help="setups, one after the other; figures are medians"
    )
    parser.add_argument("--commit", default="HEAD", help="commit of this repository that is cloned")
    parser.add_argument("--target", default="setup", help="setup or setup-dev")
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help="where the clones are made"
    )
    add_options(parser, "setup-2cores")
    arguments = parser.parse_args()
    free = shutil.disk_usage(arguments.folder).free / 1e9
    needed = arguments.runs * RUN_GB
    if free < needed:
        parser.error(
            f"{arguments.runs} runs need {needed} GB in {arguments.folder}, which has {free:.0f}: give"
            " --folder"
        )
    named = ["git", "rev-parse", arguments.commit]
    commit = subprocess.run(named, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    runs = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        for number in range(1, arguments.runs + 1):
            run = measure(Path(name) / str(number), ROOT, commit, arguments.target)
            runs.append(run)
            print(f"run {number}: wall {run.wall:.1f} s, CPU {run.cpu:.1f} s", flush=True)
    found = {
        "wall": figure(round(median(run.wall for run in runs), 1), "s"),
        "CPU": figure(round(median(run.cpu for run in runs), 1), "s"),
        "longest wall": figure(round(max(run.wall for run in runs), 1), "s"),
        "most CPU": figure(round(max(run.cpu for run in runs), 1), "s"),
        ".venv": figure(round(runs[-1].environment / 2**30, 1), "GiB"),
    }
    save(arguments, f"`make {arguments.target}` in a fresh clone with empty caches", found)


if __name__ == "__main__":
    main()
