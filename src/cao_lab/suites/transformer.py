"""The paper's future work: a small transformer on text, every optimizer tuned equally, three fresh seeds.

Two blocks of width 32 predict the characters of Python's own reference (`tasks.text`). The grids of rates are those of
`mini-tuned`: five a factor of √10 apart, around each optimizer's usual rate here.
"""

from dataclasses import replace

from cao_lab.assumptions import DAMPING
from cao_lab.config import RunConfig
from cao_lab.optimizer_config import OptimizerConfig
from cao_lab.protocol import TUNING_SEED
from cao_lab.runs.methods.cao import CAOConfig, CAODefaultsConfig
from cao_lab.runs.methods.first_order import AdamConfig, AdamWConfig, MuonConfig, SGDConfig, SOAPConfig
from cao_lab.suites.rounds import Rounds, together
from cao_lab.suites.tuned import FRESH_SEEDS, tune

EPOCHS = 10
WIDTH = 32
STEPS_PER_EPOCH = 46
"""With the text of Python 3.11; that of another version is a little longer."""

PLAIN_SGD = SGDConfig(lr=1.0, momentum=0.0)
CAO = CAOConfig(lr=DAMPING * PLAIN_SGD.lr, refresh_every=STEPS_PER_EPOCH)
OPTIMIZERS: list[OptimizerConfig] = [
    SGDConfig(lr=0.1),
    PLAIN_SGD,
    AdamConfig(),
    AdamWConfig(),
    SOAPConfig(),
    MuonConfig(),
    CAO,
    replace(CAO, rank=0),
    replace(CAO, momentum=0.9, lr=CAO.lr / 10),
    CAODefaultsConfig(lr=0.1),
]


def transformer() -> Rounds:
    """Tune each optimizer on the text, and repeat the best on fresh seeds."""
    configs = [RunConfig(one, "pydoc", "transformer", TUNING_SEED, EPOCHS, width=WIDTH) for one in OPTIMIZERS]
    yield from together(tune(config, FRESH_SEEDS) for config in configs)
