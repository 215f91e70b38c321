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
    """Raised when an environment cannot be used. The message is one sentence."""


class Failure(Exception):
    """Raised when an episode has no reward. `raised`: the type of the root error, or "" if unknown."""

    def __init__(self, text: str, raised: str = ""):
        super().__init__(text)
        self.raised = raised


def failure_of(error: BaseException) -> Failure:
    """Converts an error of the environment to a Failure with the error's place."""
    return described(type(error).__name__, str(error), "".join(traceback.format_exception(error)))


def recorded_failure(error: Any) -> Failure:
    """Converts an error that verifiers has recorded to a Failure. The error is a record, or a mapping in the
    output of a release before 0.2."""
    if isinstance(error, Mapping):
        text = error.get("error_chain_repr") or error.get("error")
        return Failure(str(text or error))
    return described(error.type, error.message, error.traceback or "")


def described(kind: str, message: str, trace: str) -> Failure:
    """Returns a Failure that names the innermost line of the environment's own code. Uses the first error of
    the traceback, which caused the others."""
    root = NEXT_ERROR.split(trace)[0]
    frames = FRAME.findall(root)
    own = [frame for frame in frames if not any(part in frame[0] for part in FOREIGN)]
    where = "".join(f" ({file}, line {line})" for file, line in own[-1:])
    last = [line for line in root.strip().splitlines() if line[:1].strip()][-1:]
    name = last[0].partition(":")[0] if last else kind
    return Failure(f"{kind}: {' '.join(message.split())}{where}", name.rpartition(".")[2])
