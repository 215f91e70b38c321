"""Reads rows with the tasks of an environment of the package `verifiers`, using the interpreter that has the
package. Starts `data/verifiers_driver` in that interpreter. Does not import verifiers. Torch-free."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

from rlhf_core.config.generated_data import VERIFIERS, VerifiersPrompts
from rlhf_core.data.rows.columns import Row
from rlhf_core.system.processes import ROOT, child_environment, how_ended

FOLDER = Path(__file__).parents[1] / "verifiers_driver"
# Imports the driver by its folder, because an interpreter with verifiers may not have alignflow.
START = (
    "import importlib.util as u, sys; f = sys.argv.pop(1); n = 'alignflow_verifiers_driver';"
    " s = u.spec_from_file_location(n, f + '/__init__.py', submodule_search_locations=[f]);"
    " m = sys.modules[n] = u.module_from_spec(s); s.loader.exec_module(m);"
    " import alignflow_verifiers_driver.driver_modes as d; d.main()"
)
RELEASE_SECONDS = 60.0
ROWS_SECONDS = 1800.0  # an environment may have to download its data set
TOLD = 400  # most characters of its error output in a message


class NoSuchInstallation(ValueError):
    """Raised when the interpreter, the package verifiers or the environment is missing."""


def driver_command(python: str | None, *arguments: str) -> list[str]:
    """Returns the command that runs the driver in an interpreter (None: this interpreter)."""
    return [python or sys.executable, "-P", "-c", START, str(FOLDER), *arguments]


def driver_environment() -> dict[str, str]:
    """Returns this process's environment variables for the driver, without alignflow's module path and
    without the variables that select an interpreter."""
    kept = child_environment()
    paths = [path for path in kept.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", str(ROOT))]
    for variable in ("PYTHONHOME", "VIRTUAL_ENV", "PYTHONPATH"):
        kept.pop(variable, None)
    return kept | ({"PYTHONPATH": os.pathsep.join(paths)} if paths else {})


def verifiers_release(name: str, python: str | None) -> Mapping[str, str]:
    """Returns the version of verifiers in an interpreter, and a digest of the environment's Python files.
    Raises NoSuchInstallation if the interpreter, the package or the environment is missing, and ValueError if
    the version or digest cannot be determined."""
    (found,) = _answered(json.dumps({"name": name}), "release", python, RELEASE_SECONDS)
    return found


def verifiers_problem(name: str, python: str | None) -> str:
    """Returns the message of the error that `verifiers_release` raises, or "" if it raises none."""
    try:
        verifiers_release(name, python)
    except ValueError as error:
        return str(error)
    return ""


def verifiers_rows(source: VerifiersPrompts, first: int | None) -> Iterator[Row]:
    """Yields the first `first` tasks (None: all) as rows: `prompt` (messages), `answer` if the task has a
    text answer, and `verifiers` (the task as JSON, which the environment accepts). Raises ValueError if the
    environment cannot be used."""
    counts = [count for count in (source.size, first) if count is not None]
    asked = {
        "name": source.environment,
        "options": source.options,
        "dataset": source.dataset,
        "sized": source.size is not None,
        "count": min(counts, default=None),
    }
    for task in deepcopy(_rows(json.dumps(asked), source.python)):
        answer = {"answer": task["answer"]} if isinstance(task.get("answer"), str) else {}
        yield {"prompt": task["prompt"], **answer, VERIFIERS: json.dumps(task["task"])}


@lru_cache(maxsize=8)
def _rows(asked: str, python: str | None) -> tuple[dict[str, Any], ...]:
    return tuple(_answered(asked, "rows", python, ROWS_SECONDS))


def _answered(asked: str, mode: str, python: str | None, seconds: float) -> list[dict[str, Any]]:
    """Returns the objects that the driver wrote. Raises ValueError if the driver reported a problem, did not
    end in time, or failed. Raises NoSuchInstallation if the interpreter is missing, or if the driver reported
    a problem in mode `release`."""
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        try:
            done = subprocess.run(
                driver_command(python, mode),
                input=asked + "\n",
                stdout=subprocess.PIPE,
                stderr=said,
                env=driver_environment(),
                text=True,
                check=False,
                timeout=seconds,
            )
        except OSError as error:
            missing = isinstance(error, FileNotFoundError | NotADirectoryError | PermissionError)
            raise (NoSuchInstallation if missing else ValueError)(
                f"{VERIFIERS}: the interpreter {python} cannot be started ({error.strerror}): correct python"
            ) from error
        except subprocess.TimeoutExpired:
            raise ValueError(
                f"{VERIFIERS}: its {mode} took more than {seconds:g} s: look at the environment"
            ) from None
        said.seek(0)
        told = said.read()[-TOLD:].strip()
    try:
        lines = [json.loads(line) for line in done.stdout.splitlines()]
    except ValueError:
        lines = []
    if lines and "problem" in lines[-1]:
        kind = NoSuchInstallation if mode == "release" else ValueError
        raise kind(f"{VERIFIERS}: {lines[-1]['problem']}")
    if done.returncode or (mode == "release" and len(lines) != 1):
        raise ValueError(
            f"{VERIFIERS}: the process in {python or sys.executable} {how_ended(done.returncode)}:"
            f" {told or 'it wrote no error'}"
        )
    return lines
