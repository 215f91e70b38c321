"""Runs an evaluation, alignment_tax or drift stage: `python -m evaluation RUN_DIR`. Exit codes are those of `python -m rlhf_core`."""

from __future__ import annotations

import sys

from rlhf_core.__main__ import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "evaluation"))
