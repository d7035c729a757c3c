"""What the paper reports: its numbers for each claim, its figures and its tables; costs are in `facts`."""

from cao_lab.facts import PAPER_TASK

NUMBERS = {
    "speed": "19 against 56 epochs", "factor": "2.95×", "threshold range": "1.9× at 0.9, 1.6× at 1.0",
    "early loss": "Figure 2", "whole curve": "Figure 1", "early variance": "Figure 2",
    "final accuracy": "0.65 and 0.66", "SGD's accuracy": "0.58 and 0.65", "rank": "Figure 3",
    "no curvature": "Figure 3",
    "time": "1.19× (1.18 to 1.22)", "memory": "2.39× (2.4 to 2.8)", "damping": "η from 0.001 to 0.1, not plotted",
    "damping and variance": "the same", "small damping": "the same", "refresh": "m from 200 to 800, not plotted",
    "stability": "no divergence", "positive definite": "any η > 0", "sufficient damping": "sufficiently large η",
}  # fmt: skip
"""The paper's number for each claim, or where it shows it; the others are words alone."""
ACCURACIES = {
    "cifar10-resnet18": ("0.82 ± 0.03", "0.89 ± 0.01", "0.89 ± 0.01"),
    "cifar10-resnet34": ("0.85 ± 0.01", "0.88 ± 0.00", "0.89 ± 0.01"),
    "cifar100-resnet18": ("0.58 ± 0.01", "0.66 ± 0.01", "0.65 ± 0.00"),
    "cifar100-resnet34": ("0.57†", "0.65†", "0.64†"),
}
"""The paper's Table 1: final test accuracy of SGD, Adam and CAO."""
HITS = {1.0: ("23", "14", "1.64×"), 0.9: ("≈ 31", "16", "1.94×"), 0.75: ("56.00 ± 1.00", "19.00 ± 0.00", "2.95×")}
"""The paper's Table 2, and what its appendix says of two more thresholds: epochs of Adam and CAO, and their ratio."""
FIGURES = (
    ("1", "train loss, 75 epochs: CAO lowest; 0.75 at 19 and 56", PAPER_TASK, "train-loss"),
    ("2", "its first 30 epochs: CAO lowest, least variance", PAPER_TASK, "train-loss-early"),
    ("3", "k = 1, 3, 5 alike, k = 0 slower", PAPER_TASK, "rank-ablation"),
    ("A", "train loss", "cifar10-resnet18", "train-loss"),
    ("B", "train loss", "cifar10-resnet34", "train-loss"),
    ("C", "train loss, one seed", "cifar100-resnet34", "train-loss"),
    ("D", "train accuracy", PAPER_TASK, "train-accuracy"),
)
"""Figure, what the paper shows in it, task, and the kind of our figure."""
