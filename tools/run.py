#!/usr/bin/env python3
"""Runs a torchrun command: with a log, stop signals, restarts, a last line and an exit code.

    tools/run.py [options] -- torchrun OPTIONS SCRIPT ARGUMENTS

The launchers call it; ./launch_single.sh --help has the exit codes. The command begins with the
word torchrun, and its options are written as --name=value. In them {start} is the number of the
start (0: the training, 1: a probe before it, 2 and more: restarts), {port} that number above
--port, and {wait} how many seconds the nodes wait for each other.
For the launchers: `run.py --job` prints the settings of this node, `run.py --count` its GPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import re
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from analysis.kernel import SYSFS, text_of

ROOT = Path(__file__).resolve().parents[1]
SAMPLE = ROOT / "data/sample_coco"
DATA = ("coco_image_path", "annotation_path", "val_image_path", "val_annotation_path")
SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
FAILED, USER, STOPPED = 1, 2, 75  # exit codes
# The launchers say what they mean; port: of start 0; sample: arguments for the sample set.
OPTIONS = {"log_dir": "logs", "run_name": "", "restarts": "0", "port": "29500", "wait": "300"}
OPTIONS |= {"probe": "0", "ifname": "", "sample": ""}
APART = "the nodes did not meet"  # in a run's last line; series.py looks for it
NODE = os.environ.get("SHOWN_NODE", "").encode()  # of two_nodes.sh, on a terminal
TIMEOUT = 300  # seconds: the script's default of --timeout
HIDDEN = ("", "-1", "NoDevFiles")  # CUDA_VISIBLE_DEVICES that shows no GPU; the last is SLURM's


class UserError(Exception):
    """Something that a user can fix: one line, exit code 2."""


def main(words: list[str]) -> int:
    try:
        if words == ["--count"]:
            print(count_gpus())
        elif words == ["--job"]:
            print("\n".join(f"{name}={shlex.quote(x)}" for name, x in job(os.environ).items()))
        else:
            return Run(*parse_arguments(words)).train()
    except UserError as error:
        tell("run.py", f"error: {error}")
        return USER
    return 0


def tell(name: str, text: str) -> bytes:
    line = f"{name}: {text}\n".encode(errors="backslashreplace")
    with contextlib.suppress(OSError):  # a terminal may be gone
        os.write(2, NODE + line)
    return line


def parse_arguments(words: list[str]) -> tuple[argparse.Namespace, Command]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in OPTIONS.items():
        parser.add_argument(f"--{name}", default=default)
    begin = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:begin])
    args.restarts = whole("RESTARTS", args.restarts, 0, 1000)
    args.wait = whole("CONNECT_TIMEOUT", args.wait, 1, 1_000_000)
    args.probe = whole("PROBE", args.probe, 0, 1)
    args.port = whole("MASTER_PORT", args.port, 1, 65534 - args.restarts)
    command = parse_command(words[begin + 1 :])
    if names_no_data(command.arguments):
        sample = args.sample.replace("{sample}", shlex.quote(str(SAMPLE)))
        command.arguments = [*shlex.split(sample), *command.arguments]
    else:
        args.sample = ""
    if threads := os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]:
        whole("OMP_NUM_THREADS", threads, 1, 4096)
    return args, command


def whole(name: str, value: str, least: int, most: int) -> int:
    """A setting that has to be such a whole number."""
    if not re.fullmatch(r"[0-9]{1,9}", value) or not least <= int(value) <= most:
        raise UserError(f"{name} is '{value}': give a whole number from {least} to {most}")
    return int(value)


# --- The command ---------------------------------------------------------------------------------


@dataclass
class Command:
    """A torchrun command, and what its options say."""

    options: list[str]
    script: str
    arguments: list[str]
    nodes: int
    node: int
    processes: int  # on this node
    host: str  # of node 0; nothing where there is one node by itself


def parse_command(words: list[str]) -> Command:
    """Its script is the first word that is no option."""
    script = next((n for n, word in enumerate(words[1:], 1) if not word.startswith("-")), 0)
    if words[:1] != ["torchrun"] or not script:
        raise UserError("write: run.py [options] -- torchrun --option=value ... SCRIPT ARGUMENTS")
    options = words[1:script]
    nodes = whole("NNODES", option("--nnodes", options) or "1", 1, 1_000_000)
    node = whole("NODE_RANK", option("--node_rank", options) or "0", 0, nodes - 1)
    text = "the number of processes (GPUS; all: the GPUs that PyTorch finds)"
    processes = whole(text, option("--nproc_per_node", options), 1, 4096)
    host = option("--rdzv_endpoint", options).rpartition(":")[0]
    arguments = words[script + 1 :]
    return Command(options, words[script], arguments, nodes, node, processes, host)


def option(name: str, words: list[str]) -> str:
    """The value of an option, or nothing. The script takes dashes inside a name, too."""
    value = ""
    for word, following in zip(words, [*words[1:], ""], strict=False):
        given, equals, own = word.partition("=")
        if given.replace("-", "_") == name.replace("-", "_"):
            value = own if equals else following
    return value


def names_no_data(arguments: list[str]) -> bool:
    return not any(option(f"--{name}", arguments) for name in DATA) and "--dummy" not in arguments


def filled(options: Iterable[str], start: int, port: int, wait: int) -> list[str]:
    """The options of torchrun for a start. Each start has a port of its own, the same on every
    node, so that a node in one start never joins another one.
    """
    values = {"{start}": str(start), "{port}": str(port + start), "{wait}": str(wait)}
    return [re.sub(r"\{\w+\}", lambda m: values.get(m[0], m[0]), word) for word in options]


def wait_later(wait: int, arguments: list[str]) -> int:
    """How long a node waits in a later start: another one may notice a failure by --timeout, and
    then torchrun gives its ranks two minutes.
    """
    try:
        timeout = round(float(option("--timeout", arguments)))
    except (ValueError, OverflowError):
        timeout = TIMEOUT
    return max(wait, timeout + 180)


# --- This node -----------------------------------------------------------------------------------


def output_of(*command: str) -> str:
    with contextlib.suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True).stdout
    return ""


def gpu_is_present() -> bool:
    """As the script has it: an NVIDIA GPU, by its device file or WSL's driver, that is not hidden.
    (nvidia-smi may never return where a GPU fell off its bus.)
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in HIDDEN
    files = [*Path("/dev").glob("nvidia[0-9]*"), *Path("/usr/lib/wsl/lib").glob("libcuda.so*")]
    return bool(files) and not hidden


def runs_on_gpus(arguments: list[str]) -> bool:
    """Whether the script will take GPUs: NVIDIA's or AMD's. It refuses those it cannot use."""
    present = gpu_is_present() or Path("/dev/kfd").exists()
    return present and option("--device", arguments) != "cpu"


def runs_nccl(arguments: list[str]) -> bool:
    backend = option("--backend", arguments)
    return backend == "nccl" or (backend != "gloo" and runs_on_gpus(arguments))


def count_gpus(python: str = sys.executable) -> int:
    """As PyTorch counts them: also AMD's, and parts of one (MIG)."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in HIDDEN:
        return 0
    code = "import torch; print(torch.cuda.device_count())"
    last = output_of(python, "-c", code).strip().rpartition("\n")[2]
    return int(last) if last.isdecimal() else 0


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Those of the affinity or, if a container's CPU quota is less, that, rounded up."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        cores = len(os.sched_getaffinity(0))
    files = ("cpu.max", "cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")  # of cgroup v2, and v1
    quota, period, *_ = [*" ".join(text_of(cgroup / name) for name in files).split(), "", ""]
    if quota.isdecimal() and period.isdecimal():  # without a quota: max, or -1
        cores = min(cores, -(-int(quota) // int(period)))
    return cores


def job(env: Mapping[str, str], count: Callable[[], int] = count_gpus) -> dict[str, str]:
    """How many nodes there are, which one this is and where node 0 is: as the variables or SLURM
    say. Another scheduler's variables belong here. Raises UserError.
    """
    names = "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "GPUS_PER_NODE", "RUN_NAME"
    found = {name: env[name] for name in names if env.get(name)}
    for other, name in (("WORLD_SIZE", "NNODES"), ("GPUS", "GPUS_PER_NODE")):
        value = env.get(other)
        if value and found.setdefault(name, value) != value:
            text = "here both mean the same, set one of them"
            raise UserError(f"{name} is {found[name]} but {other} is {value}: {text}")
    if "NNODES" not in found and env.get("SLURM_JOB_ID"):
        found = slurm_job(env) | found
    if found.get("NNODES") == "1":
        found = {"NODE_RANK": "0", "MASTER_ADDR": "localhost"} | found
    if missing := [name for name in names[:3] if name not in found]:
        text = "set the number of nodes, 0 on the node of MASTER_ADDR and 1 to NNODES - 1 on the "
        text += "others, and an address of node 0 that all can reach"
        raise UserError(f"{', '.join(missing)} not set: {text}")
    whole("NODE_RANK", found["NODE_RANK"], 0, whole("NNODES", found["NNODES"], 1, 1_000_000) - 1)
    if found.get("GPUS_PER_NODE") == "all":
        found["GPUS_PER_NODE"] = str(count())
    elif "GPUS_PER_NODE" not in found:
        found["GPUS_PER_NODE"] = str(count() or 1)
    found.setdefault("MASTER_PORT", "29500")
    return {name: found.get(name, "") for name in names}


def slurm_job(env: Mapping[str, str]) -> dict[str, str]:
    """The same of a job step of SLURM with one task on each node."""
    # A batch script has no SLURM_STEP_ID. That of salloc's shell is a number of its own; srun
    # --pty gives a terminal.
    step, tasks, nodes = (env.get(f"SLURM_STEP_{x}", "") for x in ("ID", "NUM_TASKS", "NUM_NODES"))
    if not step.isdecimal() or int(step) >= 4294967290 or sys.stdin.isatty():
        text = "write 'srun --ntasks-per-node=1 ./launch_multinode.sh ...', or set NNODES"
        raise UserError(f"in a SLURM job, but not started by srun: {text}")
    if tasks != nodes:
        text = f"srun started {tasks} tasks on {nodes} nodes"
        raise UserError(f"{text}: give it --ntasks-per-node=1")
    hosts = output_of("scontrol", "show", "hostnames", env["SLURM_STEP_NODELIST"])
    if not (hosts or env.get("MASTER_ADDR")):
        text = "set MASTER_ADDR to the name of the job's first node"
        raise UserError(f"in a SLURM job, but without the command scontrol: {text}")
    number = int(env["SLURM_JOB_ID"])
    found = {
        "NNODES": nodes,
        "NODE_RANK": env["SLURM_NODEID"],
        "MASTER_ADDR": hosts.partition("\n")[0],
        "MASTER_PORT": str(20000 + number % 300 * 40),  # other jobs may run on these nodes
        "GPUS_PER_NODE": env.get("SLURM_GPUS_ON_NODE", ""),
        "RUN_NAME": f"job{number}-step{step}",  # a requeued job finds its folder again
    }
    return {name: value for name, value in found.items() if value}


# --- Variables of torchrun -----------------------------------------------------------------------


def adapter(name: str) -> Path:
    """The folder of mlx5_0, or mlx5_0:1 for one of its ports, if it is an adapter."""
    return SYSFS / "class/infiniband" / name.partition(":")[0]


def names_in(ifname: str) -> list[str]:
    """The interfaces and adapters that IFNAME names; `adapters` stands for all that are up."""
    names = [name for name in ifname.split(",") if name]
    if "adapters" in names:
        found = [
            path.name for path in sorted(SYSFS.glob("class/infiniband/*")) if is_up(path.name)
        ]
        if not found:
            raise UserError("IFNAME=adapters: this node has no adapter that is up (ibstat)")
        at = names.index("adapters")
        names[at : at + 1] = found
    return names


def is_up(name: str) -> bool:
    _, colon, port = name.partition(":")
    if colon and not port.isdecimal():
        return False
    states = [text_of(path) for path in adapter(name).glob(f"ports/{port or '*'}/state")]
    return "ACTIVE" in str(states) or text_of(SYSFS / "class/net" / name / "carrier") == "1"


def check_interfaces(ifname: str) -> None:
    """Raises UserError if any interface or adapter is missing or down."""
    for name in names_in(ifname):
        if not is_up(name):
            text = "give interfaces or adapters, with commas between them. On this node "
            text += f"tools/preflight.py lists them, and IFNAME={name} tools/preflight.py says "
            text += "what is wrong: a cable?"
            raise UserError(f"IFNAME: '{name}' is not there or down: {text}")


def network_variables(ifname: str, route: str) -> dict[str, str]:
    """What keeps NCCL's and Gloo's traffic on this network; `route`: the interface to node 0."""
    names = names_in(ifname)
    adapters = [name for name in names if adapter(name).exists()]
    sockets = [name for name in names if name not in adapters]
    found: dict[str, str] = {}
    if any((adapter(name) / "device/driver").resolve().name == "efa" for name in adapters):
        pass  # NCCL's plugin for EFA selects the adapters
    elif adapters:
        found["NCCL_IB_DISABLE"] = "0"
        found["NCCL_NET"] = "IB"  # otherwise NCCL may silently fall back to sockets
        found["NCCL_IB_HCA"] = "=" + ",".join(adapters)
    elif sockets:
        found |= {"NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket"}
    if interface := ",".join(sockets) or route:
        found["NCCL_SOCKET_IFNAME"] = f"={interface}"  # without the = eth1 is also eth10
        found["GLOO_SOCKET_IFNAME"] = interface
    return found


def route_to(host: str) -> str:
    """The interface of the route to node 0, or nothing. By itself Gloo would take the address of
    this node's name, which Debian's /etc/hosts says is 127.0.1.1, and NCCL perhaps a bridge of
    containers. With an adapter NCCL only starts over it.
    """
    interface_of = own_addresses()
    try:
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError as error:
        text = "give an address of node 0, or a name that this node knows"
        raise UserError(f"MASTER_ADDR is {host}: {error.strerror}: {text}") from None
    for family, kind, _, _, place in found:
        with contextlib.suppress(OSError), socket.socket(family, kind) as unsent:
            unsent.connect(place)
            if name := interface_of.get(unsent.getsockname()[0]):
                return name
    # MASTER_ADDR is this node's own name: if there is only one interface with a cable.
    names = {name for name in interface_of.values() if is_up(name)}
    return names.pop() if len(names) == 1 else ""


def own_addresses() -> dict[str, str]:
    """{address: interface} of this node, without loopback. (A Mac: none.)"""
    found = {}
    with socket.socket(type=socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                reply = fcntl.ioctl(asked, 0x8915, name.encode().ljust(256, b"\0"))  # SIOCGIFADDR
                found[socket.inet_ntoa(reply[20:24])] = name
    for line in text_of(Path("/proc/net/if_inet6")).splitlines():
        digits, _, _, scope, _, name = line.split()
        if scope == "00":  # global
            found[socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))] = name
    return {address: name for address, name in found.items() if name != "lo"}


def cpu_variables(env: Mapping[str, str]) -> dict[str, str]:
    """What makes a step on a CPU faster."""
    # glibc would give the memory of each step back to the kernel, and take it again page by page.
    found = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "2147483647"}
    # An OpenMP thread that waits for another one would keep its core busy for about 3 ms. Now a
    # loader worker gets the core after 0.1 ms.
    if not env.get("OMP_WAIT_POLICY"):
        found["GOMP_SPINCOUNT"] = "10000"
    return found


# --- How a start ended: by exit code and records -------------------------------------------------


@dataclass
class Record:
    """What a rank has recorded of its end: the class of its error, and its text."""

    kind: str  # one of the script's classes; any other is that rank's own
    text: str


def parse_record(content: str) -> Record | None:
    """A rank's error.json."""
    try:
        kind, _, text = json.loads(content)["message"]["message"].partition(": ")
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return Record(kind, text.partition("\n")[0])


def read_records(folder: Path) -> list[Record | None]:
    """Of each rank of this node, in torchrun's last attempt of a start; None: it has none."""
    attempts = sorted(folder.glob("*/attempt_*"), key=lambda path: int(path.name[8:]))
    ranks = sorted(path for path in attempts[-1].iterdir() if path.is_dir()) if attempts else []
    return [parse_record(text_of(rank / "error.json")) for rank in ranks]


def judge(
    code: int, ranks: list[Record | None], agent: Record | None, quote: str
) -> tuple[str, str]:
    """How a start ended, and why. `code` is torchrun's, `agent` its own record, `quote` a line of
    the log.

    complete  all steps are made
    saved     a stop signal came, and all ranks have saved and stopped
    unsaved   a stop signal came, and all ranks have stopped without a checkpoint
    user      an error that would come again
    apart     the nodes did not meet: no rank was started
    unreached the ranks did not reach each other: a restart may help, no training after a probe
    lost      anything else: a restart may help
    """
    records = [record for record in ranks if record]
    user = [record.text for record in records if record.kind in ("UserError", "LoneUserError")]
    known = ("UserError", "LoneUserError", "Stopped", "PeerLost", "NotConnected")
    own = [f"{record.kind}: {record.text}" for record in records if record.kind not in known]
    peer = [record.text for record in records if record.kind in ("PeerLost", "NotConnected")]
    ended = f"torchrun ended with {code}, see above"
    if code == 0:
        return "complete", ""
    if records and all(record and record.kind == "Stopped" for record in ranks):
        text = records[0].text
        return "unsaved" if "not saved" in text else "saved", text
    if user or code == USER:
        return "user", [*user, quote or ended][0]
    # torchrun records a signal that has ended it, too.
    if not ranks and agent and agent.kind != "SignalException":
        return "apart", agent.text
    unreached = not own and any(record.kind == "NotConnected" for record in records)
    reason = next(filter(None, [*own, quote, *peer, ended]))
    return "unreached" if unreached else "lost", reason


# Of NCCL's watchdog; of torchrun, about a rank that was killed.
QUOTED = [
    "Watchdog caught collective operation timeout|NCCL error|Last error:",
    "Signal (?!15 ).* received",
]


def quote(text: str) -> str:
    """The line of NCCL or torchrun that tells most."""
    lines = text.splitlines()
    found = [line for pattern in QUOTED for line in lines if re.search(pattern, line)]
    return found[0].strip().removeprefix("traceback : ") if found else ""


# --- A command with a log and stop signals -------------------------------------------------------


# On a terminal: records, and the first line of any traceback.
NOT_SHOWN = re.compile(rb"(\[\w+ \d+\] \w+|Counters) \{|Traceback \(")


def start_tee(log: str) -> subprocess.Popen:
    """A process that writes to the log, and another one that writes the same to the screen. Both
    live until the last process has closed the pipe, whatever becomes of this one. If the screen's
    ends, the log's goes on; a screen that is held (Ctrl-S) holds both.
    """
    tee = subprocess.Popen(
        ["tee", "-a", "--", log],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        preexec_fn=leave_terminal,
        restore_signals=False,  # SIGPIPE stays ignored
    )
    if os.fork() == 0:
        try:
            tee.stdin.close()
            leave_terminal()
            show(tee.stdout)
        finally:
            os._exit(0)
    tee.stdout.close()
    return tee


def leave_terminal() -> None:
    """For a process that no stop signal ends, and no Ctrl-Z stops."""
    os.setsid()
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def show(source: BinaryIO) -> None:
    """Writes lines to the standard output, until one of both has gone."""
    on_terminal = os.isatty(1) or NODE
    over = False  # torchrun's own traceback has begun, with its list of ranks: the log has it
    with source, contextlib.suppress(OSError):
        for line in source:
            over = over or b"_run_module_as_main" in line
            if not (on_terminal and (over or NOT_SHOWN.match(line))):
                write_all(NODE + line)


def write_all(line: bytes) -> None:
    """To the standard output, which some CI systems make one that does not block: then a reader
    that does not read for a minute is taken for one that has gone.
    """
    while line:
        try:
            line = line[os.write(1, line) :]
        except BlockingIOError:
            if not select.select([], [1], [], 60)[1]:
                raise


def descendants(pid: int) -> list[int]:
    """Of a process. (On a Mac none: there its ranks notice that torchrun has gone.)"""
    children = " ".join(map(text_of, Path(f"/proc/{pid}/task").glob("*/children"))).split()
    return [one for child in map(int, children) for one in (child, *descendants(child))]


def folder_of(log_dir: str, name: str) -> Path:
    """That of a run's files. Without a name it is a new one."""
    return Path(log_dir) / (name or f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")


class Run:
    """A run on this node: its log, its present process and the stop signal that came."""

    def __init__(self, args: argparse.Namespace, command: Command) -> None:
        self.args, self.command = args, command
        self.variables: dict[str, str] = {}  # of torchrun
        self.log_is_whole = True
        self.wait = args.wait  # seconds, of the next start
        self.process: subprocess.Popen | None = None
        self.stopped = 0  # the first stop signal
        self.interrupts = 0  # how many of them were Ctrl-C
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # of nohup, or of a background job
                signal.signal(number, self.stop)

    def say(self, text: str) -> None:
        line = tell("run.py", text)
        with contextlib.suppress(OSError):  # the disk may be full
            self.log.write(line)

    # --- Signals

    def stop(self, number: int, _frame: object) -> None:
        """Passes the first stop signal on, as SIGTERM, because torchrun ignores SIGINT while it
        waits for other nodes. A second Ctrl-C ends at once.
        """
        self.interrupts += number == signal.SIGINT
        if not self.stopped:
            self.stopped = number
            self.terminate()
        elif number == signal.SIGINT and self.interrupts > 1:
            if self.process:  # torchrun's ranks have sessions of their own
                for pid in [self.process.pid, *descendants(self.process.pid)]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            self.say("killed by a second SIGINT")
            raise SystemExit(128 + number)

    def terminate(self) -> None:
        if self.process:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGTERM)

    def execute(self, *words: object, **variables: str) -> int:
        """Runs a command to the end of all that it has started. Returns its exit code."""
        tee = start_tee(self.log.name)
        self.process = subprocess.Popen(
            [sys.executable, *map(str, words)],
            stdin=subprocess.DEVNULL,
            stdout=tee.stdin,
            stderr=subprocess.STDOUT,
            env={**os.environ, **variables},
            start_new_session=True,  # a group of its own: torchrun would get Ctrl-C twice
            # SLURM sends SIGUSR1 before a time limit, often to all processes. torchrun would die
            # of it. The ranks handle it themselves.
            preexec_fn=lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN),
        )
        tee.stdin.close()
        if self.stopped:  # before there was a process
            self.terminate()
        code = self.process.wait()
        self.process = None
        self.log_is_whole = tee.wait() == 0 and self.log_is_whole
        with contextlib.suppress(ChildProcessError):
            os.wait()  # for what writes the screen
        return code

    # --- The run

    def train(self) -> int:
        """The whole run on this node. Returns the exit code."""
        args, command = self.args, self.command
        folder = folder_of(args.log_dir, args.run_name)
        resumes = "--resume" in command.arguments
        checkpoint = option("--checkpoint", command.arguments)
        if args.restarts:
            checkpoint = checkpoint or str(folder / "checkpoint.pt")
            # A restart would go on with the older run. Nodes may share the folder: node 0, which
            # writes there, alone looks.
            if not resumes and command.node == 0 and os.path.exists(checkpoint):
                text = "give --resume to continue from it, or another --checkpoint or RUN_NAME"
                raise UserError(f"checkpoint {checkpoint} is there already: {text}")
            command.arguments += [f"--checkpoint={checkpoint}"]  # what a restart resumes from
        self.open_log(folder / f"node{command.node}.log")
        self.set_variables(folder)
        if args.sample and self.execute(ROOT / "tools/make_sample_coco.py", SAMPLE):
            outcome, reason = "user", "the sample set was not made: see above"
        else:
            outcome, reason = self.probe_and_train()
        saved = (args.restarts or resumes) and checkpoint and os.path.exists(checkpoint)
        return self.finish(outcome, reason, checkpoint, bool(saved))

    def open_log(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.log = path.open("a+b", buffering=0)
        except OSError as error:
            text = "set LOG_DIR to a folder that can be, or another RUN_NAME"
            raise UserError(f"{path} cannot be written ({error.strerror}): {text}") from None
        if path.stat().st_size:
            self.say(f"{path} has a run already, to which this one is appended")

    def set_variables(self, folder: Path) -> None:
        """For torchrun, beside the user's own, which win. Raises UserError."""
        args, command = self.args, self.command
        threads = str(max(1, usable_cores() // command.processes))
        self.variables["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or threads
        check_interfaces(args.ifname)
        route = route_to(command.host) if command.nodes > 1 else ""
        wanted = network_variables(args.ifname, route)
        if command.nodes > 1 and "GLOO_SOCKET_IFNAME" not in wanted:
            text = "the interface to the other nodes is not found: set IFNAME to it if they do"
            self.say(f"{text} not connect (tools/preflight.py lists this node's)")
        nccl = runs_nccl(command.arguments)
        if not nccl:
            wanted = {name: x for name, x in wanted.items() if not name.startswith("NCCL_")}
        if not runs_on_gpus(command.arguments):
            wanted |= cpu_variables(os.environ)
        for name, value in wanted.items():
            own = os.environ.get(name)
            if own is None:
                self.variables[name] = value
            elif own != value:
                self.say(f"keeping your {name}='{own}' (the launcher would have used '{value}')")
        if nccl and command.host and not any(n.startswith("NCCL_DEBUG") for n in os.environ):
            # For tools/nccl_log.py: which network NCCL uses, and why.
            self.variables |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV"}
            self.variables["NCCL_DEBUG_FILE"] = f"{folder}/nccl.node{command.node}.%h.%p.log"
        # Ranks that validate, or write to slow storage, need more than torchrun's 30 seconds for
        # their last checkpoint. A variable, because an older torchrun does not know the option:
        # there it stays at 30.
        if "PET_SHUTDOWN_TIMEOUT" not in os.environ:
            self.variables["PET_SHUTDOWN_TIMEOUT"] = "120"

    def probe_and_train(self) -> tuple[str, str]:
        """The probe, the training and its restarts. Returns how the last one ended, and why."""
        command, restarts = self.command, self.args.restarts
        if self.args.probe and command.nodes * command.processes > 1:
            outcome, reason = self.start_torchrun(
                1, ROOT / "tools/probe_link.py", command.arguments
            )
            if self.stopped:
                return "lost", reason
            if outcome not in ("complete", "lost"):
                return outcome, reason  # it would come again in the training
            if outcome == "lost":
                self.say(f"the probe failed, the training starts without it: {reason}")
        self.count_traffic()
        outcome, reason = self.start_torchrun(0, command.script, command.arguments)
        for n in range(1, restarts + 1):
            if outcome in ("lost", "unreached") and not self.stopped:
                self.say(f"restart {n} of {restarts}, after: {reason}")
                again = [*command.arguments, "--resume"]
                outcome, reason = self.start_torchrun(n + 1, command.script, again)
        self.count_traffic("--since", self.log.name)
        return outcome, reason

    def count_traffic(self, *options: str) -> None:
        """The kernel's counters: which interface carried the training."""
        if not self.command.host or self.stopped:
            return
        if self.execute(ROOT / "tools/counters.py", *options):
            self.say("the kernel's counters could not be read, see above: the run goes on")

    def start_torchrun(self, number: int, script: object, arguments: list[str]) -> tuple[str, str]:
        """One start of torchrun: how it ended, and why."""
        command, nodes = self.command, self.command.nodes
        options = filled(command.options, number, self.args.port, self.wait)
        words = [*options, str(script), *arguments]
        given = [f"{name}={value}" for name, value in self.variables.items()]
        line = shlex.join([*given, "torchrun", *words])
        self.say(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}")
        if nodes > 1:
            self.say(f"waiting for {nodes - 1} other node(s), up to {self.wait} s")
        begin = os.fstat(self.log.fileno()).st_size
        # Each start has records of its own: a rank's, and torchrun's.
        with tempfile.TemporaryDirectory(prefix="run.py-", ignore_cleanup_errors=True) as folder:
            agent = Path(folder) / "agent.json"
            own = {"PET_LOG_DIR": folder, "TORCHELASTIC_ERROR_FILE": str(agent)}
            code = self.execute("-m", "torch.distributed.run", *words, **self.variables, **own)
            ranks, torchrun = read_records(Path(folder)), parse_record(text_of(agent))
        # From now on a node may need --timeout to notice that another has failed.
        self.wait = wait_later(self.args.wait, command.arguments)
        # Not by its name: somebody may have removed the file.
        size = os.fstat(self.log.fileno()).st_size - begin if code else 0
        text = os.pread(self.log.fileno(), size, begin).decode(errors="replace")
        outcome, reason = judge(code, ranks, torchrun, quote(text))
        if outcome == "apart" and command.host:
            text = "Is this port (MASTER_PORT) free on node 0"
            if nodes > 1:
                text += ", and open in its firewall? Has the launcher been started on all "
                text += f"{nodes} nodes, each with its own NODE_RANK and the same RUN_NAME"
            place = option("--rdzv_endpoint", options)
            reason = f"{APART} at {place}: {reason.rstrip('.')}. {text}? Try tools/preflight.py"
        return outcome, reason

    def finish(self, outcome: str, reason: str, checkpoint: str, saved: bool) -> int:
        """The last lines, and the exit code. saved: the checkpoint is one of this run."""
        folder = shlex.quote(str(Path(self.log.name).parent))
        self.say(f"log: {self.log.name} (python tools/compare_logs.py {folder} reads it)")
        if not self.log_is_whole:
            text = "cannot be written, and is not whole: is its disk full?"
            self.say(f"error: the log {self.log.name} {text}")
        if outcome == "complete":
            if self.args.sample and not self.command.host and self.log_is_whole:
                text = "GPUS=2 ./launch_single.sh for two processes, or images of your own: "
                self.say(f"next: {text}--coco_image_path DIR --annotation_path FILE")
            return 0 if self.log_is_whole else FAILED
        if outcome == "unsaved" and not self.stopped:  # the signal came to another node
            self.stopped = signal.Signals[reason.split()[2]]  # "Stopped on SIGTERM | ..."
        name = f" by {signal.Signals(self.stopped).name}" if self.stopped else ""
        # A signal that came between two starts finds no rank: what is saved is the last start's.
        if outcome == "saved" or (self.stopped and saved):
            way = f": --resume goes on from {checkpoint}" if checkpoint else ""
            # Another node need not have node 0's file.
            self.say(f"stopped{name}{', saved by node 0' if self.command.node else way}")
            return STOPPED
        if self.stopped:
            self.say(f"stopped{name}, not saved")
            return 128 + self.stopped
        self.say(f"error: {reason}")
        return USER if outcome == "user" else FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
