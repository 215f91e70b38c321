"""Configures the engines that sample answers: their kinds, what each kind can do, and their options."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from rlhf_core.records import Config, NotInDigest, Positive, Rate, check, keys_that_are_no_text


class Abilities(NamedTuple):
    """The capabilities of a kind of engine. `splits`: hold a model on several GPUs; `adapters`: take new
    adapters without the other weights; `routing`: return the experts of each token; `interrupts`: take new
    weights between two tokens of an answer; `serves`: run as a server with an API."""

    splits: bool
    adapters: bool
    routing: bool
    interrupts: bool
    serves: bool


ABILITIES = {
    "vllm": Abilities(splits=True, adapters=True, routing=True, interrupts=True, serves=True),
    "transformers": Abilities(splits=False, adapters=False, routing=False, interrupts=False, serves=False),
}

# vLLM options that `engine.options` refuses, with the reason
NOT_FOR_VLLM = {
    **dict.fromkeys(
        ("model", "tokenizer", "revision", "tokenizer_revision", "hf_config_path"),
        "the stage's model decides it",
    ),
    **dict.fromkeys(("dtype", "seed", "trust_remote_code"), "the recipe has a field of this name"),
    **dict.fromkeys(
        ("tensor_parallel_size", "pipeline_parallel_size", "gpu_memory_utilization"),
        "engine has a field of this name",
    ),
    **dict.fromkeys(
        ("max_model_len", "served_model_name", "override_generation_config"), "the stage decides it"
    ),
    **dict.fromkeys(
        ("data_parallel_size", "data_parallel_size_local"),
        "it needs processes that alignflow does not reserve",
    ),
    **dict.fromkeys(
        ("nnodes", "node_rank", "master_addr", "master_port", "distributed_executor_backend"),
        "alignflow sets it",
    ),
    **dict.fromkeys(("load_format", "quantization_config"), "new weights could not be loaded"),
    **dict.fromkeys(("enable_lora", "max_lora_rank", "max_loras"), "engine.adapters sets it"),
    **dict.fromkeys(
        ("worker_cls", "worker_extension_cls", "logprobs_mode", "disable_log_stats", "language_model_only"),
        "alignflow sets it",
    ),
    "scheduler_cls": "alignflow uses vLLM's own scheduler",
    "enable_sleep_mode": "engine.sleep sets it",
    "enable_return_routed_experts": "routing_replay sets it",
    "hf_token": "recipes and cards would show it (HF_TOKEN is read instead)",
}

# engine options that affect only speed or memory; they are in no digest
SPEED_ONLY = frozenset(
    "max_num_seqs max_num_batched_tokens long_prefill_token_threshold enable_chunked_prefill"
    " enable_prefix_caching block_size num_gpu_blocks_override kv_cache_memory_bytes cpu_offload_gb"
    " enforce_eager compilation_config cudagraph_capture_sizes max_cudagraph_capture_size optimization_level"
    " performance_mode async_scheduling disable_cascade_attn disable_custom_all_reduce attention_backend"
    " enable_expert_parallel moe_backend max_parallel_loading_workers gdn_prefill_backend batch_size".split()
)


class EngineConfig(Config):
    """The engines of a stage."""

    kind: Literal["vllm", "transformers"] = Field(
        "vllm",
        description=(
            "vllm; transformers: its own `generate`, for models that vLLM cannot sample; slow, but computes"
            " as the trainer does"
        ),
    )
    num_engines: Annotated[Positive, NotInDigest] = Field(1, le=10_000, description="engines")
    cpus: Annotated[float, NotInDigest] = Field(1.0, gt=0, description="CPUs of one engine")
    tensor_parallel_size: Annotated[Positive, NotInDigest] = Field(
        1, le=256, description="GPUs, all on one node, that share one engine's model"
    )
    pipeline_parallel_size: Annotated[Positive, NotInDigest] = Field(
        1,
        le=64,
        description=(
            "pipeline stages that an engine's layers are split into, for models that do not fit on a node:"
            " each uses tensor_parallel_size GPUs of one node, and different stages may be on different nodes"
        ),
    )
    gpus: Annotated[float, NotInDigest] = Field(
        0.0,
        ge=0,
        description=(
            "GPUs per engine or, with tensor_parallel_size or pipeline_parallel_size, per process of the"
            " engine"
        ),
    )
    gpu_memory_utilization: Annotated[float, NotInDigest] = Field(
        0.9, gt=0, le=1, description="share of a GPU's memory that the engine uses"
    )
    kv_cache_gib: Annotated[float, NotInDigest] = Field(
        1.0, gt=0, description="KV cache size on a CPU machine, in GiB"
    )
    seed_answers: bool = Field(
        False,
        description=(
            "sample each answer on a GPU from its own random stream, independent of other answers; slower."
            " Always on for CPUs"
        ),
    )
    sleep: Annotated[bool, NotInDigest] = Field(
        False,
        description=(
            "in ppo: free the GPU's memory while the models score and train (the next sync sends the weights"
            " again); for a judge: free it while the judge is idle (its weights stay in host memory)"
        ),
    )
    adapters: Annotated[Literal["merged", "alone"], NotInDigest] = Field(
        "merged",
        description=(
            "what a sync sends in ppo with lora. merged: all weights, with the adapters merged; alone: only"
            " the adapters, to engines that keep the actor's starting model (vLLM's runtime LoRA), which"
            " sends less but samples more slowly"
        ),
    )
    start_timeout: Annotated[Rate, NotInDigest] = Field(
        900.0,
        description=(
            "time limit in seconds for a server (a vllm judge, alignment_tax) or a round's judge to become"
            " ready"
        ),
    )

    options: dict[str, Any] = Field(
        {},
        description=(
            "further options of vLLM's engine under its own names, such as max_num_seqs or"
            " enable_expert_parallel; they override alignflow's. For transformers: batch_size, the maximum"
            " number of answers sampled at once (64). Options that only affect speed or memory are not in the"
            " digest"
        ),
    )

    @property
    def abilities(self) -> Abilities:
        return ABILITIES[self.kind]

    @property
    def processes(self) -> int:
        """Processes of one engine, each with its own GPU."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def drafts(self) -> Any:
        """The drafting of tokens (vLLM's `speculative_config`); None if it is off."""
        return self.options.get("speculative_config")

    @check
    def _check_kind(self) -> Iterator[str]:
        if self.kind == "vllm":
            return
        without = f"engine.kind is {self.kind}, which has no"
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            if getattr(self, name) > 1:
                yield f"{without} {name}: leave it out, or set kind to vllm"
        if self.adapters == "alone":
            yield f"{without} adapters of its own: leave engine.adapters out, or set kind to vllm"
        for name in self.options.keys() - {"batch_size"}:
            yield f"{without} option {name!r}: leave it out, or set kind to vllm"
        size = self.options.get("batch_size", 1)
        if type(size) is not int or size < 1:
            yield f"engine.options.batch_size must be 1 or more, not {size!r}"

    @check
    def _check_options_of_vllm(self) -> Iterator[str]:
        if self.kind != "vllm":
            return
        yield from (
            f"engine.options.{name}: {NOT_FOR_VLLM[name]}, so leave it out"
            for name in self.options
            if name in NOT_FOR_VLLM
        )
        if self.options.get("quantization") not in (None, "fp8"):
            yield (
                "engine.options.quantization: new weights can be loaded only as fp8: set it to fp8, or leave"
                " it out"
            )
        yield from keys_that_are_no_text("engine.options", self.options)
        if self.drafts is not None and not isinstance(self.drafts, dict):
            yield (
                "engine.options.speculative_config must be a mapping, such as {method: ngram,"
                " num_speculative_tokens: 3}"
            )
        elif self.drafts is not None and self.drafts.get("method") not in ("ngram", "ngram_gpu"):
            yield (
                "engine.options.speculative_config: a separate draft model would not follow the weight"
                " updates: set method to ngram or ngram_gpu"
            )
        if self.drafts is not None and self.pipeline_parallel_size > 1:
            yield (
                "engine.options.speculative_config does not work with pipeline_parallel_size: leave one of"
                " them out"
            )
        for name in ("quantization", "speculative_config"):
            if self.options.get(name) is not None and not self.gpus:
                yield f"engine.options.{name} needs a GPU, but gpus is 0: set gpus, or leave it out"

    @check
    def _check_sleep(self) -> Iterator[str]:
        if self.sleep and not self.gpus:
            yield "engine.sleep frees a GPU's memory, but gpus is 0: set gpus, or leave sleep out"


def only_in_ppo(engine: EngineConfig) -> Iterator[str]:
    """Yields a sentence for each engine option that only ppo supports."""
    if engine.adapters != "merged":
        yield "engine.adapters is only for ppo, which sends weights to its engines: leave it out"


def without_pipeline(engine: EngineConfig) -> Iterator[str]:
    """Yields a sentence if an engine outside Ray has several pipeline stages."""
    if engine.pipeline_parallel_size > 1:
        yield (
            "engine.pipeline_parallel_size is only for the engines of ppo and preferences: leave it out"
            " (tensor_parallel_size splits a model)"
        )
