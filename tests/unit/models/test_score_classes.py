"""A class with a scalar head for families for which transformers has none: scores, files, and a reward model
trained and loaded again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_core.models.load_model import load_scorer, trained_scorer
from rlhf_core.models.score_classes import add_score_class
from tests.support.families import HYBRID
from tests.unit.models.test_models import SHAPE

EXPERTS = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, n_group=1, topk_group=1)
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Granite": {},
    "GraniteMoeHybrid": {**HYBRID, "mamba_d_head": 16},
    "Glm4Moe": EXPERTS,
    "Glm4MoeLite": {**EXPERTS, **LATENT},
    "NemotronH": {
        "layers_block_type": ["mamba", "attention"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 1,
    },
    "Lfm2": {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3},
    "Cohere2": {},
    "Dbrx": {  # its backbone has another name than `model`
        **{
            "d_model": 32,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 64,
            "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8},
        },
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
    },
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_language_model_of_the_family_becomes_a_reward_model(family: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **FAMILIES[family]})
    policy = AutoModelForCausalLM.from_config(config)
    policy.save_pretrained(tmp_path / "policy")
    scorer = trained_scorer(str(tmp_path / "policy"), 0, "float32", False, None, 0)
    assert not scorer.model.score.weight.any()
    torch.nn.init.normal_(scorer.model.score.weight)
    tokens = torch.tensor([[5, 7, 11, 13]])
    positions = torch.arange(4)[None]
    scores = scorer.eval()(tokens, positions)
    hidden = (
        AutoModel.from_pretrained(tmp_path / "policy")
        .eval()(input_ids=tokens, use_cache=False)
        .last_hidden_state
    )
    torch.testing.assert_close(scores, scorer.model.score(hidden).squeeze(-1))
    scorer.model.save_pretrained(tmp_path / "reward")
    torch.testing.assert_close(load_scorer(str(tmp_path / "reward"), 0).eval()(tokens, positions), scores)
    add_score_class(AutoConfig.from_pretrained(tmp_path / "reward"))
    loaded, info = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "reward", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert loaded.config.architectures == [type(loaded).__name__]
    assert type(loaded).__name__.endswith("ForSequenceClassification")


def test_a_class_of_transformers_stays() -> None:
    config = transformers.LlamaConfig(**SHAPE)
    add_score_class(config)
    assert (
        type(AutoModelForSequenceClassification.from_config(config))
        is transformers.LlamaForSequenceClassification
    )
