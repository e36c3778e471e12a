"""tools/make_sample_coco.py: its files read back with pycocotools and Pillow.

The real command makes the set that most tests look at; others call the same functions.
"""

import contextlib
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from pycocotools.coco import COCO

import make_sample_coco as tool
from support.nodes import small_disk
from support.processes import LONG, ROOT, start, wait_until

TOOL = ROOT / "tools" / "make_sample_coco.py"
UNUSED_IDS = {12, 26, 29, 30, 45, 66, 68, 69, 71, 83}
SMALL = ["--images", "20", "--val_images", "4", "--seed", "5"]
FOUR = ["--images", "4", "--val_images", "0"]
IMAGES = {"train2017": 20, "val2017": 4}
# The command, for which a few pictures are enough to start processes. It says how many.
SHARED = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import make_sample_coco as tool
drawing = tool.drawing
tool.drawing = lambda *given: print(given[-1], "processes") or drawing(*given)
tool.LEAST_SHARE = 3
tool.main()
"""

# pycocotools 2.0.11 with numpy 2 says this for each mask that it decodes.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def make(*arguments):
    """What the command says; raises what it ends with."""
    return tool.run(tool.parse_arguments([*map(str, arguments)]))


def command(*arguments, program=(TOOL,)):
    words = [sys.executable, *map(str, [*program, *arguments])]
    return subprocess.run(words, capture_output=True, text=True, timeout=60)


def load(folder, split):
    with contextlib.redirect_stdout(io.StringIO()):
        return COCO(str(folder / "annotations" / f"instances_{split}.json"))


def digests(folder):
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sample") / "coco"
    result = command(folder, *SMALL)
    assert result.returncode == 0 and len(result.stdout.splitlines()) == 1, result.stderr
    return folder


def test_layout(sample):
    parts = {"train2017", "val2017", "annotations", "sample.json"}
    assert {path.name for path in sample.iterdir()} == parts
    assert [path.name for path in sample.parent.iterdir()] == ["coco"]  # nothing temporary
    names = {split: os.listdir(sample / split) for split in IMAGES}
    assert {split: len(found) for split, found in names.items()} == IMAGES
    assert not {*names["train2017"]} & {*names["val2017"]}


@pytest.mark.parametrize("split", IMAGES)
def test_categories_are_those_of_coco(sample, split):
    path = sample / "annotations" / f"instances_{split}.json"
    categories = json.loads(path.read_text())["categories"]
    ids = [category["id"] for category in categories]
    assert ids == sorted(set(range(1, 91)) - UNUSED_IDS) and len(ids) == 80
    assert {*map(frozenset, categories)} == {frozenset({"supercategory", "id", "name"})}
    named = {c["id"]: (c["supercategory"], c["name"]) for c in categories}
    assert len({*named.values()}) == 80 and len({group for group, _ in named.values()}) == 12
    assert named[1] == ("person", "person") and named[90] == ("indoor", "toothbrush")
    assert named[25] == ("animal", "giraffe") and named[27] == ("accessory", "backpack")
    assert named[44] == ("kitchen", "bottle") and named[67] == ("furniture", "dining table")


@pytest.mark.parametrize("split", IMAGES)
def test_images_are_as_the_file_says(sample, split):
    coco, modes, sizes = load(sample, split), [], []
    assert len(coco.imgs) == IMAGES[split]
    for image in coco.imgs.values():
        assert image["file_name"] == f"{image['id']:012d}.jpg"
        path = sample / split / image["file_name"]
        with Image.open(path) as picture:
            assert picture.format == "JPEG"
            assert picture.size == (image["width"], image["height"])
            picture.load()
            modes.append(picture.mode)
        sizes.append(path.stat().st_size)
    assert 1 <= modes.count("L") < len(modes) / 2 and {*modes} == {"L", "RGB"}
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
            assert mask.sum() == annotation["area"]
            assert mask[y : y + height, x : x + width].all()
        else:
            # The mask counts pixels, the area is that of the polygon: they part along the edge.
            assert abs(mask.sum() - annotation["area"]) <= width + height + 4


def test_colour_tells_the_category(sample):
    """The eight common ones by hue alone: else nothing could be learned from crops."""
    coco, hues = load(sample, "train2017"), {}
    for image_id, annotations in coco.imgToAnns.items():
        with Image.open(sample / "train2017" / f"{image_id:012d}.jpg") as picture:
            if picture.mode == "RGB":
                hue, vivid, _ = picture.convert("HSV").split()
                counts = hue.histogram(vivid.point(bool).convert("1"))
                hues.setdefault(annotations[0]["category_id"], []).append(
                    counts.index(max(counts))
                )
    assert len({*hues} & {*tool.FIRST_SHARE}) >= 4
    for category in {*hues} & {*tool.FIRST_SHARE}:
        wanted = 256 * list(tool.FIRST_SHARE).index(category) / 8
        for hue in hues[category]:
            assert abs((hue - wanted + 128) % 256 - 128) < 14, (category, hue)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_even_a_tiny_sample_has_a_crowd(tmp_path, seed):
    make(tmp_path / "tiny", *FOUR, "--annotations", 3, "--seed", seed, "--annotations_only")
    coco = load(tmp_path / "tiny", "train2017")
    assert len(coco.anns) == 3 and coco.getAnnIds(iscrowd=True)


def test_the_first_annotation_is_the_large_object_and_mostly_one_of_eight(tmp_path):
    make(tmp_path / "many", "--images", 500, "--val_images", 0, "--annotations_only")
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
    commonest = sorted((firsts.count(number) for number in {*firsts}), reverse=True)[:8]
    assert 0.90 < sum(commonest) / len(firsts) < 0.985
    assert commonest[0] < 0.3 * len(firsts) and commonest[-1] > 0.04 * len(firsts)


def test_same_arguments_same_bytes(sample, tmp_path):
    make(tmp_path / "again", *SMALL)
    assert digests(tmp_path / "again") == digests(sample)
    make(tmp_path / "other", *FOUR, "--seed", 6)
    assert not {*digests(tmp_path / "other").values()} & {*digests(sample).values()}


def test_any_number_of_processes_gives_the_same_bytes(sample, tmp_path):
    """`sample` is too small for more than one."""
    program = ["-c", SHARED, TOOL.parent]
    result = command(tmp_path / "shared", *SMALL, "--processes", 3, program=program)
    assert "3 processes" in result.stdout, result.stderr
    assert digests(tmp_path / "shared") == digests(sample)


@LONG
def test_disk_that_is_full_for_several_processes(tmp_path):
    with small_disk(tmp_path / "disk", "1m") as disk:
        given = [disk / "coco", *SMALL, "--processes", 2]
        result = command(*given, program=["-c", SHARED, TOOL.parent])
        assert not os.listdir(disk)
    assert (result.returncode, result.stdout) == (1, "2 processes\n")
    (line,) = result.stderr.splitlines()
    assert line.endswith(f"error: cannot write {disk}/coco: No space left on device")


@LONG
def test_process_that_is_killed_while_it_draws(tmp_path):
    given = [tmp_path / "coco", "--images", 400, "--processes", 2]
    with start([sys.executable, TOOL, *given], split=True) as started:
        wait_until(lambda: list(tmp_path.rglob("*.jpg")), 30, "the first picture")
        os.kill(max(started.pids()), signal.SIGKILL)  # the last one that was started
        run = started.finish(30, expect=1)
    assert "error: a process that drew pictures was ended: is there enough memory?" in run.err
    assert len(run.err.splitlines()) == 1 and not os.listdir(tmp_path)


def test_annotations_only_writes_the_same_files(sample, tmp_path):
    make(tmp_path / "index", *SMALL, "--annotations_only")
    assert not list(tmp_path.rglob("*.jpg"))
    for split in IMAGES:
        name = f"annotations/instances_{split}.json"
        assert (tmp_path / "index" / name).read_bytes() == (sample / name).read_bytes()


@LONG
def test_annotations_gives_the_exact_number_and_a_realistic_size(tmp_path):
    given = ["--images", 1183, "--val_images", 0, "--annotations", 8600, "--annotations_only"]
    make(tmp_path / "index", *given)
    path = tmp_path / "index/annotations/instances_train2017.json"
    assert len(json.loads(path.read_text())["annotations"]) == 8600
    assert not (tmp_path / "index/annotations/instances_val2017.json").exists()
    # train2017's own file: 448 MB for 860,001 annotations.
    assert path.stat().st_size == pytest.approx(448e6 / 100, rel=0.1)


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
    (tmp_path / "empty").mkdir()
    make(tmp_path / "empty", *FOUR)
    pictures = [*(tmp_path / "empty/train2017").iterdir()]
    assert len(pictures) == 4
    pictures[0].unlink()
    with pytest.raises(tool.Failure, match="not empty"):  # damaged
        make(tmp_path / "empty", *FOUR)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/letter").write_text("mine")
    with pytest.raises(tool.Failure, match=f"{tmp_path / 'full'} is not empty"):
        make(tmp_path / "full", *FOUR)
    assert os.listdir(tmp_path / "full") == ["letter"]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(tool.Failure, match="is the current folder"):
        make(".", *FOUR)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--images", "-3"], "--images -3 is not at least 4"),
        (["--images", "3"], "--images 3 is not at least 4"),
        (["--images", "many"], "--images: invalid int value: 'many'"),
        (["--val_images", "-1"], "--val_images -1"),
        (["--val_images", "3"], "--val_images 3 is not at least 4"),
        (["--seed", "-1"], "--seed -1"),
        (["--processes", "0"], "--processes 0 is not at least 1"),
        (["--annotations", "10", "--images", "50"], "--annotations 10 is not at least 49"),
        (["--pictures", "9"], "--pictures"),
    ],
)
def test_bad_arguments(capsys, arguments, part):
    with pytest.raises(SystemExit, match="2"):
        tool.parse_arguments(["coco", *arguments])
    (line,) = capsys.readouterr().err.splitlines()
    assert "error: " in line and part in line


def test_out_is_a_file_or_lies_under_one(tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    for out in (file, file / "coco"):
        result = command(out)
        assert (result.returncode, result.stdout) == (1, "")
        (line,) = result.stderr.splitlines()
        assert line.startswith("make_sample_coco.py: error: ")
        assert f"{file} is a file, not a folder" in line
    assert file.read_text() == "mine"


def test_no_write_permission(tmp_path):
    # Root may write anywhere but where the kernel itself says no.
    folder = Path("/proc") if os.geteuid() == 0 else tmp_path
    if os.geteuid():
        tmp_path.chmod(0o555)
    try:
        with pytest.raises(tool.Failure, match=f"cannot write {folder / 'coco'}: "):
            make(folder / "coco", *FOUR)
    finally:
        tmp_path.chmod(0o755)


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGINT, marks=LONG),
        pytest.param(signal.SIGKILL, marks=LONG),
    ],
)
def test_an_interrupted_make_leaves_no_out(tmp_path, number):
    # Two processes keep the pipes open as long as they are there.
    words = [sys.executable, TOOL, tmp_path / "coco", "--images", 5000, "--processes", 2]
    with start(words, split=True) as started:
        wait_until(lambda: list(tmp_path.rglob("*.jpg")), 30, "the first picture")
        os.kill(started.pid, number)
        code = -number if number == signal.SIGKILL else 128 + number
        run = started.finish(30, expect=code)
    assert not (tmp_path / "coco").exists() and run.out == ""
    if number == signal.SIGKILL:  # nobody can clean up then, but the name says what it is
        assert all(path.name.endswith(".unfinished") for path in tmp_path.iterdir())
    else:
        assert len(run.err.splitlines()) == 1 and "stopped" in run.err
        assert not list(tmp_path.iterdir())


def test_help_names_units_and_defaults(capsys):
    with pytest.raises(SystemExit, match="0"):
        tool.parse_arguments(["--help"])
    shown = capsys.readouterr().out
    for word in ("--images", "480", "kB", "--val_images", "64", "--seed", "--annotations_only"):
        assert word in shown
