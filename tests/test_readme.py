"""README.md and docs/: commands parse, links resolve, tables agree with the code.

All bash blocks of a page run as one script, in which functions take the place of the commands and
note how they were called. Under --ci README's first commands, and those for own data and an own
model, really run.
"""

from __future__ import annotations

import importlib
import os
import re
import runpy
import shutil
import subprocess
from pathlib import Path

import demo_coco_resnet18 as demo
import pytest
import torch
import torchvision
from torch.distributed.run import get_args_parser

import series
from analysis.logs import END, PREFIX, STEP, VALIDATION
from support.datasets import numbered, write_images
from support.launchers import copy_project
from support.pages import HOMEWORK, PAGES, README, RUNNING
from support.processes import ROOT, SCRIPT, base_env, new_test_id, start

COMMANDS = "\n".join(text for page in PAGES.values() for text in page.commands)
# Files that the reader makes.
MADE = ["make_coco.py", "demo_resnet50.py", "mine.py", "calls.py", "spawn.py"]
PARTS, SUFFIXES = ("docs", "tests", "tools"), {".md", ".py", ".sh", ".sbatch", ".ipynb"}
LESSONS = ["ddp.py", "shard.py", "all_reduce.py"]  # what torchrun starts in docs/lesson
STARTED = [SCRIPT.name, "tools/probe_link.py", *MADE, *LESSONS]

# A call is written down as its words, each ended by a zero byte, and a second one.
PROGRAMS = """
python python3 ./launch_single.sh ./launch_multinode.sh tests/run.sh source
tools/environment.sh tools/series.py
curl unzip apt-get torchrun sudo srun sbatch salloc mpirun pip apptainer docker sed grep
git cp diff
"""
NOTING = "\n".join(
    f"function {name} {{ printf '%s\\0' {name} \"$@\" '' >>calls; }}" for name in PROGRAMS.split()
)
# What running.md sets first, for pages that use it.
COCO = "coco=(--coco_image_path images --annotation_path file.json)"


@pytest.fixture(scope="module")
def calls(tmp_path_factory) -> list[list[str]]:
    """The calls that the commands of all pages make; nothing runs.

    Bash that is not sound, an unknown command, or one that fails, fails the test.
    """
    found = []
    for page in PAGES.values():
        folder = tmp_path_factory.mktemp("calls")
        (folder / "calls").touch()
        script = "\n".join(["set -euo pipefail", NOTING, COCO, *page.commands])
        how = dict(env=base_env(new_test_id()), cwd=folder, capture_output=True, text=True)
        done = subprocess.run(["bash", "-c", script], **how, timeout=20)
        assert (done.returncode, done.stderr) == (0, ""), page.name
        noted = (folder / "calls").read_text().split("\0\0")
        found += [call.split("\0") for call in noted if call]
    return found


def rows(head: str) -> list[list[str]]:
    """The cells of the table whose first column is called `head`; one page has it."""
    table = re.compile(rf"^\| {re.escape(head)} \|.*\n\|[-|]+\n((?:\|.*\n)+)", re.MULTILINE)
    (found,) = [match for page in PAGES.values() for match in table.finditer(page.text)]
    lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in found[1].splitlines()]
    return [[cell.strip() for cell in cells] for cells in lines]


def source(*patterns: str) -> str:
    return "\n".join(path.read_text() for pattern in patterns for path in ROOT.glob(pattern))


# --- Commands ----------------------------------------------------------------------------------


def test_programs_take_the_arguments_of_the_commands(calls, monkeypatch):
    """The script's go to it through whatever launcher. A parser exits if it refuses them."""
    monkeypatch.chdir(ROOT)
    targets = {SCRIPT.name, "./launch_single.sh", "./launch_multinode.sh", *MADE, "--"}
    targets |= {"tools/slurm/coco.sbatch", "tools/slurm/torchrun.sbatch"}
    parsed = []
    for call in calls:
        at = [i for i, word in enumerate(call) if word in targets]
        if call[0] not in ("sed", "docker") and at and call[at[0] + 1 :]:
            words = call[at[0] + 1 :]
            given = any("_path" in word or word == "--dummy" for word in words)
            if call[at[0]].startswith("./launch_") and not given:
                words += ["--coco_image_path", "sample", "--annotation_path", "sample"]
            args = demo.parse_arguments(words)
            assert args.dummy or (args.coco_image_path and args.annotation_path)
            parsed.append("script")
        if call[0] == "python" and call[1].startswith("tools/"):
            tool = importlib.import_module(Path(call[1]).stem)
            if parse := getattr(tool, "parse_arguments", None):  # others take no arguments
                parse(call[2:])
                parsed.append(tool.__name__)
        if call[0] == "tools/series.py":
            series.parse_arguments(call[1:])
            parsed.append("series")
        if call[0] == "torchrun":
            known = get_args_parser().parse_args(call[1:])
            assert known.training_script in STARTED
            if not known.standalone:
                assert int(known.nnodes) > known.node_rank
                assert known.rdzv_backend == "static" and known.rdzv_endpoint
            parsed.append("torchrun")
    assert {*parsed} >= {"series", "benchmark", "check_coco", "compare_logs", "prepare_coco"}
    assert parsed.count("script") >= 18 and parsed.count("torchrun") >= 5


def test_each_torchrun_of_one_node_has_its_address():
    """Otherwise torchrun hangs on a machine whose own name does not resolve."""
    files = [*ROOT.glob("*.*"), *(path for name in PARTS for path in (ROOT / name).rglob("*.*"))]
    texts = [path.read_text() for path in files if path.suffix in SUFFIXES]
    options = re.findall(r"[-]-standalone(\W+--local-addr=127\.0\.0\.1)?", "\n".join(texts))
    assert len(options) > 20 and all(options)


def test_commands_of_the_launcher_of_nodes_have_what_it_needs():
    nodes = r"^(.*) (?:\./launch_multinode\.sh|tools/series\.py(?! --processes))"
    found = re.findall(nodes, COMMANDS, re.MULTILINE)
    assert len(found) >= 6
    for before in found:
        by_hand = re.search(r"\bNNODES=2 NODE_RANK=[01] MASTER_ADDR=10\.0\.0\.1\b", before)
        by_srun = re.match(r"(RUN_NAME=\w+ )?srun --nodes=\d --ntasks-per-node=1 ", before)
        assert by_hand or by_srun, before


def test_a_log_kept_by_hand_has_errors_and_leaves_the_exit_code():
    blocks = [text for page in PAGES.values() for text in page.commands if "| tee " in text]
    for text in blocks:
        assert text.count("| tee ") == text.count("2>&1 | tee ")
        assert "pipefail" in text.partition("| tee ")[0]
    assert blocks


def test_files_that_commands_name_exist(calls):
    named = {part for call in calls for part in call if part not in MADE}
    named = [part for part in named if re.fullmatch(r"(\./)?[\w/]+\.(sh|sbatch|py|txt)", part)]
    assert len(named) >= 10
    for part in named:
        folders = (ROOT, ROOT / "docs/lesson")  # the lesson's commands run there
        assert any((folder / part).is_file() for folder in folders), part
        assert not part.endswith(".sh") or os.access(ROOT / part, os.X_OK), part


@pytest.mark.slow
def test_readmes_first_commands_train_and_compare(tmp_path):
    """On 64 of the 512 images, without COCO: the first command, the fifteen minutes, one GPU."""
    project = copy_project(tmp_path)
    drawing = project / "tools" / "make_sample_coco.py"
    drawing.write_text(drawing.read_text().replace("default=512", "default=64"))
    trains, *others = PAGES[README].commands
    (alone,) = [text for text in others if "--checkpoint sample.pt" in text]
    (runs,) = [text for text in others if "RUN_NAME=same" in text]
    (compares,) = [text for text in others if "compare_logs.py logs/two" in text]
    lines = [line for line in trains.splitlines() if not line.startswith("tests/")]
    script = "\n".join(["set -eo pipefail; source() { true; }", *lines, alone, runs, compares])
    with start(["bash", "-c", script], cwd=project) as started:
        run = started.finish(600)
    assert run.out.count("Cleanup complete") == 1 + 1 + 1 + 2 + 2
    first, second = map(float, re.findall(r"Epoch \d complete \| Avg loss: (\S+)", run.out)[:2])
    assert second < first
    assert re.search(r"Epoch 2 validation \| Top-1: \d", run.out)
    assert run.json_line("Summary")["replicas_identical"]
    assert re.search(r"^two: a step of ", run.out, re.MULTILINE)  # the verdict


def test_readmes_log_is_one_that_the_comparison_reads_whole():
    (excerpt,) = [text for text in PAGES[README].printed if "Loss" in text]
    lines = [line for line in excerpt.splitlines() if line != "..."]
    first, *others = (PREFIX.sub("", line) for line in lines)
    assert first.startswith("Run: 1 process on 1 node, ") and len(lines) == 8
    for line in others:
        found = [form.match(line) for form in (STEP, VALIDATION, END)]
        found.append(re.match(r"Epoch \d+ (complete) \| Avg loss: ", line))
        assert any(match and None not in match.groups() for match in found), line


TOOLS = sorted({*ROOT.glob("tools/*.py")} - {ROOT / "tools/step_log.py"})  # which is imported


@pytest.mark.parametrize("path", TOOLS, ids=lambda path: path.name)
def test_each_tool_answers_help(path, monkeypatch, capsys):
    monkeypatch.setattr(os, "_exit", pytest.fail)  # the probe ends with it on an error
    monkeypatch.setattr("sys.argv", [str(path), "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    assert not ended.value.code and capsys.readouterr().out.startswith("usage: ")


# --- Tables and the code -----------------------------------------------------------------------


def test_options_that_the_text_names_exist():
    """In the script, in torchrun, in the source of a tool, or in a program of others."""
    option = r"(?<![\w-])--[a-z][\w-]*"
    files = source("tools/*.*", "tools/*/*.py", "tools/*/*.sh", "tests/run.sh")
    known = {*re.findall(option, files)}
    known |= {*demo.make_parser()._option_string_actions}
    known |= {*get_args_parser()._option_string_actions}
    known |= {"--cpus-per-task", "--nv", "--install"}  # of SLURM, Apptainer, WSL
    known |= {"--index-url", "--use_cuda", "--report_gbits"}  # of pip, perftest
    named = {page.name: {*re.findall(option, page.prose)} for page in PAGES.values()}
    assert sum(map(len, named.values())) > 40
    for name, options in named.items():
        assert options <= known, (name, options - known)


def test_launchers_read_the_variables_of_their_help():
    code = source("launch_*.sh", "tools/run.py")
    heads = code.split("Other environment variables")[1:]  # of the two launchers
    heads = "".join(head.partition("\nset -e")[0] for head in heads)
    named = re.findall(r"^#   ([A-Z_]+(?:, [A-Z_]+)*)(?:=(\S+))? ", heads, re.MULTILINE)
    assert len(named) >= 12
    for names, default in named:
        for name in names.split(", "):
            read = rf'[{{"]{name}(:-|", "){default}["}}]' if default else rf'[{{"]{name}\b'
            assert re.search(read, code), name


def test_table_of_changes_names_the_marked_functions():
    functions, marked = [], {}
    for name, number in re.findall(r"^ *def (\w+)|# DDP (\d)/6", SCRIPT.read_text(), re.MULTILINE):
        functions += [name] * bool(name)
        marked |= {number: functions[-1]} if number else {}
    assert len(marked) == 6
    assert {row[0]: row[1].strip("`") for row in rows("change")} == marked


def test_a_paragraph_names_all_settings_that_a_resumed_run_must_share():
    wanted = {f"`--{name}`" for name in demo.SAME_ON_RESUME}
    paragraphs = PAGES[RUNNING].prose.split("\n\n")
    assert any({*re.findall(r"`--\w+`", text)} == wanted for text in paragraphs)


def test_size_of_the_gradients_is_that_of_the_code():
    with torch.device("meta"):
        model = torchvision.models.resnet18(num_classes=80)
    count = sum(map(torch.numel, model.parameters()))
    text = f"has {count:,} weights. In fp32 a gradient has 4 bytes, so all gradients are"
    assert f"{text} **{4 * count / 1e6:.1f} MB**." in PAGES[HOMEWORK].text


def test_messages_of_the_fault_table_are_those_of_the_code():
    code = source("*.py", "*.sh", "tools/*.sh", "tools/run.py", "tools/series.py")
    code = re.sub(r'"\s*\n\s*f?"', "", code)  # strings that stand on several lines
    messages = [text for row in rows("message") for text in re.findall(r"`([^`]+)`", row[0])]
    of_others = {"Connection reset by peer", "Connection closed by peer", "exitcode  : -9"}
    of_others |= {"remote process exited", "exitcode  : -6", "no kernel image is available"}
    of_others |= {"DataLoader worker (pid", "DataLoader timed out", "Too many open files"}
    of_others |= {"unable to find an engine", "invalid device ordinal", "getpwuid"}
    of_others |= {"C++ compiler found", "find C compiler", "unhandled system error"}
    assert len(messages) >= 15 and of_others <= {*messages}
    for text in {*messages} - of_others:
        assert text in code, text


# --- Links -------------------------------------------------------------------------------------


def test_links_resolve_and_lead_to_each_page():
    linked = set()
    for page in PAGES.values():
        assert len({*page.anchors}) == len(page.anchors)  # a second one would get another anchor
        for link in page.links:
            path, _, place = link.partition("#")
            target = (ROOT / page.name).parent.joinpath(path) if path else ROOT / page.name
            if link.startswith("https://"):
                continue
            name = os.path.relpath(target, ROOT)
            linked |= {name} - {page.name}
            assert target.is_file() and not name.startswith(".."), f"{page.name}: {link}"
            assert not place or place in PAGES[name].anchors, link
    assert linked >= {*PAGES}


# --- Own data, own model -----------------------------------------------------------------------

# A small, short training in place of each, without weights that would have to be downloaded.
FAST = """
python() {
    case $1 in
    demo_*) command python "$@" --weights none --image_size 64 --max_steps 2 --workers 0 ;;
    *) command python "$@" ;;
    esac
}
"""


@pytest.mark.slow
def test_own_data_and_own_model_train_as_written(tmp_path):
    """The page's lines, and its line that loads a checkpoint into torchvision's own model."""
    for number, (name, count) in enumerate({"cat": 11, "dog": 6}.items()):
        write_images(tmp_path / "photos" / name, numbered(count), seed=number)
    shutil.copy(SCRIPT, tmp_path)
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    page = PAGES[RUNNING]
    (program,) = re.findall(r"^```python\n(.*?)^```$", page.text, re.MULTILINE | re.DOTALL)
    (tmp_path / "make_coco.py").write_text(program)
    own = [text for text in page.commands if '"${own[@]}"' in text]
    (load,) = [text for text in page.commands if "torch.load" in text]
    load = load.replace("coco.pt", "photos.pt")
    script = "\n".join(["set -euo pipefail", FAST, *own, load])
    with start(["bash", "-c", script], cwd=tmp_path) as started:
        run = started.finish(600)
    found = re.findall(r"Top-1: (\S+)% \| 5 images", run.out)  # every fifth of 11 and of 6
    assert len(found) == 6 and found[1] == found[2] and found[4] == found[5]
    assert run.out.count('"classes": 2') == 2
    assert run.json_line("Run")["parameters"] == 23_512_130  # ResNet-50 with two classes
    assert "<All keys matched successfully>" in run.out
