"""tools/make_sample_coco.py: its files read back with pycocotools and Pillow.

The real command makes the set that most tests look at; others call the same functions.
"""

import operator
import os
import signal
import subprocess
import sys
from collections import Counter
from unittest import mock

import pytest
from PIL import Image

import make_sample_coco as tool
from support.datasets import COCO_IDS, digests, read_coco
from support.processes import LONG, ROOT, refusal, start, wait_until

TOOL = ROOT / "tools" / "make_sample_coco.py"
SMALL = ["--images", "20", "--val_images", "4", "--seed", "5"]
FOUR = ["--images", "4", "--val_images", "0"]
IMAGES = {"train2017": 20, "val2017": 4}

# pycocotools 2.0.11 with numpy 2 says this for each mask that it decodes.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def make(*arguments):
    """What the command says; raises what it ends with."""
    return tool.run(tool.parse_arguments([*map(str, arguments)]))


def command(*arguments):
    words = [sys.executable, TOOL, *arguments]
    return subprocess.run(words, capture_output=True, text=True, timeout=60)


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sample") / "coco"
    result = command(folder, *SMALL)
    assert result.returncode == 0 and len(result.stdout.splitlines()) == 1, result.stderr
    return folder


@pytest.fixture(params=IMAGES)
def coco(sample, request):
    """Each of its splits, as pycocotools reads it; `folder` has its pictures."""
    coco = read_coco(sample, request.param)
    coco.folder, coco.expected = sample / request.param, IMAGES[request.param]
    return coco


def test_layout(sample):
    parts = {"train2017", "val2017", "annotations", "sample.json"}
    assert {path.name for path in sample.iterdir()} == parts
    assert [path.name for path in sample.parent.iterdir()] == ["coco"]  # nothing temporary
    names = {split: os.listdir(sample / split) for split in IMAGES}
    assert {split: len(found) for split, found in names.items()} == IMAGES
    assert not {*names["train2017"]} & {*names["val2017"]}


def test_categories_are_those_of_coco(coco):
    categories = coco.dataset["categories"]
    assert [category["id"] for category in categories] == COCO_IDS
    assert {*map(frozenset, categories)} == {frozenset({"supercategory", "id", "name"})}
    named = {c["id"]: (c["supercategory"], c["name"]) for c in categories}
    assert len({*named.values()}) == 80 and len({group for group, _ in named.values()}) == 12
    assert named[1] == ("person", "person") and named[90] == ("indoor", "toothbrush")
    assert named[27] == ("accessory", "backpack") and named[67] == ("furniture", "dining table")


def test_images_are_as_the_file_says(coco):
    modes, sizes = [], []
    assert len(coco.imgs) == coco.expected
    for image in coco.imgs.values():
        assert image["file_name"] == f"{image['id']:012d}.jpg"
        path = coco.folder / image["file_name"]
        with Image.open(path) as picture:
            assert picture.format == "JPEG"
            assert picture.size == (image["width"], image["height"])
            picture.load()
            modes.append(picture.mode)
        sizes.append(path.stat().st_size)
    assert 1 <= modes.count("L") < len(modes) / 2 and {*modes} == {"L", "RGB"}
    assert 60_000 < sum(sizes) / len(sizes) < 200_000 and min(sizes) > 15_000


def test_annotations_agree_with_pycocotools(coco):
    per_image = [len(coco.getAnnIds(imgIds=[number])) for number in coco.imgs]
    assert min(per_image) == 0 and per_image.count(0) <= 2  # some have none, few do
    assert sum(count > 1 for count in per_image) > len(per_image) / 2
    assert len(coco.anns) == sum(per_image) == round(coco.expected * 860_001 / 118_287)
    crowds = coco.getAnnIds(iscrowd=True)
    assert 1 <= len(crowds) < len(coco.anns) / 5
    for annotation in coco.anns.values():
        image = coco.imgs[annotation["image_id"]]
        assert annotation["category_id"] in coco.cats
        assert annotation["iscrowd"] == (annotation["id"] in crowds)
        x, y, width, height = annotation["bbox"]
        assert width > 0 and height > 0 and x >= 0 and y >= 0
        assert x + width <= image["width"] + 0.02 and y + height <= image["height"] + 0.02
        mask = coco.annToMask(annotation)
        assert mask.shape == (image["height"], image["width"])
        if annotation["iscrowd"]:
            assert mask.sum() == annotation["area"]
            assert mask[y : y + height, x : x + width].all()
        else:
            # The mask counts pixels, the area is that of the polygon: they part along the edge.
            assert abs(mask.sum() - annotation["area"]) <= width + height + 4


def test_colour_tells_the_category(sample):
    """The eight common ones by hue alone: else nothing could be learned from crops."""
    seen = set()
    for image_id, (first, *_) in read_coco(sample, "train2017").imgToAnns.items():
        with Image.open(sample / "train2017" / f"{image_id:012d}.jpg") as picture:
            category = first["category_id"]
            if picture.mode != "RGB" or category not in tool.FIRST_SHARE:
                continue
            hue, vivid, _ = picture.convert("HSV").split()
        counts = hue.histogram(vivid.point(bool).convert("1"))
        off = counts.index(max(counts)) - 256 * list(tool.FIRST_SHARE).index(category) / 8
        assert abs((off + 128) % 256 - 128) < 14, category
        seen.add(category)
    assert len(seen) >= 4


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_even_a_tiny_sample_has_a_crowd(tmp_path, seed):
    make(tmp_path / "tiny", *FOUR, "--seed", seed, "--annotations_only")
    assert read_coco(tmp_path / "tiny", "train2017").getAnnIds(iscrowd=True)
    assert not (tmp_path / "tiny/annotations/instances_val2017.json").exists()


def test_the_first_annotation_is_the_large_object_and_mostly_one_of_eight(tmp_path):
    make(tmp_path / "many", "--images", 500, "--val_images", 0, "--annotations_only")
    coco, firsts = read_coco(tmp_path / "many", "train2017"), Counter()
    for first, *others in coco.imgToAnns.values():
        image = coco.imgs[first["image_id"]]
        assert first["area"] > 0.4 * image["width"] * image["height"]
        assert all(other["area"] < first["area"] for other in others)
        firsts[first["category_id"]] += 1
    places = [annotation["image_id"] for annotation in coco.dataset["annotations"]]
    assert sum(map(operator.eq, places, places[1:])) < len(places) / 10  # as in COCO, not grouped
    commonest = [count / firsts.total() for _, count in firsts.most_common(8)]
    assert 0.90 < sum(commonest) < 0.985
    assert commonest[0] < 0.3 and commonest[-1] > 0.04


def test_same_arguments_same_bytes(sample, tmp_path, monkeypatch):
    """Whatever the number of processes: `sample` is too small for more than one that draws."""
    monkeypatch.setattr(tool, "LEAST_SHARE", 3)
    with mock.patch.object(tool, "results_of", wraps=tool.results_of) as processes:
        make(tmp_path / "again", *SMALL, "--processes", 3)
    assert len(processes.call_args.args[0]) == 1 + 3
    assert digests(tmp_path / "again") == digests(sample)
    make(tmp_path / "other", *FOUR, "--seed", 6)
    common = {*digests(tmp_path / "other").values()} & {*digests(sample).values()}
    assert common == {"folder"}


def test_annotations_only_writes_the_same_files(sample, tmp_path):
    make(tmp_path / "index", *SMALL, "--annotations_only")
    assert not list(tmp_path.rglob("*.jpg"))
    assert digests(tmp_path / "index" / "annotations") == digests(sample / "annotations")


def test_a_complete_sample_is_left_alone(sample):
    before = digests(sample)
    assert "already" in make(sample, *SMALL, "--processes", 7)
    with pytest.raises(tool.Failure, match=f"{sample} is not empty"):
        make(sample, *SMALL[:-1], "6")
    assert digests(sample) == before


def test_sample_that_another_process_makes_meanwhile(tmp_path, monkeypatch):
    """As two nodes that share a disk do."""
    make_sample = tool.make_sample

    def slower(folder, args):
        monkeypatch.setattr(tool, "make_sample", make_sample)
        make(tmp_path / "coco", *FOUR)
        make_sample(folder, args)

    monkeypatch.setattr(tool, "make_sample", slower)
    assert "another process" in make(tmp_path / "coco", *FOUR)
    assert os.listdir(tmp_path) == ["coco"]


def test_an_empty_folder_is_taken_and_a_damaged_sample_or_other_data_is_not(tmp_path, monkeypatch):
    folder = tmp_path / "empty"
    folder.mkdir()
    make(folder, *FOUR)
    pictures = [*(folder / "train2017").iterdir()]
    assert len(pictures) == 4
    pictures[0].unlink()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter").write_text("mine")
    for path in (folder, tmp_path / "full"):
        with pytest.raises(tool.Failure, match=f"{path} is not empty"):
            make(path, *FOUR)
    assert os.listdir(tmp_path / "full") == ["letter"]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(tool.Failure, match="is the current folder"):
        make(".", *FOUR)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ("--images 3", "--images 3 is not at least 4"),
        ("--val_images 3", "--val_images 3 is not at least 4"),
        ("--seed -1", "--seed -1"),
        ("--processes 0", "--processes 0 is not at least 1"),
    ],
)
def test_bad_arguments(capsys, arguments, part):
    line = refusal(capsys, tool.parse_arguments, f"coco {arguments}")
    assert "error: " in line and part in line


def test_out_that_lies_under_a_file(tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    result = command(file / "coco")
    assert (result.returncode, result.stdout, file.read_text()) == (1, "", "mine")
    (line,) = result.stderr.splitlines()
    assert line.startswith("make_sample_coco.py: error: ")
    assert f"{file} is a file, not a folder" in line


def test_no_write_permission():
    """The kernel itself says no there, to root, too."""
    with pytest.raises(tool.Failure, match="cannot write /proc/coco: "):
        make("/proc/coco", *FOUR)


KILLED = "a worker was ended by signal 9 (9 is also how a system ends processes when it is out of "
KILLED += "memory)"


@pytest.mark.parametrize(
    ("whom", "number", "code", "words"),
    [
        ("process", signal.SIGTERM, 143, "stopped on a signal; nothing is left"),
        pytest.param("worker", signal.SIGKILL, 1, KILLED, marks=LONG),
        pytest.param("process", signal.SIGKILL, -9, None, marks=LONG),
    ],
)
def test_an_interrupted_make_leaves_no_out(tmp_path, whom, number, code, words):
    command = [sys.executable, TOOL, tmp_path / "coco", "--images", 1000, "--processes", 2]
    # Two processes keep the pipes open as long as they are there.
    with start(command, split=True) as started:
        wait_until(lambda: list(tmp_path.rglob("*.jpg")), 30, "the first picture")
        os.kill(max(started.pids()) if whom == "worker" else started.pid, number)
        run = started.finish(30, expect=code)
    assert not (tmp_path / "coco").exists() and run.out == ""
    if words:
        assert run.err == f"make_sample_coco.py: error: {words}\n"
        assert not list(tmp_path.iterdir())
    else:  # nobody can clean up then, but the name says what it is
        assert all(path.name.endswith(".unfinished") for path in tmp_path.iterdir())
