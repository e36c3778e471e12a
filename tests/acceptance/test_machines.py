"""The first hour on machines that differ from this one: names, drivers, launchers, users."""

from __future__ import annotations

import os
import pwd
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import warnings
import zlib

import pytest
import torch

from support.datasets import make_set
from support.forks import run_forked
from support.launchers import (
    COMMAND,
    FAST,
    SINGLE,
    place,
)
from support.nodes import nameless, python_for, real_quota
from support.processes import ROOT, SCRIPT, Run, demo_command, require, run_demo, start

# As inside a job step of SLURM, in which MPICH's mpiexec starts processes of its own.
STEP = {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
STEP |= {"SLURM_STEP_NUM_TASKS": "1", "SLURM_GTIDS": "0"}
STEP |= {"SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options of three steps of two processes, or of six of one."""
    return [*make_set(tmp_path_factory.mktemp("set"), 24), *FAST, "--num_epochs", "1"]


def assert_trained(run: Run, ranks: int, steps: int) -> dict:
    """By so many processes; returns the Run record."""
    record = run.json_line("Run")
    assert record["world_size"] == ranks
    for rank in range(ranks):
        assert [step for _, step, _ in run.steps(rank)] == [*range(1, steps + 1)], run.tail()
    return record


# --- A host name that does not resolve ---------------------------------------------------------


@pytest.mark.slow
def test_a_launcher_trains_where_the_host_name_does_not_resolve(training, tmp_path):
    """Without it torchrun waits for its own store under that name, before it starts a rank."""
    env = {"GPUS": "2", "PYTHON": sys.executable}
    run = nameless(tmp_path, "bash", SINGLE, *training, **env)
    assert_trained(run, 2, steps=3)
    assert " --standalone --local-addr=127.0.0.1 " in COMMAND.search(run.out)[1]


@pytest.mark.slow
def test_a_task_of_srun_trains_where_the_host_name_does_not_resolve(training, tmp_path):
    """Rank 0's address is the node's name there."""
    step = STEP | {"SLURM_STEP_NODELIST": "nowhere"}
    run = nameless(tmp_path, sys.executable, SCRIPT, *training, **step)
    assert_trained(run, 1, steps=6)


# --- GPUs that PyTorch cannot use --------------------------------------------------------------


def test_gpus_that_pytorch_cannot_use_are_an_error(demo, monkeypatch):
    """Then PyTorch's warning is of no use to anyone."""

    reason = "CUDA initialization: The NVIDIA driver on your system is too old"

    def is_available() -> bool:
        warnings.warn(f"{reason} (Triggered internally at CUDAFunctions.cpp:109.)", stacklevel=2)
        return False

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    line = f"cannot use this node's 8 GPUs: {reason} | "
    with pytest.raises(demo.UserError, match=re.escape(line) + "see nvidia-smi.*--device cpu"):
        demo.usable_gpus(demo.parse_arguments(["--dummy"]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert demo.usable_gpus(demo.parse_arguments(["--dummy", "--device", "cpu"])) == 0


@pytest.mark.slow
def test_a_real_pytorch_with_an_old_driver_says_so_and_trains_on_the_cpu_if_asked(
    training, tmp_path
):
    """PyTorch sees two GPUs of an old driver: stub libraries, from beside the checkout."""
    sources = ROOT.parent / "shared" / "fake_driver"
    if not sources.is_dir() or not shutil.which("gcc"):  # with --ci as well: no clone has to
        pytest.skip(f"the stubs of a driver cannot be built: {sources}, gcc")
    if not torch.version.cuda:
        pytest.skip("this build of PyTorch has no CUDA")
    for source, library in (("cuda.c", "libcuda.so.1"), ("nvml.c", "libnvidia-ml.so.1")):
        command = ["gcc", "-shared", "-fPIC", "-o", tmp_path / library, sources / source]
        subprocess.run(command, check=True)
    env = {"LD_LIBRARY_PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": None}
    runs = [(2, training), (0, [*training, "--device", "cpu"])]
    runs.append((0, training, {"CUDA_VISIBLE_DEVICES": ""}))
    refused, *trained = run_forked(runs, env=env, expect=None)
    assert refused.returncode == 2 and not refused.steps(0)
    for rank in (0, 1):
        (line,) = [line for line in refused.lines(rank) if line.startswith("ERROR: ")]
        assert re.search("GPUs: CUDA initialization: .*driver.* or give --device cpu$", line)
    for run in trained:
        assert run.returncode == 0 and "UserWarning" not in run.out, run.tail()
        assert_trained(run, 1, steps=6)


# --- Packages and folders that do not work -----------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torchvision", "pycocotools"])
def test_a_package_that_cannot_be_loaded_is_one_line_that_names_it(tmp_path, name):
    broken = "raise RuntimeError('operator torchvision::nms does not exist')\n"
    (tmp_path / f"{name}.py").write_text(broken)
    command = demo_command(["--dummy", "--max_steps", 1], launcher="python")
    with start(command, env={"PYTHONPATH": str(tmp_path)}) as started:
        run = started.finish(120, expect=None)
    assert run.returncode != 0 and "Traceback" not in run.output
    assert run.output.count("\n") == 1 and name in run.output


@pytest.mark.slow
def test_loader_workers_start_where_the_temporary_folder_has_a_long_name(training, tmp_path):
    """They make sockets there, whose names the system limits to some 100 characters."""
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    words = [*training, "--workers", 1, "--max_steps", 1, "--timeout", 15]
    run_demo(words, launcher="python", env={"TMPDIR": str(folder)})


# --- A container's CPU quota -------------------------------------------------------------------


@pytest.mark.slow
def test_training_in_a_real_quota_of_one_core_has_one_thread_and_says_so(training):
    with real_quota(100000, 100000) as command:
        words = [*command, sys.executable, SCRIPT, *training, "--max_steps", "1"]
        with start(words, env={"OMP_NUM_THREADS": None}) as started:
            facts = started.finish().json_line("Run")
    assert (facts["cores"], facts["threads"]) == (1, 1)


# --- Other launchers of processes --------------------------------------------------------------

OPEN_MPI = shlex.split("mpirun.openmpi --oversubscribe --bind-to none -n 2")
OPEN_MPI += ["--allow-run-as-root"] if os.geteuid() == 0 else []


@pytest.mark.slow
def test_open_mpi_starts_one_run_of_two_processes(training):
    """Nobody has to tell them rank 0's address, as all are on one node."""
    require(shutil.which(OPEN_MPI[0]), "openmpi-bin is not installed")
    with start([*OPEN_MPI, sys.executable, SCRIPT, *training]) as started:
        assert_trained(started.finish(), 2, steps=3)


# As each launcher sets them for rank 5 of 8, the second of two processes on its node.
PLACE = ("5", "8", "1", "2")
IN_STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1"}
IN_STEP |= {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1"}
IN_STEP |= {"SLURM_GTIDS": "4,5"}
NAMES = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
BY_OPEN_MPI = {f"OMPI_COMM_WORLD_{name}": n for name, n in zip(NAMES, PLACE, strict=True)}
BY_OPEN_MPI["PMIX_NAMESPACE"] = "prterun-a@1"
BY_PMI = {"PMI_RANK": "5", "PMI_SIZE": "8"}
IN_BATCH_SCRIPT = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}
STEP_PORT, MPI_PORT = str(20000 + zlib.crc32(b"7.1") % 12000), str(20000 + 4004349739 % 12000)
BY_MPI = ("mpirun", None, *PLACE)
STARTED = [  # its variables, its launcher, rank 0's address and numbers, the port
    (IN_STEP, ("srun", None, *PLACE), STEP_PORT),
    (IN_STEP | BY_PMI, ("srun", None, *PLACE), STEP_PORT),  # srun --mpi=pmi2
    (IN_STEP | BY_OPEN_MPI, BY_MPI, MPI_PORT),
    (IN_STEP | {"MASTER_PORT": "4000"}, ("srun", None, *PLACE), "4000"),
    (IN_BATCH_SCRIPT, ("python", "127.0.0.1", *"0101"), "0"),
]


@pytest.mark.parametrize(("variables", "expected", "port"), STARTED)
def test_a_process_learns_its_place_from_what_started_it(variables, expected, port):
    """Inside a job step of SLURM mpirun's variables win. Each job has a port of its own."""
    env = dict(variables)
    assert place(env) == expected and env.get("MASTER_PORT") == port


BY_HAND = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
BY_HAND["MASTER_ADDR"] = "127.0.0.1"
ONE_A_NODE = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1"}


@pytest.mark.parametrize("local_rank", [{}, {"LOCAL_RANK": "0"}])
def test_ranks_without_a_local_number_are_one_a_node(local_rank):
    """As Azure and others start them."""
    _, address, *numbers = place(ONE_A_NODE | local_rank)
    assert (address, *numbers) == ("10.0.0.1", "1", "2", "0", "1")


# Variables of a process that cannot learn its rank, and what it says.
UNCLEAR = [
    ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "by another launcher"),
    (IN_STEP | {"PMI_SIZE": "16"}, "use torchrun, srun or Open MPI, or set RANK"),
    (STEP | {"SLURM_LOCALID": "x"}, "started by srun.* whole numbers"),
    (ONE_A_NODE | {"LOCAL_RANK": "1"}, "LOCAL_WORLD_SIZE"),
    (BY_HAND | {"RANK": "2"}, "RANK is 2 of WORLD_SIZE 2"),
    (BY_HAND | {"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
    (BY_HAND | {"MASTER_PORT": "70000"}, "MASTER_PORT is '70000'"),
]


@pytest.mark.parametrize(("variables", "words"), UNCLEAR)
def test_a_process_that_cannot_learn_its_place_says_why(demo, monkeypatch, variables, words):
    """For the one line that a UserError becomes see test_refusals.py."""
    monkeypatch.setattr(os, "environ", dict(variables))
    with pytest.raises(demo.UserError, match=words):
        demo.read_environment(demo.ProcessInfo())


# --- Another user -------------------------------------------------------------------------------


@pytest.mark.slow
def test_another_user_without_a_home_trains():
    user = pwd.getpwnam("nobody")
    require(os.geteuid() == 0, "to become another user needs root")
    env = {**python_for(user), "HOME": "/nonexistent"}
    as_user = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
    readable = subprocess.run([*as_user, "test", "-r", SCRIPT]).returncode == 0
    require(readable, f"{user.pw_name} cannot read this checkout")
    words = ["--dummy", "--image_size", 40, "--batch_size", 4, "--max_steps", 2]
    with tempfile.TemporaryDirectory() as name:  # pytest's own are for root
        os.chown(name, user.pw_uid, user.pw_gid)
        _, *words = demo_command([*words, "--checkpoint", f"{name}/run.pt"], 2)
        command = [*as_user, env.pop("PYTHON"), *words]
        with start(command, env=env | {"TMPDIR": name}, cwd=name) as started:
            run = started.finish(120)
        assert os.stat(f"{name}/run.pt").st_uid == user.pw_uid
    assert run.json_line("Summary")["steps"] == 2
