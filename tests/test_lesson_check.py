"""docs/lesson/check.py says which of the six changes a program lacks, by what the program does."""

from __future__ import annotations

import re
import runpy
import sys

import pytest

from support.forks import run_forked
from support.processes import ROOT, start

LESSON = ROOT / "docs" / "lesson"
CHECK = runpy.run_path(str(LESSON / "check.py"))
ANSWER = (LESSON / "ddp.py").read_text()
# Runs a program as check.py does in each rank, as forks of one process that has loaded PyTorch.
WATCH = """
import os, runpy, sys

def main():
    check, program, path, seconds = sys.argv[1:]
    watch = runpy.run_path(check)["watch"]
    watch.__globals__["HANGS"] = float(seconds)
    with open(f"{path}.{os.environ.get('RANK', 'plain')}", "w", buffering=1) as out:
        watch(program, out)

def run_and_exit(main):
    main()
    sys.exit()
"""

RANK = 'rank = int(os.environ["RANK"])'
WORLD = 'world_size = int(os.environ["WORLD_SIZE"])'
JOIN = 'dist.init_process_group("gloo", timeout=timedelta(seconds=20))'
SAMPLER = "sampler = DistributedSampler(data, world_size, rank)"
LOADER = "loader = DataLoader(data, batch_size=BATCH_SIZE // world_size, sampler=sampler)"
WRAP = "ddp = DistributedDataParallel(model)"
FORWARD = "outputs = ddp(images)"
BACKWARD = "loss.backward()"
SUM = "dist.all_reduce(results)"
PRINT = 'if rank == 0:\n        say(f"epoch {epoch}: loss'
ORDER = "sampler.set_epoch(epoch)"
LEAVE = "dist.destroy_process_group()"
ALL_IMAGES = {
    SAMPLER: "sampler = torch.utils.data.RandomSampler(data, generator=torch.Generator())",
    ORDER: "sampler.generator.manual_seed(epoch)",
}
COPIED = "ddp = model\nfor p in model.parameters(): dist.broadcast(p.data, 0)"
ADDED = f"{BACKWARD}\n        for p in model.parameters(): dist.all_reduce(p.grad)"
OTHER = "import copy\nddp = DistributedDataParallel(copy.deepcopy(model))"
SLICES = """numbers, images, labels = (x[rank::2] for x in (numbers, images, labels))
        images, labels = images"""

# Each program: what it has in place of lines of the answer, and what check.py says, in parts.
FIRST = {
    "the answer": ({}, []),
    "without 1": (
        {RANK: "rank = 0", WORLD: "world_size = 1", "range(world_size)": "range(2)"},
        ["Change 1 is missing. ", "Change 3 is missing. ", "Change 6 is missing. "],
    ),
    "without 2": (
        {JOIN: ""},
        ["It fails. ValueError: Default process group", f"`{WRAP}`", "Change 2 is missing. "],
    ),
    "without both parts of 3": (
        {LOADER: LOADER.replace(" // world_size", ""), ORDER: "pass"},
        [
            "Made: 1, 2, 4, 5, 6. Missing: 3.",
            "Change 3 is missing. A step of both ranks has 16 images, one of plain.py 8. ",
            " The last epoch has the same images in the same order as the first one.",
        ],
    ),
    "without 4": (
        {"ddp = DistributedDataParallel(model": f"{WRAP[:-1]}, init_sync=False"},
        ["Change 4 is missing. "],
    ),
    "without the average of 5": (
        {WRAP: COPIED, BACKWARD: ADDED},
        ["Change 5 is missing. After the first backward the gradients are 2 times plain.py's."],
    ),
    "without 6": ({SUM: ""}, ["Change 6 is missing. The line of epoch 0 is about 8 images"]),
}
OTHERS = {
    # Right in another way
    "rank from the group, shares by slices, gradients averaged by hand": (
        {
            **ALL_IMAGES,
            RANK: "",
            JOIN: f"{JOIN}\nrank = dist.get_rank()",
            LOADER: LOADER.replace(" // world_size", ""),
            "images, labels = images": SLICES,
            WRAP: COPIED,
            BACKWARD: f"{ADDED}; p.grad /= 2",
        },
        [],
    ),
    "a loader worker, lines run together, the seed by its name, sys.exit": (
        {
            LOADER: LOADER.replace("sampler=", "num_workers=1, sampler="),
            '{text}\\n"': '{text}"',
            "torch.manual_seed(0)": "torch.manual_seed(seed=0)",
            LEAVE: f"{LEAVE}; raise SystemExit",
        },
        [],
    ),
    # Not all are made
    "only 1 and 2": (
        {**ALL_IMAGES, WRAP: "ddp = model", SUM: ""},
        [f"Change {n} is missing. " for n in (3, 4, 5, 6)],
    ),
    "only rank 0 leaves the group": (
        {LEAVE: f"if rank == 0: {LEAVE}"},
        ["Missing: 2.", "Change 2 is missing. It joins, but destroy_process_group is not called."],
    ),
    "weights copied, all images": (
        {**ALL_IMAGES, FORWARD: "outputs = model(images)"},
        ["Made: 1, 2, 4, 6. Missing: 3. Cannot tell yet: 5.", "Change 3 is missing. "],
    ),
    # Wrong
    "local rank": (
        {RANK: 'rank = int(os.environ["LOCAL_RANK"])'},
        [
            "Change 1 is missing. The program does not read its rank. It reads LOCAL_RANK",
            "Change 3 is missing. ",
            "Change 6 is missing. ",
        ],
    ),
    "four ranks written down": (
        {WORLD: "world_size = 4", "range(world_size)": "range(2)"},
        ["Change 3 is missing. In epoch 0 no rank trains on 8 of the images."],
    ),
    "another model in DDP": (
        {WRAP: OTHER, FORWARD: "outputs = model(images)"},
        ["One of 4 or 5 is missing. "],
    ),
    "another model in the optimizer": (
        {WRAP: OTHER},
        ["It never trains: the weights that the optimizer has get no gradients."],
    ),
    "the rank is text": (
        {'int(os.environ["RANK"])': 'os.environ["RANK"]', "data, world_size, rank": "data"},
        ["Change 6 is missing. No rank prints a result. Is the rank a number?"],
    ),
    "only rank 0 steps": (
        {"optimizer.step()": "rank or optimizer.step()"},
        ["Rank 1 never trains: optimizer.step() is not called."],
    ),
    "an early end": (
        {ORDER: f"{ORDER}\n    if epoch == 1: os._exit(0)"},
        ["It makes 2 optimizer steps in 3 epochs. ", "Change 2 is missing. It joins, but "],
    ),
    "every rank prints": (
        {PRINT: PRINT.replace("rank == 0", "True")},
        ["Change 6 is missing. `epoch 0: loss ...` is printed 2 times, not once."],
    ),
    "mean in place of sum": (
        {SUM: f"{SUM}; results[1] /= 2"},
        ["Change 6 is missing. `epoch 0: loss ...` shows 0.69", CHECK["QUESTIONS"]["6"]],
    ),
    "another rate": (
        {"lr=0.5": "lr=1.0"},
        ["`epoch 1: loss ...` shows ", "What else did you change"],
    ),
    "another seed": (
        {"torch.manual_seed(0)": "torch.manual_seed(5)"},
        ["`epoch 0: loss ...` shows ", "What made plain.py's first weights?"],
    ),
    "a rank is killed": (
        {SUM: f"os.kill(os.getpid(), 9) if rank == 1 else {SUM}"},
        ["It fails. A rank was killed.\n    Rank 1: "],
    ),
    "one step fewer": (
        {"in loader:": "in list(loader)[rank:]:"},
        [
            "It hangs for ",
            f"Rank 0: line 73, `{FORWARD}`",
            f"Rank 1: line 83, `{SUM}`",
            "Do all ranks make the same collective calls in the same order?",
        ],
    ),
}
CASES = FIRST | OTHERS


@pytest.fixture(scope="module")
def said(tmp_path_factory, request) -> dict[str, str]:
    """What check.py says of each program whose test was chosen."""
    chosen = [item.name for item in request.session.items if "said" in item.fixturenames]
    folder = tmp_path_factory.mktemp("my lesson")
    (folder / "watch.py").write_text(WATCH)
    programs = {"plain": str(LESSON / "plain.py")}
    for name in CASES:
        if not any(test.endswith(f"[{name}]") for test in chosen):
            continue
        text = ANSWER
        for old, new in CASES[name][0].items():
            assert text.count(old) == 1, (name, old)
            text = text.replace(old, new)
        program = folder / f"{name}.py"
        program.write_text(text)
        programs[name] = str(program)
    runs = []
    for name, program in programs.items():
        seconds = 5 if name == "one step fewer" else 60
        words = [LESSON / "check.py", program, folder / name, seconds]
        runs.append((0 if name == "plain" else 2, words))
    run_forked(runs, program=folder / "watch.py", expect=None, cwd=folder)
    plain = CHECK["Process"](programs.pop("plain"), folder / "plain.plain")
    found = {}
    for name, program in programs.items():
        ranks = [CHECK["Process"](program, folder / f"{name}.{rank}") for rank in (0, 1)]
        assert all(rank.text.count('["note", "end"]') <= 1 for rank in ranks), name
        found[name] = "\n".join(CHECK["judge"](ranks, plain))
    return found


def assert_says(text: str, wanted: list[str]) -> None:
    """All of these parts, and of no other change that it lacks, which the first line has, too."""
    assert bool(text) == bool(wanted), text
    assert all(part in text for part in wanted), text
    lacks = re.compile(r"(?:Change|One of) (.*?) is missing")
    missing = lacks.findall(text)
    assert missing == lacks.findall("\n".join(wanted)), text
    if text:
        listed = re.search(r"Missing: ([\d, ]+)\.", text.splitlines()[0])
        numbers = re.findall(r"\d", " ".join(missing))
        assert (listed[1] if listed else "") == ", ".join(numbers), text


@pytest.mark.parametrize(
    "name", [*FIRST, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)
def test_what_a_program_lacks_is_said(said, name):
    assert_says(said[name], CASES[name][1])


def check(program: object, expect: int) -> str:
    with start([sys.executable, LESSON / "check.py", program]) as started:
        return started.finish(expect=expect).out


def test_a_program_that_cannot_start_is_one_line(tmp_path):
    program = tmp_path / "mine.py"
    assert check(program, 1) == f"{program}: No such file or directory\n"
    program.write_text("import torch\nfor\n")
    assert check(program, 1) == f"{program}, line 2: invalid syntax\n"


@pytest.mark.slow
def test_a_rank_that_torchrun_ends_when_the_other_one_fails(tmp_path):
    """In a path with a space. For a program that is complete see the notebook's test."""
    program = tmp_path / "my ddp.py"
    program.write_text(ANSWER.replace(SUM, f"time.sleep(9) if rank == 0 else 1 / 0; {SUM}"))
    lines = check(program, 1).splitlines()
    at = lines.index("It fails. ZeroDivisionError: division by zero")
    assert [line[:10] for line in lines[at + 1 :]] == ["    Rank 1", "    Rank 0"]
    assert all("line 83, `time.sleep(9)" in line for line in lines[at + 1 :])
    assert lines[at - 1] == "Made: 1, 2, 4, 5. Cannot tell yet: 3, 6."
    progress = [line for line in lines[: at - 1] if re.match(r" *\d+ s: ", line)]
    ends = [line.partition(" s: ")[2] for line in progress]
    assert {"plain.py begins", "plain.py has ended", "rank 1 has failed"} <= {*ends}
