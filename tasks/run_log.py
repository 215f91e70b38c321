"""Removes the tracebacks of errors whose message is meant for the user from Prefect's run logs."""

from __future__ import annotations

import logging
import re
from typing import get_args

import httpx

from rlhf_core.recipe.gate_checks import ApprovalAwaited, GateFailed
from rlhf_core.runs.launch import SeveralFailed, StageFailed
from rlhf_core.runs.remote.remote_files import StoreFault
from rlhf_core.system.machine import MachineLacks, disk_problem
from rlhf_core.system.processes import raised_by_us

TOLD = (
    StageFailed | GateFailed | ApprovalAwaited | SeveralFailed | StoreFault | MachineLacks | httpx.HTTPError
)
# Prefect's last line about a run or stage that failed with one of these errors; it repeats the previous
# sentence.
_KINDS = "|".join(("ValueError", *(kind.__name__ for kind in get_args(TOLD) if kind is not httpx.HTTPError)))
REPEATED = re.compile(
    rf"Finished in state Failed\(['\"](Flow|Task) run encountered an exception:? ({_KINDS})"
)
FLOWS = "prefect.flow_runs"
# Two more sources that repeat the sentence: all messages of one logger, and a line in the log of a
# deployment's run.
ENGINE = "prefect.engine"
OF_ENGINE = "Engine execution exited"


def without_tracebacks() -> None:
    """Adds `shorten` as a filter to the logs of this process's flows and tasks."""
    for name in (FLOWS, "prefect.task_runs", ENGINE):
        logging.getLogger(name).addFilter(shorten)


def shorten(record: logging.LogRecord) -> bool:
    """Reduces log records about failed stages and gates, wrong input and a full disk to the sentence, without
    a traceback. Also removes the traceback from server errors.

    Returns False, which drops the record, if the sentence has already been logged, and for Prefect's messages
    about our hooks below the level of warnings.
    """
    if "ook 'notify_state'" in record.getMessage():
        return record.levelno > logging.INFO
    if REPEATED.match(record.getMessage()):
        return False
    error = record.exc_info[1] if record.exc_info else None
    if error is None:
        return True
    repeats = record.name == ENGINE or record.getMessage().startswith(OF_ENGINE)
    problem = None if isinstance(error, TOLD) else disk_problem(error)
    if problem:
        place = getattr(error, "filename", None) or "the artifacts folder"
        record.msg = "%s cannot be written to: %s, then run again"
        record.args = (place, problem)
    elif isinstance(error, ValueError) and raised_by_us(error):
        record.msg = "%s"
        record.args = (str(error),)
    elif isinstance(error, StageFailed):
        record.msg = "%s"
        record.args = (error.summary,)
        repeats = repeats or record.name == FLOWS  # the stage's own line has already been logged
    elif isinstance(error, httpx.HTTPError):
        pass
    elif isinstance(error, TOLD):
        record.msg = "%s"
        record.args = (str(error),)
    else:
        return True
    record.exc_info = None
    return not repeats
