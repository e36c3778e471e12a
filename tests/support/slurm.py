"""A real SLURM cluster of two nodes: slurmctld and two slurmd in network namespaces."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from support.nodes import NamespacePair
from support.processes import MARK, Run, Started, base_env, require

_SBIN = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"

# linuxproc and task/none: no cgroup is needed. config_overrides: the CPUs stated here count, not
# those of the machine, so two nodes fit a small one. Everybody is who they say they are.
# cred_expire is also how long a requeued job waits before it starts again (default 120 s); the
# scheduler's own intervals are cut down to match.
_SLURM_CONF = """
ClusterName=demo
SlurmctldHost=node0(10.77.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
MailProg=/bin/true
ReturnToService=2
KillWait=5
SelectType=select/linear
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1,batch_sched_delay=0
NodeName=node0 NodeAddr=10.77.0.1 CPUs=4 State=UNKNOWN
NodeName=node1 NodeAddr=10.77.0.2 CPUs=4 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=10
"""


class SlurmCluster:
    """A SLURM cluster of two nodes, `node0` (with the controller) and `node1`, in a
    `NamespacePair`.

    The folder `self.folder` is the shared file system of both, as is every other path of the
    machine.
    """

    def __init__(self) -> None:
        self.pair = NamespacePair()
        self._daemons: list[tuple[str, subprocess.Popen]] = []

    def __enter__(self) -> SlurmCluster:
        tools = ("slurmctld", "slurmd", "srun")
        missing = [tool for tool in tools if not shutil.which(tool, path=_SBIN)]
        require(not missing, f"SLURM needs {missing} (Debian package slurm-wlm)")
        self.pair.__enter__()
        try:
            # /tmp: the path of a socket may have 107 characters at most.
            self.folder = Path(tempfile.mkdtemp(prefix="demo-slurm-", dir="/tmp"))
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        (self.folder / "state").mkdir()
        conf = _SLURM_CONF.format(folder=self.folder).lstrip()
        (self.folder / "slurm.conf").write_text(conf)
        self._daemon("slurmctld", 0, "slurmctld", "-D", "-c")
        for node, name in enumerate(self.pair.hostnames):
            self._daemon(f"slurmd.{name}", node, "slurmd", "-D", "-N", name)
        self._wait(self._idle, "two idle nodes")

    def _idle(self) -> bool:
        states = self.run("sinfo", "-h", "-N", "-p", "main", "-o", "%T", expect=None)
        return states.out.split() == ["idle", "idle"]

    def _env(self) -> dict[str, str]:
        return {
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PATH": f"{Path(sys.executable).parent}:{_SBIN}",
        }

    def _daemon(self, name: str, node: int, *command: str) -> None:
        # Daemons carry no mark: a test's own processes are those that it starts through them.
        env = base_env("", self._env())
        del env[MARK]
        with (self.folder / f"{name}.out").open("wb") as out:
            daemon = subprocess.Popen(
                self.pair.enter(node, command),
                env=env,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._daemons.append((name, daemon))

    def _wait(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            ended = [name for name, daemon in self._daemons if daemon.poll() is not None]
            if ended or time.monotonic() > deadline:
                why = f"{', '.join(ended)} ended" if ended else "waited 30 s"
                raise RuntimeError(f"SLURM cluster: {why}, without {what}\n{self.logs()}")
            time.sleep(0.1)

    def logs(self) -> str:
        """The end of each daemon's log, to be shown when something fails."""
        text = []
        for file in sorted([*self.folder.glob("*.log"), *self.folder.glob("*.out")]):
            text += [f"--- {file.name}", *file.read_text(errors="replace").splitlines()[-15:]]
        return "\n".join(text)

    def start(
        self, *command: object, env: Mapping[str, str] | None = None, **options: Any
    ) -> Started:
        """Start a command on node0, such as `srun`, with the options of `Started`."""
        return self.pair.popen(0, command, env={**self._env(), **(env or {})}, **options)

    def run(
        self,
        *command: object,
        timeout: float = 60,
        expect: int | None = 0,
        clean: float | None = None,
        **options: Any,
    ) -> Run:
        """Run srun, sbatch, squeue, scontrol, ... on node0 to its end. `timeout`, `expect` and
        `clean` as in `Started.finish`, the rest as in `Started`.
        """
        return self.start(*command, **options).finish(timeout, expect, clean)

    def submit(self, *words: object, **options: Any) -> int:
        """sbatch with these words and the options of `Started`; returns the job's id."""
        run = self.run("sbatch", "--parsable", *words, **options)
        return int(run.out.split()[-1])

    def job(self, job_id: int) -> dict[str, str]:
        """What `scontrol show job` says of a job, such as JobState, Restarts, ExitCode."""
        out = self.run("scontrol", "--oneliner", "show", "job", job_id).out
        return dict(field.split("=", 1) for field in out.split() if "=" in field)

    def cancel_all(self) -> None:
        """End all jobs, so that the next test finds both nodes idle."""
        self.run("scancel", "--user=root", "--state=PENDING", expect=None)
        self.run("scancel", "--user=root", expect=None)
        self._wait(self._idle, "two idle nodes after all jobs were cancelled")

    def __exit__(self, *_: object) -> None:
        try:
            for _, daemon in reversed(self._daemons):
                daemon.terminate()
            deadline = time.monotonic() + 5
            for _, daemon in self._daemons:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    daemon.wait(max(0, deadline - time.monotonic()))
        finally:
            self.pair.__exit__()  # kills what is left, jobs included
            for _, daemon in self._daemons:
                daemon.wait(10)
            shutil.rmtree(getattr(self, "folder", "/nonexistent"), ignore_errors=True)
