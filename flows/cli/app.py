"""Runs the command `alignflow`: maps names to commands and exceptions to exit codes.

Exit codes: 0 ok; 1 a stage or a gate failed; 2 wrong input (recipe, overrides, files, data); 3 the machine
or environment is not sufficient (CPUs, GPUs, keys, packages, a folder that cannot be written to); 4 a
person must approve a stage; 130 interrupted; 143 terminated. Commands import flows only when they run them,
so `validate` and `--dry-run` do not import Prefect.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from cyclopts import App, CycloptsError

from flows.cli import first_commands as cli_start
from flows.cli import loop_commands as cli_loops
from flows.cli import prepare as cli_prepare
from flows.cli import run_commands as cli_run
from flows.cli.operate import approve as cli_approve
from flows.cli.operate import champion_commands as cli_champion
from flows.cli.operate import dashboard as cli_dashboard
from flows.cli.operate import feedback_commands as cli_feedback
from flows.cli.operate import label as cli_label
from flows.cli.operate import suite_commands as cli_suite
from flows.cli.operate import trigger_commands as cli_triggers
from flows.cli.results import artifacts as cli_artifacts
from flows.cli.show import FAILED, INTERRUPTED, OK, WAITS, errors
from rlhf_core.recipe.gate_checks import ApprovalAwaited, GateFailed
from rlhf_core.runs.launch import SeveralFailed, StageFailed
from rlhf_core.runs.remote.remote_files import StoreFault
from rlhf_core.system.machine import MachineLacks, Unreachable, disk_problem
from rlhf_core.system.processes import ENVIRONMENT, WRONG_INPUT, raised_by_us

COMMANDS: dict[str, Callable[..., int]] = {
    "demo": cli_start.demo,
    "init": cli_start.init,
    "serve": cli_loops.serve,
    "serve-triggers": cli_triggers.serve_triggers,
    "run": cli_run.run,
    "stage": cli_run.stage,
    "validate": cli_prepare.validate,
    "plan": cli_prepare.forecast,
    "data": cli_prepare.data,
    "migrate": cli_prepare.migrate,
    "doctor": cli_prepare.doctor,
    "dashboard": cli_dashboard.dashboard,
    "approve": cli_approve.approve,
    "champion": cli_champion.champion,
    "promote": cli_champion.promote,
    "rollback": cli_champion.rollback,
    "report": cli_artifacts.report,
    "stages": cli_artifacts.stages,
    "diff": cli_artifacts.diff,
    "lineage": cli_artifacts.lineage,
    "gc": cli_artifacts.gc,
    "serve-reward": cli_artifacts.serve_reward,
    "leaderboard": cli_artifacts.leaderboard,
    "label": cli_label.label,
    "config-docs": cli_prepare.config_docs,
    "metrics-docs": cli_prepare.metrics_docs,
}


# errors whose messages are written for the user
TOLD = (MachineLacks, StoreFault, StageFailed, GateFailed, ApprovalAwaited)


def installed_version() -> str:
    """Returns the installed package's version, or "not installed"."""
    try:
        return version("alignflow")
    except PackageNotFoundError:
        return "not installed"


app = App(
    name="alignflow",
    help=(
        "Aligns a language model according to a recipe: SFT, reward model, PPO, iterative DPO, evaluation,"
        " publication.\n\nExit codes: 0 ok, 1 a stage or a gate failed, 2 wrong input, 3 machine or"
        " environment is not sufficient, 4 a person must approve a stage, 130 interrupted, 143 terminated."
    ),
    version=installed_version,
    suppress_keyboard_interrupt=False,  # `main` explains how to continue
)
app.command(cli_loops.loop_app)
app.command(cli_artifacts.runs_app)
app.command(cli_feedback.feedback_app)
app.command(cli_suite.suite_app)
for name, command in COMMANDS.items():
    app.command(command, name=name)


def code_of(error: Exception) -> int:
    """Returns the exit code for an error in TOLD; for several errors, the code of the first."""
    if isinstance(error, SeveralFailed):
        return code_of(error.errors[0])
    if isinstance(error, StageFailed):
        return error.code if error.code in (WRONG_INPUT, ENVIRONMENT) else FAILED
    if isinstance(error, ApprovalAwaited):
        return WAITS
    return ENVIRONMENT if isinstance(error, MachineLacks | StoreFault) else FAILED


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command, prints an error as one sentence, and returns the exit code. Other exceptions
    propagate."""
    try:
        result: Any = app(
            sys.argv[1:] if argv is None else argv,
            exit_on_error=False,
            print_error=False,
            result_action="return_value",
        )
        return result if isinstance(result, int) else OK
    except (CycloptsError, ValueError) as error:
        if not isinstance(error, CycloptsError) and not raised_by_us(error):
            raise
        errors.print(str(error), markup=False)
        return WRONG_INPUT
    except Unreachable as error:
        errors.print(str(error), markup=False)
        return ENVIRONMENT
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            errors.print(
                f"{str(error.filename)[:60]}...: this name is too long for a file or folder: correct it",
                markup=False,
            )
            return WRONG_INPUT
        reason = disk_problem(error)
        if not reason:
            raise
        errors.print(
            f"{error.filename or 'the artifacts folder'} cannot be written to: {reason}, then run again",
            markup=False,
        )
        return ENVIRONMENT
    except (MachineLacks, StoreFault, StageFailed, GateFailed, ApprovalAwaited, SeveralFailed) as error:
        if isinstance(error, SeveralFailed) and (
            strange := next((one for one in error.errors if not isinstance(one, TOLD)), None)
        ):
            raise strange from error
        errors.print(str(error), markup=False)
        return code_of(error)
    except KeyboardInterrupt:
        errors.print("interrupted; run the same command again to continue", markup=False)
        return INTERRUPTED
