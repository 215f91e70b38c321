"""Says which lines of a stage's process are for `log.txt` alone: notes of its libraries that nobody can act
on.

Where a library has a setting or logger for a note, that is used (`ENV_DEFAULTS` in rlhf_core/__main__.py,
rollout/environment.py). These are the others, and those of releases and processes that the settings do not
reach.
"""

from __future__ import annotations

import re

CODES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~])?")  # of terminals: colours, moves of the cursor
# before each line of Ray's other processes
RAY_PREFIX = re.compile(r"^\([^()]+ pid=\d+(, ip=[^()]+)?\)( |$)")
NOISE = re.compile(
    "|".join(
        (
            r"\s*$",
            r"\s+\[(state-dump|\d{4}-\S+ \S+ \w \d+ \d+\] \(raylet\))",  # Ray repeats a raylet's log
            r"\[Gloo\] Rank \d+ is connected to ",
            r"\[W\S* .*Warning: NUMA binding: ",
            r"\[\S+ \S+\] \[\w+\] \[real_accelerator\.py:.*\] Setting (ds_)?accelerator to ",
            r".*Triton is installed(, but doesn't include CPU backend| but \d+ active driver)",
            r".*Triton not installed or not compatible",
            r"(INFO|WARNING) \S+ \S+ \[[\w./]+:\d+\] The global random seed is set to ",
            r"The global random seed is set to ",
            # progress bars: of shards that are loaded, of CUDA graphs
            r"[\w ,()-]+: *\d+%( Completed)? ?\|.*(it/s|s/it|\?)",
        )
    )
)


def plain(line: str) -> str:
    """Returns a line without codes of terminals, such as those of colours."""
    return CODES.sub("", line)


def is_noise(line: str) -> bool:
    """Returns whether a line, without codes of terminals, says nothing to whoever watches the stage."""
    return NOISE.match(RAY_PREFIX.sub("", line)) is not None
