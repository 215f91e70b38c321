"""An adapter of the Hub as base model: its base comes with it at the commit it names, and SFT and DPO start
from both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi, constants
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

import rlhf_core.stages.dpo
import rlhf_core.stages.sft
from rlhf_core.config import Recipe
from rlhf_core.hub.snapshots import snapshot
from rlhf_core.models.load_model import load_policy
from rlhf_core.models.lora import base_of
from rlhf_core.preflight.inputs import require_here
from rlhf_core.recipe.plan import Node, Plan, plan
from rlhf_core.runs.lineage import lineage, tree
from rlhf_core.runs.run_dir import RunDir, run_in_directory
from rlhf_core.stages.publication import publication_stage as hub
from rlhf_core.stages.publication.publication_folder import assemble
from rlhf_core.stages.publication.upload import upload
from tests.support.hub_server import TOKEN, Blob, Hub
from tests.support.publishing import ONCE, serving_hub

BASE = "someone/base"
ADAPTER = "someone/adapter"
TOKENS = torch.tensor([[5, 9, 20, 33, 40, 51, 7]])
WORK = {"sft": rlhf_core.stages.sft.run, "dpo": rlhf_core.stages.dpo.run, "publication": hub.run}


@pytest.fixture(autouse=True)
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, material: Path) -> Iterator[Hub]:
    """A Hub with the demo's base model."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    with serving_hub(monkeypatch) as running:
        assemble(
            material / "base",
            tmp_path / "base",
            {"README.md": "---\nlicense: apache-2.0\n---\n"},
            "publication",
            "0",
        )
        upload(HfApi(endpoint=running.url, token=TOKEN), tmp_path / "base", BASE, True, "v1", ONCE)
        yield running


def chain(material: Path, place: Path, base: str, **stages: dict[str, Any]) -> Plan:
    return plan(Recipe(name="adapters", base_model=base, artifacts=str(place), seed=3, stages=stages))


def run(planned: Plan, node: Node) -> Path:
    """As the flow does: the stage in its run directory. Returns its output."""
    directory = RunDir(node.run_dir)
    directory.prepare(planned.request(node))
    result = run_in_directory(node.run_dir, WORK[node.kind])
    return directory / result.outputs.get("checkpoint", "published")


def training(material: Path, rows: str, **more: Any) -> dict[str, Any]:
    """Two steps of training."""
    data = {"sources": str(material / rows), "max_samples": 8}
    batches = {"train_batch_size": 4, "micro_train_batch_size": 4, "max_len": 96, "learning_rate": 1e-2}
    return {"data": data, **batches, **more}


def publish_adapter(material: Path, place: Path) -> Path:
    """Trains an adapter of the base at v1 and publishes it. Returns its checkpoint."""
    sft = training(material, "sft.jsonl", model="base", lora={"rank": 4, "alpha": 8.0, "export": "adapter"})
    planned = chain(material, place, f"{BASE}@v1", sft=sft, publication={"model": "sft", "repo_id": ADAPTER})
    checkpoint = run(planned, planned["sft"])
    run(planned, planned["publication"])
    return checkpoint


def hf_download(place: str, cache: Path, server: Hub) -> None:
    """Runs `hf download` as a user does, on a machine with a network that shares the cache folder."""
    repo_id, commit = place.split("@")
    ours = {
        "HF_HUB_CACHE": str(cache),
        "HF_ENDPOINT": server.url,
        "HF_TOKEN": TOKEN,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
    }
    command = [str(Path(sys.executable).with_name("hf")), "download", repo_id, "--revision", commit]
    subprocess.run(command, env=os.environ | ours, check=True, capture_output=True)


def commit_of(server: Hub, repo_id: str) -> str:
    return server.repositories[repo_id].branches["main"]


def test_an_adapter_trained_on_a_pinned_base_names_repository_and_commit(
    material: Path, tmp_path: Path, server: Hub
) -> None:
    checkpoint = publish_adapter(material, tmp_path / "artifacts")
    commit = server.repositories[BASE].tags["v1"]
    for config in (
        checkpoint / "adapter_config.json",
        checkpoint.parents[1].glob("publication-*/published/adapter_config.json"),
    ):
        file = config if isinstance(config, Path) else next(config)
        named = json.loads(file.read_text())
        assert (named["base_model_name_or_path"], named["revision"]) == (BASE, commit)
    assert f"{BASE} (hub) {commit}" in tree(lineage(checkpoint))
    card = (
        server.repositories[ADAPTER].commits[commit_of(server, ADAPTER)].files["README.md"].content.decode()
    )
    assert (
        f"base_model: {BASE}" in card and f"{BASE} (hub) {commit}" in card and "license: apache-2.0" in card
    )
    assert str(tmp_path) not in card
    assert base_of(str(checkpoint)) == str(snapshot(f"{BASE}@{commit}"))


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("sft", "offline"),
        ("dpo", "online"),
        pytest.param("sft", "online", marks=pytest.mark.long),
        pytest.param("dpo", "offline", marks=pytest.mark.long),
    ],
)
def test_training_starts_from_an_adapter_and_its_base_as_it_was(
    material: Path, tmp_path: Path, server: Hub, monkeypatch: pytest.MonkeyPatch, kind: str, how: str
) -> None:
    checkpoint = publish_adapter(material, tmp_path / "artifacts")
    moved = server.repositories[BASE]
    other = {
        name: blob
        for name, blob in moved.commits[moved.tags["v1"]].files.items()
        if name != "model.safetensors"
    }
    # nobody must read this
    moved.commit("main", "other weights", other | {"config.json": Blob(b"{}", False)})
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "another-machine"))

    adapter = f"{ADAPTER}@{commit_of(server, ADAPTER)}"
    if how == "offline":
        hf_download(adapter, tmp_path / "another-machine", server)
        hf_download(f"{BASE}@{moved.tags['v1']}", tmp_path / "another-machine", server)
        server.heal()
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    model, rows = ("model", "sft.jsonl") if kind == "sft" else ("policy", "preferences.jsonl")
    base = adapter if how == "offline" else f"{ADAPTER}@main"
    planned = chain(
        material, tmp_path / "artifacts", base, **{kind: training(material, rows, **{model: "base"})}
    )
    require_here(planned, planned.nodes)
    out = run(planned, planned[kind])
    assert bool(server.requests) == (how == "online")

    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(material / "base")
        expected = PeftModel.from_pretrained(plain, checkpoint).merge_and_unload()(TOKENS).logits
        start = load_policy(str(snapshot(adapter))).model(TOKENS).logits
        trained = AutoModelForCausalLM.from_pretrained(out)(TOKENS).logits
    assert torch.equal(start, expected), "what training starts from is the base with its adapter"
    assert 1e-3 < (trained - expected).abs().max() and not (out / "adapter_config.json").exists()
    assert RunDir(planned[kind].run_dir).result().metrics["steps"] == 2  # type: ignore[union-attr]
    assert f"{ADAPTER} (hub) {commit_of(server, ADAPTER)}" in tree(lineage(out))
    assert AutoTokenizer.from_pretrained(out)("a word").input_ids


def test_an_adapter_trained_on_an_adapter_is_both(material: Path, tmp_path: Path, server: Hub) -> None:
    first = publish_adapter(material, tmp_path / "artifacts")
    sft = training(material, "sft.jsonl", model="base", lora={"rank": 2, "alpha": 8.0, "export": "adapter"})
    planned = chain(material, tmp_path / "again", f"{ADAPTER}@main", sft=sft)
    second = run(planned, planned["sft"])
    named = json.loads((second / "adapter_config.json").read_text())
    assert (named["base_model_name_or_path"], named["revision"]) == (ADAPTER, commit_of(server, ADAPTER))
    with torch.no_grad():
        model = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(material / "base"), first
        ).merge_and_unload()
        before = model(TOKENS).logits
        expected = PeftModel.from_pretrained(model, second).merge_and_unload()(TOKENS).logits
        assert torch.equal(load_policy(str(second)).model(TOKENS).logits, expected)
    assert (expected - before).abs().max() > 1e-3


def test_an_adapter_without_a_tokenizer_takes_that_of_its_base(
    material: Path, tmp_path: Path, server: Hub
) -> None:
    publish_adapter(material, tmp_path / "artifacts")
    repository = server.repositories[ADAPTER]
    files = {
        name: blob
        for name, blob in repository.commits[commit_of(server, ADAPTER)].files.items()
        if not name.startswith("tokenizer")
    }
    repository.commit(
        "main",
        "no tokenizer",
        {name: blob for name, blob in files.items() if not name.startswith("chat_template")},
    )
    planned = chain(
        material, tmp_path / "again", f"{ADAPTER}@main", sft=training(material, "sft.jsonl", model="base")
    )
    found = AutoTokenizer.from_pretrained(run(planned, planned["sft"]))
    assert found.get_vocab() == AutoTokenizer.from_pretrained(material / "base").get_vocab()


def test_a_base_that_is_gone_is_one_sentence(
    material: Path, tmp_path: Path, server: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_adapter(material, tmp_path / "artifacts")
    del server.repositories[BASE]
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "another-machine"))
    planned = chain(
        material, tmp_path / "again", f"{ADAPTER}@main", sft=training(material, "sft.jsonl", model="base")
    )
    with pytest.raises(
        ValueError, match=f"^the Hub has no model {BASE} for you: correct it, or set HF_TOKEN"
    ):
        run(planned, planned["sft"])
