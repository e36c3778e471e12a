"""tools/probe_link.py on two namespaces: rate, latency, counters, errors."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import compare_logs
from support.forks import run_forked
from support.nodes import NamespacePair
from support.processes import LONG, ROOT

GRADIENT_BYTES = 44_870_208  # 4 * 11,217,552 parameters
# What each forked rank runs: the probe, with NODES in a namespace, as support/nodes.py starts
# what is new there. With FIGURES it prints what the probe makes of times that it is given. Without
# either, the file is run as torchrun runs it.
PROGRAM = f"""
import ctypes, json, os, runpy, socket, subprocess, sys

sys.path.insert(0, {str(ROOT / "tools")!r})
import probe_link
from probe_link import demo

NEW_MOUNTS, NEW_HOST_NAME = 0x20000, 0x4000000


def enter(rank, name):
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/run/netns/" + name) as namespace:
        assert libc.setns(namespace.fileno(), 0) == 0, ctypes.get_errno()
    assert libc.unshare(NEW_MOUNTS | NEW_HOST_NAME) == 0, ctypes.get_errno()
    socket.sethostname(f"node{{rank}}")
    for words in ("--make-rprivate /", "-t sysfs sysfs /sys"):
        subprocess.run(["mount", *words.split()], check=True)


def main(process):
    if "FIGURES" in os.environ:
        process.world_size = 4
        rounds = [(1, 900.0), (1, 2.0), (10, 3.0), (10, 4.0)]
        print(json.dumps(probe_link.timing(process, 6000, rounds)))
        return
    rank = int(os.environ["RANK"])
    enter(rank, os.environ["NODES"].split()[rank])
    probe_link.main(process)


def run_and_exit(main):
    sys.argv[0] = probe_link.__file__
    if "FIGURES" in os.environ or "NODES" in os.environ:
        demo.run_and_exit(main, log_wall_time=False)
    runpy.run_path(probe_link.__file__, run_name="__main__")
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("probe") / "program.py"
    path.write_text(PROGRAM)
    return path


@LONG
@pytest.mark.guards("probe-bytes", "probe-wire")
def test_record_and_words_of_a_link_of_a_known_rate(program, tmp_path, capsys):
    """It takes the training's arguments, and compare_logs.py reads what it writes."""
    with NamespacePair("300mbit") as nodes:
        own = {"MASTER_ADDR": nodes.addresses[0], "GLOO_SOCKET_IFNAME": nodes.interface}
        own |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NODES": " ".join(nodes.names)}
        words = ["--coco_image_path", "x", "--max_steps", "2"]
        (run,) = run_forked([(2, words, own)], program=program)
    record = run.json_line("Probe")
    sizes = [2**10, 2**12, 2**15, 2**18, 2**21, 2**24, GRADIENT_BYTES]
    assert [size["bytes"] for size in record["sizes"]] == sizes
    # By the clock and by the counters; a busy machine is slower.
    rates = [8 * record["algbw_GBps"]]
    rates += [node["interfaces"][0]["wire_Gbps"] for node in record["nodes"]]
    assert all(0.2 < rate < 0.315 for rate in rates), rates
    assert [node["host"] for node in record["nodes"]] == ["node0", "node1"]
    assert [node["interfaces"][0]["name"] for node in record["nodes"]] == ["eth0", "eth0"]
    assert [node["nccl"] for node in record["nodes"]] == [None, None]
    assert all(node["tcp"]["segments"] > 1000 for node in record["nodes"])
    assert 0 < record["latency_ms"] < record["all_reduce_ms"] / 10
    words = r"Probe: all-reduce of 44\.9 MB in [\d,]+ ms: \d+ Mb/s on eth0 \(ethernet\)$"
    assert re.search(words, run.out, re.MULTILINE), run.tail()
    (tmp_path / "node0.log").write_text(run.out)
    assert compare_logs.main([str(tmp_path)]) == 1  # there is no training in it
    assert "sockets (byte counters)" in capsys.readouterr().out


@pytest.mark.guards("probe-warm-up", "probe-bus-rate", "probe-wall-time")
def test_figures_are_those_after_the_warm_up_an_error_is_one_line_and_one_process_no_link(program):
    runs = [(0, [], {"FIGURES": "1"}), (0, [])]
    figures, alone = run_forked(runs, program=program)
    (error,) = run_forked([(0, ["--backend", "smoke"])], program=program, expect=2)
    # Of four ranks a ring carries one and a half times the bytes.
    expected = {"bytes": 6000, "ms": 3.0, "algbw_GBps": 0.002, "busbw_GBps": 0.003}
    assert json.loads(figures.out) == pytest.approx(expected)
    refusal = "[CPU 0] ERROR: probe_link.py: argument --backend: invalid choice: "
    assert error.out.startswith(refusal) and error.out.count("\n") == 1, error.tail()
    # (Where the host name does not resolve, PyTorch warns of it.)
    assert alone.lines(0) == ["Probe: one process has no link to probe"]
