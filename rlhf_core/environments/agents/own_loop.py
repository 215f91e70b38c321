"""Runs asynchronous work to completion from synchronous code inside an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

R = TypeVar("R")


def in_a_loop_of_its_own(work: Callable[[], Awaitable[R]]) -> R:
    """Runs `work` in a new event loop on another thread, so that it can run even while a loop is running in
    this thread. Blocks until it is done, and returns its result."""
    results = list[R]()
    errors = list[BaseException]()

    async def worked() -> R:
        return await work()

    def run() -> None:
        try:
            results.append(asyncio.run(worked()))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
