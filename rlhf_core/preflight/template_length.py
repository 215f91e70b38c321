"""Measures how many tokens a chat template takes by itself, in a process that cannot import torch, unless it runs code of models.

transformers imports torch if it can, which takes seconds, and reads most tokenizers without it. The caller reads the others again, with
torch, as the stages do; only an error there refuses the recipe, and a template that loops, whose process the kernel ends.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from rlhf_core.system.gc_pause import uncollected
from rlhf_core.system.processes import child_environment

Pair = tuple[str, str]  # a model folder and a template
SECONDS = 60.0
CPU_SECONDS = 2.0  # of one template, which takes milliseconds
ENDLESS = f"the chat template did not end within {CPU_SECONDS:.0f} s; correct it, or set the template of the data to a plain one"
SPOKEN = ({"role": "user", "content": "What is here?"}, {"role": "assistant", "content": "Some text."})
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
# By folder, template and newest mtime in the folder. A run checks twice: before its flow and in it.
_known: dict[tuple[str, str, int], int] = {}


def frame_lengths(pairs: Iterable[Pair], trust_remote_code: bool = False) -> dict[Pair, int | str]:
    """Returns `Renderer.frame_len`, in tokens, of each pair that can be read without torch and the Hub, and ENDLESS for one that loops;
    others are left out."""
    keys = {pair: (*pair, _changed(Path(pair[0]))) for pair in pairs}
    left = [pair for pair, key in keys.items() if key not in _known]
    endless: dict[Pair, int | str] = {}
    while left:
        lengths, ended = _ask(left, trust_remote_code)
        _known.update((keys[pair], length) for pair, length in zip(left, lengths, strict=False) if length is not None)
        left = left[len(lengths) :] if ended == -signal.SIGVTALRM else []
        endless |= dict.fromkeys(left[:1], ENDLESS)
        left = left[1:]
    return {pair: _known[key] for pair, key in keys.items() if key in _known} | endless


def _ask(pairs: list[Pair], trust_remote_code: bool) -> tuple[list[int | None], int]:
    """Returns what the process of `main` says of the first pairs, and its exit code."""
    command = [sys.executable, "-P", "-m", "rlhf_core.preflight.template_length", *["trust"] * trust_remote_code]
    environment = child_environment() | ENVIRONMENT
    with contextlib.suppress(subprocess.TimeoutExpired, ValueError):
        done = subprocess.run(command, input=json.dumps(pairs), capture_output=True, text=True, timeout=SECONDS, env=environment)
        return [json.loads(line) for line in done.stdout.splitlines()], done.returncode
    return [], 0


def _changed(folder: Path) -> int:
    return max((path.stat().st_mtime_ns for path in folder.glob("*")), default=0)


def main() -> None:
    """Reads pairs from standard input as JSON, writes a line for each: its length, or null for one that cannot be read."""
    trust = sys.argv[1:] == ["trust"]
    if not trust:  # a model's code may need it
        sys.modules["torch"] = None  # type: ignore[assignment]  # makes `import torch` fail
    with uncollected():
        from rlhf_core.data.chat import Renderer, load_tokenizer

    for place, template in json.load(sys.stdin):
        length = None
        with contextlib.suppress(Exception):  # the caller's attempt with torch reports it
            tokenizer = load_tokenizer(place, trust)
            signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS)  # its signal ends this process, inside a library's loop too
            renderer = Renderer(tokenizer, template)
            with contextlib.suppress(ValueError):  # a template that refuses it is reported with the data
                renderer.conversation(SPOKEN)  # one may loop on text alone
            length = renderer.frame_len
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        print(json.dumps(length), flush=True)


if __name__ == "__main__":
    main()
