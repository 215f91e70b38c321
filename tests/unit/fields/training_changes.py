"""Another value of each field of SFT, reward model, DPO and KTO that decides the result; every probe runs the
stage."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any

from safetensors.torch import load_file

from rlhf_core.config import KINDS
from rlhf_core.config.training.optimiser_fields import Freeze
from rlhf_core.models.load_model import load_policy
from rlhf_core.models.weights.frozen_weights import freeze_weights
from rlhf_core.runs.run_dir import RunDir
from rlhf_core.training.engine import AdamW
from rlhf_core.training.zero.zero_options import engine_config, options_of
from tests.support.stage_request import stage_request
from tests.unit.fields.change import Change, World

SIZES: dict[str, Any] = {
    "train_batch_size": 4,
    "micro_train_batch_size": 4,
    "max_len": 64,
    "learning_rate": 1e-2,
}
NEEDED: dict[str, dict[str, Any]] = {
    "sft": {"model": "base", "data": {"sources": "rows.jsonl"}},
    "reward_model": {
        "model": "base",
        "data": {"sources": "pairs.jsonl"},
        "eval_data": {"sources": "held.jsonl"},
    },
    "dpo": {"policy": "base", "data": {"sources": "pairs.jsonl"}},
    "kto": {"policy": "base", "data": {"sources": "pairs.jsonl"}},
}
SCORES = {"chosen_score": 1, "rejected_score": 0}
ROWS: dict[str, list[dict[str, Any]]] = {
    "rows": [{"prompt": f"What is {i}?", "response": f"It is {i} {'x' * i}", "reward": i} for i in range(10)],
    "more": [{"prompt": f"What is {i}?", "response": f"Less {i}", "reward": -i} for i in range(10)],
    "pairs": [{"prompt": f"What is {i}?", "chosen": f"It is {i}", "rejected": "Nothing" + "." * i, "margin": i} for i in range(10)],
    "held": [
        {"prompt": f"Who is {i}?", "chosen": f"It is {i}", "rejected": "None", "margin": 1, "subset": "s", "part": f"{i % 2}"}
        for i in range(4)
    ],
    "scored": [{"prompt": [{"role": "user", "content": f"Is {i}?"}], "response": f"Is {i}", "reward": i} for i in range(10)],
    "labels": [{"prompt": [{"role": "user", "content": f"Is {i}?"}], "response": f"Is {i}", "label": i > 4, "reward": i} for i in range(9)],
    "sampled": [
        {"prompt": [{"role": "user", "content": f"Is {i}?"}], "chosen": "Yes", "rejected": f"No {i}", **SCORES}
        for i in range(9)
    ],
}  # fmt: skip


def prepared(world: World, kind: str, fields: Mapping[str, Any]) -> Any:
    for name, rows in ROWS.items():
        world.rows(name, rows)
    return KINDS[kind].config.model_validate({**SIZES, **NEEDED[kind], **fields})


@cache
def trained(kind: str) -> Any:
    """Returns the probe that runs a stage: its metrics, and the weights of its checkpoint."""

    def probe(world: World, fields: Mapping[str, Any]) -> Any:
        config = prepared(world, kind, fields)
        shutil.rmtree(world.folder / "run", ignore_errors=True)
        run = RunDir(world.folder / "run")
        run.path.mkdir()
        inputs = {"base": world.place("sft")} | {name: world.place(name) for name in ("other", "moe")}
        inputs |= {name: str(world.models / f"{name}.jsonl") for name in ("scored", "labels", "sampled")}
        outcome = import_module(KINDS[kind].module).run(stage_request(config, inputs, name=kind, seed=3), run)
        weights = (
            load_file(run.path / "checkpoint" / "model.safetensors")
            if (run.path / "checkpoint" / "model.safetensors").exists()
            else {}
        )
        lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
        told = [
            {name: value for name, value in line.items() if "second" not in name and name != "time"}
            for line in (*lines, outcome.metrics)
        ]
        average = run.path / "exports" / "ema" / "model.safetensors"
        if average.exists():
            weights |= {f"ema.{name}": weight for name, weight in load_file(average).items()}
        return told, {
            name: [float(weight.double().sum()), str(weight.dtype)] for name, weight in weights.items()
        }

    probe.__name__ = f"trained_{kind}"
    return probe


@cache
def sharded(kind: str) -> Any:
    """Returns the probe of a stage's configuration of DeepSpeed."""

    def probe(world: World, fields: Mapping[str, Any]) -> Any:
        config = prepared(world, kind, fields)
        adamw = AdamW(config.betas, config.weight_decay, config.max_norm)
        return engine_config(adamw, 3, config.dtype, 4, options_of(config, "model", config.ranks), True, {})

    probe.__name__ = f"sharded_{kind}"
    return probe


def optimised(kind: str) -> list[Change]:
    """Fields that all training stages share."""
    run = trained(kind)
    return [
        Change("data", {"sources": "held.jsonl"} if kind != "sft" else {"sources": "more.jsonl"}, run),
        Change("eval_data", {"sources": "pairs.jsonl" if kind != "sft" else "more.jsonl"}, run),
        Change("train_batch_size", 8, run),
        Change("max_epochs", 2, run),
        Change("betas", (0.5, 0.5), run),
        Change("weight_decay", 0.5, run),
        Change("warmup_ratio", 1.0, run),
        Change("min_lr_ratio", 0.9, run),
        Change("schedule", "constant", run),
        *([Change("ema", 0.5, run)] if kind != "reward_model" else []),
        Change("decay", "hidden", run, {"weight_decay": 0.5}),
        Change("optimizer", "muon", run),
        Change("freeze", {"layers": 1}, run),
        Change("image_encoder", "projector", encoded(kind)),
        Change("image_encoder_learning_rate", 1e-4, encoded(kind), {"image_encoder": "trained"}),
        Change("warmup_steps", 3, run),
        Change("decay_ratio", 0.9, run, {"schedule": "wsd"}),
        Change("max_norm", 0.01, run),
        Change("dtype", "bfloat16", run),
        Change("float8", True, rounded(kind), {"dtype": "bfloat16"}),
        Change("lora", {"rank": 2}, run),
        Change("max_len", 16, run),
        Change("learning_rate", 1e-3, run),
        Change("deepspeed", {"zero_optimization": {"zero_quantized_weights": True}}, sharded(kind)),
    ]


def of_policies(kind: str, field: str) -> list[Change]:
    """Fields of stages that train a policy, which `field` names."""
    return [
        Change("router_aux_coef", 0.5, trained(kind), {field: "moe"}),
        Change("fp32_head", True, trained(kind), {"dtype": "bfloat16"}),
    ]


@cache
def rounded(kind: str) -> Any:
    """Returns the probe that says whether a stage asks for FP8; layers of tests are too small for it."""

    def probe(world: World, fields: Mapping[str, Any]) -> Any:
        asked: list[bool] = []
        world.patch.setattr("rlhf_core.training.ranks.use_float8", lambda *_, **__: asked.append(True))
        return trained(kind)(world, fields), asked

    probe.__name__ = f"rounded_{kind}"
    return probe


@cache
def encoded(kind: str) -> Any:
    """Returns the probe that says what a stage trains of an image encoder; models of other probes have
    none."""

    def probe(world: World, fields: Mapping[str, Any]) -> Any:
        asked: list[str] = []
        world.patch.setattr(
            f"rlhf_core.stages.{kind}.require_images", lambda trained, _: asked.append(trained)
        )
        rates: list[float] = []
        world.patch.setattr(
            "rlhf_core.training.ranks.AdamW", lambda *fields: rates.append(fields[-1]) or AdamW(*fields)
        )
        return trained(kind)(world, fields), asked, rates

    probe.__name__ = f"encoded_{kind}"
    return probe


def frozen(world: World, fields: Mapping[str, Any]) -> Any:
    """Which weights of a policy stay trained."""
    policy = load_policy(world.place("sft"))
    freeze_weights(policy.model, Freeze.model_validate(fields))
    return [name for name, weight in policy.named_parameters() if weight.requires_grad]


NORMS = {"names": ("*norm*",)}
PAIRS = {"data": None, "pairs": "sampled"}
LABELS = {"data": None, "answers": "labels"}
SCORED = {"data": None, "answers": "scored"}
DPO = trained("dpo")
TRAINING = {
    "Freeze": [
        Change("embeddings", True, frozen, NORMS),
        Change("layers", 1, frozen, NORMS),
        Change("names", ("*.q_proj.*",), frozen, {"embeddings": True}),
    ],
    "sft": [
        *optimised("sft"),
        Change("model", "other", trained("sft")),
        Change("answers", "scored", trained("sft"), {}, {"data": None}),
        Change("template", "Q: {}", trained("sft"), SCORED),
        Change("template_args", {"note": "ab"}, trained("sft"), SCORED),
        Change("condition", "reward", trained("sft")),
        *of_policies("sft", "model"),
    ],
    "reward_model": [
        *optimised("reward_model"),
        Change("model", "other", trained("reward_model")),
        Change("centering", 0.5, trained("reward_model")),
    ],
    "dpo": [
        *optimised("dpo"),
        Change("policy", "other", DPO),
        Change("reference", "other", DPO),
        Change("pairs", "sampled", DPO, {}, {"data": None}),
        Change("template", "Q: {}", DPO, PAIRS),
        Change("template_args", {"note": "ab"}, DPO, PAIRS),
        Change("beta", 0.5, DPO),
        Change("beta", 0.5, DPO, {"loss": "simpo"}),
        Change("loss", "ipo", DPO),
        Change("loss", "ipo_sum", DPO),
        Change("loss", "orpo", DPO),
        Change("label_smoothing", 0.2, DPO),
        Change("nll_coef", 0.5, DPO),
        Change("gamma", 0.2, DPO, {"loss": "simpo"}),
        Change("lambd", 0.5, DPO, {"loss": "orpo"}),
        *of_policies("dpo", "policy"),
    ],
    "kto": [
        *optimised("kto"),
        Change("policy", "other", trained("kto")),
        Change("reference", "other", trained("kto")),
        Change("answers", "labels", trained("kto"), {}, {"data": None}),
        Change("template", "Q: {}", trained("kto"), LABELS),
        Change("template_args", {"note": "ab"}, trained("kto"), LABELS),
        Change("beta", 0.5, trained("kto")),
        Change("w_desirable", 2.0, trained("kto")),
        Change("w_undesirable", 2.0, trained("kto")),
        *of_policies("kto", "policy"),
    ],
}
