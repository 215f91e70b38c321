"""PPO and its critic-free relatives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from rlhf_core.config.data import Data, Text
from rlhf_core.config.loop_kinds import Rewarded
from rlhf_core.config.process_groups import Groups, Wanted, check_together
from rlhf_core.config.rewards import Environment, EnvironmentReward, NoReward, ShortEnvironment
from rlhf_core.config.training.optimised import Optimised, Routed, adapter_mistakes
from rlhf_core.records import NotInDigest, Off, Positive, Ranks, Rate, Share, check

AdvantageEstimator = Literal["gae", "grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"]
Aggregation = Literal["token", "sequence", "constant"]
AGGREGATIONS: dict[str, Aggregation] = {"grpo": "sequence", "dr_grpo": "constant"}  # the others: "token"
# these compare the answers to one prompt
GROUP_ESTIMATORS = ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline")


def pass_sizes(samples: int) -> list[int]:
    """Returns each k for which pass@k is reported with `samples` answers per prompt: 1, 2, 4, ... and
    `samples`."""
    return sorted({1 << power for power in range(samples.bit_length())} | {samples})


class PPO(Optimised, Rewarded, Routed):
    """Proximal policy optimisation (Schulman et al. 2017) and its critic-free relatives. Each model runs on
    its own Ray group; vLLM generates the rollouts."""

    stage: Literal["ppo"] = "ppo"
    actor: str = Field("sft", description="model to train")
    critic: str | None = Field(
        None, description="value model; default: starts from the first reward model; only for gae"
    )
    reference: str | None = Field(
        None,
        description=(
            "KL anchor; default: the actor before training, or, with init_kl_coef 0 and no kl_target, none:"
            " no KL is measured"
        ),
    )

    environment: ShortEnvironment | None = Field(
        None,
        description=(
            "what the actor talks to in several turns and with tools: path.py:Class, or guess or tools; it"
            " gives the reward, unless `reward` names other sources"
        ),
    )

    advantage_estimator: AdvantageEstimator = Field(
        "gae",
        description=(
            "gae: PPO with a critic; grpo, dr_grpo, rloo, reinforce_pp, reinforce_pp_baseline: no critic is"
            " started"
        ),
    )
    loss_aggregation: Aggregation | None = Field(
        None,
        description=(
            "mean of the loss over all tokens (token), per answer and then over answers (sequence), or over"
            " answers times generate_max_len (constant); default: sequence for grpo, constant for dr_grpo,"
            " sequence for ratio sequence, else token"
        ),
    )
    policy_loss: Literal["clip", "cispo"] = Field(
        "clip",
        description=(
            "clip: PPO's clipped surrogate; cispo: the clipped ratio weighs the log-prob, without a gradient"
            " (MiniMax-M1, 2025)"
        ),
    )
    ratio: Literal["token", "sequence"] = Field(
        "token", description="policy ratio of each token, or of the whole answer (GSPO)"
    )

    rollout_batch_size: Positive = Field(512, description="prompts of one iteration")
    n_samples_per_prompt: Positive = Field(1, description="answers per prompt")
    micro_rollout_tokens: Annotated[Positive | None, NotInDigest] = Field(
        None,
        description=(
            "tokens of one scoring pass on one rank, in place of micro_rollout_batch_size; as"
            " micro_train_tokens"
        ),
    )
    num_episodes: Positive = Field(1, description="passes over the prompts")
    max_steps: Positive | None = Field(None, description="stop after this many iterations")

    actor_learning_rate: Rate = Field(1e-6, description="peak learning rate of the actor")
    critic_learning_rate: Rate = Field(9e-6, description="peak learning rate of the critic")

    init_kl_coef: float = Field(0.01, ge=0, description="coefficient of the per-token KL")
    kl_in: Literal["reward", "loss"] = Field(
        "reward", description="the KL is subtracted from the reward, or added to the loss (k2, k3)"
    )
    kl_target: float | None = Field(
        None,
        gt=0,
        description=(
            "adapt the coefficient so that kl/mean, in nats per token, comes to this (Ziegler et al. 2019,"
            " whose target is per answer: divide it by the answers' length); default: fixed"
        ),
    )
    kl_horizon: Positive = Field(
        10000,
        description="answers over which the coefficient adapts: it changes by 2 % at most in a tenth of them",
    )
    kl_estimator: Literal["k1", "k2", "k3"] = Field(
        "k1", description="KL estimator (Schulman 2020); k1 suits kl_in reward, k2 suits kl_in loss"
    )
    gamma: Share = Field(1.0, description="discount")
    lambd: Share = Field(0.95, description="GAE lambda")
    eps_clip: Rate = Field(0.2, description="clip of the policy ratio, both ways")
    eps_clip_low: Rate | None = Field(None, description="clip of the ratio below 1; default eps_clip")
    eps_clip_high: Rate | None = Field(
        None, description="clip of the ratio above 1 (clip-higher, DAPO); default eps_clip"
    )
    dual_clip: float | None = Field(
        None, gt=1, description="bound of the objective where advantages are negative (Ye et al. 2020)"
    )
    entropy_coef: float = Field(0.0, ge=0, description="coefficient of the entropy bonus")
    value_clip: Rate | None = Field(
        0.2,
        description=(
            "how far the critic's values may move in the loss of an iteration, in standard deviations of its"
            " returns (in units of reward where all returns are equal); null: as far as they like, for a"
            " critic that lags behind"
        ),
    )
    reward_clip: Rate = Field(10.0, description="rewards are clipped to +- this, before KL and penalties")
    reward_at: Literal["last_token", "every_token"] = Field(
        "last_token",
        description=(
            "the reward is given on the answer's last token (end of sequence), or in equal parts on all of"
            " its tokens"
        ),
    )
    normalize_reward: bool = Field(
        False, description="standardise each reward model's scores with the mean and std stored with it"
    )
    overlong_buffer: int = Field(
        0,
        ge=0,
        description="last tokens below generate_max_len with a growing penalty (DAPO, eq. 13); 0: none",
    )
    overlong_penalty: Rate = Field(
        1.0,
        description=(
            "penalty of an answer of generate_max_len tokens, of an episode with what tools and users say"
            " after the prompt"
        ),
    )
    truncated_penalty: float = Field(
        0.0,
        ge=0,
        description=(
            "is subtracted from the reward of an answer or episode that a limit of tokens, turns or time cut "
            "(missing_eos_penalty in TRL); use it where cut answers score too well, or never learn to end"
        ),
    )
    mask_truncated: bool = Field(
        False,
        description=(
            "answers and episodes that a limit cut are not trained on, though their rewards count in the"
            " baselines of the others (overlong filtering, DAPO, section 3.4); use it where a cut answer may"
            " be right so far, as long reasoning is"
        ),
    )
    bootstrap_truncated: bool = Field(
        False,
        description=(
            "gae: an answer that generate_max_len cut gets gamma times the critic's value of the whole text"
            " in place of its reward (Pardo et al. 2018, time limits); use it where the limit is a matter of"
            " cost and no part of the task"
        ),
    )
    dynamic_filtering: bool = Field(
        False, description="groups whose answers all have one reward are replaced by others (DAPO)"
    )
    max_filter_rounds: Positive = Field(
        10, description="rounds of sampling to fill an iteration; what is there then is trained on"
    )
    filter_min_spread: float = Field(
        1e-6,
        ge=0,
        description=(
            "a group has no signal when its rewards, standardised, clipped and with penalties, differ by no"
            " more than this"
        ),
    )
    whiten_advantages: bool = Field(
        True,
        description=(
            "advantages of gae and reinforce_pp get mean 0 and std 1 over the whole rollout"
            " (reinforce_pp_baseline: always; other group estimators: never)"
        ),
    )
    stream_batch_size: Annotated[Positive | None, NotInDigest] = Field(
        None,
        description=(
            "prompts whose answers are scored together, as soon as engines on GPUs of their own have finished"
            " these, while they answer others; default: all of the iteration, after the last answer"
        ),
    )
    freezing_actor_steps: int = Field(0, ge=0, description="first N iterations train only the critic")
    max_staleness: int = Field(
        0,
        ge=0,
        description=(
            "asynchronous training: iterations between the begin of an answer and its training, at most;"
            " engines have GPUs of their own. 1: they answer the next prompts while this iteration trains. 2"
            " or more: they answer without pause, weights change between two tokens, long answers go on over"
            " updates; sampler_is corrects for older weights"
        ),
    )
    sampler_is: Annotated[Literal["truncate", "clamp", "mask", "off"], Off] = Field(
        "truncate",
        description=(
            "importance weights trainer / sampler: capped at sampler_is_cap, kept within sampler_is_clamp, 0"
            " outside of it (mask, IcePop), or none"
        ),
    )
    sampler_is_level: Literal["token", "sequence", "geometric"] = Field(
        "token",
        description=(
            "importance weights of each token, or one of the whole answer for all of its tokens: the product"
            " (sequence), whose spread grows with the answer's length, or the geometric mean (geometric),"
            " which suits sampler_is mask with narrow bounds, such as sampler_is_clamp [0.98, 1.02]"
        ),
    )
    sampler_is_cap: float = Field(2.0, gt=0, description="cap of the truncated importance weight")
    sampler_is_clamp: tuple[float, float] = Field(
        (0.5, 5.0),
        description=(
            "bounds of the clamped or masked importance weight; what is masked is in no mean of the loss"
        ),
    )

    eval_prompts: Data | None = Field(
        None,
        description=(
            "prompts that are answered and scored while the actor trains, and at its end; the checkpoint is"
            " then the iteration with the highest mean reward (or the model before training)"
        ),
    )
    eval_steps: Positive = Field(10, description="iterations between two validations on eval_prompts")
    eval_samples: Positive = Field(1, description="answers to each of eval_prompts")
    eval_temperature: float | None = Field(
        None,
        ge=0,
        description=(
            "temperature of the answers to eval_prompts; default: that of the training, so that what is"
            " measured is what is trained; set it to that of the model's use (0: greedy, one answer each)"
        ),
    )
    eval_top_p: float | None = Field(
        None, gt=0, le=1, description="top_p of the answers to eval_prompts; default: that of the training"
    )
    eval_right: float | None = Field(
        None,
        description=(
            "an answer of at least this reward is right: the share of right answers is reported, and pass@k"
            " for k = 1, 2, 4, ... and eval_samples"
        ),
    )
    stop_when: Positive | None = Field(
        None, description="stop after this many validations in a row without a higher mean reward"
    )

    export_at: tuple[Positive, ...] = Field(
        (),
        description=(
            "iterations after which the actor is also exported as a model, which other stages name"
            " STAGE.iterationN"
        ),
    )
    timeout: Annotated[Positive, NotInDigest] = Field(
        600,
        description=(
            "seconds any rank may make no progress (passes, tokens, weights, bytes of files) before the run"
            " stops and names it"
        ),
    )

    routing_replay: bool = Field(
        True,
        description=(
            "experts on GPUs, without engine.pipeline_parallel_size: tokens go to those that vLLM chose (R3,"
            " Ma et al. 2025)"
        ),
    )

    actor_ranks: Annotated[Ranks, NotInDigest] = Ranks()
    critic_ranks: Annotated[Ranks, NotInDigest] = Ranks()
    reference_ranks: Annotated[Ranks, NotInDigest] = Field(
        Ranks(),
        description=(
            "unused with `lora` where the reference is the actor's starting model: it is the actor without"
            " adapters then"
        ),
    )
    reward_ranks: Annotated[Ranks, NotInDigest] = Ranks()
    colocate_actor_ref: Annotated[bool, NotInDigest] = Field(
        False, description="actor and reference share their GPUs, rank by rank"
    )
    colocate_critic_reward: Annotated[bool, NotInDigest] = Field(
        False, description="critic and reward models share their GPUs, rank by rank"
    )
    colocate_all: Annotated[bool, NotInDigest] = Field(
        False,
        description="all models and the engines share the same GPUs, rank by rank; usually with engine.sleep",
    )
    ref_reward_offload: Annotated[bool, NotInDigest] = Field(
        False, description="reference and reward models are in host memory while they do not score"
    )
    ref_reward_shard: Annotated[bool, NotInDigest] = Field(
        False,
        description=(
            "reference and reward models are cut over their ranks (ZeRO-3), which fetch a layer at a time"
            " while they score"
        ),
    )
    adam_offload: Annotated[tuple[Literal["actor", "critic"], ...], NotInDigest] = Field(
        (),
        description=(
            "these roles' optimiser states are in host memory, where their steps run; true: actor and critic"
        ),
    )
    param_offload: Annotated[tuple[Literal["actor", "critic"], ...], NotInDigest] = Field(
        (),
        description=(
            "these roles' shards of the weights, under ZeRO-3, are in host memory; a layer at a time goes to"
            " the GPU"
        ),
    )

    @property
    def texts(self) -> Sequence[Text]:
        own = (
            []
            if self.eval_prompts is None
            else [Text("eval_prompts", self.eval_prompts, "prompt", "prompt_max_len", self.prompt_max_len)]
        )
        return [*super().texts, *own]

    @property
    def answering(self) -> Sequence[tuple[str, str]]:
        return [("actor", self.actor)]

    @property
    def talks_to(self) -> Environment | None:
        return self.environment

    @property
    def exports(self) -> Sequence[str]:
        return [f"iteration{number}" for number in self.export_at]

    @property
    def has_critic(self) -> bool:
        return self.advantage_estimator == "gae"

    @property
    def has_reference(self) -> bool:
        """Whether a reference is loaded: the recipe names one, or a KL to it is measured."""
        return self.reference is not None or self.init_kl_coef > 0 or self.kl_target is not None

    @property
    def reference_in_actor(self) -> bool:
        """Whether the reference is the actor without its adapters: both start from the same model, whose
        weights are frozen."""
        return self.has_reference and self.lora is not None and self.reference in (None, self.actor)

    @property
    def scorings(self) -> dict[str, int]:
        """How often each group scores the answers of an iteration."""
        return dict.fromkeys(self.groups, 1) | {"actor": (not self.one_update) + self.reference_in_actor}

    @property
    def replays_routing(self) -> bool:
        """Whether vLLM reports which experts it sent tokens to. With pipeline stages, each knows only those
        of its own layers."""
        return (
            self.routing_replay and self.engine.abilities.routing and self.engine.pipeline_parallel_size == 1
        )

    @property
    def continuous(self) -> bool:
        """Whether engines answer without pause, across weight updates."""
        return self.max_staleness > 1

    @property
    def aggregation(self) -> Aggregation:
        """The configured aggregation of the loss, or the default for the ratio and estimator."""
        return self.loss_aggregation or (
            "sequence" if self.ratio == "sequence" else AGGREGATIONS.get(self.advantage_estimator, "token")
        )

    @property
    def sampler_is_bounds(self) -> tuple[float, float]:
        """The bounds of importance weights."""
        return (0.0, self.sampler_is_cap) if self.sampler_is in ("truncate", "off") else self.sampler_is_clamp

    @property
    def one_update(self) -> bool:
        """Whether an iteration is one on-policy optimiser step that needs no log-probs beforehand, neither
        for rewards nor for masking tokens. The log-probs then come from the training pass."""
        steps = self.max_epochs * (
            self.rollout_batch_size * self.n_samples_per_prompt // self.train_batch_size
        )
        needed = (self.kl_in == "reward" and self.has_reference) or self.sampler_is == "mask"
        return steps == 1 and not self.freezing_actor_steps and not needed

    @property
    def clips(self) -> tuple[float, float]:
        """How far the policy ratio may go below 1 and above it."""
        return self.eps_clip_low or self.eps_clip, self.eps_clip_high or self.eps_clip

    @property
    def longest(self) -> int:
        return self.prompt_max_len + self.generate_max_len

    @property
    def trained_ranks(self) -> dict[str, Ranks]:
        return {"actor_ranks": self.actor_ranks} | (
            {"critic_ranks": self.critic_ranks} if self.has_critic else {}
        )

    def offloaded(self, what: Literal["adam", "param"]) -> tuple[str, ...]:
        return self.adam_offload if what == "adam" else self.param_offload

    @property
    def groups(self) -> dict[str, Ranks]:
        """The processes of each model; reward models are called `reward:<title>`."""
        trained = {"actor": self.actor_ranks} | ({"critic": self.critic_ranks} if self.has_critic else {})
        rewards = {
            f"reward:{source.title}": source.ranks or self.reward_ranks for source in self.reward_models
        }
        loaded = self.has_reference and not self.reference_in_actor
        return trained | ({"reference": self.reference_ranks} if loaded else {}) | rewards

    def sharing_of(self, role: str) -> int:
        """Returns how many ranks of a group compute each pass together: 1 for a read-only model whose number
        of ranks `sequence_parallel_size` does not divide."""
        return (
            1 if self.groups[role].world_size % self.sequence_parallel_size else self.sequence_parallel_size
        )

    @property
    def placed(self) -> dict[str, Wanted]:
        """All groups, including the engines as `sampler`."""
        return {**self.groups, "sampler": self.engine}

    @property
    def turns(self) -> Sequence[Groups]:
        return [self.placed]

    @property
    def read_only(self) -> list[str]:
        """The groups of models that are not trained."""
        return [name for name in self.groups if name not in ("actor", "critic")]

    @property
    def together(self) -> list[list[str]]:
        if self.colocate_all:
            return [[*self.groups, "sampler"]]
        critic_reward = [name for name in self.groups if name == "critic" or name.startswith("reward:")]
        actor_ref = ["actor", "reference"]
        chosen = (
            (self.colocate_actor_ref and "reference" in self.groups, actor_ref),
            (self.colocate_critic_reward, critic_reward),
        )
        return [names for wanted, names in chosen if wanted]

    @field_validator("adam_offload", "param_offload", mode="before")
    @classmethod
    def _both(cls, value: object) -> object:
        if isinstance(value, bool):
            return ("actor", "critic") if value else ()
        return value

    @check
    def _check_family(self) -> Iterator[str]:
        estimator = self.advantage_estimator
        if self.temperature == 0:
            yield (
                "temperature=0 gives the same answer every time, there is nothing to compare: set it above 0,"
                " usually to 1"
            )
        if any(isinstance(source, NoReward) for source in self.reward):
            if (
                self.reference is None
                or self.kl_in != "reward"
                or not self.init_kl_coef
                or len(self.reward) > 1
            ):
                yield (
                    "reward none learns from the KL to a teacher alone: set reference to the teacher,"
                    " init_kl_coef to 1, kl_in to reward, and name no other reward"
                )
            if self.eval_prompts is not None or self.dynamic_filtering:
                yield "eval_prompts and dynamic_filtering compare rewards, and reward is none: leave them out"
        if self.has_critic and self.critic is None and not self.reward_models:
            yield (
                "gae needs a critic, and there is no reward model to start it from: set critic, or a"
                " critic-free estimator"
            )
        if not self.has_critic and (self.critic is not None or self.freezing_actor_steps):
            yield (
                f"{estimator} has no critic: leave out critic and freezing_actor_steps, or set"
                " advantage_estimator to gae"
            )
        if self.n_samples_per_prompt < 2 and (estimator in GROUP_ESTIMATORS or self.dynamic_filtering):
            what = estimator if estimator in GROUP_ESTIMATORS else "dynamic_filtering"
            yield f"{what} compares the answers to one prompt: set n_samples_per_prompt to 2 or more"
        if self.kl_target is not None and not self.init_kl_coef:
            yield (
                "kl_target multiplies the coefficient, which stays 0 with init_kl_coef 0: set init_kl_coef"
                " above 0, or leave out kl_target"
            )
        if self.kl_in == "loss" and self.kl_estimator == "k1":
            yield (
                "k1 as a loss has an expected gradient of zero: set kl_estimator to k2, whose gradient is"
                " that of the KL, or kl_in to reward"
            )
        if self.overlong_buffer >= self.generate_max_len:
            yield (
                f"overlong_buffer={self.overlong_buffer} must be below"
                f" generate_max_len={self.generate_max_len}"
            )
        yield from self._bootstrap_mistakes()
        if self.ratio == "sequence" and self.sampler_is == "mask" and self.sampler_is_level == "token":
            yield (
                "sampler_is mask leaves out single tokens, and ratio sequence is of whole answers: set"
                " sampler_is_level to geometric or sequence"
            )
        if self.bootstrap_truncated and self.dynamic_filtering:
            yield (
                "dynamic_filtering compares rewards before the critic's values are known, which"
                " bootstrap_truncated puts in their place: leave one of them out"
            )
        if self.policy_loss == "cispo" and (self.dual_clip is not None or self.ratio == "sequence"):
            yield (
                "cispo weighs each token's log-prob: leave out dual_clip and ratio, or set policy_loss to"
                " clip"
            )
        if not 0 < self.sampler_is_clamp[0] <= 1 <= self.sampler_is_clamp[1]:
            yield (
                f"sampler_is_clamp={list(self.sampler_is_clamp)} must be two numbers around 1, such as"
                " [0.5, 5]"
            )

    def _bootstrap_mistakes(self) -> Iterator[str]:
        if not self.bootstrap_truncated:
            return
        if not self.has_critic:
            estimator = self.advantage_estimator
            yield (
                f"bootstrap_truncated needs a critic, and {estimator} has none: leave it out, or set"
                " mask_truncated"
            )
        if self.mask_truncated:
            yield (
                "bootstrap_truncated and mask_truncated are two ways to treat answers that a limit cut: set"
                " one of them"
            )
        if self.environment is not None:
            yield (
                "bootstrap_truncated needs the value of what comes next, which an episode that is cut between"
                " two answers does not have: leave it out, or set mask_truncated"
            )

    @model_validator(mode="before")
    @classmethod
    def _renamed(cls, given: Any) -> Any:
        if isinstance(given, dict) and "one_step_off_policy" in given:
            raise ValueError(
                "one_step_off_policy is called max_staleness: write max_staleness: 1 for true, or leave it"
                " out for false"
            )
        return given

    @model_validator(mode="before")
    @classmethod
    def _rewarded_by_the_environment(cls, given: Any) -> Any:
        return (
            {"reward": "environment", **given}
            if isinstance(given, dict) and given.get("environment")
            else given
        )

    @check
    def _check_environment(self) -> Iterator[str]:
        if any(isinstance(source, EnvironmentReward) for source in self.reward) and self.environment is None:
            yield "reward names the environment, and there is none: set environment, or name another reward"
        if self.environment is not None and self.stream_batch_size:
            yield (
                "stream_batch_size scores answers as they are finished, which episodes of an environment are"
                " not: leave it out"
            )
        if self.environment is not None and self.stop:
            yield (
                "stop ends answers that an environment goes on from, which need the template's end of turn:"
                " leave it out"
            )
        if self.environment is not None and (self.environment.answer_max_len or 0) > self.generate_max_len:
            yield (
                f"environment.answer_max_len={self.environment.answer_max_len} must be at most"
                f" generate_max_len={self.generate_max_len}: all tokens after the prompt share it"
            )

    @check
    def _check_validation(self) -> Iterator[str]:
        if self.eval_prompts is None:
            fields = (
                "eval_steps",
                "eval_samples",
                "eval_temperature",
                "eval_top_p",
                "eval_right",
                "stop_when",
            )
            unread = [name for name in fields if getattr(self, name) != type(self).model_fields[name].default]
            if unread:
                yield (
                    f"eval_prompts are not set, and {', '.join(unread)} are about these: set eval_prompts, or"
                    f" leave {unread[0]} out"
                )
        if self.eval_temperature == 0 and self.eval_samples > 1:
            yield (
                "eval_temperature=0 gives the same answer every time: set eval_samples to 1, or"
                " eval_temperature above 0"
            )
        if self.stop_when is not None and self.export_at:
            yield (
                f"stop_when may end the stage before iteration {max(self.export_at)} of export_at: leave one"
                " of them out"
            )

    @check
    def _check_overlap(self) -> Iterator[str]:
        for field, what in (("max_staleness", "trains"), ("stream_batch_size", "scores")):
            if getattr(self, field) and (self.colocate_all or self.engine.sleep):
                yield (
                    f"{field} {what} while engines generate, so they need GPUs of their own: leave out"
                    f" colocate_all and engine.sleep, or {field}"
                )
            if getattr(self, field) and self.dynamic_filtering:
                yield (
                    "dynamic_filtering needs the rewards of all answers to know how many are missing, and"
                    f" with {field} engines and models work on different ones: leave one of them out"
                )
        if self.max_staleness and self.stream_batch_size:
            yield (
                "with max_staleness answers are there before the weights that score them, so there is nothing"
                " to stream: leave out stream_batch_size"
            )
        if self.continuous and not self.engine.abilities.interrupts:
            yield (
                "max_staleness above 1 changes weights between two tokens of an answer, and engine.kind is"
                f" {self.engine.kind}, which finishes its answers first: set max_staleness to 1"
            )
        if self.max_staleness and self.sampler_is == "off":
            yield (
                "max_staleness trains on answers of older weights, which importance weights correct: set"
                " sampler_is to truncate or clamp"
            )

    @check
    def _check_placement(self) -> Iterator[str]:
        if self.colocate_critic_reward and not (self.has_critic and self.reward_models):
            yield "colocate_critic_reward needs a critic and a reward model: leave it out"
        offloads: dict[str, Sequence[str]] = {
            "adam_offload": self.adam_offload,
            "param_offload": self.param_offload,
        }
        for field, roles in (
            offloads | {"ref_reward_offload": ["reference"] * self.ref_reward_offload}
        ).items():
            without = [role for role in roles if role in self.groups and not self.groups[role].gpus]
            if without:
                yield (
                    f"{field} frees a GPU's memory, and these have none: {', '.join(without)}: set gpus of"
                    " their ranks"
                )
        if self.ref_reward_shard and self.ref_reward_offload:
            yield (
                "ref_reward_shard and ref_reward_offload are two ways to free the same memory: set one of"
                " them"
            )
        if self.ref_reward_shard and (
            alone := [name for name in self.read_only if self.groups[name].world_size == 1]
        ):
            yield (
                f"ref_reward_shard cuts a model over its ranks, and these have one: {', '.join(alone)}: leave"
                " it out"
            )
        for names in self.together:
            check_together({name: self.placed[name] for name in names})

    @check
    def _check(self) -> Iterator[str]:
        yield from adapter_mistakes(self.engine, self.lora, self.dtype)
        if self.micro_train_tokens is None:
            yield from self.batch_mistakes()
        samples = self.rollout_batch_size * self.n_samples_per_prompt
        if samples % self.train_batch_size:
            yield (
                f"rollout_batch_size x n_samples_per_prompt = {samples} must be a multiple of"
                f" train_batch_size={self.train_batch_size}: a rollout is cut into whole optimiser steps"
            )

    def iterations(self, num_prompts: int) -> int:
        """Returns the number of iterations over `num_prompts` prompts. Raises ValueError if there is none, or
        if `export_at` is past the last."""
        if num_prompts < self.rollout_batch_size:
            raise ValueError(
                f"ppo needs rollout_batch_size={self.rollout_batch_size} prompts, the data has {num_prompts}:"
                " lower it or add prompts"
            )
        total = num_prompts // self.rollout_batch_size * self.num_episodes
        total = min(total, self.max_steps) if self.max_steps else total
        if self.export_at and max(self.export_at) > total:
            raise ValueError(
                f"export_at names iteration {max(self.export_at)}, and this run has {total}: lower it, or"
                " give more prompts"
            )
        return total
