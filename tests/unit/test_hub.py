"""Publication with the real huggingface_hub client against a stand-in of the Hub's write API (tests/hub_server.py)."""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import HfApi, constants
from huggingface_hub.utils import _http as client_http

from rlhf_core import hub
from rlhf_core.config import Publication
from rlhf_core.hub import Patience, upload
from rlhf_core.launch import raised_by_us
from rlhf_core.published import MARKER, assemble, check_loads, model_files, read_marker
from rlhf_core.stage import RunDir, StageRequest, run_stage
from tests.chain import Chain, build, remember_place, save_model
from tests.hub_server import TOKEN, Blob, Hub, Repository, serve

REPO = "someone/tiny"
TAG = "publication-00000000000000aa"
CARDS_READ = 2  # requests for the cards of the base model and of a data set, whose licences are inherited
WEIGHTS_REQUEST = CARDS_READ + 7  # the number, from 0, of the request that sends the weights
ONCE, THREE = Patience(attempts=1, wait=0.0), Patience(attempts=3, wait=0.0)


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    chain = build(tmp_path_factory.mktemp("home"))
    save_model(chain.checkpoint)
    return chain


@pytest.fixture(scope="module")
def folder(chain: Chain, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("out") / "published"
    assemble(chain.checkpoint, folder, {"README.md": "---\nlicense: mit\n---\n# tiny\n"}, "publication", "00aa")
    return folder


@pytest.fixture(autouse=True)
def client(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in has no xet store; the client's own waits between attempts are skipped."""
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(client_http, "time", SimpleNamespace(sleep=lambda seconds: None, time=time.time))


@pytest.fixture
def server() -> Iterator[Hub]:
    with serve() as running:
        yield running


def api(server: Hub, token: str = TOKEN) -> HfApi:
    return HfApi(endpoint=server.url, token=token)


def stage(chain: Chain, place: Path, **config: Any) -> RunDir:
    """A publication stage ready to run."""
    request = StageRequest(
        name="publication",
        digest="00000000000000aa",
        config=Publication(model="dpo-1", evaluation="evaluation", **config),
        inputs={"dpo-1": str(chain.checkpoint), "evaluation": str(chain.report)},
        seed=0,
    )
    run = RunDir(place)
    run.prepare(request)
    return run


def texts(*folders: Path) -> str:
    files = [file for folder in folders for file in folder.rglob("*") if file.is_file()]
    return "".join(file.read_bytes().decode("utf-8", "replace") for file in files)


# To a folder


def test_the_stage_publishes_a_whole_model_to_its_run_directory(chain: Chain, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    result = run_stage(stage(chain, tmp_path / "run").path, hub.run)
    out = tmp_path / "run" / "published"
    expected = {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    expected |= {"chat_template.jinja", "README.md", "eval_results.json", ".eval_results/alignflow.yaml", MARKER}
    assert {file.relative_to(out).as_posix() for file in out.rglob("*") if file.is_file()} == expected
    assert result.outputs == {"published": "published"} and result.metrics["files"] == len(expected) - 1
    assert RunDir(tmp_path / "run").result() is not None
    assert "| **dpo-1** | sft | rule | 72.0" in (out / "README.md").read_text()
    assert AutoModelForCausalLM.from_pretrained(out).num_parameters() > 1000
    assert AutoTokenizer.from_pretrained(out).apply_chat_template([{"role": "user", "content": "one two"}], tokenize=False) == "one two "


def test_a_folder_elsewhere_is_part_of_the_result(chain: Chain, tmp_path: Path) -> None:
    target = tmp_path / "models" / "mine"
    run = stage(chain, tmp_path / "run", folder=str(target))
    run_stage(run.path, hub.run)
    assert read_marker(target) is not None
    assert not (run / "published").exists()
    assert run.result() is not None
    (target / "model.safetensors").unlink()
    assert run.result() is None, "a published folder that lost a file is published again"
    run_stage(run.path, hub.run)
    assert (target / "model.safetensors").exists()


def test_publishing_again_replaces_the_folder(chain: Chain, tmp_path: Path) -> None:
    out = tmp_path / "published"
    assemble(chain.checkpoint, out, {"README.md": "old", "eval_results.json": "{}"}, "publication", "1")
    assemble(chain.checkpoint, out, {"README.md": "new"}, "publication", "2")
    assert (out / "README.md").read_text() == "new" and not (out / "eval_results.json").exists()
    marker = read_marker(out)
    assert marker is not None and marker.digest == "2"
    assert [file.name for file in tmp_path.iterdir()] == ["published"], "nothing is left beside it"


def test_a_foreign_folder_is_refused_and_untouched(chain: Chain, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="mine holds files that were not published by alignflow: name another folder"):
        run_stage(stage(chain, tmp_path / "run", folder=str(tmp_path / "mine")).path, hub.run)
    assert texts(tmp_path / "mine") == "years of work"
    with pytest.raises(ValueError, match="not published by alignflow"):
        assemble(chain.checkpoint, chain.checkpoint, {}, "publication", "1")
    (tmp_path / "empty").mkdir()
    assemble(chain.checkpoint, tmp_path / "empty", {}, "publication", "1")


def test_what_was_cut_off_leaves_the_old_folder_and_is_cleaned_up(chain: Chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "published"
    assemble(chain.checkpoint, out, {"README.md": "old"}, "publication", "1")
    with monkeypatch.context() as patch:
        patch.setattr("rlhf_core.published.check_loads", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            assemble(chain.checkpoint, out, {"README.md": "new"}, "publication", "1")
    assert (out / "README.md").read_text() == "old"
    assemble(chain.checkpoint, out, {"README.md": "new"}, "publication", "1")
    assert (out / "README.md").read_text() == "new" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("missing", "sentence"),
    [("config.json", "has no config.json"), ("model.safetensors", "has no safetensors weights"), ("tokenizer.json", "has no tokenizer")],
)
def test_half_a_model_is_refused(chain: Chain, tmp_path: Path, missing: str, sentence: str) -> None:
    shutil.copytree(chain.checkpoint, tmp_path / "half")
    (tmp_path / "half" / missing).unlink()
    with pytest.raises(ValueError, match=sentence):
        assemble(tmp_path / "half", tmp_path / "out", {}, "publication", "1")
    assert not (tmp_path / "out").exists()


def test_damaged_weights_and_a_lying_index_are_refused(chain: Chain, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(chain.checkpoint, model)
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "model.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    check_loads(model)
    index["weight_map"]["model.layers.7.weight"] = "model-00002.safetensors"
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"promises model\.layers\.7\.weight in model-00002\.safetensors, and it is not there"):
        check_loads(model)
    weights = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(weights[:-8])
    with pytest.raises(ValueError, match=r"model\.safetensors of the model to publish is damaged"):
        check_loads(model)


def test_no_pickle_no_foreign_file_and_no_place_of_the_machine_is_published(chain: Chain, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(chain.checkpoint, model)
    remember_place(model, str(chain.root / "secret-place"))
    for name in ("pytorch_model.bin", "optimizer.pt", "notes.txt", "code.py", "score_statistics.json"):
        (model / name).write_text("{}")
    assert {file.name for file in model_files(model)}.isdisjoint({"pytorch_model.bin", "optimizer.pt", "notes.txt", "code.py"})
    assert "code.py" in {file.name for file in model_files(model, trust_remote_code=True)}
    assemble(model, tmp_path / "out", {}, "publication", "1")
    assert (tmp_path / "out" / "score_statistics.json").exists()
    assert str(tmp_path) not in texts(tmp_path / "out") and "secret-place" not in texts(tmp_path / "out")


def test_nothing_published_by_the_stage_names_the_machine(chain: Chain, tmp_path: Path) -> None:
    run_stage(stage(chain, tmp_path / "run").path, hub.run)
    shown = texts(tmp_path / "run" / "published")
    assert str(chain.root) not in shown and str(tmp_path) not in shown


# To the Hub


def check_published(server: Hub, folder: Path, commits: int = 2) -> Repository:
    """The head holds exactly the folder, in one commit of ours, and the one tag names it."""
    repository = server.repositories[REPO]
    head = repository.branches["main"]
    assert repository.tags == {TAG: head}
    assert len(repository.history()) == commits and repository.history()[0] == f"Publish {TAG}"
    files = {path: blob.content for path, blob in repository.commits[head].files.items() if path != ".gitattributes"}
    assert files == {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    return repository


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
    assert [request for request in server.requests if not request.startswith("GET")] == ["POST /api/repos/create"]


def test_large_files_go_in_parts(folder: Path) -> None:
    with serve(part_size=4000) as server:
        upload(api(server), folder, REPO, True, TAG, THREE)
        check_published(server, folder)
        assert len(server.parts) == -(-(folder / "model.safetensors").stat().st_size // 4000) > 2


def test_what_was_published_can_be_downloaded_by_its_tag(server: Hub, folder: Path, tmp_path: Path) -> None:
    commit = upload(api(server), folder, REPO, True, TAG, THREE)
    path = Path(api(server).snapshot_download(REPO, revision=TAG, cache_dir=tmp_path))
    assert path.name == commit.commit
    assert all((path / file.name).read_bytes() == file.read_bytes() for file in folder.iterdir() if file.is_file())


def number_of_requests(folder: Path, part_size: int | None) -> int:
    with serve(part_size) as server:
        upload(api(server), folder, REPO, True, TAG, ONCE)
        return len(server.requests)


@pytest.mark.parametrize("how", ["refuse", "busy", "cut", "lost"])
@pytest.mark.parametrize("part_size", [None, 8000])
def test_one_failure_at_each_request_in_turn_is_survived(folder: Path, how: str, part_size: int | None) -> None:
    count = number_of_requests(folder, part_size)
    assert count >= 12
    for request in range(count):
        with serve(part_size) as server:
            server.break_at(request, how)
            upload(api(server), folder, REPO, True, TAG, THREE)
            check_published(server, folder)


@pytest.mark.parametrize("how", ["refuse", "cut", "lost"])
def test_a_run_cut_off_at_each_request_is_completed_by_the_next_run(folder: Path, how: str) -> None:
    count = number_of_requests(folder, None)
    for request in range(count):
        with serve() as server:
            server.break_at(request, how, times=1000)
            with pytest.raises(ConnectionError, match="run this again later, nothing is lost or doubled"):
                upload(api(server), folder, REPO, True, TAG, ONCE)
            server.heal()
            upload(api(server), folder, REPO, True, TAG, ONCE)
            check_published(server, folder)


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        (
            "full",
            r"the Hub has no space left to .* of someone/tiny \(.*storage limit reached.*\): make space or get more, then run this again",
        ),
        ("disk", r"the Hub has no space left to .* of someone/tiny.*: make space or get more, then run this again"),
        ("expired", r"the Hub does not accept the token in HF_TOKEN: set it to a valid token with write access to someone/tiny"),
    ],
)
def test_a_full_quota_or_a_dead_token_at_each_request_is_one_sentence_and_the_next_run_ends_in_the_same_commit(
    folder: Path, how: str, sentence: str
) -> None:
    with serve() as undisturbed:
        expected = upload(api(undisturbed), folder, REPO, True, TAG, ONCE).commit
    for request in range(number_of_requests(folder, None)):
        with serve() as server:
            server.break_at(request, how, times=1000)
            with pytest.raises(ValueError, match=f"^{sentence}") as caught:
                upload(api(server), folder, REPO, True, TAG, THREE)
            assert raised_by_us(caught.value) and caught.value.__suppress_context__, "exit code 2 and no traceback"
            assert "\n" not in str(caught.value) and TOKEN not in str(caught.value) and "SignedAddress" not in str(caught.value)
            assert len(server.requests) <= request + 2, (
                "what cannot succeed is not tried again; the client asks whether the repository is there"
            )
            server.heal()
            assert upload(api(server), folder, REPO, True, TAG, ONCE).commit == expected
            check_published(server, folder)


def test_a_broken_connection_inside_xet_is_tried_again(server: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = api(server)
    send, failures = client.create_commit, [ConnectionError("Network error")]

    def fail_once(*arguments: Any, **named: Any) -> Any:
        if failures:
            raise failures.pop()
        return send(*arguments, **named)

    monkeypatch.setattr(client, "create_commit", fail_once)
    upload(client, folder, REPO, True, TAG, THREE)
    check_published(server, folder)


def test_a_new_version_removes_stale_model_files_and_keeps_the_rest(server: Hub, chain: Chain, folder: Path, tmp_path: Path) -> None:
    repository = server.repositories[REPO] = Repository(private=True)
    others = {"logo.png": Blob(b"png", False), ".gitattributes": Blob(b"", False), "adapter/config.json": Blob(b"{}", False)}
    stale = {"model-00001-of-00002.safetensors": Blob(b"0", True), "eval_results.json": Blob(b"{}", False)}
    repository.commit("main", "an earlier model", others | stale)
    upload(api(server), folder, REPO, True, TAG, THREE)
    files = set(repository.commits[repository.tags[TAG]].files)
    assert files == set(others) | {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}


def test_a_commit_by_someone_else_meanwhile_is_detected(server: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    with pytest.raises(ValueError, match=f"the repository {REPO} is public: make it private, or set private: false"):
        upload(api(server), folder, REPO, True, TAG, THREE)
    assert repository.history() == ["initial commit"]
    upload(api(server), folder, REPO, False, TAG, THREE)
    check_published(server, folder)


def test_a_wrong_token_is_one_sentence(server: Hub, folder: Path) -> None:
    with pytest.raises(ValueError) as caught:
        upload(api(server, "hf_WrongTokenThatMustNotShow"), folder, REPO, True, TAG, THREE)
    assert str(caught.value) == f"the Hub does not accept the token in HF_TOKEN: set it to a valid token with write access to {REPO}"
    assert not server.repositories and caught.value.__suppress_context__


def test_no_write_access_is_one_sentence(folder: Path) -> None:
    with serve(may_write=False) as server:
        with pytest.raises(ValueError, match=r"does not let this token create the repository of someone/tiny .*rights"):
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
    run = stage(chain, tmp_path / "run", repo_id=repo_id)
    with pytest.raises(ValueError, match=sentence):
        run_stage(run.path, hub.run)
    assert not (run / "published").exists()


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
    monkeypatch.setattr(hub, "PATIENCE", THREE)
    monkeypatch.setattr(logging.getLogger("huggingface_hub"), "propagate", True)
    server.break_at(WEIGHTS_REQUEST, "refuse", times=2)
    run = stage(chain, tmp_path / "run", repo_id=REPO)
    result = run_stage(run.path, hub.run)
    assert server.requests[WEIGHTS_REQUEST].startswith("PUT /storage/"), "the address with a signature is the one that failed"
    check_published(server, run / "published")
    receipt = json.loads((run / result.outputs["hub"]).read_text())
    assert receipt["commit"] == server.repositories[REPO].tags[receipt["tag"]]
    assert f'from_pretrained("{REPO}")' in (run / "published" / "README.md").read_text()
    assert (run / "published" / ".eval_results" / "alignflow.yaml").exists()
    said = "".join(capfd.readouterr()) + caplog.text
    assert f"published to {server.url}/{REPO}/tree/{TAG}" in said
    sent = "".join(
        blob.content.decode("latin-1") for commit in server.repositories[REPO].commits.values() for blob in commit.files.values()
    )
    for text in (texts(run.path), said, sent):
        assert TOKEN not in text and "SignedAddress" not in text
