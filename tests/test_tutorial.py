"""The tutorial is run block by block, and prints what it says it prints."""

import io
import math
import re
from contextlib import redirect_stdout
from pathlib import Path

import torch

PAGE = Path(__file__).parents[1] / "docs/tutorial.md"
BLOCK = re.compile(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```\n)?", re.DOTALL)
SECONDS = re.compile(r"\S+ s$", re.MULTILINE)  # They are the machine's own.
NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?(?:e[+-][0-9]+)?")


def words(text: str) -> str:
    return NUMBER.sub("#", text)


def numbers(text: str) -> list[str]:
    return NUMBER.findall(SECONDS.sub("", text))


def are_close(one: str, other: str) -> bool:
    """Whether two numbers agree to a hundredth, or in their order of magnitude where that is what they are given in."""
    if "e" in one + other:
        return abs(math.log10(float(one) / float(other))) < 1
    return math.isclose(float(one), float(other), rel_tol=0.01)


def blocks() -> list[tuple[str, str]]:
    """Return each block of code with what stands below it."""
    return BLOCK.findall(PAGE.read_text())


def test_every_block_of_the_tutorial_prints_what_stands_below_it():
    names: dict[str, object] = {}
    with torch.random.fork_rng():
        for code, shown in blocks():
            printed = io.StringIO()
            with redirect_stdout(printed):
                exec(compile(code, PAGE.name, "exec"), names)
            assert words(printed.getvalue()) == words(shown), code
            assert all(are_close(*pair) for pair in zip(*map(numbers, (printed.getvalue(), shown)), strict=True)), code


def test_the_tutorial_has_what_it_promises():
    text = "".join(code for code, _ in blocks())
    for name in (
        "CAO(",
        "SketchedLBFGS(",
        "LeastSquares(",
        "watch(",
        "top_eigenpairs(",
        "optimizer.refresh_if_due(loss)",
    ):
        assert name in text
