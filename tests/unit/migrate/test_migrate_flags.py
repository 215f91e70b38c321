"""Every flag of a launch script is accounted for, whatever it is and whatever its value."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.config import KINDS
from rlhf_core.migrate.draft import find_field
from rlhf_core.migrate.flags import DROPPED, FIELDS, RENAMED, flat
from rlhf_core.migrate.launches import launches_in
from rlhf_core.migrate.script import migrate
from rlhf_core.migrate.shell import Variables, read_script
from tests.support.launch_scripts import (
    DPO,
    KTO,
    PPO_COLOCATED,
    PPO_GROUPS,
    REQUIRED,
    REWARD_MODEL,
    SFT,
    migrated,
)

OTHERS = (
    "bf16 param_dtype lora_rank lora_alpha target_modules load_in_4bit lr_scheduler use_dynamic_batch"
    " train_max_tokens_per_gpu ipo seed eps_clip_low_high reward_clip_range use_kl_loss"
    " enable_vllm_is_correction is_correction_type vllm_is_truncated_threshold max_samples remote_rm_url"
    " critic_pretrain ref_pretrain dataset_probs prompt_data_probs prompt_split input_key output_key"
    " apply_chat_template input_template margin_loss eval_dataset eval_split num_nodes num_gpus_per_node"
    " actor_num_nodes critic_num_gpus_per_node save_path"
).split()
FLAGS = st.sampled_from(
    sorted({*FIELDS, *DROPPED, *OTHERS, *RENAMED, "ds.lora.rank", "eval.dataset", "vllm.num_engines"})
)
VALUES = st.sampled_from(
    [
        "",
        "0",
        "1",
        "2",
        "7",
        "-1",
        "0.5",
        "1e-5",
        "1e9",
        "nan",
        "abc",
        "$X",
        "a,b",
        "0.2 0.3",
        "1 2",
        "none",
        "True",
        "{}",
        "'x {}'",
    ]
)


def test_every_flag_of_a_script_is_accounted_for(tmp_path: Path) -> None:
    for text in (PPO_GROUPS, PPO_COLOCATED, REWARD_MODEL, SFT, DPO, KTO):
        _, found = migrated(tmp_path, text)
        variables = Variables()
        (launch,) = launches_in(read_script(text, variables), variables).launches
        named = {note.flag.split()[0] for note in found.notes}
        # Lengths, groups and switches that only make sense with others are told together.
        together = {"--data.max_len", "--prompt_data", "--dataset"}
        assert {f"--{name}" for name in launch.flags} - named <= together


def test_the_tables_name_real_fields() -> None:
    missing = {
        rule.name
        for rule in FIELDS.values()
        if all(find_field(kind.config, rule.name) is None for kind in KINDS.values())
    }
    # told as what we do not have
    assert missing <= {"ref_offload", "deepspeed_enable_sleep", "compute_fp32_loss"}
    assert all(DROPPED.values())


@pytest.mark.parametrize(
    ("dotted", "name"),
    [
        ("actor.adam.lr", "actor_learning_rate"),
        ("rollout.batch_size", "rollout_batch_size"),
        ("train.colocate_all", "colocate_all"),
        ("data.max_len", "max_len"),
        ("fsdp.zero_stage", "zero_stage"),
        ("fsdp.lora.rank", "lora_rank"),
        ("critic.max_norm", "critic.max_norm"),
        ("model.beta", "beta"),
    ],
)
def test_dotted_names(dotted: str, name: str) -> None:
    assert flat(dotted) == (name, "dotted")


@given(st.sampled_from(sorted(REQUIRED)), st.dictionaries(FLAGS, VALUES, max_size=12))
def test_any_flags_give_a_valid_recipe_or_a_sentence(
    tmp_path_factory: pytest.TempPathFactory, program: str, flags: dict[str, str]
) -> None:
    script = tmp_path_factory.getbasetemp() / "any.sh"
    script.write_text(
        f"python {program}.py {REQUIRED[program]} "
        + " ".join(f"--{name} {value}" for name, value in flags.items())
    )
    try:
        found = migrate(script)
    except ValueError as error:
        assert str(error).startswith(f"script {script}: ")
    else:
        assert len(found.recipe.stages) == 1
