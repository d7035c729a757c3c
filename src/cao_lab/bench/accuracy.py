"""How right the fast paths are: against scipy where they are exact, against the whole batch's Hessian where not."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from cao import Eigenpairs, Hessian, Lanczos
from cao.curvature.operators import ParameterOperator
from cao_lab.bench.race import COUNT, by_eigsh, plain_product
from cao_lab.bench.rows import Row, Rows
from cao_lab.bench.sizes import Sizes
from cao_lab.bench.task import Curvature, Task
from cao_lab.bench.trained import cold_start, trained

TARGET = 1e-3
REFERENCE_TOLERANCE = 1e-3
"""Of the residuals; an eigenvalue's error goes with its square."""


def accuracy_rows(sizes: Sizes) -> Rows:
    """Compare exact paths with scipy's eigsh, and the Gauss-Newton matrix and parts with the whole batch's Hessian."""
    network = trained(sizes)
    task, where = network.task, f"{network.data}, width {sizes.width}, batch {sizes.batch}"
    reference = by_eigsh(plain_product(task), task, REFERENCE_TOLERANCE)
    exact = {
        "graph": Hessian(task.loss(), task.params),
        "function": Hessian(task.loss, task.params),
    }
    rows = [exact_row(name, solved(path, task, sizes), reference, where) for name, path in exact.items()]
    approximate: tuple[Curvature, ...] = ("gauss-newton", "parts")
    for kind in approximate:
        rows += distance_rows(kind, solved(task.operator(kind), task, sizes), reference, where)
    return rows


def solved(operator: ParameterOperator, task: Task, sizes: Sizes) -> Eigenpairs:
    """Return the top eigenpairs of an operator, as converged as the reference: unfinished ones can change places."""
    products = 3 * sizes.solver_products
    return Lanczos(products, count=COUNT, tolerance=REFERENCE_TOLERANCE)(operator, cold_start(task, 0))


def exact_row(name: str, pairs: Eigenpairs, reference: Eigenpairs, where: str) -> Row:
    """Return the largest relative difference of the eigenvalues."""
    distances = relative_distances(pairs, reference)
    note = f"largest relative difference of {COUNT} eigenvalues from scipy's eigsh, Hessian of a {name}; {where}"
    return Row(f"eigenvalue_error_hessian_{name}", float(distances.max()), TARGET, None, "relative", note, 1)


def distance_rows(kind: Curvature, pairs: Eigenpairs, reference: Eigenpairs, where: str) -> Rows:
    """Return how far eigenvalues and subspaces lie from those of the whole batch's Hessian."""
    label, distances = kind.replace("-", "_"), relative_distances(pairs, reference)
    top = f"λ₁ {float(pairs.values[0]):.4g} against the Hessian's {float(reference.values[0]):.4g}; {where}"
    values = ", ".join(f"{float(a):.3g}/{float(b):.3g}" for a, b in zip(pairs.values, reference.values, strict=True))
    first = largest_angle(pairs.vectors[:, :1], reference.vectors[:, :1])
    whole = largest_angle(pairs.vectors, reference.vectors)
    return [
        Row(f"{label}_top_eigenvalue_distance", float(distances[0]), None, None, "relative", top, 1),
        Row(f"{label}_eigenvalue_distance", float(distances.max()), None, None, "relative", f"largest of {values}", 1),
        Row(f"{label}_top_vector_angle", first, None, None, "degrees", "between the top eigenvectors", 1),
        Row(
            f"{label}_subspace_angle", whole, None, None, "degrees",
            f"largest principal angle between the top {COUNT} eigenvectors' spans", 1,
        ),
    ]  # fmt: skip


def relative_distances(pairs: Eigenpairs, reference: Eigenpairs) -> Float[Tensor, " k"]:
    """Return |λ − λ'|/|λ'| for each eigenvalue, largest magnitude first."""
    return (pairs.values - reference.values).abs() / reference.values.abs()


def largest_angle(left: Float[Tensor, "n k"], right: Float[Tensor, "n k"]) -> float:
    """Return the largest principal angle of two subspaces, in degrees, from its sine, which small angles keep."""
    left, right = (torch.linalg.qr(columns.double()).Q for columns in (left, right))
    outside = right - left @ (left.T @ right)
    return math.degrees(math.asin(min(1.0, float(torch.linalg.matrix_norm(outside, ord=2)))))
