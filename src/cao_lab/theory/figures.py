"""Figures of the theory: curves from the formulas, dots from runs."""

from pathlib import Path

import torch
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from cao_lab.theory import contraction, sketches, stability, stationarity
from cao_lab.theory.problems import CosineMixture, Quadratic, dense_preconditioner, generator, orthonormal

BLUE, ORANGE, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#777777"
SPECTRA = {
    "(100, 1, 0.5, 0.1)": (torch.tensor([100.0, 1.0, 0.5, 0.1], dtype=torch.float64), BLUE),
    "(100, 50, 1)": (torch.tensor([100.0, 50.0, 1.0], dtype=torch.float64), ORANGE),
}


def draw_all(out: Path) -> None:
    """Write every figure as PNG and PDF."""
    figures = {
        "theory-stable-range": stable_range_figure(),
        "theory-stationarity": stationarity_figure(),
        "theory-contraction": contraction_figure(),
        "theory-sketch": sketch_figure(),
    }
    out.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        figure.savefig(out / f"{name}.png", dpi=150)
        # Without a date, equal figures are equal files.
        figure.savefig(out / f"{name}.pdf", metadata={"CreationDate": None})


def panels(titles: tuple[str, str]) -> tuple[Figure, list[Axes]]:
    """Return a figure of two titled panels side by side."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = list(figure.subplots(1, 2))
    for panel, title in zip(axes, titles, strict=True):
        panel.set_title(title, fontsize=10)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    return figure, axes


def stable_range_figure() -> Figure:
    """Draw the stable range against the damping, in the effective rate and in the learning rate itself."""
    figure, (effective, plain) = panels(("In the effective rate α/η the range widens", "In α itself it can narrow"))
    for name, (spectrum, color) in SPECTRA.items():
        curve, dots = torch.logspace(-2, 3, 200).tolist(), torch.logspace(-2, 3, 9).tolist()
        predicted = [stability.stable_lr(spectrum, 1, eta) / 0.02 for eta in curve]
        measured = [stability.measured_range(spectrum, 1, eta, 0.0, generator(0)) / 0.02 for eta in dots]
        effective.plot(curve, [p / eta for p, eta in zip(predicted, curve, strict=True)], color=color, label=name)
        effective.plot(dots, [m / eta for m, eta in zip(measured, dots, strict=True)], "o", color=color)
        plain.plot(curve, predicted, color=color, label=name)
        plain.plot(dots, measured, "o", color=color)
    for panel in (effective, plain):
        panel.axhline(1, color=GREY, linestyle="--", label="SGD")
        panel.set(xscale="log", yscale="log", xlabel="damping η", ylabel="largest stable rate over SGD's")
    effective.legend(title="spectrum, k = 1; dots measured", fontsize=8, title_fontsize=8)
    return figure


def stationarity_figure() -> Figure:
    """Draw the running mean of ‖∇f‖² against its bound, without and with gradient noise."""
    figure, axes = panels(("Exact gradients: 1/T", "Noisy gradients (σ = 30): a floor at constant α"))
    function = CosineMixture.random(8, 24, generator(0))
    lr, steps = 0.5 / function.smoothness, torch.arange(1, 2001)
    for panel, noise in zip(axes, (0.0, 30.0), strict=True):
        run = stationarity.descend(function, lr, len(steps), noise=noise, seed=1)
        setting = stationarity.Setting(function.smoothness, 1.0, run.captured, noise)
        bound = [stationarity.stationarity_bound(run.gap, lr, t, setting) for t in steps.tolist()]
        panel.loglog(steps, bound, color=GREY, linestyle="--", label="bound")
        panel.loglog(steps, run.squares.cumsum(0) / steps, color=BLUE, label="observed")
        panel.set(xlabel="steps T", ylabel="mean of ‖∇f‖² over T steps")
        panel.legend(fontsize=8)
    return figure


def contraction_figure() -> Figure:
    """Draw the contraction over 10 steps against the rank, at a fixed and at the best learning rate."""
    figure, (fixed, best) = panels(("The same α = η/λ₁ for every k", "The best α for each k"))
    spectrum = torch.logspace(2, -1, 8, dtype=torch.float64)
    ranks = list(range(len(spectrum)))
    # Smaller marks on top of larger ones keep curves that coincide visible.
    for damping, color, size in ((0.02, ORANGE, 10), (0.2, GREEN, 7), (2.0, BLUE, 4)):
        lr = damping / float(spectrum[0])
        at_fixed = [1 - contraction.quadratic_factor(spectrum, k, damping, lr) ** 10 for k in ranks]
        rates = [contraction.best_lr(spectrum, k, damping) for k in ranks]
        at_best = [1 - contraction.quadratic_factor(spectrum, k, damping, a) ** 10 for k, a in enumerate(rates)]
        fixed.plot(ranks, at_fixed, "o-", color=color, markersize=size, label=f"η = {damping:g}")
        best.plot(ranks, at_best, "o-", color=color, markersize=size, label=f"η = {damping:g}")
    for panel in (fixed, best):
        panel.set(yscale="log", xlabel="rank k", ylabel="γ over 10 steps")
    best.legend(title="λ from 100 down to λᵣ = 0.1", fontsize=8, title_fontsize=8)
    return figure


def sketch_figure() -> Figure:
    """Draw the curvature that a step meets against the error of its sketch, with the bounds."""
    figure, (angle, noise) = panels(("A sketch off by an angle", "A sketch of H + E with ‖E‖ = δ"))
    spectrum = torch.tensor([100.0, *torch.logspace(0, -1, 9).tolist()], dtype=torch.float64)
    draw_angles(angle, spectrum, damping=1.0)
    draw_noise(noise, spectrum, damping=1.0)
    for panel in (angle, noise):
        panel.axhline(100, color=ORANGE, linestyle=":", label="k = 0")
        panel.set(yscale="log", ylabel=r"$\lambda_{\max}(P^{1/2}HP^{1/2})$")
        panel.legend(fontsize=8)
    return figure


def draw_angles(panel: Axes, spectrum: Float[Tensor, " n"], damping: float) -> None:
    """Draw observation and bound for a one-dimensional sketch at angles up to 90°."""
    vectors = orthonormal(generator(0), len(spectrum), len(spectrum))
    hessian = (vectors * spectrum) @ vectors.T
    degrees = torch.linspace(0, 90, 46, dtype=torch.float64)
    observed = [
        sketches.relative_sharpness(
            hessian, dense_preconditioner(spectrum[:1], sketches.tilt(vectors, 1, radians), damping)
        )
        for radians in degrees.deg2rad().tolist()
    ]
    sines = degrees.deg2rad().sin().tolist()
    bounds = [sketches.curvature_at_angle(spectrum, spectrum[:1], sine, damping) for sine in sines]
    panel.plot(degrees, bounds, color=GREY, linestyle="--", label="bound")
    panel.plot(degrees, observed, color=BLUE, label="observed")
    panel.set(xlabel="angle θ (degrees)")


def draw_noise(panel: Axes, spectrum: Float[Tensor, " n"], damping: float) -> None:
    """Draw observation and bound for exact one-dimensional sketches of noisy Hessians."""
    source = generator(0)
    hessian = Quadratic.with_spectrum(spectrum, source).hessian
    noise = sketches.random_symmetric(source, len(spectrum))
    noise = noise / sketches.spectral_radius(noise)
    sizes = torch.logspace(-2, 2, 41).tolist()
    trials = [sketches.sketch_trial(hessian, hessian + size * noise, 1, damping, size) for size in sizes]
    panel.plot(sizes, [bound for bound, _ in trials], color=GREY, linestyle="--", label="bound")
    panel.plot(sizes, [observed for _, observed in trials], color=BLUE, label="observed")
    panel.set(xscale="log", xlabel="error δ of the sketched Hessian")
