"""Reads lm-eval tasks as recipes name them: by lm-eval's own name, or by the path of a task YAML. Imports
neither torch nor lm-eval.

It reads a YAML without running its code, so that a recipe can be planned and checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

YAML = (".yaml", ".yml")


class LocalTask(NamedTuple):
    """A task YAML with its includes. `data_files`: its local data. `files`: all files that it consists of,
    the YAML itself first. All paths are absolute."""

    name: str
    data_files: tuple[Path, ...]
    files: tuple[Path, ...]


class _Function(str):
    """The value of `!function`."""


class _TaskLoader(yaml.SafeLoader):
    pass


_TaskLoader.add_constructor("!function", lambda loader, node: _Function(node.value))


def is_path(task: str) -> bool:
    """Returns whether a task is given as a file rather than by its name in lm-eval."""
    return task.endswith(YAML)


def task_name(task: str) -> str:
    """Returns the task's name in metrics and on the page: its name in lm-eval, or the file's."""
    return Path(task).stem if is_path(task) else task


def read_task(path: str, trust_code: bool = True) -> LocalTask:
    """Reads a task YAML. Raises ValueError for missing or unreadable files, and for code when `trust_code` is
    false."""
    content, files = _merged(Path(path).expanduser().absolute(), ())
    name = content.get("task")
    if not isinstance(name, str):
        raise ValueError(
            f"the task file {path} names no `task`: it must be one task of lm-eval, not a group; add `task:"
            " some_name`"
        )
    data = tuple(_data_files(content, files[0].parent))
    missing = next((file for file in data if not file.is_file()), None)
    if missing:
        raise ValueError(
            f"the task file {path} reads its data from {missing}, which does not exist: correct data_files"
        )
    code = tuple(dict.fromkeys(_functions(content)))
    if code and not trust_code:
        raise ValueError(
            f"the task file {path} runs Python ({', '.join(code)}): read it, then set trust_task_code: true"
        )
    return LocalTask(name, data, (*files, *data, *_modules(content, files)))


def located(data_files: Any, folder: Path) -> Any:
    """Returns `data_files` as absolute paths, resolved against the task's folder, else the working
    directory."""
    if isinstance(data_files, dict):
        return {split: located(files, folder) for split, files in data_files.items()}
    if isinstance(data_files, list):
        return [located(file, folder) for file in data_files]
    if "://" in str(data_files):
        return str(data_files)
    beside = folder / Path(str(data_files)).expanduser()
    here = Path(str(data_files)).absolute()
    # lm-eval resolves against the working directory.
    return str(here if here.is_file() and not beside.is_file() else beside)


def _merged(path: Path, seen: tuple[Path, ...]) -> tuple[dict[str, Any], tuple[Path, ...]]:
    """Returns a YAML's contents merged with its includes, and the paths of all these files, the YAML itself
    first."""
    if path in seen:
        raise ValueError(f"the task file {path} includes itself: remove the include")
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_TaskLoader)  # noqa: S506 - a SafeLoader
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"the task file {path} cannot be read ({getattr(error, 'strerror', None) or error}): correct the"
            " path"
        ) from None
    except (
        yaml.YAMLError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        raise ValueError(f"the task file {path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ValueError(f"the task file {path} must be a mapping, as lm-eval's tasks are")
    included: dict[str, Any] = {}
    files: tuple[Path, ...] = (path,)
    names = content.pop("include", [])
    for name in names if isinstance(names, list) else [names]:
        more, others = _merged((path.parent / str(name)).absolute(), (*seen, path))
        included |= more
        files += others
    return included | content, files


def _data_files(content: dict[str, Any], folder: Path) -> Iterator[Path]:
    arguments = content.get("dataset_kwargs")
    found = (
        located(arguments["data_files"], folder)
        if isinstance(arguments, dict) and "data_files" in arguments
        else []
    )
    for files in found.values() if isinstance(found, dict) else [found]:
        yield from (
            Path(file) for file in (files if isinstance(files, list) else [files]) if "://" not in file
        )


def _functions(value: Any) -> Iterator[str]:
    if isinstance(value, _Function):
        yield str(value)
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _functions(item)


def _modules(content: dict[str, Any], files: tuple[Path, ...]) -> Iterator[Path]:
    """Returns the Python files that `!function` names, in the folders of the YAML files."""
    names = dict.fromkeys(name.rpartition(".")[0].replace(".", "/") + ".py" for name in _functions(content))
    folders = dict.fromkeys(file.parent for file in files)
    return (folder / name for folder in folders for name in names if (folder / name).is_file())
