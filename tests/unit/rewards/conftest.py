"""A server of rewards on this machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.reward_server import Served, serving_rewards


@pytest.fixture
def served() -> Iterator[Served]:
    with serving_rewards() as served:
        yield served
