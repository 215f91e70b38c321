"""What `alignflow doctor` says of libraries that every process compiles again."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from flows.cli import doctor
from flows.cli.doctor import _compiled, examine


@pytest.mark.parametrize(
    ("told", "compiled", "warned"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_libraries_that_every_process_compiles(
    told: bool, compiled: bool, warned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = tmp_path / "torch" / "__init__.py"
    (cached := Path(importlib.util.cache_from_source(str(origin)))).parent.mkdir(parents=True)
    if compiled:
        cached.touch()
    monkeypatch.setattr(sys, "dont_write_bytecode", told)
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: SimpleNamespace(name=name, origin=str(origin)) if name == "torch" else None,
    )
    found = _compiled()
    assert [finding.level for finding in found] == (["warn"] if warned else [])
    assert not warned or (
        "and torch have no compiled files: each process" in found[0].value
        and f"-j 0 {tmp_path}`" in found[0].value
    )


def test_the_findings_of_this_environment() -> None:
    found = {finding.what: finding for finding in examine()}
    assert found["torch"].level == "ok" and found["CPUs"].level == "ok"
    assert found["vllm: rotary_heads"].value.endswith(
        "Until: A CPU kernel for tensors with a dimension of heads."
    )


def test_a_vllm_that_is_not_tested_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda package: {"vllm": "0.27.0"}.get(package, "1"))
    (finding,) = [finding for finding in examine() if finding.what.startswith("vllm ")]
    assert finding.level == "bad" and "vLLM 0.27.0 is not tested" in finding.value
