"""Records what TRL makes of the material: `trl.json`, the goldens of tests/unit/training/test_agreement.py.

    pip install --no-deps trl==1.16.0 accelerate
    python -m tests.agreement.record_trl

TRL trains through its own data path and its own loop, in the order our stages take the rows (`items_of_step`,
laid out one after the other and read in sequence). Losses are those its `training_step` returns, gradient
norms those it logs.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import random
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", OMP_NUM_THREADS="1")

import torch
import trl
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerBase,
)
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOTrainer

from rlhf_core.training.train_loop import items_of_step
from tests.agreement import material
from tests.agreement.compare import GOLDENS
from tests.agreement.ours import gradient

TRAINERS = {
    "SFT": (trl.SFTTrainer, trl.SFTConfig),
    "Reward": (trl.RewardTrainer, trl.RewardConfig),
    "DPO": (trl.DPOTrainer, trl.DPOConfig),
    "KTO": (trl.KTOTrainer, trl.KTOConfig),
    "CPO": (CPOTrainer, CPOConfig),
    "GRPO": (trl.GRPOTrainer, trl.GRPOConfig),
    "RLOO": (trl.RLOOTrainer, trl.RLOOConfig),
}
PLAIN = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "logging_steps": 1,
    "seed": material.SEED,
}
OPTIMISER = {
    "optim": "adamw_torch",
    "adam_beta1": material.OPTIMISER["betas"][0],
    "adam_beta2": material.OPTIMISER["betas"][1],
    "adam_epsilon": 1e-8,
    "weight_decay": material.OPTIMISER["weight_decay"],
    "max_grad_norm": material.OPTIMISER["max_norm"],
    "lr_scheduler_type": "constant",
    "warmup_steps": 0,
}


def rows_in_our_order(case: material.Case, folder: Path) -> Dataset:
    rows = [json.loads(line) for line in (folder / f"{case.rows}.jsonl").read_text().splitlines()]
    per_epoch = -(-len(rows) // material.BATCH)
    steps = [
        items_of_step(rows, step, per_epoch, material.BATCH, material.SEED) for step in range(material.STEPS)
    ]
    ordered = [dict(row) for step in steps for row in step]
    if case.trainer == "KTO":
        ordered = [
            {**row, "completion": [{"role": "assistant", "content": row.pop("response")}]} for row in ordered
        ]
    return Dataset.from_list(ordered)


def train(case: material.Case, folder: Path, out: Path) -> dict[str, Any]:
    source = str(folder / "base")
    if case.trainer == "Reward":
        model = AutoModelForSequenceClassification.from_pretrained(source, num_labels=1, dtype=torch.float32)
        torch.nn.init.zeros_(model.score.weight)  # as ours; TRL's own head is random
    else:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    start = {name: weight.clone() for name, weight in model.state_dict().items()}
    trainer_class, config_class = TRAINERS[case.trainer]
    fields = {
        "per_device_train_batch_size": material.BATCH,
        "num_train_epochs": 1,
        "learning_rate": case.learning_rate,
        "train_sampling_strategy": "sequential",
        "max_length": 96,
        **PLAIN,
        **OPTIMISER,
        **case.trl,
    }
    config = config_class(output_dir=str(out), **fields)
    tokenizer = AutoTokenizer.from_pretrained(source)
    trainer = trainer_class(
        model=model, args=config, train_dataset=rows_in_our_order(case, folder), processing_class=tokenizer
    )

    losses: list[float] = []
    whole_step = trainer.training_step

    def training_step(*args: Any, **more: Any) -> torch.Tensor:
        loss = whole_step(*args, **more)
        losses.append(float(loss))
        return loss

    trainer.training_step = training_step
    trainer.train()
    n = config.gradient_accumulation_steps
    logs = [line for line in trainer.state.log_history if "grad_norm" in line]
    end = trainer.model.state_dict()
    assert len(logs) == trainer.state.global_step == material.STEPS, (len(logs), trainer.state.global_step)
    kl = {"kl": [line["kl"] for line in logs]} if case.trainer == "KTO" else {}
    return kl | {
        "loss": [sum(losses[i : i + n]) for i in range(0, len(losses), n)],
        "grad_norm": [line["grad_norm"] for line in logs],
        "learning_rate": [line["learning_rate"] for line in logs],
        "moved": {name: float((end[name] - start[name]).double().norm()) for name in sorted(end)},
    }


def prompt_tokens(tokenizer: PreTrainedTokenizerBase, prompt: list[dict[str, str]]) -> list[int]:
    return list(
        tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]
    )


def logprobs_of_answers(folder: Path) -> list[list[float]]:
    """By transformers alone: of every answer token of the rollout."""
    source = str(folder / "base")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source)
    rollout = material.rollout()
    found = []
    for prompt, answer in zip(rollout.prompts, rollout.answers, strict=True):
        ids = prompt_tokens(tokenizer, prompt)
        with torch.no_grad():
            logits = model(torch.tensor([ids + answer])).logits[0, len(ids) - 1 : -1]
        found.append(logits.log_softmax(-1).gather(-1, torch.tensor(answer)[:, None]).squeeze(-1).tolist())
    return found


def tensors(folder: Path) -> dict[str, list[list[float]]]:
    """Log-probs before the update, of the reference and of the sampler: the policy's own, moved at random, to
    four decimals."""
    source = random.Random(material.SEED + 2)
    now = logprobs_of_answers(folder)

    def moved(by: float) -> list[list[float]]:
        return [[round(value + source.gauss(0, by), 4) for value in row] for row in now]

    return {"old": moved(0.4), "ref": moved(0.6), "sampler": moved(0.5)}


def rl_loss(
    case: material.RLCase, folder: Path, out: Path, recorded: dict[str, list[list[float]]]
) -> dict[str, Any]:
    """TRL's advantages, loss and gradient: its own scoring of the rollout, then its own loss, on recorded
    answers and log-probs."""
    source = str(folder / "base")
    length = 1 if case.one_token else material.MAX_LENGTH
    rollout = material.rollout()
    answers = [answer[:length] for answer in rollout.answers]
    texts = [[{"role": "assistant", "content": ""}] for _ in answers]
    trainer_class, config_class = TRAINERS[case.trainer]
    fields = {
        "per_device_train_batch_size": len(answers),
        "num_generations": material.ANSWERS,
        "max_completion_length": material.MAX_LENGTH,
        "epsilon": material.CLIP_LOW,
        "epsilon_high": material.CLIP_HIGH,
        "beta": case.beta,
        "temperature": 1.0,
        **PLAIN,
        **case.trl,
    }
    rows = [{"prompt": prompt} for prompt in rollout.prompts]
    trainer = trainer_class(
        model=AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32),
        args=config_class(output_dir=str(out), **fields),
        reward_funcs=[lambda **_: rollout.rewards],
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(source),
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    prompts = [prompt_tokens(trainer.processing_class, prompt) for prompt in rollout.prompts]
    sampler = [row[:length] for row in recorded["sampler"]]
    if case.trainer == "GRPO":
        generated: tuple[Any, ...] = (
            prompts,
            answers,
            None,
            texts,
            sampler if case.cap else None,
            {},
            None,
            None,
        )
    else:
        generated = (prompts, answers, texts)
    trainer._generate = lambda _: generated
    if case.cap:
        trainer.use_vllm = True
        trainer.vllm_importance_sampling_correction = True
        trainer.vllm_importance_sampling_mode = "token_truncate"
        trainer.vllm_importance_sampling_clip_min = None
        trainer.vllm_importance_sampling_clip_max = case.cap

    def padded(name: str) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(row[:length]) for row in recorded[name]], batch_first=True
        )

    own = trainer._get_per_token_logps_and_entropies

    def recorded_logprobs(model: torch.nn.Module, *args: Any, **more: Any) -> tuple[torch.Tensor, None, None]:
        if model is not trainer.model:
            return padded("ref"), None, None
        return own(model, *args, **more) if case.on_policy else (padded("old"), None, None)

    trainer._get_per_token_logps_and_entropies = recorded_logprobs
    prepared = trainer._generate_and_score_completions(rows)
    trainer._get_per_token_logps_and_entropies = own
    if case.trainer == "GRPO" and not case.on_policy:
        # without vLLM TRL leaves it out when it makes one step a rollout
        prepared["old_per_token_logps"] = padded("old")
    loss = trainer._compute_loss(trainer.model, prepared)
    loss.backward()
    return {"advantages": prepared["advantages"].tolist(), **gradient(trainer.model, float(loss.detach()))}


def odds_ratio(odds: material.Odds) -> dict[str, Any]:
    """TRL's own method, on an object that has what it reads."""
    reads = SimpleNamespace(beta=odds.lambd, accelerator=SimpleNamespace(device="cpu"))
    chosen, rejected = (torch.tensor(values, requires_grad=True) for values in (odds.chosen, odds.rejected))
    loss = -ORPOTrainer.odds_ratio_loss(reads, chosen, rejected)[0].mean()  # subtracted from the NLL
    gradients = torch.autograd.grad(loss, (chosen, rejected))
    return {"loss": float(loss.detach()), "last": torch.cat(gradients).tolist()}


def main() -> None:
    versions = {
        name: importlib.metadata.version(name) for name in ("trl", "transformers", "accelerate", "torch")
    }
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "material"
        folder.mkdir()
        material.make(folder)
        recorded = tensors(folder)
        goldens = {
            "versions": (
                versions
                | {
                    "python": platform.python_version(),
                    "cpu": torch.backends.cpu.get_cpu_capability(),
                }
            ),
            "seed": material.SEED,
            "digest": material.digest(folder),
            "tensors": recorded,
            "curves": {
                name: train(case, folder, Path(place) / "out") for name, case in material.CASES.items()
            },
            "odds": odds_ratio(material.odds()),
            "losses": {
                name: rl_loss(case, folder, Path(place) / "out", recorded)
                for name, case in material.RL.items()
            },
        }
    GOLDENS.write_text(json.dumps(goldens, separators=(",", ":")).replace('},"', '},\n"') + "\n")
    print(f"wrote {GOLDENS}")


if __name__ == "__main__":
    main()
