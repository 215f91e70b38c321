"""Names a reader of each field whose name other classes have, too, and that has no probe: a file, and what it
reads there."""

from __future__ import annotations

_TEXT = """
Recipe.name rlhf_core/recipe/plan.py self.recipe.name
Recipe.artifacts rlhf_core/recipe/plan.py self.recipe.artifacts
Recipe.store rlhf_core/runs/remote/store.py recipe.store
Recipe.seed rlhf_core/recipe/plan.py seed=self.recipe.seed
Recipe.trust_remote_code rlhf_core/recipe/plan.py self.recipe.trust_remote_code
Recipe.wandb rlhf_core/recipe/plan.py self.recipe.wandb
Recipe.stages rlhf_core/recipe/expand.py recipe.stages
Gated.gates rlhf_core/recipe/gate_checks.py config.gates
Optimised.zero_stage rlhf_core/config/training/optimised.py self.zero_stage
Trainable.ranks rlhf_core/training/ranks.py config.ranks
Trainable.adam_offload rlhf_core/config/training/optimised.py self.adam_offload
Trainable.param_offload rlhf_core/config/training/optimised.py self.param_offload
Loop.rounds rlhf_core/recipe/expand.py config.rounds
RewardShaping.environment rlhf_core/stages/ppo/train.py config.environment
ModelPlacement.timeout rlhf_core/stages/ppo/start_fleet.py config.timeout
ModelPlacement.adam_offload rlhf_core/config/ppo/model_placement.py self.adam_offload
ModelPlacement.param_offload rlhf_core/config/ppo/model_placement.py self.param_offload
Evaluation.models evaluation/evaluation_stage.py config.models
Evaluation.baseline evaluation/evaluation_stage.py config.baseline
Evaluation.questions evaluation/evaluation_stage.py config.questions
Evaluation.parents evaluation/evaluation_stage.py config.parents
Evaluation.calibration rlhf_core/recipe/consistency.py config.calibration
Evaluation.proxy evaluation/evaluation_stage.py config.proxy
Regression.history evaluation/regression/regression_stage.py config.history
Regression.band evaluation/regression/regression_stage.py config.band
Calibration.judge evaluation/calibration/calibration_stage.py config.judge
Calibration.labels evaluation/calibration/calibration_stage.py config.labels
Served.max_model_len evaluation/answers/served_models.py config.max_model_len
AlignmentTax.models evaluation/alignment_tax/tax_stage.py config.models
AlignmentTax.baseline evaluation/alignment_tax/tax_stage.py config.baseline
AlignmentTax.tasks evaluation/alignment_tax/tax_stage.py config.tasks
AlignmentTax.limit evaluation/alignment_tax/harness.py config.limit
AlignmentTax.num_fewshot evaluation/alignment_tax/harness.py config.num_fewshot
AlignmentTax.chat_template evaluation/alignment_tax/harness.py config.chat_template
AlignmentTax.timeout evaluation/alignment_tax/harness.py config.timeout
Select.of evaluation/select_stage.py config.of
Select.by evaluation/select_stage.py config.by
Drift.kl evaluation/drift/drift_stage.py config.kl
Publication.folder rlhf_core/stages/publication/publication_stage.py config.folder
Publication.repo_id rlhf_core/stages/publication/publication_stage.py config.repo_id
Publication.branch rlhf_core/stages/publication/publication_stage.py config.branch
Publication.license rlhf_core/stages/publication/publication_stage.py config.license
Notify.timeout tasks/notify.py notify.timeout
Wandb.group rlhf_core/runs/wandb_mirror.py request.wandb.group
Gate.metric rlhf_core/recipe/gate_checks.py gate.metric
Gate.approve rlhf_core/recipe/gate_checks.py gate.approve
Lora.rank rlhf_core/models/lora.py lora.rank
Lora.alpha rlhf_core/models/lora.py lora.alpha
Lora.export rlhf_core/training/ranks.py lora.export
Ranks.num_nodes rlhf_core/records.py self.num_nodes
Ranks.num_ranks_per_node rlhf_core/records.py self.num_ranks_per_node
Ranks.cpus rlhf_core/cluster/layout.py groups[name].cpus
Ranks.gpus rlhf_core/cluster/layout.py groups[names[0]].gpus
Data.sources rlhf_core/data/rows/mixture.py data.sources
EngineConfig.cpus rlhf_core/cluster/layout.py groups[name].cpus
EngineConfig.gpus rlhf_core/cluster/layout.py groups[names[0]].gpus
EngineConfig.sleep rlhf_core/stages/ppo/start_fleet.py config.engine.sleep
EngineConfig.adapters rlhf_core/stages/ppo/start_fleet.py config.engine.adapters
EngineConfig.kind rlhf_core/rollout/engine_kinds.py config.kind
EngineConfig.options rlhf_core/rollout/vllm/vllm_engine.py config.options
WeighedReward.name rlhf_core/config/rewards.py self.name
WeighedReward.weight rlhf_core/rewards/combine.py source.weight
ModelReward.normalize rlhf_core/rewards/combine.py source.normalize
ModelReward.ranks rlhf_core/config/ppo/model_placement.py source.ranks
RequestedReward.normalize rlhf_core/rewards/combine.py source.normalize
RequestedReward.timeout rlhf_core/rewards/clients.py source.timeout
HttpReward.url rlhf_core/rewards/clients.py source.url
HttpReward.api_key_env rlhf_core/rewards/clients.py source.api_key_env
EnvironmentReward.normalize rlhf_core/rewards/combine.py source.normalize
Environment.path rlhf_core/config/rewards.py self.path
Environment.options rlhf_core/config/rewards.py self.options
Environment.answer_max_len rlhf_core/stages/ppo/train.py config.environment.answer_max_len
Environment.timeout rlhf_core/environments/episodes.py self._config.timeout
RequestLimits.timeout evaluation/answers/chat_client.py self.limits.timeout
Remote.api_key_env evaluation/answers/chat_client.py config.api_key_env
Endpoint.more evaluation/answers/remote_answers.py endpoint.more
Endpoint.max_failed evaluation/answers/remote_answers.py endpoint.max_failed
Source.path rlhf_core/data/rows/row_files.py source.path
Source.split rlhf_core/data/rows/row_files.py source.split
RuleJudge.answer_key evaluation/evaluation_stage.py judge.answer_key
RewardJudge.tie evaluation/judges/factory.py judge.tie
ChatJudge.max_failed evaluation/judges/factory.py judge.max_failed
RewardEvaluation.models evaluation/evaluation_stage.py wanted.models
Anchors.judge evaluation/drift/drift_stage.py config.anchors.judge
Recipe.cost evaluation/dashboard/cost.py config["cost"]
Publication.champion tasks/decisions/champion.py config.champion
"""
READERS: dict[str, tuple[str, str]] = {
    field: (file, text)
    for field, file, text in (line.split(maxsplit=2) for line in _TEXT.strip().splitlines())
}
