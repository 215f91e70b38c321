"""Files are written whole or not at all, also on a full disk."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import flows.cli
import flows.cli.prepare
from rlhf_core.config import SFT
from rlhf_core.runs.run_dir import RunDir
from rlhf_core.system.files import write_text
from rlhf_core.system.machine import disk_problem
from tests.support.programs import captured
from tests.support.stage_request import stage_request

LIMIT = 1_000_000  # bytes of one file: less than the checkpoint, more than logs, metrics and data


def work(run: RunDir, limit: int | None) -> subprocess.CompletedProcess[str]:
    def limited() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

    root = str(Path(flows.cli.__file__).parents[2])
    return captured(
        [sys.executable, "-P", "-m", "rlhf_core", str(run.path)],
        preexec_fn=limited,
        env=os.environ | {"PYTHONPATH": root},
        timeout=240,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "save_steps",
    [pytest.param(100, id="the checkpoint"), pytest.param(2, id="a resume state", marks=pytest.mark.long)],
)
def test_a_full_disk_is_one_sentence(material: Path, tmp_path: Path, save_steps: int) -> None:
    why = "a file is larger than this process may write (ulimit -f); raise the limit, then run again"
    fields = {"max_len": 96, "train_batch_size": 8, "micro_train_batch_size": 4, "save_steps": save_steps}
    config = SFT.model_validate(
        {"data": {"sources": str(material / "sft.jsonl"), "max_samples": 24}, **fields}
    )
    run = RunDir(tmp_path / "sft-0")
    run.prepare(stage_request(config, material / "base", seed=3))
    ended = work(run, LIMIT)
    assert ended.returncode == 3, ended.stderr[-3000:]
    assert ended.stderr.strip().splitlines()[-1].startswith(f"{run.path} cannot be written to: {why}")
    assert "Traceback" not in ended.stderr
    assert run.result() is None
    ended = work(run, None)
    assert ended.returncode == 0 and run.result() is not None


def test_which_errors_are_disk_problems() -> None:
    assert "disk is full" in (disk_problem(OSError(errno.ENOSPC, "No space left on device")) or "")
    assert "disk is full" in (
        disk_problem(
            RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")
        )
        or ""
    )
    try:
        try:
            raise OSError(errno.EROFS, "Read-only file system")
        except OSError as error:
            raise RuntimeError("it did not work") from error
    except RuntimeError as error:
        assert "only be read" in (disk_problem(error) or "")
    assert disk_problem(OSError(errno.ENOENT, "No such file")) is None
    assert disk_problem(RuntimeError("out of memory")) is None


def test_the_command_tells_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "artifacts/t/run.json")

    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text("{name: t, base_model: org/m, stages: {sft: {data: {sources: d.jsonl}}}}")
    monkeypatch.setattr(flows.cli.prepare, "plan", full)
    assert flows.cli.main(["validate", "r.yaml"]) == 3
    told = "artifacts/t/run.json cannot be written to: its disk is full; free some space, then run again"
    assert " ".join(capsys.readouterr().err.split()) == told


def test_a_file_that_cannot_be_written_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "loop.json").write_text("before")
    code = (
        "import resource; from pathlib import Path; from rlhf_core.system.files import write_text;"
        " resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY));"
        " write_text(Path('loop.json'), 'x' * 1000)"
    )
    root = str(Path(flows.cli.__file__).parents[2])
    ended = captured(
        [sys.executable, "-c", code], cwd=tmp_path, env=os.environ | {"PYTHONPATH": root}, timeout=60
    )
    assert ended.stderr.strip().splitlines()[-1] == "OSError: [Errno 27] File too large: 'loop.json'"
    assert [file.name for file in tmp_path.iterdir()] == ["loop.json"]
    assert (tmp_path / "loop.json").read_text() == "before"


def test_writers_with_one_process_id_do_not_meet(tmp_path: Path) -> None:
    """Machines that share a folder may have equal process ids, as the threads here have."""
    texts = [str(number) * 5000 for number in range(8)]
    with ThreadPoolExecutor(len(texts)) as pool:
        for _ in range(25):
            assert list(pool.map(lambda text: write_text(tmp_path / "index.html", text), texts)) == [
                None
            ] * len(texts)
            assert (tmp_path / "index.html").read_text() in texts
    assert [file.name for file in tmp_path.iterdir()] == ["index.html"]
