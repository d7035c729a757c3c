"""The modules of a package, found by where they are: what one of them offers needs to be listed nowhere else."""

from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType


def modules_in(package: str) -> list[ModuleType]:
    """Import all modules of a package, in alphabetical order."""
    return [import_module(f"{package}.{found.name}") for found in iter_modules(import_module(package).__path__)]
