"""Processes of a stage: groups of ranks, vLLM engines and servers, and which of them can share GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from rlhf_core.records import Config, NotInDigest, Positive, Ranks, Rate, check

# Options of vLLM's engine that other fields decide, and which.
SET_BY_US = {
    **dict.fromkeys(("model", "tokenizer"), "the stage's model"),
    **dict.fromkeys(("dtype", "seed", "trust_remote_code"), "the recipe's field of that name"),
    "max_model_len": "the stage's lengths",
    **{name: f"vllm.{name}" for name in ("tensor_parallel_size", "gpu_memory_utilization")},
    "enable_sleep_mode": "vllm.sleep",
    "enable_return_routed_experts": "routing_replay",
    "speculative_config": "nobody: log-probs of drafted tokens are not read",
    **dict.fromkeys(
        ("worker_cls", "worker_extension_cls", "distributed_executor_backend", "logprobs_mode", "disable_log_stats", "language_model_only"),
        "alignflow",
    ),
}


class Vllm(Config):
    """The vLLM engines of a stage."""

    num_engines: Annotated[Positive, NotInDigest] = Field(1, le=10_000, description="engines")
    cpus: Annotated[float, NotInDigest] = Field(1.0, gt=0, description="CPUs of one engine")
    tensor_parallel_size: Annotated[Positive, NotInDigest] = Field(
        1, le=256, description="GPUs that share one engine's model, all of one node"
    )
    gpus: Annotated[float, NotInDigest] = Field(
        0.0, ge=0, description="GPUs of one engine; with tensor_parallel_size, of each of its processes"
    )
    gpu_memory_utilization: Annotated[float, NotInDigest] = Field(0.9, gt=0, le=1, description="share of a GPU's memory")
    kv_cache_gib: Annotated[float, NotInDigest] = Field(1.0, gt=0, description="KV cache on a CPU machine, GiB")
    seed_answers: bool = Field(
        False,
        description="sampling on a GPU: a random stream for each answer, which then depends on no other; slower. On CPU always",
    )
    sleep: Annotated[bool, NotInDigest] = Field(
        False, description="in ppo: free the GPU's memory while the models score and train (the next sync sends the weights again)"
    )
    start_timeout: Annotated[Rate, NotInDigest] = Field(
        900.0, description="of a server (a vllm judge, alignment_tax): seconds until it must be ready"
    )

    engine: dict[str, Any] = Field(
        {}, description="further options of vLLM's engine by its own names, as max_num_seqs or enable_expert_parallel, which go before ours"
    )

    @check
    def _check_engine(self) -> Iterator[str]:
        for name in self.engine:
            if name in SET_BY_US:
                yield f"vllm.engine.{name} is set by {SET_BY_US[name]}: leave it out there"

    @check
    def _check_sleep(self) -> Iterator[str]:
        if self.sleep and not self.gpus:
            yield ("vllm.sleep gives a GPU's memory back, and gpus is 0: set gpus, or leave sleep out")


class Served(Config):
    """A model on a vLLM server that the stage starts and stops."""

    max_model_len: Positive | None = Field(None, description="longest prompt and answer together, in tokens; default: the model's own")
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="auto: that of the checkpoint")
    vllm: Vllm = Field(Vllm(), description="the server's engine")

    @check
    def _check_server(self) -> Iterator[str]:
        if self.vllm.num_engines > 1 or self.vllm.sleep:
            yield ("a server is one engine that never sleeps: leave num_engines and sleep out (tensor_parallel_size splits a model)")


Wanted = Ranks | Vllm
Groups = Mapping[str, Wanted]


def processes(wanted: Wanted) -> int:
    """Returns the number of processes of a group."""
    return wanted.world_size if isinstance(wanted, Ranks) else wanted.num_engines * wanted.tensor_parallel_size


def check_together(groups: Groups) -> None:
    """Raises ValueError unless groups on the same GPUs have one process on each of them."""
    counts = {name: processes(wanted) for name, wanted in groups.items()}
    if len(set(counts.values())) > 1:
        found = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise ValueError(
            f"groups that share GPUs need equally many processes, there are: {found}. Set num_nodes x num_ranks_per_node to the same "
            f"(and vllm.num_engines x tensor_parallel_size)"
        )
    if len({bool(wanted.gpus) for wanted in groups.values()}) > 1:
        without = ", ".join(name for name, wanted in groups.items() if not wanted.gpus)
        raise ValueError(f"groups that share GPUs all need one: set gpus of {without}")
