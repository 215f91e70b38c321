"""Creates an empty Prefect database once and copies it for new users. Prefect itself would run over a hundred
migrations, which takes seconds.

`python -m tasks.fresh_database` creates the database for this environment, with Prefect's empty tables; `make
setup` runs it. Without this database, or if Prefect is configured to use one other than `prefect.db` in its
home, Prefect creates its own.
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

NAME = "prefect.db"
MAKE_SECONDS = 600.0


def template() -> Path:
    """Returns the path of this environment's empty database; the path depends on Prefect's version."""
    return Path(sys.prefix) / "share" / "alignflow" / f"prefect-{version('prefect')}.db"


def make(path: Path) -> None:
    """Creates an empty database with Prefect's own command. Raises RuntimeError with the command's output
    on failure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / NAME
        whole = Path(folder) / "whole.db"
        settings = {
            "PREFECT_HOME": folder,
            "PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{made}",
        }
        command = [sys.executable, "-P", "-m", "prefect", "server", "database", "upgrade", "--yes"]
        done = subprocess.run(
            command, env=os.environ | settings, capture_output=True, text=True, timeout=MAKE_SECONDS
        )
        if done.returncode:
            raise RuntimeError(
                f"Prefect could not create an empty database: {(done.stdout + done.stderr).strip()[-2000:]}"
            )
        with closing(sqlite3.connect(made)) as database:
            database.execute("VACUUM INTO ?", (str(whole),))  # one file, without a write-ahead log
        os.replace(whole, path)


def lay_database() -> None:
    """Copies the empty database to Prefect's home. Leaves an existing database and all its files
    unchanged."""
    # Imported here because `make`, which setup waits for, needs no settings.
    from prefect.settings import PREFECT_API_DATABASE_CONNECTION_URL, PREFECT_HOME

    home = PREFECT_HOME.value()
    ours = PREFECT_API_DATABASE_CONNECTION_URL.value() == f"sqlite+aiosqlite:///{home}/{NAME}"
    if not ours or not template().is_file() or any(home.glob(f"{NAME}*")):
        return
    part = home / f".{NAME}.{os.getpid()}"
    try:
        home.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(template(), part)
        part.chmod(0o600)  # it will hold the names and parameters of runs
        os.link(part, home / NAME)  # fails if another process has just created one
    except OSError:  # Prefect creates its own
        return
    finally:
        with contextlib.suppress(OSError):
            part.unlink()


if __name__ == "__main__":
    make(template())
