"""Writes the page of a run of nights from its results: `python -m tests.nights.table` writes it anew."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_core.system.markdown_table import table
from tests.nights.verdicts import MARGIN, Check, verdicts

ROOT = Path(__file__).parents[2]
RESULTS, PAGE = Path(__file__).with_name("results.json"), ROOT / "docs" / "reference" / "nights.md"
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

`make nights` lets a simulated town live with a loop (tests/nights): each day people ask the champion questions whose right answers are
known, and rank, edit or rate its answers by one taste; each night a round is trained on that, judged by a judge that a calibration checks
against people's labels, held back or not by gates, approved by a person, and published. Faults are planted in some nights
(`tests/nights/faults.yaml`). The engines, the commands and the endpoints are the real ones, with a model of a million parameters on a CPU;
the Hub and the judge's endpoint are doubles.

*Right answers*: the probability, at temperature 1, that the model gives exactly the right answer, mean over held-out questions that no
other part of the run has seen. *Better* and *worse*: by at least {100 * MARGIN:g} point, with a paired 95 % interval beyond 0.
"""


def page(results: Mapping[str, Any]) -> str:
    """The whole page."""
    run, control = results["run"], results["control"]
    checks = verdicts(run, control)
    parts = [
        HEAD,
        f"Seed {run['seed']}. {len(run['nights'])} nights took {sum(night['seconds'] for night in run['nights']) / 60:.0f} minutes.\n",
        table(("shown", "result", "numbers"), [(check.name, "yes" if check.passed else "**no**", _plain(check.found)) for check in checks]),
        "\n## With faults\n",
        nights_table(run),
        "\n## Where each fault is named\n",
        table(
            ("night", "fault", "named on"),
            [(n["number"], WORDS[kind], f"{_plain(where) or '**nowhere**'}") for n in run["nights"] for kind, where in n["named"].items()],
        ),
    ]
    if control is not None:
        parts += ["\n## The control: the same seed without faults\n", nights_table(control)]
    return "\n".join(parts) + "\n"


def nights_table(run: Mapping[str, Any]) -> str:
    """A row for each night."""
    rounds = {one["round"]: one for one in run["rounds"]}
    rows = []
    for night in run["nights"]:
        one = rounds.get(night["round"])
        change = f"{100 * one['gain']['mean']:+.1f} ({100 * one['gain']['low']:+.1f} to {100 * one['gain']['high']:+.1f})" if one else "–"
        right = f"{100 * one['right']:.1f} %" if one else "–"
        new = night["champion_after"] != night["champion"]
        end = "champion" if new else "; ".join(map(_short, night["gates"])) or _short(night["states"][-1])
        rows.append(
            (night["number"], ", ".join(WORDS[kind] for kind in night["faults"]) or "–", night["round"], right, change, _plain(end))
        )
    return table(("night", "planted", "round", "right answers", "against the champion, points", "end of the night"), rows)


def told(checks: list[Check]) -> str:
    """The checks for a terminal."""
    return "\n".join(f"{'yes' if check.passed else 'NO '}  {check.name}: {check.found}" for check in checks)


def _short(text: str) -> str:
    return text.removeprefix("COMPLETED nights of town: ")[:160]


def _plain(text: str) -> str:
    return text.replace("|", "/").replace("<", "&lt;")[:220]


if __name__ == "__main__":
    PAGE.write_text(page(json.loads(RESULTS.read_text())))
