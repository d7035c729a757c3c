"""The documentation is built as a site; a warning is an error."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

pytest.importorskip("mkdocs", reason="the site needs the extra docs")

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", ROOT / "mkdocs.yml", "-d", folder]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == 0, ended.stderr
    return folder


def test_every_formula_is_drawn_by_the_browser_itself(site):
    for name in ("theory", "method", "results"):
        text = (site / f"{name}.html").read_text()
        assert text.count("<math") == len(formulas((ROOT / f"docs/{name}.md").read_text()))
        assert "arithmatex" not in text


def formulas(markdown: str) -> list[str]:
    """Return what stands between dollars, outside of code."""
    without_code = re.sub(r"```.*?```|`[^`\n]*`", "", markdown, flags=re.DOTALL)
    return re.findall(r"\$\$.+?\$\$|\$[^$\n]+(?:\n[^$\n]+)?\$", without_code, flags=re.DOTALL)


def test_no_page_asks_the_network_for_anything(site):
    for page in site.rglob("*.html"):
        assert not re.findall(r"""(?:src|href)=["']?(?:https?:)?//""", page.read_text())


def test_the_reference_names_everything_that_the_library_exports(site):
    import cao  # noqa: PLC0415

    text = "".join(page.read_text() for page in (site / "api").glob("*.html"))
    shown = set(re.findall(r'id="cao\.([A-Za-z_]+)"', text))
    assert set(cao.__all__) - shown == set()


def test_the_menu_has_every_page():
    class Loader(yaml.SafeLoader):
        """Passes over what is Python's."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
    menu = str(yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"])
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")]
    assert [page for page in pages if page not in menu] == []
