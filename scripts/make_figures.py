"""Regenerate every figure and table from the logs: the name the paper gives to what `cao report` does."""

import argparse
import sys
from pathlib import Path

from cao_lab.reporting.logreader import ReportError
from cao_lab.reporting.report import write_report


def main() -> None:
    """Write the report and say where its page is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("logs", type=Path, nargs="?", default=Path("logs"), help="folder of logs (default: logs)")
    parser.add_argument("--out", type=Path, default=Path("report"), help="where to write (default: report)")
    arguments = parser.parse_args()
    try:
        page = write_report(arguments.logs, arguments.out)
    except (ReportError, OSError) as error:
        sys.exit(f"make_figures: {error}")
    sys.stdout.write(f"{page}\n")


if __name__ == "__main__":
    main()
