"""Strokes are told apart by everybody, as far as models of colour blindness know."""

from itertools import combinations

import numpy as np
import pytest
from pandas import DataFrame

from cao_lab.facts import METHODS
from cao_lab.reporting.palette import CURVED, PLAIN, Stroke, strokes

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
    colours = [*CURVED, *PLAIN.values()]
    seen = {colour: lab(VISIONS[vision] @ linear(colour, white)) for colour in colours}
    distances = {pair: np.linalg.norm(seen[pair[0]] - seen[pair[1]]) for pair in combinations(colours, 2)}
    # 2.3 is just noticeable side by side; the colours that these replaced came down to 3.6.
    assert min(distances.values()) > 10, min(distances, key=lambda pair: distances[pair])


@pytest.mark.parametrize(("ground", "white"), [("#ffffff", 0.0), ("#14171c", 0.35)], ids=["light", "dark"])
def test_all_colours_stand_out_from_the_ground_and_the_usual_methods_more(ground: str, white: float) -> None:
    def luminance(rgb: np.ndarray) -> float:
        return float(TO_XYZ[1] @ rgb)

    usual = {*CURVED, *(PLAIN[name] for name in ("sgd", "adam", "adamw", "lbfgs"))}
    for colour in (*CURVED, *PLAIN.values()):
        bright, dark = sorted((luminance(linear(colour, white)), luminance(linear(ground))), reverse=True)
        assert (bright + 0.05) / (dark + 0.05) >= (3 if colour in usual else 2.2), colour


def strokes_of(*methods: dict[str, object]) -> list[Stroke]:
    """Return the strokes of methods in one figure, in the order in which they are listed."""
    usual = {"optimizer": "cao", "rank": 1.0, "sketch": "top"}
    as_text = {"negative_curvature": "magnitude", "eigensolver": "subspace", "warmup_steps": 0.0}
    rows = DataFrame([usual | as_text | {"name": f"method {at:02}"} | method for at, method in enumerate(methods)])
    return [strokes(rows)[name] for name in rows["name"]]


def test_every_method_has_a_solid_colour_of_its_own() -> None:
    found = strokes_of(*({"optimizer": name, "rank": np.nan} for name in METHODS if name != "cao"), {})
    assert len({stroke.colour for stroke in found}) == len(METHODS)
    assert not any(stroke.is_dashed or stroke.marker for stroke in found)


def test_ranks_come_before_variants_and_no_variant_looks_like_a_control() -> None:
    variants = [{"eigensolver": "lanczos"}, {"negative_curvature": "signed"}, {"warmup_steps": 40.0}]
    found = strokes_of(*variants, *({"rank": rank} for rank in (1.0, 2.0, 3.0, 5.0)))
    assert len(set(found)) == len(found)
    assert not any(stroke.is_dashed for stroke in found)
    assert [bool(stroke.marker) for stroke in found] == [True] * 3 + [False] * 4


def test_only_controls_are_dashed() -> None:
    sgd = {"optimizer": "sgd", "rank": np.nan}
    found = strokes_of({"rank": 0.0}, {"sketch": "random"}, {}, sgd, sgd, *({"optimizer": "soap"} for _ in range(3)))
    assert [stroke.is_dashed for stroke in found] == [True, True, False, False, True, False, False, False]
    assert len(set(found)) == len(found)


def test_methods_that_nobody_listed_look_like_no_other() -> None:
    own = [{"optimizer": f"mine{at:02}", "rank": np.nan} for at in range(20)]
    found = strokes_of(*own, {"optimizer": "adam", "rank": np.nan}, {})
    assert len(set(found)) == len(found)
    assert not any(stroke.is_dashed for stroke in found)
