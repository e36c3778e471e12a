"""tools/two_nodes.sh makes two nodes of one machine, trains on them, and leaves nothing behind."""

from __future__ import annotations

import os
import pwd
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from datetime import datetime
from pathlib import Path

import pytest

from support.datasets import make_set
from support.launchers import (
    COMMAND,
    FAST,
    NOTEBOOK,
    SAVED,
    STOPS,
    copy_project,
    launch_series,
    project_with,
    starts,
    stub_python,
)
from support.nodes import python_for, require_namespaces, start_two_nodes
from support.processes import FACTOR, ROOT, Run, free_ports, require, start

TOOL = "tools/two_nodes.sh"


def two_nodes(folder: Path, *arguments: object, root: Path = ROOT, **variables: object) -> Run:
    """The command to its end, whatever its code; no namespace of it stays."""
    require_namespaces()
    env = {"PYTHON": sys.executable, "PROBE": "0", "RUN_NAME": "run"}
    env |= {name: None if value is None else str(value) for name, value in variables.items()}
    with start_two_nodes(["bash", root / TOOL, *arguments], env=env, cwd=folder) as started:
        return started.finish(400, None, clean=10)


def log_of(folder: Path, node: int = 0) -> Run:
    """What a node's log in this folder says."""
    return Run([], 0, (folder / f"node{node}.log").read_text(), 0)


REFUSED = {
    "--lr 1": "--lr",
    "--rate": "--rate",
    "--rate 1gbit --links a=1gbit": "--rate and --links",
    "--rate fast -- --annotation_path none": "rate.* fast",
    "--links slow -- x": "slow.*NAME=RATE",
    "--links lo=1gbit,fast=unshaped -- --annotation_path none": r"\blo\b",
    "--links a=1gbit,a=2gbit -- --annotation_path none": r"\ba\b",
    "--links a=fast,b=2gbit -- --annotation_path none": " fast",
}


def test_wrong_options_are_refused_in_one_line(tmp_path):
    for options, words in REFUSED.items():
        run = two_nodes(tmp_path, *options.split())
        assert run.returncode not in (0, SAVED)
        errors = [line for line in run.lines() if "error: " in line]
        assert errors == run.lines()[-1:] and re.search(words, errors[0]), run.tail()
    assert not (tmp_path / "logs").exists()


def test_without_root_it_is_refused():
    other = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    tried = subprocess.run([*other, "test", "-r", ROOT / TOOL], capture_output=True)
    require(tried.returncode == 0, "no other user can be made that reads this checkout")
    with start([*other, "bash", ROOT / TOOL, "--", "--lr", 1], cwd="/") as started:
        (line,) = started.finish(20, expect=2).lines()
    assert "error: " in line and "root" in line


def test_both_nodes_are_started_over_each_cable(tmp_path):
    """With their share of the cores. The comparison is told the rate of a cable that has one; a
    user, that the GPU is shared. A run in which node 0 alone fails has failed. What outlives its
    launcher ends with the nodes.
    """
    words = ["--links", "slow=1gbit,fast=unshaped", "--", "--annotation_path", "none"]
    stub = stub_python(tmp_path)
    ends = "setsid sleep 999 >/dev/null 2>&1 &\n[[ $NODE_RANK$GLOO_SOCKET_IFNAME != 0fast ]]\n"
    stub.write_text(stub.read_text() + ends)
    variables = {"PYTHON": stub, "OMP_NUM_THREADS": None}
    run = two_nodes(tmp_path, *words, **variables, CUDA_VISIBLE_DEVICES=0, GPUS_PER_NODE=2)
    assert run.returncode == 1
    threads = max(1, len(os.sched_getaffinity(0)) // 4)
    for label in ("slow", "fast"):
        for node in (0, 1):
            log = log_of(tmp_path / "logs/run" / label, node)
            words = {"--nnodes=2", f"--node_rank={node}", "--nproc_per_node=2"}
            words |= {f"OMP_NUM_THREADS={threads}", f"GLOO_SOCKET_IFNAME={label}"}
            assert words <= {*shlex.split(COMMAND.search(log.out)[1])}
    assert re.findall(r"--link_gbps (\S+)", run.out) == ["slow=1"]
    assert "Both nodes use the same GPUs" in run.out


OWN = shlex.split("--max_steps 2 --global_batch_size 8 --image_size 40 --timeout 60 --log_every 1")
OWN += shlex.split("--workers 0 --precision fp32")


@pytest.mark.slow
def test_both_nodes_train_over_a_cable_of_the_rate_asked_for():
    """Behind sudo, without a sample set: what it makes belongs to the user, whose settings win. A
    step sends 45 MB of gradients each way: 3.6 s at 100 Mb/s.
    """
    require_namespaces()
    caller = pwd.getpwnam("nobody")
    variables = {**python_for(caller), "SUDO_UID": caller.pw_uid, "SUDO_GID": caller.pw_gid}
    with tempfile.TemporaryDirectory(prefix="mein Gerät-") as name:  # pytest's own is for root
        folder = Path(name)
        folder.chmod(0o755)
        project = copy_project(folder)
        for path in (folder, project):
            os.chown(path, caller.pw_uid, caller.pw_gid)
        drawing = project / "tools/make_sample_coco.py"
        drawing.write_text(drawing.read_text().replace("default=512", "default=48"))
        words = ["--rate", "100mbit", "--", *OWN]
        run = two_nodes(folder, *words, root=project, **variables, TMPDIR=folder)
        assert run.returncode == 0 and "sample_coco: 48 + " in run.out, run.tail()
        for node in (0, 1):
            log = log_of(folder / "logs/run", node)
            assert [rank for rank in (0, 1) if log.steps(rank)] == [node]
            times = re.findall(r"\| step (\S+) ms", log.out)
            assert len(times) == 2 and all(float(time) > 3000 for time in times)
        facts = run.json_line("Run")
        assert facts["hosts"] == ["node0", "node1"] and facts["weights"] == "none"
        assert facts["global_batch_size"] == 8 and facts["image_size"] == 40
        assert facts["coco_image_path"] == f"{project}/data/sample_coco/train2017"
        made = [*folder.glob("logs/**/*"), *project.glob("data/**/*")]
        assert {"node0.log", "node1.log"} <= {path.name for path in made} and len(made) > 48
        owners = {(path.lstat().st_uid, path.lstat().st_gid) for path in made}
        assert owners == {(caller.pw_uid, caller.pw_gid)}


# --- Several cables ----------------------------------------------------------------------------

TIMEOUT = 8  # seconds, of --timeout


def swallow(space: str, interface: str, but: str) -> None:
    """A firewall in this namespace drops all TCP of an interface, but to and from these ports."""
    dropped = f"tcp sport != {but} tcp dport != {but} drop"
    rules = f"""
    table inet demo {{
        chain input {{
            type filter hook input priority 0;
            iifname {interface} {dropped}
        }}
        chain output {{
            type filter hook output priority 0;
            oifname {interface} {dropped}
        }}
    }}"""
    command = ["ip", "netns", "exec", space, "nft", "-f", "-"]
    subprocess.run(command, input=rules.encode(), check=True)


@pytest.fixture(scope="module")
def training(tmp_path_factory) -> list[str]:
    """Options of six steps."""
    images = make_set(tmp_path_factory.mktemp("set"), 80)
    return [*images, *FAST, "--max_steps", 6]


@pytest.fixture(scope="module")
def links(training, tmp_path_factory) -> tuple[Path, Run]:
    """The folder of a run over each of three cables, of which the first is open for the rendezvous
    alone.
    """
    require_namespaces()
    require(shutil.which("nft"), "a firewall needs the command nft (package nftables)")
    folder = tmp_path_factory.mktemp("links")
    # -x: it prints what it does, and with that the exit code of each node.
    words = ["--links", "bad=unshaped,slim=500mbit,fast=unshaped", "--"]
    words += [*training, "--timeout", TIMEOUT]
    port = free_ports(30)  # namespaces have ports of their own: any number serves
    env = {"PYTHON": sys.executable, "PROBE": "1", "RESTARTS": "1", "OMP_NUM_THREADS": None}
    env |= {"MASTER_PORT": str(port), "RUN_NAME": "both"}
    with start_two_nodes(["bash", "-x", ROOT / TOOL, *words], env=env, cwd=folder) as started:
        started.wait_for("^[^+].*Emulated cable fast")
        swallow(f"two_nodes{started.pid}-1", "bad", but=f"{port}-{port + 29}")
        run = started.finish(400, expect=1, clean=10)
    return folder / "logs/both", run


@pytest.mark.slow
def test_links_are_compared_in_a_table_and_a_picture(links):
    """On node 0. Of each network there is the log of each node."""
    logs, run = links
    slim, fast = (log_of(logs / label).json_line("Summary") for label in ("slim", "fast"))
    assert slim["weights_sha256"] == fast["weights_sha256"] and slim["steps"] == 6
    probe = log_of(logs / "slim").json_line("Probe")
    found = [link for node in probe["nodes"] for link in node["interfaces"]]
    rates = [link["wire_Gbps"] for link in found if link["name"] == "slim"]
    assert probe["world_size"] == 2 and rates == pytest.approx([0.5, 0.5], rel=0.1)
    assert re.search("two_nodes.sh: Emulated cable slim, 500mbit: .* namespaces", run.out)
    head = re.search(r"^\|.*\| +bad +\| +slim +\| +fast +\|$", run.out, re.MULTILINE)
    assert head and head[0] in (logs / "compare.md").read_text()
    assert (logs / "compare.png").stat().st_size > 10_000
    assert "report: logs/both/compare.md; picture: logs/both/compare.png" in run.out
    # Its interface states 10 Gb/s; the cable that was made is judged by its own rate. The training
    # itself sent the bytes of its gradients over each.
    rates = {
        "slim": "of the 500 Mb/s that you gave",
        "fast": "a virtual interface states any rate",
    }
    for name, rate in rates.items():
        (block,) = re.findall(rf"(?ms)^{name}: a step of .*?\n\n", run.out)
        assert f"- network of the probe: by the bytes, {name} (ethernet)\n" in block
        assert re.search(rf"^- probe: .*{rate}", block, re.MULTILINE)
        assert re.search(rf"- training: a node sent [\d.]+ MB .*a step over {name}; the", block)
    assert "check failed" not in run.out


@pytest.mark.slow
def test_a_network_whose_probe_does_not_connect_is_left_out(links):
    """Both nodes name the firewall in time, and end with 1; the training is not started, and the
    other networks are compared. A minute is for what the ranks load first.
    """
    logs, run = links
    assert re.findall(r"^\++ code=([1-9]\d*)$", run.out, re.MULTILINE) == ["1", "1"]
    both = (logs / "compare.md").read_text()
    assert re.search(r"(?m)^bad is not scored: it failed: .*no connection to all ranks", both)
    for node in (0, 1):
        bad, slim, fast = (log_of(logs / label, node).out for label in ("bad", "slim", "fast"))
        assert starts(bad) == 1 and "probe_link.py" in COMMAND.search(bad)[1]
        assert re.search(rf"^\[CPU {node}\] ERROR.*GLOO_SOCKET_IFNAME.*firewall", bad, re.M), bad
        lines = [COMMAND.search(log)[0] for log in (bad, slim)]
        begun, ended = (datetime.fromisoformat(" ".join(line.split()[1:3])) for line in lines)
        assert (ended - begun).total_seconds() < (TIMEOUT + 15 + 60) * FACTOR
        # No idle interface is named: by the second of two Counters lines.
        assert "| Step 1 " not in bad and "| Step 6 " in fast
        assert re.findall(r"^Sent .* on (\S+) \(ethernet\) in \d+ s$", fast, re.M) == ["fast"]
    kinds = r"^(?:\[CPU 0\] )?(Probe|Counters|Run|Summary) \{"
    order = re.findall(kinds, log_of(logs / "fast").out, re.MULTILINE)
    assert order == ["Probe", "Counters", "Run", "Summary", "Counters"]


@pytest.mark.slow
def test_one_and_two_processes_and_two_nodes_train_with_equal_threads(training, links, folder):
    """And are compared. Two processes train the same wherever they are. What a notebook sets
    changes no picture.
    """
    words = ["--processes", "1,2", "--", *training]
    with launch_series(folder, *words, OMP_NUM_THREADS=None, **NOTEBOOK) as started:
        compared = started.finish(300)
    assert re.search(r"(?m)^\|.*\| +p1 \| +p2 +\|$", compared.out), compared.tail()
    end = "report: logs/run/compare.md; picture: logs/run/compare.png"
    assert compared.lines()[-1].endswith(end)
    assert (folder / "logs/run/compare.png").stat().st_size > 10_000
    logs = {name: folder / "logs/run" / name for name in ("p1", "p2")}
    logs["fast"] = links[0] / "fast"
    runs = [log_of(path).json_line("Run") for path in logs.values()]
    assert [(run["world_size"], run["nodes"]) for run in runs] == [(1, 1), (2, 1), (2, 2)]
    assert [run["global_batch_size"] for run in runs] == [4, 8, 8]
    assert {run["threads"] for run in runs} == {max(1, len(os.sched_getaffinity(0)) // 2)}
    digests = [log_of(path).json_line("Summary")["weights_sha256"] for path in logs.values()]
    assert digests[0] != digests[1] == digests[2]
    named = [f"{name}={path}" for name, path in logs.items()]
    with start([sys.executable, ROOT / "tools/compare_logs.py", *named]) as started:
        compared = started.finish(60)
    assert re.search(r"(?m)^\|.*\| +p1 \| +p2 \| +fast +\|$", compared.out), compared.tail()


# Over the first of two cables it ends at once.
SECOND = 'if os.environ["GLOO_SOCKET_IFNAME"] == "one":\n    sys.exit()\n' + STOPS


@pytest.mark.slow
def test_a_stop_in_the_second_of_three_runs_ends_both_nodes(tmp_path):
    """The first one is compared, and no namespace stays."""
    require_namespaces()
    project = project_with(tmp_path, SECOND)
    words = ["--links", "one=unshaped,two=unshaped,three=unshaped"]
    env = {"PYTHON": sys.executable, "PROBE": "0", "RUN_NAME": "run"}
    command = ["bash", project / TOOL, *words, "--", "--annotation_path", "none"]
    with start_two_nodes(command, env=env, cwd=tmp_path) as started:
        for rank in (0, 1):
            started.wait_for(rf"\[CPU {rank}\] trains")
        started.signal(signal.SIGINT)
        run = started.finish(30, SAVED, clean=10)
    assert run.out.count("run.py: stopped by SIGINT") == 2, run.tail()
    assert re.search(r"^one is not scored: ", run.out, re.MULTILINE)
    logs = tmp_path / "logs/run"
    assert not (logs / "three").exists()
    for node in (0, 1):
        assert "Stopped on SIGTERM" in log_of(logs / "two", node).out
