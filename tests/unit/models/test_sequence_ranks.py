"""Ranks that compute passes together: the losses and gradients of one rank; models that cannot be split are
refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from rlhf_core.models.kernels.attention import PLAIN, can_share, split_attention
from rlhf_core.models.kernels.choose import attend_each
from rlhf_core.models.kernels.sequence_ranks import SequenceRanks
from rlhf_core.objectives.masked import next_token_pairs
from tests.support.gloo_ranks import on_gloo_ranks
from tests.unit.models.test_attention import plain_varlen
from tests.unit.models.test_models import FAMILIES, SHAPE

CPU = torch.device("cpu")


@pytest.mark.slow
def test_two_three_and_four_ranks_compute_what_one_does(tmp_path: Path) -> None:
    """Losses and gradients of SFT, reward model, DPO, KTO, actor and critic, packed, masked, with shared
    prompts."""
    program = (
        "import os, sys\nfrom tests.support.sequence_ranks import main\nmain(int(os.environ['RANK']),"
        " sys.argv[1])"
    )
    assert all("the same" in text for text in on_gloo_ranks(4, program, tmp_path / "store"))


def test_the_parts_of_a_pass() -> None:
    """Of ten tokens in three documents, on four ranks: two of them hold pads alone at their end."""
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1, 2]])
    ranks = [SequenceRanks(4, rank) for rank in range(4)]
    assert [part.own(torch.arange(1, 11)).tolist() for part in ranks] == [
        [1, 2, 3],
        [4, 5, 6],
        [7, 8, 9],
        [10, 0, 0],
    ]
    assert [part.own(torch.ones(10, 2)).sum().item() for part in ranks] == [6, 6, 6, 2]
    pairs = next_token_pairs(positions)
    owned = [part.own_pairs(pairs, 10) for part in ranks]
    whole = torch.cat([own + torch.tensor([[3 * rank], [0]]) for rank, own in enumerate(owned)], 1)
    assert torch.equal(whole, pairs), "each pair once, also where its target is in the next part"
    assert [own[0].tolist() for own in owned] == [[0, 1, 2], [1, 2], [1, 2], []]


def test_keys_are_repeated_where_there_are_fewer_than_ranks() -> None:
    def heads(ranks: int, queries: int, keys: int) -> list[int] | None:
        found = SequenceRanks(ranks)._heads(queries, keys, CPU)
        return None if found is None else found.tolist()

    assert heads(2, 8, 4) is None
    assert heads(4, 8, 2) == [0, 0, 1, 1], "one key head a rank, of both of its query heads"
    assert heads(4, 12, 3) == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2], "that of each query head"


@pytest.mark.parametrize("window", [-1, 3])
def test_the_plain_kernel_is_attention_inside_documents(window: int) -> None:
    torch.manual_seed(0)
    q = torch.randn(9, 4, 8)
    k = torch.randn(14, 2, 8)
    v = torch.randn(14, 2, 8)
    edges = torch.tensor([0, 4, 5, 9], dtype=torch.int32), torch.tensor([0, 4, 8, 14], dtype=torch.int32)
    found = attend_each(q, k, v, *edges, 4, 6, scale=0.3, window=window)
    torch.testing.assert_close(
        found, plain_varlen(q, k, v, *edges, 4, 6, scale=0.3, window_size=(window, 0), enable_gqa=True)
    )


def rope(kind: str) -> LlamaForCausalLM:
    scaling = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 32}
    return LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=scaling))


@pytest.mark.parametrize(
    ("model", "ranks", "told"),
    [
        (
            FAMILIES["llama"],
            3,
            (
                "LlamaForCausalLM has 4 attention heads, which 3 ranks cannot share equally: set .* to 1 or"
                " to a divisor"
            ),
        ),
        (
            lambda: Lfm2ForCausalLM(Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"])),
            2,
            (
                "Lfm2ForCausalLM has layers that carry state along a row, which cannot be split over ranks:"
                " set sequence_parallel_size to 1"
            ),
        ),
        (
            lambda: rope("dynamic"),
            2,
            "LlamaForCausalLM rotates by angles that depend on the longest position of a pass",
        ),
        (
            lambda: Gemma2ForCausalLM(Gemma2Config(**SHAPE, head_dim=8, attn_implementation="eager")),
            2,
            "Gemma2ForCausalLM has attention with more than documents, causality and a window",
        ),
    ],
)
def test_models_that_cannot_be_split(model: Callable[[], Any], ranks: int, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        split_attention(model(), ranks)


def test_the_attention_of_a_model_that_can_takes_bounds_and_shared_prompts() -> None:
    model = FAMILIES["llama"]()
    assert not can_share(model, CPU)
    split_attention(model, 4)
    assert model.config._attn_implementation == PLAIN and can_share(model, CPU)
