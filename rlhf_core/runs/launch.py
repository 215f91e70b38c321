"""Runs a stage as a process on this machine. The process's output goes to `log.txt` and to a callback, and
all its descendants end with it.

A stage is done if `result.json` exists and each file that it lists has the recorded size; the exit code is
ignored. No process is started on other machines; a stage that needs a Ray cluster connects to it.
"""

from __future__ import annotations

import os
import re
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rlhf_core.records import StageResult
from rlhf_core.runs.allotment import check_stop
from rlhf_core.runs.prepared import GRACE_SECONDS, end, prepared, reaped
from rlhf_core.runs.run_dir import LOG, RunDir
from rlhf_core.system.processes import ENVIRONMENT, WRONG_INPUT

TAIL_LINES = 15
SECRET_NAME = re.compile(r"(TOKEN|APIKEY|(^|_)KEY|SECRET|PASSWORD|AUTH_STRING)(_?\d+)?$")
CODES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~])?")  # terminal codes, such as colours and cursor movements
# prefix of lines from Ray's other processes
RAY_PREFIX = re.compile(r"^\([^()]+ pid=\d+(, ip=[^()]+)?\)( |$)")
# Output lines of a stage's process that go only to `log.txt`: library messages that nobody can act on. Where
# a library's setting or logger can silence messages, that is used instead (`ENV_DEFAULTS` in
# rlhf_core/__main__.py, rollout/vllm/environment.py). Listed here are the rest, and messages of releases and
# processes that the settings do not reach.
NOISE = re.compile(
    "|".join(
        (
            r"\s*$",
            r"\s+\[(state-dump|\d{4}-\S+ \S+ \w \d+ \d+\] \(raylet\))",  # Ray repeats the raylet's log
            r"\[Gloo\] Rank \d+ is connected to ",
            r"\[W\S* .*Warning: NUMA binding: ",
            r"\[\S+ \S+\] \[\w+\] \[real_accelerator\.py:.*\] Setting (ds_)?accelerator to ",
            r".*Triton is installed(, but doesn't include CPU backend| but \d+ active driver)",
            r".*Triton not installed or not compatible",
            r"(INFO|WARNING) \S+ \S+ \[[\w./]+:\d+\] The global random seed is set to ",
            r"The global random seed is set to ",
            # progress bars for loading shards and capturing CUDA graphs
            r"[\w ,()-]+: *\d+%( Completed)? ?\|.*(it/s|s/it|\?)",
        )
    )
)


class StageFailed(RuntimeError):
    """Raised when a stage's process ended without a result. `code`: its exit code, or 128 + n if signal n
    ended it; `tail`: the last lines of its log."""

    def __init__(self, name: str, code: int, tail: tuple[str, ...]):
        self.name = name
        self.code = code
        self.tail = tail
        super().__init__(name, code, tail)

    @property
    def can_retry(self) -> bool:
        """Returns whether a retry can succeed: not after wrong input, missing resources or a stop signal."""
        return self.code not in (WRONG_INPUT, ENVIRONMENT, 128 + signal.SIGINT, 128 + signal.SIGTERM)

    def __str__(self) -> str:
        if self.code in (WRONG_INPUT, ENVIRONMENT):
            return self.summary
        return "\n  ".join([f"{self.summary}; the last lines of its log:", *self.tail])

    @property
    def summary(self) -> str:
        """Returns the message without the lines of the log."""
        if self.code in (WRONG_INPUT, ENVIRONMENT):
            return (
                f"stage {self.name}:"
                f" {self.tail[-1] if self.tail else 'it refused to start and gave no reason'}"
            )
        how = f"exit code {self.code}, but there is no result" if self.code == 0 else f"exit code {self.code}"
        if self.code > 128 and (ended_by := _signal_name(self.code - 128)):
            how = f"ended by {ended_by}" + (
                " (Linux sends SIGKILL when host memory is exhausted)" if ended_by == "SIGKILL" else ""
            )
        return f"stage {self.name} failed ({how})"


class SeveralFailed(RuntimeError):
    """Raised when several stages that ran at the same time failed or did not pass their gates. `errors`:
    their errors, in order of time."""

    def __init__(self, errors: Sequence[Exception]):
        self.errors = tuple(errors)
        super().__init__(self.errors)

    def __str__(self) -> str:
        return "\n".join(map(str, self.errors))


def launch(
    module: str,
    run_dir: Path,
    name: str,
    on_line: Callable[[str], None],
    grace_seconds: float = GRACE_SECONDS,
) -> StageResult:
    """Runs `python -m MODULE RUN_DIR`, or uses the process prepared for it, and returns the result. `on_line`
    receives each output line that is not noise, without terminal codes; `log.txt` has all lines.

    Writes the start time to `log.txt`, and also the end time unless an exception in this call ended the
    process. Masks the values of keys that the stage needs and of variables that are named like keys. Raises
    StageFailed when the process ends without a result, and Stopped when the stage runs alongside others and
    their run ends (allotment.py). Any exception or signal that ends this call also ends the process and its
    descendants.
    """
    run = RunDir(run_dir)
    config = run.request().config
    kind = config.stage
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    keys = {key.variable for key in config.needed_keys}
    secrets = [
        value
        for name, value in os.environ.items()
        if (name in keys or SECRET_NAME.search(name)) and len(value) >= 8
    ]
    start = time.monotonic()
    process = prepared.take(module, kind, run.path, grace_seconds)
    if process is None:
        process = reaped(module, [str(run.path)], kind, grace_seconds).reaper
    try:
        prepared.start()
        with (run / LOG).open("a") as log:
            log.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {name}\n")
            log.flush()  # so that the log also shows a process killed before its first line
            for line in _lines(process):
                for secret in secrets:
                    line = line.replace(secret, "***")
                log.write(line + "\n")
                log.flush()
                shown = plain(line)
                if not is_noise(shown):
                    tail.append(shown)
                    on_line(shown)
            code = process.wait()
            log.write(
                f"+++ {time.strftime('%Y-%m-%d %H:%M:%S')} {name} ended after {time.monotonic() - start:.2f}"
                f" s with code {code}\n"
            )
    finally:
        end(process, grace_seconds)
    result = run.result()
    if result is None:
        raise StageFailed(name, code, tuple(tail))
    return result


def _lines(process: subprocess.Popen[bytes]) -> Iterator[str]:
    """Yields output lines until the process closes stdout or exits. For a line overwritten with \\r (progress
    bars), yields only the final text. Raises Stopped for the same reasons as `check_stop`."""
    assert process.stdout is not None
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while True:
            ready = selector.select(timeout=0.5)
            check_stop()
            chunk = os.read(process.stdout.fileno(), 65536) if ready else b""
            *whole, rest = (rest + chunk).split(b"\n")
            yield from (_text(line) for line in whole)
            if (ready and not chunk) or (not ready and process.poll() is not None):
                break
    if rest.strip():
        yield _text(rest)


def _text(line: bytes) -> str:
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")


def _signal_name(number: int) -> str | None:
    try:
        return signal.Signals(number).name
    except ValueError:
        return None


def plain(line: str) -> str:
    """Returns a line without terminal codes."""
    return CODES.sub("", line)


def is_noise(line: str) -> bool:
    """Returns whether a line, without terminal codes, is useless to people who watch the stage."""
    return NOISE.match(RAY_PREFIX.sub("", line)) is not None
