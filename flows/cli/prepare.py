"""Commands that prepare a run: `alignflow migrate`, `config-docs`, `metrics-docs`, `validate`, `plan`, `data`
and `doctor`. They start no runs."""

from __future__ import annotations

import math
from itertools import chain
from itertools import count as counted
from pathlib import Path
from typing import Literal

from flows.cli.show import OK, Override, RecipePlace, Whole, console, errors, say, show_migration, show_pins
from rlhf_core.preflight.inputs import check_inputs, input_warnings, load_here
from rlhf_core.preflight.machine_checks import check_machine, needs
from rlhf_core.preflight.server_checks import SilentServers, key_warnings, silent_servers
from rlhf_core.recipe.gate_checks import reset_reference_notes
from rlhf_core.recipe.idle_fields import idle_fields
from rlhf_core.recipe.load_recipe import load_recipe
from rlhf_core.recipe.plan import plan
from rlhf_core.system.files import write_text
from rlhf_core.system.processes import ENVIRONMENT, WRONG_INPUT


def migrate(script: Path, *, out: Path | None = None, gpus: Whole = 8) -> int:
    """Turn a launch script of OpenRLHF (flat or dotted flags) or TRL (sft, dpo, kto, reward, grpo) into a
    recipe. Executes none of it.

    Args:
        script: shell script, Kubernetes YAML that contains one, or a TRL YAML config.
        out: recipe to write; it must not exist yet. Default: recipe.yaml, or the first of recipe-2.yaml,
            recipe-3.yaml, ... that does not exist. Its comments explain how each flag was translated.
        gpus: GPUs of one machine, for launchers that use all of them.
    """
    from rlhf_core.migrate.script import migrate as read

    if gpus < 1:
        raise ValueError(f"--gpus {gpus}: give the number of GPUs of one machine, 1 or more")
    if out is not None and out.exists():
        raise ValueError(f"{out} exists already: give another --out, or remove it")
    if out is not None and not out.absolute().parent.is_dir():
        raise ValueError(
            f"--out {out}: the folder {out.absolute().parent} does not exist: create it, or give another file"
        )
    found = read(script, gpus)
    place = _free(Path("recipe.yaml")) if out is None else out
    write_text(place, found.text)
    show_migration(console, place, found)
    return OK


def _free(path: Path) -> Path:
    """Returns `path`, or if it exists, the first of `<stem>-2`, `<stem>-3`, ... that does not exist."""
    numbered = (path.with_stem(f"{path.stem}-{number}") for number in counted(2))
    return next(each for each in chain([path], numbered) if not each.exists())


def config_docs() -> int:
    """Print all fields of a recipe as markdown."""
    from flows.cli.config_page import config_page

    print(config_page())
    return OK


def metrics_docs() -> int:
    """Print all metrics that gates may name as markdown."""
    from rlhf_core.config import KINDS
    from rlhf_core.config.metrics.metrics_page import metrics_page

    print(metrics_page({name: kind.metrics for name, kind in KINDS.items()}))
    return OK


def validate(recipe: RecipePlace, *overrides: Override, here: bool = False) -> int:
    """Check a recipe's keys and values, and that its stages fit together. Reads none of its input files, and
    uses the network only to look up branches and tags on the Hub.

    Args:
        here: also check files, columns, tokenizers, limits and this machine's resources, as `run` does before
            any work, and whether judges and reward servers answer.
    """
    planned = plan(load_here(recipe, overrides) if here else load_recipe(recipe, overrides))
    show_pins(planned)
    for idle in idle_fields(planned.recipe):
        errors.print(f"note: {idle}", markup=False)
    for sentence in key_warnings(planned.nodes) + reset_reference_notes(planned):
        errors.print(f"note: {sentence}", markup=False)
    inputs = check_inputs(planned, planned.nodes) if here else []
    silent = silent_servers(planned) if here else SilentServers([], [])
    machine = check_machine(planned, planned.nodes) + silent.needed if here else []
    warned = input_warnings(planned, planned.nodes) if here and not inputs else []
    for sentence in warned + silent.later:
        console.print(f"warning: {sentence}", markup=False, soft_wrap=True)
    for problem in inputs + machine:
        errors.print(problem, markup=False)
    if not inputs and not machine:
        done = sum(node.done for node in planned.nodes) if here else 0
        need = f" ({done} done already)" * bool(done) + (
            f" and everything that {'the others' if done else 'they'} need is available"
        ) * (here and not silent.later)
        console.print(f"{recipe}: ok, {len(planned.nodes)} stages{need}", markup=False)
    if inputs:
        return WRONG_INPUT
    return ENVIRONMENT if machine else OK


def forecast(
    recipe: RecipePlace,
    *overrides: Override,
    gpus: Whole = 0,
    gpu: Literal["h200", "h100", "h800", "a100", "a800"] = "h200",
    gpu_memory: float | None = None,
    flops: float | None = None,
    bandwidth: float | None = None,
    nodes: Whole | None = None,
    network: float | None = None,
) -> int:
    """Estimate the memory per GPU and the seconds per iteration, and recommend a placement. Starts nothing.

    Args:
        gpus: number of GPUs to place a PPO stage on; default: as many as the recipe needs.
        gpu: GPU type, which sets memory and rates; for other types, give the next three options.
        gpu_memory: memory per GPU, in GiB.
        flops: measured TFLOP/s of bf16 matrix products.
        bandwidth: measured memory bandwidth, in TB/s.
        nodes: number of nodes, each with equally many of these GPUs; default: as the recipe says, else 8 GPUs
            per node.
        network: nominal GB/s between a node and the others; default: 50.
    """
    from flows.cli.forecast import nodes_in, show_forecast
    from rlhf_core.forecast.hardware import GPUS, on_nodes

    given = {"memory": (gpu_memory, 2**30), "flops": (flops, 1e12), "bandwidth": (bandwidth, 1e12)}
    numbers = [gpu_memory, flops, bandwidth, nodes, network]
    if gpus < 0 or not all(value is None or 0 < value < math.inf for value in numbers):
        told = "--gpus, --gpu-memory, --flops, --bandwidth, --nodes and --network"
        raise ValueError(f"{told} must be numbers above 0: leave out unknown ones")
    planned = plan(load_recipe(recipe, overrides))
    needed = max((round(needs(node.config).gpus) for node in planned.nodes), default=0)
    kind = GPUS[gpu]
    count = gpus or max(1, needed)
    memory, rate, speed = (
        getattr(kind, name) if value is None else value * unit for name, (value, unit) in given.items()
    )
    on = nodes or nodes_in(planned, count)
    known = on_nodes(
        kind._replace(memory=memory, flops=rate, bandwidth=speed), count, on, network and network * 1e9
    )
    show_forecast(console, planned, count, known)
    return 0


def data(recipe: RecipePlace, *overrides: Override) -> int:
    """Report on the data of a recipe without training: rows, lengths, duplicates, balance and damage. Needs
    the data files and tokenizers."""
    from rlhf_core.data.data_report import markdown
    from rlhf_core.preflight.data_reports import examine

    problems = []
    for name, surveys, wrong in examine(plan(load_recipe(recipe, overrides))):
        if surveys:
            say(f"# Data of {name}\n\n{markdown(surveys)}")
        problems += wrong
    if problems:
        raise ValueError("\n".join(problems))
    return OK


def doctor() -> int:
    """Show versions and devices, and anything that is missing."""
    from flows.cli.doctor import examine

    findings = examine()
    for level, what, value in findings:
        mark = {"ok": "[green]ok  [/]", "warn": "[yellow]warn[/]", "bad": "[red]bad [/]"}[level]
        console.print(f"{mark} {what:22} {value}", highlight=False)
    return ENVIRONMENT if any(finding.level == "bad" for finding in findings) else OK
