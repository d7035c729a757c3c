"""`python -m cao_lab.fits run --nist FOLDER` runs the suite; `… show` prints its tables and draws its profiles."""

from pathlib import Path

import tyro

from cao_lab.fits.profiles import profile_figure, table
from cao_lab.fits.running import carry_out, read

LOGS = Path("logs/fits")


def run(nist: Path, logs: Path = LOGS) -> None:
    """Run every method on every problem, and write what is not there yet.

    Args:
        nist: a folder with NIST's 27 files, Misra1a.dat and so on.
        logs: where the logs go.
    """
    for line in carry_out(nist, logs):
        print(line, flush=True)  # noqa: T201


def show(logs: Path = LOGS, figure: Path | None = None) -> None:
    """Print the tables, and draw the profiles if a file is named."""
    results = read(logs)
    print(table(results))  # noqa: T201
    if figure:
        profile_figure(results).savefig(figure)


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"run": run, "show": show})
