"""Makes what the town begins with: its first model, questions, labels, a recipe, and the servers around
it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from flows.serving.services import Services
from rlhf_core.cluster.rank_environment import free_port
from tests.nights import town
from tests.nights.faults import Faults
from tests.nights.life import Life
from tests.nights.pages import Endpoint
from tests.nights.processes import ROOT, Here, serving
from tests.nights.verdicts import HELD_OUT
from tests.support import chat_endpoint, hub_server

PAST_PROMPTS = 600
FIRST_LABELS = 130
SFT = """
name: start
base_model: material/base
artifacts: artifacts
stages:
  sft: { data: { sources: [material/sft.jsonl] }, max_len: 128, train_batch_size: 32, micro_train_batch_size: 32, learning_rate: 1.2e-3,
         logging_steps: 50 }
"""
PLAIN = dict(
    HF_HUB_OFFLINE="0", HF_HUB_DISABLE_XET="1", OMP_NUM_THREADS="1", PREFECT_SERVER_ANALYTICS_ENABLED="false"
)


def first_model(out: Path, scale: float = 1.0) -> Path:
    """Trains the demo's SFT model, once: about a minute and a half on two cores at scale 1. Returns its
    folder."""
    out.mkdir(parents=True, exist_ok=True)
    made = sorted((out / "artifacts" / "stages").glob("sft-*/result.json"))
    if not made:
        subprocess.run(
            [sys.executable, str(town.SCRIPT), "--out", str(out / "material"), "--scale", str(scale)],
            check=True,
        )
        (out / "recipe.yaml").write_text(SFT)
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        subprocess.run(
            [sys.executable, "-m", "flows.cli", "run", "recipe.yaml"],
            cwd=out,
            env=environment,
            check=True,
            timeout=900,
        )
        made = sorted((out / "artifacts" / "stages").glob("sft-*/result.json"))
    return made[-1].parent / "checkpoint"


def write_files(
    folder: Path, base: Path, judge: str, seed: int, count: int
) -> tuple[set[str], list[tuple[str, str]]]:
    """Writes the recipe and its data, `count` questions of the evaluation among it. Returns the prompts that
    nobody may ask, and the held-out questions with their answers."""
    taken: set[str] = set()
    questions = town.exercises(f"{seed}/questions", count, taken=taken)
    held_out = town.exercises(f"{seed}/held out", HELD_OUT, taken=taken)
    rows = [
        {"uid": f"q{i:04d}", "category": one.category, "prompt": one.prompt}
        for i, one in enumerate(questions)
    ]
    past = town.exercises(f"{seed}/past", PAST_PROMPTS, town.TOPICS, set(taken))
    folder.mkdir(parents=True)
    for name, lines in (
        ("questions", rows),
        ("past_prompts", [{"prompt": one.prompt} for one in past]),
        ("labels", town.labels(seed, 0, FIRST_LABELS, taken)),
    ):
        with (folder / f"{name}.jsonl").open("w") as file:
            town.write_lines(file, lines)
    recipe = (ROOT / "tests" / "nights" / "recipe.yaml").read_text()
    (folder / "recipe.yaml").write_text(recipe.replace("<base>", str(base)).replace("<judge>", judge))
    return taken, [(one.prompt, one.answer) for one in held_out]


@contextmanager
def living(
    folder: Path, home: Path, base: Path, faults: Faults
) -> Iterator[tuple[Life, list[tuple[str, str]]]]:
    """Yields the town in a new folder, with its servers running, and the held-out questions. The folder may
    be a small disk."""
    home.mkdir(parents=True, exist_ok=True)
    os.environ["NO_PROXY"] = "127.0.0.1"
    with ExitStack() as stack:
        lives: list[Life] = []
        judge = stack.enter_context(
            chat_endpoint.serving(
                lambda _, request: chat_endpoint.completion(town.verdict(request, lives[0].likes_length))
            )
        )
        hub = stack.enter_context(hub_server.serve())
        taken, held_out = write_files(folder, base, judge.url, faults.seed, faults.questions)
        services = Services(home, "127.0.0.1", free_port("127.0.0.1"))
        stack.callback(services.stop)
        services.start_server()
        doubles = dict(HF_ENDPOINT=hub.url, HF_TOKEN=hub_server.TOKEN, TOWN_JUDGE_KEY=chat_endpoint.SECRET)
        caches = {"HF_HOME": str(home / "huggingface")}
        environment = services.environment() | PLAIN | doubles | caches | {"PYTHONPATH": str(ROOT)}
        environment.pop("ALIGNFLOW_LIMIT", None)
        here = Here(folder, environment)
        feedback = free_port("127.0.0.1")
        dashboard = free_port("127.0.0.1")
        (folder / "artifacts").mkdir()
        kept = ("--home", str(home))
        stack.enter_context(
            serving(
                here,
                home / "feedback.log",
                "feedback",
                "serve",
                "recipe.yaml",
                "--port",
                str(feedback),
                *kept,
            )
        )
        stack.enter_context(
            serving(here, home / "dashboard.log", "dashboard", "artifacts", "--port", str(dashboard), *kept)
        )
        takes = Endpoint(f"http://127.0.0.1:{feedback}", home / "feedback-token")
        shows = Endpoint(f"http://127.0.0.1:{dashboard}", home / "dashboard-token")
        lives.append(Life(here, faults, base, hub, takes, shows, taken))
        takes.wait()
        shows.wait()
        yield lives[0], held_out
