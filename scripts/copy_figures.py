"""Copy the figures that the documentation shows from a report into docs/images: copy_figures.py REPORT."""

import shutil
import sys
from pathlib import Path

IMAGES = Path(__file__).parents[1] / "docs/images"
MINI = "mini/cifar100-resnet18w8-n5000"
FIGURES = {
    "mini-controls": f"{MINI}/controls",
    "mini-eigenvalues": f"{MINI}/eigenvalues",
    "mini-test-accuracy": f"{MINI}/test-accuracy",
    "mini-train-loss": f"{MINI}/train-loss",
    "tuned-train-loss": "mini-tuned/cifar100-resnet18w8-n5000/train-loss",
    "transformer-train-loss": "transformer/pydoc-transformerw32/train-loss",
    "sensitivity": "mini-sensitivity/cifar100-resnet18w8-n5000/sweep",
    "stable-rates": "stable-range/stable-rates",
    "robust-loss-by-rate": "robust/loss-by-rate",
    "robust-effort": "robust/rank-and-cost-by-rate",
    "rule-edge": "robust/edge",
    "scientific-loss": "scientific/loss",
    "scientific-loss-seconds": "scientific/loss-seconds",
    "rathore-loss-seconds": "rathore/loss-seconds",
}
"""What a picture is called there, and where a report has it. The others are of `cao bench` and examples/pinn.py."""


if __name__ == "__main__":
    for name, place in FIGURES.items():
        shutil.copyfile(Path(sys.argv[1], "figures", f"{place}.png"), IMAGES / f"{name}.png")
