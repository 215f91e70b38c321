"""Runs Qwen2 by the second model runner of vLLM 0.24."""

from __future__ import annotations


def apply() -> None:
    """Adds Qwen2 to the models that vLLM runs by its second model runner where that has all that is asked
    for: by default Llama and Qwen3, which have the same layers but for biases. VLLM_USE_V2_MODEL_RUNNER=0
    still chooses the first one. All processes of an engine have to choose the same."""
    from vllm.config import vllm

    vllm.DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES |= {"Qwen2ForCausalLM"}
