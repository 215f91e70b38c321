"""Imports and calls the user's functions that an environment names: agents and checkers."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from rlhf_core.system.processes import users_module


async def called(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Returns the result of a function written by the user. A function that is not async runs in its own
    thread, which this process does not wait for, so a function that hangs does not block other calls."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **named)
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def settle(set_it: Callable[[Any], None], value: Any) -> None:
        if not done.done():
            set_it(value)

    def call() -> None:
        try:
            outcome: tuple[Callable[[Any], None], Any] = done.set_result, function(*args, **named)
        except (StopIteration, asyncio.CancelledError) as error:  # these have another meaning to a future
            outcome = done.set_exception, RuntimeError(f"{type(error).__name__}: {error}")
        except BaseException as error:  # any kind of error in the user's code
            outcome = done.set_exception, error
        loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=call, daemon=True).start()
    result = await done
    return await result if inspect.isawaitable(result) else result


def function_of(place: str, what: str, modules: dict[str, ModuleType]) -> Callable[..., Any]:
    """Returns the function `path.py:function`, loading each file only once. Raises ValueError if there is no
    such function."""
    path, _, name = place.rpartition(":")
    if path not in modules:
        modules[path] = users_module(Path(path), what)
    found = getattr(modules[path], name, None)
    if not callable(found):
        raise ValueError(f"{path} has no function {name!r}; correct the {what}")
    return found


def require_arguments(
    function: Callable[..., Any], place: str, args: tuple[Any, ...], named: dict[str, Any]
) -> None:
    """Raises ValueError when the function does not accept these arguments."""
    try:
        inspect.signature(function).bind(*args, **named)
    except TypeError as error:
        raise ValueError(
            f"{place} cannot be called with {len(args)} arguments and options: {error}"
        ) from None


def reward_of(result: Any, what: str) -> float:
    """Returns the reward that `what` returned. Raises ValueError if it is not a number."""
    if not isinstance(result, bool | int | float) and not hasattr(result, "__float__"):
        raise ValueError(f"the {what} returned {result!r:.60}, no number: return the reward")
    return float(result)
