"""What a run is: a frozen dataclass that is the command line, the log's header and its path at once."""

import math
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from cao_lab.facts import CurvatureName, DatasetName, ModelName
from cao_lab.log.records import METHOD_SETTINGS, label_part
from cao_lab.optimizer_config import OptimizerConfig, optimizer_configs
from cao_lab.runs.settings import LARGEST_NUMBER
from cao_lab.runs.settings import ConfigError as ConfigError  # noqa: PLC0414  # everybody takes it from here

AT_LEAST_ONE = ("epochs", "width", "train_samples", "batch_size", "curvature_samples", "curvature_part")
NOT_NEGATIVE = ("seed", "l2", "monitor_curvature")
# What is larger is a slip of the keyboard: it would fill the memory, or never end, before anybody knew why.
RETIRED = [("decoupled_weight_decay", False)]
"""Settings that there are no more, with the value that did nothing."""
AT_MOST = {"seed": 2**63 - 1, "width": 4096, "epochs": 10**7, "monitor_curvature": 1000}
MOST_THREADS = 1024


@dataclass(frozen=True)
class RunConfig:
    """One training run. Everything that decides its numbers is here, and is written into its log."""

    optimizer: OptimizerConfig
    """The optimizer and its settings."""
    dataset: DatasetName = "digits"
    """CIFAR must be downloaded, see `cao data --help`; the others need no download."""
    model: ModelName = "mlp"
    """linear is least squares, logistic or softmax regression, depending on the dataset."""
    seed: int = 0
    """Seed of the weights, of the order of batches, of crops and flips."""
    epochs: int = 20
    """Passes over the training set."""
    width: int = 64
    """Channels of a ResNet's first stage (64 is the paper's), units of a hidden layer."""
    train_samples: int | None = None
    """Train on a fixed class-balanced subset of this many samples."""
    augmentation: Literal["usual", "heavy"] = "usual"
    """Crop and flip for CIFAR, or a black square of half the side besides; nothing for the others."""
    batch_size: int | None = 128
    """Samples in a step; None takes the whole training set."""
    l2: float = 0.0
    """Add l2/2·‖θ‖² to the objective and to the logged training loss."""
    schedule: Literal["constant", "cosine", "step"] = "constant"
    """Learning rate: constant (the paper), cosine to 0, or a tenth after 1/2 and again after 3/4."""
    precision: Literal["fp32", "bf16", "fp64"] = "fp32"
    """Single precision, bfloat16 by autocast, or double precision."""
    curvature: CurvatureName = "hessian"
    """Which matrix is sketched and watched; Gauss-Newton is taken in single precision where training is in bf16."""
    curvature_samples: int | None = None
    """How many samples it is computed from; None takes the training batch itself."""
    curvature_part: int = 128
    """Largest part, if curvature-samples has to be processed in parts."""
    monitor_curvature: int = 0
    """Log this many eigenvalues at the start of every epoch, whatever the optimizer."""
    suite: str = "runs"
    """First folder of the log's path."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        for field in AT_LEAST_ONE:
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ConfigError(f"{field} must be at least 1, got {value}")
        for field in NOT_NEGATIVE:
            if getattr(self, field) < 0:
                raise ConfigError(f"{field} must not be negative, got {getattr(self, field)}")
        for field, most in AT_MOST.items():
            if getattr(self, field) > most:
                raise ConfigError(f"{field} must be at most {most}, got {getattr(self, field)}")
        if not self.l2 <= LARGEST_NUMBER:
            raise ConfigError(f"l2 must be finite and at most {LARGEST_NUMBER:g}, got {self.l2}")
        if self.augmentation != "usual" and not self.dataset.startswith("cifar"):
            raise ConfigError(
                f"augmentation must be usual, got {self.augmentation} for {self.dataset}: it is for CIFAR"
            )
        if self.optimizer.needs_full_batch and self.batch_size is not None:
            name = self.optimizer.name
            raise ConfigError(f"{name} needs the whole training set in a step: add --batch-size None")
        if Path(self.suite).parts != (self.suite,) or self.suite in (os.sep, ".."):
            raise ConfigError(f"suite must be a folder name, got {self.suite!r}")

    @property
    def is_curvature_of_the_graph(self) -> bool:
        """Whether the curvature is made from the graph of the training loss, and not from passes of its own."""
        return self.curvature == "hessian" and self.curvature_samples is None

    @property
    def task(self) -> str:
        """The problem that is solved, whatever solves it: cifar100-resnet18w16-n5000."""
        width = f"w{self.width}" if self.width != 64 else ""
        parts = [self.dataset, self.model + width]
        if self.train_samples is not None:
            parts.append(f"n{self.train_samples}")
        if self.augmentation != "usual":
            parts.append(self.augmentation)
        if self.batch_size != 128:
            parts.append("full" if self.batch_size is None else f"b{self.batch_size}")
        if self.l2:
            parts.append(f"l2={self.l2:g}")
        return "-".join(parts)

    @property
    def label(self) -> str:
        """The method: the optimizer, and the fields in which it differs from the defaults."""
        changed = [text for field, text in changed_fields(self) if field in METHOD_SETTINGS]
        return "-".join([optimizer_label(self.optimizer), *changed])

    @property
    def folder(self) -> Path:
        """Where the log lies below the folder of all logs."""
        return Path(self.suite, self.task, self.label, f"seed{self.seed}")


@dataclass(frozen=True)
class Execution:
    """Where and how a run is carried out; none of this is part of its configuration."""

    logs: Path = Path("logs")
    """Folder with the logs."""
    data_dir: Path | None = None
    """Folder with the CIFAR pickles; $CAO_DATA if not given."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto takes a GPU if there is one."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """How the processes of torchrun talk; auto is NCCL between GPUs and gloo otherwise."""
    threads: int | None = None
    """Threads of torch; torch's own choice if not given."""
    checkpoint_minutes: float = 5.0
    """Save every so many minutes within an epoch, besides at the end of each epoch."""
    tensorboard: bool = False
    """Write the rows of the log for TensorBoard too, into the run's folder."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        check_threads(self.threads)
        if not 0 <= self.checkpoint_minutes < math.inf:
            raise ConfigError(f"checkpoint_minutes must be finite and not negative, got {self.checkpoint_minutes}")


@dataclass(frozen=True)
class SlurmOptions:
    """What each run asks of a cluster, with --launcher slurm."""

    partition: str | None = None
    """Partition of the cluster; sinfo lists them."""
    minutes: int = 60
    """Time limit of a job; a run that needs more is requeued and goes on."""
    cpus: int = 1
    """Cores of a job, and threads of its run."""
    gpus: int = 0
    """GPUs of a job; a run uses one."""
    memory_gib: int | None = None
    """Memory of a job; the partition's default if not given."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        check_threads(self.cpus)
        for field, least in (("minutes", 3), ("gpus", 0), ("memory_gib", 1)):
            value = getattr(self, field)
            if value is not None and value < least:
                raise ConfigError(f"{field} must be at least {least}, got {value}")


def check_threads(threads: int | None) -> None:
    """Refuse a number of threads that torch would not take."""
    if threads is not None and not 1 <= threads <= MOST_THREADS:
        raise ConfigError(f"threads must be from 1 to {MOST_THREADS}, got {threads}")


def optimizer_label(optimizer: OptimizerConfig) -> str:
    """Name the optimizer by what is not default in it; CAO always by its rank."""
    always = optimizer.always_in_label
    first = [label_part(field, getattr(optimizer, field)) for field in always]
    changed = [text for field, text in changed_fields(optimizer) if field not in always]
    return "-".join([optimizer.name, *first, *changed])


def changed_fields(config: Any) -> list[tuple[str, str]]:
    """Return the fields that differ from their defaults, each with its part of a label."""
    pairs = [(field.name, getattr(config, field.name), field.default) for field in fields(config)]
    return [(name, label_part(name, value)) for name, value, default in pairs if value != default]


def config_to_dict(config: RunConfig) -> dict[str, Any]:
    """Return the config as plain data for JSON."""
    return asdict(config)


def config_from_dict(data: dict[str, Any]) -> RunConfig:
    """Rebuild a config from `config_to_dict`; fields that a later version added take their defaults.

    A setting that was retired is left out where it asked for nothing.
    """
    try:
        optimizer = {name: value for name, value in data["optimizer"].items() if (name, value) not in RETIRED}
        kind = optimizer_configs()[optimizer["name"]]
        return RunConfig(**{**data, "optimizer": kind(**optimizer)})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"not the config of a run: {error}") from error


def differences(old: RunConfig, new: RunConfig) -> list[str]:
    """Say in which fields two configs differ, one line each."""
    before, after = flat(old), flat(new)
    return [
        f"{name}: {before.get(name)!r} in the log, {after.get(name)!r} now"
        for name in before | after
        if before.get(name) != after.get(name)
    ]


def flat(config: RunConfig) -> dict[str, Any]:
    """Return all fields in one dictionary, the optimizer's own with a prefix."""
    data = config_to_dict(config)
    optimizer = data.pop("optimizer")
    return {"optimizer": optimizer.pop("name")} | {f"optimizer.{k}": v for k, v in optimizer.items()} | data


def command_line(config: RunConfig) -> str:
    """Return the `cao train` line that repeats the run."""
    flags = [flag(field.name, config) for field in fields(config) if field.name != "optimizer"]
    flags += [flag(field.name, config.optimizer) for field in fields(config.optimizer) if field.name != "name"]
    return " ".join(["cao train", config.optimizer.name, *filter(None, flags)])


def flag(field: str, config: Any) -> str:
    """Return `--field value` where it is not the default, and nothing otherwise."""
    value = getattr(config, field)
    if value == next(entry.default for entry in fields(config) if entry.name == field):
        return ""
    name = field.replace("_", "-")
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name} {value}"


def output_folder(path: Path) -> Path:
    """Make the folder that a command writes to; asked for before anything is computed, so that nothing is lost."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ConfigError(f"a folder is needed for the output, and {path} is a file or lies below one") from None
    return path
