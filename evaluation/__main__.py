"""The process of an evaluation stage: `python -m evaluation RUN_DIR`.

Exit code 0: done (or done before); 2: something the user can mend, told in one line on stderr; 1: anything else, with a traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rlhf_core.stage import REQUEST, run_stage


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1 or not (Path(arguments[0]) / REQUEST).is_file():
        print(f"usage: python -m evaluation RUN_DIR, where RUN_DIR holds a {REQUEST}", file=sys.stderr)
        return 2
    from evaluation.run import run

    try:
        run_stage(arguments[0], run)
    except ValueError as error:
        if "\n" in str(error):  # not one of ours, which are sentences for the user
            raise
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
