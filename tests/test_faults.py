"""What a run does when something goes wrong: one fault a test, with real processes.

Most ranks are forked from one Python that has the script imported (`Nursery`), in namespaces where
a test needs two nodes: importing torch takes seconds, and these tests are many. Where torchrun or
the launcher is what is hit, or what has to notice, the real one is started.

DEMO_ENDURANCE=1 adds the long form of the endurance test; DEMO_SEED chooses another seed for it.
DEMO_SCRIPT puts another copy of the script to the tests of forked ranks.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import importlib.util
import json
import os
import pickle
import random
import re
import resource
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import cluster as helpers
import numpy as np
import pytest
from PIL import Image

SCRIPT = Path(os.environ.get("DEMO_SCRIPT", helpers.SCRIPT))
FAST = shlex.split("--weights none --image_size 40 --batch_size 4 --workers 0 --precision fp32")
FAST += ["--log_every", "1"]
STOPPED = 75  # the script's exit code after a stop signal
NOTICED = 20  # seconds: a silent peer is noticed after --timeout 8, the rest is a slow machine


# --- Forked processes ------------------------------------------------------------------------


def serve(script: str) -> None:
    """In the process that has the script imported: fork a rank for each JSON line on stdin.

    Writes [process id, None] for each start and [process id, exit code] for each end. In a forked
    process this returns, so that it ends as any Python does, after its work.
    """
    spec = importlib.util.spec_from_file_location("demo", script)
    demo = sys.modules["demo"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    # An optimizer imports this when it is made: once here, not in each process.
    importlib.import_module("torch._dynamo")
    gc.freeze()  # a collection in a forked process would copy every page
    print("[0, null]", flush=True)
    unread = b""
    while True:
        if select.select([0], [], [], 0.02)[0]:
            piece = os.read(0, 65536)
            if not piece:
                return None
            *lines, unread = (unread + piece).split(b"\n")
            for line in lines:
                pid = os.fork()
                if pid == 0:
                    return become(demo, script, **json.loads(line))
                print(json.dumps([pid, None]), flush=True)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                code = os.waitstatus_to_exitcode(ended[1])
                print(json.dumps([ended[0], code]), flush=True)


def become(demo, script, argv, env, cwd, out, node, before, call) -> None:
    """In a forked process: be the script, or the function `call`, after each of `before`."""
    helpers.enter_process(script, argv, env, cwd, out, out)
    if node:
        enter_node(**node)
    for name, options in before:
        globals()[name](demo, **options)
    if call:
        globals()[call[0]](demo, **call[1])
    else:
        demo.one_line_errors(demo.main)


def own_namespaces(*flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(sum(flags)):
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)


NEW_MOUNTS, NEW_HOSTNAME = 0x20000, 0x4000000  # CLONE_NEWNS, CLONE_NEWUTS of <sched.h>


def enter_node(netns: str, hostname: str, hosts: str) -> None:
    """Make this process one of a node of a `NamespacePair`."""
    descriptor = os.open(f"/run/netns/{netns}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, 0):
        raise OSError(ctypes.get_errno(), "setns")
    os.close(descriptor)
    own_namespaces(NEW_MOUNTS, NEW_HOSTNAME)
    socket.sethostname(hostname)
    subprocess.run(["mount", "--bind", hosts, "/etc/hosts"], check=True)


# What a test does to a forked process before the script starts in it. --------------------------


def small_shm(demo, size: str) -> None:
    own_namespaces(NEW_MOUNTS)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", "/dev/shm"], check=True)


def few_files(demo, limit: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))


def slowly(demo, seconds: float) -> None:
    """Each step takes longer, so that a signal surely arrives in the middle of an epoch."""
    step = demo.train_step

    def slow(run, micro_batches):
        time.sleep(seconds)
        return step(run, micro_batches)

    demo.train_step = slow


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


def save_again_and_again(demo) -> None:
    """In the place of a run: saves without end, and says which step has been saved."""
    run = helpers.prepared(demo)
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
            host, port, wait = "127.0.0.1", helpers.free_port(), timedelta(seconds=1)
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


class Ranks:
    """Forked ranks at work, all writing to one file."""

    def __init__(self, nursery: Nursery, requests: list[dict], out: Path) -> None:
        self._nursery, self._out = nursery, out
        self._begin = time.monotonic()
        self.pids = [nursery.fork(request) for request in requests]
        self.command = [str(SCRIPT), *requests[0]["argv"]]

    def text(self) -> str:
        return self._out.read_text(errors="replace") if self._out.exists() else ""

    def codes(self) -> list[int | None]:
        """The exit code of each rank, None while it runs."""
        self._nursery.listen(0)
        return [self._nursery.ended.get(pid) for pid in self.pids]

    def wait_for(self, pattern: str, timeout: float = 60) -> re.Match:
        """The first match of `pattern` (multi-line mode) in the output."""
        deadline = time.monotonic() + timeout
        while True:
            over = None not in self.codes() or time.monotonic() > deadline
            if match := re.search(pattern, self.text(), re.MULTILINE):
                return match
            if over:
                self.fail(f"no {pattern!r} in the output")
            time.sleep(0.02)

    def signal(self, rank: int, number: int) -> None:
        os.kill(self.pids[rank], number)

    def run(self) -> helpers.Run:
        codes = [code for code in self.codes() if code is not None]
        seconds = time.monotonic() - self._begin
        code = max(codes, key=abs, default=0)
        return helpers.Run(self.command, code, self.text(), seconds, self._nursery.test_id)

    def fail(self, why: str) -> None:
        codes = self.codes()
        self._nursery.clear()
        pytest.fail(f"{why}; exit codes {codes}\n{self.run().tail()}")

    def finish(
        self, timeout: float = 60, expect: int | list[int] | None = 0, clean: bool = True
    ) -> helpers.Run:
        """Wait until all have ended; fails after `timeout` seconds, on other exit codes than
        `expect` (None: any), and, unless not `clean`, on a process that is left.
        """
        deadline = time.monotonic() + timeout
        while None in self.codes():
            if time.monotonic() > deadline:
                self.fail(f"still running after {timeout:g} s")
            time.sleep(0.02)
        wanted = [expect] * len(self.pids) if isinstance(expect, int) else expect
        if wanted is not None and self.codes() != wanted:
            self.fail(f"exit codes are not {wanted}")
        if clean:
            self._nursery.none_left()
        return self.run()


class Nursery(helpers.ForkServer):
    """Ranks that are forked one by one, and hit while they work."""

    file, script = __file__, SCRIPT  # this file, as a script: see its last lines

    def _ready(self) -> None:
        self.ended: dict[int, int] = {}
        self._unread, self._started = b"", []
        self._next_start(120)

    def listen(self, timeout: float) -> None:
        while select.select([self._server.stdout], [], [], timeout)[0]:
            piece = os.read(self._server.stdout.fileno(), 65536)
            if not piece:
                raise RuntimeError(self._why())
            *lines, self._unread = (self._unread + piece).split(b"\n")
            for pid, code in map(json.loads, lines):
                if code is None:
                    self._started.append(pid)
                else:
                    self.ended[pid] = code
            timeout = 0

    def _next_start(self, timeout: float = 20) -> int:
        deadline = time.monotonic() + timeout
        while not self._started:
            self.listen(0.1)
            assert time.monotonic() < deadline, "the process that forks does not answer"
        return self._started.pop(0)

    def fork(self, request: dict) -> int:
        self._send(request)
        return self._next_start()

    def start(
        self,
        argv: Sequence[object],
        nproc: int = 1,
        of_rank: Callable[[int], Sequence[object]] = lambda _: (),
        nodes: helpers.NamespacePair | None = None,
        env: Mapping[str, str] | None = None,
        before: Sequence[tuple[str, dict]] = (),
        call: tuple[str, dict] | None = None,
        only: Sequence[int] | None = None,
        out: Path | None = None,
    ) -> Ranks:
        """Start the script, or a function of this file in its place, with `nproc` ranks.

        One rank alone gets no variables, as from plain python. `of_rank(r)` are further arguments
        of one rank, `nodes` puts each rank on a node of its own, `only` starts some ranks only.
        """
        self._jobs += 1
        out = out or self.folder / f"out{self._jobs}"
        port, requests = str(helpers.free_port()), []
        for rank in range(nproc) if only is None else only:
            places: dict[str, str] = {}
            if nproc > 1:
                local = (0, 1) if nodes else (rank, nproc)
                master = nodes.addresses[0] if nodes else "127.0.0.1"
                places.update(RANK=str(rank), WORLD_SIZE=str(nproc), MASTER_PORT=port)
                places.update(LOCAL_RANK=str(local[0]), LOCAL_WORLD_SIZE=str(local[1]))
                places.update(MASTER_ADDR=master)
            node = nodes and {
                "netns": nodes.names[rank],
                "hostname": nodes.hostnames[rank],
                "hosts": str(nodes.hosts(rank)),
            }
            requests.append(
                {
                    "argv": [str(arg) for arg in [*argv, *of_rank(rank)]],
                    "env": helpers.base_env(self.test_id, {**places, **(env or {})}),
                    "cwd": str(self.folder),
                    "out": str(out),
                    "node": node,
                    "before": list(before),
                    "call": call,
                }
            )
        return Ranks(self, requests, out)

    def run(self, argv: Sequence[object], nproc: int = 1, **options: Any) -> helpers.Run:
        """Start ranks and wait for their end, with the options of `start` and `Ranks.finish`."""
        ending = {k: options.pop(k) for k in ("timeout", "expect", "clean") if k in options}
        return self.start(argv, nproc, **options).finish(**ending)


# --- Fixtures and helpers --------------------------------------------------------------------


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as running:
        yield running


@pytest.fixture
def ranks(nursery: Nursery) -> Iterator[Nursery]:
    """The nursery; whatever a test has left running in it is killed."""
    yield nursery
    nursery.clear()


def make_set(folder: Path, count: int, seed: int = 0, side: int = 8) -> list[str]:
    """Small pictures in COCO's layout, because the time here goes to faults, not to decoding;
    returns the script's options for them. A picture has 6 x 6 squares of `side` pixels.
    """
    rng = np.random.default_rng(seed)
    (folder / "images").mkdir(parents=True)
    images, annotations = [], []
    for number in range(1, count + 1):
        pixels = rng.integers(0, 256, (6, 6, 3), dtype=np.uint8).repeat(side, 0).repeat(side, 1)
        Image.fromarray(pixels).save(folder / "images" / f"{number:04}.jpg")
        images.append({"id": number, "file_name": f"{number:04}.jpg", "width": 48, "height": 48})
        box = {"bbox": [1, 1, 9, 9], "area": 81, "iscrowd": 0, "segmentation": []}
        annotations.append({"id": number, "image_id": number, "category_id": number % 5 + 1} | box)
    categories = [{"id": i, "name": f"kind {i}"} for i in range(1, 6)]
    content = {"images": images, "annotations": annotations, "categories": categories}
    (folder / "instances.json").write_text(json.dumps(content))
    return [f"--coco_image_path={folder}/images", f"--annotation_path={folder}/instances.json"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options for 48 images."""
    return make_set(tmp_path_factory.mktemp("data") / "set", 48)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder that is gone after the test: a checkpoint has 135 MB."""
    yield tmp_path
    shutil.rmtree(tmp_path, ignore_errors=True)


@contextlib.contextmanager
def mounted(folder: Path, size: str) -> Iterator[Path]:
    """A disk of its own, of a size such as "64m"."""
    helpers.require(os.geteuid() == 0, "mounting a small disk needs root")
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder]
    done = subprocess.run(command, capture_output=True, text=True)
    helpers.require(done.returncode == 0, f"a disk cannot be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=False)


def load(path: Path) -> dict:
    """A checkpoint, as plain values."""
    import torch

    return torch.load(path, weights_only=True, map_location="cpu")


def assert_finite(state: dict) -> None:
    import torch

    for name, value in state["model"].items():
        if "running_" in name:  # statistics of images that a diverging network has seen
            continue
        assert torch.isfinite(value.double()).all(), f"{name} is not finite"


def errors(run: helpers.Run) -> list[str]:
    """The lines by which the ranks say what is wrong."""
    return [line for line in run.out.splitlines() if re.match(r"\[CPU \d+\] ERROR: ", line)]


def the_error(run: helpers.Run) -> str:
    """The one line that says what is wrong; fails where it is not alone."""
    found = errors(run)
    assert len(found) == 1, run.tail()
    assert "Traceback" not in run.out, run.tail()
    return found[0]


def torchrun(argv: Sequence[object], nproc: int = 2, **options: Any) -> helpers.Started:
    return helpers.start(helpers.demo_command([*FAST, *argv], nproc), **options)


def on_two_nodes(
    nodes: helpers.NamespacePair,
    argv: Sequence[object],
    env: Mapping[str, str] | None = None,
    of_node: Callable[[int], Mapping[str, str]] = lambda _: {},
    only: Sequence[int] = (0, 1),
    launcher: Path = helpers.ROOT / "launch_multinode.sh",
    folder: Path | None = None,
) -> list[helpers.Started]:
    """The launcher on each node, one rank each."""
    started = []
    for node in only:
        variables = {"NNODES": "2", "NODE_RANK": str(node), "MASTER_ADDR": nodes.addresses[0]}
        variables |= {"GPUS_PER_NODE": "1", "CONNECT_TIMEOUT": "40", "LOG_DIR": str(folder)}
        variables |= {"RUN_NAME": "run", "PYTHON": sys.executable, "PROBE": "0"}
        variables |= {**(env or {}), **of_node(node)}
        command = ["bash", launcher, *FAST, *argv]
        started.append(nodes.popen(node, command, env=variables))
    return started


def main_pid(started: helpers.Started) -> int:
    """Process id of the torchrun under a launcher, or of the command itself if that is it."""
    found = [p for p in helpers.processes(started.test_id) if "distributed.run" in p.command]
    found = [
        p for p in found if p.command.split()[1:2] == ["-m"]
    ]  # not supervise.py, which names it
    assert len(found) == 1, found
    return found[0].pid


def said(text: str, pattern: str) -> str:
    """The line of a text that matches; fails without."""
    match = re.search(f"^.*(?:{pattern}).*$", text, re.MULTILINE)
    assert match, f"no {pattern!r} in:\n{text[-6000:]}"
    return match[0]


# --- Killed ----------------------------------------------------------------------------------


def test_sigkill_of_a_rank_on_one_node(data):
    with torchrun([*data, "--num_epochs", 99, "--timeout", 8]) as run:
        run.wait_for(r"^\[CPU 1\] .*Step 3 ")
        os.kill(run.rank_pid(1), signal.SIGKILL)
        ended = run.finish(NOTICED, expect=1)
    assert "SIGKILL" in ended.out
    said(ended.out, r"\[CPU 0\] ERROR: .*step \d+")


def test_sigkill_of_a_rank_on_two_nodes(ranks, data):
    with helpers.NamespacePair() as nodes:
        argv = [*FAST, *data, "--num_epochs", 99, "--timeout", 8]
        run = ranks.start(argv, 2, nodes=nodes)
        run.wait_for(r"^\[CPU 1\] .*Step 3 ")
        run.signal(1, signal.SIGKILL)
        ended = run.finish(NOTICED, expect=[1, -9])
    assert re.search(r"step \d+", the_error(ended))


def test_sigkill_of_one_nodes_torchrun(data, folder):
    with helpers.NamespacePair() as nodes:
        argv = [*data, "--num_epochs", 99, "--timeout", 8, "--checkpoint", folder / "c.pt"]
        first, second = on_two_nodes(nodes, argv, folder=folder)
        second.wait_for(r"^\[CPU 1\] .*Step 3 ")
        os.kill(main_pid(second), signal.SIGKILL)
        second = second.finish(40, expect=None)
        first = first.finish(40, expect=None)
    assert 0 < first.returncode != STOPPED, first.tail()
    assert second.returncode not in (0, STOPPED), second.tail()
    said(second.out, "torchrun was ended by signal 9")
    step = int(re.search(r"\d+", said(first.out, r"\] Stopped").partition("step")[2])[0])
    assert load(folder / "c.pt")["step"] == step


@helpers.LONG
@pytest.mark.parametrize("seed", [1])
def test_sigkill_while_a_checkpoint_is_written(ranks, data, folder, seed):
    rng, path, partial, seen = random.Random(seed), folder / "c.pt", 0, 0
    argv = [*FAST, *data, "--checkpoint", path]
    for _ in range(24):
        out = folder / "out"
        out.unlink(missing_ok=True)
        run = ranks.start(argv, call=("save_again_and_again", {}), out=out)
        begin = time.monotonic()
        run.wait_for("^saved 1$")
        run.wait_for("^saved 2$")
        pause = (time.monotonic() - begin) and rng.uniform(0, 0.7)
        time.sleep(pause)
        run.signal(0, signal.SIGKILL)
        run.finish(expect=-9)
        partial += Path(f"{path}.new").exists()
        state = load(path)
        said_saved = int(re.findall(r"^saved (\d+)$", run.text(), re.MULTILINE)[-1])
        assert state["step"] in (said_saved, said_saved + 1)
        assert_finite(state)
        seen += 1
    assert partial >= 5, f"{partial} of {seen} were hit while they wrote: too few to tell"


# --- Stop signals ----------------------------------------------------------------------------


def assert_stopped(text: str, name: str, path: Path, nproc: int = 2) -> int:
    """Every rank has said so at the same step, which is the checkpoint's; returns it."""
    steps = {
        rank: re.findall(rf"^\[CPU {rank}\] Stopped on {name} \| step (\d+)", text, re.MULTILINE)
        for rank in range(nproc)
    }
    assert all(len(found) == 1 for found in steps.values()), f"{steps}\n{text[-6000:]}"
    assert len({found[0] for found in steps.values()}) == 1, steps
    state = load(path)
    assert state["step"] == int(steps[0][0])
    return state["step"]


@pytest.mark.parametrize(
    ("target", "name"), [("torchrun", "SIGTERM"), ("rank", "SIGTERM"), ("torchrun", "SIGINT")]
)
def test_stop_signal_under_torchrun(data, folder, target, name):
    path = folder / "c.pt"
    with torchrun([*data, "--num_epochs", 99, "--checkpoint", path, "--timeout", 20]) as run:
        run.wait_for(r"^\[CPU 1\] .*Step 3 ")
        os.kill(run.pid if target == "torchrun" else run.rank_pid(1), signal.Signals[name])
        ended = run.finish(15, expect=1)  # torchrun knows no other code
    assert assert_stopped(ended.out, name, path) >= 3
    assert "Traceback" not in ended.out.partition("Stopped on")[0]


@pytest.mark.parametrize("name", ["SIGINT", "SIGUSR1"])
def test_stop_signal_to_one_rank(ranks, data, folder, name):
    path = folder / "c.pt"
    argv = [*FAST, *data, "--num_epochs", 99, "--checkpoint", path, "--timeout", 20]
    run = ranks.start(argv, 2)
    run.wait_for(r"^\[CPU 1\] .*Step 3 ")
    run.signal(1, signal.Signals[name])
    assert_stopped(run.finish(15, expect=STOPPED).out, name, path)


def test_stop_signal_to_the_launcher_is_no_failure(data, folder):
    path = folder / "c.pt"
    env = {
        "NNODES": "1",
        "GPUS_PER_NODE": "2",
        "PROBE": "0",
        "RESTARTS": "2",
        "LOG_DIR": str(folder),
    }
    env |= {"RUN_NAME": "run", "PYTHON": sys.executable}
    command = ["bash", helpers.ROOT / "launch_multinode.sh", *FAST, *data, "--num_epochs", 99]
    with helpers.start([*command, "--checkpoint", path], env=env) as run:
        run.wait_for(r"^\[CPU 1\] .*Step 3 ")
        run.signal(signal.SIGUSR1)
        ended = run.finish(20, expect=STOPPED)
    assert_stopped(ended.out, "SIGUSR1", path)
    assert "restart 1" not in ended.out


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
    writer = helpers.wait_until(lambda: opened(fifo), 20, "rank 0 to read")
    try:
        for rank in (0, 1):
            run.signal(rank, signal.SIGTERM)
        run.finish(10, expect=None)
    finally:
        os.close(writer)


# --- The link --------------------------------------------------------------------------------


def test_link_down_in_mid_epoch(ranks, data):
    with helpers.NamespacePair() as nodes:
        argv = [*FAST, *data, "--num_epochs", 99, "--timeout", 8]
        run = ranks.start(argv, 2, nodes=nodes)
        run.wait_for(r"^\[CPU 1\] .*Step 3 ")
        nodes.link_down()
        ended = run.finish(NOTICED, expect=1)
    for rank in (0, 1):
        assert re.search(r"step \d+", said(ended.out, rf"\[CPU {rank}\] ERROR: .*"))


@helpers.LONG
def test_link_down_and_up_again_within_the_timeout(ranks, data, undisturbed):
    with helpers.NamespacePair() as nodes:
        run = ranks.start([*FAST, *data, *undisturbed.argv, "--timeout", 30], 2, nodes=nodes)
        run.wait_for(r"^\[CPU 1\] .*Step 3 ")
        nodes.link_down()
        time.sleep(2)
        before = run.text()
        time.sleep(0.5)
        assert run.text() == before, "the link was not needed"
        nodes.link_up()
        ended = run.finish(60)
    assert ended.json_line("Summary")["weights_sha256"] == undisturbed.sha


# --- The start -------------------------------------------------------------------------------


@pytest.mark.parametrize("node", [0, 1])
def test_only_one_of_two_nodes_started(data, folder, node):
    with helpers.NamespacePair() as nodes:
        (run,) = on_two_nodes(nodes, data, {"CONNECT_TIMEOUT": "3"}, only=[node], folder=folder)
        ended = run.finish(40, expect=None)
    assert ended.returncode not in (0, STOPPED)
    last = "\n".join(ended.out.splitlines()[-2:])
    said(last, "within 3 s" if node else "nodes did not all come within 3 s")


@pytest.mark.parametrize("rank", [0, 1])
def test_only_one_of_two_ranks_started(ranks, data, rank):
    ended = ranks.run([*FAST, *data, "--timeout", 4], 2, only=[rank], expect=1, timeout=NOTICED)
    assert "rendezvous" in the_error(ended)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_two_nodes_with_the_same_node_rank(data, folder, rank):
    with helpers.NamespacePair() as nodes:
        env = {"NODE_RANK": rank, "CONNECT_TIMEOUT": "4"}
        started = on_two_nodes(nodes, data, env, folder=folder)
        ended = [run.finish(40, expect=None) for run in started]
    assert all(run.returncode not in (0, STOPPED) for run in ended)
    said(ended[1].out, "NODE_RANK is 0, but" if rank == "0" else "start the launcher there with")


def test_master_that_resolves_to_loopback_on_both_nodes(ranks, data, folder):
    with helpers.NamespacePair() as nodes:
        for node in (0, 1):
            nodes.hosts(node).write_text("127.0.0.1 localhost head\n")
        started = on_two_nodes(nodes, data, {"MASTER_ADDR": "head"}, folder=folder)
        for run in started:
            ended = run.finish(20, expect=1)
            said(ended.out, "MASTER_ADDR 'head' is a loopback address")
        argv = [*FAST, *data, "--timeout", 4]
        ended = ranks.run(
            argv, 2, nodes=nodes, env={"MASTER_ADDR": "head"}, expect=1, timeout=NOTICED
        )
    for rank in (0, 1):
        assert "rendezvous at head" in said(ended.out, rf"\[CPU {rank}\] ERROR: .*")


def test_another_data_set_on_one_node(ranks, data, folder):
    other = make_set(folder / "other", 48, side=7)
    ended = ranks.run(
        [*FAST, "--timeout", 20],
        2,
        of_rank=lambda rank: other if rank else data,
        expect=1,
    )
    wanted = "size of image 0001.jpg: 42 x 42 here, 48 x 48 on rank 0: start all alike (rank 1)"
    assert the_error(ended).endswith(f"ERROR: {wanted}")


def test_another_argument_on_one_node(ranks, data):
    ended = ranks.run(
        [*FAST, *data, "--timeout", 20],
        2,
        of_rank=lambda rank: ["--lr", "0.25", "--workers", "1"] if rank else [],
        expect=1,
    )
    line = the_error(ended)
    assert all(part in line for part in ("rank 1", "--lr", "0.25", "0.001")), line
    assert "--workers" not in line, "these may differ"


def test_checkpoint_that_one_rank_alone_is_told_of(ranks, data, folder):
    """All ranks take part in saving: the others would wait elsewhere."""
    argv, more = [*FAST, *data, "--timeout", 20], ["--checkpoint", folder / "c.pt"]
    ended = ranks.run(argv, 2, of_rank=lambda rank: [] if rank else more, expect=1)
    line = the_error(ended)
    assert "--checkpoint given: False here, True on rank 0" in line and "rank 1" in line


def test_rank_0_that_is_too_slow_at_the_start(data, folder):
    fifo = folder / "instances.json"
    os.mkfifo(fifo)  # nobody writes: rank 0 waits in open() for ever
    with torchrun([*data, f"--annotation_path={fifo}", "--timeout", 6]) as run:
        run.wait_for(r"rank1\]: Traceback|^\[CPU 1\] ERROR")
        ended = run.finish(10, expect=1)
    assert "index broadcast" in said(ended.out, r"\[CPU 1\] ERROR: .*")


# --- Inside a rank ---------------------------------------------------------------------------


def test_sigkill_of_a_data_loader_worker(ranks, data):
    argv = [*FAST, *data, "--num_epochs", 99, "--workers", 1, "--timeout", 8]
    run = ranks.start(argv, 2)
    run.wait_for(r"^\[CPU 1\] .*Step 3 ")
    workers = [p.pid for p in helpers.processes(ranks.test_id) if p.parent == run.pids[1]]
    os.kill(workers[0], signal.SIGKILL)
    ended = run.finish(NOTICED, expect=1)
    # PyTorch tells it in several ways, by what its main process was at.
    why = "DataLoader worker .*(killed|exited)|Connection reset"
    said(ended.out, rf"\[CPU 1\] ERROR: in .*step \d+: .*({why})")


def broken_copy(folder: Path, patch: str) -> Path:
    """A folder with the launcher, and in the script's place one that runs the real script after
    `patch`, in which `demo` is the script's module.
    """
    (folder / "copy").mkdir()
    launcher = shutil.copy(helpers.ROOT / "launch_multinode.sh", folder / "copy")
    (folder / "copy" / "tools").symlink_to(helpers.ROOT / "tools")
    (folder / "copy" / SCRIPT.name).write_text(
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('demo', {str(SCRIPT)!r})\n"
        "demo = sys.modules['demo'] = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(demo)\n"
        f"{patch}\n"
        "demo.one_line_errors(demo.main)\n"
    )
    return Path(launcher)


def test_loader_workers_that_end_while_an_error_is_told(ranks, data):
    argv = [*FAST, *data, "--workers", 1]
    ended = ranks.run(argv, before=[("lose_workers_and_tell_late", {})], expect=1)
    assert the_error(ended) == "[CPU 0] ERROR: in step 1: Connection reset on purpose"


def test_exception_on_one_rank_is_the_first_cause(data, folder):
    launcher = broken_copy(
        folder,
        "step = demo.train_step\n"
        "def broken(run, micro_batches):\n"
        "    if run.process.rank == 1 and run.step == 3:\n"
        "        raise LookupError('broken on purpose')\n"
        "    try:\n"
        "        return step(run, micro_batches)\n"
        "    except RuntimeError:\n"
        "        raise ValueError('a consequence') from None\n"
        "demo.train_step = broken",
    )
    env = {
        "NNODES": "1",
        "GPUS_PER_NODE": "2",
        "PROBE": "0",
        "LOG_DIR": str(folder),
        "RUN_NAME": "run",
    }
    # with a loader worker, which Python's own exit would wait for
    command = ["bash", launcher, *FAST, *data, "--num_epochs", 99, "--workers", 1, "--timeout", 8]
    with helpers.start(command, env=env | {"PYTHON": sys.executable}) as run:
        ended = run.finish(60, expect=1)
    assert "LookupError: broken on purpose" in ended.out.splitlines()[-1], ended.tail()
    first = ended.out.index("Traceback")
    # PyTorch puts the rank before each line of a traceback.
    line = r"^(?:\[rank\d\]: )?\S*(Error|Exception)\b.*$"
    raised = re.search(line, ended.out[first:], re.MULTILINE)
    assert "broken on purpose" in raised[0], ended.tail()
    assert "ERROR: " not in ended.out[:first]
    assert "ValueError: a consequence" in ended.out[first:]


# What the script takes for an error from outside, each by what really raises it: Gloo's own path
# and "pair closure" and the types of a store's errors here; above and below a loader worker that
# is killed, a tiny /dev/shm and the limit of open files.


def outside(run: helpers.Run, rank: int = 0) -> str:
    """What a rank said of an error from outside; fails on a traceback."""
    assert "Traceback" not in run.out, run.tail()
    return said(run.out, rf"^\[CPU {rank}\] ERROR: in (the data of )?step \d+: ")


def test_gloos_error_of_a_killed_peer_is_from_outside(ranks, data):
    run = ranks.start([*FAST, *data, "--num_epochs", 99, "--timeout", 8], 2)
    run.wait_for(r"^\[CPU 1\] .*Step 3 ")
    run.signal(1, signal.SIGKILL)
    assert "/gloo/" in outside(run.finish(NOTICED, expect=[1, -9]))


def test_gloos_error_of_a_silent_peer_is_from_outside(ranks, data):
    run = ranks.start([*FAST, *data, "--num_epochs", 99, "--timeout", 3], 2)
    run.wait_for(r"^\[CPU 1\] .*Step 3 ")
    run.signal(1, signal.SIGSTOP)
    run.wait_for(r"^\[CPU 0\] ERROR: ", NOTICED)
    run.signal(1, signal.SIGKILL)
    line = outside(run.finish(NOTICED, expect=[1, -9]))
    assert "/gloo/" in line and "Timed out" in line, line


def test_gloos_error_beside_one_of_a_silent_peer_is_from_outside(ranks, data):
    run = ranks.start([*FAST, *data, "--timeout", 3], 2, before=[("two_sums_at_once", {})])
    run.wait_for(r"^\[CPU 0\] ERROR: |Traceback", NOTICED)
    run.signal(1, signal.SIGKILL)
    line = outside(run.finish(NOTICED, expect=[1, -9]))
    assert "pair closure" in line and "/gloo/" not in line, line


@pytest.mark.parametrize(("how", "why"), [("silent", "[Tt]ime"), ("gone", "connect")])
def test_error_of_the_store_is_from_outside(ranks, data, how, why):
    before = [("lose_the_store", {"how": how})]
    ended = ranks.run([*FAST, *data, "--timeout", 8], before=before, expect=1, timeout=NOTICED)
    assert re.search(why, outside(ended)), ended.tail()


@pytest.mark.parametrize(
    "text", ["no store for this", "no space in the list", "bad socket", "worker of a DataLoader"]
)
def test_bug_that_sounds_like_an_error_from_outside_keeps_its_traceback(ranks, data, text):
    ended = ranks.run(
        [*FAST, *data, "--workers", 1], before=[("raise_in_step", {"text": text})], expect=1
    )
    assert errors(ended) == []
    assert "Traceback (most recent call last)" in ended.out
    said(ended.out, f"RuntimeError: {text}$")


def error_file(path: Path) -> dict:
    """What a rank has left, in torchrun's own form: its text and the extra information."""
    content = json.loads(path.read_text())["message"]
    extra = content["extraInfo"]
    assert isinstance(extra["timestamp"], float) and 0 <= time.time() - extra["timestamp"] < 60
    return {"text": content["message"], **extra}


@pytest.mark.parametrize(
    ("argv", "before", "code", "kind", "phase", "text"),
    [
        (["--lr", "0"], [], 2, "user", "rendezvous", r"\[CPU 0\] .*: error: --lr .*; see --help"),
        (
            ["--annotation_path", "none.json"],
            [],
            1,
            "user",
            "index broadcast",
            r"\[CPU 0\] ERROR: .*none\.json.*",
        ),
        (
            [],
            [("raise_in_step", {"text": "a bug"})],
            1,
            "bug",
            "step 2",
            r"\[CPU 0\] RuntimeError: a bug",
        ),
        (
            [],
            [("lose_the_store", {"how": "gone"})],
            1,
            "lost",
            "step 2",
            r"\[CPU 0\] ERROR: in step 2: .*",
        ),
    ],
    ids=["arguments", "user", "bug", "lost"],
)
def test_error_file_tells_the_kind(ranks, data, folder, argv, before, code, kind, phase, text):
    path = folder / "error.json"
    env = {"TORCHELASTIC_ERROR_FILE": str(path)}
    ranks.run([*FAST, *data, *argv], before=before, env=env, expect=code)
    found = error_file(path)
    assert (found["kind"], found["rank"], found["phase"]) == (kind, 0, phase)
    assert re.fullmatch(text, found["text"]), found


def test_error_file_tells_a_stop(ranks, data, folder):
    path = folder / "error.json"
    env = {"TORCHELASTIC_ERROR_FILE": str(path)}
    argv = [*FAST, *data, "--num_epochs", 99, "--checkpoint", folder / "c.pt"]
    run = ranks.start(argv, env=env)
    run.wait_for(r"^\[CPU 0\] .*Step 3 ")
    run.signal(0, signal.SIGTERM)
    run.finish(15, expect=STOPPED)
    found = error_file(path)
    assert (found["kind"], found["rank"]) == ("stopped", 0)
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


def test_tiny_shared_memory(ranks, data):
    helpers.require(os.geteuid() == 0, "a /dev/shm of its own needs root")
    argv = [*FAST, *data, "--workers", 1, "--image_size", 224, "--batch_size", 12]
    ended = ranks.run(argv, before=[("small_shm", {"size": "1m"})], expect=1, timeout=40)
    said(ended.out, "ERROR: in .*shared memory")


def test_few_open_files(ranks, data):
    argv = [*FAST, *data, "--workers", 1, "--max_steps", 3]
    ranks.run(argv, before=[("few_files", {"limit": 64})], timeout=40)
    ended = ranks.run(argv, before=[("few_files", {"limit": 16})], expect=1, timeout=40)
    said(ended.out, "ERROR: in .*[Tt]oo many open files")


def test_loss_that_is_not_finite_on_one_rank(ranks, data, folder):
    path = folder / "c.pt"
    argv = [*FAST, *data, "--checkpoint", path, "--checkpoint_every", 2, "--timeout", 20]
    ended = ranks.run(argv, 2, before=[("not_a_number", {"rank": 1, "step": 3})], expect=1)
    line = the_error(ended)
    assert "rank 1" in line
    assert "step 3" in line
    state = load(path)
    assert state["step"] == 2
    assert_finite(state)


def test_update_that_is_not_finite(ranks, data, folder):
    """The loss shows it one step later, when the bad weights could have been saved."""
    path = folder / "c.pt"
    argv = [*FAST, *data, "--checkpoint", path, "--checkpoint_every", 1]
    ended = ranks.run(argv, before=[("bad_gradient", {"step": 3})], expect=1)
    assert re.search("step [34]", the_error(ended))
    state = load(path)
    assert state["step"] == 2
    assert_finite(state)


def test_weights_that_explode(ranks, data, folder):
    path = folder / "c.pt"
    argv = [*FAST, *data, "--checkpoint", path, "--checkpoint_every", 1, "--lr", "1e9"]
    ended = ranks.run(argv, expect=1)
    step = int(re.search(r"step (\d+)", the_error(ended))[1])
    if path.exists():
        state = load(path)
        assert state["step"] < step
        assert_finite(state)


# --- Storage ---------------------------------------------------------------------------------


def test_full_disk(ranks, data, folder):
    with mounted(folder / "disk", "200m") as disk:  # room for one checkpoint, not for two
        path = disk / "c.pt"
        argv = [*FAST, *data, "--checkpoint", path, "--checkpoint_every", 2, "--max_steps", 5]
        ended = ranks.run(argv, expect=1)
        line = the_error(ended)
        assert str(path) in line
        assert "No space left" in line
        said(ended.out, r"WARNING: .*not saved at step 4")
        assert [step for _, step, _ in ended.steps()] == [1, 2, 3, 4, 5], "the run went on"
        assert load(path)["step"] == 2
        assert sorted(os.listdir(disk)) == ["c.pt", "c.pt.lock"]


def test_read_only_folder(ranks, data, folder):
    with mounted(folder / "disk", "1m") as disk:
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        argv = [*FAST, *data, "--checkpoint", disk / "c.pt", "--max_steps", 2]
        ended = ranks.run(argv, 2, expect=1)
        line = the_error(ended)
    assert str(disk) in line
    assert "Read-only file system" in line


class Payload:
    """What a malicious file holds: unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture(scope="module")
def saved(nursery, data, tmp_path_factory) -> Iterator[Path]:
    """A checkpoint after step 3."""
    folder = tmp_path_factory.mktemp("saved")
    nursery.run([*FAST, *data, "--checkpoint", folder / "c.pt", "--max_steps", 3])
    yield folder / "c.pt"
    shutil.rmtree(folder)


def bad_file(kind: str, good: Path, path: Path, payload: Path) -> None:
    import torch

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
        torch.save({"model": {}, "epoch": Payload(payload)}, path)
    elif kind == "malicious pickle":
        path.write_bytes(pickle.dumps(Payload(payload), protocol=2))


@pytest.mark.parametrize(
    "kind",
    [
        *["truncated", "empty", "text", "list", "other run", "incomplete", "other model"],
        *["malicious", "malicious pickle"],
    ],
)
def test_bad_checkpoint(ranks, data, folder, saved, kind):
    path, payload = folder / "c.pt", folder / "payload"
    bad_file(kind, saved, path, payload)
    before = path.read_bytes()
    argv = [*FAST, *data, "--checkpoint", path, "--resume", "--max_steps", 4, "--timeout", 20]
    ended = ranks.run(argv, 1 if kind != "truncated" else 2, expect=1)
    assert str(path) in the_error(ended)
    assert not payload.exists(), "code in the file was run"
    assert path.read_bytes() == before


@pytest.mark.parametrize("kind", ["malicious", "malicious pickle"])
def test_malicious_weights_file(ranks, data, folder, saved, kind):
    path, payload = folder / "w.pt", folder / "payload"
    bad_file(kind, saved, path, payload)
    ended = ranks.run([*FAST, *data, "--weights", path], expect=1)
    assert str(path) in the_error(ended)
    assert not payload.exists(), "code in the file was run"


def digest(state: dict) -> str:
    """Of the weights and of Adam's averages: a mixture of two files is none of the two."""
    found = hashlib.sha256()
    averages = [v["exp_avg"] for v in state["optimizer"]["state"].values()]
    for value in [*state["model"].values(), *averages]:
        found.update(value.numpy().tobytes())
    return found.hexdigest()


def test_same_run_twice_at_once(ranks, data, folder):
    """Both write the same bytes at each step, so what is on the disk is known at any moment."""
    path, out = folder / "c.pt", folder / "log"
    argv = [*FAST, *data, "--checkpoint", path, "--checkpoint_every", 1, "--max_steps", 8]
    both = [ranks.start(argv, out=out)]
    both[0].wait_for("Step 1 ")
    both.append(ranks.start(argv, out=out))
    loaded: dict[int, set[str]] = {}
    while None in [*both[0].codes(), *both[1].codes()]:
        if path.exists():
            state = load(path)
            loaded.setdefault(state["step"], set()).add(digest(state))
        time.sleep(0.02)
    codes = [run.finish(expect=None).returncode for run in both]
    assert "Traceback" not in out.read_text(), out.read_text()[-3000:]
    assert loaded
    assert all(len(found) == 1 for found in loaded.values()), loaded
    assert load(path)["step"] == 8
    assert "WARNING" not in out.read_text(), out.read_text()[-3000:]
    assert codes in ([0, 0], [0, 1])
    if any(codes):
        assert len(errors(both[0].run())) == 1, both[0].text()


# --- Resume ----------------------------------------------------------------------------------


@pytest.mark.parametrize("nproc", [pytest.param(1, marks=helpers.LONG), 2])
def test_interrupted_and_resumed_equals_uninterrupted(ranks, data, folder, nproc):
    """Bit for bit, with a worker and accumulation, after stops in both epochs."""
    path, slow = folder / "c.pt", [("slowly", {"seconds": 0.5})]
    sizes = ["--batch_size", "2", "--accumulate_steps", "2", "--workers", "1", "--timeout", "20"]
    argv = [*FAST, *data, *sizes, "--num_epochs", 2]
    whole = ranks.run(argv, nproc)
    steps = 12 // nproc  # of an epoch
    assert whole.json_line("Summary")["steps"] == 2 * steps
    parts = []
    for pattern in (r"\| Step 2 ", rf"Epoch 2 \| Step {steps + 2} "):
        run = ranks.start([*argv, "--checkpoint", path, "--resume"], nproc, before=slow)
        run.wait_for(pattern)
        begin = time.monotonic()
        run.signal(nproc - 1, signal.SIGTERM)
        parts.append(run.finish(15, expect=STOPPED))
        assert time.monotonic() - begin < 10
        step = assert_stopped(parts[-1].out, "SIGTERM", path, nproc)
        assert step % steps, "it was to be stopped in mid-epoch"
    parts.append(ranks.run([*argv, "--checkpoint", path, "--resume"], nproc))
    assert "starts afresh" in parts[0].out
    for part in parts[1:]:
        said(part.out, "Resumed from .* step")
    for rank in range(nproc):
        assert [line for part in parts for line in part.steps(rank)] == whole.steps(rank)
    ends = [run.json_line("Summary") for run in (whole, parts[-1])]
    for name in ("weights_sha256", "steps", "loss_by_epoch"):
        assert ends[0][name] == ends[1][name], name


def test_resume_with_another_number_of_ranks(ranks, data, folder):
    path = folder / "c.pt"
    argv = [*FAST, *data, "--global_batch_size", 4, "--checkpoint", path, "--timeout", 20]
    ranks.run([*argv, "--max_steps", 5], 2)
    ended = ranks.run([*argv, "--resume", "--max_steps", 14], 1)
    said(ended.out, "step 5; processes then 2, now 1")
    assert [step for _, step, _ in ended.steps()] == list(range(6, 15))
    ended = ranks.run([*argv, "--resume", "--max_steps", 16], 2)
    said(ended.out, "step 14; processes then 1, now 2")


@pytest.mark.parametrize(
    ("option", "then", "now"),
    [
        ("--lr", "0.001", "0.002"),
        ("--seed", "0", "3"),
        ("--image_size", "40", "64"),
        ("--global_batch_size", "4", "8"),
        ("data set", "", ""),
    ],
)
def test_resume_with_something_changed_is_refused(ranks, data, folder, saved, option, then, now):
    if now:
        argv = [*FAST, *data, f"{option}={now}"]
    else:
        argv = [*FAST, *make_set(folder / "other", 40)]
    ended = ranks.run([*argv, "--checkpoint", saved, "--resume", "--max_steps", 5], expect=1)
    line = the_error(ended)
    assert all(part in line for part in (option.strip("-"), then, now)), line
    assert load(saved)["step"] == 3


def test_resume_with_pictures_of_another_size_is_refused(ranks, data, folder, saved):
    """Of the same names and labels: made smaller by tools/prepare_coco.py, say."""
    before = saved.read_bytes()
    argv = [*FAST, *make_set(folder / "other", 48, side=7), "--checkpoint", saved, "--resume"]
    line = the_error(ranks.run([*argv, "--max_steps", 5], expect=1))
    assert "has size of image 0001.jpg 48 x 48, not 42 x 42" in line, line
    assert saved.read_bytes() == before


def test_run_record_tells_pictures_of_another_size(ranks, data, folder):
    """As compare_logs refuses to compare such runs; other pixels alone make no difference."""
    sets = [data, make_set(folder / "a", 48, side=7), make_set(folder / "b", 48, seed=1)]
    runs = [ranks.run([*FAST, *options, "--max_steps", 1]) for options in sets]
    usual, smaller, others = (run.json_line("Run")["picture_sizes"] for run in runs)
    assert usual == others != smaller


def test_resume_of_a_finished_run_does_nothing(ranks, data, saved):
    before = saved.read_bytes()
    ended = ranks.run([*FAST, *data, "--checkpoint", saved, "--resume", "--max_steps", 3])
    assert not ended.steps()
    assert ended.json_line("Summary")["steps"] == 3
    assert load(saved)["step"] == 3
    assert len(before) == saved.stat().st_size


# --- Restarts --------------------------------------------------------------------------------


class Undisturbed:
    """What a run of 60 steps on two ranks ends with when nothing happens to it."""

    argv = shlex.split("--num_epochs 10")

    def __init__(self, sha: str) -> None:
        self.sha = sha


@pytest.fixture(scope="module")
def undisturbed(nursery, data) -> Undisturbed:
    ended = nursery.run([*FAST, *data, *Undisturbed.argv, "--timeout", 30], 2, timeout=120)
    assert ended.json_line("Summary")["steps"] == 60
    return Undisturbed(ended.json_line("Summary")["weights_sha256"])


def test_restarts_give_up_with_the_first_cause(data, folder):
    launcher = broken_copy(
        folder,
        "step = demo.train_step\n"
        "def broken(run, micro_batches):\n"
        "    if run.step == 2:\n"
        "        raise LookupError('broken on purpose')\n"
        "    return step(run, micro_batches)\n"
        "demo.train_step = broken",
    )
    env = {"NNODES": "1", "GPUS_PER_NODE": "1", "LOG_DIR": str(folder), "RUN_NAME": "run"}
    env |= {"RESTARTS": "1", "PYTHON": sys.executable}
    with helpers.start(["bash", launcher, *FAST, *data, "--timeout", 8], env=env) as run:
        ended = run.finish(90, expect=1)
    said(ended.out, r"restart 1 of 1 after: \[CPU 0\] LookupError: broken on purpose")
    said(ended.out, "gave up after 1 restarts")
    assert "LookupError: broken on purpose" in ended.out.splitlines()[-1], ended.tail()


def hit(nodes: helpers.NamespacePair, runs: list[helpers.Started], what: str, node: int) -> None:
    """Kill something on a node, or cut the link for longer than the script's --timeout."""
    if what == "link":
        nodes.link_down(node)
        time.sleep(10)
        nodes.link_up(node)
    elif what == "rank":
        os.kill(runs[node].rank_pid(node), signal.SIGKILL)
    else:
        os.kill(main_pid(runs[node]), signal.SIGKILL)


def last_step(runs: list[helpers.Started]) -> int:
    steps = [re.findall(r"\| Step (\d+) ", run.text()) for run in runs]
    return max(int(found[-1]) if found else 0 for found in steps)


def endure(
    argv: Sequence[object], folder: Path, steps: int, hits: Sequence[str], seed: int
) -> list[helpers.Run]:
    """A run on two nodes that is hit at random steps, and at random moments after these."""
    rng = random.Random(seed)
    every = steps // (len(hits) + 1)
    plan = [
        (every * (n + 1) - rng.randrange(every // 2), what, rng.randrange(2), rng.random())
        for n, what in enumerate(hits)
    ]
    (folder / "plan").write_text("".join(f"{line}\n" for line in plan))
    print(f"seed {seed}: {plan}")
    path = folder / "run" / "c.pt"
    with helpers.NamespacePair() as nodes:
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


def attempts(runs: list[helpers.Started]) -> int:
    """The number of restarts that both nodes have begun, with a first step."""
    return min(len(re.findall(r"launch_multinode.sh: restart \d+ of", r.text())) for r in runs)


def last_step_of_attempt(runs: list[helpers.Started]) -> int:
    steps = []
    for run in runs:
        found = re.findall(
            r"\| Step (\d+) ", re.split(r"launch_multinode.sh: restart \d+ of", run.text())[-1]
        )
        steps.append(int(found[-1]) if found else 0)
    return min(steps)


def assert_endured(runs: list[helpers.Run], hits: Sequence[str], sha: str) -> None:
    shown = "\n".join(run.tail(40) for run in runs)
    assert [run.returncode for run in runs] == [0, 0], shown
    text = runs[0].out
    assert runs[0].json_line("Summary")["weights_sha256"] == sha
    restarts = re.findall(r"restart (\d+) of \d+ after", text)
    assert len(restarts) == len(hits), shown
    repeated = re.findall(r"restart \d+ went on from step (\d+).*: (\d+) steps repeated", text)
    assert len(repeated) == len(hits), shown


def test_endurance_short(data, folder, undisturbed):
    hits = ["rank", "torchrun", "link"]
    seed = int(os.environ.get("DEMO_SEED", "1"))
    runs = endure([*data, *undisturbed.argv], folder, 60, hits, seed)
    assert_endured(runs, hits, undisturbed.sha)


@pytest.mark.skipif(
    os.environ.get("DEMO_ENDURANCE") != "1", reason="takes long: set DEMO_ENDURANCE=1"
)
def test_endurance_long(nursery, data, folder):
    seed = int(os.environ.get("DEMO_SEED", "1"))
    argv = shlex.split("--num_epochs 60")  # 360 steps
    whole = nursery.run([*FAST, *data, *argv, "--timeout", 30], 2, timeout=600)
    hits = random.Random(seed).choices(["rank", "torchrun", "link"], k=12)
    runs = endure([*data, *argv], folder, 360, hits, seed)
    assert_endured(runs, hits, whole.json_line("Summary")["weights_sha256"])


if __name__ == "__main__":
    serve(sys.argv[1])
