"""The stores in which ranks find each other: a file on one node, a port of the cluster's interface alone on
several."""

from __future__ import annotations

import socket
import stat
from datetime import timedelta
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit

import pytest

from rlhf_core.cluster.rank_environment import open_store, store_address
from rlhf_core.system.pages.secret_file import private_folder
from tests.support.strangers import as_nobody, as_root

OTHER_INTERFACE = "127.0.0.2"  # an address of this machine that is not the default loopback address
SECONDS = timedelta(seconds=20)


@pytest.mark.parametrize("host", ["127.0.0.1", OTHER_INTERFACE])
def test_ranks_find_each_other(host: str) -> None:
    address = store_address(host)
    found = []
    other = Thread(target=lambda: found.append(open_store(address, 1, 2, SECONDS).get("key")))
    other.start()
    store = open_store(address, 0, 2, SECONDS)
    store.set("key", "value")
    other.join(20)
    assert found == [b"value"]


def test_a_store_of_one_node_listens_nowhere() -> None:
    assert urlsplit(store_address()).scheme == "file"


@as_root
def test_another_user_neither_reads_nor_writes_a_store() -> None:
    place = urlsplit(store_address()).path
    store = open_store(f"file://{place}", 0, 1, SECONDS)
    store.set("key", "value")
    for mode in ("r", "a"):
        assert as_nobody("open(sys.argv[1], sys.argv[2])", place, mode) == "PermissionError"
    assert store.get("key") == b"value"


def test_a_folder_of_somebody_else_holds_no_store(tmp_path: Path) -> None:
    own = private_folder(tmp_path)
    assert private_folder(tmp_path) == own and stat.S_IMODE(own.stat().st_mode) == 0o700
    own.chmod(0o755)
    assert private_folder(tmp_path) != own
    own.rmdir()
    own.symlink_to(tmp_path)
    assert private_folder(tmp_path) != own and stat.S_IMODE(private_folder(tmp_path).stat().st_mode) == 0o700


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
