"""Bad input to the script: one clear line on stderr, an exit code, no hang, nothing left."""

from __future__ import annotations

import ast
import contextlib
import errno
import fcntl
import functools
import io
import json
import operator
import os
import pkgutil
import re
import runpy
import shlex
import shutil
import socket
import sys
import time
import unicodedata
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
from PIL import Image

import test_demo
from support.datasets import Payload, instances, make_set, truncate
from support.forks import Job, start, write
from support.processes import LONG, ROOT, SCRIPT, free_port, long_among, run_demo

FAST = [*test_demo.FAST, "--batch_size", "4", "--max_steps", "1"]


def without_fcntl(demo, result):
    """The script from its first line on, as Python starts it on Windows."""
    sys.modules["fcntl"] = None
    runpy.run_path(str(SCRIPT), run_name="__main__")


def elsewhere(demo, result, values=None, returns=None, raises=None, there=()):
    """The script's main on another machine: what these names are, return or raise there, and the
    files that are there besides.
    """
    exists = os.path.exists
    os.path.exists = lambda path: path in there or exists(path)
    for name, value in (values or {}).items():
        mock.patch(name, value).start()
    for name, value in (returns or {}).items():
        mock.patch(name, return_value=value).start()
    for name, (kind, *given) in (raises or {}).items():
        mock.patch(name, side_effect=pkgutil.resolve_name(kind)(*given)).start()
    start(demo)


def parsed(demo, result, lines):
    """Of what stands in each command line besides the data: the exit code, and what is said."""
    found = {}
    for line in lines:
        argv = ["--coco_image_path", "a", "--annotation_path", "b", *shlex.split(line)]
        code, said = 0, io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                demo.parse_arguments(argv)
        except SystemExit as end:
            code = end.code
        found[line] = code, said.getvalue()
    write(result, found)


def save_weights(demo, result, path, kind, marker=""):
    """A weights file that is of no use."""
    import torch
    from torchvision.models import resnet18

    good = resnet18(num_classes=80).state_dict()
    kinds = {
        "payload": {"conv1.weight": Payload(marker)},
        "other model": {"features.0.weight": torch.zeros(64, 3, 11, 11)},
        "other shape": good | {"conv1.weight": torch.zeros(64, 1, 7, 7)},
        "nan": good | {"fc.bias": torch.full((80,), torch.nan)},
    }
    torch.save(kinds[kind], path)


@pytest.fixture
def data(tmp_path) -> list[str]:
    """The options for a good data set; `refused` takes this list as a test has changed it."""
    return [*make_set(tmp_path, 8, val=8), *FAST]


@pytest.fixture
def refused(demo, data) -> Callable[..., Job]:
    """The script with the data set is refused: all ranks end by themselves, in time, with one line
    that has the words in it.

    others: a pattern of further lines that PyTorch itself may write to stderr.
    """

    def run(words, *more, nproc=1, code=1, others=None, within=30, **options) -> Job:
        job = demo.run([*data, *more], nproc, expect=None, **options)
        assert job.codes == [code] * nproc, job.tail()
        assert job.seconds < within
        line = error_line(job.output)
        rest = [other for other in job.err.split("\n") if other not in ("", line)]
        assert [x for x in rest if not (others and re.match(others, x))] == [], job.tail()
        assert "Traceback" not in job.output, job.tail()
        # Nothing in the output steers a terminal, or makes one line look as two.
        kinds = {unicodedata.category(c) for c in job.output.replace("\n", "")}
        assert not kinds & {"Cc", "Zl", "Zp"}, job.tail()
        for word in words:
            assert word in line, line
        assert len(line) < 700, line
        return job

    return run


def error_line(text: str) -> str:
    """The one line that a user reads; fails when there are several, or none."""
    found = [line for line in text.split("\n") if "ERROR: " in line or ": error: " in line]
    assert len(found) == 1, text[-4000:]
    form = r"\[(CPU|GPU) \d+\] ERROR: .*|demo_coco_resnet18\.py: error: .*"
    assert re.fullmatch(form, found[0]), found[0]
    return found[0]


# --- System ----------------------------------------------------------------------------------


def with_gpus(count: int) -> dict:
    return {"torch.cuda.is_available": count > 0, "torch.cuda.device_count": count}


def with_driver(visible: str | None, cuda: str | None, hip: str | None = None) -> dict:
    """The options for a machine with an NVIDIA driver that PyTorch cannot use."""
    return {
        "there": ["/dev/nvidiactl"],
        "returns": with_gpus(0),
        "values": {"torch.version.cuda": cuda, "torch.version.hip": hip},
        "env": {"CUDA_VISIBLE_DEVICES": visible},
    }


def library(name: str, version: str) -> dict:
    return {"values": {f"{name}.__version__": version}}


NO_KERNEL = "CUDA error: no kernel image is available for execution on the device"
HIDE = "or export CUDA_VISIBLE_DEVICES= to train on the CPU"
UNFIT: dict[str, tuple] = {
    # Not run on Windows: python demo_coco_resnet18.py --help.
    "Windows": ({"call": without_fcntl}, "Windows", "WSL2"),
    "torch": (library("torch", "2.10.1+cu128"), "torch 2.10.1", " 2.11: pip install --upgrade"),
    "torchvision": (library("torchvision", "0.25.0"), "torchvision 0.25.0", " 0.26: "),
    # Else a node with GPUs would train on its CPU, and the others would wait for it.
    "old driver": (with_driver(None, "13.0"), "driver", "CUDA 13.0", HIDE),
    "PyTorch without CUDA": (with_driver("0", None), "has no CUDA", "pytorch.org", HIDE),
    "GPU that this build was not made for": (
        {
            "returns": with_gpus(1) | {"torch.cuda.set_device": None},
            "raises": {"torch.ones": ["torch.AcceleratorError", NO_KERNEL]},
        },
        f"this build of PyTorch cannot use cuda:0: AcceleratorError: {NO_KERNEL}",
    ),
    # As with MIG, where torch counts more devices than it may use.
    "GPU that cannot be chosen": (
        {
            "returns": with_gpus(1),
            "raises": {"torch.cuda.set_device": ["builtins.RuntimeError", "CUDA error: ordinal"]},
        },
        "this build of PyTorch cannot use cuda:0: RuntimeError: CUDA error: ordinal",
    ),
}


@pytest.mark.parametrize("name", UNFIT)
def test_machine_that_cannot_run_the_script_is_one_line(refused, name):
    options, *words = UNFIT[name]
    refused(words, **{"call": elsewhere} | options)


@pytest.mark.parametrize(("visible", "hip"), [("", None), ("-1", None), (None, "6.4")])
def test_node_whose_gpus_are_hidden_trains_on_its_cpu(demo, data, visible, hip):
    job = demo.run(data, call=elsewhere, **with_driver(visible, None if hip else "13.0", hip))
    assert job.json_line("Run")["devices"], job.tail()


def test_more_processes_than_gpus(demo, data):
    job = demo.run(data, 2, expect=[1, 1], call=elsewhere, returns=with_gpus(1))
    (line,) = {re.sub(r"^\[\w+ \d\] ", "", line) for line in job.err.splitlines()}
    for word in ("ERROR: ", "2 processes", "1 GPU", "--backend gloo"):
        assert word in line


@pytest.mark.parametrize("version", ["2.11.0a0+git1234", "3.0.0", "unknown"])
def test_library_that_is_not_too_old_is_taken(demo, version):
    values = {"torch.__version__": version, "torchvision.__version__": "0.26.0+cpu"}
    assert demo.run(["--help"], call=elsewhere, values=values).out.startswith("usage: ")


def test_least_versions_are_the_same_in_all_places():
    least = re.search(r"(?m)^LEAST_TORCH, LEAST_TORCHVISION = (.*?)  #", SCRIPT.read_text())[1]
    torch, torchvision = (".".join(map(str, pair)) for pair in ast.literal_eval(least))
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"(torch {torch}, torchvision {torchvision} or newer)" in readme
    requirements = (ROOT / "requirements.txt").read_text()
    assert re.findall(r"(?m)^torch(?:vision)?>=(\S+)", requirements) == [torch, torchvision]


# --- Data ------------------------------------------------------------------------------------


def wrote(content: bytes) -> Callable[[Path], object]:
    """The annotation file holds this."""
    return lambda folder: (folder / "instances.json").write_bytes(content)


def put(place: str, value: object, name: str = "instances.json") -> Callable[[Path], object]:
    """A place in an annotation file, such as "images.0.id", has this value."""

    def spoil(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        *way, last = (int(key) if key.isdigit() else key for key in place.split("."))
        functools.reduce(operator.getitem, way, content)[last] = value
        (folder / name).write_text(json.dumps(content))

    return spoil


def remove(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def rename(name: str) -> Callable[[Path], object]:
    return put("images.0.file_name", name)


def truncate_all(folder: Path) -> None:
    for path in (folder / "images").iterdir():
        truncate(path)


VAL = "val_instances.json"
FILE = "/instances.json is no usable COCO instances file"
MANY = ["0000.jpg", "absent.jpg", *["0001.jpg"] * 200]  # more than a sample would find
DRAWS = "a\x1b[31m\n[CPU 0] ERROR: b\x9b2J\x85c\u2028d\r\0.jpg"
# How the data are spoilt, and words of the line.
SPOILT: dict[str, tuple] = {
    "half an annotation file": (wrote(b'{"images": ['), FILE),
    "deeply nested JSON": (wrote(b"[" * 200_000), FILE),
    "captions": (put("annotations", [{"id": 1, "image_id": 100, "caption": "a cat"}]), FILE),
    "image without a name": (put("images.0", {"id": 100}), FILE, "file_name"),
    "id of an image is a decimal": (put("images.0.id", 1.0), FILE, "integers"),
    "image of an annotation is a decimal": (put("annotations.0.image_id", 1.5), FILE, "integers"),
    "no labelled image": (put("annotations", []), FILE, "no image has an annotation"),
    "no categories": (put("categories", []), FILE, "it has no categories"),
    "unknown category": (put("annotations.3.category_id", 12), FILE, "unknown categories {12}"),
    "name leads out": (rename("a/../../x.jpg"), FILE, "a/../../x.jpg"),
    "name is absolute": (rename("/etc/hostname"), FILE, "/etc/hostname"),
    "missing image": (wrote(json.dumps(instances(MANY)).encode()), "absent.jpg", "images"),
    "name is empty": (rename(""), "images"),
    "name is not text": (rename("\udcff.jpg"), "images"),
    "name draws on the terminal": (rename(DRAWS), "a?[31m?[CPU 0] ERROR: b?2J?c?d??.jpg"),
    "truncated images": (truncate_all, "damaged"),
    "missing validation image": (remove("val_images/0003.jpg"), "0003.jpg", "val_images"),
    "validation of other categories": (put("annotations.0.category_id", 12, VAL), VAL, "12"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_spoilt_data_is_refused(tmp_path, refused, name):
    spoil, *words = SPOILT[name]
    spoil(tmp_path)
    refused(words)


@pytest.mark.parametrize(
    ("option", "what"),
    [
        ("--coco_image_path", "folder of images nowhere"),
        ("--annotation_path", "annotation file nowhere"),
        ("--val_annotation_path", "annotation file nowhere"),
        ("--weights", "weights file nowhere"),
    ],
)
def test_path_that_leads_nowhere_is_refused(refused, option, what):
    refused([what], option, "nowhere")


def test_the_data_set_is_good_unless_spoilt(demo, data):
    """Its images are as large as --image_size, and not smaller."""
    job = demo.run(data)
    assert job.json_line("Run")["images"] == 8
    assert "WARNING: the images are smaller" not in job.out


# --- Arguments -------------------------------------------------------------------------------

# Each is named in the line as it was given, or so.
WRONG: dict[str, list[str]] = {
    "--no_such_option": [],
    "--batch_size 0": [],
    "--batch_size many": [],
    "--num_epochs 0": [],
    "--max_steps 0": [],
    "--workers -1": [],
    "--seed -1": [],
    "--image_size 32": [],  # its last stage would be one pixel, too little for batch norm
    "--lr 0": [],
    "--lr nan": [],
    "--timeout 0": [],
    "--precision fp8": [],
    "--resume": ["--checkpoint"],
    "--val_image_path x": ["--val_image_path", "--val_annotation_path"],
    "--val_annotation_path x": ["--val_image_path", "--val_annotation_path"],
    "--batch_size '1\n[CPU 0] ERROR: 2\x1b[31m'": ["--batch_size", r"'1\n[CPU 0] ERROR: 2\x1b"],
}


@pytest.fixture(scope="module")
def said(demo) -> dict[str, list]:
    """What the script says of each of them, all in one process."""
    return demo.run(call=parsed, lines=[*WRONG]).result()


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_arguments_are_refused(said, wrong):
    code, text = said[wrong]
    assert code == 2 and text == error_line(text) + "\n" and text[:-1].isprintable()
    for word in WRONG[wrong] or wrong.split():
        assert word in text, text


def test_arguments_that_are_needed(refused, data):
    data[:] = ["--num_epochs", "1"]
    refused(["--coco_image_path", "--annotation_path"], code=2)


ON_A_MAC = {"call": elsewhere, "returns": {"torch.backends.mps.is_available": True}}


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("--global_batch_size 7 --accumulate_steps 2", {}, ["--global_batch_size 7", "2"]),
        ("--global_batch_size 5", {"nproc": 2}, ["--global_batch_size 5", "2"]),
        ("--grad_compression powersgd --precision fp16", {"nproc": 2}, ["PowerSGD", "fp16"]),
        ("--backend nccl", {}, ["--backend nccl", "GPU"]),
        ("--sync_bn", {}, ["--sync_bn", "GPUs"]),
        ("--device mps", {}, ["--device mps", "Mac"]),
        ("--device mps", ON_A_MAC | {"nproc": 2}, ["--device mps takes one process, not 2"]),
        ("--device mps --grad_compression fp16", ON_A_MAC, ["--grad_compression", "--device mps"]),
    ],
)
def test_arguments_that_do_not_suit_are_refused(refused, text, options, words):
    job = refused(words, *text.split(), **options)
    assert "One process" not in job.out


# --- Weights ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("other model", ["weights.pt", "ResNet-18"]),
        ("other shape", ["weights.pt", "conv1.weight"]),
        ("nan", ["step 1", "finite"]),
    ],
)
def test_useless_weights_are_refused(demo, tmp_path, refused, kind, words):
    file = tmp_path / "weights.pt"
    demo.run(call=save_weights, path=str(file), kind=kind)
    refused(words, "--weights", file)


@pytest.mark.parametrize("cached", [False, True])
def test_code_in_a_weights_file_is_not_run(demo, tmp_path, refused, cached):
    """Nor in the cached one: only a file that has just been fetched is held against its hash."""
    marker = tmp_path / "was-run"
    file = tmp_path / "hub" / "checkpoints" / "resnet18-f37072fd.pth"
    file.parent.mkdir(parents=True)
    demo.run(call=save_weights, path=str(file), kind="payload", marker=str(marker))
    words = ["no ImageNet weights", "Weights only"] if cached else [file.name]
    weights = "imagenet" if cached else file
    refused(words, "--weights", weights, env={"TORCH_HOME": str(tmp_path)})
    assert not marker.exists()


def test_imagenet_weights_without_a_network(tmp_path, refused):
    """The line names the file to fetch, and the folder where this machine looks for it."""
    proxy = f"http://127.0.0.1:{free_port()}"  # nobody answers there
    env = {"TORCH_HOME": str(tmp_path), "no_proxy": "", "NO_PROXY": ""}
    env |= {name: proxy for name in ("https_proxy", "HTTPS_PROXY", "http_proxy", "all_proxy")}
    url = "https://download.pytorch.org/models/resnet18-f37072fd.pth"
    refused([f"{tmp_path}/hub/checkpoints", url], "--weights", "imagenet", nproc=2, env=env)


# --- Ranks -----------------------------------------------------------------------------------


def test_error_of_all_ranks_is_in_the_error_file_of_each(tmp_path, refused):
    """Though rank 0 alone logs it: torchrun asks the process that ends first."""
    paths = [tmp_path / f"error{rank}.json" for rank in (0, 1)]
    files = [{"env": {"TORCHELASTIC_ERROR_FILE": str(path)}} for path in paths]
    argv = ["--annotation_path", "none.json"]
    job = refused(["[CPU 0] ", "none.json"], *argv, nproc=2, of_rank=lambda rank: files[rank])
    assert "[CPU 1]" not in job.output
    for rank, path in enumerate(paths):
        message = json.loads(path.read_text())["message"]
        assert message["extraInfo"]["rank"] == rank and message["extraInfo"]["kind"] == "user"
        assert re.match(rf"\[CPU {rank}\] ERROR: .*none\.json", message["message"])


@pytest.fixture
def views(tmp_path, data) -> list[Path]:
    """Folders of two nodes with the same images, which a relative path finds."""
    data += ["--coco_image_path", "images"]
    folders = [tmp_path / f"node{rank}" for rank in (0, 1)]
    for folder in folders:
        shutil.copytree(tmp_path / "images", folder / "images")
    return folders


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (remove("images/0005.jpg"), ["0005.jpg"]),
        (
            lambda view: Image.new("RGB", (40, 48)).save(view / "images" / "0005.jpg"),
            ["sizes of the images: ", " here, ", "on rank 0"],
        ),
    ],
    ids=["image missing", "another picture"],
)
def test_node_with_other_images_is_refused(views, refused, spoil, words):
    spoil(views[1])
    refused([*words, "rank 1"], nproc=2, of_rank=lambda rank: {"cwd": views[rank]})


def test_node_of_truncated_images_ends_the_run(demo, data, views):
    """Their headers are whole: the first steps find out."""
    for path in (views[1] / "images").iterdir():
        path.write_bytes(path.read_bytes()[: path.stat().st_size * 4 // 5])
    job = demo.run(data, 2, expect=[1, 1], of_rank=lambda rank: {"cwd": views[rank]})
    (line,) = set(job.err.splitlines())
    assert re.fullmatch(r"\[CPU 0\] ERROR: \d images are damaged, over 1%: repair them", line)
    assert "Summary" not in job.out
    assert "[CPU 1] WARNING: image " in job.out and "[CPU 0] WARNING" not in job.out


FULL = "CUDA out of memory. Tried to allocate 20.00 MiB."
NCCL = "NCCL error in: NCCLUtils.cpp:94, unhandled system error\nLast error:\nNo space (28)"


@pytest.mark.parametrize(
    ("place", "error", "kind", "line"),
    [
        (
            "demo.train_step",
            ["torch.OutOfMemoryError", FULL],
            "user",
            f"in step 1: {FULL} Give less than the present --batch_size 4",
        ),
        (
            "demo.dist.init_process_group",
            ["torch.distributed.DistBackendError", NCCL],
            "lost",
            "NCCL: No space (28)",
        ),
    ],
    ids=["full GPU", "NCCL"],
)
def test_error_of_pytorch_is_told_in_few_words(tmp_path, refused, place, error, kind, line):
    file = tmp_path / "error.json"
    env = {"TORCHELASTIC_ERROR_FILE": str(file)}
    job = refused([], env=env, call=elsewhere, raises={place: error})
    assert error_line(job.output) == f"[CPU 0] ERROR: {line}"
    assert json.loads(file.read_text())["message"]["extraInfo"]["kind"] == kind


# PyTorch's C++ part adds warnings of its own: [W1120 ...] The client socket has timed out.
OF_PYTORCH = r"\[[WE]\d+ |Exception raised from |frame #|<omitting python frames>"
FIRST_OF_TWO = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
FIRST_OF_TWO |= {"MASTER_ADDR": "127.0.0.1"}
PLACES = {
    "rank is not a number": ({"RANK": "first"}, ["torchrun", "RANK"]),
    "rank out of range": ({"RANK": "3"}, ["RANK 3", "WORLD_SIZE"]),
    "no local rank": ({"LOCAL_RANK": None}, ["torchrun", "LOCAL_RANK"]),
    "no master": ({"MASTER_ADDR": None}, ["export MASTER_ADDR="]),
    "master has no address": ({"MASTER_ADDR": "no-such-host.invalid", "RANK": "1"}, ["no-such"]),
    "nobody joins rank 0": ({}, ["127.0.0.1", "rendezvous"]),
}


@pytest.mark.parametrize("name", long_among(PLACES, ["master has no address"]))
def test_wrong_place_among_the_ranks_is_refused(refused, name):
    change, words = PLACES[name]
    env = FIRST_OF_TWO | {"MASTER_PORT": str(free_port())} | change
    refused(words, "--timeout", 1, others=OF_PYTORCH, within=1 + 10, env=env)


def test_port_that_is_taken(refused):
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = str(taken.getsockname()[1])
        env = FIRST_OF_TWO | {"MASTER_PORT": port}
        refused(["127.0.0.1", port], "--timeout", 3, others=OF_PYTORCH, env=env)


def test_one_process_a_node_needs_no_local_rank(demo, data):
    """As in the pods of a Kubernetes job. Here both are on one node, which is said."""
    unset = {"LOCAL_RANK": None, "LOCAL_WORLD_SIZE": None, "GLOO_SOCKET_IFNAME": "lo"}
    job = demo.run(data, 2, env=unset, call=test_demo.run_record)
    facts = job.json_line("Run")
    assert (facts["launcher"], facts["nodes"], facts["world_size"]) == ("environment", 2, 2)
    told = [line for line in job.lines(0) if "LOCAL_RANK" in line]
    assert told[0].startswith("LOCAL_RANK is not set: ") and len(told) == 2
    assert told[1].startswith("WARNING: 2 processes are on ")
    assert "[CPU 0] Run: 2 processes on 2 nodes, gloo" in job.out


# --- Locks -----------------------------------------------------------------------------------


def failing_locks(number: int) -> dict:
    """The options for a file system whose locks end with this error."""
    error = ["builtins.OSError", number, os.strerror(number)]
    return {"call": elsewhere, "raises": {"fcntl.lockf": error}}


def test_checkpoint_where_no_file_can_be_locked_is_one_warning(demo, data, tmp_path):
    checkpoint = tmp_path / "c.pt"
    job = demo.run([*data, "--checkpoint", checkpoint], **failing_locks(errno.ENOLCK))
    (line,) = (line for line in job.lines() if "WARNING" in line)
    assert re.match(r"\[CPU 0\] WARNING: checkpoint .*c\.pt cannot be locked \(", line), line
    assert checkpoint.exists()


@pytest.mark.parametrize("options", [{}, failing_locks(errno.EACCES)], ids=["locked", "EACCES"])
def test_checkpoint_of_another_run_is_refused(tmp_path, refused, options):
    with (tmp_path / "c.pt.lock").open("w") as other:
        fcntl.lockf(other, fcntl.LOCK_EX)
        words = ["c.pt", "in use by another run"]
        refused(words, "--checkpoint", tmp_path / "c.pt", **options)
    assert not (tmp_path / "c.pt").exists()


# --- Pictures --------------------------------------------------------------------------------


def test_picture_that_would_fill_the_memory_is_refused(demo, tmp_path):
    """300 MB as RGB. Pillow by itself would only warn."""
    path = tmp_path / "bomb.png"
    Image.new("1", (10_000, 10_000)).save(path)
    assert path.stat().st_size < 100_000
    job = demo.run(call=test_demo.brightness, paths=[str(path)])
    sound, means, used = job.result()
    assert (sound, means) == ([False], [0]) and used < 64 * 2**20
    assert job.seconds < 5


def test_images_smaller_than_image_size_are_one_warning(demo, data):
    """They have 48 x 40 pixels, made for 40, say; it is no error."""
    job = demo.run([*data, "--image_size", 41], 2, call=test_demo.run_record)
    found = [line for line in job.lines() if "WARNING" in line]
    wanted = "[CPU 0] WARNING: the images are smaller than --image_size: made for another one?"
    assert found == [wanted]


# --- As a user starts it ---------------------------------------------------------------------


@LONG
def test_torchrun_ends_all_ranks_with_one_line(data):
    run = run_demo([*data, "--coco_image_path", "nowhere"], 2, expect=1, split=True)
    # torchrun's own report at the end repeats what each rank has left in its error file
    report = re.findall(r"(?m)^  traceback : (.*)\n", run.err)
    text = re.sub(r"(?m)^  traceback : .*\n", "", run.out + run.err)
    assert "nowhere" in error_line(text)
    assert report and all("] ERROR: " in line and "nowhere" in line for line in report)
    cause = run.err[run.err.index("Root Cause") :]
    assert re.search(r"traceback : \[CPU [01]\] ERROR: .*nowhere", cause)
    assert re.search(r"error_file: /.*/error\.json", cause)
    assert re.search(rf"time +: {time.strftime('%Y-')}", cause)  # the file's own, of seconds
    # its own error alone, of a child that failed, and none in reading the file
    assert re.findall(r"(?m)^(?:\w+\.)*(\w+Error)\b", run.err) == ["ChildFailedError"], run.err
    # torchrun adds a report, with the traceback of its own code, but none of the script's.
    assert f'File "{SCRIPT}"' not in run.out + run.err
    assert run.seconds < 30 + 10  # the second is what torchrun may take to start


def test_tmpdir_too_long_for_the_sockets_of_workers(refused, tmp_path):
    """Without the check a worker fails in a thread of its own and the run waits for ever."""
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    job = refused(["TMPDIR"], "--workers", 1, env={"TMPDIR": str(folder)})
    assert job.err.endswith("export TMPDIR=/tmp\n")
