"""Runs one episode of an environment with made-up answers, so that a bug in it is reported before any engine
starts.

As for reward functions (see `rlhf_core.rewards.reward_trial`), the stage ends only on an error that would
occur in every episode.
"""

from __future__ import annotations

from rlhf_core.config.rewarding.environment_config import Environment
from rlhf_core.data.chat import Renderer
from rlhf_core.data.documents import Prompt
from rlhf_core.environments.episodes import Episodes
from rlhf_core.environments.process import Failed
from rlhf_core.rewards.reward_trial import SECONDS, made_up_answer
from rlhf_core.rollout.dispatch import Background
from rlhf_core.rollout.engine_contract import Pictures, SampledAnswer, Sampling, answer_of


class MadeUpAnswers:
    """Replaces the engines, and returns the same answer to every request."""

    def __init__(self, renderer: Renderer, text: str):
        self._tokens = list(renderer.answer_tokens([], text).tokens)

    def reserve(self) -> int:
        return 0

    def release(self, engine: int) -> None: ...

    async def ask(
        self, engine: int, tokens: list[int], seed: int, sampling: Sampling, pictures: Pictures
    ) -> SampledAnswer:
        given = self._tokens[: sampling.max_new_tokens]
        return answer_of(given, [0.0] * len(given), len(given) == len(self._tokens))


def try_environment(
    config: Environment, episodes: Episodes, background: Background, prompt: Prompt, renderer: Renderer
) -> None:
    """Runs one episode. Prints a warning if it fails or takes too long. Raises ValueError if the
    environment's code would fail for every answer."""
    answers = MadeUpAnswers(renderer, made_up_answer(prompt.row))
    sampling = Sampling(n=1, temperature=1.0, max_new_tokens=1, stop_token_ids=())
    try:
        background.run(episodes.try_once(prompt, sampling, answers, SECONDS))
    except Failed as failed:
        if failed.certain:
            told = f"an episode with made-up answers raised {failed}"
            raise ValueError(f"the environment {config.title}: {told}; correct it, then run again") from None
        _warn(config, f"failed: {failed}")
    except TimeoutError:
        _warn(config, f"is not done after {SECONDS:g} s")


def _warn(config: Environment, what: str) -> None:
    told = (
        f"an episode with made-up answers {what}; the stage goes on, and ends if too many episodes of the"
        " model fail"
    )
    print(f"warning: the environment {config.title}: {told}", flush=True)
