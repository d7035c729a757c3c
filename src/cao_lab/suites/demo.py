"""The demonstration: a badly scaled regression, where curvature pays."""

from dataclasses import replace

from cao_lab.runs.methods.lbfgs import LBFGSConfig
from cao_lab.suites.ill_conditioned import ADAM, CAO, LBFGS_ITERATIONS, PROBLEMS, SGD

BREAST_CANCER = PROBLEMS[0].run

# The rates of these two are the best that the suite `ill-conditioned` found; CAO and L-BFGS are not tuned.
CONDITIONING = [
    replace(BREAST_CANCER, optimizer=replace(CAO, lr=1.0)),
    replace(BREAST_CANCER, optimizer=replace(ADAM, lr=0.0316)),
    replace(BREAST_CANCER, optimizer=replace(SGD, lr=3.16e-5)),
    replace(BREAST_CANCER, optimizer=LBFGSConfig(), epochs=BREAST_CANCER.epochs // LBFGS_ITERATIONS),
]
