"""Records of benchmarks: each is complete, the table is made from them, and a slower run is found."""

from __future__ import annotations

import copy
import importlib
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import compare, record, table

FILES = sorted(record.RESULTS.glob("*.json"))
STORED = {
    "name": "step",
    "title": "a step",
    "date": None,
    "commit": None,
    "hardware": "a GPU",
    "versions": None,
    "settings": {},
    "command": "python step.py",
    "figures": {
        "step": record.figure(10.0, "s"),
        "rate": record.figure(100.0, "tokens/s", "higher"),
        "size": record.figure(3, "MiB", None),
    },
}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_record_has_the_required_keys(file: Path) -> None:
    found = record.load(file)
    assert found["name"] == file.stem and found["command"] and found["hardware"] and found["figures"]
    assert set(found.get("peer", {"figures": {}})["figures"]) <= set(found["figures"])
    assert not [word for word in shlex.split(found["command"]) if Path(word).is_absolute()], (
        "a place of one machine"
    )


def test_a_record_names_no_place_of_its_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys,
        "argv",
        ["tests/benchmarks/step.py", "--model", "/data/model", "--json", "/data/new.json", "--rounds", "5"],
    )
    record.write(tmp_path / "new.json", "step", "a step", {}, {})
    assert (
        record.load(tmp_path / "new.json")["command"]
        == "python tests/benchmarks/step.py --model FOLDER --json new.json --rounds 5"
    )


def test_a_record_without_a_key_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    file.write_text(json.dumps({key: value for key, value in STORED.items() if key != "commit"}))
    with pytest.raises(ValueError, match=r"missing keys \['commit'\]"):
        record.load(file)


def test_the_readme_has_the_table_of_the_records() -> None:
    page = table.README.read_text()
    assert len(FILES) > 20
    assert page == table.with_table(page, table.records()), "run: python -m tests.benchmarks.table"
    assert len(page.partition(table.BEGIN)[0].split()) < 600


def compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, figures: dict[str, Any], *options: str) -> int:
    """The exit code of the command for a new run that differs from the stored one in `figures`."""
    new = copy.deepcopy(STORED) | {"figures": {**STORED["figures"], **figures}}
    new["figures"] = {name: figure for name, figure in new["figures"].items() if figure}
    (tmp_path / "step.json").write_text(json.dumps(STORED))
    (tmp_path / "new.json").write_text(json.dumps(new))
    monkeypatch.setattr(
        sys, "argv", ["compare", str(tmp_path / "new.json"), "--results", str(tmp_path), *options]
    )
    return compare.main()


@pytest.mark.parametrize(
    ("figures", "options", "code"),
    [
        ({}, (), 0),
        ({"step": record.figure(10.9, "s")}, (), 0),
        ({"step": record.figure(11.2, "s")}, (), 1),  # a planted slowdown
        ({"step": record.figure(11.2, "s")}, ("--share", "0.2"), 0),
        ({"rate": record.figure(80.0, "tokens/s", "higher")}, (), 1),
        ({"rate": record.figure(150.0, "tokens/s", "higher"), "step": record.figure(5.0, "s")}, (), 0),
        ({"step": None}, (), 1),
        ({"step": record.figure(float("nan"), "s")}, (), 1),
        ({"size": record.figure(9, "MiB", None)}, (), 0),
    ],
)
def test_a_run_that_is_worse_is_found(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    figures: dict[str, Any],
    options: tuple[str, ...],
    code: int,
) -> None:
    assert compared(tmp_path, monkeypatch, figures, *options) == code


def test_a_run_that_nothing_is_stored_of_is_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "new.json").write_text(json.dumps(STORED | {"name": "other"}))
    monkeypatch.setattr(sys, "argv", ["compare", str(tmp_path / "new.json"), "--results", str(tmp_path)])
    assert compare.main() == 2


def test_a_benchmark_writes_a_record_that_can_be_compared(tmp_path: Path) -> None:
    record.write(
        tmp_path / "new.json", "step", "a step", {"model": tmp_path}, {"step": record.figure(10.0, "s")}
    )
    found = record.load(tmp_path / "new.json")
    assert found["versions"]["python"] and found["date"] and found["settings"] == {"model": str(tmp_path)}
    assert list(compare.compare(found, found, 0.0)) == [("step", 10.0, 10.0, 1.0, False)]


def test_scripts_write_records_with_the_figures_of_stored_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(record.RESULTS.parent))
    training = importlib.import_module("training")
    ppo_step = importlib.import_module("ppo_step")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(bytes(2000))
    monkeypatch.setattr(training, "ours", lambda *_: ([9.0, 9.0, 2.0, 2.0, 2.0], 1000.0))
    options = [
        "--model",
        str(tmp_path / "model"),
        "--out",
        str(tmp_path / "out"),
        "--json",
        str(tmp_path / "new.json"),
        "--name",
        "sft-h200",
    ]
    monkeypatch.setattr(sys, "argv", ["training.py", *options])
    training.main()
    new, stored = (record.load(file) for file in (tmp_path / "new.json", record.RESULTS / "sft-h200.json"))
    assert new["name"] == "sft-h200" and new["figures"]["rate"] == record.figure(500, "tokens/s", "higher")
    assert new["figures"].keys() == stored["figures"].keys() | {"host peak"}
    steps = [
        {
            "time": 130.0 + 20 * i,
            "phase/generate": 4.0,
            "phase/score": 3.0,
            "phase/train": 2.5,
            "phase/sync": 0.5,
        }
        for i in (0, 1)
    ]
    steps[-1]["sampler/gap"] = 0.0166
    figures = ppo_step.figures(steps, 100.0, [2**30, 3 * 2**30])
    assert {name: figure["value"] for name, figure in figures.items()} == {
        "step": 10.0,
        "generate": 4.0,
        "score": 3.0,
        "train": 2.5,
        "sync": 0.5,
        "first rollout": 20.0,
        "peak": 3.0,
        "sampler gap": 0.0166,
    }
    for name in (
        "ppo-step-1.5b-h200",
        "ppo-step-1.5b-h100-plan",
        "ppo-step-7.6b-4h200",
        "first-rollout-1.5b-h200",
    ):
        assert record.load(record.RESULTS / f"{name}.json")["figures"].keys() <= figures.keys(), (
            "a new run of it could not be compared"
        )
