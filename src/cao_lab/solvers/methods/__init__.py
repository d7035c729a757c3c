"""The methods by name, with the settings they are compared at."""

from cao_lab.solvers.method import Method
from cao_lab.solvers.methods.cao_as_it_is import FullBatchCAO
from cao_lab.solvers.methods.dense import ScipyBFGS
from cao_lab.solvers.methods.first_order import Adam, Soap
from cao_lab.solvers.methods.nncg import NNCG
from cao_lab.solvers.methods.quasi_newton import ScipyLBFGSB, TorchLBFGS
from cao_lab.solvers.methods.sketched import Sketched

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Sketched(),
        TorchLBFGS(),
        ScipyLBFGSB(),
        ScipyBFGS(),
        NNCG(),
        NNCG(lbfgs_share=0.5),
        Soap(),
        Adam(),
        FullBatchCAO(),
    )
}
