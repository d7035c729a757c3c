"""Put tables of a report into a page of the documentation, between marks that name them.

    cao report logs --out report && python scripts/fill_tables.py docs/scientific-ml.md report/tables

A mark is a line `<!-- table NAME -->`; what stands between it and the next `<!-- end -->` is replaced.
"""

import re
import sys
from pathlib import Path

MARKED = re.compile(r"(<!-- table (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(page: str, tables: Path) -> str:
    """Return a page with the tables of a folder in their places."""
    return MARKED.sub(lambda match: f"{match[1]}{(tables / f'{match[2]}.md').read_text()}\n{match[3]}", page)


if __name__ == "__main__":
    path, folder = map(Path, sys.argv[1:])
    path.write_text(filled(path.read_text(), folder))
