"""Environments may use task groups of anyio, as clients of MCP and HTTP do."""

from __future__ import annotations

from pathlib import Path

from rlhf_core.data.chat import Renderer
from tests.unit.environments.test_episodes import Make, make, renderer, run

__all__ = ["make", "renderer"]
GROUPS = """
import anyio

class World:
    async def rollout(self, task, model):
        await model.answer()
        async with anyio.create_task_group() as group:
            group.start_soon(anyio.sleep, 1000)
            group.cancel_scope.cancel()
        return 1.0
"""


def test_task_groups_of_anyio_can_be_cancelled(make: Make, renderer: Renderer, tmp_path: Path) -> None:
    (tmp_path / "groups.py").write_text(GROUPS)
    (found,) = run(make("groups.py:World", max_attempts=1, timeout=60.0), renderer, [{}])
    assert found.failure == "" and found.rewards == [1.0]
