"""Plants each fault of planted.json in a copy of the code and runs the tests named with it: they must fail.

    python tests/mutations/run_all.py [NUMBER ...]

With numbers, only those faults. Prints a line for each fault; exits with 1 when tests missed one, or when its
text is not found exactly once.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("rlhf_core", "evaluation", "tasks", "flows", "deployments", "tests", "docs")
SECONDS = 300


def main() -> int:
    faults = dict(enumerate(json.loads(Path(__file__).with_name("planted.json").read_text()), 1))
    faults = {
        number: fault for number, fault in faults.items() if len(sys.argv) == 1 or str(number) in sys.argv[1:]
    }
    caught = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in COPIED:
            shutil.copytree(
                ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
            )
        for file in ROOT.iterdir():
            if file.is_file():
                shutil.copy(file, copy)
        for number, fault in faults.items():
            outcome = try_fault(copy, **fault)
            caught += outcome == "caught"
            print(
                f"{number:2} {outcome:8} {fault['file']}: {fault['old'].strip()!r} ->"
                f" {fault['new'].strip()!r}",
                flush=True,
            )
    print(f"{caught} of {len(faults)} caught")
    return 0 if caught == len(faults) else 1


def try_fault(copy: Path, file: str, old: str, new: str, tests: str) -> str:
    """Returns `caught`, `missed`, or `stale` when `old` is not in the file exactly once. The file is as
    before afterwards."""
    path = copy / file
    text = path.read_text()
    if text.count(old) != 1:
        return "stale"
    path.write_text(text.replace(old, new))
    try:
        run = subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                "-xq",
                "-p",
                "no:cacheprovider",
                "-m",
                "not slow and not long and not gpu",
                *tests.split(),
            ],
            cwd=copy,
            env=os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            timeout=SECONDS,
        )
        return "caught" if run.returncode == 1 else "missed"
    except subprocess.TimeoutExpired:
        return "caught"
    finally:
        path.write_text(text)


if __name__ == "__main__":
    sys.exit(main())
