"""What was trained is what a stranger loads: reward models and adapters, through the stand-in Hub, with transformers and peft alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi, constants
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import rlhf_core.reward_model
from rlhf_core import hub
from rlhf_core.config import Data, Lora, Publication, RewardModel
from rlhf_core.data.documents import Document
from rlhf_core.models.load import load_scorer
from rlhf_core.models.scoring import score_documents
from rlhf_core.stage import RunDir, StageRequest, run_stage
from tests.hub_server import TOKEN, Hub, serve

REPO = "someone/tiny"


@pytest.fixture(autouse=True)
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with serve() as running:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        yield running


def publish(checkpoint: Path, place: Path, **config: Any) -> RunDir:
    """The publication stage, to the stand-in."""
    publication = Publication(**{"model": "trained", "repo_id": REPO, **config})
    run = RunDir(place)
    run.prepare(StageRequest(name="publication", digest="00aa", config=publication, inputs={"trained": str(checkpoint)}, seed=0))
    run_stage(run.path, hub.run)
    return run


def download(server: Hub, cache: Path) -> Path:
    return Path(HfApi(endpoint=server.url, token=TOKEN).snapshot_download(REPO, revision="publication-00aa", cache_dir=cache))


def train_reward_model(material: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, lora: Lora | None = None) -> Any:
    """Trains for five steps and returns the model as it is in memory at the end; its checkpoint lies in `folder`."""
    trained = []
    export = rlhf_core.reward_model.finish_training

    def keep(engine: Any, *rest: Any) -> Any:
        trained.append(engine.module)
        return export(engine, *rest)

    monkeypatch.setattr(rlhf_core.reward_model, "finish_training", keep)
    data = Data(sources=str(material / "preferences.jsonl"), max_samples=40)
    config = RewardModel(model="base", data=data, train_batch_size=8, micro_train_batch_size=4, max_len=96, learning_rate=1e-2, lora=lora)
    run = RunDir(folder)
    run.prepare(StageRequest(name="reward_model", digest="0", config=config, inputs={"base": str(material / "base")}, seed=3))
    run_stage(run.path, rlhf_core.reward_model.run)
    return trained[0].eval()


def test_a_published_reward_model_scores_exactly_as_the_trained_one(
    material: Path, tmp_path: Path, server: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = train_reward_model(material, tmp_path / "rm", monkeypatch)
    publish(tmp_path / "rm" / "checkpoint", tmp_path / "publication")
    folder = download(server, tmp_path / "cache")
    loaded, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    documents = [tokenizer(text).input_ids for text in texts_to_score(material)]
    batch = tokenizer.pad({"input_ids": documents}, return_tensors="pt")
    with torch.no_grad():
        for one in (torch.tensor([document]) for document in documents):
            assert loaded(one).logits.item() == trained.model(one).logits.item()
        together = loaded(**batch).logits[:, 0]
        assert torch.equal(together, trained.model(**batch).logits[:, 0])
    assert together.dtype == torch.float32 and together.std() > 1e-2, "the scores tell nothing apart"
    # What the stages read with position ids, in packed rows, goes through another attention kernel: equal up to rounding.
    rows = [Document(document, [False] * len(document)) for document in documents]
    ours = score_documents(trained, rows, tokenizer.pad_token_id, 8)
    assert ours == score_documents(load_scorer(str(folder), tokenizer.pad_token_id).eval(), rows, tokenizer.pad_token_id, 8)
    torch.testing.assert_close(torch.tensor(ours), together, rtol=1e-5, atol=1e-5)


def texts_to_score(material: Path) -> list[str]:
    """100 texts: prompts of the demo with their answers."""
    rows = [json.loads(line) for line in (material / "preferences.jsonl").read_text().splitlines()]
    texts = [f"{row['prompt']} {row[answer]}" for row in rows for answer in ("chosen", "rejected")][:100]
    assert len(set(texts)) >= 90
    return texts
