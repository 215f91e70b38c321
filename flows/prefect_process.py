"""Runs a Prefect module like `python -m`, after importing the flows: `python -P -m flows.prefect_process
MODULE ARGUMENTS...`.

Prefect puts the working directory first on the module path while it imports a flow by name
(`prefect.utilities.importtools.load_module` in Prefect 3.7), so a folder there could replace a package that
the flow imports. Modules that are already imported are not searched for again.
"""

from __future__ import annotations

import importlib
import runpy
import sys
import warnings

from tasks.run_log import without_tracebacks

FLOWS = ("flows.alignment", "flows.loops", "flows.parts")  # the modules of all entrypoints

if __name__ == "__main__":
    for module in FLOWS:
        importlib.import_module(module)
    without_tracebacks()
    warnings.filterwarnings("ignore", "'prefect.engine' found in sys.modules", RuntimeWarning)
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
