"""What was trained is what a stranger loads: reward models and adapters, through the stand-in Hub, with
transformers and peft alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import HfApi
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import rlhf_core.stages.reward_model
import rlhf_core.stages.sft
from rlhf_core.config import SFT, Data, Lora, Publication, RewardModel
from rlhf_core.data.documents import Document
from rlhf_core.models.load_model import load_scorer
from rlhf_core.models.reward_scoring import score_documents
from rlhf_core.runs.run_dir import RunDir, run_in_directory
from rlhf_core.stages.publication import publication_stage as hub
from rlhf_core.stages.publication.publication_folder import adapter_base
from tests.support.hub_server import TOKEN, Hub
from tests.support.publishing import serving_hub
from tests.support.stage_request import stage_request

REPO = "someone/tiny"


@pytest.fixture(autouse=True)
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A Hub of our own; whatever a test publishes, the token is in no file of the run and in none that was
    sent."""
    with serving_hub(monkeypatch) as running:
        yield running
        sent = [
            blob.content
            for repo in running.repositories.values()
            for commit in repo.commits.values()
            for blob in commit.files.values()
        ]
        written = [file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()]
        assert written and not any(TOKEN.encode() in content for content in [*sent, *written])


def publish(checkpoint: Path, place: Path, **config: Any) -> RunDir:
    """The publication stage, to the stand-in."""
    publication = Publication(**{"model": "trained", "repo_id": REPO, **config})
    run = RunDir(place)
    run.prepare(stage_request(publication, {"trained": str(checkpoint)}, digest="00aa"))
    run_in_directory(run.path, hub.run)
    return run


def download(server: Hub, cache: Path) -> Path:
    return Path(
        HfApi(endpoint=server.url, token=TOKEN).snapshot_download(
            REPO, revision="publication-00aa", cache_dir=cache
        )
    )


def train_reward_model(
    material: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, lora: Lora | None = None
) -> Any:
    """Trains for five steps and returns the model as it is in memory at the end; its checkpoint is in
    `folder`."""
    trained = []
    export = rlhf_core.stages.reward_model.finish_training

    def keep(engine: Any, *rest: Any) -> Any:
        trained.append(engine.module)
        return export(engine, *rest)

    monkeypatch.setattr(rlhf_core.stages.reward_model, "finish_training", keep)
    data = Data(sources=str(material / "preferences.jsonl"), max_samples=40)
    config = RewardModel(
        model="base",
        data=data,
        train_batch_size=8,
        micro_train_batch_size=4,
        max_len=96,
        learning_rate=1e-2,
        lora=lora,
    )
    run = RunDir(folder)
    run.prepare(stage_request(config, material / "base", seed=3))
    run_in_directory(run.path, rlhf_core.stages.reward_model.run)
    return trained[0].eval()


def test_a_published_reward_model_scores_exactly_as_the_trained_one(
    material: Path, tmp_path: Path, server: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = train_reward_model(material, tmp_path / "rm", monkeypatch)
    publish(tmp_path / "rm" / "checkpoint", tmp_path / "publication")
    folder = download(server, tmp_path / "cache")
    loaded = aligned(AutoModelForSequenceClassification.from_pretrained(folder).eval())
    aligned(trained.model)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    documents = [tokenizer(text).input_ids for text in texts_to_score(material)]
    batch = tokenizer.pad({"input_ids": documents}, return_tensors="pt")
    with torch.no_grad():
        for one in (torch.tensor([document]) for document in documents):
            assert loaded(one).logits.item() == trained.model(one).logits.item()
        together = loaded(**batch).logits[:, 0]
        assert torch.equal(together, trained.model(**batch).logits[:, 0])
    assert together.dtype == torch.float32 and together.std() > 1e-2, "the scores are all equal"
    # What the stages read with position ids, in packed rows, goes through another attention kernel: equal up
    # to rounding.
    rows = [Document(document, [False] * len(document)) for document in documents]
    ours = score_documents(trained, rows, tokenizer.pad_token_id, 8)
    scorer = load_scorer(str(folder), tokenizer.pad_token_id).eval()
    aligned(scorer.model)
    assert ours == score_documents(scorer, rows, tokenizer.pad_token_id, 8)
    torch.testing.assert_close(torch.tensor(ours), together, rtol=1e-5, atol=1e-5)


def aligned(model: torch.nn.Module) -> torch.nn.Module:
    """Copies each weight to memory of its own and returns the model. A product on a CPU rounds differently for
    weights at addresses that are no multiple of 64, as those of a mapped file."""
    for weight in model.parameters():
        weight.data = weight.data.clone()
    return model


def texts_to_score(material: Path) -> list[str]:
    """100 texts: prompts of the demo with their answers."""
    rows = [json.loads(line) for line in (material / "preferences.jsonl").read_text().splitlines()]
    texts = [f"{row['prompt']} {row[answer]}" for row in rows for answer in ("chosen", "rejected")][:100]
    assert len(set(texts)) >= 90
    return texts


ADAPTER = Lora(rank=4, alpha=8, export="adapter")


def train_sft_adapter(material: Path, folder: Path) -> Path:
    data = Data(sources=str(material / "sft.jsonl"), max_samples=40)
    config = SFT(
        model="base",
        data=data,
        train_batch_size=8,
        micro_train_batch_size=4,
        max_len=96,
        learning_rate=1e-2,
        lora=ADAPTER,
    )
    run = RunDir(folder)
    run.prepare(stage_request(config, material / "base", seed=3))
    run_in_directory(run.path, rlhf_core.stages.sft.run)
    return folder / "checkpoint"


def header(folder: Path) -> dict[str, Any]:
    return yaml.safe_load((folder / "README.md").read_text().split("---\n")[1])


def test_an_adapter_is_published_for_peft_and_names_its_base_on_the_hub(
    material: Path, tmp_path: Path, server: Hub
) -> None:
    checkpoint = train_sft_adapter(material, tmp_path / "sft")
    publish(checkpoint, tmp_path / "publication", base_repo="someone/base")
    folder = download(server, tmp_path / "cache")
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= {
        file.name for file in folder.iterdir()
    }
    assert not (folder / "config.json").exists() and not (folder / "model.safetensors").exists()
    assert (
        json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == "someone/base"
    )
    wanted = {
        "library_name": "peft",
        "base_model": "someone/base",
        "base_model_relation": "adapter",
        "pipeline_tag": "text-generation",
    }
    assert header(folder).items() >= wanted.items()
    card = (folder / "README.md").read_text()
    assert 'from_pretrained("someone/base")' in card and f'PeftModel.from_pretrained(model, "{REPO}")' in card
    for file in folder.iterdir():
        assert str(material).encode() not in file.read_bytes(), f"{file.name} names a folder of this machine"

    tokens = torch.tensor([[5, 9, 20, 33, 40, 51, 7]])
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(material / "base")
        untouched = plain(tokens).logits
        ours = (
            PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(material / "base"), checkpoint)
            .eval()(tokens)
            .logits
        )
        theirs = PeftModel.from_pretrained(plain, folder).eval()(tokens).logits
    assert torch.equal(theirs, ours) and (theirs - untouched).abs().max() > 1e-2


def test_the_adapter_of_a_reward_model_travels_with_its_head(
    material: Path, tmp_path: Path, server: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = train_reward_model(material, tmp_path / "rm", monkeypatch, ADAPTER)
    publish(tmp_path / "rm" / "checkpoint", tmp_path / "publication", base_repo="someone/base")
    folder = download(server, tmp_path / "cache")
    assert header(folder)["pipeline_tag"] == "text-classification"
    told = (folder / "README.md").read_text()
    assert ('AutoModelForSequenceClassification.from_pretrained("someone/base", num_labels=1)') in told
    tokenizer = AutoTokenizer.from_pretrained(folder)
    plain = AutoModelForSequenceClassification.from_pretrained(
        material / "base", num_labels=1, pad_token_id=tokenizer.pad_token_id
    )
    loaded = PeftModel.from_pretrained(plain, folder).eval()
    batch = tokenizer.pad(
        {"input_ids": [tokenizer(text).input_ids for text in texts_to_score(material)]}, return_tensors="pt"
    )
    with torch.no_grad():
        assert torch.equal(loaded(**batch).logits, trained.model(**batch).logits)


def test_an_adapter_of_a_folder_is_refused_and_of_the_hub_names_it(
    material: Path, tmp_path: Path, server: Hub
) -> None:
    checkpoint = train_sft_adapter(material, tmp_path / "sft")
    with pytest.raises(
        ValueError,
        match=(
            r"belongs to base, which is not on the Hub: set lora\.export to merged to publish a whole"
            r" model, or"
        ),
    ):
        publish(checkpoint, tmp_path / "local")
    assert not (tmp_path / "local" / "published").exists() and not server.requests
    config = json.loads((checkpoint / "adapter_config.json").read_text())
    for base, revision in (
        ("stand-in/base-1m", None),
        (str(tmp_path / "models--stand-in--base-1m" / "snapshots" / ("ab" * 20)), "ab" * 20),
    ):
        (checkpoint / "adapter_config.json").write_text(
            json.dumps(config | {"base_model_name_or_path": base})
        )
        assert adapter_base(checkpoint, None) == ("stand-in/base-1m", revision)
    with pytest.raises(
        ValueError, match="base_repo is someone/base, and the model to publish is whole, not an adapter"
    ):
        adapter_base(material / "base", "someone/base")
