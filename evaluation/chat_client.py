"""Many questions to one OpenAI-compatible chat endpoint: what the judge and remote models that answer have in common.

A busy, failing or silent endpoint is asked again with growing pauses. One that refuses `max_tokens` or a temperature, as those of
reasoning models do, is asked without (`max_completion_tokens`). The API key goes into the client and nowhere else: error texts of
refused keys are not repeated.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TextIO, TypeVar

from openai import APIConnectionError, APIResponseValidationError, APIStatusError, AsyncOpenAI, DefaultAsyncHttpxClient
from pydantic import ValidationError
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_attempt, wait_random_exponential

from rlhf_core.types import Frozen

LONGEST_PAUSE = 60.0  # seconds between two attempts
PROGRESS = 200  # items between two lines of progress
REFUSED = (401, 403, 404)  # no request can succeed
WRONG_REQUEST = (400, 422)

Item = TypeVar("Item")
Found = TypeVar("Found")
Record = TypeVar("Record", bound=Frozen)


class Unreadable(Exception):
    """A reply with status 200 that is no chat completion."""


NO_REPLY = (APIConnectionError, APIStatusError, APIResponseValidationError, Unreadable, TimeoutError)  # what `ask` may end with


class Connection(NamedTuple):
    """Where to ask. `hint`: what to look at when the endpoint refuses; `check` raises when the server behind it is known to be gone.

    A server of this machine (`local`) is never asked through a proxy.
    """

    url: str
    key: str
    hint: str
    check: Callable[[], None] = lambda: None
    local: bool = False


class Reply(Frozen):
    """Tokens as the endpoint counts them; `reasoning_tokens` are those of the output that are not in `text`. `cut`: at a limit."""

    text: str
    input_tokens: int
    output_tokens: int
    reasoning_tokens: int = 0
    cut: bool = False


class Pace:
    """Lets callers through one by one, `per_minute` a minute; None: at once. What a pause delayed does not catch up."""

    def __init__(self, per_minute: float | None):
        self.gap = 60 / per_minute if per_minute else 0.0
        self.free = 0.0  # when the next may pass, on the monotonic clock

    async def turn(self) -> None:
        while (wait := self.free - time.monotonic()) > 0:
            await asyncio.sleep(wait)
        self.free = time.monotonic() + self.gap


class ChatClient:
    """Asks `model` at an endpoint, at most `concurrency` requests at once.

    `who` names the asker in messages (`judge gpt`); `connect` is called when there is something to ask, and may start a server;
    `settings` are the request's further fields; `timeout` seconds per request; `pause` seconds is the scale of the first pause.
    `requests` counts what was sent.
    """

    def __init__(
        self,
        who: str,
        model: str,
        connect: Callable[[], Connection],
        settings: Mapping[str, Any],
        *,
        concurrency: int,
        timeout: float,
        max_attempts: int,
        requests_per_minute: float | None = None,
        pause: float = 1.0,
    ):
        self.who = who
        self.model = model
        self.connect = connect
        self.settings = dict(settings)
        self.concurrency = concurrency
        self.timeout = timeout
        self.max_attempts = max_attempts
        self.backoff = wait_random_exponential(multiplier=pause, max=LONGEST_PAUSE)
        self.pace = Pace(requests_per_minute)
        self.requests = 0

    def each(self, items: Mapping[str, Item], work: Callable[[Asking, Item], Awaitable[Found]], done: Callable[[str, Found], None]) -> None:
        """Does `work` for every item, `done` with what it found as it comes. An exception of either ends all."""
        if items:
            connection = self.connect()
            asyncio.run(self._each(connection, items, work, done))

    async def _each(
        self,
        connection: Connection,
        items: Mapping[str, Item],
        work: Callable[[Asking, Item], Awaitable[Found]],
        done: Callable[[str, Found], None],
    ) -> None:
        asking = Asking(self, connection)
        waiting, finished = iter(items.items()), 0  # one queue for all workers

        async def worker() -> None:
            nonlocal finished
            for key, item in waiting:
                done(key, await work(asking, item))
                finished += 1
                if finished % PROGRESS == 0:
                    print(f"{self.who}: {finished} of {len(items)} asked", flush=True)

        tasks = [asyncio.ensure_future(worker()) for _ in range(min(self.concurrency, len(items)))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asking.api.close()


class Asking:
    """A client while it is connected."""

    def __init__(self, client: ChatClient, connection: Connection):
        self.client, self.connection = client, connection
        http = DefaultAsyncHttpxClient(trust_env=False) if connection.local else None
        self.api = AsyncOpenAI(base_url=connection.url, api_key=connection.key, max_retries=0, http_client=http)

    async def ask(self, messages: Sequence[Mapping[str, str]]) -> Reply:
        """One reply, after as many attempts as allowed. Raises one of NO_REPLY, or ValueError when no attempt can succeed."""
        client = self.client
        attempts = AsyncRetrying(
            retry=retry_if_exception(_passing), stop=stop_after_attempt(client.max_attempts), wait=self._pause, reraise=True
        )
        try:
            return await attempts(self._once, list(messages))
        except APIStatusError as error:
            if error.status_code in REFUSED:
                raise ValueError(
                    f"{client.who}: {self.connection.url} answers {error.status_code} for model {client.model!r}: "
                    f"check the model's name{self.connection.hint}"
                ) from None
            raise

    def reason(self, error: Exception) -> str:
        """Why there is no reply, in brackets."""
        if isinstance(error, APIStatusError):  # in its own words only where they cannot hold somebody's key
            return f"(no reply: HTTP {error.status_code}{f', {error.message[:300]}' if self.connection.local else ''})"
        if isinstance(error, TimeoutError) or "Timeout" in type(error).__name__:
            return f"(no reply within {self.client.timeout:g} s)"
        return f"(no reply: {type(error).__name__})"

    async def _once(self, messages: Any) -> Reply:
        client = self.client
        await client.pace.turn()
        client.requests += 1
        settings: dict[str, Any] = client.settings
        try:
            async with asyncio.timeout(client.timeout):  # the library's own timeout starts anew with every byte
                completion = await self.api.chat.completions.create(
                    model=client.model, messages=messages, timeout=client.timeout, **_as_arguments(settings)
                )
        except APIStatusError as error:
            if error.status_code not in WRONG_REQUEST or not self._adapt(settings, str(error)):
                raise
            return await self._once(messages)
        except (APIConnectionError, TimeoutError):
            self.connection.check()
            raise
        except ValueError:
            raise Unreadable("the reply is no JSON") from None
        try:
            choice, usage = completion.choices[0], completion.usage
            details = usage.completion_tokens_details if usage else None
            return Reply(
                text=choice.message.content or "",
                input_tokens=usage.prompt_tokens if usage else 0,
                output_tokens=usage.completion_tokens if usage else 0,
                reasoning_tokens=(details.reasoning_tokens or 0) if details else 0,
                cut=choice.finish_reason == "length",
            )
        except (AttributeError, IndexError, TypeError, ValidationError):
            raise Unreadable("the reply is no chat completion") from None

    def _adapt(self, sent: dict[str, Any], complaint: str) -> bool:
        """Changes the settings when the endpoint's complaint names one that it was sent; True when it makes sense to ask again."""
        client = self.client
        if client.settings is not sent:
            return True  # another request has met the same complaint
        if "max_tokens" in sent and "max_tokens" in complaint and not self.connection.local:
            client.settings = {"max_completion_tokens" if name == "max_tokens" else name: value for name, value in sent.items()}
        elif "temperature" in sent and "temperature" in complaint:
            client.settings = {name: value for name, value in sent.items() if name != "temperature"}
        else:
            return False
        print(f"{client.who}: the endpoint refused a parameter, it is now asked with {', '.join(client.settings)}", flush=True)
        return True

    def _pause(self, state: RetryCallState) -> float:
        """Seconds until the next attempt: what the endpoint asks for, else growing at random."""
        error = state.outcome.exception() if state.outcome else None
        if isinstance(error, APIStatusError):
            try:
                return min(float(error.response.headers["retry-after"]), LONGEST_PAUSE)
            except (KeyError, ValueError):
                pass  # absent, or a date: our own pause serves as well
        return self.client.backoff(state)


def remote(base_url: str, api_key_env: str) -> Connection:
    """An endpoint with the key in an environment variable; a server without keys takes any, one with keys answers 401."""
    hint = f", base_url and the key in the environment variable {api_key_env}"
    return Connection(base_url, os.environ.get(api_key_env) or "none", hint)


@contextmanager
def appending(path: Path) -> Iterator[TextIO]:
    """A file of lines to append to; a last line that was cut by a kill does not swallow the next one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        if file.tell() and not path.read_bytes().endswith(b"\n"):
            file.write("\n")
        yield file


def records_of(path: Path, kind: type[Record]) -> Iterator[Record]:
    """The whole lines of such a file; one cut by a kill is left out. (`splitlines` would also cut at U+2028.)"""
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n") if path.is_file() else ():
        try:
            record = kind.model_validate_json(line)
        except ValidationError:
            continue
        yield record


def _as_arguments(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that are not OpenAI's (a vLLM server's `top_k`) go into the body as they are."""
    known = {name: value for name, value in settings.items() if name in ("max_tokens", "max_completion_tokens", "temperature")}
    extra = {name: value for name, value in settings.items() if name not in known}
    return known | ({"extra_body": extra} if extra else {})


def _passing(error: BaseException) -> bool:
    """Errors that another attempt may not meet."""
    if isinstance(error, APIStatusError):
        return error.status_code in (408, 409, 429) or error.status_code >= 500
    return isinstance(error, (APIConnectionError, APIResponseValidationError, Unreadable, TimeoutError))
