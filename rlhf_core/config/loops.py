"""Sampling by vLLM, data sets of sampled answers, and loops over both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import Field

from rlhf_core.config.data import Data
from rlhf_core.config.gates import Gated
from rlhf_core.config.rewards import ModelReward, RewardSources, title_mistakes
from rlhf_core.config.training import ROUTER, PreferenceLoss, Trainable, UnpairedLoss
from rlhf_core.records import Config, NotInDigest, Positive, Ranks, Rate, Share, check

PostProcessor = Literal["dpo", "kto", "conditional_sft", "rejection_sampling"]


class Sampling(Config):
    """How answers are sampled by vLLM."""

    temperature: float = Field(1.0, ge=0, description="sampling temperature; 0 is greedy")
    prompt_max_len: Positive = Field(1024, description="longest prompt in tokens; longer ones keep their end and are counted")
    generate_max_len: Positive = Field(1024, description="longest answer in tokens; cut answers are counted")


class Vllm(Config):
    """The vLLM engines of a stage."""

    num_engines: Annotated[Positive, NotInDigest] = Field(1, description="engines")
    cpus: Annotated[float, NotInDigest] = Field(1.0, gt=0, description="CPUs of one engine")
    tensor_parallel_size: Annotated[Positive, NotInDigest] = Field(1, description="GPUs that share one engine's model, all of one node")
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

    @check
    def _check_sleep(self) -> Iterator[str]:
        if self.sleep and not self.gpus:
            yield "vllm.sleep gives a GPU's memory back, and gpus is 0: set gpus, or leave sleep out"


def server_mistakes(vllm: Vllm) -> Iterator[str]:
    """There is not one engine without sleep."""
    if vllm.num_engines > 1 or vllm.sleep:
        yield "a server is one engine that never sleeps: leave num_engines and sleep out (tensor_parallel_size splits a model)"


class Rounds(Config):
    """Fields that a preferences stage and a loop share."""

    policy: str = Field("sft", description="model that answers; in a loop, the one that the first round starts from")
    reward: RewardSources = Field(
        (ModelReward(),), description="a reward model, path.py:function, http://..., or a list of these with weights; they are summed"
    )
    max_failed_rewards: Annotated[Share, NotInDigest] = Field(
        0.02, description="share of a round's answers a source may leave without a reward"
    )
    prompts: Data = Field(description="rows with a prompt")
    n_samples_per_prompt: Positive = Field(4, description="answers per prompt")
    min_reward: float | None = Field(
        None,
        description="rejection_sampling: a prompt whose best answer scores lower is dropped (of the weighed sum; with one reward model "
        "alone, in its own units)",
    )
    micro_rollout_batch_size: Annotated[Positive, NotInDigest] = Field(8, description="documents of one scoring pass")
    vllm: Vllm = Vllm()
    post_processor: PostProcessor = Field(
        "dpo",
        description="what a prompt's answers become. dpo: the best against the worst; kto: each answer, desirable when it scores above "
        "their mean; rejection_sampling: the best; conditional_sft: every answer with its reward",
    )

    @check
    def _check_reward(self) -> Iterator[str]:
        yield from title_mistakes(self.reward)
        for source in self.reward:
            if isinstance(source, ModelReward) and source.ranks is not None:
                yield f"the reward model {source.title} scores in the stage's own process: leave out its ranks"

    @check
    def _check_post_processor(self) -> Iterator[str]:
        if self.n_samples_per_prompt < 2 and self.post_processor != "conditional_sft":
            yield (f"post_processor {self.post_processor!r} compares answers to one prompt: set n_samples_per_prompt to 2 or more")
        if self.min_reward is not None and self.post_processor != "rejection_sampling":
            yield f"min_reward belongs to post_processor 'rejection_sampling': leave it out for {self.post_processor!r}"


class Preferences(Gated, Sampling, Rounds):
    """Sample n answers a prompt, score them, and write a data set: pairs, labelled answers, the best, or all with their rewards."""

    stage: Literal["preferences"] = "preferences"
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="of the policy and of reward models; auto: that of each checkpoint; in a loop the loop's dtype"
    )
    first_prompt: int = Field(0, ge=0, description="prompts skipped (a round takes its own slice)")
    num_prompts: Positive | None = Field(None, description="prompts used; default all")


class Loop(Sampling, Rounds, Trainable):
    """Rounds of sampling and training; round k starts from round k-1. Expands into stages of its own in the plan."""

    rounds: Positive = Field(2, description="rounds")
    max_len: int = Field(0, ge=0, description="longest sequence in training, in tokens; 0: prompt_max_len + generate_max_len")
    prompts_per_round: Positive = Field(1024, description="each round takes the next slice of the prompts")
    learning_rate: Rate = Field(5e-7, description="peak learning rate of each round")
    router_aux_coef: float = Field(0.0, ge=0, description=ROUTER)


class IterativeDPO(Loop, PreferenceLoss):
    """Rounds of (preferences, dpo): `iterative` with the post-processor dpo."""

    stage: Literal["iterative_dpo"] = "iterative_dpo"
    post_processor: Literal["dpo"] = Field("dpo", description="the best answer against the worst")


class Iterative(Loop, PreferenceLoss, UnpairedLoss):
    """Rounds of sampling and of the training that `post_processor` names: dpo, kto, or sft."""

    stage: Literal["iterative"] = "iterative"
    post_processor: PostProcessor = Field(
        description="dpo: pairs; kto: labelled answers; rejection_sampling, conditional_sft: SFT on answers"
    )
    packing: bool = Field(True, description="rejection_sampling, conditional_sft: pack documents into rows of max_len")

    @check
    def _check_owners(self) -> Iterator[str]:
        """A field that the chosen post-processor does not read would be a wish that nobody hears."""
        if self.post_processor == "kto" and self.train_batch_size < 2:
            yield "post_processor 'kto' estimates its KL over train_batch_size answers: set it to 2 or more"
        for field, owners in POST_PROCESSOR_FIELDS.items():
            if self.post_processor not in owners and getattr(self, field) != type(self).model_fields[field].default:
                yield f"{field} belongs to post_processor {' or '.join(owners)}: leave it out for {self.post_processor!r}"


POST_PROCESSOR_FIELDS: dict[str, tuple[PostProcessor, ...]] = {
    **dict.fromkeys(("loss", "label_smoothing", "nll_coef", "gamma", "lambd"), ("dpo",)),
    "beta": ("dpo", "kto"),
    **dict.fromkeys(UnpairedLoss.model_fields, ("kto",)),
    "packing": ("rejection_sampling", "conditional_sft"),
}


Wanted = Ranks | Vllm


def processes(wanted: Wanted) -> int:
    return wanted.world_size if isinstance(wanted, Ranks) else wanted.num_engines * wanted.tensor_parallel_size


def check_together(groups: Mapping[str, Wanted]) -> None:
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
