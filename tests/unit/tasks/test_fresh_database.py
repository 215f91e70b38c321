"""Copies a ready Prefect database to a new home, and never over or beside another one."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_DATABASE_CONNECTION_URL, PREFECT_HOME, temporary_settings

from tasks import fresh_database
from tasks.fresh_database import lay_database, make

MADE = b"what setup made"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Prefect's home, which is not there yet; the database that setup made is `MADE`."""
    (tmp_path / "template.db").write_bytes(MADE)
    monkeypatch.setattr(fresh_database, "template", lambda: tmp_path / "template.db")
    with temporary_settings(
        {PREFECT_HOME: tmp_path / "home"}, restore_defaults=[PREFECT_API_DATABASE_CONNECTION_URL]
    ):
        yield tmp_path / "home"


def test_a_new_home_gets_the_one_that_setup_made(home: Path) -> None:
    lay_database()
    assert [(path.name, path.read_bytes()) for path in home.iterdir()] == [("prefect.db", MADE)]
    assert (home / "prefect.db").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("name", ["prefect.db", "prefect.db-wal"])
def test_what_is_there_stays_as_it_is(home: Path, name: str) -> None:
    home.mkdir()
    (home / name).write_bytes(b"another")
    lay_database()
    assert [(path.name, path.read_bytes()) for path in home.iterdir()] == [(name, b"another")]


def test_nothing_is_put_where_prefect_does_not_look(home: Path) -> None:
    with temporary_settings({PREFECT_API_DATABASE_CONNECTION_URL: f"sqlite+aiosqlite:///{home}/other.db"}):
        lay_database()
    assert not home.exists()


def test_without_one_prefect_makes_its_own(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fresh_database, "template", lambda: home / "none.db")
    lay_database()
    assert not home.exists()


def test_one_that_another_process_makes_meanwhile_wins(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def copy(source: Path, target: Path) -> None:
        target.write_bytes(source.read_bytes())
        (home / "prefect.db").write_bytes(b"another")

    monkeypatch.setattr(fresh_database.shutil, "copyfile", copy)
    lay_database()
    assert [(path.name, path.read_bytes()) for path in home.iterdir()] == [("prefect.db", b"another")]


@pytest.mark.long
def test_prefect_has_nothing_to_add_to_it(tmp_path: Path) -> None:
    made = tmp_path / "prefect.db"
    make(made)
    assert [path.name for path in tmp_path.iterdir()] == ["prefect.db"]
    before = tables(made)
    assert before["alembic_version"] == 1 and before["flow_run"] == 0
    settings = {
        "PREFECT_HOME": str(tmp_path),
        "PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{made}",
    }
    command = [sys.executable, "-m", "prefect", "server", "database", "upgrade", "--yes"]
    subprocess.run(command, env=os.environ | settings, check=True, capture_output=True, timeout=100)
    assert tables(made) == before


def tables(path: Path) -> dict[str, int]:
    """Returns the number of rows of each table; 0 for an index."""
    with closing(sqlite3.connect(path)) as database:
        names = [(kind, name) for kind, name in database.execute("SELECT type, name FROM sqlite_master")]
        return {
            name: database.execute(f'SELECT count(*) FROM "{name}"').fetchone()[0] if kind == "table" else 0
            for kind, name in names
        }
