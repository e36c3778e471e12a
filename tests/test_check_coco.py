"""tools/check_coco.py: what it says of folders of images; test_annotations.py has the files."""

from __future__ import annotations

import io
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import demo_coco_resnet18 as demo
import pytest
from PIL import Image

import prepare_coco
from check_coco import SCAN, TAIL, UserError, check, fault_of
from support.annotation_cases import write
from support.datasets import instances, numbered, write_images
from support.processes import ROOT


@pytest.fixture
def file(tmp_path: Path) -> str:
    """A good file: of its five images 0004.jpg has no label."""
    return write(tmp_path / "file.json")


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """The folder of its labelled images, of a kind whose end is not looked for."""
    folder = tmp_path / "images"
    folder.mkdir()
    for name in numbered(4):
        (folder / name).write_bytes(b"GIF89a")
    return folder


def fault(*arguments: object) -> str:
    """What is said of a fault; "" if there is none."""
    try:
        check(*arguments)
    except UserError as error:
        return str(error)
    return ""


def test_labelled_images_that_the_folder_lacks_are_counted(file, images, tmp_path):
    for number in (1, 2):
        (images / f"000{number}.jpg").unlink()
    (images / "0001.jpg").symlink_to("gone.jpg")
    words = " lacks 2 of 4 listed images, the first is 0001.jpg: check the path"
    assert words in fault(file, images)
    for name in ("gone.jpg", "0002.jpg"):
        (images / name).symlink_to("0000.jpg")
    assert fault(file, images) == ""
    gone = tmp_path / "gone"
    assert fault(file, gone) == f"there is no folder of images {gone}: check the path"
    backslash = write(tmp_path / "windows.json", r'images[0].file_name = "part\\0000.jpg"')
    assert fault(backslash, images).endswith("as paths of Windows: write / in its place")


def test_ids_and_names_that_train_are_not_refused(images, tmp_path):
    for changes in (
        "images[*].id as text; annotations[*].image_id as text",
        "categories[*].id as text; annotations[*].category_id as text",
        "annotations[*].category_id as floats",
        f'images[0].file_name = "{images}/0000.jpg"',
        'images[0].file_name = "../images/0000.jpg"',
    ):
        file = write(tmp_path / "odd.json", changes)
        demo.look_for_images(images, demo.read_image_list(file).names)
        assert fault(file, images) == "", changes


def test_a_packed_file_is_whole_and_has_all_images(file, tmp_path):
    write_images(tmp_path / "coco/images", numbered(5))
    words = [str(tmp_path / "coco"), str(tmp_path), "--shorter_side=64", "--packed"]
    args = prepare_coco.parse_arguments(words)
    packed = tmp_path / "images.rgb"
    prepare_coco.pack(args, "images", numbered(3))
    line = f"the packed file {packed} lacks 1 of 4 listed images, the first is 0003.jpg"
    assert fault(file, packed).startswith(line)
    prepare_coco.pack(args, "images", numbered(5))
    assert fault(file, packed) == ""
    with packed.open("ab") as pixels:
        pixels.write(b"more")
    assert fault(file, packed).startswith(f"{packed} and {packed}.index do not belong together")


def encoded(kind: str, size: int = 300, **options: object) -> bytes:
    """A JPEG or PNG; one of 300 pixels is larger than what is looked at first."""
    file = io.BytesIO()
    noise = Image.frombytes("RGB", (size, size), random.Random(0).randbytes(3 * size * size))
    noise.save(file, kind, quality=95, **options)
    assert size < 300 or len(file.getvalue()) > 10 * TAIL
    return file.getvalue()


NO_IMAGES = {
    "is a pointer of git-LFS": b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n",
    "is an HTML page": b"<!DOCTYPE html>\n<html><head><title>404</title></head></html>\n",
    "is HEIC, which Pillow cannot decode": b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(99),
    "is empty": b"",
}


def test_images_that_are_cut_off_or_none_are_told_from_whole_ones(tmp_path):
    """Whole are also a JPEG of a phone, which has a film behind it, and what is no JPEG or PNG."""
    jpeg, png = encoded("JPEG"), encoded("PNG")
    with_preview = encoded("JPEG", exif=b"Exif" + b"\xff\xd8" + SCAN + b" a small one \xff\xd9")
    small = {kind: encoded(kind, size=40) for kind in ("JPEG", "PNG")}
    whole = [jpeg, png, with_preview, jpeg + b"\n", png + b"\n", b"GIF89a"]
    for image in (jpeg, png, *small.values()):
        whole += [image + bytes(2 * TAIL), image + b"film" * TAIL]
    cases = dict.fromkeys(whole) | {content: said for said, content in NO_IMAGES.items()}
    for kind, image in (("JPEG", jpeg), ("JPEG", with_preview), ("PNG", png)):
        broken_download = small[kind][:-20] + bytes(2 * TAIL)
        for content in (image[:-9], image[: 2 * TAIL], image[:8], broken_download):
            cases[content] = f"is cut off: no end of a {kind}"
    for content, said in cases.items():
        (tmp_path / "image").write_bytes(content)
        found = fault_of(tmp_path / "image")
        assert (found and found[0]) == said, content[:9]


def test_the_number_of_more_images_is_of_one_kind_of_fault(file, images):
    for name, content in (("0000.jpg", b""), ("0001.jpg", b"\xff\xd8 cut"), ("0002.jpg", b"")):
        (images / name).write_bytes(content)
    line = f"image {images}/0000.jpg is empty (and 1 more). Fetch it again, or take it out of the"
    assert fault(file, images).startswith(line)


def test_files_without_faults_are_described(images, tmp_path):
    """Annotations of no image are counted, and images that neither file lists."""
    (images / "part").mkdir()
    for name in ("8.JPG", "9.png", "part/1.jpeg", "notes.txt", "0004.jpg"):
        (images / name).touch()
    changes = 'categories[3] = {"id": 3, "name": "cow"}; '
    changes += "annotations[4].image_id = 998; annotations[5].image_id = 999"
    train = write(tmp_path / "train.json", changes)
    val = write(tmp_path / "val.json", 'images[4].file_name = "9.png"')
    described = ["images: 5, without a label: 1 (training leaves them out)"]
    described += ["classes: 3, without an image: 0", "bird 2, apple 1, clock 1"]
    assert check(train, images, val) == [
        f"annotation file {train}",
        described[0],
        "annotations: 2 have an image_id that no image has (training leaves them out)",
        "classes: 4, without an image: 1",
        described[2],
        f"{images} has all images that have a label; none is empty, no JPEG or PNG is cut off",
        f"annotation file {val}",
        *described,
        "The training file has all classes of the validation images",
        f"image files in {images} that are not listed: 2, such as 8.JPG",
    ]


def test_decode_lists_each_image_at_which_a_training_would_end(tmp_path):
    """One is damaged in its middle, where no look at its end shows it, one has 16 bits, one has
    more pixels than Pillow decodes, and one is no image at all. One is listed twice.
    """
    write_images(tmp_path, numbered(6))
    png = bytearray(encoded("PNG"))
    png[len(png) // 2] ^= 255
    (tmp_path / "0001.jpg").write_bytes(png)
    Image.new("I;16", (8, 8)).save(tmp_path / "0002.jpg", format="PNG")
    (tmp_path / "0003.jpg").write_bytes(b"P5 20000 20000 255\n")
    train = tmp_path / "train.json"
    train.write_text(json.dumps(instances([*numbered(6), "0002.jpg"])))
    assert check(train, tmp_path)[-1].endswith("none is empty, no JPEG or PNG is cut off")
    (tmp_path / "0004.jpg").write_bytes(NO_IMAGES["is a pointer of git-LFS"])
    with pytest.raises(UserError) as error:
        check(train, tmp_path, every=True)
    damaged, deep, large, none, last = str(error.value).splitlines()
    assert damaged.startswith(f"image {tmp_path}/0001.jpg cannot be decoded: ")
    assert deep == f"image {tmp_path}/0002.jpg has pixels of more than 8 bits (mode I;16)"
    assert large.startswith(f"image {tmp_path}/0003.jpg is too large: Pillow decodes at most 178,")
    assert none == f"image {tmp_path}/0004.jpg is a pointer of git-LFS"
    assert last.startswith("4 of 6 images cannot be trained on")


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ('categories[0].name = "Käse"', 0, "K?se 2"),
        ("annotations[*].id is gone", 2, "has no id: expected one of its own (and 5 more)"),
    ],
)
def test_the_command_says_what_is_there_or_ends_with_2(images, tmp_path, changes, code, words):
    """Where Python has nothing but itself (-S), and a terminal few characters."""
    path = write(tmp_path / "file.json", changes)
    command = [sys.executable, "-S", ROOT / "tools/check_coco.py", path, images]
    how = dict(env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, text=True)
    done = subprocess.run(command, timeout=60, **how)
    assert (done.returncode, done.stderr) == (code, "") and words in done.stdout
    assert not code or done.stdout.count("\n") == 1
    assert not re.search(r"Error|Errno|Exception|Traceback", done.stdout)
