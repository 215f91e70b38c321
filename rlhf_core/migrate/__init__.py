"""Launch scripts of other tools become recipes. Torch-free; a script is read, never executed.

script or Kubernetes YAML -> commands (`shell.py`, `manifests.py`) -> launches with their flags (`launches.py`) -> stages (`stages.py`,
by the tables in `flags.py`) -> a recipe with what became of every flag (`script.py`).
"""
