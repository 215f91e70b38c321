"""`make crash`: kills what works on a stage, at its start, in its middle and at its end, and compares what
the next run ends with.

A point is STAGE/WHO/WHEN. The recipe (recipe.yaml) is the demo's with little of everything. One undisturbed
run is the reference; a point copies the stages before its own from it, starts `alignflow stage`, kills WHO
with -9, runs the same command again, and compares every file's sha256 with the reference. WHEN is how far the
reference's log was after 10 % of the time from the stage's lock to its result, and after 50 and 90 % of the
time from its first step to its result (of a stage without steps, from its lock too). WHO: `flow`; `stage`
(the process that trains); `ray` (the newest of the stage's Ray actors; stages without Ray have no such
point); `server` (Prefect's, beside the flow); `worker` (of an `alignflow serve`, which is asked for a run of
the whole recipe in place of the command).

    python -m tests.crash.run_all                     # all points that build/crash/results.json does not have
    yet
    python -m tests.crash.run_all --only sft,ppo/ray  # those that begin with one of these
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Lock

from flows.serving.services import Services
from rlhf_core.cluster.rank_environment import free_port
from rlhf_core.system.files import write_text
from tests.crash.points import WHEN, WHO, Chain, Moment, Outcome, files, measure, point

ROOT = Path(__file__).parents[2]
STAGES = (
    "sft",
    "reward_model",
    "ppo",
    "iterative_dpo.round1.preferences",
    "iterative_dpo.round1.dpo",
    "evaluation",
    "publication",
)
POINTS = tuple(
    f"{stage}/{who}/{when}"
    for stage in STAGES
    for who in WHO
    if who != "ray" or stage == "ppo"
    for when in WHEN
)
TRIES = 3
Results = dict[str, Outcome]


def material(out: Path) -> Path:
    """The demo's base model and data, small."""
    made = out / "material"
    if not (made / "base").exists():
        script = ROOT / "deployments" / "demo" / "make_material.py"
        subprocess.run([sys.executable, str(script), "--out", str(made), "--scale", "0.05"], check=True)
    return made


def prepare(folder: Path, material: Path, home: Path) -> dict[str, str]:
    """Recipe, data and a copy of the Prefect database in `home`: an empty one takes a third of a minute to
    make. The environment."""
    if not folder.exists():
        (folder / "demo").mkdir(parents=True)
        (folder / "demo" / "material").symlink_to(material)
        shutil.copy(ROOT / "tests" / "crash" / "recipe.yaml", folder / "recipe.yaml")
        (folder / "home").mkdir()
        with (
            closing(sqlite3.connect(home / "prefect.db")) as made,
            closing(sqlite3.connect(folder / "home" / "prefect.db")) as new,
        ):
            made.backup(new)
    ours = dict(
        PYTHONPATH=str(ROOT), PREFECT_HOME=str(folder / "home"), OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1"
    )
    ours |= {"PREFECT_SERVER_ANALYTICS_ENABLED": "false", "HF_HUB_OFFLINE": "1"}
    return {key: value for key, value in os.environ.items() if key != "PREFECT_API_URL"} | ours


def reference(chain: Chain, out: Path, stages: tuple[str, ...], api: str) -> dict[str, dict[str, Moment]]:
    """Runs stages once, undisturbed; the moments to kill each at. Those that `moments.json` has are not run
    again."""
    folder = out / "reference"
    record = out / "moments.json"
    moments: dict[str, dict[str, Moment]] = {}
    if record.exists():
        read = json.loads(record.read_text())
        moments = {
            stage: {when: Moment(*moment) for when, moment in found.items()} for stage, found in read.items()
        }
    environment = chain.prepare(folder)
    for stage in stages:
        if stage not in moments or not files(folder, stage):
            print(f"reference: {stage}", flush=True)
            moments[stage] = measure(folder, environment, stage, api)
            write_text(record, json.dumps(moments, indent=2))
    return moments


def page(results: Results) -> str:
    """The table, a row for each stage and victim; points that were not done are said to be missing."""
    good = sum(result.killed and result.ok for result in results.values())
    over = sum(not result.killed for result in results.values())
    lines = [
        "# Killed and run again",
        "",
        (
            "`make crash` kills a process that works on a stage with SIGKILL and runs the same command"
            " again (tests/crash/run_all.py explains how),"
        ),
        (
            "with the real engines on a CPU. *same*: the stage ended with the same files as an undisturbed"
            " run, byte for byte; after 40 s no process"
        ),
        (
            "of either run was left; and nothing was done twice: no earlier stage was started again, and"
            " this stage only once more. *same, finished*:"
        ),
        (
            "the first run had already finished the stage, so it was not started again: the kill came in"
            " the stage's last moments, or the flow itself"
        ),
        "retried the stage, or continued with a new Prefect server.",
        "",
        f"{good} of {len(POINTS)} points ended this way"
        + (f"; {over} had nothing left to kill" if over else "")
        + (f"; {missing} have not been run." if (missing := len(POINTS) - len(results)) else "."),
        "",
        f"| stage | killed | {' | '.join(WHEN)} |",
        f"|---|---|{'---|' * len(WHEN)}",
    ]
    for stage in STAGES:
        for who in WHO:
            names = [f"{stage}/{who}/{when}" for when in WHEN]
            if names[0] in POINTS:
                lines.append(f"| {stage} | {who} | {' | '.join(told(results.get(name)) for name in names)} |")
    return "\n".join(lines) + "\n"


def spread(points: list[str]) -> list[str]:
    """In an order in which every stage and victim has its turn before any has its second: much is known
    before all is done."""
    rows = sorted(
        {point.rpartition("/")[0] for point in points},
        key=[point.rpartition("/")[0] for point in POINTS].index,
    )
    order = list(WHEN)
    turns = [
        [f"{row}/{order[(number + turn) % len(order)]}" for number, row in enumerate(rows)]
        for turn in range(len(order))
    ]
    return [point for turn in turns for point in turn if point in points]


def told(result: Outcome | None) -> str:
    if result is None:
        return "not run"
    if result.ok:
        return ("same, finished" if result.finished else "same") if result.killed else "over before"
    return f"differs: {', '.join(f'{key} {value}' for key, value in result._asdict().items())}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="points that begin with one of these, separated by commas")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "crash")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "reference" / "crash.md")
    parser.add_argument("--at-once", type=int, default=1, help="points at a time")
    given = parser.parse_args()
    out = given.out.absolute()
    (out / "home").mkdir(parents=True, exist_ok=True)
    wanted = [name for name in POINTS if name.startswith(tuple(given.only.split(",")))]
    last = max(STAGES.index(name.split("/")[0]) for name in wanted)
    file = out / "results.json"
    writing = Lock()
    results = (
        {name: Outcome(**found) for name, found in json.loads(file.read_text()).items()}
        if file.exists()
        else {}
    )

    def do(name: str) -> None:
        folder = out / "points" / name.replace("/", "-")
        stage, _, when = name.split("/")
        moment = moments[stage][when]
        begin = time.monotonic()
        # a reference that was measured under load is slower: what was over before is tried again, earlier
        for _ in range(TRIES):
            shutil.rmtree(folder, ignore_errors=True)
            outcome = point(name, chain, out / "reference", folder, moment, server.api)
            if outcome.killed:
                break
            moment = moment._replace(seconds=moment.seconds / 2)
        results[name] = outcome
        print(f"{name}: {time.monotonic() - begin:.0f} s, {results[name]}", flush=True)
        with writing:
            write_text(
                file,
                json.dumps({name: result._asdict() for name, result in sorted(results.items())}, indent=2),
            )
        if results[name].ok:
            shutil.rmtree(folder)

    made = material(out)
    chain = Chain("crash", STAGES, lambda folder: prepare(folder, made, out / "home"))
    server = Services(out / "home", "127.0.0.1", free_port("127.0.0.1"))
    try:
        server.start_server()
        moments = reference(chain, out, STAGES[: last + 1], server.api)
        with ThreadPoolExecutor(given.at_once) as pool:
            list(pool.map(do, [name for name in spread(wanted) if name not in results]))
    finally:
        server.stop()
    given.page.write_text(page(results))
    return 0 if all(results[name].ok for name in wanted) else 1


if __name__ == "__main__":
    sys.exit(main())
