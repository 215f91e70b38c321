"""Cancels runs of `alignflow serve` at every stage of the demo's chain, with the real engines, and writes
docs/reference/cancel.md.

One `serve`, one run after another of the same recipe (the demo's, with little of everything). Each is
cancelled through Prefect's API, as its pages do, while the first stage that is not done yet is at work; the
next run finishes that stage and goes on to the following one. In PPO an `alignflow run` gets a Ctrl-C as
well. The publication goes to a stand-in of the Hub that holds its answers back until it is cancelled. A last
run finishes what is left.

    python tests/crash/cancel.py     # goes on where it was cut off; build/cancel holds what it made
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from rlhf_core.runs.run_dir import LOG, METRICS, RESULT  # noqa: E402
from tests.support.demo_recipe import demo_recipe  # noqa: E402
from tests.support.hub_server import TOKEN, Hub  # noqa: E402
from tests.support.hub_server import serve as hub_server  # noqa: E402
from tests.support.micro import Serve, ask, left, wait_until  # noqa: E402
from tests.support.programs import alive, hear_ctrl_c, logged  # noqa: E402

NAME = "tiny-cpu"
REPO = "me/model"
SMALL = (
    "sft.data.max_samples=1600",
    "sft.logging_steps=1",
    "sft.gates=[]",
    "reward_model.data.max_samples=960",
    "reward_model.logging_steps=1",
    "reward_model.gates=[]",
    "ppo.max_steps=4",
    "ppo.rollout_batch_size=16",
    "ppo.train_batch_size=32",
    "ppo.micro_train_batch_size=32",
    "ppo.gates=[]",
    "iterative_dpo.rounds=1",
    "iterative_dpo.prompts_per_round=192",
    "iterative_dpo.n_samples_per_prompt=3",
    "iterative_dpo.train_batch_size=2",
    "iterative_dpo.micro_train_batch_size=2",
    "evaluation.max_questions=20",
    f"publication.repo_id={REPO}",
)
PREFERENCES = "iterative_dpo.round1.preferences"
DPO = "iterative_dpo.round1.dpo"
STAGES = ("sft", "reward_model", "ppo", PREFERENCES, DPO, "evaluation", "publication")
# A stage is at work when it has logged a step, or said this.
SIGNS = {PREFERENCES: "Loading safetensors", "evaluation": "Loading safetensors", "publication": "published"}
API = "Prefect's API"
CTRL_C = "Ctrl-C"
POINTS = [(stage, how) for stage in STAGES for how in ((CTRL_C, API) if stage == "ppo" else (API,))]
LIMIT_SECONDS = 40.0
START_SECONDS = 1200.0
KINDS = {  # what a part of a command line stands for
    "prefect.engine": "flow",
    "flows.cli": "flow",
    "prefect.server": "server",
    "server_process.py": "server",
    "rlhf_core.system.reaper": "reaper",
    "-m rlhf_core": "stage",
    "-m evaluation": "stage",
    "gcs_server": "GCS",
    "raylet/raylet": "raylet",
    "rlhf_core/system/orphan_watcher.py": "watcher",
    "ray::": "Ray workers",
    "/ray/": "Ray's others",
}


def at_work(folder: Path, stage: str, since: float) -> bool:
    """Whether a stage has begun its work since a time of day."""
    file = METRICS if stage not in SIGNS else LOG
    for found in folder.glob(f"artifacts/stages/{stage}-*/{file}"):
        if found.stat().st_mtime > since:
            text = found.read_text()
            return bool(text) if stage not in SIGNS else SIGNS[stage] in text.rpartition("\n--- ")[2]
    return False


def is_done(folder: Path, stage: str) -> bool:
    return any(folder.glob(f"artifacts/stages/{stage}-*/{RESULT}"))


def cut_off(
    folder: Path, stage: str, top: psutil.Process, cancel: Callable[[], object], spared: set[int]
) -> dict[str, object]:
    """Cancels, and waits until all that `top` started and all else of the folder is gone. What it was, and
    how long it took."""
    everything = top.children(recursive=True)
    told = kinds(everything)
    start = time.monotonic()
    cancel()
    wait_until(
        lambda: not any(map(alive, everything)) and {p.pid for p in left(folder)} <= spared,
        f"everything of {stage} to end",
        180,
    )
    return {
        "processes": len(everything),
        "kinds": told,
        "seconds": round(time.monotonic() - start, 1),
        "done": is_done(folder, stage),
    }


def cancelled(serve: Serve, api: str, stage: str, hub: Hub) -> dict[str, object]:
    """A run that is cancelled through the API while `stage` is at work."""
    spared = {process.pid for process in left(serve.folder)}
    since = time.time()
    if stage == "publication":
        hub.lock.acquire()  # the Hub takes requests and does not answer
    try:
        run = serve.run(api, f"alignment/{NAME}")
        wait_until(lambda: at_work(serve.folder, stage, since), f"{stage} to work", START_SECONDS, serve.told)
        time.sleep(2)
        worker = next(
            p
            for p in psutil.Process(serve.process.pid).children()
            if ("prefect", "worker") in pairwise(p.cmdline())
        )
        body = {"state": {"type": "CANCELLING"}}
        found = cut_off(
            serve.folder, stage, worker, lambda: ask(api, f"/flow_runs/{run}/set_state", body), spared
        )
        wait_until(lambda: ended(serve, api, run), "the state of the run", 60, serve.told)
        published = any(repository.tags for repository in hub.repositories.values())
    finally:
        if hub.lock.locked():
            hub.lock.release()
    state = serve.state(api, run)
    return {
        **found,
        "state": state,
        "ok": found["seconds"] <= LIMIT_SECONDS and state == "CANCELLED" and not (found["done"] or published),
    }


def interrupted(folder: Path, environment: dict[str, str], stage: str) -> dict[str, object]:
    """An `alignflow run` that gets a Ctrl-C while `stage` is at work."""
    spared = {process.pid for process in left(folder)}
    since = time.time()
    command = [sys.executable, "-m", "flows.cli", "run", "recipe.yaml", *SMALL]
    log = folder / "run.txt"
    log.unlink(missing_ok=True)
    process = logged(
        command, log, cwd=folder, env=environment, start_new_session=True, preexec_fn=hear_ctrl_c
    )

    def told() -> str:
        return log.read_text()[-3000:]

    wait_until(
        lambda: at_work(folder, stage, since) or process.poll() is not None,
        f"{stage} to work",
        START_SECONDS,
        told,
    )
    time.sleep(2)
    top = psutil.Process(process.pid)

    def ctrl_c() -> None:
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of the foreground's processes
        process.wait(120)

    found = cut_off(folder, stage, top, ctrl_c, spared)
    state = f"exit code {process.returncode}"
    return {
        **found,
        "state": state,
        "ok": found["seconds"] <= LIMIT_SECONDS and process.returncode == 130 and not found["done"],
    }


def ended(serve: Serve, api: str, run: str) -> bool:
    return serve.state(api, run) in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


def kinds(processes: list[psutil.Process]) -> str:
    """What processes are, counted."""
    found: list[str] = []
    for process in processes:
        try:
            command = " ".join(process.cmdline())
        except psutil.Error:
            continue
        found.append(next((kind for part, kind in KINDS.items() if part in command), "others"))
    return ", ".join(
        f"{found.count(kind)} {kind}" if found.count(kind) > 1 else kind for kind in dict.fromkeys(found)
    )


def page(results: dict[str, dict[str, object]]) -> str:
    rest = results.get("the rest", {})
    lines = [
        "# Cancelled at every stage",
        "",
        (
            "`python tests/crash/cancel.py` cancels the demo's chain, with small sizes and the real engines"
            " on a CPU, while each"
        ),
        (
            "stage is running; the next run finishes that stage and continues. *gone after*: time from the"
            " request until no process of the run was"
        ),
        (
            f"left, whatever its parent; {LIMIT_SECONDS:.0f} s are allowed. A worker checks for cancelled"
            " runs every three seconds, and a stage"
        ),
        "has ten seconds to end by itself.",
        "",
        "| stage | cancelled by | processes of the run | gone after | ended as | marked as done |",
        "|---|---|---|---|---|---|",
    ]
    for stage, how in POINTS:
        found = results.get(f"{stage} by {how}")
        if found is None:
            lines.append(f"| {stage} | {how} | not run | | | |")
        else:
            done = "yes" if found["done"] else "no"
            seconds = f"{found['seconds']} s"
            lines.append(
                f"| {stage} | {how} | {found['processes']}: {found['kinds']} | {seconds} | {found['state']} |"
                f" {done} |"
            )
    return (
        "\n".join(
            [
                *lines,
                "",
                (
                    f"The last run, of what was left: {rest.get('state', 'not run')}. Attempts:"
                    f" {rest.get('attempts', '')}."
                ),
            ]
        )
        + "\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "cancel")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "reference" / "cancel.md")
    given = parser.parse_args()
    folder = given.out.absolute()
    if not (folder / "demo" / "material" / "base").exists():
        script = ROOT / "deployments" / "demo" / "make_material.py"
        subprocess.run(
            [sys.executable, str(script), "--out", str(folder / "demo" / "material"), "--scale", "0.1"],
            check=True,
        )
    demo_recipe(folder, NAME)
    file = folder / "results.json"
    results: dict[str, dict[str, object]] = json.loads(file.read_text()) if file.exists() else {}
    with hub_server() as hub:
        kept = {
            key: value
            for key, value in os.environ.items()
            if key not in ("PREFECT_API_URL", "HF_HUB_OFFLINE")
        }
        environment = kept | dict(
            PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", HF_ENDPOINT=hub.url, HF_TOKEN=TOKEN
        )
        environment |= {"PREFECT_HOME": str(folder / "prefect"), "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
        environment |= {"HF_HUB_DISABLE_XET": "1"}  # the stand-in has no xet store
        serve = Serve(folder, environment, "--no-schedule", *SMALL)
        try:
            api = serve.ready(300)
            for stage, how in POINTS:
                name = f"{stage} by {how}"
                if name not in results:
                    ours = (
                        cancelled(serve, api, stage, hub)
                        if how == API
                        else interrupted(folder, environment, stage)
                    )
                    results[name] = ours
                    print(f"{name}: {ours}", flush=True)
                    file.write_text(json.dumps(results, indent=2))
            run = serve.run(api, f"alignment/{NAME}")
            wait_until(
                lambda: all(is_done(folder, stage) for stage in STAGES),
                "the last run",
                START_SECONDS,
                serve.told,
            )
            wait_until(lambda: ended(serve, api, run), "the state of the last run", 60, serve.told)
            logs = {
                stage: next(folder.glob(f"artifacts/stages/{stage}-*/{LOG}")).read_text() for stage in STAGES
            }
            attempts = ", ".join(
                f"{stage} {sum(line.startswith('--- ') for line in log.splitlines())}"
                for stage, log in logs.items()
            )
            results["the rest"] = {"state": serve.state(api, run), "attempts": attempts}
            results["the rest"]["ok"] = results["the rest"]["state"] == "COMPLETED" and all(
                is_done(folder, stage) for stage in STAGES
            )
            file.write_text(json.dumps(results, indent=2))
        finally:
            serve.stop()
    given.page.write_text(page(results))
    return 0 if all(found["ok"] for found in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
