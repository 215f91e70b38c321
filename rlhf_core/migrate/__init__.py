"""Converts launch scripts of other tools to recipes. Torch-free. A script is parsed but not executed.

script or Kubernetes YAML -> commands (`shell.py`) -> launches with their flags (`launches.py`) -> stages
(`stage_drafts.py`, with the tables in `flags.py`) -> a recipe with a comment about every flag (`script.py`).
TRL's commands and configs: `trl/`.
"""
