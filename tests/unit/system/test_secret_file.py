"""Checks that the state folder, its database and its secrets are their user's alone, whatever the umask and
whatever was there."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.serving.services import only_one
from rlhf_core.system.pages.secret_file import kept_secret, make_private
from tests.support.strangers import NOBODY, as_root


@pytest.fixture(params=[0, 0o022, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.usefixtures("umask")
def test_a_new_state_folder_is_private(tmp_path: Path) -> None:
    kept_secret(tmp_path / "above" / ".alignflow" / "dashboard-token")
    assert mode(tmp_path / "above" / ".alignflow") == 0o700
    assert mode(tmp_path / "above" / ".alignflow" / "dashboard-token") == 0o600


@pytest.mark.usefixtures("umask")
def test_serve_mends_the_modes_of_what_is_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    home = tmp_path / ".alignflow"
    home.mkdir()
    home.chmod(0o755)
    names = ("prefect.db", "prefect.db-wal", "serve.log", "served.json")
    for name in names:
        (home / name).touch()
        (home / name).chmod(0o644)
    with only_one(home):
        assert mode(home) == 0o700 and {mode(home / name) for name in names} == {0o600}
    assert not caplog.records


def test_the_working_directory_and_folders_for_all_keep_their_modes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "inside").mkdir()
    (tmp_path / "all").mkdir()
    tmp_path.chmod(0o755)
    (tmp_path / "all").chmod(0o1777)
    monkeypatch.chdir(tmp_path / "inside")
    for home in (tmp_path, tmp_path / "all"):
        make_private(home)
    assert (mode(tmp_path), stat.S_IMODE((tmp_path / "all").stat().st_mode)) == (0o755, 0o1777)
    told = [record.getMessage().partition(",")[0] for record in caplog.records]
    assert told == [f"other users of this machine can read {home}" for home in (tmp_path, tmp_path / "all")]


@as_root
def test_what_another_user_owns_is_told_and_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    home = tmp_path / ".alignflow"
    home.mkdir()
    home.chmod(0o755)
    os.chown(home, NOBODY, NOBODY)
    make_private(home)
    assert mode(home) == 0o755
    assert "it belongs to another user: name a folder of your own with --home" in caplog.text
