"""Time of three branches side by side and one after the other: `python tests/benchmarks/side_by_side.py
MATERIAL`.

MATERIAL is a folder of `deployments/demo/make_material.py`. The recipe trains its base model three times,
with another learning rate each; no stage needs another. Both ways run in turn, `--repeat` times, each from
nothing and with a Prefect server of its own; a figure is the shortest of its runs. A run counts from the
start of its flow to its page (`run.json`). Also says whether both made the same weights.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from record import add_options, figure, save

ROOT = Path(__file__).parents[2]
STAGE = """
  {name}: {{stage: sft, data: {{sources: {material}/sft.jsonl, max_samples: {rows}}}, max_len: 128, train_batch_size: 32,
    micro_train_batch_size: 32, learning_rate: {rate}}}"""


class Run(NamedTuple):
    """Seconds of the flow and of its stages' work, and the SHA-256 of each stage's weights."""

    flow: float
    work: float
    weights: dict[str, str]


def measure(material: Path, rows: int, jobs: int) -> Run:
    """Runs the recipe, `jobs` stages at once."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stages = "".join(
            STAGE.format(name=branch, material=material.absolute(), rows=rows, rate=rate)
            for branch, rate in (("low", 3e-4), ("middle", 6e-4), ("high", 1.2e-3))
        )
        (folder / "recipe.yaml").write_text(
            f"name: branches\nbase_model: {material.absolute() / 'base'}\nstages:{stages}\n"
        )
        command = [sys.executable, "-m", "flows.cli", "run", "recipe.yaml", "--jobs", str(jobs)]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "PREFECT_HOME": str(folder / "prefect")}
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600
        )
        if done.returncode:
            raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
        run = json.loads((folder / "artifacts" / "branches" / "run.json").read_text())
        found = {stage["name"]: folder / "artifacts" / stage["run_dir"] for stage in run["stages"]}
        work = sum(json.loads((place / "result.json").read_text())["seconds"] for place in found.values())
        weights = {
            branch: hashlib.sha256((place / "checkpoint" / "model.safetensors").read_bytes())
            for branch, place in found.items()
        }
        return Run(
            run["ended"] - run["started"],
            work,
            {branch: made.hexdigest() for branch, made in weights.items()},
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("material", type=Path, help="folder of deployments/demo/make_material.py")
    parser.add_argument("--jobs", type=int, default=2, help="stages at once")
    parser.add_argument("--rows", type=int, default=600, help="conversations that each stage trains on, once")
    parser.add_argument("--repeat", type=int, default=2, help="runs of each way")
    add_options(parser, "side-by-side-cpu")
    arguments = parser.parse_args()
    runs: dict[int, list[Run]] = {1: [], arguments.jobs: []}
    for _ in range(arguments.repeat):
        for jobs, made in runs.items():
            made.append(measure(arguments.material, arguments.rows, jobs))
            print(
                f"{jobs} at once: flow {made[-1].flow:.1f} s, stages' work {made[-1].work:.1f} s", flush=True
            )
    alone, beside = (min(run.flow for run in made) for made in runs.values())
    same = runs[1][0].weights == runs[arguments.jobs][0].weights
    print(
        f"one after the other {alone:.1f} s, side by side {beside:.1f} s; {'the same' if same else 'other'}"
        " weights"
    )
    del arguments.material  # a folder of this machine
    figures = {
        "one after the other": figure(round(alone, 1), "s"),
        "side by side": figure(round(beside, 1), "s"),
    }
    save(arguments, "Three independent branches on a CPU", figures)


if __name__ == "__main__":
    main()
