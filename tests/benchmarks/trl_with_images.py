"""TRL's SFTTrainer or GRPOTrainer on rows with images, as a process of its own for `images.py`:
`python trl_with_images.py SETTINGS`, a JSON file. Appends a line for each optimiser step to its `steps` file.

Imports nothing of this project: TRL's folder is on the path of this process alone.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset, Image, List
from transformers import AutoModelForImageTextToText, AutoProcessor, TrainerCallback


class StepClock(TrainerCallback):
    """Writes the time at the end of each optimiser step, and prints what is logged."""

    def __init__(self, file: Path):
        self._file = file

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        with self._file.open("a") as file:
            file.write(json.dumps({"time": time.time()}) + "\n")

    def on_log(self, *_: Any, logs: dict[str, Any], **__: Any) -> None:
        named = ("loss", "num_tokens", "reward", "completions/mean_length")
        told = {name: logs[name] for name in named if name in logs}
        print(f"TRL: {told}", flush=True)


def letters(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
    """The reward of `images.LETTERS`."""
    return [sum(map(ord, answer[0]["content"])) % 101 / 50 - 1 for answer in completions]


def main(settings: dict[str, Any]) -> None:
    print(f"transformers {transformers.__version__}, torch {torch.__version__}", flush=True)
    if settings["liger"]:
        # beside nvidia-cutlass-dsl Liger takes slower kernels than Triton's
        with suppress(ImportError):
            from liger_kernel.backends import set_impl

            set_impl("nvidia-triton")
    on_gpu = torch.cuda.is_available()
    processor = AutoProcessor.from_pretrained(settings["model"])
    model = AutoModelForImageTextToText.from_pretrained(
        settings["model"],
        dtype=getattr(torch, settings["dtype"]),
        attn_implementation="flash_attention_2" if on_gpu else "sdpa",
    )
    model.model.visual.requires_grad_(False)
    common: dict[str, Any] = {
        "output_dir": settings["out"],
        "per_device_train_batch_size": settings["rows"],
        "gradient_accumulation_steps": settings["passes"],
        "max_steps": settings["steps"],
        "gradient_checkpointing": settings["checkpointing"],
        "bf16": on_gpu,
        "use_cpu": not on_gpu,
        "optim": "adamw_torch_fused",
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "use_liger_kernel": settings["liger"],
        "dataloader_num_workers": settings["workers"],
    }
    rows = [json.loads(line) for line in Path(settings["data"]).read_text().splitlines()]
    data = Dataset.from_list(rows).cast_column("images", List(Image()))
    clock = StepClock(Path(settings["steps_file"]))
    make = sft_trainer if settings["what"] == "sft" else grpo_trainer
    trainer = make(settings, common, model, processor, data, clock)
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    print(f"TRL trains {trained / 1e9:.3f}B of {model.num_parameters() / 1e9:.3f}B weights", flush=True)
    trainer.train()


def sft_trainer(
    settings: dict[str, Any], common: dict[str, Any], model: Any, processor: Any, data: Any, clock: StepClock
) -> Any:
    """TRL neither packs rows with images nor leaves out their padding."""
    from trl import SFTConfig, SFTTrainer

    return SFTTrainer(
        model,
        args=SFTConfig(**common, max_length=None),
        train_dataset=data,
        processing_class=processor,
        callbacks=[clock],
    )


def grpo_trainer(
    settings: dict[str, Any], common: dict[str, Any], model: Any, processor: Any, data: Any, clock: StepClock
) -> Any:
    """Without a KL to a reference; an optimiser step for each batch of answers."""
    from trl import GRPOConfig, GRPOTrainer

    processor.tokenizer.padding_side = "left"  # as TRL loads it where it is given none
    # Random weights would sample these tokens, for which there are no features.
    marks = [processor.image_token_id, processor.video_token_id]
    generation: dict[str, Any] = {"suppress_tokens": marks}
    if settings["vllm"]:
        common |= {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": settings["vllm"],
            "vllm_max_model_length": settings["max_len"],
        }
        generation = {"logit_bias": dict.fromkeys(marks, -100.0)}
    return GRPOTrainer(
        model,
        reward_funcs=letters,
        args=GRPOConfig(
            **common,
            num_generations=settings["answers"],
            max_completion_length=settings["new_tokens"],
            beta=0.0,
            temperature=1.0,
            generation_kwargs=generation,
        ),
        train_dataset=data,
        processing_class=processor,
        callbacks=[clock],
    )


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
