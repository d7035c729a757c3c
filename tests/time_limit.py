"""A time limit for all tests together, after which every process that runs tests shows where it is, and ends.

A test has a limit of its own (pytest-timeout), which native code can ignore. This one is kept by a thread that needs
nothing from Python, and xdist reports the test that a worker was running when it ended.
"""

import faulthandler
import os

import pytest

GRACE_SECONDS = 120


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let pyproject.toml set the limit."""
    parser.addini("time_limit", "seconds that all tests together may take", default="3600")


def pytest_configure(config: pytest.Config) -> None:
    """Start the clock; output is not captured yet, so that the standard error is the terminal's."""
    # The process that hands the tests out has to report on the workers, which end before it.
    grace = 0 if hasattr(config, "workerinput") else GRACE_SECONDS
    seconds = float(config.getini("time_limit")) + grace
    faulthandler.dump_traceback_later(seconds, exit=True, file=os.dup(2))


def pytest_unconfigure() -> None:
    """Stop the clock after the last test."""
    faulthandler.cancel_dump_traceback_later()
