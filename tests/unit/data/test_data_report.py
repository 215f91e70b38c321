"""The data report: each planted fault is named with a row to look at, clean data is left in peace, and it is
there before training."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import flows.cli
import rlhf_core.stages.dpo
import rlhf_core.stages.sft
import tasks.stages
from evaluation.report.run_page import write_report
from evaluation.report.summary import StageView
from rlhf_core.config import DPO, SFT, Data
from rlhf_core.data.chat import Renderer
from rlhf_core.data.data_report import CHART, JSON, MARKDOWN, markdown, surveys_of, warnings
from rlhf_core.data.pictures.picture_source import PICTURE_FACTS
from rlhf_core.data.sources import (
    answer_documents,
    labelled_answers,
    preference_pairs,
    prompts,
    sft_documents,
)
from rlhf_core.data.survey import LIMITS, Survey
from rlhf_core.runs.run_dir import RunDir
from rlhf_core.training.engine import TorchEngine
from tests.support.data_rows import write
from tests.support.stage_request import stage_request

Rows = list[dict[str, Any]]
MAX_LEN = 64


def words(index: int, salt: str = "") -> str:
    return str(random.Random(f"{index}{salt}").randrange(10**6, 10**7))


def clean(kind: str, count: int = 60, salt: str = "") -> Rows:
    rows: Rows = []
    for i in range(count):
        row: dict[str, Any] = {"prompt": f"Sort these digits: {words(i, salt)}"}
        if kind == "preference":
            first = words(i, "first")
            second = words(i, "second") + "1"
            row |= dict(
                chosen=first if i % 2 else second, rejected=second if i % 2 else first, margin=1.0 + i % 3
            )
        elif kind != "prompt":
            row |= {"response": words(i, "answer"), "label": bool(i % 2), "reward": float(i % 7)}
        rows.append(row)
    return rows


def survey(kind: str, data: Data, renderer: Renderer) -> Survey:
    """Of the data set read as a stage of this kind reads it."""
    if kind == "prompt":
        report = prompts(data, renderer, MAX_LEN, 0).report
    elif kind == "scored":
        report = answer_documents(data, renderer, MAX_LEN, 0, "reward").documents.report
    else:
        load: Callable[..., Any] = dict(
            sft=sft_documents, preference=preference_pairs, labelled=labelled_answers
        )[kind]
        report = load(data, renderer, MAX_LEN, 0).report
    return surveys_of({"data": report})["data"]


def source(path: Path, rows: Rows) -> Data:
    return Data.model_validate(
        {"sources": [{"path": write(path, rows), "margin_key": "margin" if "margin" in rows[0] else None}]}
    )


@pytest.mark.parametrize("kind", ["sft", "preference", "prompt", "labelled", "scored"])
def test_clean_data_gets_no_warning_and_its_facts(kind: str, renderer: Renderer, tmp_path: Path) -> None:
    found = survey(kind, source(tmp_path / "a.jsonl", clean(kind)), renderer)
    assert found.findings == () and (found.rows, found.kept, found.dropped) == (60, 60, {})
    assert found.sources[0].rows == 60
    assert 0 < found.lengths["prompt"]["p5"] <= found.lengths["prompt"]["max"] <= MAX_LEN
    assert sum(found.histogram["prompt"][:-1]) == 60, "the last number is the upper edge"
    assert found.facts["truncated"] == 0
    if kind == "preference":
        assert found.facts["chosen longer"] == 0.5 and (
            found.facts["margin min"],
            found.facts["margin max"],
        ) == (1.0, 3.0)
    if kind == "labelled":
        assert found.facts["desirable"] == 0.5
    if kind == "scored":
        assert found.facts["reward max"] == 6
        assert found.facts["reward mean"] == pytest.approx(sum(i % 7 for i in range(60)) / 60)


def changed(rows: Rows, every: int, **columns: Any) -> Rows:
    return [{**row, **columns} if i % every == every - 1 else row for i, row in enumerate(rows)]


FAULTS: dict[str, tuple[str, Callable[[Rows], Rows], int, str]] = {
    # finding: kind of data, how it is planted, rows that show it, row of the example
    "duplicate rows": ("sft", lambda rows: [*rows[:55], *rows[10:15]], 5, "row 56, which repeats "),
    "duplicate prompts": ("prompt", lambda rows: rows[:30] * 2, 30, "row 31, which repeats "),
    "empty answers": ("sft", lambda rows: changed(rows, 12, response=" \n"), 5, "row 12"),
    "empty prompts": ("prompt", lambda rows: changed(rows, 12, prompt=" "), 5, "row 12"),
    "equal answers": ("preference", lambda rows: changed(rows, 20, chosen="7", rejected="7"), 3, "row 20"),
    "control tokens": (
        "sft",
        lambda rows: [rows[0], {**rows[1], "prompt": rows[1]["prompt"] + "<|end|>"}, *rows[2:]],
        1,
        "row 2",
    ),
    "damaged text": (
        "sft",
        lambda rows: [rows[0], {**rows[1], "response": "cafÃ© \ufffd"}, *rows[2:]],
        1,
        "row 2",
    ),
    "truncated": ("sft", lambda rows: changed(rows, 5, response="1" * 200), 12, "row 5"),
    "answers cut away": ("sft", lambda rows: changed(rows, 10, prompt="1" * 200), 6, "row 10"),
    "dropped": ("sft", lambda rows: changed(rows, 10, prompt="1" * 200), 6, "row 10"),
    "desirable": (
        "labelled",
        lambda rows: changed(rows, 2, label=False)[:58] + changed(rows, 1, label=True)[58:],
        2,
        "",
    ),
    "chosen longer": (
        "preference",
        lambda rows: [{**row, "chosen": row["rejected"] + "12"} for row in rows],
        60,
        "",
    ),
    "negative margins": ("preference", lambda rows: changed(rows, 30, margin=-1.0), 2, "row 30"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_planted_fault_is_named(name: str, renderer: Renderer, tmp_path: Path) -> None:
    kind, plant, count, example = FAULTS[name]
    found = survey(kind, source(tmp_path / "a.jsonl", plant(clean(kind))), renderer)
    finding = {finding.name: finding for finding in found.findings}[name]
    assert f": {count} of 60" in finding.sentence
    assert (
        finding.example.startswith(f"{tmp_path / 'a.jsonl'}, {example}") if example else finding.example == ""
    )
    assert any(finding.sentence in sentence for sentence in warnings({"data": found}))
    assert finding.sentence in markdown({"data": found})
    expected = {
        name,
        *({"dropped"} if name in ("answers cut away",) else ()),
        *({"answers cut away"} if name == "dropped" else ()),
    }
    # nothing else is found
    assert {finding.name for finding in found.findings} - {"dropped"} == expected - {"dropped"}


@pytest.mark.parametrize(
    ("kind", "column"), [("sft", "response"), ("preference", "chosen"), ("prompt", "prompt")]
)
def test_a_single_empty_text_is_named(kind: str, column: str, renderer: Renderer, tmp_path: Path) -> None:
    found = survey(
        kind, source(tmp_path / "a.jsonl", changed(clean(kind, 200), 150, **{column: ""})), renderer
    )
    name = "prompts" if kind == "prompt" else "answers"
    told = f"data: {name} without any text: 1 of 200 rows (for instance {tmp_path / 'a.jsonl'}, row 150)"
    assert warnings({"data": found}) == [told]
    assert re.search(rf"empty {name} +\| 0.50 % +\| any", markdown({"data": found}))


def test_a_source_too_small_for_its_share_is_named(renderer: Renderer, tmp_path: Path) -> None:
    parts = [
        {"path": write(tmp_path / f"{name}.jsonl", clean("sft", count, name)), "probability": 0.5}
        for name, count in (("a", 20), ("b", 200))
    ]
    found = survey("sft", Data.model_validate({"sources": parts}), renderer)
    (finding,) = found.findings
    assert finding.name == "unused rows"
    assert finding.sentence.startswith(f"{tmp_path / 'a.jsonl'} is too small for its share of 0.5")
    assert f"ends after {found.rows} rows and leaves {220 - found.rows} rows" in finding.sentence
    assert found.rows in (40, 41)
    assert [use.rows for use in found.sources] in ([20, 20], [20, 21])
    asked_for_less = Data.model_validate({"sources": parts, "max_samples": 30})
    assert survey("sft", asked_for_less, renderer).findings == ()


def test_held_out_prompts_that_are_trained_on_are_named(renderer: Renderer, tmp_path: Path) -> None:
    train = clean("preference")
    leak = [*clean("preference", 17, "held out"), *train[5:8]]

    def surveys(held_out: Rows) -> dict[str, Survey]:
        parts = {"data": train, "eval_data": held_out}
        return surveys_of(
            {
                name: preference_pairs(source(tmp_path / f"{name}.jsonl", rows), renderer, MAX_LEN, 0).report
                for name, rows in parts.items()
            }
        )

    told = surveys(leak)
    assert told["data"].findings == () and told["eval_data"].facts["shared with data"] == 0.15
    assert warnings(told) == [
        "eval_data: held-out prompts that are also trained on: 3 of 20 rows (for instance"
        f" {tmp_path / 'eval_data.jsonl'}, row 18)"
    ]
    assert warnings(surveys(leak[:17])) == []


def test_prompts_of_a_validation_that_are_trained_on(renderer: Renderer, tmp_path: Path) -> None:
    rows = clean("prompt")
    parts = {"prompts": rows, "eval_prompts": [*clean("prompt", 10, salt="held out"), *rows[:2]]}
    told = surveys_of(
        {
            name: prompts(source(tmp_path / f"{name}.jsonl", part), renderer, MAX_LEN, 0).report
            for name, part in parts.items()
        }
    )
    (sentence,) = warnings(told)
    assert sentence.startswith("eval_prompts: held-out prompts that are also trained on: 2 of 12 rows (for")


def test_all_faults_of_one_data_set_are_named_before_it_is_trained_on(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A stage with every fault that pairs can have: the report is whole and told when the first optimiser
    step comes."""
    rows = [{**row, "chosen": row["rejected"] + "12"} for row in clean("preference")]
    rows = changed(rows, 10, prompt="Sort these digits: cafÃ©", margin=-2.0)
    rows = changed(changed(rows, 6, rejected=""), 12, chosen="7", rejected="7")
    rows = changed(rows, 7, chosen="1" * 90) + rows[:3] * 2
    small = write(tmp_path / "small.jsonl", clean("preference", 6, "small"))
    parts = [
        {"path": write(tmp_path / "a.jsonl", rows), "probability": 0.5, "margin_key": "margin"},
        {"path": small, "probability": 0.5},
    ]
    alone = [{**parts[0], "probability": 1.0}]
    held_out = Data.model_validate({"sources": [{"path": write(tmp_path / "held_out.jsonl", rows[:5])}]})
    common = {"max_len": MAX_LEN, "train_batch_size": 8, "micro_train_batch_size": 4}

    def stop(self: TorchEngine, rate: float) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(TorchEngine, "step", stop)
    named: set[str] = set()
    for name, sources in (("alone", alone), ("mixed", parts)):
        run = RunDir(tmp_path / name)
        config = DPO(
            policy="base", data=Data.model_validate({"sources": sources}), eval_data=held_out, **common
        )
        request = stage_request(config, material / "base", name="faulty", seed=3)
        with pytest.raises(KeyboardInterrupt):
            rlhf_core.stages.dpo.run(request, run)
        printed = capfd.readouterr().out
        content = json.loads((run / JSON).read_text())
        for field, part in content.items():
            for finding in part["findings"]:
                named.add(finding["name"])
                assert f"warning: {field}: {finding['sentence']}" in printed
                assert finding["sentence"] in (run / MARKDOWN).read_text()
        assert (run / CHART).read_text().rstrip().endswith("</svg>")
    assert named == set(LIMITS) - set(PICTURE_FACTS) - {
        "empty prompts",
        "answers cut away",
        "duplicate prompts",
        "control tokens",
    } | {"chosen longer"}, "those have tests above"


def test_the_report_is_an_output_an_artifact_and_on_the_page(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = clean("sft", 16)
    rows[3] = {**rows[3], "response": "cafÃ©"}
    config = SFT(
        model="base",
        data=source(tmp_path / "a.jsonl", rows),
        max_len=MAX_LEN,
        train_batch_size=8,
        micro_train_batch_size=8,
    )
    request = stage_request(config, material / "base", seed=3)
    run = RunDir(tmp_path / "stages" / "sft-0")
    run.prepare(request)
    outcome = rlhf_core.stages.sft.run(request, run)
    result = run.finish(request, outcome, 1.0)
    assert result.outputs["data_report"] == JSON and JSON in result.files
    assert {name for name in result.metrics if name.startswith("data/")} == {
        f"data/{name}" for name in ("rows", "kept", "truncated", "dropped", "tokens")
    }
    shown: dict[str, str] = {}
    for name in ("create_markdown_artifact", "create_link_artifact"):
        monkeypatch.setattr(tasks.stages, name, lambda content, key, **_: shown.update({key: content}))
    tasks.stages.show(result, run.path)
    assert "broken characters" in shown["sft-data"] and shown["sft-data-report"] == (run / JSON).as_uri()
    assert all(re.fullmatch("[a-z0-9-]+", key) for key in shown), "Prefect takes no other keys"
    page = write_report(
        tmp_path / "recipe", "recipe", [StageView("sft", "sft", (), run.path, "done")]
    ).read_text()
    assert "broken characters" in page and f"{tmp_path / 'a.jsonl'}, row 4" in page


def test_the_command_reports_without_training(
    material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = write(tmp_path / "pairs.jsonl", changed(clean("preference"), 20, chosen="7", rejected="7"))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"name: look\nbase_model: {material / 'base'}\nartifacts: {tmp_path / 'artifacts'}\nstages:\n  sft:"
        f" {{stage: sft, data: {{sources: {write(tmp_path / 'sft.jsonl', clean('sft'))}}}, max_len: 64}}\n "
        f" dpo: {{stage: dpo, policy: sft, data: {{sources: {pairs}}}, max_len: 64}}\n"
    )
    assert flows.cli.main(["data", str(recipe)]) == 0
    told = capsys.readouterr().out
    assert "# Data of sft" in told and "- no warnings" in told.split("# Data of dpo")[0]
    assert "chosen and rejected are the same: 3 of 60 rows" in told.split("# Data of dpo")[1]
    assert f"{pairs}, row 20" in told
    assert not (tmp_path / "artifacts").exists()
    assert flows.cli.main(["data", str(recipe), "sft.max_len=2"]) == 2
