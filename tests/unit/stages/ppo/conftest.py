"""The loop in which answers are sampled beside the training."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rlhf_core.rollout.dispatch import Background


@pytest.fixture
def background() -> Iterator[Background]:
    made = Background()
    yield made
    made.close()
