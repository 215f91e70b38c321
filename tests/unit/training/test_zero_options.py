"""DeepSpeed's configuration: the recipe's options override ours, and a sentence names those that the
installed release lacks."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf_core.config import SFT, Ranks
from rlhf_core.training.engine import AdamW
from rlhf_core.training.zero.zero_engine import library, unknown
from rlhf_core.training.zero.zero_options import ZeroOptions, engine_config, options_of, require_known
from tests.support.text_rows import rows_of_text

ADAMW = AdamW((0.9, 0.95), 0.0, 1.0)
FETCHING = {"stage3_prefetch_bucket_size": 7}


@pytest.mark.parametrize(
    ("options", "told"),
    rows_of_text(
        """
    {zero_optimization: {reduce_bucket_size: 5, stage3_max_live_parameters: 5}} | ''
    {zero_optimization: {max_live_parameters: 5}, comms_logger: {enabled: true}, aio: {block_size: 1}} | ''
    {zero_optimization: {reduce_bucket_sz: 5}} | has no option 'zero_optimization.reduce_bucket_sz'; did you mean zero_optimization.reduce_bucket_size?
    {zero_optimisation: {}} | has no option 'zero_optimisation'; did you mean zero_optimization?
    {data_types: {grad_accum_dtyp: fp32}} | has no option 'data_types.grad_accum_dtyp'
    {zero_optimization: {reduce_bucket_size: a}} | 'refuses zero_optimization.reduce_bucket_size: Input should be a valid integer'
    {communication_data_type: fp31} | 'refuses it: Invalid communication_data_type'
    {nebula: {}} | 'refuses it: Nebula checkpointing has been removed'
    """,
        yaml_columns={1},
    ),
)
def test_the_installed_release_says_what_it_knows(options: dict[str, Any], told: str) -> None:
    found = "".join(unknown(options))
    assert told in found and bool(found) == bool(told)
    if told:
        with pytest.raises(ValueError, match=r"^deepspeed: DeepSpeed 0\.19"):
            require_known(library(), options)


def test_options_of_the_recipe_come_before_ours_under_both_names() -> None:
    more = {
        "zero_optimization": {"prefetch_bucket_size": 3, "overlap_comm": False},
        "wall_clock_breakdown": True,
    }
    found = engine_config(ADAMW, 3, "bfloat16", 2, ZeroOptions(more=more), True, FETCHING)
    assert found["zero_optimization"] == dict(
        stage=3, overlap_comm=False, contiguous_gradients=True, prefetch_bucket_size=3
    )
    assert found["wall_clock_breakdown"]
    assert found["bf16"] == {"enabled": True}
    assert found["gradient_clipping"] == 1.0


def test_offloads_and_copies_are_options_of_stage_3() -> None:
    all_on = ZeroOptions(adam_offload=True, param_offload=True, hpz_ranks=8)
    zero = engine_config(ADAMW, 3, "bfloat16", 1, all_on, True, {})["zero_optimization"]
    host = {"device": "cpu", "pin_memory": True}
    assert zero["offload_optimizer"] == host
    assert zero["offload_param"] == host
    assert zero["zero_hpz_partition_size"] == 8
    lower = engine_config(ADAMW, 2, "bfloat16", 1, all_on, True, {})["zero_optimization"]
    assert lower["offload_optimizer"] == host
    assert not {"offload_param", "zero_hpz_partition_size"} & lower.keys()


@pytest.mark.parametrize(("nodes", "expected"), [(2, 8), (1, 1)])
def test_a_copy_is_shared_by_the_ranks_of_a_node(nodes: int, expected: int) -> None:
    ranks = Ranks(num_nodes=nodes, num_ranks_per_node=8, gpus=1)
    config = SFT.model_validate({"data": {"sources": "rows.jsonl"}, "ranks": ranks, "adam_offload": True})
    assert options_of(config.model_copy(update={"zero_hpz": True}), "model", ranks) == ZeroOptions(
        True, False, expected, {}, expected == 1
    )


def test_all_that_is_unknown_or_wrong_is_said_at_once() -> None:
    found = unknown({"foo": 1, "bar": 2})
    assert len(found) == 2 and "'foo'" in found[0] and "'bar'" in found[1]
    found = unknown({"zero_optimization": {"reduce_bucket_size": "a", "allgather_bucket_size": "b"}})
    assert [line.split(": ")[0] for line in found] == [
        f"DeepSpeed {library().__version__} refuses zero_optimization.{name}"
        for name in ("reduce_bucket_size", "allgather_bucket_size")
    ]


@pytest.mark.parametrize("options", [{"aio": 3}, {"flops_profiler": [1]}])
def test_values_that_deepspeed_cannot_read_are_refused(options: dict[str, Any]) -> None:
    (found,) = unknown(options)
    assert "refuses" in found


def test_keys_that_are_no_text_are_refused_at_any_depth() -> None:
    with pytest.raises(ValueError, match=r"deepspeed\.zero_optimization: the key True is no .* it in quotes"):
        SFT.model_validate(
            {"data": {"sources": "rows.jsonl"}, "deepspeed": {"zero_optimization": {True: 2, "a": 3}}}
        )
