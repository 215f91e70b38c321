"""Another value of each deciding field of loops, and the stages that then take their place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_core.config import Recipe
from rlhf_core.recipe.expand import expand
from tests.unit.fields.change import Change, World


def expanded(kind: str, needed: Mapping[str, Any]) -> Any:
    """Returns the probe of a loop: the stages that take its place."""

    def probe(world: World, fields: Mapping[str, Any]) -> Any:
        stage = {"stage": kind, **needed, **fields}
        recipe = Recipe.model_validate({"name": "r", "base_model": "base", "stages": {"loop": stage}})
        return expand(recipe).stages

    probe.__name__ = f"expanded_{kind}"
    return probe


SAMPLED_LOOP = {"policy": "base", "prompts": {"sources": "p.jsonl"}, "reward": "org/r", "rounds": 1}
LOOPS: dict[str, dict[str, Any]] = {
    "iterative_dpo": SAMPLED_LOOP,
    "iterative": {**SAMPLED_LOOP, "post_processor": "dpo"},
    "iterative_feedback": {
        "policy": "base",
        "method": "dpo",
        "feedback": {"sources": "f.inbox"},
        "rounds": 1,
    },
}
TRAINED: dict[str, Any] = {
    "beta": 0.5, "betas": (0.5, 0.5), "deepspeed": {"zero_optimization": {"zero_quantized_weights": True}}, "dtype": "bfloat16",
    "label_smoothing": 0.2, "learning_rate": 1e-3, "lora": {"rank": 2}, "loss": "ipo", "max_epochs": 3, "max_len": 99, "max_norm": 0.5,
    "min_lr_ratio": 0.5, "nll_coef": 0.5, "policy": "org/p", "router_aux_coef": 0.5, "train_batch_size": 64, "warmup_ratio": 0.5,
    "skip_nonfinite_steps": 2, "weight_decay": 0.5, "rounds": 2, "schedule": "linear", "warmup_steps": 3, "decay": "hidden",
    "freeze": {"layers": 1}, "optimizer": "muon", "image_encoder": "trained",
}  # fmt: skip
ROUNDS: dict[str, Any] = {
    "generate_max_len": 99, "n_samples_per_prompt": 8, "prompt_max_len": 99, "prompts": {"sources": "q.jsonl"}, "prompts_per_round": 9,
    "reward": "org/s", "stop": ("x",), "temperature": 0.5, "top_k": 5, "top_p": 0.5, "engine": {"options": {"max_num_seqs": 3}},
}  # fmt: skip


def rounds(kind: str) -> list[Change]:
    """A change of each field of a loop."""
    probe = expanded(kind, LOOPS[kind])
    found = [Change(name, value, probe) for name, value in TRAINED.items()]
    found.append(Change("decay_ratio", 0.5, probe, {"schedule": "wsd"}))
    found.append(Change("image_encoder_learning_rate", 1e-4, probe, {"image_encoder": "trained"}))
    found.append(Change("float8", True, probe, {"dtype": "bfloat16"}))
    found.append(Change("fp32_head", True, probe, {"dtype": "bfloat16"}))
    found += [Change("gamma", 0.5, probe, {"loss": "simpo"}), Change("lambd", 0.5, probe, {"loss": "orpo"})]
    if kind != "iterative_feedback":
        found += [Change(name, value, probe) for name, value in ROUNDS.items()]
    if kind != "iterative_dpo":
        other = {"method": "kto"} if kind == "iterative_feedback" else {"post_processor": "kto"}
        found += [Change(name, 2.0, probe, other) for name in ("w_desirable", "w_undesirable")]
        found.append(Change(*next(iter(other.items())), probe))
    if kind == "iterative":
        found.append(Change("min_reward", 0.5, probe, {"post_processor": "rejection_sampling"}))
    return (
        [*found, Change("feedback", {"sources": "g.inbox"}, probe)] if kind == "iterative_feedback" else found
    )


ROUNDS_OF_LOOPS = {kind: rounds(kind) for kind in LOOPS}
