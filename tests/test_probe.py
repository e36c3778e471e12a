"""tools/probe_link.py on two namespaces: rate, latency, counters, errors."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import compare_logs
from support.nodes import NamespacePair
from support.processes import LONG, ROOT, Run, base_env, new_test_id

PROBE = [sys.executable, str(ROOT / "tools" / "probe_link.py")]
GRADIENT_BYTES = 44_870_208  # 4 * 11,217,552 parameters


def probe(nodes: NamespacePair, address: str, interface: str, *words: str) -> Run:
    """The probe as rank 0 on node 0 and rank 1 on node 1; what rank 0 says."""
    started = []
    for rank in (0, 1):
        env = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        env |= {"MASTER_ADDR": address, "MASTER_PORT": 29500, "GLOO_SOCKET_IFNAME": interface}
        env |= {"OMP_NUM_THREADS": 1, "TORCHELASTIC_RUN_ID": "probe"}
        texts = {name: str(value) for name, value in env.items()}
        started.append(nodes.popen(rank, [*PROBE, *words], env=texts))
    first, _ = (one.finish(120) for one in started)
    return first


def test_record_and_words_of_a_link_of_a_known_rate(tmp_path, capsys):
    """It takes the training's arguments, and compare_logs.py reads what it writes."""
    with NamespacePair("300mbit") as nodes:
        run = probe(
            nodes, nodes.addresses[0], "eth0", "--coco_image_path", "x", "--max_steps", "2"
        )
    record = run.json_line("Probe")
    sizes = [2**10, 2**12, 2**15, 2**18, 2**21, 2**24, GRADIENT_BYTES]
    assert [size["bytes"] for size in record["sizes"]] == sizes
    for size in record["sizes"]:  # with two ranks a ring carries each byte once
        assert size["algbw_GBps"] == size["busbw_GBps"]
        assert size["algbw_GBps"] == pytest.approx(size["bytes"] / size["ms"] / 1e6)
    # By the clock and by the counters; a busy machine is slower.
    rates = [8 * record["algbw_GBps"]]
    rates += [node["interfaces"][0]["wire_Gbps"] for node in record["nodes"]]
    assert all(0.2 < rate < 0.315 for rate in rates), rates
    assert [node["host"] for node in record["nodes"]] == ["node0", "node1"]
    assert [node["interfaces"][0]["name"] for node in record["nodes"]] == ["eth0", "eth0"]
    assert [node["nccl"] for node in record["nodes"]] == [None, None]
    assert all(node["tcp"]["segments"] > 1000 for node in record["nodes"])
    assert 0 < record["latency_ms"] < record["all_reduce_ms"] / 10
    words = (
        r"Probe: all-reduce of 44\.9 MB in [\d,]+ ms: \d+ Mb/s on eth0 \(ethernet\), \d % of its"
    )
    assert re.search(words, run.out), run.tail()
    (tmp_path / "node0.log").write_text(run.out)
    assert compare_logs.main([str(tmp_path)]) == 1  # there is no training in it
    assert "sockets (byte counters)" in capsys.readouterr().out


@LONG
@pytest.mark.parametrize(
    ("words", "code", "out", "error"),
    [
        ("", 0, "[CPU 0] Probe: one process has no link to probe\n", ""),
        ("--backend smoke", 2, "", "ERROR: probe_link.py: argument --backend: invalid choice: "),
    ],
)
def test_one_process_has_no_link_and_an_error_is_one_line(words, code, out, error):
    env = base_env(new_test_id()) | {"OMP_NUM_THREADS": "1"}
    how = {"capture_output": True, "text": True, "timeout": 60, "env": env}
    done = subprocess.run([*PROBE, *words.split()], **how)
    assert (done.returncode, done.stdout) == (code, out), done.stderr
    assert error in done.stderr and len(done.stderr.splitlines()) == bool(error), done.stderr
