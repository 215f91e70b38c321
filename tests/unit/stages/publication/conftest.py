"""The run directories that publications of these tests begin with."""

from __future__ import annotations

import pytest

from tests.support.chain import Chain, build, save_model


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    chain = build(tmp_path_factory.mktemp("home"))
    save_model(chain.checkpoint)
    return chain
