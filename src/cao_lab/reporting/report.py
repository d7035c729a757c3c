"""The report as a whole: figures, tables, audit and page, from a folder of logs and nothing else."""

import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from multiprocessing import get_context
from pathlib import Path
from typing import TypeAlias

import matplotlib.style
from matplotlib.figure import Figure
from pandas import DataFrame
from tqdm import tqdm

from cao_lab.facts import SUITES, suites_of
from cao_lab.log.header import read_sweeps
from cao_lab.log.records import SolveRun
from cao_lab.reporting.alarms import readings_in, sharpness_figure, watch_tables
from cao_lab.reporting.claims import audit
from cao_lab.reporting.figures import STYLE
from cao_lab.reporting.logreader import Logs, ReportError, load_logs
from cao_lab.reporting.page import page, page_without_runs
from cao_lab.reporting.rates import predicted_windows
from cao_lab.reporting.robust import (
    Duel,
    duels,
    duels_table,
    edge_figure,
    effort_figure,
    goals_table,
    rates_figure,
)
from cao_lab.reporting.scientific import load_solves, loss_figure, profile_figure
from cao_lab.reporting.scientific_tables import solver_tables
from cao_lab.reporting.setting import Setting, settings
from cao_lab.reporting.suite_figures import setting_figures, stable_window_figure
from cao_lab.reporting.tables import make_tables
from cao_lab.reporting.tabular import Table, markdown, write_table

FEW_FIGURES = 10
Figures: TypeAlias = dict[str, "partial[Figure]"]
"""Figures to be drawn: where each goes, and the call that draws it."""


def write_report(logs: Path, out: Path) -> Path:
    """Write everything that a folder of logs has to tell, and return the path of the page."""
    missing: list[str] = []
    beside = load_beside(logs, missing)
    try:
        read = load_logs(logs)
    except ReportError:
        if not (beside.solves or beside.swept or beside.watched):
            raise
        write_parts(out, beside.figures(), beside.tables())
        text = page_without_runs(beside.tables(), list(beside.figures()), missing)
        return written(out / "index.html", text)
    tqdm.write(f"read: {len(read.runs)} runs; next: tables and the audit, then figures, then the page", sys.stderr)
    found = settings(read)
    read = replace(read, missing=(*read.missing, *missing))
    figures = figures_of(read, found) | beside.figures()
    tables, verdicts = [*make_tables(read, found), *beside.tables()], audit(found)
    write_parts(out, figures, tables)
    written(out / "claims.md", claims_markdown(verdicts))
    return written(out / "index.html", page(read, found, tables, verdicts, list(figures)))


@dataclass(frozen=True)
class Beside:
    """What lies beside training runs: solves of full-batch problems, sweeps over learning rates, alarms."""

    solves: list[SolveRun]
    swept: list[Duel]
    watched: list[Table]
    readings: DataFrame | None

    def figures(self) -> Figures:
        """Return their figures: of solvers the loss over evaluations or a profile, and the loss over seconds."""
        found: Figures = {}
        for suite in suites_of(["solvers"]):
            if runs := [run for run in self.solves if run.suite == suite and run.records]:
                if isfinite(runs[0].evaluations):
                    found[f"{suite}/loss"] = partial(loss_figure, runs, "billed")
                else:
                    found[f"{suite}/profile"] = partial(profile_figure, runs)
                found[f"{suite}/loss-seconds"] = partial(loss_figure, runs, "seconds")
        if self.swept:
            found["robust/loss-by-rate"] = partial(rates_figure, self.swept)
            found["robust/rank-and-cost-by-rate"] = partial(effort_figure, self.swept)
            found["robust/edge"] = partial(edge_figure)
        if self.readings is not None:
            found["sharpness/edge-of-stability"] = partial(sharpness_figure, self.readings)
        return found

    def tables(self) -> list[Table]:
        """Return their tables."""
        swept = [goals_table(self.swept), duels_table(self.swept)] if self.swept else []
        return [*solver_tables(self.solves), *swept, *self.watched]


def load_beside(logs: Path, missing: list[str]) -> Beside:
    """Read all suites of solvers, of sweeps and of alarms."""
    swept = [duels(read_sweeps(logs / suite, missing)) for suite in suites_of(["rates"])]
    watched = watch_tables(logs, missing)
    every_duel = [duel for suite in swept for duel in suite]
    return Beside(load_solves(logs, missing), every_duel, watched, readings_in(logs, missing))


def write_parts(out: Path, figures: Figures, tables: list[Table]) -> None:
    """Write figures and tables."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except FileNotFoundError as error:  # A file system such as /proc takes no folder.
        raise ReportError(f"the folder {out} cannot be made; choose another with --out") from error
    write_figures(figures, out / "figures")
    for table in tables:
        write_table(table, out / "tables")


def written(path: Path, text: str) -> Path:
    """Write a text, and return where it is."""
    path.write_text(text, encoding="utf-8")
    return path


def figures_of(logs: Logs, found: list[Setting]) -> Figures:
    """Return the figures that the logs have data for."""
    figures: Figures = {}
    for one in found:
        if one.kind != "stability":
            names = SUITES[one.suite].figures if one.suite in SUITES else {}
            for kind, draw in setting_figures(one).items():
                figures[f"{one.suite}/{names.get((one.task, kind), f'{one.task}/{kind}')}"] = draw
    windows = predicted_windows(logs.epochs, logs.refreshes)
    if len(windows):
        figures[f"{suites_of(['stability'])[0]}/stable-rates"] = partial(stable_window_figure, windows)
    return figures


def write_figures(figures: Figures, folder: Path) -> None:
    """Draw the figures, on all cores if they are many: a further process takes as long to start as four figures."""
    for path in figures:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
    with tqdm(figures.items(), desc="drawing", unit="figure") as drawing:
        if len(figures) <= FEW_FIGURES:
            for path, draw in drawing:
                write_figure(folder / path, draw)
            return
        with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
            paths = [folder / path for path in figures]
            for _ in pool.map(write_figure, paths, figures.values()):
                drawing.update()


def write_figure(path: Path, draw: "partial[Figure]") -> None:
    """Write one figure as PNG and PDF, without the dates that would make two equal figures differ."""
    with matplotlib.style.context(STYLE):
        figure = draw()
        figure.savefig(f"{path}.png", metadata={"Software": None})
        # To lay panels out takes half of the time of a figure that has many, and once is enough.
        figure.set_layout_engine("none")
        figure.savefig(f"{path}.pdf", metadata={"CreationDate": None})


def claims_markdown(verdicts: DataFrame) -> str:
    """Return the audit as a document: claim, rule, and what each suite shows."""
    lines = ["# What these logs say about the paper's claims", ""]
    for name, rows in verdicts.groupby("claim", sort=False):
        cells = rows[["suite", "task", "part", "verdict", "evidence"]].rename(columns=str.capitalize)
        lines += [f"## {str(name).capitalize()}", "", rows["statement"].iloc[0], "", markdown(cells)]
        lines += [f"*Rule.* {rows['rule'].iloc[0]}", ""]
    return "\n".join(lines)
