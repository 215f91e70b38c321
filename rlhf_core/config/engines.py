"""The engines that sample answers: their kinds, what each kind can do, and their options."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from rlhf_core.records import Config, NotInDigest, Positive, Rate, check, keys_that_are_no_text


class Abilities(NamedTuple):
    """Describes what a kind of engine can do. `splits`: hold a model on several GPUs; `adapters`: take new
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

# options of vLLM that `engine.options` refuses, and why.
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
        ("data_parallel_size", "data_parallel_size_local"), "it needs processes that are not reserved"
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
    "scheduler_cls": "answers are scheduled by vLLM's own",
    "enable_sleep_mode": "engine.sleep sets it",
    "enable_return_routed_experts": "routing_replay sets it",
    "hf_token": "recipes and cards would show it (HF_TOKEN is read in its place)",
}

# engine options that only decide speed or memory. They are in no digest.
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
            "vllm; or transformers: its own `generate`, slow and computed as the trainer does, for models"
            " that vLLM cannot sample"
        ),
    )
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
            "GPUs of one engine, or, with tensor_parallel_size or pipeline_parallel_size, of each of its"
            " processes"
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
            "sampling on a GPU: a random stream for each answer, so that it depends on no other; slower. On a"
            " CPU always on"
        ),
    )
    sleep: Annotated[bool, NotInDigest] = Field(
        False,
        description=(
            "in ppo: free the GPU's memory while the models score and train (the next sync sends the weights"
            " again); of a judge: while it does not judge (its weights wait in host memory)"
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
        900.0,
        description=(
            "for a server (a vllm judge, alignment_tax) and a round's judge: seconds until it must be ready"
        ),
    )

    options: dict[str, Any] = Field(
        {},
        description=(
            "further options of vLLM's engine by its own names, such as max_num_seqs or"
            " enable_expert_parallel; they override ours. For transformers: batch_size, the most answers that"
            " it samples at once (64). Options that only affect speed or memory are not in the digest"
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
        """How tokens are drafted (vLLM's `speculative_config`); None if they are not."""
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
                "engine.options.quantization: new weights could be loaded as fp8 alone: set it to fp8, or"
                " leave it out"
            )
        yield from keys_that_are_no_text("engine.options", self.options)
        if self.drafts is not None and not isinstance(self.drafts, dict):
            yield (
                "engine.options.speculative_config must be a mapping, such as {method: ngram,"
                " num_speculative_tokens: 3}"
            )
        elif self.drafts is not None and self.drafts.get("method") not in ("ngram", "ngram_gpu"):
            yield (
                "engine.options.speculative_config: another model's drafts would not follow the weights: set"
                " method to ngram or ngram_gpu"
            )
        if self.drafts is not None and self.pipeline_parallel_size > 1:
            yield (
                "engine.options.speculative_config is for engines without pipeline_parallel_size: leave one"
                " of them out"
            )
        for name in ("quantization", "speculative_config"):
            if self.options.get(name) is not None and not self.gpus:
                yield f"engine.options.{name} needs a GPU, and gpus is 0: set gpus, or leave it out"

    @check
    def _check_sleep(self) -> Iterator[str]:
        if self.sleep and not self.gpus:
            yield "engine.sleep gives a GPU's memory back, and gpus is 0: set gpus, or leave sleep out"


def only_in_ppo(engine: EngineConfig) -> Iterator[str]:
    """Yields a sentence for each engine option that only ppo supports."""
    if engine.adapters != "merged":
        yield "engine.adapters is of ppo, which sends weights to its engines: leave it out"


def without_pipeline(engine: EngineConfig) -> Iterator[str]:
    """Yields a sentence if an engine that runs without Ray has pipeline stages."""
    if engine.pipeline_parallel_size > 1:
        yield (
            "engine.pipeline_parallel_size is for the engines of ppo and preferences: leave it out"
            " (tensor_parallel_size splits a model)"
        )
