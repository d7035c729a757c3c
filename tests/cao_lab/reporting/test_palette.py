"""Colours are told apart by everybody, as far as models of colour blindness know."""

from itertools import combinations

import numpy as np
import pytest

from cao_lab.reporting.palette import CURVED, OTHERS, PLAIN

# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB.
VISIONS = {
    "usual": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)
WHITE = np.array([0.95047, 1.0, 1.08883])


def linear(colour: str, white: float = 0.0) -> np.ndarray:
    """Return a colour as linear RGB, mixed with white as the page does on a dark ground."""
    parts = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    parts = (1 - white) * parts + white
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    xyz = TO_XYZ @ rgb.clip(0, 1) / WHITE
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("white", [0.0, 0.35], ids=["light", "dark"])
@pytest.mark.parametrize("vision", VISIONS)
def test_any_two_solid_colours_differ_for_everybody(vision: str, white: float) -> None:
    colours = [*CURVED, *PLAIN.values(), *OTHERS]
    seen = {colour: lab(VISIONS[vision] @ linear(colour, white)) for colour in colours}
    distances = {pair: np.linalg.norm(seen[pair[0]] - seen[pair[1]]) for pair in combinations(colours, 2)}
    # 2.3 is just noticeable side by side; the colours that these replaced came down to 3.6.
    assert min(distances.values()) > 10, min(distances, key=lambda pair: distances[pair])


@pytest.mark.parametrize(("ground", "white"), [("#ffffff", 0.0), ("#14171c", 0.35)], ids=["light", "dark"])
def test_the_usual_methods_stand_out_from_the_ground(ground: str, white: float) -> None:
    def luminance(rgb: np.ndarray) -> float:
        return float(TO_XYZ[1] @ rgb)

    for colour in (*CURVED, *PLAIN.values()):
        bright, dark = sorted((luminance(linear(colour, white)), luminance(linear(ground))), reverse=True)
        assert (bright + 0.05) / (dark + 0.05) >= 3, colour
