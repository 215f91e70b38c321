"""Shared by tests of publication: a client without waits, tiny folders to publish, and checks of a
repository."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import pytest
from huggingface_hub import HfApi, constants, file_download
from huggingface_hub.utils import _http as client_http

from rlhf_core.config import Publication
from rlhf_core.hub.api import Retries
from rlhf_core.runs.run_dir import RunDir
from rlhf_core.stages.publication.publication_folder import AdapterBase, assemble, put
from rlhf_core.stages.publication.upload import upload
from tests.support.chain import Chain, save_model
from tests.support.hub_server import TOKEN, Hub, Repository, serve
from tests.support.stage_request import stage_request

REPO = "someone/tiny"
TAG = "publication-00000000000000aa"
ONCE = Retries(attempts=1, wait=0.0)
THREE = Retries(attempts=3, wait=0.0)
KINDS = ("model", "adapter", "reward model", "dataset")


class Thing(NamedTuple):
    """A published folder, and what kind of repository holds such."""

    folder: Path
    repo_type: Literal["model", "dataset"]

    @property
    def repository(self) -> str:
        """Repository id on the stand-in."""
        return REPO if self.repo_type == "model" else f"datasets/{REPO}"


def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in has no xet store; the client's own waits between attempts are skipped."""
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for module in (client_http, file_download):
        monkeypatch.setattr(module, "time", SimpleNamespace(sleep=lambda seconds: None, time=time.time))


@contextmanager
def serving_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The stand-in as the Hub of this process's environment."""
    quiet(monkeypatch)
    with serve() as server:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def model_to_publish(root: Path) -> Path:
    """The folder of a tiny model as a publication stage leaves it."""
    save_model(root / "checkpoint")
    assemble(
        root / "checkpoint",
        root / "published",
        {"README.md": "---\nlicense: mit\n---\n# tiny\n"},
        "publication",
        "00aa",
    )
    return root / "published"


def api(server: Hub, token: str = TOKEN) -> HfApi:
    return HfApi(endpoint=server.url, token=token)


def things(root: Path) -> dict[str, Thing]:
    """Makes a tiny folder of each kind."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    base = root / "base"
    save_model(base)
    tokenizer = AutoTokenizer.from_pretrained(base)
    torch.manual_seed(0)
    get_peft_model(
        AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=2, target_modules=["q_proj"])
    ).save_pretrained(root / "adapter")
    AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, pad_token_id=2).save_pretrained(
        root / "reward"
    )
    for folder in (root / "adapter", root / "reward"):
        tokenizer.save_pretrained(folder)
    card = {"README.md": "---\nlicense: mit\n---\n# tiny\n"}
    published = {kind: root / "published" / kind.replace(" ", "-") for kind in KINDS}
    assemble(base, published["model"], card, "publication", "00aa")
    assemble(
        root / "adapter",
        published["adapter"],
        card,
        "publication",
        "00aa",
        base=AdapterBase("someone/base", "ab" * 20),
    )
    assemble(root / "reward", published["reward model"], card, "publication", "00aa")
    rows = root / "pairs.jsonl"
    rows.write_text(
        "".join(json.dumps({"prompt": str(n), "chosen": "a", "rejected": "b"}) + "\n" for n in range(5))
    )
    put({"data/pairs.jsonl": rows}, published["dataset"], card, "publication", "00aa", lambda partial: None)
    return {
        kind: Thing(folder, "dataset" if kind == "dataset" else "model") for kind, folder in published.items()
    }


def stage(chain: Chain, place: Path, **config: Any) -> RunDir:
    """Prepares the run directory of a publication stage."""
    request = stage_request(
        Publication(model="dpo-1", evaluation="evaluation", **config),
        {"dpo-1": str(chain.checkpoint), "evaluation": str(chain.report)},
        digest="00000000000000aa",
    )
    run = RunDir(place)
    run.prepare(request)
    return run


def texts(*folders: Path) -> str:
    files = [file for folder in folders for file in folder.rglob("*") if file.is_file()]
    return "".join(file.read_bytes().decode("utf-8", "replace") for file in files)


def send(server: Hub, thing: Thing, retries: Retries) -> str:
    """Uploads the folder. Returns the commit."""
    return upload(api(server), thing.folder, REPO, True, TAG, retries, thing.repo_type).commit


def check_published(server: Hub, folder: Path, commits: int = 2, name: str = REPO) -> Repository:
    """The head holds exactly the folder, in one commit of ours, and the one tag names it."""
    repository = server.repositories[name]
    head = repository.branches["main"]
    assert repository.tags == {TAG: head}
    assert len(repository.history()) == commits and repository.history()[0] == f"Publish {TAG}"
    files = {
        path: blob.content
        for path, blob in repository.commits[head].files.items()
        if path != ".gitattributes"
    }
    assert files == {
        file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()
    }
    return repository


def number_of_requests(thing: Thing, part_size: int | None = None) -> int:
    """Of an undisturbed upload."""
    with serve(part_size) as server:
        send(server, thing, ONCE)
        return len(server.requests)
