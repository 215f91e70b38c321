"""`make crash`: kills what works on a stage, at its start, in its middle and at its end, and compares what the next run ends with.

A point is STAGE/WHO/WHEN. The recipe is the demo's with little of everything. One undisturbed run is the reference; a point copies the
stages before its own from it, starts `alignflow stage`, kills WHO with -9 when a share of the reference's time has passed, runs the same
command again, and compares every file's sha256 with the reference. WHO: `flow`, `stage` (the process that trains), `ray` (the newest of
the stage's Ray workers; stages without Ray have no such point), `server` (Prefect's, beside the flow). What `alignflow serve`
starts, its worker among them, is in tests/flows/test_cancel.py.

    python tests/crash/run_all.py                     # all points that build/crash/results.json does not have yet
    python tests/crash/run_all.py --only sft,ppo/ray  # those that begin with one of these
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "deployments" / "recipes" / "tiny-cpu.yaml"
SMALL = (
    "sft.data.max_samples=320",
    "sft.save_steps=4",
    "reward_model.data.max_samples=128",
    "reward_model.save_steps=2",
    "ppo.max_steps=4",
    "ppo.save_steps=1",
    "ppo.rollout_batch_size=16",
    "ppo.train_batch_size=32",
    "ppo.micro_train_batch_size=32",
    "iterative_dpo.rounds=1",
    "iterative_dpo.prompts_per_round=24",
    "iterative_dpo.n_samples_per_prompt=3",
    "iterative_dpo.train_batch_size=8",
    "iterative_dpo.micro_train_batch_size=8",
    "iterative_dpo.save_steps=1",
    "evaluation.max_questions=20",
)
STAGES = ("sft", "reward_model", "ppo", "iterative_dpo.round1.preferences", "iterative_dpo.round1.dpo", "evaluation", "publication")
WHO = ("flow", "stage", "ray", "server")
WHEN = {"start": 0.1, "middle": 0.5, "end": 0.9}  # of the time between the stage's first and last moment in the reference
END_SECONDS = 40.0
POINTS = [f"{stage}/{who}/{when}" for stage in STAGES for who in WHO if who != "ray" or stage == "ppo" for when in WHEN]


def start(folder: Path, stage: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "flows.cli", "stage", stage, str(RECIPE), *SMALL]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PREFECT_HOME": str(folder / "prefect"), "OMP_NUM_THREADS": "1"}
    environment |= {"PREFECT_SERVER_ANALYTICS_ENABLED": "false", "HF_HUB_OFFLINE": "1"}
    environment.pop("PREFECT_API_URL", None)
    with (folder / "out.txt").open("ab") as out:
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=out, stdin=subprocess.DEVNULL)


def directory(folder: Path, stage: str) -> Path | None:
    return next(iter(folder.glob(f"artifacts/stages/{stage}-*")), None)


def files(folder: Path, stage: str) -> dict[str, str]:
    """The sha256 of everything a stage made that is the same in each run of it: no times of day, no seconds."""
    found = directory(folder, stage)
    if found is None or not (found / "result.json").exists():
        return {}
    manifest = json.loads((found / "result.json").read_text())["files"]
    return {f"{found.name}/{name}": info["sha256"] for name, info in manifest.items() if not name.endswith(("eval.json", ".md", ".html"))}


def stage_process(flow: psutil.Process) -> psutil.Process | None:
    """The process that does the work: the child of the reaper."""
    for process in _children(flow):
        if "rlhf_core.reaper" in _command(process):
            return next(iter(process.children()), None)
    return None


def reference(folder: Path, material: Path, stages: tuple[str, ...]) -> dict[str, float]:
    """Runs stages once; the seconds of each, from its process's start to its result. Goes on where it was cut off."""
    (folder / "demo").mkdir(parents=True, exist_ok=True)
    if not (folder / "demo" / "material").exists():
        (folder / "demo" / "material").symlink_to(material)
    times: dict[str, float] = json.loads((folder / "times.json").read_text()) if (folder / "times.json").exists() else {}
    for stage in stages:
        if stage in times and files(folder, stage):
            continue
        print(f"reference: {stage}", flush=True)
        if start(folder, stage).wait() or not files(folder, stage):
            raise SystemExit(f"the reference's {stage} failed: see {folder / 'out.txt'}")
        found = directory(folder, stage)
        assert found is not None
        times[stage] = (found / "result.json").stat().st_mtime - (found / "config.json").stat().st_mtime
        (folder / "times.json").write_text(json.dumps(times, indent=2))
    return times


def point(name: str, place: Path, folder: Path, seconds: float) -> dict[str, object]:
    """Does one point; what became of it."""
    stage, who, when = name.split("/")
    (folder / "demo").mkdir(parents=True)
    (folder / "demo" / "material").symlink_to((place / "demo" / "material").resolve())
    for before in STAGES[: STAGES.index(stage)]:
        source = directory(place, before)
        assert source is not None
        shutil.copytree(source, folder / "artifacts" / "stages" / source.name)
    flow = start(folder, stage)
    process = psutil.Process(flow.pid)
    _until(lambda: stage_process(process) or flow.poll() is not None, 120)
    time.sleep(seconds * WHEN[when])
    everything = [process, *_children(process)]
    victim = _victim(process, who)
    hit = victim is not None
    if victim is not None:
        print(f"  killing {who}: {' '.join(_command(victim))[-100:]}", flush=True)
        victim.kill()
    code = flow.wait(600)
    gone = _until(lambda: not [p for p in everything if _alive(p)], END_SECONDS)
    attempts_before = _attempts(folder, stage)
    again = start(folder, stage).wait(600)
    same = files(folder, stage) == files(place, stage)
    ok = hit and gone and again == 0 and same
    return {
        "ok": ok,
        "killed": hit,
        "code": code,
        "gone": gone,
        "again": again,
        "same": same,
        "starts": [attempts_before, _attempts(folder, stage)],
    }


def _victim(flow: psutil.Process, who: str) -> psutil.Process | None:
    if who == "flow":
        return flow
    if who == "stage":
        return stage_process(flow)
    if who == "server":
        found = [p for p in flow.children() if "uvicorn" in _command(p) or "prefect.server" in " ".join(_command(p))]
    else:
        found = [p for p in _children(flow) if " ".join(_command(p)).startswith("ray::")]
    return max(found, key=lambda p: p.create_time(), default=None)


def _attempts(folder: Path, stage: str) -> int:
    found = directory(folder, stage)
    return (found / "log.txt").read_text().count("\n--- ") + 1 if found and (found / "log.txt").exists() else 0


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _until(true: object, seconds: float) -> bool:
    assert callable(true)
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def page(results: dict[str, dict[str, object]]) -> str:
    """The table, a row for each stage and victim; points that were not done are said to be missing."""
    lines = [
        "# Killed and run again",
        "",
        "`make crash` kills what works on a stage with -9 and runs the same command again (tests/crash/run_all.py says how), with",
        "the real engines on a CPU. *same*: it ended with the files of an undisturbed run, byte for byte, and nothing of the first run was",
        "left after 40 s. The worker, and `serve` itself, are killed in tests/flows/test_cancel.py.",
        "",
        f"{sum(bool(result['ok']) for result in results.values())} of {len(results)} points ended so; "
        f"{len(POINTS) - len(results)} have not been run.",
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


def told(result: dict[str, object] | None) -> str:
    if result is None:
        return "not run"
    if not result["killed"]:
        return "over before"
    return "same" if result["ok"] else f"differs: {', '.join(f'{key} {result[key]}' for key in ('gone', 'again', 'same'))}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="points that begin with one of these, separated by commas")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "crash")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "crash.md")
    given = parser.parse_args()
    out = given.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    material = out / "material"
    if not (material / "base").exists():
        script = ROOT / "deployments" / "demo" / "make_material.py"
        subprocess.run([sys.executable, str(script), "--out", str(material), "--scale", "0.05"], check=True)
    wanted = [name for name in POINTS if name.startswith(tuple(given.only.split(",")))]
    last = max(STAGES.index(name.split("/")[0]) for name in wanted)
    times = reference(out / "reference", material, STAGES[: last + 1])
    file = out / "results.json"
    results: dict[str, dict[str, object]] = json.loads(file.read_text()) if file.exists() else {}
    for name in wanted:
        if name not in results:
            folder = out / "points" / name.replace("/", "-")
            shutil.rmtree(folder, ignore_errors=True)
            results[name] = point(name, out / "reference", folder, times[name.split("/")[0]])
            print(f"{name}: {results[name]}", flush=True)
            file.write_text(json.dumps(results, indent=2))
            if results[name]["ok"]:
                shutil.rmtree(folder)
    given.page.write_text(page(results))
    return 0 if all(results[name]["ok"] for name in wanted) else 1


if __name__ == "__main__":
    sys.exit(main())
