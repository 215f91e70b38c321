"""Defines the exit codes and environment of stage processes, distinguishes errors of our code, of libraries
and of users, ends processes and process groups, and imports users' files."""

from __future__ import annotations

import atexit
import dis
import importlib.util
import inspect
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

import psutil

# variable with the descriptor of the listening socket that a process inherits
LISTENER = "ALIGNFLOW_LISTENER"
FAILED = 1
WRONG_INPUT = 2
ENVIRONMENT = 3  # exit codes of a stage: it failed; the user's mistake; a missing package or device


ROOT = Path(__file__).parents[2]


OURS = ("flows", "tasks", "evaluation", "rlhf_core")
LASTING = (  # programming errors, which every later attempt would repeat
    NameError,
    TypeError,
    AttributeError,
    ImportError,
    SyntaxError,
    LookupError,
    ValueError,
    ArithmeticError,
    AssertionError,
    NotImplementedError,
    RecursionError,
)
WRONG_CALL = re.compile(
    r"\(\) (missing \d+ required|takes (no|exactly|from|\d+) |got an unexpected keyword|got multiple values)"
)


def raised_by_us(error: BaseException, packages: Collection[str] = OURS) -> bool:
    """Returns whether one of `packages` raised an error. The message of such an error is meant for the user;
    an error from a library needs its traceback."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and str(frames[-1].f_globals.get("__name__", "")).split(".")[0] in packages


def module_path() -> dict[str, str]:
    """Returns the variables that set a child's module path. The path includes a checkout that is not
    installed. It excludes the working directory, in the child and in any process it starts (PYTHONSAFEPATH),
    because a user's `tasks.py` there would be imported instead of ours."""
    ours = "" if ROOT.name in ("site-packages", "dist-packages") else str(ROOT)
    paths = list(filter(None, [os.environ.get("PYTHONPATH"), ours]))
    return {"PYTHONSAFEPATH": "1"} | ({"PYTHONPATH": os.pathsep.join(paths)} if paths else {})


def child_environment() -> dict[str, str]:
    """Returns the environment of a stage's process, without the auth string of Prefect's API, which stages do
    not call."""
    kept = {name: value for name, value in os.environ.items() if not name.endswith("API_AUTH_STRING")}
    return kept | {"PYTHONUNBUFFERED": "1"} | module_path()


def age_of_this_process() -> float:
    """Returns the seconds since this process was started."""
    return max(0.0, time.time() - psutil.Process().create_time())


def kill_group(leader: int) -> None:
    """Kills the leader of a process group and all processes in the group."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def end_process(code: int) -> NoReturn:
    """Ends this process like Python's own exit: waits for threads, calls functions registered with `atexit`,
    and flushes buffered output. Skips the teardown of modules, which takes seconds with large libraries."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the stream has no reader, or is closed
            stream.flush()
    os._exit(code)


def how_ended(code: int) -> str:
    """Describes how a process ended. `code`: as in `subprocess.Popen.returncode`, -n if signal n ended it."""
    if code >= 0:
        return f"exited with status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    if name == "SIGKILL":
        return "was killed by SIGKILL (Linux sends it when host memory is exhausted)"
    return f"was killed by {name}"


class UsersError(NamedTuple):
    """Describes an error in a user's code. `text`: its type, message, file and line. `place`: type, file and
    line if every attempt would repeat the error, such as a NameError; "" if a later attempt may avoid it,
    such as a network error. `certain`: whether the error occurs regardless of the arguments, as a NameError
    does; False if another model answer might not cause it."""

    text: str
    place: str
    certain: bool = False


def users_error(error: BaseException, file: Path, called: Callable[..., Any] | None = None) -> UsersError:
    """Describes an error raised by the code in `file` or in modules in the same folder. If the traceback has
    no line of this code, names the line that defines `called`."""
    line = _users_line(error, file)
    code = getattr(inspect.unwrap(called), "__code__", None) if called is not None else None
    if not line and code is not None:
        line = f"{code.co_filename}, line {code.co_firstlineno}"
    kind = type(error).__name__
    message = error.msg if isinstance(error, SyntaxError) else error
    where = f" ({line})" if line else ""
    lasts = isinstance(error, LASTING) and not isinstance(error, OSError)
    return UsersError(
        f"{kind}: {message}{where}", f"{kind}{where}" if lasts else "", _meets_every_call(error)
    )


def _meets_every_call(error: BaseException) -> bool:
    """Returns whether an error occurs for all inputs, because a name or module is undefined or a function
    does not accept the arguments of a call. Unassigned local variables and unpacked arguments (`f(*words)`)
    do not count, as they may fail only for some inputs."""
    if isinstance(error, ImportError | SyntaxError):
        return True
    if isinstance(error, NameError):
        return str(error).startswith("name ")  # other messages concern a function's variables
    if isinstance(error, AttributeError):
        return isinstance(error.obj, ModuleType)
    return isinstance(error, TypeError) and bool(WRONG_CALL.search(str(error))) and not _unpacks(error)


def _unpacks(error: BaseException) -> bool:
    """Returns whether the instruction that raised is a call with unpacked arguments."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return last is not None and dis.opname[last.tb_frame.f_code.co_code[last.tb_lasti]] == "CALL_FUNCTION_EX"


def _users_line(error: BaseException, file: Path) -> str:
    """Returns the file and line of the innermost user code in a traceback; "" if there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    found = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        name = Path(frame.f_code.co_filename)
        beside = name.is_relative_to(file.parent) and not {"site-packages", "dist-packages"} & {*name.parts}
        ours = any(name.is_relative_to(ROOT / package) for package in OURS)
        if name == file or (beside and not ours):
            found = f"{name}, line {line}"
    return found


def users_module(file: Path, what: str) -> ModuleType:
    """Returns the module of a user's Python file, which may import modules from its folder. `what` describes
    it in messages. Raises ValueError if there is no such file or its import fails."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise ValueError(f"there is no Python file {file}; correct the path of the {what}")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.parent))
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # report anything that the user's module raises
        raise ValueError(f"{file} cannot be imported: {users_error(error, file).text}") from error
    return module
