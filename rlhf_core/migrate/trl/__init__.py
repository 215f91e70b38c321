"""Reads TRL's commands (`trl sft`, `dpo`, `kto`, `reward`, `grpo`) and their YAML configs. Names and
defaults follow TRL 1.16.

commands and configs -> launches (`../trl_commands.py`) -> stages (`trl_stages.py`, `trl_sampling.py` for
grpo, with the tables in `options.py`).
"""
