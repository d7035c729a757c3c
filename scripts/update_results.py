"""Put the tables that the logs give into docs/results.md, below their marks."""

import re
from pathlib import Path

from cao_lab.reporting.claims import audit
from cao_lab.reporting.document import document_tables
from cao_lab.reporting.logreader import load_logs
from cao_lab.reporting.setting import settings

ROOT = Path(__file__).parents[1]


def updated(document: str, tables: dict[str, str]) -> str:
    """Return a document with the table below each mark replaced."""
    marks = {f"<!-- {name} -->\n": table for name, table in tables.items()}
    found = re.compile(rf"({'|'.join(map(re.escape, marks))})(?:\|.*\n)*")
    return found.sub(lambda match: match[1] + marks[match[1]], document)


if __name__ == "__main__":
    found = settings(load_logs(ROOT / "logs"))
    path = ROOT / "docs/results.md"
    path.write_text(updated(path.read_text(encoding="utf-8"), document_tables(found, audit(found))), encoding="utf-8")
