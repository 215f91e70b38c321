"""Reads and writes files below a URL through fsspec, with retries, and reports each failure in one sentence.
Torch-free.

The URL's client reads keys from the environment (boto's variables and profiles for s3://); they are never
shown.
"""

from __future__ import annotations

import functools
import os
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import fsspec
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_exponential

from rlhf_core.runs.allotment import check_stop
from rlhf_core.runs.launch import SECRET_NAME
from rlhf_core.system.machine import DISK_PROBLEMS

T = TypeVar("T")
ATTEMPTS = 5
PAUSE = 1.0  # attempts for one file; seconds before the second, doubled each time
LASTING = (FileNotFoundError, PermissionError, NotADirectoryError, ImportError)
NO_KEYS = {
    "NoCredentialsError",
    "PartialCredentialsError",
    "CredentialRetrievalError",
    "ProfileNotFound",
    "TokenRetrievalError",
}
NO_WAY = {
    "ConnectionError",
    "TimeoutError",
    "ConnectTimeoutError",
    "ReadTimeoutError",
    "ConnectionClosedError",
    "ClientConnectionError",
}


class StoreFault(RuntimeError):
    """Raised when the store cannot be used, or its copy of a stage is damaged. The message is one sentence
    with the fault, its reason and the remedy. Local results are kept."""


@dataclass(frozen=True)
class RemoteFiles:
    """Files below `url`; each `place` is a path relative to it. Every method raises StoreFault when its last
    attempt fails."""

    url: str
    attempts: int = ATTEMPTS
    pause: float = PAUSE

    def probe(self) -> None:
        """Checks access: writes a small file, reads it, deletes it."""

        def call() -> None:
            place = self._at(f".probe-{uuid.uuid4().hex}")
            self._system.pipe_file(place, b"alignflow")
            self._system.cat_file(place)
            self._system.rm_file(place)

        self._try("nothing can be written", call)

    def read(self, place: str) -> bytes | None:
        """Returns the contents of a small file; None when it does not exist."""
        return self._try(f"{place} cannot be read", lambda: self._system.cat_file(self._at(place)), None)

    def write(self, content: bytes, place: str) -> None:
        """Writes a small file."""
        self._try(f"{place} cannot be written", lambda: self._system.pipe_file(self._at(place), content))

    def send(self, file: Path, place: str) -> None:
        """Copies a local file to the store."""
        self._try(f"{place} cannot be written", lambda: self._system.put_file(str(file), self._at(place)))

    def get(self, place: str, file: Path) -> None:
        """Copies a file from the store to the local path `file`."""
        file.parent.mkdir(parents=True, exist_ok=True)
        self._try(f"{place} cannot be fetched", lambda: self._system.get_file(self._at(place), str(file)))

    def remove(self, place: str) -> None:
        """Removes a file, or a folder with its contents, if it exists."""
        self._try(
            f"{place} cannot be removed", lambda: self._system.rm(self._at(place), recursive=True), None
        )

    def names(self, place: str) -> list[str]:
        """Returns the names directly in a folder; empty when it does not exist."""
        paths: list[Any] = self._try(
            f"{place} cannot be listed", lambda: self._system.ls(self._at(place), detail=False), []
        )
        return [str(path).rstrip("/").rpartition("/")[2] for path in paths]

    @functools.cached_property
    def _place(self) -> tuple[Any, str]:
        local = "://" not in self.url or self.url.startswith(("file:", "local:"))
        system, root = fsspec.core.url_to_fs(
            self.url, use_listings_cache=False, **({"auto_mkdir": True} if local else {})
        )
        return system, str(root).rstrip("/")

    @property
    def _system(self) -> Any:
        return self._place[0]

    def _at(self, place: str) -> str:
        return f"{self._place[1]}/{place}"

    def _try(self, what: str, call: Callable[[], T], *missing: T) -> T:
        """Calls `call` until it succeeds or the attempts are used up. Returns `missing`, if given, when the
        file does not exist. Raises Stopped for the same reasons as `check_stop`, so copying many files stops
        after the current one."""
        check_stop()
        pauses = wait_exponential(multiplier=self.pause)
        try:
            return Retrying(
                stop=stop_after_attempt(self.attempts),
                wait=pauses,
                retry=retry_if_exception(_may_pass),
                reraise=True,
            )(call)
        except Exception as error:  # each fsspec backend raises its own classes for network errors
            if missing and isinstance(error, FileNotFoundError | NotADirectoryError):
                return missing[0]
            raise StoreFault(f"store {self.url}: {what}: {why(error)}") from None


def _may_pass(error: BaseException) -> bool:
    """Returns whether another attempt may succeed."""
    lasting = (
        isinstance(error, LASTING)
        or getattr(error, "errno", None) in DISK_PROBLEMS
        or NO_KEYS & _names(error)
    )
    return isinstance(error, Exception) and not lasting


def why(error: BaseException) -> str:
    """Returns the reason for a failure and what to do, without keys."""
    if isinstance(error, ImportError):
        return "its client is not installed; for s3:// install alignflow's extra `s3`"
    if NO_KEYS & _names(error):
        return "there are no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
    if isinstance(error, OSError) and error.errno in DISK_PROBLEMS:
        return DISK_PROBLEMS[error.errno]
    if isinstance(error, PermissionError):
        return "access is refused; check credentials, and that they may read, write, list and delete"
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return "there is no such bucket or folder; make it, or correct the name"
    if NO_WAY & _names(error):
        return "no connection; check the network, and AWS_ENDPOINT_URL if the store is not Amazon's"
    text = (str(error).splitlines() or [""])[0][:200]
    for key, value in os.environ.items():
        text = text.replace(value, "***") if SECRET_NAME.search(key) and len(value) >= 8 else text
    return f"{type(error).__name__}: {text}"


def _names(error: BaseException) -> set[str]:
    """Returns the class names of an error and its causes. Returns names rather than classes, because the
    package that defines them may not be installed."""
    return {kind.__name__ for cause in _causes(error) for kind in type(cause).__mro__}


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
