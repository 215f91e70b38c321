"""A recipe whose stages are real processes that only write the files of their kind, also when a worker starts
them.

`modules/sitecustomize.py`, on every process's path, has the flows start `micro_stage` in place of `rlhf_core`
and `evaluation`. A stage writes down that it works (`attempts.txt`), hangs where `slow.json` says (`start`,
`middle`, `end`) with a child (that ignores SIGTERM: `stubborn`; at the first attempt only, for so many
seconds: `once`), waits until there is a file `slow.json` names (`until`), and its result is a digest of its
inputs' content: a round made from another round's result has another one.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.support.programs import logged

ROOT = Path(__file__).parents[2]
RECIPE = """
name: micro
base_model: org/model
stages:
  sft: {data: {sources: train.jsonl}}
  loop: {stage: iterative_dpo, reward: org/reward, prompts: {sources: prompts.jsonl}, rounds: 1}
  evaluation: {models: [loop], baseline: sft, questions: {path: q.jsonl}}
"""
BRANCHES = """
name: micro
base_model: org/model
side_by_side: 2
stages:
  sft: {data: {sources: train.jsonl}}
  one: {stage: dpo, policy: sft, data: {sources: pairs.jsonl}}
  two: {stage: dpo, policy: sft, beta: 0.3, data: {sources: pairs.jsonl}}
  evaluation: {models: [one, two], baseline: sft, questions: {path: q.jsonl}}
"""
CUSTOMIZE = """
import importlib.abc, importlib.machinery, sys

class Hook(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name not in ("tasks.stages", "rlhf_core.preflight.inputs"):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module
        def exec_module(module):
            execute(module)
            if name == "tasks.stages":
                launch = module.launch
                module.launch = lambda package, *rest: launch("micro_stage", *rest)
            else:
                module.require_here = lambda planned, nodes: None
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Hook())
"""
STAGE = """
import hashlib, json, os, signal, subprocess, sys, time
from pathlib import Path
from rlhf_core.runs.run_dir import Outcome, run_in_directory, write_text
from rlhf_core.records import EvalReport, WinRate

def content(place):
    return "".join(file.read_text() for file in sorted(Path(place).rglob("*")) if file.is_file()) if Path(place).is_dir() else (
        Path(place).read_text() if Path(place).is_file() else place)

def work(request, run):
    # first, since a test may change the file once it knows that the stage works
    slow = json.loads(Path("slow.json").read_text()) if Path("slow.json").exists() else {}
    with Path("attempts.txt").open("a") as file:
        file.write(f"{request.name} {request.digest} {os.getpid()}\\n")
    again = Path("attempts.txt").read_text().count(request.digest) > 1
    def pause(when):
        print(when, flush=True)
        if slow.get(request.name) == when and not (again and "once" in slow):
            ignored = "signal.SIG_IGN" if slow.get("stubborn") else "signal.SIG_DFL"
            child = f"import signal, time; signal.signal(signal.SIGTERM, {ignored}); time.sleep(300)"
            subprocess.Popen([sys.executable, "-S", "-c", child])
            time.sleep(slow.get("once", 250))

    deadline = time.monotonic() + 600
    while "until" in slow and not Path(slow["until"]).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    pause("start")
    inputs = [content(request.inputs[name]) for name in sorted(request.inputs)]
    made = hashlib.sha256("".join([request.digest, *inputs]).encode()).hexdigest()
    kind = request.config.stage
    if kind == "evaluation":
        more = dict(ci_low=0.4, ci_high=0.9, num_questions=300, num_failed=0, swap_consistency=1.0, by_category={})
        rates = tuple(WinRate(model=model, baseline="sft", judge="rule", win_rate=0.5 + 0.1 * min(i, 1), **more)
                      for i, model in enumerate(request.config.models))
        (run / "report").mkdir(exist_ok=True)
        report = EvalReport(baseline="sft", judge="rule", win_rates=rates, right={}, mean_tokens={}, truncated={})
        write_text(run / "report" / "eval.json", report.model_dump_json())
        return Outcome({f"win_rate/{rate.model}": rate.win_rate for rate in rates}, {"report": "report"})
    name = "pairs" if kind == "preferences" else "checkpoint"
    write_text(run / "half", made)
    pause("middle")
    (run / "made").mkdir(exist_ok=True)
    write_text(run / "made" / name, made)
    pause("end")
    return Outcome({"loss": 1.5}, {name: f"made/{name}"})

run_in_directory(sys.argv[1], work)
"""


AUTH: dict[str, str] = {}  # auth strings by API URL
ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


def build(folder: Path, recipe: str = RECIPE) -> dict[str, str]:
    """Writes a recipe, with the name `micro`, and modules. Returns the environment of processes that use
    them."""
    (folder / "modules").mkdir(parents=True)
    (folder / "modules" / "micro_stage.py").write_text(STAGE)
    (folder / "modules" / "sitecustomize.py").write_text(CUSTOMIZE)
    (folder / "recipe.yaml").write_text(recipe)
    return environment(folder)


def environment(folder: Path) -> dict[str, str]:
    """Returns the environment of processes that use the files of `build`."""
    kept = {key: value for key, value in os.environ.items() if key != "PREFECT_API_URL"}
    return kept | {
        "PYTHONPATH": f"{folder / 'modules'}{os.pathsep}{ROOT}",
        "PYTHONUNBUFFERED": "1",
        "PREFECT_HOME": str(folder / "home"),
    }


def attempts(folder: Path) -> list[tuple[str, str, int]]:
    """Returns (stage, digest, PID) of each started stage process, in order."""
    lines = (folder / "attempts.txt").read_text().splitlines() if (folder / "attempts.txt").exists() else []
    return [(name, digest, int(pid)) for name, digest, pid in (line.split() for line in lines)]


def begun(folder: Path) -> list[str]:
    return [name for name, _, _ in attempts(folder)]


def left(folder: Path) -> list[psutil.Process]:
    """Returns the running processes that were started in or for a folder."""
    found = []
    for process in psutil.process_iter():
        try:
            ours = str(folder) in " ".join(process.cmdline()) or process.cwd() == str(folder)
            if ours and process.status() != psutil.STATUS_ZOMBIE and process.pid != os.getpid():
                found.append(process)
        except psutil.Error:
            continue
    return found


# A wait ends when what it waits for is there. This bound only ends a test that hangs, also on a busy machine.
WAIT_SECONDS = 300.0
AGAIN_SECONDS = 60.0


def wait_until(
    true: Callable[[], object],
    what: str,
    seconds: float = WAIT_SECONDS,
    told: Callable[[], str] = str,
    again: Callable[[], object] | None = None,
) -> None:
    """`again` is called every minute of the wait, such as to send an event that Prefect's server dropped while
    its database was busy."""
    began = called = time.monotonic()
    while not true():
        now = time.monotonic()
        assert now < began + seconds, f"waited {seconds} s for {what}\n{told()}"
        if again and now > called + AGAIN_SECONDS:
            again()
            called = now
        time.sleep(0.1)


def ask(api: str, route: str, body: dict[str, Any] | None = None) -> Any:
    """Returns the answer of a route of Prefect's API. Retries while the database is busy, as Prefect's client
    does."""
    for pause in (1, 2, 4, 8):
        try:
            return _ask(api, route, body)
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise
            time.sleep(pause)
    return _ask(api, route, body)


# 90 s: under load the server can take a minute to answer.
def _ask(api: str, route: str, body: dict[str, Any] | None) -> Any:
    data = json.dumps(body).encode() if body is not None else None
    headers = {"Content-Type": "application/json"}
    headers |= {"Authorization": basic(AUTH[api])} if api in AUTH else {}
    request = urllib.request.Request(api + route, data=data, headers=headers)
    with urllib.request.urlopen(request, timeout=90) as answer:
        return json.load(answer)


def basic(auth: str) -> str:
    """Returns the header with the auth string of an API."""
    return f"Basic {base64.b64encode(auth.encode()).decode()}"


def client(api: str) -> dict[str, str]:
    """Returns the environment of a Prefect client."""
    return {"PREFECT_API_URL": api, "PREFECT_API_AUTH_STRING": AUTH[api]}


class Serve:
    """`alignflow serve` as a process, in `folder`."""

    def __init__(self, folder: Path, environment: dict[str, str], *given: str):
        self.folder = folder
        command = [
            sys.executable,
            "-P",
            "-m",
            "flows.cli",
            "serve",
            "recipe.yaml",
            "--port",
            "0",
            "--home",
            str(folder / "home"),
            *given,
        ]
        (folder / "serve.txt").unlink(missing_ok=True)
        self.process = logged(
            command, folder / "serve.txt", cwd=folder, env=environment, start_new_session=True
        )

    def told(self) -> str:
        log = self.folder / "home" / "serve.log"
        return (self.folder / "serve.txt").read_text()[-3000:] + (
            log.read_text()[-3000:] if log.exists() else ""
        )

    def ready(self, seconds: float = WAIT_SECONDS) -> str:
        """Waits until it is ready. Returns the API's URL."""

        def is_ready() -> bool:
            assert self.process.poll() is None, self.told()
            return (self.folder / "home" / "serve.json").exists() and "serving on" in (
                self.folder / "serve.txt"
            ).read_text()

        wait_until(is_ready, "serve to start", seconds, self.told)
        api = str(json.loads((self.folder / "home" / "serve.json").read_text())["api"])
        AUTH[api] = (self.folder / "home" / "auth-string").read_text().strip()
        return api

    def run(self, api: str, deployment: str, **parameters: Any) -> str:
        """Creates a run of a deployment. Returns its id."""
        flow, name = deployment.split("/")
        identity = ask(api, f"/deployments/name/{flow}/{name}")["id"]
        return str(
            ask(
                api,
                f"/deployments/{identity}/create_flow_run",
                {"parameters": parameters, "state": {"type": "SCHEDULED"}},
            )["id"]
        )

    def state(self, api: str, run: str) -> str:
        return str(ask(api, f"/flow_runs/{run}")["state_type"])

    def reaches(self, api: str, run: str, wanted: str) -> None:
        """Waits until a run has the wanted state. Fails at once when it has ended with another one."""

        def is_there() -> bool:
            state = ask(api, f"/flow_runs/{run}")["state"]
            if state["type"] == wanted:
                return True
            assert state["type"] not in ENDED, f"{state['name']}: {state['message']}\n{self.told()}"
            return False

        wait_until(is_there, f"run {run} to be {wanted}", told=self.told)

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(timeout=WAIT_SECONDS)
