"""The tokenizer and chat template of the demo's base model."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_core.data.chat import Renderer, load_tokenizer


@pytest.fixture(scope="module")
def renderer(material: Path) -> Renderer:
    return Renderer(load_tokenizer(str(material / "base")), "chat")
