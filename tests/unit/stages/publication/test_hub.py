"""Publication to the Hub with the real huggingface_hub client against a stand-in of its write API
(tests/support/hub_server.py).

What happens while the Hub fails is in test_hub_failures.py.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi, constants

from rlhf_core.__main__ import main
from rlhf_core.runs.run_dir import run_in_directory
from rlhf_core.stages.publication import publication_stage as hub
from rlhf_core.stages.publication.publication_folder import assemble
from rlhf_core.stages.publication.upload import upload
from rlhf_core.system.processes import ENVIRONMENT
from tests.support.chain import Chain
from tests.support.hub_server import TOKEN, Blob, Hub, Repository, serve
from tests.support.publishing import REPO, TAG, THREE, api, check_published, quiet, stage, texts

CARDS_READ = 2  # requests for the cards of the base model and of a data set, whose licences are inherited
WEIGHTS_REQUEST = CARDS_READ + 7  # the number, from 0, of the request that sends the weights


@pytest.fixture(scope="module")
def folder(chain: Chain, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("out") / "published"
    assemble(
        chain.checkpoint, folder, {"README.md": "---\nlicense: mit\n---\n# tiny\n"}, "publication", "00aa"
    )
    return folder


@pytest.fixture(autouse=True)
def client(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet(monkeypatch)


@pytest.fixture
def server() -> Iterator[Hub]:
    with serve() as running:
        yield running


def test_upload_makes_a_private_repository_one_commit_and_a_tag_last(server: Hub, folder: Path) -> None:
    commit = upload(api(server), folder, REPO, True, TAG, THREE)
    repository = check_published(server, folder)
    assert repository.private
    assert commit == (REPO, repository.branches["main"], TAG, f"{server.url}/{REPO}/tree/{TAG}")
    assert server.requests[0] == "POST /api/repos/create"
    assert server.requests[-1].startswith(f"POST /api/models/{REPO}/tag/")
    head = repository.commits[commit.commit]
    assert head.files["model.safetensors"].lfs and not head.files["README.md"].lfs


def test_upload_again_changes_nothing(server: Hub, folder: Path) -> None:
    first = upload(api(server), folder, REPO, True, TAG, THREE)
    server.heal()
    assert upload(api(server), folder, REPO, True, TAG, THREE) == first
    check_published(server, folder)
    assert [request for request in server.requests if not request.startswith("GET")] == [
        "POST /api/repos/create"
    ]


def test_large_files_go_in_parts(folder: Path) -> None:
    with serve(part_size=4000) as server:
        upload(api(server), folder, REPO, True, TAG, THREE)
        check_published(server, folder)
        assert len(server.parts) == -(-(folder / "model.safetensors").stat().st_size // 4000) > 2


def test_what_was_published_can_be_downloaded_by_its_tag(server: Hub, folder: Path, tmp_path: Path) -> None:
    commit = upload(api(server), folder, REPO, True, TAG, THREE)
    path = Path(api(server).snapshot_download(REPO, revision=TAG, cache_dir=tmp_path))
    assert path.name == commit.commit
    assert all(
        (path / file.name).read_bytes() == file.read_bytes() for file in folder.iterdir() if file.is_file()
    )


def test_a_broken_connection_inside_xet_is_tried_again(
    server: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = api(server)
    send = client.create_commit
    failures = [ConnectionError("Network error")]

    def fail_once(*arguments: Any, **named: Any) -> Any:
        if failures:
            raise failures.pop()
        return send(*arguments, **named)

    monkeypatch.setattr(client, "create_commit", fail_once)
    commit = upload(client, folder, REPO, True, TAG, THREE)
    check_published(server, folder)
    assert not failures and server.repositories[REPO].tags == {TAG: commit.commit}


def test_a_new_version_removes_stale_model_files_and_keeps_the_rest(
    server: Hub, chain: Chain, folder: Path, tmp_path: Path
) -> None:
    repository = server.repositories[REPO] = Repository(private=True)
    others = {
        "logo.png": Blob(b"png", False),
        ".gitattributes": Blob(b"", False),
        "adapter/config.json": Blob(b"{}", False),
    }
    others |= {name: Blob(b"as the base's owner requires", False) for name in ("LICENSE", "NOTICE.txt")}
    stale = {"model-00001-of-00002.safetensors": Blob(b"0", True), "eval_results.json": Blob(b"{}", False)}
    repository.commit("main", "an earlier model", others | stale)
    upload(api(server), folder, REPO, True, TAG, THREE)
    files = set(repository.commits[repository.tags[TAG]].files)
    assert files == set(others) | {
        file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()
    }


def test_a_commit_by_someone_else_meanwhile_is_detected(
    server: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = api(server)
    repository = server.repositories[REPO] = Repository(private=True)
    send = client.create_commit

    def send_second(*arguments: Any, **named: Any) -> Any:
        repository.commit("main", "theirs", {"README.md": Blob(b"theirs", False)})
        return send(*arguments, **named)

    monkeypatch.setattr(client, "create_commit", send_second)
    with pytest.raises(ValueError, match=f"^someone else changed {REPO} while this was being published"):
        upload(client, folder, REPO, True, TAG, THREE)
    assert repository.history() == ["theirs", "initial commit"] and not repository.tags
    upload(api(server), folder, REPO, True, TAG, THREE)
    check_published(server, folder, commits=3)


def test_a_tag_that_holds_another_model_is_never_moved(server: Hub, folder: Path) -> None:
    repository = server.repositories[REPO] = Repository(private=True)
    repository.tags[TAG] = repository.branches["main"]
    with pytest.raises(ValueError, match=f"the tag {TAG} of {REPO} holds another model"):
        upload(api(server), folder, REPO, True, TAG, THREE)
    assert repository.history() == ["initial commit"]


def test_a_public_repository_is_refused_unless_asked_for(server: Hub, folder: Path) -> None:
    repository = server.repositories[REPO] = Repository(private=False)
    with pytest.raises(
        ValueError, match=f"the repository {REPO} is public: make it private, or set private: false"
    ):
        upload(api(server), folder, REPO, True, TAG, THREE)
    assert repository.history() == ["initial commit"]
    upload(api(server), folder, REPO, False, TAG, THREE)
    check_published(server, folder)


def test_a_wrong_token_is_one_sentence(server: Hub, folder: Path) -> None:
    with pytest.raises(ValueError) as caught:
        upload(api(server, "hf_WrongTokenThatMustNotShow"), folder, REPO, True, TAG, THREE)
    assert (
        str(caught.value)
        == "the Hub does not accept the token in HF_TOKEN: set it to a valid token with write access to"
        f" {REPO}"
    )
    assert not server.repositories and caught.value.__suppress_context__


def test_no_write_access_is_one_sentence(folder: Path) -> None:
    with serve(may_write=False) as server:
        with pytest.raises(ValueError, match=r"does not let this .* the repository of someone/tiny .*rights"):
            upload(api(server), folder, REPO, True, TAG, THREE)


def test_an_unreachable_hub_is_one_sentence(folder: Path) -> None:
    with pytest.raises(ConnectionError, match=r"in 3 attempts \(ConnectError\)"):
        upload(HfApi(endpoint="http://127.0.0.1:9", token=TOKEN), folder, REPO, True, TAG, THREE)


@pytest.mark.parametrize(
    ("repo_id", "token", "sentence"),
    [
        ("someone/tiny", "", "HF_TOKEN is empty: set it, or leave repo_id out"),
        ("tiny", TOKEN, "'tiny' is not a Hub repository: write it as"),
        ("someone/tiny", TOKEN, "HF_HUB_OFFLINE keeps everything off the Hub"),
    ],
)
def test_a_missing_token_or_wrong_id_stops_before_any_work(
    chain: Chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repo_id: str, token: str, sentence: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=sentence):
        run_in_directory(stage(chain, tmp_path / "run", repo_id=repo_id).path, hub.run)
    assert not (tmp_path / "run" / "published").exists()


def test_the_stage_publishes_to_the_hub_and_no_file_or_line_holds_the_token(
    chain: Chain,
    tmp_path: Path,
    server: Hub,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setattr(hub, "RETRIES", THREE)
    monkeypatch.setattr(logging.getLogger("huggingface_hub"), "propagate", True)
    weights = WEIGHTS_REQUEST + 2  # after two about the base: its card, and who may read it
    server.break_at(weights, "refuse", times=2)
    run = stage(chain, tmp_path / "run", repo_id=REPO)
    result = run_in_directory(run.path, hub.run)
    # the address with a signature is the one that failed
    assert server.requests[weights].startswith("PUT /storage/")
    check_published(server, run / "published")
    receipt = json.loads((run / result.outputs["hub"]).read_text())
    assert receipt["commit"] == server.repositories[REPO].tags[receipt["tag"]]
    assert f'from_pretrained("{REPO}")' in (run / "published" / "README.md").read_text()
    assert (run / "published" / ".eval_results" / "alignflow.yaml").exists()
    said = "".join(capfd.readouterr()) + caplog.text
    assert f"published to {server.url}/{REPO}/tree/{TAG}" in said
    sent = "".join(
        blob.content.decode("latin-1")
        for commit in server.repositories[REPO].commits.values()
        for blob in commit.files.values()
    )
    for text in (texts(run.path), said, sent):
        assert TOKEN not in text and "SignedAddress" not in text


def test_an_outage_of_the_hub_is_one_sentence_and_no_failure_to_try_again(
    server: Hub,
    chain: Chain,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(hub, "RETRIES", THREE)
    run = stage(chain, tmp_path / "run", repo_id=REPO)
    server.break_at(0, "refuse", times=10_000)
    assert main([str(run.path)]) == ENVIRONMENT
    told = capsys.readouterr().err.strip().splitlines()
    assert (
        told[-1]
        == "the Hub could not send the card of stand-in/base-1m in 3 attempts (HTTP 503): run this again"
        " later, nothing is lost or doubled"
    )
    server.heal()
    assert main([str(run.path)]) == 0 and server.repositories[REPO].tags
