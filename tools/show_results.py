#!/usr/bin/env python3
"""Draws what a model has learnt: some of its answers, and what became of each class.

    python tools/show_results.py run.pt --coco_image_path DIR --annotation_path FILE

CHECKPOINT is what --checkpoint of demo_coco_resnet18.py has written. The model computes as in the
script's own validation, on a folder of images or a packed file.

The picture shows 16 images, as far as possible 8 right answers (solid frame) and 8 wrong ones
(dashed frame), each from the surest to the least sure. Beside them stand the classes: how many of
their images are right, and what the wrong ones were taken for most. Printed is Top-1, the
accuracy, and what always guessing the most frequent class would reach: the baseline.
"""

import argparse
import importlib.util
import os
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import torch

os.environ["MPLBACKEND"] = "Agg"  # matplotlib may lack that of a notebook
try:
    import matplotlib
    from matplotlib.figure import Figure  # without pyplot, which may look for a display
except ImportError:
    sys.exit("show_results.py: error: matplotlib is missing: pip install matplotlib")

SCRIPT = Path(__file__).resolve().parent.parent / "demo_coco_resnet18.py"
MOST_IMAGES = 16  # in the picture
MOST_CLASSES = 18  # each with a row of its own
LONGEST = 16  # characters of a name


# ---- The model's answers


def load_script(path):
    """The script as a module: model, list of images and crops are its own."""
    spec = importlib.util.spec_from_file_location("demo", path)
    demo = sys.modules["demo"] = importlib.util.module_from_spec(spec)  # for its dataclasses
    spec.loader.exec_module(demo)
    return demo


def results_of(demo, args):
    """What the checkpoint's model answers on the images. Raises demo.UserError.

    names: of the classes. labels, guesses, confidence: tensors (n,). dataset: the images.
    """
    with demo.as_user_error(f"{args.checkpoint} is no checkpoint of the demo"):
        state = torch.load(args.checkpoint, map_location="cpu", weights_only=True)
        names, weights, trained = state["categories"], state["model"], state["settings"]
        image_size, precision = trained["--image_size"], trained["--precision"]
    images, file = args.coco_image_path, args.annotation_path
    classes = demo.ImageSet([], range(len(names)), dict(enumerate(names)), 0)
    image_list = demo.read_image_list(file, classes)
    demo.look_for_images(images, image_list.names)
    argv = [f"--{part}image_path={images}" for part in ("coco_", "val_")]
    argv += [f"--{part}annotation_path={file}" for part in ("", "val_")]
    argv += [f"--image_size={image_size}", f"--precision={precision}", "--weights=none"]
    argv += ["--workers=0"]
    settings, process = demo.parse_arguments(argv), demo.ProcessInfo()
    os.environ.update(demo.ALONE)  # whatever has started this program
    demo.join_process_group(settings, process)  # chooses the device
    loader = demo.make_val_loader(settings, process, image_list)
    model = demo.build_model(settings, process, image_list)
    with demo.as_user_error(f"{args.checkpoint} has another model, see --script"):
        model.load_state_dict(weights)
    mean, std = (values.to(process.device) for values in (demo.MEAN, demo.STD))
    # What forward needs of it.
    training = SimpleNamespace(args=settings, process=process, mean=mean, std=std)
    found = []
    model.eval()
    with torch.inference_mode():
        for batch, labels in loader:
            confidence, guesses = demo.forward(training, model, batch).softmax(1).max(1)
            found.append((labels, guesses.cpu(), confidence.cpu()))
    labels, guesses, confidence = (torch.cat(parts) for parts in zip(*found, strict=True))
    names = [str(name)[:LONGEST] for name in names]
    return SimpleNamespace(
        names=names, dataset=loader.dataset, labels=labels, guesses=guesses, confidence=confidence
    )


def choose(right, confidence):
    """Positions of at most MOST_IMAGES images: right ones, then wrong ones."""
    order = confidence.argsort(descending=True, stable=True)
    wrong = spread(order[~right[order]], MOST_IMAGES // 2)
    return spread(order[right[order]], MOST_IMAGES - len(wrong)) + wrong


def spread(positions, count):
    """`count` of them in equal steps, the first and the last included; or all."""
    steps = torch.linspace(0, len(positions) - 1, min(count, len(positions)))
    return positions[steps.round().long()].tolist()


def class_rows(results):
    """(name, images, right, text) of each class that has images, most images first.

    The text says how many are right, and what the class was taken for most often.
    """
    rows = []
    for label, images in Counter(results.labels.tolist()).most_common():
        guesses = Counter(results.guesses[results.labels == label].tolist())
        right = guesses.pop(label, 0)
        text = f"{right} of {images}"
        for guess, times in guesses.most_common(1):
            text += f", {times} × {results.names[guess]}"
        rows.append((results.names[label], images, right, text))
    return rows


def in_words(results):
    """Top-1 and the baseline, with the figures of the script's line on its validation."""
    images = len(results.labels)
    correct = (results.labels == results.guesses).sum().item()
    label, most = Counter(results.labels.tolist()).most_common(1)[0]
    text = f"Top-1: {100 * correct / images:.2f}% | {images} images | "
    return text + f"baseline {100 * most / images:.2f}% (always {results.names[label]})"


# ---- The picture


def draw(results, file):
    """Images on the left, classes on the right. Raises OSError or ValueError."""
    matplotlib.rcParams["text.parse_math"] = False  # a class may have a $ in its name
    figure = Figure(figsize=(11, 6.8), layout="constrained")
    figure.suptitle(in_words(results))
    left, right = figure.subfigures(1, 2, width_ratios=[6, 5])
    draw_images(left.subplots(4, 4).ravel(), results)
    draw_classes(right.subplots(), results)
    figure.savefig(file, dpi=110)


def draw_images(axes, results):
    right = results.labels == results.guesses
    chosen = choose(right, results.confidence)
    for axis in axes[len(chosen) :]:
        axis.set_axis_off()
    for axis, position in zip(axes, chosen, strict=False):
        image, label = results.dataset[0, position]
        axis.imshow(image.numpy())
        axis.set(xticks=[], yticks=[])
        sign = "✓" if right[position] else "✗"
        guess = results.names[results.guesses[position]]
        axis.set_title(f"{sign} {guess} {results.confidence[position]:.0%}", fontsize=8)
        if not right[position]:
            axis.set_xlabel(f"is {results.names[label]}", fontsize=8)
            axis.spines[:].set(linestyle=(0, (2, 2)), linewidth=3, color="#c1440e")


def draw_classes(axis, results):
    names, images, right, texts = zip(*class_rows(results)[:MOST_CLASSES], strict=True)
    places = range(len(names))
    bars = axis.barh(places, images, color="white", edgecolor="black")
    axis.barh(places, right, color="#666666", edgecolor="black")
    axis.bar_label(bars, texts, padding=3, fontsize=8)
    axis.set_yticks(places, names, fontsize=8)
    axis.invert_yaxis()
    axis.set_xticks([])
    axis.set_xlim(0, 2 * max(images))  # room for the texts
    axis.spines[:].set_visible(False)
    axis.set_title("Largest classes; filled: right; then the most frequent mistake", fontsize=9)


# ---- The command


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("checkpoint", metavar="CHECKPOINT", help="what the script's --checkpoint has written")
    add("--coco_image_path", metavar="DIR", required=True, help="folder of the images")
    add("--annotation_path", metavar="FILE", required=True, help="their COCO instances file")
    add("--output", metavar="FILE", default="results.png", help="the picture (%(default)s)")
    text = "the script that trained the model, if it was a changed copy"
    add("--script", metavar="FILE", default=SCRIPT, help=text)
    args = parser.parse_args(argv)
    demo = load_script(args.script)
    try:
        is_there = os.path.exists(args.output)
        results = results_of(demo, args)
        print(in_words(results))
        draw(results, args.output)
    except (demo.UserError, OSError, ValueError) as error:
        sys.exit(f"show_results.py: error: {error}")
    finally:
        if demo.dist.is_initialized():
            demo.dist.destroy_process_group()
    print(f"Picture: {args.output}{' (the one that was there is replaced)' if is_there else ''}")


if __name__ == "__main__":
    main()
