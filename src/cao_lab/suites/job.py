"""One run as a process of its own, as suites start it: a config and how to carry it out, as JSON on standard input."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from cao_lab.config import ConfigError, Execution, RunConfig, config_from_dict, config_to_dict

FAILED = 1


def to_json(config: RunConfig, execution: Execution) -> str:
    """Return what `work` reads."""
    return json.dumps({"config": config_to_dict(config), "execution": asdict(execution)}, default=str)


def from_json(text: str) -> tuple[RunConfig, Execution]:
    """Return what `to_json` was given."""
    data: dict[str, Any] = json.loads(text)
    execution = data["execution"]
    folders = {name: Path(execution[name]) for name in ("logs", "data_dir") if execution[name] is not None}
    return config_from_dict(data["config"]), Execution(**{**execution, **folders})


def work(text: str) -> NoReturn:
    """Run, leave the reason of a failure as the last line on standard error, and exit as `cao train` would."""
    from cao_lab.runs.session import run  # noqa: PLC0415  # torch is not for those who only write the JSON

    try:
        sys.exit(run(*from_json(text)).exit_code)
    except (ConfigError, ValueError, OSError, RuntimeError) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.exit(FAILED)


if __name__ == "__main__":
    work(sys.stdin.read())
