"""One page that holds everything, in one file: no network, no server, readable from disk."""

import re
from collections.abc import Hashable, Iterable
from html import escape
from pathlib import Path

from pandas import DataFrame
from plotly.offline import get_plotlyjs

from cao_lab.facts import suites_of
from cao_lab.reporting.logreader import Logs
from cao_lab.reporting.matrix import WORDS, matrix, task_title
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
FEW_PICTURES = 3
"""So many are shown without being asked for."""
PLURAL = {
    Verdict.HOLDS: "hold", Verdict.FAILS: "do not hold", Verdict.RATE: "hold only because of the learning rate",
    Verdict.TIE: "are a tie", Verdict.UNDECIDED: "are open",
}  # fmt: skip
"""What claims with a verdict do."""


def page(logs: Logs, found: list[Setting], tables: list[Table], verdicts: DataFrame, figures: list[str]) -> str:
    """Return the page as one text of HTML."""
    pieces = {
        "summary": summary(logs, verdicts),
        "matrix": matrix_section(verdicts),
        "audit": audit(verdicts),
        "tables": "".join(table_section(table) for table in tables),
        "beside": beside("theory", "Theory, checked numerically", logs.theory)
        + beside("bench", "Benchmarks", logs.bench),
        "missing": missing(logs.missing),
        "figures": figure_links(figures),
        "pictures": pictures(figures),
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
    """Return what there is, in numbers, and the answer: what became of the paper's claims."""
    states = logs.runs["status"].value_counts().sort_index()
    told = ", ".join(f"{count} {state}" for state, count in states.items())
    tasks = logs.runs[["suite", "task"]].drop_duplicates()
    facts = f"{len(logs.runs)} training runs ({told}) of {len(tasks)} tasks in {tasks['suite'].nunique()} suites."
    return f'<p class="lead">{escape(answer(verdicts))}</p><p class="facts">{escape(facts)}</p>'


def answer(verdicts: DataFrame) -> str:
    """Return in two sentences whether the paper holds."""
    claims, judged = verdicts["claim"].nunique(), verdicts[verdicts["verdict"].isin([str(one) for one in WORDS])]
    if judged.empty:
        return f"None of the paper's {claims} claims can be judged by these logs."
    counts = judged.loc[judged["is_counted"], "verdict"].value_counts()
    told = ", ".join(f"{counts[one]} {PLURAL[one]}" for one in WORDS if one in counts)
    return (
        f"Does the paper hold? Of its {claims} claims, these logs can say something about {judged['claim'].nunique()}. "
        f"Counting each claim once per task, at one damping: {told or 'none'}."
    )


def matrix_section(verdicts: DataFrame) -> str:
    """Return claims against tasks: a word a cell, in colour, that leads to the evidence."""
    columns = matrix(verdicts)
    if not columns:
        return ""
    head = "".join(
        f'<th scope="col">{escape(task_title(task))}<small>suite {escape(suite)}</small></th>'
        for suite, task in columns
    )
    rows = []
    for claim in verdicts["claim"].unique():
        cells = [matrix_cell(found.get(claim), anchor(claim)) for found in columns.values()]
        if any(claim in found for found in columns.values()):
            title = f'<th scope="row"><a href="#{anchor(claim)}">{escape(capitalized(claim))}</a></th>'
            rows.append(f"<tr>{title}{''.join(cells)}</tr>")
    return (
        f'<div class="scroll"><table class="matrix"><thead><tr><th scope="col">Claim</th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def matrix_cell(rows: DataFrame | None, target: str) -> str:
    """Return what a task says of a claim, each part of it in a word."""
    badges = []
    for row in [] if rows is None else rows.to_dict("records"):
        verdict, part = Verdict(row["verdict"]), f" <small>{escape(row['part'])}</small>" if row["part"] else ""
        badges.append(
            f'<a class="badge {BADGES[verdict]}" href="#{target}" title="{escape(row["evidence"])}">'
            f"{WORDS[verdict]}{part}</a>"
        )
    return f"<td>{''.join(badges)}</td>"


def capitalized(words: str) -> str:
    """Return words with a capital at their beginning, and all others as they are."""
    return words[:1].upper() + words[1:]


def anchor(claim: str) -> str:
    """Return the name of a claim's place on the page."""
    return "claim-" + re.sub(r"\W+", "-", claim.lower())


def audit(verdicts: DataFrame) -> str:
    """Return the claims, folded: the statement, what each setting shows (untested ones last), and the rule."""
    cards = []
    for name, rows in verdicts.groupby("claim", sort=False):
        in_order = sorted(rows.to_dict("records"), key=lambda row: row["verdict"] in SILENT)
        statement = escape(rows["statement"].iloc[0])
        cards.append(
            f'<details class="claim"><summary><b>{escape(capitalized(str(name)))}</b> {statement}</summary>'
            f'<div id="{anchor(str(name))}"><ul>{"".join(finding(row) for row in in_order)}</ul>'
            f"<p><b>The rule.</b> {escape(rows['rule'].iloc[0])}</p></div></details>"
        )
    return "".join(cards)


def finding(row: dict[Hashable, str]) -> str:
    """Return what one setting says about a claim."""
    badge = BADGES[Verdict(row["verdict"])]
    return (
        f'<li class="{badge}"><span class="badge {badge}">{escape(row["verdict"])}</span>'
        f'<span class="where">{escape(" · ".join(filter(None, (task_title(row["task"]), row["part"]))))}'
        f" (suite {escape(row['suite'])})</span>"
        f'<span class="evidence">{escape(row["evidence"])}</span></li>'
    )


def table_section(table: Table) -> str:
    """Return a table under its caption, folded if it is a long one."""
    links = ", ".join(f'<a href="tables/{table.name}.{kind}">{kind}</a>' for kind in ("md", "tex", "csv"))
    title = escape(table.name.replace("-", " ").capitalize())
    groups = [column for column in ("Suite", "Task") if column in table.cells and "Optimizer" in table.cells]
    return (
        f'<details class="table" id="table-{table.name}"><summary>{title}</summary>'
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
    return f'<details class="table" id="{name}"><summary>{title}</summary>{html_table(cells)}</details>'


def missing(sentences: Iterable[str]) -> str:
    """Return the list of what is missing or broken."""
    items = [f"<li>{escape(sentence)}</li>" for sentence in sentences]
    if not items:
        return "<p><b>What is missing.</b> Nothing: every run came to its end, and every seed is there.</p>"
    title = f"What is missing or broken: {len(items)} notes"
    return f'<details class="table"><summary>{title}</summary><ul>{"".join(items)}</ul></details>'


def figure_links(figures: list[str]) -> str:
    """Return links to the figures in the folder beside the page."""
    items = "".join(
        f"<li>{escape(name)} "
        + " ".join(f'<a href="figures/{escape(name)}.{kind}">{kind.upper()}</a>' for kind in ("png", "pdf"))
        + "</li>"
        for name in figures
    )
    return f"<ul>{items}</ul>"


def pictures(figures: list[str]) -> str:
    """Return the figures that have no curves to choose from: of solvers, sweeps over rates and sharpness."""
    folders = (*suites_of(["solvers", "rates"]), "sharpness")
    shown = [name for name in figures if name.split("/", maxsplit=1)[0] in folders]
    opened = " open" if len(shown) <= FEW_PICTURES else ""
    items = "".join(
        f'<details class="table"{opened}><summary>{escape(figure_title(name))}</summary>'
        f'<img src="figures/{escape(name)}.png" alt="{escape(figure_title(name))}" loading="lazy" class="picture">'
        "</details>"
        for name in shown
    )
    return items or "<p>There are no logs of such suites.</p>"


def figure_title(name: str) -> str:
    """Return "Scientific: loss seconds" for `scientific/loss-seconds`."""
    suite, _, rest = name.partition("/")
    return f"{suite.replace('-', ' ').capitalize()}: {rest.replace('-', ' ')}"


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
