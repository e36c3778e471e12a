"""The script and its launcher under real schedulers: SLURM on two nodes, and Open MPI's mpirun."""

from __future__ import annotations

import re
import shlex
import shutil
import socket

import pytest

from support.datasets import data_args
from support.processes import (
    LONG,
    ROOT,
    WITH_STAND_IN,
    Run,
    assert_none_left,
    demo_command,
    free_port,
    kill_leftover,
    new_test_id,
    require,
    run_demo,
    wait_until,
)

pytestmark = LONG
LAUNCHER = ROOT / "launch_multinode.sh"
FAST = shlex.split("--weights none --image_size 40 --batch_size 4 --num_epochs 20 --log_every 1")

# Two things may stop it early: its time limit, of which SLURM warns this script (B:) by SIGUSR1,
# and preemption, of which it warns the tasks of srun by SIGTERM.
PAGE = (ROOT / "docs" / "slurm.md").read_text()
BATCH_SCRIPT = re.search(r"^```bash\n(#!.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[1]


def check(run: Run, steps: int, hosts: list[str]) -> None:
    """All ranks trained all steps, in one job, on the nodes expected, and agree at the end."""
    for rank in range(len(hosts)):
        assert [step for _, step, _ in run.steps(rank)] == list(range(1, steps + 1)), run.tail()
    facts, summary = run.json_line("Run"), run.json_line("Summary")
    assert facts["hosts"] == hosts and facts["nodes"] == len({*hosts})
    assert summary["steps"] == steps and summary["replicas_identical"] is True
    assert run.lines(0)[-1].startswith("Cleanup complete. Total wall time: ")


@pytest.fixture
def idle_slurm(slurm):
    """The cluster, and no job left in it afterwards. As Debian has it, each node's own name is
    loopback there; it sees the other one's real address.
    """
    for node, name in enumerate(slurm.pair.hostnames):
        hosts = slurm.pair.hosts(node)
        hosts.write_text(re.sub(rf"\S+ {name}", f"127.0.1.1 {name}", hosts.read_text()))
    yield slurm
    slurm.cancel_all()


def test_srun_places_two_tasks_on_each_node(idle_slurm, sample):
    """Local ranks, and a master that is not among the local tasks of node 1."""
    argv = [*data_args(sample), *FAST, "--max_steps", 2, "--workers", 0]
    places = ["-N", 2, "-n", 4, "--ntasks-per-node=2"]
    command = ["srun", *places, *demo_command(argv, launcher="python")]
    run = idle_slurm.run(*command, timeout=120, clean=5)
    check(run, 2, ["node0", "node0", "node1", "node1"])
    facts = run.json_line("Run")
    assert facts["launcher"] == "srun"
    # Gloo alone would take 127.0.1.1, and connect from there only to nodes of lower addresses.
    assert facts["env"]["GLOO_SOCKET_IFNAME"] == idle_slurm.pair.interface


def warn_of_time_limit(slurm, job_id: int) -> None:
    """What --signal=B:USR1@120 does, at a moment of our choosing."""
    slurm.run("scancel", "--batch", "--signal=USR1", job_id)


def preempt(slurm, job_id: int) -> None:
    """A job of higher priority wants both nodes; SLURM gives the running one its time of grace."""
    slurm.run("srun", "--partition=urgent", "-N", 2, "true", timeout=60)


# So many steps, of some 0.1 s, that it is stopped in the middle: SLURM takes seconds to preempt.
@pytest.mark.parametrize(
    ("interrupt", "steps", "torchrun"),
    [(warn_of_time_limit, 30, WITH_STAND_IN), (preempt, 60, {})],
    ids=["time limit", "preempted"],
)
def test_batch_job_is_requeued_and_finishes(
    idle_slurm, sample, tmp_path, interrupt, steps, torchrun
):
    """Master, port, node count and node rank all come from SLURM. One of the two has the stand-in
    of torchrun.
    """
    script = tmp_path / "job.sh"
    script.write_text(BATCH_SCRIPT.replace("./launch_multinode.sh", str(LAUNCHER)))
    out = tmp_path / "slurm.out"
    test_id = new_test_id()

    def log() -> Run:
        return Run(["sbatch", str(script)], 0, out.read_text() if out.exists() else "", 0)

    env = {"SBATCH_OUTPUT": str(out), "GPUS_PER_NODE": "1", "RUN_NAME": f"test-{tmp_path.name}"}
    env |= torchrun
    # With a loader worker, since SLURM sends its signals to every process of a job step.
    argv = [*data_args(sample), *FAST, "--workers", 1, "--max_steps", steps]
    job_id = idle_slurm.submit(script, *argv, cwd=tmp_path, test_id=test_id, env=env)

    def wait_for(condition, timeout: float, what: str) -> None:
        def reached() -> bool:
            state, there = idle_slurm.job(job_id)["JobState"], condition()
            going_on = state in ("PENDING", "RUNNING", "COMPLETING")
            assert there or going_on, f"{state} without {what}\n{log().tail()}"
            return there

        wait_until(reached, timeout, what)

    try:
        wait_for(lambda: len(log().steps()) >= 3, 120, "step 3 of the first start")
        interrupt(idle_slurm, job_id)
        wait_for(lambda: idle_slurm.job(job_id)["JobState"] == "COMPLETED", 240, "success")
        assert_none_left(test_id)
    finally:
        kill_leftover(test_id)
    run, job = log(), idle_slurm.job(job_id)
    assert (job["Restarts"], job["ExitCode"]) == ("1", "0:0"), run.tail()
    assert (tmp_path / "run.pt").is_file()
    check(run, steps, ["node0", "node1"])  # each step once: none lost, none repeated
    stops = re.findall(r"^\[CPU (\d)\] Stopped on \w+ \| step (\d+)", run.out, re.MULTILINE)
    step = run.json_line("Run")["start_step"]
    assert sorted(stops) == [("0", str(step)), ("1", str(step))] and 3 <= step < steps


def test_mpirun_starts_the_script(sample):
    require(shutil.which("mpirun"), "the command mpirun is missing (Debian package openmpi-bin)")
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    argv = [*data_args(sample), *FAST, "--max_steps", 3, "--workers", 0]
    run = run_demo(argv, nproc=2, launcher="mpirun", env=env)
    check(run, 3, [socket.gethostname()] * 2)
    assert run.json_line("Run")["launcher"] == "mpirun"
