"""One page that holds everything, in one file: no network, no server, readable from disk."""

import re
from collections.abc import Hashable, Iterable
from html import escape
from pathlib import Path

from pandas import DataFrame
from plotly.offline import get_plotlyjs

from cao_lab.reporting.logreader import Logs
from cao_lab.reporting.page_data import page_data
from cao_lab.reporting.setting import Setting
from cao_lab.reporting.tabular import Table
from cao_lab.reporting.verdicts import Verdict

HERE = Path(__file__).parent
BADGES = {
    Verdict.HOLDS: "holds", Verdict.FAILS: "fails", Verdict.RATE: "rate", Verdict.UNDECIDED: "undecided",
    Verdict.TIE: "undecided",
    Verdict.UNTESTED: "untested", Verdict.UNTESTABLE: "untested",
}  # fmt: skip
SILENT = (Verdict.UNTESTED, Verdict.UNTESTABLE)
"""Verdicts that say nothing of the claim, and stand last."""
OPEN_TABLES = ("final-accuracy", "stable-range")


def page(logs: Logs, found: list[Setting], tables: list[Table], verdicts: DataFrame, figures: list[str]) -> str:
    """Return the page as one text of HTML."""
    pieces = {
        "summary": summary(logs, verdicts),
        "audit": audit(verdicts),
        "tables": "".join(table_section(table) for table in tables),
        "beside": beside("theory", "Theory, checked numerically", logs.theory)
        + beside("bench", "Benchmarks", logs.bench),
        "missing": missing(logs.missing),
        "figures": figure_links(figures),
        "runs": html_table(provenance(logs.runs), ["Suite", "Task"], code="Command"),
        "style": (HERE / "page.css").read_text(encoding="utf-8"),
        "data": page_data(found),
        "script": (HERE / "page.js").read_text(encoding="utf-8"),
        "plotly": get_plotlyjs(),
    }
    text = (HERE / "page.html").read_text(encoding="utf-8")
    # In one pass over the template alone, so that no piece can be mistaken for the mark of another.
    return re.sub(r"<!--(\w+)-->", lambda mark: pieces[mark[1]], text)


def page_without_runs(tables: list[Table], figures: list[str], sentences: Iterable[str]) -> str:
    """Return a page of figures and tables, for logs that have no training runs: nothing to choose or to judge."""
    style = (HERE / "page.css").read_text(encoding="utf-8")
    pictures = "".join(f'<p><img src="figures/{name}.png" alt="{escape(name)}" width="100%"></p>' for name in figures)
    body = pictures + "".join(table_section(table) for table in tables) + missing(sentences)
    head = f'<meta charset="utf-8"><title>CAO: what the logs say</title><style>{style}</style>'
    title = "<h1>CAO: what the logs say</h1>"
    return f'<!doctype html><html lang="en"><head>{head}</head><body><main>{title}{body}</main></body></html>'


def summary(logs: Logs, verdicts: DataFrame) -> str:
    """Return what there is, in numbers: runs by state, tasks, verdicts."""
    states = logs.runs["status"].value_counts().sort_index()
    told = ", ".join(f"{count} {state}" for state, count in states.items())
    tasks = logs.runs[["suite", "task"]].drop_duplicates()
    facts = f"{len(logs.runs)} runs ({told}) of {len(tasks)} tasks in {tasks['suite'].nunique()} suites"
    counts = verdicts.loc[verdicts["is_counted"], "verdict"].value_counts()
    chips = "".join(
        f'<li><a class="badge {BADGES[one]}" href="#audit">{one}: <b>{counts[one]}</b></a></li>'
        for one in Verdict
        if one in counts
    )
    listed = f'<ul class="chips" aria-label="Verdicts, claim by claim and task by task">{chips}</ul>'
    return f'<p class="facts">{escape(facts)}</p>{listed}'


def audit(verdicts: DataFrame) -> str:
    """Return the claims as cards: the statement, what each setting shows (untested ones last), and the rule."""
    cards = []
    for name, rows in verdicts.groupby("claim", sort=False):
        in_order = sorted(rows.to_dict("records"), key=lambda row: row["verdict"] in SILENT)
        cards.append(
            f'<article class="claim"><h3>{escape(str(name).capitalize())}</h3>'
            f"<p>{escape(rows['statement'].iloc[0])}</p><ul>{''.join(finding(row) for row in in_order)}</ul>"
            f"<details><summary>The rule</summary><p>{escape(rows['rule'].iloc[0])}</p></details></article>"
        )
    return "".join(cards)


def finding(row: dict[Hashable, str]) -> str:
    """Return what one setting says about a claim."""
    badge = BADGES[Verdict(row["verdict"])]
    return (
        f'<li class="{badge}"><span class="badge {badge}">{escape(row["verdict"])}</span>'
        f'<span class="where">{escape(" · ".join(filter(None, (row["suite"], row["task"], row["part"]))))}</span>'
        f'<span class="evidence">{escape(row["evidence"])}</span></li>'
    )


def table_section(table: Table) -> str:
    """Return a table under its caption, folded if it is a long one."""
    opened = " open" if table.name in OPEN_TABLES else ""
    links = ", ".join(f'<a href="tables/{table.name}.{kind}">{kind}</a>' for kind in ("md", "tex", "csv"))
    title = escape(table.name.replace("-", " ").capitalize())
    groups = [column for column in ("Suite", "Task") if column in table.cells and "Optimizer" in table.cells]
    return (
        f'<details class="table" id="table-{table.name}"{opened}><summary>{title}</summary>'
        f"<p>{escape(table.caption)} <small>({links})</small></p>{html_table(table.cells, groups)}</details>"
    )


def beside(name: str, title: str, frame: DataFrame) -> str:
    """Return the table that another command left beside the runs, nothing if it was not run."""
    if frame.empty:
        return ""
    cells = frame.map(lambda value: f"{value:.4g}" if isinstance(value, float) else str(value)).where(
        frame.notna(), "–"
    )
    cells.columns = [str(column).replace("_", " ").capitalize() for column in cells.columns]
    return f'<section id="{name}"><h2>{title}</h2>{html_table(cells)}</section>'


def missing(sentences: Iterable[str]) -> str:
    """Return the list of what is missing or broken."""
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f"<ul>{items}</ul>" if items else "<p>Nothing: every run came to its end, and every seed is there.</p>"


def figure_links(figures: list[str]) -> str:
    """Return links to the figures in the folder beside the page."""
    items = "".join(
        f"<li>{escape(name)} "
        + " ".join(f'<a href="figures/{escape(name)}.{kind}">{kind.upper()}</a>' for kind in ("png", "pdf"))
        + "</li>"
        for name in figures
    )
    return f"<ul>{items}</ul>"


def provenance(runs: DataFrame) -> DataFrame:
    """Return where each run comes from, as text."""
    columns = {
        "suite": "Suite", "task": "Task", "name": "Optimizer", "seed": "Seed", "status": "Status",
        "git_commit": "Commit", "versions": "Versions", "device": "Device", "command": "Command",
    }  # fmt: skip
    cells = runs[list(columns)].rename(columns=columns)
    cells["Commit"] = cells["Commit"].map(lambda commit: shortened(commit) if isinstance(commit, str) else "none")
    return cells.fillna("–").astype(str)


def shortened(commit: str) -> str:
    """Return the first ten digits of a commit, and whether the tree was dirty."""
    return commit[:10] + ("-dirty" if commit.endswith("-dirty") else "")


def html_table(cells: DataFrame, groups: Iterable[str] = (), code: str | None = None) -> str:
    """Return a table; grouped columns become headings, and each cell knows its column for narrow screens."""
    groups = list(groups)
    columns = [column for column in cells.columns if column not in groups]
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    bodies = [(None, cells)] if not groups else list(cells.groupby(groups, sort=False))
    parts = [f'<div class="scroll"><table><thead><tr>{head}</tr></thead>']
    for key, rows in bodies:
        parts.append("<tbody>")
        if key is not None:
            names = " · ".join(str(name) for name in key)
            parts.append(f'<tr class="group"><th colspan="{len(columns)}" scope="rowgroup">{escape(names)}</th></tr>')
        parts += [html_row(columns, row, code) for row in rows[columns].astype(str).to_numpy().tolist()]
        parts.append("</tbody>")
    return "".join(parts) + "</table></div>"


def html_row(columns: list[str], row: list[str], code: str | None) -> str:
    """Return one row of a table."""
    texts = [
        f"<code>{escape(cell)}</code>" if column == code else escape(cell)
        for column, cell in zip(columns, row, strict=True)
    ]
    return (
        "<tr>"
        + "".join(f'<td data-label="{escape(column)}">{text}</td>' for column, text in zip(columns, texts, strict=True))
        + "</tr>"
    )
