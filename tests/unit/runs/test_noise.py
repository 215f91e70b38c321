"""Which lines of a stage's process are shown. The lines are those of real logs: vLLM 0.32, Ray 2.60,
DeepSpeed 0.19, PyTorch 2.13."""

from __future__ import annotations

import pytest

from rlhf_core.runs.launch import is_noise, plain

NOISE = """\
\x1b[36m(sampler pid=6263)\x1b[0m Triton is installed, but doesn't include CPU backend. Disabling Triton.
Triton is installed, but doesn't include CPU backend. Disabling Triton.
Triton is installed but 0 active driver(s) found (expected 1). Disabling Triton to prevent runtime errors.
The global random seed is set to 0. Since VLLM_ENABLE_V1_MULTIPROCESSING is set to False, this may affect the random state of the process.
\x1b[36m(sampler pid=6263)\x1b[0m [W1128 12:25:54.060902107 utils.cpp:68] Warning: NUMA binding: Using MEMBIND policy for memory allocation
Loading safetensors checkpoint shards:   0% Completed | 0/1 [00:00<?, ?it/s]
Loading safetensors checkpoint shards: 100% Completed | 1/1 [00:00<00:00, 140.83it/s]
Capturing CUDA graphs (decode, FULL): 100%|██████████| 35/35 [00:01<00:00, 21.83it/s]
\x1b[36m(sampler pid=6263)\x1b[0m \n\
[2026-11-28 12:22:52,355] [WARNING] [real_accelerator.py:213:get_accelerator] Setting accelerator to CPU. If you have GPU or other
[2026-11-28 12:22:52,355] [INFO] [real_accelerator.py:260:get_accelerator] Setting ds_accelerator to cuda (auto detect)
[Gloo] Rank 0 is connected to 0 peer ranks. Expected number of connected peer ranks is : 0
    [state-dump] of Ray
    [2026-11-25 07:57:27,188 I 10 11] (raylet) accessor.cc:475: of Ray
""".splitlines()
SHOWN = """\
step 40/1250  loss 2.078  grad_norm 1.845
each episode leaves out 48 of 6000 prompts, which fill no iteration of 64 (rollout_batch_size)
sft: 420 answers in 7.2 s
sampled answers to 512 of 768 prompts, 12,345 tokens
warning: data: rows that equal another one: 2644 of 40000 rows (for instance sft.jsonl, row 804)
judge gpt: 120 of 840 done
(actor pid=6174) ValueError: 100% of the answers are empty
[W1128 12:25:54.060902107 ProcessGroupNCCL.cpp:1250] Warning: WARNING: destroy_process_group() was not called
RuntimeError: Triton kernel failed
""".splitlines()


@pytest.mark.parametrize("line", NOISE)
def test_notes_of_libraries_are_noise(line: str) -> None:
    assert is_noise(plain(line))


@pytest.mark.parametrize("line", SHOWN)
def test_what_a_stage_says_and_what_goes_wrong_is_shown(line: str) -> None:
    assert plain(line) == line and not is_noise(line)


def test_colours_and_other_codes_are_cut() -> None:
    assert plain("\x1b[36m(actor pid=7)\x1b[0m a line") == "(actor pid=7) a line"
    assert plain("an answer \x1b[2J\x1b[H that clears the screen\x1b") == "an answer  that clears the screen"
