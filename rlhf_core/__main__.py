"""`python -m rlhf_core RUN_DIR`: does the work of one run directory, with or without Prefect around it.

Exit codes: 0 done; 2 wrong input (one line on stderr says what to change); 3 a package is missing; 1 anything else, with a traceback.
A ValueError counts as wrong input when our own code raised it; one from inside a library is a failure.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Mapping, Sequence

from pydantic import ValidationError

from rlhf_core.garbage import uncollected
from rlhf_core.launch import ENVIRONMENT, OURS, WRONG_INPUT, raised_by_us
from rlhf_core.machine import no_room, num_gpus
from rlhf_core.stage import RunDir, run_stage

WORK = {
    "sft": "rlhf_core.sft",
    "reward_model": "rlhf_core.reward_model",
    "dpo": "rlhf_core.dpo",
    "kto": "rlhf_core.kto",
    "preferences": "rlhf_core.preferences",
    "ppo": "rlhf_core.ppo.start",
    "publication": "rlhf_core.hub",
}
ENV_DEFAULTS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # A stage's log tells of its work: no progress bars of libraries, no notes to their developers.
    "TQDM_DISABLE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # Threads that wait stop spinning soon: on a machine that does something else too, a spinning thread holds up the one it waits for.
    "GOMP_SPINCOUNT": "10000",
    "PYTHONWARNINGS": "ignore::FutureWarning,ignore::DeprecationWarning",
}


def main(argv: Sequence[str], work: Mapping[str, str] = WORK) -> int:
    """Runs the stage in `argv[0]` with the module that `work` names for its kind. Returns the exit code."""
    if len(argv) != 1:
        return _refuse("give one argument, the run directory", WRONG_INPUT)
    for key, value in ENV_DEFAULTS.items():
        os.environ.setdefault(key, value)
    warnings.simplefilter("ignore", FutureWarning)  # PYTHONWARNINGS reaches only the processes this one starts
    if num_gpus() == 0:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        request = RunDir(argv[0]).request()
    except (OSError, ValidationError) as error:
        return _refuse(f"{argv[0]} is no run directory: config.json: {str(error).splitlines()[0]}", WRONG_INPUT)
    kind = request.config.stage
    if kind not in work:
        return _refuse(f"{argv[0]} is of kind {kind}, which this command does not do; it does {', '.join(work)}", WRONG_INPUT)
    try:
        with uncollected():
            module = importlib.import_module(work[kind])
        run_stage(argv[0], module.run)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in OURS:
            raise
        return _refuse(f"{kind} needs the package {error.name}, which is not installed; install alignflow's extras", ENVIRONMENT)
    except ValueError as error:
        if not raised_by_us(error):
            raise
        return _refuse(" ".join(str(error).split()), WRONG_INPUT)
    except Exception as error:
        if reason := no_room(error):
            return _refuse(f"{argv[0]} cannot be written to: {reason}, then run again: it goes on from its last checkpoint", ENVIRONMENT)
        raise
    return 0


def _refuse(sentence: str, code: int) -> int:
    print(sentence, file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
