"""docs/lesson/: its programs and its notebook print what its pages show, its experiments do what
the teacher's page says, and the answers there are those of the programs.
"""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import shutil
import sys
from itertools import chain
from pathlib import Path
from zipfile import ZipFile

import pytest
from PIL import Image

from support.lesson import run_programs
from support.nodes import nameless, no_namespaces
from support.pages import FENCED, PAGES
from support.processes import ROOT, Run, free_port, require, start

PAGE, HOMEWORK, PARALLEL, PYTORCH, TEACHER = (
    PAGES[f"docs/lesson/{name}.md"]
    for name in ("README", "homework", "parallel", "pytorch", "teacher")
)
LESSON = ROOT / "docs" / "lesson"
PROGRAMS = [LESSON / "plain.py", LESSON / "ddp.py"]
DDP = PROGRAMS[1].read_text()
MADE = runpy.run_path(str(LESSON / "make_pages.py"))
STUDENTS = "".join(page.text for page in (PAGE, HOMEWORK, PARALLEL))
_, *parts = re.split(r"^#+ (.*)\n", PAGE.text + HOMEWORK.text, flags=re.M)
SECTIONS = dict(zip(parts[::2], parts[1::2], strict=True))
DECIMAL = r"-?\d+\.\d+"


def blocks(title: str, kind: str) -> list[str]:
    """The code blocks of a kind in a section of the students' pages."""
    return [text for found, text in FENCED.findall(SECTIONS[title]) if found == kind]


def shown(title: str) -> list[str]:
    """What the teacher's page says that one should see, in the part with this title."""
    text = TEACHER.text.partition(f"\n**{title}**")[2]
    return [text for kind, text in FENCED.findall(text.partition("\n**")[0]) if kind == "text"]


RUN_DDP = blocks("Complete", "bash")[0].splitlines()[1]


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


def images(output: str, rank: int) -> list[list[int]]:
    """Those of a rank, epoch by epoch."""
    found = re.findall(rf"\[rank {rank}\] epoch \d: images (\[.*?\])", output)
    return [json.loads(numbers) for numbers in found]


def last_loss(output: str) -> float:
    """The loss over all ranks in the last epoch."""
    return float(re.findall(rf"epoch 2: loss ({DECIMAL})", output)[-1])


def copy_programs(made: Path) -> Path:
    """A folder of a student."""
    made.mkdir(parents=True)
    for path in PROGRAMS:
        shutil.copy(path, made)
    return made


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> dict[int, str]:
    """{ranks: what is printed} by the programs as they are; 0: by plain.py."""
    folder = tmp_path_factory.mktemp("original")
    names = {0: "0/plain.py"} | {ranks: f"{ranks}/ddp.py" for ranks in (2, 3, 4)}
    for ranks in names:
        copy_programs(folder / str(ranks))
    ended = run_programs(folder, {name: (ranks,) for ranks, name in names.items()})
    return {ranks: ended[name].out for ranks, name in names.items()}


# --- The two programs --------------------------------------------------------------------------

SAME = re.compile(r"^(?:\[rank 0\] )?(epoch \d: loss .* right|\w+ weights: .*)$", re.M)


def test_programs_print_what_the_page_shows_and_agree(original):
    """Three processes see two images twice. On a busy machine a thread that is left could abort
    Python at its end: SIGABRT, after all results. plain.py, which has no group, goes on to it.
    """
    (plain,), (ddp,) = blocks("First run", "text"), blocks("Complete", "text")
    assert figures(original[0].partition("Python goes on")[0]) == near(figures(plain))
    begin, end = ddp.split("...\n")
    assert_printed(begin + end, original[2])
    assert original[2].count("[rank 1] epoch") == 3  # its images: rank 0 prints the results
    alone, *parallel = (
        "\n".join(SAME.findall(output)) for output in (original[0], original[2], original[4])
    )
    for together in parallel:
        assert figures(together) == near(figures(alone)) and len(figures(alone)) == 5
    assert "replicas identical: True" in original[3] and original[3].count(" of 18 right") == 3
    assert "Python goes on" in original[0] and "Python goes on" not in original[3]


# --- The notebook, which is the class ----------------------------------------------------------


def test_notebook_is_made_of_the_pages_and_programs():
    """If it differs, run docs/lesson/make_pages.py."""
    text = (LESSON / "lesson.ipynb").read_text()
    assert text == MADE["notebook"]()
    cells = "\n".join(cell["source"] for cell in json.loads(text)["cells"])
    (speed,) = blocks("2. Speed", "bash")
    alone, two = speed.splitlines()
    assert (alone, two) == ("OMP_NUM_THREADS=1 python plain.py", f"OMP_NUM_THREADS=1 {RUN_DDP}")
    assert cells.count("*Question ") == cells.count("<summary>Answer</summary>") == 22
    # Two pictures are tables there, so that the file stays small.
    assert re.findall(r"\]\(([^)]*\.png)\)", cells) == ["attachment:step.png"]
    assert text.count('"image/png"') == 1 and len(text.encode()) < 70_000
    for title, words, _ in MADE["ring_states"]():
        row = rf"^\| {title}\b[^|]* \| {re.escape(' | '.join(map(', '.join, words)))} \|$"
        assert re.search(row, cells.replace("**", ""), re.M), title


RUN_NOTEBOOK = """
import sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], 4)
place = {"metadata": {"path": sys.argv[2]}}
nbclient.NotebookClient(notebook, kernel_name="python3", resources=place).execute()
nbformat.write(notebook, sys.argv[1])
"""


@pytest.fixture(scope="module")
def notebook(tmp_path_factory) -> dict[str, str]:
    """{code of each cell: what it printed} by a Jupyter kernel, as on Colab: the file alone. The
    class has made its six changes.
    """
    found = all(map(importlib.util.find_spec, ("nbclient", "ipykernel")))
    require(found, "nbclient or ipykernel is not installed")
    folder = tmp_path_factory.mktemp("my class")
    path = tmp_path_factory.mktemp("notebook") / "lesson.ipynb"
    port = str(free_port())
    text = (LESSON / "lesson.ipynb").read_text().replace("29500", port)
    late = "torchrun --nnodes=2 --node_rank=1 "  # later than the timeout of ddp.py
    assert text.count(late) == 1
    made = json.loads(text.replace(late, f"sleep 25; {late}"))
    for cell in made["cells"]:
        if cell["source"].startswith("%%writefile mine.py"):
            cell["source"] = f"%%writefile mine.py\n{DDP}"
    path.write_text(json.dumps(made))
    command = [sys.executable, "-c", RUN_NOTEBOOK, path, folder]
    if no_namespaces():
        with start(command) as started:
            started.finish(1800)
    else:  # a machine whose own name does not resolve, as is usual in a class
        nameless(path.parent, *command, timeout=1800)
    ended = {}
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] == "code":
            printed = ["".join(output.get("text", [])) for output in cell["outputs"]]
            ended["".join(cell["source"]).replace(port, "29500")] = "".join(printed)
    return ended


def cell(notebook: dict[str, str], begin: str) -> str:
    """What the cell printed that begins so."""
    (printed,) = [text for code, text in notebook.items() if code.startswith(begin)]
    return printed.replace("\r\n", "\n")  # of a terminal


@pytest.mark.slow
def test_notebook_runs_whole(notebook):
    """Its commands print what the pages show, and check.py what it says of a class that is done.
    How much faster two processes are is the machine's: here only that both say it. torchrun waits
    for the second node, before it starts a rank.
    """
    checked = cell(notebook, "!python check.py mine.py")
    assert checked.splitlines()[-1].startswith("Complete. ")
    changed = f"!{RUN_DDP.replace('ddp.py', 'changed_ddp.py')}\n"
    error, check, detail = shown("A missing collective call.")
    fails, _ = shown("Saving")
    answer, saved = cell(notebook, "!diff "), cell(notebook, f"{changed}!python changed_plain")
    missing = cell(notebook, f"{changed}!python check.py")
    assert_printed(blocks("Complete", "text")[0].replace("...\n", ""), answer)
    assert_printed(error, missing)
    assert_printed(check, missing)
    assert_printed(detail, cell(notebook, "!TORCH_DISTRIBUTED_DEBUG=DETAIL "))
    assert_printed(fails, saved)
    speed = cell(notebook, "!OMP_NUM_THREADS=1 python changed_plain.py")
    seconds = re.findall(rf"seconds an epoch: ({DECIMAL})$", speed, re.M)
    assert len(seconds) == 2 and min(map(float, seconds)) > 0.01
    two = cell(notebook, "%%bash")
    assert "replicas identical: True" in two and "[rank 0] last weights: sum 2.2" in two
    assert sorted(chain(*(images(two, rank)[0] for rank in range(4)))) == [*range(16)]


# --- Answers that a program gives --------------------------------------------------------------


FOLD = r"\n\n<details><summary>Answer</summary>\n\n(.*?)\n\n</details>\n"
ANSWERED = rf"^\*Question (\d+): [^*]*(?:\*[^*\n]+)*\*{FOLD}"
ANSWERS = {
    int(n): " ".join(text.split()) for n, text in re.findall(ANSWERED, STUDENTS, re.M | re.S)
}


# Of a question: the part of ddp.py that gives way to what the question names first.
SLIPS = {5: "ddp(images)", 21: "DistributedSampler(data, world_size, rank)"}


def put(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1, old
    path.write_text(text.replace(old, new))


def change(path: Path, diff: str) -> None:
    """Makes the change of a diff."""
    old, new = ([line[1:] for line in diff.splitlines() if line[0] != sign] for sign in "+-")
    put(path, "\n".join(["", *old, ""]), "\n".join(["", *new, ""]))


def slip(question: int, folder: Path) -> None:
    """A copy of the programs with the slip of a question."""
    path = copy_programs(folder) / "ddp.py"
    if question in SLIPS:
        (new,) = re.findall(rf"^\*Question {question}: [^`]*`([^`]+)`", STUDENTS, re.M)
        put(path, SLIPS[question], new)
    else:
        change(path, blocks("Other mistakes", "diff")[question - 14])


# In calls.py: rank 1 makes no call while rank 0 waits.
LATE = "elif dist.get_rank() == 1:\n    import time; time.sleep(10)"


@pytest.fixture(scope="module")
def changed(tmp_path_factory) -> dict[str, Run]:
    """Runs of the changed programs."""
    folder = tmp_path_factory.mktemp("changed")
    for question in (5, 15, 16, 21):
        slip(question, folder / str(question))
    shutil.copytree(folder / "16", folder / "rate")
    put(folder / "rate/ddp.py", "lr=0.5", "lr=1.0")
    saving = copy_programs(folder / "saving")
    for name, diff in zip(("ddp.py", "plain.py"), blocks("Saving", "diff"), strict=True):
        change(saving / name, diff.replace("ddp.state", "model.state"))
    (calls,) = blocks("1. A missing collective call", "python")
    (folder / "calls.py").write_text(
        calls.replace("seconds=20", "seconds=3").replace("dist.broadcast(x, 0)", LATE)
    )
    runs = {f"{name}/ddp.py": (2,) for name in ("5", "15", "16", "rate", "saving", "clock")}
    (clock,) = blocks("Timing on a GPU", "diff")
    change(copy_programs(folder / "clock") / "ddp.py", clock)
    shutil.copy(PROGRAMS[1], folder / "mine.py")
    runs |= {"21/ddp.py": (4, 2), "saving/plain.py": (0,), "calls.py": (2,), "mine.py": (0,)}
    return run_programs(folder, runs, expect=None)


@pytest.mark.slow
def test_answers_are_what_the_changed_programs_show(original, changed):
    output = changed["5/ddp.py"].out
    assert "replicas identical: False" in output
    assert len({*chain(*images(output, 0))}) == 14 and "14 of the 16" in ANSWERS[5]

    output = changed["15/ddp.py"].out  # one step fewer
    (quoted,) = re.findall(r'"(.*?)"', ANSWERS[15])
    assert changed["15/ddp.py"].returncode and quoted in output and "20000ms" in quoted

    told = re.findall(rf"(?<!=){DECIMAL}", FENCED.sub("", SECTIONS["Other mistakes"]))
    runs = [changed["16/ddp.py"].out, original[2], changed["rate/ddp.py"].out]
    assert [*map(last_loss, runs)] == pytest.approx([*map(float, told)], abs=0.02)

    assert "replicas identical: True" in changed["clock/ddp.py"].out

    output = changed["21/ddp.py"].out  # shares by local rank, on two nodes
    assert images(output, 0) == images(output, 2) and images(output, 1) == images(output, 3)

    assert_printed(shown("Saving")[1], changed["saving/plain.py"].out)
    assert changed["calls.py"].returncode and "3000ms" in changed["calls.py"].output
    assert "KeyError: 'RANK'" in changed["mine.py"].output  # without torchrun


@pytest.mark.slow
def test_answer_on_a_rank_that_is_killed(tmp_path):
    slip(14, tmp_path / "my lesson")
    with start(RUN_DDP.split(), cwd=tmp_path / "my lesson") as started:
        output = started.finish(expect=1).output
    (quoted,) = re.findall(r'"(.*?)"', ANSWERS[14])
    cause = output[output.index(quoted) :]
    assert re.search(r"rank +: 1 \(", cause) and re.search(r"exitcode +: -9 ", cause)
    assert "rank 1, exit code -9" in ANSWERS[14]


# --- Numbers and questions ---------------------------------------------------------------------


def test_times_of_the_ring_follow_from_the_formula():
    size = 4 * 11_217_552
    found = re.findall(r"^\| (\d+) Gb/s \| ([\d.]+) ms \| ([\d.]+) ms \|$", HOMEWORK.text, re.M)
    assert len(found) == 3
    for rate, *times in found:
        for n, time in zip((2, 4), times, strict=True):
            milliseconds = 2 * (n - 1) / n * size * 8 / (float(rate) * 1e9) * 1e3
            assert float(time) == pytest.approx(milliseconds, rel=0.01)


def test_each_question_has_an_answer_and_a_place_in_the_plan():
    questions = re.findall(r"^\*Question (\d+): ", STUDENTS, re.M)
    assert questions == [*map(str, ANSWERS)] == [str(n + 1) for n in range(len(questions))]
    planned: list[int] = []
    for first, word, last in re.findall(r"\| (\d+)(?:( to |, )(\d+))? \|$", TEACHER.text, re.M):
        planned += range(int(first), int(last if word else first) + 1)
    assert [*map(str, sorted(planned))] == questions


def test_picture_of_a_step_hides_all_but_the_last_bucket():
    lanes = MADE["step_times"]()
    *ranks, sent = ({name: (begin, end) for name, begin, end in lane} for lane in lanes.values())
    for n in (1, 2, 3):  # no rank sends what another one has not yet
        have = [sum(rank[f"backward {n}"]) for rank in ranks]
        assert have[0] < have[1] <= sent[f"bucket {n}"][0] + 1e-9
    assert all(rank["optimizer"][0] == sum(sent["bucket 3"]) for rank in ranks)
    assert ranks[0]["exposed"][1] > ranks[1]["exposed"][1] == sent["bucket 3"][1]


def test_picture_of_a_pipeline_has_the_share_of_the_answer():
    lanes = MADE["pipeline"](8)
    first, second = ({name: (begin, begin + long) for name, begin, long in lane} for lane in lanes)
    assert 8 / max(end for _, end in first.values()) == pytest.approx(16 / 18)
    for n in range(1, 9):
        assert first[f"forward {n}"][1] <= second[f"forward {n}"][0]
        assert second[f"backward {n}"][1] <= first[f"backward {n}"][0]
    assert f"{16 / 18:.0%}".replace("%", " %") in ANSWERS[23]


# --- PyTorch in one page -----------------------------------------------------------------------


@pytest.mark.slow
def test_numpy_and_pytorch_print_the_same_as_the_page(tmp_path):
    (shown,) = PYTORCH.printed
    table = PYTORCH.text.partition("\n## Words\n")[0]
    for column, name in ((2, "fit_numpy.py"), (3, "fit_torch.py")):
        with start([sys.executable, LESSON / name], cwd=tmp_path) as started:
            assert started.finish().out == shown
        rows = re.findall(r"^\| (?:data|forward|loss|gradients|step) \|.*\|$", table, re.M)
        own = {line.strip() for line in (LESSON / name).read_text().splitlines()}
        assert len(rows) == 5
        assert {row.split("|")[column].strip(" `") for row in rows} <= own


# --- What students get -------------------------------------------------------------------------


@pytest.mark.slow
def test_set_up_ends_with_two_processes_that_meet(tmp_path):
    """Where nobody knows the machine's name, and with macOS's name for the loopback interface."""
    shutil.copy(LESSON / "all_reduce.py", tmp_path)
    (export,) = re.findall(r"`(export GLOO_SOCKET_IFNAME=.*?)`", PAGE.text)
    renamed = ["ip link set lo down", "ip link set lo name lo0", "ip link set lo0 up"]
    lines = [*renamed, export, blocks("Set-up", "bash")[1]]
    run = nameless(tmp_path, "bash", "-ec", "\n".join(lines))
    assert run.out.count(" ms, by hand ") == 6


def test_archive_has_what_students_need(tmp_path):
    """All files but the teacher's own, and with them all that the pages link to. It is unpacked as
    on Windows, and the exercise begun; to hide the answer, the command takes two arguments more.
    """
    require(shutil.which("git"), "the archive is made by git")
    shutil.copytree(LESSON, tmp_path / "docs/lesson")
    (command,) = (text for text in TEACHER.commands if text.startswith("git archive"))
    commit = "git -c user.name=any -c user.email=any commit --quiet --message=any"
    (hide,) = re.findall(r"To hide the answer, add `(.*?)`", TEACHER.text)
    (unpack,) = re.findall(r"`(cd; python3 -m zipfile .*?)`", PAGE.text)
    unpack = unpack.replace("/mnt/c/Users/NAME/Downloads", str(tmp_path))
    lines = ["git init --quiet", "git add docs", commit, command.strip()]
    lines += [f"{command.strip()} {hide}".replace("lesson.zip", "hidden.zip"), unpack]
    lines += [blocks("The exercise", "bash")[0].splitlines()[0], "pwd", "ls mine.py"]
    home = {"HOME": str(tmp_path)}
    with start(["bash", "-ec", "\n".join(lines)], env=home, cwd=tmp_path) as started:
        assert started.finish().lines()[-2:] == [f"{tmp_path}/lesson", "mine.py"]
    archives = [ZipFile(tmp_path / name).namelist() for name in ("lesson.zip", "hidden.zip")]
    packed, hidden = (
        {name[7:] for name in names if name.startswith("lesson/")} for names in archives
    )
    assert packed - hidden == {"ddp.py", "lesson.ipynb"}
    assert packed > {"README.md", "plain.py", "ddp.py", "check.py", "lesson.ipynb"}
    assert not packed & {"teacher.md", "make_pages.py"}
    for page in (PAGE, HOMEWORK, PARALLEL, PYTORCH):
        links = {link.partition("#")[0] for link in page.links}
        inside = {link for link in links if link and not link.startswith("https://")}
        assert inside <= packed, page.name


@pytest.mark.slow
def test_commands_that_compare_nccls_algorithms(tmp_path):
    """On CPUs, where Gloo does not read the variable: both runs are logged and compared."""
    (block,) = (text for kind, text in FENCED.findall(PARALLEL.text) if "NCCL_ALGO" in text)
    small = "--dummy --batch_size 4 --image_size 64 --max_steps 6"
    command = block.replace("--dummy", small).replace("GPUS=all", "GPUS=2")
    for folder in ("tools", "launch_single.sh", "demo_coco_resnet18.py"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    with start(["bash", "-ec", command], env={"PYTHON": sys.executable}, cwd=tmp_path) as started:
        run = started.finish(240)
    assert re.search(r"^\| +\| +ring +\| +tree +\|$", run.out, re.MULTILINE), run.tail()


@pytest.mark.slow
def test_pictures_show_an_all_reduce_and_are_drawn_anew(tmp_path):
    """Also where the environment names a backend that matplotlib does not have."""
    assert [words for _, words, _ in MADE["ring_states"]()][-1] == [["A", "B", "C"]] * 3
    folder = tmp_path / "my lesson"
    shutil.copytree(LESSON, folder)
    pictures = [path.name for path in LESSON.glob("*.png")]
    assert {*pictures} == {"ring.png", "nodes.png", "step.png", "pipeline.png"}
    for name in pictures:
        (folder / name).unlink()
    command = [sys.executable, folder / "make_pages.py"]
    with start(command, env={"MPLBACKEND": "backend_of_a_notebook"}) as started:
        started.finish()
    for name in pictures:
        drawn, own = Image.open(folder / name), Image.open(LESSON / name)
        assert drawn.size == own.size and drawn.mode == own.mode == "P"
        assert (LESSON / name).stat().st_size < 25_000
