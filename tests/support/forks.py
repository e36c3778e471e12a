"""Ranks that are forked from one Python that has the script imported.

Importing torch takes seconds, which a test that starts many processes would spend on nothing else.
Each rank is a process of its own, with arguments, environment, folder, node and exit code of its
own, and all the script's code runs in it as usual. What depends on how Python or torchrun starts
or ends is tested with these themselves.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import dataclasses
import functools
import gc
import importlib
import importlib.util
import io
import json
import os
import re
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

from support.nodes import NamespacePair, enter_node
from support.processes import (
    ROOT,
    SCRIPT,
    WITH_LONG,
    Run,
    Watched,
    assert_none_left,
    base_env,
    free_port,
    kill_leftover,
    new_test_id,
)

SMALL = not WITH_LONG  # the network of forked ranks
PARAMETERS = 1_266_896 if SMALL else 11_217_552  # of it, with 80 classes
BATCH_NORMS = 13 if SMALL else 20
STATE_TENSORS = 80 if SMALL else 122  # with batch norm's statistics
FOR_ONE_CHECKPOINT = "24m" if SMALL else "200m"  # a disk with no room for two

# Where test files and the tools are known by the names under which pytest knows them.
SERVER = """
import sys
*sys.path[:1], script = sys.argv[1:]
from support.forks import serve
serve(script)
"""

# --- In the process that forks ---------------------------------------------------------------


def serve(script: str) -> None:
    """Forks a rank for each JSON line on stdin, which says its process id on stdout. The exit code
    and the time of its end come into the file ended<process id> in this folder.
    """
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        spec = importlib.util.spec_from_file_location("demo", script)
        demo = sys.modules["demo"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(demo)
        # An optimizer imports this when it is made: once here, not in each process.
        importlib.import_module("torch._dynamo")
    if SMALL:
        use_small_network()
    for finalizer in list(weakref.finalize._registry):
        finalizer.atexit = False  # of the libraries: a third of what a short process would cost
    facts = {"printed": printed.getvalue(), "threads": threading.active_count()}
    print(json.dumps(facts | {"group": demo.dist.is_initialized()}), flush=True)
    waiting = None
    while True:
        if select.select([0], [], [], waiting)[0]:
            line = sys.stdin.readline()  # there is no other one: each is answered before the next
            if not line:
                return
            request = json.loads(line)
            for module, *_ in request["calls"]:
                importlib.import_module(module)
            gc.freeze()  # a collection in a forked process would copy every page
            if os.fork() == 0:
                become(demo, script, **request)
        waiting = 0.01 if note_ends() else None


def ended_file(pid: int) -> Path:
    return Path(f"ended{pid}")


def note_ends() -> bool:
    """Writes what became of those that ended; True while others go on."""
    try:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            facts = [os.waitstatus_to_exitcode(ended[1]), time.monotonic()]
            ended_file(ended[0]).write_text(json.dumps(facts))
    except ChildProcessError:
        return False
    return True


def use_small_network() -> None:
    """Makes torchvision's ResNet-18 one with half of its layers, half as wide: a run of two ranks
    takes a third of the time.

    For speed alone: with TEST_LONG=1 the same tests run with the whole network, and what torchrun
    starts has it always.
    """
    import torchvision
    from torch.nn import Linear
    from torchvision.models.resnet import BasicBlock, ResNet

    class Small(ResNet):
        def _make_layer(self, block, planes, *others, **more):
            return super()._make_layer(block, planes // 2, *others, **more)

    def small(num_classes: int = 1000) -> ResNet:
        network = Small(BasicBlock, [1, 1, 1, 1])
        network.fc = Linear(network.fc.in_features // 2, num_classes)
        return network

    torchvision.models.resnet18 = small


def become(demo, script, argv, env, cwd, out, err, node, calls) -> NoReturn:
    """In a forked process: makes the calls, usually one of `start`, and ends the process.

    Python's own clearing away at its exit takes seconds after a fork, and is left out.
    """
    os.setsid()
    ended_file(os.getpid()).unlink(missing_ok=True)  # of an earlier process with this number
    print(os.getpid(), flush=True)
    for descriptor, path in enumerate((os.devnull, out, err)):
        flags = os.O_RDONLY if descriptor == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND
        os.dup2(os.open(path, flags, 0o644), descriptor)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    tempfile.tempdir = None  # what an earlier environment has said
    sys.argv = [script, *argv]
    code = 0
    try:
        if node:
            enter_node(**node)
        for module, name, options in calls:
            getattr(sys.modules[module], name)(demo, **options)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


# --- What a forked process may be told to call -----------------------------------------------


def start(demo, result=None):
    """The script as its last line starts it."""
    demo.one_line_errors(demo.main)


def run_to_the_end(demo):
    """The same, but this process goes on afterwards, unless the run failed."""
    try:
        start(demo)
    except SystemExit as end:
        if end.code:
            raise


def write(result: str, value: object) -> None:
    """For `Job.result`."""
    Path(f"{result}.json").write_text(json.dumps(value))


class _Prepared(BaseException):
    pass


def prepared(demo):
    """The Run that the script's main has prepared, before any step of it, with the order of its
    first epoch.
    """
    start_or_resume, kept = demo.start_or_resume, []

    def keep(run, *others):
        start_or_resume(run, *others)
        kept.append(run)
        raise _Prepared

    demo.start_or_resume = keep
    with contextlib.suppress(_Prepared):
        demo.main(demo.Process())
    (run,) = kept
    run.loader.sampler.set_epoch(1)
    return run


def validation_batch(demo, folder, image_list, size):
    """All images of a folder as validation sees them, and their labels."""
    options = {"coco_image_path": None, "val_image_path": folder, "image_size": size, "seed": 0}
    data = demo.FirstCategory(argparse.Namespace(**options), demo.Process(), None, image_list)
    positions = range(len(image_list.names))
    return data.__getitems__([(demo.VALIDATION, position) for position in positions])


# --- In a test -------------------------------------------------------------------------------


@dataclasses.dataclass(kw_only=True)
class Job(Run):
    """Ranks that ended."""

    codes: list[int]  # of each rank
    folder: Path

    def result(self, rank: int = 0) -> Any:
        """What `rank` has written for it."""
        return json.loads((self.folder / f"result{rank}.json").read_text())


# What torch writes to stderr where no name server can be reached, as on a laptop that is offline.
NO_NAME_SERVER = re.compile(
    r"^\[W.*The hostname of the client socket cannot be .*\n", re.MULTILINE
)


class Ranks(Watched):
    """Forked ranks at work."""

    def __init__(self, server: ForkServer, requests: list[dict], folder: Path) -> None:
        self._server, self.folder = server, folder
        self._began = time.monotonic()
        self.pids = [server.fork(request) for request in requests]
        self.command = [str(SCRIPT), *requests[0]["argv"]]

    def read(self, name: str) -> str:
        path = self.folder / name
        return path.read_text(errors="replace") if path.exists() else ""

    def text(self) -> str:
        """What they have written so far, to stdout and then to stderr."""
        return self.read("out") + self.read("err")

    def running(self) -> bool:
        return not all(map(self._server.end_of, self.pids))

    def signal(self, rank: int, number: int) -> None:
        os.kill(self.pids[rank], number)

    def job(self) -> Job:
        """Of those that have ended so far."""
        ended = [*filter(None, map(self._server.end_of, self.pids))]
        codes = [code for code, _ in ended]
        seconds = max((end for _, end in ended), default=self._began) - self._began
        texts = {"out": self.read("out"), "err": NO_NAME_SERVER.sub("", self.read("err"))}
        facts = {"codes": codes, "folder": self.folder}
        code = max(codes, key=abs, default=0)
        return Job(self.command, code, seconds=seconds, **texts, **facts)

    def fail(self, why: str) -> NoReturn:
        job = self.job()
        self._server.clear()
        pytest.fail(f"{why}; exit codes {job.codes} of {len(self.pids)}\n{job.tail(100)}")

    def finish(self, timeout: float = 120, expect: int | list[int] | None = 0) -> Job:
        """Wait until all have ended; fails after `timeout` seconds, on other exit codes than
        `expect` (None: any), and on a process that is left.
        """
        deadline = time.monotonic() + timeout
        while self.running():
            if time.monotonic() > deadline:
                self.fail(f"still running after {timeout:g} s")
            time.sleep(0.01)
        wanted = [expect] * len(self.pids) if isinstance(expect, int) else expect
        job = self.job()
        if wanted is not None and job.codes != wanted:
            self.fail(f"exit codes are not {wanted}")
        self._server.none_left()
        return job


class ForkServer:
    """The process that forks, as a context manager; on exit all that it forked is killed.

    `env` is added to `base_env`.
    """

    def __init__(self, env: Mapping[str, str | None] | None = None) -> None:
        self.env = env

    def __enter__(self) -> ForkServer:
        self.test_id = new_test_id()
        self.folder = Path(tempfile.mkdtemp(prefix="demo-fork-"))
        self._jobs = 0
        server = [sys.executable, "-c", SERVER, ROOT / "tests", ROOT / "tools", SCRIPT]
        with (self.folder / "server").open("wb") as err:
            self._server = subprocess.Popen(
                server,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=err,
                env=base_env(self.test_id, self.env),
                cwd=self.folder,
                start_new_session=True,
            )
        try:
            self.imported = self._answer()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stdin.close()
        kill_leftover(self.test_id)
        self._server.wait(10)
        self._server.stdout.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _why(self) -> str:
        """What the server has said on stderr, for one that ended."""
        return (self.folder / "server").read_text()[-3000:]

    def _answer(self) -> Any:
        ready = select.select([self._server.stdout], [], [], 120)[0]
        line = self._server.stdout.readline() if ready else b""
        assert line, f"the process that forks does not answer: {self._why()}"
        return json.loads(line)

    def fork(self, request: dict) -> int:
        self._server.stdin.write(json.dumps(request).encode() + b"\n")
        self._server.stdin.flush()
        return self._answer()

    def end_of(self, pid: int) -> tuple[int, float] | None:
        """Of a forked process the exit code and time.monotonic() at its end; None before."""
        assert self._server.poll() is None, self._why()
        path = self.folder / ended_file(pid)
        text = path.read_text() if path.exists() else ""
        return tuple(json.loads(text)) if text else None

    def start(
        self,
        argv: Iterable[object] = (),
        nproc: int = 1,
        call: Callable = start,
        before: Sequence[Callable] = (),
        env: Mapping[str, str] | None = None,
        torchrun: bool = False,
        nodes: NamespacePair | None = None,
        only: Sequence[int] | None = None,
        of_rank: Callable[[int], Mapping[str, Any]] = lambda _: {},
        **options: Any,
    ) -> Ranks:
        """Start the script, or `call(demo, result, **options)` in its place, with `nproc` ranks.

        before: functions, or partial ones, that do something to the script first. Several ranks
        get torchrun's variables, one gets none unless `torchrun` says so. `nodes` puts each rank
        on a node of its own, `only` starts some ranks only. `of_rank(r)` may set argv, env, cwd,
        options of one rank.
        """
        self._jobs += 1
        folder = self.folder / str(self._jobs)
        folder.mkdir()
        port, requests = str(free_port()), []
        for rank in range(nproc) if only is None else only:
            own = dict(of_rank(rank))
            places: dict[str, str] = {}
            if nproc > 1 or torchrun:
                local_rank, local_size = (0, 1) if nodes else (rank, nproc)
                places = {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(nproc),
                    "LOCAL_RANK": str(local_rank),
                    "LOCAL_WORLD_SIZE": str(local_size),
                    "MASTER_ADDR": nodes.addresses[0] if nodes else "127.0.0.1",
                    "MASTER_PORT": port,
                }
            places |= {**(env or {}), **own.get("env", {})}
            last = functools.partial(call, **options, **own.get("options", {}))
            requests.append(
                {
                    "argv": [str(arg) for arg in own.get("argv", argv)],
                    "env": base_env(self.test_id, places),
                    "cwd": str(own.get("cwd", folder)),
                    "out": str(folder / "out"),
                    "err": str(folder / "err"),
                    "node": nodes and nodes.place(rank),
                    "calls": [
                        *map(_spelled, before),
                        _spelled(functools.partial(last, result=str(folder / f"result{rank}"))),
                    ],
                }
            )
        return Ranks(self, requests, folder)

    def run(
        self,
        argv: Iterable[object] = (),
        nproc: int = 1,
        expect: int | list[int] | None = 0,
        timeout: float = 120,
        **options: Any,
    ) -> Job:
        """Start ranks and wait for their end, with the options of `start` and `Ranks.finish`; a
        good run of the script alone, on one node, has written nothing to stderr.
        """
        job = self.start(argv, nproc, **options).finish(timeout, expect)
        if expect == 0 and not {"call", "before", "nodes"} & {*options}:
            assert job.err == "", job.tail(100)
        return job

    def clear(self) -> None:
        """Kills what has been forked, and what that has started."""
        kill_leftover(self.test_id, but=self._server.pid)

    def none_left(self) -> None:
        """Fails the test if these do not end by themselves."""
        assert_none_left(self.test_id, but=self._server.pid)


@functools.cache
def shared() -> ForkServer:
    """One for all tests of this pytest process."""
    running = ForkServer().__enter__()
    atexit.register(running.__exit__)
    return running


def _spelled(function: Callable) -> list:
    """A function, or a partial one, by names that another process can look up."""
    partial = functools.partial(function)  # of a partial one the same, in one
    return [partial.func.__module__, partial.func.__name__, partial.keywords]
