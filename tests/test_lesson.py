"""docs/lesson/: its programs print what its page shows, its experiments do what it says, and the
answers to the sheet are those of the programs.
"""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image

from support.forks import run_forked
from support.nodes import nameless, no_namespaces
from support.pages import FENCED, PAGES
from support.processes import LONG, ROOT, Run, free_port, start

PAGE, SHEET, ANSWERS = (PAGES[f"docs/lesson/{name}.md"] for name in ("README", "sheet", "answers"))
LESSON = ROOT / "docs" / "lesson"
PROGRAMS = [LESSON / "plain.py", LESSON / "ddp.py"]
DDP = PROGRAMS[1].read_text()
MADE = runpy.run_path(str(LESSON / "make_pages.py"))
_, *parts = re.split(r"^#+ (.*)\n", PAGE.text, flags=re.M)
SECTIONS = dict(zip(parts[::2], parts[1::2], strict=True))
EXPERIMENTS = {int(title[0]): title for title in SECTIONS if re.match(r"\d\. ", title)}
DECIMAL = r"-?\d+\.\d+"
PLACE = re.compile(r"[Ll]ine (\d+)(?: of `(plain)\.py`)?")


def blocks(title: str, kind: str) -> list[str]:
    """The code blocks of a kind in a section of the page."""
    return [text for found, text in FENCED.findall(SECTIONS[title]) if found == kind]


RUN_PLAIN, RUN_DDP = (text.strip() for text in blocks("First run", "bash"))
NODES = "".join(f"{text.strip()} &\n" for text in blocks("Two nodes on one laptop", "bash"))


def figures(output: str) -> dict[str, float]:
    """Each line with # for its decimal, and the decimal. Seconds are the machine's: 0."""
    found = {}
    for line in output.splitlines():
        number = 0.0 if "seconds an epoch" in line else re.search(DECIMAL, line)
        found[re.sub(DECIMAL, "#", line)] = float(number[0]) if number else 0.0
    return found


def near(shown: dict[str, float]) -> object:
    return pytest.approx(shown, abs=0.02)


def assert_printed(shown: str, output: str) -> None:
    """The output has these lines, those without a decimal as a part of longer ones."""
    printed = figures(output)
    for line, number in figures(shown).items():
        assert line in output or near({line: number}) == {line: printed.get(line)}, output


def of_ranks(output: str) -> str:
    """What a rank says. Other lines are the tests', and those of torch 2.8's Gloo."""
    return "".join(re.findall(r"^\[rank .*\n", output, re.M))


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


def run_nameless(command: str, folder: Path, expect: int = 0) -> str:
    """What a command prints; where that can be had, on a machine whose own name does not resolve,
    as is usual in a class.
    """
    command = f"code=0; {{ {command}\n}} || code=$?; test $code = {expect}"
    if no_namespaces():
        with start(["bash", "-c", command], cwd=folder) as started:
            return started.finish().out
    return nameless(folder, "bash", "-c", command, timeout=120).out


# Runs a program in its folder, and says which threads it leaves. A second argument is the number
# of ranks on each node, if that is not the number of all ranks.
ANY_PROGRAM = (
    "\n".join(re.findall(r"^(?:import|from) .*", DDP, re.M))
    + """
import pathlib, runpy, sys

def main():
    if sys.argv[2:]:
        os.environ["LOCAL_RANK"] = str(int(os.environ["RANK"]) % int(sys.argv[2]))
    os.chdir(os.path.dirname(sys.argv[1]))
    runpy.run_path(sys.argv[1])
    threads = pathlib.Path("/proc/self/task").glob("*/comm")
    print(f"threads: {[path.read_text().strip() for path in threads]}\\n", end="")

def run_and_exit(main):
    main()
    sys.exit()
"""
)


def run_programs(folder: Path, runs: dict[str, tuple[int, list]]) -> dict[str, Run]:
    """{program in the folder: its run} of {program: (ranks, further arguments)}: 0 ranks are one
    process alone. All share one start of Python.
    """
    (folder / "any_program.py").write_text(ANY_PROGRAM)
    listed = [(ranks, [folder / name, *more]) for name, (ranks, more) in runs.items()]
    ended = run_forked(listed, program=folder / "any_program.py", expect=None)
    return dict(zip(runs, ended, strict=True))


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> dict[int, str]:
    """{ranks: what is printed} by the programs as they are; 0: by plain.py."""
    folder = tmp_path_factory.mktemp("original")
    names = {0: "plain.py"} | {ranks: f"{ranks}/ddp.py" for ranks in (2, 3, 4)}
    for ranks in (2, 3, 4):
        copy_programs(folder / str(ranks))
    shutil.copy(LESSON / "plain.py", folder)
    ended = run_programs(folder, {name: (ranks, []) for ranks, name in names.items()})
    assert all(run.returncode == 0 for run in ended.values()), [*map(Run.tail, ended.values())]
    return {ranks: ended[name].out for ranks, name in names.items()}


# --- The two programs --------------------------------------------------------------------------

SAME = re.compile(r"^(?:\[rank 0\] )?(epoch \d.* loss .* right|\w+ weights: .*)$", re.M)


@pytest.mark.guards("lesson-shares", "lesson-wrap", "lesson-forward", "lesson-set-epoch")
@pytest.mark.guards("lesson-sum", "lesson-rank-0", "lesson-seed", "lesson-plain")
def test_programs_print_what_the_page_shows_and_agree(original):
    plain, ddp = blocks("First run", "text")
    assert figures(original[0].partition("threads: ")[0]) == near(figures(plain))
    assert figures(of_ranks(original[2])) == near(figures(ddp))
    alone, *parallel = (
        "\n".join(SAME.findall(output)).replace(", all ranks", "")
        for output in (original[0], original[2], original[4])
    )
    for together in parallel:
        assert figures(together) == near(figures(alone)) and len(figures(alone)) == 5


@pytest.mark.guards("lesson-threads")
def test_three_processes_see_two_images_twice_and_leave_no_thread(original):
    """On a busy machine a thread that is left could abort Python at its end: SIGABRT, after all
    results.
    """
    assert "replicas identical: True" in original[3]
    assert original[3].count(" of 18 right") == 3
    threads = re.findall(r"^threads: (.*)$", original[3], re.M)
    assert len(threads) == 3
    assert all("python" in names and "gloo" not in names for names in threads)


def test_diff_is_the_one_that_the_page_explains():
    (command,) = blocks("The diff", "bash")
    done = subprocess.run(command.split(), cwd=LESSON, stdout=subprocess.PIPE, text=True)
    explained = "".join(blocks("The diff", "diff"))
    assert done.returncode == 1 and done.stdout.endswith(explained)
    for line in re.findall(r"^[<>] (.+)$", done.stdout.removesuffix(explained), re.M):
        assert re.match(r'import |from |""".*"""$|BATCH_SIZE = 8', line), line


def test_lines_that_the_text_names_are_those_of_ddp():
    lines = DDP.splitlines()
    named = re.findall(r"`([^`]+)` \(line (\d+)\)", PAGE.text + ANSWERS.text)
    assert len(named) >= 6
    for code, number in named:
        assert code in lines[int(number) - 1], number


# --- Experiments -------------------------------------------------------------------------------

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


def outcomes(number: int) -> list[str]:
    """What the page says an experiment prints: after all experiments, so that nobody reads it
    before writing an expectation.
    """
    text = SECTIONS["What you should see"].partition(f"**{EXPERIMENTS[number]}**\n")[2]
    blocks = FENCED.findall(text.partition(f"\n**{number + 1}. ")[0])
    return [text for kind, text in blocks if kind == "text"]


def test_page_and_sheet_have_the_same_experiments_on_lines_that_are_there(tmp_path):
    titles = re.findall(r"^\*\*Experiment (.*)\*\*$", SHEET.text, re.M)
    assert titles == [*EXPERIMENTS.values()] and len(titles) == 5
    folder = copy_programs(tmp_path / "my lesson")
    for title in titles:
        of_sheet = SHEET.text.partition(f"**Experiment {title}**")[2].partition("I expect:")[0]
        assert changes(SECTIONS[title]) == changes(of_sheet) != []
        for change in changes(of_sheet):
            apply(change, folder)
    for path in folder.iterdir():
        compile(path.read_text(), path.name, "exec")


@pytest.fixture(scope="module")
def changed(tmp_path_factory) -> dict[str, Run]:
    """Runs of the changed programs."""
    folder = tmp_path_factory.mktemp("changed")
    runs: dict[str, tuple[int, list]] = {}
    for number in (1, 2, 3, 4, 5):
        made = copy_programs(folder / f"experiment {number}")
        for change in changes(SECTIONS[EXPERIMENTS[number]]):
            apply(change, made)
        runs[f"{made.name}/ddp.py"] = 2, []
    for number in (11, 12, 13, 15, 21):
        made = copy_programs(folder / f"question {number}")
        becomes(number, made)
        runs[f"{made.name}/ddp.py"] = (4, [2]) if number == 21 else (2, [])
    for name, told, old, new in (
        ("experiment 5", "without a prefix", "ddp.state_dict()", "model.state_dict()"),
        ("question 15", "doubled rate", "lr=0.5", "lr=1.0"),
    ):
        shutil.copytree(folder / name, folder / told)
        text = (folder / told / "ddp.py").read_text()
        assert text.count(old) == 1
        (folder / told / "ddp.py").write_text(text.replace(old, new))
        runs[f"{told}/ddp.py"] = 2, []
    for name in ("experiment 4", "experiment 5", "without a prefix"):
        runs[f"{name}/plain.py"] = 0, []
    return run_programs(folder, runs)


def output_of(run: Run, fails: bool = False) -> str:
    assert bool(run.returncode) == fails, run.tail()
    return run.out


@LONG
def test_experiments_show_what_the_page_promises(original, changed):
    """How much faster two processes are is the machine's: here only that both say it."""
    for number in (1, 2, 3):
        (shown,) = outcomes(number)
        assert_printed(shown, output_of(changed[f"experiment {number}/ddp.py"], number == 3))
        assert any(line not in original[2] for line in shown.splitlines())
    for name, least in (("plain", 0.02), ("ddp", 0.01)):
        output = output_of(changed[f"experiment 4/{name}.py"])
        (seconds,) = re.findall(rf"seconds an epoch: ({DECIMAL})$", output, re.M)
        assert float(seconds) > least


@LONG
def test_saved_model_loads_without_the_prefix_alone(changed):
    fails, goes_on = outcomes(5)
    output_of(changed["experiment 5/ddp.py"])
    assert_printed(fails, output_of(changed["experiment 5/plain.py"], fails=True))
    output_of(changed["without a prefix/ddp.py"])
    assert_printed(goes_on, output_of(changed["without a prefix/plain.py"]))


# --- Answers that a program gives --------------------------------------------------------------


def answer(question: int) -> str:
    (text,) = re.findall(rf"^{question}\. (.*?)(?=^\d+\. |^\*\*|\Z)", ANSWERS.text, re.M | re.S)
    return " ".join(text.split())


@LONG
def test_answers_are_what_the_changed_programs_show(original, changed):
    output = output_of(changed["experiment 3/ddp.py"], fails=True)
    number = re.search(r"\(line (\d+)\)", answer(8))[1]  # of rank 1; Gloo itself ends rank 0
    assert re.search(rf'ddp\.py", line {number}, in <module>', output)
    assert "[rank 1] epoch 0: images" in output and "[rank 1] epoch 1: images" not in output

    output = output_of(changed["question 11/ddp.py"])  # all ranks have the same images
    assert images(output, 0) == images(output, 1) and len(images(output, 0)[0]) == 16
    assert " of 32 right" in output and '"of 32"' in answer(11)

    output = output_of(changed["question 12/ddp.py"])  # different first weights
    assert "[rank 1] first weights: sum -1.97" not in output
    assert last_loss(output) == pytest.approx(last_loss(original[2]), abs=0.02)

    output = output_of(changed["question 13/ddp.py"], fails=True)  # one step less
    (quoted,) = re.findall(r'"(.*?)"', answer(13))
    assert quoted in output and "20000ms" in quoted

    (question,) = re.findall(r"^15\. (.*)$", SHEET.text, re.M)  # the global batch doubles
    told = re.findall(rf"(?<!=){DECIMAL}", question + answer(15))
    runs = [changed["question 15/ddp.py"].out, original[2], changed["doubled rate/ddp.py"].out]
    assert [*map(last_loss, runs)] == pytest.approx([*map(float, told)], abs=0.02)

    output = output_of(changed["question 21/ddp.py"])  # shares by local rank, on two nodes
    assert images(output, 0) == images(output, 2) and images(output, 1) == images(output, 3)


@LONG
def test_answer_on_a_rank_that_is_killed(tmp_path):
    folder = copy_programs(tmp_path / "my lesson")
    becomes(14, folder)
    output = run_nameless(RUN_DDP, folder, expect=1)
    (quoted,) = re.findall(r'"(.*?)"', answer(14))
    cause = output[output.index(quoted) :]
    assert re.search(r"rank +: 1 \(", cause) and re.search(r"exitcode +: -9 ", cause)
    assert "rank 1, exit code -9" in answer(14)


@LONG
def test_two_nodes_on_one_laptop(tmp_path):
    """As the notebook starts them; the second one later."""
    both = f"{NODES}wait".replace("29500", str(free_port()))
    # Longer than the timeout of ddp.py: torchrun waits, before it starts a rank.
    late = both.replace(" &\n", " &\nsleep 25\n", 1)
    output = run_nameless(late, copy_programs(tmp_path / "my lesson"))
    assert "[rank 3] last weights: sum 2.2" in output and "replicas identical: True" in output
    seen = [number for rank in range(4) for number in images(output, rank)[0]]
    assert sorted(seen) == [*range(16)]


# --- Numbers and sheet -------------------------------------------------------------------------


def test_worked_step_adds_up():
    table = re.findall(r"^\|(.*)\|(.*)\|(.*)\|$", SECTIONS["A step in numbers"], re.M)[2:]
    shares = [1, 3], [2, 4]
    gradients = [[2 * x * (x - 2 * x) for x in share] for share in shares]
    mean = sum(map(sum, gradients)) / 4
    for rank, share in enumerate(shares):
        losses = [(x - 2 * x) ** 2 for x in share]
        rows = [share, losses, [sum(losses) / 2], gradients[rank], [sum(gradients[rank]) / 2]]
        rows += [[mean], [1 - 0.05 * mean]]
        for cells, wanted in zip(table, rows, strict=True):
            shown = re.findall(r"(?<![\w-])-?\d+(?:\.\d+)?", cells[1 + rank])
            assert [*map(float, shown)][-len(wanted) :] == wanted


def test_times_of_the_ring_follow_from_the_formula():
    size = 4 * 11_217_552
    found = re.findall(r"^\| (\d+) Gb/s \| ([\d.]+) ms \| ([\d.]+) ms \|$", PAGE.text, re.M)
    assert len(found) == 3
    for rate, *times in found:
        for n, shown in zip((2, 4), times, strict=True):
            milliseconds = 2 * (n - 1) / n * size * 8 / (float(rate) * 1e9) * 1e3
            assert float(shown) == pytest.approx(milliseconds, rel=0.01)


def test_page_sheet_and_answers_number_the_same_questions():
    questions, answers = (re.findall(r"^(\d+)\. ", page.text, re.M) for page in (SHEET, ANSWERS))
    assert questions == answers == [str(n + 1) for n in range(len(questions))]
    named: list[int] = []
    for first, word, last in re.findall(r"\*Questions? (\d+)(?: (to|and) (\d+))?", PAGE.text):
        named += range(int(first), int(last if word else first) + 1)
    assert [*map(str, named)] == questions
    for number, text in re.findall(r"^\*Question (\d+): (.*?)\*$", PAGE.text, re.M | re.S):
        assert f"\n{number}. {' '.join(text.split())}\n" in SHEET.text


# --- What students get -------------------------------------------------------------------------


@pytest.mark.guards("lesson-folder")
def test_archive_has_what_students_need():
    (command,) = (text for text in PAGE.commands if text.startswith("git archive"))
    packed = command.partition(" HEAD:docs/lesson ")[2].split()
    needed = {"README.md", "sheet.md", "lesson.ipynb", "plain.py", "ddp.py"}
    assert {*packed} == needed | {*re.findall(r"\w+\.png", PAGE.text)}
    assert all((LESSON / name).is_file() for name in packed)
    (folder,) = re.findall(r"^git archive --format=zip --prefix=(\w+)/ ", command)
    assert f"Students unpack it and go to the folder `{folder}`." in PAGE.text


@pytest.mark.guards("lesson-notebook", "lesson-speed")
def test_notebook_is_made_of_the_programs_and_runs_the_commands_of_the_page():
    """If it differs, run docs/lesson/make_pages.py. Jupyter runs a cell as a file, as lines of the
    shell, or as a script of bash. The tests above run these commands.
    """
    text = (LESSON / "lesson.ipynb").read_text()
    assert text == MADE["notebook"]()
    notebook = json.loads(text)
    cells = ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]
    (diff,) = blocks("The diff", "bash")
    plain, ddp = (f"%%writefile {path.name}\n{path.read_text()}".rstrip("\n") for path in PROGRAMS)
    speed = "\n".join(f"!{text.strip()}" for text in blocks(EXPERIMENTS[4], "bash"))
    first = [plain, f"!{RUN_PLAIN}", ddp, f"!{RUN_DDP}", f"!{diff.strip()}", f"!{RUN_DDP}"]
    assert cells == [*first, speed, f"%%bash\n{NODES}wait"]


@LONG
def test_pictures_show_an_all_reduce_and_are_drawn_anew(tmp_path):
    assert [words for _, words, _ in MADE["ring_states"]()][-1] == [["A", "B", "C"]] * 3
    for name in ("ring", "nodes"):
        MADE[f"draw_{name}"](tmp_path / f"{name}.png")
        sizes = [Image.open(folder / f"{name}.png").size for folder in (tmp_path, LESSON)]
        assert sizes[0] == sizes[1]
