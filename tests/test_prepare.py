"""tools/prepare_coco.py: the real command; what it writes is read with Pillow, pycocotools and the
demo itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.util
import io
import json
import os
import pty
import random
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw

from support.datasets import data_args
from support.forks import shared, validation_batch, write
from support.nodes import small_disk
from support.processes import LONG, ROOT, Run, Started, start, wait_until

# Another copy of the tool can be put to these tests, to see that they find what is broken in it.
TOOL = Path(os.environ.get("PREPARE_SCRIPT", ROOT / "tools" / "prepare_coco.py"))
SIDE = 64  # of the small sets that tests make
FAST = "--weights none --image_size 40 --batch_size 4 --workers 0 --precision fp32 --max_steps 1"


def be_the_tool(demo, result) -> None:
    """In a forked process."""
    tool().main(sys.argv[1:])


def prepare(*args: object) -> Run:
    """The tool's run; one that is expected to fail has said why in one line."""
    run = shared().run(args, call=be_the_tool, expect=None)
    assert "Traceback" not in run.err, run.tail()
    return run


def done(*args: object) -> Run:
    run = prepare(*args)
    assert run.returncode == 0, run.tail()
    return run


def refused(*args: object, code: int = 1) -> str:
    run = prepare(*args)
    assert (run.returncode, len(run.err.splitlines())) == (code, 1), run.tail()
    assert run.err.startswith("prepare_coco.py: error: "), run.err
    return run.err


@functools.cache
def tool():
    """The tool as a module."""
    spec = importlib.util.spec_from_file_location("prepare_coco", TOOL)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # for pickle
    spec.loader.exec_module(module)
    return module


def fails(*args: object) -> str:
    """The one line with which the tool refuses, without a process of its own."""
    with pytest.raises(tool().Failure) as failure:
        tool().run(tool().parse_arguments([str(arg) for arg in args]))
    assert "\n" not in str(failure.value)
    return str(failure.value)


def digests(folder: Path) -> dict[str, str]:
    """Of each file, and of each folder its existence."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        if path.is_file()
        else "folder"
        for path in sorted(folder.rglob("*"))
    }


def content(folder: Path, split: str = "train2017", kind: str = "instances") -> dict:
    return json.loads((folder / "annotations" / f"{kind}_{split}.json").read_text())


def write_content(folder: Path, dataset: dict, split: str = "train2017") -> None:
    (folder / "annotations").mkdir(parents=True, exist_ok=True)
    path = folder / "annotations" / f"instances_{split}.json"
    path.write_text(json.dumps(dataset))


def picture(number: int, size: tuple[int, int] = (200, 150)) -> Image.Image:
    """Smooth colours, other ones in each corner and in each picture."""
    corners = np.random.default_rng(number).integers(0, 256, (2, 2, 3), dtype=np.uint8)
    return Image.fromarray(corners).resize(size, Image.Resampling.BILINEAR)


def make_set(folder: Path, pictures: dict[str, object], split: str = "train2017") -> Path:
    """A set with one annotation a picture; pictures are images, or the bytes of a file."""
    dataset = {"images": [], "annotations": [], "categories": [{"id": 7, "name": "train"}]}
    for number, (name, image) in enumerate(pictures.items()):
        path = folder / split / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(image, bytes):
            path.write_bytes(image)
        else:
            image.save(path, "JPEG")
        dataset["images"].append({"id": 50 - number, "file_name": name})
        boxed = {
            "id": number,
            "image_id": 50 - number,
            "category_id": 7,
            "bbox": [20, 30, 100, 90],
        }
        dataset["annotations"].append(boxed | {"area": 9000, "iscrowd": 0, "segmentation": []})
    write_content(folder, dataset, split)
    return folder


def in_format(image: Image.Image, name: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, name, **options)
    return file.getvalue()


@pytest.fixture(scope="module")
def first_run(sample, tmp_path_factory) -> Run:
    """The sample of 96 and 20 pictures, prepared in one go."""
    target = tmp_path_factory.mktemp("undisturbed") / "small"
    with start([sys.executable, TOOL, sample, target], split=True) as started:
        run = started.finish(60)
    assert "116 shrunk, 0 copied, 0 damaged, 0 missing" in run.out
    return run


@pytest.fixture(scope="module")
def undisturbed(first_run) -> Path:
    """What that run has made."""
    return Path(first_run.command[-1])


@pytest.fixture(scope="module")
def tiny_small(tiny_coco, tmp_path_factory) -> Path:
    """The real pictures, prepared."""
    target = tmp_path_factory.mktemp("tiny") / "small"
    done(tiny_coco, target)
    return target


# --- What a prepared set is --------------------------------------------------------------------


def test_layout_names_and_sizes(sample, undisturbed):
    for split in ("train2017", "val2017"):
        assert sorted(os.listdir(sample / split)) == sorted(os.listdir(undisturbed / split))
        for path in (sample / split).iterdir():
            with Image.open(path) as old, Image.open(undisturbed / split / path.name) as new:
                assert (min(new.size), new.format) == (256, "JPEG")
                assert max(new.size) == round(256 * max(old.size) / min(old.size))
                assert (old.size[0] > old.size[1]) == (new.size[0] > new.size[1])
    there = {"annotations", "prepare_coco.json", "train2017", "val2017"}
    assert {*os.listdir(undisturbed)} == there
    record = json.loads((undisturbed / "prepare_coco.json").read_text())
    assert (record["shorter_side"], record["quality"]) == (256, 90)
    assert [*record["annotations"]] == ["instances_train2017.json", "instances_val2017.json"]


def test_annotations_keep_order_ids_and_every_other_key(sample, undisturbed):
    def others(dataset):
        scaled = {"width", "height", "segmentation", "bbox", "area"}
        kept = {k: v for k, v in dataset.items() if k not in ("images", "annotations")}
        return kept, [
            [(key, key in scaled or value) for key, value in record.items()]
            for record in dataset["images"] + dataset["annotations"]
        ]

    for split in ("train2017", "val2017"):
        old, new = content(sample, split), content(undisturbed, split)
        assert others(old) == others(new)
        assert list(old) == list(new)
        assert sum(a["iscrowd"] for a in new["annotations"]) > 0
        assert all(a["segmentation"] == [] for a in new["annotations"])


def load(folder: Path, split: str):
    from pycocotools.coco import COCO

    with contextlib.redirect_stdout(io.StringIO()):
        return COCO(str(folder / "annotations" / f"instances_{split}.json"))


def test_pycocotools_finds_the_same_boxes(tiny_coco, tiny_small):
    from pycocotools.cocoeval import COCOeval

    old, new = load(tiny_coco, "val2017"), load(tiny_small, "val2017")
    for number, image in new.imgs.items():
        with Image.open(tiny_small / "val2017" / image["file_name"]) as file:
            assert file.size == (image["width"], image["height"])
        before = np.array([old.imgs[number][k] for k in ("width", "height") * 2])
        after = np.array([image[k] for k in ("width", "height") * 2])
        assert [a["id"] for a in old.imgToAnns[number]] == [a["id"] for a in new.imgToAnns[number]]
        for one, other in zip(old.imgToAnns[number], new.imgToAnns[number], strict=True):
            boxes = np.array(one["bbox"]) / before, np.array(other["bbox"]) / after
            assert np.abs(boxes[0] - boxes[1]).max() <= 0.005 / after.min()
            areas = one["area"] / before[:2].prod(), other["area"] / after[:2].prod()
            assert areas[0] == pytest.approx(areas[1], abs=1e-4 / after[:2].prod())
    assert [*old.getAnnIds(iscrowd=True)] == [*new.getAnnIds(iscrowd=True)] != []
    with contextlib.redirect_stdout(io.StringIO()):  # a detector that is always right
        guesses = [a | {"score": 1} for a in new.anns.values() if not a["iscrowd"]]
        judge = COCOeval(new, new.loadRes(guesses), "bbox")
        judge.evaluate(), judge.accumulate(), judge.summarize()
    assert judge.stats[0] == pytest.approx(1)


@pytest.mark.parametrize("size", [(301, 200), (150, 407), (640, 480)])
def test_a_scaled_box_still_frames_its_object(tmp_path, size):
    image = Image.new("L", size)
    x, y, w, h = 20, 30, 100, 90
    ImageDraw.Draw(image).rectangle((x, y, x + w - 1, y + h - 1), fill=255)
    source = make_set(tmp_path / "coco", {"a.jpg": image})
    done(source, tmp_path / "small", "--shorter_side", SIDE)
    (annotation,) = content(tmp_path / "small")["annotations"]
    with Image.open(tmp_path / "small" / "train2017" / "a.jpg") as file:
        pixels = np.asarray(file.convert("L"))
    x, y, w, h = annotation["bbox"]
    inside = np.zeros(pixels.shape, bool)
    inside[round(y) : round(y + h), round(x) : round(x + w)] = True
    assert (pixels > 127)[inside].mean() > 0.99
    assert (pixels > 127)[~inside].mean() < 0.01
    assert annotation["area"] == pytest.approx((pixels / 255).sum(), rel=0.05)


def test_settings(tmp_path):
    names = ("0.jpg", "x/a.jpg", "x/y/é.jpg")  # folders of their own are kept
    source = make_set(tmp_path / "coco", {name: picture(n) for n, name in enumerate(names)})
    settings = {"a": (SIDE, []), "b": (SIDE, ["--quality", 40]), "c": (32, ["--shorter-side", 32])}
    for target, (side, options) in settings.items():
        done(source, tmp_path / target, "--shorter_side", SIDE, *options)
        for name in names:
            assert min(Image.open(tmp_path / target / "train2017" / name).size) == side
    first, second = (tmp_path / target / "train2017" / "0.jpg" for target in "ab")
    assert second.stat().st_size < first.stat().st_size


def test_the_same_bytes_whatever_the_number_of_workers(sample, undisturbed, tmp_path):
    done(sample, tmp_path / "small", "--workers", 3)
    assert digests(tmp_path / "small") == digests(undisturbed)


def test_started_again_it_finds_all_done(sample, undisturbed):
    def times():
        return {path: path.stat().st_mtime_ns for path in undisturbed.glob("*2017/*")}

    before, whole = times(), digests(undisturbed)
    assert "116 shrunk, 0 copied" in done(sample, undisturbed).out
    assert times() == before and digests(undisturbed) == whole


# --- What the demo sees ------------------------------------------------------------------------


def turned(number: int) -> bytes:
    """A picture with the note that a camera was held upright."""
    exif = Image.Exif()
    exif[0x0112] = 6
    return in_format(picture(number), "JPEG", exif=exif)


def deep_colours() -> bytes:
    """A PNG file with 16 bits a colour, which Pillow can read but not write."""
    rows = b"".join(b"\0" + bytes(range(200)) * 3 for _ in range(90))
    parts = [(b"IHDR", struct.pack(">2I5B", 100, 90, 16, 2, 0, 0, 0))]
    parts += [(b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    chunks = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def odd_pictures() -> dict[str, bytes]:
    """Files of many kinds by name; what is before the dash says what becomes of them."""
    see_through = picture(7).convert("RGBA")
    see_through.putalpha(100)
    several = {"save_all": True, "append_images": [picture(1)]}
    kinds = {
        "shrunk-colour": in_format(picture(1), "JPEG"),
        "shrunk-progressive": in_format(picture(2), "JPEG", progressive=True),
        "shrunk-grey": in_format(picture(3).convert("L"), "JPEG"),
        "shrunk-cmyk": in_format(picture(4).convert("CMYK"), "JPEG"),
        "shrunk-turned": turned(5),
        "shrunk-large": in_format(picture(6, (1700, 1100)), "JPEG"),  # libjpeg leaves out a part
        "shrunk-alpha": in_format(see_through, "PNG"),
        "shrunk-png": in_format(picture(8), "PNG"),
        "shrunk-palette": in_format(picture(9).convert("P"), "PNG"),
        "shrunk-greyalpha": in_format(picture(10).convert("LA"), "PNG"),
        "shrunk-long": in_format(picture(11, (900, 70)), "JPEG"),
        "shrunk-mpo": in_format(picture(12), "MPO", **several),
        "copied-small": in_format(picture(13, (300, SIDE)), "JPEG"),
        "copied-tiny": in_format(picture(14, (1, 1)), "PNG"),
        "copied-deep": in_format(Image.fromarray(np.full((90, 99), 999, np.uint16)), "PNG"),
        "copied-deepcolours": deep_colours(),
        "copied-animated": in_format(picture(15), "GIF", **several),
        "damaged-cut": in_format(picture(16), "JPEG")[:-400],
        "damaged-large": in_format(picture(17, (1700, 1100)), "JPEG")[:-9],
        "damaged-small": in_format(picture(18, (60, SIDE)), "JPEG")[:-40],
        "damaged-empty": b"",
        "damaged-text": b"no picture\n" * 50,
        "damaged-huge": in_format(Image.new("1", (2**14, 2**12 + 1)), "PNG"),
    }
    return {f"{name}.jpg": data for name, data in kinds.items()}


@pytest.fixture(scope="module")
def odd(tmp_path_factory) -> tuple[Path, Path, Run]:
    """A set of such pictures, its prepared form, and the run that has made that."""
    folder = tmp_path_factory.mktemp("odd")
    source = make_set(folder / "coco", odd_pictures())
    return source, folder / "small", done(source, folder / "small", "--shorter_side", SIDE)


@pytest.fixture(scope="module")
def seen(demo, odd, sample, undisturbed) -> dict:
    """What the demo reads of both forms of both sets."""
    folders = {"odd": [*map(str, odd[:2])], "sample": [str(sample), str(undisturbed)]}
    return demo.run(call=look, **folders).result()


def look(demo, result, odd, sample) -> None:
    """In a forked process: what the demo reads."""
    found = {"indexes": [], "first": [], "views": []}
    sets = [("indexes", sample[0], "instances"), ("indexes", sample[1], "instances")]
    for to, folder, kind in [*sets, ("first", sample[1], "first_instances")]:
        for split in ("train2017", "val2017"):
            index = demo.read_index(f"{folder}/annotations/{kind}_{split}.json")
            fields = [[str(n) for n in index.names], index.labels.tolist(), index.categories]
            found[to].append([*fields, index.unlabelled])
    for folder in odd:
        index = demo.read_index(f"{folder}/annotations/instances_train2017.json")
        images, labels = validation_batch(demo, f"{folder}/train2017", index, 33)
        views = zip(index.names, labels, images, strict=True)
        found["views"].append({n.decode(): [int(k), i.tolist()] for n, k, i in views})
    write(result, found)


def test_the_demo_reads_the_same_labels(seen):
    train, val, small_train, small_val = seen["indexes"]
    assert train == small_train and val == small_val
    assert seen["first"] == [small_train, small_val]  # from first annotations alone
    assert (len(train[1]), len(val[1])) == (95, 19)


def test_first_annotations_are_those_of_the_whole_file(undisturbed):
    for split in ("train2017", "val2017"):
        whole, first = content(undisturbed, split), content(undisturbed, split, "first_instances")
        annotations, kept = whole.pop("annotations"), first.pop("annotations")
        numbers = [a["image_id"] for a in annotations]
        places = sorted(map(numbers.index, set(numbers)))
        assert kept == [annotations[place] for place in places]
        assert first == whole and len(kept) < len(numbers)


def test_the_demo_trains_on_it_with_unchanged_options(demo, undisturbed):
    run = demo.run([*data_args(undisturbed, val=True), *shlex.split(FAST)])
    assert run.json_line("Summary")["steps"] == 1
    (epoch,) = (line for line in run.lines(0) if line.startswith("Epoch 1 complete"))
    assert "damaged" not in epoch and " | 19 images | " in run.out


def test_the_demo_sees_the_same_pictures(seen):
    """A quarter turn, inverted colours or a lost alpha would be off by 30 and more."""
    old, new = seen["views"]
    assert old.keys() == new.keys() == odd_pictures().keys()
    off = {}
    for name in old:
        assert old[name][0] == new[name][0], f"{name} is damaged in one of the sets alone"
        off[name] = np.abs(np.array(old[name][1]) - np.array(new[name][1])).mean()
    assert max(off.values()) < 3, off
    assert min(np.array(old[n][1]).std() for n in old if n.startswith("shrunk")) > 8, "too flat"


def test_the_demo_names_the_same_damaged_pictures(seen):
    for views in seen["views"]:
        damaged = {name for name, (label, _) in views.items() if label < 0}
        # These are whole, but more than the demo's decoder and its crop can take.
        beyond = {f"copied-{kind}.jpg" for kind in ("deep", "deepcolours", "animated")}
        assert damaged == {n for n in views if n.startswith("damaged")} | beyond


def losses(demo, result, folders) -> None:
    """In a forked process: one fixed model's loss on the validation pictures of each folder.

    Its convolutions are random, its last layer has learned the first folder's pictures by heart:
    a random layer would give any picture the same loss, this one a higher one to other pictures.
    """
    import torch
    from torch.nn.functional import cross_entropy
    from torchvision.models import resnet18

    torch.manual_seed(0)
    model, features = resnet18(num_classes=demo.CLASSES).eval(), []
    head, model.fc = model.fc, torch.nn.Identity()
    for folder in folders:
        index = demo.read_index(f"{folder}/annotations/instances_val2017.json")
        images, labels = validation_batch(demo, f"{folder}/val2017", index, 112)
        with torch.no_grad():
            features.append(model((images - demo.MEAN) / demo.STD))
    features = [(f - features[0].mean(0)) / features[0].std(0) for f in features]
    optimizer = torch.optim.Adam(head.parameters(), lr=0.01)
    for _ in range(20):
        optimizer.zero_grad()
        cross_entropy(head(features[0]), torch.from_numpy(labels)).backward()
        optimizer.step()
    write(result, [cross_entropy(head(f), torch.from_numpy(labels)).item() for f in features])


@LONG
def test_a_fixed_models_loss_on_real_pictures(demo, tiny_coco, tiny_small):
    """Measured: 1.18 times the loss. At quality 10 it was 1.99 times, with pictures of 64 pixels
    20 times, with red and blue exchanged 151 times.
    """
    folders = [str(tiny_coco), str(tiny_small)]
    original, prepared = demo.run(call=losses, folders=folders).result()
    assert original < 0.05, "it has not learned them"
    assert prepared / original < 1.5


@pytest.mark.parametrize("name", odd_pictures())
def test_each_kind_is_shrunk_or_copied(odd, name):
    source, target, _ = odd
    old, new = ((folder / "train2017" / name).read_bytes() for folder in (source, target))
    if not name.startswith("shrunk"):
        assert old == new
        return
    with Image.open(io.BytesIO(new)) as image:
        assert (image.format, min(image.size)) == ("JPEG", SIDE)
        assert image.mode == ("L" if name == "shrunk-grey.jpg" else "RGB")
        # Kept as a note, as in pictures that are copied: every program sees what it saw before.
        assert image.getexif().get(0x0112) == (6 if name == "shrunk-turned.jpg" else None)


# --- What is wrong with a set ------------------------------------------------------------------


def test_damaged_pictures_are_named_and_counted(odd):
    run = odd[2]
    damaged = sorted(name for name in odd_pictures() if name.startswith("damaged"))
    lines = [line for line in run.err.splitlines() if "is damaged, copied as it is: " in line]
    assert sorted(line.split()[2] for line in lines) == [f"train2017/{name}" for name in damaged]
    assert run.err.splitlines()[-1] == "WARNING: 6 pictures are damaged: see above"
    assert len(run.err.splitlines()) == 7
    again = done(*odd[:2], "--shorter_side", SIDE)
    assert sorted(again.err.splitlines()) == sorted(run.err.splitlines())
    counts = "23 pictures: 12 shrunk, 5 copied, 6 damaged, 0 missing; "
    assert counts in run.out.splitlines()[-1] and counts in again.out.splitlines()[-1]


def test_the_last_line_has_the_sizes_before_and_after(odd):
    source, target, run = odd
    before, after = (
        sum(path.stat().st_size for path in (folder / "train2017").iterdir())
        for folder in (source, target)
    )
    notes = [f / "annotations" / "instances_train2017.json" for f in (source, target)]
    texts = [f"{path.stat().st_size / 1e3:.1f} kB" for path in notes]
    last = run.out.splitlines()[-1]
    assert f"; {before / 1e3:.1f} kB -> {after / 1e3:.1f} kB, annotations" in last
    assert f"annotations {texts[0]} -> {texts[1]}; " in last


def test_a_picture_that_cannot_be_read_at_all(tmp_path):
    source = make_set(tmp_path / "coco", {"a.jpg": picture(0), "b.jpg": picture(1)})
    path = source / "train2017" / "a.jpg"
    path.unlink()
    path.symlink_to("a.jpg")  # a circle: for root, too, who may read everything
    target = tmp_path / "small"
    run = done(source, target, "--shorter_side", SIDE)
    assert "train2017/a.jpg is damaged" in run.err and "1 shrunk, 0 copied, 1 damaged" in run.out
    assert (target / "train2017" / "a.jpg").read_bytes() == b""
    path.unlink()
    picture(0).save(path)
    assert "2 shrunk, 0 copied, 0 damaged" in done(source, target, "--shorter_side", SIDE).out


def test_missing_pictures_are_one_line(tmp_path):
    source = make_set(tmp_path / "coco", {f"{n}.jpg": picture(n) for n in range(4)})
    for name in ("1.jpg", "2.jpg"):
        (source / "train2017" / name).unlink()
    run = done(source, tmp_path / "small", "--shorter_side", SIDE)
    (line,) = run.err.splitlines()
    assert "2 listed pictures are missing, one is train2017/1.jpg" in line
    assert "2 shrunk, 0 copied, 0 damaged, 2 missing" in run.out
    boxes = [annotation["bbox"] for annotation in content(tmp_path / "small")["annotations"]]
    assert [box == [20, 30, 100, 90] for box in boxes] == [False, True, True, False]
    for name in ("0.jpg", "3.jpg"):
        (source / "train2017" / name).unlink()
    assert "lacks the pictures" in fails(source, tmp_path / "other")


@pytest.mark.parametrize("name", ["../a.jpg", "/a.jpg", "x/../../a.jpg", "x/..", "", "a\0.jpg"])
def test_a_file_name_that_leaves_the_folder(tmp_path, name):
    source = make_set(tmp_path / "coco", {"a.jpg": picture(0), "b.jpg": picture(1)})
    picture(2).save(source / "a.jpg")
    dataset = content(source)
    dataset["images"][0]["file_name"] = name
    write_content(source, dataset)
    before = digests(tmp_path)
    assert "leaves the image folder" in fails(source, tmp_path / "small")
    assert digests(tmp_path) == before


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "Expecting value"),
        ("[]", "no usable COCO instances file"),
        ('{"images": []}', "'annotations'"),
        ('{"images": [{"id": 1}], "annotations": []}', "'file_name'"),
        ('{"images": [], "annotations": [{"image_id": 1, "bbox": [1, 2]}]}', "four numbers"),
        ('{"images": [{"id": 1, "file_name": "a", "width": "1"}], "annotations": []}', "str"),
        ('{"images": [], "annotations": [{"image_id": 1, "bbox": ["", 1, 1, 1]}]}', "str"),
    ],
)
def test_a_file_that_is_no_instances_file(tmp_path, text, words):
    source = make_set(tmp_path / "coco", {"a.jpg": picture(0)})
    (source / "annotations" / "instances_train2017.json").write_text(text)
    error = fails(source, tmp_path / "small")
    assert words in error and "instances_train2017.json" in error
    assert not (tmp_path / "small").exists()


def test_as_much_of_coco_as_there_is(tmp_path):
    source = tmp_path / "coco"
    assert "is no folder" in fails(source, tmp_path / "small")
    source.mkdir()
    assert "no annotations/instances_*.json" in fails(source, tmp_path / "small")
    make_set(source, {"a.jpg": picture(0)}, "val2017")
    write_content(source, content(source, "val2017"))  # its pictures have not been fetched
    run = done(source, tmp_path / "small", "--shorter_side", SIDE)
    assert "instances_train2017.json is left out" in run.out
    assert not (tmp_path / "small" / "annotations" / "instances_train2017.json").exists()
    make_set(source, {"b.jpg": picture(1)})
    assert "2 shrunk" in done(source, tmp_path / "small", "--shorter_side", SIDE).out
    shutil.rmtree(source / "train2017")
    shutil.rmtree(source / "val2017")
    assert "none of the folders of pictures" in fails(source, tmp_path / "other")


# --- Nothing is lost ---------------------------------------------------------------------------


@pytest.fixture
def small_set(tmp_path) -> Path:
    return make_set(tmp_path / "coco", {f"{n}.jpg": picture(n) for n in range(4)})


@pytest.mark.parametrize(
    "kind",
    ["same", "inside", "pictures", "link", "link inside", "linked pictures", "elsewhere", "above"],
)
def test_a_target_that_is_the_source(small_set, tmp_path, kind):
    target = {
        "same": small_set,
        "inside": small_set / "small" / "256",
        "pictures": small_set / "train2017",
        "above": tmp_path,
    }.get(kind, tmp_path / "link")
    if kind == "link":
        target.symlink_to(small_set)
    if kind == "link inside":
        target.symlink_to(small_set / "train2017")
        target = target / "new"
    if kind == "linked pictures":
        done(small_set, target, "--shorter_side", SIDE)
        shutil.rmtree(target / "train2017")
        (target / "train2017").symlink_to(small_set / "train2017")
    if kind == "elsewhere":  # where the source's own pictures lie
        os.rename(small_set / "train2017", tmp_path / "disk")
        (small_set / "train2017").symlink_to(tmp_path / "disk")
        target = tmp_path / "disk" / "small"
    before = digests(tmp_path)
    error = fails(small_set, target, "--shorter_side", SIDE)
    assert ("not empty" if kind == "above" else "give another TARGET") in error
    assert digests(tmp_path) == before


def test_a_target_made_with_other_settings(small_set, tmp_path):
    target, options = tmp_path / "small", ["--shorter_side", SIDE]
    done(small_set, target, *options)
    before = digests(target)
    assert f"shorter_side {SIDE}, not 65" in fails(small_set, target, "--shorter_side", SIDE + 1)
    assert "quality 90, not 80" in fails(small_set, target, *options, "--quality", 80)
    dataset = content(small_set)
    dataset["annotations"][0]["category_id"] = 8
    write_content(small_set, dataset)
    error = fails(small_set, target, *options)
    assert "made from another instances_train2017.json" in error
    assert digests(target) == before


def test_a_target_that_is_something_else(small_set, tmp_path):
    target = tmp_path / "mine"
    target.mkdir()
    (target / "thesis.tex").write_text("years of work")
    assert "not empty, and not made by prepare_coco.py" in fails(small_set, target)
    (target / "prepare_coco.json").write_text("{}")
    assert "is damaged" in fails(small_set, target)
    assert sorted(os.listdir(target)) == ["prepare_coco.json", "thesis.tex"]
    assert "File exists" in refused(small_set, target / "thesis.tex")


def test_two_at_once(small_set, tmp_path, monkeypatch):
    monkeypatch.setattr(tool(), "LOCK_WAIT", 0.1)
    done(small_set, tmp_path / "small", "--shorter_side", SIDE)
    with (tmp_path / "small" / "prepare_coco.json").open() as record:
        fcntl.flock(record, fcntl.LOCK_EX)
        error = fails(small_set, tmp_path / "small", "--shorter_side", SIDE)
    assert "another prepare_coco.py is writing" in error


@pytest.mark.parametrize(
    "argv", [["--quality", "0"], ["--workers", "x"], ["--shorter_side=9"], []]
)
def test_wrong_arguments(tmp_path, argv):
    folders = [tmp_path, tmp_path / "small"] if argv else [tmp_path]
    assert "--help" in refused(*folders, *argv, code=2)


# --- Stopped, killed, out of room --------------------------------------------------------------


def unlike(folder: Path, whole: dict[str, str]) -> list[str]:
    """Files that are not those of an undisturbed run, apart from the ones in the making."""
    found = digests(folder) if folder.exists() else {}
    return [
        name
        for name, digest in found.items()
        if not name.startswith(".unfinished") and digest != whole.get(name)
    ]


@LONG
def test_killed_at_twenty_moments_and_started_again(sample, first_run, undisturbed, tmp_path):
    """By turns alone and with its workers."""
    target, whole = tmp_path / "small", digests(undisturbed)
    chance, killed = random.Random(0), 0
    while killed < 20:
        started = start([sys.executable, TOOL, sample, target], split=True)
        with started:
            time.sleep(chance.uniform(0, first_run.seconds))
            if started.process.poll() is None:
                if killed % 3:
                    started.signal(signal.SIGKILL)  # the workers notice
                    started.process.wait(10)
                killed += 1
            elif unlike(target, whole):
                pytest.fail(f"a run that was not killed: {started.text()}")
            else:
                shutil.rmtree(target)  # done before it was killed: from the beginning
        assert unlike(target, whole) == [], f"after {killed} kills"
    done(sample, target)
    assert digests(target) == whole


@LONG
def test_workers_end_with_a_run_that_is_killed(sample, tmp_path):
    target, argv = tmp_path / "small", ["--shorter_side", 400, "--workers", 1]
    with start([sys.executable, TOOL, sample, target, *argv]) as started:
        first_picture(started, target)
        started.signal(signal.SIGKILL)
        wait_until(lambda: not started.pids(), 20, "the worker's end")
    assert len(os.listdir(target / "train2017")) < 80


def first_picture(started: Started, target: Path) -> None:
    wait_until(lambda: any(target.glob("train2017/*")), 30, "a picture", 0.001)
    assert started.process.poll() is None


@pytest.mark.parametrize(
    ("number", "whom"),
    [(15, "process"), pytest.param(2, "all", marks=LONG), pytest.param(1, "process", marks=LONG)],
)
def test_stopped_on_a_signal(sample, undisturbed, tmp_path, number, whom):
    """Ctrl-C reaches the workers, too."""
    target = tmp_path / "small"
    with start([sys.executable, TOOL, sample, target], split=True) as started:
        first_picture(started, target)
        (os.killpg if whom == "all" else os.kill)(started.pid, number)
        run = started.finish(20, expect=128 + number, clean=2)
    assert run.err == "prepare_coco.py: error: stopped on a signal; start again: it goes on\n"
    assert not (target / ".unfinished").exists()
    assert unlike(target, digests(undisturbed)) == []
    assert len(os.listdir(target / "train2017")) < 96


def test_what_a_killed_run_left_is_removed(small_set, tmp_path):
    target = tmp_path / "small"
    (target / ".unfinished").mkdir(parents=True)
    (target / ".unfinished" / "4711").write_bytes(b"half a picture")
    (target / "prepare_coco.json").touch()  # killed between making and writing it
    with tool().claimed(tool().Job(small_set, target, SIDE, 90), []):
        assert os.listdir(target / ".unfinished") == []
    assert os.listdir(target) == ["prepare_coco.json"]


def test_a_picture_cut_by_a_crash_of_the_machine_is_made_again(small_set, tmp_path):
    target = tmp_path / "small"
    done(small_set, target, "--shorter_side", SIDE)
    whole = digests(target)
    (target / "train2017" / "1.jpg").write_bytes(b"")
    done(small_set, target, "--shorter_side", SIDE)
    assert digests(target) == whole


@LONG
def test_a_worker_that_is_killed(sample, tmp_path):
    target = tmp_path / "small"
    with start([sys.executable, TOOL, sample, target], split=True) as started:
        first_picture(started, target)
        os.kill(next(pid for pid in started.pids() if pid != started.pid), signal.SIGKILL)
        run = started.finish(20, expect=1, clean=2)
    (line,) = run.err.splitlines()
    assert "a worker was ended by signal 9" in line and "start again" in line


def test_a_disk_that_fills_up(tmp_path):
    """Every second picture is flat: those are what the space needed is estimated from."""
    noise = np.random.default_rng(0).integers(0, 256, (150, 200, 3), dtype=np.uint8)
    heavy = [Image.new("RGB", (200, 150)), Image.fromarray(noise)]
    source = make_set(tmp_path / "coco", {f"{n:02d}.jpg": heavy[n % 2] for n in range(60)})
    options = ["--shorter_side", 140, "--quality", 95]
    done(source, tmp_path / "whole", *options)
    with small_disk(tmp_path / "disk", "400k") as disk:
        error = refused(source, disk / "small", *options)
        assert "No space left on device" in error and "start again: it goes on" in error
        made = os.listdir(disk / "small" / "train2017")
        assert 3 < len(made) < 60
        assert unlike(disk / "small", digests(tmp_path / "whole")) == []
        assert not (disk / "small" / ".unfinished").exists()
        subprocess.run(["mount", "-o", "remount,size=8m", disk], check=True)
        done(source, disk / "small", *options)
        assert digests(disk / "small") == digests(tmp_path / "whole")


def test_no_room_is_known_before(sample, tmp_path):
    with small_disk(tmp_path / "disk", "2m") as disk:
        error = refused(sample, disk / "small")
        assert "no room" in error and "4." in error and "2.1 MB free" in error
        assert not (disk / "small" / "train2017").exists()


# --- What a person sees ------------------------------------------------------------------------


@LONG
def test_a_terminal_gets_a_line_that_counts(tmp_path):
    large = in_format(picture(0, (3000, 2000)), "JPEG")  # 12 of them take half a second
    source = make_set(tmp_path / "coco", {f"{n}.jpg": large for n in range(12)})
    master, slave = pty.openpty()
    command = [sys.executable, TOOL, source, tmp_path / "small", "--workers", "1"]
    command += ["--shorter_side", "600"]
    process = subprocess.Popen(command, stdout=slave, stderr=slave)
    os.close(slave)
    text = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while more := os.read(master, 4096):
            text += more
    os.close(master)
    assert process.wait(20) == 0, text
    assert b" of 12 pictures | " in text and b" img/s | ETA " in text
    assert text.count(b"\n") == 1, text  # the last line alone stays


def test_a_pipe_gets_few_lines(first_run):
    lines = first_run.out.splitlines()
    assert len(lines) <= 1 + first_run.seconds / 5
