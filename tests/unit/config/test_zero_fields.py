"""Options of DeepSpeed in a recipe: what other fields set is refused, and what only decides speed makes
nothing anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rlhf_core.config import PPO, SFT, Ranks
from rlhf_core.config.training.zero_fields import deciding_options
from rlhf_core.recipe.digest import deciding
from rlhf_core.system.files import Digests
from tests.support.text_rows import rows_of_text

DATA = {"sources": "rows.jsonl"}
TWO = Ranks(num_ranks_per_node=2, gpus=1)


def sft(**fields: Any) -> SFT:
    return SFT.model_validate({"data": DATA, "ranks": TWO, **fields})


def ppo(**fields: Any) -> PPO:
    return PPO.model_validate(
        {
            "prompts": DATA,
            **{f"{role}_ranks": TWO for role in ("actor", "critic", "reference", "reward")},
            **fields,
        }
    )


@pytest.mark.parametrize(
    ("fields", "told"),
    rows_of_text("""
    {deepspeed: {optimizer: {}}} | deepspeed.optimizer: alignflow sets AdamW and its schedule, so leave it out
    {deepspeed: {zero_optimization: {stage: 3}}} | deepspeed.zero_optimization.stage: zero_stage of the stage sets it
    {deepspeed: {zero_optimization: 3}} | deepspeed.zero_optimization=3 must be a mapping of DeepSpeed options
    {deepspeed: {dump_state: true}, zero_stage: 0, ranks: {gpus: 1}} | zero_stage=0 uses plain torch
    {adam_offload: true, zero_stage: 0, ranks: {gpus: 1}} | zero_stage=0 keeps Adam on the GPU
    {adam_offload: true, ranks: {}} | adam_offload frees a GPU's memory, but ranks have no GPU:
    {param_offload: true, zero_stage: 2} | param_offload applies only to sharded weights: set zero_stage to 3 or auto
    {param_offload: true, lora: {quantize: nf4}} | lora.quantize=nf4 keeps whole weights on the GPU: leave out param_offload
    {zero_hpz: true, lora: {quantize: nf4}, ranks: {num_nodes: 2}} | lora.quantize=nf4 keeps whole weights on the GPU: leave out zero_hpz
    {zero_hpz: true} | zero_hpz keeps a copy of the weights on each node, but only one node is set for ranks: leave it out
    {zero_hpz: true, zero_stage: 1, ranks: {num_nodes: 2}} | zero_hpz applies only to sharded weights:
    """),
)
def test_what_cannot_be_is_refused_in_a_sentence(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        sft(**fields)


def test_ppo_names_the_roles() -> None:
    config = ppo(param_offload=True, adam_offload=["critic"])
    assert config.offloaded("param") == ("actor", "critic") and config.offloaded("adam") == ("critic",)
    one = dict.fromkeys(("actor_ranks", "critic_ranks", "reference_ranks", "reward_ranks"), Ranks(gpus=1))
    assert ppo(**one).alone and not ppo().alone and not ppo(**one, adam_offload=["critic"]).alone
    with pytest.raises(
        ValidationError, match=r"param_offload frees a GPU's memory, .* no GPU: actor: set gpus"
    ):
        ppo(param_offload=["actor"], actor_ranks={})


def test_only_options_that_decide_a_result_are_in_the_digest(tmp_path: Path) -> None:
    quantized = {"zero_optimization": {"zero_quantized_weights": True}}
    faster = {
        "zero_optimization": {"stage3_prefetch_bucket_size": 1, "overlap_comm": False},
        "wall_clock_breakdown": True,
    }
    assert deciding_options(faster) == {}
    assert (
        deciding_options({"zero_optimization": quantized["zero_optimization"] | faster["zero_optimization"]})
        == quantized
    )
    contents = [
        deciding(config, Digests(tmp_path))
        for config in (sft(), sft(deepspeed=faster), sft(param_offload=True))
    ]
    # the digest of recipes without it stays
    assert contents[0] == contents[1] == contents[2] and "deepspeed" not in contents[0]
    assert deciding(sft(deepspeed=quantized), Digests(tmp_path))["deepspeed"] == quantized


def test_engine_options_that_only_decide_speed_are_in_no_digest(tmp_path: Path) -> None:
    def content(**engine: Any) -> Any:
        return deciding(ppo(engine={"gpus": 1, "options": engine}), Digests(tmp_path))["engine"]

    assert content(max_num_seqs=64, enforce_eager=True) == content()
    assert content() == {"kind": "vllm", "seed_answers": False, "options": {}}
    assert content(max_num_seqs=64, quantization="fp8")["options"] == {"quantization": "fp8"}
