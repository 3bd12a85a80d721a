"""`sinkflex bench step` with its files: a whole training step, eager against ours. Eager needs 10 GB at 4096 tokens.

python benchmarks/step.py --tokens 1024 2048 4096 --json step.json --plot step.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from sinkflex.bench import step


def main() -> None:
    """Measure, print the table, and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--rho", action="store_true", help="also at the attention share of a 20B model (8 GB)")
    parser.add_argument("--budget", action="store_true", help="also the longest sequence in 2.5 GB (half an hour)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    rows = step.run(tuple(options.tokens), rho=options.rho, budget=options.budget)
    print(step.table(rows))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    if options.plot:
        options.plot.write_text(step.plot(rows))


if __name__ == "__main__":
    main()
