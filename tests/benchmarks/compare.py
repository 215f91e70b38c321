"""Compares a new run with the stored one of the same name: `python -m tests.benchmarks.compare NEW.json
[--share 0.1]`.

Exit code 1 when a figure is worse by more than the share, or missing in the new run; 2 when there is nothing
to compare with.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.benchmarks.record import RESULTS, load


class Line(NamedTuple):
    """One figure: stored and new value, new divided by stored, and whether that is worse than allowed."""

    name: str
    stored: float
    new: float
    ratio: float
    worse: bool


def compare(stored: dict[str, Any], new: dict[str, Any], share: float) -> Iterator[Line]:
    """A line for each stored figure that has a better direction. A figure that is missing or not finite is
    worse."""
    for name, figure in stored["figures"].items():
        if figure["better"] is None:
            continue
        before = figure["value"]
        value = new["figures"].get(name, {"value": math.nan})["value"]
        ratio = value / before if before else math.nan
        allowed = ratio <= 1 + share if figure["better"] == "lower" else ratio >= 1 / (1 + share)
        yield Line(name, before, value, ratio, not allowed)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("new", type=Path, metavar="NEW.json")
    parser.add_argument(
        "--share", type=float, default=0.1, help="how much worse a figure may be: 0.1 is a tenth"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the stored records")
    arguments = parser.parse_args()
    try:
        new = load(arguments.new)
        stored = load(arguments.results / f"{new['name']}.json")
    except (OSError, ValueError) as error:
        print(f"nothing to compare: {error}", file=sys.stderr)
        return 2
    for key in ("hardware", "versions", "settings"):
        if stored[key] != new[key]:
            print(f"{key} differ: {stored[key]} and {new[key]}")
    lines = list(compare(stored, new, arguments.share))
    for line in lines:
        print(
            f"{line.name:40} {line.stored:12g} {line.new:12g}  ratio"
            f" {line.ratio:.3f}{'  WORSE' if line.worse else ''}"
        )
    return int(any(line.worse for line in lines))


if __name__ == "__main__":
    sys.exit(main())
