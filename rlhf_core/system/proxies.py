"""Keeps requests to this machine away from proxies, and reports which proxy other requests use."""

from __future__ import annotations

import os
from urllib.parse import urlsplit
from urllib.request import getproxies_environment, proxy_bypass

LOOPBACK = ("127.0.0.1", "localhost", "::1")
NO_PROXY = ("no_proxy", "NO_PROXY")  # libraries read one or both and prefer the first
EXCEPTIONS = (*NO_PROXY, "no_grpc_proxy")
EVERYTHING = "*"  # as the only entry of NO_PROXY: no request uses a proxy


def bypass_loopback() -> None:
    """Adds this machine's loopback names to NO_PROXY and no_proxy if a variable names a proxy.

    Existing entries are kept. If only one of the two variables is set, the other gets its entries too. Child
    processes inherit both.
    """
    proxies = [name for name, value in os.environ.items() if name.lower().endswith("_proxy") and value]
    if all(name.lower() in EXCEPTIONS for name in proxies):
        return
    values = [os.environ[name] for name in NO_PROXY if name in os.environ]
    for name in NO_PROXY:
        value = os.environ.get(name, values[0] if values else "")
        os.environ[name] = _with_loopback(value)


def _with_loopback(value: str) -> str:
    entries = [entry.strip() for entry in value.split(",") if entry.strip()]
    if entries == [EVERYTHING]:  # with more entries, some libraries would read it as a host name
        return EVERYTHING
    return ",".join(dict.fromkeys([*entries, *LOOPBACK]))


def proxy_of(url: str) -> str:
    """Returns the end of a sentence about a failed request to `url`, which names the proxy, without
    credentials, and the variable that sets it.

    Returns "" if the request goes directly to its server or `url` is not an address.
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        return ""
    proxies = getproxies_environment()
    scheme = next((scheme for scheme in (parts.scheme, "all") if proxies.get(scheme)), None)
    if scheme is None or proxy_bypass(parts.netloc.rpartition("@")[2]):
        return ""
    value = proxies[scheme]
    names = (
        name for name, named in os.environ.items() if name.lower() == f"{scheme}_proxy" and named == value
    )
    address = urlsplit(value if "://" in value else f"//{value}").netloc.rpartition("@")[2]
    return (
        f", through the proxy {address} that {next(names)} names (NO_PROXY lists hosts to reach without one)"
    )
