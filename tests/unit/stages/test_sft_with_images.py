"""SFT on rows with images: the colour of a square is learned from the image, and only the language model is
changed."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

import rlhf_core.stages.sft
from rlhf_core.config import SFT, Data, Lora
from rlhf_core.data.chat import load_tokenizer
from rlhf_core.models.load_model import load_policy
from rlhf_core.models.picture_reading import reads_pictures
from rlhf_core.runs.metrics_log import read_metrics
from rlhf_core.runs.run_dir import Outcome, RunDir
from tests.support.pictured_models import (
    COLOURS,
    STAGED,
    asked,
    is_language_weight,
    make_pictured,
    square,
    write_rows,
)
from tests.support.stage_request import stage_request

QUESTION = {"type": "text", "text": "Colour?"}


def rows_of(folder: Path, count: int, name: str = "rows.jsonl") -> Data:
    """Squares of three colours and some sizes; every fourth row has no image."""
    rows = []
    for number in range(count):
        colour = list(COLOURS)[number % 3]
        file = f"{name}-{number}.png"
        (folder / file).write_bytes(square(colour, 16 + number % 5, 16))
        part = [{"type": "image", "image": file}, QUESTION]
        rows.append(asked(part, colour) if number % 4 else asked("Say hi.", "hi"))
    return Data(sources=str(write_rows(folder / name, rows)))


def train(base: Path, folder: Path, data: Data, **fields: object) -> Outcome:
    config = SFT.model_validate(
        {
            **dict(model="base", data=data, train_batch_size=8, micro_train_batch_size=4, max_len=96),
            **dict(learning_rate=3e-3, max_epochs=1, dtype="float32"),
            **fields,
        }
    )
    folder.mkdir(exist_ok=True)
    return rlhf_core.stages.sft.run(stage_request(config, base, seed=3), RunDir(folder))


@pytest.fixture(scope="module", params=STAGED)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pictured(request.param, tmp_path_factory.mktemp("models") / request.param)


@pytest.mark.parametrize("lora", [None, Lora(rank=2)], ids=["full", "lora"])
def test_only_the_language_model_changes(base: Path, lora: Lora | None, tmp_path: Path) -> None:
    train(base, tmp_path / "run", rows_of(tmp_path, 16), lora=lora)
    made = tmp_path / "run" / "checkpoint"
    before = load_file(base / "model.safetensors")
    after = load_file(made / "model.safetensors")
    assert before.keys() == after.keys()
    changed = {name for name, weight in after.items() if not torch.equal(weight, before[name])}
    assert changed and all(is_language_weight(name) for name in changed)
    for file in base.glob("*processor*.json"):
        assert (made / file.name).read_bytes() == file.read_bytes()
    assert (made / "config.json").read_bytes() == (base / "config.json").read_bytes()
    _, problems = AutoModelForImageTextToText.from_pretrained(made, output_loading_info=True)
    assert not any(problems.values())
    report = (tmp_path / "run" / "data_report.md").read_text()
    assert "12 images" in report
    # another stage goes on from it
    train(made, tmp_path / "again", rows_of(tmp_path, 8))


def test_packed_padded_and_split_steps_have_the_same_loss(base: Path, tmp_path: Path) -> None:
    data = rows_of(tmp_path, 16)
    ways = (
        {"packing": True},
        {"packing": False, "micro_train_batch_size": 1},
        {"packing": False, "micro_train_batch_size": 2},
        {"micro_train_tokens": 150},
    )
    losses = []
    for number, way in enumerate(ways):
        train(base, tmp_path / f"{number}", data, **way)
        losses.append([row["loss"] for row in read_metrics(tmp_path / f"{number}") if "loss" in row])
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-5)


def test_two_runs_are_the_same(base: Path, tmp_path: Path) -> None:
    data = rows_of(tmp_path, 16)
    whole = train(base, tmp_path / "whole", data)
    again = train(base, tmp_path / "again", data)
    assert whole.metrics["loss"] == again.metrics["loss"]


@pytest.mark.parametrize("family", STAGED)
def test_the_colour_of_a_square_is_learned_from_the_image(family: str, tmp_path: Path) -> None:
    """A model that does not see the image reaches log 3 on the colour at best."""
    base = make_pictured(family, tmp_path / "base", initializer_range=0.05)
    data = rows_of(tmp_path, 96)
    held_out = rows_of(tmp_path, 24, "held_out.jsonl")
    outcome = train(
        base,
        tmp_path / "run",
        data,
        eval_data=held_out,
        max_epochs=8,
        train_batch_size=16,
        learning_rate=1e-2,
    )
    # tokens of an answer with its end: "red" 4, "green" 6, "blue" 5, "hi" 3; blind: log 3 once per colour
    answers = [list(COLOURS)[number % 3] if number % 4 else "hi" for number in range(24)]
    blind = 18 * math.log(3) / sum(len(answer) + 1 for answer in answers)
    assert outcome.metrics["eval/loss"] < blind / 3


def test_what_is_not_built_is_refused(base: Path, tmp_path: Path) -> None:
    """Scored answers, here."""
    rows = [{"prompt": "What?", "image": "a.png", "response": "a", "reward": reward} for reward in (0, 1)]
    scored = Data(sources=str(write_rows(tmp_path / "scored.jsonl", rows)))
    with pytest.raises(ValueError, match=r"scored.jsonl, row 1: has images, which are read only by sft"):
        train(base, tmp_path / "run", scored, condition="reward")


def test_rows_with_images_are_not_split_over_ranks(base: Path) -> None:
    policy = load_policy(str(base))
    with pytest.raises(ValueError, match="set sequence_parallel_size to 1"):
        reads_pictures(policy, str(base), load_tokenizer(str(base)), "float32", sequence_parallel_size=2)
    assert policy.tower is None


def test_all_images_unusable_is_told(base: Path, tmp_path: Path) -> None:
    rows = [asked([{"type": "image", "image": "gone.png"}, QUESTION])] * 2
    data = Data(sources=str(write_rows(tmp_path / "rows.jsonl", rows)))
    with pytest.raises(ValueError, match=r"all 2 rows were dropped \(image missing: 2\): correct"):
        train(base, tmp_path / "run", data)
