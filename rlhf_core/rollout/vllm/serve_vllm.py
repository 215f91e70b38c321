"""Runs vLLM's API server, as `python -m vllm.entrypoints.openai.api_server` does, with this project's
patches.

The spawned engine process imports this module again, so the patches are applied at import.
"""

from __future__ import annotations

import runpy

from rlhf_core.rollout.vllm.key_guard import answer_on_given_socket
from rlhf_core.rollout.vllm.patches.table import apply_patches

apply_patches()

if __name__ == "__main__":
    answer_on_given_socket()
    # Without alter_sys, because a spawned process would import whichever module is then `__main__` in
    # `sys.modules`.
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
