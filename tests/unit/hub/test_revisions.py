"""`owner/name@REVISION` in a recipe: the commit that it is pinned to, the effect on digests, and the message for
an unknown revision."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset, IterableDataset
from huggingface_hub import HfApi, constants, snapshot_download

import flows.cli
from flows.alignment import refresh_hub_revisions
from rlhf_core.data.rows.mixture import load_rows
from rlhf_core.hub import api as hub_requests
from rlhf_core.hub.api import Retries
from rlhf_core.hub.ids import is_hub_id, parted
from rlhf_core.hub.revisions import PINS
from rlhf_core.hub.snapshots import fetched, snapshot
from rlhf_core.recipe.load_recipe import load_recipe
from rlhf_core.recipe.plan import Plan, plan
from rlhf_core.runs.lineage import lineage, tree
from rlhf_core.runs.run_dir import Outcome, RunDir
from rlhf_core.stages.publication.card_sections import data_sets
from rlhf_core.stages.publication.licenses import upstream_licenses
from rlhf_core.stages.publication.model_card import CardModel, front_matter
from rlhf_core.stages.publication.upload import upload
from rlhf_core.stages.publication.upstream_cards import upstream_cards
from tests.support.hub_server import TOKEN, Blob, Hub, Repository
from tests.support.publishing import model_to_publish, serving_hub
from tests.support.text_rows import rows_of_text

REPO = "someone/tiny"
OTHER = "ab" * 20
TEXT = """
name: tiny
base_model: {base}
stages:
  sft: {{data: {{sources: [{{path: "{data}"}}]}}}}
  reward_model: {{model: {model}, data: {{sources: pairs.jsonl}}}}
  ppo: {{prompts: {{sources: prompts.jsonl}}, reward: "{reward}"}}
"""
Planned = Callable[..., Plan]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_to_publish(tmp_path_factory.mktemp("model"))


@pytest.fixture
def server(published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub with a model under the tag v1, and data."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    with serving_hub(monkeypatch) as running:
        upload(HfApi(endpoint=running.url, token=TOKEN), published, REPO, True, "v1", Retries(1, 0.0))
        running.repositories["datasets/someone/rows"] = Repository(private=True)
        running.heal()
        yield running


def head(server: Hub) -> str:
    return server.repositories[REPO].branches["main"]


def move_on(server: Hub) -> str:
    """A later commit on main."""
    files = server.repositories[REPO].commits[head(server)].files | {
        "README.md": Blob(b"---\nlicense: gpl-3.0\n---\n", False)
    }
    return server.repositories[REPO].commit("main", "later", files)


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Planned:
    monkeypatch.chdir(tmp_path)

    def make(
        base: str = "stand-in/base",
        data: str = "train.jsonl",
        model: str = "sft",
        reward: str = "reward_model",
    ) -> Plan:
        (tmp_path / "recipe.yaml").write_text(TEXT.format(base=base, data=data, model=model, reward=reward))
        return plan(load_recipe("recipe.yaml"))

    return make


def test_what_names_a_revision() -> None:
    assert parted("org/name@v1.0") == ("org/name", "v1.0") and parted("gpt2@main") == ("gpt2", "main")
    assert parted("org/name") == ("org/name", None) and parted("a/b/c@main") == ("a/b/c@main", None)
    assert (
        is_hub_id("org/name@main") and not is_hub_id("data/rows.jsonl@main") and not is_hub_id("/models/x@y")
    )


def test_a_branch_and_a_tag_are_their_commit_and_the_digest_names_it(server: Hub, planned: Planned) -> None:
    commit = head(server)
    at_branch = planned(f"{REPO}@main")
    at_tag = planned(f"{REPO}@v1")
    asked = len(server.requests)
    at_commit = planned(f"{REPO}@{commit}")
    elsewhere = planned(f"{REPO}@{OTHER}")
    anywhere = planned(REPO)
    assert len(server.requests) == asked == 2, "a commit asks nobody"
    assert at_branch["sft"].models == {"base": f"{REPO}@{commit}"}
    assert at_branch.pins == ((f"{REPO}@main", commit),) and at_commit.pins == ()
    digests = [found["sft"].digest for found in (at_branch, at_tag, at_commit, elsewhere, anywhere)]
    assert digests[0] == digests[1] == digests[2] and len(set(digests)) == 3


def test_the_commit_is_kept_until_it_is_forgotten_after_a_finished_run(server: Hub, planned: Planned) -> None:
    first = planned(f"{REPO}@main")
    later = move_on(server)
    assert planned(f"{REPO}@main")["sft"].digest == first["sft"].digest
    assert json.loads((first.folder / PINS).read_text()) == {f"model:{REPO}@main": first.pins[0].commit}

    def run(*statuses: str) -> None:
        stages = [{"name": f"stage-{n}", "status": status} for n, status in enumerate(statuses)]
        (first.folder / "run.json").write_text(json.dumps({"recipe": "tiny", "stages": stages}))

    for unfinished in (("done", "failed"), ("skipped", "not run")):
        run(*unfinished)
        refresh_hub_revisions(first.recipe)
        # a run that was cut off goes on with its commits
        assert planned(f"{REPO}@main").pins[0].commit != later
    run("done", "skipped")
    refresh_hub_revisions(first.recipe)
    second = planned(f"{REPO}@main")
    assert second.pins[0].commit == later and second["sft"].digest != first["sft"].digest
    refresh_hub_revisions(second.recipe)
    refresh_hub_revisions(second.recipe)  # also when there is nothing to forget


def test_models_rewards_and_data_are_pinned_wherever_a_hub_id_may_stand(
    server: Hub, planned: Planned
) -> None:
    commit = head(server)
    rows = server.repositories["datasets/someone/rows"].branches["main"]
    found = planned(data="someone/rows@main", model=f"{REPO}@v1", reward=f"{REPO}@main")
    assert found["reward_model"].models == {f"{REPO}@v1": f"{REPO}@{commit}"}
    assert found["ppo"].models == {f"{REPO}@main": f"{REPO}@{commit}"}
    assert found["sft"].config.data.sources[0].path == f"someone/rows@{rows}"  # type: ignore[union-attr]
    assert dict(found.pins) == {"someone/rows@main": rows, f"{REPO}@v1": commit, f"{REPO}@main": commit}
    server.repositories["datasets/someone/rows"].commit("main", "more rows", {})
    (found.folder / PINS).unlink()
    assert planned(data="someone/rows@main", model=f"{REPO}@v1")["sft"].digest != found["sft"].digest


def test_a_file_with_an_at_sign_in_its_name_is_a_file(planned: Planned, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows@v1").write_text("")
    (tmp_path / "models" / "tiny@v1").mkdir(parents=True)
    found = planned("models/tiny@v1", data="data/rows@v1")
    assert found["sft"].models == {"base": str(tmp_path / "models" / "tiny@v1")} and found.pins == ()


def test_rows_are_read_at_the_commit(monkeypatch: pytest.MonkeyPatch, planned: Planned) -> None:
    asked: dict[str, Any] = {}
    files = {"train": [f"hf://datasets/someone/rows@{OTHER}/train.jsonl"]}

    class Builder:
        config = SimpleNamespace(data_files=files)

        def __init__(self, path: str, revision: str):
            asked.update(path=path, revision=revision)

        def as_dataset(self, split: str) -> Dataset:
            asked.update(split=split)
            return Dataset.from_list([{"prompt": "one", "response": "two"}])

        def as_streaming_dataset(self, split: str) -> IterableDataset:
            return self.as_dataset(split).to_iterable_dataset()

        def download_and_prepare(self) -> None:
            """Downloads nothing."""

    monkeypatch.setattr("datasets.load_dataset_builder", Builder)
    config = planned(data=f"someone/rows@{OTHER}")["sft"].config
    assert len(load_rows(config.data, 0)) == 1  # type: ignore[union-attr]
    assert (asked["path"], asked["revision"], asked["split"]) == ("someone/rows", OTHER, "train")
    for foreign in (
        "/etc/rows.jsonl",
        "http://127.0.0.1/rows.jsonl",
        "hf://datasets/someone/rows-of-others@main/rows.jsonl",
    ):
        files["validation"] = [foreign]
        with pytest.raises(
            ValueError,
            match=(
                f"its card names {foreign}, which is no file of someone/rows: only files of its own are read"
            ),
        ):
            load_rows(config.data, 0)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("base", "sentence"),
    rows_of_text("""
    someone/tiny@round-9 | ^someone/tiny has no revision round-9: name a branch, a tag or a commit of it$
    someone/other@main | ^the Hub has no model someone/other for you: correct it, or set HF_TOKEN to a token that may read it$
    """),
)
def test_a_revision_that_is_not_there_is_one_sentence(
    server: Hub, planned: Planned, base: str, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        planned(base)


def test_without_a_network_the_cache_answers_and_without_both_one_sentence(
    server: Hub, planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = head(server)
    snapshot_download(REPO, revision="v1", endpoint=server.url, token=TOKEN)
    move_on(server)

    def nobody_knows(revision: str, reason: str) -> None:
        with pytest.raises(
            ValueError,
            match=(
                rf"^{REPO}@{revision}: {reason}, and this machine has no copy of that revision: name a commit"
            ),
        ):
            planned(f"{REPO}@{revision}")

    with monkeypatch.context() as offline:
        offline.setattr(constants, "HF_HUB_OFFLINE", True)
        found = planned(f"{REPO}@v1")
        assert found.pins == ((f"{REPO}@v1", commit),)
        nobody_knows("main", "HF_HUB_OFFLINE keeps everything off the Hub")
        inputs = fetched(found.request(found["sft"]).inputs)
        assert Path(inputs["base"]).name == commit and (Path(inputs["base"]) / "model.safetensors").is_file()
        nowhere = (
            f"^{REPO}@{OTHER} is not on this machine and the Hub cannot be reached: run `hf download {REPO}"
            f" --revision {OTHER}`"
        )
        with pytest.raises(ValueError, match=nowhere):
            snapshot(f"{REPO}@{OTHER}")
    (found.folder / PINS).unlink()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(hub_requests, "LONGEST_WAIT", 0.0)
    assert planned(f"{REPO}@v1").pins == ((f"{REPO}@v1", commit),)
    nobody_knows("main", "the Hub cannot be reached")


@pytest.mark.parametrize("how", ["refuse", "cut"])
def test_a_failure_at_each_request_of_a_fetch_is_survived(
    server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(hub_requests, "LONGEST_WAIT", 0.0)
    place = f"{REPO}@{head(server)}"
    whole = snapshot(place)
    names = {file.name for file in whole.iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md"} <= names
    for request in range(len(server.requests)):
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / f"cache-{request}"))
        server.break_at(request, how)
        assert {file.name for file in snapshot(place).iterdir()} == names


def test_what_is_no_safetensors_model_is_refused(server: Hub) -> None:
    pickles = server.repositories["someone/pickles"] = Repository(private=True)
    commit = pickles.commit(
        "main", "a pickle", {"config.json": Blob(b"{}", False), "pytorch_model.bin": Blob(b"0", True)}
    )
    with pytest.raises(
        ValueError, match=f"^someone/pickles@{commit} has no safetensors weights: alignflow loads no pickles"
    ):
        snapshot(f"someone/pickles@{commit}")


def test_validate_says_which_commit_it_is(
    server: Hub, planned: Planned, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = planned(f"{REPO}@main").folder
    assert flows.cli.main(["validate", "recipe.yaml"]) == 0
    told = capsys.readouterr().out.replace("\n", " ").replace("  ", " ")
    assert f"{REPO}@main is commit {head(server)}, kept in {folder / PINS}" in told
    assert flows.cli.main(["validate", "recipe.yaml", f"base_model={REPO}@gone"]) == 2
    assert capsys.readouterr().err == f"{REPO} has no revision gone: name a branch, a tag or a commit of it\n"


def test_lineage_card_and_licences_name_repository_and_commit(server: Hub, planned: Planned) -> None:
    commit = head(server)
    found = planned(f"{REPO}@v1", data=f"someone/rows@{OTHER}")
    node = found["sft"]
    run = RunDir(found["sft"].run_dir)
    run.prepare(found.request(node))
    (run / "checkpoint").mkdir()
    run.finish(found.request(node), Outcome({}, {"checkpoint": "checkpoint"}), 1.0)
    model = lineage(run / "checkpoint")
    assert f"└── {REPO} (hub) {commit}" in tree(model)
    header = front_matter(CardModel(model, "m", "m", "mit", False, True))
    assert header["base_model"] == REPO and header["datasets"] == ["someone/rows"]
    assert f"someone/rows@{OTHER}" in data_sets(model)
    snapshot(f"{REPO}@{commit}")
    move_on(server)  # to another licence
    assert upstream_licenses(upstream_cards(run / "checkpoint", None), {"someone/rows": "cc0-1.0"}) == {
        REPO: "mit",
        "someone/rows": "cc0-1.0",
    }
