"""A recipe that goes on every night from what it published last: real stages, tiny, through the stand-in of
the Hub, cut off on the way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi, constants

import flows.alignment
import rlhf_core.stages.sft
from evaluation.report.summary import Status
from rlhf_core.config import Recipe
from rlhf_core.recipe.gate_checks import GateFailed, gates_of
from rlhf_core.recipe.plan import Plan, plan
from rlhf_core.runs.lineage import lineage, tree
from rlhf_core.runs.run_dir import RunDir, StageRequest, run_in_directory
from rlhf_core.stages.publication import publication_stage as hub
from rlhf_core.stages.publication.publication_folder import assemble
from rlhf_core.stages.publication.upload import upload
from tasks.run_report import found, record, this_run, views_of
from tests.support.hub_server import TOKEN, Hub, Repository
from tests.support.publishing import ONCE, THREE, serving_hub

REPO = "me/model"
WORK = {"sft": rlhf_core.stages.sft.run, "publication": hub.run}


@pytest.fixture(autouse=True)
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, material: Path) -> Iterator[Hub]:
    """A Hub whose repository holds the model of the first night's beginning; the flow without Prefect's logs,
    artifacts and page."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    monkeypatch.setattr(hub, "RETRIES", ONCE)

    def work(request: StageRequest, run_dir: Path, store: object) -> str:
        run = RunDir(run_dir)
        if run.result() is not None:
            return "skipped"
        run.prepare(request)
        run_in_directory(run_dir, WORK[request.config.stage])
        return "done"

    @contextmanager
    def recorded(planned: Plan) -> Iterator[dict[str, Status]]:
        statuses: dict[str, Status] = {node.name: found(node.run_dir) for node in planned.nodes}
        try:
            yield statuses
        finally:
            record(planned, views_of(planned, statuses), this_run("mine"))

    monkeypatch.setattr(flows.alignment, "run_stage", work)
    monkeypatch.setattr(flows.alignment, "check_gates", gates_of)
    monkeypatch.setattr(flows.alignment, "reported", recorded)
    with serving_hub(monkeypatch) as running:
        assemble(
            material / "base",
            tmp_path / "start",
            {"README.md": "---\nlicense: mit\n---\n"},
            "publication",
            "0",
        )
        upload(HfApi(endpoint=running.url, token=TOKEN), tmp_path / "start", REPO, True, "start", THREE)
        yield running


def night(material: Path, place: Path, max_loss: float = 99.0) -> Plan:
    """What `alignflow run recipe.yaml --latest` does."""
    data = {"sources": str(material / "sft.jsonl"), "max_samples": 8}
    sft: dict[str, Any] = dict(
        model="base", data=data, train_batch_size=4, micro_train_batch_size=4, max_len=96
    )
    sft |= {"gates": [{"metric": "loss", "max": max_loss}]}
    stages = {"sft": sft, "publication": {"model": "sft", "repo_id": REPO}}
    recipe = Recipe(name="nightly", base_model=f"{REPO}@main", artifacts=str(place), stages=stages)
    flows.alignment.refresh_hub_revisions(recipe)
    planned = plan(recipe)
    flows.alignment.run_all(planned, planned.nodes)
    return planned


def repository(server: Hub) -> Repository:
    return server.repositories[REPO]


def test_each_night_begins_at_the_last_nights_commit(material: Path, tmp_path: Path, server: Hub) -> None:
    heads = [repository(server).branches["main"]]
    digests = []
    for _ in range(2):
        planned = night(material, tmp_path / "artifacts")
        assert planned["sft"].models == {"base": f"{REPO}@{heads[-1]}"}
        assert f"{REPO} (hub) {heads[-1]}" in tree(lineage(planned["sft"].run_dir / "checkpoint"))
        heads.append(repository(server).branches["main"])
        digests.append(planned["publication"].digest)
    assert len(set(heads)) == 3 and len(set(digests)) == 2
    assert repository(server).history() == [f"Publish publication-{digest}" for digest in digests[::-1]] + [
        "Publish start",
        "initial commit",
    ]
    assert repository(server).tags == {"start": heads[0]} | {
        f"publication-{d}": h for d, h in zip(digests, heads[1:], strict=True)
    }


@pytest.mark.parametrize("lost", ["create_commit", "create_tag", "the answer"])
def test_a_night_that_was_cut_off_ends_in_one_commit_and_one_tag(
    material: Path, tmp_path: Path, server: Hub, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """Above all after the commit: main is another one then, and the night must not begin again from its own
    result."""
    begin = repository(server).branches["main"]
    with monkeypatch.context() as broken:

        def fail(self: HfApi, *given: Any, **named: Any) -> Any:
            if lost == "the answer":
                tag(self, *given, **named)
            raise ConnectionError("cut off")

        tag = HfApi.create_tag
        broken.setattr(HfApi, "create_commit" if lost == "create_commit" else "create_tag", fail)
        # the tag that stands is found by the second attempt
        for _ in range(1 if lost == "the answer" else 2):
            with pytest.raises(ConnectionError, match="nothing is lost or doubled"):
                night(material, tmp_path / "artifacts")
    assert (repository(server).branches["main"] == begin) == (lost == "create_commit")
    planned = night(material, tmp_path / "artifacts")
    name = f"publication-{planned['publication'].digest}"
    assert planned["sft"].models == {"base": f"{REPO}@{begin}"}
    assert repository(server).history() == [f"Publish {name}", "Publish start", "initial commit"]
    assert repository(server).tags == {"start": begin, name: repository(server).branches["main"]}
    assert len(list((tmp_path / "artifacts" / "stages").iterdir())) == 2, "nothing was trained twice"


def test_a_night_whose_gate_fails_leaves_main_alone_and_the_next_does_not_move_on(
    material: Path, tmp_path: Path, server: Hub
) -> None:
    begin = repository(server).branches["main"]
    for _ in range(2):
        with pytest.raises(
            GateFailed,
            match=r"^stage sft: loss is [\d.]+, and the gate requires at most 0\.01: what depends on it",
        ):
            night(material, tmp_path / "artifacts", max_loss=0.01)
    assert repository(server).branches["main"] == begin
    later = repository(server).commit("main", "somebody's", dict(repository(server).commits[begin].files))
    with pytest.raises(GateFailed):
        night(material, tmp_path / "artifacts", max_loss=0.01)
    planned = night(material, tmp_path / "artifacts")
    assert planned["sft"].models == {"base": f"{REPO}@{begin}"}, "the night that was begun is ended"
    assert night(material, tmp_path / "artifacts")["sft"].models["base"] not in (
        f"{REPO}@{begin}",
        f"{REPO}@{later}",
    )
