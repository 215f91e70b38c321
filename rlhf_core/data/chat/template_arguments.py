"""Compares the arguments that a recipe passes to a chat template with the variables that the template
reads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from jinja2 import TemplateError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import PreTrainedTokenizerBase

from rlhf_core.config.data import passed_by_alignflow

TAGS = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")  # only transformers supports these tags


def variables_of(chat_template: str) -> set[str]:
    """Returns the names that a Jinja template may read from its arguments. These include variables that the
    template itself sets only in some branches. Raises ValueError for a template with invalid syntax."""
    try:
        jinja = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
        parsed = jinja.parse(TAGS.sub("", chat_template))
    except TemplateError as error:
        raise ValueError(f"the chat template cannot be read: {error}") from error
    return meta.find_undeclared_variables(parsed)


def read_arguments(tokenizer: PreTrainedTokenizerBase, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments that the tokenizer's chat template reads."""
    if not given:
        return {}
    known = variables_of(str(tokenizer.get_chat_template()))
    return {name: value for name, value in given.items() if name in known}


def refuse_unread(chat_template: str, given: Mapping[str, Any], place: str) -> None:
    """Raises ValueError if the template of the model at `place` never reads one of the arguments."""
    if not given:
        return
    known = variables_of(chat_template)
    unread = [name for name in given if name not in known]
    if unread:
        own = sorted(name for name in known if not passed_by_alignflow(name))
        reads = f"reads only {', '.join(own)}" if own else "reads no arguments"
        raise ValueError(
            f"{place}: the chat template never reads {', '.join(unread)} of template_args, it {reads}:"
            " correct the name, or leave it out"
        )
