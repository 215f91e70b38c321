"""Stores that fail: attempts, wrong buckets, stores that cannot be written or are full."""

from __future__ import annotations

import errno
import resource
import signal
import time
from pathlib import Path

import fsspec
import pytest

from rlhf_core.cluster.rank_environment import free_port
from rlhf_core.preflight.machine_checks import check_machine
from rlhf_core.recipe.load_recipe import load_recipe
from rlhf_core.recipe.plan import plan
from rlhf_core.runs.remote.remote_files import RemoteFiles, StoreFault
from rlhf_core.runs.remote.store import Store
from tests.support.s3_server import SECRET
from tests.unit.runs.test_store import FAST, REQUEST, bucket, done, elsewhere, recipe, store

__all__ = ["bucket", "store"]


def test_attempts_are_bounded_and_only_made_where_they_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = RemoteFiles(f"file://{tmp_path}", attempts=3, pause=0.01)
    faults: list[Exception] = []

    def cat(place: str) -> bytes:
        if faults:
            raise faults.pop(0)
        return b"content"

    monkeypatch.setattr(type(files._system), "cat_file", lambda self, place: cat(place))
    faults[:] = [TimeoutError(), ConnectionResetError()]
    start = time.monotonic()
    assert files.read("x") == b"content" and time.monotonic() - start >= 0.03
    faults[:] = [ConnectionResetError() for _ in range(5)]
    with pytest.raises(StoreFault, match="x cannot be read: no connection; check the network"):
        files.read("x")
    assert len(faults) == 2
    faults[:] = [PermissionError() for _ in range(5)]
    with pytest.raises(StoreFault, match="access is refused; check credentials"):
        files.read("x")
    assert len(faults) == 4
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    faults[:] = [RuntimeError(f"signed with {SECRET}") for _ in range(3)]
    with pytest.raises(StoreFault, match=r"RuntimeError: signed with \*\*\*$"):
        files.read("x")


def test_wrong_bucket_no_credentials_no_network(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from s3fs import S3FileSystem

    def told(url: str) -> str:
        S3FileSystem.clear_instance_cache()
        with pytest.raises(StoreFault) as fault:
            RemoteFiles(url, attempts=1).probe()
        S3FileSystem.clear_instance_cache()
        return str(fault.value)

    probed = RemoteFiles(f"{bucket}/probed", attempts=1)
    probed.probe()
    assert probed.names("") == [], "the probe leaves nothing"
    assert (
        told("s3://no-such-bucket/x")
        == "store s3://no-such-bucket/x: nothing can be written: there is no such bucket or folder; make it,"
        " or correct the name"
    )
    with monkeypatch.context() as patch:
        patch.delenv("AWS_ACCESS_KEY_ID")
        patch.delenv("AWS_SECRET_ACCESS_KEY")
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", "none")
        assert "there are no credentials; set AWS_ACCESS_KEY_ID" in told(bucket)
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
        patch.setenv("AWS_MAX_ATTEMPTS", "1")
        assert "no connection; check the network" in told(bucket)


def test_a_store_that_cannot_be_written_is_told_before_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text(recipe(""))
    Path("taken").write_text("a file, not a folder")
    (problem,) = check_machine(plan(load_recipe("r.yaml", ["store=taken/x"])), ())
    assert problem.startswith("store taken/x: nothing can be written: ")
    assert check_machine(plan(load_recipe("r.yaml", [f"store=file://{tmp_path}/new"])), ()) == []

    def read_only(self: object, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(type(fsspec.filesystem("file")), "pipe_file", read_only)
    (problem,) = check_machine(plan(load_recipe("r.yaml", [f"store=file://{tmp_path}/new"])), ())
    assert (
        problem
        == f"store file://{tmp_path}/new: nothing can be written: it can only be read; set another folder"
    )


def test_a_full_store_loses_nothing(tmp_path: Path) -> None:
    """The system refuses to write files over a limit, as it does when a disk is full."""
    run = done(tmp_path, "w" * 100_000)
    store = Store(f"file://{tmp_path}/store", **FAST)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
        with pytest.raises(
            StoreFault,
            match=r"model\.safetensors cannot be written: a file is larger than this process may write",
        ):
            store.put(run)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert run.result() is not None and not store.has("sft-00ff")
    assert store.put(run) and store.fetch(elsewhere(tmp_path), REQUEST)
