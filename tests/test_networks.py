"""One command a node for several networks: NETWORKS, networks.py, two_nodes.sh --links.

What a run does is not the point here: a stand-in for torchrun starts a stand-in for the script, so
that no test waits for torch. The real ones run, under --ci, in the last tests of this file.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from analysis.logs import parse_text
from launcher import networks as network_series
from launcher.errors import Refused
from support.datasets import data_args
from support.launcher_folder import LauncherFolder
from support.nodes import NamespacePair, namespaces, require_namespaces
from support.processes import LONG, ROOT, WITH_STAND_IN, Run, long, start

# In compare_logs.py's place, where the comparison itself is not the point.
COMPARE = """
import sys
from pathlib import Path
Path(sys.argv[sys.argv.index("--plot") + 1]).touch()
print("COMPARED", *sys.argv[1:])
"""


class Folder(LauncherFolder):
    """With stand-ins for two of the tools."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        (path / "tools" / "compare_logs.py").write_text(COMPARE)
        (path / "tools" / "make_sample_coco.py").write_text("import sys; print('MADE', sys.argv)")

    def start(self, nodes, *arguments: object, of_node=lambda _: {}, **variables: object) -> list:
        """The launcher on both nodes; `of_node(k)` has the variables of one."""
        own = [{"RUN_NAME": "series"} | variables | of_node(node) for node in (0, 1)]
        return [self.start_on(nodes, node, *arguments, **own[node]) for node in (0, 1)]

    def run(self, nodes, *arguments: object, expect: int = 0, **options: object) -> list:
        started = self.start(nodes, *arguments, **options)
        return [one.finish(60, expect=expect) for one in started]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


@pytest.fixture(scope="module")
def nodes() -> Iterator[NamespacePair]:
    with NamespacePair() as pair:
        yield pair


def reports(run: Run) -> list[dict]:
    return [json.loads(line) for line in re.findall(r"REPORT (\{.*\})", run.out)]


def errors(run: Run) -> list[str]:
    return [line for line in run.out.splitlines() if "error:" in line]


BOTH = "one=eth0 two=eth0"
NOTE = "Emulated: here\n\n"


# --- A series --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def series(nodes, tmp_path_factory) -> tuple[Folder, list[Run]]:
    """Two networks, with a probe of each; its folder, and what each node has printed."""
    folder = Folder(tmp_path_factory.mktemp("series"))
    shutil.copy(folder.path / "demo_coco_resnet18.py", folder.path / "tools" / "probe_link.py")
    variables = {"MASTER_PORT": 29600, "RESTARTS": 3, "DEMO_NOTE": NOTE}
    return folder, folder.run(nodes, "--lr", "0.1", "a b", NETWORKS=BOTH, **variables)


def test_each_network_has_its_run_its_ports_and_its_folder(series):
    folder, runs = series
    for node, run in enumerate(runs):
        found = reports(run)
        assert [r["env"]["RUN_NAME"] for r in found] == ["one", "one", "two", "two"]
        assert [r["script"] for r in found] == ["probe_link.py", "demo_coco_resnet18.py"] * 2
        # Each start of each network at its own: probe, training, three restarts.
        assert [int(r["port"]) for r in found] == [29600, 29601, 29605, 29606]
        for report in found:
            assert report["rank"] == node and "NETWORKS" not in report["env"]
            assert report["argv"][:3] == ["--lr", "0.1", "a b"]
            assert (report["env"]["IFNAME"], report["env"]["NETWORK"]) == ("eth0", "ethernet")
        for label in ("one", "two"):
            log = folder.path / "logs" / "series" / label / f"node{node}.log"
            assert len(re.findall("REPORT", log.read_text())) == 2


def test_node_0_alone_compares_and_keeps_it_beside_the_logs(series):
    folder, (first, second) = series
    names = "one=logs/series/one two=logs/series/two --plot logs/series/compare.png"
    text = f"{NOTE}COMPARED {names}\n"
    assert text in first.out
    assert "COMPARED" not in second.out
    kept = folder.path / "logs" / "series"
    shown = "![Parts of a step, throughput and loss](compare.png)"
    assert (kept / "compare.md").read_text() == f"{text}\n{shown}\n"
    assert (kept / "compare.png").exists()
    assert "this is logs/series/compare.md; its picture: logs/series/compare.png" in first.out


@LONG
def test_second_series_keeps_the_logs_of_the_first_apart(folder, nodes):
    for argument in ("first", "second"):
        folder.run(nodes, argument, NETWORKS=BOTH)
    logs = folder.path / "logs" / "series" / "two"
    assert "first" not in (logs / "node1.log").read_text()
    (kept,) = logs.glob("node1.log.*")
    assert "first" in kept.read_text()


@pytest.mark.parametrize("name", ["SIGKILL", *long("SIGTERM")])
def test_signal_ends_the_series_and_its_run(folder, nodes, name):
    folder.plan("one=wait")
    started = folder.start(nodes, "x", NETWORKS=BOTH)
    for one in started:
        one.wait_for(r"\] waiting")
    for one in started:
        one.signal(signal.Signals[name])
    killed = name == "SIGKILL"
    for one in started:
        run = one.finish(30, expect=-signal.SIGKILL if killed else 75, clean=15)
        assert "Stopped on SIGTERM" in run.out
        assert [r["env"]["RUN_NAME"] for r in reports(run)] == ["one"]
        assert killed or "stopped in network one: what comes after is left out" in run.out
        assert "COMPARED" not in run.out


def test_each_node_names_its_own_interface_under_the_same_label(folder):
    """eth0 on node 0 is enp5s0 on node 1."""
    with NamespacePair() as nodes:
        renamed = ("eth0 down", "eth0 name enp5s0", "enp5s0 up")
        nodes.ip(1, *(f"link set {words}" for words in renamed))
        own = ("one=eth0 two=eth0", "one=enp5s0 two=enp5s0")
        runs = folder.run(nodes, "x", of_node=lambda node: {"NETWORKS": own[node]}, PROBE=0)
    for run, name in zip(runs, ("eth0", "enp5s0"), strict=True):
        found = [(r["env"]["RUN_NAME"], r["env"]["GLOO_SOCKET_IFNAME"]) for r in reports(run)]
        assert found == [("one", name), ("two", name)]
    assert "COMPARED one=logs/series/one two=logs/series/two" in runs[0].out


# --- What is refused, before anything starts -------------------------------------------------


@pytest.mark.parametrize(
    ("values", "words"),
    [
        pytest.param((BOTH, "one=eth0 three=eth0"), ("one two", "one three"), marks=LONG),
        ((BOTH, "two=eth0 one=eth0"), ("one two", "two one")),
        (("", BOTH), ("not set", "one two")),
    ],
    ids=["another", "another order", "not set"],
)
def test_networks_that_differ_between_nodes(folder, nodes, values, words):
    runs = folder.run(nodes, "x", of_node=lambda n: {"NETWORKS": values[n]}, expect=1)
    text = "error: NETWORKS (its labels, in their order) is {} on node 0 (node0) but {} on node 1 "
    text += "(node1): give it the same"
    for run in runs:
        (line,) = errors(run)
        assert line.endswith(f"{text.format(*words)} value on all nodes")
        assert not reports(run) and run.seconds < 40


WRONG = {
    "no interface": ({"NETWORKS": "one=eth0 two"}, "NETWORKS has 'two': write NAME=INTERFACE"),
    "a folder": ({"NETWORKS": "one=eth0 ../x=eth0"}, "NETWORKS has '../x=eth0': write NAME="),
    "the same name": ({"NETWORKS": "a=eth0 a=eth1"}, "NETWORKS has two networks named a"),
    "one network": ({"NETWORKS": "one=eth0"}, "name two networks or more to compare"),
    "IFNAME too": ({"IFNAME": "eth0"}, "NETWORKS and IFNAME are both set"),
    "one node": ({"NNODES": "1"}, "and NNODES is 1: unset it"),
    "resume": ({}, "--resume would go on from the network before"),  # in each case, told last
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_networks(monkeypatch, case):
    variables, text = WRONG[case]
    usual = {"NNODES": "2", "NETWORKS": BOTH, "IFNAME": "", "MASTER_PORT": "29500"}
    for name, value in (usual | variables).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Refused, match=re.escape(text)):
        network_series.read_networks(os.environ["NETWORKS"])
        network_series.check(["x", "--resume"])


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("MASTER_PORT", 65535, "MASTER_PORT is 65535: give a number from 1 to 65534"),
        ("MASTER_ADDR", "localhost", "is a loopback address"),
    ],
)
def test_wrong_networks_are_refused_with_one_line(folder, name, value, text):
    env = folder.env(1, **{"NETWORKS": BOTH, name: value})
    command = ["bash", folder.path / "launch_multinode.sh", "x"]
    (line,) = start(command, env=env, cwd=folder.path).finish(20, expect=1).lines()
    assert "error: " in line and text in line


# --- One run on several nodes ----------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(nodes, tmp_path_factory) -> tuple[Folder, list[Run]]:
    """Without arguments and with no setting of a network."""
    folder = Folder(tmp_path_factory.mktemp("plain"))
    return folder, folder.run(nodes)


def test_without_arguments_all_nodes_take_the_same_steps_on_a_sample(plain):
    folder, runs = plain
    first, second = (reports(run)[0]["argv"] for run in runs)
    assert first == second
    options = dict(zip(first[::2], first[1::2], strict=True))
    sample = f"{folder.path}/data/sample_coco"
    assert options["--coco_image_path"] == f"{sample}/train2017"
    assert options["--annotation_path"] == f"{sample}/annotations/instances_train2017.json"
    assert int(options["--max_steps"]) > 0 and options["--weights"] == "none"
    # 16 images hid a link of 1 Gb/s on a CPU without bf16: docs/networks.md says four.
    assert (options["--batch_size"], options["--image_size"]) == ("4", "64")
    for run in runs:
        assert f"{sample!r}]" in re.search("MADE .*", run.out)[0]


def test_nccl_writes_to_files_of_the_run_and_gloo_has_preflights_interface(plain):
    for node, run in enumerate(plain[1]):
        env = reports(run)[0]["env"]
        assert (env["NCCL_DEBUG"], env["NCCL_DEBUG_SUBSYS"]) == ("INFO", "INIT,NET,ENV")
        assert env["NCCL_DEBUG_FILE"] == f"logs/series/nccl.node{node}.%h.%p.log"
        assert env["GLOO_SOCKET_IFNAME"] == "eth0"


@LONG
def test_users_own_interface_tells_the_kind_of_the_network_and_nccls_own_text_stays(folder, nodes):
    for run in folder.run(nodes, "x", IFNAME="eth0", NCCL_DEBUG_SUBSYS="ALL"):
        env = reports(run)[0]["env"]
        assert (env["NETWORK"], env["GLOO_SOCKET_IFNAME"]) == ("ethernet", "eth0")
        assert "NCCL_DEBUG" not in env and "NCCL_DEBUG_FILE" not in env
        assert env["NCCL_DEBUG_SUBSYS"] == "ALL"


# --- SLURM -----------------------------------------------------------------------------------


@LONG
def test_srun_starts_the_series_on_all_nodes(slurm, folder):
    env = folder.env(GPUS_PER_NODE=1, NETWORKS=BOTH, RUN_NAME="series")
    command = ["-N", 2, "--ntasks-per-node=1", folder.path / "launch_multinode.sh", "x"]
    run = slurm.run("srun", *command, env=env, cwd=folder.path)
    found = sorted((r["rank"], r["env"]["RUN_NAME"]) for r in reports(run))
    assert found == [(0, "one"), (0, "two"), (1, "one"), (1, "two")]
    assert run.out.count("COMPARED") == 1


# --- two_nodes.sh --links --------------------------------------------------------------------


def two_nodes(root: Path, *arguments: object, expect: int = 0, **env: str) -> Run:
    """The script of a folder that has tools/, to its end; no namespace of it stays."""
    require_namespaces()
    command = ["bash", root / "tools" / "two_nodes.sh", "--name", "series", *arguments]
    env = {"PYTHON": sys.executable, **WITH_STAND_IN, **env}
    with start(command, env=env, cwd=root) as started:
        run = started.finish(300, expect=expect)
    assert not namespaces(started)
    return run


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--links slow -- x", "--links has 'slow': write NAME=RATE"),
        ("--links lo=1gbit,fast=unshaped -- x", "--links has 'lo=1gbit': write NAME=RATE"),
        ("--links a=1gbit,a=2gbit -- x", "--links has two named a"),
        ("--links slow=1gbit -- x", "--links is 'slow=1gbit': name two or more"),
        ("--links a=1gbit,b=2gbit --rate 1gbit -- x", "--rate and --links"),
        ("--links a=fast,b=2gbit -- x", "tc does not take --links fast"),
        ("--gpus_per_node 0 -- x", "--gpus_per_node is '0'"),
        ("--lr 1", "unknown option --lr"),
        ("--rate", "--rate needs a value"),
    ],
)
def test_two_nodes_refuses_with_one_line(folder, arguments, text):
    run = two_nodes(folder.path, *arguments.split(), expect=1)
    assert text in run.lines()[-1] and "error:" in run.lines()[-1]


@LONG
def test_links_compare_two_real_runs(tmp_path, sample):
    """The real script, probe and comparison: table, verdict and picture."""
    options = "--weights none --image_size 64 --batch_size 8 --num_epochs 9 --max_steps 12"
    links = ["--links", "slow=1gbit,fast=unshaped", "--", *data_args(sample), *options.split()]
    run = two_nodes(ROOT, *links, LOG_DIR=str(tmp_path))
    series = tmp_path / "series"
    report = (series / "compare.md").read_text()
    note = "Emulated: two network namespaces of one machine, joined by slow=1gbit,fast=unshaped"
    picture = "\n![Parts of a step, throughput and loss](compare.png)\n"
    assert report.replace(picture, "") in run.out and report.startswith(f"{note}\n\n")
    assert picture in report
    assert re.search(r"^\| +\| +slow \| +fast \|$", report, re.MULTILINE)
    for row in ("status", "img/s, job", "- exposed communication", "all-reduce alone"):
        assert f"| {row} " in report
    assert re.search(r"^slow: ", report, re.MULTILINE)  # the verdict on it
    assert (series / "compare.png").stat().st_size > 10_000
    logs = [parse_text((series / label / "node0.log").read_text()) for label in ("slow", "fast")]
    links = [link for log in logs for link in log.records["Probe"]["nodes"][0]["interfaces"]]
    rates = {link["name"]: link["wire_Gbps"] for link in links if link["wire_Gbps"] > 0.1}
    assert rates["slow"] == pytest.approx(1, rel=0.1) and rates["fast"] > rates["slow"]
    own = [log.records["Run"]["env"]["GLOO_SOCKET_IFNAME"] for log in logs]
    assert own == ["slow", "fast"]
    slow, fast = (log.records["Summary"] for log in logs)
    assert slow["steps"] == fast["steps"] == 12
    assert slow["weights_sha256"] == fast["weights_sha256"]
