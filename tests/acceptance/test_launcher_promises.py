"""The launchers' and two_nodes.sh's further promises: settings, names, ends, counters, cables."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support import processes
from support.datasets import make_set
from support.launchers import FAST, MULTINODE, SAVED, SINGLE, TwoNodes, finish_all, two_nodes
from support.nodes import namespaces, require_namespaces
from support.processes import LONG, ROOT, Run, Started, start, wait_until

# On the old launchers these tests are not even tried.
TWO_NODES = ROOT / "tools" / "two_nodes.sh"
ALONE = {"PYTHON": sys.executable, "RUN_NAME": "run", "NNODES": "1", "PROBE": "0"}
LOG = "logs/run/node0.log"
STEP_3 = r"\| Step 3 "
START = re.compile(r"^\S+\.sh: [\d-]+ [\d:]+ (.*\btorchrun .*)$", re.MULTILINE)


def launch(launcher: Path, folder: Path, *arguments: object, **variables: str | None) -> Started:
    """Starts a launcher on this machine; `variables` are its environment, None unsets one."""
    env = {**ALONE, "MASTER_PORT": str(processes.free_ports(4)), **variables}
    return start(["bash", launcher, *arguments], env=env, cwd=folder)


def printed(started: Started) -> set[str]:
    """The words of the torchrun command, which a launcher prints before it runs it."""
    return set(shlex.split(started.wait_for(START.pattern)[1]))


def chosen(started: Started) -> set[str]:
    """What that command sets for NCCL and Gloo, except NCCL's debug text."""
    return {word for word in printed(started) if re.match("(NCCL|GLOO)_(?!DEBUG)", word)}


def refused(started: Started, words: str) -> None:
    """The launcher has to end with one line that has these words."""
    run = started.finish(30, expect=None)
    (line,) = run.lines()
    assert run.returncode not in (0, SAVED) and re.search(f"error: .*{words}", line), run.tail()


def starts(run: Run) -> int:
    return len(START.findall(run.out))


def has_rank(started: Started) -> bool:
    return any("RANK" in found.env for found in processes.processes(started.test_id))


@pytest.fixture(scope="module")
def training(tmp_path_factory) -> list[str]:
    """Options of a run of 40 steps on two nodes that saves every second step."""
    images = make_set(tmp_path_factory.mktemp("set"), 64)
    return [*FAST, *images, "--timeout", "8", "--checkpoint_every", "2", "--num_epochs", "5"]


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """A copy of this project without its data/."""
    copy = tmp_path_factory.mktemp("copy") / "project"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "data", "logs", "tests"))
    return copy


# --- Settings ---------------------------------------------------------------------------------

CORES = len(os.sched_getaffinity(0))
ALL, HALF = (f"OMP_NUM_THREADS={n}" for n in (CORES, max(1, CORES // 2)))
PRINTED = [  # launcher, variables, options, words of the torchrun command, what it has not
    (SINGLE, "GPUS=all CUDA_VISIBLE_DEVICES=0,2", "", "--nproc_per_node=2", "--checkpoint"),
    (SINGLE, "GPUS=all CUDA_VISIBLE_DEVICES=1,-1,0", "", "--nproc_per_node=1", "--checkpoint"),
    (SINGLE, "CUDA_VISIBLE_DEVICES=0,2", "", f"--nproc_per_node=1 {ALL}", "--checkpoint"),
    (MULTINODE, "CUDA_VISIBLE_DEVICES=GPU-8f,MIG-2e", "", "--nproc_per_node=2", "--checkpoint"),
    (SINGLE, "GPUS=2", "", HALF, "--checkpoint"),
    (MULTINODE, "GPUS_PER_NODE=2", "", HALF, "--checkpoint"),
    (MULTINODE, "GPUS_PER_NODE=2 OMP_NUM_THREADS=3", "", "OMP_NUM_THREADS=3", "--checkpoint"),
    (SINGLE, "RESTARTS=1", "", "--checkpoint logs/run/checkpoint.pt", "--resume"),
    (MULTINODE, "RESTARTS=1", "", "--checkpoint logs/run/checkpoint.pt", "--resume"),
    (SINGLE, "RESTARTS=1", "--checkpoint own.pt", "--checkpoint own.pt", "checkpoint.pt"),
    (MULTINODE, "", "", "NCCL_DEBUG_FILE=logs/run/nccl.node0.%h.%p.log", "--checkpoint"),
    (
        MULTINODE,
        "NETWORKS=a=lo",
        "",
        "NCCL_DEBUG_FILE=logs/run/a/nccl.node0.%h.%p.log",
        "--resume",
    ),
    (MULTINODE, "NCCL_DEBUG=WARN", "", "", "NCCL_DEBUG"),  # as it is in the environment already
    (MULTINODE, "NCCL_DEBUG_SUBSYS=ALL", "", "", "NCCL_DEBUG"),
]


@pytest.mark.parametrize(("launcher", "variables", "options", "words", "absent"), PRINTED)
def test_settings_and_defaults_are_seen_in_the_torchrun_command(
    tmp_path, launcher, variables, options, words, absent
):
    given = {"OMP_NUM_THREADS": None} | dict(word.split("=", 1) for word in variables.split())
    with launch(launcher, tmp_path, "--lr", 1, *options.split(), **given) as started:
        found = printed(started)
    assert set(words.split()) <= found and not [word for word in found if absent in word]


def test_an_exported_cdpath_changes_nothing(tmp_path):
    """With it `cd` prints where it goes, and may go elsewhere."""
    (tmp_path / ROOT.name / "tools").mkdir(parents=True)
    words = ["bash", SINGLE.relative_to(ROOT.parent)]
    with start(words, env={"CDPATH": f"{tmp_path}:.", "GPUS": "0"}, cwd=ROOT.parent) as started:
        refused(started, "GPUS")


def test_launcher_counts_on_the_scripts_timeout_where_none_is_given():
    default = re.search(r"^TIMEOUT = (\d+)", processes.SCRIPT.read_text(), re.MULTILINE)[1]
    assert f"timeout=${{timeout:-{default}}}\n" in MULTINODE.read_text()


# --- Networks ---------------------------------------------------------------------------------

# The kernel's files of adapters that no machine for tests has, for this start alone.
ADAPTERS = """
cp -a /sys/class/net "$0"
mount -t tmpfs none /sys/class
mv "$0/net" /sys/class
for name in mlx5_0 mlx5_1 mlx5_2 rdmap0s6; do
    mkdir -p /sys/class/infiniband/$name/ports/1 /sys/class/infiniband/$name/device
    echo "4: ACTIVE" >/sys/class/infiniband/$name/ports/1/state
    ln -s /sys/bus/pci/drivers/mlx5_core /sys/class/infiniband/$name/device/driver
done
ln -sfn /sys/bus/pci/drivers/efa /sys/class/infiniband/rdmap0s6/device/driver
echo "1: DOWN" >/sys/class/infiniband/mlx5_2/ports/1/state
exec "$@"
"""
VERBS = {"NCCL_IB_DISABLE=0", "NCCL_NET=IB"}
ETH0 = {"NCCL_SOCKET_IFNAME==eth0", "GLOO_SOCKET_IFNAME=eth0"}
CHOSEN = [
    ({"IFNAME": "mlx5_0"}, VERBS | {"NCCL_IB_HCA==mlx5_0"}),
    ({"IFNAME": "mlx5_0,mlx5_1"}, VERBS | {"NCCL_IB_HCA==mlx5_0,mlx5_1"}),
    ({"IFNAME": "mlx5_0,eth0"}, VERBS | {"NCCL_IB_HCA==mlx5_0"} | ETH0),
    ({"IFNAME": "eth0", "NETWORK": "infiniband"}, VERBS | ETH0),
    ({"NETWORKS": "infiniband=eth0"}, {"NCCL_IB_DISABLE=1", "NCCL_NET=Socket"} | ETH0),
    ({"IFNAME": "rdmap0s6"}, set()),
    ({"IFNAME": "rdmap0s6,eth0"}, ETH0),
]
REFUSED = [
    ({"IFNAME": "mlx5_0,mlx5_2"}, [], "mlx5_2"),
    ({"IFNAME": "mlx5_0", "NETWORK": "ethernet"}, [], "NETWORK=ethernet.*mlx5_0"),
    ({"IFNAME": "down0"}, [], "down0 .*down"),
    ({"NETWORKS": "one=eth0 two=loose0"}, [], "loose0 .*cable"),
    ({"NETWORKS": "one=eth0 one=lo"}, [], "NETWORKS .*one"),
    ({"NETWORKS": "one=eth0 two=lo"}, ["--resume"], "--resume"),
    ({"GPUS_PER_NODE": "all", "CUDA_VISIBLE_DEVICES": "-1,0"}, [], "GPU"),
    ({"PYTHON": "/nowhere/python"}, [], "/nowhere/python"),
]


def with_adapters(nodes: TwoNodes, *options: object, **variables: str) -> Started:
    """The launcher on node 0, which has adapters, an interface that is down, and a loose one."""
    nodes.pair.ip(0, "link add down0 type bridge", "link add loose0 up type veth peer name end")
    env = ALONE | {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "10.77.0.1"} | variables
    words = ["sh", "-ec", ADAPTERS, nodes.folder(0), "bash", MULTINODE, "--lr", 1, *options]
    return nodes.pair.popen(0, words, env=env, cwd=nodes.folder(0))


@pytest.mark.parametrize(("variables", "expected"), CHOSEN)
def test_nccl_is_kept_on_the_adapters_or_interface_except_with_efa(tmp_path, variables, expected):
    with two_nodes(tmp_path) as nodes:
        assert chosen(with_adapters(nodes, **variables)) == expected


@pytest.mark.parametrize(("variables", "options", "words"), REFUSED)
def test_what_is_missing_or_contradictory_is_refused(tmp_path, variables, options, words):
    with two_nodes(tmp_path) as nodes:
        refused(with_adapters(nodes, *options, **variables), words)


VETH0 = ["link set eth0 down", "link set eth0 name veth0", "link set veth0 up"]
BRIDGE = ["link add br-x up type bridge", "link add veth7 up type veth peer name end"]
MEMBER = [*BRIDGE, "link set eth0 master br-x", "addr flush dev eth0"]
CONTAINERS = {  # commands on the node, variables, whether container networks are left out
    "bridge": (BRIDGE, {}, True),
    "none": ([], {}, False),
    "veth joins": (VETH0, {}, False),
    "bridge joins": ([*MEMBER, "addr add 10.77.0.{}/24 dev br-x"], {}, False),
    "InfiniBand": ([*BRIDGE, "link add ib0 type bridge"], {}, False),  # which NCCL takes first
    "chosen": (BRIDGE, {"NCCL_SOCKET_IFNAME": "eth0"}, False),
}


@pytest.mark.parametrize("node", [0, pytest.param(1, marks=LONG)])
@pytest.mark.parametrize("case", CONTAINERS)
def test_container_networks_are_left_out_unless_they_join_the_nodes(tmp_path, node, case):
    commands, variables, expected = CONTAINERS[case]
    with two_nodes(tmp_path) as nodes:
        nodes.pair.ip(node, *(text.format(node + 1) for text in commands))
        found = " ".join(chosen(nodes.start(node, "--lr", 1, **variables)))
    names = found.removeprefix("NCCL_SOCKET_IFNAME=^").split(",")
    assert {"lo", "docker", "br-", "veth"} <= set(names) if expected else not found


def test_each_node_has_its_own_interface_under_one_label(tmp_path):
    with two_nodes(tmp_path) as nodes:
        nodes.pair.ip(1, *VETH0)
        for node, name in enumerate(["eth0", "veth0"]):
            words = printed(nodes.start(node, "--lr", 1, NETWORKS=f"one={name}"))
            assert {f"GLOO_SOCKET_IFNAME={name}", "--rdzv_id=one-1"} <= words


def second_cable(nodes: TwoNodes) -> None:
    nodes.pair.ip(0, f"link add eth1 type veth peer name eth1 netns {nodes.pair.names[1]}")
    for node in (0, 1):
        nodes.pair.ip(node, f"addr add 10.78.0.{node + 1}/24 dev eth1", "link set eth1 up")


@LONG
def test_networks_in_another_order_on_each_node_are_never_mixed(training, tmp_path):
    with two_nodes(tmp_path) as nodes:
        second_cable(nodes)
        orders = enumerate(["one=eth0 two=eth1", "two=eth1 one=eth0"])
        started = [nodes.start(k, *training, NETWORKS=n, CONNECT_TIMEOUT=5) for k, n in orders]
        runs = finish_all(started, expect=1)
    assert not any("| Step " in run.out for run in runs)


@LONG
def test_the_interface_used_is_named_and_the_idle_one_is_not(training, tmp_path):
    """In each node's log after the second of two Counters lines, and in the comparison."""
    with two_nodes(tmp_path) as nodes:
        second_cable(nodes)
        finish_all(nodes.start_both(*training, "--max_steps", 3, PROBE=1))
        compare = [sys.executable, ROOT / "tools/compare_logs.py", nodes.folder(0) / LOG]
        comparison = nodes.pair.popen(0, compare).finish(60).out
        logs = [nodes.log(node) for node in (0, 1)]
    for log in logs:
        assert re.findall(r"^Sent .* on (\S+) \(ethernet\) in \d+ s$", log, re.M) == ["eth0"]
    order = re.findall(r"^(Counters|\[CPU 0\] Run|\[CPU 0\] Summary) \{", logs[0], re.M)
    assert order == ["Counters", "[CPU 0] Run", "[CPU 0] Summary", "Counters"]
    assert "TCP on eth0 (ethernet), by byte counters" in comparison and "eth1" not in comparison


# --- A name that is used twice ----------------------------------------------------------------


@pytest.fixture(scope="module")
def three(training, tmp_path_factory) -> tuple[Path, list[Run]]:
    """Under one name a run of two steps, another one, and one that goes on from that to step 4."""
    folder, runs = tmp_path_factory.mktemp("three"), []
    for options in (["2"], ["2"], ["4", "--resume"]):
        with launch(SINGLE, folder, *training, "--max_steps", *options, RESTARTS="1") as started:
            runs.append(started.finish(120))
    return folder, runs


@LONG
def test_a_name_used_twice_appends_to_the_log_and_says_so_unless_it_resumes(three):
    folder, runs = three
    assert len(START.findall((folder / LOG).read_text())) == 3
    assert [run.out.count("has a run already") for run in runs] == [0, 1, 0]


@LONG
def test_an_earlier_runs_checkpoint_is_renamed_unless_it_is_resumed(three):
    folder, runs = three
    assert [[step for _, step, _ in run.steps()] for run in runs] == [[1, 2], [1, 2], [3, 4]]
    assert [run.out.count("renamed") for run in runs] == [0, 1, 0]
    assert len([*folder.glob("logs/run/checkpoint.pt.2*")]) == 1


@LONG
def test_the_comparison_takes_the_last_run_of_a_log_and_says_so(three):
    with start([sys.executable, ROOT / "tools/compare_logs.py", three[0] / LOG]) as started:
        run = started.finish(60)
    assert re.search(r"^\| steps +\| +4 \|$", run.out, re.MULTILINE), run.tail()
    assert "1 other run(s) before it in the same log" in run.out


# --- Ends -------------------------------------------------------------------------------------


@LONG
@pytest.mark.parametrize(("restarts", "gpus"), [(0, 2), (1, 1)])
def test_a_killed_rank_ends_the_run_with_its_signal(training, tmp_path, restarts, gpus):
    """In each start one is killed; of two ranks torchrun ends the other one by another signal."""
    variables = {"RESTARTS": str(restarts), "GPUS": str(gpus)}
    with launch(SINGLE, tmp_path, *training, **variables) as started:
        for n in range(restarts + 1):
            started.wait_for(rf"(?s)(\] Run {{.*?){{{n + 1}}}\| Step ")
            os.kill(started.rank_pid(0), signal.SIGKILL)
        run = started.finish(60, expect=1)
    assert starts(run) == restarts + 1
    assert re.search("SIGKILL|exitcode *: -9", run.lines()[-1]), run.tail()


@LONG
def test_an_error_of_the_user_on_one_node_is_not_restarted(training, tmp_path):
    with two_nodes(tmp_path) as nodes:
        first = nodes.start(0, *training, RESTARTS=1)
        second = nodes.start(1, *training, "--lr", 0.5, RESTARTS=1)
        runs = finish_all([first, second], 60, expect=1)
    assert [starts(run) for run in runs] == [1, 1]


@LONG
def test_a_failed_probe_is_never_followed_by_the_training(training, tmp_path):
    variables = {"PROBE": "1", "GPUS_PER_NODE": "2", "RESTARTS": "1"}
    with launch(MULTINODE, tmp_path, *training, **variables) as started:
        wait_until(lambda: has_rank(started), 60, "a rank")
        os.kill(started.rank_pid(0), signal.SIGKILL)
        run = started.finish(60, expect=1)
    assert starts(run) == 1


@LONG
def test_a_cable_that_comes_back_after_the_timeout_costs_a_restart_and_no_step(training, tmp_path):
    with two_nodes(tmp_path) as nodes:
        unbroken, _ = finish_all(nodes.start_both(*training, RUN_NAME="unbroken"))
        started = nodes.start_both(*training, RESTARTS=1)
        for one in started:
            one.wait_for(STEP_3)
        nodes.pair.link_down()
        for one in started:
            one.wait_for("restart 1 of 1")
        nodes.pair.ip(1, "link set eth0 up")
        broken, _ = finish_all(started)
    assert broken.json_line("Run")["start_step"] >= 2, "it was not resumed"
    digests = [run.json_line("Summary")["weights_sha256"] for run in (broken, unbroken)]
    assert digests[0] == digests[1]


@LONG
def test_a_reader_that_goes_away_ends_neither_the_run_nor_its_log(training, tmp_path):
    pipe = ["bash", "-c", '"$@" 2>&1 | head -n 1; exit "${PIPESTATUS[0]}"', "bash", "bash"]
    with start([*pipe, SINGLE, *training, "--max_steps", 3], env=ALONE, cwd=tmp_path) as started:
        started.finish()
    log = (tmp_path / LOG).read_text()
    assert "| Step 3 " in log and "[CPU 0] Cleanup complete" in log


@pytest.mark.parametrize("launcher", [SINGLE, MULTINODE, TWO_NODES], ids=lambda path: path.name)
def test_a_stop_while_the_sample_set_is_made_ends_at_once(project, tmp_path, launcher):
    if launcher == TWO_NODES:
        require_namespaces()
    with launch(project / launcher.relative_to(ROOT), tmp_path) as started:
        wait_until(lambda: started.pids("make_sample"), 60, "the sample set")
        started.signal(signal.SIGTERM)
        started.finish(10, 128 + signal.SIGTERM)


@LONG
def test_a_stop_before_the_first_step_is_not_called_saved_for_an_old_file(training, tmp_path):
    (tmp_path / "old.pt").touch()
    with launch(SINGLE, tmp_path, *training, "--checkpoint", "old.pt") as started:
        wait_until(lambda: has_rank(started), 60, "a rank")
        started.signal(signal.SIGTERM)
        started.finish(20, 128 + signal.SIGTERM)


@LONG
def test_a_stop_in_the_first_of_two_networks_ends_the_series(training, tmp_path):
    with launch(MULTINODE, tmp_path, *training, NETWORKS="one=lo two=lo") as started:
        started.wait_for(STEP_3)
        started.signal(signal.SIGTERM)
        started.finish(20, SAVED)
    assert [path.name for path in (tmp_path / "logs/run").iterdir()] == ["one"]


@LONG
def test_a_second_ctrl_c_ends_at_once(training, tmp_path):
    """The rank is stopped, and cannot answer the first one."""
    with launch(SINGLE, tmp_path, *training) as started:
        started.wait_for(STEP_3)
        os.kill(started.rank_pid(0), signal.SIGSTOP)
        started.signal(signal.SIGINT)
        time.sleep(1)
        assert started.running()
        started.signal(signal.SIGINT)
        wait_until(lambda: not started.running(), 5, "its end")
        assert started.process.returncode == 128 + signal.SIGINT


# --- Other places -----------------------------------------------------------------------------

READ_ONLY = 'mount --bind "$0" "$0"; mount -o remount,bind,ro "$0"; exec bash "$@"'


@LONG
def test_a_checkout_mounted_read_only_trains(project, training, tmp_path):
    require_namespaces()
    words = ["unshare", "-m", "sh", "-ec", READ_ONLY, project, project / SINGLE.name]
    with start([*words, *training, "--max_steps", 2], env=ALONE, cwd=tmp_path) as started:
        assert started.finish().json_line("Summary")["steps"] == 2


@LONG
def test_srun_with_two_tasks_a_node_is_refused_on_each(slurm, tmp_path):
    tasks = ["--nodes=2", "--ntasks=4", "--ntasks-per-node=2", "bash", MULTINODE, "--lr", 1]
    run = slurm.run("srun", *tasks, expect=None, cwd=tmp_path)
    assert len(re.findall("error: .*--ntasks-per-node=1", run.out)) == 4, run.tail()
    assert run.returncode and not (tmp_path / "logs").exists()


# --- two_nodes.sh -----------------------------------------------------------------------------


def two_nodes_sh(folder: Path, *arguments: object, **variables: str) -> Started:
    require_namespaces()
    return launch(TWO_NODES, folder, *arguments, **variables)


def logs_in(folder: Path) -> list[Run]:
    return [Run([], 0, (folder / f"node{k}.log").read_text(), 0) for k in (0, 1)]


def test_two_nodes_without_root_are_refused():
    other = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    tried = subprocess.run([*other, "test", "-r", TWO_NODES], capture_output=True)
    processes.require(tried.returncode == 0, "no other user can be made that reads this checkout")
    with start([*other, "bash", TWO_NODES, "--", "--lr", 1], env=ALONE, cwd="/") as started:
        refused(started, "root")


@LONG
def test_two_processes_on_each_of_two_nodes_train_as_four_ranks(training, tmp_path):
    options = ["--gpus_per_node", 2, "--", *training, "--max_steps", 1]
    with two_nodes_sh(tmp_path, *options) as started:
        started.finish(240, clean=10)
    for log, ranks in zip(logs_in(tmp_path / "logs/run"), [(0, 1), (2, 3)], strict=True):
        assert [rank for rank in range(4) if log.steps(rank)] == [*ranks]


@LONG
def test_a_stop_of_two_nodes_saves_on_both_and_leaves_no_namespace(training, tmp_path):
    with two_nodes_sh(tmp_path, "--", *training, "--num_epochs", 99) as started:
        for rank in (0, 1):
            started.wait_for(rf"\[CPU {rank}\] .*{STEP_3}")
        started.signal(signal.SIGTERM)
        started.finish(20, SAVED, clean=10)
    assert not namespaces(started)
    for node, log in enumerate(logs_in(tmp_path / "logs/run")):
        assert any(line.startswith("Stopped on SIGTERM") for line in log.lines(node))


@LONG
def test_a_cable_has_the_rate_asked_for(training, tmp_path):
    options = ["--rate", "500mbit", "--", *training, "--max_steps", 1]
    with two_nodes_sh(tmp_path, *options, PROBE="1") as started:
        probe = started.finish(240, clean=10).json_line("Probe")
    rates = [link["wire_Gbps"] for node in probe["nodes"] for link in node["interfaces"]]
    assert rates == pytest.approx([0.5, 0.5], rel=0.1)
