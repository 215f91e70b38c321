"""Identifies the output lines of a stage's process that go only to `log.txt`: library messages that nobody
can act on.

Messages that a library's setting or logger can silence are silenced that way (`ENV_DEFAULTS` in
rlhf_core/__main__.py, rollout/vllm/environment.py). This module handles the rest, and releases and
processes that the settings do not reach.
"""

from __future__ import annotations

import re

CODES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~])?")  # terminal codes: colours, cursor movements
# prefix of lines from Ray's other processes
RAY_PREFIX = re.compile(r"^\([^()]+ pid=\d+(, ip=[^()]+)?\)( |$)")
NOISE = re.compile(
    "|".join(
        (
            r"\s*$",
            r"\s+\[(state-dump|\d{4}-\S+ \S+ \w \d+ \d+\] \(raylet\))",  # Ray repeats the raylet's log
            r"\[Gloo\] Rank \d+ is connected to ",
            r"\[W\S* .*Warning: NUMA binding: ",
            r"\[\S+ \S+\] \[\w+\] \[real_accelerator\.py:.*\] Setting (ds_)?accelerator to ",
            r".*Triton is installed(, but doesn't include CPU backend| but \d+ active driver)",
            r".*Triton not installed or not compatible",
            r"(INFO|WARNING) \S+ \S+ \[[\w./]+:\d+\] The global random seed is set to ",
            r"The global random seed is set to ",
            # progress bars for loading shards and capturing CUDA graphs
            r"[\w ,()-]+: *\d+%( Completed)? ?\|.*(it/s|s/it|\?)",
        )
    )
)


def plain(line: str) -> str:
    """Returns a line without terminal codes, such as colours."""
    return CODES.sub("", line)


def is_noise(line: str) -> bool:
    """Returns whether a line, without terminal codes, is of no use to whoever watches the stage."""
    return NOISE.match(RAY_PREFIX.sub("", line)) is not None
