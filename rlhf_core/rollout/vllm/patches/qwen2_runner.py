"""Runs Qwen2 with the second model runner of vLLM 0.24."""

from __future__ import annotations


def apply() -> None:
    """Adds Qwen2 to the models that vLLM runs with its second model runner, provided that the runner supports
    all requested options.

    By default these models are Llama and Qwen3, whose layers differ from Qwen2's only in biases.
    VLLM_USE_V2_MODEL_RUNNER=0 still selects the first runner. All processes of an engine must choose the same
    runner.
    """
    from vllm.config import vllm

    vllm.DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES |= {"Qwen2ForCausalLM"}
