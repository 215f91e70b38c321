"""Runs a stage as a process, on this machine: its output goes to `log.txt` and to a callback, its end never leaves a process behind.

The stage is done when its directory says so (`result.json` and the files it names), not when its process says so.
Left out: other machines; a stage that needs a cluster connects to it itself.
"""

from __future__ import annotations

import os
import re
import selectors
import signal
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

from rlhf_core.stage import LOG, RunDir
from rlhf_core.types import StageResult

WRONG_INPUT, ENVIRONMENT = 2, 3  # exit codes of a stage: the user's mistake; a package or device is lacking
GRACE_SECONDS = 10.0  # between TERM and KILL
TAIL_LINES = 15
SECRET_NAME = re.compile(r"(TOKEN|APIKEY|(^|_)KEY|SECRET|PASSWORD)$")
ROOT = Path(__file__).parents[1]
OURS = ("flows", "tasks", "evaluation", "rlhf_core")


class StageFailed(RuntimeError):
    """A stage's process ended without a result. `code`: its exit code, -n when signal n ended it; `tail`: the log's last lines."""

    def __init__(self, name: str, code: int, tail: tuple[str, ...]):
        self.name, self.code, self.tail = name, code, tail
        super().__init__(name, code, tail)

    @property
    def can_retry(self) -> bool:
        """Whether another attempt, which resumes from the last checkpoint, may end otherwise."""
        return self.code not in (WRONG_INPUT, ENVIRONMENT, -signal.SIGINT, 128 + signal.SIGTERM)

    def __str__(self) -> str:
        if self.code in (WRONG_INPUT, ENVIRONMENT):
            return f"stage {self.name}: {self.tail[-1] if self.tail else 'it refused to start and did not say why'}"
        how = f"exit code {self.code}, but there is no result" if self.code == 0 else f"exit code {self.code}"
        if self.code > 128 and (ended_by := _signal_name(self.code - 128)):
            how = f"ended by {ended_by}" + (" (the system kills so when memory runs out)" if ended_by == "SIGKILL" else "")
        return "\n  ".join([f"stage {self.name} failed ({how}); the last lines of its log:", *self.tail])


def launch(module: str, run_dir: Path, name: str, on_line: Callable[[str], None], grace_seconds: float = GRACE_SECONDS) -> StageResult:
    """Runs `python -m MODULE RUN_DIR` and waits for it. `on_line` gets each line of its output.

    The log says when each process started and, unless it was ended from here, when it ended.
    Raises StageFailed when the process ends and the directory holds no result. Whatever ends this call, an exception or a signal,
    ends the process and its descendants too.
    """
    run = RunDir(run_dir)
    command = [sys.executable, "-P", "-m", module, str(run.path)]
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    secrets = [value for key, value in os.environ.items() if SECRET_NAME.search(key) and len(value) >= 8]
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "rlhf_core.reaper", str(os.getpid()), str(grace_seconds), *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=child_environment(),
        start_new_session=True,
    )
    try:
        with (run / LOG).open("a") as log:
            log.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {name}\n")
            log.flush()  # each start is on record, also one that is killed before it says anything
            for line in _lines(process):
                for secret in secrets:
                    line = line.replace(secret, "***")
                log.write(line + "\n")
                log.flush()
                tail.append(line)
                on_line(line)
            code = process.wait()
            log.write(f"+++ {time.strftime('%Y-%m-%d %H:%M:%S')} {name} ended after {time.monotonic() - start:.2f} s with code {code}\n")
    finally:
        _end(process, grace_seconds)
    result = run.result()
    if result is None:
        raise StageFailed(name, code, tuple(tail))
    return result


def raised_by_us(error: BaseException) -> bool:
    """Whether our own code raised an error, and so wrote its message for the user; else a library did, and its traceback is needed."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and str(frames[-1].f_globals.get("__name__", "")).split(".")[0] in OURS


def child_environment() -> dict[str, str]:
    """A checkout that is not installed is put on the child's path; the working directory never is (`-P`): names there could hide ours."""
    paths = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    if ROOT.name not in ("site-packages", "dist-packages"):
        paths.append(str(ROOT))
    return {**os.environ, "PYTHONUNBUFFERED": "1", **({"PYTHONPATH": os.pathsep.join(paths)} if paths else {})}


def _lines(process: subprocess.Popen[bytes]) -> Iterator[str]:
    """The process's output by lines, until it closes it or ends; of a progress bar's many states the last."""
    assert process.stdout is not None
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while True:
            ready = selector.select(timeout=0.5)
            chunk = os.read(process.stdout.fileno(), 65536) if ready else b""
            *whole, rest = (rest + chunk).split(b"\n")
            yield from (_text(line) for line in whole)
            if (ready and not chunk) or (not ready and process.poll() is not None):
                break
    if rest.strip():
        yield _text(rest)


def _text(line: bytes) -> str:
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")


def _end(process: subprocess.Popen[bytes], grace_seconds: float) -> None:
    """Ends the reaper, which ends everything below it; a second interrupt while waiting does not cut that short."""
    while process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=grace_seconds + 5)
        except subprocess.TimeoutExpired:
            process.kill()
        except KeyboardInterrupt:
            continue
    if process.stdout is not None:
        process.stdout.close()


def _signal_name(number: int) -> str | None:
    try:
        return signal.Signals(number).name
    except ValueError:
        return None
