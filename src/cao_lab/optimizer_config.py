"""The optimizers by name: each is a class in a file of `runs/methods`, and is found there."""

from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, Union

import tyro

from cao_lab.discovery import modules_in
from cao_lab.runs.settings import Settings


def optimizer_configs() -> dict[str, type[Any]]:
    """Return the settings of each optimizer, by its name."""
    found: list[type[Any]] = [
        each
        for module in modules_in("cao_lab.runs.methods")
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, Settings) and hasattr(each, "name")
    ]
    return {each.name: each for each in sorted(found, key=lambda each: str(each.name))}


# The command line takes its choices from the files; a type checker cannot look into them.
if TYPE_CHECKING:
    OptimizerConfig: TypeAlias = Settings
else:
    OptimizerConfig = Union[  # noqa: UP007  # made from a list
        tuple(Annotated[each, tyro.conf.subcommand(name)] for name, each in optimizer_configs().items())
    ]
