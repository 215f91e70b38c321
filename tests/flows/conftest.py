"""Fixtures: a Prefect server in its own process for the whole session, and the recipe that most flow tests
run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL, PREFECT_LOCAL_STORAGE_PATH, temporary_settings
from prefect.testing.utilities import prefect_test_harness

import flows.alignment
import flows.cli.run_commands
import tasks.stages
from rlhf_core.config import Recipe
from rlhf_core.recipe.load_recipe import load_recipe
from rlhf_core.runs.launch import launch
from tests.support.writing_stages import STAGE, TEXT


@pytest.fixture(scope="session")
def prefect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yields the API's URL."""
    with (
        temporary_settings({PREFECT_LOCAL_STORAGE_PATH: tmp_path_factory.mktemp("prefect-results")}),
        prefect_test_harness(server_startup_timeout=300),
    ):
        yield str(PREFECT_API_URL.value())


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Recipe]:
    """Returns a loader of the recipe of tests/support/writing_stages.py with overrides; changes to the
    recipe's folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "stage_for_flows.py").write_text(STAGE)
    (tmp_path / "recipe.yaml").write_text(TEXT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    monkeypatch.setattr(tasks.stages, "launch", lambda package, *rest: launch("stage_for_flows", *rest))
    monkeypatch.setattr(tasks.stages.run_stage, "retry_delay_seconds", 0)
    monkeypatch.setattr(flows.alignment, "require_here", lambda planned, nodes: None)
    monkeypatch.setattr(flows.cli.run_commands, "require_here", lambda planned, nodes: None)
    return lambda *overrides: load_recipe("recipe.yaml", overrides)
