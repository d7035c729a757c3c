"""The list of optimizers: each is a file of `runs/methods`, and a line here."""

# ruff: noqa: PLC0414  # everybody takes the settings from here

from typing import Annotated, Any, get_args

import tyro

from cao_lab.runs.methods.adagrad import AdaGradConfig as AdaGradConfig
from cao_lab.runs.methods.adahessian import AdaHessianConfig as AdaHessianConfig
from cao_lab.runs.methods.adam import AdamConfig as AdamConfig
from cao_lab.runs.methods.adamw import AdamWConfig as AdamWConfig
from cao_lab.runs.methods.cao import CAOConfig as CAOConfig
from cao_lab.runs.methods.lbfgs import LBFGSConfig as LBFGSConfig
from cao_lab.runs.methods.muon import MuonConfig as MuonConfig
from cao_lab.runs.methods.rmsprop import RMSPropConfig as RMSPropConfig
from cao_lab.runs.methods.sgd import SGDConfig as SGDConfig
from cao_lab.runs.methods.shampoo import ShampooConfig as ShampooConfig
from cao_lab.runs.methods.soap import SOAPConfig as SOAPConfig

OptimizerConfig = (
    Annotated[SGDConfig, tyro.conf.subcommand("sgd")]
    | Annotated[AdamConfig, tyro.conf.subcommand("adam")]
    | Annotated[AdamWConfig, tyro.conf.subcommand("adamw")]
    | Annotated[LBFGSConfig, tyro.conf.subcommand("lbfgs")]
    | Annotated[CAOConfig, tyro.conf.subcommand("cao")]
    | Annotated[AdaHessianConfig, tyro.conf.subcommand("adahessian")]
    | Annotated[SOAPConfig, tyro.conf.subcommand("soap")]
    | Annotated[MuonConfig, tyro.conf.subcommand("muon")]
    | Annotated[AdaGradConfig, tyro.conf.subcommand("adagrad")]
    | Annotated[RMSPropConfig, tyro.conf.subcommand("rmsprop")]
    | Annotated[ShampooConfig, tyro.conf.subcommand("shampoo")]
)


def optimizer_configs() -> dict[str, type[Any]]:
    """Return the dataclasses of the union under the names their configs carry."""
    classes = [get_args(member)[0] for member in get_args(OptimizerConfig)]
    return {cls().name: cls for cls in classes}
