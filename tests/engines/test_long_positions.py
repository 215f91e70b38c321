"""Rotary embeddings that are stretched beyond the length of pretraining are the same in vLLM as in training,
at four times that length."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_core.config import EngineConfig
from rlhf_core.data.documents import Document
from rlhf_core.models.load_model import load_policy
from rlhf_core.objectives.collate import collate
from rlhf_core.rollout.vllm.vllm_engine import VllmEngine
from tests.support.families import make_family

pytestmark = pytest.mark.slow
ORIGINAL = 48
LENGTH = 4 * ORIGINAL
RNG = random.Random(0)
DOCUMENTS = [[RNG.randrange(3, 80) for _ in range(n)] for n in (LENGTH - 1, ORIGINAL // 2)]
PLAIN = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
QUERIES = {"llama_4_scaling_beta": 0.0, "original_max_position_embeddings": ORIGINAL}
THETA = {"rope_theta": 10000.0, "original_max_position_embeddings": ORIGINAL, "factor": 4.0}
YARN = {**THETA, "rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0}
LLAMA3 = {**THETA, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
GEMMA = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0},
}
QUARTER = [1.0 + 0.1 * i for i in range(16)]
LONG = dict(
    rope_type="longrope", rope_theta=10000.0, original_max_position_embeddings=ORIGINAL, long_factor=QUARTER
)
# The family, and its positions.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "yarn": ("qwen3", YARN),
    "yarn of latent heads": ("deepseek-v3", {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}),
    "yarn, queries scaled by position": ("ministral3", {**YARN, "llama_4_scaling_beta": 0.1}),
    "by wavelength": ("llama", LLAMA3),
    "linear": ("llama", {**THETA, "rope_type": "linear"}),
    "two bases": ("gemma3", GEMMA),
    "a part of each head": ("glm4", {**PLAIN, "partial_rotary_factor": 0.5}),
    "long factors": ("phi3", {**LONG, "short_factor": [1.0] * 16}),
}


def logprobs(folder: Path) -> Tensor:
    batch = collate([[Document(d, [False] * len(d))] for d in DOCUMENTS], pad_token_id=0)
    with torch.no_grad():
        return load_policy(str(folder)).eval()(batch.tokens, batch.positions, batch.documents).logprobs


@pytest.mark.parametrize("variant", VARIANTS)
def test_positions_are_those_of_training(variant: str, material: Path, tmp_path: Path) -> None:
    family, rope = VARIANTS[variant]
    larger = {"rope_parameters": rope, "max_position_embeddings": LENGTH}
    if family == "phi3":
        larger["original_max_position_embeddings"] = ORIGINAL
    base = make_family(family, material / "base", tmp_path / "base", larger=larger)
    plain = (
        {kind: PLAIN for kind in rope}
        if family == "gemma3"
        else PLAIN | QUERIES
        if family == "ministral3"
        else PLAIN
    )
    other = make_family(
        family, material / "base", tmp_path / "other", larger=larger | {"rope_parameters": plain}
    )
    ours = logprobs(base)
    assert (ours - logprobs(other)).abs().mean() > 0.01, "positions change nothing here"
    sampler = VllmEngine(str(base), seed=0, max_model_len=LENGTH, config=EngineConfig(kv_cache_gib=0.5))
    try:
        for theirs, row, document in zip(sampler.prompt_logprobs(DOCUMENTS), ours, DOCUMENTS, strict=True):
            assert row[1 : len(document)].tolist() == pytest.approx(theirs[1:], abs=1e-3)
    finally:
        sampler.close()
