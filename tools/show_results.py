#!/usr/bin/env python3
"""Draws what a model has learnt: some of its answers, and what became of each class.

    python tools/show_results.py run.pt --coco_image_path DIR --annotation_path FILE

CHECKPOINT is what --checkpoint of demo_coco_resnet18.py has written. The images are cropped, and
the model computes, as in the script's own validation.

The picture shows 16 images, as far as possible 8 right answers (solid frame) and 8 wrong ones
(dashed frame), each from the surest to the least sure. Beside them stand the classes: how many of
their images are right, and what the wrong ones were taken for most.

Printed is Top-1, the accuracy, and the baseline: what always guessing the most frequent class
would reach. Exit code: 0 done, 2 wrong arguments, else 1.
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
    from matplotlib.figure import Figure  # without pyplot, which may look for a display
except ImportError:
    sys.exit("show_results.py: error: matplotlib is missing: pip install matplotlib")

SCRIPT = Path(__file__).resolve().parent.parent / "demo_coco_resnet18.py"
MOST_IMAGES = 16  # in the picture
MOST_CLASSES = 18  # each with a row of its own
LONGEST = 16  # characters of a name that have room


# ---- The model's answers


def load_script(path):
    """The script as a module: model, list of images and crops are its own."""
    spec = importlib.util.spec_from_file_location("demo", path)
    demo = sys.modules["demo"] = importlib.util.module_from_spec(spec)  # for its dataclasses
    spec.loader.exec_module(demo)
    return demo


def results_of(demo, args):
    """What the checkpoint's model answers on the images. Raises demo.UserError.

    names: of the classes. labels, guesses, confidence: a tensor each, (n,). dataset: the images.
    """
    with demo.as_user_error(f"{args.checkpoint} is no checkpoint of the demo"):
        state = torch.load(args.checkpoint, map_location="cpu", weights_only=True)
        names, weights, trained = state["categories"], state["model"], state["settings"]
        image_size, precision = trained["--image_size"], trained["--precision"]
    images, file = args.coco_image_path, args.annotation_path
    image_list = demo.read_image_list(file, images)
    demo.check_images(images, image_list.names)
    if list(image_list.categories.values()) == names:
        demo.check_names(file, image_list)
    else:
        trained = demo.ImageSet([], range(len(names)), dict(enumerate(names)), 0)
        image_list = demo.match_classes(image_list, file, trained)
    argv = [f"--coco_image_path={images}", f"--annotation_path={file}", "--weights=none"]
    argv += [f"--val_image_path={images}", f"--val_annotation_path={file}", "--workers=0"]
    argv += [f"--image_size={image_size}", f"--precision={precision}"]
    settings, process = demo.parse_arguments(argv), demo.ProcessInfo()
    os.environ.update(demo.ALONE)  # whatever has started this program
    demo.join_process_group(settings, process)  # chooses the device
    loader = demo.make_val_loader(settings, process, image_list)
    model = demo.build_model(settings, process, image_list)
    with demo.as_user_error(f"{args.checkpoint} has another model, see --script"):
        model.load_state_dict(weights)
    mean, std = (values.to(process.device) for values in (demo.MEAN, demo.STD))
    # What forward needs of it.
    training = SimpleNamespace(args=settings, place=process, mean=mean, std=std)
    labels, guesses, confidence = answers(demo, training, model, loader)
    return SimpleNamespace(
        names=names, dataset=loader.dataset, labels=labels, guesses=guesses, confidence=confidence
    )


def answers(demo, training, model, loader):
    """Labels, guesses and the guesses' probabilities, a tensor each, (n,)."""
    found = []
    model.eval()
    with torch.inference_mode():
        for images, labels in loader:
            confidence, guesses = demo.forward(training, model, images).softmax(1).max(1)
            found.append((labels, guesses.cpu(), confidence.cpu()))
    return [torch.cat(parts) for parts in zip(*found, strict=True)]


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
    """(name, images, right, mistake, times) of each class that has images, most images first.

    The mistake is what the class was taken for most often, "" if for nothing.
    """
    rows = []
    for label, images in Counter(results.labels.tolist()).most_common():
        guesses = Counter(results.guesses[results.labels == label].tolist())
        right = guesses.pop(label, 0)
        mistake, times = "", 0
        if guesses:
            guess, times = guesses.most_common(1)[0]
            mistake = results.names[guess]
        rows.append((results.names[label], images, right, mistake, times))
    return rows


def in_words(results):
    """Top-1 and the baseline, with the figures of the script's line on its validation."""
    images = len(results.labels)
    correct = (results.labels == results.guesses).sum().item()
    label, most = Counter(results.labels.tolist()).most_common(1)[0]
    text = f"Top-1: {100 * correct / images:.2f}% | {images} images | "
    return text + f"baseline {100 * most / images:.2f}% (always {results.names[label]})"


# ---- The picture


def short(name):
    return name if len(name) <= LONGEST else name[: LONGEST - 1] + "…"


def draw(results, file):
    """Images on the left, classes on the right. Raises OSError or ValueError."""
    figure = Figure(figsize=(11, 6.8), layout="constrained")
    figure.suptitle(in_words(results)[:100])
    left, right = figure.subfigures(1, 2, width_ratios=[6, 5])
    draw_images(left, results)
    draw_classes(right, results)
    figure.savefig(file, dpi=110)


def draw_images(figure, results):
    right = results.labels == results.guesses
    chosen = choose(right, results.confidence)
    axes = figure.subplots(4, 4).ravel()
    for axis in axes[len(chosen) :]:
        axis.set_axis_off()
    for axis, position in zip(axes, chosen, strict=False):
        axis.set(xticks=[], yticks=[])
        image, label = results.dataset[0, position]
        axis.imshow(image.permute(1, 2, 0).numpy())
        sign = "✓" if right[position] else "✗"
        sure = results.confidence[position].item()
        guess = short(results.names[results.guesses[position]])
        axis.set_title(f"{sign} {guess} {sure:.0%}", fontsize=8)
        if not right[position]:
            axis.set_xlabel(f"is {short(results.names[label])}", fontsize=8)
            for spine in axis.spines.values():
                spine.set(linestyle=(0, (2, 2)), linewidth=3, color="#c1440e")


def draw_classes(figure, results):
    rows = class_rows(results)
    shown, rest = rows[:MOST_CLASSES], rows[MOST_CLASSES:]
    axis = figure.subplots()
    places = range(len(shown))
    axis.barh(places, [row[1] for row in shown], color="white", edgecolor="black")
    axis.barh(places, [row[2] for row in shown], color="#666666", edgecolor="black")
    for place, (_, images, right, mistake, times) in enumerate(shown):
        text = f" {right} of {images}"
        if times:
            text += f", {times} × {short(mistake)}"
        axis.text(images, place, text, va="center", fontsize=8)
    axis.set_yticks(places, [short(row[0]) for row in shown], fontsize=8)
    axis.invert_yaxis()
    axis.set_xticks([])
    axis.set_xlim(0, 2 * max(row[1] for row in shown))  # room for the words
    axis.spines[:].set_visible(False)
    title = "Images of each class; filled: right; then the most frequent mistake"
    if rest:
        title += f"\n({len(rest)} classes with fewer images are not shown)"
    axis.set_title(title, fontsize=9)


# ---- The command


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("checkpoint", metavar="CHECKPOINT", help="what the script's --checkpoint has written")
    text = "folder of the validation images"
    add("--coco_image_path", "--coco-image-path", metavar="DIR", required=True, help=text)
    text = "their COCO instances file"
    add("--annotation_path", "--annotation-path", metavar="FILE", required=True, help=text)
    text = "the picture, in the format of its suffix (%(default)s)"
    add("--output", metavar="FILE", default="results.png", help=text)
    text = "the script that trained the model, if it was a changed copy"
    add("--script", metavar="FILE", default=str(SCRIPT), help=text)
    args = parser.parse_args(argv)
    if not Path(args.output).absolute().parent.is_dir():
        parser.error(f"--output {args.output}: its folder is not there")
    return args


def main(argv=None):
    args = parse_arguments(argv)
    demo = load_script(args.script)
    try:
        results = results_of(demo, args)
        draw(results, args.output)
    except (demo.UserError, OSError, ValueError) as error:
        sys.exit(f"show_results.py: error: {error}")
    finally:
        if demo.dist.is_initialized():
            demo.dist.destroy_process_group()
    print(in_words(results))
    print(f"Picture: {args.output}")


if __name__ == "__main__":
    main()
