"""An engine of two stages, each in a process of ours: it samples and loads what one process does, and a stage
that dies is noticed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import copytree

import psutil
import pytest
from safetensors.torch import load_file, save_file

from rlhf_core.cluster.pending import RankDied
from rlhf_core.cluster.ray_cluster import leave
from rlhf_core.cluster.temporary_group import temporary_group
from rlhf_core.cluster.worker_group import WorkerGroup
from rlhf_core.config import EngineConfig
from rlhf_core.rollout.engine_contract import SampledAnswer, Sampling
from rlhf_core.rollout.sampler_role import SamplerRole

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [12, 13]]
SEEDS = [1, 2, 3]
PREPARE = ("rlhf_core.rollout.sampler_role:prepare", EngineConfig(kv_cache_gib=0.5))


@contextmanager
def engine(material: Path, stages: int) -> Iterator[WorkerGroup]:
    vllm = EngineConfig(pipeline_parallel_size=stages, cpus=0.5, kv_cache_gib=0.5)
    parts = {"span": stages, "pipeline_stages": stages}
    options = {"model": str(material / "base"), "seed": 0, "max_model_len": 64, "config": vllm}
    try:
        with temporary_group("sampler", vllm, 200, SamplerRole, PREPARE, **parts, **options) as group:
            yield group
    finally:
        leave()


@pytest.fixture(scope="module")
def weights(material: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint whose weights differ from the base's."""
    folder = Path(copytree(material / "base", tmp_path_factory.mktemp("other") / "checkpoint"))
    file = folder / "model.safetensors"
    save_file({name: 1.2 * weight for name, weight in load_file(file).items()}, file, {"format": "pt"})
    return str(folder)


def said(group: WorkerGroup, checkpoint: str = "") -> list[tuple[int, list[SampledAnswer]]]:
    if checkpoint:
        group.call("load", SamplerRole.load, checkpoint).wait(100)
    return group.call("generate", SamplerRole.generate_share, PROMPTS, SEEDS, Sampling(2, 1.0, 20, [1])).wait(
        100
    )[0]


def strangers_may_connect() -> list[str]:
    """The processes that listen on more than loopback."""
    found = []
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            sockets = [each for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
            found += [
                f"{process.name()} {each.laddr}"
                for each in sockets
                if each.laddr.ip.removeprefix("::ffff:") not in ("127.0.0.1", "::1")
            ]
    return found


def vllm_process(stage: int) -> psutil.Process:
    (found,) = (
        p for p in psutil.Process().children(recursive=True) if f"Worker_PP{stage}" in " ".join(p.cmdline())
    )
    return found


def test_two_stages_answer_as_one_process_and_the_death_of_one_is_noticed(
    material: Path, weights: str
) -> None:
    with engine(material, 1) as alone:
        expected = said(alone), said(alone, weights)
    assert expected[0] != expected[1], "both checkpoints answer alike"
    with engine(material, 2) as group:
        assert group.world_size == 1 and group.call("look", SamplerRole.gpu_uuids).wait(100) == [[None, None]]
        assert (said(group), said(group, weights)) == expected
        assert strangers_may_connect() == [], "processes listen on loopback alone"
        many = group.call(
            "generate", SamplerRole.generate_share, PROMPTS * 67, range(201), Sampling(1, 1.0, 4, [1])
        ).wait(100)[0]
        assert len(many) == 201, "vLLM's own limit without its context is 128"
        vllm_process(1).kill()
        begun = time.monotonic()
        with pytest.raises(RankDied, match="a rank of sampler died during 'generate'"):
            said(group)
        assert time.monotonic() - begun < 60, "sooner than the 100 s without progress"
        group.build_again([0]).wait(200)
        assert said(group) == expected[0]
