"""tools/show_results.py: the script's own answers, the picture, and one line for bad input."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.text import Text
from PIL import Image

import show_results as tool
from analysis import results_plot
from support.datasets import make_set, numbered, truncate
from support.forks import write
from support.processes import LONG, SCRIPT
from test_classes import FAST, ODD, data_of

# --- In a forked process, where torch is imported already --------------------------------------


def show(demo, result):
    """The tool as its last line starts it, with this process's arguments."""
    sys.exit(tool.main())


def show_all(demo, result, calls):
    """[exit code, stdout, stderr] of the tool for each list of arguments, one after the other."""
    found = []
    for hidden, argv in calls:
        out, err = io.StringIO(), io.StringIO()
        with without(hidden), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = tool.main(argv)
            except SystemExit as end:
                code = end.code
            except Exception as error:  # fails the test of this row alone
                code = repr(error)
        found.append([code, out.getvalue(), err.getvalue()])
    write(result, found)


@contextlib.contextmanager
def without(package):
    """As if it were not installed."""
    import analysis

    kept = dict(sys.modules)
    if package:
        sys.modules[package] = None
        sys.modules.pop("analysis.results_plot", None)
        vars(analysis).pop("results_plot", None)
    yield
    sys.modules.clear()
    sys.modules.update(kept)
    analysis.results_plot = results_plot


def results(demo, result, given):
    """What the tool has found out, as far as it is plain values."""
    args = tool.parse_arguments(given)
    found = tool.results_of(tool.load_script(args.script), args)
    facts = {name: getattr(found, name) for name in ("names", "chosen", "baseline")}
    arrays = {name: getattr(found, name).tolist() for name in ("labels", "guesses", "confidence")}
    write(result, facts | arrays | {"pictures": found.pictures.shape})


def make_checkpoints(demo, result, folder, state):
    """Files that are no checkpoint of the demo, made of one that is."""
    state = demo.torch.load(state, weights_only=True)
    facts = state["facts"]
    for name, content in {
        "list": [1],
        "weights": state["model"],
        "facts": state | {"facts": {}},
        "size": state | {"facts": facts | {"--image_size": "wide"}},
        "names": state | {"categories": ["four", "6", "8", "nine"]},
        "layers": state | {"model": {"fc.weight": state["model"]["fc.weight"]}},
        "old": {key: value for key, value in state.items() if key != "categories"},
    }.items():
        demo.torch.save(content, f"{folder}/{name}.pt")


# --- What it finds -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(demo, tmp_path_factory):
    """A checkpoint of four classes; 39 validation images and a damaged one; the run's last line on
    them, and the tool's arguments for them.
    """
    folder = tmp_path_factory.mktemp("trained")
    labels = np.random.default_rng(0).choice([*ODD], 40).tolist()
    argv = [*data_of(folder, ODD, labels), *FAST[:-1], "6", "--num_epochs", "3"]
    truncate(folder / "val_images" / "0007.jpg")
    job = demo.run([*argv, "--batch_size", "8", "--checkpoint", folder / "c.pt"])
    lines = [line for line in job.lines(0) if " validation | " in line]
    own = [str(folder / "c.pt"), "--coco_image_path", str(folder / "val_images")]
    own += ["--annotation_path", str(folder / "val_instances.json"), "--script", str(SCRIPT)]
    return SimpleNamespace(folder=folder, line=lines[-1], argv=own, labels=labels)


def test_top_1_and_baseline_are_those_of_the_scripts_validation(demo, trained, tmp_path):
    picture = tmp_path / "a picture.png"
    job = demo.run([*trained.argv, "--output", picture], call=show)
    theirs = re.search(r"(Top-1: .*%) \| (39 images) \| .*s \| (baseline .*%)$", trained.line)
    hits = round(39 * float(theirs[1][7:-1]) / 100)
    assert 0 < hits < 39, "all alike: could not tell one model from another"
    line, where = job.out.splitlines()[-2:]
    assert line.startswith(" | ".join(theirs.groups()) + " (always ")
    assert where == f"Picture: {picture}"
    assert job.out.count("WARNING: image ") == job.out.count("0007.jpg is damaged") == 1
    with Image.open(picture) as image:
        assert image.format == "PNG" and image.width == 1200


def test_each_answer_stands_once_among_the_classes(demo, trained):
    job = demo.run(call=results, given=trained.argv)
    found = SimpleNamespace(**job.result())
    names = ["four", "6", "7", "?"]
    assert found.names == names and found.pictures == [16, 40, 40, 3]
    wanted = [[*ODD].index(label) for label in trained.labels]
    assert found.labels == [-100 if i == 7 else label for i, label in enumerate(wanted)]
    for name in ("labels", "guesses", "confidence"):
        setattr(found, name, np.array(getattr(found, name)))
    assert (found.confidence >= 0.25).all() and (found.confidence <= 1).all()  # of four classes
    found.whole = found.labels >= 0
    rows = results_plot.class_rows(found)
    assert sum(row.images for row in rows) == 39
    assert [row.images for row in rows] == sorted((row.images for row in rows), reverse=True)
    for row in rows:
        own = found.labels == names.index(row.name)
        guesses = found.guesses[own & found.whole].tolist()
        assert row.right == guesses.count(names.index(row.name))
        if row.times:
            others = [guess for guess in guesses if guess != names.index(row.name)]
            assert row.times == max(map(others.count, others))
            assert row.times == others.count(names.index(row.mistaken_for))
        else:
            assert row.right == row.images


@pytest.mark.parametrize(
    ("right", "wrong", "shown"),
    [(30, 30, (8, 8)), (30, 3, (13, 3)), (2, 30, (2, 14)), (3, 2, (3, 2)), (0, 1, (0, 1))],
)
def test_half_of_the_images_are_wrong_ones_from_the_surest_on(right, wrong, shown):
    count = right + wrong + 1
    order = np.random.default_rng(right).permutation(count)
    is_right, whole, sure = (np.zeros(count, kind) for kind in (bool, bool, float))
    is_right[order[:right]], whole[order[:-1]] = True, True
    sure[order] = np.linspace(0.99, 0.5, count)
    chosen = tool.choose(is_right, whole, sure)
    assert len({*chosen}) == len(chosen) == sum(shown) and whole[chosen].all()
    assert is_right[chosen].tolist() == [True] * shown[0] + [False] * shown[1]
    for kind, mine in ((is_right, chosen[: shown[0]]), (~is_right & whole, chosen[shown[0] :])):
        if mine:
            assert sure[mine].tolist() == sorted(sure[mine], reverse=True)
            assert sure[mine[0]] == sure[kind].max()
            assert len(mine) == 1 or sure[mine[-1]] == sure[kind].min()


# --- The picture -------------------------------------------------------------------------------


def made_up(classes: int, images: int, name: str) -> SimpleNamespace:
    noise = np.random.default_rng(classes)
    labels = noise.integers(0, classes, images)
    guesses = np.where(noise.random(images) < 0.6, labels, noise.integers(0, classes, images))
    confidence, whole = noise.random(images), np.ones(images, bool)
    chosen = tool.choose(labels == guesses, whole, confidence)
    return SimpleNamespace(
        names=[name.format(i) for i in range(classes)],
        labels=labels,
        guesses=guesses,
        confidence=confidence,
        whole=whole,
        chosen=chosen,
        pictures=np.zeros((len(chosen), 8, 8, 3), np.uint8),
        baseline=50.0,
        most_frequent=0,
    )


@pytest.mark.parametrize(
    ("classes", "images", "name"),
    [
        pytest.param(4, 40, "class {}", marks=LONG),
        (1, 20, "$only$ {}"),
        (200, 3000, "a category {} with a very long name"),
        (3, 2, "{} 猫 of a few"),
    ],
    ids=["some", "one", "200", "few"],
)
def test_picture_has_all_words_apart_and_inside(tmp_path, monkeypatch, classes, images, name):
    figures, make = [], results_plot.Figure
    monkeypatch.setattr(
        results_plot, "Figure", lambda **how: figures.append(make(**how)) or figures[0]
    )
    found = made_up(classes, images, name)
    tool.write_picture(results_plot, found, str(tmp_path / "picture"))  # no suffix: PNG
    monkeypatch.undo()
    (figure,) = figures
    with Image.open(tmp_path / "picture") as image:
        assert image.format == "PNG"
    texts = [t for t in figure.findobj(Text) if t.get_text() and t.get_visible()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of letters that the font lacks
        figure.draw_without_rendering()
        boxes = [(text.get_text(), text.get_window_extent()) for text in texts]
    assert any(words.startswith("Top-1: ") for words, _ in boxes)
    for i, (words, box) in enumerate(boxes):
        inside = box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1
        assert inside and box.y1 <= figure.bbox.y1, f"{words!r} is cut off"
        for other, place in boxes[:i]:
            assert not box.overlaps(place), f"{words!r} lies on {other!r}"
    check_frames(figure, found)


def check_frames(figure, found):
    """Right and wrong differ by sign and frame, without colour; wrong ones have both names."""
    images = [axis for axis in figure.axes if axis.images]
    assert len(images) == len(found.chosen) == min(16, len(found.labels))
    for axis, position in zip(images, found.chosen, strict=True):
        right = found.labels[position] == found.guesses[position]
        assert axis.get_title()[0] == ("✓" if right else "✗")
        assert {spine.get_linestyle() == "-" for spine in axis.spines.values()} == {right}
        answer, label = (found.names[i[position]] for i in (found.guesses, found.labels))
        lines = [answer] if right else [answer, f"is {label}"]
        for line, words in zip(lines, axis.get_xlabel().split("\n"), strict=True):
            assert line.startswith(words.rstrip("…")) and (words == line or len(words) > 10)


# --- Bad input ---------------------------------------------------------------------------------

# What is given in place of what is right, {} being the folder of the checkpoint; what is hidden;
# what the line says.
BAD = {
    "no checkpoint": (["{}/none.pt"], None, "checkpoint {}/none.pt cannot be read"),
    "a picture": (["{}/val_images/0001.jpg"], None, "cannot be read, or holds more than"),
    "a list": (["{}/list.pt"], None, "list.pt is not one of this demo"),
    "weights alone": (["{}/weights.pt"], None, "weights.pt is not one of this demo"),
    "no facts": (["{}/facts.pt"], None, "facts.pt is not one of this demo: KeyError: '--image"),
    "no size": (["{}/size.pt"], None, "size.pt is not one of this demo: ValueError"),
    "another model": (["{}/layers.pt"], None, "layers.pt has another model (--script names"),
    "other names": (["{}/names.pt"], None, "has a class 8, the annotations 7: give annotations"),
    "other classes": (
        ["--annotation_path", "{}/other/instances.json"],
        None,
        "{}/c.pt has 4 classes, 80 are in the annotations: give annotations of the data set",
    ),
    "no annotations": (["--annotation_path", "{}/none.json"], None, "annotation file {}/none"),
    "no images": (["--coco_image_path", "{}/none"], None, "{}/none lacks 40 of 40 listed"),
    "all damaged": (["--coco_image_path", "{}/damaged"], None, "can be decoded: repair them"),
    "no such folder": (["--output", "{}/none/a.png"], None, "none/a.png: no such folder"),
    "a folder": (["--output", "{}"], None, "--output {}: is a folder, name a file in it"),
    "not writable": (["--output", "/proc/a.png"], None, "--output /proc/a.png: cannot be written"),
    "no such format": (["--output", "{}/a.xyz"], None, "no format is called .xyz: name it .png"),
    "no matplotlib": ([], "matplotlib", "the picture needs matplotlib: pip install matplotlib"),
    "no pycocotools": ([], "pycocotools.coco", "activate the environment that trains, see README"),
    "no script": (["--script", "{}/none.py"], None, "--script {}/none.py: cannot be loaded"),
    "another script": (["--script", tool.__file__], None, "is neither the demo's script nor"),
}


@pytest.fixture(scope="module")
def refusals(demo, trained):
    """What the tool says to each row of BAD, all in one process."""
    folder = trained.folder
    demo.run(call=make_checkpoints, folder=str(folder), state=str(folder / "c.pt"))
    make_set(folder / "other", 4)
    damaged = folder / "damaged"
    damaged.mkdir()
    for name in numbered(40):
        (damaged / name).write_bytes(b"no picture")
    calls = []
    for name, (given, hidden, _) in BAD.items():
        given = [part.format(folder) for part in given]
        base = trained.argv[1:] if given and not given[0].startswith("-") else trained.argv
        calls.append([hidden, [*base, "--output", str(folder / f"{name}.png"), *given]])
    return dict(zip(BAD, demo.run(call=show_all, calls=calls).result(), strict=True))


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_leaves_no_picture(refusals, trained, name):
    code, out, err = refusals[name]
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("show_results.py: error: ")
    assert BAD[name][2].format(trained.folder) in line
    assert not (trained.folder / f"{name}.png").exists()


def test_checkpoint_without_names_takes_those_of_the_annotations(demo, trained, refusals):
    """As of before other numbers of classes than COCO's were possible."""
    argv = [str(trained.folder / "old.pt"), *trained.argv[1:]]
    assert demo.run(call=results, given=argv).result()["names"] == ["four", "6", "7", "?"]
