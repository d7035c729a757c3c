import shutil

from cao_lab.config import Execution, RunConfig
from cao_lab.optimizer_config import AdamConfig, SGDConfig
from cao_lab.reporting.report import write_report
from cao_lab.runs.session import run


def test_logs_of_two_machines_merge_by_copying_their_folders(tmp_path):
    configs = [RunConfig(optimizer, epochs=2, width=8, suite="demo") for optimizer in (SGDConfig(), AdamConfig())]
    for machine, config in zip("ab", configs, strict=True):
        run(config, Execution(logs=tmp_path / machine, threads=1))
        shutil.copytree(tmp_path / machine, tmp_path / "logs", dirs_exist_ok=True)
    write_report(tmp_path / "logs", tmp_path / "report")
    page = (tmp_path / "report/index.html").read_text()
    assert all(f"{config.folder}" in page or config.label in page for config in configs)
    merged = sorted(path.parent.name for path in (tmp_path / "logs").glob("demo/*/*/seed0"))
    assert merged == ["adam", "sgd"]
