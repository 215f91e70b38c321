"""One person's rows are deleted everywhere, also after a kill, and the models that were trained on them are
named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config import Recipe
from rlhf_core.feedback import forget as module
from rlhf_core.feedback.forget import Forgotten, forget
from rlhf_core.feedback.inbox import Inbox
from rlhf_core.feedback.parse import feedback_of
from rlhf_core.recipe.plan import plan
from rlhf_core.runs.remote.remote_files import StoreFault
from rlhf_core.runs.remote.store import Store
from rlhf_core.runs.run_dir import Outcome, RunDir
from rlhf_core.system.files import locked

SECRET = "the secret of ann"


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    box = Inbox(tmp_path / "all.inbox")
    for person, prompt in (("ann", SECRET), ("bob", "a question of bob"), ("ann", f"more {SECRET}")):
        box.add([feedback_of({"prompt": prompt, "chosen": "good", "rejected": "bad", "annotator": person})])
    reward = {"reward": "org/reward", "prompts": {"sources": str(box.folder)}}
    stages: dict[str, Any] = {
        "dpo": {"policy": "base", "data": {"sources": str(box.folder)}},
        "answers": {"stage": "preferences", "policy": "base", **reward},
        "second": {"stage": "dpo", "policy": "base", "pairs": "answers"},
        "other": {"stage": "sft", "data": {"sources": "train.jsonl"}},
    }
    return Recipe(name="r", base_model="org/base", artifacts=str(tmp_path / "artifacts"), stages=stages)


def do(recipe: Recipe, store: Store | None = None, unfinished: str = "") -> None:
    planned = plan(recipe)
    for node in planned.nodes:
        run = RunDir(node.run_dir)
        run.prepare(planned.request(node))
        if node.name == unfinished:
            (run / "state").mkdir()
            (run / "state" / "tokens.i32").write_text(SECRET)
            continue
        (run / "pairs.jsonl").write_text("")
        if node.name == "answers":
            lines = [
                json.dumps({"prompt": [{"role": "user", "content": text}], "chosen": "x"})
                for text in (SECRET, "a question of bob")
            ]
            (run / "pairs.jsonl").write_text("\n".join(lines) + "\n")
        (run / "checkpoint").write_text(node.digest)
        run.finish(
            planned.request(node), Outcome({}, {"checkpoint": "checkpoint", "pairs": "pairs.jsonl"}), 1.0
        )
        if store:
            store.put(run)


def holding(folder: Path) -> list[str]:
    return [
        str(file) for file in folder.rglob("*") if file.is_file() and SECRET.encode() in file.read_bytes()
    ]


def forgotten(recipe: Recipe, tmp_path: Path, *stores: Store) -> Forgotten:
    return forget(Inbox(tmp_path / "all.inbox"), "ann", [tmp_path / "artifacts"], stores)


def test_every_copy_is_deleted_and_models_are_named(recipe: Recipe, tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    do(recipe, store)
    assert len(holding(tmp_path)) == 5  # the inbox, two files of stages, the answers, and their copy
    found = forgotten(recipe, tmp_path, store)
    assert found.rows == 2 and holding(tmp_path) == []
    assert sorted(name.rpartition("-")[0] for name in found.trained) == ["answers", "dpo", "second"]
    planned = plan(recipe)
    answers = next(path for path in (tmp_path / "artifacts" / "stages").glob("answers-*"))
    assert RunDir(answers).result() is not None
    assert "a question of bob" in (answers / "pairs.jsonl").read_text()
    (answers / "pairs.jsonl").unlink()
    assert store.fetch(RunDir(answers), RunDir(answers).request())
    assert "a question of bob" in (answers / "pairs.jsonl").read_text()
    # the first reads other rows than it was trained on
    assert not planned["dpo"].done and planned["other"].done


def test_an_unfinished_stage_begins_anew_and_a_running_one_is_waited_for(
    recipe: Recipe, tmp_path: Path
) -> None:
    do(recipe, unfinished="dpo")
    (folder,) = (tmp_path / "artifacts" / "stages").glob("dpo-*")
    with (
        locked(folder / ".lock"),
        pytest.raises(ValueError, match="is running on these rows: cancel its run"),
    ):
        forgotten(recipe, tmp_path)
    assert len(list(Inbox(tmp_path / "all.inbox").rows(("ranking",)))) == 3
    forgotten(recipe, tmp_path)
    assert holding(tmp_path) == [] and not (folder / "state").exists()


@pytest.mark.parametrize("killed_at", ["_clean", "_filter"])
def test_a_deletion_cut_off_is_done_again(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_at: str
) -> None:
    do(recipe)

    def killed(*given: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(module, killed_at, killed)
        forgotten(recipe, tmp_path)
    found = forgotten(recipe, tmp_path)
    assert found.rows == 2 and len(found.trained) == 3 and holding(tmp_path) == []


def test_an_unknown_person_has_no_rows(recipe: Recipe, tmp_path: Path) -> None:
    do(recipe)
    assert forget(Inbox(tmp_path / "all.inbox"), "eve", [tmp_path / "artifacts"]) == (0, [], [])


def test_a_deletion_that_the_store_cut_off_is_done_again_there(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(str(tmp_path / "store"))
    do(recipe, store)

    def unreachable(*given: Any) -> None:
        raise StoreFault("the store is away")

    with monkeypatch.context() as patched, pytest.raises(StoreFault):
        patched.setattr(Store, "replace", unreachable)
        forgotten(recipe, tmp_path, store)
    assert forgotten(recipe, tmp_path, store).rows == 2 and holding(tmp_path) == []
    (answers,) = (tmp_path / "artifacts" / "stages").glob("answers-*")
    assert RunDir(answers).result() is not None and store.has(answers.name)


def test_a_path_of_the_inbox_with_dots_and_what_a_killed_stage_left(recipe: Recipe, tmp_path: Path) -> None:
    do(recipe)
    (tmp_path / "below").mkdir()
    (tmp_path / "all.inbox" / "taken" / ".preference-0-3.jsonl.1").write_text(SECRET)
    found = forget(Inbox(tmp_path / "below" / ".." / "all.inbox"), "ann", [tmp_path / "artifacts"])
    assert found.rows == 2 and len(found.trained) == 3 and holding(tmp_path) == []


def test_nobody_else_reads_an_inbox(recipe: Recipe, tmp_path: Path) -> None:
    assert (tmp_path / "all.inbox").stat().st_mode & 0o077 == 0
