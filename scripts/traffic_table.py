"""Print what CAO sends between processes, by formula, for a model of 10⁹ parameters: the table of docs/scale.md."""

import sys

from cao_lab.bench.traffic import table

if __name__ == "__main__":
    sys.stdout.write(table(n=10**9, rank=8, every=400, ranks=(8, 64, 256, 1024)) + "\n")
