"""Hosts for tests: Linux namespaces with an address, processes and a Ray temporary folder of their own,
joined by a switch.

A host is the first process of a PID namespace (`unshare`), which Linux kills when this process ends, however
that happens: with it all processes of the host end, and with the last of them its network and its cables.
Nothing has a name that could stay behind. The hosts share the file system.
"""

from __future__ import annotations

import ctypes
import functools
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.support.micro import wait_until
from tests.support.programs import captured, logged

ROOT = Path(__file__).parents[2]
NET = "10.83.0"
PORT = 6379
UNSHARE = ["unshare", "--net", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc"]
ORPHANS = "trap '' CHLD; exec sleep infinity"  # adopted processes that end are not kept as zombies
RAY_FOLDER = "/tmp/alignflow-ray"  # each host has one of its own there; short: paths of sockets have a limit
PR_SET_PDEATHSIG = 1
# Of this process's environment: settings for one machine alone, and what other clusters are called.
FOREIGN = ("RAY_", "GLOO_", "NCCL_", "VLLM_HOST_IP", "PREFECT_")


def _ends_with_us() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


@functools.cache
def unavailable() -> str:
    """Why there can be no hosts here; "" where they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "hosts are Linux namespaces, which only root may make"
    missing = [name for name in ("ip", "unshare", "nsenter") if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)} (iproute2, util-linux) are not installed"
    made = "ip link add switch type bridge && ip link add port1 type veth peer name card0"
    done = captured([*UNSHARE, "sh", "-c", made], timeout=20)
    return f"namespaces are refused here: {done.stderr.strip()}" if done.returncode else ""


class Host:
    """One host. `address` is that of its network card, `environment` that of its processes."""

    def __init__(self, number: int, folder: Path, token: str):
        self.number = number
        self.address = f"{NET}.{number}"
        self.folder = folder / f"host{number}"
        self.folder.mkdir(parents=True)
        Path(RAY_FOLDER).mkdir(exist_ok=True)
        mount = f"mount --bind {self.folder} {RAY_FOLDER} && "
        self._unshare = subprocess.Popen(
            [*UNSHARE, "sh", "-c", mount + ORPHANS], stdin=subprocess.DEVNULL, preexec_fn=_ends_with_us
        )
        wait_until(self._first_runs, f"host {number}", 20)
        self.first = psutil.Process(self._unshare.pid).children()[0].pid
        self._namespace = os.readlink(f"/proc/{self.first}/ns/pid")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        self.environment = kept | {
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            "RAY_TMPDIR": RAY_FOLDER,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": token,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_memory_monitor_refresh_ms": "0",
        }

    def _first_runs(self) -> bool:
        children = psutil.Process(self._unshare.pid).children()
        return bool(children) and children[0].name() == "sleep"

    def command(self, *command: str, folder: Path | None = None) -> list[str]:
        """Returns a command that runs another one on the host."""
        return [
            "nsenter",
            "-t",
            str(self.first),
            "-n",
            "-p",
            "-m",
            "--",
            "env",
            "-C",
            str(folder or ROOT),
            *command,
        ]

    def start(
        self, *command: str, log: Path, folder: Path | None = None, **environment: str
    ) -> subprocess.Popen[bytes]:
        """Starts a command on the host, with its output in a file. The process returned is `nsenter`, with
        the command's exit code."""
        return logged(self.command(*command, folder=folder), log, env=self.environment | environment)

    def run(self, *command: str, **environment: str) -> str:
        """Runs a command on the host; returns what it prints."""
        done = captured(self.command(*command), env=self.environment | environment, timeout=120)
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        return done.stdout

    def processes(self) -> list[psutil.Process]:
        """Returns the host's processes, but the one that keeps it up."""
        found = []
        for process in psutil.process_iter():
            try:
                inside = os.readlink(f"/proc/{process.pid}/ns/pid") == self._namespace
                if inside and process.pid != self.first and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (OSError, psutil.Error):
                continue
        return found

    def named(self, part: str) -> list[psutil.Process]:
        """Returns the host's processes with this in their command line."""
        found = []
        for process in self.processes():
            try:
                if part in " ".join(process.cmdline()):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def kill(self) -> None:
        """Ends the host with all its processes at once, as a loss of power does."""
        self._unshare.kill()
        self._unshare.wait()


class Cluster:
    """Hosts 1, 2, ... on one switch; `join` starts a Ray node on each, the first one's is the head."""

    def __init__(self, count: int, folder: Path):
        token = secrets.token_hex(16)
        self._switch = subprocess.Popen(
            [*UNSHARE, "sh", "-c", ORPHANS], stdin=subprocess.DEVNULL, preexec_fn=_ends_with_us
        )
        self.hosts: list[Host] = []
        try:
            wait_until(lambda: psutil.Process(self._switch.pid).children(), "the switch", 20)
            self._in_switch = str(psutil.Process(self._switch.pid).children()[0].pid)
            self._ip(self._in_switch, "link add switch type bridge")
            self._ip(self._in_switch, "link set switch up")
            for number in range(1, count + 1):
                self.hosts.append(Host(number, folder, token))
                self._plug(self.hosts[-1])
        except BaseException:
            self.remove()
            raise
        self.head = self.hosts[0]
        self.ray_address = f"{self.head.address}:{PORT}"

    def _ip(self, namespace: str, arguments: str) -> None:
        subprocess.run(
            ["nsenter", "-t", namespace, "-n", "ip", *arguments.split()],
            check=True,
            timeout=20,
            stdin=subprocess.DEVNULL,
        )

    def _plug(self, host: Host) -> None:
        inside = str(host.first)
        self._ip(self._in_switch, f"link add port{host.number} type veth peer name card0 netns {inside}")
        self._ip(self._in_switch, f"link set port{host.number} master switch")
        self._ip(self._in_switch, f"link set port{host.number} up")
        for command in ("link set lo up", f"addr add {host.address}/24 dev card0", "link set card0 up"):
            self._ip(inside, command)

    def join(self, cpus: Sequence[float], *head_options: str, **environment: str) -> None:
        """Starts a Ray node on each host, with so many CPUs, and waits until all are there. `head_options`:
        of `ray start`."""
        ray = str(Path(sys.executable).with_name("ray"))
        for host, count in zip(self.hosts, cpus, strict=True):
            options = [
                f"--node-ip-address={host.address}",
                f"--num-cpus={count:g}",
                f"--object-store-memory={100 << 20}",
            ]
            if host is self.head:
                options += ["--head", f"--port={PORT}", *(head_options or ["--include-dashboard=false"])]
            else:
                options += [f"--address={self.ray_address}"]
            host.run(ray, "start", *options, "--disable-usage-stats", **environment)

    def cut(self, host: Host) -> None:
        """Cuts the cable of a host, at the switch."""
        self._ip(self._in_switch, f"link set port{host.number} down")

    def mend(self, host: Host) -> None:
        self._ip(self._in_switch, f"link set port{host.number} up")

    def remove(self) -> None:
        """Ends all processes of all hosts."""
        for process in [*(host._unshare for host in self.hosts), self._switch]:
            process.kill()
            process.wait()
        wait_until(lambda: not any(host.processes() for host in self.hosts), "the hosts to be gone", 30)
        for host in self.hosts:
            shutil.rmtree(host.folder, ignore_errors=True)


@contextmanager
def cluster(count: int, folder: Path) -> Iterator[Cluster]:
    """Hosts for the time of a `with` block."""
    made = Cluster(count, folder)
    try:
        yield made
    finally:
        made.remove()
