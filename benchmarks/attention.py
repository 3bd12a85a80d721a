"""`sinkflex bench attention` with its files: one layer, eager against ours. Eager needs 6 GB at 8192 tokens.

python benchmarks/attention.py --tokens 1024 2048 4096 --json attention.json --plot attention.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from sinkflex.bench import attention


def main() -> None:
    """Measure, print the table, and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    rows = attention.run(tuple(options.tokens))
    print(attention.table(rows))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    if options.plot:
        options.plot.write_text(attention.plot(rows))


if __name__ == "__main__":
    main()
