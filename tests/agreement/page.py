"""The text of docs/reference/agreement.md, around the figures."""

PAGE = """# Agreement with TRL

Written by `python -m tests.agreement.compare` on {date}; do not edit by hand. It runs our stages and compares them with what TRL made of
the same material, `tests/agreement/trl.json`, which `python -m tests.agreement.record_trl` writes where TRL is installed. The test
`test_agreement.py` makes the same comparison and fails above {tolerance}; it also plants changes (beta 0.11 for 0.1, a sum for a
mean, one token too many in a denominator, ...) and asserts that each makes at least twenty times that. Rounding alone, with the SSE, AVX2
and AVX-512 kernels of one machine, made at most 5e-6.

- TRL's side: {theirs}.
- Ours: {ours}. float32 on CPU, seed {seed}.
- Material: a Llama of two layers and 32 dimensions whose weights are the same bits on every machine, {rows} rows of each kind in messages,
  tokenised and rendered by each side's own code. Rows come in our order: TRL reads them one after the other.

## Training: {steps} steps of AdamW

Batches of {batch}, {batch} rows a micro-batch, constant learning rate, betas {betas}, epsilon 1e-8, weight decay {decay} (none on norms, on
both sides), gradient norm clipped at {norm}. The largest relative differences over all steps; of the last column but one: over all
weights, of the distance (L2) between the first and the last step. KL: KTO's, relative to its largest value.

{curves}

## Losses on recorded tensors

Groups of four answers to each of three prompts, old, reference and sampler log-probs moved away from the policy's at random (standard
deviations 0.4, 0.6, 0.5), clip 0.2 and 0.28. TRL's own trainer scores the rollout and computes the loss; what it would sample, and the
log-probs it would compute before the update, are the recorded ones.
Differences of the loss are relative to the loss; of the gradient: the larger of the norm of each weight's and of the entries of the last
norm's.

{losses}

## Settings, and where the two differ by definition

- Learning rate: TRL's warm-up (transformers') starts at 0, ours at the first step of the ramp; so it is constant here.
- Reward model: our head starts at zero, TRL's at random; it is set to zero here. `center_rewards_coefficient` is our `centering`.
- SFT, packed: TRL packs the data set before it is cut into batches, we pack inside an optimiser step, so batches of packed rows do not
  hold the same documents. TRL's `padding_free` lays the documents of a batch in one row without padding: our rows of packed documents
  are compared with that.
- DPO with `nll_coef` is TRL's `loss_type` sigmoid + sft with weights 1 and `nll_coef`. Our metric `loss` is the preference loss alone.
- cDPO: TRL's sigmoid loss takes no label smoothing; its `aot` with batches of one pair, accumulated, is the same function.
- IPO: both average log-probs over tokens. SimPO is TRL's experimental CPO trainer with `cpo_alpha` 0; its `simpo_gamma` is our `gamma`.
- ORPO: our NLL is a mean over answers of means over answer tokens; TRL's is a mean over all tokens of prompts and chosen answers. Only
  the odds-ratio term is compared.
- KTO: both pair each prompt with the answer before it, around the end of the batch, and clamp the KL at 0. TRL does so in each
  micro-batch, we in the whole optimiser step; they are the same without gradient accumulation.
- GRPO: our aggregation `sequence` is TRL's loss type grpo, `token` is bnpo, `constant` is dr_grpo with `generate_max_len` as the
  constant. Both add 1e-4 to the standard deviation (n - 1) of a group. Both weigh the KL (k3) by the ratio (`use_bias_correction_kl`,
  TRL's default); ours also by the weights against the sampler, so a KL and these are compared apart. `sampler_is_cap` is the cap of
  TRL's `token_truncate` (1.5 here). `dual_clip` is TRL's `delta`, where that is above 1 + `eps_clip_high`.
- RLOO: TRL's ratio is that of the whole answer, the product over its tokens, and its loss a mean over answers; ours are PPO's, with a
  ratio a token. They are the same function for answers of one token, and on the policy that sampled they have the same gradient
  (aggregation `constant` with constant 1; our default divides by tokens instead of answers). Both subtract the KL (k1, summed over the
  answer) from the reward. TRL's RLOO has no importance weights against the sampler.
"""
