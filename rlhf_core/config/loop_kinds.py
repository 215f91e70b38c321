"""Configures sampling by an engine, data sets of sampled answers, and loops over both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Field

from rlhf_core.config.data import Data, Text
from rlhf_core.config.engines import EngineConfig, only_in_ppo
from rlhf_core.config.gates import AskedServer, Gated, chat_servers
from rlhf_core.config.process_groups import Groups
from rlhf_core.config.rewarding.judge_models import EngineJudge, OwnJudge, RatingModel
from rlhf_core.config.rewarding.judge_reward import JudgeReward
from rlhf_core.config.rewards import (
    EnvironmentReward,
    HttpReward,
    ModelReward,
    NoReward,
    RewardSources,
    normalized_in_groups,
)
from rlhf_core.config.training.pass_size import FULL_PASS, ROWS, PassSize, pass_size
from rlhf_core.config.training.preference import PreferenceLoss, UnpairedLoss
from rlhf_core.config.training.trainable import Trainable, TrainedPolicy
from rlhf_core.records import Config, NotInDigest, Positive, Rate, Share, check

ACROSS_PROMPTS = ("rejection_sampling", "conditional_sft")  # these need rewards on one scale for all prompts
PostProcessor = Literal["dpo", "kto", "conditional_sft", "rejection_sampling"]


class SamplingFields(Config):
    """Fields for how answers are sampled, and how many are scored at once."""

    temperature: float = Field(
        1.0,
        ge=0,
        description="sampling temperature; 0: greedy (not in ppo, which divides the trainer's logits by it)",
    )
    prompt_max_len: Positive = Field(
        1024,
        description=(
            "maximum prompt length in tokens; longer prompts lose their oldest messages, then the beginning"
            " of the last message, and are counted; longer prompts with images are left out"
        ),
    )
    generate_max_len: Positive = Field(1024, description="maximum answer tokens; cut answers are counted")
    micro_rollout_batch_size: Annotated[Positive | None, NotInDigest] = Field(
        None,
        description=(
            f"documents per scoring pass on one rank; default: as many as have the tokens of {ROWS} documents"
            f" of maximum length, but at most {FULL_PASS} tokens or one document"
        ),
    )
    engine: EngineConfig = Field(EngineConfig(), description="the engines that sample answers")

    @property
    def most_tokens(self) -> tuple[int, str]:
        """The maximum length in tokens of prompt and answer together, and the fields that set it."""
        return self.prompt_max_len + self.generate_max_len, "prompt_max_len + generate_max_len"

    @property
    def scoring_pass(self) -> PassSize:
        """The size of a pass without gradients."""
        return pass_size(self.micro_rollout_batch_size, None, self.most_tokens[0])


class Rewarded(Gated, SamplingFields):
    """Fields of stages whose sampled answers receive rewards."""

    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description=(
            "sample from the smallest set of most probable tokens whose probabilities add up to this"
            " (Holtzman et al. 2020); ppo trains that distribution"
        ),
    )
    top_k: int = Field(
        0,
        ge=0,
        description=(
            "sample from this many of the most probable tokens; 0: all tokens; ppo trains that distribution"
        ),
    )
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (),
        description=(
            "strings that end an answer, besides the template's end of turn; the answer includes the string"
        ),
    )
    reward: RewardSources = Field(
        (ModelReward(),),
        description=(
            "a reward model, path.py:function, http://..., math, code, reasoning_gym, a judge, or a list of"
            " these, summed with their weights"
        ),
    )
    max_failed_rewards: Annotated[Share, NotInDigest] = Field(
        0.02,
        description=(
            "share of a round's answers (in ppo: an iteration's) that a source may leave without a reward"
        ),
    )
    prompts: Data = Field(description="rows with a prompt")

    @check
    def _check_stop(self) -> Iterator[str]:
        if self.stop and self.engine.drafts is not None:
            yield (
                "stop can end an answer at any token, but speculative decoding adds several tokens at once:"
                " leave out stop, or engine.options.speculative_config"
            )

    @property
    def compares_group(self) -> bool:
        """Whether a judge compares the answers to one prompt with each other."""
        judges = (source for source in self.reward if isinstance(source, JudgeReward))
        return any(source.compare == "group" for source in judges)

    def group_mistakes(self, answers: int) -> Iterator[str]:
        """Yields a sentence if a reward compares the answers to one prompt, but there is only one answer per
        prompt."""
        if answers > 1:
            return
        if self.compares_group:
            yield "compare: group compares the answers to one prompt: set n_samples_per_prompt to 2 or more"
        if normalized_in_groups(self.reward):
            yield "normalize group compares the answers to one prompt: set n_samples_per_prompt to 2 or more"

    @property
    def reward_models(self) -> tuple[ModelReward, ...]:
        return tuple(source for source in self.reward if isinstance(source, ModelReward))

    @property
    def own_judges(self) -> Sequence[OwnJudge]:
        """The judges on engines that the stage starts."""
        return [
            OwnJudge(
                "reward.judge" if len(self.reward) == 1 else f"reward.{i}.judge", source.title, source.judge
            )
            for i, source in enumerate(self.reward)
            if isinstance(source, JudgeReward) and isinstance(source.judge, EngineJudge)
        ]

    @property
    def nested_names(self) -> Sequence[tuple[str, str, str]]:
        return [(f"{judge.place}.model", judge.model.model, "policy") for judge in self.own_judges]

    @property
    def turns(self) -> Sequence[Groups]:
        judges = [{judge.group: judge.model.engine} for judge in self.own_judges]
        return [{"sampler": self.engine}, *judges]

    def lengths(self, start: str) -> Mapping[tuple[str, str], tuple[int, str]]:
        found = {("", start): self.most_tokens}
        for place, _, judge in self.own_judges:
            needed = (judge.max_tokens, "max_tokens")
            if judge.max_model_len is not None:
                needed = (judge.max_model_len, "max_model_len")
            found[f".{place}", judge.model] = needed
        return found

    @property
    def texts(self) -> Sequence[Text]:
        return [Text("prompts", self.prompts, "prompt", "prompt_max_len", self.prompt_max_len)]

    @property
    def servers(self) -> Sequence[AskedServer]:
        own = (source for source in self.reward if isinstance(source, HttpReward))
        judges = [
            (f"the reward {source.title}", source.judge)
            for source in self.reward
            if isinstance(source, JudgeReward) and isinstance(source.judge, RatingModel)
        ]
        return [
            AskedServer(f"the reward {source.title}", source.url, source.api_key_env) for source in own
        ] + chat_servers(judges)


class Rounds(Rewarded):
    """Fields that preferences stages and loops share."""

    policy: str = Field(
        "sft",
        description="model that samples the answers; in a loop: the model that the first round starts from",
    )
    n_samples_per_prompt: Positive = Field(4, description="answers per prompt")
    min_reward: float | None = Field(
        None,
        description=(
            "rejection_sampling: drop prompts whose best answer scores lower than this (weighted sum; with a"
            " single reward model, in its own units)"
        ),
    )
    post_processor: PostProcessor = Field(
        "dpo",
        description=(
            "training data made from a prompt's answers. dpo: a pair of the best and the worst; kto: each"
            " answer, desirable when it scores above their mean; rejection_sampling: the best;"
            " conditional_sft: every answer with its reward"
        ),
    )

    @property
    def answering(self) -> Sequence[tuple[str, str]]:
        return [("policy", self.policy)]

    @check
    def _check_engines(self) -> Iterator[str]:
        yield from only_in_ppo(self.engine)

    @check
    def _check_reward(self) -> Iterator[str]:
        if any(isinstance(source, EnvironmentReward | NoReward) for source in self.reward):
            yield (
                "reward: environment and none work only in ppo: name a reward model, a function, a server or"
                " a judge"
            )
        yield from self.group_mistakes(self.n_samples_per_prompt)
        for source in self.reward_models:
            if source.ranks is not None:
                yield (
                    f"the reward model {source.title} runs in the stage's own process: leave out its ranks"
                )
        for judge in self.own_judges:
            if judge.model.engine.sleep:
                yield (
                    f"the judge {judge.title} has the GPUs to itself while it judges a round: leave out"
                    " engine.sleep"
                )

    @check
    def _check_post_processor(self) -> Iterator[str]:
        if self.n_samples_per_prompt < 2 and self.post_processor != "conditional_sft":
            yield (
                f"post_processor {self.post_processor!r} compares the answers to one prompt: set"
                " n_samples_per_prompt to 2 or more"
            )
        if self.min_reward is not None and self.post_processor != "rejection_sampling":
            yield (
                "min_reward applies only to post_processor 'rejection_sampling': leave it out for"
                f" {self.post_processor!r}"
            )
        if normalized_in_groups(self.reward) and self.post_processor in ACROSS_PROMPTS:
            yield (
                f"post_processor {self.post_processor!r} needs rewards on one scale for all prompts, but"
                " normalize group shifts each prompt's rewards to mean 0: set normalize to none or running"
            )


class Preferences(Rounds):
    """Samples n answers per prompt, scores them, and writes a data set: pairs, labelled answers, the best
    answers, or all answers with their rewards."""

    stage: Literal["preferences"] = "preferences"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description=(
            "dtype of the policy and the reward models; auto: the dtype of each checkpoint; in a loop: the"
            " loop's dtype"
        ),
    )
    first_prompt: int = Field(
        0, ge=0, description="number of prompts to skip (each round sets its own slice)"
    )
    num_prompts: Positive | None = Field(None, description="number of prompts to use; default: all")

    @property
    def made_for(self) -> PostProcessor:
        return self.post_processor

    def rows_made(self, prompts: int) -> int:
        used = min(self.num_prompts or prompts, prompts)
        is_one_each = self.post_processor in ("dpo", "rejection_sampling")
        return used if is_one_each else used * self.n_samples_per_prompt


class Loop(Trainable, TrainedPolicy):
    """Rounds of training, each of which starts from the model of the previous round. The plan expands a loop
    into stages."""

    policy: str = Field("sft", description="model that the first round starts from")
    rounds: Positive = Field(2, le=1000, description="number of rounds, at most 1000")
    learning_rate: Rate = Field(5e-7, description="peak learning rate of each round")

    @check
    def _check_no_ema(self) -> Iterator[str]:
        if self.ema is not None:
            yield (
                "ema: each round of a loop exports only one model: leave ema out, or write the rounds as"
                " stages"
            )

    @check
    def _check_no_sweep(self) -> Iterator[str]:
        if self.sweep:
            yield (
                "sweep: a loop cannot have variants: sweep a stage before it, or write a loop for each value"
            )


class SampledLoop(Rounds, Loop):
    """Rounds of sampling answers, then training on them."""

    max_len: int = Field(
        0,
        ge=0,
        description="maximum sequence length in training, in tokens; 0: prompt_max_len + generate_max_len",
    )
    prompts_per_round: Positive = Field(1024, description="give each round the next slice of the prompts")


class IterativeDPO(SampledLoop, PreferenceLoss):
    """Rounds of a preferences stage and a dpo stage: `iterative` with the post-processor dpo."""

    stage: Literal["iterative_dpo"] = "iterative_dpo"
    post_processor: Literal["dpo"] = Field("dpo", description="pairs of the best and the worst answer")


class Iterative(SampledLoop, PreferenceLoss, UnpairedLoss):
    """Rounds of sampling, then training as `post_processor` requires: dpo, kto, or sft."""

    stage: Literal["iterative"] = "iterative"
    post_processor: PostProcessor = Field(
        description=(
            "how each round trains. dpo: DPO on pairs; kto: KTO on labelled answers; rejection_sampling,"
            " conditional_sft: SFT on answers"
        )
    )
    packing: Annotated[bool, NotInDigest] = Field(
        True, description="rejection_sampling, conditional_sft: pack several documents into a row"
    )

    @check
    def _check_owners(self) -> Iterator[str]:
        """Yields a sentence for each field that the chosen post-processor does not read, and for KTO batches
        of one answer."""
        if self.post_processor == "kto" and self.train_batch_size < 2:
            yield "post_processor 'kto' estimates its KL over train_batch_size answers: set it to 2 or more"
        for field, owners in POST_PROCESSOR_FIELDS.items():
            if (
                self.post_processor not in owners
                and getattr(self, field) != type(self).model_fields[field].default
            ):
                yield (
                    f"{field} applies only to post_processor {' or '.join(owners)}: leave it out for"
                    f" {self.post_processor!r}"
                )


class IterativeFeedback(Loop, PreferenceLoss, UnpairedLoss):
    """Rounds of training on people's feedback: each round takes the new rows of its inbox."""

    stage: Literal["iterative_feedback"] = "iterative_feedback"
    method: Literal["dpo", "kto"] = Field(
        description="dpo: train on edits and rankings, as pairs; kto: train on thumbs, as labelled answers"
    )
    feedback: Data = Field(
        description="an inbox (NAME.inbox), and optionally other sources, which are the same in each round"
    )
    min_new_rows: Annotated[Positive, NotInDigest] = Field(
        1, description="number of new rows for this method that the inbox must hold before a round starts"
    )

    @property
    def texts(self) -> Sequence[Text]:
        return [
            Text(
                "feedback",
                self.feedback,
                "preference" if self.method == "dpo" else "labelled",
                "max_len",
                self.max_len,
            )
        ]

    @property
    def new_rows_needed(self) -> int:
        return self.min_new_rows

    @check
    def _check_feedback(self) -> Iterator[str]:
        if not any(source.is_inbox for source in self.feedback.sources):
            yield (
                "feedback: no source is an inbox, so rounds would have no new rows: name a folder that ends"
                " with .inbox"
            )
        if self.method == "kto" and self.train_batch_size < 2:
            yield "method 'kto' estimates its KL over train_batch_size answers: set it to 2 or more"
        for field, owners in METHOD_FIELDS.items():
            if self.method not in owners and getattr(self, field) != type(self).model_fields[field].default:
                yield (
                    f"{field} applies only to method {' or '.join(owners)}: leave it out for {self.method!r}"
                )


METHOD_FIELDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("loss", "label_smoothing", "nll_coef", "gamma", "lambd"), ("dpo",)),
    **dict.fromkeys(UnpairedLoss.model_fields, ("kto",)),
}
POST_PROCESSOR_FIELDS: dict[str, tuple[PostProcessor, ...]] = {
    **dict.fromkeys(("loss", "label_smoothing", "nll_coef", "gamma", "lambd"), ("dpo",)),
    "beta": ("dpo", "kto"),
    **dict.fromkeys(UnpairedLoss.model_fields, ("kto",)),
    "packing": ("rejection_sampling", "conditional_sft"),
}
