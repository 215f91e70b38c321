"""What a run costs beside its stages, from the files it left: `python tests/benchmarks/orchestration.py artifacts/RECIPE`.

Every stage must have been done in that run. A stage counts from the first line of its log, written when its process is started, to its
`result.json`; the run from the start of its flow to its page (`run.json`). With `--micro N` it makes such a run of N stages whose work is
only to sleep, through the whole command with Prefect's temporary server, and says what it cost.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SLEEP = 2.0  # seconds of a stage of the micro recipe
HEADER = re.compile(r"^--- (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) ", re.MULTILINE)
STAGE = f"""
import sys, time
from rlhf_core.stage import Outcome, run_stage, write_text

def work(request, run):
    time.sleep({SLEEP})
    (run / "checkpoint").mkdir(exist_ok=True)
    write_text(run / "checkpoint" / "made", request.digest)
    return Outcome({{"loss": 1.0}}, {{"checkpoint": "checkpoint"}})

run_stage(sys.argv[1], work)
"""
COMMAND = """
import sys, time
start = time.time()
import flows.alignment, flows.cli, flows.cli_run, tasks.stages
tasks.stages.module_of = lambda kind: "micro_stage"
flows.alignment.require_here = flows.cli_run.require_here = lambda planned, nodes: None
code = flows.cli.main(["run", "recipe.yaml"])
sys.exit(code)
"""


class Share(NamedTuple):
    """Seconds. `processes`: the stages' processes; `work`: what they call their work, without imports."""

    flow: float
    processes: float
    work: float
    stages: int

    @property
    def beside(self) -> float:
        return self.flow - self.processes


def measure(folder: Path) -> Share:
    """Reads a recipe's folder. ValueError when a stage of it was not done in its last run."""
    run = json.loads((folder / "run.json").read_text())
    if not run.get("ended") or any(stage["status"] != "done" for stage in run["stages"]):
        raise ValueError(f"{folder}: give a run that did all of its stages itself and came to its end")
    processes = work = 0.0
    for stage in run["stages"]:
        run_dir = folder.parent / stage["run_dir"]
        started = datetime.strptime(HEADER.findall((run_dir / "log.txt").read_text())[-1], "%Y-%m-%d %H:%M:%S").timestamp()
        processes += (
            (run_dir / "result.json").stat().st_mtime - started - 0.5
        )  # the log's time has whole seconds: on average half too early
        work += json.loads((run_dir / "result.json").read_text())["seconds"]
    return Share(run["ended"] - run["started"], processes, work, len(run["stages"]))


def micro(stages: int) -> tuple[Share, float]:
    """A run of `stages` stages that sleep; its share, and the seconds of the whole command."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "micro_stage.py").write_text(STAGE)
        models = ["base", *(f"s{i}" for i in range(stages))]
        lines = [f"  s{i}: {{stage: sft, model: {models[i]}, data: {{sources: none.jsonl}}}}" for i in range(stages)]
        (folder / "recipe.yaml").write_text("\n".join(["name: micro", "base_model: org/model", "stages:", *lines]))
        environment = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "PREFECT_HOME": str(folder / "prefect")}
        start = time.monotonic()
        done = subprocess.run([sys.executable, "-c", COMMAND], cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
        if done.returncode:
            raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
        return measure(folder / "artifacts" / "micro"), time.monotonic() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", help="<artifacts>/<recipe name>")
    parser.add_argument("--micro", type=int, metavar="N", help="make a run of N stages that sleep")
    arguments = parser.parse_args()
    if arguments.folder:
        share = measure(arguments.folder)
        print(f"{share.stages} stages: flow {share.flow:.1f} s, stages' processes {share.processes:.1f} s, their work {share.work:.1f} s")
        print(f"beside the stages' processes: {share.beside:.1f} s, {share.beside / share.flow:.1%} of the flow")
    if arguments.micro:
        share, whole = micro(arguments.micro)
        around = whole - share.flow
        print(f"{share.stages} stages that sleep {SLEEP:g} s: command {whole:.1f} s, flow {share.flow:.1f} s")
        print(f"beside the stages' processes: {share.beside / share.stages:.2f} s a stage, {around:.1f} s before and after the flow")


if __name__ == "__main__":
    main()
