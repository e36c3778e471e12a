"""README.md and docs/*.md: their commands run, or at least parse, and tables agree with the code.

All bash blocks of a page are put together, in order, into one bash script, as a reader would type
them into one terminal; a page may use the variables that README sets. Functions take the place of
the commands: each notes how it was called. Those that work on README's own small data set then
really run, on one page after the other; the others would need a GPU, COCO, root or a cluster, and
only what they were given is checked, by the parser of the program that it is for.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import shutil
import subprocess
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from support.forks import shared, write
from support.processes import ROOT, SCRIPT, base_env, long, new_test_id, start
from test_probe import SMALL

README, LESSON, PROBE = "README.md", "docs/lesson.md", "tools/probe_link.py"
OWN, RESULTS = "docs/your_own.md", "tools/show_results.py"
OWN_SCRIPT = "docs/your_script.md"  # test_your_script.py runs what it shows
STAND_IN = ROOT / "tests" / "support" / "stand_in"
LAUNCHERS = ["launch_single.sh", "launch_multinode.sh"]
# Options of programs that are not in this repository. torchrun's are asked of torchrun itself.
FOREIGN = {
    "--create-dirs",  # curl
    "--output-dir",
    "--nodes",  # SLURM
    "--ntasks-per-node",
    "--cpus-per-task",
    "--gpus-per-node",
    "--time",
    "--shm-size",  # docker
    "--network",
    "--nv",  # apptainer
}
VARIABLES = ["NNODES", "NODE_RANK", "MASTER_ADDR", "GPUS_PER_NODE", "GPUS", "RESTARTS"]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def anchor(title: str) -> str:
    """GitHub's: lower case, spaces to dashes, without punctuation."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


class Page:
    """One of them, by its path under the repository's root."""

    def __init__(self, name: str) -> None:
        self.name, self.text = name, (ROOT / name).read_text()
        blocks = [(m[1], m[2]) for m in FENCED.finditer(self.text)]
        shell = [text for kind, text in blocks if kind == "bash"]
        self.files = [text for text in shell if text.startswith("#!")]
        self.commands = [text for text in shell if text not in self.files]
        self.printed = [text for kind, text in blocks if kind == "text"]
        self.kinds = {kind for kind, _ in blocks}
        self.prose = FENCED.sub("", self.text)
        self.anchors = [*map(anchor, re.findall(r"^#+ (.*)$", self.prose, re.MULTILINE))]
        self.links = re.findall(r"\]\(([^)]+)\)", self.prose)


DOCS = [f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))]
PAGES = {name: Page(name) for name in [README, *DOCS]}
every_page = pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)

# `note` writes a call down: the settings in its environment, the program, its arguments, each
# ended by a zero byte, the call by a second one.
PRELUDE = r"""
set -euo pipefail
note() {
    local name
    for name in $VARIABLES; do
        if [ -n "${!name+set}" ]; then printf '%s=%s\0' "$name" "${!name}"; fi
    done >>"$CALLS"
    printf '%s\0' "$@" '' >>"$CALLS"
}
run_small() {
    case "$REALLY $* " in
    "yes "*data/small*) command "$@" ;;
    esac
}
python() {
    note python "$@"
    [ "$1" != -c ] || set -- "${INLINE:--c}" "${@:2}"
    run_small python "$@"
}
function ./launch_single.sh {
    note ./launch_single.sh "$@"
    PYTHONPATH=$STAND_IN run_small ./launch_single.sh "$@"
}
"""
# These alone are noted, by a function of bash in the place of each.
NOTED = """
./launch_multinode.sh tests/run.sh tests/breaks/run.py tools/launcher/python_env.sh source curl
unzip torchrun sudo srun sbatch mpirun python3 pip conda module apptainer sed docker grep patch
nvidia-smi
"""
PRELUDE += "\n".join(f'function {name} {{ note {name} "$@"; }}' for name in NOTED.split())
# What the lesson makes of the script; all files that pages make.
COPIES = re.findall(r"\.py > (data/small/\w+\.py)$", PAGES[LESSON].text, re.MULTILINE)
MADE = [*COPIES, *(f"data/small/{name}.py" for name in ("plain", "ddp", "gradients"))]
MADE += ["make_coco.py", "demo_resnet50.py", "mine.py"]  # by docs/your_own.md, your_script.md
ARRAYS = re.findall(r"^\w+=\(.*?\)$", "".join(PAGES[README].commands), re.MULTILINE | re.DOTALL)


def environment(folder: Path, **variables: str) -> dict[str, str]:
    env = {"CALLS": str(folder / "calls"), "VARIABLES": " ".join(VARIABLES)}
    return base_env(new_test_id(), env | {"REALLY": "no", "STAND_IN": ""} | variables)


@pytest.fixture(scope="module")
def calls(tmp_path_factory) -> dict[str, list[list[str]]]:
    """The calls that the commands of each page make; nothing runs.

    What is no sound bash, a command that none of the functions knows, or one that fails, fails the
    test.
    """
    found = {}
    for page in PAGES.values():
        folder = tmp_path_factory.mktemp("calls")
        (folder / "data" / "small").mkdir(parents=True)  # README's first steps make it
        (folder / "calls").touch()
        script = "\n".join([PRELUDE, *(ARRAYS if page.name != README else []), *page.commands])
        how = dict(env=environment(folder), cwd=folder, capture_output=True, text=True, timeout=20)
        done = subprocess.run(["bash", "-c", script], **how)
        assert (done.returncode, done.stderr) == (0, ""), page.name
        # test_your_own.py, test_your_script.py and test_lesson.py run these
        more = {OWN: {"python"}, OWN_SCRIPT: {"python"}, LESSON: {"python", "diff"}}
        more = more.get(page.name, set())
        assert page.kinds <= {"bash", "text"} | more, "a block of another kind is not checked"
        noted = (folder / "calls").read_text().split("\0\0")
        found[page.name] = [call.split("\0") for call in noted if call]
    return found


@pytest.fixture(scope="module")
def all_calls(calls) -> list[list[str]]:
    return [call for page in calls.values() for call in page]


def ask(demo, result, script_calls, torchrun_calls):
    """What the pages must agree with; in a forked process, as it takes the script and torch."""
    from torch.distributed.run import get_args_parser

    def taken(arguments):
        with contextlib.suppress(SystemExit):
            args = demo.parse_arguments(arguments)
            return bool(args.coco_image_path and args.annotation_path)
        return False

    torchrun, kept = get_args_parser(), ("required", "default", "choices")
    actions = [a for a in demo.make_parser()._actions if a.dest != "help"]
    facts = {
        "docstring": demo.__doc__,
        "options": {a.option_strings[-1]: {k: getattr(a, k) for k in kept} for a in actions},
        "refused": [call for call in script_calls if not taken(call)],
        "torchrun_options": [*torchrun._option_string_actions],
        "torchruns": [vars(torchrun.parse_args(call)) for call in torchrun_calls],
        "pixels": 2 * demo.Image.MAX_IMAGE_PIXELS,
        "max_damaged": demo.MAX_DAMAGED,
        "shared": demo.SHARED,
        "logged": demo.LOGGED.pattern,
        "warm_up": demo.WARM_UP,
    }
    write(result, facts)


@pytest.fixture(scope="module")
def script(demo, all_calls) -> SimpleNamespace:
    given = {"script_calls": script_calls(all_calls), "torchrun_calls": torchrun_calls(all_calls)}
    return SimpleNamespace(**demo.run(call=ask, **given).result())


def program(call: list[str]) -> list[str]:
    """A call without the settings before it."""
    return call[next(i for i, part in enumerate(call) if not re.match(r"[A-Z_]+=", part)) :]


def settings(call: list[str]) -> dict[str, str]:
    return dict(part.split("=", 1) for part in call[: len(call) - len(program(call))])


def script_calls(calls: list[list[str]]) -> list[list[str]]:
    """What each command hands to the script, through whatever launcher."""
    targets = {SCRIPT.name, PROBE, "coco.sbatch", *COPIES, *(f"./{name}" for name in LAUNCHERS)}
    found = []
    for call in map(program, calls):
        at = [i for i, part in enumerate(call) if part in targets]
        if "tools/two_nodes.sh" in call:
            at = [call.index("--")] if "--" in call else []
        # The launchers take none, too: a sample set. sed only reads the script.
        if not at or len(call) == 1 or call[0] == "sed":
            continue
        if call[1:2] == ["tools/supervise.py"]:  # its own --probe may name a target
            at = [i for i in at if i > call.index("--")]
        if not at:  # a script of the reader's own
            assert call[-1] == "mine.py"
            continue
        found.append(call[at[-1] + 1 :])
    return found


def torchrun_calls(calls: list[list[str]]) -> list[list[str]]:
    """The arguments of each torchrun, those that supervise.py starts included."""
    found = []
    for call in map(program, calls):
        if call[:2] == ["python", "tools/supervise.py"]:
            call = call[call.index("--") + 1 :]
        if call[0] == "torchrun":
            found.append(call[1:])
    return found


def rows(head: str) -> list[list[str]]:
    """The cells of the table whose first column is called `head`; it stands on one page."""
    table = re.compile(rf"^\| {re.escape(head)} \|.*\n\|[-|]+\n((?:\|.*\n)+)", re.MULTILINE)
    found = [match for page in PAGES.values() for match in table.finditer(page.text)]
    assert len(found) == 1, f"{len(found)} tables {head!r}"
    return [
        [cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in found[0][1].splitlines()
    ]


# --- commands --------------------------------------------------------------------------------


def test_every_use_is_shown(calls, all_calls):
    """Guards the tests below: a command that is no longer found would no longer be checked."""
    found = Counter(program(call)[0] for call in all_calls)
    assert {"torchrun", "srun", "sbatch", "mpirun", "sudo", "tests/run.sh", "python"} <= {*found}
    assert found["./launch_single.sh"] >= 3 and found["./launch_multinode.sh"] >= 5
    first = calls[README][0]
    assert program(first) == ["./launch_single.sh"] and not settings(first)


def test_script_options_are_accepted(all_calls, script):
    assert len(script_calls(all_calls)) >= 20
    assert script.refused == []


def test_tool_options_are_accepted(all_calls, monkeypatch):
    """By the tool's own parser, or by two_nodes.sh's list of options."""
    monkeypatch.chdir(ROOT)
    tools, shell = set(), (ROOT / "tools" / "two_nodes.sh").read_text()
    for call in map(program, all_calls):
        if call[0] == "python" and call[1].startswith("tools/"):
            tools.add(call[1])
            try:
                importlib.import_module(Path(call[1]).stem).parse_arguments(call[2:])
            except SystemExit:
                pytest.fail(f"{call[1]} refuses what a page gives it: {call}")
        elif "tools/two_nodes.sh" in call:
            tools.add("two_nodes.sh")
            own = " ".join(call).partition("tools/two_nodes.sh")[2].partition(" -- ")[0]
            for name in own.split()[::2]:
                assert f"__{name[2:]})" in shell, f"two_nodes.sh has no {name}"
    assert len(tools) == 9


def test_torchrun_commands_parse_and_readmes_are_those_of_the_script(calls, script):
    """Typed as they stand: one process, and two nodes by static rendezvous, each with its rank."""
    assert len(script.torchruns) >= 6
    for known in script.torchruns:
        assert known["training_script"] in (SCRIPT.name, PROBE, *MADE)
        if not known["standalone"]:
            assert int(known["nnodes"]) > known["node_rank"]
            assert known["rdzv_backend"] == "static" and known["rdzv_endpoint"]
    found = torchrun_calls(calls[README])
    known = script.torchruns[: len(found)]  # README is the first page
    shown = [(k["standalone"], k["nproc_per_node"], k["node_rank"]) for k in known]
    # The last two, probe and training, are the comparison by hand.
    assert shown == [(True, "1", 0), *[(False, "2", rank) for rank in (0, 1, 0, 0)]]
    docstring = " ".join(script.docstring.split())
    for call in found[:2]:
        assert f"torchrun {' '.join(call[: call.index(SCRIPT.name) + 1])} " in docstring
    assert [part.replace("node_rank=1", "node_rank=0") for part in found[2]] == found[1]


def test_node_settings_are_complete(calls):
    for page in calls.values():
        nodes = [settings(call) for call in page if program(call)[0] == "./launch_multinode.sh"]
        for node in nodes:
            assert {"NNODES", "NODE_RANK", "MASTER_ADDR"} <= set(node)
            assert int(node["NODE_RANK"]) < int(node["NNODES"])
        if page is calls[README]:
            first, second = nodes[:2]
            assert first.pop("NODE_RANK") == "0" and second.pop("NODE_RANK") == "1"
            assert first == second  # only the rank differs


def test_files_and_tests_that_commands_name_exist(all_calls):
    tests = " ".join(path.name for path in (ROOT / "tests").glob("test_*.py"))
    for call in all_calls:
        if "tests/run.sh" in call and "-k" in call:
            assert call[call.index("-k") + 1] in tests
        for part in program(call):
            if re.fullmatch(r"(\./)?[\w/]+\.(sh|py|txt)", part) and part not in MADE:
                assert (ROOT / part).is_file(), part
                assert not part.endswith(".sh") or os.access(ROOT / part, os.X_OK), part


def test_coco_comes_from_its_own_site(calls):
    site = "http://images.cocodataset.org"
    names = ["zips/train2017", "zips/val2017", "annotations/annotations_trainval2017"]
    urls = [call[-1] for call in calls[README] if call[0] == "curl"]
    assert urls == [f"{site}/{name}.zip" for name in names]
    unzipped = [call[2] for call in calls[README] if call[0] == "unzip"]
    assert unzipped == [f"coco/{Path(name).name}.zip" for name in names]


def test_batch_script_is_the_tested_one():
    """test_schedulers.py runs docs/slurm.md's on a SLURM cluster; no page shows another."""
    assert [name for name, page in PAGES.items() for _ in page.files] == ["docs/slurm.md"]
    (text,) = PAGES["docs/slurm.md"].files
    done = subprocess.run(["bash", "-n", "-c", text], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


# Of a log's sentences, what follows a 1 and any other number.
ONE_AND_MORE = {"process on": "processes on", "node,": "nodes,", "has a label,": "have labels,"}
ONE_AND_MORE |= {"does not,": "do not,", "comes twice": "come twice"}


def shape(line: str) -> str:
    """A log line without its figures, the precision that this CPU is best at, and the rest of a
    record.
    """
    line = re.sub(r", \.\.\.}$", "", line)
    line = re.sub(r"\b(fp32|fp16|bf16)\b", "PRECISION", line)
    for one, more in ONE_AND_MORE.items():
        line = line.replace(more, one)
    line = re.sub(r"(\d+h )?(\d+m )?\d+(\.\d+)?s\b", "TIME", line)
    return re.sub(r"\d+(\.\d+)?", "N", line)


def run_code(demo, code):
    exec(code)


# What takes the place of a program, by its file's name: the function of a module, its options.
FORKED = {
    SCRIPT.name: ("support.forks", "start", {}),
    "probe_link.py": ("test_probe", "probe", {"result": None, "settings": SMALL}),
    "inline.py": ("test_pages", "run_code", {}),
    "show_results.py": ("test_show_results", "show", {"result": None}),
}


def fork_what_is_asked(project: Path, asking: dict[Path, int]) -> None:
    """Does what the stand-in program.py asks for, in forked processes, and tells how they ended;
    `asking` holds their process ids by the file of the question.
    """
    for file in project.glob("*.asked"):
        request = json.loads(file.read_text())
        file.unlink()
        (path, *argv), streams = request.pop("argv"), f"/proc/{file.stem}/fd"
        module, function, options = FORKED[Path(path).name]
        if function == "run_code":
            options = {"code": argv.pop()}
        request |= {"argv": argv, "out": f"{streams}/1", "err": f"{streams}/2", "node": None}
        asking[file] = shared().fork(request | {"calls": [[module, function, options]]})
    for file, end in [(file, shared().end_of(pid)) for file, pid in asking.items()]:
        if end:
            file.with_suffix(".code").write_text(f"{end[0]}\n")
            del asking[file]


@pytest.mark.parametrize("real", [False, *long(True)], ids=["forked", "torchrun"])
def test_commands_on_the_small_set_run(tmp_path, real):
    """Makes the set, trains on two processes, resumes on one, draws and loads the checkpoint.

    test_lesson.py runs the lesson's commands, which come to no good end.
    By default with torchrun's stand-in and in forked processes: nothing here imports torch.
    """
    ignored = shutil.ignore_patterns(".*", "data", "logs", "tests", "__pycache__", "coco", "*.pt")
    project = shutil.copytree(ROOT, tmp_path / "project", ignore=ignored)
    pages = [page for page in PAGES.values() if page.name != LESSON]
    script = "\n".join([PRELUDE, *(text for page in pages for text in page.commands)])
    env = environment(tmp_path, REALLY="yes")
    if not real:
        for name in (SCRIPT.name, PROBE, RESULTS, "inline.py"):
            shutil.copy(STAND_IN / "program.py", project / name)
        env |= {"STAND_IN": str(STAND_IN), "INLINE": "inline.py", "FORKS": str(project)}
    asking: dict[Path, int] = {}
    with ThreadPoolExecutor() as pool, start(["bash", "-c", script], env, project) as started:
        try:
            ended = pool.submit(started.finish, timeout=400)
            while not ended.done():
                fork_what_is_asked(project, asking)
                time.sleep(0.02)
            run = ended.result()
        finally:
            if asking:
                shared().clear()  # what is left of a run that failed
    assert [step for _, step, _ in run.steps(0)] == [1, 2, 3, 4, 5, 6]
    assert [step for _, step, _ in run.steps(1)] == [1, 2, 3, 4]
    assert run.json_line("Run")["start_step"] == 4
    assert run.json_line("Summary")["replicas_identical"] is True
    assert len([line for line in run.lines(0) if line.startswith("Cleanup complete.")]) == 2
    assert "<All keys matched successfully>" in run.out
    assert re.search(r"^Top-1: .* images \| baseline .*\nPicture: results.png$", run.out, re.M)
    assert (project / "results.png").is_file()
    assert len(list(tmp_path.glob("project/logs/*/node0.log"))) == 1

    # The excerpt on the first screen has the form of what was printed just now.
    (excerpt,) = (text for text in PAGES[README].printed if text.startswith("[CPU"))
    printed = [shape(line) for line in run.lines() if line.startswith("[CPU")]
    for line in excerpt.splitlines():
        assert any(real.startswith(shape(line)) for real in printed), line
    assert "Cleanup complete. Total wall time:" in excerpt.splitlines()[-1]

    # So have the records and the sentences that README explains.
    named = [name for row in rows("part of a line") for name in re.findall(r"`([^`]+)`", row[0])]
    begins = [n.removesuffix("...}") for n in named if n.endswith(("{...}", ": "))]
    assert len(begins) == 7
    logged = [*run.lines(), *(line.partition("] ")[2] for line in run.lines())]
    for begin in begins:
        assert any(line.startswith(begin) for line in logged), f"{begin}: in no line of the log"


# --- tables ----------------------------------------------------------------------------------


def test_option_table_is_the_parsers(script):
    table = {row[0].strip("`"): row for row in rows("option")}
    assert list(table) == list(script.options)
    for name, facts in script.options.items():
        action = SimpleNamespace(**facts)
        default = "required" if action.required else action.default
        default = "unset" if default is None else "off" if default is False else default
        assert table[name][1] == (f"{default:g}" if type(default) is float else str(default)), name
        assert len(table[name][2]) > 5, name
        for choice in {*(action.choices or ())} - {"auto", "none"}:
            assert choice in table[name][2], f"{name}: {choice} is not explained"


@every_page
def test_options_that_the_text_names_exist(page, script):
    """Wherever they stand; in a tool's own source where they are not the script's."""
    sources = [*(ROOT / "tools").rglob("*"), *ROOT.glob("tests/*.sh")]
    text = "\n".join(path.read_text() for path in sources if path.suffix in (".py", ".sh"))
    option = r"(?<![\w-])--[a-z][\w-]*"
    known = {*script.options, *FOREIGN, *script.torchrun_options, *re.findall(option, text)}
    for name in sorted({*re.findall(option, page.prose)}):
        assert {name, name.replace("_", "-")} & known, f"{name} is an option of nothing"


def test_variables_of_the_launchers():
    table = {name: row for row in rows("variable") for name in re.findall(r"`(\w+)`", row[0])}
    sources = [ROOT / name for name in LAUNCHERS] + [ROOT / "tools/launcher/python_env.sh"]
    code = "\n".join(path.read_text() for path in sources)
    for name in table:
        assert re.search(rf"\$\{{?{name}\b", code), f"no launcher reads {name}"
    assert {*VARIABLES} <= {*table}
    # What the header of the launcher names is in the table, with the default named there.
    header = (ROOT / LAUNCHERS[1]).read_text().partition("\nset -e")[0]
    for names, default in re.findall(r"^#   ([A-Z_]+(?:, [A-Z_]+)*) +(\d*)", header, re.MULTILINE):
        for name in names.split(", "):
            if name == "WORLD_SIZE":
                assert "`WORLD_SIZE`" in table["NNODES"][2]
                continue
            assert not default or table[name][1] == default, name
    checked = re.findall(r"^number ([A-Z_]+) .* (\d+)$", code, re.MULTILINE)
    assert len(checked) >= 4
    for name, default in checked:
        assert table[name][1] in (default, "–"), name


def test_variables_that_a_network_sets():
    table = [name for row in rows("network") for name in re.findall(r"`([A-Z_]+=?\w*)`", row[1])]
    code = (ROOT / LAUNCHERS[1]).read_text()
    for name in table:
        assert f"prefer {name.replace('=', ' ')}" in code, f"the launcher does not set {name}"
    for name in re.findall(r"\bprefer ([A-Z]+_[A-Z_]+) ", code):
        assert name in {entry.partition("=")[0] for entry in table}, f"{name} is not explained"


def test_step_table_names_the_marked_functions():
    functions, marked = [], {}
    for name, number in re.findall(r"^ *def (\w+)|# DDP (\d)/6", SCRIPT.read_text(), re.MULTILINE):
        functions += [name] * bool(name)
        marked |= {number: f"`{functions[-1]}`"} if number else {}
    table = rows("step")
    assert {row[0]: row[1] for row in table} == marked and len(marked) == 6
    for number, _, what, without in table:
        assert what and without
        for other in re.findall(r"`(\w+)`", what):
            assert other in functions, f"step {number} names {other}"


def test_exit_codes():
    assert [int(row[0]) for row in rows("code")] == [0, 1, 2, os.EX_TEMPFAIL]


def test_limits_in_the_text_are_the_scripts(script):
    faults, security = PAGES["docs/faults.md"].prose, PAGES["docs/security.md"].prose
    assert script.pixels == 2**26 and "2^26 pixels" in security
    assert script.max_damaged == 0.01 and "more than 1 % of all" in faults
    refused = re.search(r"(?s)With another\n(.*?)refused", faults)[1]
    assert re.findall(r"`(--\w+)`", refused) == [n for n in script.shared if n.startswith("--")]
    logged = re.search(r"variables that begin with (.*)", security, re.DOTALL)[1]
    assert re.findall(r"`([A-Z_]+_)`", logged) == script.logged.split("|")
    (compression,) = (row for row in rows("option") if row[0] == "`--grad_compression`")
    assert f"from step {script.warm_up + 1} on" in compression[2]


def test_short_tables_are_part_of_the_long_ones():
    """README shows some lines of the emulated comparison; figures must not part ways."""
    short = [line for line in PAGES[README].text.splitlines() if line.endswith((" ms |", "%) |"))]
    assert len(short) >= 5
    for line in short:
        assert line in PAGES["docs/networks.md"].text.splitlines(), line


# --- links -----------------------------------------------------------------------------------


@every_page
def test_links_resolve_and_sections_have_names_of_their_own(page):
    text = re.sub(r"(?s)^```diff\n.*?^```$", "", page.text, flags=re.MULTILINE)
    assert text.startswith("# ") and "@@" not in text
    assert len({*page.anchors}) == len(page.anchors)  # a second one would get another anchor
    assert page.links
    for link in page.links:
        if link.startswith("https://"):
            continue
        path, _, place = link.partition("#")
        target = (ROOT / page.name).parent.joinpath(path).resolve() if path else ROOT / page.name
        assert target.is_file() and target.is_relative_to(ROOT), link
        if place:
            name = str(target.relative_to(ROOT))
            assert place in PAGES[name].anchors, f"{link}: no such section in {name}"


def test_contents_list_every_section_and_page():
    readme = PAGES[README]
    sections = re.findall(r"^## (.*)$", readme.prose, re.MULTILINE)
    listed = re.findall(r"\]\(#([^)]+)\) ?(?:·|$)", readme.prose, re.MULTILINE)
    assert listed == [anchor(section) for section in sections]
    pages = re.findall(r"\]\((docs/\w+\.md)\) ?(?:·|$)", readme.prose, re.MULTILINE)
    assert sorted(pages) == DOCS
    for name in DOCS:
        assert any(link.startswith("../README.md") for link in PAGES[name].links), name


def test_readme_begins_with_the_two_commands_the_picture_and_the_log():
    first_screen = "\n".join(PAGES[README].text.splitlines()[:40])
    parts = ("./launch_single.sh", "tests/run.sh", "docs/compare.png", "[CPU 0] Epoch 2")
    places = [first_screen.find(part) for part in parts]
    assert -1 not in places and places == sorted(places)
