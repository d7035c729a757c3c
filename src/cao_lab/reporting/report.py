"""The report as a whole: figures, tables, audit and page, from a folder of logs and nothing else."""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import matplotlib.style
from matplotlib.figure import Figure
from pandas import DataFrame

from cao_lab.facts import SUITES, suites_of
from cao_lab.log.solves import SolveRun
from cao_lab.log.sweeps import read_sweeps
from cao_lab.reporting.claims import audit
from cao_lab.reporting.figures import STYLE
from cao_lab.reporting.logreader import Logs, ReportError, load_logs
from cao_lab.reporting.page import page, page_without_runs
from cao_lab.reporting.rates import predicted_windows
from cao_lab.reporting.robust import Contest, contests, contests_table, goals_table, rates_figure
from cao_lab.reporting.rule_figures import edge_figure, effort_figure
from cao_lab.reporting.scientific import load_solves
from cao_lab.reporting.scientific_figures import loss_figure
from cao_lab.reporting.scientific_tables import solver_tables
from cao_lab.reporting.setting import Setting, settings
from cao_lab.reporting.setting_figures import setting_figures
from cao_lab.reporting.stable_rates_figure import stable_window_figure
from cao_lab.reporting.tables import make_tables
from cao_lab.reporting.tabular import Table, markdown, write_table

FEW_FIGURES = 10


@dataclass(frozen=True)
class FigureJob:
    """A figure to be drawn: where it goes, and the call that draws it."""

    path: str
    draw: "partial[Figure]"


def write_report(logs: Path, out: Path) -> Path:
    """Write everything that a folder of logs has to tell, and return the path of the page."""
    missing: list[str] = []
    beside = Beside(load_solves(logs, missing), swept_contests(logs, missing))
    try:
        read = load_logs(logs)
    except ReportError:
        if not (beside.solves or beside.swept):
            raise
        write_parts(out, beside.figure_jobs(), beside.tables())
        text = page_without_runs(beside.tables(), [job.path for job in beside.figure_jobs()], missing)
        return written(out / "index.html", text)
    found = settings(read)
    read = replace(read, missing=(*read.missing, *missing))
    jobs = [*figure_jobs(read, found), *beside.figure_jobs()]
    tables, verdicts = [*make_tables(read, found), *beside.tables()], audit(found)
    write_parts(out, jobs, tables)
    written(out / "claims.md", claims_markdown(verdicts))
    return written(out / "index.html", page(read, found, tables, verdicts, [job.path for job in jobs]))


@dataclass(frozen=True)
class Beside:
    """What lies beside training runs: solves of full-batch problems, and sweeps over learning rates."""

    solves: list[SolveRun]
    swept: list[Contest]

    def figure_jobs(self) -> list[FigureJob]:
        """List their figures."""
        jobs = list(solver_figure_jobs(self.solves))
        if self.swept:
            jobs += [
                FigureJob("robust/loss-by-rate", partial(rates_figure, self.swept)),
                FigureJob("robust/rank-and-cost-by-rate", partial(effort_figure, self.swept)),
                FigureJob("robust/edge", partial(edge_figure)),
            ]
        return jobs

    def tables(self) -> list[Table]:
        """Return their tables."""
        swept = [goals_table(self.swept), contests_table(self.swept)] if self.swept else []
        return [*solver_tables(self.solves), *swept]


def swept_contests(logs: Path, missing: list[str]) -> list[Contest]:
    """Read all suites of sweeps."""
    return [contest for suite in suites_of(["rates"]) for contest in contests(read_sweeps(logs / suite, missing))]


def write_parts(out: Path, jobs: list[FigureJob], tables: list[Table]) -> None:
    """Write figures and tables."""
    out.mkdir(parents=True, exist_ok=True)
    write_figures(jobs, out / "figures")
    for table in tables:
        write_table(table, out / "tables")


def written(path: Path, text: str) -> Path:
    """Write a text, and return where it is."""
    path.write_text(text, encoding="utf-8")
    return path


def figure_jobs(logs: Logs, found: list[Setting]) -> Iterator[FigureJob]:
    """List the figures that the logs have data for."""
    for one in found:
        if one.kind == "stability":
            continue
        names = SUITES[one.suite].figures if one.suite in SUITES else {}
        for kind, draw in setting_figures(one).items():
            yield FigureJob(f"{one.suite}/{names.get((one.task, kind), f'{one.task}/{kind}')}", draw)
    windows = predicted_windows(logs.epochs, logs.refreshes)
    if len(windows):
        yield FigureJob(f"{suites_of(['stability'])[0]}/stable-rates", partial(stable_window_figure, windows))


def solver_figure_jobs(solves: list[SolveRun]) -> Iterator[FigureJob]:
    """List the figures of full-batch solvers: loss over evaluations and over seconds, for each of their suites."""
    for suite in suites_of(["solvers"]):
        runs = [run for run in solves if run.suite == suite and run.records]
        if runs:
            yield FigureJob(f"{suite}/loss", partial(loss_figure, runs, "billed"))
            yield FigureJob(f"{suite}/loss-seconds", partial(loss_figure, runs, "seconds"))


def write_figures(jobs: list[FigureJob], folder: Path) -> None:
    """Draw the figures, on all cores if they are many: a further process takes as long to start as four figures."""
    for job in jobs:
        (folder / job.path).parent.mkdir(parents=True, exist_ok=True)
    if len(jobs) <= FEW_FIGURES:
        for job in jobs:
            write_figure(folder, job)
        return
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        list(pool.map(partial(write_figure, folder), jobs))


def write_figure(folder: Path, job: FigureJob) -> None:
    """Write one figure as PNG and PDF, without the dates that would make two equal figures differ."""
    with matplotlib.style.context(STYLE):
        figure = job.draw()
        figure.savefig(folder / f"{job.path}.png", metadata={"Software": None})
        figure.savefig(folder / f"{job.path}.pdf", metadata={"CreationDate": None})


def claims_markdown(verdicts: DataFrame) -> str:
    """Return the audit as a document: claim, rule, and what each suite shows."""
    lines = ["# What these logs say about the paper's claims", ""]
    for name, rows in verdicts.groupby("claim", sort=False):
        cells = rows[["suite", "task", "verdict", "evidence"]].rename(columns=str.capitalize)
        lines += [f"## {str(name).capitalize()}", "", rows["statement"].iloc[0], "", markdown(cells)]
        again = "" if rows["is_counted"].all() else " The same comparison again: it is not counted."
        lines += [f"*Rule.* {rows['rule'].iloc[0]}{again}", ""]
    return "\n".join(lines)
