"""Runs the command `alignflow` as `python -m flows.cli`."""

import sys

from flows.cli.app import main

sys.exit(main())
