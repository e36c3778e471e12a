#!/usr/bin/env python3
"""Runs a torchrun command: with a log, stop signals, restarts, a last line and an exit code.

    tools/run.py [options] -- torchrun OPTIONS SCRIPT ARGUMENTS

The launchers call it; ./launch_single.sh --help has the exit codes. The command begins with the
word torchrun, and its options are written as --name=value. In them {start} is the number of the
start (0: a probe, 1: the training, 2 and more: restarts), {port} that number above --port, and
{wait} how many seconds the nodes wait for each other.
For the launchers: `run.py --job` prints the settings of this node, `run.py --count` its GPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from analysis.kernel import SYSFS, text_of

ROOT = Path(__file__).resolve().parents[1]
SAMPLE, MAKE_SAMPLE = ROOT / "data/sample_coco", ROOT / "tools/make_sample_coco.py"
PROBE = ROOT / "tools/probe_link.py"
DATA = ("coco_image_path", "annotation_path", "val_image_path", "val_annotation_path")
SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
FAILED, USER, STOPPED = 1, 2, 75  # exit codes
NODE = os.environ.get("SHOWN_NODE", "").encode()  # of two_nodes.sh, on a terminal
TIMEOUT = 300  # seconds: the script's default of --timeout


class UserError(Exception):
    """Something that a user can fix: one line, exit code 2."""


def main(words: list[str]) -> int:
    try:
        if words == ["--count"]:
            print(count_gpus() or no_gpus("GPUS"))
            return 0
        if words == ["--job"]:
            print("\n".join(f"{name}={shlex.quote(x)}" for name, x in job(os.environ).items()))
            return 0
        args, command = parse_arguments(words)
        with tempfile.TemporaryDirectory(prefix="run.py-", ignore_cleanup_errors=True) as records:
            return Run(args, command, Path(records)).train()
    except UserError as error:
        tell("run.py", f"error: {error}")
        return USER


def tell(name: str, text: str) -> bytes:
    line = f"{name}: {text}\n".encode(errors="backslashreplace")
    with contextlib.suppress(OSError):  # a terminal may be gone
        os.write(2, NODE + line)
    return line


def parse_arguments(words: list[str]) -> tuple[argparse.Namespace, Command]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    text = "the run's files are in LOG_DIR/RUN_NAME; without a name one is made of date and time"
    parser.add_argument("--log_dir", default="logs", help=text)
    parser.add_argument("--run_name", default="", help="see --log_dir")
    parser.add_argument("--restarts", default="0", help="starts after a failure")
    parser.add_argument("--port", default="29500", help="of start 0")
    parser.add_argument("--wait", default="300", help="seconds to wait for the other nodes")
    parser.add_argument("--probe", default="0", help="1: measure the link before the training")
    parser.add_argument("--ifname", default="", help="interfaces or adapters for the traffic")
    parser.add_argument("--network", default="", help="infiniband or ethernet")
    text = "the script's arguments if no data is given: for the sample set in {sample}"
    parser.add_argument("--sample", default="", help=text)
    begin = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:begin])
    refuse_series(os.environ)
    args.restarts = whole("RESTARTS", args.restarts, 0, 1000)
    args.wait = whole("CONNECT_TIMEOUT", args.wait, 1, 1_000_000)
    args.probe = whole("PROBE", args.probe, 0, 1)
    args.port = whole("MASTER_PORT", args.port, 1, 65534 - args.restarts)
    command = parse_command(words[begin + 1 :])
    if args.sample and names_no_data(command.arguments):
        sample = [word.replace("{sample}", str(SAMPLE)) for word in shlex.split(args.sample)]
        command.arguments = [*sample, *command.arguments]
    else:
        args.sample = ""
    return args, command


def whole(name: str, value: str, least: int, most: int) -> int:
    """A setting that has to be such a whole number."""
    if not re.fullmatch(r"[0-9]{1,9}", value):
        raise UserError(f"{name} is '{value}': give a whole number")
    if not least <= int(value) <= most:
        raise UserError(f"{name} is {value}: give a number from {least} to {most}")
    return int(value)


def refuse_series(env: Mapping[str, str]) -> None:
    """What was a variable of the launchers once: several runs have a command of their own."""
    words = [f"--network {network}" for network in env.get("NETWORKS", "").split()]
    numbers = env.get("GPUS", "").split()
    words += [f"--processes {','.join(numbers)}"] if len(numbers) > 1 else []
    words += [f"--repeats {env['REPEATS']}"] if env.get("REPEATS") else []
    if words:
        text = "NETWORKS, REPEATS and several GPUS are not for one run. Several start with"
        raise UserError(f"{text} tools/series.py {' '.join(words)} -- ARGUMENTS")


# --- The command ---------------------------------------------------------------------------------


@dataclass
class Command:
    """A torchrun command in three parts."""

    options: list[str]
    script: str
    arguments: list[str]

    def number(self, name: str, default: int) -> int:
        """A number among the options of torchrun."""
        value = option(name, self.options)
        return int(value) if re.fullmatch("[0-9]+", value) else default

    def endpoint(self) -> str:
        """Where several nodes meet, or nothing."""
        return option("--rdzv_endpoint", self.options)


def parse_command(words: list[str]) -> Command:
    """Its script is the first word that is no option."""
    script = next((n for n, word in enumerate(words[1:], 1) if not word.startswith("-")), 0)
    if words[:1] != ["torchrun"] or not script:
        raise UserError("write: run.py [options] -- torchrun --option=value ... SCRIPT ARGUMENTS")
    command = Command(words[1:script], words[script], words[script + 1 :])
    processes = option("--nproc_per_node", command.options)
    whole("the number of processes (GPUS or GPUS_PER_NODE)", processes, 1, 4096)
    return command


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
    """The options of torchrun for a start."""
    values = {"{start}": str(start), "{port}": str(port + start), "{wait}": str(wait)}
    return [re.sub(r"\{\w+\}", lambda m: values.get(m[0], m[0]), word) for word in options]


def wait_later(wait: int, arguments: list[str]) -> int:
    """How long a node waits in a later start: another one may notice a failure by --timeout."""
    try:
        timeout = round(float(option("--timeout", arguments)))
    except (ValueError, OverflowError):
        timeout = TIMEOUT
    return wait + timeout + 60


# --- This node -----------------------------------------------------------------------------------


def count_gpus(python: str = sys.executable) -> int:
    """As PyTorch counts them: also AMD's, parts of one (MIG), and without an nvidia-smi."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return 0
    code = "import torch; print(torch.cuda.device_count())"
    last = output_of(python, "-c", code).strip().rpartition("\n")[2]
    return int(last) if last.isdecimal() else 0


def no_gpus(name: str) -> str:
    raise UserError(f"{name}=all, but PyTorch finds no GPU here: give the number of processes")


def nvidia_smi_lists_a_gpu() -> bool:
    """A PyTorch for CPUs alone must not train on them in silence."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    return output_of("nvidia-smi", "-L").startswith("GPU ")


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Those of the affinity or, if a container's CPU quota is less, that, rounded up."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        cores = len(os.sched_getaffinity(0))
    files = ("cpu.max", "cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")  # of cgroup v2, and v1
    quota, period, *_ = [*" ".join(text_of(cgroup / name) for name in files).split(), "", ""]
    if quota.isdecimal():  # without a quota: max, or -1
        cores = min(cores, -(-int(quota) // int(period)))
    return cores


def job(env: Mapping[str, str], count: Callable[[], int] = count_gpus) -> dict[str, str]:
    """How many nodes there are, which one this is and where node 0 is: as the variables or SLURM
    say. Another scheduler's variables belong here. Raises UserError.
    """
    refuse_series(env)
    names = "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "GPUS_PER_NODE", "RUN_NAME"
    found = {name: env.get(name, "") for name in names}
    nodes, world = found["NNODES"] or env.get("WORLD_SIZE", ""), env.get("WORLD_SIZE")
    if world and world != nodes:
        text = "here both mean the number of nodes, set one of them"
        raise UserError(f"NNODES is {nodes} but WORLD_SIZE is {world}: {text}")
    found["NNODES"] = nodes
    if not nodes and env.get("SLURM_JOB_ID"):
        for name, value in slurm_job(env).items():
            found[name] = found[name] or value
    if found["NNODES"] != "1" and not all(found[name] for name in names[:3]):
        told = ", ".join(f"{name} '{found[name]}'" for name in names[:3])
        text = "set the number of nodes, 0 on the node of MASTER_ADDR and 1 to NNODES - 1 on the "
        text += "others, and an address of node 0 that all can reach"
        raise UserError(f"{told}: {text}")
    number = whole("NNODES", found["NNODES"], 1, 1_000_000)
    rank = whole("NODE_RANK", found["NODE_RANK"] or "0", 0, number - 1)
    port = whole("MASTER_PORT", found["MASTER_PORT"] or "29500", 1, 65535)
    found |= {"NNODES": str(number), "NODE_RANK": str(rank), "MASTER_PORT": str(port)}
    found["MASTER_ADDR"] = found["MASTER_ADDR"] or "localhost"
    if found["GPUS_PER_NODE"] in ("", "all"):
        gpus = count()
        if found["GPUS_PER_NODE"] and not gpus:
            no_gpus("GPUS_PER_NODE")
        found["GPUS_PER_NODE"] = str(gpus or 1)
    return found


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
    number = int(env["SLURM_JOB_ID"])
    return {
        "NNODES": nodes,
        "NODE_RANK": env["SLURM_NODEID"],
        "MASTER_ADDR": hosts.partition("\n")[0],
        "MASTER_PORT": str(20000 + number % 300 * 40),  # other jobs may run on these nodes
        "GPUS_PER_NODE": env.get("SLURM_GPUS_ON_NODE", ""),
        "RUN_NAME": f"job{number}-step{step}",  # a requeued job finds its folder again
    }


# --- The network ---------------------------------------------------------------------------------


def adapter(name: str) -> Path:
    """The folder of mlx5_0, or mlx5_0:1 for one of its ports, if it is an adapter."""
    return SYSFS / "class/infiniband" / name.partition(":")[0]


def check_interfaces(ifname: str) -> None:
    """Raises UserError if any interface or adapter is missing or down."""
    if " " in ifname:
        raise UserError(f"IFNAME is '{ifname}': separate names by commas")
    for name in filter(None, ifname.split(",")):
        interface = SYSFS / "class/net" / name
        if adapter(name).exists():
            if not any("ACTIVE" in text_of(x) for x in adapter(name).glob("ports/*/state")):
                text = "look at its cable, ibstat, the subnet manager"
                raise UserError(f"no port of {name} is active: {text}")
        elif not interface.exists():
            text = "'ip -br link' lists interfaces, 'ls /sys/class/infiniband' adapters"
            raise UserError(f"this node has no {name}: {text}")
        elif text_of(interface / "carrier") != "1":
            text = "'ip -br link' shows it"
            raise UserError(f"interface {name} is down, or has no cable: {text}")


def network_variables(ifname: str, network: str, route: str, notes: list[str]) -> dict[str, str]:
    """What keeps NCCL's and Gloo's traffic on this network; `route`: the interface to node 0."""
    if network not in ("", "ethernet", "infiniband"):
        raise UserError(f"NETWORK is '{network}': give ethernet or infiniband")
    names = [name for name in ifname.split(",") if name]
    adapters = [name for name in names if adapter(name).exists()]
    sockets = [name for name in names if name not in adapters]
    found: dict[str, str] = {}
    if any((adapter(name) / "device/driver").resolve().name == "efa" for name in adapters):
        notes.append(f"{','.join(adapters)}: NCCL's plugin for EFA selects the adapters")
    elif adapters or network == "infiniband":
        if network == "ethernet":
            text = "is an adapter: name its interface"
            raise UserError(f"NETWORK=ethernet, but {','.join(adapters)} {text}")
        found["NCCL_IB_DISABLE"] = "0"
        found["NCCL_NET"] = "IB"  # otherwise NCCL may silently fall back to sockets
        if adapters:
            found["NCCL_IB_HCA"] = "=" + ",".join(adapters)
    elif sockets or network:
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
    names = []
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(host)
        names = addressed("to", address)  # on the node of MASTER_ADDR
        route = output_of("ip", "-o", "route", "get", address)
        names = names or re.findall(r" dev (\S+)", route)
    if names in ([], ["lo"]):  # MASTER_ADDR is this node's own name: if there is only one
        names = addressed("up", "scope", "global")
    return names[0] if len(names) == 1 else ""


def addressed(*which: str) -> list[str]:
    """Interfaces with such an IPv4 address, without lo."""
    lines = output_of("ip", "-o", "-4", "address", "show", *which)
    return sorted({*re.findall(r"^\d+: *(\S+)", lines, re.MULTILINE)} - {"lo"})


def output_of(*command: str) -> str:
    with contextlib.suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True).stdout
    return ""


# --- Variables of torchrun -----------------------------------------------------------------------


def cpu_variables(env: Mapping[str, str]) -> dict[str, str]:
    """What makes a step on a CPU faster."""
    # glibc would give the memory of each step back to the kernel, and take it again page by page.
    found = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "2147483647"}
    # An OpenMP thread that waits for another one would keep its core busy for about 3 ms. Now a
    # loader worker gets the core after 0.1 ms.
    if not env.get("OMP_WAIT_POLICY"):
        found["GOMP_SPINCOUNT"] = "10000"
    return found


def without_users_own(
    wanted: Mapping[str, str], env: Mapping[str, str], notes: list[str]
) -> dict[str, str]:
    """Those of the variables that the user has not set; a note for each one that differs."""
    for name, value in wanted.items():
        if env.get(name, value) != value:
            text = f"(the launcher would have used '{value}')"
            notes.append(f"keeping your {name}='{env[name]}' {text}")
    return {name: value for name, value in wanted.items() if name not in env}


def variables_of(args: argparse.Namespace, command: Command, notes: list[str]) -> dict[str, str]:
    """The environment that torchrun is given beside the user's."""
    env = os.environ
    processes = command.number("--nproc_per_node", 1)
    threads = env.get("OMP_NUM_THREADS") or str(max(1, usable_cores() // processes))
    wanted: dict[str, str] = {}
    if option("--device", command.arguments) != "cuda":
        wanted |= cpu_variables(env)
    check_interfaces(args.ifname)
    host = command.endpoint().rpartition(":")[0]
    route = route_to(host) if command.number("--nnodes", 1) > 1 else ""
    wanted |= network_variables(args.ifname, args.network, route, notes)
    found = {"OMP_NUM_THREADS": threads} | without_users_own(wanted, env, notes)
    # Ranks that validate, or write to slow storage, need more than torchrun's 30 seconds for their
    # last checkpoint. A variable, because an older torchrun does not know the option.
    return found | {"PET_SHUTDOWN_TIMEOUT": "120"}


# --- How a start ended: by exit code and records -------------------------------------------------


@dataclass
class Record:
    """What a rank has recorded of its end: own, shared, peer or stopped; and its line."""

    word: str
    text: str
    time: int = 0


def parse_record(content: str) -> Record | None:
    """A rank's error.json. What another script has recorded is that rank's own error."""
    try:
        message = json.loads(content)["message"]
        text = message["message"].partition("\n")[0]
        when = int(message["extraInfo"]["timestamp"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    found = re.fullmatch(r"\w+: (own|shared|peer|stopped): (.*)", text)
    return Record(found[1], found[2], when) if found else Record("own", text, when)


def read_records(folder: Path) -> list[Record | None]:
    """Of each rank of this node, in torchrun's last attempt of a start; None: it has none."""
    attempts = sorted(folder.glob("*/attempt_*"), key=lambda path: int(path.name[8:]))
    ranks = sorted(path for path in attempts[-1].iterdir() if path.is_dir()) if attempts else []
    return [parse_record(text_of(rank / "error.json")) for rank in ranks]


def judge(
    code: int, ranks: list[Record | None], agent: Record | None, quote: str, listed: str = ""
) -> tuple[str, str]:
    """How a start ended, and why. `code` is torchrun's, `agent` its own record;
    `quote` and `listed` are lines of the log.

    complete  all steps are made
    asked     a stop signal came, and all ranks have saved and stopped
    user      an error that would come again
    apart     the nodes did not meet: no rank was started
    lost      anything else: a restart may help
    """
    records = sorted((record for record in ranks if record), key=lambda record: record.time)
    first = {record.word: record.text for record in reversed(records)}
    if code == 0:
        return "complete", ""
    if records and all(record and record.word == "stopped" for record in ranks):
        return "asked", first["stopped"]
    if "shared" in first or code == USER:
        return "user", first.get("shared") or quote or f"torchrun ended with {code}"
    # torchrun records a signal that has ended it, too.
    if not ranks and agent and not agent.text.startswith("SignalException"):
        return "apart", agent.text.partition(": ")[2]
    reason = first.get("own") or quote or first.get("peer") or listed
    return "lost", reason or f"torchrun ended with {code}"


QUOTED = [  # of NCCL's watchdog; of torchrun, which has killed a rank, or lists those that failed
    re.compile(rb"Watchdog caught collective operation timeout|NCCL error|Last error:"),
    re.compile(rb"Signal (?!15 ).* received"),
    re.compile(rb"^ *exitcode +: (?!-15 |0 )"),
]


def quote(lines: Iterable[bytes]) -> tuple[str, str]:
    """The line of NCCL or torchrun that tells most, and the first exit code that is listed."""
    found = ["", "", ""]
    for line in lines:
        for n, pattern in enumerate(QUOTED):
            if not found[n] and pattern.search(line):
                found[n] = line.decode(errors="replace").strip().removeprefix("traceback : ")
    return found[0] or found[1], found[2]


# --- A command with a log and stop signals -------------------------------------------------------


RANK = re.compile(rb"\[\w+ \d+\] (?:\w+ (\{)?)?")


class Terminal:
    """What is shown where the output is a terminal: all but the records, and torchrun's own
    traceback with its list of ranks. The log has both.
    """

    def __init__(self) -> None:
        self.held = b""  # a traceback's first line, until the next one says whose it is
        self.inside, self.rules = False, 0  # in one of torchrun, and its list's lines of =

    def shown(self, line: bytes) -> bytes:
        if rank := RANK.match(line):
            return b"" if rank[1] else line
        if line.startswith((b"Counters {", b"Traceback (")):
            self.held = line if line.startswith(b"T") else b""
            return b""
        if self.held:
            self.inside = b"_run_module_as_main" in line
            held, self.held, self.rules = self.held, b"", 0
            return b"" if self.inside else held + line
        if self.inside:
            self.rules += line.startswith(b"=====")
            in_list = self.rules == 1 or b"ChildFailedError" in line
            self.inside = self.rules < 2 and (in_list or line[:1] in (b" ", b"\n"))
            return b""
        return line


def write_lines(source: int, log: Path | None) -> int:
    """Writes what comes to the log and to the standard output. A full disk of the log, or a
    reader that has gone, is no reason to stop. Returns 1 if the log is not whole.
    """
    screen = os.fdopen(1, "wb", closefd=False)
    terminal = Terminal() if os.isatty(1) or NODE else None
    outputs, file = [screen], None
    if log:
        with contextlib.suppress(OSError):
            file = log.open("ab")
            outputs.append(file)
    for line in os.fdopen(source, "rb"):
        for output in [*outputs]:
            try:
                shown = terminal.shown(line) if terminal and output is screen else line
                output.write(NODE + shown if shown and output is screen else shown)
                output.flush()
            except OSError:
                outputs.remove(output)
    return int(log is not None and file not in outputs)


def start_writer(log: Path | None) -> tuple[int, int]:
    """A process that lives until the last one has closed the pipe, whatever becomes of this one:
    its id, and the pipe's end.
    """
    source, pipe = os.pipe()
    writer = os.fork()
    if writer == 0:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        os.close(pipe)
        os.setsid()
        os._exit(write_lines(source, log))
    os.close(source)
    return writer, pipe


def make_folder(log_dir: str, name: str) -> Path:
    """That of the run's files. Without a name it is a new one, called by date and time."""
    folder = Path(log_dir) / name
    try:
        while not name:
            folder = Path(log_dir) / time.strftime("%Y%m%d-%H%M%S")
            with contextlib.suppress(FileExistsError):
                folder.mkdir(parents=True)
                break
            time.sleep(0.2)  # another run was started in this second
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        text = f"the folder {folder} cannot be made ({error.strerror})"
        raise UserError(f"{text}: set LOG_DIR to a folder that can be written") from None
    return folder


class Run:
    """A run on this node: its log, its present process and the stop signal that came."""

    def __init__(self, args: argparse.Namespace, command: Command, records: Path) -> None:
        self.args, self.command, self.records = args, command, records
        self.variables: dict[str, str] = {}  # of torchrun
        self.log: Path | None = None
        self.log_is_whole = True
        self.wait = args.wait  # seconds, of the next start
        self.job = 0  # the process group of what was started
        self.stopped = 0  # the first stop signal
        self.told = self.killed = False
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # of nohup, or of a background job
                signal.signal(number, self.stop)

    def say(self, text: str) -> None:
        line = tell("run.py", text)
        with contextlib.suppress(OSError), open(self.log or os.devnull, "ab") as file:
            file.write(line)  # the disk may be full

    # --- Signals

    def stop(self, number: int, _frame: object) -> None:
        """Passes a stop signal on, once, as SIGTERM, because torchrun ignores SIGINT while it
        waits for other nodes. A second Ctrl-C kills.
        """
        if number == self.stopped == signal.SIGINT:
            self.killed = True
            self.send(signal.SIGKILL)
        self.stopped = self.stopped or number
        self.pass_on()

    def pass_on(self) -> None:
        if self.stopped and self.job and not self.told:
            self.told = True
            self.send(signal.SIGTERM)

    def send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self.job:
                os.killpg(self.job, number)

    def execute(self, *words: object, **variables: str) -> int:
        """Runs a command to the end of all that it has started. Returns its exit code."""
        writer, pipe = start_writer(self.log)
        process = subprocess.Popen(
            [sys.executable, *map(str, words)],
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=subprocess.STDOUT,
            env={**os.environ, **variables},
            start_new_session=True,  # a group of its own: torchrun would get Ctrl-C twice
            # SLURM sends SIGUSR1 before a time limit, often to all processes. torchrun would die
            # of it. The ranks handle it themselves.
            preexec_fn=lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN),
        )
        os.close(pipe)
        self.job, self.told = process.pid, False
        self.pass_on()  # a signal that came before there was a process
        code = process.wait()
        self.job = 0
        ended = status = 0
        while not ended and not self.killed:
            ended, status = os.waitpid(writer, os.WNOHANG)
            time.sleep(0.0 if ended else 0.02)
        self.log_is_whole = self.log_is_whole and status == 0
        return code

    # --- The run

    def open_log(self, log: Path, resumes: bool) -> None:
        try:
            log.open("ab").close()
        except OSError as error:
            text = f"the log {log} cannot be written ({error.strerror})"
            raise UserError(f"{text}: set LOG_DIR to a folder that can") from None
        self.log = log
        if log.stat().st_size and not resumes:
            text = "this one is appended. RUN_NAME gives it a folder of its own"
            self.say(f"{log} has a run already: {text}")

    def train(self) -> int:
        """The whole run on this node. Returns the exit code."""
        args, command = self.args, self.command
        node, notes = command.number("--node_rank", 0), []
        if nvidia_smi_lists_a_gpu():
            command.arguments = ["--device", "cuda", *command.arguments]
        self.variables = variables_of(args, command, notes)
        folder = make_folder(args.log_dir, args.run_name)
        resumes = "--resume" in command.arguments
        checkpoint = option("--checkpoint", command.arguments)
        if args.restarts:
            checkpoint = checkpoint or str(folder / "checkpoint.pt")
            # A restart would go on with the older run. Nodes may share the folder: node 0, which
            # writes there, alone looks.
            if not resumes and node == 0 and Path(checkpoint).exists():
                text = "give --resume to continue from it, or another --checkpoint or RUN_NAME"
                raise UserError(f"checkpoint {checkpoint} is there already: {text}")
            command.arguments += ["--checkpoint", checkpoint]  # what a restart resumes from
        self.open_log(folder / f"node{node}.log", resumes)
        for note in notes:
            self.say(note)
        if command.endpoint() and not any(name.startswith("NCCL_DEBUG") for name in os.environ):
            # For tools/nccl_log.py: which network NCCL uses, and why.
            self.variables |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV"}
            self.variables["NCCL_DEBUG_FILE"] = str(folder / f"nccl.node{node}.%h.%p.log")
        if args.sample and self.execute(MAKE_SAMPLE, SAMPLE):
            outcome, reason = "user", "the sample set was not made: see above"
        else:
            outcome, reason = self.starts()
        saved = bool(args.restarts or resumes) and Path(checkpoint).exists()
        return self.finish(outcome, reason, checkpoint, saved)

    def starts(self) -> tuple[str, str]:
        """The probe, the training and its restarts. Returns how the last one ended, and why."""
        command, restarts = self.command, self.args.restarts
        processes = command.number("--nnodes", 1) * command.number("--nproc_per_node", 1)
        if self.args.probe and processes > 1:
            outcome, reason = self.start(0, PROBE, command.arguments)
            if outcome != "complete" or self.stopped:
                return outcome, reason  # there is no training
        self.count_traffic()
        outcome, reason = self.start(1, command.script, command.arguments)
        for n in range(1, restarts + 1):
            if outcome == "lost" and not self.stopped:
                self.say(f"restart {n} of {restarts}, after: {reason}")
                again = [*command.arguments, "--resume"]
                outcome, reason = self.start(n + 1, command.script, again)
        self.count_traffic("--since", self.log)
        return outcome, reason

    def count_traffic(self, *options: object) -> None:
        """The kernel's counters: which interface carried the training."""
        if self.command.endpoint() and not self.stopped:
            self.execute(ROOT / "tools/counters.py", *options)

    def start(self, number: int, script: object, arguments: list[str]) -> tuple[str, str]:
        """One start of torchrun: how it ended, and why. A start has the same number and port on
        every node, so that a node in start 1 never joins start 2.
        """
        nodes = self.command.number("--nnodes", 1)
        options = filled(self.command.options, number, self.args.port, self.wait)
        words = [*options, str(script), *arguments]
        given = [f"{name}={value}" for name, value in self.variables.items()]
        line = shlex.join([*given, "torchrun", *words])
        self.say(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}")
        if nodes > 1:
            self.say(f"waiting for {nodes - 1} other node(s), up to {self.wait} s")
        # Each start has records of its own: a rank's, and torchrun's.
        records = self.records / str(number)
        records.mkdir()
        own = {"PET_LOG_DIR": str(records), "TORCHELASTIC_ERROR_FILE": f"{records}/agent.json"}
        begin = self.log.stat().st_size if self.log and self.log.exists() else 0
        code = self.execute("-m", "torch.distributed.run", *words, **self.variables, **own)
        # From now on a node may need --timeout to notice that another has failed.
        self.wait = wait_later(self.args.wait, self.command.arguments)
        told, listed = quote(self.lines_from(begin)) if code else ("", "")
        agent = parse_record(text_of(records / "agent.json"))
        outcome, reason = judge(code, read_records(records), agent, told, listed)
        if outcome == "apart" and nodes > 1:
            text = f"Has the launcher been started on all {nodes} nodes, each with its own "
            text += "NODE_RANK and the same RUN_NAME? Is this port free on node 0, and open in "
            text += "its firewall? Try tools/preflight.py"
            place = option("--rdzv_endpoint", options)
            reason = f"the nodes did not meet at {place}: {reason.rstrip('.')}. {text}"
        return outcome, reason

    def lines_from(self, begin: int) -> Iterator[bytes]:
        with contextlib.suppress(OSError), open(self.log or os.devnull, "rb") as file:
            file.seek(begin)
            yield from file

    def finish(self, outcome: str, reason: str, checkpoint: str, saved: bool) -> int:
        """The last line, and the exit code. saved: the checkpoint is one of this run."""
        if not self.log_is_whole:
            text = "cannot be written, and is not whole: is its disk full?"
            self.say(f"error: the log {self.log} {text}")
        if outcome == "complete":
            return 0 if self.log_is_whole else FAILED
        name = f" by {signal.Signals(self.stopped).name}" if self.stopped else ""
        # A signal that came between two starts finds no rank: what is saved is the last start's.
        if outcome == "asked" or (self.stopped and saved):
            way = f": --resume goes on from {checkpoint}" if checkpoint else ""
            self.say(f"stopped{name}{way}")
            return STOPPED
        if self.stopped:
            self.say(f"stopped{name}")
            return 128 + self.stopped
        self.say(f"error: {reason}")
        return USER if outcome == "user" else FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
