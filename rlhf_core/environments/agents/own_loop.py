"""Runs asynchronous work to completion from code that an event loop has called."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

R = TypeVar("R")


def in_a_loop_of_its_own(work: Callable[[], Awaitable[R]]) -> R:
    """Runs work although another event loop is running in this thread; the thread waits for the work."""
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
