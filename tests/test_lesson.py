"""docs/lesson/: its programs print what its page shows, and its experiments do what it says."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from support.processes import LONG, ROOT, SCRIPT, Run, free_port, start
from test_readme import FENCED, PAGES

PAGE, SHEET, ANSWERS = (PAGES[f"docs/lesson/{name}.md"] for name in ("README", "sheet", "answers"))
PLAIN, DDP = "docs/lesson/plain.py", "docs/lesson/ddp.py"
_, *parts = re.split(r"^#+ (.*)\n", PAGE.text, flags=re.M)
SECTIONS = dict(zip(parts[::2], parts[1::2], strict=True))
EXPERIMENTS = {int(title[0]): title for title in SECTIONS if re.match(r"\d\. ", title)}
TWO_NODES = "Two nodes on one laptop"
DECIMAL = r"-?\d+\.\d+"


def blocks(title: str, kind: str) -> list[str]:
    """The code blocks of a kind in a section of the page."""
    return [text for found, text in FENCED.findall(SECTIONS[title]) if found == kind]


RUN_PLAIN, RUN_DDP = (text.strip() for text in blocks("First run", "bash"))


def run(command: str, expect: int = 0) -> Run:
    """Types a command of the page in the repository's folder."""
    with start(["bash", "-c", command], cwd=ROOT) as started:
        return started.finish(120, expect)


def is_printed(shown: str, output: str) -> bool:
    """Whether the output has this line, or a longer one, with nearly the same decimals."""
    text = re.split(DECIMAL, shown)
    wanted = [float(number) for number in re.findall(DECIMAL, shown)]
    pattern = f"({DECIMAL})".join(map(re.escape, text))
    found = [[*map(float, match.groups())] for match in re.finditer(pattern, output)]
    return any(numbers == pytest.approx(wanted, abs=0.02) for numbers in found)


def changed_copy(title: str, folder: Path) -> Path:
    """ddp.py with the change that a section shows: one line, where the section says it is."""
    (number,) = re.findall(r"[Ll]ine (\d+) ", SECTIONS[title].partition("```diff")[0])
    before, after = blocks(title, "diff")[0].splitlines()
    lines = (ROOT / DDP).read_text().splitlines()
    assert (before[0], after[0]) == ("-", "+")
    assert lines[int(number) - 1] == before[1:]
    lines[int(number) - 1] = after[1:]
    path = folder / "ddp.py"
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def original():
    """What ddp.py prints as it is, with two processes."""
    return run(RUN_DDP).out


# --- The two programs --------------------------------------------------------------------------


def test_plain_prints_what_the_page_shows():
    lines, shown = run(RUN_PLAIN).lines(), blocks("First run", "text")[0]
    assert len(lines) == len(shown.splitlines())
    assert all(map(is_printed, shown.splitlines(), lines))


def test_ddp_prints_what_the_page_shows_and_ends_with_the_weights_of_plain(original):
    plain, shown = (text.splitlines() for text in blocks("First run", "text"))
    # torch 2.8's Gloo has lines of its own, in pieces that mix.
    printed = [line for line in original.splitlines() if line.startswith("[rank ")]
    assert len(printed) == len(shown)
    for line in shown:
        assert is_printed(line, original), line
    for rank in (0, 1):
        assert f"[rank {rank}] {plain[-1]}" in shown


def test_diff_is_the_one_that_the_page_explains():
    command = blocks("The diff", "bash")[0].split()
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20).stdout
    assert "".join(blocks("The diff", "diff")) == printed


def test_six_marks_stand_once_and_in_order_and_mean_functions_of_the_big_script():
    marks = re.compile(r"# DDP (\d)/6")
    assert marks.findall((ROOT / PLAIN).read_text()) == []
    assert marks.findall((ROOT / DDP).read_text()) == [*"123456"]
    text = SECTIONS["The diff"]
    assert re.findall(r"^\*\*(\d)/6: ", text, re.M) == [*"123456"]
    for number, name in re.findall(r"^\| (\d)/6 .*\| `(\w+)`", PAGE.text, re.M):
        before_mark = SCRIPT.read_text().partition(f"# DDP {number}/6")[0]
        assert re.findall(r"^def (\w+)", before_mark, re.M)[-1] == name


@LONG
def test_three_processes_see_two_images_twice_and_leave_no_thread(tmp_path):
    """On a busy machine one could abort Python at its end: SIGABRT, after all results."""
    program = tmp_path / "program.py"
    program.write_text(
        "import pathlib, runpy\n"
        f"runpy.run_path({str(ROOT / DDP)!r})\n"
        "print(*[path.read_text() for path in pathlib.Path('/proc/self/task').glob('*/comm')])\n"
    )
    command = RUN_DDP.replace("=2", "=3").replace(DDP, shlex.quote(str(program)))
    output = run(command).out
    assert output.count(" of 18 right") == 3
    assert "python" in output and "gloo" not in output


# --- Experiments -------------------------------------------------------------------------------

FAIL = {6, 7}  # these end with an error


@LONG
@pytest.mark.parametrize("number", EXPERIMENTS)
def test_experiment_shows_what_the_page_promises(number, original, tmp_path):
    title = EXPERIMENTS[number]
    command = RUN_DDP.replace(DDP, f"'{changed_copy(title, tmp_path)}'")
    ended = run(command, expect=int(number in FAIL))
    output = ended.out
    if number == 6:
        assert ended.seconds > 20
    if number == 7:
        output = output[output.index("Root Cause") :]  # torchrun lists the other ranks above it
    shown = blocks(title, "text")[0].splitlines()
    for line in shown:
        assert is_printed(line, output), f"{line!r} is not in:\n{output}"
    assert not all(is_printed(line, original) for line in shown)


def test_each_experiment_changes_a_line_that_is_there(tmp_path):
    assert [*EXPERIMENTS] == [1, 2, 3, 4, 5, 6, 7] and f"`{RUN_DDP}`" in SECTIONS["Experiments"]
    for title in [*EXPERIMENTS.values(), TWO_NODES]:
        compile(changed_copy(title, tmp_path).read_text(), title, "exec")


@LONG
def test_call_of_rank_0_alone_is_the_mismatch_that_the_answers_quote(tmp_path):
    call, message = (
        "    dist.all_reduce(results)",
        "a distributed collective mismatch in your code",
    )
    path = tmp_path / "ddp.py"
    text = (ROOT / DDP).read_text()
    path.write_text(text.replace(call, f"    if rank == 0: {call.strip()}"))
    assert message in run(RUN_DDP.replace(DDP, f"'{path}'"), expect=1).out
    assert message in ANSWERS.text


@LONG
def test_two_nodes_on_one_laptop(tmp_path, original):
    path, port = changed_copy(TWO_NODES, tmp_path), str(free_port())
    commands = [
        text.strip().replace("29500", port).replace(DDP, f"'{path}'")
        for text in blocks(TWO_NODES, "bash")
    ]
    output = run(" & ".join(commands) + "; wait").out
    shown = blocks(TWO_NODES, "text")[0].splitlines()
    for line in shown:
        assert is_printed(line, output), line
    assert not all(is_printed(line, original) for line in shown)


# --- Numbers and sheet -------------------------------------------------------------------------


def test_worked_step_adds_up():
    number = re.compile(r"(?<![\w-])-?\d+(?:\.\d+)?")
    table = re.findall(r"^\|(.*)\|(.*)\|(.*)\|$", SECTIONS["A step in numbers"], re.M)[2:]
    shares = [1, 3], [2, 4]
    gradients = [[2 * x * (x - 2 * x) for x in share] for share in shares]
    mean = sum(map(sum, gradients)) / 4
    for rank, share in enumerate(shares):
        losses = [(x - 2 * x) ** 2 for x in share]
        rows = [share, losses, [sum(losses) / 2], gradients[rank], [sum(gradients[rank]) / 2]]
        rows += [[mean], [1 - 0.05 * mean]]
        for cells, wanted in zip(table, rows, strict=True):
            shown = [float(found) for found in number.findall(cells[1 + rank])]
            assert shown[-len(wanted) :] == wanted


def test_times_of_the_ring_follow_from_the_formula():
    size = 4 * 11_217_552
    found = re.findall(r"^\| (\d+) Gb/s \| ([\d.]+) ms \| ([\d.]+) ms \|$", PAGE.text, re.M)
    assert len(found) == 3
    for rate, *times in found:
        for n, shown in zip((2, 4), times, strict=True):
            milliseconds = 2 * (n - 1) / n * size * 8 / (float(rate) * 1e9) * 1e3
            assert float(shown) == pytest.approx(milliseconds, rel=0.01)
    assert f"**{size / 1e6:.1f} MB**" in PAGE.text and f"{1.5 * size / 1e6:.1f} MB" in PAGE.text


@LONG
def test_gradients_of_the_big_script_have_that_size():
    from torchvision.models import resnet18

    count = sum(parameter.numel() for parameter in resnet18(num_classes=80).parameters())
    assert f"{count:,} weights" in PAGE.text


def test_plan_sheet_and_answers_fit_together():
    minutes = re.findall(r"^\| (\d+) \|", SECTIONS["The lesson: DDP in 90 minutes"], re.M)
    assert sum(map(int, minutes)) == 90
    questions, answers = (re.findall(r"^(\d+)\. ", page.text, re.M) for page in (SHEET, ANSWERS))
    assert questions == answers == [str(n + 1) for n in range(len(questions))]
    assert re.findall(r"^\*\*Experiment (\d)\.", ANSWERS.text, re.M) == [*map(str, EXPERIMENTS)]
    form = r"^\*\*Experiment ([^\n]*)\*\* \(line (\d+)\)\n\n```diff\n(.*?)^```"
    wanted = []
    for title in EXPERIMENTS.values():
        line = re.search(r"Line (\d+) ", SECTIONS[title])[1]
        wanted.append((title, line, blocks(title, "diff")[0]))
    assert re.findall(form, SHEET.text, re.M | re.S) == wanted


def test_lines_that_the_text_names_are_those_of_ddp():
    lines = (ROOT / DDP).read_text().splitlines()
    named = re.findall(r"`([^`]+)` \(line (\d+)\)", PAGE.text + ANSWERS.text)
    assert len(named) == 8
    for code, number in named:
        assert code in lines[int(number) - 1], number
