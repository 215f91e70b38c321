"""What a PPO stage may not start for: one sentence for each, before any work."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from tests.support.text_rows import rows_of_text
from tests.support.tiny_roles import ppo


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        *rows_of_text("""
    {temperature: 0} | temperature=0 gives the same answer every time
    {temperature: -1} | greater than or equal to 0
    {top_p: 0} | greater than 0
    {kl_in: loss} | k1 has an expected gradient of zero in the loss:
    {advantage_estimator: rloo, n_samples_per_prompt: 1} | rloo compares the answers to one prompt
    {dynamic_filtering: true, n_samples_per_prompt: 1} | dynamic_filtering compares the answers
    {advantage_estimator: grpo, critic: sft} | grpo has no critic: leave out critic and freezing_actor_steps
    {advantage_estimator: grpo, freezing_actor_steps: 2} | grpo has no critic
    {reward: 'checks.py:short'} | gae needs a critic, but there is no reward model to start it from
    {reward: ['a.py:f', 'b.py:f']} | two reward sources are called 'f'
    {overlong_buffer: 16} | overlong_buffer=16 must be below generate_max_len=16
    {bootstrap_truncated: true, advantage_estimator: rloo} | bootstrap_truncated needs a critic, but rloo has none
    {bootstrap_truncated: true, mask_truncated: true} | alternative treatments of cut answers: set only one of them
    {bootstrap_truncated: true, environment: guess, critic: rm} | needs the critic's value at the cut,
    {bootstrap_truncated: true, dynamic_filtering: true} | dynamic_filtering compares rewards before the critic's values
    {ratio: sequence, sampler_is: mask} | set sampler_is_level to geometric or sequence
    {teacher_top_k: 5, kl_in: loss} | teacher_top_k reads the distributions of a teacher: set reference to it
    {teacher_top_k: 5, reference: other} | teacher_top_k adds a KL over distributions to the loss: set kl_in to loss
    {teacher_top_k: 5, reference: other, kl_in: loss, init_kl_coef: 0} | teacher_top_k has no effect with init_kl_coef 0
    {teacher_top_k: 5, reference: other, kl_in: loss, top_p: 0.9} | teacher_top_k compares whole distributions
    {teacher_top_k: 5, reference: other, kl_in: loss, top_k: 9} | leave out top_p and top_k
    {teacher_top_k: 5, reference: sft, kl_in: loss, lora: {rank: 4}} | set reference to another model, or leave teacher_top_k out
    {teacher_top_k: 0, reference: other, kl_in: loss} | greater than or equal to 1
    {teacher_top_k: 5000, reference: other, kl_in: loss} | less than or equal to 1024
    {kl_target: 0.1, init_kl_coef: 0} | set init_kl_coef above 0, or leave out kl_target
    {truncated_penalty: -1.0} | greater than or equal to 0
    {dual_clip: 1.0} | greater than 1
    {train_batch_size: 3, micro_train_batch_size: 3} | must be a multiple of train_batch_size=3
    """),
        ({"sampler_is_clamp": (2, 5)}, "two numbers around 1"),
    ],
)
def test_what_cannot_work_is_refused(changes: dict[str, object], expected: str) -> None:
    with pytest.raises(ValidationError, match=expected):
        ppo(**changes)


def test_the_prompts_must_fill_an_iteration() -> None:
    assert ppo(num_episodes=3).iterations(9) == 6
    with pytest.raises(ValueError, match="rollout_batch_size=4 prompts, but the data has 3"):
        ppo().iterations(3)
