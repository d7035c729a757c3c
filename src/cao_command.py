"""The command `cao`: the laboratory carries it out, and where that is not installed one line says how to get it."""

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Hand over to the laboratory."""
    try:
        from cao_lab.cli import main as run  # noqa: PLC0415  # its absence is what this module is about
    except ModuleNotFoundError as error:
        advice = "the command needs the laboratory: pip install 'cao-optimizer[lab]'"
        sys.exit(f"cao: {error.name} is not installed; {advice}")
    run()


if __name__ == "__main__":
    main()
