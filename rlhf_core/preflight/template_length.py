"""Measures how many tokens a chat template takes by itself, in a process that cannot import torch.

transformers imports torch if it can, which takes seconds, and reads most tokenizers without it. The caller reads the others again, with
torch, as the stages do; only an error there refuses the recipe.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from rlhf_core.system.gc_pause import uncollected
from rlhf_core.system.processes import child_environment

Pair = tuple[str, str]  # a model folder and a template
SECONDS = 60.0
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
# By folder, template and newest mtime in the folder. A run checks twice: before its flow and in it.
_known: dict[tuple[str, str, int], int] = {}


def frame_lengths(pairs: Iterable[Pair]) -> dict[Pair, int]:
    """Returns `Renderer.frame_len`, in tokens, of each pair that can be read without torch and the Hub; others are left out."""
    keys = {pair: (*pair, _changed(Path(pair[0]))) for pair in pairs}
    if unknown := [pair for pair, key in keys.items() if key not in _known]:
        command = [sys.executable, "-P", "-m", "rlhf_core.preflight.template_length"]
        environment = child_environment() | ENVIRONMENT
        with contextlib.suppress(subprocess.TimeoutExpired, ValueError, IndexError):
            done = subprocess.run(command, input=json.dumps(unknown), capture_output=True, text=True, timeout=SECONDS, env=environment)
            for pair, length in zip(unknown, json.loads(done.stdout.splitlines()[-1]), strict=True):
                if length is not None:
                    _known[keys[pair]] = int(length)
    return {pair: _known[key] for pair, key in keys.items() if key in _known}


def _changed(folder: Path) -> int:
    return max((path.stat().st_mtime_ns for path in folder.glob("*")), default=0)


def main() -> None:
    """Reads pairs from standard input as JSON, writes a list of lengths, null for those that could not be read."""
    sys.modules["torch"] = None  # type: ignore[assignment]  # makes `import torch` fail
    with uncollected():
        from rlhf_core.data.chat import Renderer, load_tokenizer

    lengths: list[int | None] = []
    for place, template in json.load(sys.stdin):
        try:
            lengths.append(Renderer(load_tokenizer(place), template).frame_len)
        except Exception:  # the caller's attempt with torch reports it
            lengths.append(None)
    print(json.dumps(lengths))


if __name__ == "__main__":
    main()
