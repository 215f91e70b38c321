"""DPO and KTO on pairs whose images decide: log-probs, references, and what is learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import rlhf_core.stages.dpo
import rlhf_core.stages.kto
from rlhf_core.config import DPO, KTO, Data
from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.data.documents import Document
from rlhf_core.data.packing import Passes
from rlhf_core.data.pictures.picture_source import EncodedPicture, PictureSource
from rlhf_core.data.sources import preference_pairs
from rlhf_core.models.kernels.attention import PLAIN, can_share, is_stateful
from rlhf_core.models.load_model import load_policy
from rlhf_core.models.picture_reading import reads_pictures
from rlhf_core.runs.metrics_log import read_metrics
from rlhf_core.runs.run_dir import Outcome, RunDir
from rlhf_core.stages.dpo import pair_logprobs
from rlhf_core.stages.kto import mismatch
from rlhf_core.stages.reference_logprobs import _key, answer_logprobs, reference_logprobs
from rlhf_core.training.engine import AdamW, TorchEngine
from tests.support.pictured_models import STAGED, is_language_weight, make_pictured, square
from tests.support.pictured_pairs import colour_pairs, whole_outputs
from tests.support.stage_request import stage_request

COMMON: dict[str, Any] = dict(train_batch_size=8, micro_train_batch_size=4, max_len=96, learning_rate=3e-3)


def train(
    base: Path, folder: Path, kind: str, data: Data, other: Path | None = None, **fields: Any
) -> Outcome:
    config_class, module = {"dpo": (DPO, rlhf_core.stages.dpo), "kto": (KTO, rlhf_core.stages.kto)}[kind]
    config = config_class.model_validate(
        {"policy": "base", "data": data, "dtype": "float32", "max_epochs": 1, **COMMON, **fields}
    )
    folder.mkdir(exist_ok=True)
    inputs = {"base": str(base), "other": str(other or base)}
    return module.run(stage_request(config, inputs, seed=3), RunDir(folder))


@pytest.fixture(scope="module", params=STAGED)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pictured(request.param, tmp_path_factory.mktemp("models") / request.param)


def renderer_of(base: Path) -> Renderer:
    return Renderer(load_tokenizer(str(base)), "chat")


@pytest.mark.parametrize("tokens", [None, 500])
@torch.no_grad()
def test_logprobs_of_both_answers_are_those_of_the_whole_model(
    base: Path, tokens: int | None, tmp_path: Path
) -> None:
    """Padded, and packed where the attention lets texts share their prompt and documents with images do not."""
    pairs = preference_pairs(colour_pairs(tmp_path, 8, texts=True), renderer_of(base), 96, 0).items
    policy = load_policy(str(base)).eval()
    policy.model.set_attn_implementation(PLAIN if tokens else "sdpa")
    reader = reads_pictures(policy, str(base), load_tokenizer(str(base)), "float32")
    engine = TorchEngine(policy, AdamW((0.9, 0.95), 0.0, 1.0))
    shares = can_share(policy.model, engine.device)
    assert shares == (tokens is not None and "gemma3" not in str(base))
    passes = Passes(8, tokens, share=shares, apart=is_stateful(policy.model))
    found = pair_logprobs(engine, pairs, 0, False, passes).responses
    for index, pair in enumerate(pairs):
        for side, document in enumerate((pair.chosen, pair.rejected)):
            _, logprobs = whole_outputs(base, reader, document)
            expected = logprobs[torch.tensor(list(document.mask)[1:])].sum()
            torch.testing.assert_close(found[side, index], expected, atol=5e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_packed_padded_and_split_steps_have_the_same_loss(base: Path, kind: str, tmp_path: Path) -> None:
    data = colour_pairs(tmp_path, 8, texts=True)
    held_out = colour_pairs(tmp_path, 4, "held_out.jsonl")
    found = []
    ways = ({}, {"micro_train_batch_size": 1}, {"micro_train_tokens": 300})
    for number, way in enumerate(ways):
        outcome = train(base, tmp_path / f"{number}", kind, data, eval_data=held_out, max_epochs=2, **way)
        losses = [row["loss"] for row in read_metrics(tmp_path / f"{number}") if "loss" in row]
        found.append([*losses, outcome.metrics["eval/loss"]])
    assert found[0][0] != pytest.approx(found[0][1], rel=1e-3)
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-5)


@pytest.mark.parametrize(
    "fields", [{"loss": "ipo", "reference": "other"}, {"loss": "simpo"}, {"nll_coef": 0.2}]
)
def test_only_the_language_model_changes(base: Path, fields: dict[str, Any], tmp_path: Path) -> None:
    """With other losses, and another model as the reference, which gets its own encoder."""
    other = make_pictured(base.name, tmp_path / "other", initializer_range=0.1)
    data = colour_pairs(tmp_path, 8, texts=True)
    train(base, tmp_path / "run", "dpo", data, other, **fields)
    before = load_file(base / "model.safetensors")
    after = load_file(tmp_path / "run" / "checkpoint" / "model.safetensors")
    assert before.keys() == after.keys()
    changed = {name for name, weight in after.items() if not torch.equal(weight, before[name])}
    assert changed and all(is_language_weight(name) for name in changed)
    for file in base.glob("*processor*.json"):
        assert (tmp_path / "run" / "checkpoint" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize("kind", ["dpo", "kto"])
@pytest.mark.parametrize("family", STAGED)
def test_a_preference_that_only_the_image_decides_is_learned(family: str, kind: str, tmp_path: Path) -> None:
    """A policy that sees no image prefers one answer for all squares: half of the held-out pairs."""
    base = make_pictured(family, tmp_path / "base", initializer_range=0.05)
    data = colour_pairs(tmp_path, 64)
    held_out = colour_pairs(tmp_path, 16, "held_out.jsonl")
    outcome = train(base, tmp_path / "run", kind, data, eval_data=held_out, max_epochs=4)
    # for kto each answer counts alone, against the step's KL
    assert outcome.metrics["eval/accuracy"] > (0.9 if kind == "dpo" else 0.6)
    # the checkpoint itself, with and without its eyes
    made = str(tmp_path / "run" / "checkpoint")
    policy, before = (load_policy(path).eval() for path in (made, str(base)))
    for model, path in ((policy, made), (before, str(base))):
        reads_pictures(model, path, load_tokenizer(path), "float32")
    pairs = preference_pairs(held_out, renderer_of(base), 96, 0).items
    right = blind = 0
    for pair in pairs:
        for seen in (True, False):
            documents = [pair.chosen, pair.rejected]
            if not seen:
                documents = [Document(document.tokens, document.mask) for document in documents]
            with torch.no_grad():
                now, then = (
                    answer_logprobs(model, documents, 0, False, torch.device("cpu"))
                    for model in (policy, before)
                )
            prefers = bool((now - then)[0] > (now - then)[1])
            right += seen and prefers
            blind += not seen and prefers
    assert right > 0.9 * len(pairs) and blind == len(pairs) / 2


def test_a_mismatched_prompt_keeps_its_images(base: Path, tmp_path: Path) -> None:
    pairs = preference_pairs(colour_pairs(tmp_path, 4, texts=True), renderer_of(base), 96, 0).items
    red, green, _, text = (pair.chosen for pair in pairs)
    joined = mismatch(red, green, 96)
    assert joined.pictures == red.pictures != green.pictures
    assert list(joined.tokens) == list(red.tokens[: red.answer_start]) + list(
        green.tokens[green.answer_start :]
    )
    assert mismatch(text, red, 96).pictures == ()
    assert mismatch(red, text, 96).pictures == red.pictures


def test_references_of_other_images_are_computed_anew(base: Path, tmp_path: Path) -> None:
    """Squares of one size have the same tokens."""
    pairs = preference_pairs(colour_pairs(tmp_path, 11), renderer_of(base), 96, 0).items
    red, green = pairs[0].chosen, pairs[5].chosen
    green = Document(red.tokens, red.mask, pictures=green.pictures)
    policy = load_policy(str(base))
    reads_pictures(policy, str(base), load_tokenizer(str(base)), "float32")
    engine = TorchEngine(policy, AdamW((0.9, 0.95), 0.0, 1.0))
    found = [
        reference_logprobs(engine, RunDir(tmp_path), lambda: engine, "org/x", [[each]], Passes(1), 0, False)[
            0
        ]
        for each in (red, green, red)
    ]
    assert found[0] == found[2] and abs(found[0] - found[1]) > 1e-3


def test_references_of_another_image_under_the_same_path_are_not_reused(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(square("red"))
    picture = EncodedPicture(0, 2, PictureSource("a.png", str(tmp_path)))
    document = Document([5, 6, 7], [False, False, True], pictures=(picture,))
    before = _key("base", [[document]], False)
    assert before == _key("base", [[document]], False)
    (tmp_path / "a.png").write_bytes(square("blue", 20))
    assert before != _key("base", [[document]], False)
