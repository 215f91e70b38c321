"""What a run costs beside its stages, from the files it left: `python tests/benchmarks/orchestration.py
artifacts/RECIPE`.

Every stage must have been done in that run. A stage counts from the start of its process to its end, as its
log has it: what the process does after its `result.json`, such as ending its Ray cluster, is the stage's own.
The run counts from the start of its flow to its page (`run.json`). `--again RECIPE` runs the recipe of that
folder once more, from nothing, with stages that only copy what they made the first time: all else is real, so
that this tells in half a minute what a whole run costs beside its stages, and when. `--micro N` makes a run
of N stages that only sleep, without the check of their inputs, and says what it cost.
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
from pathlib import Path
from typing import Any, NamedTuple

from record import add_options, figure, save

ROOT = Path(__file__).parents[2]
SLEEP = 2.0  # seconds of a stage of the micro recipe
# rlhf_core/runs/launch.py writes it
ENDED = re.compile(r"^\+\+\+ .* ended after ([0-9.]+) s with code", re.MULTILINE)
STAGE = f"""
import sys, time
from rlhf_core.runs.run_dir import Outcome, run_in_directory, write_text

def work(request, run):
    time.sleep({SLEEP})
    (run / "checkpoint").mkdir(exist_ok=True)
    write_text(run / "checkpoint" / "made", request.digest)
    return Outcome({{"loss": 1.0}}, {{"checkpoint": "checkpoint"}})

run_in_directory(sys.argv[1], work)
"""
COPY = """
import shutil, sys
from pathlib import Path
run, source = Path(sys.argv[1]), Path({source!r}) / Path(sys.argv[1]).name
own = ["config.json", "log.txt", "result.json", ".lock"]
shutil.copytree(source, run, ignore=lambda folder, names: own if Path(folder) == source else [], dirs_exist_ok=True)
shutil.copy(source / "result.json", run / "result.json")
"""
COMMAND = """
import sys
import flows.cli, flows.cli.run_commands
run = flows.cli.run_commands._run

def with_other_stages(*given):
    import flows.alignment, tasks.stages
    launch = tasks.stages.launch
    tasks.stages.launch = lambda package, *rest: launch("other_stage", *rest)
    flows.alignment.require_here = flows.cli.run_commands.require_here
    return run(*given)

flows.cli.run_commands._run = with_other_stages
if sys.argv[1] == "unchecked":
    flows.cli.run_commands.require_here = lambda planned, nodes: None
sys.exit(flows.cli.main(["run", *sys.argv[2:]]))
"""


class Share(NamedTuple):
    """Seconds. `processes`: the stages' processes; `work`: what their results say, from the start of each to
    its result."""

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
        ended = ENDED.findall((run_dir / "log.txt").read_text())
        if not ended:
            raise ValueError(
                f"{run_dir / 'log.txt'} does not say when its process ended: give a run of this version"
            )
        processes += float(ended[-1])
        work += json.loads((run_dir / "result.json").read_text())["seconds"]
    return Share(run["ended"] - run["started"], processes, work, len(run["stages"]))


def micro(stages: int) -> tuple[Share, float]:
    """A run of `stages` stages that sleep; its share, and the seconds of the whole command."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = ["base", *(f"s{i}" for i in range(stages))]
        lines = [
            f"  s{i}: {{stage: sft, model: {models[i]}, data: {{sources: none.jsonl}}}}"
            for i in range(stages)
        ]
        (folder / "recipe.yaml").write_text(
            "\n".join(["name: micro", "base_model: org/model", "stages:", *lines])
        )
        start, end = command(
            folder, STAGE, "unchecked", str(folder / "recipe.yaml"), f"artifacts={folder / 'artifacts'}"
        )
        return measure(folder / "artifacts" / "micro"), end - start


def again(recipe: str, done: Path) -> tuple[float, float, float]:
    """Runs a recipe, from the working directory, with stages that copy their results from `done`, the
    recipe's folder. Returns the seconds before the first stage, between the stages, and after the last. A
    stage lasts from its request to the end of its process."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy = COPY.format(source=str(done.absolute().parent / "stages"))
        start, end = command(folder, copy, "checked", recipe, f"artifacts={folder / 'artifacts'}")
        run = json.loads((folder / "artifacts" / done.name / "run.json").read_text())
        runs = [folder / "artifacts" / stage["run_dir"] for stage in run["stages"]]
        begun = sorted((run_dir / "config.json").stat().st_mtime for run_dir in runs)
        # its last line is written then
        ended = sorted((run_dir / "log.txt").stat().st_mtime for run_dir in runs)
        return (
            begun[0] - start,
            sum(later - before for later, before in zip(begun[1:], ended, strict=False)),
            end - ended[-1],
        )


def command(folder: Path, stage: str, *arguments: str) -> tuple[float, float]:
    """Runs `alignflow run` with a fresh Prefect home, all stages being the script `stage`; when it began and
    ended."""
    (folder / "other_stage.py").write_text(stage)
    environment = os.environ | {
        "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}",
        "PREFECT_HOME": str(folder / "prefect"),
    }
    start = time.time()
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    if done.returncode:
        raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
    return start, time.time()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", help="<artifacts>/<recipe name>")
    parser.add_argument(
        "--again",
        metavar="RECIPE",
        help="run the folder's recipe again, with stages that copy what they made",
    )
    parser.add_argument("--micro", type=int, metavar="N", help="make a run of N stages that sleep")
    add_options(parser, "orchestration")
    arguments = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    if arguments.again:
        before, between, after = again(arguments.again, arguments.folder)
        print(
            f"before the first stage {before:.1f} s, between the stages {between:.1f} s, after the last"
            f" {after:.1f} s"
        )
        print(f"in all {before + between + after:.1f} s")
        found["besides stages, run again"] = figure(round(before + between + after, 1), "s")
    elif arguments.folder:
        share = measure(arguments.folder)
        print(
            f"{share.stages} stages: flow {share.flow:.1f} s, stages' processes {share.processes:.1f} s,"
            f" their work {share.work:.1f} s"
        )
        print(
            f"beside the stages' processes: {share.beside:.1f} s, {share.beside / share.flow:.1%} of the flow"
        )
        found["inside the flow"] = figure(round(share.beside, 1), "s")
    if arguments.micro:
        share, whole = micro(arguments.micro)
        around = whole - share.flow
        print(f"{share.stages} stages that sleep {SLEEP:g} s: command {whole:.1f} s, flow {share.flow:.1f} s")
        print(
            f"beside the stages' processes: {share.beside / share.stages:.2f} s a stage, {around:.1f} s"
            " before and after the flow"
        )
        found["beside a stage"] = figure(round(share.beside / share.stages, 2), "s")
    save(arguments, "Time of a run that is no stage", found)


if __name__ == "__main__":
    main()
