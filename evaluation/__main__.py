"""Runs a stage of this package, such as an evaluation: `python -m evaluation RUN_DIR`. Exit codes match
`python -m rlhf_core`."""

from __future__ import annotations

import sys

from rlhf_core.__main__ import main
from rlhf_core.system.processes import end_process

if __name__ == "__main__":
    end_process(main(sys.argv[1:], "evaluation"))
