"""How many products a refresh needs from the last sketch, and how many from nothing."""

from torch import Tensor

from cao.linalg.eigensolvers import eigensolver_for
from cao_lab.bench.rows import Row, Rows, estimate
from cao_lab.bench.sizes import Sizes
from cao_lab.bench.task import Curvature
from cao_lab.bench.trained import Trained, cold_start, trained

TOLERANCE = 1e-2
TARGET = 4.0
COMPARED: tuple[tuple[Curvature, str], ...] = (
    ("hessian", "lanczos"),
    ("hessian", "subspace"),
    ("gauss-newton", "lanczos"),
)


def warm_start_rows(sizes: Sizes) -> Rows:
    """Count the products to a relative residual of 1e-2, warm and cold, on batches that training has not seen."""
    network = trained(sizes)
    return [
        products_row(network, sizes, curvature, solver, start)
        for curvature, solver in COMPARED
        for start in ("warm", "cold")
    ]


def products_row(network: Trained, sizes: Sizes, curvature: Curvature, solver: str, start: str) -> Row:
    """Solve for the top eigenpair on each fresh batch."""
    counts, open_ends = [], 0
    for number, task in enumerate(network.on_fresh_batches()):
        first: Tensor = network.old_vector if start == "warm" else cold_start(task, 1 + number)
        operator, iterations = task.operator(curvature), sizes.solver_products - 1
        pairs = eigensolver_for(solver, iterations, TOLERANCE)(operator, first)
        counts.append(float(pairs.products))
        open_ends += bool(pairs.residuals[0] > TOLERANCE * pairs.values[0].abs())
    age = f"a start {sizes.training_steps} SGD steps old" if start == "warm" else "a random start"
    failed = f"; {open_ends} of {len(counts)} gave up at {sizes.solver_products}" if open_ends else ""
    note = f"{curvature} by {solver} from {age}; {network.data}, width {sizes.width}, batch {sizes.batch}{failed}"
    name = f"products_{start}_{curvature.replace('-', '_')}_{solver}"
    # The target is that of the exact Hessian by whichever solver CAO offers that needs fewer.
    has_target = start == "warm" and curvature == "hessian" and solver == "lanczos"
    return estimate(counts).row(name, note, target=TARGET if has_target else None, unit="products")
