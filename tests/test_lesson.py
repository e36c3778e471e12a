"""docs/lesson.md: its commands print what the page shows, figures apart."""

from __future__ import annotations

import ast
import difflib
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.nodes import require_namespaces
from support.processes import LONG, ROOT, free_port, long_among, start
from test_pages import ARRAYS, COMMANDS, FENCED, PAGES

LESSON = PAGES["docs/lesson.md"]
SMALL = next(text for text in ARRAYS if text.startswith("small="))
# What needs root is run by root here; each test has processes of its own at its own port.
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


def blocks(title: str, kind: str) -> str:
    """All blocks of a kind in a section."""
    return "\n".join(text for found, text in PARTS[title] if found == kind)


def shape(line: str) -> str:
    """A line without its figures, and of an error what the script itself says."""
    line = re.sub(r"(address\?:).*", r"\1", line.strip())
    return re.sub(r"\d+(\.\d+)?", "N", line)


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """A copy of the repository, in which README's small set has been made."""
    ignored = shutil.ignore_patterns(".*", "data", "logs", "tests", "__pycache__", "coco", "*.pt")
    folder = tmp_path_factory.mktemp("lesson") / "a copy"
    shutil.copytree(ROOT, folder, ignore=ignored)
    (command,) = re.findall(r"^python (tools/make_sample_coco.py data/small .*)$", COMMANDS, re.M)
    made = [sys.executable, *shlex.split(command)]
    subprocess.run(made, cwd=folder, check=True, timeout=120, stdout=subprocess.DEVNULL)
    return folder


def run_page(project: Path, title: str, expect: int = 0) -> list[str]:
    """The lines that a section's commands print, among which are those that the page shows."""
    script = "\n".join([PRELUDE, SMALL, SETUP, blocks(title, "bash")])
    script = script.replace("MASTER_PORT=29500", f"MASTER_PORT={free_port()}")
    env = {"OMP_NUM_THREADS": None}
    with start(["bash", "-c", script], env=env, cwd=project, split=True) as started:
        lines = started.finish(400, expect).output.splitlines()
    printed = {shape(line) for line in lines}
    for line in blocks(title, "text").splitlines():
        assert not line or shape(line) in printed, f"{line!r} is not in:\n" + "\n".join(lines)
    return lines


# --- The loops ---------------------------------------------------------------------------------


def test_plain_loop_knows_nothing_of_the_others_and_each_step_is_in_the_diff():
    plain, diff = blocks("The diff", "python"), blocks("The diff", "diff")
    ast.parse(plain)
    assert not re.search(r"\bdist\b|rank|Distributed", plain)
    added = "\n".join(line for line in diff.splitlines() if line.startswith("+"))
    assert re.findall(r"# (\d)/6", added) == ["1", "2", "2", "3", "4", "5", "6", "6"]


@LONG
def test_loop_of_one_process_and_its_ddp_form_print_the_same(project):
    """Equal text with one process; with two, whose sums have another order, nearly so."""
    lines = run_page(project, "The diff")
    plain, ddp, two = lines[:3], lines[3:6], lines[6:]
    assert plain == ddp
    losses = [[float(line.split()[-1]) for line in found] for found in (plain, two)]
    assert losses[1] == pytest.approx(losses[0], abs=2e-3)
    assert losses[0][2] < losses[0][0]


# --- Experiments -------------------------------------------------------------------------------

SED = re.compile(r"^sed (.*) (\S+\.py) > (\S+\.py)$", re.MULTILINE)


def test_each_copy_has_the_changes_that_its_sed_names(project):
    """A pattern that fits no line any more would leave the copy as it was."""
    found = [
        match for title in EXPERIMENTS.values() for match in SED.finditer(blocks(title, "bash"))
    ]
    assert len(found) == 8
    for match in found:
        subprocess.run(["bash", "-euc", match[0]], cwd=project, check=True, timeout=20)
        before, after = ((project / match[n]).read_text().splitlines() for n in (2, 3))
        ast.parse("\n".join(after))
        changed = [line for line in difflib.ndiff(before, after) if line[0] == "-"]
        assert len(changed) == max(1, match[1].count("-e ")), match[0]


# Of these experiments the figures are the same on every machine: those of each line, or of the
# lines with these words.
SAME = {1: "Run: ", 3: "images [", 6: "ERROR", 8: ""}


@pytest.mark.parametrize("number", long_among(EXPERIMENTS, {*EXPERIMENTS} - {2}))
def test_experiment_prints_what_the_page_shows(project, number):
    if number == 7:
        require_namespaces()
    title = EXPERIMENTS[number]
    lines = run_page(project, title, expect=int(number == 2))
    if number in SAME:
        shown = blocks(title, "text").splitlines()
        same = [
            [line for line in found if line and SAME[number] in line] for found in (shown, lines)
        ]
        assert sorted(same[0]) == sorted(same[1])
    if number == 5:  # the mean gradient is that of all images, except for batch norm
        apart = [float(line.split()[1]) for line in lines if line.endswith(" apart")]
        assert apart[0] < 1e-4 and apart[1] > 0.01
    if number == 7:
        for name, sent in (("plain", "44.9 MB"), ("powersgd", "1.2 MB")):
            log = (project / "logs" / name / "node0.log").read_text()
            number_of_bytes = int(re.search(r'"wire_bytes_per_step": (\d+)', log)[1])
            assert f"{number_of_bytes / 1e6:.1f} MB" == sent and f"sends {sent}" in LESSON.prose
    if number == 9:
        assert (project / "data" / "small" / "processes.png").stat().st_size > 10_000


# --- A step in numbers -------------------------------------------------------------------------


def test_worked_step_adds_up():
    table = re.search(r"\| \| rank 0 \| rank 1 \|\n.*\n((?:\|.*\n)+)", LESSON.text)[1]
    cells = [line.split("|")[2:4] for line in table.splitlines()]
    number = re.compile(r"(?<![\w-])-?\d+(?:\.\d+)?")
    shares = [1, 3], [2, 4]
    means = [sum(2 * x * (x - 2 * x) for x in share) / 2 for share in shares]
    for rank, share in enumerate(shares):
        losses, gradients = [(x - 2 * x) ** 2 for x in share], [2 * x * (x - 2 * x) for x in share]
        mean = sum(means) / 2
        rows = [
            share,
            losses,
            [sum(losses) / 2],
            gradients,
            [means[rank]],
            [mean],
            [1 - 0.05 * mean],
        ]
        shown = [[float(found) for found in number.findall(row[rank])] for row in cells]
        assert [row[-len(wanted) :] for row, wanted in zip(shown, rows, strict=True)] == rows
