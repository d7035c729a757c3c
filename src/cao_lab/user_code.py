"""A Python file of the user's own: a suite, or a model to look at."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from cao_lab.config import ConfigError


def import_file(path: Path) -> ModuleType:
    """Import a file as a script would be: its neighbours can be imported too."""
    # A file may be called like a module that is in use; that one must stay what it is.
    name = path.stem if path.stem not in sys.modules else f"user_code_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ConfigError(f"{path} is not a file; name a Python file and something in it, path.py:name")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent.resolve()))
    sys.modules[name] = module
    with explained(f"{path} cannot be imported"):
        spec.loader.exec_module(module)
    return module


def user_function(target: str, otherwise: str, returns: str) -> Callable[[], Any]:
    """Return the function that path.py:function names; `otherwise` says what a target must be."""
    path, _, name = target.rpartition(":")
    if not path.endswith(".py") or not name.isidentifier():
        raise ConfigError(f"{target} {otherwise}")
    function = getattr(import_file(Path(path)), name, None)
    if not callable(function):
        raise ConfigError(f"{path} has no function {name}; define one: {returns}")
    return cast("Callable[[], Any]", function)


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Tell in one line what code of the user's raised; its end of the program is no end of ours."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if type(error).__module__.startswith("cao_lab"):
            raise
        raise ConfigError(f"{what} ({type(error).__name__}: {error})") from error
