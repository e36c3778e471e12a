"""docs/lesson/: its programs print what its page shows, its experiments do what it says, and the
answers to the sheet are those of the programs.
"""

from __future__ import annotations

import io
import json
import math
import re
import runpy
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
from PIL import Image

from support.forks import run_forked
from support.nodes import nameless, no_namespaces
from support.processes import LONG, ROOT, SCRIPT, Run, free_port, require, start
from test_readme import FENCED, PAGES

PAGE, SHEET, ANSWERS = (PAGES[f"docs/lesson/{name}.md"] for name in ("README", "sheet", "answers"))
LESSON = ROOT / "docs" / "lesson"
PROGRAMS = [LESSON / "plain.py", LESSON / "ddp.py"]
PLAIN, DDP = (path.read_text() for path in PROGRAMS)
_, *parts = re.split(r"^#+ (.*)\n", PAGE.text, flags=re.M)
SECTIONS = dict(zip(parts[::2], parts[1::2], strict=True))
EXPERIMENTS = {int(title[0]): title for title in SECTIONS if re.match(r"\d\. ", title)}
TWO_NODES = "Two nodes on one laptop"
OUTCOMES = "What you should see"
DECIMAL = r"-?\d+\.\d+"
PLACE = re.compile(r"[Ll]ine (\d+)(?: of `(plain)\.py`)?")


def outcomes(number: int) -> list[str]:
    """What the page says an experiment prints: after all experiments, so that nobody reads it
    before writing an expectation.
    """
    _, *parts = re.split(r"^\*\*(\d)\. (.*)\*\*$", SECTIONS[OUTCOMES], flags=re.M)
    assert [
        f"{number}. {title}" for number, title in zip(parts[::3], parts[1::3], strict=True)
    ] == [*EXPERIMENTS.values()]
    return [text for kind, text in FENCED.findall(parts[3 * number - 1]) if kind == "text"]


def blocks(title: str, kind: str) -> list[str]:
    """The code blocks of a kind in a section of the page."""
    return [text for found, text in FENCED.findall(SECTIONS[title]) if found == kind]


RUN_PLAIN, RUN_DDP = (text.strip() for text in blocks("First run", "bash"))
SPEED = "".join(blocks(EXPERIMENTS[4], "bash"))
NOTEBOOK = json.loads((LESSON / "lesson.ipynb").read_text())
CELLS = ["".join(c["source"]) for c in NOTEBOOK["cells"] if c["cell_type"] == "code"]


def run(command: str, folder: Path, expect: int = 0) -> Run:
    """Types a command in the folder of the two programs."""
    with start(["bash", "-c", command], cwd=folder) as started:
        return started.finish(120, expect)


def is_printed(shown: str, output: str) -> bool:
    """Whether the output has this line, or a longer one, with nearly the same decimals."""
    text = re.split(DECIMAL, shown)
    wanted = [float(number) for number in re.findall(DECIMAL, shown)]
    pattern = f"({DECIMAL})".join(map(re.escape, text))
    found = [[*map(float, match.groups())] for match in re.finditer(pattern, output)]
    near = math.inf if "seconds an epoch" in shown else 0.02
    return any(numbers == pytest.approx(wanted, abs=near) for numbers in found)


def assert_printed(shown: str, output: str) -> None:
    for line in shown.splitlines():
        assert is_printed(line, output), f"{line!r} is not in:\n{output}"


def images(output: str, rank: int) -> list[list[int]]:
    """Those of a rank, epoch by epoch."""
    found = re.findall(rf"\[rank {rank}\] epoch \d: images (\[.*?\])", output)
    return [json.loads(numbers) for numbers in found]


def last_loss(output: str) -> float:
    """The loss over all ranks in the last epoch."""
    return float(re.findall(rf"epoch 2, all ranks: loss ({DECIMAL})", output)[-1])


def copy_programs(made: Path) -> Path:
    """A folder of a student."""
    made.mkdir(parents=True)
    for path in PROGRAMS:
        shutil.copy(path, made)
    return made


@pytest.fixture
def folder(tmp_path):
    return copy_programs(tmp_path / "my lesson")


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """What ddp.py prints as it is, with two processes."""
    made = tmp_path_factory.mktemp("original")
    shutil.copy(LESSON / "ddp.py", made)
    return run_nameless(RUN_DDP, made)


# --- Changes of the programs -------------------------------------------------------------------

# Of an experiment: where in which program, and the lines of the diff.
Change = tuple[int, str, list[str]]


def changes(text: str) -> list[Change]:
    """What a section of the page, or the experiment on the sheet, changes."""
    found, rest = [], text
    for diff in re.findall(r"^```diff\n(.*?)^```", text, re.M | re.S):
        before, _, rest = rest.partition(diff)
        for number, plain in PLACE.findall(before):
            found.append((int(number), "plain.py" if plain else "ddp.py", diff.splitlines()))
    return found


def apply(change: Change, folder: Path) -> None:
    number, name, (first, *more) = change
    lines = (folder / name).read_text().splitlines()
    assert lines[number - 1] == first[1:] and all(line[0] == "+" for line in more)
    new = [line[1:] for line in more]
    lines[number - 1 : number] = new if first[0] == "-" else [first[1:], *new]
    (folder / name).write_text("\n".join(lines))


def becomes(question: int, folder: Path) -> None:
    """Makes the change that a question of the sheet describes."""
    (text,) = re.findall(rf"^{question}\. (?:\(Homework\) )?(.*)$", SHEET.text, re.M)
    number, code = re.match(r"Line (\d+) becomes `(.*?)`\. ", text).groups()
    lines = (folder / "ddp.py").read_text().splitlines()
    old = lines[int(number) - 1]
    indent = old[: len(old) - len(old.lstrip())]
    assert old != indent + code
    lines[int(number) - 1] = indent + code
    (folder / "ddp.py").write_text("\n".join(lines))


# --- The two programs --------------------------------------------------------------------------


def test_plain_prints_what_the_page_shows(folder):
    lines, shown = run(RUN_PLAIN, folder).lines(), blocks("First run", "text")[0]
    assert len(lines) == len(shown.splitlines())
    assert all(map(is_printed, shown.splitlines(), lines))


def test_ddp_prints_what_the_page_shows_and_ends_with_the_weights_of_plain(original):
    plain, shown = blocks("First run", "text")
    # torch 2.8's Gloo has lines of its own, in pieces that mix.
    printed = [line for line in original.splitlines() if line.startswith("[rank ")]
    assert len(printed) == len(shown.splitlines())
    assert_printed(shown, original)
    (weights,) = re.findall(r"^last weights: .*$", plain, re.M)
    for rank in (0, 1):
        assert f"[rank {rank}] {weights}" in shown


def test_diff_is_the_one_that_the_page_explains(folder):
    (command,) = blocks("The diff", "bash")
    printed = run(command, folder, expect=1).out  # as diff ends where files differ
    assert printed.endswith("".join(blocks("The diff", "diff")))
    left_out = printed[: -len("".join(blocks("The diff", "diff")))]
    for line in re.findall(r"^[<>] (.+)$", left_out, re.M):
        assert re.match(r'import |from |""".*"""$|BATCH_SIZE = 8', line), line


def test_six_marks_stand_once_and_in_order_and_mean_functions_of_the_big_script():
    marks = re.compile(r"# DDP (\d)/6")
    assert marks.findall(PLAIN) == []
    assert marks.findall(DDP) == [*"123456"]
    text = SECTIONS["The diff"]
    assert re.findall(r"^\*\*(\d)/6: ", text, re.M) == [*"123456"]
    for number, name in re.findall(r"^\| (\d)/6 .*\| `(\w+)`", PAGE.text, re.M):
        before_mark = SCRIPT.read_text().partition(f"# DDP {number}/6")[0]
        assert re.findall(r"^def (\w+)", before_mark, re.M)[-1] == name


def test_what_ranks_send_is_on_their_device():
    """NCCL sends only what is on a GPU: tests/gpu runs ddp.py on one."""
    for text in (PLAIN, DDP):
        made = re.findall(r"results \+?= torch\.(.*)$", text, re.M)
        assert len(made) == 2 and all("device" in code.partition("#")[0] for code in made)


THREADS = """
import pathlib, runpy
runpy.run_path("ddp.py")
names = [path.read_text().strip() for path in pathlib.Path("/proc/self/task").glob("*/comm")]
print(f"threads: {names}\\n", end="")
"""


# --- Experiments -------------------------------------------------------------------------------

# Runs a changed program in its folder, as Python does, and says how long that took. A second
# argument is the number of ranks on each node, if that is not the number of all ranks.
ANY_PROGRAM = (
    "\n".join(re.findall(r"^(?:import|from) .*", DDP, re.M))
    + """
import runpy, sys

def main():
    if sys.argv[2:]:
        os.environ["LOCAL_RANK"] = str(int(os.environ["RANK"]) % int(sys.argv[2]))
    os.chdir(os.path.dirname(sys.argv[1]))
    runpy.run_path(sys.argv[1])

def run_and_exit(main):
    start = time.perf_counter()
    try:
        main()
        sys.exit()
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
    finally:
        print(f"ended after {time.perf_counter() - start} s\\n", end="")
"""
)


@pytest.fixture(scope="module")
def changed(tmp_path_factory) -> dict[str, Run]:
    """Runs of the changed programs, which share one start of Python."""
    folder = tmp_path_factory.mktemp("changed")
    for number in (1, 2, 3, 4, 5):
        made = copy_programs(folder / f"experiment {number}")
        for change in changes(SECTIONS[EXPERIMENTS[number]]):
            apply(change, made)
    for number in (11, 12, 13, 15, 21):
        becomes(number, copy_programs(folder / f"question {number}"))
    names = [path.name for path in folder.iterdir()]
    for name, told, old, new in (
        ("experiment 5", "without a prefix", "ddp.state_dict()", "model.state_dict()"),
        ("question 15", "doubled rate", "lr=0.5", "lr=1.0"),
    ):
        shutil.copytree(folder / name, folder / told)
        text = (folder / told / "ddp.py").read_text()
        assert text.count(old) == 1
        (folder / told / "ddp.py").write_text(text.replace(old, new))
        names.append(told)
    runs = {f"{name}/ddp.py": (2, [folder / name / "ddp.py"]) for name in names}
    runs["question 21/ddp.py"] = 4, [folder / "question 21/ddp.py", 2]
    (copy_programs(folder / "three") / "program.py").write_text(THREADS)
    runs["three/program.py"] = 3, [folder / "three/program.py"]
    for name in ("experiment 4", "experiment 5", "without a prefix"):
        runs[f"{name}/plain.py"] = 0, [folder / name / "plain.py"]
    (folder / "any_program.py").write_text(ANY_PROGRAM)
    program = folder / "any_program.py"
    return dict(zip(runs, run_forked([*runs.values()], program=program, expect=None), strict=True))


def run_nameless(command: str, folder: Path) -> str:
    """What a command prints; where that can be had, on a machine whose own name does not resolve,
    as is usual in a class.
    """
    if no_namespaces():
        return run(command, folder).out
    return nameless(folder, "bash", "-c", command, timeout=120).out


def output_of(run: Run, fails: bool = False) -> str:
    assert bool(run.returncode) == fails, run.tail()
    return run.out


@pytest.fixture(scope="module")
def mismatch(tmp_path_factory) -> str:
    """What experiment 3 prints, which ends in an error: by torchrun, on which it depends what of
    the other rank is still seen.
    """
    folder = copy_programs(tmp_path_factory.mktemp("mismatch") / "my lesson")
    (change,) = changes(SECTIONS[EXPERIMENTS[3]])
    apply(change, folder)
    return run(RUN_DDP, folder, expect=1).out


@LONG
def test_three_processes_see_two_images_twice_and_leave_no_thread(changed):
    """On a busy machine a thread that is left could abort Python at its end: SIGABRT, after all
    results.
    """
    output = output_of(changed["three/program.py"])
    assert "replicas identical: True" in output
    assert output.count(" of 18 right") == 3
    threads = re.findall(r"^threads: (.*)$", output, re.MULTILINE)
    assert len(threads) == 3
    assert all("python" in names and "gloo" not in names for names in threads)


@LONG
@pytest.mark.parametrize("number", [1, 2, 3])
def test_experiment_shows_what_the_page_promises(number, original, changed, mismatch):
    output = mismatch if number == 3 else output_of(changed[f"experiment {number}/ddp.py"])
    (shown,) = outcomes(number)
    assert_printed(shown, output)
    assert not all(is_printed(line, original) for line in shown.splitlines())


@LONG
def test_speed_is_measured_with_a_width_that_takes_time(changed):
    """How much faster two processes are is the machine's: here only that both say it."""
    assert [line.removeprefix("OMP_NUM_THREADS=1 ") for line in SPEED.splitlines()] == [
        RUN_PLAIN,
        RUN_DDP,
    ]
    output = "".join(output_of(changed[f"experiment 4/{name}.py"]) for name in ("plain", "ddp"))
    one, two = map(
        float, re.findall(rf"^(?:\[rank 0\] )?seconds an epoch: ({DECIMAL})$", output, re.M)
    )
    assert one > 0.02 and two > 0.01
    assert "replicas identical: True" in output


@LONG
def test_saved_model_loads_without_the_prefix_alone(changed):
    fails, goes_on = outcomes(5)
    output_of(changed["experiment 5/ddp.py"])
    assert_printed(fails, output_of(changed["experiment 5/plain.py"], fails=True))
    told = "save `model.state_dict()` in place of `ddp.state_dict()`"
    assert told in SECTIONS[EXPERIMENTS[5]]
    output_of(changed["without a prefix/ddp.py"])
    assert_printed(goes_on, output_of(changed["without a prefix/plain.py"]))


def test_each_experiment_changes_lines_that_are_there(folder):
    assert [*EXPERIMENTS] == [1, 2, 3, 4, 5]
    counts = [len(changes(SECTIONS[title])) for title in EXPERIMENTS.values()]
    assert counts == [1, 1, 1, 2, 2]
    for title in EXPERIMENTS.values():
        assert not blocks(title, "text"), "what it prints stands with the outcomes"
        for change in changes(SECTIONS[title]):
            apply(change, folder)
    for path in folder.iterdir():
        compile(path.read_text(), path.name, "exec")


# --- Answers that a program gives --------------------------------------------------------------


def answer(question: int) -> str:
    (text,) = re.findall(rf"^{question}\. (.*?)(?=^\d+\. |^\*\*|\Z)", ANSWERS.text, re.M | re.S)
    return " ".join(text.split())


@LONG
def test_answer_on_the_call_that_met_another(changed):
    """Without torchrun, which may end rank 1 before it says where it was."""
    output = output_of(changed["experiment 3/ddp.py"], fails=True)
    (number,) = re.findall(r"^`loss.backward\(\)` \(line (\d+)\) in epoch 1", answer(8), re.M)
    assert re.search(rf'^\[rank1\]:.*ddp\.py", line {number}, in <module>', output, re.M)
    assert "[rank 1] epoch 0: images" in output and "[rank 1] epoch 1: images" not in output


@LONG
def test_answer_on_all_ranks_with_the_same_images(changed):
    output = output_of(changed["question 11/ddp.py"])
    assert images(output, 0) == images(output, 1) and len(images(output, 0)[0]) == 16
    assert " of 32 right" in output and '"of 32"' in answer(11)
    assert answer(11).startswith("Four steps, each of the same 4 images")


@LONG
def test_answer_on_different_first_weights(changed, original):
    output = output_of(changed["question 12/ddp.py"])
    assert "[rank 1] first weights: sum -1.97" not in output
    assert last_loss(output) == pytest.approx(last_loss(original), abs=0.02)
    assert "replicas identical: True" in output


@LONG
def test_answer_on_a_rank_that_makes_one_step_less(changed):
    output = output_of(changed["question 13/ddp.py"], fails=True)
    seconds = [float(text) for text in re.findall(rf"^ended after ({DECIMAL}) s", output, re.M)]
    assert len(seconds) == 2 and min(seconds) > 20 and "20 seconds" in answer(13)
    (quoted,) = re.findall(r'"(.*?)"', answer(13))
    assert quoted in output


@LONG
def test_answer_on_a_rank_that_is_killed(folder):
    becomes(14, folder)
    output = run(RUN_DDP, folder, expect=1).out
    (quoted,) = re.findall(r'"(.*?)"', answer(14))
    cause = output[output.index(quoted) :]
    assert re.search(r"rank +: 1 \(", cause) and re.search(r"exitcode +: -9 ", cause)
    assert "rank 1, exit code -9" in answer(14)


@LONG
def test_answer_on_a_global_batch_that_doubles(changed, original):
    (question,) = re.findall(r"^15\. (.*)$", SHEET.text, re.M)
    larger, small = map(float, re.findall(rf"({DECIMAL})", question))
    assert last_loss(original) == pytest.approx(small, abs=0.02)
    output = output_of(changed["question 15/ddp.py"])
    assert last_loss(output) == pytest.approx(larger, abs=0.02)
    assert "lr=0.5" in DDP.splitlines()[62] and "line 63" in question
    (doubled,) = re.findall(rf"With `lr=1.0` the loss is ({DECIMAL})", answer(15))
    output = output_of(changed["doubled rate/ddp.py"])
    assert last_loss(output) == pytest.approx(float(doubled), abs=0.02)


@LONG
def test_answer_on_the_local_rank(changed):
    """Two ranks on each of two nodes. For the commands see the next test."""
    output = output_of(changed["question 21/ddp.py"])
    assert "replicas identical: True" in output
    assert images(output, 0) == images(output, 2) and images(output, 1) == images(output, 3)
    assert "the same half of the images" in answer(21)


@LONG
def test_two_nodes_on_one_laptop(folder):
    """As the notebook starts them; the second one later."""
    both = CELLS[-1].removeprefix("%%bash\n").replace("29500", str(free_port()))
    # Longer than the timeout of ddp.py: torchrun waits, before it starts a rank.
    late = both.replace(" &\n", " &\nsleep 25\n", 1)
    assert late != both
    output = run_nameless(late, folder)
    assert "[rank 3] last weights: sum 2.2" in output and "replicas identical: True" in output
    seen = [number for rank in range(4) for number in images(output, rank)[0]]
    assert sorted(seen) == [*range(16)]


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


def test_plan_leaves_ten_of_ninety_minutes_and_counts_the_words():
    """A row's minutes are those of its words, its commands and its typing."""
    plan = SECTIONS["The lesson: DDP in 90 minutes"]
    rows = re.findall(r"^\| \[(.*?)\]\(.*?\) \| (.*) \|$", plan, re.M)
    total = 0
    for title, cells in rows:
        words, commands, typing, minutes, _ = (cell.strip() for cell in cells.split("|"))
        sections = [*SECTIONS]
        first = sections.index(title)
        heads = re.findall(r"^## (.*)$", PAGE.prose, re.M)
        last = sections.index(heads[heads.index(title) + 1])
        text = "\n".join(SECTIONS[name] for name in sections[first:last])
        counted = len(re.sub(r"[|>*-]+ ", " ", FENCED.sub("", text)).split())
        assert float(words) == pytest.approx(counted / 130, abs=0.3), f"{title}: {counted}"
        assert sum(map(float, (words, commands, typing))) == pytest.approx(float(minutes), abs=0.6)
        total += float(minutes)
    assert len(rows) == 6 and total == 80
    assert re.search(r"^\| slack \|.*\| 10 \|", plan, re.M)


def test_answer_on_the_global_batch_of_the_big_script():
    (batch,) = re.findall(r"^22\. .* `--batch_size (\d+)` on two nodes", SHEET.text, re.M)
    assert "world size x batch size" in SCRIPT.read_text()
    assert answer(22).startswith(f"8 processes × {batch} = {8 * int(batch)} images")


def test_page_sheet_and_answers_number_the_same_questions():
    questions, answers = (re.findall(r"^(\d+)\. ", page.text, re.M) for page in (SHEET, ANSWERS))
    assert questions == answers == [str(n + 1) for n in range(len(questions))]
    named: list[int] = []
    for first, word, last in re.findall(r"\*Questions? (\d+)(?: (to|and) (\d+))?", PAGE.text):
        named += range(int(first), int(last if word else first) + 1)
    assert [*map(str, named)] == questions
    for number, text in re.findall(r"^\*Question (\d+): (.*?)\*$", PAGE.text, re.M | re.S):
        assert f"\n{number}. {' '.join(text.split())}\n" in SHEET.text


def test_sheet_has_the_experiments_of_the_page():
    titles = re.findall(r"^\*\*Experiment (.*)\*\*$", SHEET.text, re.M)
    assert titles == [*EXPERIMENTS.values()]
    for title in titles:
        text = SHEET.text.partition(f"**Experiment {title}**")[2].partition("I expect:")[0]
        assert changes(text) == changes(SECTIONS[title])


def test_lines_that_the_text_names_are_those_of_ddp():
    lines = DDP.splitlines()
    named = re.findall(r"`([^`]+)` \(line (\d+)\)", PAGE.text + ANSWERS.text)
    assert len(named) >= 6
    for code, number in named:
        assert code in lines[int(number) - 1], number


# --- What students get -------------------------------------------------------------------------

MADE = runpy.run_path(str(LESSON / "make_pages.py"))


def test_archive_has_what_students_need():
    (command,) = (text for text in PAGE.commands if text.startswith("git archive"))
    require((ROOT / ".git").exists(), "git archive needs a clone")
    command = command.strip().replace("--output=lesson.zip ", "")
    done = subprocess.run(command.split(), cwd=ROOT, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(io.BytesIO(done.stdout)) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
    pages = {"README.md", "sheet.md", "lesson.ipynb"} | {*re.findall(r"\w+\.png", PAGE.text)}
    assert {*names} == {f"lesson/{name}" for name in pages | {"plain.py", "ddp.py"}}


def test_notebook_is_made_of_the_programs():
    """If it differs, run docs/lesson/make_pages.py."""
    assert (LESSON / "lesson.ipynb").read_text() == MADE["notebook"]()
    assert NOTEBOOK["nbformat"] == 4


def test_cells_of_the_notebook_write_the_programs_and_run_the_commands_of_the_page():
    """Jupyter runs a cell as a file, as lines of the shell, or as a script of bash. The tests
    above run these commands, each with the files that the notebook has written before it.
    """
    written = [f"%%writefile {path.name}\n{path.read_text()}".rstrip("\n") for path in PROGRAMS]
    (diff,) = blocks("The diff", "bash")
    commands = [f"!{text.strip()}" for text in (RUN_PLAIN, RUN_DDP, diff, RUN_DDP)]
    speed = "\n".join(f"!{line}" for line in SPEED.splitlines())
    nodes = "".join(f"{text.strip()} &\n" for text in blocks(TWO_NODES, "bash"))
    plain, ddp, diff, again = commands
    assert [
        written[0],
        plain,
        written[1],
        ddp,
        diff,
        again,
        speed,
        f"%%bash\n{nodes}wait",
    ] == CELLS
    assert "Set `WIDTH = 4096` in both programs" in MADE["SPEED"]


def test_pictures_show_an_all_reduce_and_are_drawn_anew(tmp_path):
    moments = MADE["ring_states"]()
    assert [words for _, words, _ in moments][-1] == [["A", "B", "C"]] * 3
    assert [title for title, _, _ in moments] == ["at first", *(f"turn {n}" for n in (1, 2, 3, 4))]
    for name in ("ring", "nodes"):
        MADE[f"draw_{name}"](tmp_path / f"{name}.png")
        sizes = [Image.open(folder / f"{name}.png").size for folder in (tmp_path, LESSON)]
        assert sizes[0] == sizes[1]
