"""Measure the spectrum of a model's curvature, and write it as table, JSON and figures."""

import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from jaxtyping import Float
from pandas import DataFrame
from torch import Tensor
from tqdm import tqdm

from cao import Eigenpairs, SpectralDensity, extreme_eigenpairs, spectral_density, trace
from cao.curvature.operators import ParameterOperator
from cao_lab.config import output_folder
from cao_lab.reporting.tabular import Table, write_table
from cao_lab.spectrum.config import Density, Eigenvalue, Layer, Spectrum, SpectrumConfig, SpectrumError, TraceEstimate
from cao_lab.spectrum.figures import density_figure, layers_figure
from cao_lab.spectrum.target import Target, in_mode, load_target
from cao_lab.user_code import explained


class Watched:
    """An operator that tells how many products it has made."""

    def __init__(self, operator: ParameterOperator, on_products: Callable[[int], object]) -> None:
        self.operator, self.on_products, self.params = operator, on_products, operator.params

    def __matmul__(self, columns: Tensor) -> Tensor:
        """Return the operator's product with each column."""
        product = self.operator @ columns
        self.on_products(columns.shape[1])
        return product


def measure_spectrum(config: SpectrumConfig) -> str:
    """Carry `cao spectrum` out: measure, write all files, and return what to print."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    target = load_target(config)
    folder = output_folder(config.out or Path("out", "spectrum", target.name))
    spectrum = measure(target, config)
    written = write_spectrum(spectrum, folder)
    return f"{summary(spectrum)}\n\nwritten to {folder}: {', '.join(written)}"


def measure(target: Target, config: SpectrumConfig) -> Spectrum:
    """Take a spectrum; the model comes out as it went in."""
    started = time.perf_counter()
    size = sum(p.numel() for p in target.params)
    top = min(config.top, size)
    most = config.max_products or max(100, 20 * top)
    others = config.trace_products + config.probes * config.iterations
    bar = tqdm(total=most + others, unit=" products", disable=not sys.stderr.isatty())
    with in_mode(target.model, config.mode) as mode, bar:
        loss = finite_loss(target)
        operator = Watched(target.curvature(config.curvature), bar.update)
        bar.set_description("eigenvalues")
        largest, smallest = extreme_eigenpairs(operator, top, config.tolerance, max_products=most, seed=config.seed)
        bar.total = largest.products + others
        bar.set_description("trace")
        estimate = trace(operator, products=config.trace_products, seed=config.seed)
        bar.set_description("density")
        density = spectral_density(operator, probes=config.probes, iterations=config.iterations, seed=config.seed)
    return Spectrum(
        target=target.name,
        curvature=config.curvature,
        mode=mode,
        samples=target.samples,
        parts=len(target.parts),
        parameters=size,
        loss=loss,
        largest=eigenvalues(largest),
        smallest=eigenvalues(smallest),
        trace=TraceEstimate(estimate.value, estimate.standard_error),
        density=plain_density(density),
        layers=layer_shares(target, largest.vectors) if config.by_layer else [],
        products=largest.products + estimate.products + density.products,
        seconds=round(time.perf_counter() - started, 2),
    )


def finite_loss(target: Target) -> float:
    """Return the loss, if curvature at this point can mean anything."""
    with explained(f"{target.name}: the loss cannot be computed"):
        loss = target.loss()
    if not math.isfinite(loss):
        raise SpectrumError(
            f"{target.name}: the loss is {loss}, so its curvature is not defined; take a run that works"
        )
    return loss


def eigenvalues(pairs: Eigenpairs) -> list[Eigenvalue]:
    """Return values and residuals as plain numbers."""
    return [Eigenvalue(*pair) for pair in zip(pairs.values.tolist(), pairs.residuals.tolist(), strict=True)]


def plain_density(density: SpectralDensity) -> Density:
    """Return a density as plain numbers."""
    return Density(density.points.tolist(), density.density.tolist(), density.standard_error.tolist(), density.width)


def layer_shares(target: Target, vectors: Float[Tensor, "n k"]) -> list[Layer]:
    """Return the share of each parameter tensor in each eigenvector; over the tensors they add up to 1."""
    names = [name for name, p in target.model.named_parameters() if p.requires_grad]
    sizes = [p.numel() for p in target.params]
    pieces = vectors.split(sizes)
    return [
        Layer(name, size, piece.double().square().sum(dim=0).tolist())
        for name, size, piece in zip(names, sizes, pieces, strict=True)
    ]


def write_spectrum(spectrum: Spectrum, folder: Path) -> list[str]:
    """Write a spectrum into a folder as JSON, tables and figures, and return the files' names."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(asdict(spectrum), indent=1, ensure_ascii=False) + "\n"
    (folder / "spectrum.json").write_text(text, encoding="utf-8")
    write_table(eigenvalue_table(spectrum), folder)
    density_figure(spectrum).savefig(folder / "density.png")
    names = ["spectrum.json", "eigenvalues.md/.tex/.csv", "density.png"]
    if spectrum.layers:
        write_table(layer_table(spectrum), folder)
        layers_figure(spectrum).savefig(folder / "layers.png")
        names += ["layers.md/.tex/.csv", "layers.png"]
    return names


def eigenvalue_table(spectrum: Spectrum) -> Table:
    """Return both ends of the spectrum side by side."""
    rows = zip(spectrum.largest, spectrum.smallest, strict=True)
    numbers = DataFrame(
        [
            [index, high.value, high.residual, low.value, low.residual]
            for index, (high, low) in enumerate(rows, start=1)
        ],
        columns=["index", "largest", "largest_residual", "smallest", "smallest_residual"],
    )
    cells = DataFrame(
        {
            "#": numbers["index"],
            "largest": numbers["largest"].map("{:.5g}".format),
            "residual": numbers["largest_residual"].map("{:.1e}".format),
            "smallest": numbers["smallest"].map("{:.5g}".format),
            "residual ": numbers["smallest_residual"].map("{:.1e}".format),
        }
    )
    return Table("eigenvalues", heading(spectrum), cells, numbers)


def layer_table(spectrum: Spectrum) -> Table:
    """Return the share of each parameter tensor in each of the top eigenvectors."""
    columns = [f"v{index}" for index in range(1, len(spectrum.largest) + 1)]
    numbers = DataFrame([layer.shares for layer in spectrum.layers], columns=columns)
    cells = numbers.map(lambda share: f"{share:.1%}")
    for table in (numbers, cells):
        table.insert(0, "tensor", [layer.name for layer in spectrum.layers])
        table.insert(1, "size", [layer.size for layer in spectrum.layers])
    return Table("layers", f"share of each tensor in the top eigenvectors: {heading(spectrum)}", cells, numbers)


def heading(spectrum: Spectrum) -> str:
    """Say in one line what was measured."""
    return (
        f"{spectrum.target}: {spectrum.curvature} of {spectrum.samples} samples in {spectrum.parts} part(s), "
        f"{spectrum.mode} mode, {spectrum.parameters:,} parameters, loss {spectrum.loss:.4g}"
    )


def summary(spectrum: Spectrum) -> str:
    """Return what the command prints."""
    blocks = [heading(spectrum), eigenvalue_table(spectrum).cells.to_string(index=False)]
    blocks.append(
        f"trace {spectrum.trace.value:.5g} ± {spectrum.trace.standard_error:.2g} (standard error)\n"
        f"{spectrum.products} products in {spectrum.seconds:.1f} s"
    )
    if spectrum.layers:
        blocks.append(layer_table(spectrum).cells.to_string(index=False))
    return "\n\n".join(blocks)
