"""`make nights`: lives some nights with planted faults, then the same nights without, and checks what they
had to show.

    python -m tests.nights.run_all                                  # faults.yaml and its control; writes
    docs/reference/nights.md
    python -m tests.nights.run_all --faults mine.yaml               # other faults; the checks are only
    printed
    python -m tests.nights.run_all --only control                   # one of the two runs; the other one's
    results are kept

Exit code 1 when a check fails. Everything that can be read of the runs (logs, reports, pages) is in
build/nights.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar

from rlhf_core.system.files import write_text
from tests.nights.disk import enter_own_mounts, mount_disk
from tests.nights.faults import Faults, read_faults
from tests.nights.record import copy_texts, recorded
from tests.nights.start import ROOT, first_model, living
from tests.nights.table import RESULTS, told, write_page
from tests.nights.verdicts import verdicts

MODULE = "tests.nights.run_all"
DISK_MIB = 50  # for each night


def run(name: str, faults: Faults, out: Path) -> Iterator[dict[str, Any]]:
    """Lives the nights in a new folder of `out` and yields what has happened, after each night. Weights are
    lost with the small disk."""
    place = out / name
    shutil.rmtree(place, ignore_errors=True)
    mount_disk(place / "disk", DISK_MIB * faults.nights)
    (place / "pages").mkdir()
    with living(place / "disk" / "town", place / "home", first_model(out / "start"), faults) as (
        life,
        held_out,
    ):
        nights = []
        for number in range(1, faults.nights + 1):
            night = life.live(number)
            nights.append(night)
            planted = f" ({', '.join(night.faults)})" if night.faults else ""
            print(
                f"{name}, night {number}{planted}: {night.seconds:.0f} s, {night.states[-1].splitlines()[0]}",
                flush=True,
            )
            write_text(place / "pages" / f"night{number:02d}.json", json.dumps(night.pages, indent=1))
            copy_texts(life.here.folder, place / "town")
            yield recorded(life, nights, held_out)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--faults",
        type=Path,
        default=Path(__file__).with_name("faults.yaml"),
        help="which fault in which night",
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build" / "nights", help="folder of logs and pages"
    )
    parser.add_argument("--only", choices=("run", "control"), help="live one of the two")
    parser.add_argument(
        "--no-page", action="store_true", help="leave the page, and the results that it is of, as they are"
    )
    given = parser.parse_args()
    try:
        faults = read_faults(given.faults)
        enter_own_mounts(MODULE)
    except (OSError, ValueError) as error:
        parser.exit(2, f"{error}\n")
    disable_progress_bar()
    out = given.out.absolute()
    file = given.out.absolute() / f"{given.faults.stem}.json"
    results: dict[str, Any] = (
        json.loads(file.read_text()) if given.only and file.exists() else {"run": None, "control": None}
    )
    for name, planted in (("run", faults), ("control", faults.none)):
        if given.only in (None, name):
            for so_far in run(name, planted, out):
                results[name] = so_far
                write_text(file, json.dumps(results, indent=1))
    if results["run"] is None:
        return 0
    checks = verdicts(results["run"], results["control"])
    kept = (
        RESULTS.get(given.faults.stem)
        if given.faults.resolve().parent == Path(__file__).resolve().parent
        else None
    )
    if kept is not None and not given.no_page:
        # errors name files of this machine
        write_text(kept, json.dumps(results, indent=1).replace(f"{out}/", "") + "\n")
        write_page()
    print(told(checks))
    return 0 if all(check.passed for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
