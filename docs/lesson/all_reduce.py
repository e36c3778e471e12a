"""Ring and tree all-reduce in send and recv: torchrun starts it, once for each process"""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

# The model of a cable: each send first sleeps 5 ms + bytes / rate.
LATENCY = 0.005  # seconds
RATE = 10e6  # bytes per second
SIZES = [8_000, 64_000, 512_000]  # bytes
ROUNDS = 3

rank = int(os.environ["RANK"])
world_size = int(os.environ["WORLD_SIZE"])


def sleep_for(tensor):
    """As long as the cable would take for this tensor."""
    time.sleep(LATENCY + tensor.nbytes / RATE)


def ring(tensor):
    """All-reduce, in place: each rank sends a piece to the next rank, 2(N - 1) times."""
    pieces = tensor.tensor_split(world_size)  # views: they share the tensor's memory
    for turn in range(2 * (world_size - 1)):
        outgoing = pieces[(rank - turn) % world_size]
        piece = pieces[(rank - turn - 1) % world_size]
        incoming = torch.empty_like(piece)
        sleep_for(outgoing)  # all ranks at the same time, as all cables work at the same time
        # If all ranks began with send, each would wait for a recv that nobody reaches.
        if rank % 2 == 0:
            dist.send(outgoing, (rank + 1) % world_size)
            dist.recv(incoming, (rank - 1) % world_size)
        else:
            dist.recv(incoming, (rank - 1) % world_size)
            dist.send(outgoing, (rank + 1) % world_size)
        if turn < world_size - 1:
            piece += incoming
        else:  # from here on the pieces that arrive are sums over all ranks
            piece.copy_(incoming)


def tree(tensor):
    """All-reduce, in place: sums go up to rank 0, which is the root, then the total comes down."""
    distances = [2**level for level in range((world_size - 1).bit_length())]  # 1, 2, 4
    for distance in distances:
        if rank % (2 * distance) == distance:
            sleep_for(tensor)
            dist.send(tensor, rank - distance)
        elif rank % (2 * distance) == 0 and rank + distance < world_size:
            incoming = torch.empty_like(tensor)
            dist.recv(incoming, rank + distance)
            tensor += incoming
    for distance in reversed(distances):
        if rank % (2 * distance) == distance:
            dist.recv(tensor, rank - distance)
        elif rank % (2 * distance) == 0 and rank + distance < world_size:
            sleep_for(tensor)
            dist.send(tensor, rank + distance)


def measure(all_reduce, size):
    """Seconds of each round, of the slowest rank in it."""
    seconds = torch.zeros(ROUNDS)
    for n in range(ROUNDS):
        tensor = torch.randint(100, (size // 4,)).float()  # sums of whole numbers are exact
        expected = tensor.clone()
        dist.all_reduce(expected)  # also lets the ranks start together
        start = time.perf_counter()
        all_reduce(tensor)
        seconds[n] = time.perf_counter() - start
        assert torch.equal(tensor, expected), "not what dist.all_reduce gives"
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds


def by_hand(size):
    """Seconds of ring and tree by the model of a cable alone, for 2, 4, 8 ... ranks."""
    turns, levels = 2 * (world_size - 1), (world_size - 1).bit_length()
    return [
        turns * (LATENCY + size / world_size / RATE),
        2 * levels * (LATENCY + size / RATE),
    ]


dist.init_process_group("gloo", timeout=timedelta(seconds=20))
torch.manual_seed(rank)  # different numbers on each rank
for size in SIZES:
    measured = [measure(ring, size), measure(tree, size)]
    if rank == 0:
        for name, seconds, model in zip(("ring", "tree"), measured, by_hand(size), strict=True):
            fastest = 1000 * seconds.min().item()  # a busy machine can only add time
            print(f"{size:7,} bytes, {name}: {fastest:4.0f} ms, by hand {1000 * model:4.0f} ms")
# NOTE: the last all_reduce's tensor must live until here, or PyTorch 2.6 may hang in this call.
dist.destroy_process_group()
