"""Put what the logs say into the pages of the documentation: tables, and with a report its pictures.

    python scripts/fill_documents.py [REPORT]

A table stands between a line `<!-- table NAME -->` and the next `<!-- end -->`. REPORT is what `cao report` wrote.
"""

import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from cao_lab.reporting.document import tables_of

ROOT = Path(__file__).parents[1]
MARKED = re.compile(r"(<!-- table (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
PAGES = [path for path in sorted((ROOT / "docs").glob("*.md")) if MARKED.search(path.read_text(encoding="utf-8"))]
IMAGES = ROOT / "docs/images"
MINI = "mini/cifar100-resnet18w8-n5000"
FIGURES = {
    "mini-controls": f"{MINI}/controls",
    "mini-eigenvalues": f"{MINI}/eigenvalues",
    "mini-test-accuracy": f"{MINI}/test-accuracy",
    "mini-train-loss": f"{MINI}/train-loss",
    "tuned-train-loss": "mini-tuned/cifar100-resnet18w8-n5000/train-loss",
    "transformer-train-loss": "transformer/pydoc-transformerw32/train-loss",
    "sensitivity": "mini-sensitivity/cifar100-resnet18w8-n5000/sweep",
    "stable-rates": "stable-range/stable-rates",
    "robust-loss-by-rate": "robust/loss-by-rate",
    "robust-effort": "robust/rank-and-cost-by-rate",
    "rule-edge": "robust/edge",
    "scientific-loss": "scientific/loss",
    "scientific-loss-seconds": "scientific/loss-seconds",
    "rathore-loss-seconds": "rathore/loss-seconds",
}
"""What a picture is called there, and where a report has it. The others are of `cao bench` and examples/pinn.py."""


def filled(page: str, tables: Mapping[str, str]) -> str:
    """Return a page with its tables in their places."""
    return MARKED.sub(lambda match: f"{match[1]}{tables[match[2]]}\n{match[3]}", page)


def main() -> None:
    """Fill all pages, and copy the pictures of a report."""
    tables = tables_of(ROOT / "logs")
    for path in PAGES:
        path.write_text(filled(path.read_text(encoding="utf-8"), tables), encoding="utf-8")
    for name, place in FIGURES.items() if len(sys.argv) > 1 else ():
        shutil.copyfile(Path(sys.argv[1], "figures", f"{place}.png"), IMAGES / f"{name}.png")


if __name__ == "__main__":
    main()
