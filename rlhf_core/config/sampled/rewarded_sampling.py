"""Configures how an engine samples answers, and the stages whose sampled answers receive rewards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated

from pydantic import Field

from rlhf_core.config.data import Data, Text
from rlhf_core.config.engines import EngineConfig
from rlhf_core.config.gates import AskedServer, Gated, chat_servers
from rlhf_core.config.process_groups import Groups
from rlhf_core.config.rewarding.judge_models import EngineJudge, OwnJudge, RatingModel
from rlhf_core.config.rewarding.judge_reward import JudgeReward
from rlhf_core.config.rewards import HttpReward, ModelReward, RewardSources, normalized_in_groups
from rlhf_core.config.training.pass_size import FULL_PASS, ROWS, PassSize, pass_size
from rlhf_core.records import Config, NotInDigest, Positive, Share, check


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
