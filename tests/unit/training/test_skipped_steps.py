"""Steps whose loss or gradient norm is not finite are left out, up to a budget: their rows are told, and
nothing is trained on them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import rlhf_core.stages.sft
from rlhf_core.config import SFT, Data
from rlhf_core.config.training.schedule_fields import ScheduleFields
from rlhf_core.objectives.losses import Loss
from rlhf_core.runs.metrics_log import read_metrics
from rlhf_core.runs.run_dir import Outcome, RunDir
from rlhf_core.training import train_loop
from rlhf_core.training.engine import TorchEngine
from rlhf_core.training.learning_rate import learning_rate
from rlhf_core.training.skipped_steps import NONFINITE_STEPS
from tests.support.stage_request import stage_request

BROKEN = "a row that breaks the loss"


@pytest.fixture
def rows(material: Path, tmp_path: Path) -> Path:
    """40 conversations, of which two are broken."""
    lines = (material / "sft.jsonl").read_text().splitlines()[:38]
    bad = [
        json.dumps(
            {
                "messages": [
                    {"role": "user", "content": f"{BROKEN} {n}"},
                    {"role": "assistant", "content": "x"},
                ]
            }
        )
        for n in "01"
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join([*lines[:10], bad[0], *lines[10:30], bad[1], *lines[30:]]) + "\n")
    return file


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch, material: Path) -> None:
    """Makes the loss of a pass with a broken row infinite; a constant, which has no gradient."""
    from rlhf_core.data.chat import load_tokenizer

    tokenizer = load_tokenizer(str(material / "base"), False)
    sound = rlhf_core.stages.sft.sft_loss
    marker = torch.tensor(tokenizer(BROKEN, add_special_tokens=False).input_ids)
    seen: list[torch.Tensor] = []
    collate = rlhf_core.stages.sft.collate

    def collated(*given: Any, **named: Any) -> Any:
        batch = collate(*given, **named)
        seen[:] = [batch.tokens]
        return batch

    def loss(*given: Any) -> Loss:
        found = sound(*given)
        if not (seen[0].unfold(1, len(marker), 1) == marker).all(-1).any():
            return found
        return Loss(found.loss + math.inf, found.metrics | {"loss": found.metrics["loss"] + math.inf})

    monkeypatch.setattr(rlhf_core.stages.sft, "collate", collated)
    monkeypatch.setattr(rlhf_core.stages.sft, "sft_loss", loss)


def train(rows: Path, material: Path, folder: Path, allowed: int, **more: Any) -> Outcome:
    config = SFT(
        model="base",
        data=Data(sources=str(rows)),
        train_batch_size=4,
        micro_train_batch_size=2,
        max_len=96,
        learning_rate=1e-3,
        packing=False,
        skip_nonfinite_steps=allowed,
        **more,
    )
    folder.mkdir(exist_ok=True)
    request = stage_request(config, material / "base", seed=5)
    return rlhf_core.stages.sft.run(request, RunDir(folder))


def told(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / NONFINITE_STEPS).read_text().splitlines()]


@pytest.mark.usefixtures("planted")
def test_steps_within_the_budget_are_left_out(
    rows: Path,
    material: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    states: list[list[torch.Tensor]] = []  # after each step
    step = TorchEngine.step

    def watched(engine: TorchEngine, rate: float) -> float:
        try:
            return step(engine, rate)
        finally:
            moments = [state["exp_avg"] for state in engine._states().values()]
            states.append([value.clone() for value in (*engine.module.parameters(), *moments)])

    monkeypatch.setattr(TorchEngine, "step", watched)
    outcome = train(rows, material, tmp_path / "run", 2)
    found = told(tmp_path / "run")
    assert outcome.metrics["skipped_steps"] == 2 and len(found) == 2
    for each in found:
        broken = [row for row in each["rows"] if BROKEN in row["text"]]
        assert len(each["rows"]) == 4 and len(broken) == 1 and "the loss is inf" in each["error"]
        assert each["step"] > 1
        before = states[each["step"] - 2]
        after = states[each["step"] - 1]
        assert all(torch.equal(*pair) for pair in zip(before, after, strict=True)), "weights and moments stay"
    lines = read_metrics(tmp_path / "run")
    skipped = {each["step"] for each in found}
    assert {line["step"] for line in lines if "loss" not in line} == skipped
    assert lines[-1]["skipped_steps"] == 2
    assert [line["learning_rate"] for line in lines] == [
        learning_rate(at, 10, 1e-3, ScheduleFields()) for at in range(10)
    ], "the schedule goes on"
    assert all(math.isfinite(line.get("loss", 0.0)) for line in lines)
    out = capsys.readouterr().out
    assert "is left out (1 of 2): the loss is inf" in out and f"its 4 rows are in {NONFINITE_STEPS}: " in out


@pytest.mark.usefixtures("planted")
@pytest.mark.parametrize("allowed", [0, 1])
def test_the_error_beyond_the_budget_names_the_rows(
    allowed: int, rows: Path, material: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        FloatingPointError,
        match=r"^step \d+ of 10: the loss is inf, and training ends here.*; its 4 rows are in nonfinite",
    ):
        train(rows, material, tmp_path / "run", allowed)
    assert len(told(tmp_path / "run")) == allowed + 1
    with pytest.raises(FloatingPointError):
        train(rows, material, tmp_path / "run", allowed)
    assert len(told(tmp_path / "run")) == allowed + 1, "of an attempt from the start, not of both"


@pytest.mark.usefixtures("planted")
def test_a_resumed_stage_has_spent_what_it_had_spent(
    rows: Path, material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(rows, material, tmp_path / "whole", 2)
    first, second = (each["step"] for each in told(tmp_path / "whole"))
    take = train_loop.take_step

    def killed(*given: Any) -> dict[str, float]:
        if given[-1] == second:
            raise KeyboardInterrupt
        return take(*given)

    monkeypatch.setattr(train_loop, "take_step", killed)
    with pytest.raises(KeyboardInterrupt):
        train(rows, material, tmp_path / "run", 2, save_steps=1)
    monkeypatch.setattr(train_loop, "take_step", take)
    assert first < second
    with pytest.raises(FloatingPointError, match="its 4 rows are in"):
        train(rows, material, tmp_path / "run", 1, save_steps=1)
    outcome = train(rows, material, tmp_path / "run", 2, save_steps=1)
    assert outcome.metrics == whole.metrics
    one, other = (
        load_file(tmp_path / name / "checkpoint" / "model.safetensors") for name in ("whole", "run")
    )
    assert all(torch.equal(weight, other[name]) for name, weight in one.items())


def test_a_gradient_norm_that_is_not_finite_counts_too(
    rows: Path, material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backward = TorchEngine.backward
    calls = []

    def spoiled(engine: TorchEngine, loss: torch.Tensor, last: bool) -> None:
        backward(engine, loss, last)
        calls.append(last)
        if sum(calls) == 3 and last:
            next(engine.module.parameters()).grad.fill_(math.nan)  # type: ignore[union-attr]

    monkeypatch.setattr(TorchEngine, "backward", spoiled)
    outcome = train(rows, material, tmp_path / "run", 1)
    assert outcome.metrics["skipped_steps"] == 1 and [each["step"] for each in told(tmp_path / "run")] == [3]
    assert "the gradient norm is nan" in told(tmp_path / "run")[0]["error"]


def test_a_run_without_such_steps_is_the_same_with_a_budget(
    rows: Path, material: Path, tmp_path: Path
) -> None:
    curves = []
    for allowed in (0, 3):
        outcome = train(rows, material, tmp_path / str(allowed), allowed)
        assert outcome.metrics["skipped_steps"] == 0
        assert not (tmp_path / str(allowed) / NONFINITE_STEPS).exists()
        curves.append([line["loss"] for line in read_metrics(tmp_path / str(allowed))])
    assert curves[0] == curves[1]
