"""Runs for machines with two, four and eight GPUs, each with what `alignflow plan` says of it beforehand.

    export PYTHONPATH=.
    python tests/benchmarks/several_gpus.py --list
    python tests/benchmarks/shapes.py 7.6b MODEL
    python tests/benchmarks/several_gpus.py --run ppo-7.6b-4 --model MODEL --out FOLDER
    python tests/benchmarks/several_gpus.py --forecast tests/benchmarks/results/several-gpus-forecast.json

`--list` prints each run's commands. `--forecast` writes seconds, rates and GiB of all runs on H100s and H200s,
which needs no GPU and no weights. `--run` makes one run on the GPUs of this machine and writes
FOLDER/NAME-KIND.json: the figures of its benchmark, the stored forecast of each, and its error (forecast by
measurement, in percent: above 0 the forecast was higher).
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from openrlhf_ppo import run_child
from record import RESULTS, figure, hardware, load, write
from several_gpus_cases import CASES, GpuCase
from several_gpus_forecast import HOST, figures_of_plan, fits, peak_of, words_of

from rlhf_core.forecast.hardware import GIB
from rlhf_core.system.machine import free_memory, num_gpus

FORECAST = RESULTS / "several-gpus-forecast.json"
KINDS = ("h100", "h200")
BY_NAME = {case.name: case for case in CASES}


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--list", action="store_true", help="print the commands")
    what.add_argument("--forecast", type=Path, help="file for the record of the forecasts")
    what.add_argument("--run", choices=BY_NAME, help="name of one run, with --out and --model")
    parser.add_argument("--model", type=Path, help="folder with a checkpoint of the run's shape")
    parser.add_argument("--out", type=Path, help="folder for the run's files and its record")
    return parser


def main() -> int:
    parser = command_line()
    arguments = parser.parse_args()
    if arguments.list:
        print("\n\n".join(["export PYTHONPATH=.", *map(listed, CASES)]))
        return 0
    if arguments.forecast:
        write_forecast(arguments.forecast)
        return 0
    case = BY_NAME[arguments.run]
    if arguments.out is None or (case.shape and arguments.model is None):
        parser.error(f"--run {case.name} needs --out{' and --model' if case.shape else ''}")
    return run(case, arguments.model, arguments.out)


def listed(case: GpuCase) -> str:
    """A run's commands: one makes its model, one makes the run, and its benchmark's own, on H200s."""
    model = " --model MODEL" if case.shape else ""
    lines = [f"# {case.name}: {case.gpus} GPUs"]
    if case.shape:
        lines.append(f"python tests/benchmarks/shapes.py {case.shape} MODEL")
    lines.append(f"python tests/benchmarks/several_gpus.py --run {case.name}{model} --out FOLDER")
    lines.append(f"#   runs tests/benchmarks/{case.script}.py {shlex.join(words_of(case, 'h200'))}")
    return "\n".join(lines)


def write_forecast(file: Path) -> None:
    """Writes what `alignflow plan` says of each run on each kind of GPU; prints and notes what does not
    fit."""
    found: dict[str, dict[str, Any]] = {}
    too_large = []
    for case in CASES:
        for kind in KINDS:
            figures = figures_of_plan(case, kind)
            if not fits(figures, kind):
                too_large.append(f"{case.name} on {kind} ({peak_of(figures):g} GiB)")
            found |= {f"{case.name}, {kind}, {name}": value for name, value in figures.items()}
    note = "Written before the runs. host: the steps' host memory."
    if too_large:
        note += f" Do not fit a GPU: {', '.join(too_large)}."
    most = max((value["value"], name) for name, value in found.items() if name.endswith(f", {HOST}"))
    note += f" The most host memory: {most[1].partition(',')[0]}, {most[0]:,.0f} GiB."
    print(note)
    title = "What `alignflow plan` says of runs on two, four and eight GPUs"
    uncompared = {name: value | {"better": None} for name, value in found.items()}
    write(file, file.stem, title, {"cases": len(CASES)}, uncompared, note=note)


def stored_forecast(case: GpuCase, kind: str) -> dict[str, dict[str, Any]]:
    """The figures of a run in the stored record, by the names of the measured ones."""
    start = f"{case.name}, {kind}, "
    figures = load(FORECAST)["figures"]
    found = {name.removeprefix(start): value for name, value in figures.items() if name.startswith(start)}
    if not found:
        raise ValueError(f"{FORECAST} has no forecast of {case.name} on {kind}: write it with --forecast")
    return found


def refusal(case: GpuCase, gpus: int, free: float, forecast: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Why a machine with this many GPUs and free bytes of host memory cannot make a run; None if it can."""
    if gpus < case.gpus:
        return (
            f"{case.name} needs {case.gpus} GPUs and this machine has {gpus}: run it on one with {case.gpus}"
        )
    needed = forecast[HOST]["value"]
    if needed * GIB > free:
        return (
            f"the steps of {case.name} need an estimated {needed:,.0f} GiB of host memory and"
            f" {free / GIB:,.0f} are free: use a machine with more"
        )
    return None


def kind_of(names: str) -> str:
    """The kind of the GPUs that `hardware` names. Raises ValueError for others than the forecast has."""
    found = [kind for kind in KINDS if kind in names.lower()]
    if len(found) != 1:
        raise ValueError(f"the forecasts are for {' and '.join(KINDS)}, but this machine has {names}")
    return found[0]


def run(case: GpuCase, model: Path | None, out: Path) -> int:
    """Makes a run and writes its record; returns the benchmark's exit code. Exits with a sentence where this
    machine cannot make it."""
    gpus = num_gpus()
    if gpus < case.gpus:
        sys.exit(refusal(case, gpus, 0.0, {}))
    kind = kind_of(hardware())
    forecast = stored_forecast(case, kind)
    lacking = refusal(case, gpus, free_memory(), forecast)
    if lacking:
        sys.exit(lacking)
    out.mkdir(parents=True, exist_ok=True)
    name = f"{case.name}-{kind}"
    file = (out / f"{name}.json").absolute()
    folders = []
    if model is not None and case.shape:
        folders = ["--model", str(model.absolute()), "--out", str((out / name).absolute())]
    script = Path(__file__).with_name(f"{case.script}.py")
    written = ["--json", str(file), "--name", name]
    code = run_child(str(script), *folders, *words_of(case, kind), *written)
    if not file.exists():
        sys.exit(f"{case.name} ended with exit code {code} before it had measured anything: see its output")
    found = load(file)
    found["figures"] = with_forecast(found["figures"], forecast)
    file.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n")
    for figure_name, value in found["figures"].items():
        print(f"{figure_name}: {value['value']:,} {value['unit']}")
    print(f"wrote {file}: copy it to {RESULTS.name}/ and run python -m tests.benchmarks.table")
    return code or 0


def with_forecast(
    measured: Mapping[str, dict[str, Any]], forecast: Mapping[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """The measured figures, each followed by its forecast and by the forecast's error in percent of what was
    measured; forecasts that nothing measured are last."""
    found = dict[str, dict[str, Any]]()
    for name, value in measured.items():
        found[name] = value
        if name in forecast:
            planned = forecast[name]["value"]
            found[f"{name}, plan"] = figure(planned, value["unit"], None)
            if value["value"] > 0:
                error = 100 * (planned / value["value"] - 1)
                found[f"{name}, error of the plan"] = figure(round(error, 1), "%", None)
    for name, value in forecast.items():
        if name not in measured:
            found[f"{name}, plan"] = figure(value["value"], value["unit"], None)
    return found


if __name__ == "__main__":
    raise SystemExit(main())
