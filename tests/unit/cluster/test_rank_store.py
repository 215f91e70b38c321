"""The stores in which ranks find each other: a file on one node, a port of the cluster's interface alone on several."""

from __future__ import annotations

import socket
from datetime import timedelta
from threading import Thread
from urllib.parse import urlsplit

import pytest

from rlhf_core.cluster.rank_environment import open_store, store_address

OTHER_INTERFACE = "127.0.0.2"  # an address of this machine that is not the default loopback address
SECONDS = timedelta(seconds=20)


@pytest.mark.parametrize("host", ["127.0.0.1", OTHER_INTERFACE])
def test_ranks_find_each_other(host: str) -> None:
    address, found = store_address(host), []
    other = Thread(target=lambda: found.append(open_store(address, 1, 2, SECONDS).get("key")))
    other.start()
    store = open_store(address, 0, 2, SECONDS)
    store.set("key", "value")
    other.join(20)
    assert found == [b"value"]


def test_a_store_of_one_node_listens_nowhere() -> None:
    assert urlsplit(store_address()).scheme == "file"


def test_a_store_of_several_nodes_listens_on_their_interface_alone() -> None:
    address = store_address(OTHER_INTERFACE)
    port = urlsplit(address).port
    assert port is not None
    store = open_store(address, 0, 1, SECONDS)
    with socket.create_connection((OTHER_INTERFACE, port), timeout=5):
        pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)
    del store
