"""The launchers and their helpers: real bash, and stand-ins for torchrun and the script.

The script's stand-in says what it was given and then does what a test asks of it, so that these
tests are about the launchers alone; other test files run the real script under the same launchers.
With DEMO_LONG=1 those in which torchrun has a part of its own are repeated with the real one.
"""

import os
import re
import shutil
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

import preflight
from support.cgroups import CGROUPS, make_cgroups
from support.launcher_folder import LauncherFolder
from support.nodes import namespaces, require_namespaces
from support.processes import LONG, WITH_STAND_IN, long, require, start, wait_until
from test_networks import errors, reports

BOTH = pytest.mark.parametrize("folder", ["stand-in", *long("torchrun")], indirect=True)
REAL = pytest.mark.parametrize("folder", long("torchrun"), indirect=True)


class Folder(LauncherFolder):
    """With its own logs, programs that come first, and torchrun or the stand-in for it."""

    def __init__(self, path, torchrun="stand-in"):
        super().__init__(path)
        self.started = []
        (path / "programs").mkdir()
        programs = f"{path}/programs:{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.usual = {"PATH": programs, "PYTHON": sys.executable}
        if torchrun == "stand-in":
            self.usual |= WITH_STAND_IN

    def program(self, name, text):
        path = self.path / "programs" / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def start(self, *command, **variables):
        env = dict.fromkeys(["CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "VIRTUAL_ENV"])
        env |= self.usual | {name: str(value) for name, value in variables.items()}
        self.started.append(start(["bash", *command], env=env, cwd=self.path))
        return self.started[-1]

    def run(self, *command, expect=0, **variables):
        """To the end. A process that outlives it is an error."""
        return self.start(*command, **variables).finish(60, expect)

    def log(self, name="*", node=0):
        (path,) = self.path.glob(f"logs/{name}/node{node}.log")
        return path.read_text()


@pytest.fixture
def folder(tmp_path, request):
    """Each launcher runs in a folder with a space and an accent in its name."""
    path = tmp_path / "mein Gerät"
    path.mkdir()
    made = Folder(path, getattr(request, "param", "stand-in"))
    yield made
    for started in made.started:
        started.kill()


def add_probe(folder):
    shutil.copy(folder.path / "demo_coco_resnet18.py", folder.path / "tools/probe_link.py")


def hanging(started):
    """The process id of a rank that hangs, and that of its torchrun."""
    rank = int(started.wait_for(r"\] hanging.* (\d+)$")[1])
    return rank, int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1])


def one_line(run, text):
    """Nothing but this error has been printed."""
    assert run.out.count("\n") == 1 and "error: " in run.out and text in run.out


# ---- one machine


@BOTH
def test_arguments_reach_every_process_and_the_log_has_what_the_terminal_had(folder, tmp_path):
    """Also where log and arguments have accents, of which the locale knows nothing."""
    add_probe(folder)
    arguments = ["--coco_image_path", "a folder/it's", "", "*", "ä b", "--lr=0.1"]
    variables = {"GPUS": 2, "OMP_NUM_THREADS": 3, "WORLD_SIZE": 7, "NODE_RANK": 5, "LC_ALL": "C"}
    variables |= {"LOG_DIR": tmp_path / "meine Läufe", "RUN_NAME": "größer 2"}
    run = folder.run("launch_single.sh", *arguments, **variables)
    scripts = ["tools/probe_link.py", "demo_coco_resnet18.py"]
    found = [(report["script"], report["rank"]) for report in reports(run)]
    assert sorted(found) == sorted((Path(s).name, rank) for s in scripts for rank in (0, 1))
    for report in reports(run):
        assert (report["argv"], report["world_size"]) == (arguments, 2)
        assert report["env"]["OMP_NUM_THREADS"] == "3"
    for script in scripts:
        shown = f"torchrun --standalone --nnodes=1 --nproc_per_node=2 {script} --coco_image_path"
        assert re.search(f"{shown} .* 'ä b' --lr=0.1\n", run.out)
    assert (tmp_path / "meine Läufe/größer 2/node0.log").read_text() == run.out
    # torchrun's own choice was not needed
    assert "OMP_NUM_THREADS environment variable" not in run.out


def stand_in_for_the_sample(folder, more=""):
    """A make_sample_coco.py that says how it was called."""
    text = f"import sys; print('MADE', sys.argv[1:])\n{more}"
    (folder.path / "tools/make_sample_coco.py").write_text(text)


def test_without_arguments_it_trains_on_the_sample_set(folder):
    """On several nodes it is another training: test_networks.py."""
    stand_in_for_the_sample(folder)
    (folder.path / "tools/launcher/cores.sh").write_text("echo 6")
    run = folder.run("launch_single.sh")
    data = folder.path / "data/sample_coco"
    assert f"MADE ['--processes', '6', '{data}']" in run.out
    (report,) = reports(run)
    assert report["env"]["OMP_NUM_THREADS"] == "6"
    options = dict(zip(report["argv"][::2], report["argv"][1::2], strict=True))
    assert options["--annotation_path"] == f"{data}/annotations/instances_train2017.json"
    assert (options["--val_image_path"], options["--image_size"]) == (f"{data}/val2017", "128")


def test_checkout_that_cannot_be_written(folder, tmp_path):
    """The logs lie elsewhere, and the sample set has no place."""
    require(os.geteuid() == 0 and shutil.which("unshare"), "only root can mount it read-only")
    for path in (folder.path, tmp_path):
        (path / "attempts0").touch()  # which the script's stand-in writes
    mount = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0"'
    mount += ' && mount --bind "$LOG_DIR/attempts0" "$0/attempts0" && cd "$LOG_DIR"'
    inside = ["-c", 'exec unshare -m bash -c "$@"', "bash"]
    inside += [f'{mount} && bash "$0/launch_single.sh" "$@"', folder.path]
    run = folder.run(*inside, "x", LOG_DIR=tmp_path, RUN_NAME="run")
    assert reports(run) and (tmp_path / "run/node0.log").read_text() == run.out
    refused = folder.run(*inside, expect=1, LOG_DIR=tmp_path)
    one_line(refused, f"made in {folder.path}/data, which cannot be written: give --coco_image")


def test_exported_cdpath_changes_nothing(folder):
    """Under it `cd` prints where it goes."""
    shutil.rmtree(folder.path / "tools")
    for name in ("launch_single.sh", "launch_multinode.sh"):
        command = ["-c", 'cd .. && exec bash "$@"', "bash", f"{folder.path.name}/{name}", "x"]
        run = folder.run(*command, CDPATH=".", NNODES=1, PYTHON="echo")
        assert f" {folder.path}/demo_coco_resnet18.py x\n" in run.out, name


def test_without_tools_the_launchers_still_train(folder):
    shutil.rmtree(folder.path / "tools")
    folder.usual["PYTHON"] = ""  # the one on the PATH has torch
    run = folder.run("launch_single.sh", "--lr", "1", NETWORK="ethernet", IFNAME="lo")
    (report,) = reports(run)
    assert report["argv"] == ["--lr", "1"] and report["env"]["GLOO_SOCKET_IFNAME"] == "lo"
    assert "tools/ is missing, and with it the log, restarts, the probe" in run.out
    command = r"OMP_NUM_THREADS=\d+ torchrun --standalone .*demo_coco_resnet18.py --lr 1\n"
    assert re.search(command, run.out) and not (folder.path / "logs").exists()
    one_line(folder.run("launch_single.sh", expect=1), "make_sample_coco.py, which is missing")
    for setting in ({"RESTARTS": 1}, {"NETWORKS": "one=eth0 two=eth0"}):
        refused = folder.run("launch_single.sh", "x", expect=1, **setting)
        one_line(refused, "tools/ is missing, and with it RESTARTS and PROBE=1, and NETWORKS")


# By where the cause is found: in an error file, in torch's own of @record, in the output.
# test_supervise.py has all kinds, without a launcher.
CAUSES = {
    "error": r"\[CPU 0\] ERROR: no such folder: /nowhere0",
    "traceback": "ValueError: a bug in the script",
    "silent": "torchrun ended with code 1; its last line: the last words",
}


@pytest.mark.parametrize(
    ("folder", "action"),
    [("stand-in", "error"), *(pytest.param("torchrun", action, marks=LONG) for action in CAUSES)],
    indirect=["folder"],
)
def test_root_cause_is_the_last_line(folder, action):
    folder.plan(action)
    add_probe(folder)
    variables = {"GPUS": 2, "PROBE": 0, "RESTARTS": 3 * (action == "error")}
    run = folder.run("launch_single.sh", "x", expect=1, **variables)
    for text in (run.out, folder.log()):
        assert re.fullmatch(CAUSES[action], text.splitlines()[-1]), text
    assert "restart 1" not in run.out and "tools/probe_link.py" not in run.out


# ---- restarts and signals


@BOTH
def test_restarts_resume_and_give_up(folder):
    folder.plan("lost", "bug", "kill")
    checkpoint = folder.path / "logs/again/checkpoint.pt"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.write_text("of an earlier run")
    run = folder.run("launch_single.sh", "x", expect=1, RESTARTS=2, RUN_NAME="again")
    given = ["x", "--checkpoint", "logs/again/checkpoint.pt"]
    resumed = [*given, "--resume"]
    assert [report["argv"] for report in reports(run)] == [given, resumed, resumed]
    assert "restart 1 of 2 after: [CPU 0] ERROR: in step 3: Connection closed" in run.out
    assert "restart 2 of 2 after: [CPU 0] RuntimeError" in run.out
    assert "gave up after 2 restarts" in run.out
    assert run.out.splitlines()[-1] == "rank 0 was ended by signal 9"
    (kept,) = checkpoint.parent.glob("checkpoint.pt?*")
    assert kept.read_text() == "of an earlier run" and not checkpoint.exists()


def test_restarts_leave_the_users_own_checkpoint_and_resume_alone(folder):
    (folder.path / "own.pt").write_text("to be resumed")
    own = ["--checkpoint=own.pt", "--resume"]
    (report,) = reports(folder.run("launch_single.sh", *own, RESTARTS=1))
    assert report["argv"] == own and (folder.path / "own.pt").read_text() == "to be resumed"


@BOTH
@pytest.mark.parametrize("name", ["SIGUSR1", "SIGINT"])
def test_signal_is_passed_on_and_never_restarted(folder, name):
    """A terminal sends SIGINT to the whole process group: launcher, tee and all."""
    folder.plan("wait")
    started = folder.start("launch_single.sh", "x", GPUS=2, RESTARTS=2)
    started.wait_for(r"(?s)\] waiting.*\] waiting")
    (os.killpg if name == "SIGINT" else os.kill)(started.pid, signal.Signals[name])
    output = started.finish(30, expect=75).out
    assert output.count(f"] Stopped on {name}") == folder.log().count(f"] Stopped on {name}") == 2
    assert "restart 1" not in output


@REAL
def test_orphans_of_a_killed_torchrun_are_ended_before_the_restart(folder):
    folder.plan("hang", "done")
    started = folder.start("launch_single.sh", "x", RESTARTS=1)
    orphan, torchrun = hanging(started)
    os.kill(torchrun, signal.SIGKILL)
    started.wait_for(r"(?s)\] hanging.*REPORT")
    assert orphan not in started.pids()
    output = started.finish(30).out
    assert "Killed" not in output  # bash's own report of it, with the whole command line
    assert "restart 1 of 1 after: torchrun was ended by signal 9" in output


@BOTH
def test_torchrun_does_not_outlive_its_launcher(folder):
    folder.plan("hang")
    started = folder.start("launch_single.sh", "x")
    _, torchrun = hanging(started)
    started.signal(signal.SIGKILL)
    wait_until(lambda: torchrun not in started.pids(), 5, "the end of torchrun")


# ---- what is refused, and how a node is set up


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ("", "set NNODES"),
        ("NNODES=2 WORLD_SIZE=4", "NNODES is 2 but WORLD_SIZE is 4"),
        ("NNODES=two", "NNODES is 'two': give a whole number"),
        ("NNODES=2", "NODE_RANK is not set: give 0 on the node of MASTER_ADDR, 1 to 1"),
        ("NNODES=2 NODE_RANK=2", "NODE_RANK is 2: give a number from 0 to 1 (NNODES is 2)"),
        ("WORLD_SIZE=2 NODE_RANK=0", "MASTER_ADDR is not set"),
        ("NNODES=1 MASTER_PORT=99999", "MASTER_PORT is 99999: give a number from 1 to 6553"),
        ("NNODES=1 RESTARTS=-1", "RESTARTS is '-1'"),
        ("NNODES=1 NETWORK=tokenring", "NETWORK is 'tokenring': give ethernet or infiniband"),
        ("NNODES=1 NETWORK=ethernet", "NETWORK=ethernet needs IFNAME"),
        ("NNODES=1 LOG_DIR=/proc/none RUN_NAME=a", "the log folder /proc/none/a cannot be made"),
        ("SLURM_JOB_ID=7", "job 7 but not started by srun"),
        ("SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_NTASKS=4", "srun started 4 tasks on 2 nodes"),
        ("GPUS=0", "GPUS is '0'"),
        ("GPUS=all", "all GPUs are asked for, but nvidia-smi finds none"),
    ],
)
def test_wrong_settings_are_refused_with_one_line(folder, settings, text):
    """What preflight.py and networks.py refuse is tested with them."""
    folder.program("nvidia-smi", "exit 9")
    launcher = "launch_single.sh" if "GPUS=" in settings else "launch_multinode.sh"
    given = {"SLURM_PROCID": 0, "SLURM_NNODES": 2}  # which count in a job alone
    given |= dict(word.split("=") for word in settings.split())
    run = folder.run(launcher, "x", expect=1, **given)
    (line,) = errors(run)
    assert text in line and not reports(run) and run.seconds < 20
    assert "LOG_DIR" in given or run.out.count("\n") == 1  # mkdir has said why


# Of a machine with three GPUs: what the user leaves of them, and how many CUDA then shows.
VISIBLE = {"0,2": 2, " 1, 0,": 2, "1,-1,0": 1, "GPU-8f1c,MIG-a0/1/0": 2, None: 3, "": 0}


@pytest.mark.parametrize(("visible", "wanted"), VISIBLE.items())
def test_gpus_are_counted_as_cuda_shows_them(folder, visible, wanted):
    folder.program("nvidia-smi", 'for n in 0 1 2; do echo "GPU $n: A100 (UUID: GPU-$n)"; done')
    shutil.rmtree(folder.path / "tools")
    given = {"PYTHON": "echo"} | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    run = folder.run("launch_multinode.sh", "x", NNODES=1, **given)
    assert f" --nproc_per_node={wanted or 1} " in run.out
    run = folder.run("launch_single.sh", "x", GPUS="all", expect=int(not wanted), **given)
    none = f"error: all GPUs are asked for, but CUDA_VISIBLE_DEVICES is '{visible}'"
    assert (f" --nproc_per_node={wanted} " if wanted else none) in run.out


@pytest.mark.parametrize("case", CGROUPS)
def test_cores_are_those_that_a_cgroup_leaves(folder, case):
    folder.program("nproc", 'echo "${OMP_NUM_THREADS:-64}"')  # as GNU's
    wanted = make_cgroups(folder.path, case) or 64
    run = folder.run("tools/launcher/cores.sh", folder.path, OMP_NUM_THREADS=7)
    assert run.out == f"{wanted}\n"


def test_cores_in_a_real_cgroup(folder, cgroup_of_one_core):
    enter = ["-c", 'echo $$ >"$0" && exec bash "$1"', cgroup_of_one_core / "cgroup.procs"]
    assert folder.run(*enter, "tools/launcher/cores.sh").out == "1\n"


def test_port_that_is_taken_and_nodes_that_do_not_come(folder):
    address, _ = preflight.route_to("203.0.113.1")
    require(address, "this machine has no address but loopback")
    node = {"NNODES": 2, "NODE_RANK": 0, "MASTER_ADDR": address, "CONNECT_TIMEOUT": 2}
    with socket.create_server(("", 0)) as server:
        node["MASTER_PORT"] = port = server.getsockname()[1]
        taken = folder.run("launch_multinode.sh", "x", expect=1, **node, RESTARTS=1)
    alone = folder.run("launch_multinode.sh", "x", expect=1, **node)
    text = f"port {port} cannot be used on this node (Address already in use)"
    assert text in taken.out.splitlines()[-1]
    text = "the other nodes did not all come within 2 s (missing: node 1): start the launcher"
    assert text in alone.out.splitlines()[-1]


# Of node 1 of two.
JOB = {"SLURM_JOB_ID": 2405, "SLURM_STEP_ID": 0, "SLURM_PROCID": 1, "SLURM_NODEID": 1}
JOB |= {"SLURM_NNODES": 2, "SLURM_JOB_NODELIST": "n[7-8]"}


# With six starts of each network three of them take 18 ports a job: 666 jobs until they repeat.
@pytest.mark.parametrize(
    ("networks", "port"),
    [("", 20050), pytest.param("a=eth0 b=eth0 c=eth0", 20000 + 2405 % 666 * 18, marks=LONG)],
)
def test_slurm_gives_address_port_and_rank(folder, networks, port):
    folder.program("getent", "exit 2")  # the node's name does not resolve
    folder.program("scontrol", 'echo "NodeName=$4 Arch=x NodeAddr=192.0.2.7 NodeHostName=n"')
    job = JOB | {"SLURM_NTASKS": 2, "CONNECT_TIMEOUT": 1, "NETWORKS": networks, "RESTARTS": 5}
    run = folder.run("launch_multinode.sh", "x", expect=1, **job)
    text = f"node 0 did not answer at 192.0.2.7:{port} within 1 s "
    assert re.search(re.escape(text) + ".*: start the launcher there with NODE_RANK=0", run.out)
    assert networks or text in folder.log("job2405", node=1)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n[7-8],m3", "n7"), ("gpu-[003-007,010]-ib,x", "gpu-003-ib"), ("r[1-2]n[05,07]", "r1n05")],
)
def test_first_node_of_a_slurm_job_without_scontrol(folder, nodes, first):
    folder.program("scontrol", "exit 127")
    folder.program("getent", f"exit {int(first == 'n7')}")  # whether the name resolves
    (folder.path / "tools/supervise.py").unlink()  # the launcher starts torchrun by itself
    job = JOB | {"SLURM_JOB_NODELIST": nodes, "PYTHON": "echo", "PROBE": 0}
    run = folder.run("launch_multinode.sh", "x", **job)
    address = f"--rdzv_backend=static --rdzv_endpoint={first}:20050"
    assert f"-m torch.distributed.run --nnodes=2 --node_rank=1 {address} --nproc" in run.out


ETHERNET = "NCCL_IB_DISABLE=1 NCCL_NET=Socket GLOO_SOCKET_IFNAME=lo"
INFINIBAND = "NCCL_IB_DISABLE=0 NCCL_NET=IB NCCL_IB_HCA==mlx5_97 GLOO_SOCKET_IFNAME=ib97"


@pytest.mark.parametrize(
    ("network", "names", "wanted"),
    [("ethernet", ["lo"], ETHERNET), ("infiniband", ["mlx5_97", "ib97"], INFINIBAND)],
)
def test_network_keeps_the_traffic_on_the_named_interface(folder, network, names, wanted):
    variables = {"NETWORK": network, "IFNAME": ",".join(names), "NCCL_SOCKET_IFNAME": "eth9"}
    run = folder.run("launch_single.sh", "x", **variables)
    env = reports(run)[0]["env"]
    assert {*wanted.split()} <= {f"{name}={value}" for name, value in env.items()}
    assert env["NCCL_SOCKET_IFNAME"] == "eth9" and folder.log(network) == run.out
    assert f"would set NCCL_SOCKET_IFNAME=={names[-1]}, but it is set to 'eth9'" in run.out
    missing = re.findall(r"warning: this node has no interface or adapter (\w+)", run.out)
    assert missing == [name for name in names if name != "lo"]


# ---- two nodes on one machine


@pytest.fixture
def two_nodes(folder):
    """The folder, where network namespaces can be made; checks that none of them is left."""
    require_namespaces()
    yield folder
    assert not [name for started in folder.started for name in namespaces(started)]


@BOTH
def test_two_nodes_probe_train_and_restart_on_ports_of_their_own(two_nodes):
    add_probe(two_nodes)
    two_nodes.plan("done", "lost", "done")
    options = ["--gpus-per-node", 2, "--name", "series", "--", "--lr", "0.1", "a b"]
    variables = {"RESTARTS": 2, "CDPATH": "."}  # which makes cd print where it goes
    run = two_nodes.run("tools/two_nodes.sh", *options, **variables)
    given = ["--lr", "0.1", "a b", "--checkpoint", "logs/series/checkpoint.pt"]
    starts = [("probe_link.py", given), ("demo_coco_resnet18.py", given)]
    starts.append(("demo_coco_resnet18.py", [*given, "--resume"]))
    first = int(reports(run)[0]["port"])
    for node in (0, 1):
        found = [report for report in reports(run) if report["node_rank"] == str(node)]
        assert [(int(r["port"]) - first, (r["script"], r["argv"])) for r in found] == [
            (n, start) for n, start in enumerate(starts) for _ in (0, 1)
        ]
        assert {(r["rank"], r["world_size"]) for r in found} == {(2 * node, 4), (2 * node + 1, 4)}
        assert {r["env"]["GLOO_SOCKET_IFNAME"] for r in found} == {"veth0"}
        text = two_nodes.log("series", node)
        assert text.count("REPORT") == 6
        assert re.search(f'Node {{"node": {node}, "host": "node{node}", .*"starts": 3,', text)
        assert re.search(r"this node sent .* on veth0 \(ethernet\).* in \d+ s\n", text)
    # torch warns where it finds no host name; that node 0's store has ended first is no fault here
    warnings = [line for line in run.out.splitlines() if "[W" in line]
    assert all("recvValueWithTimeout failed" in line for line in warnings), warnings


def test_two_nodes_link_has_the_rate_asked_for(two_nodes):
    two_nodes.plan("send")
    run = two_nodes.run("tools/two_nodes.sh", "--rate", "100mbit", "--", "x")
    rate, mtu = map(float, re.search(r"RATE (\S+) MTU (\d+)", run.out).groups())
    # Ethernet's header; IP's, TCP's and its time stamp
    assert rate * (mtu + 14) / (mtu - 52) == pytest.approx(100, rel=0.02)


@BOTH
def test_two_nodes_stops_both_and_cleans_up(two_nodes):
    two_nodes.plan("wait")
    who = {"SUDO_UID": 65533, "SUDO_GID": 65532}
    started = two_nodes.start("tools/two_nodes.sh", "--", "x", RESTARTS=3, **who)
    started.wait_for(r"(?s)\] waiting.*\] waiting")
    assert len(namespaces(started)) == 2
    started.signal(signal.SIGTERM)
    assert started.finish(30, expect=75).out.count("] Stopped on SIGTERM") == 2
    made = [two_nodes.path / "logs", *(two_nodes.path / "logs").rglob("*")]
    assert {"node0.log", "node1.log"} <= {path.name for path in made}
    assert {owner(path) for path in made} == {(65533, 65532)}


def owner(path):
    found = os.lstat(path)
    return found.st_uid, found.st_gid


# In the place of what makes the sample: makes files, and writes into one that was there.
MAKES = """
from pathlib import Path
Path("data/sample_coco").mkdir(parents=True)
Path("data/sample_coco/link").symlink_to("../../demo_coco_resnet18.py")
for name in ("new", "others"):
    Path("logs/run", name).write_text("more")
"""


@pytest.mark.parametrize("folder_of", ["the caller", "root"])
def test_two_nodes_under_sudo_gives_nothing_else_away(two_nodes, folder_of):
    """Neither what was there before nor what a link points to, also where it fails."""
    stand_in_for_the_sample(two_nodes, MAKES)
    caller, other, root = (65533, 65533), (65532, 65532), (os.geteuid(), os.getegid())
    own = caller if folder_of == "the caller" else root
    run = two_nodes.path / "logs/run"
    run.mkdir(parents=True)
    for name, of in {"old": root, "others": other, ".": own}.items():
        (run / name).touch()
        os.chown(run / name, *of)
    time.sleep(0.05)  # the clock of a file system goes by steps of some ms
    command = ["tools/two_nodes.sh", "--rate", "fast", "--name", "run"]
    failed = two_nodes.run(*command, expect=1, SUDO_UID=caller[0], SUDO_GID=caller[1])
    assert "tc does not take --rate fast" in failed.out
    owners = {"logs/run/others": other, "logs/run/new": own}
    owners |= dict.fromkeys(["data", "data/sample_coco", "data/sample_coco/link"], caller)
    owners |= dict.fromkeys(["logs", "logs/run/old", "demo_coco_resnet18.py", "tools"], root)
    assert {name: owner(two_nodes.path / name) for name in owners} == owners


@LONG
def test_two_nodes_killed_itself_is_cleaned_up_by_the_next(two_nodes):
    two_nodes.plan("wait", "done")
    started = two_nodes.start("tools/two_nodes.sh", "--", "x")
    started.wait_for(r"(?s)\] waiting.*\] waiting")
    started.signal(signal.SIGKILL)
    started.finish(30, expect=-signal.SIGKILL, clean=30)  # its launchers stop
    assert len(namespaces(started)) == 2
    two_nodes.run("tools/two_nodes.sh", "--", "x")
    assert not namespaces(started)


def test_two_nodes_elsewhere_than_on_linux_as_root_says_so(folder):
    for program, says, text in (("id", 1000, "need root"), ("uname", "Darwin", "Linux's own")):
        folder.program(program, f"echo {says}")
        one_line(folder.run("tools/two_nodes.sh", "--", "x", expect=1), text)
