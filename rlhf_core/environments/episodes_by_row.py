"""Runs the episodes of several environments. Each prompt is used in the environment that its row names."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from rlhf_core.environments.episode_contract import Episode, EpisodeRequest
from rlhf_core.environments.episodes import Episodes
from rlhf_core.environments.row_environments import ENVIRONMENT
from rlhf_core.rollout.engine_contract import Sampling


class EpisodesByRow:
    """Holds the episodes of each environment, keyed by its name."""

    def __init__(self, members: Mapping[str, Episodes]):
        self._members = members

    async def run(self, asked: Sequence[EpisodeRequest], sampling: Sampling) -> list[Episode]:
        """Runs the episodes of all environments at the same time, and returns them in the order of `asked`.
        Raises the same errors as `Episodes.run`."""
        shares: dict[str, list[int]] = {}
        for place, request in enumerate(asked):
            shares.setdefault(request.prompt.row[ENVIRONMENT], []).append(place)
        running = [
            asyncio.create_task(self._members[name].run([asked[place] for place in places], sampling))
            for name, places in shares.items()
        ]
        try:
            finished = await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()
        by_place: dict[int, Episode] = {}
        for places, episodes in zip(shares.values(), finished, strict=True):
            by_place |= dict(zip(places, episodes, strict=True))
        return [by_place[place] for place in range(len(asked))]

    def close(self) -> None:
        """Ends all processes."""
        for episodes in self._members.values():
            episodes.close()
