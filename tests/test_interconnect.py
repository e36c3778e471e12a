"""What the script says of the link, of a step's parts and of compressed gradients, held against
arithmetic by hand and against the kernel's counters: real ranks, real network namespaces.

Most ranks are forked, as in test_demo.py, from one Python that has the script imported;
DEMO_SCRIPT puts another copy of the script to these tests.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import cluster as helpers
import numpy as np
import pytest
import test_demo as forks
import test_faults as faults
from PIL import Image

FAST = shlex.split(
    "--weights none --image_size 40 --batch_size 4 --workers 0 --precision fp32 --timeout 30 "
    "--log_every 1"
)
WHOLE = 3  # steps that PowerSGD leaves alone and that stay out of the averages
GRADIENT_BYTES = 44_870_208  # 4 * 11,217,552 parameters
KINDS = ("none", "fp16", "bf16", "powersgd")
RANK = 8  # PowerSGD's, where no option says so


class Server(forks.Prefork):
    """Forks ranks which can be told to call this file's functions, beside those of test_demo."""

    file = __file__

    def __enter__(self) -> Server:
        with pytest.MonkeyPatch.context() as patch:
            # To give back each step's memory and to get it again is a third of the time here.
            patch.setenv("MALLOC_MMAP_MAX_", "0")
            patch.setenv("MALLOC_TRIM_THRESHOLD_", str(2**32))
            return super().__enter__()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as running:
        yield running


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> list[str]:
    """The options for 40 images: 5 steps an epoch for two ranks."""
    return forks.make_set(tmp_path_factory.mktemp("data"), 40)


@pytest.fixture
def checkpoint(tmp_path) -> Iterator[Path]:
    """A name for a checkpoint; the file has 135 MB and more and does not outlive its test."""
    yield tmp_path / "saved.pt"
    for file in tmp_path.glob("saved.pt*"):
        file.unlink()


# --- What runs in forked processes -----------------------------------------------------------


def counters(demo, result, root):
    forks.write(result, demo.read_counters(*root))


def shapes(demo, result):
    """Of the parameters, as torchvision has them."""
    from torchvision.models import resnet18

    forks.write(result, [parameter.shape for parameter in resnet18(num_classes=80).parameters()])


def on_node(demo, result, node, murmur=False):
    """The script's main on a node of a `NamespacePair`, /sys included.

    murmur: all the time a few bytes go over the loopback interface.
    """
    go_to(**node)
    own = os.getpid()
    if murmur and os.fork() == 0:
        datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        while os.getppid() == own:
            datagrams.sendto(bytes(100), ("127.0.0.1", 9))  # nobody has to receive them
            time.sleep(0.02)
        os._exit(0)
    demo.main()


def go_to(**node):
    faults.enter_node(**node)
    # Entering a network namespace is not enough: /sys goes on showing the interfaces of the one
    # in which it was mounted.
    subprocess.run(["mount", "-t", "sysfs", "sysfs", "/sys"], check=True)


def send_known_bytes(demo, result, node, address, count):
    """Node 0 sends `count` bytes to node 1; both keep what their counters said before and after.

    Node 1 confirms, so that no byte is under way when the counters are read again.
    """
    go_to(**node)
    before = demo.read_counters()
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
    forks.write(result, [before, demo.read_counters()])


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
    demo.main()


def probe_twice(demo, result):
    """What differs after a probe, by name: before the first step, and after four of them."""
    run, differences = forks.prepared(demo), []
    for steps in (4, 0):
        before = contents(run)
        found = demo.probe(run)
        after = contents(run)
        assert set(after) == set(before) and len(before) > 120
        different = [name for name in before if before[name] != after[name]]
        differences.append([sorted(found), different, len(run.moments)])
        group = iter(run.loader)
        for _ in range(steps):
            demo.optimizer_step(run, [next(group)])
            run.step += 1
    forks.write(result, differences)


def owed_after_resume(demo, result):
    """What PowerSGD still owes to the mean gradient: that of this rank after it has resumed, and
    the mean over the ranks that saved; with its memory of the step before, as far as it is equal.
    """
    import torch

    run = forks.prepared(demo)
    saved = torch.load(run.args.checkpoint, weights_only=True)["powersgd"]
    demo.load_checkpoint(run)
    now, then = run.powersgd.error_dict[0], [memory["error_dict"][0] for memory in saved]
    wanted = sum(then) / len(then)
    same = [
        torch.equal(getattr(run.powersgd, name)[0], saved[0][name][0])
        for name in ("p_memory_dict", "q_memory_dict")
    ]
    sizes = [float(tensor.norm()) for tensor in (now, wanted, now - wanted)]
    forks.write(result, {"sizes": sizes, "same": same, "iter": run.powersgd.iter})


def workers_at_first_backward(demo, result):
    """Trains; how many loader workers there were when the first backward pass began."""
    seen, backward = [], demo.backward

    def watched(*args, **kwargs):
        seen.append(len(multiprocessing.active_children()))
        return backward(*args, **kwargs)

    demo.backward = watched
    code = 0
    try:
        demo.main()
    except SystemExit as end:
        code = end.code
    forks.write(result, {"workers": seen, "code": code})


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
        "python": random.getstate(),
        "progress": [run.epoch, run.step, run.epoch_loss, run.times, run.exposed],
        "training": [module.training for module in run.ddp.modules()],
    }
    if run.powersgd:
        names = ("iter", "error_dict", "p_memory_dict", "q_memory_dict")
        parts["powersgd"] = {name: getattr(run.powersgd, name) for name in names}
    return dict(flat(parts, "run"))


# --- Counters --------------------------------------------------------------------------------


def read(server, *root: Path) -> dict[str, list]:
    """What the script reads of a tree, or of the machine's own."""
    return server.run(call=counters, root=[str(folder) for folder in root]).result()


def interface(root: Path, name: str, tx: object, rx: object, **files: object) -> None:
    """A folder as /sys/class/net has them."""
    folder = root / "net" / name
    (folder / "statistics").mkdir(parents=True)
    files |= {"statistics/tx_bytes": tx, "statistics/rx_bytes": rx}
    for file, text in files.items():
        (folder / file).write_text(f"{text}\n")


def port(root: Path, device: str, number: int, rate: str, xmit: int, rcv: int) -> None:
    """A folder as /sys/class/infiniband has them; the counters are in words of 4 bytes."""
    folder = root / "infiniband" / device / "ports" / str(number)
    (folder / "counters").mkdir(parents=True)
    (folder / "rate").write_text(f"{rate}\n")
    (folder / "counters" / "port_xmit_data").write_text(f"{xmit}\n")
    (folder / "counters" / "port_rcv_data").write_text(f"{rcv}\n")


def test_counters_of_each_kind_of_interface(server, tmp_path):
    interface(tmp_path, "eth0", 1000, 2000, type=1, speed=1000)
    interface(tmp_path, "fast", 2**53, 1, type=1, speed=400000)
    interface(tmp_path, "lo", 5, 5, type=772)
    interface(tmp_path, "down", 7, 8, type=1, speed=-1)
    interface(tmp_path, "silent", 9, 10, type=1, speed="")
    interface(tmp_path, "ib0", 11, 12, type=32, speed=56000)
    interface(tmp_path, "tun0", 13, 14, type=65534, speed=10)
    port(tmp_path, "mlx4_0", 1, "56 Gb/sec (4X FDR)", 250, 500)
    port(tmp_path, "mlx4_0", 2, "2.5 Gb/sec (1X SDR)", 1, 0)
    assert read(server, tmp_path) == {
        "eth0": ["ethernet", 1, 1000, 2000],
        "fast": ["ethernet", 400, 2**53, 1],
        "lo": ["loopback", 0, 5, 5],
        "down": ["ethernet", 0, 7, 8],
        "silent": ["ethernet", 0, 9, 10],
        "ib0": ["ipoib", 56, 11, 12],
        "tun0": ["other", 0.01, 13, 14],
        "mlx4_0:1": ["infiniband", 56, 1000, 2000],
        "mlx4_0:2": ["infiniband", 2.5, 4, 0],
    }


def test_counters_of_what_is_no_interface_are_zero(server, tmp_path):
    interface(tmp_path, "eth0", 3, 4, type=1, speed=100)
    interface(tmp_path, "junk", "many", "-", type="?", speed="Unknown!")
    (tmp_path / "net" / "bytes" / "statistics").mkdir(parents=True)
    (tmp_path / "net" / "bytes" / "statistics" / "tx_bytes").write_bytes(b"\xff\xfe")
    (tmp_path / "net" / "empty").mkdir()
    (tmp_path / "net" / "bonding_masters").write_text("bond0\n")
    (tmp_path / "net" / "nowhere").symlink_to(tmp_path / "gone")
    (tmp_path / "infiniband" / "mlx5_0" / "ports" / "1").mkdir(parents=True)
    found = read(server, tmp_path)
    assert found.pop("eth0") == ["ethernet", 0.1, 3, 4]
    assert all(speed == sent == received == 0 for _, speed, sent, received in found.values())


def test_counters_of_an_empty_tree(server, tmp_path):
    assert read(server, tmp_path) == {}
    assert read(server, tmp_path / "missing") == {}


def test_counters_of_this_machine(server):
    helpers.require(Path("/sys/class/net/lo").exists(), "there is no /sys/class/net/lo here")
    kind, _, before, _ = read(server)["lo"]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagram:
        for _ in range(10):
            datagram.sendto(bytes(1000), ("127.0.0.1", 9))  # nobody has to receive them
    assert kind == "loopback" and read(server)["lo"][2] - before >= 10_000


# --- Two nodes -------------------------------------------------------------------------------


def places(nodes: helpers.NamespacePair):
    """For `Server.run`: puts rank r on node r."""

    def of_rank(rank: int) -> dict:
        node = {"netns": nodes.names[rank], "hostname": nodes.hostnames[rank]}
        node["hosts"] = str(nodes.hosts(rank))
        local = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": nodes.addresses[0]}
        return {"options": {"node": node}, "env": local}

    return of_rank


def test_known_bytes_are_counted_on_both_nodes(server):
    count = 20_000_000
    with helpers.NamespacePair() as nodes:
        options = {"address": nodes.addresses[1], "count": count}
        job = server.run(nproc=2, call=send_known_bytes, of_rank=places(nodes), **options)
    for rank, sends in enumerate((True, False)):
        before, after = job.result(rank)
        kind, speed, *sent_received = after["eth0"]
        assert (kind, speed) == ("ethernet", 10)  # which is what a veth states, shaped or not
        gone, come = (
            now - then for now, then in zip(sent_received, before["eth0"][2:], strict=True)
        )
        there, back = (gone, come) if sends else (come, gone)
        # Headers are counted too, but one for many bytes: the kernel hands over large packets.
        assert count < there < 1.05 * count and back < 0.05 * count
        assert after["lo"] == before["lo"] and after["lo"][0] == "loopback"


def check_split(run: helpers.Run) -> dict:
    """The parts of a step add up for each rank, and are those of the step lines; the Summary."""
    summary, names = run.json_line("Summary"), ("data_ms", "compute_ms", "exposed_ms")
    for part in [summary, *summary["ranks"]]:
        assert sum(part[name] for name in names) == pytest.approx(part["step_ms"], rel=0.05)
        assert min(part[name] for name in names) >= 0 and part["compute_ms"] > 0
    assert sum(summary[f"{name[:-3]}_share"] for name in names) == pytest.approx(1)
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


def busiest(node: dict) -> dict:
    """The interface that is named first, which has to be the one that carried most."""
    carried = [i["tx_bytes"] + i["rx_bytes"] for i in node["interfaces"]]
    assert carried == sorted(carried, reverse=True) and min(carried) > 0
    return node["interfaces"][0]


def test_probe_and_summary_at_a_known_rate(server, data):
    """On a link of 1 Gb/s between two nodes: what it delivers, and what a step then waits for.

    Medians of five rounds: a machine that does something else during one of them does not decide.
    """
    argv = [*data, *FAST, "--probe_steps", 5, "--max_steps", 5]
    with helpers.NamespacePair("1gbit") as nodes:
        run = server.run(argv, 2, call=on_node, of_rank=places(nodes), murmur=True).run
    probe, least_ms = run.json_line("Probe"), 8e-6 * GRADIENT_BYTES  # of an all-reduce at 1 Gb/s
    assert probe["all_reduce_bytes"] == run.json_line("Run")["gradient_bytes"] == GRADIENT_BYTES
    assert least_ms < probe["all_reduce_ms"] < 1.3 * least_ms
    assert probe["algbw_GBps"] == pytest.approx(GRADIENT_BYTES / probe["all_reduce_ms"] / 1e6)
    assert probe["busbw_GBps"] == pytest.approx(probe["algbw_GBps"])  # 2 (n - 1) / n, n = 2
    assert [node["host"] for node in probe["nodes"]] == ["node0", "node1"]
    for node in probe["nodes"]:
        link = busiest(node)
        assert (link["name"], link["kind"], link["speed_Gbps"]) == ("eth0", "ethernet", 10)
        assert link["wire_Gbps"] == pytest.approx(1, abs=0.05)
        assert link["share"] == pytest.approx(link["wire_Gbps"] / 10)
        (quiet,) = node["interfaces"][1:]
        assert (quiet["name"], quiet["kind"], quiet["speed_Gbps"]) == ("lo", "loopback", None)
        assert quiet["wire_Gbps"] < 0.01 and quiet["share"] is None
        # Six rounds, the warm-up and those asked for; each node sends as much as it receives.
        for way in ("tx_bytes", "rx_bytes"):
            assert 6 * GRADIENT_BYTES < link[way] < 6.6 * GRADIENT_BYTES
    assert probe["step_ms"] > least_ms > probe["no_sync_ms"] > 0
    assert probe["exposed_ms"] == pytest.approx(probe["step_ms"] - probe["no_sync_ms"])
    summary = check_split(run)
    assert [node["host"] for node in summary["traffic"]] == ["node0", "node1"]
    for node in summary["traffic"]:
        assert busiest(node)["name"] == "eth0"
        for way in ("tx_bytes", "rx_bytes"):
            assert 5 * GRADIENT_BYTES < busiest(node)[way] < 5.5 * GRADIENT_BYTES
    # What computing cannot hide of the all-reduce is exposed, on each of two equal nodes.
    for rank in summary["ranks"]:
        assert rank["exposed_ms"] + rank["compute_ms"] > 0.95 * least_ms
        assert rank["exposed_ms"] > 0.4 * least_ms


# --- The probe leaves no trace ---------------------------------------------------------------


def losses(run: helpers.Run) -> list[list[tuple[int, int, float]]]:
    return [run.steps(rank) for rank in (0, 1)]


@pytest.mark.parametrize("kind", ["none", "powersgd"])
def test_probe_changes_nothing_in_the_run(server, data, kind):
    """PowerSGD compresses the last of four steps, out of a memory that the probe has used."""
    argv = [*data, *FAST, "--grad_compression", kind, "--max_steps", 4]
    runs = {n: server.run([*argv, "--probe_steps", n], 2).run for n in (0, 1, 5)}
    assert [step for _, step, _ in runs[0].steps(1)] == [1, 2, 3, 4]
    found = [(run.json_line("Summary")["weights_sha256"], losses(run)) for run in runs.values()]
    assert found[0] == found[1] == found[2]
    assert found[0][1][0] != found[0][1][1]  # each rank has losses of its own
    said = {n: [line for line in run.lines() if "Probe" in line] for n, run in runs.items()}
    assert [len(lines) for lines in said.values()] == [0, 1, 1]
    assert said[1][0].startswith("[CPU 0] Probe {")


@pytest.mark.parametrize("kind", ["none", "powersgd"])
def test_probe_leaves_each_byte_of_a_rank_as_it_was(server, data, kind):
    argv = [*data, *FAST, "--grad_compression", kind, "--probe_steps", 1]
    job = server.run(argv, 2, call=probe_twice)
    for rank in (0, 1):
        for keys, different, moments in job.result(rank):
            assert "all_reduce_ms" in keys and "no_sync_ms" in keys
            assert (different, moments) == ([], 0)


@pytest.mark.parametrize("kind", ["none", "powersgd"])
def test_one_process_has_no_link_to_probe(server, data, kind):
    argv = [*data, *FAST, "--grad_compression", kind, "--probe_steps", 5, "--max_steps", 4]
    run = server.run(argv, torchrun=True).run
    assert "Probe" not in run.out
    summary = check_split(run)
    assert [rank["rank"] for rank in summary["ranks"]] == [0] and summary["straggler"] is None
    # Nobody to wait for: what is left is what DDP does after a backward pass, and PowerSGD's work.
    assert kind == "powersgd" or summary["exposed_ms"] < 0.5 * summary["step_ms"]


# --- Where a step's time goes ----------------------------------------------------------------


def test_slow_rank_is_named_and_the_other_waits_for_it(server, data):
    """Rank 1 is stopped three quarters of the time, as if something else had its processor."""
    argv = [*data, *FAST, "--probe_steps", 0, "--max_steps", 8]
    slow = {"stopped_ms": 60, "running_ms": 20}
    options = [{"options": {}}, {"options": slow}]
    run = server.run(argv, 2, call=in_pulses, of_rank=lambda rank: options[rank]).run
    summary = check_split(run)
    quick, slow = summary["ranks"]
    behind = slow["compute_ms"] - quick["compute_ms"]
    assert behind > quick["compute_ms"] and summary["straggler"] == 1, summary
    assert quick["exposed_ms"] > 0.6 * behind and quick["exposed_ms"] > 1.5 * slow["exposed_ms"]
    assert quick["step_ms"] == pytest.approx(slow["step_ms"], rel=0.1)  # all go at one pace


def test_slow_input_of_one_rank_is_exposed_time_of_the_other(server, tmp_path):
    """Rank 1 has much larger pictures to decode, in files of the same names and lengths."""
    options = [forks.make_set(tmp_path / name, 16) for name in ("small", "large")]
    for file in (tmp_path / "large" / "images").iterdir():
        with Image.open(file) as image:
            image.resize((4200, 4200), Image.Resampling.NEAREST).save(file, "JPEG", quality=50)
        longest = file.stat().st_size
        other = tmp_path / "small" / "images" / file.name
        assert other.stat().st_size < longest
        other.write_bytes(other.read_bytes().ljust(longest, b"\0"))  # decoders stop before
    argv = [*FAST, "--probe_steps", 0, "--num_epochs", 3]
    both = [{"argv": [*own, *argv]} for own in options]
    run = server.run([], 2, of_rank=lambda rank: both[rank]).run
    summary = check_split(run)
    quick, slow = summary["ranks"]
    assert slow["data_ms"] > 3 * quick["data_ms"], summary
    assert quick["exposed_ms"] > 1.5 * slow["exposed_ms"], summary
    assert summary["straggler"] == 1, summary


# --- Compressed gradients --------------------------------------------------------------------


@pytest.fixture(scope="module")
def compressed_bytes(server) -> Callable[[int], int]:
    """What PowerSGD of a rank sends, from the shapes: of a matrix n x m two factors with as many
    columns as its rank, where that is less than half; all else as it is.
    """
    matrices = [(s[0], math.prod(s[1:])) for s in server.run(call=shapes).result()]
    assert 4 * sum(n * m for n, m in matrices) == GRADIENT_BYTES

    def of_rank(rank: int) -> int:
        factors = [((n + m) * min(rank, n, m), n * m) for n, m in matrices]
        return 4 * sum(small if 2 * small < whole else whole for small, whole in factors)

    return of_rank


@pytest.fixture(scope="module")
def by_kind(server, data) -> dict[str, helpers.Run]:
    """Six steps with each compression, on two nodes where they can be had.

    One bucket for all: what is sent as what it is is then added up in the same order.
    """
    argv = [*data, *FAST, "--probe_steps", 0, "--max_steps", 6, "--bucket_cap_mb", 1024]
    apart = not helpers.why_no_namespaces()
    with helpers.NamespacePair() if apart else contextlib.nullcontext() as nodes:
        where = {"call": on_node, "of_rank": places(nodes)} if apart else {}
        runs = {}
        for kind in KINDS:
            runs[kind] = server.run([*argv, "--grad_compression", kind], 2, **where).run
        twice = [*argv, "--probe_steps", 1, "--accumulate_steps", 2, "--batch_size", 2]
        runs["accumulated"] = server.run(twice, 2, **where).run
        half = [*argv, "--grad_compression", "powersgd", "--precision", "bf16"]
        runs["powersgd in bf16"] = server.run(half, 2, **where).run
    return runs


@pytest.mark.parametrize("kind", KINDS)
def test_compressed_gradients_train_alike(by_kind, kind):
    run, plain = by_kind[kind], by_kind["none"]
    summary = check_split(run)
    assert summary["replicas_identical"] is True
    for rank in (0, 1):
        found, wanted = ([loss for _, _, loss in r.steps(rank)] for r in (run, plain))
        assert len(found) == 6
        assert found[0] == wanted[0]  # before any gradient was sent
        assert found[:4] == pytest.approx(wanted[:4], abs=0.05), (found, wanted)
        assert kind == "none" or found != wanted


def test_first_steps_of_powersgd_are_uncompressed(by_kind):
    """So the fourth loss, too, is that of the run without compression; the fifth is not."""
    for rank in (0, 1):
        found, plain = (by_kind[kind].steps(rank) for kind in ("powersgd", "none"))
        assert found[: WHOLE + 1] == plain[: WHOLE + 1]
        assert found[WHOLE + 1] != plain[WHOLE + 1]


def test_bytes_of_a_step_by_arithmetic(by_kind, compressed_bytes):
    found = {kind: run.json_line("Summary") for kind, run in by_kind.items()}
    wanted = {"none": GRADIENT_BYTES, "fp16": GRADIENT_BYTES // 2, "bf16": GRADIENT_BYTES // 2}
    wanted |= {"accumulated": GRADIENT_BYTES, "powersgd": compressed_bytes(RANK)}
    wanted["powersgd in bf16"] = compressed_bytes(RANK) // 2
    assert {kind: s["wire_bytes_per_step"] for kind, s in found.items()} == wanted
    wanted = {kind: 6 * count for kind, count in wanted.items()}
    wanted["powersgd"] = WHOLE * GRADIENT_BYTES + 3 * compressed_bytes(RANK)
    wanted["powersgd in bf16"] = wanted["powersgd"] // 2
    assert {kind: s["all_reduced_bytes"] for kind, s in found.items()} == wanted


@pytest.mark.parametrize("rank", [1, 3, 4])
def test_bytes_of_a_step_with_powersgd_of_another_rank(server, data, compressed_bytes, rank):
    argv = [*data, *FAST, "--probe_steps", 0, "--max_steps", 5]
    argv += ["--grad_compression", "powersgd", "--powersgd_rank", rank]
    summary = server.run(argv).run.json_line("Summary")
    assert summary["wire_bytes_per_step"] == compressed_bytes(rank)
    assert summary["all_reduced_bytes"] == WHOLE * GRADIENT_BYTES + 2 * compressed_bytes(rank)


@pytest.mark.parametrize("kind", [*KINDS, "accumulated", "powersgd in bf16"])
def test_bytes_on_the_wire_are_those_of_the_summary(by_kind, kind):
    """With two ranks a ring sends as many bytes each way as are reduced; the rest is headers."""
    reason = helpers.why_no_namespaces()
    helpers.require(not reason, reason)
    summary = by_kind[kind].json_line("Summary")
    assert len(summary["traffic"]) == 2
    for node in summary["traffic"]:
        link = busiest(node)
        assert link["name"] == "eth0"
        for way in ("tx_bytes", "rx_bytes"):
            assert 1 < link[way] / summary["all_reduced_bytes"] < 1.1, (kind, link)


def test_accumulated_step_is_probed_and_sent_once(by_kind):
    """The same four images a rank in two parts: the probe has a step of both."""
    run = by_kind["accumulated"]
    facts, probe = run.json_line("Run"), run.json_line("Probe")
    assert facts["batch"] == {"per_process": 2, "accumulate_steps": 2, "global": 8}
    assert probe["all_reduce_bytes"] == GRADIENT_BYTES
    assert probe["step_ms"] > 0 and probe["no_sync_ms"] > 0 and probe["exposed_ms"] >= 0
    assert [step for _, step, _ in run.steps(1)] == [1, 2, 3, 4, 5, 6]
    assert check_split(run)["replicas_identical"] is True


def test_powersgd_with_fp16_is_refused(server, data):
    argv = [*data, *FAST, "--grad_compression", "powersgd", "--precision", "fp16"]
    for nproc in (1, 2):
        job = server.run(argv, nproc, expect=1)
        (line,) = job.err.splitlines()
        assert line.startswith("[CPU 0] ERROR: PowerSGD ") and "--precision fp16" in line


def test_workers_are_forked_before_the_first_backward_pass(server, sample):
    """NOTE: a fork beside a thread that just ran a communication hook has hung a worker."""
    argv = [*helpers.data_args(sample, val=True), *FAST, "--batch_size", 4, "--max_steps", 2]
    argv += ["--grad_compression", "bf16", "--workers", 1]
    job = server.run(argv, 2, call=workers_at_first_backward)
    for rank in (0, 1):  # one for training, one for validation
        found = job.result(rank)
        assert found["code"] == 0 and set(found["workers"]) == {2}, found


# --- Interrupted and resumed -----------------------------------------------------------------


def resumed(server, argv, nproc, stops: Sequence[int], checkpoint: Path) -> list[helpers.Run]:
    """A run in parts: each ends at a step of `stops`, the next goes on from its checkpoint."""
    argv = [*argv, "--checkpoint", checkpoint, "--resume"]
    return [server.run([*argv, "--max_steps", stop], nproc).run for stop in stops]


def assert_same(whole: helpers.Run, parts: Sequence[helpers.Run], nproc: int) -> None:
    for rank in range(nproc):
        assert [step for part in parts for step in part.steps(rank)] == whole.steps(rank)
    ends = [run.json_line("Summary") for run in (whole, parts[-1])]
    assert ends[0]["weights_sha256"] == ends[1]["weights_sha256"]
    assert ends[0]["loss_by_epoch"] == pytest.approx(ends[1]["loss_by_epoch"])


@helpers.LONG
def test_resume_with_four_ranks_is_exact(server, data, checkpoint):
    """Of more than two ranks the sum depends on its order, so on the buckets that DDP makes."""
    argv = [*data, *FAST, "--batch_size", 2, "--probe_steps", 0]
    whole = server.run([*argv, "--max_steps", 3], 4).run
    parts = resumed(server, argv, 4, (2, 3), checkpoint)
    assert_same(whole, parts, 4)


@pytest.mark.parametrize(
    ("nproc", "precision"),
    [(1, "fp32"), pytest.param(2, "fp32", marks=helpers.LONG), (2, "bf16")],
)
def test_resume_with_powersgd_is_exact(
    server, data, checkpoint, compressed_bytes, nproc, precision
):
    """Stopped before it begins to compress, and after."""
    argv = [*data, *FAST, "--grad_compression", "powersgd", "--probe_steps", 0]
    argv += ["--precision", precision]
    whole = server.run([*argv, "--max_steps", 6], nproc).run
    parts = resumed(server, argv, nproc, (2, 4, 6), checkpoint)
    assert_same(whole, parts, nproc)
    sent = [part.json_line("Summary") for part in parts]
    half = 2 if precision == "bf16" else 1  # PowerSGD works in what the run computes in
    plain, small = GRADIENT_BYTES // half, compressed_bytes(RANK) // half
    assert [part["wire_bytes_per_step"] for part in sent] == [plain, small, small]
    total = [2 * plain, plain + small, 2 * small]
    assert [part["all_reduced_bytes"] for part in sent] == total


def test_resume_with_powersgd_on_another_number_of_ranks(
    server, data, checkpoint, compressed_bytes
):
    argv = [*data, *FAST, "--grad_compression", "powersgd", "--probe_steps", 0, "--resume"]
    argv += ["--global_batch_size", 8, "--checkpoint", checkpoint]
    server.run([*argv, "--max_steps", 4], 2)
    found = server.run(argv, call=owed_after_resume).result()
    size, wanted, difference = found["sizes"]
    assert size > 0 and difference < 1e-5 * wanted, found["sizes"]
    assert found["same"] == [True, True] and found["iter"] == 4
    run = server.run([*argv, "--max_steps", 6], 1).run
    assert "processes then 2, now 1" in run.out
    assert [step for _, step, _ in run.steps()] == [5, 6]
    assert run.json_line("Summary")["all_reduced_bytes"] == 2 * compressed_bytes(RANK)


def test_resume_with_another_compression_is_refused(server, data, checkpoint):
    argv = [*data, *FAST, "--probe_steps", 0, "--checkpoint", checkpoint, "--resume"]
    argv += ["--max_steps", 1, "--grad_compression", "powersgd"]
    server.run(argv)
    for name, then, now in (("grad_compression", "powersgd", "bf16"), ("powersgd_rank", RANK, 3)):
        job = server.run([*argv, f"--{name}", now], expect=1)
        (line,) = job.err.splitlines()
        assert "ERROR: " in line and f"--{name} {then}, not {now}" in line, line


# --- The end of a run ------------------------------------------------------------------------


def test_run_with_workers_and_a_probe_ends_by_itself(data):
    """Loader workers end when nothing knows their loader any more, a hook of DDP's included.

    Whole Pythons, because it is at their exit that this shows: forked ranks leave that out.
    """
    argv = [sys.executable, forks.SCRIPT, *data, *FAST, "--workers", 1, "--probe_steps", 1]
    argv += ["--max_steps", 2]
    places = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    places |= {"MASTER_PORT": str(helpers.free_port())}
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in ("0", "1"):
            env = places | {"RANK": rank, "LOCAL_RANK": rank}
            ranks.append(stack.enter_context(helpers.start(argv, env=env, split=True)))
        for rank in ranks:
            rank.wait_for("Cleanup complete", 90)
        runs = [rank.finish(10, clean=3) for rank in ranks]
    assert [run.err for run in runs] == ["", ""]
    assert runs[0].json_line("Probe") and runs[0].json_line("Run")["workers"] == 1


if __name__ == "__main__":
    calls = (
        counters,
        shapes,
        on_node,
        send_known_bytes,
        in_pulses,
        probe_twice,
        owed_after_resume,
        workers_at_first_backward,
    )
    vars(forks).update({call.__name__: call for call in calls})
    forks.serve(sys.argv[1])
