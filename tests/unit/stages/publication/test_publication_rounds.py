"""The rounds of a loop, each on its own branch of the Hub: the plan, one commit and one tag for each, and
again after any failure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi
from pydantic import ValidationError

from rlhf_core.config import Publication
from rlhf_core.hub.api import Retries
from rlhf_core.runs.run_dir import RunDir, run_in_directory
from rlhf_core.stages.publication import publication_stage as hub
from rlhf_core.stages.publication.publication_folder import assemble
from rlhf_core.stages.publication.upload import upload
from tests.support.chain import Chain, build, save_model
from tests.support.hub_server import TOKEN, Blob, Hub, Repository, serve
from tests.support.publishing import ONCE, THREE, quiet
from tests.support.stage_request import stage_request
from tests.support.text_rows import rows_of_text
from tests.support.tiny_plan import Planned

REPO = "someone/tiny"
ROUNDS = (
    ("round-1", "publication.round1-aa"),
    ("round-2", "publication.round2-bb"),
    ("main", "publication-cc"),
)
TEXT = """
name: tiny
base_model: base/model
stages:
  sft: {data: {sources: train.jsonl}}
  reward_model: {data: {sources: pairs.jsonl}}
  loop: {stage: iterative_dpo, prompts: {sources: prompts.jsonl}, rounds: 2}
  evaluation: {models: [loop], questions: {path: q.jsonl}}
  publication: {model: loop, repo_id: someone/tiny, round_branch: "round-{}"}
"""


@pytest.fixture(autouse=True)
def client(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet(monkeypatch)


# The plan


def test_every_round_is_published_right_after_it_and_the_last_one_to_main(
    planned: Planned,
) -> None:
    found = planned()
    names = [node.name for node in found.nodes]
    assert names[2:] == [
        "loop.round1.preferences",
        "loop.round1.dpo",
        "publication.round1",
        "loop.round2.preferences",
        "loop.round2.dpo",
        "publication.round2",
        "evaluation",
        "publication",
    ]
    places = {
        node.name: (node.config.branch, node.parents)
        for node in found.nodes
        if isinstance(node.config, Publication)
    }
    assert places == {
        "publication.round1": ("round-1", ("loop.round1.dpo",)),
        "publication.round2": ("round-2", ("loop.round2.dpo",)),
        "publication": ("main", ("loop.round2.dpo",)),
    }
    assert [node.name for node in found.stages_of("publication")] == [
        "publication.round1",
        "publication.round2",
        "publication",
    ]


def test_rounds_whose_cards_show_scores_wait_for_the_evaluation(planned: Planned) -> None:
    names = [node.name for node in planned("publication.evaluation=evaluation").nodes]
    assert names[-4:] == ["evaluation", "publication.round1", "publication.round2", "publication"]


def test_more_rounds_publish_no_round_again(planned: Planned) -> None:
    def digests(*overrides: str) -> dict[str, str]:
        return {node.name: node.digest for node in planned(*overrides).nodes}

    two = digests()
    three = digests("loop.rounds=3")
    assert {name for name in two if two[name] != three[name]} == {"evaluation", "publication"}
    plain = digests("publication.round_branch=null")
    assert plain["publication"] == two["publication"] and "publication.round1" not in plain


@pytest.mark.parametrize(
    ("override", "sentence"),
    rows_of_text(r"""
    publication.model=sft | ^stages\.publication\.round_branch: sft has no rounds: name loop as model$
    publication.round_branch=rounds | stages\.publication: round_branch applies to the model of a loop and must contain \{\} once
    publication.round_branch='{}-{}' | round_branch applies to the model of a loop and must contain \{\} once
    publication.repo_id=null | stages\.publication: round_branch publishes several models to branches: set repo_id, and leave
    publication.folder=out | round_branch publishes several models to branches
    publication.branch=round-7 | stages\.publication: branch round-7 is also the branch of a round: choose another one
    publication.branch=a/b | stages\.publication\.branch: 'a/b' is not a branch name: use letters, digits
    publication.round_branch='../{}' | '\.\./\{\}' is not a branch name:
    """),
)
def test_wrong_branches_are_one_sentence(planned: Planned, override: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as refused:
        planned(override)
    assert "\n" not in str(refused.value)


def test_a_branch_is_never_named_like_a_commit() -> None:
    with pytest.raises(ValidationError, match="is not a branch name:"):
        Publication(model="sft", branch="ab" * 20)


# The Hub


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One published folder for each branch; they differ in weights and card."""
    root = tmp_path_factory.mktemp("rounds")
    found = {}
    for number, (branch, _) in enumerate(ROUNDS):
        save_model(root / branch / "checkpoint")
        (root / branch / "checkpoint" / "generation_config.json").write_text(
            json.dumps({"max_length": 20 + number})
        )
        texts = {"README.md": f"---\nlicense: mit\n---\n# {branch}\n"}
        assemble(
            root / branch / "checkpoint", root / branch / "published", texts, "publication", f"0{number}"
        )
        found[branch] = root / branch / "published"
    return found


def publish(server: Hub, folders: dict[str, Path], retries: Retries) -> None:
    """What a run of the recipe does: every round to its branch, the last model to main."""
    for branch, tag in ROUNDS:
        upload(
            HfApi(endpoint=server.url, token=TOKEN),
            folders[branch],
            REPO,
            True,
            tag,
            retries,
            "model",
            branch,
        )


def refs(server: Hub) -> tuple[dict[str, str], dict[str, str]]:
    return server.repositories[REPO].branches, server.repositories[REPO].tags


def check(server: Hub, folders: dict[str, Path]) -> None:
    repository = server.repositories[REPO]
    assert set(repository.branches) == {"main", "round-1", "round-2"}
    assert repository.tags == {tag: repository.branches[branch] for branch, tag in ROUNDS}
    for branch, tag in ROUNDS:
        assert repository.history(branch) == [f"Publish {tag}", "initial commit"]
        files = {
            path: blob.content for path, blob in repository.commits[repository.branches[branch]].files.items()
        }
        files.pop(".gitattributes")
        assert files == {
            f.relative_to(folders[branch]).as_posix(): f.read_bytes()
            for f in folders[branch].rglob("*")
            if f.is_file()
        }


def test_each_round_has_its_branch_with_one_commit_and_one_tag(folders: dict[str, Path]) -> None:
    with serve() as server:
        publish(server, folders, THREE)
        check(server, folders)
        before = refs(server)
        server.heal()
        publish(server, folders, THREE)
        assert refs(server) == before
        assert {request for request in server.requests if not request.startswith("GET")} == {
            "POST /api/repos/create"
        }


@pytest.mark.parametrize(
    "how",
    ["cut", "lost", *(pytest.param(how, marks=pytest.mark.long) for how in ("refuse", "full", "expired"))],
)
def test_cut_off_at_each_request_the_next_run_ends_in_the_same_commits(
    folders: dict[str, Path], how: str
) -> None:
    with serve() as undisturbed:
        publish(undisturbed, folders, ONCE)
        count = len(undisturbed.requests)
        expected = refs(undisturbed)
    assert count > 30
    for request in range(count):
        with serve() as server:
            server.break_at(request, how, times=1000)
            with pytest.raises((ConnectionError, ValueError), match=r"run this again|HF_TOKEN"):
                publish(server, folders, ONCE)
            server.heal()
            publish(server, folders, ONCE)
            assert refs(server) == expected
            check(server, folders)


def test_one_failure_at_each_request_is_survived(folders: dict[str, Path]) -> None:
    with serve() as undisturbed:
        publish(undisturbed, folders, ONCE)
        count = len(undisturbed.requests)
        expected = refs(undisturbed)
    for request in range(count):
        with serve() as server:
            server.break_at(request, "lost")
            publish(server, folders, THREE)
            assert refs(server) == expected


def test_a_commit_by_someone_else_on_the_branch_is_detected(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve() as server:
        client = HfApi(endpoint=server.url, token=TOKEN)
        send = client.create_commit

        def send_second(*arguments: Any, **named: Any) -> Any:
            server.repositories[REPO].commit("round-1", "theirs", {"README.md": Blob(b"theirs", False)})
            return send(*arguments, **named)

        monkeypatch.setattr(client, "create_commit", send_second)
        with pytest.raises(ValueError, match=f"^someone else changed {REPO} while this was being published"):
            upload(client, folders["round-1"], REPO, True, "tag-1", THREE, "model", "round-1")
        repository = server.repositories[REPO]
        assert repository.history("round-1")[0] == "theirs"
        assert not repository.tags
        assert repository.history() == ["initial commit"]


def test_the_next_night_goes_on_from_what_is_there_and_tags_of_both_stay(folders: dict[str, Path]) -> None:
    with serve() as server:
        publish(server, folders, THREE)
        tonight = {"round-1": folders["round-2"]}
        client = HfApi(endpoint=server.url, token=TOKEN)
        upload(client, tonight["round-1"], REPO, True, "publication.round1-dd", THREE, "model", "round-1")
        repository = server.repositories[REPO]
        assert repository.history("round-1") == [
            "Publish publication.round1-dd",
            "Publish publication.round1-aa",
            "initial commit",
        ]
        assert len(repository.tags) == 4
        assert repository.tags["publication.round1-dd"] == repository.branches["round-1"]


def test_the_stage_publishes_to_its_branch_and_the_card_says_how_to_load_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain: Chain = build(tmp_path / "home")
    save_model(chain.checkpoint)
    monkeypatch.setattr(hub, "RETRIES", THREE)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    config = Publication(model="loop.round1", evaluation="evaluation", repo_id=REPO, branch="round-1")
    inputs = {"loop.round1": str(chain.checkpoint), "evaluation": str(chain.report)}
    with serve() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        server.repositories[REPO] = Repository(private=True)
        run = RunDir(tmp_path / "run")
        run.prepare(stage_request(config, inputs, name="publication.round1", digest="aa"))
        run_in_directory(run.path, hub.run)
        repository = server.repositories[REPO]
        assert repository.history() == ["initial commit"]
        assert list(repository.tags) == ["publication.round1-aa"]
        card = repository.commits[repository.branches["round-1"]].files["README.md"].content.decode()
    assert f'AutoModelForCausalLM.from_pretrained("{REPO}", revision="round-1")' in card
    assert "The published model is **dpo-1**" in card, "named as the evaluation names it"
