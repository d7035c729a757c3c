"""`cao solve`: what it writes, what it accepts, and its errors in one line."""

import csv
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import matplotlib.image
import pytest
import torch

from cao_lab.config import ConfigError
from cao_lab.log.locking import Lock
from cao_lab.log.records import LogError
from cao_lab.solvers import command
from cao_lab.solvers.budget import Budget, Record
from cao_lab.solvers.command import Line, progress_bar, run_solve, show, why_ended
from cao_lab.solvers.config import MethodName, SolveConfig, SolveError
from cao_lab.solvers.methods import METHODS
from cao_lab.solvers.price import Price
from cao_lab.solvers.solving import solve
from cao_lab.solvers.user_problem import load_problem

HEAD = "import torch\nx = torch.tensor([3.0, 1.0], dtype=torch.float64, requires_grad=True)\n"


def written(folder: Path, body: str) -> str:
    """A file of the user's with a function `problem`."""
    path = folder / "mine.py"
    path.write_text(HEAD + body)
    return f"{path}:problem"


def solved(target: str, folder: Path, **settings: Any) -> tuple[str, list[dict[str, str]], dict[str, Any]]:
    message, _ = run_solve(SolveConfig(target, **{"method": "torch-lbfgs", "out": folder, **settings}))
    with (folder / "records.csv").open() as file:
        return message, list(csv.DictReader(file)), json.loads((folder / "solve.json").read_text())


def test_a_loss_is_minimised_and_everything_is_written(tmp_path: Path) -> None:
    target = written(tmp_path, "def problem():\n    return [x], lambda: (x**4).sum(), lambda: float(x.norm())\n")
    message, rows, outcome = solved(target, tmp_path / "out", evaluations=40)
    assert message.startswith("loss ")
    assert float(rows[0]["loss"]) == 82
    assert float(rows[-1]["loss"]) == outcome["outcome"]["loss"] < 1e-3
    assert float(rows[-1]["error"]) == pytest.approx(torch.load(tmp_path / "out" / "params.pt")[0].norm().item())
    assert outcome["config"]["evaluations"] == 40
    assert matplotlib.image.imread(tmp_path / "out" / "solve.png").ndim == 3


def test_adam_first_is_part_of_the_log(tmp_path: Path) -> None:
    target = written(tmp_path, "def problem():\n    return [x], lambda: (x**4).sum()\n")
    _, rows, outcome = solved(target, tmp_path / "out", evaluations=20, adam=30, adam_lr=0.1, records=10)
    methods = [row["method"] for row in rows]
    assert methods == sorted(methods)
    assert {*methods} == {"adam", "torch-lbfgs"}
    spent = [float(row["billed"]) for row in rows]
    assert spent == sorted(spent)
    assert spent[-1] == outcome["outcome"]["billed"] == 50
    losses = [float(row["loss"]) for row in rows]
    assert losses == sorted(losses, reverse=True)


def test_a_problem_without_an_error_measure_has_none_in_the_log(tmp_path: Path) -> None:
    target = written(tmp_path, "def problem():\n    return [x], lambda: (x**4).sum()\n")
    _, rows, outcome = solved(target, tmp_path / "out", evaluations=5)
    assert math.isnan(float(rows[-1]["error"]))
    assert outcome["outcome"]["error"] is None


@pytest.mark.parametrize("residuals", ["x - 1", "(x[0] - 1, x[1:] - 1)", "[x - 1]"])
def test_residuals_of_any_form_become_a_sum_of_squares(tmp_path: Path, residuals: str) -> None:
    problem = load_problem(written(tmp_path, f"def problem():\n    return x, lambda: {residuals}\n"))
    assert float(problem.loss().detach()) == 4
    assert problem.residuals is not None
    assert sum(part.numel() for part in problem.residuals()) == 2


def test_a_module_stands_for_its_parameters(tmp_path: Path) -> None:
    body = "net = torch.nn.Linear(2, 1)\ndef problem():\n    return net, lambda: net(torch.ones(1, 2)).square().sum()\n"
    assert load_problem(written(tmp_path, body)).size == 3


def test_a_problem_of_the_laboratory_has_its_name() -> None:
    assert load_problem("regression").size == 1_981


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("other = 1\n", "has no function problem"),
        (
            "def problem():\n    return 3\n",
            r"returned int; it must return \(params, loss or residuals\[, error\[, draw\]",
        ),
        ("def problem():\n    return x, 1, 2, 3, 4\n", "returned 5 values"),
        ("def problem():\n    return x, 3\n", "returned int where a function was expected"),
        ("def problem():\n    return x, lambda: x.sum(), 3\n", "returned int where a function was expected"),
        ("def problem():\n    return [1], lambda: x.sum()\n", "returned int among its params"),
        ("def problem():\n    return [x.detach()], lambda: x.sum()\n", "returned no params to optimise"),
        ("def problem():\n    return x, lambda: 3.0\n", "got float"),
        ("def problem():\n    return x, lambda: x.sum().detach()\n", r"got a tensor of shape \(\) without a graph"),
        ("def problem():\n    return x, lambda: (x, 'a')\n", r"got \(a tensor of shape \(2,\), str\)"),
        ("def problem():\n    return x, lambda: x.sum() * float('nan')\n", "the loss is nan at the start"),
        ("def problem():\n    raise RuntimeError('no data\\nhere')\n", r"failed \(RuntimeError in line 4: no data\)"),
        ("def problem():\n    return x, lambda: x @ torch.ones(3)\n", r"failed \(RuntimeError in line 4: "),
        (
            "y = x.detach().requires_grad_()\ndef problem():\n    return x, lambda: y.sum()\n",
            "does not depend on params",
        ),
        ("def problem():\n    return x, lambda: x[:0]\n", r"got a tensor of shape \(0,\)"),
        ("def problem():\n    return x, lambda: x * 1j\n", r"got a complex tensor of shape \(2,\)"),
        ("def problem():\n    return x, lambda: x * torch.rand(2)\n", "must be the same at every call"),
        ("def problem():\n    return x, lambda: x, lambda: 'a'\n", "the error function must return a number, got str"),
        ("def problem():\n    return x, lambda: x, lambda: None\n", "must return a number, got NoneType"),
        ("def problem():\n    return x, lambda: x, lambda: x\n", r"must return a number, got a tensor of shape \(2,\)"),
        (
            "def problem():\n    return x, lambda: x, lambda: 1 / 0\n",
            r"failed \(ZeroDivisionError in line 4: division ",
        ),
    ],
)
def test_what_cannot_be_solved_is_refused_in_one_line(tmp_path: Path, body: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_problem(written(tmp_path, body))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "error", ["x.norm()", "x.norm()[None]", "x.detach().norm().numpy()", "float(x.detach().norm())"]
)
def test_an_error_is_a_number_or_a_tensor_with_one_entry(tmp_path: Path, error: str) -> None:
    problem = load_problem(written(tmp_path, f"def problem():\n    return x, lambda: x, lambda: {error}\n"))
    assert problem.error is not None
    measured = problem.error()
    assert type(measured) is float
    assert measured == pytest.approx(math.sqrt(10))


def test_a_file_that_does_not_exist_is_named() -> None:
    with pytest.raises(ConfigError, match=r"missing\.py is not a file"):
        load_problem("missing.py:problem")


def test_a_target_that_names_nothing_lists_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"convectoin is no problem; write path\.py:function, or one of allen-cahn, "):
        load_problem("convectoin")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"evaluations": 0}, "evaluations must be at least 1, got 0"),
        ({"adam": -1}, "adam must be at least 0, got -1"),
        ({"seconds": -2.0}, r"seconds must be positive, got -2\.0"),
        ({"seconds": math.nan}, "seconds must be positive, got nan"),
        ({"adam_lr": 0.0}, r"adam_lr must be positive, got 0\.0"),
        ({"threads": 0}, "threads must be at least 1, got 0"),
    ],
)
def test_settings_that_cannot_be_run_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SolveError, match=message):
        SolveConfig("wave", **settings)


def test_an_interrupted_run_is_written_as_far_as_it_got(tmp_path: Path) -> None:
    body = (
        "calls = []\ndef loss():\n    calls.append(1)\n    if len(calls) == 20:\n        raise KeyboardInterrupt\n"
        "    return (x**4).sum()\ndef problem():\n    return x, loss\n"
    )
    message, rows, outcome = solved(written(tmp_path, body), tmp_path / "out", evaluations=50)
    assert "(interrupted); gradient norm " in message
    # Three calls are made to look at the problem before the run begins.
    assert rows[-1]["status"] == outcome["outcome"]["status"] == "interrupted"
    assert rows[-1]["evaluations"] == "16"
    (x,) = torch.load(tmp_path / "out" / "params.pt")
    assert float((x**4).sum()) == float(rows[-1]["loss"])


FAILING = (
    "calls = []\ndef loss():\n    calls.append(1)\n    if len(calls) == 20:\n        raise RuntimeError('boom')\n"
    "    return (x**4).sum()\ndef problem():\n    return x, loss, lambda: 1 / (30 - len(calls))\n"
)


@pytest.mark.parametrize(("line", "body"), [(7, FAILING), (10, FAILING.replace("== 20", "== 99"))])
def test_a_run_that_fails_is_written_as_far_as_it_got(tmp_path: Path, line: int, body: str) -> None:
    folder = tmp_path / "out"
    with pytest.raises(SolveError, match=rf"failed \(.*Error in line {line}: .*written to {folder}: ") as caught:
        solved(written(tmp_path, body), folder, evaluations=50)
    assert "\n" not in str(caught.value)
    outcome = json.loads((folder / "solve.json").read_text())["outcome"]
    assert outcome["status"] == "failed"
    (x,) = torch.load(folder / "params.pt")
    assert float((x**4).sum()) == outcome["loss"] < 82
    assert (folder / "solve.png").exists()


def test_a_failure_that_is_not_the_users_is_raised_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = written(tmp_path, "def problem():\n    return x, lambda: (x**4).sum()\n")
    monkeypatch.setattr(command, "solve", lambda *_, **__: iter([None]))
    with pytest.raises(AttributeError):
        solved(target, tmp_path / "out")


def test_a_loss_that_cannot_be_differentiated_twice_is_named_in_one_line(tmp_path: Path) -> None:
    body = (
        "class Quartic(torch.autograd.Function):\n"
        "    @staticmethod\n    def forward(ctx, x):\n        ctx.save_for_backward(x)\n        return x**4\n"
        "    @staticmethod\n    @torch.autograd.function.once_differentiable\n"
        "    def backward(ctx, g):\n        return 4 * ctx.saved_tensors[0] ** 3 * g\n"
        "def problem():\n    return x, lambda: Quartic.apply(x).sum()\n"
    )
    with pytest.raises(SolveError, match=r"failed \(NoSecondDerivativeError: .*; nothing was reached"):
        solved(written(tmp_path, body), tmp_path / "out", method="sketched-lbfgs")


@pytest.mark.parametrize("method", ["sketched-lbfgs", "scipy-lbfgsb", "scipy-bfgs"])
def test_a_run_that_arrives_says_so(tmp_path: Path, method: str) -> None:
    target = written(tmp_path, "def problem():\n    return x, lambda: x - 1\n")
    message, rows, outcome = solved(target, tmp_path / "out", method=method, evaluations=500, seconds=1e6)
    assert message.startswith("loss 0 (a sum of squares) after ")
    assert " (converged: " in message
    assert rows[-1]["status"] == "idle"
    assert outcome["outcome"]["status"].startswith("stalled: ")
    assert outcome["outcome"]["seconds"] < 1e6


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ("stalled: tolerance_grad", "converged: the gradient is zero"),
        ("stalled: minimal to rounding", "converged: minimal to rounding"),
        ("stalled: CONVERGENCE: NORM OF G <= PGTOL", "converged: norm of g <= pgtol"),
        ("stalled: no step lowers the loss", "stopped early: no step lowers the loss"),
        ("spent", "budget spent"),
        ("interrupted", "interrupted"),
    ],
)
def test_a_person_is_told_why_a_run_ended(status: str, words: str) -> None:
    assert why_ended(status) == words


def test_a_residual_that_is_taken_for_the_loss_is_pointed_out(tmp_path: Path) -> None:
    message, *_ = solved(written(tmp_path, "def problem():\n    return x, lambda: x[0] - 1\n"), tmp_path / "out")
    assert "(stopped early: the loss is unbounded below" in message
    assert "if it is a residual, return (residual,)" in message


def test_the_time_of_adam_and_of_measuring_is_part_of_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = written(tmp_path, "def problem():\n    return x, lambda: (x**4).sum()\n")
    budgets: list[Budget] = []
    limits: list[float] = []
    times = iter(range(0, 1000, 3))

    def spying(problem: Any, method: Any, budget: Budget, **settings: Any) -> Any:
        budgets.append(budget)
        return (replace(record, seconds=4.0) for record in solve(problem, method, Budget(5), price=Price()))

    monkeypatch.setattr(command, "perf_counter", lambda: float(next(times)))
    monkeypatch.setattr(command, "price_for", lambda method, problem, limit, clock: limits.append(limit))
    monkeypatch.setattr(command, "solve", spying)
    solved(target, tmp_path / "out", adam=10, seconds=20.0)
    assert [budget.seconds for budget in budgets] == [17, 10]
    assert limits == [2, 1.3]


def test_the_bar_ends_at_the_whole_budget_though_the_bill_is_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    record = Record(90, 3, 0, 104.0, 1.0, 0.5, math.nan, 4.0, 0.0, "spent")
    with progress_bar(SolveConfig("wave", evaluations=100)) as bar:
        show(bar, Line("cao", record, 1.04))
        assert bar.n == 1
        assert "100%" in str(bar)
        assert "loss 0.5" in str(bar)


SQUARE = "def problem():\n    return x, lambda: ((x - 1) ** 2).sum()\n"


def test_files_with_functions_of_one_name_write_to_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for place in ("a.py", "b.py", "c/a.py"):
        Path(place).parent.mkdir(exist_ok=True)
        Path(place).write_text(HEAD + SQUARE)
    for target in ("a.py:problem", "b.py:problem", "a.py:problem"):
        run_solve(SolveConfig(target, method="adam", evaluations=3))
    assert {path.name for path in Path("out/solve").iterdir()} == {"a-problem-adam", "b-problem-adam"}
    before = Path("out/solve/a-problem-adam/records.csv").read_bytes()
    with pytest.raises(SolveError, match=r"holds the result of .*/a\.py:problem; name another folder with --out"):
        run_solve(SolveConfig("c/a.py:problem", method="adam", evaluations=3))
    assert Path("out/solve/a-problem-adam/records.csv").read_bytes() == before


def test_a_folder_that_another_process_solves_into_is_refused(tmp_path: Path) -> None:
    with Lock(tmp_path), pytest.raises(LogError, match="another process is working on"):
        solved(written(tmp_path, SQUARE), tmp_path)


def test_code_that_goes_elsewhere_leaves_the_output_where_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    target = written(tmp_path, f"import os\nos.chdir({str(tmp_path / 'there')!r})\n{SQUARE}")
    message, code = run_solve(SolveConfig(target, method="adam", evaluations=3, out=Path("mine")))
    assert code == 0
    assert "written to mine: " in message
    assert (tmp_path / "mine" / "solve.json").exists()
    assert not list((tmp_path / "there").iterdir())


@pytest.mark.parametrize("calls", [1, 20])
def test_a_problem_that_ends_the_program_is_no_success(tmp_path: Path, calls: int) -> None:
    body = (
        f"calls = []\ndef loss():\n    calls.append(1)\n    if len(calls) == {calls}:\n        raise SystemExit(0)\n"
        "    return (x**4).sum()\ndef problem():\n    return x, loss\n"
    )
    with pytest.raises(SolveError, match=r"failed \(SystemExit in line 7"):
        solved(written(tmp_path, body), tmp_path / "out", evaluations=50)


def test_an_interrupted_solve_has_the_exit_code_of_one(tmp_path: Path) -> None:
    body = (
        "calls = []\ndef loss():\n    calls.append(1)\n    if len(calls) == 20:\n        raise KeyboardInterrupt\n"
        "    return (x**4).sum()\ndef problem():\n    return x, loss\n"
    )
    target = written(tmp_path, body)
    assert run_solve(SolveConfig(target, method="adam", evaluations=50, out=tmp_path / "out"))[1] == 130


def test_a_small_problem_is_told_with_its_gradient_and_its_parameters(tmp_path: Path) -> None:
    message, *_ = solved(written(tmp_path, SQUARE), tmp_path / "out", method="scipy-bfgs", evaluations=50)
    (x,) = torch.load(tmp_path / "out" / "params.pt")
    norm = float(2 * (x - 1).norm())
    assert f"; gradient norm {norm:.2g}, parameters {x[0]:.6g}, {x[1]:.6g}\n" in message


def test_every_method_can_be_asked_for() -> None:
    assert set(get_args(MethodName)) == set(METHODS)


def test_several_methods_begin_at_one_start_and_are_drawn_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[dict[str, list[Record]]] = []
    figure = command.convergence_figure
    monkeypatch.setattr(
        command, "convergence_figure", lambda runs, title: drawn.append({**runs}) or figure(runs, title)
    )
    body = "def problem():\n    p = torch.randn(3, dtype=torch.float64, requires_grad=True)\n"
    target = written(tmp_path, body + "    return [p], lambda: (p**4).sum()\n")
    methods = "torch-lbfgs,scipy-bfgs,adam"
    message, code = run_solve(SolveConfig(target, method=methods, out=tmp_path / "out", evaluations=30))
    assert code == 0
    assert [line.partition(":")[0] for line in message.splitlines() if ": loss" in line] == methods.split(",")
    assert list(drawn[-1]) == methods.split(",")
    assert len({records[0].loss for records in drawn[-1].values()}) == 1
    assert matplotlib.image.imread(tmp_path / "out" / "solve.png").ndim == 3
    for name in methods.split(","):
        assert json.loads((tmp_path / "out" / name / "solve.json").read_text())["config"]["method"] == name
    run_solve(SolveConfig(target, method=methods, out=tmp_path / "out", evaluations=5))  # It may be replaced.


@pytest.mark.parametrize(
    ("methods", "message"), [("adam,sgd", "got 'sgd'"), ("adam,", "got ''"), ("adam,adam", "named once")]
)
def test_methods_that_there_are_not_or_twice_are_refused(methods: str, message: str) -> None:
    with pytest.raises(SolveError, match=message):
        SolveConfig("convection", method=methods)


def test_the_command_line_waits_for_no_torch() -> None:
    code = "import sys, cao_lab.solvers.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


DRAWN = """
net = torch.nn.Sequential(torch.nn.Linear(1, 10), torch.nn.Tanh(), torch.nn.Linear(10, 1)).double()
def draw(n, seed):
    return torch.rand(n, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
def residuals(points):
    return net(points) - torch.sin(9 * points)
def problem():
    return net, residuals, None, draw
"""


def test_a_problem_that_draws_points_gets_more_of_them_and_both_curves_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "price_for", lambda *args, **kwargs: Price(1.0, 5.0))
    target = written(tmp_path, DRAWN.replace("return net, residuals, None, draw", "return net, residuals, None, few"))
    few = "def few(n, seed):\n    return draw(max(n // 50, 3), seed)\n"
    Path(target.rpartition(":")[0]).write_text(HEAD + few + Path(target.rpartition(":")[0]).read_text()[len(HEAD) :])
    message, rows, outcome = solved(target, tmp_path / "out", method="sketched-lbfgs", evaluations=300, records=50)
    points = [int(row["points"]) for row in rows]
    assert points[0] == 0
    assert points == sorted(points)
    assert points[-1] > 500  # With ten points at first, for 31 parameters.
    assert float(rows[-1]["held_out"]) == outcome["outcome"]["held_out"]
    assert f"held out from {points[-1]:,} points" in message


def test_points_that_are_drawn_alike_for_each_seed_are_refused(tmp_path: Path) -> None:
    target = written(tmp_path, DRAWN.replace("manual_seed(seed)", "manual_seed(0)"))
    with pytest.raises(SolveError, match="draw returned the same points for the seeds 0 and 1"):
        load_problem(target)
