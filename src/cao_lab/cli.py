"""The command `cao`: train · solve · suite · report · theory · spectrum · watch · bench · data.

Each command imports what it needs when it runs, so that `cao --help` and `cao report` do not wait for torch.
"""

# ruff: noqa: PLC0415

import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from importlib import import_module, metadata
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import tyro

from cao_lab.config import ConfigError, Execution, RunConfig, SlurmOptions, output_folder
from cao_lab.facts import RUN_ELSEWHERE, SUITES, kind_of
from cao_lab.failures import is_expected
from cao_lab.solvers.config import SolveConfig
from cao_lab.spectrum.config import SpectrumConfig
from cao_lab.terminal import complain, prepare

WRONG_INPUT = 2
SECONDS_FOR_THE_FIRST = 10.0
SUITE_HELP = "\n".join(
    [*(f"{name}: {info.about}" for name, info in SUITES.items()), "or path.py:NAME, a list of yours."]
)


def train(config: RunConfig, execution: Execution) -> int:
    """Train one model with one optimizer; the same command resumes a run that was interrupted."""
    from cao_lab.runs.session import run

    outcome = run(config, execution)
    if is_first_rank():
        print(outcome.message)
        if outcome.status == "interrupted":
            print(to_go_on())
    return outcome.exit_code


def is_first_rank() -> bool:
    """Whether this process speaks for all: torchrun starts several, and numbers them."""
    return not is_under_torchrun() or os.environ.get("RANK") == "0"


def is_under_torchrun() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def to_go_on() -> str:
    """Return what to do after an interruption."""
    if is_under_torchrun():
        return "to go on, give torchrun the same command again"
    return f"to go on: {shlex.join(['cao', *sys.argv[1:]])}"


def solve(config: SolveConfig) -> int:
    """Minimise a full-batch loss, yours or one of the laboratory's, and draw loss against evaluations and seconds."""
    from cao_lab.solvers.command import run_solve

    message, code = run_solve(config)
    print(message)
    return code


def suite(
    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(help=SUITE_HELP)],
    /,
    *,
    jobs: int = 1,
    dry_run: bool = False,
    launcher: Literal["local", "slurm"] = "local",
    slurm: SlurmOptions = SlurmOptions(),  # noqa: B008  # frozen
    execution: Execution = Execution(),  # noqa: B008  # frozen
) -> int:
    """Run the experiments of a suite that are not finished yet.

    Args:
        name: Which suite.
        jobs: How many runs at a time; the cores are divided among them.
        dry_run: List the runs with an estimate of their time, and run nothing.
        launcher: Processes of this machine, or one job array of Slurm.
        slurm: What each run asks of Slurm.
        execution: Where and how the runs are carried out.
    """
    if jobs < 1:
        raise ConfigError(f"jobs must be at least 1, got {jobs}")
    kind = kind_of(name)
    if kind and not dry_run:  # A folder that cannot be written to shows at once, and not in each run.
        output_folder(execution.logs)
    if is_under_torchrun():
        raise ConfigError("cao suite starts processes itself, and torchrun would start all of them again; do without")
    if launcher == "slurm" and kind in RUN_ELSEWHERE:
        raise ConfigError(f"--launcher slurm carries out training runs, and {name} has none; use --jobs alone")
    if kind is not None and kind in RUN_ELSEWHERE:
        module = import_module(f"cao_lab.suites.{RUN_ELSEWHERE[kind]}")
        return told(module.list_suite(name, execution)) if dry_run else int(module.run_suite(name, execution, jobs))
    options = slurm if launcher == "slurm" else None
    if dry_run:
        from cao_lab.suites.estimate import list_runs

        return told(list_runs(name, execution, jobs, options))
    from cao_lab.suites.runner import run_suite

    return run_suite(name, execution, jobs, options)


def told(lines: Iterable[str]) -> int:
    """Print lines as they come."""
    for line in lines:
        print(line)
    return 0


def report(logs: tyro.conf.Positional[Path] = Path("logs"), /, out: Path = Path("report")) -> int:
    """Make figures, tables, the audit of the paper's claims and a page out of logs.

    Args:
        logs: Folder with the logs.
        out: Folder to write to.
    """
    from cao_lab.reporting.report import write_report

    print(write_report(logs, out))
    return 0


def theory(logs: Path = Path("logs"), out: Path = Path("report")) -> int:
    """Check each statement of the paper's theory numerically.

    Args:
        logs: Folder with the logs, where theory.csv is written.
        out: Folder to write the figures to.
    """
    from cao_lab.theory import check_theory, shown

    for folder in (logs, out):  # One that cannot be written to shows at once, and not after minutes.
        output_folder(folder)
    print(shown(check_theory(logs, out), logs, max(100, shutil.get_terminal_size().columns)))
    return 0


def spectrum(config: SpectrumConfig) -> int:
    """Look at the curvature of a run's model, or of your own: eigenvalues, trace and density."""
    from cao_lab.spectrum.measure import measure_spectrum

    print(measure_spectrum(config))
    return 0


def watch(log: tyro.conf.Positional[Path], /, out: Path = Path("out/watch.png")) -> int:
    """Draw the sharpness, the edge of stability and the learning rate of a training.

    Args:
        log: What `Sharpness(optimizer, tell="watch.csv")` has written.
        out: Picture to write.
    """
    from cao.readings import from_file, picture

    try:
        readings = from_file(log)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if not readings:
        raise ConfigError(f"{log} has no readings yet")
    output_folder(out.parent)
    picture(readings).savefig(out, dpi=140)
    print(f"{readings[-1]}\nwritten to {out}")
    return 0


def bench(out: Path = Path("out/bench"), quick: bool = False, device: Literal["auto", "cpu", "cuda"] = "auto") -> int:
    """Measure what curvature costs in time and memory, against the alternatives.

    Args:
        out: Folder to write bench.json, bench.md and bench.png to.
        quick: Small sizes, under two minutes, not for the record.
        device: Where to measure; auto takes a GPU if there is one.
    """
    from cao_lab.bench.run import run_bench

    rows = run_bench(out, quick, device)
    missed = f"{sum(row.is_reached is False for row in rows)} targets missed"
    print(f"{'quick figures are not held against the targets' if quick else missed}; see {out / 'bench.md'}")
    return 0


def data(
    dataset: tyro.conf.Positional[Literal["cifar10", "cifar100"]],
    /,
    data_dir: Annotated[Path, tyro.conf.arg(help="Folder to put the dataset into.")],
    url: Annotated[str | None, tyro.conf.arg(help="Another address to download the official archive from.")] = None,
) -> int:
    """Download the official archive of a dataset, check it, unpack it and load it once."""
    from cao_lab.tasks.download import download

    print(download(dataset, data_dir, url))
    return 0


COMMANDS: dict[str, Callable[..., int]] = {
    "train": train,
    "solve": solve,
    "suite": suite,
    "report": report,
    "theory": theory,
    "spectrum": spectrum,
    "watch": watch,
    "bench": bench,
    "data": data,
}

# `cao train sgd --lr 1`, not `cao train config.optimizer:sgd-config --config.optimizer.lr 1`.
SHORT_NAMES = (
    tyro.conf.OmitArgPrefixes,
    tyro.conf.OmitSubcommandPrefixes,
    tyro.conf.CascadeSubcommandArgs,
)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run a command; what the user can correct is reported in one line, a mistake of ours with its traceback."""
    prepare()
    if is_under_torchrun():
        # Every process would be told by torch, before its first step, that no parameter is unused: see runs/ranks.py.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if (sys.argv[1:] if arguments is None else arguments) == ["--version"]:
        print(f"cao {metadata.version('cao-optimizer')}")
        sys.exit(0)
    try:
        code = tyro.extras.subcommand_cli_from_dict(
            COMMANDS,
            prog="cao",
            description="The laboratory of CAO: train, compare, report, look at curvature.",
            args=arguments,
            config=SHORT_NAMES,
        )
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # Whoever read our output has had enough, as `cao suite paper --dry-run | head` does.
        sys.stdout = None
        sys.exit(0)
    except Exception as error:
        if not is_expected(error):
            raise
        if not is_first_rank():
            # What is wrong is mostly so in all processes, and torchrun ends this one when the first has said it.
            time.sleep(SECONDS_FOR_THE_FIRST)
        complain(f"cao: {' '.join(str(error).split())}")
        sys.exit(WRONG_INPUT)
    sys.exit(code)
