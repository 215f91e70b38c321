"""Runs vLLM's API server, as `python -m vllm.entrypoints.openai.api_server`, with the patches that concern a
server.

The engine's own process imports this module again when it is spawned, so the patches are applied at import.
"""

from __future__ import annotations

import runpy

from rlhf_core.rollout.key_guard import answer_on_given_socket
from rlhf_core.rollout.patches.table import apply_patches

apply_patches()

if __name__ == "__main__":
    answer_on_given_socket()
    # Not with alter_sys: a process that is spawned imports what `sys.modules` then calls the main module.
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
