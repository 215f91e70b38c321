"""Tokens per second of packed SFT, reward model and DPO on random weights: ours on one or several GPUs, and
TRL's on one.

    python tests/benchmarks/training.py --model FOLDER --out FOLDER --what sft [--prompts 0.5] [--peer]
    [--gpus 4 --zero-stage 3]

Both train the same documents in bf16 with AdamW, equally many tokens a pass, and are timed from the third
optimiser step on. Ours steps a copy of the weights in fp32; TRL steps what it loaded, bf16, or fp32 under
autocast with --peer-weights float32. MFU counts 6N operations a token (DPO's reference log-probs are computed
beforehand by both) against --flops, the GPU's measured matrix rate.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from gpu_memory import in_gib, watch_host, watch_memory
from openrlhf_ppo import start_child
from record import add_options, figure, save

from rlhf_core.config import DPO, KTO, SFT, Ranks, RewardModel, Trainable
from rlhf_core.forecast.by_phase import training_by_phase
from rlhf_core.forecast.hardware import GPUS
from rlhf_core.forecast.zero_stage import stage_of_training
from rlhf_core.hub.model_config import size_of
from rlhf_core.runs.metrics_log import read_metrics
from rlhf_core.runs.run_dir import RunDir
from tests.support.stage_request import stage_request

PASSES = 4  # of one optimiser step, on one GPU
PAIR = 1024  # tokens of each side of a pair


def command_line() -> argparse.ArgumentParser:
    """The options of this command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--what", choices=("sft", "rm", "dpo", "kto"), default="sft")
    parser.add_argument(
        "--prompts",
        type=float,
        default=0.0,
        help="share of each text that is its prompt, of which no loss is taken",
    )
    parser.add_argument("--pass-tokens", type=int, default=16384, help="tokens of a pass on one GPU")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument(
        "--work",
        type=int,
        help="passes of a step are 4 times this, in place of 4 times the GPUs: equal steps on 1 and 2",
    )
    parser.add_argument(
        "--zero-stage", type=lambda stage: stage if stage == "auto" else int(stage), default=0
    )
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--no-liger", action="store_true")
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        default=[200, 1000, 840],
        help="tokens of SFT's documents, equally many of each",
    )
    parser.add_argument(
        "--rows", type=int, help="rows of a pass, in place of its tokens, as in a recipe that sets neither"
    )
    parser.add_argument(
        "--apart",
        action="store_true",
        help="one document a row, as where documents of a row would see each other",
    )
    parser.add_argument(
        "--active",
        type=float,
        help="parameters that a token meets, for the MFU of a mixture of experts; default: all",
    )
    parser.add_argument("--set", default="{}", help="JSON of more fields of the stage, such as adam_offload")
    parser.add_argument("--no-export", action="store_true", help="end the stage after its last step")
    parser.add_argument("--peer", action="store_true", help="TRL in place of ours")
    parser.add_argument(
        "--peer-weights",
        default="bfloat16",
        choices=("bfloat16", "float32"),
        help="float32: TRL steps fp32, as ours does",
    )
    parser.add_argument("--flops", type=float, default=790e12)
    parser.add_argument("--gpu", choices=GPUS, default="h200", help="for what the plan says")
    add_options(parser, "training")
    return parser


def main() -> None:
    parser = command_line()
    arguments = parser.parse_args()
    if arguments.pass_tokens % (2 * PAIR) or (arguments.peer and arguments.gpus > 1):
        parser.error(f"--pass-tokens is a multiple of {2 * PAIR}, and TRL runs on one GPU")
    if arguments.steps < 4:
        parser.error("--steps is 4 or more: steps are timed from the third on")
    arguments.out.mkdir(parents=True)
    arguments.passes = passes_of_step(arguments)
    tokens = arguments.steps * arguments.passes * arguments.pass_tokens
    rows = make_rows(arguments.what, tokens, arguments.prompts, arguments.lengths)
    peaks = watch_memory()
    host = watch_host()
    seconds, per_step = (trl if arguments.peer else ours)(arguments, rows)
    steady = sorted(seconds[2:])[len(seconds[2:]) // 2]
    size = arguments.active or sum(file.stat().st_size for file in arguments.model.glob("*.safetensors")) / 2
    rate = per_step / steady
    name = (
        f"TRL, {arguments.peer_weights} weights"
        if arguments.peer
        else f"ours, {arguments.gpus} GPU(s), ZeRO-{arguments.zero_stage}"
        + ", no Liger" * arguments.no_liger
        + ", one document a row" * arguments.apart
    )
    mfu = 6 * size * rate / arguments.flops / arguments.gpus
    print(
        f"{arguments.what} {name}: {rate:,.0f} tokens/s, {steady:.2f} s a step of {per_step:,.0f} tokens, MFU"
        f" {mfu:.1%}",
        flush=True,
    )
    found = {
        "rate": figure(round(rate), "tokens/s", "higher"),
        "MFU": figure(round(100 * mfu, 1), "%", "higher"),
    }
    if peaks:
        found["peak"] = figure(max(in_gib(peaks)), "GiB")
        print(f"peak GiB by GPU {in_gib(peaks)}", flush=True)
    found["host peak"] = figure(*in_gib(host), "GiB")
    print(f"peak GiB of the host {found['host peak']['value']}", flush=True)
    save(arguments, f"{arguments.what} {name}", found)


def passes_of_step(arguments: argparse.Namespace) -> int:
    """The passes of an optimiser step, of all GPUs together."""
    return int((arguments.work or arguments.gpus) * PASSES)


def tokens_of(row: dict[str, str]) -> int:
    """A prompt stands before each answer; with the last token."""
    return sum(
        len(row["prompt"]) + len(text)
        for key, text in row.items()
        if key in ("response", "chosen", "rejected")
    )


def rows_of(what: str, tokens: int, lengths: list[int]) -> int:
    """The rows that fill this many tokens."""
    if what in ("rm", "dpo"):
        return tokens // (2 * PAIR)
    if what == "kto":
        return tokens // PAIR
    return tokens // (sum(lengths) + 8) * len(lengths)


def make_rows(what: str, tokens: int, prompts: float, lengths: list[int]) -> list[dict[str, Any]]:
    """Random letters (one token each): documents of these lengths, or pairs of 2 x 1,024, as many as fill the
    passes."""
    rng = random.Random(0)

    def text(length: int) -> str:
        return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(length))

    def row(length: int, *answers: str) -> dict[str, Any]:
        asked = max(1, round(prompts * length))
        return {"prompt": text(asked), **{answer: text(length - 3 - asked) for answer in answers}}

    count = rows_of(what, tokens, lengths)
    if what in ("rm", "dpo"):
        return [row(PAIR, "chosen", "rejected") for _ in range(count)]
    if what == "kto":
        return [row(PAIR, "response") | {"label": bool(i % 2)} for i in range(count)]
    return [row(length, "response") for _ in range(count // len(lengths)) for length in lengths]


def stage_config(arguments: argparse.Namespace, file: Path, batch: int) -> Trainable:
    """The stage that the options of the command describe. `file`: its data; `batch`: the rows of an optimiser
    step."""
    kinds: dict[str, type[Trainable]] = {"sft": SFT, "rm": RewardModel, "dpo": DPO, "kto": KTO}
    return kinds[arguments.what].model_validate(
        {
            ("policy" if arguments.what in ("dpo", "kto") else "model"): "base",
            "data": {"sources": str(file), "template": "{}"},
            "max_len": 2048,
            "train_batch_size": batch // (arguments.rows or 1) * (arguments.rows or 1),
            "micro_train_batch_size": arguments.rows or 1,
            "micro_train_tokens": None if arguments.rows else arguments.pass_tokens,
            "dtype": "bfloat16",
            "zero_stage": arguments.zero_stage,
            "gradient_checkpointing": arguments.checkpointing,
            "ranks": Ranks(num_ranks_per_node=arguments.gpus, gpus=1),
            **json.loads(arguments.set),
        }
    )


def ours(arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> tuple[list[float], float]:
    """Seconds between the ends of steps, and tokens of a step."""
    file = arguments.out / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = stage_config(arguments, file, len(rows) // arguments.steps)
    size = size_of(str(arguments.model))
    memory = GPUS[arguments.gpu].memory
    stage = stage_of_training(config, size, memory).stage
    phases = training_by_phase(config, size, stage, GPUS[arguments.gpu])
    told = ", ".join(
        f"{phase} {each.gpu / 2**30:.1f} / {each.host / 2**30:.1f}" for phase, each in phases.items()
    )
    print(f"plan: ZeRO-{stage}; GiB of a GPU / of the host: {told}", flush=True)
    run = RunDir(arguments.out / "run")
    run.prepare(stage_request(config, arguments.model, name=arguments.what))
    hide = "sys.modules['liger_kernel'] = None; " if arguments.no_liger else ""
    hide += (
        "from rlhf_core.models import document_leak; document_leak.leaks = lambda *_: True; "
        if arguments.apart
        else ""
    )
    code = (
        f"import sys, runpy; {hide}sys.argv = ['rlhf_core', {str(run.path)!r}]; runpy.run_module('rlhf_core',"
        " run_name='__main__')"
    )
    with (arguments.out / "log.txt").open("w") as log:
        child = start_child("-c", code, stdout=log, stderr=log)
        ended = False
        try:
            while child.poll() is None and not (
                ended := arguments.no_export and len(read_metrics(run.path)) >= arguments.steps
            ):
                time.sleep(0.5)
        finally:
            child.terminate()
            failed = child.wait()
    if failed and not ended:
        sys.exit((arguments.out / "log.txt").read_text()[-3000:])
    times = [line["time"] for line in read_metrics(run.path)]
    print("losses", [round(line["loss"], 5) for line in read_metrics(run.path)])
    return [after - before for before, after in pairwise(times)], sum(
        tokens_of(row) for row in rows
    ) / arguments.steps


def trl(arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> tuple[list[float], float]:
    """Seconds between the ends of steps, and tokens of a step as TRL counts what it took: its packed rows are
    not quite full."""
    import torch
    from datasets import Dataset
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
        TrainerCallback,
    )
    from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

    times: list[float] = []
    # Beside nvidia-cutlass-dsl Liger takes other kernels, with which TRL was 1.6 times as slow; ours has
    # Triton's.
    with suppress(ImportError):
        from liger_kernel.backends import set_impl

        set_impl("nvidia-triton")

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize()
            times.append(time.time())

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    auto = AutoModelForSequenceClassification if arguments.what == "rm" else AutoModelForCausalLM
    options = {"num_labels": 1} if arguments.what == "rm" else {}
    model = auto.from_pretrained(
        arguments.model,
        dtype=getattr(torch, arguments.peer_weights),
        attn_implementation="flash_attention_2",
        **options,
    )
    common: dict[str, Any] = {
        "output_dir": str(arguments.out / "trl"),
        "gradient_accumulation_steps": arguments.passes,
        "max_steps": arguments.steps,
        "gradient_checkpointing": arguments.checkpointing,
        "bf16": True,
        "optim": "adamw_torch_fused",
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "use_liger_kernel": not arguments.no_liger,
    }
    if arguments.what == "sft":
        data = Dataset.from_list([{"prompt": row["prompt"], "completion": row["response"]} for row in rows])
        config = SFTConfig(
            **common, packing=True, max_length=2048, per_device_train_batch_size=arguments.pass_tokens // 2048
        )
        trainer = SFTTrainer(
            model, args=config, train_dataset=data, processing_class=tokenizer, callbacks=[Clock()]
        )
    elif arguments.what == "dpo":
        data = Dataset.from_list(rows)
        config = DPOConfig(
            **common,
            max_length=2048,
            per_device_train_batch_size=arguments.pass_tokens // (2 * PAIR),
            precompute_ref_log_probs=True,
            padding_free=True,
        )
        trainer = DPOTrainer(
            model, args=config, train_dataset=data, processing_class=tokenizer, callbacks=[Clock()]
        )
    else:
        data = Dataset.from_list(rows)
        # no head that speaks
        common["liger_kernel_config"] = {"cross_entropy": False, "fused_linear_cross_entropy": False}
        config = RewardConfig(
            **common, max_length=2048, per_device_train_batch_size=arguments.pass_tokens // (2 * PAIR)
        )
        trainer = RewardTrainer(
            model, args=config, train_dataset=data, processing_class=tokenizer, callbacks=[Clock()]
        )
    trainer.train()
    taken = [line["num_tokens"] for line in trainer.state.log_history if "num_tokens" in line]
    return [after - before for before, after in pairwise(times)], (taken[-1] - taken[1]) / (len(taken) - 2)


if __name__ == "__main__":
    main()
