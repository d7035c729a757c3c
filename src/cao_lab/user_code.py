"""A Python file of the user's own: a suite, or a model to look at."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from cao_lab.config import ConfigError


def import_file(path: Path) -> ModuleType:
    """Import a file as a script would be: its neighbours can be imported too."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ConfigError(f"{path} is not a file; name a Python file and something in it, path.py:name")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent.resolve()))
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"{path} cannot be imported ({type(error).__name__}: {error})") from error
    return module
