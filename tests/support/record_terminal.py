"""Records what a run shows on a terminal into docs/reference/terminal.md: at 5 s, at 30 s, in PPO, at the
end.

    python -m tests.support.record_terminal                 # the demo, in a temporary folder; about six
    minutes on two idle cores
    python -m tests.support.record_terminal RECIPE [OVERRIDES]      # another recipe, printed in place of the
    page

The demo is the run that the page shows.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path

from tests.support.screen import Terminal

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "terminal.md"
WIDTH = 110
HEIGHT = 30
SECONDS = 3600
IN_PPO = re.compile(r"▶ ppo .* (\d+)/(\d+) ")
HEAD = """# The terminal

On a terminal, `alignflow run`, `stage` and `demo` show a line for each stage: its mark (`▶` running, `✓` done, `·` waiting, `✗` failed), its
run time, and what it does or waits for. A stage that reports its steps has a bar, its pace, the time left and its last metrics. If there are
more stages than rows, running and failed stages are shown, and the others are counted. The log goes to `ARTIFACTS/RECIPE/runs/ID.log`, next
to the run's record. With `--plain`, in a pipe, in CI (`CI` is set), or if `TERM` is `dumb`, the output is the log. `NO_COLOR=1` turns off
colours.

Ctrl-C ends the running stages, which may take some seconds, and then prints a table of the stages.
"""
DEMO = "This is `alignflow demo` on two cores, recorded by `python -m tests.support.record_terminal`."


def record(command: list[str], folder: Path) -> dict[str, str]:
    """Runs a command on a terminal. Returns its screens by title. Raises RuntimeError with the last one when
    it fails."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("CI", "NO_COLOR", "PREFECT_API_URL")
    }
    screens: dict[str, str] = {}
    rows = 0

    def see(now: Terminal) -> None:
        nonlocal rows
        text = now.screen.text()
        if "stages done" not in text or text.count("\n") < rows:
            return  # between two pictures
        rows = text.count("\n")
        for second in (5, 30):
            if now.seconds >= second:
                screens.setdefault(f"After {second} seconds", text)
        half = IN_PPO.search(text)
        if half and int(half[1]) * 2 >= int(half[2]):
            screens.setdefault("In PPO", text)

    paths = environment | {"TERM": "xterm-256color", "PYTHONPATH": str(ROOT)}
    shown = Terminal(command, folder, paths, WIDTH, HEIGHT)
    code = shown.run(see, SECONDS)
    if code:
        raise RuntimeError(f"{' '.join(command)}: exit code {code}\n{shown.screen.text()}")
    return screens | {"At the end": shown.screen.text()}


def page(screens: dict[str, str], told: str) -> str:
    """Returns the screens as markdown. `told`: what was recorded."""
    parts = [f"## {title}\n\n```text\n{text}\n```\n" for title, text in screens.items()]
    return "\n".join([HEAD, f"{told}\n", *parts])


def main(given: list[str]) -> None:
    command = [sys.executable, "-P", "-m", "flows.cli", *(["run", *given] if given else ["demo"])]
    with tempfile.TemporaryDirectory(prefix="alignflow-terminal-") as name:
        folder = Path.cwd() if given else Path(name)
        told = f"This is `alignflow run {' '.join(given)}`." if given else DEMO
        text = page(record(command, folder), told).replace(f"{folder.resolve()}/", "")
    if given:
        print(text)
    else:
        PAGE.write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])
