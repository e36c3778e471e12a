"""What a run does when something goes wrong: one fault a test, with real processes.

Most ranks are forked, in namespaces where a test needs two nodes. Where torchrun or the launcher
is what is hit, or what has to notice, the real one is started.

DEMO_ENDURANCE=1 adds the long form of the endurance test; DEMO_SEED chooses another seed for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import random
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.datasets import Payload, make_set
from support.forks import FOR_ONE_CHECKPOINT, ForkServer, prepared, shared, write
from support.forks import start as start_script
from support.nodes import NEW_MOUNTS, NamespacePair, mount, own_namespaces, small_disk
from support.processes import (
    LONG,
    ROOT,
    SCRIPT,
    Run,
    Started,
    demo_command,
    free_port,
    long,
    processes,
    require,
    start,
    wait_until,
)

FAST = shlex.split("--weights none --image_size 40 --batch_size 4 --workers 0 --precision fp32")
FAST += ["--log_every", "1"]
STOPPED = 75  # the script's exit code after a stop signal
NOTICED = 20  # seconds: a silent peer is noticed after --timeout 8, the rest is a slow machine


# --- What is done to the script in a forked process ------------------------------------------


def small_shm(demo, size: str) -> None:
    own_namespaces(NEW_MOUNTS)
    mount("tmpfs", "/dev/shm", "tmpfs", f"size={size}")


def fill_shm_later(demo) -> None:
    """Something else fills /dev/shm when the workers have been started."""
    log_run = demo.log_run

    def full(*given):
        log_run(*given)
        with contextlib.suppress(OSError), open("/dev/shm/other", "wb") as file:
            while True:
                file.write(bytes(2**16))
                file.flush()

    demo.log_run = full


def slow_first_step(demo, result) -> None:
    """The script's main; in its first step the workers get ahead as far as they may."""
    train_step = demo.train_step

    def slow(run, micro_batches):
        time.sleep(1 if run.step == 0 else 0)
        return train_step(run, micro_batches)

    demo.train_step = slow
    start_script(demo)


def end_after_arguments(demo) -> None:
    """All ranks end when the arguments are complete."""
    complete = demo.complete_arguments

    def complete_and_end(*given):
        complete(*given)
        sys.exit(0)

    demo.complete_arguments = complete_and_end


def few_files(demo, limit: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))


def stop_signal(demo, rank: int, step: int) -> None:
    """One rank gets SIGTERM in this step."""
    step_of_demo = demo.train_step

    def stopped(run, micro_batches):
        if (run.process.rank, run.step + 1) == (rank, step):
            os.kill(os.getpid(), signal.SIGTERM)
        return step_of_demo(run, micro_batches)

    demo.train_step = stopped


def slow_validation(demo, rank: int, seconds: float) -> None:
    """Each batch that this rank validates takes longer, and is told of."""
    forward = demo.forward

    def slow(run, model, images):
        if not model.training and run.process.rank == rank:
            os.write(1, b"validating\n")
            time.sleep(seconds)
        return forward(run, model, images)

    demo.forward = slow


def not_a_number(demo, rank: int, step: int) -> None:
    """The loss of one rank at one step is NaN, and with it every weight after that step."""
    forward = demo.forward

    def poisoned(run, model, images):
        wrong = run.process.rank == rank and run.step + 1 == step
        return forward(run, model, images) * (float("nan") if wrong else 1)

    demo.forward = poisoned


def bad_gradient(demo, step: int) -> None:
    """The loss of this step is finite, but its update makes a weight NaN."""
    step_of_demo = demo.train_step

    def poisoned(run, micro_batches):
        if run.step + 1 == step:
            run.model.fc.bias.register_hook(lambda gradient: gradient * float("nan"))
        return step_of_demo(run, micro_batches)

    demo.train_step = poisoned


def save_again_and_again(demo, result) -> None:
    """In the place of a run: saves without end, and says which step has been saved."""
    run = prepared(demo)
    demo.train_step(run, [next(iter(run.loader))])  # Adam has its state from now on
    while True:
        run.step += 1
        demo.save_checkpoint(run)
        os.write(1, f"saved {run.step}\n".encode())


def lose_workers_and_tell_late(demo) -> None:
    """A step's error is told so late that its loader workers have been ended meanwhile: SIGCHLD,
    and what PyTorch would raise on it, come in between.
    """
    log = demo.log

    def broken(run, micro_batches):
        raise ConnectionResetError("Connection reset on purpose")

    def late(process, text, to=1):
        if "ERROR" in text:
            for worker in demo.torch.multiprocessing.active_children():
                worker.kill()
            time.sleep(1)
        log(process, text, to)

    demo.log, demo.train_step = late, broken


def raise_in_step(demo, text: str) -> None:
    """A bug in the second step, with this text."""
    step = demo.train_step

    def broken(run, micro_batches):
        if run.step == 1:
            raise RuntimeError(text)
        return step(run, micro_batches)

    demo.train_step = broken


def lose_the_store(demo, how: str) -> None:
    """The second step needs something of a store that does not answer."""
    from datetime import timedelta

    import torch.distributed as dist

    step = demo.train_step

    def broken(run, micro_batches):
        if run.step == 1:
            host, port, wait = "127.0.0.1", free_port(), timedelta(seconds=1)
            serves = how == "silent"
            store = dist.TCPStore(
                host, port, is_master=serves, timeout=wait, wait_for_workers=False
            )
            store.get("a key that nobody sets")
        return step(run, micro_batches)

    demo.train_step = broken


def two_sums_at_once(demo) -> None:
    """Rank 0 waits for the second of two sums that rank 1 takes no part in: when the first is over
    its time, Gloo ends what else its connections are at.
    """
    import torch.distributed as dist

    step = demo.train_step

    def broken(run, micro_batches):
        if run.step == 1:
            time.sleep(600 * run.process.rank)
            first = dist.all_reduce(demo.torch.ones(9), async_op=True)
            time.sleep(0.5)
            second = dist.all_reduce(demo.torch.ones(9), async_op=True)
            second.wait()
            first.wait()
        return step(run, micro_batches)

    demo.train_step = broken


# --- Fixtures and helpers --------------------------------------------------------------------


@pytest.fixture
def ranks(demo: ForkServer) -> Iterator[ForkServer]:
    """Where ranks are forked; whatever a test has left running is killed."""
    yield demo
    demo.clear()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options for 48 images."""
    return make_set(tmp_path_factory.mktemp("data"), 48)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder that is gone after the test: a checkpoint has 135 MB."""
    yield tmp_path
    shutil.rmtree(tmp_path, ignore_errors=True)


def load(path: Path) -> dict:
    """A checkpoint, as plain values."""
    import torch

    return torch.load(path, weights_only=True, map_location="cpu")


def told(demo, result, path):
    """Of a checkpoint what `saved_in` tells."""
    state = load(Path(path))
    # but for statistics of images that a diverging network has seen
    weights = {name: v for name, v in state["model"].items() if "running_" not in name}
    bad = [name for name, v in weights.items() if not v.double().isfinite().all()]
    write(result, {"step": state["step"], "scaler": state.get("scaler"), "not_finite": bad})


def saved_in(path: Path) -> dict:
    """The step, the state of fp16's scaler and the weights that are not finite of a checkpoint,
    read in a forked process: pytest's own would import torch for it, which takes seconds.
    """
    return shared().run(call=told, path=str(path)).result()


def errors(run: Run) -> list[str]:
    """The lines by which the ranks say what is wrong."""
    return [line for line in run.output.splitlines() if re.match(r"\[CPU \d+\] ERROR: ", line)]


def the_error(run: Run) -> str:
    """The one line that says what is wrong; fails where it is not alone."""
    found = errors(run)
    assert len(found) == 1, run.tail()
    assert "Traceback" not in run.output, run.tail()
    return found[0]


def torchrun(argv: Sequence[object], nproc: int = 2, **options: Any) -> Started:
    return start(demo_command([*FAST, *argv], nproc), **options)


LAUNCHER = ROOT / "launch_multinode.sh"


def launched(
    folder: Path, argv: Sequence[object], nproc: int, launcher: Path = LAUNCHER, **env: str
) -> Started:
    """The launcher, on this machine alone."""
    variables = {"NNODES": "1", "GPUS_PER_NODE": str(nproc), "PROBE": "0", "RUN_NAME": "run"}
    variables |= {"LOG_DIR": str(folder), "PYTHON": sys.executable}
    return start(["bash", launcher, *FAST, *argv], env=variables | env)


def on_two_nodes(
    nodes: NamespacePair,
    argv: Sequence[object],
    env: Mapping[str, str] | None = None,
    of_node: Callable[[int], Mapping[str, str]] = lambda _: {},
    only: Sequence[int] = (0, 1),
    folder: Path | None = None,
) -> list[Started]:
    """The launcher on each node, one rank each."""
    started = []
    for node in only:
        variables = {"NNODES": "2", "NODE_RANK": str(node), "MASTER_ADDR": nodes.addresses[0]}
        variables |= {"GPUS_PER_NODE": "1", "CONNECT_TIMEOUT": "40", "LOG_DIR": str(folder)}
        variables |= {"RUN_NAME": "run", "PYTHON": sys.executable, "PROBE": "0"}
        variables |= {**(env or {}), **of_node(node)}
        command = ["bash", LAUNCHER, *FAST, *argv]
        started.append(nodes.popen(node, command, env=variables))
    return started


def main_pid(started: Started) -> int:
    """Process id of the torchrun under a launcher, or of the command itself if that is it."""
    found = [p for p in processes(started.test_id) if "distributed.run" in p.command]
    found = [p for p in found if "supervise.py" not in p.command]  # which names it, too
    assert len(found) == 1, found
    return found[0].pid


def said(text: str, pattern: str) -> str:
    """The line of a text that matches; fails without."""
    match = re.search(f"^.*(?:{pattern}).*$", text, re.MULTILINE)
    assert match, f"no {pattern!r} in:\n{text[-6000:]}"
    return match[0]


# --- Killed ----------------------------------------------------------------------------------


def test_sigkill_of_a_rank_on_two_nodes(ranks, data):
    with NamespacePair() as nodes:
        argv = [*FAST, *data, "--num_epochs", 99, "--timeout", 8]
        run = ranks.start(argv, 2, nodes=nodes)
        run.wait_for(r"^\[CPU 1\] .*Step 1 ")
        run.signal(1, signal.SIGKILL)
        ended = run.finish(NOTICED, expect=[1, -9])
    assert re.search(r"ERROR: in (the data of )?step \d+: .*/gloo/", the_error(ended))


@LONG
def test_sigkill_of_one_nodes_torchrun(data, folder):
    with NamespacePair() as nodes:
        argv = [*data, "--num_epochs", 99, "--timeout", 8, "--checkpoint", folder / "c.pt"]
        first, second = on_two_nodes(nodes, argv, folder=folder)
        second.wait_for(r"^\[CPU 1\] .*Step 3 ")
        os.kill(main_pid(second), signal.SIGKILL)
        second = second.finish(40, expect=None)
        first = first.finish(40, expect=None)
    assert 0 < first.returncode != STOPPED, first.tail()
    assert second.returncode not in (0, STOPPED), second.tail()
    said(second.output, "torchrun was ended by signal 9")
    step = int(re.search(r"\d+", said(first.output, r"\] Stopped").partition("step")[2])[0])
    assert saved_in(folder / "c.pt")["step"] == step


@LONG
@pytest.mark.parametrize("seed", [1])
def test_sigkill_while_a_checkpoint_is_written(ranks, data, folder, seed):
    rng, path, unfinished, seen = random.Random(seed), folder / "c.pt", 0, 0
    argv = [*FAST, *data, "--checkpoint", path]
    for _ in range(10):
        run = ranks.start(argv, call=save_again_and_again)
        run.wait_for("^saved 1$")
        run.wait_for("^saved 2$")
        time.sleep(rng.uniform(0, 0.7))
        run.signal(0, signal.SIGKILL)
        run.finish(expect=-9)
        unfinished += Path(f"{path}.new").exists()
        state = saved_in(path)
        said_saved = int(re.findall(r"^saved (\d+)$", run.text(), re.MULTILINE)[-1])
        assert state["step"] in (said_saved, said_saved + 1)
        assert state["not_finite"] == []
        seen += 1
    assert unfinished >= 3, f"{unfinished} of {seen} were hit while they wrote: too few to tell"


# --- Stop signals ----------------------------------------------------------------------------


def assert_stopped(text: str, name: str, path: Path, nproc: int = 2) -> int:
    """Every rank has said so at the same step, which is the checkpoint's; returns it."""
    steps = {
        rank: re.findall(rf"^\[CPU {rank}\] Stopped on {name} \| step (\d+)", text, re.MULTILINE)
        for rank in range(nproc)
    }
    assert all(len(found) == 1 for found in steps.values()), f"{steps}\n{text[-6000:]}"
    assert len({found[0] for found in steps.values()}) == 1, steps
    state = saved_in(path)
    assert state["step"] == int(steps[0][0])
    return state["step"]


@LONG
@pytest.mark.parametrize(
    ("target", "name", "code"),
    [
        ("torchrun", "SIGTERM", 1),  # torchrun knows no other code
        ("rank", "SIGINT", 1),
        ("launcher", "SIGUSR1", STOPPED),
    ],
)
def test_stop_signal_to_one_process(data, folder, target, name, code):
    path = folder / "c.pt"
    argv = [*data, "--num_epochs", 99, "--checkpoint", path, "--timeout", 20]
    by_launcher = target == "launcher"
    with launched(folder, argv, 2, RESTARTS="2") if by_launcher else torchrun(argv) as run:
        run.wait_for(r"^\[CPU 1\] .*Step 3 ")
        os.kill(run.rank_pid(1) if target == "rank" else run.pid, signal.Signals[name])
        ended = run.finish(20, expect=code)
    assert assert_stopped(ended.output, name, path) >= 3
    assert "Traceback" not in ended.output.partition("Stopped on")[0]
    assert "restart 1" not in ended.output


@LONG
def test_stop_signal_during_validation(ranks, data, folder):
    """It may take long: the rest of it is left out, and no step is made after it."""
    path = folder / "c.pt"
    argv = [*FAST, *data, "--num_epochs", 99, "--checkpoint", path, "--timeout", 20]
    argv += [option.replace("--", "--val_", 1).replace("val_coco", "val") for option in data]
    run = ranks.start(argv, 2, before=[partial(slow_validation, rank=1, seconds=1)])
    run.wait_for("^validating$")
    run.signal(1, signal.SIGTERM)
    ended = run.finish(15, expect=STOPPED)
    assert assert_stopped(ended.out, "SIGTERM", path) == 6
    assert ended.out.count("validating") < 6 and "validation |" not in ended.out


def opened(fifo: Path) -> int | None:
    """A descriptor to write to the FIFO once somebody reads from it."""
    with contextlib.suppress(OSError):
        return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
    return None


def test_stop_signal_before_the_first_step(ranks, data, folder):
    """While rank 0 waits for a file server, say: nothing is lost, so they may end at once."""
    fifo = folder / "instances.json"
    os.mkfifo(fifo)
    argv = [*FAST, *data, f"--annotation_path={fifo}", "--checkpoint", folder / "c.pt"]
    run = ranks.start([*argv, "--timeout", 20], 2)
    writer = wait_until(lambda: opened(fifo), 20, "rank 0 to read")
    try:
        for rank in (0, 1):
            run.signal(rank, signal.SIGTERM)
        run.finish(10, expect=None)
    finally:
        os.close(writer)


# --- The link --------------------------------------------------------------------------------


@LONG
def test_link_down_and_up_again_within_the_timeout(ranks, data):
    argv = [*FAST, *data, "--num_epochs", 2, "--timeout", 30]  # 12 steps
    sha = ranks.run(argv, 2).json_line("Summary")["weights_sha256"]
    with NamespacePair() as nodes:
        run = ranks.start(argv, 2, nodes=nodes)
        run.wait_for(r"^\[CPU 1\] .*Step 3 ")
        nodes.link_down()
        time.sleep(2)
        before = run.text()
        time.sleep(0.5)
        assert run.text() == before, "the link was not needed"
        nodes.link_up()
        ended = run.finish(60)
    assert ended.json_line("Summary")["weights_sha256"] == sha


# --- The start -------------------------------------------------------------------------------


@LONG
@pytest.mark.parametrize("node", [0, 1])
def test_only_one_of_two_nodes_started(data, folder, node):
    with NamespacePair() as nodes:
        (run,) = on_two_nodes(nodes, data, {"CONNECT_TIMEOUT": "3"}, only=[node], folder=folder)
        ended = run.finish(40, expect=None)
    assert ended.returncode not in (0, STOPPED)
    last = "\n".join(ended.output.splitlines()[-2:])
    said(last, "within 3 s" if node else "nodes did not all come within 3 s")


@LONG
@pytest.mark.parametrize("rank", ["0", "1"])
def test_two_nodes_with_the_same_node_rank(data, folder, rank):
    with NamespacePair() as nodes:
        env = {"NODE_RANK": rank, "CONNECT_TIMEOUT": "4"}
        started = on_two_nodes(nodes, data, env, folder=folder)
        ended = [run.finish(40, expect=None) for run in started]
    assert all(run.returncode not in (0, STOPPED) for run in ended)
    said(
        ended[1].output, "NODE_RANK is 0, but" if rank == "0" else "start the launcher there with"
    )


@LONG
def test_master_that_resolves_to_loopback_on_both_nodes(ranks, data):
    with NamespacePair() as nodes:
        for node in (0, 1):
            nodes.hosts(node).write_text("127.0.0.1 localhost head\n")
        argv = [*FAST, *data, "--timeout", 4]
        ended = ranks.run(
            argv, 2, nodes=nodes, env={"MASTER_ADDR": "head"}, expect=1, timeout=NOTICED
        )
    for rank in (0, 1):
        assert "rendezvous at head" in said(ended.output, rf"\[CPU {rank}\] ERROR: .*")


@LONG
def test_name_of_node_0_that_is_loopback_there_with_srun(ranks, data):
    """As Debian writes /etc/hosts: SLURM's own address of that node tells Gloo's interface."""
    with NamespacePair() as nodes:
        nodes.hosts(0).write_text("127.0.0.1 localhost\n127.0.1.1 node0\n10.77.0.2 node1\n")
        env = {"MASTER_ADDR": "node0", "SLURM_LAUNCH_NODE_IPADDR": nodes.addresses[0]}
        argv = [*FAST, *data, "--timeout", 8, "--max_steps", 1]
        ended = ranks.run(argv, 2, nodes=nodes, env=env, timeout=NOTICED)
    assert ended.json_line("Run")["env"]["GLOO_SOCKET_IFNAME"] == "eth0"
    assert ended.json_line("Summary")["replicas_identical"] is True


@pytest.mark.parametrize(
    ("there", "wanted"),
    [
        # --workers may differ
        (["--lr", "0.25", "--workers", "1"], r"--lr: 0\.25 here, 0\.001 on rank 0: "),
        # All ranks take part in saving: the others would wait elsewhere.
        (["--checkpoint", "c.pt"], "--checkpoint given: True here, False on rank 0: "),
    ],
    ids=["argument", "checkpoint"],
)
def test_other_start_on_one_node(ranks, data, there, wanted):
    argv = [[*FAST, *data], [*FAST, *data, *there]]
    ended = ranks.run(nproc=2, of_rank=lambda rank: {"argv": argv[rank]}, expect=1)
    assert re.search(rf"ERROR: {wanted}start all alike \(rank 1\)$", the_error(ended))


@LONG
def test_rank_0_that_is_too_slow_at_the_start(data, folder):
    fifo = folder / "instances.json"
    os.mkfifo(fifo)  # nobody writes: rank 0 waits in open() for ever
    with torchrun([*data, f"--annotation_path={fifo}", "--timeout", 6]) as run:
        run.wait_for(r"rank1\]: Traceback|^\[CPU 1\] ERROR")
        ended = run.finish(10, expect=1)
    assert "image list broadcast" in said(ended.output, r"\[CPU 1\] ERROR: .*")


# --- Inside a rank ---------------------------------------------------------------------------


@LONG
def test_sigkill_of_a_data_loader_worker(ranks, data):
    argv = [*FAST, *data, "--num_epochs", 99, "--workers", 1, "--timeout", 8]
    run = ranks.start(argv, 2)
    run.wait_for(r"^\[CPU 1\] .*Step 3 ")
    workers = [p.pid for p in processes(ranks.test_id) if p.parent == run.pids[1]]
    os.kill(workers[0], signal.SIGKILL)
    ended = run.finish(NOTICED, expect=1)
    # PyTorch tells it in several ways, by what its main process was at.
    why = "DataLoader worker .*(killed|exited)|Connection reset"
    said(ended.output, rf"\[CPU 1\] ERROR: in .*step \d+: .*({why})")


def test_loader_workers_that_end_while_an_error_is_told(ranks, data):
    argv = [*FAST, *data, "--workers", 1]
    ended = ranks.run(argv, before=[lose_workers_and_tell_late], expect=1)
    assert the_error(ended) == "[CPU 0] ERROR: in step 1: Connection reset on purpose"


# The script, with a fault in one rank after a step.
BROKEN = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("demo", {str(SCRIPT)!r})
demo = sys.modules["demo"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(demo)
step = demo.train_step
def broken(run, micro_batches):
    if (run.process.rank, run.step) == (1, 3):
        raise LookupError("broken on purpose")
    try:
        return step(run, micro_batches)
    except RuntimeError:
        raise ValueError("a consequence") from None
demo.train_step = broken
demo.one_line_errors(demo.main)
"""


@LONG
def test_exception_on_one_rank_is_the_root_cause(data, folder):
    copy = folder / "copy"
    copy.mkdir()
    (copy / "tools").symlink_to(ROOT / "tools")
    for name in (LAUNCHER.name, "requirements.txt"):
        shutil.copy(ROOT / name, copy)
    (copy / SCRIPT.name).write_text(BROKEN)
    # with a loader worker, which Python's own exit would wait for
    argv = [*data, "--num_epochs", 99, "--workers", 1, "--timeout", 8]
    with launched(folder, argv, 2, copy / LAUNCHER.name) as run:
        ended = run.finish(180, expect=1)
    assert "LookupError: broken on purpose" in ended.output.splitlines()[-1], ended.tail()
    first = ended.output.index("Traceback")
    # PyTorch puts the rank before each line of a traceback.
    line = r"^(?:\[rank\d\]: )?\S*(Error|Exception)\b.*$"
    raised = re.search(line, ended.output[first:], re.MULTILINE)
    assert "broken on purpose" in raised[0], ended.tail()
    assert "ERROR: " not in ended.output[:first]
    assert "ValueError: a consequence" in ended.output[first:]


# What the script takes for an error from outside, each by what really raises it: Gloo's own path
# and "pair closure" and the types of a store's errors here; above and below a loader worker that
# is killed, a tiny /dev/shm and the limit of open files.


def outside(run: Run, rank: int = 0) -> str:
    """What a rank said of an error from outside; fails on a traceback."""
    assert "Traceback" not in run.output, run.tail()
    return said(run.output, rf"^\[CPU {rank}\] ERROR: in (the data of )?step \d+: ")


@LONG
def test_gloos_error_of_a_silent_peer_is_from_outside(ranks, data):
    run = ranks.start([*FAST, *data, "--num_epochs", 99, "--timeout", 3], 2)
    run.wait_for(r"^\[CPU 1\] .*Step 3 ")
    run.signal(1, signal.SIGSTOP)
    run.wait_for(r"^\[CPU 0\] ERROR: ", NOTICED)
    run.signal(1, signal.SIGKILL)
    line = outside(run.finish(NOTICED, expect=[1, -9]))
    assert "/gloo/" in line and "Timed out" in line, line


@LONG
def test_gloos_error_beside_one_of_a_silent_peer_is_from_outside(ranks, data):
    run = ranks.start([*FAST, *data, "--timeout", 3], 2, before=[two_sums_at_once])
    run.wait_for(r"^\[CPU 0\] ERROR: |Traceback", NOTICED)
    run.signal(1, signal.SIGKILL)
    line = outside(run.finish(NOTICED, expect=[1, -9]))
    assert "pair closure" in line and "/gloo/" not in line, line


@LONG
@pytest.mark.parametrize(("how", "why"), [("silent", "[Tt]ime"), ("gone", "connect")])
def test_error_of_the_store_is_from_outside(ranks, data, how, why):
    before = [partial(lose_the_store, how=how)]
    ended = ranks.run([*FAST, *data, "--timeout", 8], before=before, expect=1, timeout=NOTICED)
    assert re.search(why, outside(ended)), ended.tail()


@pytest.mark.parametrize(
    "text",
    ["worker of a DataLoader", *long("no store for this", "no space in the list", "bad socket")],
)
def test_bug_that_sounds_like_an_error_from_outside_keeps_its_traceback(ranks, data, folder, text):
    env = {"TORCHELASTIC_ERROR_FILE": str(folder / "error.json")}
    before = [partial(raise_in_step, text=text)]
    ended = ranks.run([*FAST, *data, "--workers", 1], before=before, env=env, expect=1)
    assert errors(ended) == []
    assert "Traceback (most recent call last)" in ended.output
    said(ended.output, f"RuntimeError: {text}$")
    found = error_file(folder / "error.json")
    assert (found["kind"], found["rank"], found["phase"]) == ("bug", 0, "step 2")
    assert found["text"] == f"[CPU 0] RuntimeError: {text}"


def bug_while_a_worker_has_its_lock(demo) -> None:
    """A bug in step 2, when a worker that is killed for it holds what Python's exit waits for."""
    step = demo.train_step

    def broken(run, micro_batches):
        if run.step == 1:
            run.loader._iterator._workers_done_event._cond.acquire()
            raise RuntimeError("a bug")
        return step(run, micro_batches)

    demo.train_step = broken


def test_bug_does_not_wait_for_a_lock_of_a_killed_worker(ranks, data):
    before = [bug_while_a_worker_has_its_lock]
    ended = ranks.run([*FAST, *data, "--workers", 1], before=before, expect=1, timeout=NOTICED)
    assert "RuntimeError: a bug" in ended.output


def error_file(path: Path) -> dict:
    """What a rank has left, in torchrun's own form: its text and the extra information."""
    content = json.loads(path.read_text())["message"]
    extra = content["extraInfo"]
    assert isinstance(extra["timestamp"], float) and 0 <= time.time() - extra["timestamp"] < 60
    return {"text": content["message"], **extra}


@pytest.mark.parametrize(
    ("argv", "code", "kind", "phase", "text"),
    [
        (["--lr", "0"], 2, "user", "start", ".*: error: --lr .*; see --help"),
        (
            ["--annotation_path", "none.json"],
            1,
            "user",
            "image list broadcast",
            r"ERROR: .*none\.json.*",
        ),
        ([], 1, "lost", "step 2", "ERROR: in step 2: .*"),
    ],
    ids=["arguments", "user", "lost"],
)
def test_error_file_tells_the_kind(ranks, data, folder, argv, code, kind, phase, text):
    path = folder / "error.json"
    env, before = {"TORCHELASTIC_ERROR_FILE": str(path)}, [partial(lose_the_store, how="gone")]
    ranks.run([*FAST, *data, *argv], before=before, env=env, expect=code)
    found = error_file(path)
    assert (found["kind"], found["rank"], found["phase"]) == (kind, 0, phase)
    assert re.fullmatch(rf"\[CPU 0\] {text}", found["text"]), found


def test_error_file_tells_a_stop(ranks, data, folder):
    path = folder / "error.json"
    env = {"TORCHELASTIC_ERROR_FILE": str(path)}
    argv = [*FAST, *data, "--num_epochs", 99, "--checkpoint", folder / "c.pt"]
    run = ranks.start(argv, env=env)
    run.wait_for(r"^\[CPU 0\] .*Step 1 ")
    run.signal(0, signal.SIGTERM)
    run.finish(15, expect=STOPPED)
    found = error_file(path)
    assert (found["kind"], found["rank"]) == ("asked", 0)
    assert re.fullmatch(r"\[CPU 0\] Stopped on SIGTERM \| step \d+ \| exit code 75", found["text"])


def test_error_file_is_not_there_after_a_good_run(ranks, data, folder):
    path = folder / "error.json"
    env = {"TORCHELASTIC_ERROR_FILE": str(path)}
    ranks.run([*FAST, *data, "--max_steps", 1], env=env)
    assert not path.exists()


def test_error_file_that_cannot_be_written_hides_nothing(ranks, data, folder):
    env = {"TORCHELASTIC_ERROR_FILE": str(folder / "nowhere" / "error.json")}
    ended = ranks.run([*FAST, *data, "--annotation_path", "none.json"], env=env, expect=1)
    assert "none.json" in the_error(ended)


def test_tiny_shared_memory_lowers_the_number_of_workers(ranks, data):
    """Unless it was given: then the line says how to mend it."""
    require(os.geteuid() == 0, "a /dev/shm of its own needs root")
    argv = [part for part in FAST if part not in ("--workers", "0")]
    argv += [*data, "--batch_size", 10, "--max_steps", 2]  # a batch takes 47 KB
    tiny, less = (partial(small_shm, size=size) for size in ("40k", "100k"))
    ended = ranks.run(argv, before=[tiny])
    assert ended.json_line("Run")["workers"] == 0 and len(ended.steps()) == 2
    line = r"^\[CPU 0\] WARNING: /dev/shm has .*: --workers 0 in place of 1; .*--shm-size=1g"
    assert len(re.findall(line, ended.out, re.MULTILINE)) == ended.out.count("WARNING") == 1
    # Enough for one process, but not for each of two; without a limit; closed to all who write.
    for size, nproc, warnings in (("240k", 1, 0), ("240k", 2, 1), ("0", 1, 0), ("64m,ro", 1, 1)):
        before = [partial(small_shm, size=size), end_after_arguments]
        ended = ranks.run(argv, nproc, before=before)
        assert len(re.findall(line, ended.out, re.MULTILINE)) == warnings, size
    ended = ranks.run([*argv, "--workers", 3], before=[tiny], expect=1)
    assert re.search("/dev/shm .* --shm-size=1g.* --workers 0", the_error(ended))
    ended = ranks.run([*argv, "--workers", 3], before=[less, end_after_arguments])
    said(ended.output, "WARNING: /dev/shm .* --workers 3 may end by a bus error; .*--shm-size")


@LONG
def test_workers_that_the_shared_memory_has_room_for_do_not_fill_it(ranks, data):
    """Two batches of each, of this step and the one before: a little more, and none is missing."""
    require(os.geteuid() == 0, "a /dev/shm of its own needs root")
    argv = [*FAST, *data, "--image_size", 224, "--batch_size", 4, "--accumulate_steps", 2]
    argv += ["--workers", 2, "--max_steps", 3]
    batch = 4 * 3 * 224 * 224
    fits = partial(small_shm, size=str(8 * batch + 2**16))  # and what is not of batches
    ended = ranks.run(argv, before=[fits], call=slow_first_step)
    assert "/dev/shm" not in ended.out and len(ended.steps()) == 3


@LONG
def test_shared_memory_that_is_filled_by_others_is_one_line(ranks, data):
    """Later than the check: the kernel ends the worker, and PyTorch says of what it died."""
    require(os.geteuid() == 0, "a /dev/shm of its own needs root")
    argv = [*FAST, *data, "--workers", 1, "--image_size", 224, "--batch_size", 12]
    before = [partial(small_shm, size="16m"), fill_shm_later]
    ended = ranks.run(argv, before=before, expect=1, timeout=40)
    said(ended.output, "ERROR: in .*shared memory")


@LONG
def test_few_open_files(ranks, data):
    argv = [*FAST, *data, "--workers", 1, "--max_steps", 3]
    ranks.run(argv, before=[partial(few_files, limit=64)], timeout=40)
    ended = ranks.run(argv, before=[partial(few_files, limit=16)], expect=1, timeout=40)
    said(ended.output, "ERROR: in .*[Tt]oo many open files")


@pytest.mark.parametrize(
    ("nproc", "fault", "step", "words"),
    [
        # The loss shows it one step later, when the bad weights could have been saved.
        (1, partial(bad_gradient, step=2), 2, "step [23]"),
        pytest.param(
            2,
            partial(not_a_number, rank=1, step=3),
            3,
            "a loss up to step [34] is not finite: lower --lr",
            marks=LONG,
        ),
    ],
    ids=["update", "loss of one rank"],
)
def test_what_is_not_finite_is_not_saved(ranks, data, folder, nproc, fault, step, words):
    path = folder / "c.pt"
    argv = [*FAST, *data, "--checkpoint", path, "--checkpoint_every", step - 1, "--timeout", 20]
    line = the_error(ranks.run(argv, nproc, before=[fault], expect=1))
    assert re.search(words, line)
    state = saved_in(path)
    assert (state["step"], state["not_finite"]) == (step - 1, [])


@LONG
def test_weights_that_explode(ranks, data, folder):
    path = folder / "c.pt"
    argv = [*FAST, *data, "--checkpoint", path, "--checkpoint_every", 1, "--lr", "1e9"]
    ended = ranks.run(argv, expect=1)
    step = int(re.search(r"step (\d+)", the_error(ended))[1])
    if path.exists():
        state = saved_in(path)
        assert state["step"] < step
        assert state["not_finite"] == []


# --- Storage ---------------------------------------------------------------------------------


def test_full_disk(ranks, data, folder):
    with small_disk(folder / "disk", FOR_ONE_CHECKPOINT) as disk:
        path = disk / "c.pt"
        argv = [*FAST, *data, "--checkpoint", path, "--checkpoint_every", 1, "--max_steps", 3]
        ended = ranks.run(argv, expect=1)
        line = the_error(ended)
        assert str(path) in line
        assert "No space left" in line
        said(ended.output, r"WARNING: .*not saved at step 2")
        assert [step for _, step, _ in ended.steps()] == [1, 2, 3], "the run went on"
        assert saved_in(path)["step"] == 1
        assert sorted(os.listdir(disk)) == ["c.pt", "c.pt.lock"]


@LONG
def test_read_only_folder(ranks, data, folder):
    with small_disk(folder / "disk", "1m") as disk:
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        argv = [*FAST, *data, "--checkpoint", disk / "c.pt", "--max_steps", 2]
        ended = ranks.run(argv, 2, expect=1)
        line = the_error(ended)
    assert str(disk) in line
    assert "Read-only file system" in line


@pytest.fixture(scope="module")
def saved(demo, data, tmp_path_factory) -> Iterator[Path]:
    """A checkpoint after step 1."""
    folder = tmp_path_factory.mktemp("saved")
    demo.run([*FAST, *data, "--checkpoint", folder / "c.pt", "--max_steps", 1])
    yield folder / "c.pt"
    shutil.rmtree(folder)


def bad_file(demo, result, kind, good, path, payload):
    import torch

    good, path = Path(good), Path(path)
    if kind == "truncated":
        path.write_bytes(good.read_bytes()[: good.stat().st_size * 2 // 3])
    elif kind == "empty":
        path.touch()
    elif kind == "text":
        path.write_text("not a checkpoint\n" * 100)
    elif kind == "list":
        torch.save([1, 2, 3], path)
    elif kind == "other run":
        torch.save({"model": {"layer.weight": torch.zeros(3)}, "epoch": 3}, path)
    elif kind == "incomplete":
        torch.save({k: v for k, v in load(good).items() if k != "optimizer"}, path)
    elif kind == "other model":
        state = load(good)
        state["model"]["fc.bias"] = torch.zeros(7)
        torch.save(state, path)
    elif kind == "malicious":
        torch.save({"model": {}, "epoch": Payload(Path(payload))}, path)
    elif kind == "malicious pickle":
        path.write_bytes(pickle.dumps(Payload(Path(payload)), protocol=2))


@pytest.mark.parametrize(
    "kind",
    [
        *["truncated", "incomplete", "malicious"],
        *long("empty", "text", "list", "other run", "other model", "malicious pickle"),
    ],
)
def test_bad_checkpoint(ranks, data, folder, saved, kind):
    path, payload = folder / "c.pt", folder / "payload"
    files = {"good": str(saved), "path": str(path), "payload": str(payload)}
    ranks.run(call=bad_file, kind=kind, **files)
    before = path.read_bytes()
    argv = [*FAST, *data, "--checkpoint", path, "--resume", "--max_steps", 4, "--timeout", 20]
    ended = ranks.run(argv, 1 if kind != "truncated" else 2, expect=1)
    assert str(path) in the_error(ended)
    assert not payload.exists(), "code in the file was run"
    assert path.read_bytes() == before


def digest(state: dict) -> str:
    """Of the weights and of Adam's averages: a mixture of two files is none of the two."""
    found = hashlib.sha256()
    averages = [v["exp_avg"] for v in state["optimizer"]["state"].values()]
    for value in [*state["model"].values(), *averages]:
        found.update(value.numpy().tobytes())
    return found.hexdigest()


@LONG
def test_same_run_twice_at_once(ranks, data, folder):
    """Both write the same bytes at each step, so what is on the disk is known at any moment."""
    path = folder / "c.pt"
    argv = [*FAST, *data, "--checkpoint", path, "--checkpoint_every", 1, "--max_steps", 5]
    both = [ranks.start(argv)]
    both[0].wait_for("Step 1 ")
    both.append(ranks.start(argv))
    loaded: dict[int, set[str]] = {}
    while both[0].running() or both[1].running():
        if path.exists():
            state = load(path)
            loaded.setdefault(state["step"], set()).add(digest(state))
        time.sleep(0.02)
    ended = [run.finish(expect=None) for run in both]
    text = "".join(run.output for run in ended)
    assert "Traceback" not in text and "WARNING" not in text, text[-3000:]
    assert loaded
    assert all(len(found) == 1 for found in loaded.values()), loaded
    assert saved_in(path)["step"] == 5
    codes = [run.returncode for run in ended]
    assert codes in ([0, 0], [0, 1])
    if any(codes):
        the_error(ended[1])


# --- Resume ----------------------------------------------------------------------------------


@LONG
def test_fp16_scales_its_loss_and_goes_on_with_that_scale(ranks, data, folder):
    """Its range is small: the loss is scaled, and a step whose gradients overflow is left out."""
    path = folder / "c.pt"
    argv = [*FAST, *data, "--precision", "fp16", "--checkpoint", path, "--resume"]
    scales = []
    for steps in (2, 4):
        run = ranks.run([*argv, "--max_steps", steps])
        assert all(0 < loss < 20 for _, _, loss in run.steps(0))
        state = saved_in(path)
        assert state["not_finite"] == []
        scales.append((state["scaler"]["scale"], state["scaler"]["_growth_tracker"]))
    (first, good), later = scales
    # A step that overflows halves the scale; how many of the first ones do, the machine decides.
    assert first * 2 ** (2 - good) == 2**16
    assert later == (first, good + 2)


@pytest.mark.parametrize(
    ("nproc", "every", "stops"),
    [(2, 3, [3]), pytest.param(1, 1, [1, 3], marks=LONG)],
    ids=["2 ranks", "1 rank, two stops"],
)
def test_interrupted_and_resumed_equals_uninterrupted(ranks, folder, nproc, every, stops):
    """Bit for bit, with a worker and accumulation; stopped in mid-epoch, of three epochs."""
    path, data = folder / "c.pt", make_set(folder / "set", 16)
    sizes = ["--global_batch_size", 8, "--accumulate_steps", 2, "--workers", 1, "--timeout", 20]
    argv = [*FAST, *data, *sizes, "--num_epochs", 3, "--max_steps", 5]
    whole = ranks.run(argv, nproc)
    facts = whole.json_line("Run")
    assert (facts["max_steps"], facts["steps_per_epoch"]) == (5, 2)
    argv += ["--checkpoint", path, "--resume", "--checkpoint_every", every]  # then they agree, too
    parts = []
    for step in stops:
        before = [partial(stop_signal, rank=nproc - 1, step=step)]
        parts.append(ranks.run(argv, nproc, before=before, expect=STOPPED))
        assert assert_stopped(parts[-1].output, "SIGTERM", path, nproc) == step
    parts.append(ranks.run(argv, nproc))
    assert "starts afresh" in parts[0].output
    for part in parts[1:]:
        said(part.output, "Resumed from .* step")
    for rank in range(nproc):
        assert [line for part in parts for line in part.steps(rank)] == whole.steps(rank)
    ends = [run.json_line("Summary") for run in (whole, parts[-1])]
    for name in ("weights_sha256", "steps"):
        assert ends[0][name] == ends[1][name], name
    for rank in range(nproc):  # of a resumed epoch, the mean of the steps since
        ends = re.findall(
            r"Epoch (\d) complete \| Avg loss: ([\d.]+)", "\n".join(parts[-1].lines(rank))
        )
        for epoch, loss in ends:
            own = [loss for number, _, loss in parts[-1].steps(rank) if number == int(epoch)]
            assert float(loss) == pytest.approx(np.mean(own), abs=2e-4)


@LONG
def test_resume_with_another_number_of_ranks(ranks, folder):
    path, data = folder / "c.pt", make_set(folder / "set", 16)  # 4 steps an epoch
    argv = [*FAST, *data, "--global_batch_size", 4, "--checkpoint", path, "--timeout", 20]
    ranks.run([*argv, "--max_steps", 3], 2)
    ended = ranks.run([*argv, "--resume", "--max_steps", 6], 1)
    said(ended.output, "Resumed from .* at step 3$")
    assert [step for _, step, _ in ended.steps()] == [4, 5, 6]
    ended = ranks.run([*argv, "--resume", "--max_steps", 7], 2)
    said(ended.output, "Resumed from .* at step 6$")


@pytest.mark.parametrize(
    ("option", "then", "now"),
    [
        ("--lr", "0.001", "0.002"),
        ("--precision", "fp32", "bf16"),
        ("data set", "", ""),
        ("sizes of the images", "", ""),  # of the same names and labels
        pytest.param("--seed", "0", "3", marks=LONG),
        pytest.param("--image_size", "40", "64", marks=LONG),
        pytest.param("--global_batch_size", "4", "8", marks=LONG),
    ],
)
def test_resume_with_something_changed_is_refused(ranks, data, folder, saved, option, then, now):
    before, other = saved.read_bytes(), folder / "other"
    if now:
        argv = [*FAST, *data, f"{option}={now}"]
    elif option == "data set":
        argv = [*FAST, *make_set(other, 40)]
    else:
        argv = [*FAST, *make_set(other, 48, size=(42, 35))]
    ended = ranks.run([*argv, "--checkpoint", saved, "--resume", "--max_steps", 5], expect=1)
    line = the_error(ended)
    if now:
        assert all(part in line for part in (option.strip("-"), then, now)), line
        assert line.endswith(f"give {option} {then}"), line
    else:
        assert re.search(rf"has {option} \w{{12}}, not \w{{12}}: use the same$", line), line
    assert saved.read_bytes() == before


@LONG
def test_rate_by_the_linear_rule_is_what_a_resumed_run_shares(ranks, data, saved):
    """That of the checkpoint is 0.001, of 4 images a step."""
    argv = [*FAST, *data, "--checkpoint", saved, "--resume", "--max_steps", 1]
    scaled = [*argv, "--lr_scaling", "linear", "--lr"]
    assert "Resumed from" in ranks.run([*scaled, 0.016]).out
    line = the_error(ranks.run([*scaled, 0.001], expect=1))
    assert line.endswith("has --lr 0.001, not 6.25e-05: give --lr 0.001 without --lr_scaling")


def without_sync_bn(demo, result, path, value):
    """Changes a checkpoint: made with --sync_bn, or before there was such an option (None)."""
    state = load(Path(path))
    state["facts"]["--sync_bn"] = value
    if value is None:
        del state["facts"]["--sync_bn"]
    demo.torch.save(state, path)


@pytest.mark.parametrize("value", [None, *long(True)])
def test_checkpoint_from_before_an_option_was_made_without_it(
    demo, ranks, data, folder, saved, value
):
    path = shutil.copy(saved, folder / "c.pt")
    argv = [*FAST, *data, "--checkpoint", path, "--resume", "--max_steps", 1]
    demo.run(call=without_sync_bn, path=str(path), value=value)
    ended = ranks.run(argv, expect=int(value is not None))
    if value is None:
        assert "Resumed from" in ended.out
    else:
        assert the_error(ended).endswith("has --sync_bn True, not False: give --sync_bn")


@LONG
def test_run_record_tells_pictures_of_another_size(ranks, data, folder):
    """As compare_logs refuses to compare such runs; other pixels alone make no difference."""
    sets = [data, make_set(folder / "a", 48, size=(42, 35)), make_set(folder / "b", 48, seed=1)]
    runs = [ranks.run([*FAST, *options, "--max_steps", 1]) for options in sets]
    usual, smaller, others = (run.json_line("Run")["picture_sizes"] for run in runs)
    assert usual == others != smaller


def test_resume_of_a_finished_run_does_nothing(ranks, data, saved):
    before = saved.read_bytes()
    ended = ranks.run([*FAST, *data, "--checkpoint", saved, "--resume", "--max_steps", 1])
    assert not ended.steps()
    assert ended.json_line("Summary")["steps"] == 1
    assert saved_in(saved)["step"] == 1
    assert len(before) == saved.stat().st_size


@LONG
def test_resume_at_the_end_of_an_epoch_has_no_mean_loss_of_it(ranks, data, folder):
    argv = [*FAST, *data, "--batch_size", 24, "--num_epochs", 1, "--checkpoint", folder / "c.pt"]
    first, again = ranks.run(argv), ranks.run([*argv, "--resume"])
    assert "Epoch 1 complete | Avg loss: " in first.output
    assert "Resumed from" in again.output and "Epoch 1 complete" not in again.output


# --- Restarts --------------------------------------------------------------------------------


ENDURANCE = pytest.mark.skipif(
    os.environ.get("DEMO_ENDURANCE") != "1", reason="takes long: set DEMO_ENDURANCE=1"
)


def hit(nodes: NamespacePair, runs: list[Started], what: str, node: int) -> None:
    """Kill something on a node, or cut the link for longer than the script's --timeout."""
    if what == "link":
        nodes.link_down(node)
        time.sleep(10)
        nodes.link_up(node)
    elif what == "rank":
        os.kill(runs[node].rank_pid(node), signal.SIGKILL)
    else:
        os.kill(main_pid(runs[node]), signal.SIGKILL)


def endure(
    argv: Sequence[object], folder: Path, steps: int, hits: Sequence[str], seed: int
) -> list[Run]:
    """A run on two nodes that is hit at random steps, and at random moments after these."""
    rng = random.Random(seed)
    every = steps // (len(hits) + 1)
    plan = [
        (every * (n + 1) - rng.randrange(every // 2), what, rng.randrange(2), rng.random())
        for n, what in enumerate(hits)
    ]
    print(f"seed {seed}: {plan}")
    path = folder / "run" / "c.pt"
    with NamespacePair() as nodes:
        env = {"RESTARTS": str(len(hits))}
        more = ["--checkpoint", path, "--checkpoint_every", 5, "--timeout", 6]
        runs = on_two_nodes(nodes, [*argv, *more], env, folder=folder)
        for number, (step, what, node, pause) in enumerate(plan):
            begin = time.monotonic()
            while not (attempts(runs) >= number and last_step_of_attempt(runs) >= step):
                if any(run.process.poll() is not None for run in runs):
                    break
                if time.monotonic() - begin > 120:
                    break
                time.sleep(0.02)
            time.sleep(pause)
            if any(run.process.poll() is not None for run in runs):
                break
            hit(nodes, runs, what, node)
        return [run.finish(180, expect=None) for run in runs]


def attempts(runs: list[Started]) -> int:
    """The number of restarts that both nodes have begun, with a first step."""
    return min(len(re.findall(r"launch_multinode.sh: restart \d+ of", r.text())) for r in runs)


def last_step_of_attempt(runs: list[Started]) -> int:
    steps = []
    for run in runs:
        found = re.findall(
            r"\| Step (\d+) ", re.split(r"launch_multinode.sh: restart \d+ of", run.text())[-1]
        )
        steps.append(int(found[-1]) if found else 0)
    return min(steps)


@pytest.mark.parametrize(
    ("epochs", "hits"), [pytest.param(7, 3, marks=LONG), pytest.param(60, 12, marks=ENDURANCE)]
)
def test_endurance(demo, data, folder, epochs, hits):
    seed, argv = int(os.environ.get("DEMO_SEED", "1")), [*data, "--num_epochs", epochs]
    whole = demo.run([*FAST, *argv, "--timeout", 30], 2, timeout=10 * epochs + 100)
    kinds = ["rank", "torchrun", "link"]
    kinds = kinds if hits == 3 else random.Random(seed).choices(kinds, k=hits)
    runs = endure(argv, folder, 6 * epochs, kinds, seed)
    shown = "\n".join(run.tail(40) for run in runs)
    assert [run.returncode for run in runs] == [0, 0], shown
    sha = whole.json_line("Summary")["weights_sha256"]
    assert runs[0].json_line("Summary")["weights_sha256"] == sha
    text = runs[0].output
    assert len(re.findall(r"restart \d+ of \d+ after", text)) == hits, shown
    repeated = r"restart \d+ went on from step \d+.*: \d+ steps repeated"
    assert len(re.findall(repeated, text)) == hits, shown
