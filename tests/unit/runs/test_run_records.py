"""Records of runs: their states, names and pins, which of them keep their stages, and damage."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

import flows.cli
from flows.cli.results.artifacts_history import remove, survey
from rlhf_core.runs.run_dir import RunDir
from rlhf_core.runs.run_records import RUNS, check_name, find_run, kept, pin, records
from tests.support.chain import Chain, build

DAY = 86400.0


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    return build(tmp_path / "artifacts")


def ran(chain: Chain, identity: str, days: float, *names: str, recipe: str = "one", **fields: Any) -> Path:
    """Writes the record of a run that began `days` ago."""
    file = chain.root / recipe / "runs" / f"{identity}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    started = time.time() - days * DAY
    stages = [
        {"name": name, "run_dir": f"stages/{chain.stages[name].name}", "status": "done"} for name in names
    ]
    file.write_text(
        json.dumps({"started": started, "ended": started + 9, "state": "done", "stages": stages} | fields)
    )
    return file


def listed(chain: Chain, *options: str) -> dict[str, str]:
    """Returns what `alignflow gc` says of each stage: `keep`, `remove` or `removed`, and why."""
    command = [sys.executable, "-m", "flows.cli", "gc", str(chain.root), *options]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.findall(r"^(\w+) +[\d.]+ MiB +\S*/(\S+)-[0-9a-f]{16}  \((.*)\)$", out, re.MULTILINE)
    return {name: f"{what} {why}" for what, name, why in found}


def test_the_states_of_runs(chain: Chain) -> None:
    ran(chain, "a", 9, "sft", state="gate failed")
    ran(
        chain,
        "b",
        8,
        "sft",
        state="",
        ended=None,
        stages=[{"name": "sft", "run_dir": "stages/sft-1", "status": "failed"}],
    )
    running = ran(chain, "c", 7, "sft", state="", ended=None)
    for days, (identity, status, ended) in enumerate(
        [("d", "failed", 5.0), ("e", "not run", 5.0), ("f", "skipped", 5.0)]
    ):
        ran(
            chain,
            identity,
            days,
            stages=[{"name": "sft", "run_dir": "stages/sft-1", "status": status}],
            state="",
            ended=ended,
        )
    with FileLock(running.with_suffix(".lock")):
        assert [(run.id, run.state) for run in records(chain.root)] == [
            ("d", "failed"), ("e", "unfinished"), ("f", "done"), ("c", "running"), ("b", "killed"), ("a", "gate failed")
        ]  # fmt: skip


def test_names_are_of_the_newest_run_and_pins_stay(chain: Chain) -> None:
    older = ran(chain, "a", 2, "sft", name="best")
    newer = ran(chain, "b", 1, "sft", name="best")
    assert pin(chain.root, "best", True).id == "b" and newer.with_suffix(".pin").exists()
    assert pin(chain.root, "a", True).label == "best (a)" and older.with_suffix(".pin").exists()
    newer.write_text(newer.read_text())  # a run that ends after it was pinned
    assert [run.pinned for run in records(chain.root)] == [True, True]
    pin(chain.root, "best", False)
    pin(chain.root, "best", False)
    assert [run.pinned for run in records(chain.root)] == [False, True]
    with pytest.raises(ValueError, match="has no run 'worst'"):
        pin(chain.root, "worst", True)
    for name in ("", "-x", ".x", "a/b", "a b", "a\n", "ä", "x" * 65):
        with pytest.raises(ValueError, match="--name"):
            check_name(name)
    for name in ("a", "0.9-best_run", "x" * 64, None):
        check_name(name)


def test_which_runs_keep_their_stages(chain: Chain) -> None:
    for days in range(1, 5):
        ran(chain, f"one-{days}", days, "sft")
    ran(chain, "two-9", 9, "sft", recipe="two")
    locked = ran(chain, "two-99", 99, "sft", recipe="two", ended=None)
    pin(chain.root, "one-4", True)
    ran(chain, "none-0", 0.1, state="failed", why="ValueError: the recipe has no stage", recipe="one")
    with FileLock(locked.with_suffix(".lock")):
        runs = records(chain.root)
        every = {run.id for run in runs}
        always = {"one-4", "two-99"}
        assert kept(runs, None, None) == every and kept(runs, 0, None) == always
        assert kept(runs, 1, None) == always | {"one-1", "two-9"}
        assert kept(runs, 9, None) == every - {"none-0"}
        assert kept(runs, None, time.time() - 2.5 * DAY) == always | {"one-1", "one-2", "none-0"}
        assert kept(runs, 1, time.time() - 2.5 * DAY) == always | {"one-1", "one-2", "two-9", "none-0"}


def test_a_run_that_waits_keeps_its_stages_until_it_goes_on(chain: Chain) -> None:
    ran(chain, "asked", 9, "sft", "reward_model", state="waits")
    ran(chain, "other", 8, "sft")
    assert kept(records(chain.root), None, time.time() - DAY) == {"asked"}
    ran(chain, "resumed", 7, "sft", "reward_model", "evaluation")
    assert kept(records(chain.root), None, time.time() - DAY) == set()


def test_gc_says_which_run_keeps_what(chain: Chain) -> None:
    ran(chain, "a", 60, "evaluation", "dpo-1", name="best")
    ran(chain, "b", 40, "sft", "reward_model", recipe="two")
    ran(chain, "c", 1, "sft")
    assert listed(chain)["evaluation"] == "keep run best (a)"
    assert listed(chain)["sft"] == "keep run c, run b, run best (a)"
    found = listed(chain, "--keep-runs", "1")
    assert found["sft"] == "keep run c, run b" and found["reward_model"] == "keep run b"
    assert found["evaluation"] == "remove of run best (a), which no longer keeps it"
    found = listed(chain, "--older-than", "30d")
    assert found["sft"] == "keep run c"
    assert found["reward_model"] == "remove of run b, run best (a), which no longer keeps it"
    assert flows.cli.main(["runs", "pin", "best", str(chain.root)]) == 0
    assert (
        listed(chain, "--older-than", "4w", "--keep-runs", "0")["evaluation"] == "keep run best (a), pinned"
    )
    assert flows.cli.main(["runs", "unpin", "best", str(chain.root)]) == 0
    assert all(path.exists() for path in chain.stages.values())
    found = listed(chain, "--older-than", "30d", "--delete")
    assert {name for name, what in found.items() if what.startswith("keep ")} == {"sft"}
    assert {name for name, path in chain.stages.items() if path.exists()} == {"sft"}
    assert [(run.id, run.state) for run in records(chain.root)] == [
        ("c", "done"),
        ("b", "done"),
        ("a", "done"),
    ]


def test_a_stage_that_a_run_takes_up_meanwhile_stays(chain: Chain) -> None:
    ran(chain, "a", 60, "sft")
    policy = partial(kept, not_before=time.time() - DAY)
    (item,) = (item for item in survey(chain.root, policy)[1] if item.path == chain.stages["sft"])
    new = ran(chain, "b", 0, "sft", recipe="two")
    assert not remove(item, policy) and RunDir(item.path).result() is not None
    new.unlink()
    assert remove(item, policy) and not item.path.exists()


def test_the_finished_stages_of_a_killed_run_are_kept(chain: Chain) -> None:
    ran(
        chain,
        "a",
        1,
        "sft",
        "ppo",
        ended=None,
        state="",
        stages=[{"name": "sft", "run_dir": f"stages/{chain.stages['sft'].name}"}],
    )
    assert chain.stages["sft"] in {item.path for item in survey(chain.root)[0]}


@pytest.mark.parametrize(
    "damage",
    [
        b"", b"{", b"[]", b"\xff\xfe", b'{"started": NaN}', b'{"started": 1e300}', b'{"started": "x"}', b'{"stages": 3}', b'{"name": []}',
        b'{"stages": [{"name": "sft"}]}', b'{"stages": [{"name": "sft", "run_dir": "/etc"}]}',
        b'{"stages": [{"name": "s", "run_dir": "stages/\\u0000"}]}',
        b"[" * 100000,
    ],
)  # fmt: skip
def test_a_damaged_record_is_a_sentence(
    chain: Chain, damage: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    ran(chain, "a", 1, "sft").write_bytes(damage)
    ran(chain, "b", 1, "sft", name="[red]good", state="[/x]done")
    assert flows.cli.main(["runs", str(chain.root)]) == 0
    out = capsys.readouterr().out
    assert "damaged" in out and "[red]good" in out and "2 runs" in out
    assert flows.cli.main(["gc", str(chain.root), "--delete"]) == 2
    assert "one/runs/a.json cannot be read: restore it, or remove it if nothing" in capsys.readouterr().err
    assert all(path.exists() for path in chain.stages.values())
    assert flows.cli.main(["runs", str(chain.root), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {run["id"]: (run["state"], run["stages_done"]) for run in listed} == {
        "a": ("damaged", 0),
        "b": ("[/x]done", 1),
    }


def test_a_list_while_records_are_written(chain: Chain) -> None:
    """Two processes write records of one recipe; every reader sees whole ones."""
    code = """
import sys
from pathlib import Path
from rlhf_core.system.files import write_text
for number in range(60):
    write_text(Path(sys.argv[1]) / f"{sys.argv[2]}-{number % 3}.json", '{"started": %d, "stages": []}' % (number + 1))
"""
    folder = ran(chain, "first", 1, "sft").parent
    writers = [
        subprocess.Popen([sys.executable, "-c", code, str(folder), name], env=os.environ)
        for name in ("x", "y")
    ]
    while any(writer.poll() is None for writer in writers):
        assert "damaged" not in {run.state for run in records(chain.root)}
    assert {run.id for run in records(chain.root)} == {
        "first",
        *(f"{name}-{number}" for name in "xy" for number in range(3)),
    }


def test_a_run_is_found_by_id_name_or_the_beginning_of_an_id(tmp_path: Path) -> None:
    folder = tmp_path / "demo" / RUNS
    folder.mkdir(parents=True)
    for number, (identity, name) in enumerate(
        [("20260101-000000-aaaaaa", "first"), ("20260102-000000-bbbbbb", "second")]
    ):
        (folder / f"{identity}.json").write_text(
            json.dumps({"recipe": "demo", "name": name, "started": 1e9 + number})
        )
    assert find_run(tmp_path, "20260101-000000-aaaaaa").name == "first"
    assert find_run(tmp_path, "second").id == "20260102-000000-bbbbbb"
    assert find_run(tmp_path, "20260102").name == "second"
    with pytest.raises(
        ValueError,
        match=r"'202601' begins the ids of second \(2026\S+\), first \(2026\S+\): give more of the id",
    ):
        find_run(tmp_path, "202601")
    with pytest.raises(ValueError, match=r"has no run 'secnod': give .* second \(20260102-000000-bbbbbb\)$"):
        find_run(tmp_path, "secnod")
