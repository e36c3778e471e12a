"""Made-up logs of runs on hardware, of each of which the truth is known: the first words of its
verdict, what is said to bound it, and the first thing to check.

A GPU run of ResNet-18 at 224 px: 256 images a process in 60 ms of compute and 2 ms of data wait,
or 16 in 6 ms. Times and rates fit each other.
"""

import re
from dataclasses import dataclass

import pytest

from test_compare_logs import (
    ASKED,
    CHANNEL,
    GRADIENT_BYTES,
    IB,
    SOCKET,
    carried,
    compared,
    finding,
    probed_run,
)

GDR, HOST_MEMORY = "NET/IB/0/GDRDMA", "NET/IB/0"
EFA = "NET/OFI Selected Provider is efa (found 4 nics)|Using network Libfabric"


@dataclass
class Made:
    """A run that was made up. `truth`: what was put into it, for whoever judges what is said."""

    truth: str
    text: str
    begins: str  # how the verdict begins; "..." is anything
    bound: str
    check: str  # in the first thing to check; more, parted by |, in others
    never: str = ""  # in none, parted by |


# Gradients among the bytes that interfaces count: the rest is headers.
PAYLOAD = 0.97
# 16 images a process: there is little to hide an all-reduce behind.
SMALL_BATCH = {"per_process": 16, "compute_ms": 6.0, "data_ms": 0.4}


def gpus(interfaces, nccl=None, moving=None, nodes=2, each=2, sent=None, **options):
    """A run on `nodes` of `each` GPUs.

    moving: Gb/s at which gradients leave a GPU or node; None: what the interfaces carried. sent:
    how many times their size that is; None: a ring's. Half of the compute, the backward pass but
    for its first layers, can hide them, and a fifth of an all-reduce never hides.
    """
    world = nodes * each
    sent = sent or 2 * (world - 1) / world
    moving = moving or PAYLOAD * sum(one["wire_Gbps"] for one in carriers(interfaces))
    took_ms = 8e-6 * sent * GRADIENT_BYTES / moving
    options = {
        "compute_ms": 60.0,
        "data_ms": 2.0,
        "probe_ms": took_ms,
        "per_process": 256,
        "steps": 200,
    } | options
    hidden_ms = min(options["compute_ms"] / 2, 0.8 * took_ms)
    options = {"exposed_ms": took_ms - hidden_ms} | options
    rate = 8e-6 * GRADIENT_BYTES / took_ms  # as probed_run has it
    options["facts"] = {"image_size": 224, "compile": True} | options.get("facts", {})
    return probed_run(interfaces, nccl, world=world, nodes=nodes, gbps=rate, **options)


def carriers(interfaces):
    """Those of the first one's kind: what passes ib0 passes its adapter, too."""
    return [one for one in interfaces if one["kind"] == interfaces[0]["kind"]]


def rails(count, stated, gbps, kind="infiniband", name="mlx5_{}:1"):
    return [carried(name.format(n), kind, stated, gbps + n / 10) for n in range(count)]


def waiting_for(slow, times):
    """The Summary of four ranks that are all as quick as the slow one, for which they wait."""
    ranks = [
        {"rank": rank, "data_ms": 2.0, "compute_ms": 60.0, "exposed_ms": 0.6} for rank in range(4)
    ]
    for rank in ranks:
        longer = "compute_ms" if rank["rank"] == slow else "exposed_ms"
        rank[longer] += 60.0 * (times - 1)
    means = {
        name: sum(rank[name] for rank in ranks) / 4
        for name in ("data_ms", "compute_ms", "exposed_ms")
    }
    return means | {"step_ms": sum(means.values()), "ranks": ranks}


def ethernet(stated, gbps, name="eth0", **more):
    return [carried(name, "ethernet", stated, gbps, **more)]


ON_SOCKETS = finding(SOCKET, "eth0")
IPOIB = [
    carried("ib0", "ipoib", 100, 24.0, carrier="mlx5_0:1"),
    carried("mlx5_0:1", "infiniband", 100, 24.5),
]
BAD_CABLE = {"symbol_error": 0, "local_link_integrity_errors": 31, "link_error_recovery": 4}
OUT_OF_ORDER = {"out_of_sequence": 41_877, "packet_seq_err": 310}
LOST = {"segments": 900_000, "retransmits": 27_000}

RUNS = {
    "infiniband": Made(
        "HDR InfiniBand of 200 Gb/s, used through GPUDirect, is as fast as it should be; the run "
        "computes.",
        gpus(rails(1, 200, 184.0), finding(IB + CHANNEL, GDR)),
        "Over InfiniBand on mlx5_0:1, by NCCL's word (GPUDirect on 1 of 1 connections): the "
        "probe's all-reduce (...) ran at 184 Gb/s on the wire, 92% of the stated 200 Gb/s: the "
        "link delivers. "
        "Bound by compute",
        "compute",
        "--batch_size",
    ),
    "infiniband without GPUDirect": Made(
        "The adapter could do 200 Gb/s; data passes through the hosts' memory, for nvidia-peermem "
        "is not loaded, and the gradients of a small batch do not hide.",
        gpus(rails(1, 200, 38.0), finding(IB + CHANNEL, HOST_MEMORY), **SMALL_BATCH),
        "Over InfiniBand on mlx5_0:1, by NCCL's word (GPUDirect on 0 of 1 connections): ... "
        "19% of the stated 200 Gb/s: this is not a 200 Gb/s result. GPUDirect was not used: all "
        "bytes passed through host memory, which may be what limits them; the link itself is not "
        "shown to be at fault. Bound by communication between its nodes, which passes through "
        "host memory",
        "link",
        "modprobe nvidia-peermem|ib_write_bw -d mlx5_0 --report_gbits",
        never="GPUDirect: |ulimit",
    ),
    "infiniband with a bad cable": Made(
        "An EDR cable with a bad lane: errors on the link, a fifth of its rate.",
        gpus(
            [carried("mlx5_0:1", "infiniband", 100, 19.0, errors=BAD_CABLE)],
            finding(IB + CHANNEL, GDR),
            **SMALL_BATCH,
        ),
        "Over InfiniBand on mlx5_0:1, by NCCL's word ... Errors counted during the probe: "
        "local_link_integrity_errors 31 on mlx5_0:1 of n0, link_error_recovery 4 on",
        "link",
        "what loses data: cable, transceiver, switch port (`ibqueryerrors`, `mlxlink -d mlx5_0",
        never="GPUDirect: |ulimit",
    ),
    "roce": Made(
        "RoCE without a lossless path, as what comes out of order shows: a fifth of its 100 Gb/s, "
        "and the run waits for it.",
        gpus(
            [carried("mlx5_0:1", "roce", 100, 18.0, errors=OUT_OF_ORDER)],
            finding(IB.replace("/IB [RO]", "/RoCE [RO]") + CHANNEL, GDR),
            **SMALL_BATCH,
        ),
        "Over RoCE on mlx5_0:1, by NCCL's word ... 18% of the stated 100 Gb/s: this is not a "
        "100 Gb/s result. Errors counted during the probe: out_of_sequence 41,877 "
        "on mlx5_0:1 of n0, ...; packets were lost or overtaken on the way, in a switch more "
        "often than in a cable. Bound by its network, which loses packets",
        "link",
        "what is lost: `rdma statistic show link mlx5_0/1` (out_of_sequence|a lossless path|"
        "ib_write_bw -d mlx5_0|NCCL_IB_GID_INDEX|ibstat mlx5_0",
        never="bad lane",
    ),
    "IP over InfiniBand, by NCCL's word": Made(
        "NCCL found no adapter it may use (no /dev/infiniband in the container) and sends by TCP "
        "over ib0: a quarter of what the adapter can do.",
        gpus(
            IPOIB,
            finding(ASKED + "NET/IB : No device found.|" + SOCKET, "ib0"),
            **SMALL_BATCH,
        ),
        'InfiniBand was asked for; NCCL used sockets over ib0, because NCCL says "NET/IB : No '
        'device found.". IP over InfiniBand: the probe ran at 24 Gb/s on ib0, 24% of what '
        "mlx5_0:1 can do (100 Gb/s stated), by byte counters. Bound by TCP over ib0, not "
        "InfiniBand itself",
        "link",
        "NCCL sees no adapter that it may use: in a container, is /dev/infiniband in it?",
        never="NETWORK=infiniband|was asked for and",
    ),
    "IP over InfiniBand, by its bytes": Made(
        "The same, and NCCL's text was not kept: the bytes alone show that ib0 carried them.",
        gpus(IPOIB, **SMALL_BATCH),
        "IP over InfiniBand: the probe ran at 24 Gb/s on ib0, 24% of what mlx5_0:1 can do ... "
        "NCCL's text, which would say why, is not in the log. Bound by TCP over ib0, not "
        "InfiniBand itself",
        "link",
        "NCCL_DEBUG=INFO shows why|NETWORK=infiniband IFNAME=mlx5_0|/sys/class/net/ib0/mode",
        never="ethtool|tc qdisc",
    ),
    "four rails": Made(
        "Four NDR adapters of 400 Gb/s a node, eight GPUs each; all deliver, the run computes.",
        gpus(rails(4, 400, 370.0), finding(IB + 4 * CHANNEL, GDR), each=8),
        "Over InfiniBand on mlx5_0:1, mlx5_1:1, mlx5_2:1, mlx5_3:1, by NCCL's word ... ran at "
        "1,481 Gb/s on the wire, 93% of the stated 1,600 Gb/s: the link delivers. Bound by "
        "compute:",
        "compute",
        "--batch_size",
    ),
    "a tree over four nodes": Made(
        "NCCL was told to take a tree, on four nodes over 25 Gb/s Ethernet, which delivers. A "
        "third of a step waits for gradients.",
        gpus(
            ethernet(25, 22.5),
            ON_SOCKETS,
            nodes=4,
            each=1,
            sent=2,  # each node sends the gradients up and down
            exposed_ms=28.0,
            facts={"env": {"NCCL_ALGO": "Tree"}},
        ),
        "Over TCP on eth0 (ethernet), by NCCL's word, with NCCL_ALGO=Tree: ... 90% of the stated "
        "25 Gb/s: the link delivers. Bound by compute, in part by its link:",
        "compute",
        "unset NCCL_ALGO (now Tree)|the exposed communication: --grad_compression|--batch_size",
        never="more GPUs",
    ),
    "NVLink": Made(
        "Eight GPUs of one machine, joined by NVLink: no network is in use, the run computes.",
        gpus(ethernet(10, 0.01), finding(CHANNEL[1:], "P2P/CUMEM"), moving=2000, nodes=1, each=8),
        "Inside one node, from GPU to GPU over NVLink or PCIe, by NCCL's word: no network is "
        "judged. Bound by compute:",
        "compute",
        "--batch_size",
    ),
    "PCIe": Made(
        "Two GPUs of a workstation without NVLink, whose traffic goes through the host's memory: "
        "the gradients cost as much as the computing.",
        gpus(
            ethernet(10, 0.01),
            finding(CHANNEL[1:], "SHM/direct/direct"),
            moving=36,
            nodes=1,
            **SMALL_BATCH,
        ),
        "Inside one node, through the host's memory (NCCL's SHM), not from GPU to GPU, by NCCL's "
        "word: no network is judged. Bound by communication inside its node:",
        "link",
        "the way between the GPUs: `nvidia-smi topo -m`|send less",
    ),
    "efa": Made(
        "Four EFA adapters of 100 Gb/s in EC2, of which NCCL's plugin makes good use.",
        gpus(
            rails(4, 100, 85.0, kind="efa", name="rdmap{}s0:1"),
            finding(EFA + 4 * CHANNEL, "NET/Libfabric/0/GDRDMA"),
            each=4,
        ),
        "Over EFA on rdmap0s0:1, rdmap1s0:1, rdmap2s0:1, rdmap3s0:1, by NCCL's word ... 85% of "
        "the stated 400 Gb/s: the link delivers. Bound by compute",
        "compute",
        "--batch_size",
    ),
    "port at 100 Mb/s": Made(
        "The node's port came up at 100 Mb/s, as the kernel says itself: a cable with two good "
        "pairs. The switch has 1 Gb/s.",
        gpus(ethernet(0.1, 0.094), ON_SOCKETS),
        "Over TCP on eth0 (ethernet), by NCCL's word: ... ran at 94 Mb/s on the wire, 94% of the "
        "stated "
        "100 Mb/s: the link delivers, but 100 Mb/s is what its port falls back to with a bad "
        "cable. Bound by its link",
        "link",
        "the port: 100 Mb/s is what it falls back to",
    ),
    "switch port at 100 Mb/s": Made(
        "The node's own port is at 1 Gb/s; a switch on the way has one at 100 Mb/s.",
        gpus(ethernet(1, 0.094), ON_SOCKETS),
        "Over TCP on eth0 (ethernet), by NCCL's word: ... ran at 94 Mb/s on the wire, 9% of the "
        "stated "
        "1 Gb/s: this is not a 1 Gb/s result, which a port on the way that fell back to 100 "
        "Mb/s, or a limit there, would explain. Bound by its link",
        "link",
        "the negotiated speed: the switch's ports, `ethtool eth0 | grep Speed` on both nodes",
    ),
    "management port": Made(
        "InfiniBand is there; NCCL_IB_DISABLE is 1 and everything goes over the 1 Gb/s port for "
        "management, which does what it can.",
        gpus(
            ethernet(1, 0.94, name="eno1"),
            finding("NCCL_IB_DISABLE set by environment to 1.|" + SOCKET, "eno1"),
            facts={"env": {"NCCL_IB_DISABLE": "1"}},
        ),
        "Over TCP on eno1 (ethernet), by NCCL's word, as NCCL_IB_DISABLE=1 keeps NCCL from "
        "InfiniBand and RoCE: ... ran at 940 Mb/s on the wire, 94% of the stated 1 Gb/s: the "
        "link delivers. "
        "Bound by its link",
        "link",
        "a faster link: without NCCL_IB_DISABLE=1 (environment, /etc/nccl.conf, ~|`ibstat`|"
        "send less",
    ),
    "lossy ethernet": Made(
        "10 Gb/s Ethernet whose transceiver loses 3 % of the packets.",
        gpus(ethernet(10, 1.1), ON_SOCKETS, tcp=LOST),
        "Over TCP on eth0 (ethernet), by NCCL's word: ... 11% of the stated 10 Gb/s: this is not "
        "a 10 Gb/s result. TCP sent 3.00% of its segments again during the probe",
        "link",
        "what loses data: cable, transceiver, switch port (`ethtool -S eth0`, optics by `ethtool "
        "-m eth0`)",
    ),
    "loader": Made(
        "Each GPU is fed by two loader processes, which decode COCO's JPEG files at 224 px: the "
        "GPUs wait for images. The InfiniBand is healthy.",
        gpus(
            rails(1, 200, 184.0),
            finding(IB + CHANNEL, GDR),
            data_ms=240.0,
            facts={"workers": 2},
        ),
        "Over InfiniBand on mlx5_0:1, ... the link delivers. Bound by its input (waiting for "
        "images): of a step of",
        "input",
        "--workers (now 2)",
    ),
    "slow GPU": Made(
        "GPU 3 is too hot and takes 2.5 times as long; the others wait for it in the all-reduce, "
        "over a healthy InfiniBand.",
        gpus(
            rails(1, 200, 184.0),
            finding(IB + CHANNEL, GDR),
            summary=waiting_for(3, 2.5),
        ),
        "Over InfiniBand on mlx5_0:1, ... the link delivers. Bound by one slow rank, 3, for which "
        "the others wait: of a step of 153 ms, ... exposed communication 68.1 ms (45%), as "
        "measured, mean over the ranks. Rank 3 itself works 152 ms of a step (data wait 2.0 ms, "
        "compute 150 ms), the others 62.0 ms. By the model, 200 Gb/s gives a run of 30 to 31 s "
        "... within that, for ranks that wait for rank 3.",
        "slow rank",
        "rank 3 on n1: heat, clock and other load of its GPU",
        never="compression|--batch_size|more GPUs",
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_verdict_on_hardware(name):
    made = RUNS[name]
    verdict = compared(made.text)["verdicts"]["run0"]
    says = " ".join(verdict.says)
    begins = ".*".join(map(re.escape, made.begins.split("...")))
    assert re.match(begins, says), says
    assert verdict.bound == made.bound, says
    checks = "\n".join(verdict.checks)
    for words in made.check.split("|"):
        assert words in checks, checks
    assert made.check.split("|")[0] in verdict.checks[0], checks
    assert "{" not in says + checks
    for words in made.never.split("|"):
        assert not words or words not in checks, checks
