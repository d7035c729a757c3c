import re
import shlex
from functools import wraps
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import pytest

from cao_lab import cli

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS = re.findall(r"^    (cao (\w+).*?)(?:  +#.*)?$", (ROOT / "README.md").read_text(), re.MULTILINE)
SHOWN = [
    line
    for page in PAGES
    for shown in re.findall(r"^    (cao .*)$", page.read_text(), re.MULTILINE)
    for line in shown.split("&&")
]
PROSE = [*PAGES, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]
# What cannot be broken: code, links, formulas.
ATOM = re.compile(r"`[^`]*`|!?\[[^\]]*\]\([^)]*\)|\$[^$]+\$")
TREE = (ROOT / "docs/architecture.md").read_text().split("## The tree")[1]


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_every_link_leads_somewhere(page):
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


def prose(page: str) -> list[str]:
    """Return the lines of a page without code, displayed formulas, what is made from logs, tables and headings."""
    blocks = r"^ *```.*?^ *```|^\$\$.*?\$\$|^<!-- table .*?<!-- end -->"
    without_blocks = re.sub(blocks, "", page, flags=re.MULTILINE | re.DOTALL)
    return [line for line in without_blocks.splitlines() if not re.match(r" *[|#]| {4}|<!--|:::", line)]


def is_wrapped(line: str) -> bool:
    """Whether a line has at most 100 columns, or nothing but one piece that cannot be broken."""
    text = re.sub(r"^ *(- |\d+\. )?", "", ATOM.sub("", line)).strip()
    return len(line) <= 100 or " " not in text


@pytest.mark.parametrize("page", PROSE, ids=[page.name for page in PROSE])
def test_prose_is_wrapped_at_100_columns(page):
    assert [line for line in prose(page.read_text()) if not is_wrapped(line)] == []


@pytest.mark.parametrize("page", PROSE, ids=[page.name for page in PROSE])
def test_no_line_of_a_paragraph_begins_a_list_by_accident(page):
    pairs = pairwise(prose(page.read_text()))
    starts = [line for before, line in pairs if re.match(r"\d+[.)] ", line) and re.match(r"[^\s\d]", before)]
    assert starts == []


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_every_name_of_ours_that_a_page_imports_is_there(page):
    lines = re.findall(r"^ *from (cao\S*) import (.+?)(?:  #.*)?$", page.read_text(), re.MULTILINE)
    names = [(module, name.split(" as ")[0].strip()) for module, listed in lines for name in listed.split(",")]
    assert [(module, name) for module, name in names if not hasattr(import_module(module), name)] == []


@pytest.mark.parametrize("line", SHOWN)
def test_every_command_that_is_shown_is_understood(line, monkeypatch):
    called = []
    for name, command in cli.COMMANDS.items():
        monkeypatch.setitem(cli.COMMANDS, name, wraps(command)(lambda *_, name=name, **__: called.append(name)))
    arguments = shlex.split(line, comments=True)[1:]
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert (exit_.value.code, called) == (None, arguments[:1])


@pytest.mark.parametrize("name", sorted({name for _, name in COMMANDS}))
def test_every_command_of_the_readme_exists_and_explains_itself(name, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main([name, "--help"])
    assert exit_.value.code == 0
    assert f"cao {name}" in capsys.readouterr().out


def test_the_readme_shows_every_command():
    assert {name for _, name in COMMANDS} == set(cli.COMMANDS)


def test_the_tree_names_every_module_of_the_library_and_every_part_of_the_laboratory():
    inner = {"autograd", "integrations"}
    modules = {path for path in (ROOT / "src/cao").rglob("*.py") if path.parent.name not in inner}
    library = {path.name for path in modules} - {"__init__.py"} | {f"{name}/" for name in inner}
    laboratory = {path for path in (ROOT / "src/cao_lab").iterdir() if path.name not in ("__init__.py", "__pycache__")}
    parts = {f"{path.name}/" if path.is_dir() else path.name for path in laboratory if path.suffix in ("", ".py")}
    assert [name for name in sorted(library | parts) if f"  {name} " not in TREE] == []


# Where each of the page's twelve changes is made, and by what name it is known there.
PLACES = (
    ("src/cao/sketch/damped.py", "weight_decay"),
    ("src/cao/prices.py", "HESSIAN_PRODUCT ="),
    ("src/cao/rules/damping.py", "def at_step"),
    ("src/cao/sketch/sketch.py", "def start"),
    ("src/cao/quasi_newton/line_search.py", "class HagerZhang"),
    ("src/cao/autograd/isolation.py", "def cloned_buffers"),
    ("src/cao/checks.py", "def check_settings"),
    ("src/cao/state.py", "def add_progress"),
    ("src/cao/edges.py", "AdamW"),
    ("src/cao_lab/log/records.py", "class EpochRecord"),
    ("src/cao_lab/protocol.py", "ACCURACY_MARGIN ="),
    ("src/cao_lab/runs/checkpoint.py", "def load"),
)


def test_the_twelve_typical_changes_have_a_place_each():
    page = (ROOT / "docs/architecture.md").read_text()
    changes = re.findall(r"^\d+\. ", page.split("## Twelve changes")[1].split("## The tree")[0], re.MULTILINE)
    assert len(changes) == len(PLACES) == 12
    assert [place for place, name in PLACES if name not in (ROOT / place).read_text()] == []
