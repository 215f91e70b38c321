"""Sequence parallelism under DeepSpeed on two Ray workers against plain torch on one rank: the same losses, the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.test_zero import TWO, two_are_one

pytestmark = pytest.mark.slow
LONG = {**TWO, "sequence_parallel_size": 2}


@pytest.mark.parametrize("kind", ["dpo", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("sft", "reward_model", "kto"))])
def test_two_ranks_compute_each_pass_as_one_does(kind: str, material: Path, tmp_path: Path) -> None:
    two_are_one(kind, material, tmp_path, ranks=LONG)
