"""Our stages and losses against TRL's, recorded in tests/agreement/trl.json: 20 optimiser steps on the same
model, rows and order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rlhf_core.stages.kto
import rlhf_core.stages.sft
from tests.agreement import material, ours
from tests.agreement.compare import (
    TOLERANCE,
    check_material,
    goldens,
    of_curves,
    of_losses,
    of_odds,
    relative,
)

TRL = goldens()
SEEN = 20 * TOLERANCE  # what a planted change must make at least


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("agreement")
    material.make(made)
    check_material(made, TRL)
    return made


@pytest.mark.parametrize("name", material.CASES)
def test_twenty_steps_agree(name: str, folder: Path, tmp_path: Path) -> None:
    theirs = TRL["curves"][name]
    curve = ours.train(material.CASES[name], folder, tmp_path / "run")
    assert (
        {len(curve[column]) for column in ("loss", "grad_norm", "learning_rate")} == {material.STEPS} == {20}
    )
    assert relative([min(curve["loss"])], [max(curve["loss"])]) > 1000 * TOLERANCE, (
        "the loss must move, or nothing is compared"
    )
    assert min(curve["moved"].values()) > 0.01, "every weight must move"
    for what, difference in of_curves(curve, theirs).items():
        assert difference < TOLERANCE, what


def test_both_sides_clip_some_gradients_and_not_others() -> None:
    norms = [norm for curve in TRL["curves"].values() for norm in curve["grad_norm"]]
    assert min(norms) < material.OPTIMISER["max_norm"] < max(norms)


def test_the_kl_of_kto_is_not_just_its_clamp() -> None:
    assert sum(kl > 0.1 for kl in TRL["curves"]["kto"]["kl"]) > 10


@pytest.mark.parametrize("name", material.RL)
def test_losses_on_recorded_tensors_agree(name: str, folder: Path) -> None:
    case = material.RL[name]
    found = of_losses(
        ours.rl_loss(case, folder, TRL["tensors"]), TRL["losses"][name], with_loss=not case.on_policy
    )
    for what, difference in found.items():
        assert difference < TOLERANCE, what


def test_the_odds_ratio_of_orpo_agrees() -> None:
    for what, difference in of_odds(ours.odds_ratio(material.odds()), TRL["odds"]).items():
        assert difference < TOLERANCE, what


def test_other_material_than_that_of_the_goldens_is_named(tmp_path: Path) -> None:
    material.make(tmp_path)
    with (tmp_path / "pairs.jsonl").open("a") as file:
        file.write("{}\n")
    with pytest.raises(ValueError, match=r"digest .* record the goldens again"):
        check_material(tmp_path, TRL)


def test_the_page_has_every_case_and_these_versions() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "agreement.md").read_text()
    for name in (*material.CASES, *material.RL):
        assert f"| {name} |" in page, "run: python -m tests.agreement.compare"
    assert ", ".join(f"{name} {version}" for name, version in TRL["versions"].items()) in page, (
        "run: python -m tests.agreement.compare"
    )


PLANTED: list[tuple[str, dict[str, Any]]] = [
    ("sft, padded", {"betas": (0.9, 0.96)}),
    ("sft, padded", {"weight_decay": 0.0}),
    ("sft, padded", {"max_norm": 1.1}),
    ("sft, padded", {"learning_rate": 3.01e-3}),
    ("reward model, margin and centring", {"centering": 0.012}),
    ("dpo, sigmoid", {"beta": 0.11}),
    ("dpo, sigmoid with nll", {"nll_coef": 0.21}),
    ("dpo, cDPO", {"label_smoothing": 0.11}),
    ("dpo, ipo", {"loss": "ipo_sum"}),
    ("simpo", {"gamma": 1.01}),
    ("kto", {"w_desirable": 1.51}),
]


@pytest.mark.parametrize(("name", "change"), PLANTED, ids=lambda value: str(value))
def test_a_planted_change_is_seen(name: str, change: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    case = material.CASES[name]
    curve = ours.train(case._replace(ours={**case.ours, **change}), folder, tmp_path / "run")
    found = of_curves(curve, TRL["curves"][name])
    assert max(found["loss"], found["grad_norm"]) > SEEN, found


def test_one_token_too_many_in_a_denominator_is_seen(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = rlhf_core.stages.sft.count
    monkeypatch.setattr(
        rlhf_core.stages.sft,
        "count",
        lambda documents: count(documents)._replace(tokens=count(documents).tokens + 1),
    )
    curve = ours.train(material.CASES["sft, padded"], folder, tmp_path / "run")
    assert of_curves(curve, TRL["curves"]["sft, padded"])["loss"] > SEEN


def test_mismatched_pairs_the_other_way_round_are_seen(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def the_answer_after(indices: list[int]) -> list[tuple[int, int]]:
        return [(index, indices[(i + 1) % len(indices)]) for i, index in enumerate(indices)]

    monkeypatch.setattr(rlhf_core.stages.kto, "mismatches_of", the_answer_after)
    curve = ours.train(material.CASES["kto"], folder, tmp_path / "run")
    assert of_curves(curve, TRL["curves"]["kto"])["kl"] > SEEN


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("grpo", {"aggregation": "token"}),
        ("grpo, token mean", {"aggregation": "sequence"}),
        ("grpo, kl", {"beta": 0.041}),
        ("grpo, importance weights", {"cap": 1.6}),
        ("grpo, dual clip", {"ours": {}}),
        ("gspo", {"ours": {}}),
        ("dr_grpo", {"ours": {"generate_max_len": 17}}),
        ("rloo, kl, on policy (gradient)", {"beta": 0.051}),
    ],
    ids=str,
)
def test_a_planted_change_in_an_objective_is_seen(name: str, change: dict[str, Any], folder: Path) -> None:
    case = material.RL[name]._replace(**change)
    found = of_losses(
        ours.rl_loss(case, folder, TRL["tensors"]), TRL["losses"][name], with_loss=not case.on_policy
    )
    assert found["gradient"] > SEEN, found
