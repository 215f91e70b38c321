"""A chat model behind an OpenAI-compatible endpoint as judge: remote, or a local vLLM server.

Every verdict is appended to a cache the moment it is there, keyed by (question, answers A and B, judge, prompt version), so a
killed stage asks nothing twice. A busy, failing or silent endpoint is asked again with growing pauses; a reply without a
verdict once more. What still fails is counted, never cached, and above `max_failed` of the games it stops the stage.
An endpoint that refuses `max_tokens` or a temperature, as those of reasoning models do, is asked without (`max_completion_tokens`).
The API key goes into the client and nowhere else: error texts of refused keys are not repeated.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openai import APIConnectionError, APIResponseValidationError, APIStatusError, AsyncOpenAI
from pydantic import ValidationError
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_attempt, wait_random_exponential

from evaluation.judge import Match
from evaluation.judge_prompt import PROMPT_VERSION, REMINDER, judge_prompt, parse_verdict
from rlhf_core.stage import digest
from rlhf_core.types import Frozen, Game

LONGEST_PAUSE = 60.0  # seconds between two attempts
PROGRESS = 200  # games between two lines of progress
REFUSED = (401, 403, 404)  # no game can succeed
WRONG_REQUEST = (400, 422)


class Unreadable(Exception):
    """A reply with status 200 that is no chat completion."""


class Entry(Frozen):
    """One line of the cache. Tokens as the endpoint counts them, over both questions when the judge had to be reminded."""

    key: str
    game: Game
    input_tokens: int
    output_tokens: int


class Reply(Frozen):
    text: str
    input_tokens: int
    output_tokens: int


class Pace:
    """Lets callers through one by one, `per_minute` a minute; None: at once."""

    def __init__(self, per_minute: float | None):
        self.gap = 60 / per_minute if per_minute else 0.0
        self.free = 0.0  # when the next may pass, on the monotonic clock

    async def turn(self) -> None:
        now = time.monotonic()
        mine = max(now, self.free)
        self.free = mine + self.gap
        if mine > now:
            await asyncio.sleep(mine - now)


class OpenAIJudge:
    """Asks for a verdict on each match, at most `concurrency` at once.

    `cache` is the file of verdicts; `timeout` seconds per request; `pause` seconds is the scale of the first pause. `requests` counts
    what was sent, tokens are those of all verdicts used, also of the cached ones.
    """

    def __init__(
        self,
        name: str,
        model: str,
        base_url: str,
        api_key_env: str,
        cache: Path,
        *,
        max_tokens: int,
        concurrency: int,
        max_failed: float,
        timeout: float,
        max_attempts: int,
        requests_per_minute: float | None = None,
        pause: float = 1.0,
    ):
        self.name = name
        self.model = model
        self.base_url = base_url
        self.api_key_env = api_key_env
        self.cache = cache
        self.limits: dict[str, int] = {"max_tokens": max_tokens, "temperature": 0}
        self.concurrency = concurrency
        self.max_failed = max_failed
        self.timeout = timeout
        self.max_attempts = max_attempts
        self.backoff = wait_random_exponential(multiplier=pause, max=LONGEST_PAUSE)
        self.pace = Pace(requests_per_minute)
        self.used: dict[str, Entry] = {}
        self.games = self.failed = self.requests = 0

    @property
    def input_tokens(self) -> int:
        return sum(entry.input_tokens for entry in self.used.values())

    @property
    def output_tokens(self) -> int:
        return sum(entry.output_tokens for entry in self.used.values())

    def judge(self, matches: Sequence[Match]) -> list[Game]:
        """Raises ValueError when the endpoint refuses the judge, or more than `max_failed` of all games so far fail."""
        keys = [self._key(match) for match in matches]
        known = read_cache(self.cache)
        missing = {key: match for key, match in zip(keys, matches, strict=True) if key not in known}
        print(f"judge {self.name}: {len(matches)} games, {len(missing)} to ask", flush=True)
        self.games += len(keys)
        if missing:
            known |= asyncio.run(self._ask_all(missing, keys))
        self.used |= {key: known[key] for key in keys}
        return [known[key].game for key in keys]

    def _key(self, match: Match) -> str:
        return digest([list(match.question.messages), match.answer_a, match.answer_b, self.model, PROMPT_VERSION])

    async def _ask_all(self, missing: dict[str, Match], keys: Sequence[str]) -> dict[str, Entry]:
        """The games of all missing matches. Verdicts go to the cache as they come."""
        # A server without keys takes any; one with keys answers 401, and the error names the variable.
        client = AsyncOpenAI(base_url=self.base_url, api_key=os.environ.get(self.api_key_env) or "none", max_retries=0)
        waiting = iter(missing.items())  # one queue for all workers
        entries: dict[str, Entry] = {}
        self.cache.parent.mkdir(parents=True, exist_ok=True)
        with self.cache.open("a", encoding="utf-8") as file:
            if file.tell() and not self.cache.read_bytes().endswith(b"\n"):
                file.write("\n")  # the last line was cut by a kill: it must not swallow the next one

            async def worker() -> None:
                for key, match in waiting:
                    entry = await self._game(client, key, match)
                    entries[key] = entry
                    if len(entries) % PROGRESS == 0:
                        print(f"judge {self.name}: {len(entries)} of {len(missing)} asked", flush=True)
                    if entry.game.score is not None:
                        file.write(entry.model_dump_json() + "\n")
                        file.flush()
                        continue
                    self.failed += keys.count(key)
                    if self.failed > self.max_failed * self.games:
                        last = entry.game.judgment["answer"][-200:].strip()
                        raise ValueError(
                            f"judge {self.name}: {self.failed} of {self.games} games have no verdict, more than "
                            f"max_failed={self.max_failed:g} allows (the last: {last!r}): look at the endpoint, then run again; "
                            f"the verdicts so far are kept"
                        )

            tasks = [asyncio.ensure_future(worker()) for _ in range(min(self.concurrency, len(missing)))]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await client.close()
        return entries

    async def _game(self, client: AsyncOpenAI, key: str, match: Match) -> Entry:
        prompt = judge_prompt(match)
        replies: list[Reply] = []
        try:
            replies.append(await self._ask(client, prompt))
            if parse_verdict(replies[0].text) is None:
                said = ({"role": "assistant", "content": replies[0].text},) if replies[0].text.strip() else ()
                replies.append(await self._ask(client, (*prompt, *said, {"role": "user", "content": REMINDER})))
            words = "\n".join(reply.text for reply in replies)
            score = parse_verdict(replies[-1].text)
        except (APIConnectionError, APIStatusError, APIResponseValidationError, Unreadable, TimeoutError) as error:
            words, score = "\n".join([*(reply.text for reply in replies), self._reason(error)]), None
        return Entry(
            key=key,
            game=Game(score=score, judgment={"answer": words}, prompt=prompt),
            input_tokens=sum(reply.input_tokens for reply in replies),
            output_tokens=sum(reply.output_tokens for reply in replies),
        )

    async def _ask(self, client: AsyncOpenAI, messages: Sequence[dict[str, str]]) -> Reply:
        """One reply, after as many attempts as allowed. Raises the last error, or ValueError when no attempt can succeed."""
        attempts = AsyncRetrying(
            retry=retry_if_exception(_passing), stop=stop_after_attempt(self.max_attempts), wait=self._pause, reraise=True
        )
        try:
            return await attempts(self._once, client, list(messages))
        except APIStatusError as error:
            if error.status_code in REFUSED:
                raise ValueError(
                    f"judge {self.name}: {self.base_url} answers {error.status_code} for model {self.model!r}: "
                    f"check the model's name, base_url and the key in the environment variable {self.api_key_env}"
                ) from None
            raise

    async def _once(self, client: AsyncOpenAI, messages: Any) -> Reply:
        await self.pace.turn()
        self.requests += 1
        limits: dict[str, Any] = self.limits
        try:
            async with asyncio.timeout(self.timeout):  # the client's own timeout starts anew with every byte
                completion = await client.chat.completions.create(model=self.model, messages=messages, timeout=self.timeout, **limits)
        except APIStatusError as error:
            if error.status_code not in WRONG_REQUEST or not self._adapt(limits, str(error)):
                raise
            return await self._once(client, messages)
        except ValueError:
            raise Unreadable("the reply is no JSON") from None
        try:
            text, usage = completion.choices[0].message.content or "", completion.usage
            return Reply(text=text, input_tokens=usage.prompt_tokens if usage else 0, output_tokens=usage.completion_tokens if usage else 0)
        except (AttributeError, IndexError, TypeError, ValidationError):
            raise Unreadable("the reply is no chat completion") from None

    def _adapt(self, sent: dict[str, int], complaint: str) -> bool:
        """Changes the limits when the endpoint's complaint names one that it was sent; True when it makes sense to ask again."""
        if self.limits is not sent:
            return True  # another request has met the same complaint
        if "max_tokens" in sent and "max_tokens" in complaint:
            self.limits = {"max_completion_tokens" if name == "max_tokens" else name: value for name, value in sent.items()}
        elif "temperature" in sent and "temperature" in complaint:
            self.limits = {name: value for name, value in sent.items() if name != "temperature"}
        else:
            return False
        print(f"judge {self.name}: the endpoint refused a parameter, it is now asked with {', '.join(self.limits)}", flush=True)
        return True

    def _pause(self, state: RetryCallState) -> float:
        """Seconds until the next attempt: what the endpoint asks for, else growing at random."""
        error = state.outcome.exception() if state.outcome else None
        if isinstance(error, APIStatusError):
            try:
                return min(float(error.response.headers["retry-after"]), LONGEST_PAUSE)
            except (KeyError, ValueError):
                pass  # absent, or a date: our own pause serves as well
        return self.backoff(state)

    def _reason(self, error: Exception) -> str:
        if isinstance(error, APIStatusError):
            return f"(no reply: HTTP {error.status_code})"
        if isinstance(error, TimeoutError) or "Timeout" in type(error).__name__:
            return f"(no reply within {self.timeout:g} s)"
        return f"(no reply: {type(error).__name__})"


def _passing(error: BaseException) -> bool:
    """Errors that another attempt may not meet."""
    if isinstance(error, APIStatusError):
        return error.status_code in (408, 409, 429) or error.status_code >= 500
    return isinstance(error, (APIConnectionError, APIResponseValidationError, Unreadable, TimeoutError))


def read_cache(file: Path) -> dict[str, Entry]:
    """All whole lines of a cache; one cut by a kill is left out."""
    if not file.is_file():
        return {}
    entries: dict[str, Entry] = {}
    for line in file.read_text(encoding="utf-8", errors="replace").split("\n"):  # splitlines would also cut at U+2028
        try:
            entry = Entry.model_validate_json(line)
        except ValidationError:
            continue
        entries[entry.key] = entry
    return entries
