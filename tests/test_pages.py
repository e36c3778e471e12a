"""README.md and docs/*.md: commands parse, tables agree with the code, links resolve.

All bash blocks of a page run as one script, in which functions take the place of the commands and
note how they were called. Under --ci README's first steps really run.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.records import END, EPOCH, PREFIX, STEP, VALIDATION
from support.forks import write
from support.processes import LONG, ROOT, SCRIPT, base_env, new_test_id, start

README = "README.md"
LAUNCHERS = ["launch_single.sh", "launch_multinode.sh"]
SOURCED = [path for path in (ROOT / "tools").glob("*.sh") if path.name != "two_nodes.sh"]
CODE = "\n".join(path.read_text() for path in [*(ROOT / name for name in LAUNCHERS), *SOURCED])
# Options of programs that are not in this repository. torchrun's are asked of torchrun itself.
FOREIGN = {"--create-dirs", "--output-dir"}  # curl
FOREIGN |= {
    "--nodes",
    "--ntasks-per-node",
    "--cpus-per-task",
    "--gpus-per-node",
    "--time",
}  # SLURM
FOREIGN |= {"--shm-size", "--network", "--nv"}  # docker, apptainer
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def anchor(title: str) -> str:
    """GitHub's: lower case, spaces to dashes, without punctuation."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


class Page:
    """A page, by its path under the repository's root."""

    def __init__(self, name: str) -> None:
        self.name, self.text = name, (ROOT / name).read_text()
        blocks = [(m[1], m[2]) for m in FENCED.finditer(self.text)]
        shell = [text for kind, text in blocks if kind == "bash"]
        self.commands = [text for text in shell if not text.startswith("#!")]
        self.printed = [text for kind, text in blocks if kind == "text"]
        self.prose = FENCED.sub("", self.text)
        self.anchors = [*map(anchor, re.findall(r"^#+ (.*)$", self.prose, re.MULTILINE))]
        self.links = re.findall(r"\]\(([^)]+)\)", self.prose)


DOCS = [f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))]
PAGES = {name: Page(name) for name in [README, *DOCS]}
every_page = pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
# What a reader has set by README's commands when another page uses it.
ARRAYS = re.findall(r"^\w+=\(.*?\)$", "".join(PAGES[README].commands), re.MULTILINE | re.DOTALL)
# Files that the commands make, and others that are not there.
COMMANDS = "\n".join(text for page in PAGES.values() for text in page.commands)
MADE = re.findall(r"> (\S+\.py)$", COMMANDS, re.MULTILINE)
OTHERS = ["data/small/ddp.py", "make_coco.py", "mine.py"]

PROGRAMS = """
python ./launch_single.sh ./launch_multinode.sh tests/run.sh tests/breaks/run.py
tools/environment.sh source curl unzip torchrun sudo srun sbatch mpirun python3 pip conda module
apptainer sed docker grep patch nvidia-smi
"""
# A call is written down as its words, each ended by a zero byte, and a second one.
NOTING = "set -euo pipefail\n" + "\n".join(
    f"function {name} {{ printf '%s\\0' {name} \"$@\" '' >>calls; }}" for name in PROGRAMS.split()
)


@pytest.fixture(scope="module")
def calls(tmp_path_factory) -> list[list[str]]:
    """The calls that the commands of all pages make; nothing runs.

    Bash that is not sound, an unknown command, or one that fails, fails the test.
    """
    found = []
    for page in PAGES.values():
        folder = tmp_path_factory.mktemp("calls")
        (folder / "data" / "small").mkdir(parents=True)  # README's first steps make it
        (folder / "calls").touch()
        script = "\n".join([NOTING, *(ARRAYS if page.name != README else []), *page.commands])
        how = dict(env=base_env(new_test_id()), cwd=folder, capture_output=True, text=True)
        done = subprocess.run(["bash", "-c", script], **how, timeout=20)
        assert (done.returncode, done.stderr) == (0, ""), page.name
        noted = (folder / "calls").read_text().split("\0\0")
        found += [call.split("\0") for call in noted if call]
    return found


def script_calls(calls: list[list[str]]) -> list[list[str]]:
    """What each command hands to the script, through whatever launcher; no arguments are fine."""
    targets = {SCRIPT.name, "tools/probe_link.py", "coco.sbatch", "--", *MADE}
    targets |= {f"./{name}" for name in LAUNCHERS}
    found = []
    for call in calls:
        at = [i for i, word in enumerate(call) if word in targets]
        if at and call[at[0] + 1 :] and call[0] != "patch":
            found.append(call[at[0] + 1 :])
    return found


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
        "options": {a.option_strings[-1]: {k: getattr(a, k) for k in kept} for a in actions},
        "refused": [call for call in script_calls if not taken(call)],
        "torchrun_options": [*torchrun._option_string_actions],
        "torchruns": [vars(torchrun.parse_args(call)) for call in torchrun_calls],
        "max_damaged": demo.MAX_DAMAGED,
        "shared": demo.SHARED,
        "warm_up": demo.WARM_UP,
    }
    write(result, facts)


@pytest.fixture(scope="module")
def script(demo, calls) -> SimpleNamespace:
    torchruns = [call[1:] for call in calls if call[0] == "torchrun"]
    given = {"script_calls": script_calls(calls), "torchrun_calls": torchruns}
    return SimpleNamespace(**demo.run(call=ask, **given).result())


def rows(head: str) -> list[list[str]]:
    """The cells of the table whose first column is called `head`; it stands on one page."""
    table = re.compile(rf"^\| {re.escape(head)} \|.*\n\|[-|]+\n((?:\|.*\n)+)", re.MULTILINE)
    found = [match for page in PAGES.values() for match in table.finditer(page.text)]
    assert len(found) == 1, f"{len(found)} tables {head!r}"
    return [
        [cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in found[0][1].splitlines()
    ]


# --- Commands ----------------------------------------------------------------------------------


def test_script_takes_the_arguments_of_the_commands(calls, script):
    assert len(script_calls(calls)) >= 20
    assert script.refused == []


def test_tools_take_the_arguments_of_the_commands(calls, monkeypatch):
    monkeypatch.chdir(ROOT)
    parsed = 0
    for call in calls:
        if call[0] == "python" and call[1].startswith("tools/"):
            tool = importlib.import_module(Path(call[1]).stem)
            if parse := getattr(tool, "parse_arguments", None):
                parse(call[2:])  # exits, and so fails the test, when it refuses them
                parsed += 1
    assert parsed >= 20


def test_torchrun_takes_the_arguments_of_the_commands(script):
    assert len(script.torchruns) >= 6
    for known in script.torchruns:
        assert known["training_script"] in (SCRIPT.name, "tools/probe_link.py", *OTHERS, *MADE)
        if not known["standalone"]:
            assert int(known["nnodes"]) > known["node_rank"]
            assert known["rdzv_backend"] == "static" and known["rdzv_endpoint"]


def test_commands_of_the_launcher_of_nodes_have_what_it_needs():
    found = re.findall(r"^(.*) \./launch_multinode\.sh", COMMANDS, re.MULTILINE)
    assert len(found) >= 10
    for before in found:
        by_hand = re.search(r"\bNNODES=2 NODE_RANK=[01] MASTER_ADDR=10\.0\.0\.1\b", before)
        assert by_hand or before.startswith("srun --nodes=2 --ntasks-per-node=1 "), before


def test_files_and_tests_that_commands_name_exist(calls):
    tests = " ".join(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    for call in calls:
        if "tests/run.sh" in call and "-k" in call:
            assert call[call.index("-k") + 1] in tests
        for part in call:
            if re.fullmatch(r"(\./)?[\w/]+\.(sh|py|txt)", part) and part not in OTHERS + MADE:
                assert (ROOT / part).is_file(), part
                assert not part.endswith(".sh") or os.access(ROOT / part, os.X_OK), part


@LONG
def test_commands_on_the_small_set_train_resume_and_draw(tmp_path):
    """README's first steps as they stand, and what docs/faults.md does with their checkpoint."""
    ignored = shutil.ignore_patterns(".*", "data", "logs", "tests", "__pycache__", "coco", "*.pt")
    project = shutil.copytree(ROOT, tmp_path / "project", ignore=ignored)
    commands = [*PAGES[README].commands, *PAGES["docs/faults.md"].commands]
    commands = [text for text in commands if re.search("data/small|^python.*small", text)]
    script = "\n".join(["set -eo pipefail", "source() { true; }", *commands])
    with start(["bash", "-c", script], cwd=project) as started:
        run = started.finish(400)
    assert [step for _, step, _ in run.steps(0)] == [1, 2, 3, 4, 5, 6]
    assert [step for _, step, _ in run.steps(1)] == [1, 2, 3, 4]
    assert run.json_line("Run")["start_step"] == 4
    assert "<All keys matched successfully>" in run.out
    assert (project / "results.png").is_file()


def test_readmes_log_is_one_that_the_comparison_reads_whole():
    (excerpt,) = (text for text in PAGES[README].printed if text.startswith("[CPU"))
    first, *others = (PREFIX.sub("", line) for line in excerpt.splitlines())
    assert first.startswith("Run: 1 process on 1 node, ")
    for line in others:
        found = [form.match(line) for form in (STEP, EPOCH, VALIDATION, END)]
        assert any(match and None not in match.groups() for match in found), line


# --- Tables and limits -------------------------------------------------------------------------


def test_option_table_is_the_parsers(script):
    table = {row[0].strip("`"): row for row in rows("option")}
    assert list(table) == list(script.options)
    for name, facts in script.options.items():
        default = "required" if facts["required"] else facts["default"]
        default = {None: "unset", False: "off"}.get(default, default)
        assert table[name][1] == (f"{default:g}" if type(default) is float else str(default)), name
        for choice in {*(facts["choices"] or ())} - {"auto", "none"}:
            assert choice in table[name][2], f"{name}: {choice} is not explained"


@every_page
def test_options_that_the_text_names_exist(page, script):
    """In the script, in torchrun, or in the source of some tool."""
    sources = [*(ROOT / "tools").rglob("*"), *ROOT.glob("tests/*.sh")]
    text = "\n".join(path.read_text() for path in sources if path.suffix in (".py", ".sh"))
    option = r"(?<![\w-])--[a-z][\w-]*"
    known = {*script.options, *FOREIGN, *script.torchrun_options, *re.findall(option, text)}
    for name in sorted({*re.findall(option, page.prose)}):
        assert {name, name.replace("_", "-")} & known, f"{name} is an option of nothing"


def test_variables_of_the_launchers():
    """All that the header of launch_multinode.sh names are in the table, with their defaults."""
    table = {name: row for row in rows("variable") for name in re.findall(r"`(\w+)`", row[0])}
    for name in table:
        assert re.search(rf"\$\{{?{name}\b", CODE), f"no launcher reads {name}"
    header = (ROOT / LAUNCHERS[1]).read_text().partition("\nset -e")[0]
    header = header.partition("Other environment variables")[2]
    named = re.findall(r"^#   ([A-Z_, ]+)(?:=(\S+))? ", header, re.MULTILINE)
    assert len(named) >= 8
    for names, default in named:
        for name in names.strip().split(", "):
            row = table["NNODES" if name == "WORLD_SIZE" else name]
            assert f"`{name}`" in " ".join(row) and default in row[1], name
    checked = re.findall(r"^set_number ([A-Z_]+) (\d+) ", CODE, re.MULTILINE)
    assert len(checked) >= 5
    for name, default in checked:
        assert table[name][1] in (default, "–"), name


def test_variables_that_a_network_sets():
    table = [name for row in rows("network") for name in re.findall(r"`([A-Z_]+=?\w*)`", row[1])]
    for name in table:
        assert f"prefer {name.replace('=', ' ')}" in CODE, f"the launcher does not set {name}"
    for name in re.findall(r"\bprefer ([A-Z]+_[A-Z_]+) ", CODE):
        assert name in {entry.partition("=")[0] for entry in table}, f"{name} is not explained"


def test_step_table_names_the_marked_functions():
    functions, marked = [], {}
    for name, number in re.findall(r"^ *def (\w+)|# DDP (\d)/6", SCRIPT.read_text(), re.MULTILINE):
        functions += [name] * bool(name)
        marked |= {number: f"`{functions[-1]}`"} if number else {}
    assert {row[0]: row[1] for row in rows("step")} == marked and len(marked) == 6


def test_limits_in_the_text_are_the_scripts(script):
    faults = PAGES["docs/faults.md"].prose
    assert script.max_damaged == 0.01 and "more than 1 % of all" in faults
    refused = re.search(r"(?s)With another\n(.*?)refused", faults)[1]
    assert re.findall(r"`(--\w+)`", refused) == [n for n in script.shared if n.startswith("--")]
    (compression,) = (row for row in rows("option") if row[0] == "`--grad_compression`")
    assert f"from step {script.warm_up + 1} on" in compression[2]


def test_figures_of_readmes_comparison_are_those_of_the_whole_one():
    short = [line for line in PAGES[README].text.splitlines() if line.endswith((" ms |", "%) |"))]
    assert len(short) >= 5
    for line in short:
        assert line in PAGES["docs/networks.md"].text.splitlines(), line


# --- Links -------------------------------------------------------------------------------------


@every_page
def test_links_resolve_and_sections_have_names_of_their_own(page):
    assert len({*page.anchors}) == len(page.anchors)  # a second one would get another anchor
    for link in page.links:
        if link.startswith("https://"):
            continue
        path, _, place = link.partition("#")
        target = (ROOT / page.name).parent.joinpath(path).resolve() if path else ROOT / page.name
        assert target.is_file() and target.is_relative_to(ROOT), link
        if place:
            name = str(target.relative_to(ROOT))
            assert place in PAGES[name].anchors, f"{link}: no such section in {name}"


def test_readme_links_every_section_and_page_and_each_page_links_back():
    readme = PAGES[README]
    sections = re.findall(r"^## (.*)$", readme.prose, re.MULTILINE)
    listed = re.findall(r"\]\(#([^)]+)\) ?(?:·|$)", readme.prose, re.MULTILINE)
    assert listed == [anchor(section) for section in sections]
    pages = re.findall(r"\]\((docs/\w+\.md)\) ?(?:·|$)", readme.prose, re.MULTILINE)
    assert sorted(pages) == DOCS
    for name in DOCS:
        assert any(link.startswith("../README.md") for link in PAGES[name].links), name
