"""Defines exit codes and environment of stage processes, distinguishes errors of our own code from those of
libraries, ends processes and process groups, and imports the files of users."""

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

# variable: the descriptor of the listening socket that a process inherits to answer on
LISTENER = "ALIGNFLOW_LISTENER"
FAILED = 1
WRONG_INPUT = 2
ENVIRONMENT = 3  # exit codes of a stage: it ended; the user's mistake; a package or device is lacking


ROOT = Path(__file__).parents[2]


OURS = ("flows", "tasks", "evaluation", "rlhf_core")
LASTING = (  # errors of a program, which no later attempt is without
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
    """Returns whether one of these packages raised an error, so that its message is for the user; a library's
    needs its traceback."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and str(frames[-1].f_globals.get("__name__", "")).split(".")[0] in packages


def module_path() -> dict[str, str]:
    """Returns the variables of a child's module path. A checkout that is not installed is on it; the working
    directory is not, in the child or in any process it starts (PYTHONSAFEPATH): a user's `tasks.py` there
    would be imported in place of ours."""
    ours = "" if ROOT.name in ("site-packages", "dist-packages") else str(ROOT)
    paths = list(filter(None, [os.environ.get("PYTHONPATH"), ours]))
    return {"PYTHONSAFEPATH": "1"} | ({"PYTHONPATH": os.pathsep.join(paths)} if paths else {})


def child_environment() -> dict[str, str]:
    """Returns the environment of a stage's process. The auth string of Prefect's API is left out: a stage
    calls nothing of Prefect."""
    kept = {name: value for name, value in os.environ.items() if not name.endswith("API_AUTH_STRING")}
    return kept | {"PYTHONUNBUFFERED": "1"} | module_path()


def age_of_this_process() -> float:
    """Returns the seconds since this process was started."""
    return max(0.0, time.time() - psutil.Process().create_time())


def kill_group(leader: int) -> None:
    """Kills a process that began a session, and what it has started."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def end_process(code: int) -> NoReturn:
    """Ends this process as Python does, but without taking its modules apart, which takes seconds after large
    libraries: waits for its threads, calls what was registered with `atexit`, writes what is buffered."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it, or it is closed
            stream.flush()
    os._exit(code)


def how_ended(code: int) -> str:
    """Says how a process ended. `code`: as of `subprocess.Popen.returncode`, -n when signal n ended it."""
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
    """Describes an error of a user's code. `text`: type, message, file and line. `place`: type, file and line
    of an error that every attempt meets again, such as a NameError; "" for one that a later attempt may not
    meet, such as one of the network. `certain`: what the code is called with makes no difference, as of a
    NameError; False where another answer of a model might be no error."""

    text: str
    place: str
    certain: bool = False


def users_error(error: BaseException, file: Path, called: Callable[..., Any] | None = None) -> UsersError:
    """Describes what the code in `file`, or in modules beside it, raised. Without a line of theirs in the
    traceback it names the line that defines `called`."""
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
    """Returns whether an error is one of the code's text: a name or module that is nowhere, a call of a
    function with other arguments than it takes. A local variable may have no value for some inputs, and
    unpacked arguments (`f(*words)`) may be too many for some."""
    if isinstance(error, ImportError | SyntaxError):
        return True
    if isinstance(error, NameError):
        return str(error).startswith("name ")  # else of a local variable, or one of an outer function
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
    """Returns the innermost file and line of the user's code that a traceback names; "" where it names
    none."""
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
    """Imports a user's Python file; modules beside it can be imported by it. `what` it is, for messages.
    Raises ValueError when there is none, or it raises."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise ValueError(f"there is no Python file {file}; correct the path of the {what}")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.parent))
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the user's module raises is reported
        raise ValueError(f"{file} cannot be imported: {users_error(error, file).text}") from error
    return module
