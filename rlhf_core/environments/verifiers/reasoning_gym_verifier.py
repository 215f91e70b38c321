"""`reward: reasoning_gym`: the score that a row's reasoning-gym task gives to the answer in a response.

The score is between 0 and 1. It is 0 for a response without an answer, or one truncated by a limit. If the
task raises or takes too long, the answer has no reward. Scores are computed in a sandbox
(reasoning_gym_scores.py), because some tasks evaluate an answer as Python.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import os
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf_core.environments import sandbox
from rlhf_core.environments.verifiers.row_cells import known_entry

PROGRAM = Path(__file__).with_name("reasoning_gym_scores.py")
WAITING = 4  # a score may take this many times its CPU limit in wall-clock time
START_SECONDS = 60.0  # for the sandbox to start and import the package
MEMORY_MIB = 4096  # of address space
LINE_BYTES = 1024  # of one reply; the program writes less


class ScoringFailed(Exception):
    """Raised when no answer can be scored, regardless of its text."""


def verify_answers(
    responses: Sequence[str],
    rows: Sequence[dict[str, Any]],
    finished: Sequence[bool],
    tag: str | None = "answer",
    seconds: float = 5.0,
    mode: str = "bubblewrap",
) -> list[float | None]:
    """Returns the scores of responses, None where the task raised or exceeded `seconds` of CPU time. Raises
    ValueError for a row that was not generated, and ScoringFailed when the sandbox or the package fails."""
    os.environ[sandbox.MODE] = mode
    entries = [known_entry(row, "reasoning_gym") for row in rows]
    scores: list[float | None] = [0.0] * len(responses)
    left = [place for place, whole in enumerate(finished) if whole]
    while left:
        answers = [(responses[place], entries[place]) for place in left]
        replies = _replies(answers, tag, seconds)
        for place, reply in zip(left, replies, strict=False):
            scores[place] = _score(reply)
            if scores[place] is None:
                print(f"{rows[place]['task']}: {reply.get('failed', reply)}", file=sys.stderr, flush=True)
        ended = left[len(replies) : len(replies) + 1]  # the answer that ended the program
        for place in ended:
            scores[place] = None
            print(f"{rows[place]['task']}: an answer took too long, or ended Python", file=sys.stderr)
        left = left[len(replies) + 1 :]
    return scores


def _score(reply: dict[str, Any]) -> float | None:
    """Returns a score as a number from 0 to 1, as the package guarantees; None for anything else."""
    score = reply.get("score")
    if isinstance(score, float) and not math.isfinite(score):
        return None
    return float(min(1, max(0, score))) if isinstance(score, int | float) else None


def _replies(answers: Sequence[tuple[str, str]], tag: str | None, seconds: float) -> list[dict[str, Any]]:
    """Returns the program's replies to the first answers, up to any that ended it. Raises ScoringFailed when
    it did not start."""
    folders = package_folders()
    command = [*sandbox.python()[:-1], "-c", PROGRAM.read_text(), *folders]
    longest = START_SECONDS + WAITING * seconds * len(answers)
    request = json.dumps({"tag": tag, "seconds": seconds, "answers": answers})
    try:
        output = asyncio.run(
            sandbox.run(
                command, request, longest, MEMORY_MIB, LINE_BYTES * (len(answers) + 1), False, folders
            )
        )
    except (OSError, RuntimeError) as error:
        raise ScoringFailed(f"the sandbox failed: {error}") from error
    lines = output.text.split("\n")[:-1]
    if not lines or json.loads(lines[0]) != {"ready": True}:
        raise ScoringFailed("reasoning-gym could not be imported in the sandbox")
    return [_reply(line) for line in lines[1 : len(answers) + 1]]


def _reply(line: str) -> dict[str, Any]:
    """Parses a reply. Any other line, which an evaluated answer may have printed, counts as a failed
    score."""
    try:
        reply = json.loads(line)
    except ValueError:
        reply = None
    return reply if isinstance(reply, dict) else {"failed": "an answer wrote to the replies"}


def package_folders() -> list[str]:
    """Returns the folders that contain reasoning-gym and its dependencies."""
    spec = importlib.util.find_spec("reasoning_gym")
    if spec is None or spec.origin is None:
        raise ImportError("reasoning-gym is not installed: pip install alignflow[reasoning-gym]")
    paths = sysconfig.get_paths()
    found = (str(Path(spec.origin).parents[1]), paths["purelib"], paths["platlib"])
    return list(dict.fromkeys(os.path.realpath(folder) for folder in found))
