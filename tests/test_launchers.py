"""The launchers and their helpers: real bash, and stand-ins for torchrun and the script.

The script's stand-in says what it was given and then does what a test asks of it, so that these
tests are about the launchers alone; other test files run the real script under the same launchers.
With DEMO_LONG=1 those in which torchrun has a part of its own are repeated with the real one.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

import preflight
from support.cgroups import CGROUPS, make_cgroups
from support.launcher_folder import LauncherFolder
from support.nodes import NamespacePair, namespaces, why_no_namespaces
from support.processes import LONG, ROOT, WITH_STAND_IN, long, require, start, wait_until

BOTH = pytest.mark.parametrize("folder", ["stand-in", *long("torchrun")], indirect=True)
REAL = pytest.mark.parametrize("folder", long("torchrun"), indirect=True)
# Of these a test sets what it needs; what the machine happens to have set must not disturb it.
LAUNCHER_VARIABLES = re.compile(
    "(SLURM|NCCL|GLOO)_.*|NNODES|WORLD_SIZE|NODE_RANK|MASTER_ADDR|MASTER_PORT|GPUS_PER_NODE|GPUS|"
    "RESTARTS|PROBE|CONNECT_TIMEOUT|NETWORK|IFNAME|LOG_DIR|RUN_NAME|"
    "CONDA_PREFIX|CDPATH|SUDO_(UID|GID)"
)


class Folder(LauncherFolder):
    """With its own logs, programs that come first, and torchrun or the stand-in for it."""

    def __init__(self, path, torchrun):
        super().__init__(path)
        self.started = []
        (path / "programs").mkdir()
        programs = f"{path}/programs:{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.env = {"PATH": programs, "PYTHON": sys.executable}
        if torchrun == "stand-in":
            self.env |= WITH_STAND_IN

    def program(self, name, text):
        path = self.path / "programs" / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def start(self, *command, **variables):
        unset = [name for name in os.environ if LAUNCHER_VARIABLES.fullmatch(name)]
        unset += ["CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "VIRTUAL_ENV"]
        given = {name: str(value) for name, value in variables.items()}
        env = dict.fromkeys(unset) | self.env | given
        self.started.append(start(["bash", *command], env=env, cwd=self.path))
        return self.started[-1]

    def run(self, *command, **variables):
        """Exit code and what came to the terminal. A process that outlives it is an error."""
        run = self.start(*command, **variables).finish(60, expect=None)
        return run.returncode, run.out

    def log(self, name="*", node=0):
        (path,) = self.path.glob(f"logs/{name}/node{node}.log")
        return path.read_text()


@pytest.fixture
def folder(tmp_path, request):
    made = Folder(tmp_path, torchrun=getattr(request, "param", "stand-in"))
    yield made
    for started in made.started:
        started.kill()


def reports(output):
    return [json.loads(line) for line in re.findall(r"REPORT (\{.*\})", output)]


def add_probe(folder):
    shutil.copy(folder.path / "demo_coco_resnet18.py", folder.path / "tools/probe_link.py")


def hanging(started):
    """The process id of a rank that hangs, and that of its torchrun."""
    rank = int(started.wait_for(r"\] hanging.* (\d+)$")[1])
    return rank, int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1])


# ---- one machine


@BOTH
def test_arguments_reach_every_process_and_the_log_has_what_the_terminal_had(folder):
    add_probe(folder)
    arguments = ["--coco_image_path", "a folder/it's", "", "*", "--lr=0.1"]
    variables = {"GPUS": 2, "PROBE": 0, "OMP_NUM_THREADS": 3, "WORLD_SIZE": 7, "NODE_RANK": 5}
    code, output = folder.run("launch_single.sh", *arguments, **variables)
    assert code == 0, output
    found = reports(output)
    assert sorted(report["rank"] for report in found) == [0, 1]
    for report in found:
        assert (report["argv"], report["script"]) == (arguments, "demo_coco_resnet18.py")
        assert report["world_size"] == 2
        assert report["env"]["OMP_NUM_THREADS"] == "3"
    assert "torchrun --standalone --nnodes=1 --nproc_per_node=2 demo_coco_resnet18.py --" in output
    assert folder.log() == output
    # torchrun's own choice was not needed
    assert "OMP_NUM_THREADS environment variable" not in output


def stand_in_for_the_sample(folder, more=""):
    """A make_sample_coco.py that says how it was called."""
    text = f"import sys; print('MADE', sys.argv[1:])\n{more}"
    (folder.path / "tools/make_sample_coco.py").write_text(text)


def test_without_arguments_it_trains_on_the_sample_set(folder):
    stand_in_for_the_sample(folder)
    (folder.path / "tools/launcher/cores.sh").write_text("echo 6")
    code, output = folder.run("launch_single.sh")
    assert code == 0, output
    data = folder.path / "data/sample_coco"
    assert f"MADE ['--processes', '6', '{data}']" in output
    (report,) = reports(output)
    options = dict(zip(report["argv"][::2], report["argv"][1::2], strict=True))
    assert options["--annotation_path"] == f"{data}/annotations/instances_train2017.json"
    assert options["--val_image_path"] == f"{data}/val2017"
    assert (options["--weights"], options["--image_size"]) == ("none", "128")
    assert report["env"]["OMP_NUM_THREADS"] == "6"


def test_checkout_that_cannot_be_written(folder):
    """The logs lie elsewhere, and the sample set has no place."""
    require(os.geteuid() == 0 and shutil.which("unshare"), "only root can mount it read-only")
    with tempfile.TemporaryDirectory() as elsewhere:
        (Path(elsewhere) / "attempts0").touch()  # which the script's stand-in writes
        (folder.path / "attempts0").touch()
        mount = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1"'
        mount += ' && mount --bind "$2/attempts0" "$1/attempts0" && cd "$2" && shift 2 && "$@"'
        inside = ["unshare", "-m", "bash", "-c", mount, "bash", folder.path, elsewhere]

        def launch(*arguments):
            words = [*inside, "bash", folder.path / "launch_single.sh", *arguments]
            command = ["-c", '"$@"', "bash", *words]
            return folder.run(*command, LOG_DIR=elsewhere, RUN_NAME="run")

        code, output = launch("x")
        assert code == 0 and reports(output), output
        assert "REPORT" in (Path(elsewhere) / "run/node0.log").read_text()
        code, output = launch()
    assert (code, output.count("\n")) == (1, 1)
    assert f"made in {folder.path}/data, which cannot be written: give --coco_image" in output


@pytest.mark.parametrize("launcher", ["launch_single.sh", "launch_multinode.sh"])
def test_exported_cdpath_changes_nothing(folder, launcher):
    """Under it `cd` prints where it goes."""
    shutil.rmtree(folder.path / "tools")  # the launcher starts torchrun by itself
    command = ["-c", 'cd .. && exec bash "$@"', "bash", f"{folder.path.name}/{launcher}", "x"]
    code, output = folder.run(*command, CDPATH=".", NNODES=1, PYTHON="echo")
    assert code == 0 and f" {folder.path}/demo_coco_resnet18.py x\n" in output


def test_path_with_a_space_and_an_accent(tmp_path):
    """In a locale that knows no accent."""
    (tmp_path / "mein Gerät").mkdir()
    folder = Folder(tmp_path / "mein Gerät", torchrun="stand-in")
    add_probe(folder)
    variables = {"LOG_DIR": tmp_path / "meine Läufe", "RUN_NAME": "größer 2", "GPUS": 2}
    variables |= {"NETWORK": "ethernet", "IFNAME": "lo", "NCCL_NET": "IB"}  # which it remarks on
    code, output = folder.run("launch_single.sh", "ä b", LC_ALL="C", **variables)
    assert code == 0, output
    found = reports(output)
    assert [r["script"] for r in found] == ["probe_link.py"] * 2 + ["demo_coco_resnet18.py"] * 2
    assert all(report["argv"] == ["ä b"] for report in found)
    torchrun = "torchrun --standalone --nnodes=1 --nproc_per_node=2"
    assert f"{torchrun} tools/probe_link.py 'ä b'\n" in output
    assert "demo_coco_resnet18.py 'ä b'\n" in output and "would set NCCL_NET=Socket" in output
    assert (tmp_path / "meine Läufe/größer 2/node0.log").read_text() == output


def test_without_tools_the_launchers_still_train(folder):
    shutil.rmtree(folder.path / "tools")
    folder.env["PYTHON"] = ""  # the one on the PATH has torch
    variables = {"NETWORK": "ethernet", "IFNAME": "lo"}
    code, output = folder.run("launch_single.sh", "--lr", "1", **variables)
    assert code == 0, output
    (report,) = reports(output)
    assert report["argv"] == ["--lr", "1"] and report["env"]["GLOO_SOCKET_IFNAME"] == "lo"
    assert "tools/ is missing, and with it the log, restarts, the probe" in output
    assert re.search(
        r"OMP_NUM_THREADS=\d+ torchrun --standalone .*demo_coco_resnet18.py --lr 1\n", output
    )
    assert not (folder.path / "logs").exists()
    code, output = folder.run("launch_single.sh")
    assert code == 1
    assert "make_sample_coco.py, which is missing" in output
    for setting in ({"RESTARTS": 1}, {"PROBE": 1}, {"NETWORKS": "one=eth0 two=eth0"}):
        code, output = folder.run("launch_single.sh", "x", **setting)
        assert code == 1 and not reports(output)
        assert "tools/ is missing, and with it RESTARTS and PROBE=1, and NETWORKS" in output


@BOTH
def test_without_tools_two_nodes_train(folder):
    shutil.rmtree(folder.path / "tools")
    with NamespacePair() as nodes:
        started = []
        for node in (0, 1):
            env = {"NNODES": "2", "NODE_RANK": str(node), "MASTER_ADDR": nodes.addresses[0]}
            env |= {"GPUS_PER_NODE": "2", **folder.env}
            command = ["bash", folder.path / "launch_multinode.sh", "x"]
            started.append(nodes.popen(node, command, env=env, cwd=folder.path))
        runs = [run.finish(60) for run in started]
    assert sorted(r["rank"] for run in runs for r in reports(run.out)) == [0, 1, 2, 3]
    address = "--rdzv_backend=static --rdzv_endpoint=10.77.0.1:29500"
    for node, run in enumerate(runs):
        assert f"torchrun --nnodes=2 --node_rank={node} {address} --nproc_per_node=2" in run.out


CAUSES = {
    "error": r"\[CPU 0\] ERROR: no such folder: /nowhere0",
    "usage": r"demo_coco_resnet18\.py: error: argument --lr: invalid value; see --help",
    "traceback": "ValueError: a bug in the script",
    "kill": "rank 0 was ended by signal 9",
    "code75": r"\[CPU \d\] Stopped on the end of its parent process .*",
    "silent": "torchrun ended with code 1; its last line: the last words",
}
# By where the cause is found: in an error file, in torch's own of @record, in torchrun's report of
# a signal, in the output. test_supervise.py has all kinds, without a launcher.
BY_TORCHRUN = ["error", "traceback", "kill", "silent"]


@pytest.mark.parametrize(
    ("folder", "action"),
    [("stand-in", "error"), ("stand-in", "silent")]
    + [pytest.param("stand-in", action, marks=LONG) for action in ("usage", "code75")]
    + [pytest.param("torchrun", action, marks=LONG) for action in BY_TORCHRUN],
    indirect=["folder"],
)
def test_root_cause_is_the_last_line(folder, action):
    cause = CAUSES[action]
    folder.plan(action)
    earlier = "[CPU 0] Stopped on SIGTERM, in an earlier run\n"  # which had code 75, not this one
    (folder.path / "logs/same").mkdir(parents=True)
    (folder.path / "logs/same/node0.log").write_text(earlier)
    restarts = 3 if action in ("usage", "error") else 0  # what the user has to mend
    variables = {"GPUS": 2, "RUN_NAME": "same", "RESTARTS": restarts}
    code, output = folder.run("launch_single.sh", "x", **variables)
    assert code == 1
    (kept,) = folder.path.glob("logs/same/node0.log.*")
    assert kept.read_text() == earlier and earlier not in folder.log()
    assert re.fullmatch(cause, output.splitlines()[-1]), output
    assert re.fullmatch(cause, folder.log().splitlines()[-1])
    assert "restart 1" not in output


# ---- restarts and signals


@BOTH
def test_restarts_resume_and_give_up(folder):
    folder.plan("lost", "bug", "kill")
    checkpoint = folder.path / "logs/again/checkpoint.pt"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.write_text("of an earlier run")
    code, output = folder.run("launch_single.sh", "x", RESTARTS=2, RUN_NAME="again")
    assert code == 1
    given = ["x", "--checkpoint", "logs/again/checkpoint.pt"]
    resumed = [*given, "--resume"]
    assert [report["argv"] for report in reports(output)] == [given, resumed, resumed]
    assert "restart 1 of 2 after: [CPU 0] ERROR: in step 3: Connection closed" in output
    assert "restart 2 of 2 after: [CPU 0] ValueError" in output
    assert "gave up after 2 restarts" in output
    assert output.splitlines()[-1] == "rank 0 was ended by signal 9"
    assert not checkpoint.exists()
    kept = [path.read_text() for path in checkpoint.parent.glob("checkpoint.pt.*")]
    assert kept == ["of an earlier run"]


def test_restarts_leave_the_users_own_checkpoint_and_resume_alone(folder):
    checkpoint = folder.path / "own.pt"
    checkpoint.write_text("to be resumed")
    own = ["--checkpoint=own.pt", "--resume"]
    code, output = folder.run("launch_single.sh", *own, RESTARTS=1)
    assert code == 0
    assert [report["argv"] for report in reports(output)] == [own]
    assert checkpoint.read_text() == "to be resumed"


@pytest.mark.parametrize(
    ("folder", "name"),
    [("stand-in", name) for name in ("SIGTERM", "SIGUSR1", "SIGINT")]
    + [pytest.param("torchrun", name, marks=LONG) for name in ("SIGUSR1", "SIGINT")],
    indirect=["folder"],
)
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


# ---- several nodes: what is refused, and what it says


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({}, "set NNODES"),
        ({"NNODES": 2, "WORLD_SIZE": 4}, "NNODES is 2 but WORLD_SIZE is 4"),
        ({"NNODES": "two"}, "NNODES is 'two': give a whole number"),
        ({"NNODES": 2}, "NODE_RANK is not set: give 0 on the node of MASTER_ADDR, 1 to 1"),
        (
            {"WORLD_SIZE": 2, "NODE_RANK": 2, "MASTER_ADDR": "10.0.0.1"},
            r"NODE_RANK is 2: give a number from 0 to 1 \(NNODES is 2\)",
        ),
        ({"NNODES": 2, "NODE_RANK": -1}, "NODE_RANK is '-1'"),
        ({"NNODES": 2, "NODE_RANK": 0}, "MASTER_ADDR is not set"),
        (
            {"NNODES": 1, "MASTER_PORT": 99999},
            "MASTER_PORT is 99999: give a number from 1 to 6553",
        ),
        ({"NNODES": 1, "GPUS_PER_NODE": "some"}, "GPUS_PER_NODE is 'some'"),
        ({"NNODES": 1, "RESTARTS": "x"}, "RESTARTS is 'x'"),
        (
            {"NNODES": 1, "NETWORK": "tokenring"},
            "NETWORK is 'tokenring': give ethernet or infiniband",
        ),
        ({"NNODES": 1, "NETWORK": "ethernet"}, "NETWORK=ethernet needs IFNAME"),
        ({"NNODES": 1, "LOG_DIR": "/proc/none"}, "log folder /proc/none/.* cannot be made"),
        # What preflight.py refuses as supervise.py does, whose tests have all such cases.
        (
            {"NNODES": 2, "NODE_RANK": 0, "MASTER_ADDR": "192.0.2.1"},
            "'192.0.2.1' is not an address of this node",
        ),
        (
            {"SLURM_JOB_ID": 7, "SLURM_PROCID": 0, "SLURM_NNODES": 2},
            "job 7 but not started by srun",
        ),
        (
            dict.fromkeys(["SLURM_PROCID", "SLURM_STEP_ID"], 0)
            | {"SLURM_JOB_ID": 7, "SLURM_NNODES": 2, "SLURM_NTASKS": 4},
            "srun started 4 tasks on 2 nodes",
        ),
        ({"GPUS": 0}, "GPUS is '0'"),
        ({"GPUS": "two"}, "GPUS is 'two'"),
        ({"GPUS": "all"}, "all GPUs are asked for, but nvidia-smi finds none"),
    ],
)
def test_wrong_settings_are_refused_with_one_line(folder, variables, text):
    folder.program("nvidia-smi", "exit 9")
    start = time.monotonic()
    launcher = "launch_single.sh" if "GPUS" in variables else "launch_multinode.sh"
    code, output = folder.run(launcher, "x", **variables)
    assert code == 1
    errors = [line for line in output.splitlines() if "error:" in line]
    assert len(errors) == 1, output
    assert re.search(text, errors[0]), output
    assert "Traceback" not in output
    assert not reports(output)
    assert "GPUS" not in variables or output.count("\n") == 1
    assert time.monotonic() - start < 20


# Of a machine with three GPUs: what the user leaves of them, and how many CUDA then shows.
VISIBLE = {"0,2": 2, " 1, 0,": 2, "1,-1,0": 1, "GPU-8f1c,MIG-a0/1/0": 2, None: 3, "-1": 0, "": 0}


@pytest.mark.parametrize(("visible", "wanted"), VISIBLE.items())
def test_gpus_are_counted_as_cuda_shows_them(folder, visible, wanted):
    folder.program("nvidia-smi", 'for n in 0 1 2; do echo "GPU $n: A100 (UUID: GPU-$n)"; done')
    # Without tools/ the launcher starts torchrun by itself, and echo says how.
    shutil.rmtree(folder.path / "tools")
    variables = {"PYTHON": "echo"}
    if visible is not None:
        variables["CUDA_VISIBLE_DEVICES"] = visible
    code, output = folder.run("launch_single.sh", "x", GPUS="all", **variables)
    if wanted:
        assert code == 0 and f" --nproc_per_node={wanted} " in output
    else:
        assert code == 1 and len(output.splitlines()) == 1
        assert f"all GPUs are asked for, but CUDA_VISIBLE_DEVICES is '{visible}'" in output
    code, output = folder.run("launch_multinode.sh", "x", NNODES=1, **variables)
    assert code == 0 and f" --nproc_per_node={wanted or 1} " in output


@pytest.mark.parametrize("case", CGROUPS)
def test_cores_are_those_that_a_cgroup_leaves(tmp_path, case):
    wanted = make_cgroups(tmp_path, case) or 64
    (tmp_path / "nproc").write_text('#!/bin/sh\necho "${OMP_NUM_THREADS:-64}"\n')  # as GNU's
    (tmp_path / "nproc").chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "OMP_NUM_THREADS": "7"}
    command = ["bash", ROOT / "tools/launcher/cores.sh", tmp_path]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert (done.stdout, done.stderr, done.returncode) == (f"{wanted}\n", "", 0)


def test_cores_in_a_real_cgroup():
    def removed():
        with contextlib.suppress(OSError):  # a process of it is ending
            made.rmdir()
        return not made.exists()

    command = ["bash", ROOT / "tools/launcher/cores.sh"]
    own = subprocess.run(command, capture_output=True, text=True)
    assert 1 <= int(own.stdout) <= len(os.sched_getaffinity(0))
    require(os.geteuid() == 0, "only root can make a cgroup")
    first, second = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
    made = (first if first.is_dir() else second) / f"launchers{os.getpid()}"
    try:
        made.mkdir()
        if first.is_dir():
            (made / "cpu.cfs_quota_us").write_text("100000")
        else:
            with contextlib.suppress(OSError):  # it may be so already
                (second / "cgroup.subtree_control").write_text("+cpu")
            (made / "cpu.max").write_text("100000 100000")
        entered = ["bash", "-c", 'echo $$ >"$1" && shift && exec "$@"', "bash"]
        entered += [made / "cgroup.procs", *command]
        assert subprocess.run(entered, capture_output=True, text=True).stdout == "1\n"
    except OSError as error:
        require(False, f"no cgroup can be made here: {error}")
    finally:
        wait_until(removed, 10, "the end of a cgroup's processes")


# Three networks of six starts each: 18 ports a job, and 666 jobs until they repeat.
THREE = {"NETWORKS": "one=eth0 two=eth0 three=eth0", "RESTARTS": 5}


def test_port_that_is_taken_and_nodes_that_do_not_come(folder):
    address, _ = preflight.route_to("203.0.113.1")
    require(address, "this machine has no address but loopback")
    node = {"NNODES": 2, "NODE_RANK": 0, "MASTER_ADDR": address, "CONNECT_TIMEOUT": 2}
    with socket.create_server(("", 0)) as server:
        node["MASTER_PORT"] = server.getsockname()[1]
        code, taken = folder.run("launch_multinode.sh", "x", **node, RESTARTS=1)
    assert code == 1
    text = f"port {node['MASTER_PORT']} cannot be used on this node (Address already in use)"
    assert text in taken.splitlines()[-1]

    code, alone = folder.run("launch_multinode.sh", "x", **node)
    assert code == 1
    text = "the other nodes did not all come within 2 s (missing: node 1): start the launcher"
    assert text in alone.splitlines()[-1]


@pytest.mark.parametrize(
    ("variables", "port"),
    [({}, 20050), pytest.param(THREE, 20000 + 2405 % 666 * 18, marks=LONG)],
)
def test_slurm_gives_address_port_and_rank(folder, variables, port):
    folder.program(
        "scontrol",
        '[ "$2" = hostnames ] && echo no-such-node-7.invalid && exit\n'
        'echo "NodeName=no-such-node-7.invalid Arch=x NodeAddr=192.0.2.7 NodeHostName=n"',
    )
    job = {"SLURM_JOB_ID": 2405, "SLURM_STEP_ID": 0, "SLURM_PROCID": 1, "SLURM_NODEID": 1}
    job |= {"SLURM_NNODES": 2, "SLURM_NTASKS": 2, "SLURM_JOB_NODELIST": "n[7-8]"}
    job |= {"SLURM_GPUS_ON_NODE": 4, "CONNECT_TIMEOUT": 1}
    code, output = folder.run("launch_multinode.sh", "x", **job, **variables)
    assert code == 1
    assert f"node 0 did not answer at 192.0.2.7:{port} within 1 s" in output
    assert variables or "did not answer" in folder.log("job2405", node=1)


NODE_LISTS = {
    "n[7-8],m3": "n7",
    "node007": "node007",
    "a,b[1-2]": "a",
    "gpu-[003-007,010]-ib,x": "gpu-003-ib",
    "r[1-2]n[05,07]": "r1n05",
}


@pytest.mark.parametrize(("nodes", "first"), NODE_LISTS.items())
def test_first_node_of_a_slurm_job_without_scontrol(folder, nodes, first):
    folder.program("scontrol", "exit 127")
    folder.program("getent", f"exit {int(first == 'n7')}")  # whether the name resolves
    variables = {"SLURM_JOB_ID": 7, "SLURM_STEP_ID": 0, "SLURM_PROCID": 1, "SLURM_NODEID": 1}
    variables |= {"SLURM_NNODES": 2, "SLURM_JOB_NODELIST": nodes, "PYTHON": "echo"}
    (folder.path / "tools/supervise.py").unlink()  # the launcher starts torchrun by itself
    code, output = folder.run("launch_multinode.sh", "x", PROBE=0, **variables)
    assert code == 0 and f" --rdzv_endpoint={first}:20070 " in output


# ---- NETWORK


def test_network_keeps_the_traffic_on_the_named_interface(folder):
    variables = {"NETWORK": "ethernet", "IFNAME": "lo", "NCCL_SOCKET_IFNAME": "eth9"}
    code, output = folder.run("launch_single.sh", "x", **variables)
    assert code == 0, output
    env = reports(output)[0]["env"]
    assert (env["NCCL_IB_DISABLE"], env["GLOO_SOCKET_IFNAME"]) == ("1", "lo")
    assert env["NCCL_SOCKET_IFNAME"] == "eth9"
    assert "would set NCCL_SOCKET_IFNAME==lo, but it is set to 'eth9'" in output
    assert "warning" not in output
    assert folder.log("ethernet")

    code, output = folder.run("launch_single.sh", "x", NETWORK="infiniband", IFNAME="mlx5_97,ib97")
    env = reports(output)[0]["env"]
    assert env["NCCL_IB_DISABLE"] == "0"
    assert env["NCCL_NET"] == "IB"
    assert env["NCCL_IB_HCA"] == "=mlx5_97"
    assert env["NCCL_SOCKET_IFNAME"] == "=ib97"
    assert env["GLOO_SOCKET_IFNAME"] == "ib97"
    for name in ("mlx5_97", "ib97"):
        assert f"warning: this node has no interface or adapter {name}" in output
    assert folder.log("infiniband")


# ---- two nodes on one machine


@pytest.fixture
def two_nodes(folder):
    """The folder, where network namespaces can be made; checks that none of them is left."""
    require(not (why := why_no_namespaces()), why)
    yield folder
    assert not [name for started in folder.started for name in namespaces(started)]


@BOTH
def test_two_nodes_probe_train_and_restart_on_ports_of_their_own(two_nodes):
    add_probe(two_nodes)
    two_nodes.plan("done", "lost", "done")
    given = ["--lr", "0.1", "a b"]
    options = ["--gpus-per-node", 2, "--name", "series"]
    variables = {"RESTARTS": 2, "CDPATH": "."}  # which makes cd print where it goes
    code, output = two_nodes.run("tools/two_nodes.sh", *options, "--", *given, **variables)
    assert code == 0, output
    whole = [*given, "--checkpoint", "logs/series/checkpoint.pt"]
    starts = [("probe_link.py", whole), ("demo_coco_resnet18.py", whole)]
    starts.append(("demo_coco_resnet18.py", [*whole, "--resume"]))
    for node in (0, 1):
        text = two_nodes.log("series", node)
        found = reports(text)
        ports = [int(report["port"]) for report in found]
        assert ports == [ports[0] + n for n in (0, 0, 1, 1, 2, 2)]
        for n, (script, argv) in enumerate(starts):
            ranks = found[2 * n : 2 * n + 2]
            assert sorted(report["rank"] for report in ranks) == [2 * node, 2 * node + 1]
            for report in ranks:
                assert (report["script"], report["argv"]) == (script, argv)
                assert (report["node_rank"], report["world_size"]) == (str(node), 4)
                assert report["env"]["GLOO_SOCKET_IFNAME"] == f"veth{node}"
        record = json.loads(re.search(r"^launch_multinode.sh: Node (\{.*\})$", text, re.M)[1])
        assert (record["node"], record["host"], record["starts"]) == (node, f"node{node}", 3)
        sent = f"launch_multinode.sh: this node sent .* on veth{node} \\(ethernet\\).* in \\d+ s\n"
        assert re.search(sent, text)
    # torch warns where it finds no host name; that node 0's store has ended first is no fault here
    warnings = [line for line in output.splitlines() if "[W" in line]
    assert all("recvValueWithTimeout failed" in line for line in warnings), warnings


def test_two_nodes_link_has_the_rate_asked_for(two_nodes):
    two_nodes.plan("send")
    code, output = two_nodes.run("tools/two_nodes.sh", "--rate", "100mbit", "--", "x")
    assert code == 0, output
    rate, mtu = map(float, re.search(r"RATE (\S+) MTU (\d+)", output).groups())
    # Ethernet's header; IP's, TCP's and its time stamp
    assert rate * (mtu + 14) / (mtu - 52) == pytest.approx(100, rel=0.02)


@BOTH
def test_two_nodes_stops_both_and_cleans_up(two_nodes):
    two_nodes.plan("wait")
    caller = {"SUDO_UID": 65533, "SUDO_GID": 65532}
    started = two_nodes.start("tools/two_nodes.sh", "--", "x", RESTARTS=3, **caller)
    started.wait_for(r"(?s)\] waiting.*\] waiting")
    assert len(namespaces(started)) == 2
    started.signal(signal.SIGTERM)
    assert started.finish(30, expect=75).out.count("] Stopped on SIGTERM") == 2
    assert not namespaces(started)
    logs = two_nodes.path / "logs"
    assert len([*logs.rglob("node?.log")]) == 2
    assert {owner(path) for path in [logs, *logs.rglob("*")]} == {(65533, 65532)}


def owner(path):
    found = os.lstat(path)
    return found.st_uid, found.st_gid


@pytest.mark.parametrize("folder_of", ["the caller", "root"])
def test_two_nodes_under_sudo_gives_nothing_else_away(two_nodes, folder_of):
    """Neither what was there before nor what a link points to, also where it fails."""
    path, other = two_nodes.path, (65532, 65532)
    run = path / "logs/run"
    run.mkdir(parents=True)
    (path / "link").symlink_to(path)
    for name in ("old", "others"):
        (run / name).touch()
    os.chown(run / "others", *other)
    if folder_of == "the caller":
        os.chown(run, 65533, 65533)
    time.sleep(0.05)  # the clock of a file system goes by steps of some ms
    more = f"from pathlib import Path; data = Path({str(path / 'data/sample_coco')!r})\n"
    more += "data.mkdir(parents=True); (data / 'link').symlink_to('../../demo_coco_resnet18.py')\n"
    more += f"Path({str(run)!r}, 'new').touch(); Path({str(run)!r}, 'others').write_text('more')\n"
    stand_in_for_the_sample(two_nodes, more)
    options = ["--rate", "fast", "--name", "run"]
    variables = {"SUDO_UID": 65533, "SUDO_GID": 65533}
    code, output = two_nodes.run("tools/two_nodes.sh", *options, **variables)
    assert code == 1 and "tc does not take --rate fast" in output
    caller, root = (65533, 65533), (os.geteuid(), os.getegid())
    for name in ("data", "data/sample_coco", "data/sample_coco/link"):
        assert owner(path / name) == caller
    assert owner(run / "new") == (caller if folder_of == "the caller" else root)
    for name in ("logs", "logs/run/old", "demo_coco_resnet18.py", "tools"):
        assert owner(path / name) == root, name
    assert owner(run / "others") == other


@LONG
def test_two_nodes_killed_itself_is_cleaned_up_by_the_next(two_nodes):
    two_nodes.plan("wait", "done")
    started = two_nodes.start("tools/two_nodes.sh", "--", "x")
    started.wait_for(r"(?s)\] waiting.*\] waiting")
    started.signal(signal.SIGKILL)
    started.finish(30, expect=-signal.SIGKILL, clean=30)  # its launchers stop
    assert len(namespaces(started)) == 2
    code, later = two_nodes.run("tools/two_nodes.sh", "--", "x")
    assert code == 0, later
    assert not namespaces(started)


def test_two_nodes_elsewhere_than_on_linux_says_so(folder):
    folder.program("uname", "echo Darwin")
    code, output = folder.run("tools/two_nodes.sh", "--", "x")
    assert (code, output.count("\n")) == (1, 1)
    assert "network namespaces are Linux's own" in output


def test_two_nodes_without_root_says_so(folder):
    require(os.geteuid() == 0 and shutil.which("setpriv"), "only root can become another user")
    folder.path.chmod(0o755)
    for parent in folder.path.parents:
        if parent != Path("/tmp") and parent.is_relative_to("/tmp"):
            parent.chmod(0o755)
    code, output = folder.run(
        "-c", "exec setpriv --reuid=65534 --clear-groups bash tools/two_nodes.sh -- x"
    )
    assert code == 1
    assert output.count("\n") == 1
    assert "need root" in output
