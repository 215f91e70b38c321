"""Stores feedback in a folder `NAME.inbox`, in an SQLite database whose rows are added but not changed.
Torch-free.

Deletion replaces a row with a tombstone, which keeps the row's number and identity, so that it is not
imported again. Several processes may add rows. Each row is on disk before `add` returns.
"""

from __future__ import annotations

import errno
import os
import secrets
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from rlhf_core.feedback.feedback_records import Feedback
from rlhf_core.system.files import locked

SUFFIX = ".inbox"
FILE = "feedback.sqlite"
LOCK = ".lock"
WAIT_SECONDS = 60.0  # how long to wait for another writer
TABLES = """
CREATE TABLE rows (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, identity TEXT NOT NULL UNIQUE,
    about TEXT, opinion TEXT, kind TEXT, annotator TEXT, body TEXT
);
CREATE INDEX by_about ON rows (about, opinion);
CREATE INDEX by_annotator ON rows (annotator);
CREATE TABLE about (id TEXT NOT NULL);
"""


class Added(NamedTuple):
    """Counts of the rows given to `add`: new rows, and rows already present or deleted."""

    new: int
    duplicate: int


class NumberedRow(NamedTuple):
    """A row and its number. Numbers only increase."""

    seq: int
    row: Feedback


class Inbox:
    """The rows in one folder, which is created with the first row and accessible only to its owner. Methods
    raise ValueError when the database cannot be read.

    `folder` is the real path, which does not depend on the working directory.
    """

    def __init__(self, folder: Path):
        if folder.suffix != SUFFIX:
            raise ValueError(
                f"{folder}: an inbox is a folder whose name ends with {SUFFIX}: give one, such as"
                f" {folder}{SUFFIX}"
            )
        self.folder = Path(os.path.realpath(folder))
        self._file = self.folder / FILE

    @property
    def exists(self) -> bool:
        return self._file.is_file()

    @cached_property
    def id(self) -> str:
        """Returns 16 hex digits that were generated with the inbox. A new inbox in the same place has a
        different id, and its row numbers start over."""
        with closing(self._open()) as database:
            return str(database.execute("SELECT id FROM about").fetchone()[0])

    def changing(self) -> AbstractContextManager[bool]:
        """Holds the lock for writing or deleting copies of rows. Yields whether it was acquired within
        WAIT_SECONDS."""
        return locked(self.folder / LOCK, WAIT_SECONDS)

    def add(self, rows: Sequence[Feedback]) -> Added:
        """Adds rows in one transaction, skipping rows whose identity is already present. Returns the counts
        of new and skipped rows. When the disk is full, adds no rows and raises OSError."""
        self._make()
        values = [
            (row.identity(), row.about(), row.opinion(), row.kind, row.annotator, row.model_dump_json())
            for row in rows
        ]
        try:
            with closing(self._open()) as database, database:
                before = database.total_changes
                database.executemany(
                    "INSERT OR IGNORE INTO rows (identity, about, opinion, kind, annotator, body) VALUES"
                    " (?,?,?,?,?,?)",
                    values,
                )
                new = database.total_changes - before
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_FULL:
                raise
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._file)) from error
        return Added(new, len(rows) - new)

    def rows(self, kinds: Iterable[str], after: int = 0, until: int | None = None) -> Iterator[NumberedRow]:
        """Yields the rows of these kinds with numbers above `after` and at most `until`, in order, skipping
        deleted rows."""
        if not self.exists:
            return
        wanted = tuple(kinds)
        those = f"seq > ? AND seq <= ? AND body IS NOT NULL AND kind IN ({_marks(wanted)})"
        query = f"SELECT seq, body FROM rows WHERE {those} ORDER BY seq"  # noqa: S608
        with closing(self._open()) as database:
            for seq, body in database.execute(
                query, (after, self.end() if until is None else until, *wanted)
            ):
                yield NumberedRow(seq, Feedback.model_validate_json(body))

    def count(self, kinds: Iterable[str], after: int = 0) -> int:
        """Returns how many rows of these kinds have numbers above `after`, not counting deleted rows."""
        if not self.exists:
            return 0
        wanted = tuple(kinds)
        query = f"SELECT count(*) FROM rows WHERE seq > ? AND body IS NOT NULL AND kind IN ({_marks(wanted)})"  # noqa: S608
        with closing(self._open()) as database:
            return int(database.execute(query, (after, *wanted)).fetchone()[0])

    def end(self) -> int:
        """Returns the number of the newest row; 0 if there is none."""
        if not self.exists:
            return 0
        with closing(self._open()) as database:
            return int(database.execute("SELECT coalesce(max(seq), 0) FROM rows").fetchone()[0])

    def kinds(self) -> Counter[str]:
        """Returns the number of rows of each kind; `deleted` counts tombstones."""
        if not self.exists:
            return Counter()
        with closing(self._open()) as database:
            return Counter(
                dict(database.execute("SELECT coalesce(kind, 'deleted'), count(*) FROM rows GROUP BY 1"))
            )

    def contradictions(self) -> int:
        """Returns the number of answers, or sets of answers, about which rows hold different opinions. Edits
        are not counted."""
        if not self.exists:
            return 0
        differing = (
            "SELECT about FROM rows WHERE about IS NOT NULL AND kind != 'edit' GROUP BY about HAVING"
            " count(DISTINCT opinion) > 1"
        )
        with closing(self._open()) as database:
            return int(database.execute(f"SELECT count(*) FROM ({differing})").fetchone()[0])  # noqa: S608

    def delete(self, annotator: str) -> list[int]:
        """Turns one person's rows into tombstones and returns their numbers. Their bytes are overwritten in
        the file."""
        if not self.exists:
            return []
        with closing(self._open()) as database:
            with database:
                gone = [
                    seq
                    for (seq,) in database.execute(
                        "SELECT seq FROM rows WHERE annotator = ? ORDER BY seq", (annotator,)
                    )
                ]
                database.execute(
                    "UPDATE rows SET about = NULL, opinion = NULL, kind = NULL, annotator = NULL, body = NULL"
                    " WHERE annotator = ?",
                    (annotator,),
                )
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            database.execute("VACUUM")
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return gone

    def _make(self) -> None:
        """Creates the database. It gets its name once it is complete, so other processes never see a partial
        one."""
        if self.exists:
            return
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        self.folder.mkdir(mode=0o700, exist_ok=True)
        with self.changing() as ours:
            if not ours or self.exists:
                return
            new = self._file.with_name(f".{FILE}.{os.getpid()}")
            new.unlink(missing_ok=True)
            with closing(sqlite3.connect(new)) as database:
                database.execute("PRAGMA journal_mode = WAL")
                database.executescript(TABLES)
                with database:
                    database.execute("INSERT INTO about VALUES (?)", (secrets.token_hex(8),))
            os.replace(new, self._file)

    def _open(self) -> sqlite3.Connection:
        try:
            database = sqlite3.connect(f"{self._file.as_uri()}?mode=rw", timeout=WAIT_SECONDS, uri=True)
            database.execute("PRAGMA synchronous = FULL")
            database.execute("PRAGMA secure_delete = ON")
            database.execute("SELECT 1 FROM rows, about LIMIT 1")
        except sqlite3.DatabaseError as error:
            raise ValueError(
                f"{self._file}: cannot be read ({error}): restore it from a copy, or move it away to begin a"
                " new inbox"
            ) from None
        return database


def _marks(values: Sequence[str]) -> str:
    return ", ".join("?" * len(values))
