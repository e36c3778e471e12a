"""Bad input to the script: one clear line on stderr, an exit code, no hang, nothing left."""

from __future__ import annotations

import ast
import contextlib
import errno
import fcntl
import json
import os
import pickle
import re
import runpy
import shlex
import shutil
import socket
import struct
import sys
import time
import unicodedata
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from PIL import Image

import test_demo
from support.datasets import Payload, instances, numbered, truncate, write_images
from support.forks import Job, start
from support.processes import LONG, ROOT, SCRIPT, free_port, long, long_among, run_demo

FAST = [*test_demo.FAST, "--batch_size", "4", "--max_steps", "1"]


def as_a_program(demo, result, missing=(), versions=None):
    """The script from its first line on, as Python starts it, with other libraries around it."""
    for name in missing:
        sys.modules[name] = None
    for name, version in (versions or {}).items():
        sys.modules[name].__version__ = version
    runpy.run_path(str(SCRIPT), run_name="__main__")


def driver_without_gpu(demo, result, visible, cuda, hip):
    """The script's main on a machine with an NVIDIA driver that PyTorch cannot use."""
    import torch

    exists = os.path.exists
    os.path.exists = lambda path: path == "/dev/nvidiactl" or exists(path)
    torch.cuda.is_available = lambda: False
    torch.version.cuda, torch.version.hip = cuda, hip
    os.environ.pop("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    start(demo)


def raise_in(demo, result, name, text):
    """The script's main, with an error of PyTorch's raised where it comes up."""
    import torch

    def broken(*_, **__):
        raise kind(text)

    place, kind = {
        "train_step": (demo, torch.OutOfMemoryError),
        "init_process_group": (demo.dist, demo.dist.DistBackendError),
    }[name]
    setattr(place, name, broken)
    start(demo)


def pretend_mac(demo, result):
    """The script's main on a machine that says it has a Mac's GPU."""
    import torch

    torch.backends.mps.is_available = lambda: True
    start(demo)


def lockf_fails(demo, result, number):
    """The script's main with a file system whose locks end with this error."""

    def lockf(*_):
        raise OSError(number, os.strerror(number))

    demo.fcntl.lockf = lockf
    start(demo)


def pretend_gpus(demo, result, count):
    """The script's main on a machine that says it has `count` GPUs."""
    import torch

    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: count
    start(demo)


def gpu_without_kernels(demo, result):
    """The script's main with one GPU, of an architecture that this build of PyTorch lacks."""
    import torch

    ones = torch.ones

    def on_device(*size, device=None, **options):
        if getattr(device, "type", "cpu") == "cuda":
            text = "CUDA error: no kernel image is available for execution on the device"
            raise torch.AcceleratorError(text)
        return ones(*size, device=device, **options)

    torch.ones, torch.cuda.set_device = on_device, lambda _: None
    pretend_gpus(demo, result, 1)


def save_file(demo, result, path, kind, marker=""):
    """A weights file of a kind that is of no use."""
    import torch
    from torchvision.models import resnet18

    whole = {
        "payload": {"conv1.weight": Payload(marker)},
        "tensor": torch.zeros(3),
        "list": [torch.zeros(3)],
        "numbers for names": {1: torch.zeros(3)},
        "model is a list": {"model": [1, 2]},
        "other model": {"features.0.weight": torch.zeros(64, 3, 11, 11)},
    }
    in_a_good_file = {
        "no tensor": {"conv1.weight": "text"},
        "number for fc.bias": {"fc.bias": 3},
        "0-d fc.bias": {"fc.bias": torch.zeros(())},
        "other shape": {"conv1.weight": torch.zeros(64, 1, 7, 7)},
        "nan": {"fc.bias": torch.full((80,), torch.nan)},
    }
    if kind in in_a_good_file:
        whole[kind] = resnet18(num_classes=80).state_dict() | in_a_good_file[kind]
    torch.save(whole[kind], path)


class Data:
    """A good data set of eight images, to be spoilt: `content`, the files or `options`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.images, self.val_images = folder / "images", folder / "val_images"
        self.file, self.val_file = folder / "instances.json", folder / "val.json"
        names = numbered(8)
        for images in (self.images, self.val_images):
            write_images(images, names)
        self.content, self.val_content = instances(names), instances(names)
        self.options = {"coco_image_path": self.images, "annotation_path": self.file}
        self.raw: bytes | None = None  # in place of the annotation file's JSON

    def rename(self, name: str) -> None:
        """The first image has this name in the annotation file."""
        self.content["images"][0]["file_name"] = name

    def with_val(self) -> None:
        self.options |= {"val_image_path": self.val_images, "val_annotation_path": self.val_file}

    def each(self, spoil: Callable[[Path], object]) -> None:
        for path in self.images.iterdir():
            spoil(path)

    def argv(self) -> list[str]:
        if self.file.parent.is_dir() and not self.file.is_dir():
            self.file.write_bytes(self.raw or json.dumps(self.content).encode())
        self.val_file.write_text(json.dumps(self.val_content))
        given = [(f"--{name}", str(value)) for name, value in self.options.items()]
        return [part for pair in given for part in pair]


@pytest.fixture
def data(tmp_path) -> Data:
    return Data(tmp_path)


@pytest.fixture
def refused(demo, data) -> Callable[..., str]:
    """The script with the data set is refused, in one line that has the words in it."""

    def run(words, *more, nproc=1, code=1, others=None, within=30, **options) -> str:
        job = demo.run([*data.argv(), *FAST, *more], nproc, expect=None, **options)
        return assert_refused(job, words, code, others, within)

    return run


def error_line(text: str) -> str:
    """The one line that a user reads; fails when there are several, or none."""
    found = [line for line in text.split("\n") if "ERROR: " in line or ": error: " in line]
    assert len(found) == 1, text[-4000:]
    form = r"\[(CPU|GPU) \d+\] ERROR: .*|demo_coco_resnet18\.py: error: .*"
    assert re.fullmatch(form, found[0]), found[0]
    return found[0]


def assert_refused(
    job: Job,
    words: Sequence[str],
    code: int = 1,
    others: str | None = None,
    within: float = 30,
) -> str:
    """All ranks ended by themselves, in time, with one line that has the `words` in it.

    others: a pattern of further lines that PyTorch itself may write to stderr.
    """
    assert job.codes == [code] * len(job.codes), job.tail()
    assert job.seconds < within
    line = error_line(job.output)
    rest = [other for other in job.err.split("\n") if other not in ("", line)]
    assert [other for other in rest if not (others and re.match(others, other))] == [], job.tail()
    assert "Traceback" not in job.output, job.tail()
    assert_clean(job)
    for word in words:
        assert word in line, line
    assert len(line) < 700, line
    return line


def assert_clean(job: Job) -> None:
    """Nothing in the output steers a terminal, or makes one line look as two."""
    text = (job.output).replace("\n", "")
    assert {c for c in text if unicodedata.category(c) in ("Cc", "Zl", "Zp")} == set()


# --- System ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        # Windows: its Python has no fcntl. Not run there: python demo_coco_resnet18.py --help.
        ({"missing": ["fcntl"]}, ["Windows", "WSL2"]),
        (
            {"versions": {"torch": "2.10.1+cu128"}},
            ["torch 2.10.1", " 2.11: ", "pip install --upgrade"],
        ),
        ({"versions": {"torch": "1.13.0"}}, ["torch 1.13.0", " 2.11: "]),
        ({"versions": {"torchvision": "0.25.0"}}, ["torchvision 0.25.0", " 0.26: "]),
    ],
    ids=str,
)
def test_system_that_lacks_something_is_one_line(refused, options, words):
    refused(words, call=as_a_program, **options)


@pytest.mark.parametrize("version", ["2.11.0a0+git1234", "2.11.0", "3.0.0", "unknown"])
def test_library_that_is_not_too_old_is_taken(demo, version):
    versions = {"torch": version, "torchvision": "0.26.0+cpu"}
    job = demo.run(["--help"], call=as_a_program, versions=versions)
    assert job.out.startswith("usage: ")


def test_least_versions_are_the_same_in_all_places():
    least = re.search(r"(?m)^LEAST_TORCH, LEAST_TORCHVISION = (.*?)  #", SCRIPT.read_text())[1]
    torch, torchvision = (".".join(map(str, pair)) for pair in ast.literal_eval(least))
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"(torch {torch}, torchvision {torchvision} or newer)" in readme
    requirements = (ROOT / "requirements.txt").read_text()
    assert re.findall(r"(?m)^torch(?:vision)?>=(\S+)", requirements) == [torch, torchvision]


# --- Data ------------------------------------------------------------------------------------


def drop(part: str, key: str | None = None) -> Callable[[Data], object]:
    """Take a part out of the annotation file, or a key out of each of its items."""

    def spoil(data: Data) -> None:
        if key is None:
            del data.content[part]
        else:
            for item in data.content[part]:
                del item[key]

    return spoil


def put(path: str, value: object) -> Callable[[Data], object]:
    """Set a place in the annotation file, such as "images.0.id"."""

    def spoil(data: Data) -> None:
        *way, last = (int(key) if key.isdigit() else key for key in path.split("."))
        place = data.content
        for key in way:
            place = place[key]
        place[last] = value

    return spoil


def raw(content: bytes) -> Callable[[Data], object]:
    return lambda data: setattr(data, "raw", content)


def options(**values: object) -> Callable[[Data], object]:
    return lambda data: data.options.update({k: data.folder / str(v) for k, v in values.items()})


def rename(name: str) -> Callable[[Data], object]:
    return lambda data: data.rename(name)


def each(spoil: Callable[[Path], object]) -> Callable[[Data], object]:
    return lambda data: data.each(spoil)


def with_val(spoil: Callable[[Data], object]) -> Callable[[Data], object]:
    return lambda data: (data.with_val(), spoil(data))


def too_many_categories(data: Data) -> None:
    data.content["categories"].append({"id": 91, "name": "one more"})


def captions(data: Data) -> None:
    data.content = {
        "images": data.content["images"],
        "annotations": [{"id": 1, "image_id": 100, "caption": "a picture"}],
    }


def panoptic(data: Data) -> None:
    segments = [{"id": 1, "category_id": 1}]
    data.content["annotations"] = [{"image_id": 100, "segments_info": segments}]


def missing_among_many(data: Data) -> None:
    names = ["0000.jpg", "absent.jpg", *["0001.jpg"] * 200]  # more than a sample would find
    data.content = instances(names)


def unlisted(data: Data) -> None:
    (data.val_images / "0003.jpg").unlink()


# How the data are spoilt, and words of the line.
SPOILT: dict[str, tuple] = {
    "no image folder": (options(coco_image_path="nowhere"), "nowhere"),
    "image folder is a file": (options(coco_image_path="val.json"), "val.json"),
    "no annotation file": (options(annotation_path="none.json"), "annotation", "none.json"),
    "annotation file is a folder": (options(annotation_path="images"), "annotation", "images"),
    "empty annotation file": (raw(b" "), "instances.json"),
    "half an annotation file": (raw(b'{"images": ['), "instances.json"),
    "picture as annotation file": (raw(b"\xff\xd8\xff\xe0\0"), "instances.json"),
    "deeply nested JSON": (raw(b"[" * 200_000), "instances.json"),
    "JSON list": (raw(b"[1, 2]"), "instances.json", "instances file"),
    "JSON number": (raw(b"1"), "instances.json", "instances file"),
    "JSON null": (raw(b"null"), "instances.json", "instances file"),
    "JSON without anything": (raw(b"{}"), "instances.json", "instances file"),
    "captions": (captions, "instances.json", "instances file"),
    "panoptic": (panoptic, "instances.json", "instances file"),
    "no categories": (drop("categories"), "instances.json", "categories"),
    "no images": (drop("images"), "instances.json", "instances file"),
    "no annotations": (drop("annotations"), "instances.json"),
    "images without names": (drop("images", "file_name"), "instances.json", "file_name"),
    "images without ids": (drop("images", "id"), "instances.json", "id"),
    "annotations without images": (drop("annotations", "image_id"), "instances.json"),
    "annotations are null": (put("annotations", None), "instances.json"),
    "images are numbers": (put("images", [1, 2]), "instances.json"),
    "name is a number": (put("images.0.file_name", 5), "instances.json"),
    "id is a list": (put("images.0.id", [1]), "instances.json"),
    "id of an image is a decimal": (put("images.0.id", 1.0), "instances.json", "integers"),
    "image of an annotation is a decimal": (
        put("annotations.0.image_id", 1.5),
        "instances.json",
        "integers",
    ),
    "category of an annotation is a decimal": (
        put("annotations.0.category_id", 1.0),
        "instances.json",
        "unknown categories",
    ),
    "id of a category is a decimal": (put("categories.0.id", 1.0), "instances.json"),
    "category is a list": (put("annotations.0.category_id", [1]), "instances.json"),
    "category ids of two kinds": (put("categories.0.id", "1"), "instances.json"),
    "no labelled image": (put("annotations", []), "instances.json", "annotation"),
    "81 categories": (too_many_categories, "instances.json", "81", "80"),
    "unknown category": (put("annotations.3.category_id", 12), "instances.json", "12"),
    "name leads out": (rename("../instances.json"), "../instances.json"),
    "name leads out later": (rename("a/../../x.jpg"), "a/../../x.jpg"),
    "name is absolute": (rename("/etc/hostname"), "/etc/hostname"),
    "missing image": (rename("absent.jpg"), "absent.jpg", "images"),
    "missing image among many": (missing_among_many, "absent.jpg", "images"),
    "name is empty": (rename(""), "images"),
    "name with a NUL": (rename("00\0.jpg"), "00?.jpg"),
    "name is not text": (rename("\udcff.jpg"), "images"),
    "name is half a character": (rename("\ud800.jpg"), "instances.json"),
    "name draws on the terminal": (rename("a\x1b[31m\n[CPU 0] ERROR: b\x9b2J\x85c"), "a?[31m?"),
    "truncated images": (each(truncate), "damaged"),
    "empty images": (each(lambda path: path.write_bytes(b"")), "damaged"),
    "text files as images": (each(lambda path: path.write_text("no picture")), "damaged"),
    "folders as images": (each(lambda path: (path.unlink(), path.mkdir())), "damaged"),
    "no validation folder": (with_val(options(val_image_path="nowhere")), "nowhere"),
    "no validation file": (with_val(options(val_annotation_path="none.json")), "none.json"),
    "missing validation image": (with_val(unlisted), "0003.jpg", "val_images"),
    "validation of other categories": (
        with_val(lambda data: data.val_content["annotations"][0].update(category_id=12)),
        "val.json",
        "12",
    ),
}


# These take the same way through the script as others do.
ALIKE = ["image folder is a file", "annotation file is a folder", "picture as annotation file"]
ALIKE += ["empty annotation file", "JSON number", "JSON null", "captions", "no images"]
ALIKE += ["no annotations", "images without ids", "annotations without images"]
ALIKE += ["images are numbers", "id is a list", "category is a list", "name leads out later"]
ALIKE += ["missing image among many", "name is half a character", "empty images"]
ALIKE += ["text files as images", "folders as images", "no validation folder"]


@pytest.mark.parametrize("name", long_among(SPOILT, ALIKE))
def test_spoilt_data_is_refused(data, refused, name):
    spoil, *words = SPOILT[name]
    spoil(data)
    refused(words)


def test_the_data_set_is_good_unless_spoilt(demo, data):
    data.with_val()
    assert demo.run([*data.argv(), *FAST]).json_line("Run")["images"] == 8


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
@pytest.mark.parametrize("name", ["instances.json", "weights.pt", "images"])
def test_what_the_user_may_not_read_is_refused(demo, data, name):
    argv, path = [*data.argv(), *FAST], data.folder / name
    if name == "weights.pt":
        path.touch()
        argv += ["--weights", path]
    path.chmod(0)
    try:
        job = demo.run(argv, expect=None)
    finally:
        path.chmod(0o700)
    assert_refused(job, ["images"] if name == "images" else [name, "Permission"])


# --- Arguments -------------------------------------------------------------------------------

# Each is named in the line as it was given.
WRONG = [
    "--no_such_option",
    "--batch_size 0",
    "--batch_size many",
    "--accumulate_steps 1.5",
    "--image_size 4",
    "--lr 0",
    "--lr nan",
    "--precision fp8",
    "--resume",
    "--val_image_path x",
    "--batch_size $'1\\n[CPU 0] ERROR: 2\\x1b[31m'",
]
# A second wrong value of an option, or an option of the same kind.
MORE_WRONG = ["--batch_size -3", "--batch_size", "--num_epochs 0", "--max_steps 0", "--workers -1"]
MORE_WRONG += ["--seed -1", "--lr inf", "--timeout 0", "--backend smoke", "--backend mpi"]
MORE_WRONG += ["--val_annotation_path x"]
ALSO_NAMED = {
    "--resume": ["--checkpoint"],
    "--val_image_path x": ["--val_annotation_path"],
    "--val_annotation_path x": ["--val_image_path"],
}
UNSUITED = {
    "--global_batch_size 7 --accumulate_steps 2": ["--global_batch_size 7", "2"],
    "--backend nccl": ["--backend nccl", "GPU"],
    "--sync_bn": ["--sync_bn", "GPUs"],
    "--device mps": ["--device mps", "Mac"],
}


def parse(text: str) -> list[str]:
    quoted = re.search(r"\$'(.*)'", text)  # as bash writes control characters
    if not quoted:
        return shlex.split(text)
    return [*shlex.split(text[: quoted.start()]), quoted[1].encode().decode("unicode_escape")]


@pytest.mark.parametrize("text", [*WRONG, *long(*MORE_WRONG)])
def test_wrong_arguments_are_refused(refused, text):
    option, *value = text.split()
    named = value if value and not value[0].startswith(("$", "x")) else []
    refused([option, *named, *ALSO_NAMED.get(text, [])], *parse(text), code=2)


def test_arguments_that_are_needed(demo):
    job = demo.run(["--num_epochs", 1], expect=None)
    assert_refused(job, ["--coco_image_path", "--annotation_path"], code=2)


@pytest.mark.parametrize("text", UNSUITED)
def test_arguments_that_do_not_suit_are_refused(refused, text):
    refused(UNSUITED[text], *shlex.split(text))


def test_batch_that_two_ranks_cannot_share(refused):
    refused(["--global_batch_size 5", "2"], "--global_batch_size", 5, nproc=2)


def test_smallest_images(demo, data, refused):
    """At 32 pixels the last stage is one pixel, from which batch norm learns nothing in a batch of
    one: that is refused. The smallest size that is not, trains.
    """
    more = ["--batch_size", 1, "--image_size"]
    refused(["--image_size"], *more, 32, code=2)
    demo.run([*data.argv(), *FAST, *more, 33])


# --- Weights ---------------------------------------------------------------------------------

WEIGHTS = {
    "tensor": ["weights.pt"],
    "no tensor": ["weights.pt"],
    "other shape": ["weights.pt", "conv1.weight"],
    "nan": ["step 1", "finite"],
    "other model": ["weights.pt", "ResNet-18"],
}
# As a tensor is: no state dict. As what is no tensor: a bad value.
ALIKE_WEIGHTS = ["list", "numbers for names", "model is a list", "number for fc.bias"]
ALIKE_WEIGHTS += ["0-d fc.bias"]


@pytest.mark.parametrize("kind", [*long_among(WEIGHTS, ["other model"]), *long(*ALIKE_WEIGHTS)])
def test_useless_weights_are_refused(demo, data, refused, kind):
    file = data.folder / "weights.pt"
    demo.run(call=save_file, path=str(file), kind=kind)
    refused(WEIGHTS.get(kind, ["weights.pt"]), "--weights", file)


@pytest.mark.parametrize("content", [None, b"PK\3\4 half a file", *long(b"", b"text", Path.mkdir)])
def test_weights_file_that_cannot_be_read_is_refused(data, refused, content):
    file = data.folder / "weights.pt"
    if callable(content):
        content(file)
    elif content is not None:
        file.write_bytes(content)
    refused(["weights.pt"], "--weights", file)


@pytest.mark.parametrize("kind", ["torch.save", "cached", *long("pickle")])
def test_code_in_a_weights_file_is_not_run(demo, data, refused, kind):
    """Nor in the cached one: only a file that has just been fetched is held against its hash."""
    marker = data.folder / "was-run"
    file = data.folder / "hub" / "checkpoints" / "resnet18-f37072fd.pth"
    file.parent.mkdir(parents=True)
    if kind == "pickle":
        file.write_bytes(pickle.dumps({"conv1.weight": Payload(marker)}, protocol=2))
    else:
        demo.run(call=save_file, path=str(file), kind="payload", marker=str(marker))
    if kind == "cached":
        words, weights = ["no ImageNet weights", "Weights only"], "imagenet"
    else:
        words, weights = [file.name], file
    refused(words, "--weights", weights, env={"TORCH_HOME": str(data.folder)})
    assert not marker.exists()


@pytest.mark.parametrize("cached", [None, *long(b"half a file")])
def test_imagenet_weights_without_a_network(data, refused, cached):
    """The line names the file to fetch, and the folder where this machine looks for it."""
    cache = data.folder / "home" / "hub" / "checkpoints"
    if cached:
        cache.mkdir(parents=True)
        (cache / "resnet18-f37072fd.pth").write_bytes(cached)
    proxy = f"http://127.0.0.1:{free_port()}"  # nobody answers there
    env = {"TORCH_HOME": str(data.folder / "home"), "no_proxy": "", "NO_PROXY": ""}
    env |= {name: proxy for name in ("https_proxy", "HTTPS_PROXY", "http_proxy", "all_proxy")}
    words = [str(cache), "resnet18-f37072fd.pth"]
    if not cached:
        words.append("https://download.pytorch.org/models/resnet18-f37072fd.pth")
    refused(words, "--weights", "imagenet", nproc=2, env=env)


# --- Ranks -----------------------------------------------------------------------------------


def test_error_of_all_ranks_is_in_the_error_file_of_each(data, refused):
    """Though rank 0 alone logs it: torchrun asks the process that ends first."""
    data.options["annotation_path"] = data.folder / "none.json"
    paths = [data.folder / f"error{rank}.json" for rank in (0, 1)]
    files = [{"env": {"TORCHELASTIC_ERROR_FILE": str(path)}} for path in paths]
    line = refused(["none.json"], nproc=2, of_rank=lambda rank: files[rank])
    assert line.startswith("[CPU 0] ERROR: ")
    for rank, path in enumerate(paths):
        message = json.loads(path.read_text())["message"]
        assert message["extraInfo"]["rank"] == rank and message["extraInfo"]["kind"] == "user"
        assert re.match(rf"\[CPU {rank}\] ERROR: .*none\.json", message["message"])


def two_views(data: Data) -> list[Path]:
    """Folders of two nodes with the same images, which a relative path finds."""
    views = [data.folder / f"node{rank}" for rank in (0, 1)]
    for view in views:
        shutil.copytree(data.images, view / "images")
    data.options["coco_image_path"] = Path("images")
    return views


OTHER_SIZES = ["sizes of the images: ", " here, ", "on rank 0"]


def another_picture(view: Path) -> None:
    Image.new("RGB", (40, 48)).save(view / "images" / "0005.jpg")


def empty_images(view: Path) -> None:
    for path in (view / "images").iterdir():
        path.write_bytes(b"")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        pytest.param(lambda view: shutil.rmtree(view / "images"), ["images"], marks=LONG),
        (lambda view: (view / "images" / "0005.jpg").unlink(), ["0005.jpg"]),
        pytest.param(empty_images, OTHER_SIZES, marks=LONG),
        (another_picture, OTHER_SIZES),
    ],
    ids=["folder missing", "image missing", "all empty", "another picture"],
)
def test_node_with_other_images_is_refused(data, refused, spoil, words):
    views = two_views(data)
    spoil(views[1])
    refused([*words, "rank 1"], nproc=2, of_rank=lambda rank: {"cwd": views[rank]})


def test_node_of_truncated_images_ends_the_run(demo, data):
    """Their headers are whole: the first steps find out."""
    views = two_views(data)
    for path in (views[1] / "images").iterdir():
        path.write_bytes(path.read_bytes()[: path.stat().st_size * 4 // 5])
    argv = [*data.argv(), *FAST]
    job = demo.run(argv, 2, expect=None, of_rank=lambda rank: {"cwd": views[rank]})
    (line,) = set(job.err.splitlines())
    assert re.fullmatch(r"\[CPU 0\] ERROR: \d images are damaged, over 1%: repair them", line)
    assert job.codes == [1, 1] and "Summary" not in job.out
    assert "[CPU 1] WARNING: image " in job.out and "[CPU 0] WARNING" not in job.out


def test_more_processes_than_gpus(demo, data):
    argv = [*data.argv(), *FAST]
    job = demo.run(argv, 2, expect=None, call=pretend_gpus, count=1)
    assert job.codes == [1, 1]
    (line,) = {re.sub(r"^\[\w+ \d\] ", "", line) for line in job.err.splitlines()}
    for word in ("ERROR: ", "2 processes", "1 GPU", "--backend gloo"):
        assert word in line


USELESS_DRIVER = ["driver", "CUDA 13.0", "export CUDA_VISIBLE_DEVICES= "]
NO_CUDA = ["has no CUDA", "pytorch.org", "export CUDA_VISIBLE_DEVICES= "]
TAKEN = ["none.json"]  # what is missing ends these a little later


@pytest.mark.parametrize(
    ("visible", "cuda", "hip", "words"),
    [
        (None, "13.0", None, USELESS_DRIVER),
        pytest.param("0", "13.0", None, USELESS_DRIVER, marks=LONG),
        (None, None, None, NO_CUDA),
        ("0", None, None, NO_CUDA),
        ("", None, None, TAKEN),
        (None, None, "6.4", TAKEN),  # a build for AMD's GPUs
    ],
)
def test_gpu_that_is_of_no_use_is_refused_unless_hidden(data, refused, visible, cuda, hip, words):
    """Else a node with GPUs would train on its CPU, and the others would wait for it."""
    data.options["annotation_path"] = "none.json"
    refused(words, call=driver_without_gpu, visible=visible, cuda=cuda, hip=hip)


@pytest.mark.parametrize("visible", ["", *long("-1")])
def test_node_whose_gpus_are_hidden_trains_on_its_cpu(demo, data, visible):
    options = {"visible": visible, "cuda": "13.0", "hip": None}
    job = demo.run([*data.argv(), *FAST], call=driver_without_gpu, **options)
    assert job.json_line("Run")["devices"], job.tail()


@pytest.mark.parametrize(
    ("nproc", "more", "words"),
    [
        (2, [], ["--device mps takes one process, not 2"]),
        (1, ["--grad_compression", "powersgd"], ["--grad_compression", "--device mps"]),
        (1, ["--sync_bn"], ["--sync_bn", "GPUs"]),
    ],
    ids=["two processes", "compression", "sync_bn"],
)
def test_what_does_not_go_with_a_macs_gpu_is_one_line(demo, data, nproc, more, words):
    argv = [*data.argv(), *FAST, "--device", "mps", *more]
    job = demo.run(argv, nproc, expect=None, call=pretend_mac)
    assert_refused(job, words)
    assert "One process" not in job.out


def test_gpu_that_this_build_was_not_made_for_is_one_line(refused):
    words = ["this build of PyTorch cannot use cuda:0", "no kernel image"]
    refused(words, call=gpu_without_kernels)


FULL = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 15.77 GiB."
NCCL = "NCCL error in: /pytorch/NCCLUtils.cpp:94, unhandled system error (run with NCCL_DEBUG=INFO"
NCCL += " for details)\nncclSystemError: System call failed or device error. \nLast error:\n"
NO_SPACE = "No space in /dev/shm (28)"


@pytest.mark.parametrize(
    ("name", "text", "kind", "line"),
    [
        (
            "train_step",
            FULL,
            "user",
            f"in step 1: {FULL} Give less than the present --batch_size 4",
        ),
        ("init_process_group", f"{NCCL}{NO_SPACE}", "lost", f"NCCL: {NO_SPACE}"),
    ],
    ids=["full GPU", "NCCL"],
)
def test_error_of_pytorch_is_told_in_the_words_that_matter(data, refused, name, text, kind, line):
    file = data.folder / "error.json"
    env = {"TORCHELASTIC_ERROR_FILE": str(file)}
    assert refused([], env=env, call=raise_in, name=name, text=text) == f"[CPU 0] ERROR: {line}"
    assert json.loads(file.read_text())["message"]["extraInfo"]["kind"] == kind


# PyTorch's C++ part adds warnings of its own: [W1120 ...] The client socket has timed out.
OF_PYTORCH = r"\[[WE]\d+ |Exception raised from |frame #|<omitting python frames>"
ONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
PLACES = {
    "rank is not a number": ({"RANK": "first"}, ["torchrun", "RANK"]),
    "rank is empty": ({"RANK": ""}, ["torchrun", "RANK"]),
    "rank out of range": ({"RANK": "3"}, ["RANK 3", "WORLD_SIZE"]),
    "no world size": ({"WORLD_SIZE": None}, ["WORLD_SIZE"]),
    "no local rank": ({"LOCAL_RANK": None}, ["torchrun", "LOCAL_RANK"]),
    "no master": ({"MASTER_ADDR": None}, ["MASTER_ADDR"]),
    "no master of pods": (
        {"MASTER_ADDR": None, "LOCAL_RANK": None, "LOCAL_WORLD_SIZE": None},
        ["export MASTER_ADDR="],
    ),
    "master has no address": ({"MASTER_ADDR": "no-such-host.invalid", "RANK": "1"}, ["no-such"]),
    "port is not a number": ({"MASTER_PORT": "http"}, ["http"]),
    "port out of range": ({"MASTER_PORT": "99999"}, ["99999"]),
    "nobody at the master's address": ({"RANK": "1"}, ["127.0.0.1", "rendezvous"]),
    "nobody joins rank 0": ({}, ["127.0.0.1", "rendezvous"]),
}
SLOW_PLACES = ["master has no address", "nobody at the master's address"]  # seconds of waiting


@pytest.mark.parametrize("name", long_among(PLACES, SLOW_PLACES))
def test_wrong_place_among_the_ranks_is_refused(refused, name):
    change, words = PLACES[name]
    port = str(free_port())
    env = ONE | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} | change
    env = {key: value for key, value in env.items() if value is not None}
    refused(words, "--timeout", 1, others=OF_PYTORCH, within=1 + 10, env=env)


def test_one_process_a_node_needs_no_local_rank(demo, data):
    """As in the pods of a Kubernetes job. Here both are on one node, which is said."""
    unset = {"LOCAL_RANK": None, "LOCAL_WORLD_SIZE": None, "GLOO_SOCKET_IFNAME": "lo"}
    job = demo.run([*data.argv(), *FAST], 2, env=unset, call=test_demo.run_record)
    facts = job.json_line("Run")
    assert (facts["launcher"], facts["nodes"], facts["world_size"]) == ("environment", 2, 2)
    told = [line for line in job.lines(0) if "LOCAL_RANK" in line]
    assert told[0].startswith("LOCAL_RANK is not set: ") and len(told) == 2
    assert told[1].startswith("WARNING: 2 processes are on ")
    assert "[CPU 0] Run: 2 processes on 2 nodes, gloo" in job.out


def test_port_that_is_taken(refused):
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = str(taken.getsockname()[1])
        env = ONE | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        refused(["127.0.0.1", port], "--timeout", 3, others=OF_PYTORCH, env=env)


# --- Locks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ENOLCK", *long("ENOSYS", "ENOTSUP", "EOPNOTSUPP", "EINVAL")])
def test_checkpoint_where_no_file_can_be_locked_is_one_warning(demo, data, name):
    argv = [*data.argv(), *FAST, "--checkpoint", data.folder / "c.pt"]
    job = demo.run(argv, call=lockf_fails, number=getattr(errno, name))
    (line,) = (line for line in job.lines() if "WARNING" in line)
    assert re.match(r"\[CPU 0\] WARNING: checkpoint .*c\.pt cannot be locked \(", line), line
    assert (data.folder / "c.pt").exists()


@pytest.mark.parametrize("name", [None, "EAGAIN", "EACCES"], ids=str)
def test_checkpoint_of_another_run_is_refused(data, refused, name):
    options = {"call": lockf_fails, "number": getattr(errno, name)} if name else {}
    with (data.folder / "c.pt.lock").open("w") as other:
        if not name:
            fcntl.lockf(other, fcntl.LOCK_EX)
        words = ["c.pt", "in use by another run"]
        refused(words, "--checkpoint", data.folder / "c.pt", **options)
    assert not (data.folder / "c.pt").exists()


# --- Pictures --------------------------------------------------------------------------------


def png_bomb(path: Path, side: int) -> None:
    """A whole and valid PNG: with 20,000 pixels a side 50 KB, which take 1.2 GB as RGB."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + check

    pack, row = zlib.compressobj(9), b"\0" * (1 + side // 8)
    rows = b"".join(pack.compress(row * 100) for _ in range(side // 100)) + pack.flush()
    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    parts = [chunk(b"IHDR", header), chunk(b"IDAT", rows), chunk(b"IEND", b"")]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))


def jpeg_bomb(path: Path, side: int) -> None:
    """A JPEG that says it has so many pixels a side."""
    Image.new("RGB", (16, 16)).save(path, "JPEG")
    content = bytearray(path.read_bytes())
    start = content.index(b"\xff\xc0") + 5
    content[start : start + 4] = struct.pack(">HH", side, side)
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("make", "side"),
    [
        (png_bomb, 20_000),
        (png_bomb, 10_000),  # 300 MB as RGB: Pillow by itself would only warn
        (jpeg_bomb, 65_000),
    ],
)
def test_picture_that_would_fill_the_memory_is_refused(demo, tmp_path, make, side):
    path = tmp_path / "bomb"
    make(path, side)
    assert path.stat().st_size < 100_000
    job = demo.run(call=test_demo.decoded, path=str(path))
    label, colours, used = job.result()
    assert label < 0 and colours == [0, 0, 0]
    assert used < 64 * 2**20
    assert job.seconds < 5


def test_file_name_cannot_draw_on_the_terminal(demo, tmp_path):
    """A picture that is too large, under a name that pretends to be two lines of the log."""
    name = "a\n[CPU 0] ERROR: b\x1b[31mred\x1b[0m\x9b2J\x85\u2028c\r.jpg"
    names = [*numbered(119), name]
    write_images(tmp_path / "images", names)
    png_bomb(tmp_path / "images" / name, 20_000)
    (tmp_path / "instances.json").write_text(json.dumps(instances(names)))
    argv = ["--coco_image_path", tmp_path / "images"]
    argv += ["--annotation_path", tmp_path / "instances.json"]
    job = demo.run([*argv, *test_demo.FAST, "--batch_size", 60, "--num_epochs", 1])
    assert_clean(job)
    (line,) = (line for line in job.out.split("\n") if "WARNING" in line)
    assert re.fullmatch(r"\[CPU 0\] WARNING: .*a\?\[CPU 0\] ERROR: b\?\[31mred.*", line), line


@pytest.mark.parametrize(("size", "warnings"), [pytest.param(40, 0, marks=LONG), (41, 1)])
def test_images_smaller_than_image_size_are_one_warning(demo, data, size, warnings):
    """They have 48 x 40 pixels, made for 40, say; it is no error."""
    argv = [*data.argv(), *FAST, "--image_size", size]
    job = demo.run(argv, 2, call=test_demo.run_record)
    found = [line for line in job.lines() if "WARNING" in line]
    wanted = "[CPU 0] WARNING: the images are smaller than --image_size: made for another one?"
    assert found == [wanted] * warnings


# --- As a user starts it ---------------------------------------------------------------------


@LONG
def test_torchrun_ends_all_ranks_with_one_line(data):
    data.options["coco_image_path"] = data.folder / "nowhere"
    run = run_demo([*data.argv(), *FAST], 2, expect=1, split=True)
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


@LONG
def test_python_ends_with_one_line(data):
    data.options["annotation_path"] = data.folder / "none.json"
    run = run_demo([*data.argv(), *FAST], launcher="python", expect=1, split=True)
    assert run.out == ""
    assert run.err == error_line(run.err) + "\n"


def test_tmpdir_too_long_for_the_sockets_of_workers(refused, tmp_path):
    """Without the check a worker fails in a thread of its own and the run waits for ever."""
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    line = refused(["TMPDIR"], "--workers", 1, env={"TMPDIR": str(folder)})
    assert line.endswith("export TMPDIR=/tmp")
