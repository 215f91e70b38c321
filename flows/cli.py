"""The command `alignflow`.

Exit codes: 0 ok; 1 a stage or a gate failed; 2 wrong input (recipe, overrides, files, data); 3 the machine or environment is not
enough (CPUs, GPUs, keys, packages, a folder that cannot be written to); 130 interrupted; 143 terminated.
Flows are imported where they are run: `validate` and `--dry-run` need no Prefect.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from cyclopts import App, CycloptsError

from flows import cli_artifacts, cli_loops, cli_models, cli_prepare, cli_run
from flows.terminal import FAILED, INTERRUPTED, OK, errors
from rlhf_core.check import MachineLacks
from rlhf_core.gates import GateFailed
from rlhf_core.launch import ENVIRONMENT, WRONG_INPUT, StageFailed, raised_by_us
from rlhf_core.machine import no_room
from rlhf_core.remote_files import StoreFault

COMMANDS: dict[str, Callable[..., int]] = {
    "serve": cli_loops.serve,
    "run": cli_run.run,
    "stage": cli_run.stage,
    "validate": cli_prepare.validate,
    "plan": cli_prepare.forecast,
    "data": cli_prepare.data,
    "migrate": cli_prepare.migrate,
    "doctor": cli_prepare.doctor,
    "report": cli_artifacts.report,
    "runs": cli_artifacts.runs,
    "diff": cli_artifacts.diff,
    "lineage": cli_artifacts.lineage,
    "gc": cli_artifacts.gc,
    "serve-reward": cli_models.serve_reward,
    "pull": cli_models.pull,
    "leaderboard": cli_models.leaderboard,
    "config-docs": cli_prepare.config_docs,
}


def installed_version() -> str:
    try:
        return version("alignflow")
    except PackageNotFoundError:
        return "not installed"


app = App(
    name="alignflow",
    help="Aligns a language model by a recipe: SFT, reward model, PPO, iterative DPO, evaluation, publication.\n\n"
    "Exit codes: 0 ok, 1 a stage or a gate failed, 2 wrong input, 3 machine or environment is not enough, 130 interrupted.",
    version=installed_version,
)
app.command(cli_loops.loop_app)
for name, command in COMMANDS.items():
    app.command(command, name=name)


def main(argv: Sequence[str] | None = None) -> int:
    """The command: runs, tells what went wrong in one sentence, returns the exit code."""
    try:
        result: Any = app(sys.argv[1:] if argv is None else argv, exit_on_error=False, print_error=False, result_action="return_value")
        return result if isinstance(result, int) else OK
    except (CycloptsError, ValueError) as error:
        if not isinstance(error, CycloptsError) and not raised_by_us(error):
            raise
        errors.print(str(error), markup=False)
        return WRONG_INPUT
    except (MachineLacks, StoreFault) as error:
        errors.print(str(error), markup=False)
        return ENVIRONMENT
    except OSError as error:
        if not (reason := no_room(error)):
            raise
        errors.print(f"{error.filename or 'the artifacts folder'} cannot be written to: {reason}, then run again", markup=False)
        return ENVIRONMENT
    except StageFailed as error:
        errors.print(str(error), markup=False)
        return error.code if error.code in (WRONG_INPUT, ENVIRONMENT) else FAILED
    except GateFailed as error:
        errors.print(str(error), markup=False)
        return FAILED
    except KeyboardInterrupt:
        errors.print("interrupted; run the same command again to go on", markup=False)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
