"""Checks pages of runs: what they say of the run, and that a run stands when its page cannot be written."""

from __future__ import annotations

import errno
import json
import logging
import re
from pathlib import Path

import pytest

import evaluation.report.run_page
from rlhf_core.config import Recipe
from rlhf_core.recipe.plan import Plan, plan
from rlhf_core.runs.run_records import RunRequest, asked
from tasks import run_report as report
from tasks.run_report import reported

RECIPE = dict(name="full", base_model="org/model", stages={"sft": {"data": {"sources": "/nowhere.jsonl"}}})


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """A plan whose page finds the disk full."""

    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(evaluation.report.run_page, "write_text", full)
    monkeypatch.setattr(
        report, "create_link_artifact", lambda *_, **__: pytest.fail("there is no page to link to")
    )
    return plan(Recipe.model_validate(RECIPE | {"artifacts": str(tmp_path / "made")}))


def told(planned: Plan, caplog: pytest.LogCaptureFixture) -> str:
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert record.exc_info is None
    return record.getMessage()


def test_a_full_disk_under_the_page_is_a_sentence_and_the_run_stands(
    planned: Plan, caplog: pytest.LogCaptureFixture
) -> None:
    with reported(planned) as statuses:
        statuses["sft"] = "done"
    assert (
        told(planned, caplog)
        == f"the page was not written because {planned.folder}/summary.json cannot be written to: its disk is"
        f" full; free some space, then write the page with `alignflow report {planned.folder}`; the stages' results"
        " are kept"
    )
    run = json.loads((planned.folder / "run.json").read_text())
    assert (run["state"], run["stages"][0]["status"]) == ("done", "done") and run["ended"]


def test_a_full_disk_under_the_page_of_a_failed_run_is_a_sentence_too(
    planned: Plan, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(KeyError, match="the stage's"), reported(planned):
        raise KeyError("the stage's")
    assert "its disk is full; free some space" in told(planned, caplog)
    assert json.loads((planned.folder / "run.json").read_text())["state"] == "failed"


def test_pages_say_which_run_they_are_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(report, "create_link_artifact", lambda *_, **__: None)
    made = plan(Recipe.model_validate(RECIPE | {"artifacts": str(tmp_path / "made")}))
    for name, overrides in (("first", ()), ("second", ("sft.max_epochs=2", "note=<b>"))):
        given = asked.set(RunRequest("recipe.yaml", overrides, name))
        try:
            with reported(made) as statuses:
                statuses["sft"] = "done"
        finally:
            asked.reset(given)
    newest = (made.folder / "report.html").read_text()
    assert re.search(r"Run second \([\w-]+\), with sft.max_epochs=2 note=&lt;b&gt;<", newest)
    assert report.rewrite(made.folder).read_text() == newest
    first = next(file for file in (made.folder / "runs").glob("*.html") if "Run first (" in file.read_text())
    assert ", with" not in re.search(r"Run first [^<]*", first.read_text())[0]  # type: ignore[index]
    written = first.read_bytes()
    assert report.rewrite_run(first.with_suffix(".json")).read_bytes() == written
