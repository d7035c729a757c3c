"""The experiments by name. A suite is a list of RunConfig, or a generator that learns from the runs it asked for."""

from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import TypeAlias

from cao_lab import facts
from cao_lab.config import ConfigError, RunConfig
from cao_lab.suites.rounds import FinishedRun, Rounds
from cao_lab.user_code import explained, import_file

Suite: TypeAlias = Sequence[RunConfig] | Callable[[], Rounds]

SUITES: dict[str, Suite] = {
    name: resolve_name(f"{__name__}.{info.runs}")
    for name, info in facts.SUITES.items()
    if info.kind not in facts.RUN_ELSEWHERE
}


def find_suite(name: str) -> tuple[str, Suite]:
    """Return a suite and the name of its folder: one of ours, or NAME in a Python file given as path.py:NAME."""
    if name in SUITES:
        return name, SUITES[name]
    path, colon, attribute = name.rpartition(":")
    if not colon or not path.endswith(".py"):
        raise ConfigError(f"no suite is called {name}; there are {', '.join(facts.SUITES)}, or give path.py:NAME")
    module = import_file(Path(path))
    if not hasattr(module, attribute):
        raise ConfigError(f"{path} defines no {attribute}")
    suite: Suite = getattr(module, attribute)
    is_list = isinstance(suite, Sequence) and all(isinstance(one, RunConfig) for one in suite)
    if not is_list and not callable(suite):
        got = type(suite).__name__
        raise ConfigError(f"{name} must be a list of RunConfig, or a function that yields such lists, got {got}")
    return attribute, suite


def rounds_of(suite: Suite) -> Generator[list[RunConfig], list[FinishedRun], None]:
    """Return any suite as rounds of runs; a list is a single round."""
    if not callable(suite):
        yield list(suite)
        return
    finished: list[FinishedRun] | None = None
    rounds = None
    while True:
        with explained("the suite's function failed"):
            rounds = suite() if rounds is None else rounds
            try:
                configs = next(rounds) if finished is None else rounds.send(finished)
            except StopIteration:
                return
            if not isinstance(configs, Sequence) or not all(isinstance(one, RunConfig) for one in configs):
                raise TypeError(f"it must yield lists of RunConfig, got {type(configs).__name__}")
        finished = yield list(configs)
