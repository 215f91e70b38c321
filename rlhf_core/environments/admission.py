"""Decides how many episodes an environment process runs at once, so that an episode that crashes the process
does not stop all others."""

from __future__ import annotations

import asyncio


class Admission:
    """Lets at most `most` episodes run at once, and fewer for some time after the process has died.

    The limit changes by additive increase and multiplicative decrease, like TCP's window (Chiu & Jain 1989).
    Each death of the process halves the limit, down to a single episode, and every finished attempt adds one.
    """

    def __init__(self, most: int):
        self._most = self._limit = most
        self._running = 0
        self._changed = asyncio.Condition()

    async def __aenter__(self) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._running < self._limit)
            self._running += 1

    async def __aexit__(self, *_: object) -> None:
        async with self._changed:
            self._running -= 1
            self._changed.notify(max(0, self._limit - self._running))

    def died(self, episodes: int) -> None:
        """Halves the limit. `episodes`: how many episodes the process was running when it died."""
        self._limit = max(1, min(self._limit, episodes) // 2)

    def finished(self) -> None:
        """Raises the limit by one."""
        self._limit = min(self._most, self._limit + 1)
