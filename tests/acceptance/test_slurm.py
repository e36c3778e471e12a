"""The script and launch_multinode.sh in real jobs of SLURM on two nodes."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.datasets import data_args
from support.launchers import FAST, MULTINODE
from support.processes import (
    ROOT,
    Run,
    assert_none_left,
    demo_command,
    kill_leftover,
    new_test_id,
    wait_until,
)
from support.slurm import SlurmCluster

pytestmark = [pytest.mark.slow, pytest.mark.root]
ONE_TASK = ["--nodes=2", "--ntasks-per-node=1"]


@pytest.fixture
def cluster(slurm) -> Iterator[SlurmCluster]:
    """No job is left in it afterwards. As Debian has it, each node's own name is loopback there;
    it sees the real address of the other one.
    """
    for node, name in enumerate(slurm.pair.hostnames):
        hosts = slurm.pair.hosts(node)
        hosts.write_text(re.sub(rf"\S+ {name}", f"127.0.1.1 {name}", hosts.read_text()))
    yield slurm
    slurm.cancel_all()


def assert_trained(run: Run, steps: int, hosts: list[str]) -> None:
    """All ranks took each step once, in one job, on these nodes, and agree at the end."""
    for rank in range(len(hosts)):
        assert [step for _, step, _ in run.steps(rank)] == list(range(1, steps + 1)), run.tail()
    facts, summary = run.json_line("Run"), run.json_line("Summary")
    assert (facts["hosts"], facts["nodes"]) == (hosts, len({*hosts}))
    assert summary["steps"] == steps and summary["replicas_identical"] is True


def ended(cluster: SlurmCluster, job: int) -> bool:
    return cluster.job(job)["JobState"] not in ("PENDING", "RUNNING", "COMPLETING")


def printed(folder: Path) -> Run:
    """What a batch job has printed so far."""
    out = folder / "slurm.out"
    return Run(["sbatch"], 0, out.read_text() if out.exists() else "", 0)


def test_srun_of_the_launcher_takes_its_settings_from_the_job(cluster, sample, tmp_path):
    """With the options that running.md shows for it."""
    page = (ROOT / "docs/running.md").read_text()
    for count in (1, 2):
        assert f"RUN_NAME=nodes{count} srun --nodes={count} --ntasks-per-node=1 " in page
    command = [MULTINODE, *data_args(sample), *FAST, "--max_steps", 8]
    env = {"GPUS_PER_NODE": "1", "PROBE": "0"}
    run = cluster.run("srun", *ONE_TASK, *command, timeout=180, clean=10, env=env, cwd=tmp_path)
    assert_trained(run, 8, ["node0", "node1"])
    (folder,) = (tmp_path / "logs").iterdir()
    assert re.match(r"job\d+", folder.name)  # without a name the job's, the same on both nodes
    for node in (0, 1):
        assert f"[CPU {node}] Epoch 1 | Step 3 " in (folder / f"node{node}.log").read_text()


# As docs/running.md has it.
FIRST_NODE = 'MASTER_ADDR=$(scontrol show hostnames | head -n 1) exec "$@"'


def test_srun_of_the_script_with_uneven_tasks(cluster, sample, tmp_path):
    """Local ranks, and a master that is not among the local tasks of node 1."""
    script = demo_command([*data_args(sample), *FAST, "--max_steps", 2], launcher="python")
    env = {"GLOO_SOCKET_IFNAME": cluster.pair.interface}  # alone, Gloo would take 127.0.1.1
    tasks = ["--nodes=2", "--ntasks=3", "bash", "-c", FIRST_NODE, "bash"]
    run = cluster.run("srun", *tasks, *script, timeout=180, clean=10, env=env, cwd=tmp_path)
    assert_trained(run, 2, ["node0", "node0", "node1"])


def test_the_lessons_block_compares_srun_with_torchrun(cluster, tmp_path):
    page = (ROOT / "docs/lesson/parallel.md").read_text()
    (block,) = re.findall(r"```bash\n(export OMP_NUM_THREADS=1.*?)```", page, re.DOTALL)
    for size, smaller in (("--max_steps 12", "--max_steps 5"), ("_size 128", "_size 40")):
        assert size in block
        block = block.replace(size, smaller)
    for name in ("demo_coco_resnet18.py", "tools"):
        (tmp_path / name).symlink_to(ROOT / name)
    env = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    run = cluster.run("bash", "-ec", block, timeout=240, env=env, cwd=tmp_path)
    for name in ("srun", "torchrun"):
        assert re.search(rf"^{name}: a step of ", run.out, re.MULTILINE), run.tail()


def test_a_launcher_in_a_batch_script_without_srun_is_refused(cluster, tmp_path):
    wrapped = f"bash {shlex.quote(str(MULTINODE))} --lr 1"
    words = [*ONE_TASK, f"--output={tmp_path}/slurm.out", "--wrap", wrapped]
    job = cluster.submit(*words, cwd=tmp_path)
    wait_until(lambda: ended(cluster, job), 60, "the end of the job")
    (line,) = printed(tmp_path).lines()
    assert cluster.job(job)["JobState"] == "FAILED" and "error: " in line and "srun" in line


def test_bare_torchrun_in_a_batch_job_trains_on_both_nodes(cluster, sample, tmp_path):
    """Each node's torchrun finds the other one by the job's own variables. A process has the cores
    of its task, as far as they exist, and not the one thread of the submitting shell.
    """
    # Gloo would take each node's own name, which is loopback here.
    env = {"GLOO_SOCKET_IFNAME": cluster.pair.interface}
    env["SBATCH_OUTPUT"] = f"{tmp_path}/slurm.out"
    words = [*data_args(sample), *FAST, "--max_steps", 3]
    job = cluster.submit(ROOT / "tools/slurm/torchrun.sbatch", *words, cwd=ROOT, env=env)
    wait_until(lambda: ended(cluster, job), 240, "the end of the job")
    run = printed(tmp_path)
    assert cluster.job(job)["ExitCode"] == "0:0", run.tail()
    facts = run.json_line("Run")
    assert sorted(facts["hosts"]) == ["node0", "node1"]
    assert facts["threads"] == min(4, len(os.sched_getaffinity(0)))
    assert_trained(run, 3, facts["hosts"])


def test_requeued_batch_job_resumes_and_loses_no_step(cluster, sample, tmp_path):
    """SLURM warns tools/slurm/coco.sbatch of its time limit with SIGUSR1."""
    script, test_id = tmp_path / "job.sh", new_test_id()
    text = (ROOT / "tools/slurm/coco.sbatch").read_text()
    script.write_text(text.replace("./launch_multinode.sh", shlex.quote(str(MULTINODE))))
    env = {"SBATCH_OUTPUT": f"{tmp_path}/slurm.out", "GPUS_PER_NODE": "1", "PROBE": "0"}
    # With a loader worker, as SLURM sends its signals to every process of a job step.
    words = [*data_args(sample), *FAST, "--workers", 1, "--num_epochs", 20, "--max_steps", 40]
    env["RUN_NAME"] = tmp_path.name
    job = cluster.submit(script, *words, cwd=tmp_path, test_id=test_id, env=env)
    try:
        wait_until(lambda: printed(tmp_path).steps()[2:] or ended(cluster, job), 240, "step 3")
        assert not ended(cluster, job), printed(tmp_path).tail()
        cluster.run("scancel", "--batch", "--signal=USR1", job, timeout=120)
        wait_until(lambda: ended(cluster, job), 300, "the end of the job")
        assert_none_left(test_id)
    finally:
        kill_leftover(test_id)
    run, facts = printed(tmp_path), cluster.job(job)
    assert (facts["Restarts"], facts["ExitCode"]) == ("1", "0:0"), run.tail()
    assert_trained(run, 40, ["node0", "node1"])  # each step once: none lost, none repeated
    stops = re.findall(r"^\[CPU (\d)\] Stopped on \w+ \| step (\d+)", run.out, re.MULTILINE)
    ends = re.findall(r"^run\.py: stopped by SIGUSR1(.*)", run.out, re.MULTILINE)
    assert sorted(ends) == [", saved by node 0", f": --resume goes on from job{job}.pt"]
    step = run.json_line("Run")["start_step"]
    assert sorted(stops) == [("0", str(step)), ("1", str(step))] and 3 <= step < 40
