"""A checkpoint on its way from its stage to a store and the Hub: its weights are hashed once, and published
without a copy."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config import SFT, Publication
from rlhf_core.runs.lineage import lineage
from rlhf_core.runs.remote.store import Store
from rlhf_core.runs.run_dir import Outcome, RunDir, StageRequest, run_in_directory
from rlhf_core.stages.publication import publication_stage as publication
from rlhf_core.stages.publication.publication_folder import read_marker
from rlhf_core.system import files
from tests.support.chain import save_model
from tests.support.stage_request import stage_request


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How often each inode is read for its digest."""
    count: Counter[int] = Counter()
    read = hashlib.file_digest

    def counted(file: Any, name: str) -> Any:
        count[os.fstat(file.fileno()).st_ino] += 1
        return read(file, name)

    monkeypatch.setattr(files.hashlib, "file_digest", counted)
    return count


def trained(folder: Path) -> RunDir:
    run = RunDir(folder / "sft-00aa")
    config = SFT.model_validate({"data": {"sources": "rows.jsonl"}})
    request = stage_request(config, digest="00aa")
    run.prepare(request)

    def work(request: StageRequest, run: RunDir) -> Outcome:
        save_model(run / "checkpoint")
        return Outcome({}, {"checkpoint": "checkpoint"})

    run_in_directory(run.path, work)
    return run


def publish(trained: RunDir, root: Path, **config: Any) -> RunDir:
    run = RunDir(root / "publication-00bb")
    inputs = {"sft": str(trained / "checkpoint")}
    run.prepare(stage_request(Publication(model="sft", **config), inputs, digest="00bb"))
    run_in_directory(run.path, publication.run)
    return run


def test_weights_are_hashed_once_and_linked(tmp_path: Path, hashed: Counter[int]) -> None:
    sft = trained(tmp_path)
    store = Store(str(tmp_path / "store"))
    store.put(sft)
    published = publish(sft, tmp_path)
    store.put(published)
    weights = sft / "checkpoint" / "model.safetensors"
    link = published / "published" / "model.safetensors"
    assert link.samefile(weights) and hashed[weights.stat().st_ino] == 1
    marker = read_marker(link.parent)
    result = published.result()
    assert marker is not None and result is not None
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    assert (
        marker.files["model.safetensors"].sha256
        == result.files["published/model.safetensors"].sha256
        == digest
    )
    # its paths are removed from the copy
    assert not (link.parent / "config.json").samefile(sft / "checkpoint" / "config.json")


def test_a_folder_of_the_users_gets_copies(tmp_path: Path) -> None:
    sft = trained(tmp_path)
    publish(sft, tmp_path, folder=str(tmp_path / "mine"))
    assert not (tmp_path / "mine" / "model.safetensors").samefile(sft / "checkpoint" / "model.safetensors")


def test_weights_that_are_newer_than_their_record_are_hashed_again(tmp_path: Path) -> None:
    sft = trained(tmp_path)
    weights = sft / "checkpoint" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    marker = read_marker(publish(sft, tmp_path) / "published")
    assert marker is not None
    assert marker.files["model.safetensors"].sha256 == hashlib.sha256(content).hexdigest()


def test_a_base_model_named_by_two_stages_is_hashed_once(tmp_path: Path, hashed: Counter[int]) -> None:
    """Also by another process: a report reads the lineage of each family, a publication that of its
    checkpoint."""
    save_model(tmp_path / "base")
    weights = tmp_path / "base" / "model.safetensors"
    config = SFT.model_validate({"data": {"sources": "rows.jsonl"}})
    stages = tmp_path / "artifacts" / "stages"
    for name, inputs in {"one": {}, "two": {"one": str(stages / "one-00aa")}}.items():
        inputs = {"base": str(tmp_path / "base")} | inputs
        RunDir(stages / f"{name}-00aa").prepare(stage_request(config, inputs, name=name, digest="00aa"))
    os.utime(weights, (1.7e9, 1.7e9))
    found = []
    for _ in range(2):
        found.append(lineage(stages / "two-00aa"))
        files._hashed.clear()  # what this process remembers
    assert found[0] == found[1] and len(found[0].parents) == 2
    assert hashed[weights.stat().st_ino] == 1


def test_a_file_that_changed_is_hashed_again(tmp_path: Path) -> None:
    """Also in the same process and with the same size."""
    file = tmp_path / "weights"
    for content, mtime in ((b"one", 1.6e9), (b"two", 1.7e9)):
        file.write_bytes(content)
        os.utime(file, (mtime, mtime))
        assert files.file_digest(file) == files.file_digest(file) == hashlib.sha256(content).hexdigest()
