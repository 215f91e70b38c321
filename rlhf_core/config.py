"""One frozen config per stage, and the recipe that joins them. Torch-free: an orchestrating machine can check a recipe.

Every field's comment (`Field(description=...)`) ends up in `docs`; defaults are those of `numerics`: the names users of
the flat flag dialect already know (`actor_learning_rate`, `init_kl_coef`, `micro_train_batch_size`, ...).
A value that names a model (`model`, `policy`, `actor`, `reward` ...) is `base`, the name of another stage of the recipe,
or a local folder / Hub id of a model.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from rlhf_core.reward_sources import ModelReward, RewardSources, check_titles
from rlhf_core.types import Frozen, Positive, Rate, Share
from rlhf_core.types import Ranks as Ranks

PostProcessor = Literal["dpo", "kto", "conditional_sft", "rejection_sampling"]


class Source(Frozen):
    """One data set of a mixture: a local .jsonl/.json/.parquet/.csv file, or a Hub data set id."""

    path: str = Field(description="file or Hub data set id")
    split: str = Field("train", description="split, for Hub data sets")
    probability: Share = Field(1.0, description="share of the mixture; the shares of all sources sum to 1")
    messages_key: str = Field("messages", description="column with chat messages (SFT)")
    prompt_key: str = Field("prompt", description="column with the prompt: a string or chat messages")
    response_key: str = Field("response", description="column with the response, when there are no messages")
    chosen_key: str = Field("chosen", description="column with the preferred response (string or messages)")
    rejected_key: str = Field("rejected", description="column with the other response (string or messages)")
    margin_key: str | None = Field(None, description="column with the margin of a preference, if there is one")
    label_key: str = Field("label", description="column that says whether a response is desirable (KTO): true or false, 1 or 0")
    reward_key: str = Field("reward", description="column with the reward of a response (conditional SFT)")


class Data(Frozen):
    """A mixture of sources and how its rows become text."""

    sources: tuple[Source, ...] = Field(description="data sets, mixed by probability", min_length=1)
    template: str = Field("chat", description="'chat': the tokenizer's chat template; else a plain one with one {} (prompt)")
    max_samples: Positive | None = Field(None, description="at most this many rows")

    @field_validator("sources", mode="before")
    @classmethod
    def _one_path_is_a_mixture(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = [value]
        if isinstance(value, (list, tuple)):
            return tuple({"path": v} if isinstance(v, str) else v for v in value)
        return value

    @model_validator(mode="after")
    def _check(self) -> Data:
        total = sum(source.probability for source in self.sources)
        if len(self.sources) > 1 and abs(total - 1) > 1e-6:
            raise ValueError(f"the probabilities of the {len(self.sources)} sources sum to {total:g}: make them sum to 1")
        if self.template != "chat" and self.template.count("{}") != 1:
            raise ValueError(f"template {self.template!r} must be 'chat' or hold exactly one {{}} for the prompt")
        return self


class Trainable(Frozen):
    """What every training stage shares: optimiser, schedule, cadence, precision, ranks."""

    max_len: Positive = Field(512, description="longest sequence in tokens; longer ones are cut and counted")
    train_batch_size: Positive = Field(128, description="documents (pairs for preferences) of one optimiser step, all ranks together")
    micro_train_batch_size: Positive = Field(8, description="rows of one forward pass on one rank")
    max_epochs: Positive = Field(1, description="passes over the data")
    learning_rate: Rate = Field(1e-5, description="peak learning rate")
    betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW")
    weight_decay: float = Field(0.0, ge=0, description="AdamW")
    warmup_ratio: Share = Field(0.03, description="share of the steps with a linear warm-up")
    min_lr_ratio: Share = Field(0.1, description="the cosine ends at this share of the peak")
    max_norm: Rate = Field(1.0, description="gradient norm clip")
    logging_steps: Positive = Field(1, description="optimiser steps between two lines of metrics.jsonl")
    eval_steps: int = Field(0, ge=0, description="steps between two evaluations on eval_data; 0: only at the end")
    save_steps: int = Field(0, ge=0, description="steps between two resume checkpoints; 0: none")
    keep_checkpoints: Positive = Field(1, description="resume checkpoints kept")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="parameters and activations")
    gradient_checkpointing: bool = Field(False, description="recompute activations in the backward pass")
    zero_stage: Literal[0, 1, 2, 3] = Field(0, description="0: plain torch, one rank; 1-3: DeepSpeed ZeRO")
    ranks: Ranks = Field(Ranks(), description="processes of this stage")

    @model_validator(mode="after")
    def _check_batch(self) -> Trainable:
        check_batch("train_batch_size", self.train_batch_size, "micro_train_batch_size", self.micro_train_batch_size, self.ranks.world_size)
        check_zero(self.zero_stage, self.ranks)
        return self


def check_batch(whole_name: str, whole: int, micro_name: str, micro: int, ranks: int) -> None:
    if whole % (micro * ranks):
        raise ValueError(
            f"{whole_name}={whole} must be a multiple of {micro_name} x ranks = {micro} x {ranks} = {micro * ranks}: "
            f"every rank makes the same number of full forward passes"
        )


def check_zero(zero_stage: int, ranks: Ranks) -> None:
    if zero_stage == 0 and ranks.world_size > 1:
        raise ValueError(f"zero_stage=0 trains on one rank, ranks ask for {ranks.world_size}: set zero_stage to 1, 2 or 3")


class SFT(Trainable):
    """Supervised fine-tuning: token-mean NLL over assistant tokens."""

    stage: Literal["sft"] = "sft"
    model: str = Field("base", description="model to train")
    data: Data | None = Field(None, description="rows with messages, or prompt and response (condition reward: these); or set answers")
    answers: str | None = Field(None, description="a preferences stage whose answers are the data (rejection_sampling, conditional_sft)")
    template: str = Field("chat", description="template of those answers: 'chat' or a plain one with one {}")
    eval_data: Data | None = Field(None, description="held-out rows for the evaluation loss")
    packing: bool = Field(True, description="pack documents into rows of max_len (best fit); attention never crosses them")
    condition: Literal["none", "reward"] = Field(
        "none", description="reward: conditional SFT, the prompt ends with the standardised reward of its answer (column reward_key)"
    )

    @model_validator(mode="after")
    def _check_data(self) -> SFT:
        if (self.data is None) == (self.answers is None):
            raise ValueError("an sft stage needs exactly one of data (files) and answers (the name of a preferences stage)")
        return self


class RewardModel(Trainable):
    """Bradley-Terry reward model (Ouyang et al. 2022, eq. 1) with an optional margin (Llama 2, eq. 2)."""

    stage: Literal["reward_model"] = "reward_model"
    model: str = Field("sft", description="backbone; the scalar head starts at zero")
    data: Data = Field(description="rows with prompt, chosen and rejected")
    eval_data: Data | None = Field(None, description="held-out pairs: accuracy, score mean and std are measured on them")
    loss: Literal["sigmoid", "logexp"] = Field(
        "sigmoid", description="-log sigmoid(d - margin), or log(1 + exp(margin - d)): two names of one function, the margin counts in both"
    )
    centering: float = Field(0.0, ge=0, description="coefficient of (r_chosen + r_rejected)^2 (Eisenstein et al. 2023)")
    learning_rate: Rate = Field(9e-6, description="peak learning rate")


class PreferenceLoss(Frozen):
    """The loss of a DPO stage (Rafailov et al. 2023, eq. 7) and of its relatives."""

    beta: Rate | None = Field(None, description="strength of the KL anchor; SimPO: scale of the log-probs. Default 0.1, for simpo 2")
    loss: Literal["sigmoid", "ipo", "ipo_sum", "simpo", "orpo"] = Field(
        "sigmoid",
        description="sigmoid: DPO; ipo: Azar et al. 2023, log-probs averaged over tokens; ipo_sum: summed, as the paper prints it; without "
        "a reference: simpo (Meng et al. 2024), orpo (Hong et al. 2024)",
    )
    label_smoothing: float = Field(0.0, ge=0, lt=0.5, description="cDPO: probability that a label is flipped")
    nll_coef: float = Field(0.0, ge=0, description="weight of the token-mean NLL of the chosen response")
    gamma: float = Field(1.0, ge=0, description="SimPO: margin that chosen must win by")
    lambd: Rate = Field(0.1, description="ORPO: weight of the odds ratio beside the NLL")

    @model_validator(mode="after")
    def _check_loss(self) -> PreferenceLoss:
        if self.loss != "sigmoid" and self.label_smoothing:
            raise ValueError(f"label_smoothing belongs to loss 'sigmoid' (cDPO): set it to 0 for {self.loss!r}")
        if self.loss == "orpo" and (self.beta is not None or self.nll_coef):
            raise ValueError("loss 'orpo' has no beta, and an NLL term of its own: leave beta and nll_coef out and set lambd")
        if self.loss != "simpo" and self.gamma != 1:
            raise ValueError(f"gamma belongs to loss 'simpo': leave it out for {self.loss!r}")
        if self.loss != "orpo" and self.lambd != 0.1:
            raise ValueError(f"lambd belongs to loss 'orpo': leave it out for {self.loss!r}")
        return self


class UnpairedLoss(Frozen):
    """The weights of a KTO stage's loss (Ethayarajh et al. 2024, eq. 8)."""

    w_desirable: float = Field(1.0, ge=0, description="KTO: weight of desirable answers")
    w_undesirable: float = Field(1.0, ge=0, description="KTO: weight of undesirable answers")

    @model_validator(mode="after")
    def _check_weights(self) -> UnpairedLoss:
        if self.w_desirable + self.w_undesirable == 0:
            raise ValueError("w_desirable and w_undesirable are both 0, so nothing would be trained: raise one")
        return self


REFERENCE_FREE = ("simpo", "orpo")


class DPO(Trainable, PreferenceLoss):
    """Direct preference optimisation against the model it starts from (or `reference`)."""

    stage: Literal["dpo"] = "dpo"
    policy: str = Field("sft", description="model to train")
    reference: str | None = Field(None, description="reference model; default: the policy before training")
    data: Data | None = Field(None, description="preference pairs; or set pairs")
    pairs: str | None = Field(None, description="a preferences stage whose pairs are the data")
    template: str = Field("chat", description="template of those pairs: 'chat' or a plain one with one {}")
    eval_data: Data | None = Field(None, description="held-out pairs")
    learning_rate: Rate = Field(5e-7, description="peak learning rate")

    @model_validator(mode="after")
    def _check_data(self) -> DPO:
        if (self.data is None) == (self.pairs is None):
            raise ValueError("a dpo stage needs exactly one of data (files) and pairs (the name of a preferences stage)")
        if self.reference is not None and self.loss in REFERENCE_FREE:
            raise ValueError(f"loss {self.loss!r} uses no reference: leave reference out")
        return self


class KTO(Trainable, UnpairedLoss):
    """Kahneman-Tversky optimisation (Ethayarajh et al. 2024): answers that are desirable or not, in no pairs."""

    stage: Literal["kto"] = "kto"
    policy: str = Field("sft", description="model to train")
    reference: str | None = Field(None, description="reference model; default: the policy before training")
    data: Data | None = Field(
        None, description="rows with prompt, response and label; preference pairs count as two answers; or set answers"
    )
    answers: str | None = Field(None, description="a preferences stage whose labelled answers (or pairs) are the data")
    template: str = Field("chat", description="template of those answers: 'chat' or a plain one with one {}")
    eval_data: Data | None = Field(None, description="held-out answers, or pairs")
    beta: Rate = Field(0.1, description="strength of the KL anchor")
    train_batch_size: Annotated[int, Field(ge=2)] = Field(
        128, description="answers of one optimiser step, all ranks together; the KL is estimated over them"
    )
    learning_rate: Rate = Field(5e-7, description="peak learning rate")

    @model_validator(mode="after")
    def _check_data(self) -> KTO:
        if (self.data is None) == (self.answers is None):
            raise ValueError("a kto stage needs exactly one of data (files) and answers (the name of a preferences stage)")
        return self


class Sampling(Frozen):
    """How answers are sampled by vLLM."""

    temperature: float = Field(1.0, ge=0, description="sampling temperature; 0 is greedy")
    prompt_max_len: Positive = Field(1024, description="longest prompt in tokens; longer ones keep their end and are counted")
    generate_max_len: Positive = Field(1024, description="longest answer in tokens; cut answers are counted")


class Vllm(Frozen):
    """The vLLM engines of a stage."""

    num_engines: Positive = Field(1, description="engines")
    cpus: float = Field(1.0, gt=0, description="CPUs of one engine")
    gpus: float = Field(0.0, ge=0, description="GPUs of one engine")
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="share of a GPU's memory")
    kv_cache_gib: float = Field(1.0, gt=0, description="KV cache on a CPU machine, GiB")


class Rounds(Frozen):
    """What sampling answers and learning from them have in common, in a stage of its own and in a loop."""

    policy: str = Field("sft", description="model that answers; in a loop, the one that the first round starts from")
    reward: str = Field("reward_model", description="reward model that scores")
    prompts: Data = Field(description="rows with a prompt")
    n_samples_per_prompt: Positive = Field(4, description="answers per prompt")
    min_reward: float | None = Field(
        None, description="rejection_sampling: a prompt whose best answer scores lower is dropped (in the reward model's own units)"
    )
    micro_rollout_batch_size: Positive = Field(8, description="documents of one scoring pass")
    vllm: Vllm = Vllm()
    post_processor: PostProcessor = Field(
        "dpo",
        description="what a prompt's answers become. dpo: the best against the worst; kto: each answer, desirable when it scores above "
        "their mean; rejection_sampling: the best; conditional_sft: every answer with its reward",
    )

    @model_validator(mode="after")
    def _check_post_processor(self) -> Rounds:
        if self.n_samples_per_prompt < 2 and self.post_processor != "conditional_sft":
            raise ValueError(
                f"post_processor {self.post_processor!r} compares answers to one prompt: set n_samples_per_prompt to 2 or more"
            )
        if self.min_reward is not None and self.post_processor != "rejection_sampling":
            raise ValueError(f"min_reward belongs to post_processor 'rejection_sampling': leave it out for {self.post_processor!r}")
        return self


class Preferences(Sampling, Rounds):
    """Sample n answers a prompt, score them, and make data of them: pairs, labelled answers, the best, or all with their rewards."""

    stage: Literal["preferences"] = "preferences"
    first_prompt: int = Field(0, ge=0, description="prompts skipped (a round takes its own slice)")
    num_prompts: Positive | None = Field(None, description="prompts used; default all")


class Loop(Sampling, Rounds, Trainable):
    """Rounds of sampling and training; round k starts from round k-1. Expands into stages of its own in the plan."""

    rounds: Positive = Field(2, description="rounds")
    prompts_per_round: Positive = Field(1024, description="each round takes the next slice of the prompts")
    learning_rate: Rate = Field(5e-7, description="peak learning rate of each round")


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

    @model_validator(mode="after")
    def _check_owners(self) -> Iterative:
        """A field that the chosen post-processor does not read would be a wish that nobody hears."""
        if self.post_processor == "kto" and self.train_batch_size < 2:
            raise ValueError("post_processor 'kto' estimates its KL over train_batch_size answers: set it to 2 or more")
        for field, owners in POST_PROCESSOR_FIELDS.items():
            if self.post_processor not in owners and getattr(self, field) != type(self).model_fields[field].default:
                raise ValueError(f"{field} belongs to post_processor {' or '.join(owners)}: leave it out for {self.post_processor!r}")
        return self


POST_PROCESSOR_FIELDS: dict[str, tuple[PostProcessor, ...]] = {
    **dict.fromkeys(("loss", "label_smoothing", "nll_coef", "gamma", "lambd"), ("dpo",)),
    "beta": ("dpo", "kto"),
    **dict.fromkeys(UnpairedLoss.model_fields, ("kto",)),
    "packing": ("rejection_sampling", "conditional_sft"),
}


AdvantageEstimator = Literal["gae", "grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"]
Aggregation = Literal["token", "sequence", "constant"]
AGGREGATIONS: dict[str, Aggregation] = {"grpo": "sequence", "dr_grpo": "constant"}  # of estimators whose paper has another than "token"
GROUP_ESTIMATORS = ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline")  # they compare the answers to one prompt


class PPO(Sampling):
    """Proximal policy optimisation (Schulman et al. 2017) and its critic-free relatives; each model on its own Ray group, vLLM rollouts."""

    stage: Literal["ppo"] = "ppo"
    temperature: float = Field(1.0, ge=0, description="sampling temperature, above 0; the trainer scales its logits alike")
    actor: str = Field("sft", description="model to train")
    critic: str | None = Field(None, description="value model; default: starts from the first reward model; only for gae")
    reference: str | None = Field(None, description="KL anchor; default: the actor before training")
    reward: RewardSources = Field(
        (ModelReward(),), description="a reward model, path.py:function, http://..., or a list of these with weights; they are summed"
    )
    max_failed_rewards: Share = Field(0.02, description="share of an iteration's answers a source may leave without a reward")
    prompts: Data = Field(description="rows with a prompt")

    advantage_estimator: AdvantageEstimator = Field(
        "gae", description="gae: PPO with a critic; grpo, dr_grpo, rloo, reinforce_pp, reinforce_pp_baseline: no critic is started"
    )
    loss_aggregation: Aggregation | None = Field(
        None,
        description="mean of the loss over all tokens (token), per answer and then over answers (sequence), or over answers times "
        "generate_max_len (constant); default: sequence for grpo, constant for dr_grpo, sequence for ratio sequence, else token",
    )
    ratio: Literal["token", "sequence"] = Field("token", description="policy ratio of each token, or of the whole answer (GSPO)")

    rollout_batch_size: Positive = Field(512, description="prompts of one iteration")
    n_samples_per_prompt: Positive = Field(1, description="answers per prompt")
    micro_rollout_batch_size: Positive = Field(8, description="documents of one scoring pass on one rank")
    train_batch_size: Positive = Field(128, description="documents of one optimiser step, all ranks together")
    micro_train_batch_size: Positive = Field(8, description="documents of one training pass on one rank")
    num_episodes: Positive = Field(1, description="passes over the prompts")
    max_steps: Positive | None = Field(None, description="stop after this many iterations")
    max_epochs: Positive = Field(1, description="passes over each rollout")

    actor_learning_rate: Rate = Field(1e-6, description="peak learning rate of the actor")
    critic_learning_rate: Rate = Field(9e-6, description="peak learning rate of the critic")
    betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW")
    weight_decay: float = Field(0.0, ge=0, description="AdamW")
    warmup_ratio: Share = Field(0.03, description="share of the optimiser steps with a linear warm-up")
    min_lr_ratio: Share = Field(0.1, description="the cosine ends at this share of the peak")
    max_norm: Rate = Field(1.0, description="gradient norm clip")

    init_kl_coef: float = Field(0.01, ge=0, description="coefficient of the per-token KL")
    kl_in: Literal["reward", "loss"] = Field("reward", description="the KL is subtracted from the reward, or added to the loss (k2, k3)")
    kl_target: float | None = Field(None, gt=0, description="adapt the coefficient to this KL (Ziegler et al. 2019); default fixed")
    kl_horizon: Positive = Field(10000, description="samples over which the coefficient adapts")
    kl_estimator: Literal["k1", "k2", "k3"] = Field("k1", description="KL estimator (Schulman 2020)")
    gamma: Share = Field(1.0, description="discount")
    lambd: Share = Field(0.95, description="GAE lambda")
    eps_clip: Rate = Field(0.2, description="clip of the policy ratio, both ways")
    eps_clip_low: Rate | None = Field(None, description="clip of the ratio below 1; default eps_clip")
    eps_clip_high: Rate | None = Field(None, description="clip of the ratio above 1 (clip-higher, DAPO); default eps_clip")
    dual_clip: float | None = Field(None, gt=1, description="bound of the objective where advantages are negative (Ye et al. 2020)")
    entropy_coef: float = Field(0.0, ge=0, description="coefficient of the entropy bonus")
    value_clip: Rate = Field(0.2, description="clip of the value change")
    reward_clip: Rate = Field(10.0, description="rewards are clipped to +- this, before KL and penalties")
    reward_at: Literal["last_token", "every_token"] = Field(
        "last_token", description="the reward is paid on the answer's last token (end of sequence), or in equal parts on all of its tokens"
    )
    normalize_reward: bool = Field(False, description="standardise each reward model's scores with the mean and std stored with it")
    overlong_buffer: int = Field(0, ge=0, description="last tokens below generate_max_len with a growing penalty (DAPO, eq. 13); 0: none")
    overlong_penalty: Rate = Field(1.0, description="penalty of an answer of generate_max_len tokens")
    dynamic_filtering: bool = Field(False, description="groups whose answers all have one reward are replaced by others (DAPO)")
    max_filter_rounds: Positive = Field(10, description="rounds of sampling to fill an iteration; what is there then is trained on")
    filter_min_spread: float = Field(1e-6, ge=0, description="a group has no signal when its rewards differ by no more than this")
    whiten_advantages: bool = Field(
        True, description="advantages of gae get mean 0 and std 1 over the whole rollout (reinforce_pp*: always; group estimators: never)"
    )
    freezing_actor_steps: int = Field(0, ge=0, description="first N iterations train only the critic")
    sampler_is: Literal["truncate", "clamp", "off"] = Field(
        "truncate", description="importance weights trainer / sampler: capped at sampler_is_cap, kept within sampler_is_clamp, or none"
    )
    sampler_is_cap: float = Field(2.0, gt=0, description="cap of the truncated importance weight")
    sampler_is_clamp: tuple[float, float] = Field((0.5, 5.0), description="bounds of the clamped importance weight")

    logging_steps: Positive = Field(1, description="iterations between two lines of metrics.jsonl")
    save_steps: int = Field(0, ge=0, description="iterations between two resume checkpoints; 0: none")
    keep_checkpoints: Positive = Field(1, description="resume checkpoints kept")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="parameters and activations")
    gradient_checkpointing: bool = Field(False, description="recompute activations in the backward pass")
    zero_stage: Literal[1, 2, 3] = Field(3, description="DeepSpeed ZeRO stage of actor and critic")
    timeout: Positive = Field(600, description="seconds any role may stay silent before the run stops and names it")

    actor_ranks: Ranks = Ranks()
    critic_ranks: Ranks = Ranks()
    reference_ranks: Ranks = Ranks()
    reward_ranks: Ranks = Ranks()
    vllm: Vllm = Vllm()

    @property
    def has_critic(self) -> bool:
        return self.advantage_estimator == "gae"

    @property
    def aggregation(self) -> Aggregation:
        """The aggregation of the loss: as told, or as the estimator's paper has it."""
        return self.loss_aggregation or ("sequence" if self.ratio == "sequence" else AGGREGATIONS.get(self.advantage_estimator, "token"))

    @property
    def reward_models(self) -> tuple[ModelReward, ...]:
        return tuple(source for source in self.reward if isinstance(source, ModelReward))

    @property
    def groups(self) -> dict[str, Ranks]:
        """The processes of each model; reward models are called `reward:<title>`."""
        trained = {"actor": self.actor_ranks} | ({"critic": self.critic_ranks} if self.has_critic else {})
        rewards = {f"reward:{source.title}": source.ranks or self.reward_ranks for source in self.reward_models}
        return trained | {"reference": self.reference_ranks} | rewards

    @model_validator(mode="after")
    def _check_family(self) -> PPO:
        estimator = self.advantage_estimator
        check_titles(self.reward)
        if self.temperature == 0:
            raise ValueError("temperature=0 gives the same answer every time, there is nothing to compare: set it above 0, usually to 1")
        if self.has_critic and self.critic is None and not self.reward_models:
            raise ValueError("gae needs a critic, and there is no reward model to start it from: set critic, or a critic-free estimator")
        if not self.has_critic and (self.critic is not None or self.freezing_actor_steps):
            raise ValueError(f"{estimator} has no critic: leave out critic and freezing_actor_steps, or set advantage_estimator to gae")
        if self.n_samples_per_prompt < 2 and (estimator in GROUP_ESTIMATORS or self.dynamic_filtering):
            what = estimator if estimator in GROUP_ESTIMATORS else "dynamic_filtering"
            raise ValueError(f"{what} compares the answers to one prompt: set n_samples_per_prompt to 2 or more")
        if self.kl_in == "loss" and self.kl_estimator == "k1":
            raise ValueError("k1 as a loss has an expected gradient of zero: set kl_estimator to k2 or k3, or kl_in to reward")
        if self.overlong_buffer >= self.generate_max_len:
            raise ValueError(f"overlong_buffer={self.overlong_buffer} must be below generate_max_len={self.generate_max_len}")
        if not 0 < self.sampler_is_clamp[0] <= 1 <= self.sampler_is_clamp[1]:
            raise ValueError(f"sampler_is_clamp={list(self.sampler_is_clamp)} must be two numbers around 1, such as [0.5, 5]")
        return self

    @model_validator(mode="after")
    def _check(self) -> PPO:
        for ranks in (self.actor_ranks, self.critic_ranks):
            check_batch("train_batch_size", self.train_batch_size, "micro_train_batch_size", self.micro_train_batch_size, ranks.world_size)
        samples = self.rollout_batch_size * self.n_samples_per_prompt
        if samples % self.train_batch_size:
            raise ValueError(
                f"rollout_batch_size x n_samples_per_prompt = {samples} must be a multiple of train_batch_size={self.train_batch_size}: "
                f"a rollout is cut into whole optimiser steps"
            )
        return self


class RuleJudge(Frozen):
    """Right beats wrong; the question carries the known answer."""

    kind: Literal["rule"] = "rule"
    answer_key: str = Field("answer", description="column of the questions with the known answer")


class RewardJudge(Frozen):
    """The higher score of a reward model wins; a difference below `tie` is a tie."""

    kind: Literal["reward"] = "reward"
    reward: str = Field("reward_model", description="reward model")
    tie: float = Field(0.0, ge=0, description="score difference that still counts as a tie")


class OpenAIJudge(Frozen):
    """A chat model behind an OpenAI-compatible endpoint, asked as Arena-Hard asks."""

    kind: Literal["openai"] = "openai"
    model: str = Field(description="model name at the endpoint")
    base_url: str = Field("https://api.openai.com/v1", description="endpoint")
    api_key_env: str = Field("OPENAI_API_KEY", description="environment variable that holds the key")
    max_tokens: Positive = Field(4096, description="longest verdict")
    concurrency: Positive = Field(16, description="requests in flight")
    timeout: Rate = Field(300.0, description="seconds one request may take")
    max_attempts: Positive = Field(6, description="attempts per request when the endpoint is busy, down or slow")
    max_failed: Share = Field(0.02, description="share of failed or unparsed games above which the report fails")
    requests_per_minute: Positive | None = Field(None, description="requests are spaced so that no more are sent; default: no limit")
    input_price: float | None = Field(None, ge=0, description="US dollars per million input tokens, for the cost in the report")
    output_price: float | None = Field(None, ge=0, description="US dollars per million output tokens")
    interval_width: float | None = Field(
        None, gt=0, lt=1, description="stop asking about a model when its 95 % interval is this narrow (0.1: +- 5 points); default: ask all"
    )
    sequential_questions: Positive = Field(50, description="questions between two looks at the interval, drawn in random order")
    verdict_cache: str | None = Field(
        None, description="folder of verdicts shared by evaluations, so that no game is judged twice; default: in the run directory"
    )


Judge = Annotated[RuleJudge | RewardJudge | OpenAIJudge, Field(discriminator="kind")]


class RewardEvaluation(Frozen):
    """Reward models on held-out preference pairs: accuracy, calibration, length bias, agreement with each other."""

    models: tuple[str, ...] = Field(("reward_model",), description="reward models", min_length=1)
    data: Data = Field(description="held-out rows with prompt, chosen and rejected")
    subset_key: str = Field("subset", description="column that names a row's subset, for accuracy per subset")
    bins: Positive = Field(10, description="bins of the calibration curve")


class Evaluation(Frozen):
    """Pairwise battles of each model against the baseline, two games a question with the answers swapped."""

    stage: Literal["evaluation"] = "evaluation"
    models: tuple[str, ...] = Field(description="models to judge, in order; the last is the final model", min_length=1)
    baseline: str = Field("sft", description="model they are judged against")
    questions: Source = Field(description="rows with a prompt, and what the rule needs")
    max_questions: Positive | None = Field(None, description="at most this many questions")
    template: str = Field("chat", description="'chat' or a plain template with one {}")
    judges: tuple[Judge, ...] = Field((RuleJudge(),), description="the first judge decides, the others are second opinions", min_length=1)
    temperature: float = Field(0.0, ge=0, description="sampling temperature of the answers")
    prompt_max_len: Positive = Field(1024, description="longest prompt in tokens")
    generate_max_len: Positive = Field(1024, description="longest answer in tokens")
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="of the models that answer; auto: as each checkpoint says")
    bootstrap_rounds: Positive = Field(1000, description="bootstrap resamples of the questions")
    micro_rollout_batch_size: Positive = Field(8, description="documents of one reward-judge pass")
    parents: dict[str, str] | None = Field(
        None, description="model: the model it is also judged against; default: the stage each was trained from; {}: none"
    )
    style_tokenizer: str | None = Field(
        None, description="counts answers' lengths: gpt-4o (tiktoken, a download), a folder or a Hub id; default: each model's own"
    )
    reward_evaluation: RewardEvaluation | None = Field(None, description="reward models to evaluate on held-out pairs")
    vllm: Vllm = Vllm()


class Publication(Frozen):
    """Weights, tokenizer, card and scores, to a folder and, when `repo_id` is set, to the Hub."""

    stage: Literal["publication"] = "publication"
    model: str = Field(description="model to publish")
    evaluation: str | None = Field(None, description="evaluation stage whose scores the card shows")
    folder: str | None = Field(None, description="folder to publish to; default: published/ in the run directory")
    repo_id: str | None = Field(None, description="Hub repository; the token comes from HF_TOKEN")
    private: bool = Field(True, description="a new repository is private, and an existing public one is refused")
    license: str = Field("apache-2.0", description="licence named on the card")


StageConfig = Annotated[
    SFT | RewardModel | DPO | KTO | Preferences | IterativeDPO | Iterative | PPO | Evaluation | Publication, Field(discriminator="stage")
]
STAGE_KINDS = ("sft", "reward_model", "dpo", "kto", "preferences", "iterative_dpo", "iterative", "ppo", "evaluation", "publication")


class Recipe(Frozen):
    """A base model, stages, and where their artifacts live."""

    name: str = Field(description="name of the recipe; artifacts are filed under it", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    base_model: str = Field(description="local folder or Hub id of the model every chain starts from")
    artifacts: str = Field("artifacts", description="folder of all run directories")
    seed: int = Field(0, ge=0, description="seed of every stage")
    trust_remote_code: bool = Field(False, description="allow model code from the Hub")
    stages: dict[str, StageConfig] = Field(description="stages by name; a stage named like its kind needs no `stage:`", min_length=1)

    @field_validator("stages", mode="before")
    @classmethod
    def _name_is_kind(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {
            name: {"stage": name, **body} if isinstance(body, dict) and "stage" not in body and name in STAGE_KINDS else body
            for name, body in value.items()
        }
