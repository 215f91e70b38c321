"""Gets rewards from a server: one POST per request, with a time limit on the whole exchange."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import httpx

from rlhf_core.rewards.reward_contract import LISTS, Reply, RewardError, Sample, question_json, read_reply
from rlhf_core.system.proxies import proxy_of

REFUSED = (401, 403, 404, 405)  # no request can succeed after these
LARGEST_REPLY = 64 << 20  # bytes


class HttpRewardClient:
    """Sends requests to the server at `url`. `timeout`: seconds for an entire request, so that a server that
    trickles bytes does not block the run.

    The key is sent as a bearer token. Error messages contain neither the key nor the query of the URL.
    """

    def __init__(self, url: str, timeout: float, api_key_env: str | None):
        self.url = url
        self.timeout = timeout
        self.api_key_env = api_key_env
        self.wanted = LISTS
        self.shown = urlunsplit((*urlsplit(url)[:3], "", ""))
        self._closed = False
        self._open = dict[asyncio.Task[Any], asyncio.AbstractEventLoop]()

    def score(self, samples: Sequence[Sample]) -> Reply:
        """Returns the server's rewards. Raises RewardError when the request fails, and ValueError when no
        request can succeed."""
        try:
            status, body = asyncio.run(self._post(question_json(samples)))
        except TimeoutError:
            raise RewardError(
                f"no answer from {self.shown} within {self.timeout:g} s{proxy_of(self.url)}"
            ) from None
        except asyncio.CancelledError:
            raise RewardError(f"{self.shown} gets no more requests") from None
        except httpx.HTTPError as error:
            raise RewardError(f"{self.shown}: {type(error).__name__}{proxy_of(self.url)}") from None
        if status in REFUSED:
            raise ValueError(
                f"the reward server {self.shown} answers {status}{proxy_of(self.url)}: {self._advice(status)}"
            )
        if status != 200:
            raise RewardError(f"{self.shown} answers {status}{proxy_of(self.url)}")
        return read_reply(body, len(samples))

    def _advice(self, status: int) -> str:
        """Returns advice on what to do about a refusal."""
        if self.api_key_env:
            return f"check its address and the key in the environment variable {self.api_key_env}"
        if status in (401, 403):
            return "set api_key_env to the name of the environment variable that holds its key"
        return "check its address"

    async def _post(self, text: str) -> tuple[int, bytes]:
        """Returns the status and body of the reply. Raises CancelledError after `close`."""
        headers = {"content-type": "application/json"}
        if self.api_key_env:
            headers["authorization"] = f"Bearer {os.environ.get(self.api_key_env, '')}"
        task = asyncio.current_task()
        body = bytearray()
        assert task is not None
        self._open[task] = asyncio.get_running_loop()
        try:
            if self._closed:  # checked only now that `close` can see the task
                raise asyncio.CancelledError
            async with (
                asyncio.timeout(self.timeout),
                httpx.AsyncClient(timeout=self.timeout) as client,
                client.stream("POST", self.url, content=text.encode(), headers=headers) as response,
            ):
                async for chunk in response.aiter_bytes():
                    body += chunk
                    if len(body) > LARGEST_REPLY:
                        raise RewardError(f"{self.shown} answers with more than {LARGEST_REPLY >> 20} MiB")
                return response.status_code, bytes(body)
        finally:
            del self._open[task]

    def close(self) -> None:
        """Cancels open requests and prevents new requests."""
        self._closed = True
        for task, loop in list(self._open.items()):
            with suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(task.cancel)
