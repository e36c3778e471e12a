"""The launchers start torchrun with what was chosen, log what it prints, and refuse the rest."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.datasets import digests
from support.forks import load
from support.launchers import (
    HERE,
    MULTINODE,
    NO_SAMPLE,
    SAVED,
    SINGLE,
    given,
    guarded,
    launch,
    launch_series,
    starts,
    stub_python,
)
from support.nodes import NamespacePair
from support.processes import (
    ROOT,
    Started,
    start,
)

guards = pytest.mark.guards
DEMO = str(ROOT / "demo_coco_resnet18.py")  # which the launchers start
CORES = len(os.sched_getaffinity(0))


@pytest.fixture
def stub(tmp_path: Path) -> Path:
    return stub_python(tmp_path)


# --- What torchrun is given --------------------------------------------------------------------

ALL_CORES, HALF = (f"OMP_NUM_THREADS={n}" for n in (CORES, max(1, CORES // 2)))
NCCL_FILE = "NCCL_DEBUG_FILE=logs/run/{}nccl.node0.%h.%p.log"
LOCAL = "--standalone --local-addr=127.0.0.1 --nnodes=1"  # not PET_NNODES, which Kubeflow sets
# One node of a SLURM job, which tells the launcher all that it needs.
IN_STEP = "NNODES= MASTER_PORT= SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=1 "
IN_STEP += "SLURM_STEP_NUM_NODES=1 SLURM_NODEID=0 SLURM_STEP_NODELIST=node7"
OF_JOB = "--rdzv_endpoint=node7:20281 " + NCCL_FILE.replace("run/{}", "job7-step0/")
PRINTED = guarded(  # fault, launcher, variables, options, words of each start, what none has
    ("", SINGLE, "GPUS=all CUDA_VISIBLE_DEVICES=0,2", "", "--nproc_per_node=2", "--checkpoint"),
    ("", SINGLE, "GPUS=all CUDA_VISIBLE_DEVICES=1,-1,0", "", "--nproc_per_node=1", "--resume"),
    ("one-by-default", SINGLE, "CUDA_VISIBLE_DEVICES=0,2", "", "--nproc_per_node=1", "--resume"),
    ("", MULTINODE, "CUDA_VISIBLE_DEVICES=GPU-8f,MIG-2e", "", "--nproc_per_node=2", "--resume"),
    ("threads-per-process local-addr one-node", SINGLE, "", "", f"{ALL_CORES} {LOCAL}", "NCCL"),
    ("", MULTINODE, "GPUS_PER_NODE=2", "", HALF, "--checkpoint"),
    ("", MULTINODE, "GPUS_PER_NODE=2 OMP_NUM_THREADS=3", "", "OMP_NUM_THREADS=3", "--resume"),
    ("", SINGLE, "RESTARTS=1", "--checkpoint own.pt", "--checkpoint own.pt", "checkpoint.pt"),
    ("", MULTINODE, "RESTARTS=1", "", "--checkpoint logs/run/checkpoint.pt", "--resume"),
    ("", MULTINODE, "", "", NCCL_FILE.format("") + " NCCL_DEBUG=INFO", "GLOO"),
    ("own-rendezvous", MULTINODE, "RUN_NAME=a", "", "--rdzv_id=a-1", "--resume"),
    ("", MULTINODE, "RUN_NAME=", "", "--rdzv_id=demo-1", "--resume"),
    ("", MULTINODE, "NCCL_DEBUG=WARN", "", "NCCL_DEBUG=WARN", "NCCL_DEBUG_FILE"),
    ("slurm-own-name", MULTINODE, IN_STEP, "", NCCL_FILE.format(""), "job7"),
    ("slurm-one-node", MULTINODE, f"{IN_STEP} RUN_NAME=", "", "--nnodes=1 " + OF_JOB, "logs/run"),
)


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


@guards("no-silent-cpu")
@pytest.mark.parametrize("launcher", [SINGLE, MULTINODE], ids=lambda path: path.name)
def test_on_a_node_with_gpus_the_script_has_to_use_them_unless_the_user_says_otherwise(
    folder, stub, launcher
):
    """With a build of PyTorch for CPUs, or a wrong CUDA_VISIBLE_DEVICES, it refuses."""
    (folder / "nvidia-smi").write_text("#!/bin/sh\necho GPU 0: A100\n")
    (folder / "nvidia-smi").chmod(0o755)
    own = {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHON": stub}
    cases = (
        (None, "", ["cuda"]),
        ("7", "", ["cuda"]),
        ("", "", []),
        (None, "cpu", ["cuda", "cpu"]),
    )
    for visible, device, expected in cases:
        options = ["--device", device] if device else []
        started = launch(
            launcher, folder, *NO_SAMPLE, *options, CUDA_VISIBLE_DEVICES=visible, **own
        )
        (words,) = given(started)
        assert [words[n + 1] for n, word in enumerate(words) if word == "--device"] == expected


NETWORKS = ["--network", "a=lo", "--network", "b=lo"]


@guards("probe-comes-first", "later-starts-wait-longer", "restart-counted")
def test_over_each_network_the_probe_comes_first_and_ports_are_left_for_restarts(folder, stub):
    """A node may need --timeout to notice that another one has failed. For what follows a probe
    that fails see test_two_nodes.py.
    """
    settings = {"RESTARTS": 3, "GPUS_PER_NODE": 2, "PROBE": 1, "PYTHON": stub}
    settings |= {"MASTER_PORT": 30000, "CONNECT_TIMEOUT": 7}
    words = [*NETWORKS, "--", *NO_SAMPLE, "--timeout", "1e2"]
    found = given(launch_series(folder, *words, **settings))
    programs = [str(ROOT / "tools/probe_link.py"), DEMO] * 2
    ports, seconds = [30000, 30001, 30005, 30006], [7, 167, 167, 327]
    for words, program, port, wait in zip(found, programs, ports, seconds, strict=True):
        assert {program, f"--rdzv_endpoint=localhost:{port}"} <= {*words}
        assert f"--rdzv_conf=timeout={wait}" in words


@guards("rounds-reversed")
def test_repeats_are_rounds_of_which_every_other_one_is_reversed_with_ports_and_files_of_their_own(
    folder, stub
):
    """And node 0 compares all of each network: that no run has ended is what it then says."""
    words = [*NETWORKS, "--repeats", 3, "--", *NO_SAMPLE, "--checkpoint", "c.pt"]
    started = launch_series(folder, *words, MASTER_PORT=30000, PYTHON=stub)
    found = given(started)
    for n, run in enumerate(["a/r1", "b/r1", "b/r2", "a/r2", "a/r3", "b/r3"]):
        endpoint = f"--rdzv_endpoint=localhost:{30000 + 2 * n + 1}"
        own = {endpoint, f"logs/run/{run}/c.pt", f"--rdzv_id=run-{run.replace('/', '-')}-1"}
        assert own <= {*found[n]}
        assert (folder / "logs/run" / run / "node0.log").exists()
    assert len(found) == 6


@guards("timeout-by-default")
def test_without_timeout_a_later_start_waits_as_long_as_the_ranks_would(folder, stub):
    words = [*NETWORKS, "--", *NO_SAMPLE]
    _, later = given(launch_series(folder, *words, CONNECT_TIMEOUT=7, PYTHON=stub))
    assert f"--rdzv_conf=timeout={7 + load(DEMO).TIMEOUT + 60}" in later


@guards("no-probe-alone")
def test_one_process_alone_has_no_link_to_probe(folder, stub):
    (words,) = given(launch(MULTINODE, folder, *NO_SAMPLE, PROBE=1, PYTHON=stub))
    assert DEMO in words


@guards("run-has-own-files")
def test_each_of_several_runs_has_its_checkpoint_and_traces_in_its_own_folder(folder, stub):
    words = ["--profile=traces/", "--checkpoint", folder / "elsewhere/c.pt", *NO_SAMPLE]
    found = given(launch_series(folder, "--processes", "1,2", "--", *words, PYTHON=stub))
    for label, words in zip(("p1", "p2"), found, strict=True):
        own = f"logs/run/{label}"
        assert words[-4:] == ["--checkpoint", f"{own}/c.pt", "--profile", f"{own}/traces"]


@guards("checkpoint-is-there", "node-0-looks", "appending-is-said", "refused-before-log")
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


def test_random_images_need_no_data(folder, stub):
    (words,) = given(launch(SINGLE, folder, "--dummy", PYTHON=stub))
    assert words[words.index(DEMO) + 1 :] == ["--dummy"]


@guards("user-options-win")
def test_without_paths_a_users_options_come_after_those_of_the_sample_set(folder, stub):
    (words,) = given(launch(SINGLE, folder, *OWN, PYTHON=stub))
    sample = words[words.index(DEMO) + 1 :]
    assert sample[-4:] == OWN and "--val_image_path" in sample
    assert sample[:2] == ["--coco_image_path", f"{ROOT}/data/sample_coco/train2017"]
    started = launch_series(folder, "--processes", "1,2", "--", *OWN, PYTHON=stub)
    for words in given(started):
        assert words[words.index(DEMO) + 1 :][0] == "--dummy" and words[-4:] == OWN


PATHS = ["coco_image_path", "annotation_path", "val_image_path", "val_annotation_path"]
ONE_PATH = [["--" + name, "none"] for name in PATHS[:2]]
ONE_PATH += [["--" + name.replace("_", "-") + "=none"] for name in PATHS[2:]]


@guards("dashes-in-a-path")
@pytest.mark.parametrize("path", ONE_PATH, ids=lambda words: words[0])
def test_with_any_path_the_script_gets_the_users_arguments_alone(folder, stub, path):
    (words,) = given(launch(SINGLE, folder, *path, "--max_steps", 5, PYTHON=stub))
    assert words[words.index(DEMO) + 1 :] == [*path, "--max_steps", "5"]


# --- Refusals and help -------------------------------------------------------------------------


def refused(started: Started, words: str) -> None:
    """The launcher has to end with one line that has these words."""
    run = started.finish(30, expect=None)
    (line,) = run.lines()
    assert run.returncode not in (0, SAVED) and re.search(f"error: .*{words}", line), run.tail()


@pytest.mark.parametrize("value", ["0", "two", "-1", "all", " ", "1 two"])
def test_wrong_number_of_processes_is_refused(folder, value):
    """All GPUs are wrong where there is none."""
    with launch(SINGLE, folder, *NO_SAMPLE, GPUS=value) as started:
        refused(started, f"GPUS.*{value.split(' ')[-1]}|GPUS=all")


# Of a node that is otherwise right; each with the words that the one line must have.
NODE = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "203.0.113.1"}
IN_JOB = dict.fromkeys(NODE) | {"SLURM_JOB_ID": "7"}
SHELL = {"SLURM_STEP_ID": "4294967290", "SLURM_JOB_NUM_NODES": "2"}  # of salloc
STEP = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2"}
WRONG = guarded(
    ("", {"NODE_RANK": None}, "NODE_RANK"),
    ("", {"NODE_RANK": "2"}, "NODE_RANK is '?2"),
    ("", {"WORLD_SIZE": "4"}, "NNODES.*WORLD_SIZE"),
    ("", {"NNODES": "two"}, "NNODES is '?two"),
    ("", {"MASTER_ADDR": None}, "MASTER_ADDR"),
    ("", {"MASTER_PORT": "99999"}, "MASTER_PORT is '?99999"),
    ("", {"RESTARTS": "-1"}, "RESTARTS is '?-1"),
    ("", {"GPUS_PER_NODE": "all"}, "GPU"),
    ("", {"NETWORK": "token-ring", "IFNAME": "lo"}, "NETWORK is '?token-ring"),
    ("", {"IFNAME": "none0"}, "none0"),
    ("", {"IFNAME": "eth0 lo"}, "commas"),
    ("", {"NETWORK": "ethernet", "IFNAME": "mlx5_0"}, "mlx5_0 is an adapter"),
    ("", {"IFNAME": "mlx5_0,mlx5_2"}, "mlx5_2"),
    ("", {"IFNAME": "down0"}, "down0 .*down"),
    ("loose-cable", {"IFNAME": "eth0,loose0"}, "loose0 .*cable"),
    (
        "",
        {"NETWORKS": "ethernet=eth0 infiniband=mlx5_0"},
        "series.py --network ethernet=eth0 --network infiniband=mlx5_0 --",
    ),
    ("", {"REPEATS": 2}, "REPEATS .*tools/series.py --repeats 2"),
    ("", {"PYTHON": "/nowhere/python"}, "/nowhere/python"),
    ("", dict.fromkeys(NODE), "NNODES.*NODE_RANK.*MASTER_ADDR"),
    ("slurm-step-without-id", IN_JOB, "not started by srun"),
    ("slurm-interactive", IN_JOB | SHELL, "not started by srun"),
    ("slurm-two-tasks", IN_JOB | STEP, "4 tasks on 2 nodes.*--ntasks-per-node=1"),
)


@pytest.mark.parametrize(("settings", "words"), WRONG)
def test_wrong_settings_are_refused(tmp_path, sysfs, settings, words):
    own = {**NODE, "SYSFS_ROOT": sysfs, **settings}
    with launch(MULTINODE, tmp_path, *NO_SAMPLE, **own) as started:
        refused(started, words)


SEVERAL = guarded(  # fault, the runs, options, words
    ("", "--processes 1", "--repeats=0", "--repeats is 0"),
    ("series-with-resume", "--processes 1,2", "-- --resume", "--resume: each run would continue"),
    ("", "--network a=lo --network b=lo", "-- --resume", "--resume: each run would continue"),
    ("", "--processes 2,1,2", "", "--processes has p2 twice"),
    ("names-twice", "--network a=lo --network a=lo", "", "--network has a twice"),
    ("", "--network ethernet", "", "ethernet: write LABEL=NAMES"),
    ("", "--network a=lo --network b=none0", "", "no none0"),
    ("", "", "", "--network LABEL=NAMES .* or --processes"),
    (
        "shares-are-whole",
        "--processes 1,2",
        "-- --global-batch-size=3",
        "3 is not a multiple of 2",
    ),
    ("", "--processes 2,4", "-- --precision=bf16", "2,4 leaves no run"),
)


@pytest.mark.parametrize(("runs", "options", "words"), SEVERAL)
def test_what_several_runs_cannot_have_is_refused(folder, stub, runs, options, words):
    own = {"CUDA_VISIBLE_DEVICES": "0" if "precision" in options else "", "PYTHON": stub}
    with launch_series(folder, *runs.split(), *options.split(), **own) as started:
        run = started.finish(30, expect=2)
    assert re.search(f"error: .*{words}", run.lines()[-1]) and not starts(run.out)


def test_runs_with_several_numbers_of_processes_have_the_same_threads(folder, stub):
    for numbers, threads in (("1,2", max(1, CORES // 2)), (f"1,{CORES + 1}", 1)):
        words = ["--processes", numbers, "--", *NO_SAMPLE]
        for found in given(launch_series(folder, *words, PYTHON=stub, OMP_NUM_THREADS=None)):
            assert f"OMP_NUM_THREADS={threads}" in found


@guards("slurm-terminal")
def test_a_shell_of_srun_on_one_of_several_nodes_is_no_step(folder):
    """srun --pty gives a terminal to one task alone."""
    in_terminal = "import os, pty, sys; os._exit(pty.spawn(sys.argv[1:]) >> 8)"
    env = dict(word.split("=", 1) for word in shlex.split(IN_STEP)) | {"SLURM_JOB_NUM_NODES": "2"}
    words = [sys.executable, "-c", in_terminal, "bash", MULTINODE, *NO_SAMPLE]
    with start(words, env=env, cwd=folder) as started:
        refused(started, "not started by srun")


def test_a_log_folder_that_cannot_be_made_is_refused(folder):
    (folder / "file").touch()
    with launch(SINGLE, folder, *NO_SAMPLE, LOG_DIR=folder / "file/logs") as started:
        refused(started, f"{folder}/file/logs")


def test_an_exported_cdpath_changes_nothing(tmp_path):
    """With it `cd` prints where it goes, and may go elsewhere."""
    (tmp_path / ROOT.name / "tools").mkdir(parents=True)
    words = ["bash", SINGLE.relative_to(ROOT.parent)]
    with start(words, env={"CDPATH": f"{tmp_path}:.", "GPUS": "0"}, cwd=ROOT.parent) as started:
        refused(started, "GPUS")


TWO_NODES_SH = ROOT / "tools/two_nodes.sh"


@pytest.mark.parametrize("options", ["--help", "-h", "--max_steps 5 --help"])
@pytest.mark.parametrize("launcher", [SINGLE, MULTINODE, TWO_NODES_SH], ids=lambda path: path.name)
def test_help_is_the_commands_own_header_and_starts_nothing(folder, launcher, options):
    options = [*["--"][: launcher == TWO_NODES_SH], *options.split()]
    with launch(launcher, folder, *options, PYTHON="/nowhere/python", NNODES=None) as started:
        *header, last = started.finish(30).lines()
    text = launcher.read_text()
    assert len(header) > 8 and all(f"\n# {line}\n" in text for line in header if line)
    assert "python demo_coco_resnet18.py --help" in last and not [*folder.iterdir()]


# --- Networks ----------------------------------------------------------------------------------


def make_sysfs(root: Path, *carriers: str) -> Path:
    """A root of sysfs with these interfaces, and with adapters, which no machine for tests has."""
    for name in carriers:
        (root / "class/net" / name).mkdir(parents=True)
        (root / "class/net" / name / "carrier").write_text("0\n" if name == "loose0" else "1\n")
    for name, state in {"mlx5_0": 4, "mlx5_1": 4, "mlx5_2": 1, "rdmap0s6": 4}.items():
        adapter = root / "class/infiniband" / name
        (adapter / "ports/1").mkdir(parents=True)
        (adapter / "ports/1/state").write_text("4: ACTIVE\n" if state == 4 else "1: DOWN\n")
        (adapter / "device").mkdir()
        driver = "efa" if name == "rdmap0s6" else "mlx5_core"
        (adapter / "device/driver").symlink_to(f"/sys/bus/pci/drivers/{driver}")
    return root


@pytest.fixture(scope="module")
def sysfs(tmp_path_factory) -> Path:
    root = make_sysfs(tmp_path_factory.mktemp("my sys"), "lo", "eth0", "loose0", "down0")
    (root / "class/net/down0/carrier").unlink()  # the kernel's cannot be read
    return root


VERBS = {"NCCL_IB_DISABLE=0", "NCCL_NET=IB"}
SOCKETS = {"NCCL_IB_DISABLE=1", "NCCL_NET=Socket"}
GLOO = {"GLOO_SOCKET_IFNAME=eth0"}


def ifname(name: str) -> set[str]:
    return {f"NCCL_SOCKET_IFNAME=={name}", f"GLOO_SOCKET_IFNAME={name}"}


ETH0 = ifname("eth0")
OWN_VALUES = {"IFNAME": "eth0", "NCCL_IB_DISABLE": "0", "GLOO_SOCKET_IFNAME": "lo"}
MINE = SOCKETS - {"NCCL_IB_DISABLE=1"} | {"NCCL_IB_DISABLE=0", "NCCL_SOCKET_IFNAME==eth0"}
CHOSEN = guarded(
    ("ifname-exact", {"IFNAME": "eth0"}, SOCKETS | ETH0),
    ("hca-exact net-ib", {"IFNAME": "mlx5_0,eth0"}, VERBS | {"NCCL_IB_HCA==mlx5_0"} | ETH0),
    ("", {"IFNAME": "mlx5_0,mlx5_1,eth0"}, VERBS | {"NCCL_IB_HCA==mlx5_0,mlx5_1"} | ETH0),
    ("", {"IFNAME": "eth0", "NETWORK": "infiniband"}, VERBS | ETH0),
    ("efa-plugin", {"IFNAME": "rdmap0s6,eth0"}, ETH0),
    ("user-value-wins", OWN_VALUES, MINE | {"GLOO_SOCKET_IFNAME=lo"}),
)


def chosen(started: Started) -> set[str]:
    """What the command sets for NCCL and Gloo, except NCCL's debug text."""
    (words,) = given(started)
    return {word for word in words if re.match("(NCCL|GLOO)_(?!DEBUG)", word)}


@pytest.mark.parametrize(("variables", "expected"), CHOSEN)
def test_nccl_is_kept_on_the_adapters_or_interface_except_with_efa(
    tmp_path, sysfs, stub, variables, expected
):
    """A value of the user's own stays."""
    own = {"NNODES": 2, "NODE_RANK": 0, "MASTER_ADDR": "127.0.0.1", **variables}
    started = launch(MULTINODE, tmp_path, PYTHON=stub, SYSFS_ROOT=sysfs, **own)
    assert chosen(started) == expected


@guards("kept-value-is-said")
def test_a_line_says_which_of_the_users_own_variables_stay(tmp_path, sysfs, stub):
    own = {"PYTHON": stub, "SYSFS_ROOT": sysfs, **OWN_VALUES}
    run = launch(MULTINODE, tmp_path, *NO_SAMPLE, **own).finish(30)
    said = re.findall(r"\.(?:sh|py): keeping your (\w+)='(\w+)'", run.out)
    assert dict(said) == {"NCCL_IB_DISABLE": "0", "GLOO_SOCKET_IFNAME": "lo"}


@pytest.fixture(scope="module")
def routes() -> Iterator[NamespacePair]:
    """Node 1 has a network of its own for containers, on each of two kinds of interfaces."""
    with NamespacePair() as pair:
        for name, kind, net in (("br-x", "bridge", 79), ("veth7", "veth peer name end", 80)):
            pair.ip(1, f"link add {name} up type {kind}", f"addr add 10.{net}.0.2/24 dev {name}")
        pair.ip(1, "link set end up")
        pair.usual_hosts()
        yield pair


HCA = VERBS | {"NCCL_IB_HCA==mlx5_0,mlx5_1"}
BRIDGE, VETH = (ifname("br-x"), ifname("veth7"))
ROUTES = guarded(  # fault, node, variables, interfaces other than the real ones, the outcome
    ("route-interface nccl-route", 1, {}, "", ETH0),
    ("", 1, {}, "lo eth0 ib0 br-x", ETH0),
    ("", 1, {"NCCL_SOCKET_IFNAME": "eth0"}, "", {"NCCL_SOCKET_IFNAME=eth0"} | GLOO),
    ("", 1, {"MASTER_ADDR": "10.80.0.1"}, "", VETH),
    ("", 1, {"MASTER_ADDR": "10.79.0.1"}, "", BRIDGE),
    ("", 1, {"MASTER_ADDR": "10.79.0.2"}, "", BRIDGE),  # its own address
    ("loopback-name", 0, {"MASTER_ADDR": "node0"}, "", ETH0),  # its own name
    ("", 0, {"IFNAME": "mlx5_0,mlx5_1"}, "lo eth0", HCA | ETH0),
)


@pytest.mark.parametrize(("node", "variables", "interfaces", "expected"), ROUTES)
def test_without_a_named_interface_the_route_to_node_0_tells_it(
    tmp_path, routes, stub, node, variables, interfaces, expected
):
    """It may be one of containers."""
    env = HERE | {"NNODES": "2", "NODE_RANK": str(node), "MASTER_ADDR": "10.77.0.1"}
    env |= {"PYTHON": str(stub), **variables}
    if interfaces:
        env["SYSFS_ROOT"] = str(make_sysfs(tmp_path / "sys", *interfaces.split()))
    words = ["bash", MULTINODE, *NO_SAMPLE]
    assert chosen(routes.popen(node, words, env=env, cwd=tmp_path)) == expected
