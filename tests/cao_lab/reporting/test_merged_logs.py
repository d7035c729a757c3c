import shutil

from cao_lab.config import Execution, RunConfig
from cao_lab.reporting.logreader import load_logs
from cao_lab.reporting.report import write_report
from cao_lab.runs.methods.first_order import AdamConfig, SGDConfig
from cao_lab.runs.session import run


def test_logs_of_two_machines_merge_by_copying_their_folders(tmp_path):
    configs = [RunConfig(optimizer, epochs=2, width=8, suite="demo") for optimizer in (SGDConfig(), AdamConfig())]
    for machine, config in zip("ab", configs, strict=True):
        run(config, Execution(logs=tmp_path / machine, threads=1))
        shutil.copytree(tmp_path / machine, tmp_path / "logs", dirs_exist_ok=True)
    assert sorted(load_logs(tmp_path / "logs").runs["label"]) == ["adam", "sgd"]
    write_report(tmp_path / "logs", tmp_path / "report")
    assert (tmp_path / "report/index.html").exists()
