"""The launchers start torchrun with what was chosen, log what it prints, and refuse the rest."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest

from support.datasets import digests, make_set
from support.launchers import (
    COMMAND,
    FAST,
    HERE,
    MULTINODE,
    NO_SAMPLE,
    SINGLE,
    given,
    launch,
    launch_series,
    programs,
    stub_python,
)
from support.nodes import NamespacePair, with_device
from support.processes import ROOT, Run, Started, start

DEMO = str(ROOT / "demo_coco_resnet18.py")  # which the launchers start
PROBE = str(ROOT / "tools/probe_link.py")
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@pytest.fixture
def stub(tmp_path: Path) -> Path:
    return stub_python(tmp_path)


def ended(started: Started, expect: int = 0) -> Run:
    with started:
        return started.finish(60, expect)


# --- What torchrun is given --------------------------------------------------------------------

ALL_CORES = f"OMP_NUM_THREADS={CORES}"
NCCL_FILE = "NCCL_DEBUG_FILE=logs/run/{}nccl.node0.%h.%p.log"
NCCL = "--backend nccl"  # as if there were a GPU
LOCAL = "--standalone --local-addr=127.0.0.1 --nnodes=1"  # not PET_NNODES, which Kubeflow sets
# One node of a SLURM job, which tells the launcher all that it needs.
IN_STEP = "NNODES= MASTER_PORT= SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=1 "
IN_STEP += "SLURM_STEP_NUM_NODES=1 SLURM_NODEID=0 SLURM_STEP_NODELIST=node7"
OF_JOB = "--rdzv_endpoint=node7:20280 " + NCCL_FILE.replace("run/{}", "job7-step0/")
PRINTED = [  # launcher, variables, options, words of each start, what none has
    (SINGLE, "GPUS=all CUDA_VISIBLE_DEVICES=0,2", "", "--nproc_per_node=2", "--checkpoint"),
    (SINGLE, "CUDA_VISIBLE_DEVICES=0,2", "", "--nproc_per_node=1", "--resume"),
    (MULTINODE, "CUDA_VISIBLE_DEVICES=GPU-8f,MIG-2e", "", "--nproc_per_node=2", "--resume"),
    (SINGLE, "", "", f"{ALL_CORES} {LOCAL} PET_SHUTDOWN_TIMEOUT=120", "NCCL"),
    (SINGLE, "GPUS_PER_NODE=4096", "", "--nproc_per_node=4096 OMP_NUM_THREADS=1", "GLOO"),
    (MULTINODE, "GPUS=2 OMP_NUM_THREADS=3", "", "OMP_NUM_THREADS=3", "--resume"),
    (MULTINODE, "RESTARTS=1", "", "--checkpoint=logs/run/checkpoint.pt", "--resume"),
    (MULTINODE, "", NCCL, NCCL_FILE.format("") + " NCCL_DEBUG=INFO", "GLOO"),
    (MULTINODE, "IFNAME=lo", "", "GLOO_SOCKET_IFNAME=lo", "NCCL"),
    (MULTINODE, "IFNAME=lo", NCCL, "NCCL_SOCKET_IFNAME==lo NCCL_NET=Socket", "--resume"),
    (MULTINODE, "RUN_NAME='a;b'", "", "--rdzv_id=a;b-0", "--resume"),
    (MULTINODE, "NCCL_DEBUG=WARN", NCCL, "NCCL_DEBUG=WARN", "NCCL_DEBUG_FILE"),
    (MULTINODE, f"{IN_STEP} RUN_NAME=", NCCL, "--nnodes=1 " + OF_JOB, "logs/run"),
    (MULTINODE, "PROBE=1", "", shlex.quote(DEMO), PROBE),  # one process has no link to probe
]


@pytest.mark.parametrize(("launcher", "variables", "options", "words", "absent"), PRINTED)
def test_settings_and_defaults_are_what_torchrun_is_given(
    tmp_path, stub, launcher, variables, options, words, absent
):
    """GPUs are shown by CUDA_VISIBLE_DEVICES alone; nvidia-smi hangs, as after a GPU was lost."""
    path = programs(tmp_path / "bin", nvidia_smi="exec sleep 500", scontrol='echo "$3"')
    own = {"OMP_NUM_THREADS": None, "PATH": path, "PYTHON": stub}
    own |= dict(word.split("=", 1) for word in shlex.split(variables))
    for found in given(launch(launcher, tmp_path, *NO_SAMPLE, *options.split(), **own)):
        assert {*shlex.split(words)} <= {*found} and not [word for word in found if absent in word]


@pytest.mark.slow
@pytest.mark.root
def test_a_gpu_that_pytorch_cannot_use_is_an_error_and_no_training(folder):
    """Here a GPU is a device file, so no build of PyTorch can use it."""
    words = ["bash", SINGLE, *make_set(folder / "set", 8), *FAST, "--max_steps", 1]
    env = HERE | {"CUDA_VISIBLE_DEVICES": None}
    run = ended(start([*with_device("nvidia0"), *words], env=env, cwd=folder), 2)
    assert "error: " in run.lines()[-1] and not run.steps()


def test_the_probe_has_the_next_port_and_counters_are_around(folder, stub):
    own = {"PYTHON": stub, "GPUS_PER_NODE": 2, "PROBE": 1, "MASTER_PORT": 30000}
    run = ended(launch(MULTINODE, folder, *NO_SAMPLE, **own))
    found = re.findall(r"^GIVEN .*?/(probe_link|counters|demo_coco_resnet18)\.py", run.out, re.M)
    assert found == ["probe_link", "counters", "demo_coco_resnet18", "counters"]
    assert re.search(r"^GIVEN .*/counters\.py --since logs/run/node0\.log$", run.out, re.M)
    ports = re.findall(r"--rdzv_endpoint=localhost:(\d+)", "\n".join(COMMAND.findall(run.out)))
    assert ports == ["30001", "30000"]


def test_a_probe_that_fails_does_not_prevent_the_training(folder, stub):
    stub.write_text(f"{stub.read_text()}[[ $* != *probe_link* ]]\n")
    own = {"PYTHON": stub, "GPUS_PER_NODE": 2, "PROBE": 1}
    first, second = given(launch(MULTINODE, folder, *NO_SAMPLE, **own))
    assert PROBE in first and DEMO in second


NETWORKS = ["--network", "a=lo", "--network", "b=lo"]


def test_runs_of_a_series_have_ports_and_files_of_their_own(folder, stub):
    """Every other round is reversed. The probe comes first, and ports are left for restarts. A
    node may need --timeout to notice that another one has failed.
    """
    own = {"RESTARTS": 3, "GPUS_PER_NODE": 2, "PROBE": 1, "PYTHON": stub}
    own |= {"MASTER_PORT": 30000, "CONNECT_TIMEOUT": 7}
    files = ["--checkpoint", folder / "elsewhere/c.pt", "--profile=traces/", "--timeout", "1e2"]
    words = [*NETWORKS, "--repeats", 2, "--", *NO_SAMPLE, *files]
    found = given(launch_series(folder, *words, **own))
    for n, run in enumerate(["a/r1", "b/r1", "b/r2", "a/r2"]):
        probe, training = found[2 * n : 2 * n + 2]
        port, name = 30000 + 5 * n, run.replace("/", "-")
        assert {PROBE, f"--rdzv_endpoint=localhost:{port + 1}"} <= {*probe}
        assert {DEMO, f"--rdzv_endpoint=localhost:{port}", f"--rdzv_id=run-{name}-0"} <= {
            *training
        }
        assert f"--rdzv_conf=timeout={280 if n else 7}" in probe
        assert "--rdzv_conf=timeout=280" in training
        place = f"logs/run/{run}"
        assert {f"--checkpoint={place}/c.pt", f"--profile={place}/traces"} <= {*training}
        assert (folder / place / "node0.log").exists()
    assert len(found) == 8


def test_runs_with_several_numbers_of_processes_have_the_same_threads(folder, stub):
    words = ["--processes", f"1,{CORES + 1}", "--", *NO_SAMPLE]
    for found in given(launch_series(folder, *words, PYTHON=stub, OMP_NUM_THREADS=None)):
        assert "OMP_NUM_THREADS=1" in found


def test_with_restarts_node_0_refuses_a_checkpoint_that_is_there(folder, stub):
    """A restart would resume from it. Nothing is written into the files of the other run."""
    file = folder / "logs/run/checkpoint.pt"
    file.parent.mkdir(parents=True)
    file.touch()
    own = {"RESTARTS": 1, "NNODES": 2, "MASTER_ADDR": "127.0.0.1", "PYTHON": stub, "PROBE": 1}
    for node, options in ((1, []), (0, ["--resume"])):
        ended(launch(MULTINODE, folder, *NO_SAMPLE, *options, **own, NODE_RANK=node))
    before = digests(folder)
    started = launch(MULTINODE, folder, *NO_SAMPLE, **own, NODE_RANK=0)
    refused(started, r"checkpoint logs/run/checkpoint\.pt is there already: give --resume ")
    assert digests(folder) == before
    assert "has a run already" in ended(launch(SINGLE, folder, *NO_SAMPLE, PYTHON=stub)).out


def test_a_checkpoint_whose_name_begins_with_a_dash_stays_one_word(folder, stub):
    words = [*NO_SAMPLE, "--checkpoint=-x.pt"]
    (found,) = given(launch(SINGLE, folder, *words, PYTHON=stub, RESTARTS=1))
    assert "--checkpoint=-x.pt" in found and "-x.pt" not in found


OWN = ["--max_steps", "5", "--lr", "0.1"]


def test_a_users_options_come_after_those_of_the_sample_set(folder, stub):
    """The end names the log, and what to type next. With any path the options are the user's."""
    (words,) = given(launch(SINGLE, folder, *OWN, PYTHON=stub))
    sample = words[words.index(DEMO) + 1 :]
    assert sample[-4:] == OWN and "--val_image_path" in sample
    assert sample[sample.index("--weights") + 1] == "none"  # nothing is downloaded
    assert sample[:2] == ["--coco_image_path", f"{ROOT}/data/sample_coco/train2017"]
    end = (folder / "logs/run/node0.log").read_text().rpartition("GIVEN")[2]
    assert "logs/run/node0.log" in end and re.search(r"next: .*\w\.sh\b", end)
    for words in given(launch_series(folder, "--processes", "1,2", "--", *OWN, PYTHON=stub)):
        assert words[words.index(DEMO) + 1 :][0] == "--dummy" and words[-4:] == OWN
    (words,) = given(launch(SINGLE, folder, "--val-image-path=none", *OWN, PYTHON=stub))
    assert words[words.index(DEMO) + 1 :] == ["--val-image-path=none", *OWN]


# --- Refusals and help -------------------------------------------------------------------------


def refused(started: Started, words: str) -> None:
    """The launcher has to end with one line that has these words."""
    run = ended(started, 2)
    (line,) = run.lines()
    assert re.search(f"error: .*{words}", line), run.tail()


NOBODY = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "nosuch.invalid"}
REFUSED = [
    (SINGLE, {"GPUS": "all"}, "GPUS.* is '0'"),  # where there is none
    (MULTINODE, {"NNODES": None}, "NNODES, NODE_RANK, MASTER_ADDR"),
    (MULTINODE, {"RESTARTS": "many"}, "RESTARTS is 'many'"),
    (MULTINODE, {"RESTARTS": "1", "MASTER_PORT": "65534"}, "MASTER_PORT is '65534'"),
    (MULTINODE, {"IFNAME": "none0"}, "none0"),
    (MULTINODE, NOBODY, "MASTER_ADDR is nosuch.invalid"),
    (MULTINODE, {"LOG_DIR": "/dev/null/logs"}, "/dev/null/logs"),
    (SINGLE, {"OMP_NUM_THREADS": "abc"}, "OMP_NUM_THREADS is 'abc'"),
]


@pytest.mark.parametrize(("launcher", "settings", "words"), REFUSED)
def test_wrong_settings_are_refused(folder, launcher, settings, words):
    refused(launch(launcher, folder, *NO_SAMPLE, **settings), words)


def test_a_series_refuses_an_interface_of_the_sites(folder, stub):
    """It would measure that one."""
    own = {"NCCL_SOCKET_IFNAME": "ib0", "PYTHON": stub}
    started = launch_series(folder, *NETWORKS, "--", *NO_SAMPLE, **own)
    refused(started, "NCCL_SOCKET_IFNAME.*unset")


def test_an_exported_cdpath_changes_nothing(tmp_path):
    """With it `cd` prints where it goes, and may go elsewhere."""
    (tmp_path / ROOT.name / "tools").mkdir(parents=True)
    words = ["bash", SINGLE.relative_to(ROOT.parent)]
    env = {"CDPATH": f"{tmp_path}:.", "GPUS": "0"}
    refused(start(words, env=env, cwd=ROOT.parent), "GPUS")


@pytest.mark.parametrize(
    ("launcher", "options"),
    [(SINGLE, "-h"), (MULTINODE, "--max_steps 5 --help"), (ROOT / "tools/two_nodes.sh", "--help")],
)
def test_help_is_the_commands_own_header_and_starts_nothing(folder, launcher, options):
    own = {"PYTHON": "/nowhere/python", "NNODES": None}
    *header, last = ended(launch(launcher, folder, *options.split(), **own)).lines()
    text = launcher.read_text()
    assert len(header) > 8 and all(f"\n# {line}\n" in text for line in header if line)
    assert "python demo_coco_resnet18.py --help" in last and not [*folder.iterdir()]


# --- Networks ----------------------------------------------------------------------------------


def test_a_line_says_which_of_the_users_own_variables_stay(folder, stub):
    """Beside any NCCL_DEBUG_... of the user's there is none of the launcher's."""
    own = {"NCCL_IB_DISABLE": "0", "GLOO_SOCKET_IFNAME": "eth7"}
    env = own | {"NCCL_DEBUG_FILE": "mine", "IFNAME": "lo", "PYTHON": stub}
    run = ended(launch(MULTINODE, folder, *NO_SAMPLE, *NCCL.split(), **env))
    assert dict(re.findall(r"run\.py: keeping your (\w+)='(\w+)'", run.out)) == own
    (command,) = COMMAND.findall(run.out)
    assert "NCCL_NET=Socket" in command
    assert not re.search("NCCL_(IB_DISABLE|DEBUG)", command)


def test_adapters_is_the_name_of_all_adapters_of_a_node(folder, stub):
    for name in ("mlx5_0", "mlx5_1"):
        state = folder / f"sys/class/infiniband/{name}/ports/1/state"
        state.parent.mkdir(parents=True)
        state.write_text("4: ACTIVE\n")
    words = ["--network", "ib=adapters", "--", *NO_SAMPLE, *NCCL.split()]
    (words,) = given(launch_series(folder, *words, SYSFS_ROOT=folder / "sys", PYTHON=stub))
    assert {"NCCL_NET=IB", "NCCL_IB_HCA==mlx5_0,mlx5_1"} <= {*words}


ROUTES = [  # node, MASTER_ADDR, the interface
    (1, "10.77.0.1", "eth0"),
    (1, "10.79.0.1", "br-x"),
    (0, "node0", "eth0"),  # its own name
    (1, "localhost", ""),  # the name of node 0 is its own, and it has two interfaces
    (1, "fd00::1", "eth0"),
]


def test_without_ifname_the_route_to_node_0_tells_the_interface(folder, stub):
    """Where none does, a line asks for it. Each node has a network of its own for containers; that
    of node 0 has none, and so no cable.
    """
    with NamespacePair() as pair:
        pair.ip(0, "link add docker0 up type veth peer name end")
        pair.ip(0, "addr add 10.79.0.1/24 dev docker0")
        pair.ip(1, "link add br-x up type bridge", "addr add 10.79.0.2/24 dev br-x")
        pair.usual_hosts()
        for node, host, interface in ROUTES:
            if ":" in host:  # IPv6 alone
                pair.ip(1, "addr flush dev eth0", "addr add fd00::2/64 dev eth0 nodad")
            env = HERE | {"NNODES": "2", "NODE_RANK": str(node), "MASTER_ADDR": host}
            words = ["bash", MULTINODE, *NO_SAMPLE, *NCCL.split()]
            run = ended(pair.popen(node, words, env=env | {"PYTHON": str(stub)}, cwd=folder))
            assert {
                *re.findall(r" (?:NCCL_SOCKET_IFNAME==|GLOO_SOCKET_IFNAME=)(\S+)", run.out)
            } == ({interface} - {""}), run.tail()
            assert bool(re.search(r"run\.py: .*\bset IFNAME\b", run.out)) == (not interface)


# --- A batch job of SLURM ------------------------------------------------------------------------

WARNS = "trap : USR1; sleep 1; kill -USR1 $PPID; sleep 1; "


@pytest.mark.parametrize(("warns", "again"), [(WARNS, True), ("", False)])
def test_a_job_is_submitted_again_only_if_slurm_has_warned_it(folder, warns, again):
    """Of its time limit. After scancel the ranks save and end with 75 as well. Most clusters give
    a task of srun one core, unless it asks for more.
    """
    srun = f'echo "$@" >given; {warns}exit 75'
    path = programs(folder / "bin", srun=srun, scontrol='echo "$@" >requeued')
    env = {"PATH": path, "SLURM_CPUS_PER_TASK": "6", "SLURM_JOB_ID": "7"}
    ended(start(["bash", ROOT / "tools/slurm/coco.sbatch"], env=env, cwd=folder), 75)
    assert (folder / "requeued").exists() == again
    assert "--cpus-per-task=6" in (folder / "given").read_text().split()
