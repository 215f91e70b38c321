"""Benchmarks import each other as scripts do, by the names of their files."""

from __future__ import annotations

import sys

from tests.benchmarks.record import RESULTS

sys.path.append(str(RESULTS.parent))
