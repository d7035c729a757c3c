"""Text that comes with Python itself: the language reference as `help()` shows it, in windows of characters.

`pydoc_data.topics` is part of the standard library and has its licence (PSF-2.0). Its text differs a little between
versions of Python, which the log of a run names.
"""

from pydoc_data.topics import topics

import numpy as np
from jaxtyping import UInt8

CONTEXT = 64
"""Characters that a model sees of a window; it predicts each from those before it."""
TEST_SHARE = 0.2
FIRST, LAST = 32, 126
"""The printable characters of ASCII; with the end of a line they are all there is, and anything else is a space."""
NEWLINE = LAST - FIRST + 1
CLASSES = NEWLINE + 1


def windows() -> tuple[UInt8[np.ndarray, "n window"], UInt8[np.ndarray, "m window"]]:
    """Return windows of CONTEXT + 1 characters for training and, from the end of the text, for testing."""
    codes = encoded("\n\n".join(topics[name] for name in sorted(topics)))
    count = (len(codes) - 1) // CONTEXT
    starts = CONTEXT * np.arange(count)
    cut = codes[starts[:, None] + np.arange(CONTEXT + 1)]
    kept = count - round(TEST_SHARE * count)
    return cut[:kept], cut[kept:]


def encoded(text: str) -> UInt8[np.ndarray, " n"]:
    """Return a text as numbers below CLASSES."""
    codes = np.array([ord(letter) for letter in text])
    is_printable = (codes >= FIRST) & (codes <= LAST)
    return np.where(codes == ord("\n"), NEWLINE, np.where(is_printable, codes - FIRST, 0)).astype(np.uint8)
