"""Problems of scientific machine learning: a network that solves a differential equation in the least-squares sense."""

from cao_lab.tasks.pde.allen_cahn import ALLEN_CAHN
from cao_lab.tasks.pde.burgers import BURGERS
from cao_lab.tasks.pde.convection import CONVECTION
from cao_lab.tasks.pde.elliptic import HELMHOLTZ, POISSON
from cao_lab.tasks.pde.problem import Equation
from cao_lab.tasks.pde.reaction import REACTION
from cao_lab.tasks.pde.regression import REGRESSION
from cao_lab.tasks.pde.wave import WAVE

EQUATIONS: dict[str, Equation] = {
    equation.name: equation
    for equation in (CONVECTION, REACTION, WAVE, BURGERS, ALLEN_CAHN, POISSON, HELMHOLTZ, REGRESSION)
}
