"""Data sets that a chain made, published through the stand-in Hub and read back with `datasets`; and what a
dry run shows."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from datasets import load_dataset
from huggingface_hub import HfApi, constants
from pydantic import ValidationError

from evaluation.scores.arena_files import judgment_lines, read_judgments
from rlhf_core.config import Publication, Recipe
from rlhf_core.hub.api import Retries
from rlhf_core.preflight.inputs import tokenizer_of
from rlhf_core.recipe.plan import plan
from rlhf_core.records import Game, Judgment, LabelledAnswer, PreferencePair
from rlhf_core.runs.run_dir import RunDir, run_in_directory
from rlhf_core.stages.publication import publication_stage as hub
from rlhf_core.stages.publication.publication_folder import read_marker
from rlhf_core.stages.publication.upload import upload
from tests.support.chain import Chain, build, save_model
from tests.support.hub_server import TOKEN, Blob, Hub, Repository
from tests.support.publishing import serving_hub
from tests.support.stage_request import stage_request

REPO = "someone/rows"
TAG = "publication-00aa"
ASKED = ({"role": "user", "content": "Sort 312"},)
PAIRS = [
    PreferencePair(prompt=ASKED, chosen="123", rejected=f"3{i}2", chosen_score=1.0, rejected_score=-0.5 * i)
    for i in range(5)
]
ANSWERS = [LabelledAnswer(prompt=ASKED, response=str(i), reward=0.5 * i, label=i > 1) for i in range(4)]
VERDICTS = [
    Judgment(
        uid=f"q{i}",
        category="sort",
        judge="rule",
        model="dpo-1",
        baseline="sft",
        games=(
            Game(score="B>A", judgment={}),
            Game(score="A>B" if i else None, judgment={"answer": "[[A>B]]"}, prompt=ASKED),
        ),
    )
    for i in range(3)
]


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    chain = build(tmp_path_factory.mktemp("home"))
    save_model(chain.checkpoint)
    (chain.stages["pairs-1"] / "pairs.jsonl").write_text(
        "".join(row.model_dump_json() + "\n" for row in PAIRS)
    )
    (chain.stages["pairs-1"] / "answers.jsonl").write_text(
        "".join(row.model_dump_json() + "\n" for row in ANSWERS)
    )
    (chain.report / "judgments").mkdir()
    (chain.report / "judgments" / "rule.jsonl").write_text(judgment_lines(VERDICTS))
    (chain.report / "answers").mkdir()
    for model in ("sft", "dpo-1"):
        answer = dict(
            uid="q0", model=model, messages=[*ASKED, {"role": "assistant", "content": {"answer": "123"}}]
        )
        (chain.report / "answers" / f"{model}.jsonl").write_text(
            json.dumps(answer | {"metadata": {"token_len": 1}}) + "\n"
        )
    return chain


@pytest.fixture(autouse=True)
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    monkeypatch.setattr(hub, "RETRIES", Retries(attempts=3, wait=0.0))
    with serving_hub(monkeypatch) as running:
        yield running


def publish(output: Path, place: Path, digest: str = "00aa", **config: Any) -> RunDir:
    given = {"repo_id": REPO, **config}
    publication = Publication(**given) if "model" in given else Publication(dataset="made", **given)
    run = RunDir(place)
    run.prepare(stage_request(publication, {publication.model or "made": str(output)}, digest=digest))
    run_in_directory(run.path, hub.run)
    return run


def download(server: Hub, cache: Path) -> Path:
    api = HfApi(endpoint=server.url, token=TOKEN)
    return Path(api.snapshot_download(REPO, repo_type="dataset", revision=TAG, cache_dir=cache))


def rows(folder: Path, cache: Path, name: str | None = None, split: str = "train") -> list[dict[str, Any]]:
    return list(load_dataset(str(folder), name, split=split, cache_dir=str(cache / "datasets")))


def test_pairs_become_a_private_data_set_that_datasets_reads(
    chain: Chain, server: Hub, tmp_path: Path
) -> None:
    run = publish(chain.stages["pairs-1"] / "pairs.jsonl", tmp_path / "run")
    repository = server.repositories[f"datasets/{REPO}"]
    assert repository.private
    assert repository.tags == {TAG: repository.branches["main"]}
    assert len(repository.history()) == 2
    assert json.loads((run / "hub.json").read_text())["url"] == f"{server.url}/datasets/{REPO}/tree/{TAG}"
    folder = download(server, tmp_path)
    assert {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()} >= {
        "README.md",
        "data/pairs.jsonl",
    }
    assert rows(folder, tmp_path) == [row.model_dump(mode="json") for row in PAIRS]
    card = (folder / "README.md").read_text()
    header = yaml.safe_load(card.split("---\n")[1])
    assert header["tags"] == ["alignflow", "pairs"] and header["license"] == "unknown"
    assert header["source_datasets"] == ["stand-in/chats"]
    for said in (
        "| data/pairs.jsonl | 5 |",
        "| data | chosen_score | number | its reward |",
        "pairs-1 (preferences)",
        "<summary>ppo (",
    ):
        assert said in card
    assert str(chain.root) not in card and str(tmp_path) not in card


def test_labelled_answers_are_another_data_set_and_what_was_there_goes(
    chain: Chain, server: Hub, tmp_path: Path
) -> None:
    publish(chain.stages["pairs-1"] / "pairs.jsonl", tmp_path / "first", digest="00bb")
    repository = server.repositories[f"datasets/{REPO}"]
    head = repository.commits[repository.branches["main"]].files
    repository.commit("main", "theirs", head | {"notes/mine.txt": Blob(b"mine", False)})
    publish(chain.stages["pairs-1"] / "answers.jsonl", tmp_path / "second")
    folder = download(server, tmp_path)
    assert rows(folder, tmp_path) == [row.model_dump(mode="json") for row in ANSWERS]
    assert not (folder / "data" / "pairs.jsonl").exists()
    assert (folder / "notes" / "mine.txt").read_text() == "mine"


def test_judgments_and_answers_interchange_after_publication(
    chain: Chain, server: Hub, tmp_path: Path
) -> None:
    publish(chain.report, tmp_path / "run")
    folder = download(server, tmp_path)
    assert read_judgments(folder / "judgments") == VERDICTS
    loaded = rows(folder, tmp_path, "judgments", "judgments")
    assert [row["uid"] for row in loaded] == ["q0", "q1", "q2"] and loaded[0]["games"][1]["score"] is None
    assert {row["model"] for row in rows(folder, tmp_path, "answers", "answers")} == {"sft", "dpo-1"}
    assert f'load_dataset("{REPO}", "judgments", split="judgments")' in (folder / "README.md").read_text()


def test_models_and_judges_are_not_published_by_their_place_on_the_machine(
    chain: Chain, tmp_path: Path
) -> None:
    report = shutil.copytree(chain.report.parent, tmp_path / chain.report.parent.name) / chain.report.name
    place = str(tmp_path / "secret" / "ck")
    for file in [*report.glob("judgments/*.jsonl"), *report.glob("answers/*.jsonl")]:
        file.write_text(
            file.read_text().replace('"dpo-1"', f'"{place}"').replace('"rule"', '"/home/alice/rm"')
        )
    folder = publish(report, tmp_path / "run", repo_id=None).path / "published"
    published = {file: file.read_text() for file in folder.rglob("*") if file.is_file()}
    assert len(published) > 3
    assert not [file for file, text in published.items() if str(tmp_path) in text or "alice" in text]
    judgments = read_judgments(folder / "judgments")
    assert {(row.model, row.judge) for row in judgments} == {("ck", "rm")}
    assert [row.games for row in judgments] == [row.games for row in VERDICTS]


@pytest.mark.parametrize("how", ["refuse", "cut", "lost"])
def test_a_data_set_cut_off_at_each_request_is_completed_by_the_next_run(
    chain: Chain, server: Hub, tmp_path: Path, how: str
) -> None:
    folder = (
        publish(chain.stages["pairs-1"] / "pairs.jsonl", tmp_path / "run", repo_id=None).path / "published"
    )
    api = HfApi(endpoint=server.url, token=TOKEN)
    once = Retries(attempts=1, wait=0.0)
    upload(api, folder, "someone/other", True, TAG, once, "dataset")
    count = len(server.requests)
    assert count >= 8
    for request in range(count):
        repo_id = f"someone/rows-{request}"
        server.break_at(request, how, times=1000)
        with pytest.raises(ConnectionError, match="nothing is lost or doubled"):
            upload(api, folder, repo_id, True, TAG, once, "dataset")
        server.heal()
        upload(api, folder, repo_id, True, TAG, once, "dataset")
        repository = server.repositories[f"datasets/{repo_id}"]
        assert repository.history() == [f"Publish {TAG}", "initial commit"]
        assert repository.tags == {TAG: repository.branches["main"]}


def test_no_file_line_or_blob_holds_the_token(
    chain: Chain,
    server: Hub,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    server.break_at(4, "refuse", times=2)
    run = publish(chain.report, tmp_path / "run")
    repository = server.repositories[f"datasets/{REPO}"]
    assert repository.tags, "it was published"
    sent = "".join(
        blob.content.decode("latin-1")
        for commit in repository.commits.values()
        for blob in commit.files.values()
    )
    kept = "".join(file.read_bytes().decode("latin-1") for file in run.path.rglob("*") if file.is_file())
    said = "".join(capfd.readouterr()) + caplog.text
    assert "again in" in said, "a failure was printed"
    for text in (sent, kept, said):
        assert TOKEN not in text and "SignedAddress" not in text


def test_a_report_without_judgments_and_a_publication_of_two_things_are_refused(
    chain: Chain, tmp_path: Path
) -> None:
    (tmp_path / "report").mkdir()
    with pytest.raises(
        ValueError, match=r"has no judgments: name a finished preferences .* or an evaluation"
    ):
        publish(tmp_path / "report", tmp_path / "run")
    for wrong in ({}, {"model": "dpo-1", "dataset": "pairs-1"}):
        with pytest.raises(ValidationError, match="a publication has either a model or a dataset"):
            Publication(**wrong)
    with pytest.raises(ValidationError, match="evaluation and base_repo apply only to models"):
        Publication(dataset="pairs-1", evaluation="evaluation")


def test_a_licence_on_the_hub_that_forbids_it_stops_before_anything_is_sent(
    chain: Chain, server: Hub, tmp_path: Path
) -> None:
    upstream = server.repositories["datasets/stand-in/chats"] = Repository(private=True)
    upstream.commit("main", "card", {"README.md": Blob(b"---\nlicense: cc-by-nc-4.0\n---\n", False)})
    server.break_at(0, "refuse", times=2)  # the Hub is busy at first
    with pytest.raises(ValueError, match=r"license is mit, and stand-in/chats is under cc-by-nc-4\.0"):
        publish(chain.stages["pairs-1"] / "pairs.jsonl", tmp_path / "run", license="mit")
    assert not [request for request in server.requests if request.startswith("POST")]
    server.break_at(0, "refuse", times=1000)
    with pytest.raises(ConnectionError, match="could not send the card of stand-in/base-1m"):
        publish(chain.stages["pairs-1"] / "pairs.jsonl", tmp_path / "again")


# A dry run


@pytest.mark.parametrize("what", ["model", "dataset"])
def test_a_dry_run_shows_exactly_what_the_run_sends_and_asks_the_hub_nothing(
    chain: Chain,
    server: Hub,
    tmp_path: Path,
    what: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    output = chain.checkpoint if what == "model" else chain.stages["pairs-1"] / "pairs.jsonl"
    config = {"model": "dpo-1"} if what == "model" else {}
    monkeypatch.delenv("HF_TOKEN")
    run = publish(output, tmp_path / "dry", dry_run=True, folder=str(tmp_path / "elsewhere"), **config)
    said = capfd.readouterr().out
    assert not server.requests
    assert not server.repositories
    assert not (tmp_path / "elsewhere").exists()
    assert not (run / "hub.json").exists()
    assert read_marker(run / "published") is not None
    assert f"repository: {REPO} ({what}, private)" in said
    assert f"one commit on the branch main: Publish {TAG}\ntag: {TAG}\n" in said

    monkeypatch.setenv("HF_TOKEN", TOKEN)
    publish(output, tmp_path / "real", **config)
    repository = server.repositories[REPO if what == "model" else f"datasets/{REPO}"]
    sent = {
        path: blob.content
        for path, blob in repository.commits[repository.tags[TAG]].files.items()
        if path != ".gitattributes"
    }
    listed = [
        line.split("  ")[-2:] for line in said.split("bytes:\n")[1].split("\nREADME.md:\n")[0].splitlines()
    ]
    assert {path: int(size.replace(",", "")) for size, path in listed} == {
        path: len(content) for path, content in sent.items()
    }
    assert f"{len(sent)} files, {sum(map(len, sent.values())):,} bytes" in said
    assert sent["README.md"].decode() in said


def test_a_recipe_publishes_the_data_of_its_own_stages_only(tmp_path: Path) -> None:
    def nodes(dataset: str) -> Any:
        prompts = {"sources": "prompts.jsonl"}
        data = {"sources": "pairs.jsonl"}
        stages = {
            "reward_model": {"stage": "reward_model", "model": "base", "data": data},
            "pairs": {"stage": "preferences", "policy": "base", "prompts": prompts},
            "rows": {"stage": "publication", "dataset": dataset, "repo_id": REPO},
        }
        return plan(
            Recipe(name="rows", base_model="stand-in/base-1m", artifacts=str(tmp_path), stages=stages)
        )

    planned = nodes("pairs")
    assert planned["rows"].parents == ("pairs",)
    assert planned.inputs(planned["rows"])["pairs"].endswith("/pairs.jsonl")
    assert tokenizer_of(planned, planned["rows"]) == "stand-in/base-1m"
    with pytest.raises(
        ValueError,
        match=(
            r"stages\.rows\.dataset: reward_model is of kind reward_model, but a stage of kind preferences or"
        ),
    ):
        nodes("reward_model")
