"""Models behind chat endpoints, and the limits of requests to them."""

from __future__ import annotations

import re
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from rlhf_core.records import Config, NotInDigest, Positive, Rate, Variable

OPENAI = "api.openai.com"
OPENAI_KEY = "OPENAI_API_KEY"


class RequestLimits(Config):
    """Concurrency, timeout and retries of requests to a chat endpoint."""

    concurrency: Annotated[Positive, NotInDigest] = Field(16, description="requests in flight")
    timeout: Annotated[Rate, NotInDigest] = Field(300.0, description="seconds one request may take")
    max_attempts: Annotated[Positive, NotInDigest] = Field(
        6, description="attempts per request when the endpoint is busy, down or slow"
    )


class Remote(RequestLimits):
    """A model behind an OpenAI-compatible endpoint."""

    model: str = Field(description="model name at the endpoint")
    base_url: str = Field("https://api.openai.com/v1", description="endpoint")
    api_key_env: Annotated[Variable | None, NotInDigest] = Field(
        None,
        description=(
            "environment variable that holds the key; default: OPENAI_API_KEY if base_url is OpenAI's, else"
            " no key is sent"
        ),
    )
    requests_per_minute: Annotated[Positive | None, NotInDigest] = Field(
        None, description="requests are spaced so that no more are sent; default: no limit"
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
                "the address holds a password or a query, which would end up in files: put a key into the"
                " variable api_key_env names"
            )
        if not re.match("https?://[^/]", value):
            raise ValueError(f"{value!r} is no address: begin it with http:// or https://")
        return value

    @property
    def has_prices(self) -> bool:
        return self.input_price is not None and self.output_price is not None

    @property
    def needs_key(self) -> bool:
        """Whether the endpoint is known to refuse requests without a key: OpenAI's, over https."""
        address = urlsplit(self.base_url)
        host = address.hostname or ""
        return address.scheme == "https" and (host == OPENAI or host.endswith(f".{OPENAI}"))

    @property
    def key_variable(self) -> str | None:
        """The environment variable whose key is sent; None: no key is sent."""
        return self.api_key_env or (OPENAI_KEY if self.needs_key else None)
