"""Checks what Prefect's logs of a run have of an error: a sentence where it is for the user, a traceback
where it is a fault."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from flows.serving.supervise import Failures
from rlhf_core.runs.launch import StageFailed
from rlhf_core.system.machine import MachineLacks
from tasks.run_log import shorten, without_tracebacks
from tasks.served import require_settings


def refuse() -> None:
    require_settings(SimpleNamespace(), ["=1"])  # type: ignore[arg-type]


def fill_disk() -> None:
    raise OSError(errno.ENOSPC, "No space left on device", "artifacts/t/report.html")


def lack() -> None:
    raise MachineLacks("there is no GPU")


def fault() -> None:
    raise KeyError("a bug")


def logged(
    logger: str, fail: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> list[logging.LogRecord]:
    """Returns what an error leaves in a log, which Prefect writes with these words."""
    log = logging.Logger(logger)
    log.addHandler(caplog.handler)
    log.addFilter(shorten)
    try:
        fail()
    except Exception as error:
        log.exception("Encountered exception during execution: %r", error)
    return caplog.records


@pytest.mark.parametrize(
    ("fail", "sentence"),
    [
        (refuse, "override '=1': write <stage>.<field>=<value>, for example"),
        (
            fill_disk,
            "artifacts/t/report.html cannot be written to: its disk is full; free some space, then run again",
        ),
        (lack, "there is no GPU"),
    ],
)
def test_errors_for_the_user_are_one_line(
    fail: Callable[[], None], sentence: str, caplog: pytest.LogCaptureFixture
) -> None:
    (record,) = logged("prefect.flow_runs", fail, caplog)
    assert record.getMessage().startswith(sentence)
    assert "\n" not in record.getMessage()
    assert record.exc_info is None


@pytest.mark.parametrize("fail", [refuse, fill_disk, lack])
def test_the_engine_does_not_repeat_them(fail: Callable[[], None], caplog: pytest.LogCaptureFixture) -> None:
    assert logged("prefect.engine", fail, caplog) == []


@pytest.mark.parametrize("logger", ["prefect.flow_runs", "prefect.engine"])
def test_faults_keep_their_traceback(logger: str, caplog: pytest.LogCaptureFixture) -> None:
    (record,) = logged(logger, fault, caplog)
    assert record.exc_info and "KeyError" in record.getMessage()


def test_the_last_line_of_a_run_does_not_repeat_wrong_input() -> None:
    def shown(text: str) -> bool:
        return shorten(
            logging.makeLogRecord({"name": "prefect.flow_runs", "levelno": logging.ERROR, "msg": text})
        )

    assert not shown(
        "Finished in state Failed('Flow run encountered an exception: ValueError: override seed.x: no')"
    )
    assert not shown("Finished in state Failed('Task run encountered an exception StageFailed: stage sft')")
    assert shown("Finished in state Failed('Flow run encountered an exception: KeyError: sft')")
    assert shown("Finished in state Completed()")


@pytest.mark.parametrize(("logger", "count"), [("prefect.task_runs", 1), ("prefect.flow_runs", 0)])
def test_a_failed_stage_is_said_once_and_its_log_is_not_repeated(
    logger: str, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise StageFailed("sft", 1, ("a line of its log",))

    told = [record.getMessage() for record in logged(logger, fail, caplog)]
    assert told == ["stage sft failed (exit code 1)"][:count]


def test_all_logs_of_runs_have_the_filter() -> None:
    names = ("prefect.flow_runs", "prefect.task_runs", "prefect.engine")
    before = {name: list(logging.getLogger(name).filters) for name in names}
    try:
        without_tracebacks()
        assert all(shorten in logging.getLogger(name).filters for name in names)
    finally:
        for name in names:
            logging.getLogger(name).filters[:] = before[name]


def test_serve_tells_each_failed_run_of_a_deployment_once() -> None:
    class Client:
        def read_flow_runs(self, flow_run_filter: Any, limit: int) -> list[Any]:
            assert flow_run_filter.end_time.after_ == since
            assert [str(one.value) for one in flow_run_filter.state.type.any_] == ["FAILED"]
            return runs

    def run(name: str, message: str, deployment: object) -> Any:
        return SimpleNamespace(
            id=uuid4(), name=name, deployment_id=deployment, state=SimpleNamespace(message=message)
        )

    since = datetime.now(UTC)
    failed = Failures(since)
    runs = [
        run("micro", "Flow run encountered an exception: ValueError: override loop.reward: no", 1),
        run("own", "x", None),
    ]
    assert failed.new(Client()) == ["run micro failed: override loop.reward: no"]  # type: ignore[arg-type]
    runs.append(run("later", "", 1))
    assert failed.new(Client()) == ["run later failed: see its log"]  # type: ignore[arg-type]


def test_the_engines_line_in_a_runs_log_does_not_repeat_wrong_input(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.Logger("prefect.flow_runs")
    log.addHandler(caplog.handler)
    log.addFilter(shorten)
    for fail in (refuse, fault):
        try:
            fail()
        except Exception:
            log.error("Engine execution exited with unexpected exception", exc_info=True)
    (record,) = caplog.records
    assert record.exc_info and "a bug" in str(record.exc_info[1])
