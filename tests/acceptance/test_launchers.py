"""The launchers start torchrun with what was chosen, log what it prints, and refuse the rest."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
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
    stub_python,
)
from support.nodes import NamespacePair, require_namespaces
from support.processes import (
    ROOT,
    Started,
    start,
)

DEMO = str(ROOT / "demo_coco_resnet18.py")  # which the launchers start
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@pytest.fixture
def stub(tmp_path: Path) -> Path:
    return stub_python(tmp_path)


def programs(folder: Path, **texts: str) -> str:
    """PATH with these shell programs first."""
    folder.mkdir()
    for name, text in texts.items():
        path = folder / name.replace("_", "-")
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


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
    (SINGLE, "GPUS_PER_NODE=2", "", "--nproc_per_node=2", "--resume"),
    (MULTINODE, "CUDA_VISIBLE_DEVICES=GPU-8f,MIG-2e", "", "--nproc_per_node=2", "--resume"),
    (SINGLE, "", "", f"{ALL_CORES} {LOCAL}", "NCCL"),
    (SINGLE, "", "", "PET_SHUTDOWN_TIMEOUT=120", "GLOO"),
    (SINGLE, "GPUS=4096", "", "OMP_NUM_THREADS=1", "NCCL"),
    (MULTINODE, "GPUS_PER_NODE=2 OMP_NUM_THREADS=3", "", "OMP_NUM_THREADS=3", "--resume"),
    (MULTINODE, "GPUS=2", "", "--nproc_per_node=2", "--resume"),
    (MULTINODE, "RESTARTS=1", "", "--checkpoint=logs/run/checkpoint.pt", "--resume"),
    (MULTINODE, "", NCCL, NCCL_FILE.format("") + " NCCL_DEBUG=INFO", "GLOO"),
    (MULTINODE, "IFNAME=lo", "", "GLOO_SOCKET_IFNAME=lo", "NCCL"),
    (MULTINODE, "IFNAME=lo", NCCL, "NCCL_SOCKET_IFNAME==lo NCCL_NET=Socket", "--resume"),
    (MULTINODE, "RUN_NAME='a;b'", "", "--rdzv_id=a;b-0", "--resume"),
    (MULTINODE, "NCCL_DEBUG=WARN", NCCL, "NCCL_DEBUG=WARN", "NCCL_DEBUG_FILE"),
    (MULTINODE, IN_STEP, NCCL, NCCL_FILE.format(""), "job7"),
    (MULTINODE, f"{IN_STEP} RUN_NAME=", NCCL, "--nnodes=1 " + OF_JOB, "logs/run"),
]


@pytest.mark.parametrize(("launcher", "variables", "options", "words", "absent"), PRINTED)
def test_settings_and_defaults_are_what_torchrun_is_given(
    tmp_path, stub, launcher, variables, options, words, absent
):
    """GPUs are shown by CUDA_VISIBLE_DEVICES alone."""
    for name, line in (("nvidia-smi", "exit 9"), ("scontrol", 'echo "$3"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    own = {"OMP_NUM_THREADS": None, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": stub}
    own |= dict(word.split("=", 1) for word in shlex.split(variables))
    for found in given(launch(launcher, tmp_path, *NO_SAMPLE, *options.split(), **own)):
        assert {*words.split()} <= {*found} and not [word for word in found if absent in word]


# A GPU that fell off its bus: the command never returns.
HANGS = "exec sleep 500"


@pytest.mark.slow
def test_an_nvidia_smi_that_hangs_does_not_hold_the_launcher_up(folder, stub):
    own = {"PATH": programs(folder / "bin", nvidia_smi=HANGS), "CUDA_VISIBLE_DEVICES": "0"}
    with launch(SINGLE, folder, *NO_SAMPLE, **own, PYTHON=stub) as started:
        started.wait_for("^GIVEN .*torch.distributed.run", 30)
        started.finish(30)


# For one command, whose /dev has the file of a GPU.
WITH_GPU = """
mount -t tmpfs none "$0"
cp -a /dev/null /dev/zero /dev/random /dev/urandom "$0"
ln -s /proc/self/fd "$0/fd"
mkdir "$0/shm"
touch "$0/nvidia0"
mount --move "$0" /dev
exec "$@"
"""
SMI = ["echo GPU 0: A100", "echo Driver/library version mismatch; exit 18"]


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.parametrize("smi", SMI)
def test_beside_a_gpus_device_file_pytorch_that_cannot_use_it_is_an_error_and_no_training(
    folder, smi
):
    """Here a GPU is a file, so no build of PyTorch can use it."""
    require_namespaces()
    (folder / "dev").mkdir()
    words = ["bash", SINGLE, *make_set(folder / "set", 8), *FAST, "--max_steps", 1]
    within = ["unshare", "-m", "sh", "-ec", WITH_GPU, folder / "dev"]
    env = HERE | {"PATH": programs(folder / "bin", nvidia_smi=smi), "CUDA_VISIBLE_DEVICES": None}
    with start([*within, *words], env=env, cwd=folder) as started:
        run = started.finish(120, expect=2)
    assert "error: " in run.lines()[-1] and not run.steps()


def failing(folder: Path, program: str) -> Path:
    """stub_python where this program ends with 1."""
    path = stub_python(folder)
    path.write_text(f"{path.read_text()}[[ $* != *{program}* ]]\n")
    return path


def test_a_probe_that_fails_does_not_prevent_the_training(folder, tmp_path):
    own = {"PYTHON": failing(tmp_path, "probe_link"), "GPUS_PER_NODE": 2, "PROBE": 1}
    first, *others = given(launch(MULTINODE, folder, *NO_SAMPLE, **own))
    assert f"{ROOT}/tools/probe_link.py" in first and DEMO in others[0]


@pytest.mark.parametrize("probe", [0, 1])
def test_master_port_is_the_trainings_and_the_next_one_the_probes(folder, stub, probe):
    own = {"PYTHON": stub, "GPUS_PER_NODE": 2, "PROBE": probe, "MASTER_PORT": 30000}
    *before, last = given(launch(MULTINODE, folder, *NO_SAMPLE, **own))
    assert DEMO in last and "--rdzv_endpoint=localhost:30000" in last
    assert ["--rdzv_endpoint=localhost:30001" in words for words in before] == [True] * probe


def test_the_kernels_counters_are_read_before_and_after_the_training(folder, stub):
    own = {"PYTHON": stub, "GPUS_PER_NODE": 2, "PROBE": 1}
    with launch(MULTINODE, folder, *NO_SAMPLE, **own) as started:
        run = started.finish(30)
    found = re.findall(r"^GIVEN .*?/(probe_link|counters|demo_coco_resnet18)\.py", run.out, re.M)
    assert found == ["probe_link", "counters", "demo_coco_resnet18", "counters"]
    assert re.search(r"^GIVEN .*/counters\.py --since logs/run/node0\.log$", run.out, re.M)


def test_with_restarts_a_checkpoint_whose_name_begins_with_a_dash_stays_one_word(folder, stub):
    words = [*NO_SAMPLE, "--checkpoint=-x.pt"]
    (found,) = given(launch(SINGLE, folder, *words, RESTARTS=1, PYTHON=stub))
    assert "--checkpoint=-x.pt" in found and "-x.pt" not in found


NETWORKS = ["--network", "a=lo", "--network", "b=lo"]


def test_over_each_network_the_probe_comes_first_and_ports_are_left_for_restarts(folder, stub):
    """A node may need --timeout to notice that another one has failed."""
    settings = {"RESTARTS": 3, "GPUS_PER_NODE": 2, "PROBE": 1, "PYTHON": stub}
    settings |= {"MASTER_PORT": 30000, "CONNECT_TIMEOUT": 7}
    words = [*NETWORKS, "--", *NO_SAMPLE, "--timeout", "1e2"]
    found = given(launch_series(folder, *words, **settings))
    programs = [str(ROOT / "tools/probe_link.py"), DEMO] * 2
    ports, seconds = [30001, 30000, 30006, 30005], [7, 280, 280, 280]
    for words, program, port, wait in zip(found, programs, ports, seconds, strict=True):
        assert {program, f"--rdzv_endpoint=localhost:{port}"} <= {*words}
        assert f"--rdzv_conf=timeout={wait}" in words


def test_repeats_are_rounds_of_which_every_other_one_is_reversed_with_ports_and_files_of_their_own(
    folder, stub
):
    """And node 0 compares all of each network: that no run has ended is what it then says."""
    files = ["--checkpoint", folder / "elsewhere/c.pt", "--profile=traces/"]
    words = [*NETWORKS, "--repeats", 2, "--", *NO_SAMPLE, *files]
    found = given(launch_series(folder, *words, MASTER_PORT=30000, PYTHON=stub))
    for n, run in enumerate(["a/r1", "b/r1", "b/r2", "a/r2"]):
        endpoint = f"--rdzv_endpoint=localhost:{30000 + 2 * n}"
        assert {endpoint, f"--rdzv_id=run-{run.replace('/', '-')}-0"} <= {*found[n]}
        own = f"logs/run/{run}"
        assert found[n][-2:] == [f"--checkpoint={own}/c.pt", f"--profile={own}/traces"]
        assert (folder / own / "node0.log").exists()
    assert len(found) == 4


def test_one_process_alone_has_no_link_to_probe(folder, stub):
    (words,) = given(launch(MULTINODE, folder, *NO_SAMPLE, PROBE=1, PYTHON=stub))
    assert DEMO in words


def test_with_restarts_node_0_refuses_a_checkpoint_that_is_there_before_anything_starts(
    folder, stub
):
    """A restart would resume from it. Nothing is written into the files of the other run."""
    file = folder / "logs/run/checkpoint.pt"
    file.parent.mkdir(parents=True)
    file.touch()
    own = {"RESTARTS": 1, "NNODES": 2, "MASTER_ADDR": "127.0.0.1", "PYTHON": stub, "PROBE": 1}
    for node, options in ((1, []), (0, ["--resume"]), (0, ["--resume"])):
        words = [*NO_SAMPLE, *options]
        with launch(MULTINODE, folder, *words, **own, NODE_RANK=node) as started:
            started.finish(30)
    before = digests(folder)
    with launch(MULTINODE, folder, *NO_SAMPLE, **own, NODE_RANK=0) as started:
        run = started.finish(30, expect=2)
    words = "checkpoint logs/run/checkpoint.pt is there already: give --resume .*, or another"
    assert len(run.lines()) == 1 and re.search(f"error: {words}", run.out)
    assert digests(folder) == before
    with launch(SINGLE, folder, *NO_SAMPLE, PYTHON=stub) as started:
        run = started.finish(30)
    assert "has a run already" in run.out


OWN = ["--max_steps", "5", "--lr", "0.1"]


def test_without_paths_a_users_options_come_after_those_of_the_sample_set(folder, stub):
    (words,) = given(launch(SINGLE, folder, *OWN, PYTHON=stub))
    sample = words[words.index(DEMO) + 1 :]
    assert sample[-4:] == OWN and "--val_image_path" in sample
    assert sample[sample.index("--weights") + 1] == "none"  # nothing is downloaded
    assert sample[:2] == ["--coco_image_path", f"{ROOT}/data/sample_coco/train2017"]
    started = launch_series(folder, "--processes", "1,2", "--", *OWN, PYTHON=stub)
    for words in given(started):
        assert words[words.index(DEMO) + 1 :][0] == "--dummy" and words[-4:] == OWN


def test_with_any_path_the_script_gets_the_users_arguments_alone(folder, stub):
    (words,) = given(launch(SINGLE, folder, "--val-image-path=none", *OWN, PYTHON=stub))
    assert words[words.index(DEMO) + 1 :] == ["--val-image-path=none", *OWN]


def test_the_first_command_ends_with_the_path_of_its_log_and_what_to_type_next(folder, stub):
    with launch(SINGLE, folder, PYTHON=stub) as started:
        run = started.finish(60)
    _, training = run.out.rsplit("\nGIVEN", 1)
    end = training.partition("\n")[2]
    assert "logs/run/node0.log" in end and re.search(r"\w\.(sh|py)\b", end)


# --- Refusals and help -------------------------------------------------------------------------


def refused(started: Started, words: str) -> None:
    """The launcher has to end with one line that has these words."""
    run = started.finish(30, expect=2)
    (line,) = run.lines()
    assert re.search(f"error: .*{words}", line), run.tail()


REFUSED = [
    (SINGLE, {"GPUS": "all"}, "GPUS.* is '0'"),  # where there is none
    (MULTINODE, {"NNODES": None}, "NNODES, NODE_RANK, MASTER_ADDR"),
    (MULTINODE, {"GPUS_PER_NODE": "all"}, "GPUS.* is '0'"),
    (MULTINODE, {"RESTARTS": "many"}, "RESTARTS is 'many'"),
    (MULTINODE, {"RESTARTS": "1", "MASTER_PORT": "65534"}, "MASTER_PORT is '65534'"),
    (MULTINODE, {"IFNAME": "none0"}, "none0"),
    (
        MULTINODE,
        {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "nosuch.invalid"},
        "MASTER_ADDR is nosuch.invalid",
    ),
    (MULTINODE, {"LOG_DIR": "/dev/null/logs"}, "/dev/null/logs"),
]


@pytest.mark.parametrize(("launcher", "settings", "words"), REFUSED)
def test_wrong_settings_are_refused(folder, launcher, settings, words):
    with launch(launcher, folder, *NO_SAMPLE, **settings) as started:
        refused(started, words)


def test_threads_that_are_no_number_are_refused(folder, stub):
    with launch(SINGLE, folder, *NO_SAMPLE, PYTHON=stub, OMP_NUM_THREADS="abc") as started:
        refused(started, "OMP_NUM_THREADS is 'abc'")


def test_a_series_refuses_an_interface_of_the_sites_as_it_would_measure_that_one(folder, stub):
    own = {"NCCL_SOCKET_IFNAME": "ib0", "PYTHON": stub}
    with launch_series(folder, *NETWORKS, "--", *NO_SAMPLE, **own) as started:
        refused(started, "NCCL_SOCKET_IFNAME.*unset|unset.*NCCL_SOCKET_IFNAME")


def test_runs_with_several_numbers_of_processes_have_the_same_threads(folder, stub):
    words = ["--processes", f"1,{CORES + 1}", "--", *NO_SAMPLE]
    for found in given(launch_series(folder, *words, PYTHON=stub, OMP_NUM_THREADS=None)):
        assert "OMP_NUM_THREADS=1" in found


def test_an_exported_cdpath_changes_nothing(tmp_path):
    """With it `cd` prints where it goes, and may go elsewhere."""
    (tmp_path / ROOT.name / "tools").mkdir(parents=True)
    words = ["bash", SINGLE.relative_to(ROOT.parent)]
    with start(words, env={"CDPATH": f"{tmp_path}:.", "GPUS": "0"}, cwd=ROOT.parent) as started:
        refused(started, "GPUS")


TWO_NODES_SH = ROOT / "tools/two_nodes.sh"


@pytest.mark.parametrize(
    ("launcher", "options"),
    [(SINGLE, "-h"), (MULTINODE, "--max_steps 5 --help"), (TWO_NODES_SH, "-- --help")],
)
def test_help_is_the_commands_own_header_and_starts_nothing(folder, launcher, options):
    options = options.split()
    with launch(launcher, folder, *options, PYTHON="/nowhere/python", NNODES=None) as started:
        *header, last = started.finish(30).lines()
    text = launcher.read_text()
    assert len(header) > 8 and all(f"\n# {line}\n" in text for line in header if line)
    assert "python demo_coco_resnet18.py --help" in last and not [*folder.iterdir()]


# --- Networks ----------------------------------------------------------------------------------


def test_a_line_says_which_of_the_users_own_variables_stay(folder, stub):
    own = {"NCCL_IB_DISABLE": "0", "GLOO_SOCKET_IFNAME": "eth7"}
    words = [*NO_SAMPLE, *NCCL.split()]
    with launch(MULTINODE, folder, *words, PYTHON=stub, IFNAME="lo", **own) as started:
        run = started.finish(30)
    assert dict(re.findall(r"run\.py: keeping your (\w+)='(\w+)'", run.out)) == own
    (command,) = COMMAND.findall(run.out)
    assert "NCCL_NET=Socket" in command and "NCCL_IB_DISABLE" not in command


@pytest.mark.parametrize("several", [False, True])
def test_adapters_is_the_name_of_all_adapters_of_a_node(folder, stub, several):
    for name in ("mlx5_0", "mlx5_1"):
        state = folder / f"sys/class/infiniband/{name}/ports/1/state"
        state.parent.mkdir(parents=True)
        state.write_text("4: ACTIVE\n")
    own, options = {"SYSFS_ROOT": folder / "sys", "PYTHON": stub}, [*NO_SAMPLE, *NCCL.split()]
    if several:
        started = launch_series(folder, "--network", "ib=adapters", "--", *options, **own)
    else:
        started = launch(MULTINODE, folder, *options, **own, IFNAME="adapters")
    (words,) = given(started)
    assert {"NCCL_NET=IB", "NCCL_IB_DISABLE=0"} <= {*words}
    chosen = [word for word in words if word.startswith("NCCL_IB_HCA")]
    assert chosen in ([], ["NCCL_IB_HCA==mlx5_0,mlx5_1"])  # without one NCCL takes all


@pytest.fixture(scope="module")
def routes() -> Iterator[NamespacePair]:
    """Node 1 has a network of its own for containers."""
    with NamespacePair() as pair:
        pair.ip(1, "link add br-x up type bridge", "addr add 10.79.0.2/24 dev br-x")
        pair.usual_hosts()
        yield pair


ROUTES = [  # node, MASTER_ADDR, the interface
    (1, "10.77.0.1", "eth0"),
    (1, "10.79.0.1", "br-x"),
    (0, "node0", "eth0"),  # its own name
]


@pytest.mark.parametrize(("node", "host", "expected"), ROUTES)
def test_without_a_named_interface_the_route_to_node_0_tells_it(
    folder, routes, stub, node, host, expected
):
    """It may be one of containers."""
    env = HERE | {"NNODES": "2", "NODE_RANK": str(node), "MASTER_ADDR": host, "PYTHON": str(stub)}
    words = ["bash", MULTINODE, *NO_SAMPLE, *NCCL.split()]
    (found,) = given(routes.popen(node, words, env=env, cwd=folder))
    assert {f"NCCL_SOCKET_IFNAME=={expected}", f"GLOO_SOCKET_IFNAME={expected}"} <= {*found}


def test_where_no_route_tells_the_interface_a_line_asks_for_it(folder, routes, stub):
    """Node 1 has two interfaces, and this name of node 0 is its own."""
    env = HERE | {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "localhost", "PYTHON": str(stub)}
    run = routes.popen(1, ["bash", MULTINODE, *NO_SAMPLE], env=env, cwd=folder).finish(60)
    assert re.search(r"run\.py: .*\bset IFNAME\b", run.out) and "SOCKET_IFNAME" not in run.out


def test_on_nodes_that_have_ipv6_alone_the_interface_is_found(folder, stub):
    with NamespacePair() as pair:
        for node in (0, 1):
            pair.ip(node, "addr flush dev eth0", f"addr add fd00::{node + 1}/64 dev eth0 nodad")
        env = HERE | {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "fd00::1"}
        env["PYTHON"] = str(stub)
        (found,) = given(pair.popen(1, ["bash", MULTINODE, *NO_SAMPLE], env=env, cwd=folder))
    assert "GLOO_SOCKET_IFNAME=eth0" in found


# --- A batch job of SLURM ------------------------------------------------------------------------


WARNS = "trap : USR1; sleep 1; kill -USR1 $PPID; sleep 1; "


@pytest.mark.parametrize(("warns", "again"), [(WARNS, True), ("", False)])
def test_a_job_is_submitted_again_only_if_slurm_has_warned_of_its_time_limit(folder, warns, again):
    """After scancel the ranks save and end with 75 as well."""
    path = programs(folder / "bin", srun=f"{warns}exit 75", scontrol='echo "$@" >requeued')
    env = {"PATH": path, "SLURM_CPUS_PER_TASK": "1", "SLURM_JOB_ID": "7"}
    with start(["bash", ROOT / "tools/slurm/coco.sbatch"], env=env, cwd=folder) as started:
        started.finish(60, expect=75)
    assert (folder / "requeued").exists() == again
