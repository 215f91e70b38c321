"""Measures how many tokens a chat template adds, and renders rows with it. Does so in a process that cannot
import torch unless it runs models' code.

transformers imports torch if it can, which takes seconds, but it reads most tokenizers without torch. The
caller reads the remaining tokenizers again with torch, as the stages do. The recipe is rejected only if the
second attempt fails too. Two cases are rejected without a second attempt: a template that loops, whose
process the kernel ends, and a template that takes too much memory.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from rlhf_core.config import Data
from rlhf_core.data.rows.columns import Kind
from rlhf_core.preflight.rows.template_rows import Rendered, render_rows
from rlhf_core.system.gc_pause import uncollected
from rlhf_core.system.processes import child_environment

if TYPE_CHECKING:  # chat imports transformers
    from rlhf_core.data.chat import Renderer

# A model folder, a template, and the template's arguments as JSON, if any.
Pair = tuple[str, str] | tuple[str, str, str]
SECONDS = 60.0
CPU_SECONDS = 2.0  # for one template, which normally takes milliseconds
ROW_CPU_SECONDS = 20.0  # for one row, which may be long
MEMORY = 4 << 30  # bytes beyond what the process already uses
ENDLESS = (
    f"the chat template did not end within {CPU_SECONDS:.0f} s; correct it, or set the template of the data"
    " to a plain one"
)
TOO_LARGE = (
    f"the chat template takes more than {MEMORY >> 30} GiB; correct it, or set the template of the data to a"
    " plain one"
)
SPOKEN = ({"role": "user", "content": "What is here?"}, {"role": "assistant", "content": "Some text."})
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}


class RowsToRender(NamedTuple):
    """Holds a data set to render: a `Data` as JSON, its kind, the field that limits its length, and that
    limit in tokens (0: no limit)."""

    data: str
    kind: Kind
    limit_field: str = ""
    limit: int = 0


class MeasuredTemplate(NamedTuple):
    """Holds `Renderer.frame_len` in tokens, and the findings from the rows of each data set."""

    length: int
    rendered: dict[RowsToRender, Rendered]


Key = tuple[Pair, int, tuple[RowsToRender, ...], tuple[int, ...]]
# Keyed by folder, template, newest mtime in the folder, data sets, and mtimes of their files: a run checks
# twice, before its flow and in it.
_known: dict[Key, MeasuredTemplate] = {}


def measured(
    pairs: Mapping[Pair, Sequence[RowsToRender]], trust_remote_code: bool = False
) -> dict[Pair, MeasuredTemplate | str]:
    """Returns, for each pair that can be read without torch and the Hub, its `Renderer.frame_len` and the
    findings from the rows of its data sets. Returns ENDLESS for a template that loops, and TOO_LARGE for a
    template that takes too much memory. Leaves out all other pairs."""
    keys = {pair: _key(pair, tuple(rows)) for pair, rows in pairs.items()}
    left = [pair for pair, key in keys.items() if key not in _known]
    refused: dict[Pair, MeasuredTemplate | str] = {}
    while left:
        answers, ended = _ask([(pair, pairs[pair]) for pair in left], trust_remote_code)
        for pair, answer in zip(left, answers, strict=False):
            if isinstance(answer, MeasuredTemplate):
                _known[keys[pair]] = answer
            elif answer is not None:
                refused[pair] = answer
        left = left[len(answers) :] if ended == -signal.SIGVTALRM else []
        refused |= dict.fromkeys(left[:1], ENDLESS)
        left = left[1:]
    return {pair: _known[key] for pair, key in keys.items() if key in _known} | refused


def measure(pair: Pair, rows: Sequence[RowsToRender], trust_remote_code: bool) -> MeasuredTemplate:
    """Works like `measured`, but in this process and without time limits. Raises ValueError for a tokenizer
    or template that cannot be used."""
    from rlhf_core.data.chat import Renderer, load_tokenizer

    renderer = Renderer(load_tokenizer(pair[0], trust_remote_code), pair[1], template_args=_arguments(pair))
    return MeasuredTemplate(renderer.frame_len, {each: _render(renderer, each) for each in rows})


def pair_of(place: str, data: Data) -> Pair:
    """Returns the key for a tokenizer's folder or Hub id and the template of a data set."""
    if not data.template_args:
        return place, data.template
    return place, data.template, json.dumps(data.template_args, sort_keys=True)


def _arguments(pair: Pair) -> dict[str, Any]:
    return json.loads(pair[2]) if len(pair) == 3 else {}


def _render(
    renderer: Renderer,
    rows: RowsToRender,
    limited: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Rendered:
    data = Data.model_validate_json(rows.data)
    return render_rows(renderer, data, rows.kind, rows.limit_field, rows.limit, limited)


def _ask(
    asked: list[tuple[Pair, Sequence[RowsToRender]]], trust_remote_code: bool
) -> tuple[list[MeasuredTemplate | str | None], int]:
    """Runs `main` in a separate process. Returns its answers, which may cover only the first pairs, and its
    exit code."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "rlhf_core.preflight.rows.template_length",
        *["trust"] * trust_remote_code,
    ]
    environment = child_environment() | ENVIRONMENT
    with contextlib.suppress(subprocess.TimeoutExpired, ValueError):
        done = subprocess.run(
            command, input=json.dumps(asked), capture_output=True, text=True, timeout=SECONDS, env=environment
        )
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        return [_read(line, rows) for line, (_, rows) in zip(lines, asked, strict=False)], done.returncode
    return [], 0


def _read(line: list[object] | str | None, rows: Sequence[RowsToRender]) -> MeasuredTemplate | str | None:
    if not isinstance(line, list):
        return line
    length, *rendered = line
    assert isinstance(length, int)
    found = {}
    for each, of_rows in zip(rows, rendered, strict=True):
        refused, warned, items, images = cast("tuple[str, list[str], int | None, bool]", of_rows)
        found[each] = Rendered(refused, tuple(warned), items, images)
    return MeasuredTemplate(length, found)


def _key(pair: Pair, rows: tuple[RowsToRender, ...]) -> Key:
    files = [Path(source.path) for each in rows for source in Data.model_validate_json(each.data).sources]
    return (
        pair,
        _changed(Path(pair[0])),
        rows,
        tuple(file.stat().st_mtime_ns if file.is_file() else 0 for file in files),
    )


def _changed(folder: Path) -> int:
    return max((path.stat().st_mtime_ns for path in folder.glob("*")), default=0)


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Ends this process if the block takes more than `seconds` of CPU time, even inside a library's loop.
    Raises MemoryError if it takes more than MEMORY bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, most))
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (before, most))


def main() -> None:
    """Reads pairs and their data sets from standard input as JSON. Writes one line per pair: its length and
    the findings from each data set, TOO_LARGE, or null if the pair cannot be read."""
    trust = sys.argv[1:] == ["trust"]
    if not trust:  # a model's code may need it
        sys.modules["torch"] = None  # type: ignore[assignment]  # makes `import torch` fail
    for pair, rows in json.load(sys.stdin):
        answer: list[object] | str | None = None
        try:
            answer = _answer(tuple(pair), [RowsToRender(*each) for each in rows], trust)
        except Exception as error:
            if isinstance(error.__cause__, MemoryError):
                answer = TOO_LARGE
            # The caller's attempt with torch reports other errors.
        print(json.dumps(answer), flush=True)


def _answer(pair: Pair, rows: Sequence[RowsToRender], trust_remote_code: bool) -> list[object]:
    with uncollected():
        from rlhf_core.data.chat import Renderer, load_tokenizer

    tokenizer = load_tokenizer(pair[0], trust_remote_code)
    with _limited(CPU_SECONDS):
        renderer = Renderer(tokenizer, pair[1], template_args=_arguments(pair))
        with contextlib.suppress(ValueError):  # the data checks report a template that rejects this message
            renderer.conversation(SPOKEN)  # some templates loop only on text
    of_row = partial(_limited, ROW_CPU_SECONDS)
    rendered = [_render(renderer, each, of_row) for each in rows]
    return [renderer.frame_len, *rendered]


if __name__ == "__main__":
    main()
