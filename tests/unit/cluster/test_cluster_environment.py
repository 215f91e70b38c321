"""What Ray workers inherit, and the error of a cluster that is too small."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from rlhf_core.cluster.ray_cluster import passed_environment, remove_leftovers, shortage


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
