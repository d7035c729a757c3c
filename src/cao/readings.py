"""What a look at the sharpness saw: as a line, for loggers, in a file and back, and as a picture."""

import csv
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias


class Reading(NamedTuple):
    """What one look saw, and what it cost."""

    step: int
    """Steps that the optimizer has taken."""
    sharpness: float
    """λ₁ of the Hessian H of the loss."""
    preconditioned: float
    """λ₁ of D^½(H + Ω)D^½: the curvature that the optimizer feels, with coupled weight decay."""
    edge: float
    """The preconditioned curvature beyond which its steps are unstable."""
    ratio: float
    """Preconditioned over edge."""
    lr: float
    """The largest learning rate."""
    residual: float
    """‖Av − λv‖/|λ| of the eigenpair behind the ratio."""
    products: int
    """Hessian-vector products of this look."""
    seconds: float
    """Time spent on this look."""
    share: float
    """Time spent on all looks, as a share of all time since the first."""

    def __str__(self) -> str:
        """Return one line for a terminal."""
        known = "" if math.isnan(self.ratio) else f", {self.ratio:.2f} of the edge"
        cost = f"{self.products} products, {self.share:.1%} of the time"
        return f"step {self.step}: sharpness {self.sharpness:.3g} at lr {self.lr:.3g}{known} ({cost})"


Listener: TypeAlias = Callable[[Reading], object]


def listener(wanted: Any) -> Listener:
    """Return a function that passes readings on: to a function, a logger, or a file by its path."""
    if isinstance(wanted, str | Path):
        return to_file(Path(wanted))
    if hasattr(wanted, "add_scalar"):  # TensorBoard's SummaryWriter.
        return lambda reading: [
            wanted.add_scalar(name, value, reading.step) for name, value in scalars(reading).items()
        ]
    if hasattr(wanted, "log"):  # A run of Weights & Biases, whose own count of steps goes on undisturbed.
        return lambda reading: wanted.log(scalars(reading) | {"watch/step": reading.step})
    if callable(wanted):
        return wanted  # type: ignore[no-any-return]
    raise TypeError(
        "tell takes functions of a reading, paths, and loggers that have .log or .add_scalar; "
        f"got {type(wanted).__name__}"
    )


def scalars(reading: Reading | None) -> dict[str, float]:
    """Return the numbers of a reading with names for loggers, such as `watch/ratio`; none without a reading."""
    numbers = {} if reading is None else reading._asdict()
    return {f"watch/{name}": float(value) for name, value in numbers.items() if name != "step"}


def to_file(path: Path) -> Listener:
    """Return a function that adds readings to a file: CSV, or JSON lines if its name ends in .jsonl."""

    def add(reading: Reading) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        with path.open("a", newline="") as file:
            if path.suffix == ".jsonl":
                file.write(json.dumps(reading._asdict()) + "\n")
                return
            writer = csv.writer(file)
            if is_new:
                writer.writerow(Reading._fields)
            writer.writerow(reading)

    return add


def from_file(path: Path) -> list[Reading]:
    """Return the readings in a file that `to_file` wrote."""
    with path.open(newline="") as file:
        rows = map(json.loads, file) if path.suffix == ".jsonl" else csv.DictReader(file)
        try:
            return [reading_of(row) for row in rows]
        except (KeyError, ValueError, TypeError) as error:
            raise ValueError(
                f"{path} is no log of readings ({error}); write one with Sharpness(optimizer, tell='watch.csv')"
            ) from error


def reading_of(row: dict[str, Any]) -> Reading:
    """Return a reading from its fields as text or numbers."""
    numbers = {name: float(row[name]) for name in Reading._fields}
    return Reading(**numbers)._replace(step=int(row["step"]), products=int(row["products"]))  # type: ignore[arg-type]


def picture(readings: Sequence[Reading]) -> Any:
    """Return a matplotlib figure: the curvature and its edge above, their ratio and the learning rate below."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415  # The library needs torch only.
    except ImportError as error:
        raise ImportError("a picture needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(8, 5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    steps = [reading.step for reading in readings]
    curves = [("preconditioned", "curvature as the optimizer feels it", "-"), ("edge", "edge of stability", "--")]
    if any(reading.sharpness != reading.preconditioned for reading in readings):
        curves.append(("sharpness", "sharpness, λ₁ of H", ":"))
    for name, label, style in curves:
        above.plot(steps, [getattr(reading, name) for reading in readings], style, label=label)
    below.plot(steps, [reading.ratio for reading in readings])
    below.axhline(1, color="0.4", linestyle="--", linewidth=1)
    rate = below.twinx()
    rate.plot(steps, [reading.lr for reading in readings], color="0.6")
    above.set(yscale="log", ylabel="curvature")
    below.set(xlabel="step", ylabel="ratio to the edge", ylim=(0, None))
    rate.set_ylabel("learning rate (grey)")
    above.legend(frameon=False)
    return figure
