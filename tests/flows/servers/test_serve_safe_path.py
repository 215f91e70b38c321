"""`alignflow serve` in a folder whose modules have the names of ours: server, worker, flow run and stages
import ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import hostile, micro
from tests.support.micro import Serve, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]


def test_a_manual_run_with_a_safe_path(tmp_path: Path) -> None:
    folder = tmp_path / "here"
    environment = micro.build(folder)
    environment.pop("PYTHONSAFEPATH", None)
    hostile.write(folder)
    serve = Serve(folder, environment, "--no-schedule")
    try:
        asked = serve.run(api := serve.ready(), "alignment/micro")
        ended = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
        wait_until(lambda: serve.state(api, asked) in ended, "the run that was asked for", told=serve.told)
        state = serve.state(api, asked)
    finally:
        serve.stop()
    assert hostile.imported(folder) == ""
    assert state == "COMPLETED", serve.told()
    assert "evaluation" in micro.begun(folder)
