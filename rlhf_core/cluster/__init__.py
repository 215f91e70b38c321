"""Runs worker groups on Ray, and places their processes. Importing the package restricts a single-machine
cluster to loopback before Ray is imported.

Without RAY_ADDRESS, all sockets of Ray, gloo and NCCL are bound to loopback, and Ray serves only clients that
have this run's token, which processes inherit through their environment. A cluster at RAY_ADDRESS keeps its
own settings (docs/explanation/threat-model.md).
"""

import os
import secrets

LOOPBACK = "127.0.0.1"
if not os.environ.get("RAY_ADDRESS"):
    # Ray's own switch for using the loopback address as the node's address
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    for name, value in {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "VLLM_HOST_IP": LOOPBACK,
    }.items():
        os.environ.setdefault(name, value)
