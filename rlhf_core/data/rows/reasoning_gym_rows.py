"""Generates rows with questions from reasoning-gym's tasks in a separate process. Does not import the
package. Torch-free."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from copy import deepcopy
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rlhf_core.config.generated_data import GENERATED, ReasoningGymPrompts
from rlhf_core.data.rows.columns import Row
from rlhf_core.system.processes import child_environment, how_ended

PACKAGE = "reasoning-gym"
MISSING = "needs the package reasoning-gym, which is not installed: pip install alignflow[reasoning-gym]"
WORKER = "rlhf_core.data.rows.reasoning_gym_worker"


def installed_release() -> str:
    """Returns the version of reasoning-gym on this machine, or "" if it is not installed."""
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return ""


def reasoning_gym_rows(source: ReasoningGymPrompts, first: int | None) -> Iterator[Row]:
    """Yields the first `first` rows (None: all): `prompt` (messages), `answer` (a correct answer, as text),
    `task` (its name), and `reasoning_gym` (the data for scoring an answer). The same fields give the same
    rows on every machine with the same release of the package. Raises ValueError if the package is not
    installed, or lacks a task or an option."""
    if not installed_release():
        raise ValueError(f"{GENERATED}: {MISSING}")
    asked = {
        "options": source.options,
        "shares": source.shares,
        "size": source.size,
        "seed": source.seed,
        "instruction": source.instruction,
        "system": source.system,
        "count": source.size if first is None else min(first, source.size),
    }
    yield from deepcopy(_generated(json.dumps(asked)))


@lru_cache(maxsize=8)
def _generated(asked: str) -> tuple[dict[str, Any], ...]:
    # some tasks depend on the order of string sets, which differs between processes unless it is fixed
    environment = child_environment() | {"PYTHONHASHSEED": "0"}
    command = [sys.executable, "-P", "-m", WORKER]
    done = subprocess.run(
        command, input=asked, stdout=subprocess.PIPE, env=environment, text=True, check=False
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    if lines and "problem" in lines[-1]:
        raise ValueError(f"{GENERATED}: {lines[-1]['problem']}")
    if done.returncode:
        raise ValueError(
            f"{GENERATED}: the process that generates prompts {how_ended(done.returncode)}: read its message"
            " above"
        )
    return tuple(lines)
