"""The solvers by name: each file of this package offers some in its METHODS, at the settings they are compared at."""

from cao_lab.discovery import modules_in
from cao_lab.solvers.method import Method

METHODS: dict[str, Method] = {method.name: method for module in modules_in(__name__) for method in module.METHODS}
