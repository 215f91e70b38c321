"""Processes of a stage: groups of ranks, vLLM engines and servers, and which of them can share GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from rlhf_core.records import Config, NotInDigest, Positive, Ranks, Rate, check, keys_that_are_no_text

# vLLM engine options that `vllm.engine` refuses, and why.
NOT_FOR_ENGINE = {
    **dict.fromkeys(
        ("model", "tokenizer", "revision", "tokenizer_revision", "hf_config_path"),
        "the stage's model decides it",
    ),
    **dict.fromkeys(("dtype", "seed", "trust_remote_code"), "the recipe has a field of this name"),
    **dict.fromkeys(
        ("tensor_parallel_size", "pipeline_parallel_size", "gpu_memory_utilization"),
        "vllm has a field of this name",
    ),
    **dict.fromkeys(
        ("max_model_len", "served_model_name", "override_generation_config"), "the stage decides it"
    ),
    **dict.fromkeys(
        ("data_parallel_size", "data_parallel_size_local"), "it needs processes that are not reserved"
    ),
    **dict.fromkeys(
        ("nnodes", "node_rank", "master_addr", "master_port", "distributed_executor_backend"),
        "alignflow sets it",
    ),
    **dict.fromkeys(("load_format", "quantization_config"), "new weights could not be loaded"),
    **dict.fromkeys(("enable_lora", "max_lora_rank", "max_loras"), "vllm.adapters sets it"),
    **dict.fromkeys(
        ("worker_cls", "worker_extension_cls", "logprobs_mode", "disable_log_stats", "language_model_only"),
        "alignflow sets it",
    ),
    "scheduler_cls": "answers are scheduled by vLLM's own",
    "enable_sleep_mode": "vllm.sleep sets it",
    "enable_return_routed_experts": "routing_replay sets it",
    "hf_token": "recipes and cards would show it (HF_TOKEN is read in its place)",
}

# vLLM engine options that only decide speed or memory. They are in no digest.
SPEED_ONLY = frozenset(
    "max_num_seqs max_num_batched_tokens long_prefill_token_threshold enable_chunked_prefill"
    " enable_prefix_caching block_size num_gpu_blocks_override kv_cache_memory_bytes cpu_offload_gb"
    " enforce_eager compilation_config cudagraph_capture_sizes max_cudagraph_capture_size optimization_level"
    " performance_mode async_scheduling disable_cascade_attn disable_custom_all_reduce attention_backend"
    " enable_expert_parallel moe_backend max_parallel_loading_workers gdn_prefill_backend".split()
)


class Vllm(Config):
    """The vLLM engines of a stage."""

    num_engines: Annotated[Positive, NotInDigest] = Field(1, le=10_000, description="engines")
    cpus: Annotated[float, NotInDigest] = Field(1.0, gt=0, description="CPUs of one engine")
    tensor_parallel_size: Annotated[Positive, NotInDigest] = Field(
        1, le=256, description="GPUs that share one engine's model, all of one node"
    )
    pipeline_parallel_size: Annotated[Positive, NotInDigest] = Field(
        1,
        le=64,
        description=(
            "pipeline stages into which an engine's layers are cut, for models that a node cannot hold: each"
            " has tensor_parallel_size GPUs of one node, and they may be on different nodes"
        ),
    )
    gpus: Annotated[float, NotInDigest] = Field(
        0.0,
        ge=0,
        description=(
            "GPUs of one engine; of each of its processes, with tensor_parallel_size or"
            " pipeline_parallel_size"
        ),
    )
    gpu_memory_utilization: Annotated[float, NotInDigest] = Field(
        0.9, gt=0, le=1, description="share of a GPU's memory"
    )
    kv_cache_gib: Annotated[float, NotInDigest] = Field(
        1.0, gt=0, description="KV cache on a CPU machine, GiB"
    )
    seed_answers: bool = Field(
        False,
        description=(
            "sampling on a GPU: a random stream for each answer, which then depends on no other; slower. On"
            " CPU always"
        ),
    )
    sleep: Annotated[bool, NotInDigest] = Field(
        False,
        description=(
            "in ppo: free the GPU's memory while the models score and train (the next sync sends the weights"
            " again)"
        ),
    )
    adapters: Annotated[Literal["merged", "alone"], NotInDigest] = Field(
        "merged",
        description=(
            "in ppo with lora: a sync sends all weights, adapters merged, or the adapters alone to engines"
            " that keep the actor's starting model (vLLM's runtime LoRA): less is sent, sampling is slower"
        ),
    )
    start_timeout: Annotated[Rate, NotInDigest] = Field(
        900.0, description="of a server (a vllm judge, alignment_tax): seconds until it must be ready"
    )

    engine: dict[str, Any] = Field(
        {},
        description=(
            "further options of vLLM's engine by its own names, such as max_num_seqs or"
            " enable_expert_parallel; they override ours. Options that only decide speed or memory are not in"
            " the digest"
        ),
    )

    @property
    def processes(self) -> int:
        """Processes of one engine, each with its own GPU."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def drafts(self) -> Any:
        """How tokens are drafted (vLLM's `speculative_config`); None if they are not."""
        return self.engine.get("speculative_config")

    @check
    def _check_engine(self) -> Iterator[str]:
        yield from (
            f"vllm.engine.{name}: {NOT_FOR_ENGINE[name]}, so leave it out"
            for name in self.engine
            if name in NOT_FOR_ENGINE
        )
        if self.engine.get("quantization") not in (None, "fp8"):
            yield (
                "vllm.engine.quantization: new weights could be loaded as fp8 alone: set it to fp8, or leave"
                " it out"
            )
        yield from keys_that_are_no_text("vllm.engine", self.engine)
        if self.drafts is not None and not isinstance(self.drafts, dict):
            yield (
                "vllm.engine.speculative_config must be a mapping, such as {method: ngram,"
                " num_speculative_tokens: 3}"
            )
        elif self.drafts is not None and self.drafts.get("method") not in ("ngram", "ngram_gpu"):
            yield (
                "vllm.engine.speculative_config: another model's drafts would not follow the weights: set"
                " method to ngram or ngram_gpu"
            )
        if self.drafts is not None and self.pipeline_parallel_size > 1:
            yield (
                "vllm.engine.speculative_config is for engines without pipeline_parallel_size: leave one of"
                " them out"
            )
        for name in ("quantization", "speculative_config"):
            if self.engine.get(name) is not None and not self.gpus:
                yield f"vllm.engine.{name} needs a GPU, and gpus is 0: set gpus, or leave it out"

    @check
    def _check_sleep(self) -> Iterator[str]:
        if self.sleep and not self.gpus:
            yield "vllm.sleep gives a GPU's memory back, and gpus is 0: set gpus, or leave sleep out"


def only_in_ppo(vllm: Vllm) -> Iterator[str]:
    """Yields a sentence for each engine option that only ppo supports."""
    if vllm.adapters != "merged":
        yield "vllm.adapters is of ppo, which sends weights to its engines: leave it out"


def without_pipeline(vllm: Vllm) -> Iterator[str]:
    """Yields a sentence if an engine that runs without Ray has pipeline stages."""
    if vllm.pipeline_parallel_size > 1:
        yield (
            "vllm.pipeline_parallel_size is for the engines of ppo and preferences: leave it out"
            " (tensor_parallel_size splits a model)"
        )


class Served(Config):
    """A model on a vLLM server that the stage starts and stops."""

    max_model_len: Positive | None = Field(
        None, description="longest prompt and answer together, in tokens; default: the model's own"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="auto: that of the checkpoint")
    vllm: Vllm = Field(Vllm(), description="the server's engine")

    @check
    def _check_server(self) -> Iterator[str]:
        if self.vllm.num_engines > 1 or self.vllm.sleep:
            yield (
                "a server is one engine that never sleeps: leave num_engines and sleep out"
                " (tensor_parallel_size splits a model)"
            )
        yield from only_in_ppo(self.vllm)
        yield from without_pipeline(self.vllm)


Wanted = Ranks | Vllm
Groups = Mapping[str, Wanted]


def processes(wanted: Wanted) -> int:
    """Returns the number of processes of a group."""
    return wanted.world_size if isinstance(wanted, Ranks) else wanted.num_engines * wanted.processes


def check_together(groups: Groups) -> None:
    """Raises ValueError unless groups that share GPUs have equally many processes, and all or none of them
    use GPUs."""
    counts = {name: processes(wanted) for name, wanted in groups.items()}
    if len(set(counts.values())) > 1:
        found = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise ValueError(
            f"groups that share GPUs need equally many processes, there are: {found}. Set num_nodes x"
            " num_ranks_per_node to the same (and vllm.num_engines x tensor_parallel_size x"
            " pipeline_parallel_size)"
        )
    if len({bool(wanted.gpus) for wanted in groups.values()}) > 1:
        without = ", ".join(name for name, wanted in groups.items() if not wanted.gpus)
        raise ValueError(f"groups that share GPUs all need one: set gpus of {without}")
