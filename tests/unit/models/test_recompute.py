"""Every training stage recomputes the configured layers and disables dropout."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPTBigCodeConfig,
    GPTBigCodeForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from rlhf_core.config import DPO, KTO, SFT, Data, RewardModel, Trainable
from rlhf_core.data.documents import Document
from rlhf_core.models.kernels.feed_forward import split_feed_forward
from rlhf_core.models.load_model import load_policy, trained_policy, trained_scorer, without_dropout
from rlhf_core.objectives.collate import collate
from rlhf_core.training.engine import Engine
from rlhf_core.training.ranks import make_engine

DATA = Data(sources="rows.jsonl")
LAYERS = 4


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    shape = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": LAYERS,
    }
    Qwen2ForCausalLM(Qwen2Config(vocab_size=97, attention_dropout=0.5, **shape)).save_pretrained(tmp_path)
    return str(tmp_path)


def engine_of(checkpoint: str, config: Trainable) -> Engine:
    if isinstance(config, RewardModel):
        return make_engine(trained_scorer(checkpoint, 0, "float32", False, None, 0), config)
    return make_engine(trained_policy(checkpoint, "float32", False, None, 0), config)


def forward(engine: Engine) -> Tensor:
    batch = collate([[Document([5, 9, 20, 33, 40, 51, 7], [False] + [True] * 6)]], pad_token_id=0)
    out = engine(
        batch.tokens,
        batch.positions,
        *([batch.documents] if engine.module.model.get_output_embeddings() is not None else []),
    )
    return out if isinstance(out, Tensor) else out.logprobs


def attended(model: PreTrainedModel) -> Counter[int]:
    """Counts the runs of each layer's attention."""
    counts: Counter[int] = Counter()
    for i, layer in enumerate(model.base_model.layers):
        layer.self_attn.register_forward_hook(lambda *_, i=i: counts.update([i]))
    return counts


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("kind", [SFT, RewardModel, DPO, KTO])
def test_the_configured_layers_are_recomputed(kind: type[Trainable], share: float, checkpoint: str) -> None:
    engine = engine_of(checkpoint, kind(data=DATA, gradient_checkpointing=share))
    counts = attended(engine.module.model)
    engine.backward(forward(engine).sum(), last=True)
    assert [counts[i] for i in range(LAYERS)] == [2 if i < share * LAYERS else 1 for i in range(LAYERS)]


def test_training_has_no_dropout_and_the_config_keeps_its_dropout(checkpoint: str) -> None:
    engine = engine_of(checkpoint, SFT(data=DATA))
    batch = collate([[Document([5, 9, 20, 33, 40, 51, 7], [True] * 7)]], pad_token_id=0)
    expected = load_policy(checkpoint)(batch.tokens, batch.positions, batch.documents).logprobs
    assert engine.module.model.base_model.layers[0].training
    torch.testing.assert_close(forward(engine), expected)
    assert engine.module.model.config.attention_dropout == 0.5


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("kind", [SFT, RewardModel])
def test_feed_forward_blocks_compute_a_part_of_the_tokens_at_a_time(
    kind: type[Trainable], share: float, checkpoint: str
) -> None:
    found = []
    rows = list[int]()
    for tokens in (None, 3):
        engine = engine_of(checkpoint, kind(data=DATA, gradient_checkpointing=share, mlp_tokens=tokens))
        if kind is RewardModel:
            torch.nn.init.constant_(engine.module.model.score.weight, 0.02)
        rows.clear()
        for layer in engine.module.model.base_model.layers:
            layer.mlp.down_proj.register_forward_hook(
                lambda _module, inputs, _output: rows.append(inputs[0].shape[-2])
            )
        value = forward(engine).square().sum()
        value.backward()
        found.append([value.detach(), *(p.grad for p in engine.module.parameters())])
        with torch.no_grad():
            assert torch.equal(forward(engine).square().sum(), value) or tokens
        assert set(rows) == ({3, 2} if tokens else {8}), "eight tokens, the last of them a pad"
    for whole, parts in zip(*found, strict=True):
        torch.testing.assert_close(parts, whole)


def test_a_model_without_such_blocks_is_refused() -> None:
    shape = dict(
        hidden_size=32, ffn_dim=48, num_attention_heads=4, num_hidden_layers=1, word_embed_proj_dim=32
    )
    with pytest.raises(
        ValueError,
        match=(
            "OPTForCausalLM has no feed-forward block that could be computed in parts: leave mlp_tokens out"
        ),
    ):
        split_feed_forward(OPTForCausalLM(OPTConfig(vocab_size=97, **shape)), 3)
    # its blocks take the residual too
    with pytest.raises(ValueError, match="BloomForCausalLM has no feed-forward block"):
        split_feed_forward(
            BloomForCausalLM(BloomConfig(vocab_size=97, hidden_size=32, n_layer=1, n_head=4)), 3
        )


def test_noise_of_families_is_off() -> None:
    shape = {"vocab_size": 97, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64}
    model = GPTBigCodeForCausalLM(
        GPTBigCodeConfig(**shape, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    ).train()
    shape = dict(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
    )
    experts = MixtralForCausalLM(
        MixtralConfig(**shape, num_key_value_heads=4, router_jitter_noise=0.5)
    ).train()
    drawn = PhimoeForCausalLM(PhimoeConfig(**shape, num_key_value_heads=4)).train()
    tokens = torch.arange(3, 23)[None]
    for each in (model, experts, drawn):
        assert not torch.equal(each(tokens).logits, each(tokens).logits)
        without_dropout(each).train()
        assert torch.equal(each(tokens).logits, each(tokens).logits)
    drawn(tokens).logits.sum().backward()
    assert all(
        part.weight.grad.abs().sum() > 0
        for part in drawn.modules()
        if type(part).__name__ == "PhimoeTopKRouter"
    )
