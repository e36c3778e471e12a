"""Logs of runs that never were, in the formats of script, probe and launcher."""

from __future__ import annotations

import json

from analysis import nccl
from analysis.logs import Log, parse_lines
from analysis.words import duration

GRADIENT_BYTES = 44_870_208  # 4 * 11,217,552 parameters: ResNet-18 with 80 classes

IB = "NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.1<0>|Using network IB"
FOUR = IB.replace("/IB [RO]", "/IB [1]mlx5_1:1/IB [2]mlx5_2:1/IB [3]mlx5_3:1/IB [RO]")
ROCE = IB.replace("/IB [RO]", "/RoCE [RO]")
SOCKET = "NET/Socket : Using [0]eth0:10.0.0.1<0>|Using network Socket"
EFA = "NET/OFI Selected Provider is efa (found 4 nics)|Using network Libfabric"
ASKED = "NCCL_IB_HCA set by environment to mlx5_0.|"
CHANNEL = "|Channel 00/0 : 0[0] -> 1[0] [send] via "
GDR = CHANNEL + "NET/IB/0/GDRDMA"


def log_of(text: str) -> Log:
    """What compare_logs.py reads in a file of this text."""
    log = Log()
    parse_lines(text.splitlines(keepends=True), log)
    return log


def finding(text: str) -> dict:
    """What nccl.py says of NCCL's lines, parted by `|`."""
    reader = nccl.Reader()
    for line in text.split("|"):
        reader.read(f"n0:1:2 [0] NCCL INFO {line}\n")
    return reader.finding().to_dict()


def carried(name: str, kind: str, stated: float | None, gbps: float, **more: object) -> dict:
    """An interface of the Probe that carried `gbps` during it."""
    sent = {"tx_bytes": int(gbps * 1e8), "rx_bytes": int(gbps * 1e8), "wire_Gbps": gbps}
    return {"name": name, "kind": kind, "speed_Gbps": stated} | sent | more


def ethernet(stated: float, gbps: float, name: str = "eth0", **more: object) -> list[dict]:
    return [carried(name, "ethernet", stated, gbps, **more)]


def one_run(
    *,
    world=2,
    nodes=2,
    steps=20,
    epochs=2,
    per_process=16,
    start_step=0,
    data_ms=1.0,
    compute_ms=140.0,
    exposed_ms=101.0,
    probe_ms=52.0,
    interfaces=None,
    nccl_says=None,
    backend="gloo",
    loss_scale=1.0,
    probe=True,
    facts=(),
    summary=(),
    node=(),
    **link,
):
    """A run's lines by rank, [(rank, text), ...], in the order in which they are written.

    interfaces: what carried the probe on each node; default: veth0 of 10 Gb/s at 6.9. nccl_says:
    NCCL's lines, parted by `|`. facts, summary, node, link: more of the Run, the Summary, a
    Probe's node, the Probe.
    """
    batch, step_ms = per_process * world, data_ms + compute_ms + exposed_ms
    speed = f"{per_process / step_ms * 1000:.1f} img/s"
    run = {
        "world_size": world,
        "nodes": nodes,
        "backend": backend,
        "hosts": [f"n{rank * nodes // world}" for rank in range(world)],
        "global_batch_size": batch,
        "precision": "bf16",
        "grad_compression": "none",
        "image_size": 64,
        "images": batch * steps // epochs,
        "num_epochs": epochs,
        "max_steps": steps,
        "start_step": start_step,
        "parameters": GRADIENT_BYTES // 4,
        "env": {},
    } | dict(facts)
    links = interfaces or [carried("veth0", "ethernet", 10, 6.9)]
    text = nccl_says and finding(nccl_says)
    measured = {
        "world_size": world,
        "all_reduce_bytes": GRADIENT_BYTES,
        "all_reduce_ms": probe_ms,
        "nodes": [
            {"host": f"n{n}", "interfaces": links, "nccl": text} | dict(node) for n in range(nodes)
        ],
    } | link
    parts = {"data_ms": data_ms, "compute_ms": compute_ms, "exposed_ms": exposed_ms}
    end = parts | {
        "step_ms": step_ms,
        "img_per_s": batch / step_ms * 1000,
        "ranks": [{"rank": rank, **parts, "step_ms": step_ms} for rank in range(world)],
        "wire_bytes_per_step": GRADIENT_BYTES,
    }
    lines = [(0, f"Run {json.dumps(run)}")]
    if world > 1 and probe:
        lines.insert(0, (0, f"Probe {json.dumps(measured)}"))
    for step in range(start_step + 1, steps + 1):
        epoch = (step - 1) * epochs // steps + 1
        if step % 5 == 1 or step == steps:
            for rank in range(world):
                loss = loss_scale * (4.5 - 2 * step / steps + 0.01 * rank)
                text = f"Epoch {epoch} | Step {step} | Loss: {loss:.4f} | {speed} | "
                text += f"data {data_ms:.1f} ms | step {step_ms:.1f} ms | ETA 0m 3s"
                lines.append((rank, text))
        if step * epochs % steps == 0:
            for rank in range(world):
                mean = loss_scale * (4 - epoch + 0.01 * rank)
                text = f"Epoch {epoch} complete | Avg loss: {mean:.4f} | {speed} | 2.42s"
                lines.append((rank, text))
            text = "Top-1: 41.67% | 48 images | 1.23s | baseline 25.00%"
            lines.append((0, f"Epoch {epoch} validation | {text}"))
    lines.append((0, f"Summary {json.dumps(end | dict(summary))}"))
    wall_s = (steps - start_step) * step_ms / 1000 + 3
    return lines + [(rank, end_line(wall_s)) for rank in range(world)]


def end_line(wall_s: float) -> str:
    return f"Cleanup complete. Total wall time: {duration(wall_s)} ({wall_s:.3f}s)"


def as_text(lines, kind: str = "CPU") -> str:
    return "".join(f"[{kind} {rank}] {text}\n" for rank, text in lines)


def on_gpus(interfaces, nccl_says=None, moving=None, each=2, small=False, **options) -> str:
    """A run on nodes of `each` GPUs, whose times and rates fit each other.

    256 images a process in 60 ms of compute and 2 ms of data wait, or (small) 16 in 6 ms. moving:
    Gb/s at which gradients leave a node; default: what the interfaces of the first one's kind
    carried, without headers. Half of the compute, the backward pass, can hide an all-reduce except
    for a fifth of it.
    """
    nodes = options.pop("nodes", 2)
    world = nodes * each
    alike = [link["wire_Gbps"] for link in interfaces if link["kind"] == interfaces[0]["kind"]]
    sent = 2 * (world - 1) / world * GRADIENT_BYTES
    took_ms = 8e-6 * sent / (moving or 0.97 * sum(alike))
    made = {"compute_ms": 60.0, "data_ms": 2.0, "per_process": 256, "steps": 200}
    if small:
        made |= {"compute_ms": 6.0, "data_ms": 0.4, "per_process": 16}
    made |= {"probe_ms": took_ms, "backend": "nccl"} | options
    hidden_ms = min(made["compute_ms"] / 2, 0.8 * took_ms)
    made = {"exposed_ms": took_ms - hidden_ms} | made
    made["facts"] = {"image_size": 224, "compile": True} | dict(made.get("facts", {}))
    links = {"interfaces": interfaces, "nccl_says": nccl_says}
    return as_text(one_run(world=world, nodes=nodes, **links, **made), "GPU")
