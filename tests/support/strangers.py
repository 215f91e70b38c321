"""Another user of this machine."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

NOBODY = 65534
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another user")


def as_nobody(code: str, *arguments: str) -> str:
    """Runs Python code as another user, without this process's environment. Returns the class of the
    exception that ended it, or `allowed`."""
    become = f"os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})"
    attack = (
        f"try:\n    {code}\nexcept Exception as error:\n    print(type(error).__name__)\nelse:\n   "
        " print('allowed')\n"
    )
    command = [sys.executable, "-I", "-S", "-c", f"import os, sys\n{become}\n{attack}", *arguments]
    done = subprocess.run(command, env={}, cwd="/", capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
