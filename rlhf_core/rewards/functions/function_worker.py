"""`python -m rlhf_core.rewards.functions.function_worker FILE NAME`: calls a reward function for each line of
JSON on stdin.

The first line of output reports that the function is loaded, or why it could not be. After that, each request
`{"number": N, "question": {...}, "options": {...}}` is answered with one line: `{"number": N, "rewards":
[...]}`, or N and the fields of a `UsersError`. The function receives the lists of the contract and the
options that its signature names. A process forked by the function sends no reply; it ends when the function
returns.
"""

from __future__ import annotations

import inspect
import json
import operator
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from threading import Thread
from typing import Any, TextIO

from rlhf_core.rewards.reward_contract import question
from rlhf_core.system.processes import users_error, users_module


def load(file: Path, name: str) -> Callable[..., Any]:
    """Returns the function, which may import modules from its file's folder. Raises ValueError when it cannot
    be loaded."""
    function = getattr(users_module(file, "reward function"), name, None)
    if not callable(function):
        raise ValueError(f"{file} has no function {name!r}; correct the name of the reward function")
    return function


def wanted(function: Callable[..., Any], lists: dict[str, Any]) -> dict[str, Any]:
    """Returns the lists named in the function's signature, or all of them if it accepts any keyword. Raises
    ValueError when it requires other arguments."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return lists
    unknown = [
        p.name
        for p in parameters
        if p.name not in lists and p.default is p.empty and p.kind is not p.VAR_POSITIONAL
    ]
    if unknown:
        raise ValueError(
            f"a reward function may name {', '.join(lists)}; {function.__name__} needs {', '.join(unknown)}"
        )
    return {parameter.name: lists[parameter.name] for parameter in parameters if parameter.name in lists}


def call(function: Callable[..., Any], lists: dict[str, Any], file: Path) -> dict[str, Any]:
    """Calls a function from `file` with one question, and returns its reply."""
    try:
        rewards = function(**wanted(function, lists))
        if isinstance(rewards, Iterable):
            return {"rewards": [_plain(reward) for reward in rewards]}
    except Exception as error:  # any error in the user's code makes the request fail
        return users_error(error, file, function)._asdict()
    wrong = TypeError(f"{function.__name__}() returned {rewards!r:.60}, no list of rewards")
    return users_error(wrong, file, function)._replace(certain=True)._asdict()


def _plain(value: Any) -> Any:
    """Converts numpy and torch numbers, alone or in steps, to Python's. Anything else becomes null, which is
    a failed reward."""
    try:
        if isinstance(value, list | tuple):
            return [[operator.index(end), _plain(reward)] for end, reward in value]
        return float(value) if value is not None and not isinstance(value, str) else None
    except (TypeError, ValueError):
        return None


def _end_with(parent: int) -> None:
    """Ends this process once its parent changes, even while the function is running."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def main(file: str, name: str, lines: Iterable[bytes]) -> None:
    """Replies to each line on the real stdout; all other output goes to stderr. Ends together with its parent
    process."""
    own = os.getpid()
    Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    try:
        function = load(Path(file), name)
        wanted(function, question([]))
        ready: dict[str, Any] = {"ready": True}
    except ValueError as error:
        ready = {"text": str(error)}
    _write(ready, out, own)
    if "ready" in ready:
        for line in lines:
            request = json.loads(line)
            arguments = request["question"] | request["options"]
            _write({"number": request["number"]} | call(function, arguments, Path(file)), out, own)


def _write(reply: dict[str, Any], out: TextIO, own: int) -> None:
    """Writes a line, unless this is a process forked by the user's code, whose ID is not `own`; such a
    process ends."""
    if os.getpid() != own:
        os._exit(0)
    print(json.dumps(reply), file=out, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.stdin.buffer)
