"""Put the tables that the logs give into the pages of the documentation, between the marks that name them.

A mark is a line `<!-- table NAME -->`; what stands between it and the next `<!-- end -->` is replaced.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from cao_lab.reporting.claims import audit
from cao_lab.reporting.document import document_tables
from cao_lab.reporting.logreader import load_logs
from cao_lab.reporting.report import load_beside
from cao_lab.reporting.setting import settings
from cao_lab.reporting.tabular import captioned

ROOT = Path(__file__).parents[1]
MARKED = re.compile(r"(<!-- table (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
PAGES = [path for path in sorted((ROOT / "docs").glob("*.md")) if MARKED.search(path.read_text(encoding="utf-8"))]


def filled(page: str, tables: Mapping[str, str]) -> str:
    """Return a page with its tables in their places."""
    return MARKED.sub(lambda match: f"{match[1]}{tables[match[2]]}\n{match[3]}", page)


def tables_of(logs: Path) -> dict[str, str]:
    """Return all tables that a page may name."""
    read = load_logs(logs)
    found = settings(read)
    beside = {table.name: captioned(table) for table in load_beside(logs, []).tables()}
    return beside | document_tables(found, audit(found), read.theory)


if __name__ == "__main__":
    tables = tables_of(ROOT / "logs")
    for path in PAGES:
        path.write_text(filled(path.read_text(encoding="utf-8"), tables), encoding="utf-8")
