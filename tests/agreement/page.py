"""The text of docs/reference/agreement.md, around the figures."""

PAGE = """# Agreement with TRL

Written by `python -m tests.agreement.compare` on {date}; do not edit by hand. The script runs alignflow's stages and compares them with
TRL's results on the same material, `tests/agreement/trl.json`, which `python -m tests.agreement.record_trl` writes where TRL is installed.
`test_agreement.py` makes the same comparison and fails above {tolerance}. It also plants errors (beta 0.11 instead of 0.1, a sum instead of
a mean, one token too many in a denominator, ...) and asserts that each makes a difference of at least twenty times this limit. Rounding
alone, with the SSE, AVX2 and AVX-512 kernels of one machine, made a difference of at most 5e-6.

- TRL: {theirs}.
- alignflow: {ours}. float32 on a CPU, seed {seed}.
- Material: a Llama with two layers of width 32, whose weights are bit-identical on every machine, and {rows} rows of each kind as messages.
  Each side renders and tokenises them with its own code. TRL reads the rows one after the other, in alignflow's order.

## Training: {steps} steps of AdamW

Batches have {batch} rows in one micro-batch. The learning rate is constant, betas are {betas}, epsilon is 1e-8, weight decay is {decay}
(none on norms, on both sides), and the gradient norm is clipped at {norm}. The table gives the largest relative differences over all steps.
"Weights moved" compares the L2 distance of each weight between the first and the last step. "KL" is KTO's, relative to its largest value.

{curves}

## Losses on recorded tensors

There are three prompts with a group of four answers each. The old, reference and sampler log-probs differ from the policy's at random
(standard deviations 0.4, 0.6, 0.5); the clips are 0.2 and 0.28. TRL's own trainer scores the rollout and computes the loss, with recorded
tensors in place of its samples and of the log-probs before the update. Differences in the loss are relative to the loss. The difference in
the gradient is the larger of two: in the norm of each weight's gradient, and in the entries of the gradient of the last norm.

{losses}

## Settings, and differences by definition

- Learning rate: TRL's warm-up (transformers') starts at 0, alignflow's at the first step of the ramp, so the rate is constant here.
- Reward model: alignflow's head starts at zero, TRL's at random; here TRL's head is set to zero. TRL's `center_rewards_coefficient` is
  `centering` in alignflow.
- SFT, packed: TRL packs the data set before cutting it into batches, alignflow packs within an optimiser step, so batches of packed rows do
  not hold the same documents. TRL's `padding_free` puts the documents of a batch into one row without padding; alignflow's packed rows are
  compared with these rows.
- DPO with `nll_coef` is TRL's `loss_type` sigmoid + sft with weights 1 and `nll_coef`. alignflow's metric `loss` is the preference loss
  alone.
- cDPO: TRL's sigmoid loss has no label smoothing; TRL's `aot` with accumulated batches of one pair is the same function.
- IPO: both average log-probs over tokens. SimPO is TRL's experimental CPO trainer with `cpo_alpha` 0; its `simpo_gamma` is alignflow's
  `gamma`.
- ORPO: alignflow's NLL is a mean over answers of means over answer tokens; TRL's is a mean over all tokens of prompts and chosen answers.
  Only the odds-ratio term is compared.
- KTO: both pair each prompt with the answer before it (the first with the last answer of the batch), and clamp the KL at 0. TRL does so in
  each micro-batch, alignflow in the whole optimiser step; without gradient accumulation the two are the same.
- GRPO: alignflow's aggregation `sequence` is TRL's loss type grpo, `token` is bnpo, and `constant` is dr_grpo with `generate_max_len` as the
  constant. Both add 1e-4 to the standard deviation (n - 1) of a group. Both weight the KL (k3) by the ratio (`use_bias_correction_kl`, TRL's
  default). alignflow also weights it by the importance weights against the sampler, so the KL and these weights are compared separately.
  `sampler_is_cap` is the cap of TRL's `token_truncate` (1.5 here). `dual_clip` is TRL's `delta` if it is above 1 + `eps_clip_high`.
- RLOO: TRL uses one ratio for the whole answer, the product over its tokens, and a loss that is a mean over answers. alignflow uses PPO's
  loss, with one ratio per token. For answers of one token they are the same function, and for the policy that sampled the answers they have
  the same gradient (aggregation `constant` with constant 1; alignflow's default divides by tokens instead of answers). Both subtract the KL
  (k1, summed over the answer) from the reward. TRL's RLOO has no importance weights against the sampler.
"""
