"""Configures models behind chat endpoints, and the limits of requests to them."""

from __future__ import annotations

import re
from ipaddress import ip_address
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from rlhf_core.records import Config, NotInDigest, Positive, Rate, Variable

OPENAI = "api.openai.com"
OPENAI_KEY = "OPENAI_API_KEY"
# these hosts, and hosts below them, refuse every request without a key
HOSTS_WITH_KEYS = (
    OPENAI,
    "api.anthropic.com",
    "api.deepseek.com",
    "api.fireworks.ai",
    "api.groq.com",
    "api.mistral.ai",
    "api.together.xyz",
    "generativelanguage.googleapis.com",
    "openai.azure.com",
    "openrouter.ai",
)


class RequestLimits(Config):
    """Fields for the concurrency, timeout and retries of requests to a chat endpoint."""

    concurrency: Annotated[Positive, NotInDigest] = Field(16, description="requests in flight")
    timeout: Annotated[Rate, NotInDigest] = Field(300.0, description="time limit in seconds for one request")
    max_attempts: Annotated[Positive, NotInDigest] = Field(
        6, description="maximum number of attempts per request when the endpoint is busy, down or slow"
    )


class Remote(RequestLimits):
    """A model behind an OpenAI-compatible endpoint."""

    model: str = Field(description="name of the model at the endpoint")
    base_url: str = Field("https://api.openai.com/v1", description="endpoint")
    api_key_env: Annotated[Variable | None, NotInDigest] = Field(
        None,
        description=(
            "environment variable that holds the key; default: OPENAI_API_KEY if base_url is OpenAI's, else"
            " no key is sent"
        ),
    )
    requests_per_minute: Annotated[Positive | None, NotInDigest] = Field(
        None, description="maximum number of requests per minute, spaced evenly; default: no limit"
    )
    input_price: Annotated[float | None, NotInDigest] = Field(
        None, ge=0, description="US dollars per million input tokens, for the cost in the report"
    )
    output_price: Annotated[float | None, NotInDigest] = Field(
        None, ge=0, description="US dollars per million output tokens"
    )

    @field_validator("base_url")
    @classmethod
    def _is_an_address_without_secret(cls, value: str) -> str:
        if "@" in urlsplit(value).netloc or urlsplit(value).query:
            raise ValueError(
                "the address contains a password or a query, which would end up in files: put the key into"
                " the variable that api_key_env names"
            )
        if not re.match("https?://[^/]", value):
            raise ValueError(f"{value!r} is not an address: begin it with http:// or https://")
        return value

    @property
    def has_prices(self) -> bool:
        return self.input_price is not None and self.output_price is not None

    @property
    def needs_key(self) -> bool:
        """Whether the endpoint is known to reject requests without a key: an https address on one of
        HOSTS_WITH_KEYS."""
        return any(self._is_at(host) for host in HOSTS_WITH_KEYS)

    @property
    def key_variable(self) -> str | None:
        """The environment variable whose key is sent; None: no key is sent."""
        return self.api_key_env or (OPENAI_KEY if self._is_at(OPENAI) else None)

    @property
    def may_need_key(self) -> bool:
        """Whether the endpoint has an https address outside this machine and its private network."""
        address = urlsplit(self.base_url)
        host = address.hostname or ""
        try:
            is_private = ip_address(host).is_private
        except ValueError:  # a name
            is_private = host == "localhost"
        return address.scheme == "https" and not is_private

    def _is_at(self, host: str) -> bool:
        address = urlsplit(self.base_url)
        own = address.hostname or ""
        return address.scheme == "https" and (own == host or own.endswith(f".{host}"))
