"""Defines the command `alignflow`; app.py has the table of commands and the exit codes."""

from flows.cli.app import main as main
