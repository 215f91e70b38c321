"""The launcher and the reaper, with small real processes: what ends, what is told, what is left behind
(nothing)."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhf_core.config import SFT, Evaluation
from rlhf_core.runs.launch import SECRET_NAME, StageFailed, launch
from rlhf_core.runs.run_dir import RunDir
from rlhf_core.system.processes import child_environment
from tests.support.stage_request import stage_request

Prepare = Callable[[str], Path]
# A stage whose behaviour is the name of its request. Every process it starts writes its pid to `pids/`.
STAGE = """
import os, signal, subprocess, sys, time
from pathlib import Path
from rlhf_core.runs.run_dir import Outcome, RunDir, run_in_directory

def pid(folder):
    (folder / "pids").mkdir(exist_ok=True)
    (folder / "pids" / str(os.getpid())).touch()

def work(request, run):
    pid(run.path)
    if request.name == "silent":
        while not (run / "go on").exists():
            time.sleep(0.05)
    print("first line", flush=True)
    if request.name in ("daemon", "stubborn"):
        if os.fork() == 0:  # a daemon in a session of its own, whose parent is gone
            os.setsid()
            if os.fork() == 0:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                pid(run.path)
                time.sleep(120)
            os._exit(0)
        while len(list((run / "pids").iterdir())) < 2:
            time.sleep(0.05)
    if request.name == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (run / "ready").touch()
        time.sleep(120)
    if request.name == "exits0":
        sys.exit(0)
    if request.name == "refuses":
        sys.stderr.write("the data has no rows: give some\\n")
        sys.exit(2)
    if request.name == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if request.name == "noisy":
        sys.stdout.write("    [state-dump] of Ray\\n    [2026-11-25 07:57:27,188 I 10 11] (raylet) accessor.cc:475: of Ray\\n")
        sys.stdout.write("1%\\r50%\\r100%\\n" + "x" * 200000 + "\\nkey " + os.environ[os.environ["NAMED"]] + "\\nno newline")
        sys.stdout.flush()
    (run / "checkpoint").mkdir(exist_ok=True)
    (run / "checkpoint" / "weights").write_text("1")
    return Outcome({"loss": 1.0}, {"checkpoint": "checkpoint"})

run_in_directory(sys.argv[1], work)
"""
# A suite started in the background of a script inherits an ignored SIGINT; the parent under test is one a
# person can interrupt.
PARENT = """
import signal, sys
from pathlib import Path
from rlhf_core.runs.launch import launch
signal.signal(signal.SIGINT, signal.default_int_handler)
launch("stage_for_tests", Path(sys.argv[1]), "stubborn", print, grace_seconds=1)
"""


@pytest.fixture
def prepare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Prepare:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "stage_for_tests.py").write_text(STAGE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))

    def make(name: str) -> Path:
        run = RunDir(tmp_path / name)
        config = SFT.model_validate({"data": {"sources": "x.jsonl"}})
        run.prepare(stage_request(config, name=name, digest="d"))
        return run.path

    return make


def start(run_dir: Path, lines: list[str]) -> object:
    return launch("stage_for_tests", run_dir, run_dir.name, lines.append, grace_seconds=1)


def alive(run_dir: Path) -> list[int]:
    """Processes of the stage that live (a zombie does not)."""
    found = []
    for path in (run_dir / "pids").iterdir():
        try:
            state = Path(f"/proc/{path.name}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z":
            found.append(int(path.name))
    return found


def wait_until(true: object, what: str, seconds: float = 100) -> None:
    assert callable(true)
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.05)


def test_a_start_is_on_record_before_the_stage_says_anything(prepare: Prepare) -> None:
    run_dir = prepare("silent")
    lines = list[str]()
    working = threading.Thread(target=start, args=(run_dir, lines))
    working.start()
    try:
        wait_until(lambda: (run_dir / "pids").exists(), "the stage to begin")
        assert (run_dir / "log.txt").read_text().startswith("--- ") and not lines
    finally:
        (run_dir / "go on").touch()
        working.join(100)
    assert lines == ["first line"]


def test_success_relays_and_keeps_the_log(prepare: Prepare) -> None:
    run_dir = prepare("plain")
    lines: list[str] = []
    result = launch("stage_for_tests", run_dir, "plain", lines.append)
    assert result.metrics == {"loss": 1.0}
    assert lines == ["first line"]
    log = (run_dir / "log.txt").read_text().splitlines()
    assert log[0].startswith("--- ") and log[1:-1] == ["first line"]
    assert re.fullmatch(r"\+\+\+ \S+ \S+ .* ended after \d+\.\d\d s with code 0", log[-1])


def test_exit_0_without_a_result_is_a_failure(prepare: Prepare) -> None:
    with pytest.raises(StageFailed) as caught:
        start(prepare("exits0"), [])
    assert caught.value.code == 0
    assert "there is no result" in str(caught.value)
    assert "first line" in str(caught.value)
    assert caught.value.can_retry


def test_wrong_input_is_one_sentence_and_not_retried(prepare: Prepare) -> None:
    with pytest.raises(StageFailed) as caught:
        start(prepare("refuses"), [])
    assert str(caught.value) == "stage refuses: the data has no rows: give some"
    assert not caught.value.can_retry


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stage_that_a_stop_signal_ended_is_not_retried(number: int) -> None:
    assert not StageFailed("s", 128 + number, ()).can_retry, "as the reaper tells it"


def test_a_killed_stage_is_told_and_can_be_retried(prepare: Prepare) -> None:
    with pytest.raises(StageFailed) as caught:
        start(prepare("killed"), [])
    assert "SIGKILL" in str(caught.value) and caught.value.can_retry


@pytest.mark.parametrize(
    "variable", ["HF_TOKEN", "OPENAI_API_KEY", "EXAMPLE_KEY_2", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD"]
)
def test_progress_bars_long_lines_secrets_and_dumps(
    variable: str, prepare: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "hf_very_secret_value")
    monkeypatch.setenv("NAMED", variable)
    run_dir = prepare("noisy")
    lines: list[str] = []
    start(run_dir, lines)
    assert lines == ["first line", "100%", "x" * 200000, "key ***", "no newline"]
    log = (run_dir / "log.txt").read_text()
    # what Ray repeats of a raylet's log is in the file alone
    assert "hf_very_secret_value" not in log and log.count("of Ray") == 2


def test_a_key_is_masked_whatever_its_variable_is_called(
    prepare: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(prepare("noisy"))
    variable = "JUDGE_OF_OUR_TEAM"
    judge = dict(kind="openai", base_url="https://judge.example/v1", model="judge", api_key_env=variable)
    config = Evaluation.model_validate(
        {"models": ["base"], "questions": {"path": "q.jsonl"}, "judges": [judge]}
    )
    run.prepare(run.request().model_copy(update={"config": config}))
    monkeypatch.setenv(variable, "a-very-secret-value")
    monkeypatch.setenv("NAMED", variable)
    lines: list[str] = []
    start(run.path, lines)
    assert "key ***" in lines and "a-very-secret-value" not in (run / "log.txt").read_text()


def test_a_stage_cannot_ask_prefect(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PREFECT_API_AUTH_STRING", "PREFECT_SERVER_API_AUTH_STRING"):
        monkeypatch.setenv(name, "alignflow:secret-of-the-api")
        assert SECRET_NAME.search(name)
    assert "alignflow:secret-of-the-api" not in child_environment().values()


def test_daemons_of_a_finished_stage_are_ended(prepare: Prepare) -> None:
    run_dir = prepare("daemon")
    start(run_dir, [])
    assert len(list((run_dir / "pids").iterdir())) == 2
    assert alive(run_dir) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_parent_leaves_nothing_behind(prepare: Prepare, number: signal.Signals) -> None:
    run_dir = prepare("stubborn")
    script = run_dir / "parent.py"
    script.write_text(PARENT)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], str(Path(__file__).parents[3])]),
    }
    parent = subprocess.Popen(
        [sys.executable, str(script), str(run_dir)], env=environment, stderr=subprocess.DEVNULL
    )
    wait_until((run_dir / "ready").exists, "the stage to start")
    assert len(alive(run_dir)) == 2
    parent.send_signal(number)
    parent.wait(timeout=100)
    wait_until(lambda: not alive(run_dir), "the stage's processes to end", 60)
    assert RunDir(run_dir).result() is None


def test_an_exception_in_the_callback_ends_the_stage(prepare: Prepare) -> None:
    run_dir = prepare("stubborn")

    def fail(line: str) -> None:
        wait_until((run_dir / "ready").exists, "the stage to start")
        raise RuntimeError("the relay broke")

    with pytest.raises(RuntimeError, match="the relay broke"):
        launch("stage_for_tests", run_dir, "stubborn", fail, grace_seconds=1)
    assert alive(run_dir) == []


def test_a_second_start_of_the_watcher_keeps_the_mark_of_the_first() -> None:
    script = (
        "import os\n"
        "from rlhf_core.system import orphan_watcher\n"
        "orphan_watcher.start()\n"
        "mark = os.environ[orphan_watcher.MARK]\n"
        "orphan_watcher.start()\n"
        "print(mark == os.environ[orphan_watcher.MARK] != 'of an outer run')\n"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[3]),
        "ALIGNFLOW_RUN": "of an outer run",
    }
    printed = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert printed.stdout.split() == ["True"]


def test_the_watcher_ends_what_a_killed_run_had_started(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(
        "import pathlib, subprocess, sys, time\n"
        "from rlhf_core.system import orphan_watcher\n"
        "orphan_watcher.start()\n"
        "child = subprocess.Popen(['sleep', '120'], start_new_session=True)\n"
        f"pathlib.Path({str(tmp_path)!r}, 'pids').mkdir()\n"
        f"pathlib.Path({str(tmp_path)!r}, 'pids', str(child.pid)).touch()\n"
        "time.sleep(120)\n"
    )
    run = subprocess.Popen(
        [sys.executable, str(script)], env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    )
    wait_until(lambda: (tmp_path / "pids").exists() and alive(tmp_path), "the run to start")
    time.sleep(1)
    assert len(alive(tmp_path)) == 1, "the watcher ends nothing while the run lives"
    run.kill()
    run.wait()
    wait_until(lambda: not alive(tmp_path), "what the run had started to end", 60)
