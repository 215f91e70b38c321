"""Which fields an environment has in place of its path: an agent, or MCP servers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config.rewards import Environment


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"agent": "agent --fast"}, "set checker"),
        ({"agent": "a.py:run", "path": "guess"}, "leave path out"),
        ({"path": "agent"}, "set agent alone"),
        ({"path": "guess", "checker": "a.py:check"}, "checker is for agent and mcp"),
        ({"agent": "agent", "checker": "a.py:check", "options": {"a": 1}}, "in the command"),
        ({"agent": "a.py:run", "checker": "check"}, "checker"),
        ({"agent": "it's"}, "neither path.py:function nor a command"),
        ({"agent": "   "}, "neither path.py:function nor a command"),
        ({"agent": "solve.py:run now", "checker": "a.py:check"}, "neither path.py:function nor a command"),
        ({"mcp": "server", "path": "guess"}, "mcp stands in place of path"),
        ({"path": "mcp_tools"}, "set mcp alone"),
        ({"mcp": "server", "agent": "a.py:run"}, "in place of path"),
        ({"mcp": "https://user:secret@host/mcp"}, "token_env"),
    ],
)
def test_wrong_fields(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Environment(**fields)


def test_the_functions_are_inputs(tmp_path: Path) -> None:
    config = Environment(agent="agents.py:run", checker="checks.py:check", options={"a": 1})
    assert not config.own and config.title == "agents.py:run"
    assert {name: path.name for name, (path, _) in config.functions.items()} == {
        "agent": "agents.py",
        "checker": "checks.py",
    }
    assert json.loads(json.dumps(config.arguments))["agent"] == f"{Path.cwd()}/agents.py:run"
