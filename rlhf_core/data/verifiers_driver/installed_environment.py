"""Finds an installed environment without importing it. Standard library only."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from .driver_errors import Problem


def release_of(name: str) -> dict[str, str]:
    """Returns the version of verifiers, and a digest of the environment's Python files. Raises Problem if
    either is missing."""
    try:
        installed = version("verifiers")
    except PackageNotFoundError:
        raise Problem(
            f"{sys.executable} has no package verifiers: install it there, or name another interpreter in"
            " python"
        ) from None
    module = name.rsplit("/", 1)[-1].partition("@")[0].replace("-", "_")
    spec = importlib.util.find_spec(module)
    files = _files_of(spec) if spec is not None else _shipped(module)
    if not files:
        raise Problem(
            f"{sys.executable} has no environment {name!r} (module {module}): install its package there"
        )
    code = hashlib.sha256()
    for file in files:
        code.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return {"verifiers": installed, "code": code.hexdigest()}


def _files_of(spec: ModuleSpec) -> list[Path]:
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    files = [file for folder in folders for file in sorted(folder.rglob("*.py"))]
    return files or [Path(str(spec.origin))]


def _shipped(module: str) -> list[Path]:
    """Returns the files of a taskset that verifiers ships. Searches the folder of verifiers, because looking
    up the module would import the package."""
    package = importlib.util.find_spec("verifiers")
    folders = [] if package is None else list(package.submodule_search_locations or ())
    tasksets = [Path(folder, "v1", "tasksets", module) for folder in folders]
    return [file for folder in tasksets for file in sorted(folder.rglob("*.py"))]
