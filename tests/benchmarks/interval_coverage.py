"""How often the interval of a win rate covers the true one, as a markdown table
(docs/explanation/statistics.md).

    python tests/benchmarks/interval_coverage.py [--evaluations 2000]

Simulates evaluations of 6, 20, 50 and 420 questions with true rates from 0.5 to 1, which takes minutes. What
is drawn: tests/support/interval_coverage.py.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from rlhf_core.system.markdown_table import table
from tests.support.interval_coverage import KINDS, coverage, interval_of

QUESTIONS = (6, 20, 50, 420)
RATES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--evaluations", type=int, default=2000, help="simulated evaluations of a cell")
    evaluations = parser.parse_args().evaluations
    rows = []
    for questions in QUESTIONS:
        interval_of.cache_clear()
        for kind, chances in KINDS.items():
            covered = [f"{100 * coverage(chances(rate), questions, evaluations):.1f}" for rate in RATES]
            rows.append((str(questions), kind, *covered))
    print(table(("questions", "scores", *(f"{rate:g}" for rate in RATES)), rows))


if __name__ == "__main__":
    main()
