"""A new user's Prefect database, made once and copied: Prefect makes an empty one by more than a hundred migrations, which takes seconds.

`python -m tasks.fresh_database` makes the one of this environment, with nothing in it but Prefect's tables; `make setup` runs it. Where it
is missing, or Prefect is set up for another place than `prefect.db` in its home, Prefect does what it always does.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import closing
from importlib.metadata import version
from pathlib import Path

from prefect.settings import PREFECT_API_DATABASE_CONNECTION_URL, PREFECT_HOME

NAME = "prefect.db"
MAKE_SECONDS = 600.0


def template() -> Path:
    """Where this environment keeps it; each version of Prefect has its own tables."""
    return Path(sys.prefix) / "share" / "alignflow" / f"prefect-{version('prefect')}.db"


def make(path: Path) -> None:
    """Makes an empty database with Prefect's own command. RuntimeError with what that said when it failed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made, whole = Path(folder) / NAME, Path(folder) / "whole.db"
        settings = {"PREFECT_HOME": folder, "PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{made}"}
        command = [sys.executable, "-m", "prefect", "server", "database", "upgrade", "--yes"]
        done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, timeout=MAKE_SECONDS)
        if done.returncode:
            raise RuntimeError(f"Prefect could not make an empty database: {(done.stdout + done.stderr).strip()[-2000:]}")
        with closing(sqlite3.connect(made)) as database:
            database.execute("VACUUM INTO ?", (str(whole),))  # one file, without a log beside it
        os.replace(whole, path)


def lay_database() -> None:
    """Copies it to where Prefect would make one now. An existing database, or what is left of one, stays as it is."""
    home = PREFECT_HOME.value()
    ours = PREFECT_API_DATABASE_CONNECTION_URL.value() == f"sqlite+aiosqlite:///{home}/{NAME}"
    if not ours or not template().is_file() or any(home.glob(f"{NAME}*")):
        return
    part = home / f".{NAME}.{os.getpid()}"
    try:
        home.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(template(), part)
        os.link(part, home / NAME)  # refuses where another process has made one in the meantime
    except OSError:  # then Prefect makes its own
        return
    finally:
        with contextlib.suppress(OSError):
            part.unlink()


if __name__ == "__main__":
    make(template())
