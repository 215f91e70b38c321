"""Reward models on pairs whose images decide: scores, the checkpoint, and what is learned."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForSequenceClassification

import rlhf_core.stages.reward_model
from rlhf_core.config import Data, Lora, RewardModel
from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.data.sources import preference_pairs
from rlhf_core.hub.model_files import layout_fault, stored_tensors
from rlhf_core.models.load_model import load_scorer, trained_scorer
from rlhf_core.models.picture_reading import reads_pictures
from rlhf_core.models.reward_scoring import RewardScorer
from rlhf_core.models.score_classes import add_score_class
from rlhf_core.runs.metrics_log import read_metrics
from rlhf_core.runs.run_dir import Outcome, RunDir
from tests.support.pictured_models import STAGED, is_language_weight, make_pictured
from tests.support.pictured_pairs import colour_pairs, whole_inputs, whole_outputs
from tests.support.stage_request import stage_request


def train(base: Path, folder: Path, data: Data, **fields: object) -> Outcome:
    config = RewardModel.model_validate(
        {
            **dict(model="base", data=data, train_batch_size=8, micro_train_batch_size=4, max_len=96),
            **dict(learning_rate=3e-3, max_epochs=1, dtype="float32"),
            **fields,
        }
    )
    folder.mkdir(exist_ok=True)
    return rlhf_core.stages.reward_model.run(stage_request(config, base, seed=3), RunDir(folder))


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: weight for file in folder.glob("*.safetensors") for name, weight in load_file(file).items()}


@pytest.fixture(scope="module", params=STAGED)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pictured(request.param, tmp_path_factory.mktemp("models") / request.param)


@pytest.fixture(scope="module")
def trained(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Data]:
    folder = tmp_path_factory.mktemp("trained")
    data = colour_pairs(folder, 16, texts=True)
    train(base, folder / "run", data)
    return folder / "run", data


def test_only_the_language_model_and_the_head_change(base: Path, trained: tuple[Path, Data]) -> None:
    run, _ = trained
    made = run / "checkpoint"
    before = weights_of(base)
    after = weights_of(made)
    assert after.keys() - before.keys() == {"score.weight"} and before.keys() <= after.keys()
    changed = {name for name, weight in before.items() if not torch.equal(after[name], weight)}
    assert changed and all(is_language_weight(name) for name in changed)
    assert layout_fault(made) is None and {*stored_tensors(made)} == {
        f.name for f in made.glob("*.safetensors")
    }
    for file in base.glob("*processor*.json"):
        assert (made / file.name).read_bytes() == file.read_bytes()
    report = (run / "data_report.md").read_text()
    assert "24 images" in report


def test_scores_are_those_of_the_whole_model(trained: tuple[Path, Data]) -> None:
    """Last hidden state of the whole multimodal model times the head, from the checkpoint as it is stored."""
    run, data = trained
    made = run / "checkpoint"
    tokenizer = load_tokenizer(str(made))
    pairs = preference_pairs(data, Renderer(tokenizer, "chat"), 96, 0).items[:4]
    documents = [document for pair in pairs for document in (pair.chosen, pair.rejected)]
    assert [len(document.pictures) for document in documents] == [1] * 6 + [0] * 2
    scorer = RewardScorer(str(made), "float32", 3)
    reader = reads_pictures(load_scorer(str(made), 0), str(made), tokenizer, "float32")
    head = weights_of(made)["score.weight"]
    assert head.any()
    expected = [float(whole_outputs(made, reader, each)[0][-1] @ head[0]) for each in documents]
    assert scorer.score(documents) == pytest.approx(expected, rel=1e-4, abs=2e-5)
    assert len({round(score, 3) for score in expected[:6]}) > 3


@torch.no_grad()
def test_transformers_loads_the_checkpoint(trained: tuple[Path, Data]) -> None:
    """The whole reward model with its encoder; Qwen3-VL's class is added (`add_score_class`)."""
    run, data = trained
    made = run / "checkpoint"
    add_score_class(AutoConfig.from_pretrained(made))
    whole = AutoModelForSequenceClassification.from_pretrained(made, dtype=torch.float32).eval()
    tokenizer = load_tokenizer(str(made))
    pairs = preference_pairs(data, Renderer(tokenizer, "chat"), 96, 0).items[:2]
    documents = [document for pair in pairs for document in (pair.chosen, pair.rejected)]
    scorer = RewardScorer(str(made), "float32", 4)
    scores = scorer.score(documents)
    assert scorer.scorer.reader is not None
    for document, score in zip(documents, scores, strict=True):
        inputs = whole_inputs(whole, scorer.scorer.reader, document)
        logits = whole(attention_mask=torch.ones_like(inputs["input_ids"]), **inputs).logits
        assert float(logits) == pytest.approx(score, rel=1e-4, abs=2e-5)


def test_packed_padded_and_split_steps_have_the_same_loss(base: Path, tmp_path: Path) -> None:
    data = colour_pairs(tmp_path, 16, texts=True)
    losses = []
    ways = ({}, {"micro_train_batch_size": 1}, {"micro_train_tokens": 200}, {"micro_train_tokens": 400})
    for number, way in enumerate(ways):
        train(base, tmp_path / f"{number}", data, max_epochs=2, **way)
        losses.append([row["loss"] for row in read_metrics(tmp_path / f"{number}") if "loss" in row])
    assert len(losses[0]) == 4 and losses[0][0] != losses[0][-1]
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize("family", STAGED)
def test_a_preference_that_only_the_image_decides_is_learned(family: str, tmp_path: Path) -> None:
    base = make_pictured(family, tmp_path / "base", initializer_range=0.05)
    data = colour_pairs(tmp_path, 72)
    held_out = colour_pairs(tmp_path, 24, "held_out.jsonl")
    outcome = train(base, tmp_path / "run", data, eval_data=held_out, max_epochs=4)
    assert outcome.metrics["eval/accuracy"] > 0.9
    # a copy that sees no image prefers one answer for all squares
    made = tmp_path / "run" / "checkpoint"
    pairs = preference_pairs(held_out, Renderer(load_tokenizer(str(base)), "chat"), 96, 0).items
    scorer = RewardScorer(str(made), "auto", 8)
    blind = [
        scorer.score(
            [type(document)(document.tokens, document.mask) for document in (pair.chosen, pair.rejected)]
        )
        for pair in pairs
    ]
    assert sum(chosen > rejected for chosen, rejected in blind) == len(pairs) / 2
    seen = [scorer.score([pair.chosen, pair.rejected]) for pair in pairs]
    assert sum(chosen > rejected for chosen, rejected in seen) > 0.9 * len(pairs)


def test_the_checkpoint_is_trained_further_and_keeps_its_encoder(
    trained: tuple[Path, Data], tmp_path: Path
) -> None:
    """On images, and on texts alone."""
    run, data = trained
    made = run / "checkpoint"
    scorer = trained_scorer(str(made), 0, "float32", False, None, 0)
    assert not scorer.new_head
    texts = Data(sources=str(tmp_path / "texts.jsonl"))
    (tmp_path / "texts.jsonl").write_text('{"prompt": "Hi", "chosen": "a", "rejected": "b"}\n' * 4)
    for name, again in (("images", data), ("texts", texts)):
        train(made, tmp_path / name, again)
        after = tmp_path / name / "checkpoint"
        assert weights_of(after).keys() == weights_of(made).keys()
        assert layout_fault(after) is None
        RewardScorer(str(after), "auto", 4)


def test_an_adapter_is_merged(base: Path, tmp_path: Path) -> None:
    data = colour_pairs(tmp_path, 8)
    train(base, tmp_path / "run", data, lora=Lora(rank=2))
    made = tmp_path / "run" / "checkpoint"
    assert weights_of(made).keys() == weights_of(base).keys() | {"score.weight"}
    assert RewardScorer(str(made), "auto", 4).score(
        [
            pair.chosen
            for pair in preference_pairs(data, Renderer(load_tokenizer(str(base)), "chat"), 96, 0).items
        ]
    )


def test_a_model_without_an_encoder_is_told(base: Path, tmp_path: Path) -> None:
    texts = Data(sources=str(tmp_path / "texts.jsonl"))
    (tmp_path / "texts.jsonl").write_text('{"prompt": "Hi", "chosen": "a", "rejected": "b"}\n' * 4)
    train(base, tmp_path / "run", texts)
    made = str(tmp_path / "run" / "checkpoint")
    scorer = load_scorer(made, 0)
    with pytest.raises(ValueError, match="has no image encoder that is run here"):
        reads_pictures(scorer, made, load_tokenizer(made), "float32")
    assert scorer.tower is None
