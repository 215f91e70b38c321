"""A flow with a store: another machine resumes from it, and an unreachable store loses no result."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import flows.cli
from flows.loops import loop
from flows.parts import evaluate
from rlhf_core.config import Recipe
from rlhf_core.recipe.plan import plan
from rlhf_core.runs.remote.remote_files import RemoteFiles, StoreFault
from rlhf_core.runs.run_dir import RunDir
from tests.support.s3_server import s3
from tests.support.writing_stages import ORDER, attempts, fault

pytestmark = pytest.mark.usefixtures("prefect")


@pytest.mark.long
def test_another_machine_resumes_from_the_store(
    recipe: Callable[..., Recipe], capsys: pytest.CaptureFixture[str]
) -> None:
    """Run, kill, delete the folder, run again: with the command and a real S3 server."""
    with s3() as url:
        command = ["run", "recipe.yaml", f"store={url}"]
        fault(**{"loop.round1.dpo": ["killed", "killed"]})
        assert flows.cli.main(command) == 1
        before = {
            path.name: (path / "result.json").read_text()
            for path in Path("artifacts/stages").iterdir()
            if (path / "result.json").exists()
        }
        assert [name.rpartition("-")[0] for name in sorted(before)] == sorted(ORDER[:3])
        shutil.rmtree("artifacts")
        Path("attempts.txt").unlink()
        capsys.readouterr()
        assert flows.cli.main([*command, "--dry-run"]) == 0
        assert f"4 to run, 0 to resume, 0 to skip, 3 to fetch from {url}" in " ".join(
            capsys.readouterr().out.split()
        )
        assert flows.cli.main([*command, "artifacts=elsewhere"]) == 0
        assert attempts() == ORDER[3:]
        for name, result in before.items():
            assert (Path("elsewhere/stages") / name / "result.json").read_text() == result
            assert RunDir(Path("elsewhere/stages") / name).result() is not None
        made = RunDir(plan(recipe("artifacts=elsewhere"))["loop"].run_dir)
        # nothing of the first folder
        assert all("elsewhere" in place for place in made.request().inputs.values() if place.startswith("/"))

        shutil.rmtree("elsewhere")  # one stage alone: its parents come from the store
        assert flows.cli.main(["stage", "evaluation", "recipe.yaml", f"store={url}"]) == 0
        assert attempts() == ORDER[3:]
        shutil.rmtree(plan(recipe())["sft"].run_dir / "made")  # a checkpoint that a later stage needs
        assert flows.cli.main([*command, "loop.beta=0.3"]) == 0
        assert attempts() == [*ORDER[3:], *ORDER[3:]]


def test_a_nightly_loop_resumes_from_the_store(recipe: Callable[..., Recipe]) -> None:
    """Two rounds, an empty disk, a third run: it trains round 3 and fetches the others."""
    Path("bucket").mkdir()
    for _ in range(2):
        loop("recipe.yaml", overrides=("store=bucket",))
    trained = [name for name in attempts() if name.startswith("loop.")]
    assert trained == ORDER[2:6]
    shutil.rmtree("artifacts")
    Path("attempts.txt").unlink()
    loop("recipe.yaml", overrides=("store=bucket",))
    assert attempts() == ["loop.round3.preferences", "loop.round3.dpo", "evaluation"]
    record = json.loads(Path("artifacts/tiny/loop.json").read_text())
    assert len(record["rounds"]) == 3 and record["begun"] is None


def test_an_evaluation_alone_takes_its_models_from_the_store(recipe: Callable[..., Recipe]) -> None:
    """As a deployment runs it, on a machine whose disk was wiped."""
    Path("bucket").mkdir()
    assert flows.cli.main(["run", "recipe.yaml", "store=bucket"]) == 0
    (done,) = Path("bucket/stages").glob("evaluation-*")
    shutil.rmtree(done)
    shutil.rmtree("artifacts")
    Path("attempts.txt").unlink()
    evaluate("recipe.yaml", overrides=("store=bucket",))
    assert attempts() == ["evaluation"] and done.is_dir()


def test_an_unreachable_store_loses_no_result(
    recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("bucket").mkdir()
    send = RemoteFiles.send
    gone = True

    def fails(self: RemoteFiles, file: Path, place: str) -> None:
        if gone and "reward_model" in place:
            raise StoreFault(f"store {self.url}: {place} cannot be written: no connection; check the network")
        send(self, file, place)

    monkeypatch.setattr(RemoteFiles, "send", fails)
    assert flows.cli.main(["run", "recipe.yaml", "store=bucket"]) == 3
    shown = capsys.readouterr()
    assert "cannot be written: no connection" in shown.err and "Traceback" not in shown.err + shown.out
    assert attempts() == ORDER[:2]
    gone = False
    assert flows.cli.main(["run", "recipe.yaml", "store=bucket"]) == 0
    assert attempts() == ORDER and len(list(Path("bucket/stages").iterdir())) == len(ORDER)
