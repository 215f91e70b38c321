"""The models and questions that evaluations of these tests begin with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.evaluations import Setting


@pytest.fixture
def setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setting:
    from tests.support.evaluations import make_setting  # imports torch, which few of these tests need

    return make_setting(tmp_path, monkeypatch)
