"""Runs of a suite as one job array of Slurm, submitted with submitit."""

import getpass
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cao_lab.config import ConfigError, Execution, SlurmOptions
from cao_lab.suites.launch import Work, start_process, to_bytes

QUEUE_SECONDS = 10.0
# A run that needs more time than a job has is requeued as often as it takes.
MOST_TIMEOUTS = 10**6
SIGNAL_SECONDS = 90


class Slurm:
    """Submits all runs of a round as one job array; those that an earlier command left in the queue stay there."""

    room = sys.maxsize

    def __init__(self, options: SlurmOptions, jobs: int, folder: Path, cluster: str = "slurm") -> None:
        self.options, self.jobs, self.folder, self.cluster = options, jobs, folder, cluster
        self.submitit, self.threads = checked_submitit(options, cluster), options.cpus
        self._queue: tuple[float, set[str] | None] = (0.0, None)

    def start(self, works: Sequence[Work], execution: Execution) -> list["SlurmRun"]:
        """Submit what is not in the queue already, and return at once."""
        ids = {name: job for name, job in self._recorded().items() if self.is_queued(job)}
        new = [work for work in works if str(work.folder) not in ids]
        executor = self._executor()
        with executor.batch():
            submitted = [executor.submit(RunInJob(to_bytes(work, execution))) for work in new]
        jobs = {str(work.folder): job for work, job in zip(new, submitted, strict=True)}
        ids |= {name: job.job_id for name, job in jobs.items()}
        self._record(ids)
        named = [(work, str(work.folder)) for work in works]
        return [SlurmRun(work, jobs.get(name) or self._found(ids[name]), self) for work, name in named]

    def parameters(self) -> dict[str, Any]:
        """Return what is asked of Slurm, by submitit's names."""
        options = self.options
        asked = {
            "slurm_partition": options.partition,
            "timeout_min": options.minutes,
            "cpus_per_task": options.cpus,
            "gpus_per_node": options.gpus or None,
            "mem_gb": options.memory_gib,
            "slurm_array_parallelism": self.jobs,
            "slurm_signal_delay_s": SIGNAL_SECONDS,
            "slurm_additional_parameters": {"requeue": True},
            "name": "cao",
        }
        return {name: value for name, value in asked.items() if value is not None}

    def described(self, runs: int) -> str:
        """Return in one line what would be submitted for so many runs."""
        options = self.options
        flags = [f"--partition={options.partition}", f"--time={options.minutes}", f"--cpus-per-task={options.cpus}"]
        flags += [f"--gpus-per-node={options.gpus}"] if options.gpus else []
        flags += [f"--mem={options.memory_gib}GB"] if options.memory_gib else []
        flags += [f"--array=0-{runs - 1}%{min(runs, self.jobs)}"] if runs > 1 else []
        return " ".join(["sbatch", *flags, f"--signal=USR2@{SIGNAL_SECONDS}", "--requeue"])

    def is_queued(self, job: str) -> bool:
        """Whether Slurm has a job waiting or running; where it gives no answer, it is taken to."""
        if self.cluster != "slurm":
            return False
        asked_at, queue = self._queue
        if time.monotonic() - asked_at > QUEUE_SECONDS:
            queue = jobs_in_queue()
            self._queue = (time.monotonic(), queue)
        return queue is None or job in queue

    def _executor(self) -> Any:
        executor = self.submitit.AutoExecutor(self.folder, cluster=self.cluster, slurm_max_num_timeout=MOST_TIMEOUTS)
        executor.update_parameters(**self.parameters())
        return executor

    def _found(self, job: str) -> Any:
        return self.submitit.SlurmJob(self.folder, job)

    def _recorded(self) -> dict[str, str]:
        """Return the jobs that earlier commands submitted, by the folders of their runs."""
        path = self.folder / "jobs.json"
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def _record(self, ids: dict[str, str]) -> None:
        temporary = self.folder / "jobs.json.new"
        temporary.write_text(json.dumps(ids, indent=2) + "\n")
        temporary.replace(self.folder / "jobs.json")


class SlurmRun:
    """A run that Slurm carries out, or will."""

    def __init__(self, work: Work, job: Any, slurm: Slurm) -> None:
        self.work, self.job, self.slurm = work, job, slurm
        self.reason = "it is still running"
        self._started_at = time.monotonic()

    @property
    def has_ended(self) -> bool:
        """Whether it left a result, or has left the queue without one."""
        is_new = time.monotonic() - self._started_at < 2 * QUEUE_SECONDS
        if self.slurm.cluster != "slurm":
            has_ended = self.job.done()
        else:
            has_result = self.job.paths.result_pickle.exists()
            has_ended = has_result or not (is_new or self.slurm.is_queued(self.job.job_id))
        if has_ended:
            lines = (self.job.stderr() or "").strip().splitlines()
            self.reason = lines[-1] if lines else f"job {self.job.job_id} left no message"
        return bool(has_ended)

    def stop(self) -> None:
        """Cancel the job: Slurm sends SIGTERM, at which a run saves and stops."""
        self.job.cancel(check=False)

    def wait(self) -> None:
        """Wait until the job is over."""
        while not self.has_ended:
            time.sleep(QUEUE_SECONDS / 10)


class RunInJob:
    """A run as a job carries it out: in a process of its own, which saves when it is asked to stop."""

    def __init__(self, message: bytes) -> None:
        self.message = message
        self.process: subprocess.Popen[bytes] | None = None

    def __call__(self) -> int:
        """Run to the end and return the exit code."""
        self.process = start_process(self.message, stderr=None)
        try:
            while self.process.poll() is None:
                time.sleep(0.2)
        finally:
            self.process.terminate()
        if self.process.returncode in (128 + signal.SIGTERM, 128 + signal.SIGUSR2):
            wait_for_slurm()
        return self.process.returncode

    def checkpoint(self) -> Any:
        """Let the run save and stop, and return what the job does when it is requeued."""
        from submitit.helpers import DelayedSubmission  # noqa: PLC0415  # an extra: imported when asked for

        if self.process is not None:
            self.process.terminate()
            # Not Popen.wait: a signal handler would wait for a lock that its own thread may hold.
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        return DelayedSubmission(RunInJob(self.message))


def wait_for_slurm(seconds: float = 600.0) -> None:
    """Stay until Slurm, which sent SIGTERM, ends the job: one that ends before it is preempted is not requeued."""
    if "SLURM_JOB_ID" in os.environ:
        time.sleep(seconds)


def jobs_in_queue() -> set[str] | None:
    """Return the user's jobs that wait or run, one by one; None if Slurm does not answer."""
    command = ["squeue", "--noheader", "--array", "--format=%i", f"--user={getpass.getuser()}"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    return set(found.stdout.split())


def checked_submitit(options: SlurmOptions, cluster: str) -> Any:
    """Return submitit, or say what is missing."""
    try:
        import submitit  # noqa: PLC0415  # an extra: imported when asked for
    except ImportError as error:
        raise ConfigError("--launcher slurm needs the extra `slurm`: pip install 'cao-optimizer[slurm]'") from error
    if options.partition is None:
        raise ConfigError("--launcher slurm needs --partition NAME, got none; `sinfo` lists the partitions")
    if cluster == "slurm" and not (shutil.which("sbatch") and shutil.which("srun")):
        raise ConfigError("--launcher slurm: no sbatch is found here; give the command on a machine of the cluster")
    return submitit
