"""Runs the stage of one run directory, with or without Prefect: `python -m rlhf_core RUN_DIR`.

With `--wait KIND DESCRIPTOR` instead of RUN_DIR, imports the libraries that the kind needs, then reads the
run directory from an inherited pipe. Exit codes: 0 done; 2 wrong input (one line on stderr says what to
change); 3 a package is missing, or a GPU is too small (also with one line on stderr); 1 anything else, with a
traceback, or with one line if a node of the cluster was lost, or a loss, gradient norm or weight is not
finite. A ValueError counts as wrong input when our own code raised it; a ValueError from inside a library is
a failure.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from pydantic import ValidationError

from rlhf_core.config import KINDS
from rlhf_core.config.kinds import Kind
from rlhf_core.runs.prepared import WAIT, awaited
from rlhf_core.runs.run_dir import Outcome, RunDir, StageRequest, run_in_directory
from rlhf_core.system.gc_pause import uncollected
from rlhf_core.system.machine import MachineLacks, NodeLost, Unreachable, disk_problem, num_gpus
from rlhf_core.system.processes import (
    ENVIRONMENT,
    FAILED,
    OURS,
    WRONG_INPUT,
    age_of_this_process,
    end_process,
    raised_by_us,
)
from rlhf_core.system.proxies import bypass_loopback

ENV_DEFAULTS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Keep progress bars and developer warnings of libraries out of the stage's log.
    "TQDM_DISABLE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "RAY_COLOR_PREFIX": "0",
    # OpenMP threads spin only briefly while they wait: on a busy machine a spinning thread slows the one it
    # waits for.
    "GOMP_SPINCOUNT": "10000",
    "PYTHONWARNINGS": "ignore::FutureWarning,ignore::DeprecationWarning",
}
# Where there is no GPU: without the second PyTorch warns of how vLLM binds memory to NUMA nodes.
CPU_DEFAULTS = {"DS_ACCELERATOR": "cpu", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def main(argv: Sequence[str], package: str = "rlhf_core") -> int:
    """Runs the stage in `argv[0]`, whose module is in `package`. Returns the exit code."""
    waits = argv[:1] == [WAIT]
    if len(argv) != (3 if waits else 1):
        return _refuse("give one argument, the run directory", WRONG_INPUT)
    for key, value in (ENV_DEFAULTS | ({} if num_gpus() else CPU_DEFAULTS)).items():
        os.environ.setdefault(key, value)
    bypass_loopback()
    # PYTHONWARNINGS reaches only the processes this one starts
    warnings.simplefilter("ignore", FutureWarning)
    if waits:
        run_dir = _imported_first(argv[1], int(argv[2]))
        if run_dir is None:
            return 0
        argv = sys.argv[1:] = [run_dir]
    seconds_before = 0.0 if waits else age_of_this_process()
    try:
        request = RunDir(argv[0]).request()
    except (OSError, ValidationError) as error:
        return _refuse(
            f"{argv[0]} is no run directory: config.json: {str(error).splitlines()[0]}", WRONG_INPUT
        )
    kind = request.config.stage
    if KINDS[kind].package != package:
        ours = ", ".join(name for name, known in KINDS.items() if known.package == package)
        return _refuse(
            f"{argv[0]} is of kind {kind}, which this command does not do; it does {ours}", WRONG_INPUT
        )
    packages = {*OURS, KINDS[kind].module.partition(".")[0]}
    try:
        run_in_directory(argv[0], partial(_work, KINDS[kind]), seconds_before)
    except ModuleNotFoundError as error:
        missing = _missing_package(error)
        if missing is None or missing.split(".")[0] in packages:
            raise
        return _refuse(
            f"{kind} needs the package {missing}, which is not installed; install alignflow's extras",
            ENVIRONMENT,
        )
    except ValueError as error:
        if not raised_by_us(error, packages):
            raise
        return _refuse(" ".join(str(error).split()), WRONG_INPUT)
    except (MachineLacks, Unreachable) as error:
        return _refuse(str(error), ENVIRONMENT)
    except NodeLost as error:
        return _refuse(str(error), FAILED)
    except FloatingPointError as error:
        if not raised_by_us(error, packages):
            raise
        return _refuse(str(error), FAILED)
    except Exception as error:
        reason = disk_problem(error)
        if reason:
            return _refuse(
                f"{argv[0]} cannot be written to: {reason}, then run again: it resumes from its last"
                " checkpoint",
                ENVIRONMENT,
            )
        raise
    return 0


def _work(kind: Kind, request: StageRequest, run: RunDir) -> Outcome:
    """Imports the module of a kind of stage and runs it."""
    print(f"importing the libraries of {kind.shown_as}", flush=True)
    with uncollected():
        module = importlib.import_module(kind.module)
    outcome: Outcome = module.run(request, run)
    return outcome


def _imported_first(kind: str, descriptor: int) -> str | None:
    """Imports the libraries that a kind of stage needs, then returns the run directory read from a pipe
    (runs/prepared.py), or None."""
    os.set_inheritable(descriptor, False)
    with uncollected(), suppress(Exception):  # the stage reports what cannot be imported
        importlib.import_module(KINDS[kind].module)
    return awaited(descriptor)


def _missing_package(error: BaseException | None) -> str | None:
    """Returns the name of the module that could not be imported, or None if the error has another reason.
    transformers raises an error without the name, so the error's causes are searched too."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name:
            return error.name
        error = error.__cause__ or error.__context__
    return None


def _refuse(sentence: str, code: int) -> int:
    print(sentence, file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
