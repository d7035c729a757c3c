"""The laboratory's version is the library's, and it needs the library of that version."""

import tomllib
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class LibraryVersion(MetadataHookInterface):
    """Reads the version from the pyproject.toml of the library, which is the only place that names it."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Fill in the version and the requirement."""
        library = tomllib.loads((Path(self.root).parent / "pyproject.toml").read_text())["project"]
        metadata["version"] = library["version"]
        metadata["dependencies"] = [f"{library['name']}[lab-requirements]=={library['version']}"]
