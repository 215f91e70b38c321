"""How many tokens a template takes by itself: asked before a run, of a process in which torch is hidden.

transformers imports torch where it is installed, for seconds, and reads tokenizers without it as well. Who asks reads what that process
could not read once more, with torch, as the stages do: so only what fails there is refused.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from rlhf_core.garbage import uncollected
from rlhf_core.launch import child_environment

Pair = tuple[str, str]  # a model folder and a template
SECONDS = 60.0
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
_known: dict[tuple[str, str, int], int] = {}  # by the folder's newest change too: a run asks twice, before its flow and in it


def check_limit(limit: int, frame_len: int) -> None:
    """Raises ValueError when `limit` tokens hold no more than the template's own tokens."""
    if limit <= frame_len:
        raise ValueError(f"a limit of {limit} tokens leaves no room for text: the template alone takes {frame_len} tokens, raise the limit")


def frame_lengths(pairs: Iterable[Pair]) -> dict[Pair, int]:
    """`Renderer.frame_len` of each pair that can be read without torch and without the Hub; the others are left out."""
    asked = {pair: (*pair, _changed(Path(pair[0]))) for pair in pairs}
    if unknown := [pair for pair, key in asked.items() if key not in _known]:
        command = [sys.executable, "-P", "-m", "rlhf_core.data.frames"]
        environment = child_environment() | ENVIRONMENT
        with contextlib.suppress(subprocess.TimeoutExpired, ValueError, IndexError):
            done = subprocess.run(command, input=json.dumps(unknown), capture_output=True, text=True, timeout=SECONDS, env=environment)
            for pair, length in zip(unknown, json.loads(done.stdout.splitlines()[-1]), strict=True):
                if length is not None:
                    _known[asked[pair]] = int(length)
    return {pair: _known[key] for pair, key in asked.items() if key in _known}


def _changed(folder: Path) -> int:
    return max((path.stat().st_mtime_ns for path in folder.glob("*")), default=0)


def main() -> None:
    """Reads pairs from standard input, writes a list of lengths, null for what could not be read."""
    sys.modules["torch"] = None  # type: ignore[assignment]  # as where it is not installed
    with uncollected():
        from rlhf_core.data.chat import Renderer, load_tokenizer

    lengths: list[int | None] = []
    for place, template in json.load(sys.stdin):
        try:
            lengths.append(Renderer(load_tokenizer(place), template).frame_len)
        except Exception:  # whatever it is, it is said by the attempt with torch
            lengths.append(None)
    print(json.dumps(lengths))


if __name__ == "__main__":
    main()
