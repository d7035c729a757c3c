"""What an epoch of CAO costs in time and memory, against SGD."""

import math

from cao_lab.protocol import RATIO_MARGIN
from cao_lab.reporting.analysis import run_costs
from cao_lab.reporting.intervals import ratio_interval
from cao_lab.reporting.setting import Setting
from cao_lab.reporting.verdicts import Finding, Verdict, equality, said, untested


def time_overhead(setting: Setting) -> Finding:
    """Holds if the interval of CAO's (k = 1) mean seconds an epoch over SGD's lies at or below 1.18 × 1.1; does
    not hold if it lies wholly above; undecided otherwise.
    """
    return overhead(setting, "seconds_per_epoch", 1.18)


def memory_overhead(setting: Setting) -> Finding:
    """Holds if the interval of CAO's (k = 1) peak memory over SGD's lies at or below 2.4 × 1.1; does not hold if
    it lies wholly above; undecided otherwise. Not tested where memory is that of the whole process, which
    holds Python, torch and the data besides.
    """
    finding = overhead(setting, "peak_memory_mib", 2.4)
    if (setting.epochs["peak_memory_source"] == "cuda").all():
        return finding
    return Finding(Verdict.UNTESTED, f"{finding.evidence}; memory of the process, not of the allocator")


def overhead(setting: Setting, unit: str, claimed: float) -> Finding:
    """Judge a cost that the paper gives as a ratio to SGD: at most that, with 10 % to spare."""
    costs = {part: run_costs(setting.of(part)).set_index("seed")[unit] for part in ("cao", "sgd")}
    ratio = ratio_interval(costs["cao"], costs["sgd"])
    if not ratio.count:
        return untested(*(setting.lacking("cao", "sgd") or ["CAO and SGD on a common seed"]))
    verdict = equality(ratio, -math.inf, claimed * RATIO_MARGIN)
    every = f"{setting.of('cao')['refresh_every'].iloc[0]:.0f}"
    told = f"{said(ratio)} SGD's {unit.replace('_', ' ').removesuffix(' mib')}, with a refresh every {every} steps"
    return Finding(verdict, told)
