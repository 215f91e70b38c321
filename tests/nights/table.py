"""Writes the page of a run of nights from its results: `python -m tests.nights.table` writes it anew."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_core.system.files import write_text
from rlhf_core.system.markdown_table import table
from tests.nights.verdicts import HELD_OUT, MARGIN, Check, verdicts

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "nights.md"
# by file
RESULTS = {
    "faults": Path(__file__).with_name("results.json"),
    "faults-long": Path(__file__).with_name("results-long.json"),
}
WORDS = {
    "poisoned": "poisoned feedback",
    "length_judge": "judge prefers length",
    "drift": "topics drift",
    "full_disk": "full disk",
    "killed": "kill -9",
    "hub_outage": "Hub outage",
    "silent_approver": "approver is silent",
}
HEAD = f"""# Nights

`make nights` runs a loop with simulated users (tests/nights). Each day they ask the champion questions whose right answers are known,
and rank, edit or rate its answers by one fixed preference, over HTTP. Each night the flow `loop` trains a round on that (DPO); a judge,
which a calibration compares with people's new labels, compares it with the champion; gates hold it back, or a person approves it and it is
published. Faults are planted in some nights. Engines, commands and endpoints are the real ones, with a model of a million parameters on a
CPU; the Hub and the judge's endpoint are doubles on this machine.

- *Right answers*: the probability, at temperature 1, that a model gives exactly the right answer; the mean over {HELD_OUT:,} held-out
  questions that no other part of the run has seen. It is computed, not sampled.
- *Better*, *worse*: by at least {100 * MARGIN:g} point, with a 95 % interval (paired by question) beyond 0. A champion is compared with
  every champion before it.
- *Promoted*: the candidate became the champion, in its own night or in a later one that completed its round.
- A *false alarm* in the control: a gate of the calibration or of the drift stage fails, or a run does. A candidate that the evaluation's
  gate holds back is no alarm.
- *Nothing lost, nothing done twice*: each accepted row of feedback is in the inbox once and in one round, a used or a refused one; rows
  sent again add nothing; each round is trained once; each champion has one commit and one tag on the Hub, in order, and the branch
  `champion` is at the last one.

`tests/nights/faults.yaml` says what goes wrong in which night: `python -m tests.nights.run_all --faults FILE` takes another file,
`make nights-long` those of `faults-long.yaml`. The full disk is a small tmpfs in a user namespace: `unshare --user --map-root-user --mount`
must work, which needs no privileges where the system lets users make namespaces.
"""


def page(results: Mapping[str, Any], longer: Mapping[str, Any] | None = None) -> str:
    """The whole page. `longer`: the results of more nights, of which it has the checks alone."""
    run = results["run"]
    control = results["control"]
    parts = [
        HEAD,
        *_checks(results),
        *([] if longer is None else ["\n## More nights\n", *_checks(longer)]),
        "\n## With faults\n",
        nights_table(run),
        "\n## Where each fault is named\n",
        table(
            ("night", "fault", "named on"),
            [
                (n["number"], WORDS[kind], f"{_plain(where) or '**nowhere**'}")
                for n in run["nights"]
                for kind, where in n["named"].items()
            ],
        ),
    ]
    if control is not None:
        parts += ["\n## The control: the same seed without faults\n", nights_table(control)]
    return "\n".join(parts) + "\n"


def _checks(results: Mapping[str, Any]) -> list[str]:
    run = results["run"]
    minutes = sum(night["seconds"] for night in run["nights"]) / 60
    rows = [
        (one.name, "yes" if one.passed else "**no**", _plain(one.found))
        for one in verdicts(run, results["control"])
    ]
    said = f"Seed {run['seed']}. {len(run['nights'])} nights took {minutes:.0f} minutes.\n"
    return [said, table(("shown", "result", "numbers"), rows)]


def write_page() -> None:
    """Writes the page of the stored results."""
    found = [json.loads(file.read_text()) if file.exists() else None for file in RESULTS.values()]
    write_text(PAGE, page(*found))


def nights_table(run: Mapping[str, Any]) -> str:
    """A row for each night."""
    rounds = {one["round"]: one for one in run["rounds"]}
    rows = []
    for night in run["nights"]:
        one = rounds.get(night["round"])
        change = (
            f"{100 * one['gain']['mean']:+.1f} ({100 * one['gain']['low']:+.1f} to"
            f" {100 * one['gain']['high']:+.1f})"
            if one
            else "–"
        )
        right = f"{100 * one['right']:.1f} %" if one else "–"
        new = night["champion_after"] != night["champion"]
        failed = (
            night["states"][-1]
            if "GateFailed" not in night["states"][-1] and not night["states"][-1].startswith("COMPLETED")
            else ""
        )
        end = (
            "champion"
            if new
            else _short(failed) or "; ".join(map(_short, night["gates"])) or _short(night["states"][-1])
        )
        rows.append(
            (
                night["number"],
                ", ".join(WORDS[kind] for kind in night["faults"]) or "–",
                night["round"],
                right,
                change,
                _plain(end),
            )
        )
    return table(
        ("night", "planted", "round", "right answers", "against the champion, points", "end of the night"),
        rows,
    )


def told(checks: list[Check]) -> str:
    """The checks for a terminal."""
    return "\n".join(f"{'yes' if check.passed else 'NO '}  {check.name}: {check.found}" for check in checks)


def _short(text: str) -> str:
    for beginning in (
        "COMPLETED nights of town: ",
        "FAILED Flow run encountered an exception: ",
        "StageFailed: ",
    ):
        text = text.removeprefix(beginning)
    return text if len(text) <= 160 else text[:157] + "..."


def _plain(text: str) -> str:
    return text.replace("|", "/").replace("<", "&lt;")[:220]


if __name__ == "__main__":
    write_page()
