"""Problems of scientific machine learning: a network that solves a differential equation in the least-squares sense.

An equation is a file of this package, and is found here by its name.
"""

from cao_lab.discovery import modules_in
from cao_lab.tasks.pde.problem import Equation

EQUATIONS: dict[str, Equation] = {
    each.name: each for module in modules_in(__name__) for each in vars(module).values() if isinstance(each, Equation)
}
