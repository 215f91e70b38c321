"""Runs a program in a bubblewrap sandbox (Debian package `bubblewrap`) with no network, a read-only system,
an empty home and no environment variables.

The program's time, memory and output are limited, and a system call filter stops it from starting processes.
It ends when its parent ends. Uses only the standard library; environments may run their own tools with this
module.
"""

from __future__ import annotations

import asyncio
import os
import platform
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

MODE = "ALIGNFLOW_SANDBOX"  # environment variable: bubblewrap or none, from the recipe
ROOTS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
SECONDS = 10.0
MEMORY_MIB = 512
OUTPUT_BYTES = 16384

# By architecture: audit number, clone, clone3, and the calls that are always refused: fork and vfork;
# memfd_create and shmget, which allocate memory outside the limit; unshare and setns, which grant rights in a
# new namespace and thereby kernel memory.
CALLS = {
    "x86_64": (0xC000003E, 56, 435, (57, 58, 319, 29, 272, 308)),
    "aarch64": (0xC00000B7, 220, 435, (279, 194, 97, 268)),
}
X32 = 0x40000000  # calls numbered from here up belong to x86-64's x32 interface
OPEN_FILES = 64
OPEN_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "PYTHONIOENCODING": "utf-8"}  # without a sandbox: no secrets
CLONE_THREAD = 0x10000
LOAD = 0x20
EQUAL = 0x15
AT_LEAST = 0x35
ANY_BIT = 0x45
RETURN = 0x06  # of classic BPF
ALLOW = 0x7FFF0000
REFUSE = 0x00050000 | 11
UNKNOWN = 0x00050000 | 38
KILL = 0x80000000  # 11: EAGAIN, 38: ENOSYS


_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


class Output(NamedTuple):
    """A program's output, truncated to the limit, and its exit code; None if the time limit ended it."""

    text: str
    code: int | None


@cache
def available() -> bool:
    """Returns whether bubblewrap is installed and works here. This is tested once per process. Containers may
    forbid user namespaces."""
    if shutil.which("bwrap") is None or platform.machine() not in CALLS:
        return False
    with tempfile.TemporaryFile() as rules:
        rules.write(_filter(platform.machine()))
        rules.seek(0)
        command = closed_in([*python()[:-1], "-c", "print(1)"], rules.fileno())
        try:
            tried = subprocess.run(
                command, pass_fds=(rules.fileno(),), capture_output=True, timeout=30, stdin=subprocess.DEVNULL
            )
        except (OSError, subprocess.TimeoutExpired):
            return False
    return tried.stdout == b"1\n"


def asked() -> bool:
    """Returns whether the recipe asks for the sandbox."""
    return os.environ.get(MODE, "bubblewrap") != "none"


async def run(
    command: Sequence[str],
    stdin: str = "",
    seconds: float = SECONDS,
    memory_mib: int = MEMORY_MIB,
    output_bytes: int = OUTPUT_BYTES,
    with_stderr: bool = True,
    readable: Sequence[str] = (),
) -> Output:
    """Runs a command and returns its stdout and, by default, its stderr. At most max(2, CPUs) commands run at
    once. `readable`: additional folders that it may read. Raises RuntimeError if the recipe asks for a
    sandbox and none is available."""
    loop = asyncio.get_running_loop()
    async with _turns.setdefault(loop, asyncio.Semaphore(max(2, os.cpu_count() or 1))):
        async with opened(command, seconds, memory_mib, with_stderr, readable=readable) as process:
            return await output_of(process, stdin, seconds, output_bytes)


async def output_of(
    process: asyncio.subprocess.Process, stdin: str, seconds: float, output_bytes: int
) -> Output:
    """Returns the output of a program that `opened` has started and will kill. `seconds`: wall-clock
    limit."""
    written = bytearray()
    late = False
    try:
        await asyncio.wait_for(_talk(process, stdin.encode(errors="replace"), written, output_bytes), seconds)
    except TimeoutError:
        late = True
    text = bytes(written[:output_bytes]).decode(errors="replace")
    if late:
        return Output(text, None)
    killed = -signal.SIGKILL  # it has printed too much and is still running
    return Output(text, killed if process.returncode is None else process.returncode)


@asynccontextmanager
async def opened(
    command: Sequence[str],
    seconds: float = SECONDS,
    memory_mib: int = MEMORY_MIB,
    with_stderr: bool = True,
    longest_line: int = 1 << 16,
    readable: Sequence[str] = (),
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Starts a command for a caller that writes to its stdin and reads its stdout, in lines of at most
    `longest_line` bytes. Kills it at the end of the block. `seconds`: limit on CPU time; the caller enforces
    any others. `readable`: additional folders that it may read. Raises RuntimeError if the recipe asks for a
    sandbox and none is available."""
    closed = asked()
    if closed and not available():
        raise RuntimeError(
            "no bubblewrap (bwrap) works here: apt-get install bubblewrap, or set environment.sandbox to none"
        )
    with tempfile.TemporaryFile() as rules:
        if closed:
            rules.write(_filter(platform.machine()))
            rules.seek(0)
        process = await asyncio.create_subprocess_exec(
            *(closed_in(command, rules.fileno(), memory_mib, readable) if closed else command),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT if with_stderr else asyncio.subprocess.DEVNULL,
            limit=longest_line,
            pass_fds=(rules.fileno(),) if closed else (),
            start_new_session=closed,  # otherwise it stays in this process's group and ends with it
            preexec_fn=lambda: _limit(seconds, memory_mib),
            env=None if closed else OPEN_ENVIRONMENT,  # bubblewrap clears the environment itself
        )
    assert process.stdout is not None
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL) if closed else process.kill()
        # asyncio does not report that a process has ended until its output is read
        while await process.stdout.read(65536):
            pass
        await process.wait()


async def _talk(process: asyncio.subprocess.Process, stdin: bytes, written: bytearray, most: int) -> None:
    """Writes stdin and reads the output until it ends or exceeds `most` bytes."""
    assert process.stdin is not None and process.stdout is not None
    with suppress(ConnectionError):
        process.stdin.write(stdin)
        await process.stdin.drain()
        process.stdin.close()
    while len(written) <= most and (part := await process.stdout.read(65536)):
        written += part
    if len(written) <= most:
        await process.wait()


def closed_in(
    command: Sequence[str], rules: int, memory_mib: int = MEMORY_MIB, readable: Sequence[str] = ()
) -> list[str]:
    """Returns the command that runs `command` in the sandbox. `rules`: the descriptor of the system call
    filter. `readable`: folders that it may read in addition to the system's."""
    bound = [part for root in ROOTS if os.path.exists(root) for part in ("--ro-bind", root, root)]
    base = os.path.realpath(sys.base_prefix)
    if not base.startswith("/usr"):  # an interpreter outside the system's folders
        bound += ["--ro-bind", base, base]
    return [
        *("bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"),
        *bound,
        *("--dev", "/dev", "--size", str(memory_mib << 20)),
        *("--tmpfs", "/tmp", "--dir", "/tmp/home", "--chdir", "/tmp/home"),  # noqa: S108 inside, a tmpfs of its own
        *(part for folder in readable for part in ("--ro-bind", folder, folder)),
        *("--setenv", "HOME", "/tmp/home", "--setenv", "PATH", "/usr/bin:/bin"),  # noqa: S108
        *("--setenv", "PYTHONIOENCODING", "utf-8"),
        *("--remount-ro", "/dev", "--remount-ro", "/", "--seccomp", str(rules), "--", *command),
    ]


def _limit(seconds: float, memory_mib: int) -> None:
    """Limits a new process before its program starts: address space, CPU seconds, file sizes, open files, and
    no core dump."""
    memory = memory_mib << 20
    limits = {
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_CPU: int(seconds) + 1,
        resource.RLIMIT_FSIZE: memory,
        resource.RLIMIT_CORE: 0,
    }
    limits[resource.RLIMIT_NOFILE] = OPEN_FILES
    for what, most in limits.items():
        resource.setrlimit(what, (most, most))


def _filter(machine: str) -> bytes:
    """Returns the system call filter for bubblewrap, a classic BPF program that allows new threads but no new
    processes."""
    audit, clone, clone3, refused = CALLS[machine]
    program: list[Any] = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, audit), (RETURN, 0, 0, KILL), (LOAD, 0, 0, 0)]
    program += [(AT_LEAST, 0, 1, X32), (RETURN, 0, 0, REFUSE)]
    for number in refused:
        program += [(EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSE)]
    # its flags are behind a pointer; libraries fall back to clone
    program += [(EQUAL, 0, 1, clone3), (RETURN, 0, 0, UNKNOWN)]
    program += [
        (EQUAL, 0, 3, clone),
        (LOAD, 0, 0, 16),
        (ANY_BIT, 1, 0, CLONE_THREAD),
        (RETURN, 0, 0, REFUSE),
        (RETURN, 0, 0, ALLOW),
    ]
    return b"".join(struct.pack("<HBBI", *step) for step in program)


def python() -> list[str]:
    """Returns the command for running a Python program from stdin with only the standard library."""
    return [os.path.realpath(sys.executable), "-I", "-S", "-"]
