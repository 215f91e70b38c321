"""Is it the SFT, the reward model or PPO? The answer that the gates of a run give, one line for each such stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from evaluation.summary import Evidence

ASKED = {"sft": "Is my SFT bad?", "reward_model": "Is my reward model bad?", "ppo": "Is my PPO bad?"}


class Suspect(NamedTuple):
    """A question, the stage it is about, and the answer. `bad` None: nothing known."""

    question: str
    stage: str
    bad: bool | None
    answer: str


def suspects(stages: Sequence[Evidence]) -> list[Suspect]:
    """In the order of the recipe; the rounds of a loop are left to the table of gates. Empty when no stage has a gate."""
    if not any(stage.view.gates for stage in stages):
        return []
    asked = [stage for stage in stages if stage.view.kind in ASKED and ".round" not in stage.view.name]
    return [Suspect(ASKED[stage.view.kind], stage.view.name, *_answer(stage)) for stage in asked]


def _answer(stage: Evidence) -> tuple[bool | None, str]:
    gates = stage.view.gates
    if stage.result is None:
        return None, "Not known: it was not run." if stage.view.status == "not run" else "Not known: it did not finish."
    if not gates:
        return None, "Not known: it has no gates."
    failed = [gate for gate in gates if not gate.passed]
    told = ", ".join(f"{v.gate.metric} {'is missing' if v.value is None else f'{v.value:.3g}'} ({v.gate.bound})" for v in failed or gates)
    if failed:
        return True, f"Yes: {told}. {failed[0].meaning}".strip()
    return False, f"No, by its gates: {told}."
