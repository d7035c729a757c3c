"""What a value of a log may be: each check returns the value, or says in one line what it should have been."""

from reprlib import repr as shortened
from typing import Any

from cao_lab.log.records import LogError

LONGEST_NAME = 255
"""Bytes that a file system allows in the name of a folder."""
LARGEST_NUMBER = 1e300
LONGEST_SENTENCE = 300
LARGEST_COUNT = 2**53
"""Whole numbers up to here are exact as floats, as tables and the page hold them."""


def wrong(name: str, wanted: str, value: object) -> LogError:
    """Return the error for a value that is not what was wanted."""
    return LogError(f"{name} must be {wanted}, got {shortened(value)}")


def text(name: str, value: Any) -> str:
    """Return a text that can be written down: JSON can hold half of a character."""
    if not isinstance(value, str) or not value.isprintable():
        raise wrong(name, "a line of text", value)
    return value


def folder_name(name: str, value: Any) -> str:
    """Return a text that can name a folder, as `task` does."""
    if not text(name, value) or "/" in value or value in (".", "..") or len(value.encode()) > LONGEST_NAME:
        raise wrong(name, "the name of a folder", value)
    return str(value)


def folder_path(name: str, value: Any) -> str:
    """Return a text that can name a folder below another, as `suite` does."""
    for part in text(name, value).split("/"):
        folder_name(name, part)
    return str(value)


def number(name: str, value: Any) -> float:
    """Return a finite number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # Comparing is safe where converting is not: an integer of JSON can be larger than any float.
    if not is_number or not -LARGEST_NUMBER < value < LARGEST_NUMBER:
        raise wrong(name, "a finite number", value)
    return float(value)


def count(name: str, value: Any, at_least: int = 0) -> int:
    """Return a whole number that is not negative."""
    if not isinstance(value, int) or isinstance(value, bool) or not at_least <= value <= LARGEST_COUNT:
        raise wrong(name, f"a whole number from {at_least} on", value)
    return value


def mapping(name: str, value: Any) -> dict[str, Any]:
    """Return an object of JSON."""
    if not isinstance(value, dict):
        raise wrong(name, "an object", value)
    return value


def one_line(words: str) -> str:
    """Return a text as one line that can be written down, cut where it gets too long to be read."""
    line = " ".join(words.encode(errors="replace").decode().split())
    line = "".join(letter if letter.isprintable() else "?" for letter in line)
    return line if len(line) <= LONGEST_SENTENCE else f"{line[:LONGEST_SENTENCE]}…"
