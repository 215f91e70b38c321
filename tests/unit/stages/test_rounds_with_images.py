"""A round on prompts with images: a tiny model answers, a reward model that sees the images scores, DPO
trains on the rows, and the rows are published with their images."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import rlhf_core.stages.dpo
import rlhf_core.stages.preferences.preferences_stage
import rlhf_core.stages.reward_model
from rlhf_core.config import DPO, Data, Preferences, RewardModel
from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.data.documents import answered
from rlhf_core.data.sources import preference_pairs
from rlhf_core.models.reward_scoring import RewardScorer
from rlhf_core.runs.run_dir import Outcome, RunDir
from rlhf_core.stages.publication.dataset import data_files
from rlhf_core.stages.publication.publication_folder import put
from tests.support.pictured_models import STAGED, make_pictured, square, write_rows
from tests.support.pictured_pairs import colour_pairs
from tests.support.stage_request import stage_request

COLOUR = {"type": "text", "text": "Colour?"}


@pytest.fixture(scope="module", params=STAGED)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A policy and a reward model."""
    folder = tmp_path_factory.mktemp("models")
    base = make_pictured(request.param, folder / "base")
    config = RewardModel(
        model="base",
        data=colour_pairs(folder, 8),
        train_batch_size=8,
        micro_train_batch_size=4,
        max_len=96,
        dtype="float32",
    )
    (folder / "rm").mkdir()
    rlhf_core.stages.reward_model.run(stage_request(config, base), RunDir(folder / "rm"))
    return {"base": str(base), "rm": str(folder / "rm" / "checkpoint")}


def sample(models: dict[str, str], folder: Path, **changes: Any) -> tuple[Outcome, list[dict[str, Any]]]:
    """A round whose prompts have one image, as a file or as bytes, two, or none."""
    (folder / "data").mkdir(exist_ok=True)
    (folder / "data" / "a.png").write_bytes(square("red"))
    (folder / "data" / "b.bin").write_bytes(square("blue", kind="JPEG"))
    red = {"type": "image", "image": "a.png"}
    blue = {"type": "image", "image": "b.bin"}
    asked = [[red, COLOUR], [red, {"type": "text", "text": "Or?"}, blue], [COLOUR], [blue, COLOUR]]
    rows = [{"prompt": [{"role": "user", "content": content}]} for content in asked]
    fields = {
        "policy": "base",
        "prompts": {"sources": str(write_rows(folder / "data" / "prompts.jsonl", rows))},
        "reward": "rm",
        "n_samples_per_prompt": 3,
        "prompt_max_len": 80,
        "generate_max_len": 6,
        "dtype": "float32",
        "engine": {"kind": "transformers"},
        **changes,
    }
    request = stage_request(Preferences.model_validate(fields), models, seed=1)
    run = RunDir(folder / "round")
    run.prepare(request)
    outcome = rlhf_core.stages.preferences.preferences_stage.run(request, run)
    file = folder / "round" / next(name for name in outcome.outputs.values() if name.endswith(".jsonl"))
    return outcome, [json.loads(line) for line in file.read_text().splitlines()]


def parts_of(row: dict[str, Any]) -> list[dict[str, Any]]:
    content = row["prompt"][0]["content"]
    return [] if isinstance(content, str) else content


def test_pairs_have_the_scores_of_what_was_seen_and_are_trained_on(
    models: dict[str, str], tmp_path: Path
) -> None:
    outcome, rows = sample(models, tmp_path)
    assert outcome.outputs["pictures"] == "pictures" and len(rows) >= 3
    shutil.rmtree(tmp_path / "data")  # the rows have what they need
    stored = [json.loads(line) for line in (tmp_path / "round/state/answers.jsonl").read_text().splitlines()]
    renderer = Renderer(load_tokenizer(models["base"]), "chat")
    tokens_of = {
        str(renderer.tokenizer.decode(tokens, skip_special_tokens=True)): tokens
        for _, group in stored
        for tokens, _ in group
    }
    scorer = RewardScorer(models["rm"], "float32", 2)
    pairs = Data(sources=str(tmp_path / "round" / "pairs.jsonl"))
    loaded = preference_pairs(pairs, renderer, 96, 0).items
    for pair, row in zip(loaded, rows, strict=True):
        pictures = pair.chosen.pictures
        assert len(pictures) == sum("image" in part for part in parts_of(row))
        prompt = list(pair.chosen.tokens[: pair.chosen.answer_start])
        for side in ("chosen", "rejected"):
            whole = answered(prompt, tokens_of[row[side]], pictures)
            assert scorer.score([whole])[0] == pytest.approx(row[f"{side}_score"], rel=1e-3, abs=1e-6)
    assert {len(pair.chosen.pictures) for pair in loaded} >= {1, 2}

    config = DPO(
        policy="base", data=pairs, train_batch_size=4, micro_train_batch_size=2, max_len=96, dtype="float32"
    )
    (tmp_path / "dpo").mkdir()
    trained = rlhf_core.stages.dpo.run(stage_request(config, models["base"]), RunDir(tmp_path / "dpo"))
    assert trained.metrics["loss"] > 0


def test_rows_are_published_with_their_images(models: dict[str, str], tmp_path: Path) -> None:
    sample(models, tmp_path)
    files = data_files(tmp_path / "round" / "pairs.jsonl")
    put(files, tmp_path / "published", {}, "round", "0", lambda partial: None)
    rows = (tmp_path / "published/data/pairs.jsonl").read_text().splitlines()
    named = [part["image"] for row in rows for part in parts_of(json.loads(row)) if "image" in part]
    assert named and all((tmp_path / "published" / "data" / name).is_file() for name in named)


def test_rows_of_answers_alone_are_refused(models: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="set post_processor to dpo or kto"):
        sample(models, tmp_path, post_processor="rejection_sampling")
    with pytest.raises(ValueError, match=r"set engine\.kind to transformers"):
        sample(models, tmp_path, engine={})
