"""What vLLM's worker takes of a GPU on which other roles load and free their models, and that it counts the
weights it loads."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.v1.worker import gpu_worker

from rlhf_core.rollout.vllm.gpu_worker import GpuWorker
from rlhf_core.rollout.vllm.patches.memory_share import BESIDES
from rlhf_core.system import progress

GIB = 2**30


def test_each_weight_that_an_engine_reads_at_its_start_is_progress(
    material: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(self: GpuWorker, **options: bool) -> None:
        model: Any = SimpleNamespace(
            model=str(material / "base"), revision=None, hf_config=None, hf_text_config=None
        )
        looks.extend(
            progress.seen()
            for _ in DefaultModelLoader(LoadConfig()).get_all_weights(model, torch.nn.Linear(1, 1))
        )

    looks = [progress.seen()]
    # to be as it was at the end
    monkeypatch.setattr(DefaultModelLoader, "get_all_weights", DefaultModelLoader.get_all_weights)
    monkeypatch.setattr(gpu_worker.Worker, "load_model", load)
    GpuWorker.__new__(GpuWorker).load_model(load_dummy_weights=False)
    assert len(set(looks)) == len(looks) == 1 + len(load_file(material / "base" / "model.safetensors"))


def worker(monkeypatch: pytest.MonkeyPatch, before: int, peak: int, granted: int) -> GpuWorker:
    """One whose model has weights of 3 GiB, in the count of PyTorch's allocator or not."""
    used = {"peak": 0}

    def largest_batch(self: GpuWorker) -> int:
        assert self.cache_config.kv_cache_memory_bytes, "vLLM would measure the GPU, others' memory too"
        used["peak"] = peak
        return 1

    monkeypatch.setattr(gpu_worker.Worker, "determine_available_memory", largest_batch)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: before)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: used["peak"])
    made = GpuWorker.__new__(GpuWorker)
    made.requested_memory = granted
    made.cache_config = SimpleNamespace(kv_cache_memory_bytes=None)
    model = SimpleNamespace(
        parameters=lambda: iter([torch.empty(3 * GIB // 2, dtype=torch.bfloat16, device="meta")])
    )
    made.model_runner = SimpleNamespace(get_model=lambda: model, sampler=None)
    return made


@pytest.mark.parametrize(
    ("before", "peak"), [(3 * GIB, 5 * GIB), (0, 2 * GIB)], ids=["counted", "not counted"]
)
def test_the_cache_gets_what_the_process_itself_has_not_used(
    before: int, peak: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = worker(monkeypatch, before, peak, 40 * GIB)
    assert made.determine_available_memory() == 35 * GIB - BESIDES == made.cache_config.kv_cache_memory_bytes


def test_a_share_that_holds_no_cache_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ValueError,
        match=(
            r"and 2 GiB for CUDA, NCCL and graphs take 7.0 GiB, and engine.gpu_memory_utilization grants 6.0:"
            r" raise it"
        ),
    ):
        worker(monkeypatch, 3 * GIB, 5 * GIB, 6 * GIB).determine_available_memory()
