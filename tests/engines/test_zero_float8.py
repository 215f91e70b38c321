"""Products in FP8 under ZeRO-3 on two ranks, which gathers weights for each pass, against one rank that has
them all."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from rlhf_core.config import Data
from tests.engines.test_zero import TWO, train

pytestmark = pytest.mark.slow
SHAPE = {
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
}


def test_two_zero3_ranks_multiply_in_fp8_as_one_does(material: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(material / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    ends = dict(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None)
    Qwen2ForCausalLM(
        Qwen2Config(vocab_size=len(tokenizer), dtype="bfloat16", **SHAPE, **ends)
    ).save_pretrained(tmp_path / "base")
    # few and short rows: a CPU without bfloat16 instructions takes minutes for the products of layers that are
    # large enough for FP8
    options = {
        "dtype": "bfloat16",
        "learning_rate": 1e-4,
        "gradient_checkpointing": True,
        "train_batch_size": 4,
        "max_len": 32,
        "data": Data(sources=str(material / "sft.jsonl"), max_samples=16),
        "eval_data": None,
    }
    exact, one = (
        train("sft", material, tmp_path / f"{on}", tmp_path / "base", float8=on, **options)
        for on in (False, True)
    )
    try:
        two = train("sft", material, tmp_path / "two", tmp_path / "base", float8=True, **{**TWO, **options})
    finally:
        ray.shutdown()
    assert len(exact) == len(one) == len(two) == 4
    apart, rounding = (
        sum(abs(a["loss"] - b["loss"]) for a, b in zip(one, other, strict=True)) for other in (two, exact)
    )
    print(f"two ranks differ by {apart:.2g} over the steps, FP8 from bfloat16 by {rounding:.2g}")
    assert apart < rounding / 2, "ranks that multiply in bfloat16 would differ by as much"
    for ours, whole, unrounded in zip(two, one, exact, strict=True):
        assert ours["loss"] == pytest.approx(whole["loss"], rel=5e-3)
        assert ours["grad_norm"] == pytest.approx(whole["grad_norm"], rel=0.02)
        assert whole["loss"] != unrounded["loss"]
        assert whole["loss"] == pytest.approx(unrounded["loss"], rel=0.02)
