"""What the probe says of the link, and the script of a step's parts and of compressed gradients,
held against arithmetic by hand and against the kernel's counters: real ranks, real network
namespaces.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import multiprocessing
import os
import re
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from analysis import runs
from analysis.logs import parse_text
from launcher import counters
from support.datasets import data_args, make_set
from support.forks import Job, prepared, run_to_the_end, start, write
from support.nodes import NamespacePair, why_no_namespaces
from support.processes import LONG, ROOT, SCRIPT, Run, Started, free_port, long, require, run_demo

TOOLS = ROOT / "tools"
PROBE = TOOLS / "probe_link.py"

FAST = shlex.split(
    "--weights none --image_size 40 --batch_size 4 --workers 0 --precision fp32 --timeout 30 "
    "--log_every 1"
)
WHOLE = 3  # steps that PowerSGD leaves alone and that stay out of the averages
GRADIENT_BYTES = 44_870_208  # 4 * 11,217,552 parameters
RANK = 8  # PowerSGD's, where no option says so


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> list[str]:
    """The options for 40 images: 5 steps an epoch for two ranks."""
    return make_set(tmp_path_factory.mktemp("data"), 40)


@pytest.fixture
def checkpoint(tmp_path) -> Iterator[Path]:
    """A name for a checkpoint; the file has 135 MB and more and does not outlive its test."""
    yield tmp_path / "saved.pt"
    for file in tmp_path.glob("saved.pt*"):
        file.unlink()


# --- What runs in forked processes -----------------------------------------------------------


def shapes(demo, result):
    """Of the parameters, as torchvision has them."""
    from torchvision.models import resnet18

    write(result, [parameter.shape for parameter in resnet18(num_classes=80).parameters()])


def probe_module(demo):
    """tools/probe_link.py, which then works with the script that was imported here."""
    sys.modules["demo_coco_resnet18"] = demo
    import probe_link  # here, as it imports torch

    return probe_link


def probe(demo, result, murmur=False, seconds=None, dies=False):
    """The probe, on a node of a `NamespacePair` where one is given, /sys included.

    murmur: all the time a few bytes go over the loopback interface. seconds: after so many it
    starts no other round. dies: this process is gone when the probe has begun.
    """
    link = probe_module(demo)
    if murmur:
        murmuring()
    if dies:
        link.measure = lambda *_: os._exit(9)
    link.SECONDS = link.SECONDS if seconds is None else seconds
    demo.one_line_errors(link.main)


def murmuring():
    own = os.getpid()
    if os.fork() == 0:
        datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        while os.getppid() == own:
            datagrams.sendto(bytes(100), ("127.0.0.1", 9))  # nobody has to receive them
            time.sleep(0.02)
        os._exit(0)


def sentences(demo, result, records):
    write(result, [probe_module(demo).sentence(record) for record in records])


def with_counters(demo, result):
    """The script on a node of a `NamespacePair`; what the node's interfaces carried from the
    beginning of its first epoch to its end.
    """
    train_epoch, before = demo.train_epoch, []

    def counted(run, epoch):
        if not before:
            demo.dist.barrier()  # what came before has arrived
            before.append(counters.read_counters())
        return train_epoch(run, epoch)

    demo.train_epoch = counted
    run_to_the_end(demo)
    carried = counters.difference(before[0], counters.read_counters())
    write(result, carried["interfaces"])


def send_known_bytes(demo, result, address, count):
    """Node 0 sends `count` bytes to node 1; both keep what their counters said before and after.

    Node 1 confirms, so that no byte is under way when the counters are read again.
    """
    readings = [counters.read_counters()]
    if os.environ["RANK"] == "1":
        with socket.create_server((address, 5555)) as listening, listening.accept()[0] as peer:
            received = 0
            while received < count:
                received += len(peer.recv(1 << 20))
            peer.sendall(b".")
    else:
        deadline = time.monotonic() + 20
        while True:
            try:
                peer = socket.create_connection((address, 5555), timeout=20)
                break
            except ConnectionRefusedError:  # node 1 is not that far yet
                assert time.monotonic() < deadline
                time.sleep(0.02)
        with peer:
            peer.sendall(bytes(count))
            assert peer.recv(1) == b"."
    readings.append(counters.read_counters())
    write(result, readings)


def in_pulses(demo, result, stopped_ms=0, running_ms=0):
    """The script's main; with `stopped_ms` it is stopped so long in every so often."""
    own = os.getpid()
    if stopped_ms and os.fork() == 0:
        with contextlib.suppress(ProcessLookupError):
            while os.getppid() == own:
                os.kill(own, signal.SIGSTOP)
                time.sleep(stopped_ms / 1e3)
                os.kill(own, signal.SIGCONT)
                time.sleep(running_ms / 1e3)
        os._exit(0)
    start(demo)


def slow_to_decode(demo, result, ms=0):
    """The script; each picture takes so much longer to decode."""
    decode = demo.decode
    demo.decode = lambda data: (time.sleep(ms / 1e3), decode(data))[1]
    start(demo)


def warm_up_again(demo, result):
    """What differs after one more warm-up pass, by name."""
    run = prepared(demo)
    before = contents(run)
    demo.fix_bucket_order(run)
    after = contents(run)
    assert set(after) == set(before) and len(before) > 120
    write(result, [name for name in before if before[name] != after[name]])


POWERSGD = ("iter", "error_dict", "p_memory_dict", "q_memory_dict")


def workers_at_first_backward(demo, result):
    """Trains; how many loader workers there were when the first backward pass began."""
    import torch

    seen, backward = [], torch.Tensor.backward

    def watched(*args, **kwargs):
        seen.append(len(multiprocessing.active_children()))
        return backward(*args, **kwargs)

    torch.Tensor.backward = watched
    run_to_the_end(demo)
    write(result, seen)


def contents(run) -> dict[str, bytes]:
    """All that later steps depend on, byte for byte."""
    import torch

    def flat(value, name):
        if isinstance(value, dict):
            for key, part in value.items():
                yield from flat(part, f"{name}.{key}")
        elif isinstance(value, list | tuple):
            yield from flat(dict(enumerate(value)), name)
        elif isinstance(value, torch.Tensor):
            yield name, value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        else:
            yield name, repr(value).encode()

    parts = {
        "model": run.model.state_dict(),
        "gradients": [parameter.grad for parameter in run.model.parameters()],
        "optimizer": run.optimizer.state_dict(),
        "scaler": run.scaler.state_dict(),
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state()[1].tobytes(),
        "progress": [run.epoch, run.step, run.sums, run.timer.steps],
        "training": [module.training for module in run.ddp.modules()],
    }
    if run.powersgd:
        parts["powersgd"] = {name: getattr(run.powersgd, name) for name in POWERSGD}
    return dict(flat(parts, "run"))


# --- Two nodes -------------------------------------------------------------------------------


def test_known_bytes_are_counted_on_both_nodes(demo):
    count = 20_000_000
    with NamespacePair() as nodes:
        options = {"address": nodes.addresses[1], "count": count}
        job = demo.run(nproc=2, call=send_known_bytes, nodes=nodes, **options)
    before, after = (reading["tcp"]["retransmits"] for reading in job.result(0))
    # On a busy machine TCP sends some packets, of 9,000 bytes, again.
    again = 9100 * (after - before)
    for rank, sends in enumerate((True, False)):
        before, after = (reading["interfaces"] for reading in job.result(rank))
        eth0 = after["eth0"]
        # A veth states 10 Gb/s, shaped or not.
        assert (eth0["kind"], eth0["speed_Gbps"]) == ("ethernet", 10)
        gone, come = (eth0[way] - before["eth0"][way] for way in ("tx_bytes", "rx_bytes"))
        there, back = (gone, come) if sends else (come, gone)
        # Headers are counted too, but one for many bytes: the kernel hands over large packets.
        assert count < there < 1.01 * count + again and back < 0.01 * count
        assert after["lo"] == before["lo"] and after["lo"]["kind"] == "loopback"


def check_split(run: Run) -> dict:
    """The parts of a step add up for each rank, and are those of the step lines; the Summary."""
    summary, names = run.json_line("Summary"), ("data_ms", "compute_ms", "exposed_ms")
    for part in [summary, *summary["ranks"]]:
        assert sum(part[name] for name in names) == pytest.approx(part["step_ms"], rel=0.05)
        assert min(part[name] for name in names) >= 0 and part["compute_ms"] > 0
    for name in (*names, "step_ms"):
        mean = np.mean([rank[name] for rank in summary["ranks"]])
        assert summary[name] == pytest.approx(mean), name
    for rank, part in enumerate(summary["ranks"]):
        assert part["rank"] == rank
        shown = [re.search(r"data ([\d.]+) ms \| step ([\d.]+) ms", x) for x in run.lines(rank)]
        shown = [[float(number) for number in match.groups()] for match in shown if match]
        assert len(shown) > WHOLE
        # The lines have one decimal place.
        wanted = pytest.approx(np.mean(shown[WHOLE:], axis=0), abs=0.06)
        assert [part["data_ms"], part["step_ms"]] == wanted
    return summary


def busiest(interfaces: list[dict]) -> dict:
    """The interface that is named first, which has to be the one that carried most."""
    carried = [i["tx_bytes"] + i["rx_bytes"] for i in interfaces]
    assert carried == sorted(carried, reverse=True) and min(carried) > 0
    return interfaces[0]


RATE = 0.5  # Gb/s: so slow that a busy machine's pauses do not decide
LEAST_MS = 8e-6 * GRADIENT_BYTES / RATE  # of an all-reduce between two nodes at this rate


def check_probe(found: dict, rounds: int) -> None:
    """That of a link between two nodes, with so many rounds."""
    assert found["world_size"] == 2 and found["all_reduce_bytes"] == GRADIENT_BYTES
    assert found["all_reduce_ms"] > LEAST_MS
    assert found["algbw_GBps"] == pytest.approx(GRADIENT_BYTES / found["all_reduce_ms"] / 1e6)
    assert found["busbw_GBps"] == pytest.approx(found["algbw_GBps"])  # 2 (n - 1) / n, n = 2
    assert [node["host"] for node in found["nodes"]] == ["node0", "node1"]
    for node in found["nodes"]:
        link = busiest(node["interfaces"])
        assert (link["name"], link["kind"], link["speed_Gbps"]) == ("eth0", "ethernet", 10)
        # Each node sends as much as it receives.
        for way in ("tx_bytes", "rx_bytes"):
            assert rounds * GRADIENT_BYTES < link[way] < 1.1 * rounds * GRADIENT_BYTES
        for quiet in node["interfaces"][1:]:
            assert (quiet["name"], quiet["kind"], quiet["speed_Gbps"]) == ("lo", "loopback", None)
            assert quiet["wire_Gbps"] < 0.01


@LONG
def test_probe_and_steps_at_a_known_rate(demo, data):
    """On a link between two nodes: what it delivers, and what a step then waits for.

    Medians of five rounds: a machine that does something else during one of them does not decide.
    """
    argv = [*data, *FAST, "--max_steps", 5]
    with NamespacePair("500mbit") as nodes:
        probed = demo.run(argv, 2, call=probe, murmur=True, seconds=9, nodes=nodes)
        job = demo.run(argv, 2, call=with_counters, nodes=nodes)
    found, summary = probed.json_line("Probe"), check_split(job)
    assert all(len(node["interfaces"]) == 2 for node in found["nodes"])  # the murmur is seen
    check_probe(found, 6)  # the warm-up and five
    ms, rates = found["all_reduce_ms"], [n["interfaces"][0]["wire_Gbps"] for n in found["nodes"]]
    assert ms < 1.3 * LEAST_MS and rates == pytest.approx([RATE, RATE], rel=0.05)
    rate = min(rates)
    (said,) = (line for line in probed.lines() if "Probe: " in line)
    pattern = r"\[CPU 0\] Probe: all-reduce of 44\.9 MB in (\d+) ms: ([\d.]+) Gb/s on eth0 "
    pattern += r"\(ethernet\), 5 % of its stated 10 Gb/s"
    shown_ms, shown_rate = map(float, re.fullmatch(pattern, said).groups())
    assert (shown_ms, shown_rate) == (pytest.approx(ms, abs=0.51), pytest.approx(rate, rel=0.01))
    for rank in (0, 1):
        link = busiest(job.result(rank))
        assert link["name"] == "eth0"
        for way in ("tx_bytes", "rx_bytes"):
            assert 5 * GRADIENT_BYTES < link[way] < 5.5 * GRADIENT_BYTES
    # What computing cannot hide of the all-reduce is exposed, on each of two equal nodes.
    for rank in summary["ranks"]:
        assert rank["exposed_ms"] + rank["compute_ms"] > 0.95 * LEAST_MS
        assert rank["exposed_ms"] > 0.4 * LEAST_MS
    # Both logs make one run.
    run = runs.make_run("a", parse_text(probed.out + job.out), {})
    assert run.complete and run.probe_s == pytest.approx(ms / 1000), run.problems
    assert (run.interface, run.wire_gbps) == ("eth0 (ethernet)", pytest.approx(rate))
    assert run.global_batch == 8 and run.wall_s > 1.5


# --- The probe -------------------------------------------------------------------------------


@LONG
def test_probe_starts_no_round_after_its_time(demo):
    """Over a slow link a round takes seconds: then the warm-up and one have to do."""
    with NamespacePair("500mbit") as nodes:
        job = demo.run([], 2, call=probe, nodes=nodes, seconds=0.1)
    check_probe(job.json_line("Probe"), 2)


@LONG
def test_probe_with_torchrun_on_one_node(data):
    """As one would type it: the training's line, with the probe in the script's place."""
    argv = [*data, *FAST, "--probe-whatever", "-1", "--backend=gloo"]
    run = run_demo(argv, nproc=2, script=PROBE)
    found, lines = run.json_line("Probe"), [line for line in run.lines() if "[CPU" in line]
    (node,) = found["nodes"]
    lo = busiest(node["interfaces"])
    assert (lo["name"], lo["kind"], lo["speed_Gbps"]) == ("lo", "loopback", None)
    assert 0.9 < lo["wire_Gbps"] / (8 * 2 * found["algbw_GBps"]) < 1.3  # both ranks send
    lines = [line for line in lines if "Probe" in line]
    assert len(lines) == 2 and "Cleanup" not in run.out, run.out
    pattern = (
        r"\[CPU 0\] Probe: all-reduce of 44\.9 MB in [\d.]+ ms: [\d.]+ Gb/s on lo \(loopback\)"
    )
    assert re.fullmatch(pattern, lines[1]), lines[1]


@pytest.mark.parametrize("torchrun", [True, False])
def test_one_process_has_no_link_to_probe(demo, torchrun):
    run = demo.run([], call=probe, torchrun=torchrun)
    assert run.out == "[CPU 0] Probe: one process has no link to probe\n" and run.err == ""


def test_probe_in_words(demo):
    """Of the slowest node, by the interface that joins the nodes."""
    lo, quick = ("lo", "loopback", None, 40.0), ("eth0", "ethernet", 10, 6.87)
    eth, of = "(ethernet)", "of its stated"
    slow, tun = ("veth1", "ethernet", 10, 0.9934), ("tun0", "other", None, 0.0998)
    ib = ("mlx5_0:1", "infiniband", 200, 188.4)
    cases = [
        ([[quick, lo], [lo, slow]], 364, f"364 ms: 0.99 Gb/s on veth1 {eth}, 10 % {of} 10 Gb/s"),
        ([[quick], [quick]], 52.26, f"52.3 ms: 6.87 Gb/s on eth0 {eth}, 69 % {of} 10 Gb/s"),
        ([[ib], [ib]], 1.9, f"1.9 ms: 188 Gb/s on mlx5_0:1 (infiniband), 94 % {of} 200 Gb/s"),
        ([[tun, lo], [quick, lo]], 3760, "3,760 ms: 0.1 Gb/s on tun0 (other)"),
        ([[lo, slow]], 25, "25 ms: 40 Gb/s on lo (loopback)"),
        # NVLink, shared memory: 44.9 MB in 1 ms are 359 Gb/s, and what was counted is not they
        ([[slow]], 1, "1 ms: 359 Gb/s inside the node, on no interface"),
        ([[]], 1, "1 ms: 359 Gb/s inside the node, on no interface"),
        ([[lo], [lo]], 100, "100 ms: 3.59 Gb/s on no interface whose bytes are counted"),
    ]  # fmt: skip
    keys = ("name", "kind", "speed_Gbps", "wire_Gbps")
    records = [
        {
            "all_reduce_bytes": GRADIENT_BYTES,
            "all_reduce_ms": ms,
            "algbw_GBps": GRADIENT_BYTES / ms / 1e6,
            "nodes": [
                {"interfaces": [dict(zip(keys, link, strict=True)) for link in node]}
                for node in nodes
            ],
        }
        for nodes, ms, _ in cases
    ]
    found = demo.run(call=sentences, records=records).result()
    assert found == [f"all-reduce of 44.9 MB in {text}" for _, _, text in cases]


@pytest.mark.parametrize(
    ("argv", "code", "kind", "part"),
    [
        (["--timeout", "0"], 2, "user", "--timeout 0.0 is not at least 0.1"),
        (["--timeout", "soon"], 2, "user", "argument --timeout: invalid float value: 'soon'"),
        (["--backend", "smoke"], 2, "user", "argument --backend: invalid choice: 'smoke'"),
        (["--backend", "nccl"], 1, "user", "--backend nccl: 2 processes for 0 GPU(s)"),
        (["--timeout", "1"], 1, "lost", "ERROR: rendezvous at 127.0.0.1:"),
    ],
)
def test_error_of_the_probe_is_one_line(demo, tmp_path, argv, code, kind, part):
    """Rank 1 of 2 never comes, which matters in the last of these only."""
    file = tmp_path / "error.json"
    places = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    places |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    places |= {"TORCHELASTIC_ERROR_FILE": str(file)}
    job = demo.run(argv, call=probe, env=places, expect=code)
    (line,) = job.err.splitlines()
    assert part in line and job.out == ""
    message = json.loads(file.read_text())["message"]
    assert part in message["message"] and message["extraInfo"]["kind"] == kind


def test_peer_that_is_lost_in_the_probe(demo):
    of_rank = [{}, {"options": {"dies": True}}]
    job = demo.run([], 2, call=probe, expect=None, of_rank=lambda rank: of_rank[rank])
    assert job.codes == [1, 9]
    (line,) = job.err.splitlines()
    assert line.startswith("[CPU 0] ERROR: in probe: ") and job.out == ""


# --- The pass before the first step ----------------------------------------------------------


@pytest.mark.parametrize("kind", ["none", *long("powersgd")])
def test_warm_up_pass_leaves_each_byte_of_a_rank_as_it_was(demo, data, kind):
    """What it leaves of PowerSGD in a resumed run is tested where that is resumed."""
    argv = [*data, *FAST, "--grad_compression", kind]
    job = demo.run(argv, 2, call=warm_up_again)
    assert [job.result(rank) for rank in (0, 1)] == [[], []]


@pytest.mark.parametrize("kind", ["none", *long("powersgd")])
def test_one_process_waits_for_nobody(demo, data, kind):
    argv = [*data, *FAST, "--grad_compression", kind, "--max_steps", 4]
    summary = check_split(demo.run(argv, torchrun=True))
    assert [rank["rank"] for rank in summary["ranks"]] == [0]
    # What is left is what DDP does after a backward pass, and PowerSGD's work.
    assert kind == "powersgd" or summary["exposed_ms"] < 0.5 * summary["step_ms"]


# --- Where a step's time goes ----------------------------------------------------------------


@LONG
@pytest.mark.parametrize(
    ("call", "options"),
    [
        # As if something else had its processor three quarters of the time.
        (in_pulses, {"stopped_ms": 60, "running_ms": 20}),
        (slow_to_decode, {"ms": 30}),
    ],
)
def test_slow_rank_is_named_and_the_other_waits_for_it(demo, data, call, options):
    of_rank = [{"options": {}}, {"options": options}]
    argv = [*data, *FAST, "--max_steps", 8]
    summary = check_split(demo.run(argv, 2, call=call, of_rank=lambda rank: of_rank[rank]))
    quick, slow = summary["ranks"]
    assert runs.find_straggler(summary) == 1, summary
    assert quick["exposed_ms"] > 1.5 * slow["exposed_ms"], summary
    if call is slow_to_decode:
        assert slow["data_ms"] > 3 * quick["data_ms"], summary
    else:
        behind = slow["compute_ms"] - quick["compute_ms"]
        assert behind > quick["compute_ms"] and quick["exposed_ms"] > 0.6 * behind, summary
        assert quick["step_ms"] == pytest.approx(slow["step_ms"], rel=0.1)  # all go at one pace


# --- Compressed gradients --------------------------------------------------------------------


@pytest.fixture(scope="module")
def compressed_bytes(demo) -> Callable[[int], int]:
    """What PowerSGD of a rank sends, from the shapes: of a matrix n x m two factors with as many
    columns as its rank, where that is less than half; all else as it is.
    """
    matrices = [(s[0], math.prod(s[1:])) for s in demo.run(call=shapes).result()]
    assert 4 * sum(n * m for n, m in matrices) == GRADIENT_BYTES

    def of_rank(rank: int) -> int:
        factors = [((n + m) * min(rank, n, m), n * m) for n, m in matrices]
        return 4 * sum(small if 2 * small < whole else whole for small, whole in factors)

    return of_rank


KINDS = {kind: ["--grad_compression", kind] for kind in ("none", "fp16", "bf16", "powersgd")}
KINDS["accumulated"] = ["--accumulate_steps", 2, "--batch_size", 2]
KINDS["powersgd in bf16"] = [*KINDS["powersgd"], "--precision", "bf16"]


@pytest.fixture(scope="module")
def by_kind(demo, data) -> Callable[[str], Job]:
    """Six steps with a compression, on two nodes where they can be had.

    One bucket for all: what is sent as what it is is then added up in the same order.
    """
    argv = [*data, *FAST, "--max_steps", 6, "--bucket_cap_mb", 1024]

    @functools.cache
    def run(kind: str) -> Job:
        apart = not why_no_namespaces()
        with NamespacePair() if apart else contextlib.nullcontext() as nodes:
            where = {"call": with_counters, "nodes": nodes} if apart else {}
            return demo.run([*argv, *KINDS[kind]], 2, **where)

    return run


@LONG
@pytest.mark.parametrize("kind", KINDS)
def test_compressed_gradients_train_alike_and_send_less(by_kind, compressed_bytes, kind):
    """By arithmetic, and by the counters: with two ranks a ring sends as many bytes each way as
    are reduced; the rest is headers.
    """
    run, plain = by_kind(kind), by_kind("none")
    summary = check_split(run)
    assert summary["replicas_identical"] is True
    if kind == "accumulated":  # the same four images a rank in two parts
        assert run.json_line("Run")["global_batch_size"] == 8
    alike = kind in ("none", "fp16", "bf16", "powersgd")  # the same images in the same precision
    for rank in (0, 1):
        assert [step for _, step, _ in run.steps(rank)] == [1, 2, 3, 4, 5, 6]
        found, wanted = ([loss for _, _, loss in r.steps(rank)] for r in (run, plain))
        if alike:
            assert found[0] == wanted[0]  # before any gradient was sent
            assert found[:4] == pytest.approx(wanted[:4], abs=0.05), (found, wanted)
            assert kind == "none" or found != wanted
        if kind == "powersgd":  # it leaves the first steps alone
            assert found[: WHOLE + 1] == wanted[: WHOLE + 1]
            assert found[WHOLE + 1] != wanted[WHOLE + 1]
    sent = compressed_bytes(RANK) if "powersgd" in kind else GRADIENT_BYTES
    reduced = WHOLE * (GRADIENT_BYTES + sent)
    if "16" in kind:
        sent, reduced = sent // 2, reduced // 2
    assert summary["wire_bytes_per_step"] == sent
    reason = why_no_namespaces()
    require(not reason, reason)
    for rank in (0, 1):
        link = busiest(run.result(rank))
        assert link["name"] == "eth0"
        for way in ("tx_bytes", "rx_bytes"):
            assert 1 < link[way] / reduced < 1.1, link


@LONG
def test_bytes_of_a_step_with_powersgd_of_another_rank(demo, data, compressed_bytes):
    argv = [*data, *FAST, "--max_steps", WHOLE + 1]
    argv += ["--grad_compression", "powersgd", "--powersgd_rank", 3]
    summary = demo.run(argv).json_line("Summary")
    assert summary["wire_bytes_per_step"] == compressed_bytes(3) < compressed_bytes(RANK)


def test_powersgd_with_fp16_is_refused(demo, data):
    argv = [*data, *FAST, "--grad_compression", "powersgd", "--precision", "fp16"]
    for nproc in (1, 2):
        job = demo.run(argv, nproc, expect=1)
        (line,) = job.err.splitlines()
        assert line.startswith("[CPU 0] ERROR: PowerSGD ") and "--precision fp16" in line


@LONG
def test_workers_are_forked_before_the_first_backward_pass(demo, sample):
    """NOTE: a fork beside a thread that just ran a communication hook has hung a worker."""
    argv = [*data_args(sample, val=True), *FAST, "--batch_size", 4, "--max_steps", 2]
    argv += ["--grad_compression", "bf16", "--workers", 1]
    job = demo.run(argv, 2, call=workers_at_first_backward)
    for rank in (0, 1):
        assert set(job.result(rank)) == {1}, job.result(rank)


# --- Interrupted and resumed -----------------------------------------------------------------


@LONG
def test_resume_with_four_ranks_is_exact(demo, data, checkpoint):
    """Of more than two ranks the sum depends on its order, so on the buckets that DDP makes."""
    argv = [*data, *FAST, "--batch_size", 2]
    whole = demo.run([*argv, "--max_steps", 2], 4)
    argv += ["--checkpoint", checkpoint, "--resume"]
    parts = [demo.run([*argv, "--max_steps", stop], 4) for stop in (1, 2)]
    for rank in range(4):
        assert [step for part in parts for step in part.steps(rank)] == whole.steps(rank)
    ends = [run.json_line("Summary")["weights_sha256"] for run in (whole, parts[-1])]
    assert ends[0] == ends[1]


@LONG
def test_resumed_run_starts_powersgd_anew(demo, data, checkpoint, compressed_bytes):
    """Its first steps are uncompressed, so a part that ends before they are over equals a run
    without it, bit for bit. A longer one compresses, and all replicas stay equal.
    """
    argv = [*data, *FAST, "--bucket_cap_mb", 1024]
    plain = demo.run([*argv, "--max_steps", 7], 2)
    argv += ["--grad_compression", "powersgd", "--checkpoint", checkpoint, "--resume"]
    parts = [demo.run([*argv, "--max_steps", stop], 2) for stop in (2, 7)]
    for rank in (0, 1):
        steps, wanted = [s for part in parts for s in part.steps(rank)], plain.steps(rank)
        assert [step for _, step, _ in steps] == list(range(1, 8))
        assert steps[:6] == wanted[:6]  # the loss of step 6 was there before it was compressed
        assert steps[6] != wanted[6] and steps[6][2] == pytest.approx(wanted[6][2], abs=0.05)
    ends = [part.json_line("Summary") for part in parts]
    assert [end["replicas_identical"] for end in ends] == [True] * 2
    sent = [end["wire_bytes_per_step"] for end in ends]
    assert sent == [GRADIENT_BYTES, compressed_bytes(RANK)]


@LONG
def test_checkpoint_does_not_grow_with_the_ranks(demo, data, checkpoint):
    argv = [*data, *FAST, "--grad_compression", "powersgd", "--global_batch_size", 8]
    argv += ["--checkpoint", checkpoint, "--max_steps", 4]
    sizes = []
    for nproc in (1, 4):
        demo.run(argv, nproc)
        sizes.append(checkpoint.stat().st_size)
    # Weights and Adam's two, each as large as the gradients; nothing of PowerSGD.
    assert 3 * GRADIENT_BYTES < sizes[0] < 3.2 * GRADIENT_BYTES
    assert max(sizes) - min(sizes) < 16_384


@LONG
def test_resume_with_another_compression_is_refused(demo, data, checkpoint):
    argv = [*data, *FAST, "--checkpoint", checkpoint, "--resume"]
    argv += ["--max_steps", 1, "--grad_compression", "powersgd"]
    demo.run(argv)
    for name, then, now in (("grad_compression", "powersgd", "bf16"), ("powersgd_rank", RANK, 3)):
        job = demo.run([*argv, f"--{name}", now], expect=1)
        (line,) = job.err.splitlines()
        assert "ERROR: " in line and f"--{name} {then}, not {now}" in line, line


# --- The end of a run ------------------------------------------------------------------------


@LONG
def test_run_with_workers_ends_by_itself(data):
    """Loader workers end when nothing knows their loader any more, a hook of DDP's included.

    Whole Pythons, because it is at their exit that this shows: forked ranks leave that out.
    """
    argv = [sys.executable, SCRIPT, *data, *FAST, "--workers", 1]
    argv += ["--max_steps", 2]
    places = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    places |= {"MASTER_PORT": str(free_port())}
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in ("0", "1"):
            env = places | {"RANK": rank, "LOCAL_RANK": rank}
            ranks.append(stack.enter_context(Started(argv, env=env, split=True)))
        for rank in ranks:
            rank.wait_for("Cleanup complete", 90)
        runs = [rank.finish(10, clean=3) for rank in ranks]
    assert [run.err for run in runs] == ["", ""]
    assert runs[0].json_line("Run")["workers"] == 1
