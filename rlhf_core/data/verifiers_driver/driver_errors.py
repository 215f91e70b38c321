"""Describes errors of an environment: type, message, file and line. Standard library only."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Mapping
from typing import Any

FRAME = re.compile(r'^  File "(.+)", line (\d+)', re.MULTILINE)
NEXT_ERROR = re.compile(r"\n(?:The above exception was|During handling of)")
# packages whose frames are not the environment's code
OTHERS = ("verifiers", "verifiers_driver", "asyncio", "pydantic", "importlib")
FOREIGN = (*(f"{os.sep}{name}{os.sep}" for name in OTHERS), "<")


class Problem(Exception):
    """Reports an environment that cannot be used, in a sentence."""


class Failure(Exception):
    """Reports why an episode has no reward. `raised`: the type of the error at its root; "" if unknown."""

    def __init__(self, text: str, raised: str = ""):
        super().__init__(text)
        self.raised = raised


def failure_of(error: BaseException) -> Failure:
    """Returns an error of the environment with its place."""
    return described(type(error).__name__, str(error), "".join(traceback.format_exception(error)))


def recorded_failure(error: Any) -> Failure:
    """Returns an error that verifiers has recorded: a record, or a mapping in the output of a release before
    0.2."""
    if isinstance(error, Mapping):
        text = error.get("error_chain_repr") or error.get("error")
        return Failure(str(text or error))
    return described(error.type, error.message, error.traceback or "")


def described(kind: str, message: str, trace: str) -> Failure:
    """Names the innermost line of the environment's own code in the first error of a traceback, which is the
    cause of the others."""
    root = NEXT_ERROR.split(trace)[0]
    frames = FRAME.findall(root)
    own = [frame for frame in frames if not any(part in frame[0] for part in FOREIGN)]
    where = "".join(f" ({file}, line {line})" for file, line in own[-1:])
    last = [line for line in root.strip().splitlines() if line[:1].strip()][-1:]
    name = last[0].partition(":")[0] if last else kind
    return Failure(f"{kind}: {' '.join(message.split())}{where}", name.rpartition(".")[2])
