"""A Prefect server for the whole session, in a process of its own, for flows that run in tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prefect.settings import PREFECT_API_URL, PREFECT_LOCAL_STORAGE_PATH, temporary_settings
from prefect.testing.utilities import prefect_test_harness


@pytest.fixture(scope="session")
def prefect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The API's address."""
    with (
        temporary_settings({PREFECT_LOCAL_STORAGE_PATH: tmp_path_factory.mktemp("prefect-results")}),
        prefect_test_harness(server_startup_timeout=120),
    ):
        yield str(PREFECT_API_URL.value())
