"""Shows a run on the terminal while it is in progress, and redirects its output to a log.

Meanwhile the file descriptors are redirected, so anything that this process, its threads, libraries and
children would write to the terminal goes to the log. No matter how the block ends, the live lines are
removed, the cursor is shown and the descriptors are restored.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.live import Live

from flows.cli.show import console, say
from flows.cli.terminal.frame import RunMoment, StageLine, frame
from rlhf_core.recipe.plan import Node, Plan
from rlhf_core.runs.run_records import RUNS

SECONDS = 0.25  # between two frames
INTERRUPTED = "interrupted: ending the running stages"
Say = Callable[[str], None]


def is_watched(plain: bool) -> bool:
    """Returns whether to show live lines. This requires a terminal that can move its cursor, a command
    without `plain`, and no CI job, because the logs of CI jobs keep every line."""
    in_ci = os.environ.get("CI", "").lower() not in ("", "0", "false")
    return not plain and not in_ci and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


@contextmanager
def working(told: str, plain: bool) -> Iterator[None]:
    """Shows the text `told` with a spinner during the block if the output is a terminal."""
    if not is_watched(plain):
        yield
        return
    with console.status(told):
        yield


@contextmanager
def live_view(planned: Plan, nodes: tuple[Node, ...], identity: str, plain: bool) -> Iterator[Say]:
    """Shows the run with this id during the block if `is_watched`. Yields a function that sets the text about
    the run's own activity."""
    if not is_watched(plain):
        yield lambda doing: None
        return
    from flows.cli.terminal.watch import RunWatch

    log = planned.folder / RUNS / f"{identity}.log"
    say(f"log: {os.path.relpath(log)}")
    with ExitStack() as ends:
        screen = Console(
            file=ends.enter_context(os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding=sys.stdout.encoding))
        )
        ends.enter_context(redirected(log))
        picture = Picture(screen, RunWatch(planned, nodes, identity).moment)
        ends.enter_context(picture.shown())
        ends.enter_context(_interrupts_told(picture.say))
        yield picture.say


@contextmanager
def redirected(log: Path) -> Iterator[None]:
    """Redirects standard output and error, if they go to a terminal, to a file during the block. Removes
    the file if it stays empty."""
    log.parent.mkdir(parents=True, exist_ok=True)
    streams = [stream for stream in (sys.stdout, sys.stderr) if stream.isatty()]
    kept = [(stream, stream.fileno(), os.dup(stream.fileno())) for stream in streams]
    with log.open("ab") as file:
        for stream, descriptor, _ in kept:
            stream.flush()
            os.dup2(file.fileno(), descriptor)
    try:
        yield
    finally:
        for stream, descriptor, terminal in kept:
            stream.flush()
            os.dup2(terminal, descriptor)
            os.close(terminal)
        with suppress(OSError):
            if not log.stat().st_size:
                log.unlink()
                log.parent.rmdir()  # unless something else is there
                log.parents[1].rmdir()


class Picture:
    """Draws a run repeatedly in its own thread."""

    def __init__(self, screen: Console, moment: Callable[[str], RunMoment]):
        self._screen = screen
        self._moment = moment
        self._doing = ""
        self._over = threading.Event()
        self._width = screen.width
        self._live = Live(
            console=screen,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            vertical_overflow="crop",
        )

    def say(self, doing: str) -> None:
        """Sets the text about the run's own activity."""
        self._doing = doing

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Draws during the block, then removes the drawn lines."""
        thread = threading.Thread(target=self._draw_on, name="terminal", daemon=True)
        self._live.start()
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()
            self._live.stop()

    def _draw_on(self) -> None:
        told = over = False
        while not over:
            over = self._over.wait(SECONDS)  # draws once more after the end, so that it is visible
            try:
                self._draw()
            except Exception:  # a drawing error must not fail the run
                if not told:
                    logging.getLogger(__name__).exception("the live lines could not be drawn")
                told = True

    def _draw(self) -> None:
        # the terminal has wrapped the old lines, so their position is unknown
        if self._screen.width != self._width:
            self._width = self._screen.width
            self._live.stop()
            self._screen.clear()
            self._live.start()
        moment = self._moment(self._doing)
        if self._doing == INTERRUPTED:
            moment = replace(moment, lines=[_without_plans(line) for line in moment.lines])
        width, height = self._screen.size
        self._live.update(frame(moment, width, height, self._screen.options.ascii_only), refresh=True)


def _without_plans(line: StageLine) -> StageLine:
    """Returns a stage's line for a run that is ending, in which a waiting stage will not start."""
    return line._replace(text="") if line.state == "waiting" else line


@contextmanager
def _interrupts_told(say: Say) -> Iterator[None]:
    """At Ctrl-C, reports that stages are being ended, which may take seconds, and calls the previous
    handler."""
    before = signal.getsignal(signal.SIGINT)
    if not callable(before):
        yield
        return

    def told(number: int, place: FrameType | None) -> None:
        say(INTERRUPTED)
        before(number, place)

    signal.signal(signal.SIGINT, told)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
