"""Calls each reward function once with made-up answers, a right one (if the data have it) and a wrong one, so
that a bug in it is reported before any work (rlhf_core/preflight/reward_functions.py) and before any engine
starts.

Only an error that occurs in every call (`UsersError.certain`) ends the stage. Other errors may be due to the
made-up answer and are warnings. Servers and judges are not asked for a reward, which may cost money; only
whether their address answers is checked, and whether the prompt's row has the reference of a judge.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import httpx

from rlhf_core.config.rewarding.judge_reward import JudgeReward
from rlhf_core.config.rewards import FunctionReward, HttpReward, RewardSource
from rlhf_core.data.documents import Prompt
from rlhf_core.data.rows.required_columns import USUAL
from rlhf_core.rewards.function import Function
from rlhf_core.rewards.remote import HttpRewardClient
from rlhf_core.rewards.reward_contract import CodeError, RewardError, Sample
from rlhf_core.system.proxies import proxy_of

if TYPE_CHECKING:  # chat imports transformers
    from rlhf_core.data.chat import Renderer

SECONDS = 30.0  # for the imports of a function, and for its call
REACH_SECONDS = 5.0
ANSWER = "This is an answer."


def made_up_answer(row: dict[str, Any]) -> str:
    """Returns the right answer of a row if a column with a usual name has one, else a fixed sentence."""
    for column in ("answer", *USUAL["answer"]):
        value = row.get(column)
        if isinstance(value, str | int | float) and str(value).strip():
            return str(value)
    return ANSWER


def try_rewards(sources: Sequence[RewardSource], prompt: Prompt, renderer: Renderer) -> None:
    """Tries all functions, servers and judges of a stage, but no reward models. Prints warnings. Raises
    ValueError for a function that cannot be loaded, or whose code fails for every answer, and for a missing
    column of references."""
    for source in sources:
        if isinstance(source, FunctionReward):
            samples = [sample_of(prompt, text, renderer) for text in made_up_answers(prompt.row)]
            failed = call_once(source, samples, SECONDS)
            if failed:
                _warn(source, failed)
        elif isinstance(source, HttpReward):
            _try_address(
                "the reward server", HttpRewardClient(source.url, source.timeout, None).shown, source.url
            )
        elif isinstance(source, JudgeReward):
            require_reference(source, prompt.row)
            _try_address(f"the judge {source.title} at", source.judge.base_url, source.judge.base_url)


def made_up_answers(row: dict[str, Any]) -> list[str]:
    """Returns the right answer of a row, if it is known, and a fixed sentence."""
    return list(dict.fromkeys([made_up_answer(row), ANSWER]))


def sample_of(prompt: Prompt, text: str, renderer: Renderer) -> Sample:
    """Returns an answer to a prompt in the form that reward sources get."""
    document = renderer.answer_tokens(prompt.tokens, text)
    return Sample(prompt.messages, text, prompt.row, True, renderer.decoded(document.tokens, False))


def call_once(source: FunctionReward, samples: Sequence[Sample], seconds: float) -> str:
    """Calls a function with made-up answers. Returns a failure that these answers may have caused, or "".
    Raises ValueError for a function that cannot be loaded, or whose code fails for every answer."""
    function = Function(source.file, source.function_name, min(source.timeout, seconds), 1)
    try:
        function.score(samples)
    except CodeError as error:
        if not error.certain:
            return f"raised {error}"
        told = f"a call with a made-up answer raised {error}"
        raise ValueError(f"the reward function {source.title}: {told}; correct it, then run again") from None
    except RewardError as error:
        return f"failed: {error}"
    finally:
        function.close()
    return ""


def _warn(source: FunctionReward, what: str) -> None:
    told = (
        f"a call with a made-up answer {what}; the stage goes on, and ends if it does so with the model's"
        " answers too"
    )
    print(f"warning: the reward function {source.title}: {told}", flush=True)


def require_reference(source: JudgeReward, row: dict[str, Any]) -> None:
    """Raises ValueError when a row of the prompts lacks the column of a judge's reference answers."""
    if source.reference is not None and source.reference not in row:
        raise ValueError(
            f"the reward {source.title}: the prompts have no column {source.reference!r}, only"
            f" {', '.join(row)}: set reference to the column with the reference answers"
        )


def _try_address(who: str, shown: str, url: str) -> None:
    try:
        httpx.head(url, timeout=REACH_SECONDS)
    except httpx.HTTPError as error:
        told = (
            f"does not answer yet ({type(error).__name__}{proxy_of(url)}): start it, or correct its address"
        )
        print(f"warning: {who} {shown} {told}", flush=True)
