#!/usr/bin/env python3
"""Faults that the tests must notice. Each one is put into a copy of the project, where the tests
that guard against it then have to fail, three times of three.

    tests/mutants.py                    all faults: about 15 minutes on two cores
    tests/mutants.py set-epoch shares   these
    tests/mutants.py --list             their names

A test says which faults it guards against: @pytest.mark.guards("set-epoch"). Before you take code
or a test away, look for the fault that would show the loss; if there is none, add it here first.
Exit code: 0: all were noticed; 1: one was not, or its text is no longer in the file.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TIMES = 3  # a fault that is noticed by chance is not noticed
SECONDS = 300  # for one run of the tests of one fault
SCRIPT = "demo_coco_resnet18.py"


@dataclass(frozen=True)
class Fault:
    """In the file `path` the text `old`, which is in it once, becomes `new`. `shows` says what a
    user would see. A fault with `untestable`, the reason, is not tried: `old` is then its comment.
    """

    name: str
    path: str
    old: str
    new: str
    shows: str
    untestable: str = ""

    def problem(self) -> str:
        """Why it cannot be put into the file; nothing if it can."""
        count = (ROOT / self.path).read_text().count(self.old)
        return "" if count == 1 else f"its text is {count} times in {self.path}"

    def put_into(self, folder: Path) -> None:
        file = folder / self.path
        file.write_text(file.read_text().replace(self.old, self.new))
        if file.suffix == ".py":
            compile(file.read_text(), file, "exec")
        elif file.suffix == ".sh":
            subprocess.run(["bash", "-n", file], check=True)


FAULTS = [
    # ---- The script: shares, gradients, sums, restarts and ends
    Fault(
        "set-epoch",
        SCRIPT,
        "    loader.sampler.set_epoch(epoch)\n",
        "",
        "each epoch repeats the first one's order and crops",
    ),
    Fault(
        "validation-shares",
        SCRIPT,
        "        sampler.end += 1\n",
        "        pass\n",
        "validation leaves images out",
    ),
    # ---- Files: annotations, images, prepared and generated sets
    # ---- compare_logs.py and analysis/
    # ---- NCCL's text, counters, probe, preflight
    # ---- Launchers, environment, nodes, schedulers
    Fault(
        "route-interface",
        "tools/launcher/networks.sh",
        '        name_route "$efa$adapters"\n',
        "        true\n",
        "Gloo listens at 127.0.1.1, and the nodes never connect",
    ),
    Fault(
        "loopback-name",
        "tools/launcher/networks.sh",
        '    if [ -z "$name" ] || [ "$name" = lo ]; then name',
        '    if [ -z "$name" ]; then name',
        "where MASTER_ADDR is the node's own name, Gloo is given lo",
    ),
    Fault(
        "ifname-exact",
        "tools/launcher/networks.sh",
        'NCCL_SOCKET_IFNAME "=${sockets',
        'NCCL_SOCKET_IFNAME "${sockets',
        "eth1 also stands for eth10",
    ),
    Fault(
        "hca-exact",
        "tools/launcher/networks.sh",
        'NCCL_IB_HCA "=${adapters',
        'NCCL_IB_HCA "${adapters',
        "mlx5_1 also stands for mlx5_10",
    ),
    Fault(
        "net-ib",
        "tools/launcher/networks.sh",
        "        prefer NCCL_NET IB # otherwise",
        "        # otherwise",
        "without its adapter NCCL falls back to TCP in silence",
    ),
    Fault(
        "efa-plugin",
        "tools/launcher/networks.sh",
        "== */efa ]]",
        "== */no ]]",
        "NCCL is kept from the plugin that an EFA device needs",
    ),
    Fault(
        "containers-left-out",
        "tools/launcher/networks.sh",
        '|veth|virbr)"\n',
        '|virbr)"\n    return 0\n',
        "NCCL takes a bridge of containers for the network between the nodes",
    ),
    Fault(
        "container-joins",
        "tools/launcher/networks.sh",
        '    grep -qE " $virtual" <<<"$found" || prefer',
        "    prefer",
        "nodes joined by a bridge or veth are forbidden to use it",
    ),
    Fault(
        "user-value-wins",
        "tools/launcher/common.sh",
        '    if [ -z "${!1+set}" ]; then\n        variables',
        "    if true; then\n        variables",
        "a user's NCCL variable is silently replaced",
    ),
    Fault(
        "names-twice",
        "tools/launcher/common.sh",
        "| sort | uniq -d)",
        "| sort | uniq -d | grep -v .)",
        "two networks of one name write into one folder",
    ),
    Fault(
        "series-with-resume",
        "tools/launcher/common.sh",
        '|| die "$1 and --resume',
        '|| say "$1 and --resume',
        "the second run of a series goes on from the first one's checkpoint",
    ),
    Fault(
        "run-has-own-files",
        "tools/launcher/common.sh",
        '[ -z "$file" ] || words+=',
        '[ -n "$file" ] || words+=',
        "the runs of a series write over each other's checkpoint",
    ),
    Fault(
        "lost-network-goes-on",
        "tools/launcher/common.sh",
        "        lost) # the others are still worth a run",
        "        never)",
        "after a network that fails the others are not tried",
    ),
    Fault(
        "restart-counted",
        "launch_multinode.sh",
        "ports_per_network=$((2 + RESTARTS))",
        "ports_per_network=2",
        "the first start over the next network has the port of a restart over this one",
    ),
    Fault(
        "start-has-own-port",
        "launch_multinode.sh",
        "local port=$((first_port + $1))",
        "local port=$first_port",
        "a node in its first start meets one that has restarted",
    ),
    Fault(
        "later-starts-wait-longer",
        "launch_multinode.sh",
        "    rendezvous_timeout=$((CONNECT_TIMEOUT + timeout + 60))\n",
        "",
        "a node gives up before the other has noticed the failure",
    ),
    Fault(
        "restart-resumes",
        "launch_multinode.sh",
        '"$@" --resume\n',
        '"$@"\n',
        "a restart begins at step 0 again",
    ),
    Fault(
        "restarts-counted",
        "tools/launcher/common.sh",
        '|| [ "$1" -gt "$RESTARTS" ]',
        '|| [ "$1" -ge "$RESTARTS" ]',
        "RESTARTS=1 gives no restart",
    ),
    Fault(
        "probe-comes-first",
        "launch_multinode.sh",
        '        on_all_nodes 0 "$root/tools/probe_link.py" "$@"\n',
        "",
        "the link is not measured before the training",
    ),
    Fault(
        "no-probe-alone",
        "launch_multinode.sh",
        "[ $((NNODES * GPUS_PER_NODE)) -gt 1 ]",
        "true",
        "one process alone fails in a probe that has no link",
    ),
    Fault(
        "old-checkpoint-renamed",
        "tools/launcher/common.sh",
        '        mv "$checkpoint" "$checkpoint.$(date +%Y%m%d-%H%M%S)"\n',
        "",
        "a restart goes on with the weights of an older run",
    ),
    Fault(
        "other-node-renames-nothing",
        "tools/launcher/common.sh",
        ' && [ "${NODE_RANK:-0}" -eq 0 ]; then',
        "; then",
        "node 1 takes away the checkpoint that node 0 has just begun",
    ),
    Fault(
        "appending-is-said",
        "tools/launcher/common.sh",
        '    if [ -s "$log" ] &&',
        "    if false &&",
        "two runs lie in one log, and nobody is told",
    ),
    Fault(
        "user-error-restarted",
        "tools/launcher/common.sh",
        '    if [ "$outcome" != lost ] ||',
        '    if [ "$outcome" = complete ] ||',
        "a wrong path is tried again RESTARTS times",
    ),
    Fault(
        "exit-2",
        "tools/launcher/common.sh",
        '    [ "$outcome" != user ] || exit 2\n',
        "",
        "a user's error ends with the code of a failure that may be tried again",
    ),
    Fault(
        "exit-75",
        "tools/launcher/common.sh",
        "        exit 75\n",
        "        exit 1\n",
        "a batch script does not queue a stopped run again",
    ),
    Fault(
        "stop-not-restarted",
        "tools/launcher/common.sh",
        '|| [ -n "$stopped" ] || [ "$1" -gt',
        '|| [ "$1" -gt',
        "a run that was stopped starts again",
    ),
    Fault(
        "signal-passed-on",
        "tools/launcher/common.sh",
        '    [ -z "$job" ] || kill "-$signal"',
        '    true || kill "-$signal"',
        "Ctrl-C does not reach the ranks",
    ),
    Fault(
        "second-ctrl-c",
        "tools/launcher/common.sh",
        "then signal=KILL; fi",
        "then signal=TERM; fi",
        "ranks that do not answer cannot be ended by a second Ctrl-C",
    ),
    Fault(
        "tee-survives",
        "tools/launcher/common.sh",
        "        trap '' HUP INT TERM USR1\n",
        "",
        "the log ends before the ranks' last lines",
    ),
    Fault(
        "torchrun-lives-on-usr1",
        "tools/launcher/common.sh",
        "    trap '' USR1\n",
        "",
        "SLURM's warning kills torchrun before the ranks have saved",
    ),
    Fault(
        "full-disk",
        "tools/launcher/common.sh",
        '/dev/null}" || true # a full',
        '/dev/null}" # a full',
        "a full disk under the log makes a trained run a failed one",
    ),
    Fault(
        "reader-gone",
        "tools/launcher/common.sh",
        "trap '' PIPE #",
        "#",
        "`| head` ends the training",
    ),
    Fault(
        "phrase-error",
        "tools/launcher/common.sh",
        'telling="$nccl|\\] ERROR: |',
        'telling="$nccl|',
        "the last line does not say why a rank has ended",
    ),
    Fault(
        "phrase-usage",
        "tools/launcher/common.sh",
        "|: error: |\\] Stopped",
        "|\\] Stopped",
        "an unknown option is tried again, and is not the last line",
    ),
    Fault(
        "phrase-stopped",
        "tools/launcher/common.sh",
        "|\\] Stopped on SIG|\\] Cleanup",
        "|\\] Cleanup",
        "a stopped run counts as failed and is restarted",
    ),
    Fault(
        "stop-has-prefix",
        "tools/launcher/common.sh",
        'elif [[ $2 == *"] Stopped on SIG"* ]]',
        'elif [[ $2$3 == *"Stopped on SIG"* ]]',
        "a path named `Stopped on SIG` makes a failed run a stopped one",
    ),
    Fault(
        "stop-beside-failure",
        "tools/launcher/common.sh",
        "|| ! grep -qvE '^(75|-15)?$' <<<\"$codes\"; }",
        "|| true; }",
        "a failed run in which one rank was stopped is not restarted",
    ),
    Fault(
        "phrase-complete",
        "tools/launcher/common.sh",
        "|\\] Cleanup complete|",
        "|",
        "a signal after the last step makes a complete run a failed one",
    ),
    Fault(
        "phrase-signal",
        "tools/launcher/common.sh",
        "|Signal .* received|",
        "|",
        "the last line does not say that a rank was killed",
    ),
    Fault(
        "phrase-exitcode",
        "tools/launcher/common.sh",
        '|^ *exitcode +:"',
        '"',
        "a user's error is tried again, because the ranks' exit codes are unknown",
    ),
    Fault(
        "phrase-watchdog",
        "tools/launcher/common.sh",
        "nccl='Watchdog caught collective operation timeout|",
        "nccl='",
        "the last line does not name the collective that timed out",
    ),
    Fault(
        "phrase-apart",
        "tools/launcher/common.sh",
        "torch.distributed.Dist*",
        "torch.distributed.Elastic*",
        "nodes that do not meet are not told what to check",
    ),
    Fault(
        "phrase-other-rank",
        "tools/launcher/common.sh",
        "grep -av 'another rank has ended'",
        "grep -av 'another rank is gone'",
        "the last line says what followed from the failure, not the failure",
    ),
    Fault(
        "phrase-of-script",
        SCRIPT,
        '    ("/gloo/", "another rank has ended, or',
        '    ("/gloo/", "another rank is gone, or',
        "the launcher takes what follows from a failure for the failure",
    ),
    Fault(
        "threads-per-process",
        "tools/launcher/common.sh",
        "    threads=$((cores / $1))\n",
        "    threads=1\n",
        "each process computes with one thread",
    ),
    Fault(
        "all-runs-same-threads",
        "launch_single.sh",
        'set_threads "$most"',
        "set_threads 1",
        "processes share cores with more threads than there are, and the speed-up is of threads",
    ),
    Fault(
        "local-addr",
        "launch_single.sh",
        " --local-addr=127.0.0.1",
        "",
        "torchrun hangs where the machine's own name does not resolve",
    ),
    Fault(
        "one-by-default",
        "launch_single.sh",
        "for GPUS in ${GPUS:-1}; do",
        "for GPUS in ${GPUS:-all}; do",
        "a first try takes every GPU of a machine that others use",
    ),
    Fault(
        "user-options-win",
        "launch_single.sh",
        '    set -- "${sample[@]}" "$@"',
        '    set -- "$@" "${sample[@]}"',
        "--max_steps of the user's own changes nothing",
    ),
    Fault(
        "slurm-step-without-id",
        "launch_multinode.sh",
        '    [ -n "${SLURM_STEP_ID:-}" ] ||\n        die',
        '    [ -n "${SLURM_STEP_ID:-}" ] ||\n        say',
        "a batch script without srun ends in a bash error about an unset variable",
    ),
    Fault(
        "slurm-two-tasks",
        "launch_multinode.sh",
        '    [ "$SLURM_STEP_NUM_TASKS" = "$SLURM_STEP_NUM_NODES" ] ||',
        "    true ||",
        "two launchers start on each node, and each waits for the other",
    ),
    Fault(
        "log-is-complete",
        "tools/launcher/common.sh",
        '        tee -a "${log:-/dev/null}" ||',
        '        tee "${log:-/dev/null}" ||',
        "the log lacks the launcher's own first lines",
    ),
    Fault(
        "dashes-in-a-path",
        "tools/launcher/common.sh",
        "        case ${word//-/_} in",
        "        case ${word/--/__} in",
        "--val-image-path is overridden by the sample set's options",
    ),
    Fault(
        "mpich-before-srun",
        SCRIPT,
        "    if {*MPICH[:3]} <= env.keys():  # before",
        '    if {*MPICH[:3]} <= env.keys() and "SLURM_STEP_ID" not in env:  # before',
        "in a SLURM job each process of mpiexec trains alone, as rank 0",
    ),
    Fault(
        "srun-node-list",
        SCRIPT,
        'env.setdefault("MASTER_ADDR", name + digits)',
        'env.setdefault("MASTER_ADDR", name)',
        "ranks look for a node with the name `node`",
    ),
    Fault(
        "batch-script-is-no-step",
        SCRIPT,
        '    if "SLURM_STEP_ID" in env and "SLURM_PROCID" in env:',
        '    if "SLURM_PROCID" in env:',
        "python in a batch script ends with an error about srun",
    ),
    Fault(
        "unknown-mpirun",
        SCRIPT,
        '        if env.get(name, "").lstrip("0") not in ("", "1"):',
        "        if False:",
        "each process of an unknown launcher trains alone, as rank 0",
    ),
    Fault(
        "job-has-own-port",
        SCRIPT,
        "    if job:  # a port",
        "    if False:  # a port",
        "two jobs on one node meet at the same port",
    ),
    Fault(
        "rank-below-world-size",
        SCRIPT,
        "    if not 0 <= rank < world_size:",
        "    if False:",
        "a rank that is out of range waits until the timeout",
    ),
    Fault(
        "set-python-wins",
        "tools/environment.sh",
        '    if [ -n "${PYTHON:-}" ]; then\n',
        "    if false; then\n",
        "PYTHON is ignored where another Python is active",
    ),
    Fault(
        "torch-2-6-taken",
        "tools/environment.sh",
        "numbers.groups())) < (2, 6)",
        "numbers.groups())) < (2, 7)",
        "PyTorch 2.6 is refused",
    ),
    Fault(
        "torch-compared-as-numbers",
        "tools/environment.sh",
        "tuple(map(int, numbers.groups())) < (2, 6)",
        'numbers.groups() < ("2", "6")',
        "PyTorch 2.10 and newer are refused as older than 2.6",
    ),
    Fault(
        "old-torch-refused",
        "tools/environment.sh",
        "elif numbers and tuple",
        "elif not version and tuple",
        "a torch that is too old is taken, and the script ends with a traceback",
    ),
    Fault(
        "small-package-named",
        "tools/environment.sh",
        '            [ -z "$lacks" ] || die "$active lacks',
        '            [ -z "$lacks" ] || say "$active lacks',
        "a missing package ends the script in place of a line with the command",
    ),
    Fault(
        "unfit-python-is-named",
        "tools/environment.sh",
        '|| say "$active $unfit: it',
        '|| true "$active $unfit: it',
        "another environment than the active one is used, and nobody is told",
    ),
    Fault(
        "unfinished-venv",
        "tools/environment.sh",
        '    [ ! -e "$venv/begun" ] && [ -z "$unfit$lacks" ]',
        '    [ -z "$unfit$lacks" ]',
        "an install that was cut short is used as if it were whole",
    ),
    Fault(
        "own-venv-kept",
        "tools/environment.sh",
        '    if [ ! -e "$venv/begun" ] && [ "$unfit"',
        '    if false && [ "$unfit"',
        "a .venv that was made by hand is deleted",
    ),
    Fault(
        "cpu-build-on-gpu-node",
        "tools/environment.sh",
        "    grep -q '^cuda[: ].*None' \"$torch/version.py\" 2>/dev/null || return 0\n",
        "    return 0\n",
        "a node with GPUs trains on its CPUs, because the torch is a build for CPUs",
    ),
    Fault(
        "rocm-build",
        "tools/environment.sh",
        '    ! grep -qE "^(hip|rocm)[: ].*\'" "$torch/version.py" || return 0\n',
        "",
        "a build for AMD's GPUs is refused as one for CPUs",
    ),
    Fault(
        "cpu-on-purpose",
        "tools/environment.sh",
        '|| [ "$(option --device "$@")" = cpu ]; then return; fi',
        "; then return; fi",
        "--device cpu is refused on a node with GPUs",
    ),
    Fault(
        "wrong-visible-devices",
        "tools/launcher/common.sh",
        '            check_first_gpu "${CUDA_VISIBLE_DEVICES%%,*}"\n',
        "            true\n",
        "a wrong CUDA_VISIBLE_DEVICES trains on the CPU",
    ),
    Fault(
        "torchruns-own-options",
        "tools/launcher/common.sh",
        '    grep -q -e "--$1\\"" "$torch/distributed/run.py"',
        "    true",
        "an older torchrun ends with an unknown option",
    ),
    Fault(
        "lock-stale",
        "tools/environment.sh",
        '&& ! is_alive "$process"; then',
        "&& false; then",
        "after an install that was killed each start waits for 30 minutes",
    ),
    Fault(
        "one-heir",
        "tools/environment.sh",
        "# NOTE: one heir at a time.",
        "",
        "two starts make one environment at once",
        untestable="two starts would have to look at one lock within a millisecond",
    ),
    Fault(
        "two-nodes-cleanup",
        "tools/two_nodes.sh",
        "trap remove_nodes EXIT\n",
        "",
        "namespaces and cables stay on the machine",
    ),
    Fault(
        "two-nodes-threads",
        "tools/two_nodes.sh",
        "threads=$((cores / (2 * GPUS_PER_NODE)))",
        "threads=$cores",
        "both nodes compute with a thread for each core, and a step takes many times as long",
    ),
    Fault(
        "cable-rate-stated",
        "tools/two_nodes.sh",
        "bits=$((rate * 8))",
        "bits=$rate",
        "a cable is judged by an eighth of its rate",
    ),
    Fault(
        "cables-are-networks",
        "tools/two_nodes.sh",
        'export NETWORKS="${networks% }" LINK_GBPS=',
        "export LINK_GBPS=",
        "the training goes over one cable alone",
    ),
    Fault(
        "loose-cable",
        "tools/launcher/networks.sh",
        '        [ "$(cat "$sysfs/class/net/$1/carrier" 2>/dev/null)" = 1 ] ||',
        "        true ||",
        "a run over a cable that is not plugged in waits until the timeout",
    ),
    Fault(
        "shares-are-whole",
        "launch_single.sh",
        '        [ "$((10#$global % number))" -eq 0 ] ||',
        "        true ||",
        "the last of several runs is refused after the others have trained",
    ),
    Fault(
        "more-than-gpus",
        "launch_single.sh",
        '        [ "$(option --backend "$@")" = gloo ] || die',
        '        [ "$(option --backend "$@")" = gloo ] || say',
        "the last of several runs fails for want of a GPU after the others have trained",
    ),
    Fault(
        "two-nodes-forwards",
        "tools/two_nodes.sh",
        '    [ "${#launchers[@]}" -eq 0 ] || kill "-$1"',
        '    true || kill "-$1"',
        "Ctrl-C ends neither node",
    ),
    Fault(
        "kept-value-is-said",
        "tools/launcher/common.sh",
        '        say "keeping your $1=',
        '        true "keeping your $1=',
        "NCCL's own traffic is not where the launcher was told, and no line says why",
    ),
    # ---- The lesson, the pages, the benchmark
]


def copy_project(folder: Path) -> Path:
    """A copy of what git knows or would add, with the same neighbours."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    project = folder / "project"
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (project / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, project / name)
    if (ROOT.parent / "shared").is_dir():
        (folder / "shared").symlink_to(ROOT.parent / "shared")
    return project


def pytest(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs pytest on a copy; the long tests, too."""
    env = {**os.environ, "TEST_LONG": "1", "TMPDIR": str(project.parent), "PYTHONPATH": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(
        command,
        cwd=project,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=SECONDS,
    )


def find_guards(project: Path) -> dict[str, list[str]]:
    """The tests that guard against each fault, by their node ids."""
    file = project.parent / "guards.json"
    done = pytest(project, "--collect-only", f"--write-guards={file}")
    if done.returncode:
        raise SystemExit(f"the tests cannot be collected:\n{done.stdout}")
    return json.loads(file.read_text())


def pass_without_faults(guards: dict[str, list[str]]) -> None:
    """Ends the program unless all these tests pass: otherwise a failure would say nothing."""
    tests = sorted({test for found in guards.values() for test in found})
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        share = ["-n", str(os.cpu_count()), "--dist", "loadfile"]
        done = pytest(copy_project(Path(folder)), *share, "-rs", *tests)
    if done.returncode or re.search(r"^SKIPPED", done.stdout, re.MULTILINE):
        raise SystemExit(f"without a fault these tests fail, or skip:\n{done.stdout}")


def notice(fault: Fault, tests: list[str]) -> tuple[str, str, float]:
    """(what is wrong, or nothing; the first test that failed; seconds for all times)."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-", ignore_cleanup_errors=True) as folder:
        project = copy_project(Path(folder))
        fault.put_into(project)
        found = ""
        for number in range(1, TIMES + 1):
            try:
                done = pytest(project, "-x", "-rfE", "--tb=no", *tests)
            except subprocess.TimeoutExpired:
                return f"not over after {SECONDS} s", "", time.monotonic() - begin
            failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
            if done.returncode != 1 or not failed:
                end = done.stdout.strip().rpartition("\n")[2]
                return f"NOT NOTICED, run {number}: {end}", "", time.monotonic() - begin
            found = failed[1].removeprefix("tests/")
    return "", found, time.monotonic() - begin


def choose(names: Iterable[str]) -> list[Fault]:
    by_name = {fault.name: fault for fault in FAULTS}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise SystemExit(f"no such fault: {', '.join(unknown)}; --list shows their names")
    return [by_name[name] for name in names] or FAULTS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="FAULT", help="default: all of them")
    parser.add_argument(
        "--list", action="store_true", help="print their names, and what they show"
    )
    args = parser.parse_args()
    faults = choose(args.names)
    if args.list:
        for fault in faults:
            print(f"{fault.name:24} {fault.path:32} {fault.shows}")
        return 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        guards = find_guards(copy_project(Path(folder)))
    tried = [fault for fault in faults if not fault.untestable]
    pass_without_faults({fault.name: guards.get(fault.name, []) for fault in tried})

    def judge(fault: Fault) -> bool:
        problem, test, seconds = fault.problem(), "", 0.0
        if not problem and not fault.untestable:
            if fault.name in guards:
                problem, test, seconds = notice(fault, guards[fault.name])
            else:
                problem = "NOT NOTICED: no test is marked with it"
        verdict = problem or test or f"not testable here: {fault.untestable}"
        print(f"| {fault.name} | {fault.shows} | {verdict} | {seconds:.0f} s |", flush=True)
        return not problem

    begin = time.monotonic()
    print("| fault | what it shows | noticed by | time |\n|---|---|---|---|")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(judge, faults))
    count, minutes = results.count(False), (time.monotonic() - begin) / 60
    print(f"{len(faults)} faults, {count} not noticed, {minutes:.1f} minutes")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
