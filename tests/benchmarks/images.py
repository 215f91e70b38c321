"""Training with images on one GPU beside TRL, one after the other: packed SFT with a frozen image encoder, or
GRPO steps with a function as reward. Random weights of Qwen3-VL-2B-Instruct's shape.

    python tests/benchmarks/images.py --out FOLDER --what sft --peer-path FOLDER
    python tests/benchmarks/images.py --out FOLDER --what grpo --engine vllm --peer-path FOLDER

--peer-path holds TRL alone, and only the peer's process has it on its path. Both sides get the same rows and
equally many rows in an optimiser step, in bf16, with Liger's kernels where they are installed. TRL pads its rows,
whose images --workers processes decode; tokens a second count no padding. Ours steps a copy of the weights in
fp32; TRL steps what it loaded. A side ends after its last step, or after --seconds or --peer-seconds; the steps
that ended count. --tiny is for a try without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from gpu_memory import in_gib, watch_memory
from image_material import ImageRow, draw_rows, question_of, write_model
from openrlhf_ppo import run_child, start_child
from record import add_options, figure, save

from rlhf_core.config import PPO, SFT, Ranks
from rlhf_core.forecast.by_phase import training_by_phase
from rlhf_core.forecast.hardware import GPUS
from rlhf_core.forecast.placements import forecast
from rlhf_core.forecast.zero_stage import stage_of_training
from rlhf_core.hub.model_config import size_of
from rlhf_core.runs.metrics_log import read_metrics
from rlhf_core.runs.run_dir import RunDir
from rlhf_core.system.machine import gpu_names
from tests.support.stage_request import stage_request

LETTERS = """
def letters(responses):
    return [sum(map(ord, response)) % 101 / 50 - 1 for response in responses]
"""
MAX_LEN = 1024  # longest row: about 630 tokens
PROMPT_LEN = 512
HERE = Path(__file__).parent
WARM = {"sft": 2, "grpo": 1}  # intervals between steps that are not timed


class Measured(NamedTuple):
    """`ends`: times of the ends of optimiser steps. `peak`: GiB of the GPU, None without one."""

    ends: list[float]
    peak: float | None


def main() -> None:
    arguments = options()
    tiny = arguments.tiny
    arguments.out.mkdir(parents=True, exist_ok=True)
    model = arguments.out / "model"
    began = time.time()
    count = arguments.out / "parameters"
    if not count.exists():
        count.write_text(str(write_model(model, tiny)))
    per_step = arguments.rows if arguments.what == "sft" else arguments.prompts
    rows = draw_rows(arguments.out / "images", per_step * arguments.steps)
    lengths = [row.tokens for row in rows]
    print(
        f"{int(count.read_text()) / 1e9:.3f}B parameters, {len(rows)} rows of {min(lengths)} to {max(lengths)}"
        f" tokens, written in {time.time() - began:.0f} s",
        flush=True,
    )
    if arguments.prepare:
        return
    peaks = watch_memory()
    ours = measured_ours(arguments, rows, peaks)
    title = titles(arguments)
    figures = figures_of(arguments, rows, ours)
    show("ours", arguments, figures)
    save(arguments, title, figures)
    if not arguments.peer_path:
        return
    peaks[:] = [0] * len(peaks)
    theirs, liger = measured_peer(arguments, rows, peaks)
    others = figures_of(arguments, rows, theirs)
    show("TRL", arguments, others)
    for name in figures.keys() & others.keys():
        value, other = figures[name]["value"], others[name]["value"]
        print(f"  {name}: ours {value}, TRL {other}, TRL's by ours {other / max(value, 1e-9):.2f}")
    peer = {
        "name": "TRL" + (" with Liger" if liger else ""),
        "figures": {name: each["value"] for name, each in others.items() if name in figures},
    }
    save(arguments, title, figures, peer)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--what", choices=("sft", "grpo"), default="sft")
    parser.add_argument(
        "--engine", choices=("vllm", "transformers"), default="vllm", help="of both, for grpo"
    )
    parser.add_argument("--share", type=float, default=0.35, help="of the GPU's memory for either's vLLM")
    parser.add_argument("--rows", type=int, default=128, help="of an optimiser step of SFT")
    parser.add_argument("--prompts", type=int, default=32, help="of a GRPO step")
    parser.add_argument("--answers", type=int, default=8, help="to each prompt")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, help="optimiser steps; default: 10 of SFT, 4 of GRPO")
    parser.add_argument("--pass-tokens", type=int, default=16384, help="tokens of a pass of ours")
    parser.add_argument("--peer-rows", type=int, default=32, help="rows of a pass of TRL's")
    parser.add_argument("--checkpointing", action="store_true", help="recompute all layers, on both sides")
    parser.add_argument("--no-liger", action="store_true", help="on both sides")
    parser.add_argument("--workers", type=int, default=8, help="processes that read data for TRL")
    parser.add_argument("--set", default="{}", help="JSON of more fields of our stage; `engine` is merged")
    parser.add_argument("--seconds", type=int, default=400, help="then ours is cut off")
    parser.add_argument("--peer-path", type=Path, help="folder with TRL's package; none: no peer")
    parser.add_argument("--peer-seconds", type=int, default=400, help="then TRL is cut off")
    parser.add_argument("--gpu", choices=GPUS, default="h200", help="for what the plan says")
    parser.add_argument(
        "--prepare", action="store_true", help="write model and rows, which the next call finds, and end"
    )
    parser.add_argument("--tiny", action="store_true", help="a tiny model in fp32")
    add_options(parser, "images")
    arguments = parser.parse_args()
    if arguments.steps is None:
        arguments.steps = 10 if arguments.what == "sft" else 4
    if arguments.steps < WARM[arguments.what] + 2:
        parser.error(f"--steps is {WARM[arguments.what] + 2} or more: first steps are not timed")
    per_step = arguments.rows if arguments.what == "sft" else arguments.prompts * arguments.answers
    if per_step % arguments.peer_rows:
        parser.error(f"--peer-rows divides the {per_step} rows of an optimiser step")
    return arguments


def titles(arguments: argparse.Namespace) -> str:
    recomputed = ", all layers recomputed" if arguments.checkpointing else ""
    if arguments.what == "sft":
        return f"SFT with images, frozen encoder, Qwen3-VL-2B's shape, one GPU{recomputed}"
    return f"GRPO step with images, Qwen3-VL-2B's shape, one GPU, engine {arguments.engine}{recomputed}"


def figures_of(
    arguments: argparse.Namespace, rows: list[ImageRow], measured: Measured
) -> dict[str, dict[str, Any]]:
    """Median seconds of a step in the steady state, the tokens of SFT a second, and the peak."""
    seconds = [after - before for before, after in pairwise(measured.ends)]
    print(f"seconds between steps {[round(each, 2) for each in seconds]}", flush=True)
    timed = seconds[WARM[arguments.what] :]
    found = {}
    if timed:
        step = statistics.median(timed)
        found["step"] = figure(round(step, 3), "s")
        if arguments.what == "sft":
            tokens = sum(row.tokens for row in rows) / arguments.steps
            found["rate"] = figure(round(tokens / step), "tokens/s", "higher")
    if measured.peak is not None:
        found["peak"] = figure(measured.peak, "GiB")
    return found


def show(side: str, arguments: argparse.Namespace, figures: dict[str, dict[str, Any]]) -> None:
    told = ", ".join(f"{name} {each['value']:,} {each['unit']}" for name, each in figures.items())
    print(f"{arguments.what} {side}: {told or 'no step in the steady state'}", flush=True)


def measured_ours(arguments: argparse.Namespace, rows: list[ImageRow], peaks: list[int]) -> Measured:
    model = arguments.out / "model"
    config = (sft_stage if arguments.what == "sft" else grpo_stage)(arguments, rows)
    print(f"plan: {planned(arguments, config)}", flush=True)
    run = RunDir(arguments.out / f"run-{arguments.what}")
    run.prepare(stage_request(config, model, name=arguments.what))
    hide = "sys.modules['liger_kernel'] = None; " if arguments.no_liger else ""
    code = (
        f"import sys, runpy; {hide}sys.argv = ['rlhf_core', {str(run.path)!r}]; runpy.run_module('rlhf_core',"
        " run_name='__main__')"
    )
    log = arguments.out / "ours.log"
    until = time.monotonic() + arguments.seconds
    shown = 0
    with log.open("w") as out:
        child = start_child("-c", code, stdout=out, stderr=out)
        try:
            # ends with the last step: no time goes into the export
            while child.poll() is None and shown < arguments.steps and time.monotonic() < until:
                time.sleep(0.5)
                lines = read_metrics(run.path)
                for line in lines[shown:]:
                    print(f"  ours: {told(line)}", flush=True)
                shown = len(lines)
        finally:
            child.terminate()
            child.wait()
    ends = [line["time"] for line in read_metrics(run.path)]
    if len(ends) < arguments.steps:
        print(f"ours ended {len(ends)} of {arguments.steps} steps:\n{log.read_text()[-3000:]}", flush=True)
    if not ends:
        sys.exit(1)
    return Measured(ends, max(in_gib(peaks)) if peaks else None)


def told(line: dict[str, float]) -> dict[str, float]:
    kept = ("loss", "tokens", "reward/mean", "response/length", "sampler/gap", "policy/grad_norm")
    kept_groups = ("phase/", "memory/")
    return {
        name: round(value, 4) for name, value in line.items() if name in kept or name.startswith(kept_groups)
    }


def planned(arguments: argparse.Namespace, config: SFT | PPO) -> str:
    """GiB of the GPU by phase, and a PPO step's seconds, as `alignflow plan` has them."""
    card = GPUS[arguments.gpu]
    size = size_of(str(arguments.out / "model"))
    if isinstance(config, SFT):
        stage = stage_of_training(config, size, card.memory).stage
        phases = training_by_phase(config, size, stage, card)
        return ", ".join(f"{phase} {each.gpu / 2**30:.1f} GiB" for phase, each in phases.items())
    plan = forecast("", config, {}, dict.fromkeys(config.groups, size), card)
    seconds = {name: round(value, 2) for name, value in plan.seconds.items()}
    return f"peak {plan.peak / 2**30:.1f} GiB, step {plan.total:.1f} s, {seconds}"


def common_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "micro_train_batch_size": 1,
        "micro_train_tokens": arguments.pass_tokens,
        "dtype": "float32" if arguments.tiny else "bfloat16",
        "zero_stage": 0,
        "gradient_checkpointing": arguments.checkpointing,
    }


def sft_stage(arguments: argparse.Namespace, rows: list[ImageRow]) -> SFT:
    lines = [{"messages": [*question_of(row), {"role": "assistant", "content": row.answer}]} for row in rows]
    fields = {
        "model": "base",
        "data": {"sources": written(arguments.out / "chats.jsonl", lines)},
        "max_len": MAX_LEN,
        "train_batch_size": arguments.rows,
        "ranks": ranks(),
        **common_fields(arguments),
    }
    return SFT.model_validate(fields | json.loads(arguments.set))


def grpo_stage(arguments: argparse.Namespace, rows: list[ImageRow]) -> PPO:
    (arguments.out / "letters.py").write_text(LETTERS)
    lines = [{"prompt": question_of(row)} for row in rows]
    engine: dict[str, Any] = {"kind": arguments.engine, "num_engines": 1}
    if gpu_names():
        engine["gpus"] = 1
    if arguments.engine == "vllm":
        engine |= {"gpu_memory_utilization": arguments.share}
    settings = json.loads(arguments.set)
    engine |= settings.pop("engine", {})
    fields = {
        "actor": "base",
        "prompts": {"sources": written(arguments.out / "asks.jsonl", lines)},
        "reward": {"function": f"{arguments.out / 'letters.py'}:letters"},
        "advantage_estimator": "grpo",
        "init_kl_coef": 0,
        "n_samples_per_prompt": arguments.answers,
        "rollout_batch_size": arguments.prompts,
        "train_batch_size": arguments.prompts * arguments.answers,
        "micro_rollout_batch_size": 1,
        "micro_rollout_tokens": arguments.pass_tokens,
        "max_steps": arguments.steps,
        "prompt_max_len": PROMPT_LEN,
        "generate_max_len": arguments.new_tokens,
        "actor_ranks": ranks(),
        "colocate_all": True,
        "engine": engine,
        "timeout": arguments.seconds,
        **common_fields(arguments),
    }
    return PPO.model_validate(fields | settings)


def ranks() -> Ranks:
    return Ranks(num_ranks_per_node=1, gpus=1) if gpu_names() else Ranks()


def written(file: Path, lines: list[dict[str, Any]]) -> str:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(file)


def measured_peer(
    arguments: argparse.Namespace, rows: list[ImageRow], peaks: list[int]
) -> tuple[Measured, bool]:
    """What TRL took, and whether with Liger: where it fails before its first step, it starts again without."""
    until = time.monotonic() + arguments.peer_seconds
    liger = bool(gpu_names()) and not arguments.no_liger
    while True:
        ends = peer_steps(arguments, rows, liger, until - time.monotonic())
        if ends or not liger or time.monotonic() > until - 30:
            break
        print("TRL failed with Liger: again without", flush=True)
        liger = False
        peaks[:] = [0] * len(peaks)
    return Measured(ends, max(in_gib(peaks)) if peaks else None), liger


def peer_steps(
    arguments: argparse.Namespace, rows: list[ImageRow], liger: bool, seconds: float
) -> list[float]:
    """The times at which TRL's steps ended."""
    out = arguments.out.absolute()
    grpo = arguments.what == "grpo"
    lines = []
    for row in rows:
        line: dict[str, Any] = {"images": [str(out / row.image)]}
        line["prompt"] = [{"role": "user", "content": row.question}]
        if not grpo:
            line["completion"] = [{"role": "assistant", "content": row.answer}]
        lines.append(line)
    steps = out / f"trl-steps-{arguments.what}-{'liger' if liger else 'plain'}.jsonl"
    steps.write_text("")
    per_step = arguments.prompts * arguments.answers if grpo else arguments.rows
    settings = {
        "what": arguments.what,
        "model": str(out / "model"),
        "out": str(out / "trl"),
        "data": written(out / "trl-rows.jsonl", lines),
        "steps_file": str(steps),
        "dtype": "float32" if arguments.tiny else "bfloat16",
        "rows": arguments.peer_rows,
        "passes": per_step // arguments.peer_rows,
        "steps": arguments.steps,
        "checkpointing": arguments.checkpointing,
        "liger": liger,
        "workers": arguments.workers,
        "vllm": arguments.share if grpo and arguments.engine == "vllm" else 0,
        "max_len": PROMPT_LEN + arguments.new_tokens,
        "answers": arguments.answers,
        "new_tokens": arguments.new_tokens,
    }
    file = out / "trl.json"
    file.write_text(json.dumps(settings))
    path = os.pathsep.join([str(arguments.peer_path.absolute()), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(out / "datasets"),
        "TOKENIZERS_PARALLELISM": "false",
    }
    log = out / f"trl-{'liger' if liger else 'plain'}.log"
    with log.open("w") as writer:
        code = run_child(
            str(HERE / "trl_with_images.py"), str(file),
            timeout=max(seconds, 1), env=environment, stdout=writer, stderr=writer,
        )  # fmt: skip
    ends = [json.loads(line)["time"] for line in steps.read_text().splitlines()]
    ended = "was cut off" if code is None else f"ended with code {code}"
    print(f"TRL {ended} after {len(ends)} of {arguments.steps} steps", flush=True)
    for line in log.read_text(errors="replace").splitlines():
        if line.startswith("TRL"):
            print(f"  {line}", flush=True)
    if len(ends) < arguments.steps:
        print(log.read_text(errors="replace")[-4000:], flush=True)
    return ends


if __name__ == "__main__":
    main()
