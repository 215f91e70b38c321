"""What Ray and libraries find in the environment of a process, and what is read of Ray's own parts."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from ray.job_config import JobConfig

from rlhf_core.cluster import ray_internals, worker
from rlhf_core.cluster.ray_cluster import passed_environment, remove_leftovers, shortage
from rlhf_core.cluster.worker import cpu_threads
from rlhf_core.runs.allotment import CORES_ENV
from rlhf_core.system import machine


def test_workers_inherit_what_keeps_nvlink_multicast_off(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NVSHMEM_DISABLE_NVLS": "1",
        "NCCL_SOCKET_IFNAME": "eth0",
    }
    wanted["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    for name, value in wanted.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setenv("HOME_GROWN", "1")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    passed = passed_environment()
    assert wanted.items() <= passed.items()
    assert "CUDA_VISIBLE_DEVICES" not in passed, "Ray gives each worker its own devices"
    assert "HOME_GROWN" not in passed
    assert not {"HF_TOKEN", "RAY_AUTH_TOKEN"} & passed.keys(), "Ray writes these variables to its logs"


def test_a_shortage_names_the_request_and_what_is_available() -> None:
    bundles = [{"CPU": 2.0, "GPU": 1.0}] * 3
    assert shortage(bundles, {"CPU": 8.0, "GPU": 4.0}) == ""
    assert shortage(bundles, {"CPU": 8.0, "GPU": 2.0}) == "GPUs (requested 3, available 2)"
    assert (
        shortage(bundles, {"CPU": 2.0})
        == "CPUs (requested 6, available 2) and GPUs (requested 3, available 0)"
    )


def test_old_files_of_processes_that_ended_are_removed(tmp_path: Path) -> None:
    running = os.getpid()
    ended = 2**22 + 1  # beyond the largest number of a process
    kept = [f"ray/session_2026-01-02_{running}", f"ray/session_2026-11-20_{ended}", "ranks-new", "another"]
    old = {*kept[:1], kept[3], f"ray/session_2026-01-01_{ended}", "ranks-old"}
    for name in (*kept, *old):
        place = tmp_path / name
        place.mkdir(parents=True, exist_ok=True) if "session" in name else place.touch()
        seconds = time.time() - (31 if name in old else 29) * 86400
        os.utime(place, (seconds, seconds))
    remove_leftovers(tmp_path)
    assert sorted(
        str(place.relative_to(tmp_path)) for place in tmp_path.rglob("*") if place.name != "ray"
    ) == sorted(kept)


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


def test_the_cores_of_a_node_are_divided_by_the_processes_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CORES_ENV, raising=False)
    monkeypatch.setattr(worker, "num_cpus", lambda: 64)
    assert [cpu_threads(side_by_side) for side_by_side in (1, 2, 16, 100)] == [64, 32, 4, 1]
    monkeypatch.setenv(CORES_ENV, "12")
    assert cpu_threads(4) == 3, "of a stage beside others, its cores"


@pytest.mark.parametrize(
    ("quota", "expected"), [("1600000 100000", 16), ("150000 100000", 2), ("max 100000", 96), ("", 96)]
)
def test_a_containers_quota_counts(quota: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CORES_ENV, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(96)))
    monkeypatch.setattr(
        machine.Path, "read_text", lambda path: quota if path == Path("/sys/fs/cgroup/cpu.max") else None
    )
    assert machine.num_cpus() == expected == cpu_threads(1)
