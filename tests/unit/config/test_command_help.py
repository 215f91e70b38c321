"""`alignflow COMMAND --help` describes each parameter."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import get_args, get_type_hints

import pytest
from cyclopts import Parameter
from docstring_parser import parse

from flows.cli import loop_commands as cli_loops
from flows.cli.app import COMMANDS, main


@pytest.mark.parametrize(("name", "command"), [*COMMANDS.items(), ("loop status", cli_loops.status)])
def test_every_parameter_is_described(
    name: str, command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    described = {
        parameter.arg_name: parameter.description for parameter in parse(command.__doc__ or "").params
    }
    hints = get_type_hints(command, include_extras=True)  # what several commands take describes itself
    described |= {
        field: part.help
        for field, hint in hints.items()
        for part in get_args(hint)
        if isinstance(part, Parameter) and part.help
    }
    assert described.keys() == inspect.signature(command).parameters.keys()
    assert main([*name.split(), "--help"]) == 0
    shown = "".join(character for character in capsys.readouterr().out if character.isalnum())
    for parameter, text in described.items():
        assert text and "".join(character for character in text if character.isalnum()) in shown, parameter
