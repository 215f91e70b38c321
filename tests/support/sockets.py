"""Which addresses the processes of a run listen at."""

from __future__ import annotations

import ipaddress
from contextlib import suppress

import psutil


def listening(pid: int) -> dict[tuple[str, int], str]:
    """Command of each process of the tree below `pid`, itself included, by address and port of its listening
    TCP sockets."""
    found = {}
    root = psutil.Process(pid)
    for process in [root, *root.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            for socket in process.net_connections("tcp"):
                if socket.status == psutil.CONN_LISTEN:
                    found[socket.laddr.ip, socket.laddr.port] = " ".join(process.cmdline())[:120]
    return found


def beyond_loopback(pid: int) -> dict[tuple[str, int], str]:
    """Of `listening`, those that other machines may reach."""

    def loopback(ip: str) -> bool:
        address = ipaddress.ip_address(ip)
        return (getattr(address, "ipv4_mapped", None) or address).is_loopback

    return {place: command for place, command in listening(pid).items() if not loopback(place[0])}
