"""`alignflow pull` with the real huggingface_hub client against the stand-in of the Hub."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import HfApi

from flows.cli.app import main
from rlhf_core.hub import pull as pulling
from rlhf_core.hub.ids import PULLED, pulled
from rlhf_core.hub.model_files import model_files
from rlhf_core.hub.pull import pull
from rlhf_core.runs.lineage import lineage
from rlhf_core.stages.publication.folder import adapter_base
from rlhf_core.stages.publication.run import upload
from tests.support.hub_server import TOKEN, Blob, Hub, Repository
from tests.support.publishing import ONCE, THREE, model_to_publish, serving_hub

REPO, TAG = "someone/tiny", "round-1"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_to_publish(tmp_path_factory.mktemp("model"))


@pytest.fixture
def server(published: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub with the model under a tag; main has moved on since."""
    with serving_hub(monkeypatch) as running:
        upload(HfApi(endpoint=running.url, token=TOKEN), published, REPO, True, TAG, THREE)
        repository = running.repositories[REPO]
        later = dict(repository.commits[repository.tags[TAG]].files) | {"README.md": Blob(b"---\n---\nlater\n", False)}
        repository.commit("main", "later", later | {"pytorch_model.bin": Blob(b"pickle", True), "code.py": Blob(b"", False)})
        running.heal()
        yield running


def test_a_revision_is_pinned_to_its_commit_and_the_lineage_names_it(server: Hub, published: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "models" / "tiny"
    commit = pull(f"{REPO}@{TAG}", folder, THREE)
    assert commit == server.repositories[REPO].tags[TAG]
    assert (folder / "model.safetensors").read_bytes() == (published / "model.safetensors").read_bytes()
    assert AutoModelForCausalLM.from_pretrained(folder).num_parameters() > 1000
    found = lineage(folder)
    assert (found.name, found.kind, found.digest) == (REPO, "hub", commit)
    assert PULLED not in {file.name for file in model_files(folder)}, "what is published of it is the model alone"
    assert [path.name for path in folder.parent.iterdir()] == ["tiny"] and not (folder / ".cache").exists()
    assert TOKEN not in "".join(file.read_bytes().decode("latin-1") for file in folder.iterdir())


def test_main_is_what_it_is_now_without_pickles_and_code(server: Hub, tmp_path: Path) -> None:
    commit = pull(REPO, tmp_path / "tiny", THREE)
    assert commit == server.repositories[REPO].branches["main"]
    names = {file.name for file in (tmp_path / "tiny").iterdir()}
    assert names.isdisjoint({"pytorch_model.bin", "code.py"}) and "later" in (tmp_path / "tiny" / "README.md").read_text()


def test_pulling_again_sends_nothing_and_another_commit_replaces_it(server: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    first = pull(f"{REPO}@{TAG}", folder, THREE)
    server.heal()
    assert pull(f"{REPO}@{first}", folder, THREE) == first
    assert len(server.requests) == 1
    assert pull(REPO, folder, THREE) != first
    assert pulled(folder) == (REPO, server.repositories[REPO].branches["main"])


def test_a_foreign_or_changed_folder_is_left_alone(server: Hub, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="mine holds files that were not pulled"):
        pull(REPO, tmp_path / "mine", THREE)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"
    pull(f"{REPO}@{TAG}", tmp_path / "tiny", THREE)
    (tmp_path / "tiny" / "config.json").write_text("{}")
    assert lineage(tmp_path / "tiny").kind == "folder", "a changed model is not the one of the commit"
    with pytest.raises(ValueError, match="or were changed since"):
        pull(f"{REPO}@{TAG}", tmp_path / "tiny", THREE)


@pytest.mark.parametrize("how", ["refuse", "busy", "cut"])
def test_a_failure_at_each_request_is_survived_and_a_cut_pull_goes_on(server: Hub, tmp_path: Path, how: str) -> None:
    pull(f"{REPO}@{TAG}", tmp_path / "whole", THREE)
    for request in range(len(server.requests)):
        server.break_at(request, how)
        pull(f"{REPO}@{TAG}", tmp_path / f"once-{request}", THREE)
        server.break_at(request, how, times=1000)
        with pytest.raises(ConnectionError, match="in 1 attempts"):
            pull(f"{REPO}@{TAG}", tmp_path / f"again-{request}", ONCE)
        assert not (tmp_path / f"again-{request}").exists()
        server.heal()
        pull(f"{REPO}@{TAG}", tmp_path / f"again-{request}", ONCE)
        for folder in (tmp_path / f"once-{request}", tmp_path / f"again-{request}"):
            assert {f.name: f.read_bytes() for f in folder.iterdir()} == {f.name: f.read_bytes() for f in (tmp_path / "whole").iterdir()}


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("tiny", "'tiny' is no model of the Hub: write owner/name or owner/name@REVISION"),
        (f"{REPO}@", "is no model of the Hub"),
        (f"{REPO}@round-9", f"{REPO} has no revision round-9: name a branch, a tag or a commit"),
        ("someone/other", "the Hub has no model someone/other for you"),
        ("someone/pickles", "someone/pickles has no safetensors weights at"),
    ],
)
def test_wrong_input_is_one_sentence_and_exit_code_2(
    server: Hub, tmp_path: Path, model: str, sentence: str, capfd: pytest.CaptureFixture[str]
) -> None:
    server.repositories["someone/pickles"] = Repository(private=True)
    assert main(["pull", model, str(tmp_path / "tiny")]) == 2
    said = capfd.readouterr().err
    assert sentence in said and said.count("\n") == 1 and not (tmp_path / "tiny").exists()


def test_the_command_says_the_commit_and_an_unreachable_hub_is_exit_code_3(
    server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["pull", f"{REPO}@{TAG}", str(tmp_path / "tiny")]) == 0
    assert server.repositories[REPO].tags[TAG] in capfd.readouterr().out
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(pulling.pull, "__defaults__", (ONCE,))
    assert main(["pull", REPO, str(tmp_path / "other")]) == 3
    assert "could not find the model of someone/tiny in 1 attempts (ConnectError)" in capfd.readouterr().err


def test_an_adapter_trained_on_a_pulled_model_names_its_commit(server: Hub, tmp_path: Path) -> None:
    commit = pull(f"{REPO}@{TAG}", tmp_path / "tiny", THREE)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(tmp_path / "tiny")}))
    assert adapter_base(tmp_path / "adapter", None) == (REPO, commit)
