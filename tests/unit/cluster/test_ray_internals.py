"""What happens with a Ray that lacks the private parts that we use."""

from __future__ import annotations

import pytest
from ray.job_config import JobConfig

from rlhf_core.cluster import ray_internals


def test_a_ray_without_the_private_parts_is_left_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ray_internals.report_missing()
    assert capsys.readouterr().out == "", "the pinned release has them"
    monkeypatch.delattr(JobConfig, "_runtime_env_has_working_dir")
    monkeypatch.setattr(ray_internals, "_internal_kv_get", None)
    monkeypatch.setattr(ray_internals, "_internal_kv_put", None)
    ray_internals.report_missing()
    assert capsys.readouterr().out.count("install Ray 2.60") == 2
    ray_internals.put("rank", "1/0/0")
    # every look finds progress, so no rank is silent
    assert ray_internals.get("rank") != ray_internals.get("rank")
