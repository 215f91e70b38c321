"""DeepSpeed's private parts are patched only in the releases that the patches were made for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf_core.training.zero.deepspeed_patches import forget_order, patch_library, reduce_beside_host


def library(version: str) -> Any:
    coordinator = SimpleNamespace(get_all_parameters="theirs")
    accelerator = type("Accelerator", (), {"is_fp16_supported": lambda _: False})()
    return SimpleNamespace(
        __version__=version,
        ops=SimpleNamespace(__compatible_ops__={"deepspeed_shm_comm": True}),
        accelerator=SimpleNamespace(get_accelerator=lambda: accelerator),
        utils=SimpleNamespace(nvtx=SimpleNamespace(enable_nvtx=True)),
        runtime=SimpleNamespace(
            zero=SimpleNamespace(partitioned_param_coordinator=coordinator),
            engine=SimpleNamespace(DeepSpeedEngine=SimpleNamespace(_do_optimizer_sanity_check="theirs")),
        ),
    )


@pytest.mark.parametrize(("version", "patched"), [("0.19.8", True), ("0.20.0", False), ("0.190.1", False)])
def test_other_releases_are_left_as_they_are(version: str, patched: bool) -> None:
    deepspeed = library(version)
    patch_library(deepspeed)
    assert deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] is not patched
    assert deepspeed.utils.nvtx.enable_nvtx is not patched
    assert (deepspeed.runtime.zero.partitioned_param_coordinator.get_all_parameters != "theirs") is patched
    assert (deepspeed.runtime.engine.DeepSpeedEngine._do_optimizer_sanity_check != "theirs") is patched
    assert deepspeed.accelerator.get_accelerator().is_fp16_supported() is (
        patched and not torch.cuda.is_available()
    )
    if not patched:
        optimizer = object()  # any change of it would raise AttributeError
        forget_order(deepspeed, optimizer)
        reduce_beside_host(deepspeed, optimizer)


def test_the_patched_parts_exist_in_the_installed_release() -> None:
    """A release in MADE_FOR without them would fail at start."""
    import inspect

    from rlhf_core.training.zero.zero_engine import library

    deepspeed = library()
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    assert (
        deepspeed.runtime.zero.partitioned_param_coordinator.get_all_parameters.__module__
        == "rlhf_core.training.zero.deepspeed_patches"
    )
    from deepspeed.runtime.zero.config import ZERO_OPTIMIZATION

    choose = deepspeed.runtime.engine.DeepSpeedEngine._do_optimizer_sanity_check
    assert choose.__module__ == "rlhf_core.training.zero.deepspeed_patches"
    assert choose(None, None) == ZERO_OPTIMIZATION
    assert {"is_invalid_trace", "_invalidate_trace"} <= set(dir(PartitionedParameterCoordinator))
    assert "empty_partition_cache" in dir(DeepSpeedZeRoOffload)
    assert "reduce_and_partition_stream" in inspect.getsource(deepspeed.runtime.zero.stage3)
