"""Lets the torchvision in a folder be imported without its operators, whose build for CUDA a CPU torch cannot
load. Usage: python requirements/torchvision_without_operators.py FOLDER

torchvision 0.28 and 0.29 describe two operators to torch.compile even where they are missing, which fails.
This guards both, as torchvision guards the others. Once a release guards them all, nothing is left to change.
"""

import os
import sys
from pathlib import Path

OPERATORS = ("nms", "qnms")
GUARD = " if torchvision.extension._has_ops() else lambda function: function"


def guarded(source: str) -> str:
    """Returns `torchvision/_meta_registrations.py` with the descriptions of both operators guarded."""
    for operator in OPERATORS:
        described = f'torch.library.register_fake("torchvision::{operator}")'
        source = source.replace(f"@{described}\n", f"@({described}{GUARD})\n")
    return source


if __name__ == "__main__":
    file = Path(sys.argv[1]) / "torchvision" / "_meta_registrations.py"
    changed = file.with_suffix(".changed")  # not in place: uv may have linked the file to its cache
    changed.write_text(guarded(file.read_text()))
    os.replace(changed, file)
