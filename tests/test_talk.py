"""docs/networks.md: the talk and the emulated runs judged, the expected times, the blocks by hand,
any program's log.
"""

from __future__ import annotations

import hashlib
import math
import re
import subprocess
import sys
from pathlib import Path

import demo_coco_resnet18 as demo
import pytest

import compare_logs
import probe_link
from analysis.runs import make_run
from support.datasets import data_args
from support.made_logs import REPORTS, log_of
from support.nodes import NamespacePair
from support.processes import FACTOR, LONG, ROOT, Run, base_env, new_test_id
from test_readme import PAGES

PAGE = PAGES["docs/networks.md"]
(TALK,) = [text for text in PAGE.commands if "docs/talk/ethernet.log" in text]
TALK = TALK.replace("\\\n", " ").partition("|")[0].strip()
PRINTED = re.findall(r"(?s)```bash\n([^`]+)\n```\n\n```text\n(.*?)```", PAGE.text)
(FOUR_LINES,) = [text for text in PAGE.printed if "[CPU 0]" in text]


def stripped(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


@pytest.mark.parametrize(("command", "printed"), PRINTED)
def test_page_shows_what_the_tool_prints(command, printed):
    """Some of its paragraphs. If the tool's words change, print them anew with the command."""
    how = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 60 * FACTOR}
    env = base_env(new_test_id())
    done = subprocess.run(["bash", "-eo", "pipefail", "-c", command], env=env, **how)
    assert done.returncode == 0, done.stderr
    paragraphs = "\n".join(stripped(done.stdout)).split("\n\n")
    shown = "\n".join(stripped(printed)).split("\n\n")
    assert {*shown} <= {*paragraphs}
    found = [paragraphs.index(text) for text in shown]
    assert found and found == sorted(found)


def test_readme_says_how_much_longer_a_step_over_the_slow_cable_takes():
    logs = [(ROOT / f"docs/emulated/{name}.log").read_text() for name in ("slow", "fast")]
    slow, fast = (Run([], 0, log, 0).json_line("Summary")["step_ms"] for log in logs)
    assert "a step takes twice as long" in PAGES["README.md"].prose
    assert 1.75 < slow / fast < 2.25


# --- The talk's times ----------------------------------------------------------------------------

GRADIENTS = 4 * 11_217_552  # bytes
RING = 1.5 * GRADIENTS  # of a node in each direction, by four ranks on two nodes
TCP_BITS = 1e9 * 1448 / 1538  # at 1 Gb/s
EXCESS_S = 14_939.79 - 1_164.99


def said_of(steps: int) -> str:
    """The recorded verdict on the slower run, if both made so many steps."""
    _, _, report = (REPORTS / "talk/report.txt").read_text().partition(f" --steps {steps} ")
    return re.search(r"^ethernet: (Bound by its link, or .*)$", report, re.MULTILINE)[1]


def minutes(nbytes: float, bits: float, steps: int) -> str:
    value = steps * nbytes * 8 / bits / 60
    return f"{value:.2g} min" if value < 10 else f"{value:.0f} min"


@pytest.mark.parametrize("steps", [924, 1850])
def test_verdict_says_how_many_minutes_the_link_explains(steps):
    said = said_of(steps)
    ring, ring_tcp = minutes(RING, 1e9, steps), minutes(RING, TCP_BITS, steps)
    tree, tree_tcp = minutes(GRADIENTS, 1e9, steps), minutes(GRADIENTS, TCP_BITS, steps)
    assert f"Of the {EXCESS_S / 60:.0f} min beyond infiniband's time, " in said
    assert f"explains at most {ring_tcp}: at line rate and at the rate that TCP" in said
    assert f"a ring {ring} and {ring_tcp}, a tree {tree} and {tree_tcp} (model" in said
    wire = steps * RING * 8 / EXCESS_S / 1e6
    assert f"a wire that ran at {wire:.0f} Mb/s" in said
    port = minutes(RING, TCP_BITS / 10, steps)
    assert f"A port that negotiated 100 Mb/s would explain {port}." in said


def test_pages_state_the_minutes_that_the_tool_prints():
    said, other = said_of(924), said_of(1850)
    prose = {name: page.prose.replace("\n", " ") for name, page in PAGES.items()}
    answers = PAGES["docs/lesson/teacher.md"].text
    for reported, report, stated, page in (
        ("at most 8.8 min: ", said, "at most [about 9 minutes](", prose["README.md"]),
        ("at most 8.8 min: ", said, "at most about 9 of the 230 min", prose["docs/networks.md"]),
        ("at 36 Mb/s", said, "it ran at about 36 Mb/s. A port", prose["docs/networks.md"]),
        ("explain 88 min", said, "would explain only 88", prose["docs/networks.md"]),
        ("at most 18 min: ", other, "at most 18 minutes, and the", prose["docs/networks.md"]),
        ("at 72 Mb/s", other, "implied rate is 72 Mb/s", prose["docs/networks.md"]),
        ("a ring 8.3 min ", said, "924 steps are 8.3 minutes", answers),
        ("a tree 5.5 min ", said, " are 5.5 in a tree", answers),
    ):
        assert reported in report and stated in page, (reported, stated)
    assert "for 924 steps" in prose["docs/lesson/homework.md"]


def test_steps_of_the_talk_and_of_its_repetition():
    """462 an epoch, 921 the last of every fifth; here incomplete batches and labelled images."""
    steps = 2 * (118_287 // 256)
    assert f"--steps {steps} " in TALK and range(1, steps + 1, 5)[-1] == 921
    (repeat,) = [text for text in PAGE.commands if "RUN_NAME=talk" in text]
    args = demo.parse_arguments(repeat.replace("\\\n", "").partition(".sh ")[2].split())
    steps = args.num_epochs * math.ceil(117_266 / args.global_batch_size)
    assert f"{steps} steps, because" in PAGE.prose.replace("\n", " ")


def test_kept_logs_and_reports_hold_no_path_of_a_machine():
    files = [*(ROOT / "docs/emulated").iterdir(), *REPORTS.rglob("*.*")]
    for file in filter(Path.is_file, files):
        text = file.read_text(errors="replace")
        assert re.findall(r"(?<![\w.])/(?:root|home|tmp|work|usr|opt|mnt|var)\b", text) == [], file


def test_logs_of_the_talk_are_unchanged():
    """These are the first digits of the SHA-256 of what its speaker handed out."""
    for name, digest in (("ethernet", "b600a9b49b69aa1b"), ("infiniband", "7218347cabb4b7b9")):
        log = (ROOT / f"docs/talk/{name}.log").read_bytes()
        assert hashlib.sha256(log).hexdigest().startswith(digest)


def test_expected_times_are_those_of_the_projection(capsys):
    rows = re.findall(r"^\| (\d+ Gb/s) \| (.*) \| (.*) \|$", PAGE.text, re.MULTILINE)
    assert len(rows) == 5
    words = TALK.replace("ethernet=1 --link_gbps infiniband=56", "56").split()[3:]
    for column, processes in ((1, "2"), (2, "4")):
        compare_logs.main([*words, "--processes", processes, "--project"])
        out = capsys.readouterr().out
        found = re.findall(r"^\| (\d+ Gb/s) +\| +([\d.]+ ms) ", out, re.MULTILINE)
        assert {(row[0], row[column]) for row in rows} <= {*found}


def test_the_four_lines_are_a_whole_run_with_a_split():
    step, end = (FOUR_LINES.splitlines()[n].replace("CPU 0", "CPU 1") for n in (1, 3))
    run = make_run("mine", log_of(f"{FOUR_LINES}{step}\n{end}\n"), {})
    assert run.problems == [] and (run.processes, run.nodes, run.steps) == (2, 2, 20)
    assert abs(run.data_s + run.compute_s + run.exposed_s - run.step_s) < 1e-6
    assert run.wire_bytes == 4 * run.parameters


BY_HAND = {
    network: text
    for text in PAGE.commands
    for network in re.findall(r"^\( # (\w+), on both nodes$", text, re.MULTILINE)
}
# Each call, with the variables that choose the network.
NOTING = """
torchrun() { echo $(env | grep -E '^(NCCL|GLOO)_(NET|IB|SOCKET)' | sort) torchrun "$@"; }
python() { echo python "$@"; }
tee() { while IFS= read -r line; do echo "$line"; done; }
"""


def called_by_hand(network: str, **top: str) -> list[str]:
    """The calls of a block, with other values of the variables at its top."""
    text = BY_HAND[network]
    for name, value in top.items():
        text, found = re.subn(rf"^{name}=\S+", f"{name}={value}", text, flags=re.MULTILINE)
        assert found == 1
    command = ["bash", "-c", NOTING + text.replace("mkdir -p", ": mkdir -p")]
    env = base_env(new_test_id())
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.parametrize("network", ["Ethernet", "InfiniBand"])
def test_a_block_by_hand_is_for_both_nodes(network):
    """NODE_RANK, the interface and node 0's address stand at its top, and nowhere else."""
    first = called_by_hand(network)
    top = {"NODE_RANK": "1", "IFNAME": "enp5s0", "MASTER_ADDR": "10.0.0.9"}
    second = called_by_hand(network, **top)
    assert len(first) == 4
    for one, two in zip(first, second, strict=True):
        one = re.sub("(rank=|node)0", r"\g<1>1", one.replace("10.0.0.1", "10.0.0.9"))
        assert one.replace("eth0", "enp5s0") == two


def test_blocks_by_hand_have_ports_of_their_own():
    assert BY_HAND.keys() == {"Ethernet", "InfiniBand"}
    ports = re.findall(r":(295\d\d) ", "".join(BY_HAND.values()))
    assert len(ports) == len({*ports}) == 4
    assert "mlx4_0" in BY_HAND["InfiniBand"] and "mlx4_0" in PAGE.prose


@LONG
def test_blocks_by_hand_run_and_are_compared(tmp_path, sample, capsys):
    """Those for Ethernet, on two nodes, with a small data set; one process a node."""
    options = (
        "--weights none --image_size 64 --batch_size 2 --num_epochs 1 --workers 0 --max_steps 6"
    )
    words = " ".join(map(str, data_args(sample)))
    with NamespacePair("200mbit") as nodes:
        started = []
        for node in (0, 1):
            text = BY_HAND["Ethernet"].replace("10.0.0.1", nodes.addresses[0])
            text = text.replace("NODE_RANK=0", f"NODE_RANK={node}")
            text = re.sub(r"^coco=.*$", f"coco=({words} {options})", text, flags=re.MULTILINE)
            text = text.replace("--max_steps 200", "").replace(
                "nproc_per_node=2", "nproc_per_node=1"
            )
            text = text.replace("logs=logs/", f"logs={tmp_path}/")
            command = ["bash", "-c", text]
            started.append(nodes.popen(node, command, cwd=ROOT, env={"OMP_NUM_THREADS": "1"}))
        for one in started:
            one.finish(300)
    assert compare_logs.main([str(tmp_path / "ethernet")]) == 0
    out = capsys.readouterr().out
    assert "ethernet: Bound by its link: " in out and "Over TCP on eth0 (ethernet)" in out
    assert compare_logs.main([str(tmp_path / "ethernet" / "node0.log")]) == 0


def test_a_block_by_hand_ends_at_what_fails_with_its_exit_code(tmp_path):
    text = BY_HAND["Ethernet"].replace("logs=logs/", f"logs={tmp_path}/")
    failing = "torchrun() { echo cause >&2; return 7; }\npython() { echo too far; }\n"
    done = subprocess.run(["bash", "-c", failing + text], capture_output=True, text=True)
    assert done.returncode == 7 and done.stdout == "cause\n"
    assert (tmp_path / "ethernet/node0.log").read_text() == "cause\n"


BUCKETS = """
import torch, torch.distributed as dist, torchvision
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
ddp = DistributedDataParallel(torchvision.models.resnet18(num_classes=80))
def hook(state, bucket):
    state.append(4 * bucket.buffer().numel())
    return allreduce_hook(dist.group.WORLD, bucket)
found = []
ddp.register_comm_hook(found, hook)
for step in range(2):  # after the first DDP rearranges them
    found.clear()
    ddp(torch.rand(2, 3, 32, 32)).sum().backward()
print(sum(found), *found)
dist.destroy_process_group()
"""


@LONG
def test_sizes_for_nccl_tests_are_those_of_the_probe_and_of_the_buckets():
    (text,) = [text for text in PAGE.commands if "all_reduce_perf" in text]
    assert "mpirun -n 4 --host node0:2,node1:2 all_reduce_perf" in text
    low, high, factor = re.search(r"-b (\d+)K -e (\d+)M -f (\d+)", text).groups()
    size, most = 2**10 * int(low), 2**20 * int(high)
    while size <= most:
        assert size in probe_link.SIZES
        size *= int(factor)
    assert size == most * int(factor)
    command = [sys.executable, "-c", BUCKETS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (listed,) = re.findall(r"for bytes in (.*); do", text)
    assert listed == done.stdout.strip()
