"""Modules of a user with the names of ours or of the standard library: an import of one is recorded and
fails."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMES = ("tasks.py", "flows/__init__.py", "evaluation.py", "tokenize.py", "rlhf_core/__init__.py")
MARK = "imported.txt"
CODE = """
import sys
from pathlib import Path
with open({mark!r}, "a") as file:
    file.write(f"{{__name__}} by {{sys.orig_argv}}\\n")
raise ImportError(f"{{__name__}} of the working directory was imported")
"""


def write(folder: Path) -> None:
    """Writes the modules into a folder."""
    for name in NAMES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(CODE.format(mark=str(folder / MARK)))


def imported(folder: Path) -> str:
    """Returns which of them were imported and by which commands; empty if none was."""
    return (folder / MARK).read_text() if (folder / MARK).exists() else ""


def environment() -> dict[str, str]:
    """Returns an environment that finds this checkout like an installed package, without PYTHONSAFEPATH."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"} | {
        "PYTHONPATH": str(ROOT)
    }
