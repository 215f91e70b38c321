"""What `alignflow plan` computes for the runs of several_gpus_cases.py: seconds, rates and GiB under the names
of the figures that each benchmark measures."""

from __future__ import annotations

import argparse
import shlex
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ppo_step
import sequence_parallel
import training
from record import figure
from several_gpus_cases import GpuCase
from shapes import SHAPES

from rlhf_core.config import PPO, Trainable
from rlhf_core.forecast.by_phase import training_by_phase
from rlhf_core.forecast.fitting_passes import Pass
from rlhf_core.forecast.hardware import GIB, GPUS, Gpu
from rlhf_core.forecast.memory import CONTEXT, USABLE
from rlhf_core.forecast.placements import details, forecast
from rlhf_core.forecast.seconds import seconds_of_host_adam, seconds_of_pass
from rlhf_core.hub.model_config import Size, size_of_config

FILE = "data.jsonl"  # of the stages, which a forecast does not read
BENCHMARKS = {"ppo_step": ppo_step, "sequence_parallel": sequence_parallel, "training": training}
# GiB on the host during the steps. Above a machine's free memory the run would be killed. Nothing measures it.
HOST = "host"
LACKING = "engines lack"  # GiB of a GPU for the engine's weights, only where its share is too small


def words_of(case: GpuCase, kind: str) -> list[str]:
    """The arguments of the case's benchmark on GPUs of this kind, without the folders and the record."""
    words = shlex.split(case.arguments)
    if kind == "h100":
        words += shlex.split(case.on_h100)
    return words if case.script == "sequence_parallel" else [*words, "--gpu", kind]


def parsed(case: GpuCase, kind: str, folder: Path) -> argparse.Namespace:
    """The case's arguments as its benchmark reads them. Exits for one that the benchmark does not have."""
    folders = ["--model", str(folder), "--out", str(folder)] if case.shape else []
    found: argparse.Namespace = (
        BENCHMARKS[case.script].command_line().parse_args([*folders, *words_of(case, kind)])
    )
    return found


def size_of_case(case: GpuCase, arguments: argparse.Namespace) -> Size:
    """The size of the case's models, from their shape alone."""
    if not case.shape:
        shape = sequence_parallel.SHAPES[arguments.shape]
        return size_of_config({**shape, "vocab_size": sequence_parallel.VOCABULARY})
    family, numbers = SHAPES[case.shape]
    return size_of_config({"model_type": family.lower(), **numbers})


def stage_of_case(case: GpuCase, arguments: argparse.Namespace) -> PPO | Trainable:
    """The stage that the case's benchmark runs."""
    if case.script == "ppo_step":
        return ppo_step.stage_config(arguments)
    if case.script == "training":
        tokens = training.passes_of_step(arguments) * arguments.pass_tokens
        rows = training.rows_of(arguments.what, tokens, arguments.lengths)
        return training.stage_config(arguments, Path(FILE), rows)
    (tokens,) = arguments.tokens
    stage = sequence_parallel.config_of(arguments, case.gpus, 1.0)
    return stage.model_copy(update={"max_len": tokens, "train_batch_size": 1})


def figures_of_plan(case: GpuCase, kind: str) -> dict[str, dict[str, Any]]:
    """The forecast of a case on GPUs of a kind: figures by the names of the measured ones, and `HOST`."""
    gpu = GPUS[kind]
    with tempfile.TemporaryDirectory() as folder:
        arguments = parsed(case, kind, Path(folder))
        stage = stage_of_case(case, arguments)
    size = size_of_case(case, arguments)
    if isinstance(stage, PPO):
        return of_ppo(stage, size, gpu)
    if case.script == "training":
        return of_training(stage, size, gpu, arguments)
    return of_long_pass(stage, size, gpu, arguments)


def peak_of(figures: Mapping[str, Mapping[str, Any]]) -> float:
    """GiB of the fullest GPU of a forecast."""
    (peak,) = (value["value"] for name, value in figures.items() if "peak" in name and "host" not in name)
    return float(peak)


def fits(figures: Mapping[str, Mapping[str, Any]], kind: str) -> bool:
    """Whether the fullest GPU of a forecast has the memory, and an engine's share of it holds the weights."""
    return peak_of(figures) * GIB <= USABLE * GPUS[kind].memory and LACKING not in figures


def gib(size: float) -> dict[str, Any]:
    return figure(round(size / GIB, 1), "GiB")


def of_ppo(stage: PPO, size: Size, gpu: Gpu) -> dict[str, dict[str, Any]]:
    sizes = dict.fromkeys(stage.groups, size)
    placement = forecast("", stage, {}, sizes, gpu)
    memory = details(stage, placement, sizes, gpu).memory
    seconds = {"step": placement.total, **placement.seconds}
    return {
        **{name: figure(round(value, 2), "s") for name, value in seconds.items()},
        "peak": gib(placement.peak),
        HOST: gib(memory["train"].host),
        **({LACKING: gib(placement.lacking)} if placement.lacking > 0 else {}),
    }


def of_training(
    stage: Trainable, size: Size, gpu: Gpu, arguments: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Tokens per second of all GPUs, with the fullest passes, and memory without an export."""
    ranks = arguments.gpus
    passes = training.passes_of_step(arguments) / ranks
    length = training.PAIR
    if arguments.what == "sft":
        length = sum(arguments.lengths) // len(arguments.lengths)
    shape = Pass(arguments.pass_tokens, stage.gradient_checkpointing)
    has_vocabulary = arguments.what != "rm"
    seconds = passes * seconds_of_pass(size, shape, arguments.zero_stage, has_vocabulary, gpu, length)
    if stage.offloaded("adam"):
        seconds += seconds_of_host_adam(size.parameters, ranks, gpu)
    memory = training_by_phase(stage, size, arguments.zero_stage, gpu)
    working = [memory[phase] for phase in ("load", "score", "step") if phase in memory]
    return {
        "rate": figure(round(passes * ranks * arguments.pass_tokens / seconds), "tokens/s", "higher"),
        "peak": gib(max(each.gpu for each in working)),
        "host peak": gib(max(each.host for each in working)),
        HOST: gib(memory["step"].host),
    }


def of_long_pass(
    stage: Trainable, size: Size, gpu: Gpu, arguments: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """A pass of one document that all GPUs compute together. Its memory is what torch takes."""
    (tokens,) = arguments.tokens
    (ranks,) = arguments.gpus
    shape = Pass(tokens // ranks, stage.gradient_checkpointing)
    seconds = seconds_of_pass(size, shape, arguments.zero_stage, True, gpu, tokens)
    memory = training_by_phase(stage, size, arguments.zero_stage, gpu)["step"]
    return {
        f"{tokens} rate {ranks}": figure(round(tokens / seconds), "tokens/s", "higher"),
        f"{tokens} peak {ranks}": gib(memory.gpu - CONTEXT),
        HOST: gib(memory.host),
    }
