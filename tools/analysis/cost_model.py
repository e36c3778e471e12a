"""The time of an all-reduce, and of a step around it, by the cost of latency and bandwidth.

A verdict says what it rests on: measured (the split of a step, the probe's all-reduces, counters
of bytes and errors), NCCL's word (its debug text), or the model (B = bytes each rank hands to the
all-reduce, n = processes on N nodes, r = bytes/s in one direction of all the interfaces of a node
that carry it, a = latency of one message: the probe's small all-reduces over their turns):
  ring   a node sends 2(n-1)/n B in each direction, as the ring enters and leaves it once:
         T = 2(n-1) a + 2(n-1)/n B/r     (n = 4 on N = 2: 1.5 B; n = 2 on N = 2: 1 B)
  tree   two pipelined binary trees over the nodes; a node is an inner node of one and a leaf of
         the other and sends 2 B, or B where there are only two nodes:
         T = 2 ceil(log2 N) a + 2 B/r
  step   from full overlap, max(floor, T), to none, floor + T; floor = data wait + compute. Where
         the log does not tell the algorithm, T is the quicker one's, but for a run that is judged
         in floor + T the slower one's
  best   with a probe of P and DDP's buckets: one bucket's all-reduce after another, each from when
         its last gradient is there and the one before is done. What is left after the backward
         pass is exposed: E(T). The last bucket always is, as it is complete when the pass ends,
         and a faster link hides no more than the others. What was exposed beyond E(P), waiting
         for other ranks and for cores, stays as it is; of less than that the same part does:
         floor + E(T) + (exposed - E(P)), or floor + E(T) exposed/E(P)
Traffic inside a node counts as free. A range has all gradients as one message, and what a run
has waited beyond E(P) in its upper end.
Sources: latency-bandwidth cost: Thakur, Rabenseifner, Gropp, Int. J. High Perf. Comp. Appl. 19(1),
2005. Ring: Patarasuk, Yuan, J. Parallel Distrib. Comput. 69(2), 2009. Two trees: Sanders, Speck,
Traeff, Parallel Computing 35(12), 2009. Algorithm and bus bandwidth: PERFORMANCE.md of nccl-tests.
"""

import math

from common.records import get

# TCP's payload out of the bytes that an Ethernet line is busy for, at MTU 1500: the packet less
# the headers of IPv4 (20), TCP (20) and its time stamp option (12, RFC 7323), over the packet plus
# Ethernet header 14, checksum 4, preamble 8 and gap 12 (IEEE 802.3): 1448/1538, 941 of 1000 Mb/s.
TCP_SHARE = (1500 - 20 - 20 - 12) / (1500 + 14 + 4 + 8 + 12)
# Where no probe timed small all-reduces: NCCL's own estimate for one hop over a network with its
# Simple protocol, rings and trees alike (hwLat in NCCL's src/graph/tuning.cc).
LATENCY_US = 14.0


def ring_bytes(nbytes, processes, nodes):
    """Bytes that one node sends, and as many it receives, in a ring all-reduce of `nbytes`."""
    return 0.0 if nodes < 2 else 2 * (processes - 1) / processes * nbytes


def ring_seconds(nbytes, processes, nodes, bytes_per_s, latency_s=0.0):
    """Seconds of a ring all-reduce; each of its 2(n-1) turns waits for a hop between nodes."""
    if nodes < 2:
        return 0.0
    return 2 * (processes - 1) * latency_s + ring_bytes(nbytes, processes, nodes) / bytes_per_s


def tree_seconds(nbytes, nodes, bytes_per_s, latency_s=0.0):
    """Seconds of an all-reduce over two pipelined binary trees, up and down again."""
    if nodes < 2:
        return 0.0
    sent = nbytes if nodes == 2 else 2 * nbytes
    return 2 * math.ceil(math.log2(nodes)) * latency_s + sent / bytes_per_s


def told_algorithm(run):
    """What NCCL_ALGO says, where NCCL ran; else empty."""
    facts = run.record("Run")
    return get(get(facts, "env", dict), "NCCL_ALGO", str) if facts.get("backend") == "nccl" else ""


def algorithm(run):
    """ring or tree where it is known: Gloo's is a ring, NCCL may have been told. Else None."""
    if run.record("Run").get("backend") == "gloo":
        return "ring"
    told = told_algorithm(run).lower()
    return told if told in ("ring", "tree") else None


def all_reduce_seconds(run, nbytes, processes, nodes, bytes_per_s, latency_s=0.0, unknown=min):
    """By the run's algorithm; where that is not known by the better one, or `unknown` of both."""
    ring = ring_seconds(nbytes, processes, nodes, bytes_per_s, latency_s)
    tree = tree_seconds(nbytes, nodes, bytes_per_s, latency_s)
    return {"ring": ring, "tree": tree}.get(algorithm(run), unknown(ring, tree))


def payload_rate(gbps):
    """Bytes of gradients per second that a line of `gbps` 10^9 bits/s carries over TCP."""
    return gbps * 1e9 / 8 * TCP_SHARE


def implied_gbps(nbytes, processes, nodes, seconds):
    """Rate in Gb/s of a wire on which a ring all-reduce would take `seconds`."""
    return ring_bytes(nbytes, processes, nodes) * 8 / seconds / 1e9


def exposed_seconds(total_s, small_s, buckets):
    """Seconds from a rank's last gradient until all buckets are averaged.

    total_s, small_s: an all-reduce of all gradients, of next to nothing. buckets: (share of the
    bytes, seconds from its last gradient to the last of all), in the order in which they are sent.
    """
    end = -math.inf
    for share, ready_s in buckets:
        begin = max(end, -ready_s)
        end = begin + small_s + share * max(0.0, total_s - small_s)
    return end


def waited_seconds(run):
    """What was exposed beyond what the probe and the buckets account for."""
    expected = exposed_seconds(run.probe_s, run.small_s or 0.0, run.buckets)
    return max(0.0, run.step_s - run.floor_s - expected)


def estimate_step(run, total_s, small_s):
    """Seconds of this run's step where an all-reduce takes total_s, and a small one small_s."""
    expected = exposed_seconds(run.probe_s, run.small_s or 0.0, run.buckets)
    exposed = run.step_s - run.floor_s
    after = exposed_seconds(total_s, small_s, run.buckets)
    if exposed >= expected:
        return run.floor_s + after + waited_seconds(run)
    return run.floor_s + after * max(0.0, exposed) / expected
