"""docs/lesson.md: its files and experiments, run as the page has them.

What the page's commands make and print is compared with what it shows, figures apart. With --ci
all commands really run. By default the page's own Python files run in forked ranks, and of the
experiments the one that is over first.
"""

from __future__ import annotations

import ast
import difflib
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from support.forks import ForkServer, Job, write
from support.nodes import require_namespaces
from support.processes import LONG, ROOT, free_port, long_among, require, start
from test_pages import ARRAYS, FENCED, PAGES, README, anchor, rows

LESSON = PAGES["docs/lesson.md"]
SMALL = next(text for text in ARRAYS if text.startswith("small="))
# What needs root is run by root here; a port of 29500 may be another test's.
PRELUDE = 'sudo() { "$@"; }\n'


def parts() -> dict[str, list[tuple[str, str]]]:
    """The code blocks of each section of the page, (kind, text), by its title."""
    _, *found = re.split(r"^#+ (?=[^\n]+\n\n)", LESSON.text, flags=re.MULTILINE)
    return {
        part.partition("\n")[0]: [(m[1], m[2]) for m in FENCED.finditer(part)] for part in found
    }


PARTS = parts()
SETUP = PARTS["The lesson, to try"][0][1]
EXPERIMENTS = {int(title[0]): title for title in PARTS if re.match(r"\d\. ", title)}


def of_kind(title: str, kind: str) -> list[str]:
    return [text for found, text in PARTS[title] if found == kind]


def shape(line: str) -> str:
    """A line without its figures; of an error what the script itself says."""
    line = re.sub(r"(address\?:|ERROR: in step \d+:).*", r"\1", line.strip())
    return re.sub(r"\d+(\.\d+)?", "N", line)


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """A copy of the repository, in which README's small set has been made."""
    ignored = shutil.ignore_patterns(".*", "data", "logs", "tests", "__pycache__", "coco", "*.pt")
    folder = tmp_path_factory.mktemp("lesson") / "a copy"
    shutil.copytree(ROOT, folder, ignore=ignored)
    commands = "\n".join(PAGES[README].commands)
    (command,) = re.findall(r"^python (tools/make_sample_coco.py data/small .*)$", commands, re.M)
    made = [sys.executable, *shlex.split(command)]
    subprocess.run(made, cwd=folder, check=True, timeout=120, stdout=subprocess.DEVNULL)
    return folder


def run_page(project: Path, script: str, expect: int | None = 0) -> list[str]:
    """The lines that a reader's terminal shows; stderr comes last."""
    script = "\n".join([PRELUDE, SMALL, SETUP, script])
    script = script.replace("MASTER_PORT=29500", f"MASTER_PORT={free_port()}")
    env = {"OMP_NUM_THREADS": None}
    with start(["bash", "-c", script], env=env, cwd=project, split=True) as started:
        return started.finish(400, expect).output.splitlines()


def assert_shown(title: str, lines: list[str]) -> None:
    """All that the page shows has been printed, but for figures."""
    printed = {shape(line) for line in lines}
    for line in "".join(of_kind(title, "text")).splitlines():
        assert shape(line) in printed, f"{line!r} is not in:\n" + "\n".join(lines)


# --- The diff ----------------------------------------------------------------------------------


def files(folder: Path) -> dict[str, str]:
    """The page's Python files as its own sed and patch take them from it."""
    commands = "\n".join(text for title in PARTS for text in of_kind(title, "bash"))
    taken = [line for line in commands.splitlines() if line.startswith("sed -n ")]
    assert len(taken) == 3
    require(shutil.which("patch"), "patch is missing")
    how = dict(cwd=folder, check=True, timeout=20)
    subprocess.run(["bash", "-euc", "\n".join(taken)], **how)
    names = ("plain", "ddp", "gradients")
    return {name: (folder / "data" / "small" / f"{name}.py").read_text() for name in names}


def run_code(demo, result, code):
    exec(compile(code, "a file of the page", "exec"), {"__name__": "__main__"})


def run_forked(demo: ForkServer, project: Path, code: str, nproc: int) -> Job:
    options = dict(torchrun=True, of_rank=lambda _: {"cwd": project}, code=code)
    return demo.run(call=run_code, nproc=nproc, **options)


def losses(lines: list[str]) -> list[float]:
    return [float(line.rpartition(" ")[2]) for line in lines if line.startswith("epoch ")]


def test_loop_of_one_process_and_its_ddp_form_print_the_same(project, demo):
    """Equal text with one process; with two, whose sums have another order, nearly so."""
    code = files(project)
    plain = run_forked(demo, project, code["plain"], 1).out
    assert re.fullmatch(r"(epoch \d: loss \d\.\d{4}\n){3}", plain)
    assert run_forked(demo, project, code["ddp"], 1).out == plain
    two = run_forked(demo, project, code["ddp"], 2).out.splitlines()
    assert losses(two) == pytest.approx(losses(plain.splitlines()), abs=2e-3)
    first, *_, last = losses(two)
    assert last < first
    assert {shape(line) for line in two} == {shape(of_kind("The diff", "text")[0].splitlines()[0])}


def test_plain_loop_knows_nothing_of_the_others_and_each_step_is_in_the_diff(project):
    code = files(project)
    ast.parse(code["ddp"])
    assert not re.search(r"\bdist\b|rank|Distributed", code["plain"])
    added = [line for line in of_kind("The diff", "diff")[0].splitlines() if line.startswith("+")]
    assert re.findall(r"# (\d)/6", "\n".join(added)) == ["1", "2", "2", "3", "4", "5", "6", "6"]
    for name in ("launch", "device", "process group", "data", "model", "checkpoint"):
        assert any(re.search(rf"# \d/6 {name}\b", line) for line in added), name
    assert "demo_coco_resnet18" not in code["plain"] + code["ddp"]


@LONG
def test_commands_of_the_diff(project):
    lines = run_page(project, "\n".join(of_kind("The diff", "bash")))
    each = [lines[n : n + 3] for n in (0, 3, 6)]
    assert len(lines) == 9 and each[0] == each[1]
    assert losses(each[2]) == pytest.approx(losses(each[0]), abs=2e-3)
    assert_shown("The diff", lines)


# --- Experiments -------------------------------------------------------------------------------

SED = re.compile(r"^sed (.*) (\S+\.py) > (\S+\.py)$", re.MULTILINE)


def test_each_copy_has_the_changes_that_its_sed_names(project):
    """A pattern that fits no line any more would leave the copy as it was."""
    found = [
        match for title in PARTS for text in of_kind(title, "bash") for match in SED.finditer(text)
    ]
    assert len(found) == 8
    for match in found:
        subprocess.run(["bash", "-euc", match[0]], cwd=project, check=True, timeout=20)
        before, after = ((project / match[n]).read_text().splitlines() for n in (2, 3))
        compile("\n".join(after), match[3], "exec")
        changed = [line for line in difflib.ndiff(before, after) if line[0] == "-"]
        assert len(changed) == max(1, match[1].count("-e ")), match[0]


def by_rank(lines: list[str]) -> tuple[list[str], list[str]]:
    """What ranks 0 and 1 have written, without their names."""
    first, second = (
        [line.removeprefix(f"[CPU {rank}] ") for line in lines if line.startswith(f"[CPU {rank}]")]
        for rank in (0, 1)
    )
    return first, second


def batches(lines: list[str]) -> list[list[int]]:
    found = [re.fullmatch(r"epoch \d: images \[(.*)\]", line) for line in lines]
    return [[int(number) for number in match[1].split(", ")] for match in found if match]


def members(found: list[list[int]]) -> list[int]:
    return [number for batch in found for number in batch]


def steps(lines: list[str]) -> list[str]:
    return [line for line in lines if " | Loss: " in line]


def check_no_ranks(lines):
    found = [line for line in lines if "Run: 1 process on 1 node" in line or " | Step " in line]
    assert len(found) == 8 and set(Counter(found).values()) == {2}  # each line twice
    assert not by_rank(lines)[1]


def check_missing_peer(lines):
    (line,) = lines
    assert line.startswith("[CPU 0] ERROR: rendezvous at 127.0.0.1:")


def check_shares(lines):
    """Of the three runs, one after the other."""
    first, second = (batches(own) for own in by_rank(lines))
    assert len(first) == 12 and len(second) == 6  # rank 0 alone is shown in the third
    taken = members(first[:3]) + members(second[:3])
    assert {*taken} == {*range(23)} and len(taken) == 24
    assert first[3:6] == second[3:6]
    assert len({*members(first[3:6])}) == 12  # 11 of 23 are in none
    ranks = by_rank(lines)
    assert steps(ranks[0]) == steps(ranks[1]) and len(steps(ranks[0])) == 3
    assert first[6:9] == first[9:]  # without set_epoch
    assert "11 of the 23" in " ".join(LESSON.text.split())


def check_replicas(lines):
    assert lines.count("replicas identical: False") == 1
    assert "replicas identical: True" not in lines


def check_no_all_reduce(lines):
    check_replicas(lines)
    check_gradients(lines)


def check_gradients(lines):
    apart = {
        mode: float(re.search(rf"(?m)^{mode}: (\S+) apart$", "\n".join(lines))[1])
        for mode in ("eval", "train")
    }
    assert apart["eval"] < 1e-4 and apart["train"] > 0.01


def check_skipped_call(lines):
    assert "supervise.py: rank 1 waited in step 2; rank 0 waited in step 3" in lines


def check_slow_link(lines):
    assert len(lines) == 2 and all("replicas identical: True" in line for line in lines)


def check_bytes(project: Path) -> None:
    """What the two runs over the slow link have sent in each step, by their logs."""
    for name, shown in (("plain", "sends 44.9 MB"), ("powersgd", "sends 1.2 MB")):
        log = (project / "logs" / name / "node0.log").read_text()
        sent = int(re.search(r'"wire_bytes_per_step": (\d+)', log)[1])
        assert shown == f"sends {sent / 1e6:.1f} MB" and shown in LESSON.prose


def check_restart(lines):
    assert lines == of_kind(EXPERIMENTS[8], "text")[0].splitlines()  # figures as well


def check_more_processes(lines):
    table = [re.findall(r"[^| ]+", line) for line in lines if re.match(r"\| \d ", line)]
    found = [row[:3] for row in table if len(row) == 5]
    assert found == [["1", "1", "base"], ["2", "2", "strong"], ["4", "4", "strong"]]


CHECKS = {
    1: check_no_ranks,
    2: check_missing_peer,
    3: check_shares,
    4: check_replicas,
    5: check_no_all_reduce,
    6: check_skipped_call,
    7: check_slow_link,
    8: check_restart,
    9: check_more_processes,
}


@pytest.mark.parametrize("number", long_among(CHECKS, [1, *range(3, 10)]))
def test_experiment(project, number):
    title = EXPERIMENTS[number]
    if number == 7:
        require_namespaces()
    lines = run_page(project, "\n".join(of_kind(title, "bash")), expect=int(number == 2))
    assert_shown(title, lines)
    CHECKS[number](lines)
    if number == 7:
        check_bytes(project)
    if number == 9:
        assert (project / "data" / "small" / "processes.png").stat().st_size > 10_000


def test_mean_gradient_is_that_of_all_images_but_for_batch_norm(project, demo):
    check_gradients(run_forked(demo, project, files(project)["gradients"], 2).out.splitlines())


def test_each_experiment_has_its_question_and_a_place_in_readmes_table():
    assert [*EXPERIMENTS] == [*CHECKS]
    assert (
        LESSON.text.count("<details><summary>")
        == LESSON.text.count("</details>")
        == 1 + len(CHECKS)
    )
    links = re.findall(r"\(docs/lesson\.md#([\w-]+)\)", " ".join(row[3] for row in rows("step")))
    assert {*links} == {anchor(EXPERIMENTS[number]) for number in range(1, 7)}


# --- A step in numbers -------------------------------------------------------------------------


def worked_step(demo, result):
    """This rank's column of the page's table, by DDP."""
    torch, dist = demo.torch, demo.dist
    dist.init_process_group("gloo")
    model = torch.nn.Linear(1, 1, bias=False)
    ddp = demo.DistributedDataParallel(model)
    with torch.no_grad():
        model.weight.fill_(1)
    share = [float(i + 1) for i in demo.DistributedSampler(range(4), shuffle=False)]
    x = torch.tensor(share)[:, None]
    each = [
        torch.autograd.grad((model(one) - 2 * one).square().sum(), model.weight)[0] for one in x
    ]
    loss = (ddp(x) - 2 * x).square()
    with ddp.no_sync():
        own = torch.autograd.grad((model(x) - 2 * x).square().mean(), model.weight)[0]
    loss.mean().backward()
    mean = model.weight.grad.item()
    torch.optim.SGD(model.parameters(), lr=0.05).step()
    column = [share, loss.flatten().tolist(), [loss.mean().item()], [g.item() for g in each]]
    write(result, [*column, [own.item()], [mean], [model.weight.item()]])
    dist.destroy_process_group()


def test_worked_step_is_what_ddp_computes(demo):
    job = demo.run(call=worked_step, nproc=2)
    table = re.search(r"\| \| rank 0 \| rank 1 \|\n.*\n((?:\|.*\n)+)", LESSON.text)[1]
    cells = [line.split("|")[2:4] for line in table.splitlines()]
    numbers = re.compile(r"(?<![\w-])-?\d+(?:\.\d+)?")
    for rank in (0, 1):
        shown = [[float(n) for n in numbers.findall(row[rank])] for row in cells]
        assert shown == [pytest.approx(row) for row in job.result(rank)]


def test_last_part_is_short():
    further = LESSON.text.partition("\n## Further\n")[2].strip().splitlines()
    assert len(further) <= 40
