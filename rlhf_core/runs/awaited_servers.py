"""Waits, before a stage takes a GPU, for the servers that the stage uses but does not start. Sends no request
that costs money: any answer, even an error, shows that a server can be reached."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from urllib.parse import urlsplit

import httpx

from rlhf_core.config.gates import AskedServer
from rlhf_core.system.machine import Unreachable
from rlhf_core.system.proxies import LOOPBACK, proxy_of
from rlhf_core.system.redaction import public_address

ATTEMPT_SECONDS = 5.0
WAIT_SECONDS = 600.0  # a server started together with the stage loads its model first
PAUSE_SECONDS = 2.0


def require_servers(servers: Sequence[AskedServer], with_replies: Collection[str] = ()) -> None:
    """Waits at most WAIT_SECONDS until all servers can be reached, and prints the servers for which it waits.
    Raises Unreachable with one sentence, and immediately if an address is invalid. For the servers of readers
    in `with_replies` it only prints a warning, because their stored replies may be all they need."""
    until = time.monotonic() + WAIT_SECONDS
    for server in servers:
        why = why_unreachable(server.address)
        if why and server.reader in with_replies:
            print(f"warning: {no_answer(server, why)}", flush=True)
            continue
        if why and wrong_address(server.address):
            raise Unreachable(no_answer(server, why))
        if why:
            print(f"waiting up to {WAIT_SECONDS:g} s: {no_answer(server, why)}", flush=True)
        while why:
            if time.monotonic() >= until:
                told = f"for {WAIT_SECONDS:g} s {no_answer(server, why)}, then run again"
                raise Unreachable(told)
            time.sleep(PAUSE_SECONDS)
            why = why_unreachable(server.address)


def no_answer(server: AskedServer, why: str) -> str:
    """Returns a sentence about a server that cannot be reached, without its address's query and password."""
    shown = public_address(server.address)
    field = "url" if server.chat is None else "base_url"
    return f"{server.reader} cannot reach {shown} ({why}): start its server, or correct {field}"


def wrong_address(address: str) -> str:
    """Returns why an address is invalid, for example because its port is not a number; "" if it is valid."""
    try:
        httpx.URL(address)
    except (httpx.InvalidURL, ValueError) as error:
        return str(error)
    return ""


def why_unreachable(address: str) -> str:
    """Returns why no connection to a server can be opened; "" if one can, even if the server's answer is slow
    or wrong."""
    own = urlsplit(address).hostname in LOOPBACK
    try:
        with httpx.Client(timeout=ATTEMPT_SECONDS, trust_env=not own) as client:
            client.head(address)
    except (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError) as error:
        told = " ".join(str(error).split())[:200] or type(error).__name__
        return told + ("" if own else proxy_of(address))
    except httpx.HTTPError:
        return ""
    except (
        httpx.InvalidURL,
        ValueError,
        ImportError,
    ) as error:  # an invalid port or host name, a SOCKS proxy
        return " ".join(str(error).split())[:200]
    return ""
