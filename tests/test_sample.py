"""tools/make_sample_coco.py: the real command, its files read back with pycocotools and Pillow."""

import contextlib
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image
from pycocotools.coco import COCO

TOOL = Path(__file__).resolve().parents[1] / "tools" / "make_sample_coco.py"
UNUSED_IDS = {12, 26, 29, 30, 45, 66, 68, 69, 71, 83}
SMALL = ["--images", "24", "--val_images", "6", "--seed", "5"]
IMAGES = {"train2017": 24, "val2017": 6}

# pycocotools 2.0.11 with numpy 2 says this for each mask that it decodes.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def make(*arguments, **options):
    command = [sys.executable, str(TOOL), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


def load(folder, split):
    with contextlib.redirect_stdout(io.StringIO()):
        return COCO(str(folder / "annotations" / f"instances_{split}.json"))


def digests(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def assert_refused(result, code, *words):
    assert result.returncode == code, result
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert result.stderr.startswith("make_sample_coco.py: error: ")
    for word in words:
        assert word in result.stderr


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sample") / "coco"
    result = make(folder, *SMALL)
    assert result.returncode == 0, result.stderr
    return folder


def test_layout_and_record(sample):
    assert {path.name for path in sample.iterdir()} == {
        "train2017",
        "val2017",
        "annotations",
        "sample.json",
    }
    assert [path.name for path in sample.parent.iterdir()] == ["coco"]  # nothing temporary
    for split, count in IMAGES.items():
        names = [path.name for path in (sample / split).iterdir()]
        assert len(names) == count
        assert all(
            len(name) == 16 and name[:12].isdigit() and name.endswith(".jpg") for name in names
        )
    assert not set(os.listdir(sample / "train2017")) & set(os.listdir(sample / "val2017"))


@pytest.mark.parametrize("split", IMAGES)
def test_categories_are_those_of_coco(sample, split):
    path = sample / "annotations" / f"instances_{split}.json"
    categories = json.loads(path.read_text())["categories"]
    ids = [category["id"] for category in categories]
    assert ids == sorted(set(range(1, 91)) - UNUSED_IDS) and len(ids) == 80
    assert {frozenset(category) for category in categories} == {
        frozenset({"supercategory", "id", "name"})
    }
    named = {
        category["id"]: (category["supercategory"], category["name"]) for category in categories
    }
    assert len(set(named.values())) == 80
    assert len({group for group, _ in named.values()}) == 12
    assert named[1] == ("person", "person") and named[90] == ("indoor", "toothbrush")
    assert named[25] == ("animal", "giraffe") and named[27] == ("accessory", "backpack")
    assert named[44] == ("kitchen", "bottle") and named[67] == ("furniture", "dining table")


@pytest.mark.parametrize("split", IMAGES)
def test_images_are_as_the_file_says(sample, split):
    coco = load(sample, split)
    assert len(coco.imgs) == IMAGES[split]
    modes, sizes = [], []
    for image in coco.imgs.values():
        assert image["file_name"] == f"{image['id']:012d}.jpg"
        path = sample / split / image["file_name"]
        with Image.open(path) as picture:
            assert picture.format == "JPEG"
            assert picture.size == (image["width"], image["height"])
            picture.load()
            modes.append(picture.mode)
        sizes.append(path.stat().st_size)
    assert 1 <= modes.count("L") < len(modes) / 3 and set(modes) == {"L", "RGB"}
    assert 60_000 < sum(sizes) / len(sizes) < 200_000 and min(sizes) > 15_000


@pytest.mark.parametrize("split", IMAGES)
def test_annotations_agree_with_pycocotools(sample, split):
    coco = load(sample, split)
    per_image = [len(coco.getAnnIds(imgIds=[number])) for number in coco.imgs]
    assert min(per_image) == 0 and per_image.count(0) <= 2  # some have none, few do
    assert sum(count > 1 for count in per_image) > len(per_image) / 2
    assert len(coco.anns) == sum(per_image) == round(IMAGES[split] * 860_001 / 118_287)

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
            code = annotation["segmentation"]
            assert code["size"] == [image["height"], image["width"]]
            assert sum(code["counts"]) == image["height"] * image["width"]
            assert mask.sum() == annotation["area"]
        else:
            # The mask counts pixels, the area is that of the polygon: they part along the edge.
            assert abs(mask.sum() - annotation["area"]) <= width + height + 4


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_even_a_tiny_sample_has_a_crowd(tmp_path, seed):
    result = make(
        tmp_path / "tiny",
        "--images",
        4,
        "--val_images",
        0,
        "--annotations",
        3,
        "--seed",
        seed,
        "--annotations_only",
    )
    assert result.returncode == 0, result.stderr
    coco = load(tmp_path / "tiny", "train2017")
    assert len(coco.anns) == 3 and coco.getAnnIds(iscrowd=True)


def test_the_first_annotation_is_the_large_object_and_mostly_one_of_eight(tmp_path):
    assert make(tmp_path / "many", "--images", 600, "--annotations_only").returncode == 0
    coco = load(tmp_path / "many", "train2017")
    firsts, neighbours, last = [], 0, None
    for annotations in coco.imgToAnns.values():
        image = coco.imgs[annotations[0]["image_id"]]
        assert annotations[0]["area"] > 0.4 * image["width"] * image["height"]
        assert all(other["area"] < annotations[0]["area"] for other in annotations[1:])
        firsts.append(annotations[0]["category_id"])
    for annotation in coco.dataset["annotations"]:
        neighbours += annotation["image_id"] == last
        last = annotation["image_id"]
    assert neighbours < len(coco.anns) / 10  # as in COCO, not grouped by image
    commonest = sorted(
        {number: firsts.count(number) for number in firsts}.items(), key=lambda entry: -entry[1]
    )[:8]
    assert 0.90 < sum(count for _, count in commonest) / len(firsts) < 0.985
    assert commonest[0][1] < 0.3 * len(firsts) and commonest[-1][1] > 0.04 * len(firsts)


def test_same_arguments_same_bytes(sample, tmp_path):
    assert make(tmp_path / "again", *SMALL).returncode == 0
    assert digests(tmp_path / "again") == digests(sample)
    assert make(tmp_path / "other", *SMALL[:-1], "6").returncode == 0
    assert not set(digests(tmp_path / "other").values()) & set(digests(sample).values())


def test_annotations_only_writes_the_same_files(sample, tmp_path):
    assert make(tmp_path / "index", *SMALL, "--annotations-only").returncode == 0
    assert not list(tmp_path.rglob("*.jpg"))
    for split in IMAGES:
        name = f"annotations/instances_{split}.json"
        assert (tmp_path / "index" / name).read_bytes() == (sample / name).read_bytes()


def test_annotations_gives_the_exact_number_and_a_realistic_size(tmp_path):
    result = make(
        tmp_path / "index",
        "--images",
        1183,
        "--val_images",
        0,
        "--annotations",
        8600,
        "--annotations_only",
    )
    assert result.returncode == 0, result.stderr
    path = tmp_path / "index/annotations/instances_train2017.json"
    assert len(json.loads(path.read_text())["annotations"]) == 8600
    assert not (tmp_path / "index/annotations/instances_val2017.json").exists()
    # train2017's own file: 448 MB for 860,001 annotations.
    assert path.stat().st_size == pytest.approx(448e6 / 100, rel=0.1)


def test_a_complete_sample_is_left_alone(sample):
    before = digests(sample)
    result = make(sample, *SMALL)
    assert result.returncode == 0 and "already" in result.stdout
    assert len(result.stdout.splitlines()) == 1
    assert_refused(make(sample, *SMALL[:-1], "6"), 1, str(sample), "not empty")
    assert digests(sample) == before


def test_a_damaged_sample_is_refused(tmp_path):
    assert make(tmp_path / "coco", "--images", 4, "--val_images", 0).returncode == 0
    next((tmp_path / "coco/train2017").iterdir()).unlink()
    assert_refused(make(tmp_path / "coco", "--images", 4, "--val_images", 0), 1, "not empty")


def test_an_empty_folder_is_taken_and_other_data_is_not(tmp_path):
    (tmp_path / "empty").mkdir()
    assert make(tmp_path / "empty", "--images", 4, "--val_images", 0).returncode == 0
    assert len(list((tmp_path / "empty/train2017").iterdir())) == 4
    (tmp_path / "full").mkdir()
    (tmp_path / "full/letter").write_text("mine")
    assert_refused(make(tmp_path / "full", "--images", 4), 1, str(tmp_path / "full"), "not empty")
    assert os.listdir(tmp_path / "full") == ["letter"]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--images", "-3"], "--images"),
        (["--images", "3"], "between 4"),
        (["--images", "many"], "whole number"),
        (["--val_images", "-1"], "--val_images"),
        (["--seed", "-1"], "--seed"),
        (["--annotations", "10", "--images", "50"], "--annotations"),
        (["--pictures", "9"], "--pictures"),
    ],
)
def test_bad_arguments(tmp_path, arguments, word):
    assert_refused(make(tmp_path / "coco", *arguments), 2, word)
    assert not list(tmp_path.iterdir())


def test_out_is_a_file_or_lies_under_one(tmp_path):
    (tmp_path / "file").write_text("mine")
    assert_refused(make(tmp_path / "file"), 1, str(tmp_path / "file"), "is a file")
    assert_refused(make(tmp_path / "file" / "coco"), 1, str(tmp_path / "file"), "is a file")
    assert (tmp_path / "file").read_text() == "mine"


def test_no_write_permission(tmp_path):
    if os.geteuid() == 0:
        # Root may write anywhere but where the kernel itself says no.
        if not Path("/proc/self").is_dir():
            pytest.skip("root may write everywhere, and there is no /proc")
        assert_refused(make("/proc/coco"), 1, "cannot write /proc/coco")
        return
    tmp_path.chmod(0o555)
    try:
        assert_refused(make(tmp_path / "coco"), 1, "cannot write", "Permission denied")
    finally:
        tmp_path.chmod(0o755)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_make_leaves_no_out(tmp_path, number):
    process = subprocess.Popen(
        [sys.executable, str(TOOL), str(tmp_path / "coco"), "--images", "5000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 30
        while not list(tmp_path.rglob("*.jpg")):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        out, error = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert not (tmp_path / "coco").exists()
    assert out == ""
    if number == signal.SIGKILL:  # nobody can clean up then, but the name says what it is
        assert all(path.name.endswith(".unfinished") for path in tmp_path.iterdir())
    else:
        assert process.returncode == 128 + number
        assert len(error.splitlines()) == 1 and "stopped" in error
        assert not list(tmp_path.iterdir())


def test_help_names_units_and_defaults():
    result = make("--help")
    assert result.returncode == 0
    for word in ("--images", "480", "MB", "--val_images", "64", "--seed", "--annotations_only"):
        assert word in result.stdout
