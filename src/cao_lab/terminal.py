"""What a command says, and where: on streams that may be closed or lack letters, and a terminal that may be narrow."""

import os
import shutil
import sys
from io import TextIOWrapper

LEAST_COLUMNS = 20
"""Help is never laid out in less: its layout does not end in three columns."""


def prepare() -> None:
    """Let neither a closed stream, nor a letter that it has no code for, nor a narrow terminal end a command."""
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # The first that is opened takes the number of the closed one; no log is to have it.
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115  # kept to the end
        elif name != "stdin" and isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    if shutil.get_terminal_size().columns < LEAST_COLUMNS:
        os.environ["COLUMNS"] = str(LEAST_COLUMNS)


def complain(text: str) -> None:
    """Say on standard error what is wrong; where nobody can hear it, nothing is said."""
    try:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    except OSError:
        sys.stderr = None
