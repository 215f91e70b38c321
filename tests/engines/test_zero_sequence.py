"""Sequence parallelism under DeepSpeed on two Ray workers against plain torch on one rank: the same losses,
the same weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import ray

from rlhf_core.config import Lora, Ranks
from tests.engines.test_zero import TWO, train, two_are_one
from tests.support.families import make_family
from tests.support.gloo_ranks import on_gloo_ranks
from tests.support.sequence_roles import read_and_train
from tests.support.tiny_roles import models, plain_engine

__all__ = ["models", "plain_engine"]
pytestmark = pytest.mark.slow
LONG = {**TWO, "sequence_parallel_size": 2}


@pytest.mark.parametrize(
    "kind", ["dpo", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("reward_model", "kto"))]
)
def test_two_ranks_compute_each_pass_as_one_does(kind: str, material: Path, tmp_path: Path) -> None:
    two_are_one(kind, material, tmp_path, ranks=LONG)


@pytest.mark.long
def test_two_pairs_of_ranks_share_the_passes_of_a_step(material: Path, tmp_path: Path) -> None:
    """The last step has an uneven number of passes."""
    two_are_one("sft", material, tmp_path, ranks={**LONG, "ranks": Ranks(num_ranks_per_node=4, cpus=0.25)})


@pytest.mark.long
def test_adapters_and_feed_forward_blocks_in_parts(material: Path, tmp_path: Path) -> None:
    two_are_one(
        "dpo", material, tmp_path, ranks=LONG, lora=Lora(rank=4), mlp_tokens=16, gradient_checkpointing=True
    )


@pytest.mark.long
def test_a_model_that_cannot_be_split_is_refused_before_its_first_step(
    material: Path, tmp_path: Path
) -> None:
    base = make_family("lfm2", material / "base", tmp_path / "base")
    try:
        with pytest.raises(ValueError, match=r"layers that carry .* row, .* set sequence_parallel_size to 1"):
            train("sft", material, tmp_path / "run", base, **LONG)
    finally:
        ray.shutdown()


def test_roles_of_ppo_score_and_learn_as_on_one_rank(
    models: Path, plain_engine: None, tmp_path: Path
) -> None:
    """Actor, critic, reference and reward model; padded rows, then packed ones."""
    out = tmp_path / "found.json"
    on_gloo_ranks(
        2, "import runpy; runpy.run_module('tests.support.sequence_roles', run_name='__main__')", models, out
    )
    for found, tokens in zip(json.loads(out.read_text()), (None, 40), strict=True):
        expected = read_and_train(models, 1, tokens)
        assert max(map(max, expected["values"])) > 0.1
        for name, values in expected.items():
            for own, other in zip(found[name], values, strict=True):
                assert own == pytest.approx(other, rel=2e-4, abs=2e-5), (name, tokens)
