"""tools/prepare_coco.py: the real command; what it writes is read with Pillow, pycocotools and the
demo itself.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import prepare_coco as tool
from analysis.units import megabytes
from support.datasets import digests, instances, read_coco
from support.forks import shared, validation_batch, write
from support.nodes import small_disk
from support.processes import LONG, ROOT, Run, refusal, start, wait_until

TOOL = ROOT / "tools" / "prepare_coco.py"
SIDE = 64  # of the small sets that tests make


def be_the_tool(demo, result) -> None:
    """In a forked process."""
    tool.main(sys.argv[1:])


def done(*args: object, expect: int = 0) -> Run:
    run = shared().run(args, call=be_the_tool, expect=expect)
    assert "Traceback" not in run.err, run.tail()
    return run


def refused(*args: object) -> str:
    """The one line on stderr."""
    run = done(*args, expect=1)
    assert run.err.startswith("prepare_coco.py: error: ") and run.err.count("\n") == 1, run.err
    return run.err


def fails(*args: object) -> str:
    """The one line with which the tool refuses, without a process of its own."""
    with pytest.raises(tool.Failure) as failure:
        tool.run(tool.parse_arguments([str(arg) for arg in args]))
    assert "\n" not in str(failure.value)
    return str(failure.value)


def content(folder: Path, split: str = "train2017", kind: str = "instances") -> dict:
    return json.loads((folder / "annotations" / f"{kind}_{split}.json").read_text())


def write_content(folder: Path, dataset: dict, split: str = "train2017") -> None:
    (folder / "annotations").mkdir(parents=True, exist_ok=True)
    (folder / "annotations" / f"instances_{split}.json").write_text(json.dumps(dataset))


def picture(number: int, size: tuple[int, int] = (200, 150)) -> Image.Image:
    """Smooth colours, other ones in each corner and in each picture."""
    corners = np.random.default_rng(number).integers(0, 256, (2, 2, 3), dtype=np.uint8)
    return Image.fromarray(corners).resize(size, Image.Resampling.BILINEAR)


def in_format(image: Image.Image, name: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, name, **options)
    return file.getvalue()


def make_set(folder: Path, pictures: dict[str, bytes], split: str = "train2017") -> Path:
    """A set with one annotation a picture, of files by name."""
    for name, data in pictures.items():
        path = folder / split / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    write_content(folder, instances([*pictures]), split)
    return folder


def jpeg(number: int) -> bytes:
    return in_format(picture(number), "JPEG")


@pytest.fixture(scope="module")
def undisturbed(sample, tmp_path_factory) -> Path:
    """The sample of 96 and 20 pictures, prepared in one go."""
    target = tmp_path_factory.mktemp("undisturbed") / "small"
    assert "116 shrunk, 0 copied, 0 damaged, 0 missing" in done(sample, target).out
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
    parts = ["annotations", "prepare_coco.json", "train2017", "val2017"]
    assert sorted(os.listdir(undisturbed)) == parts
    record = json.loads((undisturbed / "prepare_coco.json").read_text())
    assert (record["shorter_side"], record["quality"]) == (256, 90)
    assert [*record["annotations"]] == ["instances_train2017.json", "instances_val2017.json"]


@pytest.mark.parametrize("split", ["train2017", "val2017"])
def test_annotations_keep_order_ids_and_every_other_key(sample, undisturbed, split):
    old, new = content(sample, split), content(undisturbed, split)
    assert any(annotation["iscrowd"] for annotation in new["annotations"])
    assert all(annotation["segmentation"] == [] for annotation in new["annotations"])
    for dataset in (old, new):
        for record in dataset["images"] + dataset["annotations"]:
            for key in {"width", "height", "segmentation", "bbox", "area"} & {*record}:
                record[key] = "scaled"
    assert json.dumps(old) == json.dumps(new)


def test_pycocotools_finds_the_same_boxes(sample, undisturbed):
    sets = [read_coco(folder, "val2017") for folder in (sample, undisturbed)]
    for image in sets[1].imgs.values():
        with Image.open(undisturbed / "val2017" / image["file_name"]) as file:
            assert file.size == (image["width"], image["height"])
    for one, other in zip(*(coco.dataset["annotations"] for coco in sets), strict=True):
        images = [coco.imgs[one["image_id"]] for coco in sets]
        before, after = ([image["width"], image["height"]] * 2 for image in images)
        off = np.array(one["bbox"]) / before - np.array(other["bbox"]) / after
        assert np.abs(off).max() <= 0.005 / min(after)
        areas = one["area"] / np.prod(before[:2]), other["area"] / np.prod(after[:2])
        assert areas[0] == pytest.approx(areas[1], abs=1e-4 / np.prod(after[:2]))


def test_settings(tmp_path):
    names = ("0.jpg", "x/a.jpg", "x/y/é.jpg")  # folders of their own are kept
    source = make_set(tmp_path / "coco", {name: jpeg(n) for n, name in enumerate(names)})
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


def test_started_again_it_makes_what_is_not_whole_alone(sample, undisturbed):
    def times():
        return {path: path.stat().st_mtime_ns for path in undisturbed.glob("*2017/*")}

    before, whole = times(), digests(undisturbed)
    cut = min(before)
    cut.write_bytes(b"")  # as by a crash of the machine
    assert "116 shrunk, 0 copied" in done(sample, undisturbed).out
    assert digests(undisturbed) == whole
    assert {path for path, time in times().items() if time != before[path]} == {cut}


# --- What the demo sees ------------------------------------------------------------------------


def deep_colours() -> bytes:
    """A PNG file with 16 bits a colour, which Pillow can read but not write."""
    data = bytearray(in_format(picture(0), "PNG"))
    data[19], data[24] = 100, 16  # half as wide and twice as deep: as many bytes
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    return bytes(data)


def odd_pictures() -> dict[str, bytes]:
    """Files of many kinds by name; what is before the dash says what becomes of them."""
    see_through = picture(7).convert("RGBA")
    see_through.putalpha(100)
    upright = Image.Exif()  # a camera's note that it was held so
    upright[0x0112] = 6
    several = {"save_all": True, "append_images": [picture(1)]}
    kinds = {
        "shrunk-colour": in_format(picture(1), "JPEG"),
        "shrunk-grey": in_format(picture(3).convert("L"), "JPEG"),
        "shrunk-cmyk": in_format(picture(4).convert("CMYK"), "JPEG"),
        "shrunk-turned": in_format(picture(5), "JPEG", exif=upright),
        "shrunk-large": in_format(picture(6, (1700, 1100)), "JPEG"),  # libjpeg leaves out a part
        "shrunk-alpha": in_format(see_through, "PNG"),
        "shrunk-palette": in_format(picture(9).convert("P"), "PNG"),
        "shrunk-long": in_format(picture(11, (900, 70)), "JPEG"),
        "shrunk-mpo": in_format(picture(12), "MPO", **several),
        "copied-small": in_format(picture(13, (300, SIDE)), "JPEG"),
        "copied-deep": in_format(Image.fromarray(np.full((90, 99), 999, np.uint16)), "PNG"),
        "copied-deepcolours": deep_colours(),
        "copied-animated": in_format(picture(15), "GIF", **several),
        "damaged-cut": in_format(picture(16), "JPEG")[:-400],
        "damaged-large": in_format(picture(17, (1700, 1100)), "JPEG")[:-9],
        "damaged-small": in_format(picture(18, (60, SIDE)), "JPEG")[:-40],
        "damaged-empty": b"",
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
    """What the demo reads of both forms of both sets, and of the first annotations alone."""
    files = [
        f"{folder}/annotations/{kind}{split}.json"
        for folder, kind in ((sample, ""), (undisturbed, ""), (undisturbed, "first_"))
        for split in ("instances_train2017", "instances_val2017")
    ]
    return demo.run(call=look, files=files, folders=[*map(str, odd[:2])]).result()


def look(demo, result, files, folders) -> None:
    """In a forked process: what the demo reads."""
    found = {"lists": [], "views": []}
    for file in files:
        image_list = demo.read_image_list(file)
        names, labels = map(str, image_list.names), image_list.labels.tolist()
        found["lists"].append([[*names], labels, image_list.categories, image_list.unlabelled])
    for folder in folders:
        image_list = demo.read_image_list(f"{folder}/annotations/instances_train2017.json")
        images, labels = validation_batch(demo, f"{folder}/train2017", image_list, 33)
        views = zip(image_list.names, labels, images, strict=True)
        found["views"].append({n.decode(): [int(k), i.tolist()] for n, k, i in views})
    write(result, found)


def test_the_demo_reads_the_same_labels(seen):
    lists = seen["lists"]
    assert lists[:2] == lists[2:4] == lists[4:]
    assert [len(labels) for _, labels, *_ in lists[:2]] == [95, 19]


@pytest.mark.parametrize("split", ["train2017", "val2017"])
def test_first_annotations_are_those_of_the_whole_file(undisturbed, split):
    whole, first = content(undisturbed, split), content(undisturbed, split, "first_instances")
    numbers = [annotation["image_id"] for annotation in whole["annotations"]]
    places = sorted(map(numbers.index, set(numbers)))
    whole["annotations"] = [whole["annotations"][place] for place in places]
    assert first == whole and len(places) < len(numbers)


def test_the_demo_sees_the_same_pictures_and_names_the_same_damaged_ones(seen):
    """A quarter turn, inverted colours or a lost alpha would be off by 30 and more."""
    old, new = seen["views"]
    assert old.keys() == new.keys() == odd_pictures().keys()
    off = {}
    for name in old:
        assert old[name][0] == new[name][0], f"{name} is damaged in one of the sets alone"
        off[name] = np.abs(np.array(old[name][1]) - np.array(new[name][1])).mean()
    assert max(off.values()) < 3, off
    assert min(np.array(old[n][1]).std() for n in old if n.startswith("shrunk")) > 8, "too flat"
    # These are whole, but more than the demo's decoder and its crop can take.
    beyond = {f"copied-{kind}.jpg" for kind in ("deep", "deepcolours", "animated")}
    damaged = {name for name, (label, _) in old.items() if label < 0}
    assert damaged == {name for name in old if name.startswith("damaged")} | beyond


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


@pytest.fixture
def small_set(tmp_path) -> Path:
    return make_set(tmp_path / "coco", {f"{n}.jpg": jpeg(n) for n in range(4)})


def test_damaged_pictures_are_named_and_counted(odd):
    *folders, run = odd
    damaged = sorted(name for name in odd_pictures() if name.startswith("damaged"))
    *lines, last = run.err.splitlines()
    named = sorted(line.partition(" is damaged, copied as it is: ")[0] for line in lines)
    assert named == [f"WARNING: picture train2017/{name}" for name in damaged]
    assert last == "WARNING: 5 pictures are damaged: see above"
    again = done(*folders, "--shorter_side", SIDE)
    assert sorted(again.err.splitlines()) == sorted(run.err.splitlines())
    counts = "18 pictures: 9 shrunk, 4 copied, 5 damaged, 0 missing; "
    counts += f"{megabytes(sum(map(len, odd_pictures().values())))} -> "
    assert counts in run.out.splitlines()[-1] and counts in again.out.splitlines()[-1]
    assert run.out.count("\n") <= 1 + run.seconds / 5  # to a pipe the counter is rare


def test_a_picture_that_cannot_be_read_at_all(tmp_path):
    source = make_set(tmp_path / "coco", {"a.jpg": jpeg(0), "b.jpg": jpeg(1)})
    path, target = source / "train2017" / "a.jpg", tmp_path / "small"
    path.unlink()
    path.symlink_to("a.jpg")  # a circle: for root, too, who may read everything
    run = done(source, target, "--shorter_side", SIDE)
    assert "train2017/a.jpg is damaged" in run.err and "1 shrunk, 0 copied, 1 damaged" in run.out
    assert (target / "train2017" / "a.jpg").read_bytes() == b""


def test_missing_pictures_are_one_line(small_set, tmp_path):
    for name in ("1.jpg", "2.jpg"):
        (small_set / "train2017" / name).unlink()
    run = done(small_set, tmp_path / "small", "--shorter_side", SIDE)
    (line,) = run.err.splitlines()
    assert "2 listed pictures are missing, one is train2017/1.jpg" in line
    assert "2 shrunk, 0 copied, 0 damaged, 2 missing" in run.out
    boxes = [annotation["bbox"] for annotation in content(tmp_path / "small")["annotations"]]
    assert [box == [1, 1, 9, 9] for box in boxes] == [False, True, True, False]
    for name in ("0.jpg", "3.jpg"):
        (small_set / "train2017" / name).unlink()
    assert "lacks the pictures" in fails(small_set, tmp_path / "other")


IMAGE = '{"images": [{"id": 1, "file_name": "%s"}], "annotations": []}'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "list indices"),
        ('{"images": []}', "'annotations'"),
        ('{"images": [{"id": 1}], "annotations": []}', "'file_name'"),
        ('{"images": [{"id": 1, "file_name": "a", "width": "1"}], "annotations": []}', "str"),
        ('{"images": [], "annotations": [{"image_id": 1, "bbox": [1, 2]}]}', "four numbers"),
        (IMAGE % "/a.jpg", "leaves the image folder"),
        (IMAGE % "x/../../a.jpg", "leaves the image folder"),
        (IMAGE % "", "leaves the image folder"),
        (IMAGE % r"a\u0000.jpg", "leaves the image folder"),
    ],
)
def test_a_file_that_is_no_usable_instances_file(small_set, tmp_path, text, words):
    (small_set / "annotations" / "instances_train2017.json").write_text(text)
    before = digests(tmp_path)
    error = fails(small_set, tmp_path / "small")
    assert words in error and "instances_train2017.json is no usable COCO instances file" in error
    assert digests(tmp_path) == before


def test_as_much_of_coco_as_there_is(tmp_path):
    source, target = tmp_path / "coco", tmp_path / "small"
    assert "is no folder" in fails(source, target)
    source.mkdir()
    assert "no annotations/instances_*.json" in fails(source, target)
    write_content(source, instances(["a.jpg"]))
    assert "none of the folders of pictures" in fails(source, target)
    make_set(source, {"a.jpg": jpeg(0)}, "val2017")
    run = done(source, target, "--shorter_side", SIDE)
    assert "instances_train2017.json is left out" in run.out
    assert not (target / "annotations" / "instances_train2017.json").exists()
    make_set(source, {"b.jpg": jpeg(1)})
    assert "2 shrunk" in done(source, target, "--shorter_side", SIDE).out


# --- Nothing is lost ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["same", "inside", "above", "linked pictures", "elsewhere"])
def test_a_target_that_is_the_source(small_set, tmp_path, kind):
    pictures, link = small_set / "train2017", tmp_path / "link"
    target = {
        "same": small_set,
        "inside": small_set / "small" / "256",
        "above": tmp_path,
        "linked pictures": link,
        "elsewhere": tmp_path / "disk" / "small",
    }[kind]
    if kind == "linked pictures":
        done(small_set, link, "--shorter_side", SIDE)
        shutil.rmtree(link / "train2017")
        (link / "train2017").symlink_to(pictures)
    if kind == "elsewhere":  # where the source's own pictures lie
        pictures.rename(tmp_path / "disk")
        pictures.symlink_to(tmp_path / "disk")
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


def test_two_at_once(small_set, tmp_path):
    done(small_set, tmp_path / "small", "--shorter_side", SIDE)
    with (tmp_path / "small" / "prepare_coco.json").open() as record:
        fcntl.flock(record, fcntl.LOCK_EX)
        error = fails(small_set, tmp_path / "small", "--shorter_side", SIDE)
    assert "another prepare_coco.py is writing" in error


@pytest.mark.parametrize("argv", ["x y --quality 0", "x y --workers x", "x"])
def test_wrong_arguments(capsys, argv):
    line = refusal(capsys, tool.parse_arguments, argv)
    assert line.startswith("prepare_coco.py: error: ") and "--help" in line


# --- Stopped, killed, out of room --------------------------------------------------------------


def unlike(folder: Path, whole: dict[str, str]) -> set[str]:
    """Files that are not those of an undisturbed run, apart from the ones in the making."""
    others = digests(folder).items() - whole.items()
    return {name for name, _ in others if not name.startswith(".unfinished")}


@LONG
def test_killed_and_started_again(sample, undisturbed, tmp_path):
    """Its worker ends with it."""
    target, whole = tmp_path / "small", digests(undisturbed)
    with start([sys.executable, TOOL, sample, target, "--workers", 1]) as started:
        wait_until(lambda: [*target.glob("train2017/*")], 30, "a picture")
        started.signal(signal.SIGKILL)
        wait_until(lambda: not started.pids(), 20, "the worker's end")
    assert not unlike(target, whole)
    assert len(os.listdir(target / "train2017")) < 40
    done(sample, target)
    assert digests(target) == whole


STOPPED = "stopped on a signal; start again: it goes on"


@pytest.mark.parametrize(
    ("whom", "number", "code", "words"),
    [
        ("process", 15, 143, STOPPED),
        pytest.param("all", 2, 130, STOPPED, marks=LONG),  # as Ctrl-C
        pytest.param("worker", 9, 1, "a worker was ended by signal 9", marks=LONG),
    ],
)
def test_run_that_is_ended_says_why(sample, undisturbed, tmp_path, whom, number, code, words):
    target = tmp_path / "small"
    with start([sys.executable, TOOL, sample, target], split=True) as started:
        wait_until(lambda: [*target.glob("train2017/*")], 30, "a picture")
        assert started.process.poll() is None
        pid = max(started.pids()) if whom == "worker" else started.pid
        (os.killpg if whom == "all" else os.kill)(pid, number)
        run = started.finish(20, expect=code, clean=2)
    (line,) = run.err.splitlines()
    assert line.startswith(f"prepare_coco.py: error: {words}") and "start again: it goes" in line
    assert not (target / ".unfinished").exists()
    assert not unlike(target, digests(undisturbed))
    assert len(os.listdir(target / "train2017")) < 96


def test_what_a_killed_run_left_is_removed(small_set, tmp_path):
    target = tmp_path / "small"
    (target / ".unfinished").mkdir(parents=True)
    (target / ".unfinished" / "4711").write_bytes(b"half a picture")
    (target / "prepare_coco.json").touch()  # killed between making and writing it
    with tool.claimed(tool.Job(small_set, target, SIDE, 90), []):
        assert os.listdir(target / ".unfinished") == []
    assert os.listdir(target) == ["prepare_coco.json"]


def test_a_disk_that_fills_up(tmp_path):
    """Every second picture is flat: those are what the space needed is estimated from."""
    noise = np.random.default_rng(0).integers(0, 256, (150, 200, 3), dtype=np.uint8)
    heavy = [Image.new("RGB", (200, 150)), Image.fromarray(noise)]
    pictures = {f"{n:02d}.jpg": in_format(heavy[n % 2], "JPEG") for n in range(60)}
    source = make_set(tmp_path / "coco", pictures)
    options = ["--shorter_side", 140, "--quality", 95]
    done(source, tmp_path / "whole", *options)
    whole = digests(tmp_path / "whole")
    with small_disk(tmp_path / "disk", "400k") as disk:
        target = disk / "small"
        error = refused(source, target, *options)
        assert "No space left on device" in error and "start again: it goes on" in error
        assert 3 < len(os.listdir(target / "train2017")) < 60
        assert not unlike(target, whole) and not (target / ".unfinished").exists()
        subprocess.run(["mount", "-o", "remount,size=8m", disk], check=True)
        done(source, target, *options)
        assert digests(target) == whole


def test_no_room_is_known_before(sample, tmp_path):
    with small_disk(tmp_path / "disk", "2m") as disk:
        error = refused(sample, disk / "small")
        assert "no room" in error and "4." in error and "2.09 MB free" in error
        assert not (disk / "small" / "train2017").exists()


def test_progress_is_a_line_now_and_then(small_set, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tool, "PROGRESS_S", 0)
    tool.run(tool.parse_arguments([str(small_set), str(tmp_path / "small"), "--shorter_side=64"]))
    *lines, last = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"4 of 4 pictures \| [\d.]+ img/s \| ETA 0 ms", lines[-1]), lines
    assert len(lines) == 4 and "4 shrunk" in last
