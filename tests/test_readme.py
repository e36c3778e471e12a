"""README.md: its commands run, or at least parse, and its tables agree with the code.

All its bash blocks are put together, in order, into one bash script, as a reader would type them
into one terminal. Functions take the place of the commands: each notes how it was called. Those
that work on README's own small data set then really run; the others would need a GPU, COCO, root
or a cluster, and only what they were given is checked.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import cluster as helpers
import pytest

ROOT, SCRIPT = helpers.ROOT, helpers.SCRIPT
TEXT = (ROOT / "README.md").read_text()
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [m[2] for m in FENCED.finditer(TEXT) if m[1] == "bash"]
COMMANDS = [block for block in BLOCKS if not block.startswith("#!")]
FILES = [block for block in BLOCKS if block.startswith("#!")]
PROSE = FENCED.sub("", TEXT)
LAUNCHERS = ["launch_single.sh", "launch_multinode.sh"]
# Options of programs that are not in this repository. torchrun's are asked of torchrun itself.
FOREIGN = {
    "--create-dirs",  # curl
    "--output-dir",
    "--nodes",  # SLURM
    "--ntasks-per-node",
    "--gpus-per-node",
    "--time",
    "--shm-size",  # docker
}
VARIABLES = ["NNODES", "NODE_RANK", "MASTER_ADDR", "GPUS_PER_NODE", "GPUS", "RESTARTS"]

# `note` writes a call down: the settings in its environment, the program, its arguments, each
# ended by a zero byte, the call by a second one.
PRELUDE = r"""
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
python() { note python "$@"; run_small python "$@"; }
function ./launch_single.sh { note ./launch_single.sh "$@"; run_small ./launch_single.sh "$@"; }
""" + "\n".join(
    f'function {name} {{ note {name} "$@"; }}'
    for name in (
        *("./launch_multinode.sh", "tests/run.sh", "source", "curl", "unzip", "torchrun", "sudo"),
        *("srun", "sbatch", "mpirun", "python3", "pip"),
    )
)


def session(folder: Path, really: bool) -> tuple[list[list[str]], str]:
    """The calls that all of README's commands make, and what they print.

    `folder` gets a copy of the project, without its data and environment. A command that none of
    the functions knows, or one that fails, fails the test.
    """
    copy, calls = folder / "project", folder / "calls"
    ignored = shutil.ignore_patterns(".*", "data", "logs", "tests", "__pycache__", "coco", "*.pt")
    shutil.copytree(ROOT, copy, ignore=ignored)
    script = f"set -euo pipefail\n{PRELUDE}\n" + "\n".join(COMMANDS)
    calls.touch()
    env = {"CALLS": str(calls), "VARIABLES": " ".join(VARIABLES)}
    env["REALLY"] = "yes" if really else "no"
    with helpers.start(["bash", "-c", script], env=env, cwd=copy, shown=["README"]) as started:
        output = started.finish(timeout=180).out
    return [call.split("\0") for call in calls.read_text().split("\0\0") if call], output


@pytest.fixture(scope="module")
def calls(tmp_path_factory) -> list[list[str]]:
    return session(tmp_path_factory.mktemp("calls"), really=False)[0]


@pytest.fixture(scope="module")
def demo():
    """The script as a module; importing it runs nothing."""
    spec = importlib.util.spec_from_file_location("demo_of_readme", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[spec.name]


@pytest.fixture(scope="module")
def options(demo) -> dict[str, argparse.Action]:
    actions = demo.make_parser()._actions
    return {a.option_strings[-1]: a for a in actions if a.dest != "help"}


def programs(call: list[str]) -> list[str]:
    """A call without the settings before it."""
    return call[next(i for i, part in enumerate(call) if not re.match(r"[A-Z_]+=", part)) :]


def settings(call: list[str]) -> dict[str, str]:
    return dict(part.split("=", 1) for part in call[: len(call) - len(programs(call))])


def rows(head: str) -> list[list[str]]:
    """The cells of the table whose first column is called `head`."""
    found = re.search(rf"^\| {re.escape(head)} \|.*\n\|[-|]+\n((?:\|.*\n)+)", TEXT, re.MULTILINE)
    assert found, f"README has no table {head!r}"
    return [
        [cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in found[1].splitlines()
    ]


# --- commands --------------------------------------------------------------------------------


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_block_is_sound_bash(block):
    done = subprocess.run(["bash", "-n"], input=block, text=True, capture_output=True, timeout=20)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_use_is_shown(calls):
    """Guards the tests below: a command that is no longer found would no longer be checked."""
    found = Counter(programs(call)[0] for call in calls)
    for name in ("torchrun", "srun", "sbatch", "mpirun", "sudo", "tests/run.sh", "python"):
        assert found[name], name
    assert found["./launch_single.sh"] >= 3 and found["./launch_multinode.sh"] >= 3
    assert programs(calls[0]) == ["./launch_single.sh"] and not settings(calls[0])


def test_script_options_are_accepted(calls, demo):
    """What a command hands to the script, through whatever launcher, is taken by its parser."""
    targets = {SCRIPT.name, "coco.sbatch", "--", *(f"./{name}" for name in LAUNCHERS)}
    counted = 0
    for call in calls:
        parts = programs(call)
        at = [i for i, part in enumerate(parts) if part in targets]
        if not at or parts == ["./launch_single.sh"]:
            continue
        try:
            args = demo.parse_arguments(parts[at[-1] + 1 :])
        except SystemExit:
            pytest.fail(f"the script refuses what README gives it: {parts}")
        assert args.coco_image_path and args.annotation_path
        counted += 1
    assert counted >= 10


def test_torchrun_options_are_accepted(calls):
    from torch.distributed.run import get_args_parser

    (call,) = (programs(call) for call in calls if programs(call)[0] == "torchrun")
    known = get_args_parser().parse_args(call[1:])
    assert known.training_script == SCRIPT.name and known.nproc_per_node == "1"


def test_node_settings_are_complete(calls):
    nodes = [settings(call) for call in calls if programs(call)[0] == "./launch_multinode.sh"]
    for node in nodes:
        assert {"NNODES", "NODE_RANK", "MASTER_ADDR"} <= set(node)
        assert int(node["NODE_RANK"]) < int(node["NNODES"])
    first, second = nodes[:2]
    assert first.pop("NODE_RANK") == "0" and second.pop("NODE_RANK") == "1"
    assert first == second  # only the rank differs


def test_files_that_commands_name_exist(calls):
    for call in calls:
        for part in programs(call):
            if re.fullmatch(r"(\./)?[\w/]+\.(sh|py|txt)", part):
                assert (ROOT / part).is_file(), part
                assert not part.endswith(".sh") or os.access(ROOT / part, os.X_OK), part


def test_coco_comes_from_its_own_site(calls):
    urls = [call[-1] for call in calls if call[0] == "curl"]
    assert [url.rpartition("/")[2] for url in urls] == [
        "train2017.zip",
        "val2017.zip",
        "annotations_trainval2017.zip",
    ]
    assert {url.partition("org/")[0] for url in urls} == {"http://images.cocodataset."}
    unzipped = [call[2] for call in calls if call[0] == "unzip"]
    assert unzipped == [f"coco/{url.rpartition('/')[2]}" for url in urls]


def test_batch_script_is_the_tested_one():
    """test_schedulers.py runs it on a SLURM cluster; README must not show another."""
    tree = ast.parse((ROOT / "tests" / "test_schedulers.py").read_text())
    (tested,) = (
        node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and node.targets[0].id == "BATCH_SCRIPT"
    )
    assert [tested] == FILES


def shape(line: str) -> str:
    """A log line without its figures and the rest of a record."""
    line = re.sub(r", \.\.\.}$", "", line)
    line = re.sub(r"(\d+h )?(\d+m )?\d+(\.\d+)?s\b", "TIME", line)
    return re.sub(r"\d+(\.\d+)?", "N", line)


def test_commands_on_the_small_set_run(tmp_path):
    """Makes the set, trains on two processes, resumes on one, loads the checkpoint."""
    _, output = session(tmp_path, really=True)
    run = helpers.Run(["README"], 0, output, 0, "")
    assert [step for _, step, _ in run.steps(0)] == [1, 2, 3, 4, 5, 6]
    assert [step for _, step, _ in run.steps(1)] == [1, 2, 3, 4]
    assert run.json_line("Run")["start_step"] == 4
    assert run.json_line("Summary")["replicas_identical"] is True
    assert len([line for line in run.lines(0) if line.startswith("Cleanup complete.")]) == 2
    assert "<All keys matched successfully>" in output
    assert len(list(tmp_path.glob("project/logs/*/node0.log"))) == 1

    # The excerpt on the first screen has the form of what was printed just now.
    (excerpt,) = (m[2] for m in FENCED.finditer(TEXT) if m[1] == "text")
    printed = [shape(line) for line in run.lines() if line.startswith("[CPU")]
    for line in excerpt.splitlines():
        assert any(real.startswith(shape(line)) for real in printed), line
    assert "Cleanup complete. Total wall time:" in excerpt.splitlines()[-1]


# --- tables and links ------------------------------------------------------------------------


def test_option_table_is_the_parsers(options):
    table = {row[0].strip("`"): row for row in rows("option")}
    assert set(table) == set(options)
    for name, action in options.items():
        default = "required" if action.required else action.default
        default = "unset" if default is None else "off" if default is False else default
        assert table[name][1] == (f"{default:g}" if type(default) is float else str(default)), name
        assert len(table[name][2]) > 5, name
        for choice in {*(action.choices or ())} - {"auto", "none"}:
            assert choice in table[name][2], f"{name}: {choice} is not explained"


def test_options_that_the_text_names_exist(options):
    """Wherever they stand; in a tool's own source where they are not the script's."""
    sources = [*ROOT.glob("tools/*"), ROOT / "tests" / "run.sh"]
    tools = "\n".join(path.read_text() for path in sources if path.suffix in (".py", ".sh"))
    torchrun = {"--standalone", "--nnodes", "--nproc_per_node"}
    text = "\n".join(part for part in [PROSE, *COMMANDS])
    for name in sorted(set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text))):
        known = name in options or name in FOREIGN | torchrun | {"--help"}
        mine = re.search(rf"(?<![\w-]){name.replace('_', '[-_]')}(?![\w-])", tools)
        assert known or mine, f"{name} is an option of nothing"


def test_variables_of_the_launchers(calls):
    table = [name for row in rows("variable") for name in re.findall(r"`(\w+)`", row[0])]
    sources = [ROOT / name for name in LAUNCHERS] + [ROOT / "tools" / "python_env.sh"]
    code = "\n".join(path.read_text() for path in sources)
    for name in table:
        assert re.search(rf"\$\{{?{name}\b", code), f"no launcher reads {name}"
    for name in VARIABLES:
        assert name in table
    # What the header of the launcher names is in the table, with the default named there.
    header = (ROOT / LAUNCHERS[1]).read_text().partition("\nset -e")[0]
    for names, default in re.findall(r"^#   ([A-Z_]+(?:, [A-Z_]+)*) +(\d*)", header, re.MULTILINE):
        for name in names.split(", "):
            if name == "WORLD_SIZE":
                assert "`WORLD_SIZE`" in PROSE
                continue
            (row,) = (row for row in rows("variable") if f"`{name}`" in row[0])
            assert not default or row[1] == default, name


def test_step_table_names_the_marked_functions():
    source = SCRIPT.read_text()
    functions = {
        node.name: range(node.lineno, node.end_lineno + 1)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef)
    }
    lines = source.splitlines()
    table = rows("step")
    assert [row[0] for row in table] == ["1", "2", "3", "4", "5", "6"]
    for number, name, what, without in table:
        (mark,) = (i for i, line in enumerate(lines, 1) if f"# DDP {number}/6" in line)
        assert mark in functions[name.strip("`")], f"step {number} is not in {name}"
        assert what and without
        for other in re.findall(r"`(\w+)`", what):
            assert other in functions, f"step {number} names {other}"


def test_exit_codes(demo):
    table = [int(row[0]) for row in rows("code")]
    assert table == [0, 1, 2, os.EX_TEMPFAIL]


def test_limits_in_the_text_are_the_scripts(demo):
    assert 2 * demo.Image.MAX_IMAGE_PIXELS == 2**26 and "2^26 pixels" in PROSE
    assert demo.MAX_DAMAGED == 0.01 and "more than 1 % of all" in PROSE
    refused = re.search(r"(?s)With another\n(.*?)refused", PROSE)[1]
    assert re.findall(r"`--(\w+)`", refused) == demo.SAME


def anchors() -> set[str]:
    """GitHub's: lower case, spaces to dashes, without punctuation."""
    titles = re.findall(r"^#+ (.*)$", PROSE, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_resolve():
    links = re.findall(r"\]\(([^)]+)\)", PROSE)
    assert len(links) > 15
    for link in links:
        if link.startswith("#"):
            assert link[1:] in anchors(), link
        elif not link.startswith("https://"):
            assert (ROOT / link).is_file(), link


def test_contents_list_every_section():
    sections = re.findall(r"^## (.*)$", PROSE, re.MULTILINE)
    listed = re.findall(r"\]\(#([^)]+)\) ?(?:·|$)", PROSE, re.MULTILINE)
    wanted = [re.sub(r"[^\w -]", "", s.lower()).replace(" ", "-") for s in sections]
    assert listed == wanted[1:]  # the first follows the list


def test_it_can_be_read_in_one_sitting():
    lines = TEXT.splitlines()
    assert len(lines) <= 520
    assert lines[0].startswith("# ") and "./launch_single.sh" in "\n".join(lines[:10])
    assert "@@" not in TEXT
