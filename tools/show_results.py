#!/usr/bin/env python3
"""For anyone who has trained a model with the demo: what it has learnt, in one picture.

    python tools/show_results.py data/small/run.pt --coco_image_path data/small/val2017 \\
        --annotation_path data/small/annotations/instances_val2017.json --output results.png

CHECKPOINT is what `--checkpoint` of demo_coco_resnet18.py has written. It says for which classes,
at what size of the images and in which precision the model was trained; the images are cropped
and the model computes as in the script's own validation, on the GPU or, where there is none, on
the CPU. A damaged image is left out, and a line says so.

The picture shows 16 of the images as the model saw them, right ones with a solid frame and wrong
ones with a dashed frame and a cross. Half of them are right ones and half wrong ones, as far as
there are as many; both go from the surest answer to the least sure one, in equal steps. So the
same checkpoint and images give the same picture. Beside them stand the classes, those with the
most images first: how many images, how many right, and what the wrong ones were taken for most.

Printed: Top-1, the share of right answers; the baseline, what always guessing the most frequent
class would reach; where the picture is.

Exit code: 0 done; 2 wrong arguments, or something that can be mended, in one line.
"""

import argparse
import importlib.util
import os
import sys
from pathlib import Path
from types import SimpleNamespace

from analysis import UserError

SCRIPT = Path(__file__).resolve().parent.parent / "demo_coco_resnet18.py"
MOST_IMAGES = 16  # in the picture
MOST_IN_A_BATCH = 64  # for a laptop that looks at what a large GPU has trained


def main(argv=None):
    args = parse_arguments(argv)
    try:
        plot = load_plot(args.output)
        demo = load_script(args.script)
        try:
            results = results_of(demo, args)
        except demo.UserError as error:
            raise UserError(str(error)) from None
        write_picture(plot, results, args.output)
    except UserError as error:
        print(f"show_results.py: error: {error}", file=sys.stderr)
        return 2
    print(in_words(results))
    print(f"Picture: {args.output}")
    return 0


def parse_arguments(argv):
    first, _, rest = __doc__.partition("\n")
    parser = argparse.ArgumentParser(
        prog="show_results.py",
        description=first,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("checkpoint", metavar="CHECKPOINT", help="what the script's --checkpoint has written")
    images, file = "folder of the validation images", "their COCO instances file"
    add("--coco_image_path", "--coco-image-path", metavar="DIR", required=True, help=images)
    add("--annotation_path", "--annotation-path", metavar="FILE", required=True, help=file)
    picture = "the picture, PNG or by the suffix (%(default)s)"
    add("--output", metavar="FILE", default="results.png", help=picture)
    script = "the script that trained the model (demo_coco_resnet18.py): a changed copy"
    add("--script", metavar="FILE", default=str(SCRIPT), help=script)
    return parser.parse_args(argv)


# --- What the picture needs, before anything takes long ----------------------------------------


def load_plot(output):
    """The module that draws. Raises UserError where the picture could not be written."""
    try:
        from analysis import results_plot
    except ImportError:
        raise UserError("the picture needs matplotlib: pip install matplotlib") from None
    path = Path(output)
    if path.is_dir():
        raise UserError(f"--output {output}: is a folder, name a file in it")
    if not path.absolute().parent.is_dir():
        raise UserError(f"--output {output}: no such folder")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise UserError(f"--output {output}: cannot be written: give a place of your own")
    if path.suffix and path.suffix[1:].lower() not in results_plot.FORMATS:
        raise UserError(f"--output {output}: no format is called {path.suffix}: name it .png")
    return results_plot


def load_script(path):
    """The demo as a module: model, image list and crops are the script's own. Raises UserError."""
    try:
        spec = importlib.util.spec_from_file_location("demo", path)
        demo = sys.modules["demo"] = importlib.util.module_from_spec(spec)  # dataclasses need it
        spec.loader.exec_module(demo)
    except ImportError as error:
        raise UserError(f"{error}: activate the environment that trains, see README") from None
    except Exception as error:
        raise UserError(f"--script {path}: cannot be loaded: {error}") from None
    if not hasattr(demo, "read_image_list"):
        raise UserError(f"--script {path}: is neither the demo's script nor a copy of it")
    return demo


# --- The model's answers -----------------------------------------------------------------------


def results_of(demo, args):
    """What the model of the checkpoint answers on the images, and the pictures of some."""
    demo.check_system()
    state = demo.load_file(args.checkpoint, "checkpoint")
    val_list = demo.read_image_list(args.annotation_path)
    demo.check_images(args.coco_image_path, val_list)
    names = class_names(demo, args.checkpoint, state, val_list)
    process = demo.Process()
    settings = settings_of(demo, args, state)
    demo.set_up(settings, process)  # the device; alone in its process group
    try:
        model = load_model(demo, args, settings, process, state["model"], len(names))
        loader = demo.make_loader(settings, process, val_list, val_list)
        run = SimpleNamespace(args=settings, process=process, model=model, loader=loader)
        labels, guesses, confidence = answers(demo, run)
        whole = labels != demo.IGNORED
        if not whole.any():
            raise UserError(f"no image of {args.coco_image_path} can be decoded: repair them")
        chosen = choose(labels == guesses, whole, confidence)
        return SimpleNamespace(
            names=names,
            labels=labels,  # (n,) a damaged image's is IGNORED
            guesses=guesses,
            confidence=confidence,
            whole=whole,
            chosen=chosen,  # positions
            pictures=pictures_of(demo, loader.dataset, chosen),
            baseline=demo.baseline(run),  # in %
            most_frequent=demo.np.bincount(val_list.labels).argmax(),
        )
    finally:
        demo.dist.destroy_process_group()


def class_names(demo, path, state, val_list):
    """The checkpoint's classes; raises UserError where the annotations have others."""
    theirs = list(val_list.categories.values())
    with demo.as_user_error(f"checkpoint {path} is not one of this demo"):
        count = len(state["model"]["fc.weight"])
        # Checkpoints from before other numbers of classes were possible have no names.
        names = list(map(str, state.get("categories", theirs)))
    do = "give annotations of the data set that it was trained on"
    if count != len(theirs):
        raise UserError(
            f"checkpoint {path} has {count} classes, {len(theirs)} are in the annotations: {do}"
        )
    if others := [pair for pair in zip(names, theirs, strict=True) if pair[0] != pair[1]]:
        own, other = map(printable, others[0])
        raise UserError(f"checkpoint {path} has a class {own}, the annotations {other}: {do}")
    return list(map(printable, names))


def settings_of(demo, args, state):
    """The script's arguments with which it would validate as the checkpoint's run did."""
    with demo.as_user_error(f"checkpoint {args.checkpoint} is not one of this demo"):
        facts = state["facts"]
        size, precision = int(facts["--image_size"]), str(facts["--precision"])
        batch_size = min(int(facts["--batch_size"]), MOST_IN_A_BATCH)
    images, file = args.coco_image_path, args.annotation_path
    given = {"coco_image_path": images, "annotation_path": file}
    given |= {"val_image_path": images, "val_annotation_path": file}
    given |= {"image_size": size, "precision": precision, "batch_size": batch_size}
    given |= {"weights": "none", "workers": 0, "backend": "gloo"}
    return demo.parse_arguments([f"--{name}={value}" for name, value in given.items()])


def load_model(demo, args, settings, process, weights, classes):
    """The checkpoint's model, on the device."""
    model = demo.build_model(settings, process, classes)
    what = f"checkpoint {args.checkpoint} has another model (--script names a changed copy)"
    with demo.as_user_error(what):
        model.load_state_dict(weights)
    return model.eval()


def answers(demo, run):
    """Labels, guesses and the guesses' probabilities, each (n,), as `validate` makes them."""
    found = []
    run.loader.sampler.give("validation")
    with demo.torch.inference_mode():
        for images, labels in run.loader:
            logits = demo.forward(run, run.model, images)
            guesses = logits.argmax(1)
            confidence = logits.softmax(1).gather(1, guesses[:, None])[:, 0]
            found.append((labels, guesses.cpu().numpy(), confidence.cpu().numpy()))
    return map(demo.np.concatenate, zip(*found, strict=True))


def choose(right, whole, confidence):
    """Positions of at most MOST_IMAGES images: right ones, then wrong ones; see --help."""
    kinds = []
    for kind in (right & whole, ~right & whole):
        positions = kind.nonzero()[0]
        # a stable order: equally sure ones stay in the order of the file
        kinds.append(positions[(-confidence[positions]).argsort(kind="stable")])
    half = MOST_IMAGES // 2
    wrong = min(len(kinds[1]), max(half, MOST_IMAGES - len(kinds[0])))
    counts = min(len(kinds[0]), MOST_IMAGES - wrong), wrong
    chosen = [spread(kind, count) for kind, count in zip(kinds, counts, strict=True)]
    return chosen[0] + chosen[1]


def spread(positions, count):
    """`count` of them in equal steps, the first and the last included."""
    if count < 2:
        return [int(position) for position in positions[:count]]
    steps = (i * (len(positions) - 1) // (count - 1) for i in range(count))
    return [int(positions[step]) for step in steps]


def pictures_of(demo, dataset, positions):
    """uint8 (n, size, size, 3): the crops that the model saw."""
    images, _ = dataset.__getitems__([(demo.VALIDATION, position) for position in positions])
    return images.permute(0, 2, 3, 1).numpy()


# --- What is printed, and the picture ----------------------------------------------------------


def in_words(results):
    """The line of Top-1 and the baseline, with the figures as the script's validation line."""
    images = int(results.whole.sum())
    hits = int((results.labels == results.guesses).sum())
    always = results.names[results.most_frequent]
    counted = f"{images} image{'s' * (images > 1)}"
    return (
        f"Top-1: {100 * hits / images:.2f}% | {counted} | "
        f"baseline {results.baseline:.2f}% (always {always})"
    )


def printable(text):
    """A name can hold anything; half a character could be neither printed nor drawn."""
    return "".join(c if c.isprintable() else "?" for c in text)


def write_picture(plot, results, output):
    title = plot.short(in_words(results), 90)  # a name can be as long as it likes
    if damaged := int((~results.whole).sum()):
        title += f" | {damaged} damaged, left out"
    try:
        plot.draw(results, title, output)
    except (OSError, ValueError) as error:
        raise UserError(f"--output {output}: cannot be written: {error}") from None


if __name__ == "__main__":
    sys.exit(main())
