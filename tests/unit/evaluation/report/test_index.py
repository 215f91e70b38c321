"""The page over all runs, and a lineage as a picture."""

from __future__ import annotations

import base64
import json
import os
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

import flows.cli
from evaluation.report.drawing.dag import family_svg
from evaluation.report.index import line_of, write_index
from evaluation.report.run_page import write_report
from rlhf_core.runs.lineage import data_of, lineage
from rlhf_core.runs.run_dir import RunDir
from tasks.stages import curves
from tests.support.chain import Chain, build
from tests.support.finished_run import finished


def recipe_folder(artifacts: Path, name: str, **changes: object) -> Path:
    views = finished(artifacts) if not (artifacts / "stages").exists() else []
    folder = artifacts / name
    folder.mkdir(parents=True, exist_ok=True)
    if views:
        write_report(folder, name, views)
    stages = [{"name": view.name, "status": view.status} for view in views]
    (folder / "run.json").write_text(json.dumps({"recipe": name, "stages": stages, **changes}))
    return folder


def test_every_run_has_a_line_with_its_results(tmp_path: Path) -> None:
    folder = recipe_folder(tmp_path, "one")
    line = line_of(folder)
    assert (line.state, line.stages, line.page) == ("done", "9 of 9", "one/report.html")
    assert line.metrics[0].startswith("iterative_dpo.round2: win rate 71 % (66 % to 76 %)")
    page = write_index(tmp_path).read_text()
    assert '<a href="one/report.html">one</a>' in page and "sft: eval/loss" in page

    summary = json.loads((folder / "summary.json").read_text())
    gate = dict(metric="eval/loss", min=None, max=0.1, on_fail="stop", value=0.9, passed=False, meaning="")
    summary["stages"][0]["gates"] = [gate]
    (folder / "summary.json").write_text(json.dumps(summary))
    stages = [{"name": "sft", "status": "done"}, {"name": "ppo", "status": "not run"}]
    (folder / "run.json").write_text(json.dumps({"recipe": "one", "stages": stages}))
    line = line_of(folder)
    assert line.state == "stopped at a gate"
    assert line.stages == "1 of 2"
    assert line.gates == ("sft: eval/loss 0.9 (stop)",)


def test_all_runs_are_listed_with_their_own_pages(tmp_path: Path) -> None:
    recipe_folder(tmp_path, "one")
    runs = tmp_path / "one" / "runs"
    runs.mkdir()
    for identity, name in (("20260101-000000-aaaaaa", "first"), ("20260102-000000-bbbbbb", "second")):
        (runs / f"{identity}.json").write_text(json.dumps({"recipe": "one", "name": name, "state": "done"}))
    (runs / "20260101-000000-aaaaaa.html").write_text("page")
    page = write_index(tmp_path).read_text()
    assert '<a href="one/runs/20260101-000000-aaaaaa.html">first (20260101-000000-aaaaaa)</a>' in page
    assert "second (20260102-000000-bbbbbb)" in page and "bbbbbb.html" not in page


@pytest.mark.parametrize("damage", ["", "{", "[]", "null", '{"stages": 3}', '{"stages": [{}]}'])
def test_a_damaged_run_leaves_the_others_shown(tmp_path: Path, damage: str) -> None:
    recipe_folder(tmp_path, "sound")
    bad = tmp_path / "<b>bad"
    bad.mkdir()
    (bad / "run.json").write_text(damage)
    os.utime(bad / "run.json", (0, 0))
    page = write_index(tmp_path).read_text()
    assert "its records cannot be read" in page and "sound/report.html" in page and "<b>bad" not in page
    (bad / "run.json").write_text(json.dumps({"stages": []}))
    for summary in ("{", "[]", '{"stages": [{"gates": null}]}'):
        (bad / "summary.json").write_text(summary)
        assert line_of(bad).state == "damaged"


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe_folder(tmp_path, "one")
    assert flows.cli.main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip().endswith("index.html") and (tmp_path / "index.html").exists()
    assert flows.cli.main(["report", str(tmp_path / "stages")]) == 2
    assert "it has no run.json" in capsys.readouterr().err


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    return build(tmp_path / "artifacts")


def test_a_lineage_is_drawn_with_data_and_digests(chain: Chain, capsys: pytest.CaptureFixture[str]) -> None:
    (chain.root / "data" / "pairs.jsonl").write_text("{}\n")
    out = chain.root / "lineage.svg"
    assert flows.cli.main(["lineage", str(chain.checkpoint), "--out", str(out)]) == 0
    assert f"drawn in {out}" in capsys.readouterr().out.replace("\n", " ").replace("  ", " ")
    texts = [element.text for element in ElementTree.parse(out).iter("{http://www.w3.org/2000/svg}text")]
    titles = [
        element.text or "" for element in ElementTree.parse(out).iter("{http://www.w3.org/2000/svg}title")
    ]
    ancestor = lineage(chain.checkpoint)
    for name in ("sft", "ppo", "dpo-1", "reward_model"):
        assert any(title.startswith(f"{name} (") for title in titles), name
    assert f"{4:016x}"[:10] in texts, "the digest of dpo-1"
    (pairs,) = {item for item in data_of(ancestor) if item.name == "pairs.jsonl"}
    assert pairs.digest[:10] in texts and "not here" in texts
    assert family_svg(ancestor, []).count("<g ") < family_svg(ancestor, data_of(ancestor)).count("<g ")
    assert (
        flows.cli.main(["lineage", str(chain.checkpoint), "--out", str(chain.root / "none" / "x.svg")]) == 2
    )
    assert "does not exist: create it" in capsys.readouterr().err


def test_curves_are_an_image_that_needs_nothing_else(tmp_path: Path) -> None:
    views = {view.name: view for view in finished(tmp_path)}
    for name, has in {"sft": True, "ppo": True, "evaluation": False, "publication": False}.items():
        result = RunDir(views[name].run_dir).result()
        assert result
        url = curves(result, views[name].run_dir)
        assert (url is not None) == has, name
        if url:
            kind, _, content = url.partition(";base64,")
            assert kind == "data:image/svg+xml"
            assert ElementTree.fromstring(base64.b64decode(content)).tag == "{http://www.w3.org/2000/svg}svg"
