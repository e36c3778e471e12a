"""The script and its launcher under real schedulers: SLURM on two nodes, and Open MPI's mpirun."""

from __future__ import annotations

import re
import shlex
import shutil
import time

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
)

pytestmark = LONG
SHORT = shlex.split(
    "--weights none --image_size 64 --batch_size 8 --max_steps 3 --workers 0 --log_every 1"
)
# With a loader worker, since SLURM sends its signals to every process of a job step, workers and
# launchers included.
LONG_RUN = shlex.split(
    "--weights none --image_size 40 --batch_size 4 --num_epochs 20 --workers 1 --log_every 1"
)
LAUNCHER = ROOT / "launch_multinode.sh"

# The batch script that README shows. Two things may stop the job early: its time limit, of which
# SLURM warns this script (B:) by SIGUSR1, and preemption, of which it warns the tasks of srun by
# SIGTERM.
BATCH_SCRIPT = """\
#!/usr/bin/env bash
#SBATCH --job-name=coco
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --time=00:10:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@120
set -uo pipefail
warned=
trap 'warned=yes' USR1
cores=$SLURM_CPUS_PER_TASK  # which srun does not take over by itself
srun --cpus-per-task="$cores" ./launch_multinode.sh "$@" --checkpoint run.pt --resume &
step=$!
wait "$step"; code=$?
if [[ $warned ]]; then
    # The wait ended early; srun passes the signal on to the launchers, which let the ranks save
    # and stop.
    kill -USR1 "$step"
    wait "$step"; code=$?
fi
# 75: stopped by a signal, with the checkpoint saved. The job's next start goes on from there.
if [[ $code -eq 75 ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def check_two_ranks(run: Run, steps: int, nodes: list[str] | None = None) -> None:
    """Both ranks trained all steps, in one job, on the nodes expected, and agree at the end."""
    for rank in (0, 1):
        logged = run.steps(rank)
        assert logged, f"no step of rank {rank} in:\n{run.tail()}"
        assert logged[-1][1] == steps, run.tail()
    facts = run.json_line("Run")
    assert facts["world_size"] == 2
    if nodes:
        assert facts["hosts"] == nodes and facts["nodes"] == len(set(nodes))
    summary = run.json_line("Summary")
    assert summary["steps"] == steps
    assert summary["replicas_identical"] is True
    assert run.lines(0)[-1].startswith("Cleanup complete. Total wall time: ")


@pytest.fixture
def idle_slurm(slurm):
    """The cluster, and no job left in it afterwards."""
    yield slurm
    slurm.cancel_all()


def test_srun_places_two_tasks_on_each_node(idle_slurm, sample):
    """Local ranks, and a master that is not among the local tasks of node 1. One task on each:
    test_srun_trains_where_the_own_name_is_loopback.
    """
    args = [
        "--weights",
        "none",
        "--image_size",
        40,
        "--batch_size",
        2,
        "--max_steps",
        2,
        "--workers",
        0,
    ]
    command = demo_command([*data_args(sample), *args], launcher="python")
    run = idle_slurm.run(
        "srun", "-N", 2, "-n", 4, "--ntasks-per-node=2", *command, timeout=120, clean=5
    )
    facts = run.json_line("Run")
    assert (facts["world_size"], facts["nodes"]) == (4, 2)
    assert facts["hosts"] == ["node0", "node0", "node1", "node1"]
    assert all(run.steps(rank) for rank in range(4)), run.tail()
    assert run.json_line("Summary")["replicas_identical"] is True


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
        return Run(["sbatch", str(script)], 0, out.read_text() if out.exists() else "", 0, test_id)

    env = {"SBATCH_OUTPUT": str(out), "GPUS_PER_NODE": "1", "RUN_NAME": f"test-{tmp_path.name}"}
    env |= torchrun
    job_id = idle_slurm.submit(
        script,
        *data_args(sample),
        *LONG_RUN,
        "--max_steps",
        steps,
        cwd=tmp_path,
        test_id=test_id,
        env=env,
    )

    def wait_for(condition, timeout: float, what: str) -> None:
        deadline = time.monotonic() + timeout
        while True:
            state = idle_slurm.job(job_id)["JobState"]
            if condition():
                return
            ended = state not in ("PENDING", "RUNNING", "COMPLETING")
            if ended or time.monotonic() > deadline:
                pytest.fail(f"{state} after {timeout:g} s at most, without {what}\n{log().tail()}")
            time.sleep(0.2)

    try:
        wait_for(lambda: len(log().steps()) >= 3, 120, "step 3 of the first start")
        interrupt(idle_slurm, job_id)
        wait_for(lambda: idle_slurm.job(job_id)["Restarts"] == "1", 90, "its return to the queue")
        wait_for(lambda: idle_slurm.job(job_id)["JobState"] == "COMPLETED", 150, "success")
        assert_none_left(test_id)
    finally:
        kill_leftover(test_id)
    run, job = log(), idle_slurm.job(job_id)
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), run.tail()
    assert (tmp_path / "run.pt").is_file()
    check_two_ranks(run, steps, ["node0", "node1"])
    for rank in (0, 1):
        stopped = [line for line in run.lines(rank) if line.startswith("Stopped on ")]
        assert len(stopped) == 1, run.tail()
        step = int(re.search(r"\| step (\d+)", stopped[0])[1])
        assert 3 <= step < steps
        # Each step once: none lost, none repeated, since all ranks stopped at the step that was
        # saved.
        assert [logged[1] for logged in run.steps(rank)] == list(range(1, steps + 1))
    assert run.json_line("Run")["start_step"] == step


def test_mpirun_starts_the_script(sample):
    require(
        shutil.which("mpirun"), "this test needs the command mpirun (Debian package openmpi-bin)"
    )
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    run = run_demo([*data_args(sample), *SHORT], nproc=2, launcher="mpirun", env=env, timeout=120)
    check_two_ranks(run, 3)


def test_mpirun_without_a_master_says_so(sample):
    require(
        shutil.which("mpirun"), "this test needs the command mpirun (Debian package openmpi-bin)"
    )
    run = run_demo([*data_args(sample), *SHORT], launcher="mpirun", expect=None, timeout=30)
    assert run.returncode != 0
    assert "MASTER_ADDR" in run.out and "Traceback" not in run.out, run.tail()
