"""The flow with real launcher, reaper and processes, whose stages only write what a stage writes. Prefect runs in its test harness."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prefect.blocks.system import Secret
from prefect.client.orchestration import get_client
from prefect.runner import Runner

import flows.alignment
import flows.cli
import flows.cli_run
import tasks.notify
import tasks.stages
from flows.alignment import alignment, stage
from rlhf_core.check import require_here
from rlhf_core.config import Recipe
from rlhf_core.engine.ranks import free_port
from rlhf_core.gates import GateFailed
from rlhf_core.launch import StageFailed
from rlhf_core.plan import plan
from rlhf_core.recipe import load_recipe
from rlhf_core.remote_files import RemoteFiles, StoreFault
from rlhf_core.stage import RunDir
from tasks.keys import provided
from tests.s3_server import s3
from tests.webhook import TOKEN, receiving

pytestmark = pytest.mark.usefixtures("prefect")
TEXT = """
name: tiny
base_model: org/model
stages:
  evaluation: {models: [loop], questions: {path: q.jsonl}}
  sft: {data: {sources: train.jsonl}}
  reward_model: {data: {sources: pairs.jsonl}}
  loop: {stage: iterative_dpo, prompts: {sources: prompts.jsonl}, rounds: 2}
"""
ORDER = [
    "sft",
    "reward_model",
    "loop.round1.preferences",
    "loop.round1.dpo",
    "loop.round2.preferences",
    "loop.round2.dpo",
    "evaluation",
]
# Writes what a stage of its kind writes; `faults.json` in the working directory says what goes wrong instead, attempt by attempt.
STAGE = """
import json, os, signal, sys
from pathlib import Path
from rlhf_core.stage import Outcome, run_stage, write_text
from rlhf_core.types import EvalReport, WinRate

def work(request, run):
    with Path("attempts.txt").open("a") as file:
        file.write(request.name + "\\n")
    print("working on", request.name, flush=True)
    for place in request.inputs.values():
        assert not place.startswith("/") or Path(place).exists(), place
    faults = json.loads(Path("faults.json").read_text()) if Path("faults.json").exists() else {}
    fault = faults.get(request.name, [])[:1]
    if fault:
        faults[request.name].pop(0)
        Path("faults.json").write_text(json.dumps(faults))
    if fault == ["killed"]:
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == ["refuses"]:
        print("the data has no rows: give some", file=sys.stderr)
        sys.exit(2)
    kind = request.config.stage
    if kind == "evaluation":
        rates = tuple(
            WinRate(model=m, baseline="sft", judge="rule", win_rate=0.6, ci_low=0.55, ci_high=0.65, num_questions=300, num_failed=0,
                    swap_consistency=1.0, by_category={}) for m in request.config.models)
        (run / "report").mkdir(exist_ok=True)
        report = EvalReport(baseline="sft", judge="rule", win_rates=rates, right={}, mean_tokens={}, truncated={})
        write_text(run / "report" / "eval.json", report.model_dump_json())
        return Outcome({"win_rate": 0.6}, {"report": "report"})
    name = "pairs" if kind == "preferences" else "checkpoint"
    (run / "made").mkdir(exist_ok=True)
    write_text(run / "metrics.jsonl", "".join(json.dumps({"step": step, "loss": 2 / step}) + "\\n" for step in range(1, 9)))
    write_text(run / "made" / name, request.digest)
    return Outcome({"loss": 1.5}, {name: f"made/{name}"})

run_stage(sys.argv[1], work)
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Recipe]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "stage_for_flows.py").write_text(STAGE)
    (tmp_path / "recipe.yaml").write_text(TEXT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    monkeypatch.setattr(tasks.stages, "module_of", lambda kind: "stage_for_flows")
    monkeypatch.setattr(tasks.stages.run_stage, "retry_delay_seconds", 0)
    monkeypatch.setattr(flows.alignment, "require_here", lambda planned, nodes: None)
    monkeypatch.setattr(flows.cli_run, "require_here", lambda planned, nodes: None)
    return lambda *overrides: load_recipe("recipe.yaml", overrides)


def attempts() -> list[str]:
    return Path("attempts.txt").read_text().splitlines() if Path("attempts.txt").exists() else []


def statuses() -> dict[str, str]:
    summary = json.loads(Path("artifacts/tiny/summary.json").read_text())
    return {entry["name"]: entry["status"] for entry in summary["stages"]}


def fault(**faults: list[str]) -> None:
    Path("faults.json").write_text(json.dumps(faults))


def artifacts() -> dict[str, Any]:
    with get_client(sync_client=True) as client:
        return {artifact.key: artifact.data for artifact in client.read_artifacts() if artifact.key}


def test_a_recipe_runs_in_order_and_again_does_nothing(recipe: Callable[..., Recipe]) -> None:
    alignment(recipe())
    assert attempts() == ORDER
    assert set(statuses().values()) == {"done"} and list(statuses()) == ORDER
    assert load_recipe("artifacts/tiny/recipe.yaml") == recipe()
    before = json.loads(Path("artifacts/tiny/summary.json").read_text())
    page = Path("artifacts/tiny/report.html").read_text()
    assert "loop.round2" in page

    found = artifacts()
    assert "| loss | 1.5 |" in found["sft-metrics"]
    assert "file://" in found["sft-checkpoint"] and "made/checkpoint" in found["sft-checkpoint"]
    assert "| loop.round2 | rule | 0.600 | 0.550 - 0.650 | 300 |" in found["evaluation-win-rates"]
    assert "report.html" in found["report"]
    picture = base64.b64decode(found["sft-curves"].removeprefix("data:image/svg+xml;base64,"))
    assert ElementTree.fromstring(picture).tag == "{http://www.w3.org/2000/svg}svg"
    assert "evaluation-curves" not in found
    assert 'href="tiny/report.html"' in Path("artifacts/index.html").read_text()
    times = json.loads(Path("artifacts/tiny/run.json").read_text())
    assert 0 < times["ended"] - times["started"] < 600

    alignment(recipe())
    assert attempts() == ORDER
    assert set(statuses().values()) == {"skipped"}
    after = json.loads(Path("artifacts/tiny/summary.json").read_text())
    assert [entry["digest"] for entry in after["stages"]] == [entry["digest"] for entry in before["stages"]]


def test_only_what_changed_is_done_again(recipe: Callable[..., Recipe]) -> None:
    alignment(recipe())
    Path("attempts.txt").unlink()
    alignment("recipe.yaml", ("loop.beta=0.5",))
    assert attempts() == ORDER[3:]
    assert [name for name, status in statuses().items() if status == "skipped"] == ORDER[:3]


def test_a_killed_stage_is_tried_again(recipe: Callable[..., Recipe]) -> None:
    fault(reward_model=["killed"])
    alignment(recipe())
    assert attempts()[:3] == ["sft", "reward_model", "reward_model"]
    assert set(statuses().values()) == {"done"}


def test_a_stage_that_fails_twice_ends_the_run_with_a_report(recipe: Callable[..., Recipe]) -> None:
    fault(reward_model=["killed", "killed"])
    with pytest.raises(StageFailed, match="reward_model"):
        alignment(recipe())
    assert attempts() == ["sft", "reward_model", "reward_model"]
    assert statuses() == {"sft": "done", "reward_model": "failed"} | dict.fromkeys(ORDER[2:], "not run")
    alignment(recipe())
    assert attempts()[3:] == ORDER[1:]


def test_wrong_input_is_not_tried_again(recipe: Callable[..., Recipe]) -> None:
    fault(reward_model=["refuses"])
    with pytest.raises(StageFailed, match="stage reward_model: the data has no rows: give some"):
        alignment(recipe())
    assert attempts() == ["sft", "reward_model"]


def test_checks_come_before_any_work(recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flows.alignment, "require_here", require_here)
    with pytest.raises(ValueError, match=r"train\.jsonl: there is no such file"):
        alignment(recipe())
    assert attempts() == [] and not Path("artifacts").exists()


def test_one_stage_and_nothing_else(recipe: Callable[..., Recipe]) -> None:
    with pytest.raises(ValueError, match=r"round1.preferences needs sft, reward_model, which are not done: run `alignflow stage sft"):
        stage(recipe(), "loop")
    assert attempts() == []
    stage(recipe(), "sft")
    stage(recipe(), "reward_model")
    stage(recipe(), "loop.round1")
    assert attempts() == ORDER[:4]
    planned = plan(recipe())
    assert RunDir(planned["evaluation"].run_dir).result() is None
    assert statuses()["loop.round1.dpo"] == "done" and statuses()["evaluation"] == "not run"


def test_a_deleted_checkpoint_that_a_later_stage_needs(recipe: Callable[..., Recipe], capsys: pytest.CaptureFixture[str]) -> None:
    alignment(recipe())
    (plan(recipe())["reward_model"].run_dir / "made" / "checkpoint").unlink()
    before = attempts()
    assert flows.cli.main(["stage", "loop", "recipe.yaml", "loop.beta=0.7"]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert told.startswith("stage loop.round1.preferences needs reward_model, which is not done: run `alignflow stage reward_model RECIPE`")
    assert attempts() == before
    assert flows.cli.main(["run", "recipe.yaml"]) == 0
    assert attempts() == [*before, "reward_model"], "it alone is made anew"


def test_a_run_names_its_stages_from_its_start(recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch) -> None:
    """What `alignflow gc` finds while a run is in progress."""
    named = []

    def listed(request: Any, run_dir: Path, store: object) -> str:
        named.append([entry["name"] for entry in json.loads(Path("artifacts/tiny/run.json").read_text())["stages"]])
        raise KeyboardInterrupt

    monkeypatch.setattr(flows.alignment, "run_stage", listed)
    with pytest.raises(KeyboardInterrupt):
        flows.alignment.run_all(plan(recipe()), plan(recipe()).nodes)
    assert named == [ORDER]


def test_a_gate_stops_the_chain_and_a_relaxed_one_lets_it_go_on(recipe: Callable[..., Recipe]) -> None:
    gate = "reward_model.gates=[{metric: loss, max: 1.0}]"
    told = "^stage reward_model: loss is 1.5, and the gate asks for at most 1: what depends on it was not started. The reward model did not"
    for _ in range(2):  # also when the stage is found done
        with pytest.raises(GateFailed, match=told):
            alignment(recipe(gate))
        assert attempts() == ["sft", "reward_model"]
    assert statuses() == {"sft": "skipped", "reward_model": "skipped"} | dict.fromkeys(ORDER[2:], "not run")
    page = Path("artifacts/tiny/report.html").read_text()
    assert "The run stopped after reward_model, which did not pass a gate" in page and "failed: the run stopped here" in page
    assert "| loss | 1.5 | at most 1 | failed | stop |" in artifacts()["reward-model-gates"]
    with pytest.raises(GateFailed, match="reward_model"):
        stage(recipe(gate), "loop.round1")  # its parents' gates count too
    assert attempts() == ["sft", "reward_model"]

    alignment(recipe("reward_model.gates=[{metric: loss, max: 2.0}]"))
    assert attempts() == ORDER
    summary = json.loads(Path("artifacts/tiny/summary.json").read_text())
    assert [gate["passed"] for gate in summary["stages"][1]["gates"]] == [True]


def test_a_warning_goes_on_and_a_branch_leaves_out_what_depends_on_it(recipe: Callable[..., Recipe]) -> None:
    with pytest.raises(GateFailed, match=r"stage reward_model: loss is 1\.5") as held:
        alignment(
            recipe("sft.gates=[{metric: loss, max: 1, on_fail: warn}]", "reward_model.gates=[{metric: loss, max: 1, on_fail: branch}]")
        )
    assert "sft" not in str(held.value).partition(":")[0]
    assert attempts() == ["sft", "reward_model"]  # everything else needs the reward model

    Path("recipe.yaml").write_text(TEXT + "  more: {stage: dpo, data: {sources: pairs.jsonl}}\n")
    with pytest.raises(GateFailed, match="stage reward_model"):
        alignment(recipe("reward_model.gates=[{metric: loss, max: 1, on_fail: branch}]"))
    assert attempts() == ["sft", "reward_model", "more"]
    assert statuses()["more"] == "done" and statuses()["evaluation"] == "not run"


def test_a_key_that_only_prefect_knows_reaches_the_stages_of_a_flow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    Secret(value="hf_OnlyPrefectKnowsThis").save("hf-token")
    try:
        with provided(("HF_TOKEN", "A_KEY_NOBODY_KNOWS")):
            assert os.environ["HF_TOKEN"] == "hf_OnlyPrefectKnowsThis" and "A_KEY_NOBODY_KNOWS" not in os.environ
        assert "HF_TOKEN" not in os.environ
    finally:
        Secret.delete("hf-token")


def test_a_gate_in_the_terminal(recipe: Callable[..., Recipe], capsys: pytest.CaptureFixture[str]) -> None:
    gate = "sft.gates=[{metric: steps, min: 1}]"  # the stages of this test write no steps
    assert flows.cli.main(["validate", "recipe.yaml", gate]) == 0
    assert flows.cli.main(["validate", "recipe.yaml", "sft.gates=[{metric: eval/loss, max: 1}]"]) == 2
    assert "stages.sft.gates.0.metric: unknown metric 'eval/loss'" in capsys.readouterr().err
    assert flows.cli.main(["run", "recipe.yaml", gate]) == 1
    shown = capsys.readouterr()
    assert "stage sft: its result has no metric steps, and the gate asks for at least 1: what depends on it was not started." in shown.err
    assert "Traceback" not in shown.err and "gate failed (stop) stage sft" in shown.out
    assert attempts() == ["sft"]
    assert flows.cli.main(["run", "recipe.yaml", "sft.gates=[{metric: steps, min: 1, on_fail: warn}]"]) == 0
    assert attempts() == ORDER and "gate failed (warn) stage sft" in capsys.readouterr().out


def test_the_command_and_its_exit_codes(recipe: Callable[..., Recipe], capsys: pytest.CaptureFixture[str]) -> None:
    assert flows.cli.main(["run", "recipe.yaml", "--dry-run"]) == 0
    assert "7 to run, 0 to resume, 0 to skip" in capsys.readouterr().out
    fault(sft=["refuses"])
    assert flows.cli.main(["run", "recipe.yaml"]) == 2
    assert "stage sft: the data has no rows: give some" in capsys.readouterr().err
    fault(sft=["killed", "killed"])
    assert flows.cli.main(["run", "recipe.yaml"]) == 1
    assert flows.cli.main(["run", "recipe.yaml"]) == 0
    assert flows.cli.main(["run", "recipe.yaml", "--dry-run"]) == 0
    assert "0 to run, 0 to resume, 7 to skip" in capsys.readouterr().out
    assert flows.cli.main(["run", "recipe.yaml", "sft.max_len=700", "--dry-run"]) == 0
    assert "changed: max_len 512 -> 700" in capsys.readouterr().out
    Path("artifacts/tiny/report.html").unlink()
    assert flows.cli.main(["report", "artifacts/tiny"]) == 0 and Path("artifacts/tiny/report.html").exists()
    assert flows.cli.main(["report", "recipe.yaml"]) == 0
    assert flows.cli.main(["stage", "sfft", "recipe.yaml"]) == 2
    assert flows.cli.main(["run", "none.yaml"]) == 2
    assert flows.cli.main(["no-such-command"]) == 2
    assert flows.cli.main(["validate", "recipe.yaml"]) == 0
    assert flows.cli.main(["validate", "recipe.yaml", "--here"]) == 0  # all stages are done: nothing is needed
    capsys.readouterr()
    assert flows.cli.main(["validate", "recipe.yaml", "sft.max_len=700", "--here"]) == 2
    assert "stages.sft.data: train.jsonl: there is no such file" in capsys.readouterr().err


def test_a_webhook_is_told_of_states_stages_and_gates(
    recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    notify, gate = "notify={url_env: HOOK}", "sft.gates=[{metric: loss, max: 2}]"
    with receiving() as receiver:
        monkeypatch.setenv("HOOK", receiver.url)
        alignment(recipe(notify, gate))
        sender = tasks.notify._senders[receiver.url]
        assert sender.flush(10)
        assert receiver.events == ["running", "stage", "gate", *["stage"] * (len(ORDER) - 1), "completed"]
        assert [message["stage"] for message in receiver.got if message["event"] == "stage"] == ORDER
        passed = receiver.got[2]
        assert (passed["stage"], passed["metric"], passed["value"], passed["passed"]) == ("sft", "loss", 1.5, True)
        assert len({message["run_id"] for message in receiver.got}) == 1 and receiver.got[0]["run_id"]

        receiver.got.clear()
        with pytest.raises(GateFailed):
            alignment("recipe.yaml", (notify, "sft.gates=[{metric: loss, max: 1}]"))
        assert sender.flush(10) and receiver.events == ["running", "gate", "failed"]

        receiver.got.clear()
        monkeypatch.setattr(flows.alignment, "run_stage", lambda *_: (_ for _ in ()).throw(SystemExit(1)))
        with pytest.raises(SystemExit):
            stage(recipe(notify, "sft.max_len=100"), "sft")
        assert sender.flush(10) and receiver.events == ["running", "crashed"]
    told = "".join(path.read_text(errors="replace") for path in Path("artifacts").rglob("*") if path.is_file())
    assert TOKEN not in told + caplog.text + str(artifacts())


def test_another_machine_goes_on_from_the_store(recipe: Callable[..., Recipe], capsys: pytest.CaptureFixture[str]) -> None:
    """Run, killed in the middle, the folder wiped, run again: against a real S3 server, through the command."""
    with s3() as url:
        command = ["run", "recipe.yaml", f"store={url}"]
        fault(**{"loop.round1.dpo": ["killed", "killed"]})
        assert flows.cli.main(command) == 1
        before = {
            path.name: (path / "result.json").read_text() for path in Path("artifacts/stages").iterdir() if (path / "result.json").exists()
        }
        assert [name.rpartition("-")[0] for name in sorted(before)] == sorted(ORDER[:3])
        shutil.rmtree("artifacts")
        Path("attempts.txt").unlink()
        capsys.readouterr()
        assert flows.cli.main([*command, "--dry-run"]) == 0
        assert f"4 to run, 0 to resume, 0 to skip, 3 to fetch from {url}" in " ".join(capsys.readouterr().out.split())
        assert flows.cli.main([*command, "artifacts=elsewhere"]) == 0
        assert attempts() == ORDER[3:]
        for name, result in before.items():
            assert (Path("elsewhere/stages") / name / "result.json").read_text() == result
            assert RunDir(Path("elsewhere/stages") / name).result() is not None
        made = RunDir(plan(recipe("artifacts=elsewhere"))["loop"].run_dir)
        assert all("elsewhere" in place for place in made.request().inputs.values() if place.startswith("/")), "nothing of the first folder"

        shutil.rmtree("elsewhere")  # one stage alone: what it needs comes from the store
        assert flows.cli.main(["stage", "evaluation", "recipe.yaml", f"store={url}"]) == 0
        assert attempts() == ORDER[3:]
        shutil.rmtree(plan(recipe())["sft"].run_dir / "made")  # a checkpoint that a later stage needs
        assert flows.cli.main([*command, "loop.beta=0.3"]) == 0
        assert attempts() == [*ORDER[3:], *ORDER[3:]]


def test_a_store_that_goes_away_loses_nothing(
    recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("bucket").mkdir()
    send, gone = RemoteFiles.send, True

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


def test_a_bad_receiver_delays_no_flow(recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(*overrides: str) -> float:
        start = time.monotonic()
        alignment(recipe(*overrides))
        return time.monotonic() - start

    alignment(recipe())  # from now on all is skipped
    plain = min(seconds() for _ in range(2))
    with receiving() as receiver:
        receiver.hang = True
        for url in (receiver.url, f"http://127.0.0.1:{free_port()}/"):
            monkeypatch.setenv("HOOK", url)
            assert seconds("notify={url_env: HOOK, timeout: 60}") < plain + 1


def test_a_scheduled_run_tells_each_of_its_states_once(recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch) -> None:
    alignment(recipe())  # the run below finds all done
    root = Path(flows.cli.__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", f"{Path('modules').absolute()}{os.pathsep}{root}")
    with receiving() as receiver:
        monkeypatch.setenv("HOOK", receiver.url)
        deployment = alignment.to_deployment("night", parameters={"recipe": "recipe.yaml", "overrides": ["notify={url_env: HOOK}"]})
        deployment.entrypoint = "flows.alignment.alignment"
        identity = deployment.apply()
        with get_client(sync_client=True) as client:
            run = client.create_flow_run_from_deployment(identity)
        asyncio.run(Runner().execute_flow_run(run.id))
        assert receiver.events == ["scheduled", "running", "completed"]
        assert {message["run_id"] for message in receiver.got} == {str(run.id)}
