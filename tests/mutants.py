#!/usr/bin/env python3
"""Faults that the tests must notice. Each one is put into a copy of the project, where the tests
that guard against it then have to fail, three times of three.

    tests/mutants.py                    all faults: about 15 minutes on two cores
    tests/mutants.py set-epoch shares   these
    tests/mutants.py --list             their names

A test says which faults it guards against: @pytest.mark.guards("set-epoch"). Before you take code
or a test away, look for the fault that would show the loss; if there is none, add it here first.
Exit code: 0: all were noticed; 1: one was not, or its text is no longer in the file.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TIMES = 3  # a fault that is noticed by chance is not noticed
SECONDS = 300  # for one run of the tests of one fault
SCRIPT = "demo_coco_resnet18.py"
PREPARE = "tools/prepare_coco.py"
SAMPLE = "tools/make_sample_coco.py"
RESULTS = "tools/show_results.py"


@dataclass(frozen=True)
class Fault:
    """In the file `path` the text `old`, which is in it once, becomes `new`. `shows` says what a
    user would see. A fault with `untestable`, the reason, is not tried: `old` is then its comment.
    """

    name: str
    path: str
    old: str
    new: str
    shows: str
    untestable: str = ""

    def problem(self) -> str:
        """Why it cannot be put into the file; nothing if it can."""
        count = (ROOT / self.path).read_text().count(self.old)
        return "" if count == 1 else f"its text is {count} times in {self.path}"

    def put_into(self, folder: Path) -> None:
        file = folder / self.path
        file.write_text(file.read_text().replace(self.old, self.new))
        if file.suffix == ".py":
            compile(file.read_text(), file, "exec")
        elif file.suffix == ".sh":
            subprocess.run(["bash", "-n", file], check=True)


FAULTS = [
    # ---- The script: shares, gradients, sums, restarts and ends
    Fault(
        "set-epoch",
        SCRIPT,
        "    loader.sampler.set_epoch(epoch)\n",
        "",
        "each epoch repeats the first one's order and crops",
    ),
    Fault(
        "validation-shares",
        SCRIPT,
        "        sampler.end += 1\n",
        "        pass\n",
        "validation leaves images out",
    ),
    Fault(
        "shares",
        SCRIPT,
        "    sampler = EpochSampler(dataset, process.world_size, process.rank, seed=args.seed)\n",
        "    sampler = EpochSampler(dataset, process.world_size, 0, seed=args.seed)\n",
        "each rank trains on the same share of the images",
    ),
    Fault(
        "val-padded",
        SCRIPT,
        "    sampler.end = len(dataset) // process.world_size\n",
        "    sampler.end = sampler.num_samples\n",
        "validation counts images that pad the shares twice",
    ),
    Fault(
        "broadcast-buffers",
        SCRIPT,
        "bucket_cap_mb=args.bucket_cap_mb,",
        "bucket_cap_mb=args.bucket_cap_mb, broadcast_buffers=False,",
        "batch-norm statistics of pretrained weights do not reach the other ranks",
    ),
    Fault(
        "workers-before-backward",
        SCRIPT,
        "    start_workers(train_loader, val_loader)  # the processes that load images\n"
        "    rebuild_buckets(training)  #",
        "    rebuild_buckets(training)\n    start_workers(train_loader, val_loader)  #",
        "a start hangs now and then: loader workers are forked beside threads",
    ),
    Fault(
        "workers-idle",
        SCRIPT,
        "            loader.sampler.start = loader.sampler.num_samples  # the share is empty\n",
        "",
        "loader workers decode images that nobody uses",
    ),
    Fault(
        "rebuild-buckets",
        SCRIPT,
        "    rebuild_buckets(training)  #",
        "    #",
        "a resumed run's weights differ from those of an unbroken one",
    ),
    Fault(
        "powersgd-start",
        SCRIPT,
        "start_powerSGD_iter=UNMEASURED_STEPS + 1,",
        "start_powerSGD_iter=UNMEASURED_STEPS,",
        "PowerSGD begins among the steps that averages leave out",
    ),
    Fault(
        "powersgd-one-bucket",
        SCRIPT,
        "        args.bucket_cap_mb = 1024  # NOTE: over Gloo PowerSGD hangs with two buckets\n",
        "",
        "PowerSGD hangs over Gloo",
    ),
    Fault(
        "compression",
        SCRIPT,
        "        ddp.register_comm_hook(None, hooks[args.grad_compression])\n",
        "        pass\n",
        "--grad_compression bf16 sends as many bytes as before",
    ),
    Fault(
        "gc-collect",
        SCRIPT,
        "    # NOTE: this frees DDP. Threads of the group that still run could abort Python",
        "",
        "Python now and then aborts at a run's end",
        untestable="only by chance: the threads have ended nearly always",
    ),
    Fault(
        "precision-minimum",
        SCRIPT,
        "saved or min(all_gather(fastest_precision(process))",
        "saved or max(all_gather(fastest_precision(process))",
        "--precision auto takes what one rank's hardware cannot do fast",
    ),
    Fault(
        "one-write",
        SCRIPT,
        '        os.write(to, f"{process.name} {text}\\n".encode(errors="replace"))\n',
        '        for part in (f"{process.name} ", f"{text}\\n"):\n'
        '            os.write(to, part.encode(errors="replace"))\n',
        "log lines of several ranks mix",
    ),
    Fault(
        "non-printables",
        SCRIPT,
        '"".join(c if c.isprintable() else "?" for c in text)',
        "text",
        "a file's name breaks a log line, or changes the terminal",
    ),
    Fault(
        "log-errors",
        SCRIPT,
        "with suppress(OSError):  # a full disk, or a reader",
        "with nullcontext():  # a full disk, or a reader",
        "a training ends when nobody reads its output any more",
    ),
    Fault(
        "loader-timeout",
        SCRIPT,
        "        timeout=min(args.timeout, MOST_LOADER_SECONDS) if workers else 0,\n",
        "        timeout=args.timeout if workers else 0,\n",
        "a very long --timeout ends the run at its first batch",
    ),
    Fault(
        "workers-killed",
        SCRIPT,
        "        worker.kill()\n",
        "        pass\n",
        "loader workers outlive a rank that has failed",
    ),
    Fault(
        "old-torch-store",
        SCRIPT,
        "    # NOTE: torchrun of 2.8 keeps its store, so that it has the addresses",
        "",
        "with PyTorch 2.6 to 2.8 torchrun's own restart does not connect",
        untestable="the store of this PyTorch is a new one at each restart",
    ),
    Fault(
        "weights-only",
        SCRIPT,
        '        return torch.load(path, map_location="cpu", weights_only=True)\n',
        '        return torch.load(path, map_location="cpu", weights_only=False)\n',
        "code in a weights file is run",
    ),
    Fault(
        "no-sync-forward",
        SCRIPT,
        "            with nullcontext() if is_last else ddp.no_sync():\n"
        "                logits = forward(training, ddp, images)\n",
        "            logits = forward(training, ddp, images)\n"
        "            with nullcontext() if is_last else ddp.no_sync():\n",
        "each micro-batch sends its gradients",
    ),
    Fault(
        "counts-mean",
        SCRIPT,
        "    dist.all_reduce(counts)\n",
        "    dist.all_reduce(counts)\n    counts //= process.world_size\n",
        "validation counts a part of the images",
    ),
    Fault(
        "own-loss",
        SCRIPT,
        "            loss_of_step += loss.detach()",
        "            dist.broadcast(shared := loss.detach(), src=0)\n"
        "            loss_of_step += shared",
        "all ranks log rank 0's loss as theirs",
    ),
    Fault(
        "started-alike",
        SCRIPT,
        "            if own.get(name) != value:\n",
        "            if False:\n",
        "ranks with different arguments train, wrongly",
    ),
    Fault(
        "agree-fixed",
        SCRIPT,
        "    return max(1, min(MOST_STEPS_WITHOUT_AGREEMENT, int(1 / max(slowest, 1e-9))))\n",
        "    return MOST_STEPS_WITHOUT_AGREEMENT\n",
        "with steps of 2 s a stop signal takes 40 s",
    ),
    Fault(
        "resume-offset",
        SCRIPT,
        "    loader.sampler.start = steps_done * args.accumulate_steps * args.batch_size\n",
        "    loader.sampler.start = 0\n",
        "a run resumed in mid-epoch trains on images that it has had",
    ),
    Fault(
        "resume-epoch",
        SCRIPT,
        "    first_epoch = max(1, math.ceil(training.step / args.steps_per_epoch))\n",
        "    first_epoch = 1\n",
        "a resumed run validates and saves once more for each earlier epoch",
    ),
    Fault(
        "checkpoint-in-place",
        SCRIPT,
        'open(f"{path}.new", "wb") as file:',
        'open(path, "wb") as file, suppress(FileNotFoundError):',
        "a disk that fills up destroys the last checkpoint",
    ),
    Fault(
        "barrier-at-end",
        SCRIPT,
        "    dist.barrier()\n    # NOTE: this frees",
        "    # NOTE: this frees",
        "a rank that is done first breaks the connections of the others",
    ),
    Fault(
        "errors-alone",
        SCRIPT,
        "    errors = all_gather(error)\n",
        "    errors = [error]\n",
        "a user's error on one rank becomes a lost connection on the others",
    ),
    Fault(
        "explains-once",
        SCRIPT,
        "            if process.local_rank == 0 or not dist.is_initialized():\n",
        "            if True:\n",
        "an error of a user is told by each rank",
    ),
    Fault(
        "user-error-code",
        SCRIPT,
        "            code = EXIT_USER\n",
        "            code = EXIT_FAILED\n",
        "launchers start a run again that ends on a user's error",
    ),
    Fault(
        "argument-code",
        SCRIPT,
        "        parser.exit(EXIT_USER, ",
        "        parser.exit(EXIT_FAILED, ",
        "launchers start a run again that has a wrong argument",
    ),
    Fault(
        "damaged-image",
        SCRIPT,
        "        except Exception as error:  # damaged images raise errors of any type\n",
        "        except ZeroDivisionError as error:\n",
        "a damaged image ends the run",
    ),
    Fault(
        "storage-gone",
        SCRIPT,
        "content = Path(path).read_bytes()",
        'content = Path(path).read_bytes() if os.path.exists(path) else b""',
        "training goes on with black images when the storage is gone",
    ),
    Fault(
        "image-keys",
        SCRIPT,
        "        torch.default_generator.manual_seed(hash((self.seed, epoch, index)) % 2**32)\n",
        "",
        "crops differ from run to run, and in a resumed one",
    ),
    Fault(
        "accumulate-mean",
        SCRIPT,
        '                loss = cross_entropy(logits, labels, reduction="sum") / images_in_step\n',
        "                loss = cross_entropy(logits, labels)\n",
        "gradients grow with --accumulate_steps",
    ),
    Fault(
        "warm-up",
        SCRIPT,
        "lr_factor = min(1, (training.step + 1) / max(1, args.warmup_steps))",
        "lr_factor = 1",
        "--warmup_steps does nothing",
    ),
    Fault(
        "lr-scaling",
        SCRIPT,
        "        base, args.lr = args.lr, args.lr * global_batch / LR_BATCH\n",
        "        base = args.lr\n",
        "--lr_scaling linear does nothing",
    ),
    Fault(
        "worker-signals",
        SCRIPT,
        "        worker_init_fn=ignore_stop_signals,\n",
        "",
        "a stop signal to all processes ends the run unsaved",
    ),
    Fault(
        "parent-ended",
        SCRIPT,
        "    if not stop and watched and os.getppid() != process.parent:\n",
        "    if not stop and watched and os.getppid() == 0:\n",
        "ranks train on after their torchrun was killed",
    ),
    Fault(
        "statistics-shared",
        SCRIPT,
        "            dist.broadcast(buffer, src=0)\n",
        "            pass\n",
        "ranks validate different models",
    ),
    Fault(
        "replicas",
        SCRIPT,
        '        "replicas_identical": len(set(digests)) == 1,\n',
        '        "replicas_identical": True,\n',
        "replicas are called identical, whatever they are",
    ),
    Fault(
        "exposed-mark",
        SCRIPT,
        "        next(model.parameters()).register_post_accumulate_grad_hook(\n",
        "        [*model.parameters()][-1].register_post_accumulate_grad_hook(\n",
        "nearly all of backward is called exposed communication",
    ),
    Fault(
        "unmeasured-steps",
        SCRIPT,
        "    mean = mean_time(times[UNMEASURED_STEPS:] or times)\n",
        "    mean = mean_time(times)\n",
        "the slow first steps are in the averages",
    ),
    Fault(
        "wait-each-step",
        SCRIPT,
        "shown_loss = loss.item() if log_due else None",
        "shown_loss = loss.item()",
        "a GPU waits for the script in each step",
    ),
    Fault(
        "stop-exit-code",
        SCRIPT,
        "EXIT_STOPPED = os.EX_TEMPFAIL  # 75, from sysexits.h: try again later\n",
        "EXIT_STOPPED = EXIT_FAILED\n",
        "a stopped run looks like a failed one",
    ),
    Fault(
        "second-start-resumes",
        SCRIPT,
        "        args.resume = True\n",
        "        pass\n",
        "torchrun's own restart begins again from step 0",
    ),
    Fault(
        "nan-of-one-rank",
        SCRIPT,
        "not_finite = not math.isfinite(training.loss_sum)",
        "not_finite = process.rank == 0 and not math.isfinite(training.loss_sum)",
        "a loss that is not a number goes into the weights of all ranks",
    ),
    Fault(
        "missing-rank",
        SCRIPT,
        "    timer.start()\n",
        "",
        "a rank that does not answer at the start is waited for without end",
    ),
    Fault(
        "profiled-steps",
        SCRIPT,
        "training.timer.unread.pop()",
        "pass",
        "profiled steps, which take longer, are in the averages",
    ),
    Fault(
        "nccl2-setting",
        SCRIPT,
        "    # NOTE: by its source, the new process group of NCCL in PyTorch 2.15",
        "",
        "with PyTorch 2.15 an all-reduce does not overlap with backward",
        untestable="needs two GPUs",
    ),
    Fault(
        "gpu-by-local-rank",
        SCRIPT,
        "    # DDP 2/6: each process takes a GPU of its own, by its local rank.",
        "",
        "all ranks of a node compute on GPU 0",
        untestable="needs two GPUs (tests/gpu has the test)",
    ),
    # ---- Files: annotations, images, prepared and generated sets
    Fault(
        "duplicate-ids",
        SCRIPT,
        "    return unique and all(names) and ids",
        "    return all(names) and ids",
        "two images of one id get the label of one of them",
    ),
    Fault(
        "true-as-id",
        SCRIPT,
        "all(names) and ids == {int} and",
        "all(names) and",
        "true counts as the id 1, so an image gets that class",
    ),
    Fault(
        "large-floats",
        SCRIPT,
        "    return not isinstance(value, float) or abs(value) < 2**53\n",
        "    return True\n",
        "ids that a table rounded are taken for others, and images get wrong labels",
    ),
    Fault(
        "label-first",
        SCRIPT,
        'of_it[0]["category_id"]',
        'of_it[-1]["category_id"]',
        "an image's label is its last annotation's category",
    ),
    Fault(
        "categories-sorted",
        SCRIPT,
        "for i in sorted(coco.cats)}",
        "for i in coco.cats}",
        "the order of a file's categories decides the labels",
    ),
    Fault(
        "unlabelled-left-out",
        SCRIPT,
        'names = [file_name(image) for image in images if image["id"] in first]',
        "names = [file_name(image) for image in images]",
        "an image without an annotation shifts the labels of all after it",
    ),
    Fault(
        "validation-by-name",
        SCRIPT,
        "    labels = [label_of[names[label]] for label in image_list.labels]\n",
        "    labels = image_list.labels\n",
        "the accuracy is wrong if the validation file has other ids",
    ),
    Fault(
        "validation-list",
        SCRIPT,
        "args.val_annotation_path, args.val_image_path, train_list)",
        "args.val_annotation_path, args.val_image_path)",
        "the validation file is read without the classes of the training file",
    ),
    Fault(
        "same-class-names",
        SCRIPT,
        "        if other != category:\n",
        "        if False:\n",
        "two classes of one name are taken for one in the validation",
    ),
    Fault(
        "same-name-unused",
        SCRIPT,
        "used_last = [*range(len(train_names)), *train_list.labels]",
        "used_last = [*range(len(train_names))]",
        "of two classes of one name the validation takes that without images",
    ),
    Fault(
        "lvis-url",
        SCRIPT,
        'return image.get("file_name") or str(image.get("coco_url") or "").rpartition("/")[2]',
        'return image.get("file_name")',
        "LVIS's files are refused",
    ),
    Fault(
        "windows-path",
        SCRIPT,
        'names = [name.replace("\\\\", "/") if name in absent else name for name in names]',
        "names = [name for name in names if name not in absent]",
        "the images of an export made on Windows are left out",
    ),
    Fault(
        "path-escape",
        SCRIPT,
        "    if outside:\n",
        "    if False:\n",
        "an annotation file makes the script read outside the image folder",
    ),
    Fault(
        "unknown-label",
        SCRIPT,
        '        if category not in indices["categories"]:\n',
        "        if False:\n",
        "the line on a label without a category does not name the annotation",
    ),
    Fault(
        "sound-file-again",
        SCRIPT,
        "        if not image_list.names or not is_well_formed(coco, image_list):\n",
        "        if True:\n",
        "each start on COCO takes seconds longer",
    ),
    Fault(
        "missing-image",
        SCRIPT,
        "    missing = missing_images(folder, names)\n",
        "    missing = []\n",
        "a missing image ends the run when its turn comes, after hours",
    ),
    Fault(
        "one-hint",
        SCRIPT,
        '{missing[0]}: {look_around(folder, missing[0])}"',
        '{missing[0]}: {[look_around(folder, name) for name in missing][0]}"',
        "with a wrong folder the script seems to hang before its error",
    ),
    Fault(
        "hint-folder",
        SCRIPT,
        "        if os.path.isfile(os.path.join(other, name)):\n",
        "        if False:\n",
        "the line does not name the folder that has the images",
    ),
    Fault(
        "unicode-form",
        SCRIPT,
        '    return unicodedata.normalize("NFC", name)  # macOS',
        "    return name  # macOS",
        "names that macOS has written are not found, and nothing says why",
    ),
    Fault(
        "weights-other-classes",
        SCRIPT,
        "        elif their_names and list(their_names) != names:\n",
        "        elif False:\n",
        "the last layer of a checkpoint is kept for classes of other names",
    ),
    Fault(
        "damaged-image",
        SCRIPT,
        "        except Exception as error:  # damaged images raise",
        "        except ZeroDivisionError as error:  # damaged images raise",
        "one damaged image ends the training",
    ),
    Fault(
        "sixteen-bits",
        SCRIPT,
        '        if image.mode[0] in "IF":\n',
        "        if False:\n",
        "images of 16 bits train as white ones",
    ),
    Fault(
        "deep-range",
        SCRIPT,
        "(0, 2**16 - 1) if is_16_bit else image.getextrema()",
        "(0, 2**16 - 1)",
        "images of 32 bits train as black ones",
    ),
    Fault(
        "image-modes",
        SCRIPT,
        '        if image.mode != "RGB":  # convert',
        '        if image.mode == "L":  # convert',
        "images in CMYK or with a palette train as black ones",
    ),
    Fault(
        "path-escape-copy",
        PREPARE,
        '        if os.path.isabs(name) or ".." in name.split("/"):\n',
        "        if False:\n",
        "an annotation file makes prepare_coco.py write outside its TARGET",
    ),
    Fault(
        "windows-path-copy",
        PREPARE,
        '            name = name.replace("\\\\", "/")\n',
        "            pass\n",
        "prepare_coco.py refuses an export made on Windows, which trains",
    ),
    Fault(
        "later-annotations",
        PREPARE,
        'if image not in indices["images"] or image in labelled:',
        'if image not in indices["images"]:',
        "prepare_coco.py refuses a file that trains, for an annotation that nobody uses",
    ),
    Fault(
        "missing-image-copy",
        PREPARE,
        "    missing = [name for name in names if not os.path.isfile(folder / name)]\n",
        "    missing = []\n",
        "prepare_coco.py ends half-way at a missing image",
    ),
    Fault(
        "prepare-boxes",
        PREPARE,
        "[round(pixels * factor, 2) for pixels, factor in box]",
        "[round(pixels, 2) for pixels, factor in box]",
        "a prepared set has the boxes of the large images",
    ),
    Fault(
        "prepare-first",
        PREPARE,
        '        first.setdefault(annotation["image_id"], annotation)\n',
        '        first[annotation["image_id"]] = annotation\n',
        "first_instances_*.json has other labels than instances_*.json",
    ),
    Fault(
        "prepare-in-place",
        PREPARE,
        "    elif job.target.exists() and any(job.target.iterdir()):\n",
        "    elif False:\n",
        "prepare_coco.py coco coco overwrites COCO's annotations",
    ),
    Fault(
        "prepare-other-size",
        PREPARE,
        "        if made_with != settings:\n",
        "        if False:\n",
        "a set has images of two sizes",
    ),
    Fault(
        "prepare-small-copied",
        PREPARE,
        '        if min(image.size) <= side or image.mode not in ("L", "RGB"):\n',
        '        if image.mode not in ("L", "RGB"):\n',
        "small images are enlarged, and compressed once more",
    ),
    Fault(
        "prepare-modes",
        PREPARE,
        '        if min(image.size) <= side or image.mode not in ("L", "RGB"):\n',
        "        if min(image.size) <= side:\n",
        "images in CMYK are written anew, with other colours",
    ),
    Fault(
        "prepare-damaged",
        PREPARE,
        "            print(text, file=sys.stderr, flush=True)\n",
        "            pass\n",
        "nobody learns of damaged images",
    ),
    Fault(
        "prepare-unfinished",
        PREPARE,
        "        unfinished = unfinished_file(target)\n",
        "        unfinished = target\n",
        "a stopped run leaves half an image, which the next one keeps",
    ),
    Fault(
        "prepare-goes-on",
        PREPARE,
        "    if not target.exists():\n",
        "    if True:\n",
        "a run that was stopped begins again from the first image",
    ),
    Fault(
        "sample-seed",
        SAMPLE,
        '    rng = random.Random(f"{seed} {number}")\n',
        "    rng = random.Random()\n",
        "two nodes generate different images for one seed",
    ),
    Fault(
        "sample-boxes",
        SAMPLE,
        "    return [left, top, right - left, bottom - top]\n",
        "    return [left, top, right, bottom]\n",
        "the generated boxes are not in COCO's form",
    ),
    Fault(
        "sample-unfinished",
        SAMPLE,
        '        folder = Path(unfinished) / "set"\n',
        "        folder = args.folder\n",
        "a stopped call leaves half a set, and the next one refuses the folder",
    ),
    Fault(
        "sample-at-once",
        SAMPLE,
        "            if not has_set(args.folder, record):  # another",
        "            if True:  # another",
        "of two nodes that generate the set on one disk, one fails",
    ),
    Fault(
        "results-labels",
        RESULTS,
        "guess = short(results.names[results.guesses[position]])",
        "guess = short(results.names[label])",
        "a wrong answer is shown with the right name",
    ),
    Fault(
        "results-mistake",
        RESULTS,
        "            mistake = results.names[guess]\n",
        "            mistake = results.names[label]\n",
        "a class is said to be taken for itself",
    ),
    Fault(
        "results-accuracy",
        RESULTS,
        "    correct = (results.labels == results.guesses).sum().item()\n",
        "    correct = results.labels.unique().numel()\n",
        "the picture's accuracy is not that of the validation",
    ),
    Fault(
        "results-by-name",
        RESULTS,
        "        image_list = demo.match_classes(image_list, file, trained)\n",
        "        pass\n",
        "a file with other ids gives a wrong accuracy",
    ),
    Fault(
        "results-code",
        RESULTS,
        'map_location="cpu", weights_only=True',
        'map_location="cpu", weights_only=False',
        "a checkpoint from elsewhere runs its code",
    ),
    Fault(
        "results-script",
        RESULTS,
        "    demo = load_script(args.script)\n",
        "    demo = load_script(SCRIPT)\n",
        "the model of a changed script is called another one",
    ),
    # ---- compare_logs.py and analysis/
    Fault(
        "old-logs",
        "tools/analysis/runs.py",
        '    if log.ours and not run.record("Summary"):\n',
        '    if log.ours and "peak_gpu_bytes" not in run.record("Summary"):\n',
        "a log that an earlier version wrote is called incomplete",
    ),
    Fault(
        "gpus-of-each-node",
        "tools/analysis/logs.py",
        "    first = max(log.ranks) + 1 if log.ranks and not log.ours else 0\n",
        "    first = 0\n",
        "two nodes' logs of the talk's demo are read as one node's",
    ),
    Fault(
        "restart-as-start",
        "tools/analysis/logs.py",
        'found.get("resume") is False and not',
        "not",
        "a restart without a checkpoint is called another run",
    ),
    Fault(
        "earlier-attempt",
        "tools/analysis/logs.py",
        '        log.records.pop("Summary", None)\n',
        "",
        "a run cut off after its restart is scored by its first attempt",
    ),
    Fault(
        "failed-before",
        "tools/analysis/logs.py",
        '            failed = found["error"]',
        '            failed = failed or found["error"]',
        "a run that was well at the second try is called failed",
    ),
    Fault(
        "torn-loss",
        "tools/analysis/logs.py",
        '\\.\\d{4}(?!\\d))"',
        '\\.\\d{1,4})"',
        "a loss that was cut off in the middle counts",
    ),
    Fault(
        "steps-kept",
        "tools/analysis/logs.py",
        "    if len(log.steps) < MOST_STEPS:\n",
        "    if True:\n",
        "a log of days fills the memory",
    ),
    Fault(
        "node-0-alone",
        "tools/analysis/runs.py",
        "    return {rank for rank in range(total) if nodes[rank] in present}\n",
        "    return set(range(total))\n",
        "node 0's log alone is called incomplete",
    ),
    Fault(
        "incomplete-run",
        "tools/analysis/runs.py",
        '        ("no end line from", present - log.ended.keys()),\n',
        "",
        "a run of which one rank did not end is scored as whole",
    ),
    Fault(
        "slowest-node",
        "tools/analysis/runs.py",
        "        return min(self.networks,",
        "        return max(self.networks,",
        "the faster node's network is judged",
    ),
    Fault(
        "probe-of-others",
        "tools/analysis/runs.py",
        "    if count and run.processes and count != run.processes:\n",
        "    if False:\n",
        "a run is judged by the probe of another number of processes",
    ),
    Fault(
        "compressed-bytes",
        "tools/analysis/runs.py",
        "        run.probe_s = milliseconds / 1000 * run.wire_bytes / size\n",
        "        run.probe_s = milliseconds / 1000\n",
        "compressed gradients are said to take as long as whole ones",
    ),
    Fault(
        "link-gbps",
        "tools/analysis/runs.py",
        "    run.link_gbps = run.link_gbps or (run.network and run.network.stated)\n",
        "    run.link_gbps = (run.network and run.network.stated) or run.link_gbps\n",
        "--link_gbps does not replace what the interface states",
    ),
    Fault(
        "restarted-time",
        "tools/analysis/runs.py",
        "        return self.start_step > 0 or self.log.attempts > 1\n",
        "        return self.start_step > 0\n",
        "the time of a restarted run's last attempt counts as that of the run",
    ),
    Fault(
        "stray-bytes",
        "tools/analysis/network.py",
        "STRAY = 0.01\n",
        "STRAY = 0.0\n",
        "an interface that carried a node's other traffic is called the network",
    ),
    Fault(
        "bytes-twice",
        "tools/analysis/network.py",
        "    return [top] if top else []  #",
        "    return seen  #",
        "bytes through a tunnel count twice",
    ),
    Fault(
        "ring-factor",
        "tools/analysis/projection.py",
        "    return 2 * (run.processes - 1) / run.processes * run.wire_bytes\n",
        "    return run.wire_bytes\n",
        "the model's all-reduce sends too few bytes",
    ),
    Fault(
        "hidden-part",
        "tools/analysis/projection.py",
        "    hidden = max(0.0, here_s - run.exposed_s) * min(1.0, there_s / here_s)\n",
        "    hidden = max(0.0, here_s - run.exposed_s)\n",
        "over a faster link more is hidden than there is to send",
    ),
    Fault(
        "time-ratio-inverted",
        "tools/analysis/likeness.py",
        "    return run.wall_s / base.wall_s\n",
        "    return base.wall_s / run.wall_s\n",
        "the faster run is said to have taken longer",
    ),
    Fault(
        "loss-mean",
        "tools/analysis/likeness.py",
        " if key in shared] or",
        "] or",
        "losses of one node's ranks stand beside losses of all ranks",
    ),
    Fault(
        "powersgd-rank",
        "tools/analysis/likeness.py",
        '        keys.append("powersgd_rank")\n',
        "        pass\n",
        "runs that compress differently are compared",
    ),
    Fault(
        "unlike-runs",
        "tools/compare_logs.py",
        "    if unlike and not force:\n",
        "    if False:\n",
        "runs that did other work are compared as if it were the same",
    ),
    Fault(
        "exit-code-incomplete",
        "tools/compare_logs.py",
        "    return 0 if all(run.complete for run in runs) else 1\n",
        "    return 0\n",
        "a script that compares takes an incomplete run for a whole one",
    ),
    Fault(
        "same-wire",
        "tools/compare_logs.py",
        '        "same_wire": likeness.same_wire(runs),\n',
        '        "same_wire": [],\n',
        "two networks over one wire are compared without a word",
    ),
    Fault(
        "speed-up-inverted",
        "tools/analysis/scaling.py",
        "    speed_up = img_per_s(run) / img_per_s(base)\n",
        "    speed_up = img_per_s(base) / img_per_s(run)\n",
        "more processes seem to make it slower",
    ),
    Fault(
        "efficiency",
        "tools/analysis/scaling.py",
        "    found.efficiency = speed_up * base.processes / run.processes\n",
        "    found.efficiency = speed_up / run.processes\n",
        "beside a base of two processes the efficiency is half of what it is",
    ),
    Fault(
        "weak-as-strong",
        "tools/analysis/scaling.py",
        '    return "weak" if',
        '    return "strong" if',
        "weak scaling is called strong",
    ),
    Fault(
        "median-base",
        "tools/analysis/scaling.py",
        "    middle = statistics.median_low(",
        "    middle = max(",
        "of several runs with one process the fastest is the base",
    ),
    Fault(
        "images-per-second",
        "tools/analysis/scaling.py",
        "    return run.global_batch / step_ms * 1000 if known else None\n",
        "    return run.img_per_s if known else None\n",
        "the first, slow steps count in the speed-up",
    ),
    Fault(
        "base-of-each-network",
        "tools/analysis/scaling.py",
        "        own = [other for other in first if network_of(other) == network_of(run)]\n",
        "        own = first\n",
        "a run over one network is measured by another network's base",
    ),
    Fault(
        "bound-largest",
        "tools/analysis/verdict.py",
        "    verdict.bound = max(parts, key=parts.get)\n",
        "    verdict.bound = min(parts, key=parts.get)\n",
        "the smallest part of a step is said to bound the run",
    ),
    Fault(
        "straggler",
        "tools/analysis/verdict.py",
        "        parts = parts_around_slow_rank(run)\n",
        "        pass\n",
        "waiting for one slow rank is blamed on the link",
    ),
    Fault(
        "stated-share",
        "tools/analysis/verdict.py",
        "    if reached < HEALTHY:\n",
        "    if reached > HEALTHY:\n",
        "a link that delivers is said not to be what it states",
    ),
    Fault(
        "fallback-named",
        "tools/analysis/verdict.py",
        "    says = say_fallback(network)\n",
        "    says = []\n",
        "InfiniBand was asked for and TCP was used, and nothing says so",
    ),
    Fault(
        "gpudirect-off",
        "tools/analysis/verdict.py",
        "        and not network.with_gpudirect\n",
        "        and network.with_gpudirect\n",
        "the link is blamed for what host memory limits",
    ),
    Fault(
        "packets-lost",
        "tools/analysis/verdict.py",
        "LOSSY = 0.01\n",
        "LOSSY = 1.0\n",
        "lost packets are not told",
    ),
    Fault(
        "ip-over-infiniband",
        "tools/analysis/verdict.py",
        '    if run.network.kind == "ipoib":\n',
        "    if False:\n",
        "IP over InfiniBand is not told from InfiniBand",
    ),
    Fault(
        "negotiated-speed",
        "tools/analysis/advice.py",
        "FALLEN_GBPS = 0.1 ",
        "FALLEN_GBPS = 0.001 ",
        "a port that fell back to 100 Mb/s is not named",
    ),
    Fault(
        "overcome",
        "tools/analysis/advice.py",
        '        problems = [p for p in problems if p.get("id") not in OVERCOME]\n',
        "        pass\n",
        "a whole run is advised on what a restart has overcome",
    ),
    Fault(
        "trace-overlap",
        "tools/analysis/trace.py",
        "sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for",
        "sum(max(0.0, max(a[1], b[1]) - min(a[0], b[0])) for",
        "an all-reduce is said to be beside compute where it is exposed",
    ),
    Fault(
        "trace-gpu-step",
        "tools/analysis/trace.py",
        '("user_annotation", "gpu_user_annotation")',
        '("gpu_user_annotation", "user_annotation")',
        "the script's step is drawn in place of the GPU's",
    ),
    Fault(
        "profiled-step",
        "tools/analysis/trace.py",
        "events, max(shared))",
        "events, min(shared))",
        "the first profiled step is drawn, in which caches are cold",
    ),
    Fault(
        "csv-columns",
        "tools/analysis/report.py",
        "                measured = line.loss, line.img_per_s, line.data_ms, line.step_ms\n",
        "                measured = line.loss, line.img_per_s, line.step_ms, line.data_ms\n",
        "the columns of --csv are not what their head says",
    ),
    Fault(
        "json-nan",
        "tools/analysis/report.py",
        ", parse_constant=lambda name: None)",
        ")",
        "--json writes NaN, which is no JSON",
    ),
    Fault(
        "markdown-escape",
        "tools/analysis/report.py",
        '    text = report(result, address).replace("<", "&lt;")\n',
        "    text = report(result, address)\n",
        "a viewer of --report hides what stands in <>",
    ),
    # ---- NCCL's text, counters, probe, preflight
    Fault(
        "bootstrap-as-data",
        "tools/analysis/nccl.py",
        "(?:NET/Socket : Using|NET : Using interface)",
        "(?:NET/Socket : Using|Bootstrap : Using|NET : Using interface)",
        "the interface of the start-up is said to carry the data",
    ),
    Fault(
        "local-channels",
        "tools/analysis/nccl.py",
        '        if found.channels and not self.seen["network_channel"] and not amid_node:\n',
        "        if False:\n",
        "a job inside one node is judged by a network that it never used",
    ),
    Fault(
        "rank-amid-node",
        "tools/analysis/nccl.py",
        " and not amid_node:\n",
        ":\n",
        "a rank amid its node makes a job on two nodes local",
    ),
    Fault(
        "roce-as-infiniband",
        "tools/analysis/nccl.py",
        '"RoCE": "roce"}',
        '"RoCE": "infiniband"}',
        "RoCE is called InfiniBand",
    ),
    Fault(
        "adapters-once",
        "tools/analysis/nccl.py",
        'devices=list(dict.fromkeys(f"{name}:{port}" for _, name, port, _ in listed + alone)),',
        'devices=[f"{name}:{port}" for _, name, port, _ in listed + alone],',
        "an adapter is named once for each rank",
    ),
    Fault(
        "wished-as-used",
        "tools/analysis/nccl.py",
        'rf"Using (?:network|internal Network|external Network) {NAME}"',
        'rf"(?:Using .*[Nn]etwork|NCCL_NET set by environment to) {NAME}"',
        "NCCL_NET=IB is taken for what was used",
    ),
    Fault(
        "torn-lines",
        "tools/analysis/nccl.py",
        "starts = [0, *(match.start() for match in BEGINNING.finditer(line)), len(line)]",
        "starts = [0, len(line)]",
        "of two messages that one line holds, each is taken for a part of the other",
    ),
    Fault(
        "half-a-name",
        "tools/analysis/nccl.py",
        "return [text for text in found if text in KNOWN or text not in halves]",
        "return list(found)",
        "a line that was cut names a network that does not exist",
    ),
    Fault(
        "slowest-rank",
        "tools/analysis/nccl.py",
        "min((used or plugins).values(), key=SLOWEST.index)",
        "max((used or plugins).values(), key=SLOWEST.index)",
        "one rank on sockets is hidden by the others on InfiniBand",
    ),
    Fault(
        "far-pair",
        "tools/analysis/nccl.py",
        "        if not found.gpudirect:\n",
        "        if off is None:\n",
        "a healthy machine is told that GPUDirect is off",
    ),
    Fault(
        "fall-back-asked-for",
        "tools/analysis/nccl.py",
        'if found.transport == "sockets" and not found.reason and asked:',
        'if found.transport == "sockets" and asked:',
        "sockets by NCCL_IB_DISABLE=1 are called a fall-back",
    ),
    Fault(
        "missing-plugin-normal",
        "tools/analysis/nccl.py",
        'r"(?!(?:\\S+: )?\\S*ccl-net\\S*: cannot open shared)\\S+: \\S",',
        'r"\\S+: \\S",',
        "each machine without a network plugin has a finding",
    ),
    Fault(
        "verbs-first-try",
        "tools/analysis/nccl.py",
        "Cou(?:nt|ld) not open libibverbs\\.so\\.1\\b",
        "Cou(?:nt|ld) not open libibverbs\\.so",
        'the first of two tries is called "install libibverbs"',
    ),
    Fault(
        "memlock",
        "tools/analysis/nccl.py",
        "Call to ibv_\\w+ failed with error Cannot allocate memory",
        "Call to ibv_reg_mr failed with error Cannot allocate memory",
        "too little memory that may be locked has no finding",
    ),
    Fault(
        "peer-unreachable",
        "tools/analysis/nccl.py",
        "(?:12\\b|\\w+\\(12\\)",
        "(?:5\\b|12\\b|\\w+\\(\\d+\\)",
        "what only follows another error is called a peer that does not answer",
    ),
    Fault(
        "timeout-named",
        "tools/analysis/nccl.py",
        "extend([int(rank)] if rank else [])",
        "extend([])",
        "the ranks that waited for a collective are not named",
    ),
    Fault(
        "undecided-exit-code",
        "tools/nccl_log.py",
        "        return 1\n",
        "        return 0\n",
        "a script goes on though NCCL's text decides nothing",
    ),
    Fault(
        "counter-unit",
        "tools/analysis/kernel.py",
        'sent = 4 * number(port / "counters/port_xmit_data")',
        'sent = number(port / "counters/port_xmit_data")',
        "an InfiniBand port seems to have sent a quarter of its bytes",
    ),
    Fault(
        "counted-twice",
        "tools/analysis/kernel.py",
        "        if traffic(link) > 2 * above:\n",
        "        if traffic(link):\n",
        "a bond's bytes are counted again on its ports",
    ),
    Fault(
        "counter-reset",
        "tools/analysis/kernel.py",
        "max(0, now[way] - then[way])",
        "now[way] - then[way]",
        "a counter that began anew takes bytes from the sum",
    ),
    Fault(
        "rate-unit",
        "tools/analysis/kernel.py",
        'number(net / "speed") / 1000 or None',
        'number(net / "speed") or None',
        "an interface of 10 Gb/s is taken for one of 10,000 Gb/s",
    ),
    Fault(
        "errors-of-before",
        "tools/analysis/kernel.py",
        'count - then["errors"].get(name, 0)',
        "count",
        "errors of last year are said to be the run's",
    ),
    Fault(
        "loss-on-roce",
        "tools/analysis/kernel.py",
        '    "hw_counters/out_of_sequence",\n',
        "",
        "a RoCE link that loses packets has no finding",
    ),
    Fault(
        "retransmissions",
        "tools/analysis/kernel.py",
        'int(counts["RetransSegs"])',
        "0",
        "a cable that loses packets shows no retransmission",
    ),
    Fault(
        "counters-since",
        "tools/counters.py",
        '                if record.get("host") == host:\n                    return record\n',
        "                return record\n",
        "in a shared log the counters of another node are subtracted",
    ),
    Fault(
        "probe-bytes",
        "tools/probe_link.py",
        "    return 4 * sum(map(torch.numel, model.parameters()))\n",
        "    return sum(map(torch.numel, model.parameters()))\n",
        "the probe measures a quarter of what a step sends",
    ),
    Fault(
        "probe-wire",
        "tools/probe_link.py",
        'link["wire_Gbps"] = 8e-6 * busier / (calls * own["ms"])',
        'link["wire_Gbps"] = 8e-6 * busier / own["ms"]',
        "all rounds' bytes in one round's time: a link faster than it is",
    ),
    Fault(
        "probe-warm-up",
        "tools/probe_link.py",
        "for _, ms in rounds[1:])",
        "for _, ms in rounds)",
        "the first all-reduce, which makes connections, is part of the link's rate",
    ),
    Fault(
        "probe-bus-rate",
        "tools/probe_link.py",
        "    busbw = algbw * 2 * (ranks - 1) / ranks\n",
        "    busbw = algbw * 2 * (ranks - 1)\n",
        "with four ranks each link seems to carry four times its bytes",
    ),
    Fault(
        "port-not-active",
        "tools/preflight.py",
        'report("" if "ACTIVE" in str(states) else wrong, fine, named=named)',
        'report("" if states else wrong, fine, named=named)',
        "an adapter whose cable is out is called fine",
    ),
    Fault(
        "preflight-memlock",
        "tools/preflight.py",
        "if os.geteuid() and 0 <= limit < 1 << 30:",
        "if os.geteuid() and 0 <= limit < 1 << 20:",
        "8 MiB of memory that may be locked are called enough for InfiniBand",
    ),
    Fault(
        "old-driver",
        "tools/preflight.py",
        '    elif not driver or int(driver.partition(".")[0]) < least:\n',
        "    elif not driver:\n",
        "nobody is told that the NVIDIA driver is too old for this PyTorch",
    ),
    Fault(
        "preflight-firewall",
        "tools/preflight.py",
        "        wrong += swap(wrong)\n",
        "        swap(wrong)\n",
        "a node does not say that the other one cannot reach it",
    ),
    Fault(
        "preflight-address",
        "tools/preflight.py",
        '"address": address_of(interface) or own}',
        '"address": own}',
        "a network of IFNAME that does not join the nodes is called fine",
    ),
    Fault(
        "preflight-mtu",
        "tools/preflight.py",
        '        if len({mine["mtu"], theirs["mtu"]} - {""}) == 2:\n',
        "        if False:\n",
        "nodes with MTU 9000 and 1500 have no finding",
    ),
    Fault(
        "preflight-large",
        "tools/preflight.py",
        '            swap("large packets" * 2000)\n',
        '            swap("large packets")\n',
        "a switch that loses large packets has no finding, and the job hangs",
    ),
    Fault(
        "preflight-exit-code",
        "tools/preflight.py",
        "    return 1 if findings else 0\n",
        "    return 0\n",
        "a script starts the job though a node is not fit for it",
    ),
    Fault(
        "preflight-node-rank",
        "tools/preflight.py",
        "            if came not in missing:\n",
        "            if False:\n",
        "two nodes with the same NODE_RANK are not found",
    ),
    Fault(
        "preflight-loopback",
        "tools/preflight.py",
        '    if (address := socket.gethostbyname(host)).startswith("127."):\n',
        '    if (address := socket.gethostbyname(host)) == "127.0.0.1":\n',
        "MASTER_ADDR that is 127.0.1.1 on its own node, as on Debian, is called fine",
    ),
    Fault(
        "own-processes",
        "tools/analysis/nccl.py",
        '    paths = {pattern.replace("%p", str(pid)) for pid in pids}\n',
        '    paths = {str(path) for path in Path(pattern).parent.glob("*")}\n',
        "the probe tells what NCCL wrote in an earlier run",
    ),
    # ---- Launchers, environment, nodes, schedulers
    Fault(
        "route-interface",
        "tools/launcher/networks.sh",
        '        name_route "$efa$adapters"\n',
        "        true\n",
        "Gloo listens at 127.0.1.1, and the nodes never connect",
    ),
    Fault(
        "loopback-name",
        "tools/launcher/networks.sh",
        '    if [ -z "$name" ] || [ "$name" = lo ]; then name',
        '    if [ -z "$name" ]; then name',
        "where MASTER_ADDR is the node's own name, Gloo is given lo",
    ),
    Fault(
        "ifname-exact",
        "tools/launcher/networks.sh",
        'NCCL_SOCKET_IFNAME "=${sockets',
        'NCCL_SOCKET_IFNAME "${sockets',
        "eth1 also stands for eth10",
    ),
    Fault(
        "hca-exact",
        "tools/launcher/networks.sh",
        'NCCL_IB_HCA "=${adapters',
        'NCCL_IB_HCA "${adapters',
        "mlx5_1 also stands for mlx5_10",
    ),
    Fault(
        "net-ib",
        "tools/launcher/networks.sh",
        "        prefer NCCL_NET IB # otherwise",
        "        # otherwise",
        "without its adapter NCCL falls back to TCP in silence",
    ),
    Fault(
        "efa-plugin",
        "tools/launcher/networks.sh",
        "== */efa ]]",
        "== */no ]]",
        "NCCL is kept from the plugin that an EFA device needs",
    ),
    Fault(
        "containers-left-out",
        "tools/launcher/networks.sh",
        '|veth|virbr)"\n',
        '|virbr)"\n    return 0\n',
        "NCCL takes a bridge of containers for the network between the nodes",
    ),
    Fault(
        "container-joins",
        "tools/launcher/networks.sh",
        '    grep -qE " $virtual" <<<"$found" || prefer',
        "    prefer",
        "nodes joined by a bridge or veth are forbidden to use it",
    ),
    Fault(
        "user-value-wins",
        "tools/launcher/common.sh",
        '    if [ -z "${!1+set}" ]; then\n        variables',
        "    if true; then\n        variables",
        "a user's NCCL variable is silently replaced",
    ),
    Fault(
        "names-twice",
        "tools/launcher/common.sh",
        "| sort | uniq -d)",
        "| sort | uniq -d | grep -v .)",
        "two networks of one name write into one folder",
    ),
    Fault(
        "series-with-resume",
        "tools/launcher/common.sh",
        '|| die "$1 and --resume',
        '|| say "$1 and --resume',
        "the second run of a series goes on from the first one's checkpoint",
    ),
    Fault(
        "run-has-own-files",
        "tools/launcher/common.sh",
        '[ -z "$file" ] || words+=',
        '[ -n "$file" ] || words+=',
        "the runs of a series write over each other's checkpoint",
    ),
    Fault(
        "lost-network-goes-on",
        "tools/launcher/common.sh",
        "        lost) # the others are still worth a run",
        "        never)",
        "after a network that fails the others are not tried",
    ),
    Fault(
        "restart-counted",
        "launch_multinode.sh",
        "ports_per_network=$((2 + RESTARTS))",
        "ports_per_network=2",
        "the first start over the next network has the port of a restart over this one",
    ),
    Fault(
        "start-has-own-port",
        "launch_multinode.sh",
        "local port=$((first_port + $1))",
        "local port=$first_port",
        "a node in its first start meets one that has restarted",
    ),
    Fault(
        "later-starts-wait-longer",
        "launch_multinode.sh",
        "    rendezvous_timeout=$((CONNECT_TIMEOUT + timeout + 60))\n",
        "",
        "a node gives up before the other has noticed the failure",
    ),
    Fault(
        "restart-resumes",
        "launch_multinode.sh",
        '"$@" --resume\n',
        '"$@"\n',
        "a restart begins at step 0 again",
    ),
    Fault(
        "restarts-counted",
        "tools/launcher/common.sh",
        '|| [ "$1" -gt "$RESTARTS" ]',
        '|| [ "$1" -ge "$RESTARTS" ]',
        "RESTARTS=1 gives no restart",
    ),
    Fault(
        "probe-comes-first",
        "launch_multinode.sh",
        '        on_all_nodes 0 "$root/tools/probe_link.py" "$@"\n',
        "",
        "the link is not measured before the training",
    ),
    Fault(
        "no-probe-alone",
        "launch_multinode.sh",
        "[ $((NNODES * GPUS_PER_NODE)) -gt 1 ]",
        "true",
        "one process alone fails in a probe that has no link",
    ),
    Fault(
        "old-checkpoint-renamed",
        "tools/launcher/common.sh",
        '        mv "$checkpoint" "$checkpoint.$(date +%Y%m%d-%H%M%S)"\n',
        "",
        "a restart goes on with the weights of an older run",
    ),
    Fault(
        "other-node-renames-nothing",
        "tools/launcher/common.sh",
        ' && [ "${NODE_RANK:-0}" -eq 0 ]; then',
        "; then",
        "node 1 takes away the checkpoint that node 0 has just begun",
    ),
    Fault(
        "appending-is-said",
        "tools/launcher/common.sh",
        '    if [ -s "$log" ] &&',
        "    if false &&",
        "two runs lie in one log, and nobody is told",
    ),
    Fault(
        "user-error-restarted",
        "tools/launcher/common.sh",
        '    if [ "$outcome" != lost ] ||',
        '    if [ "$outcome" = complete ] ||',
        "a wrong path is tried again RESTARTS times",
    ),
    Fault(
        "exit-2",
        "tools/launcher/common.sh",
        '    [ "$outcome" != user ] || exit 2\n',
        "",
        "a user's error ends with the code of a failure that may be tried again",
    ),
    Fault(
        "exit-75",
        "tools/launcher/common.sh",
        "        exit 75\n",
        "        exit 1\n",
        "a batch script does not queue a stopped run again",
    ),
    Fault(
        "stop-not-restarted",
        "tools/launcher/common.sh",
        '|| [ -n "$stopped" ] || [ "$1" -gt',
        '|| [ "$1" -gt',
        "a run that was stopped starts again",
    ),
    Fault(
        "signal-passed-on",
        "tools/launcher/common.sh",
        '    [ -z "$job" ] || kill "-$signal"',
        '    true || kill "-$signal"',
        "Ctrl-C does not reach the ranks",
    ),
    Fault(
        "second-ctrl-c",
        "tools/launcher/common.sh",
        "then signal=KILL; fi",
        "then signal=TERM; fi",
        "ranks that do not answer cannot be ended by a second Ctrl-C",
    ),
    Fault(
        "tee-survives",
        "tools/launcher/common.sh",
        "        trap '' HUP INT TERM USR1\n",
        "",
        "the log ends before the ranks' last lines",
    ),
    Fault(
        "torchrun-lives-on-usr1",
        "tools/launcher/common.sh",
        "    trap '' USR1\n",
        "",
        "SLURM's warning kills torchrun before the ranks have saved",
    ),
    Fault(
        "full-disk",
        "tools/launcher/common.sh",
        '/dev/null}" || true # a full',
        '/dev/null}" # a full',
        "a full disk under the log makes a trained run a failed one",
    ),
    Fault(
        "reader-gone",
        "tools/launcher/common.sh",
        "trap '' PIPE #",
        "#",
        "`| head` ends the training",
    ),
    Fault(
        "phrase-error",
        "tools/launcher/common.sh",
        'telling="$nccl|\\] ERROR: |',
        'telling="$nccl|',
        "the last line does not say why a rank has ended",
    ),
    Fault(
        "phrase-usage",
        "tools/launcher/common.sh",
        "|: error: |\\] Stopped",
        "|\\] Stopped",
        "an unknown option is tried again, and is not the last line",
    ),
    Fault(
        "phrase-stopped",
        "tools/launcher/common.sh",
        "|\\] Stopped on SIG|\\] Cleanup",
        "|\\] Cleanup",
        "a stopped run counts as failed and is restarted",
    ),
    Fault(
        "stop-has-prefix",
        "tools/launcher/common.sh",
        'elif [[ $2 == *"] Stopped on SIG"* ]]',
        'elif [[ $2$3 == *"Stopped on SIG"* ]]',
        "a path named `Stopped on SIG` makes a failed run a stopped one",
    ),
    Fault(
        "stop-beside-failure",
        "tools/launcher/common.sh",
        "|| ! grep -qvE '^(75|-15)?$' <<<\"$codes\"; }",
        "|| true; }",
        "a failed run in which one rank was stopped is not restarted",
    ),
    Fault(
        "phrase-complete",
        "tools/launcher/common.sh",
        "|\\] Cleanup complete|",
        "|",
        "a signal after the last step makes a complete run a failed one",
    ),
    Fault(
        "phrase-signal",
        "tools/launcher/common.sh",
        "|Signal .* received|",
        "|",
        "the last line does not say that a rank was killed",
    ),
    Fault(
        "phrase-exitcode",
        "tools/launcher/common.sh",
        '|^ *exitcode +:"',
        '"',
        "a user's error is tried again, because the ranks' exit codes are unknown",
    ),
    Fault(
        "phrase-watchdog",
        "tools/launcher/common.sh",
        "nccl='Watchdog caught collective operation timeout|",
        "nccl='",
        "the last line does not name the collective that timed out",
    ),
    Fault(
        "phrase-apart",
        "tools/launcher/common.sh",
        "torch.distributed.Dist*",
        "torch.distributed.Elastic*",
        "nodes that do not meet are not told what to check",
    ),
    Fault(
        "phrase-other-rank",
        "tools/launcher/common.sh",
        "grep -av 'another rank has ended'",
        "grep -av 'another rank is gone'",
        "the last line says what followed from the failure, not the failure",
    ),
    Fault(
        "phrase-of-script",
        SCRIPT,
        '    ("/gloo/", "another rank has ended, or',
        '    ("/gloo/", "another rank is gone, or',
        "the launcher takes what follows from a failure for the failure",
    ),
    Fault(
        "threads-per-process",
        "tools/launcher/common.sh",
        "    threads=$((cores / $1))\n",
        "    threads=1\n",
        "each process computes with one thread",
    ),
    Fault(
        "all-runs-same-threads",
        "launch_single.sh",
        'set_threads "$most"',
        "set_threads 1",
        "processes share cores with more threads than there are, and the speed-up is of threads",
    ),
    Fault(
        "local-addr",
        "launch_single.sh",
        " --local-addr=127.0.0.1",
        "",
        "torchrun hangs where the machine's own name does not resolve",
    ),
    Fault(
        "one-by-default",
        "launch_single.sh",
        "for GPUS in ${GPUS:-1}; do",
        "for GPUS in ${GPUS:-all}; do",
        "a first try takes every GPU of a machine that others use",
    ),
    Fault(
        "user-options-win",
        "launch_single.sh",
        '    set -- "${sample[@]}" "$@"',
        '    set -- "$@" "${sample[@]}"',
        "--max_steps of the user's own changes nothing",
    ),
    Fault(
        "slurm-step-without-id",
        "launch_multinode.sh",
        '    [ -n "${SLURM_STEP_ID:-}" ] ||\n        die',
        '    [ -n "${SLURM_STEP_ID:-}" ] ||\n        say',
        "a batch script without srun ends in a bash error about an unset variable",
    ),
    Fault(
        "slurm-two-tasks",
        "launch_multinode.sh",
        '    [ "$SLURM_STEP_NUM_TASKS" = "$SLURM_STEP_NUM_NODES" ] ||',
        "    true ||",
        "two launchers start on each node, and each waits for the other",
    ),
    Fault(
        "log-is-complete",
        "tools/launcher/common.sh",
        '        tee -a "${log:-/dev/null}" ||',
        '        tee "${log:-/dev/null}" ||',
        "the log lacks the launcher's own first lines",
    ),
    Fault(
        "dashes-in-a-path",
        "tools/launcher/common.sh",
        "        case ${word//-/_} in",
        "        case ${word/--/__} in",
        "--val-image-path is overridden by the sample set's options",
    ),
    Fault(
        "mpich-before-srun",
        SCRIPT,
        "    if {*MPICH[:3]} <= env.keys():  # before",
        '    if {*MPICH[:3]} <= env.keys() and "SLURM_STEP_ID" not in env:  # before',
        "in a SLURM job each process of mpiexec trains alone, as rank 0",
    ),
    Fault(
        "srun-node-list",
        SCRIPT,
        'env.setdefault("MASTER_ADDR", name + digits)',
        'env.setdefault("MASTER_ADDR", name)',
        "ranks look for a node with the name `node`",
    ),
    Fault(
        "batch-script-is-no-step",
        SCRIPT,
        '    if "SLURM_STEP_ID" in env and "SLURM_PROCID" in env:',
        '    if "SLURM_PROCID" in env:',
        "python in a batch script ends with an error about srun",
    ),
    Fault(
        "unknown-launcher",
        SCRIPT,
        '        if env.get(name, "").lstrip("0") not in ("", "1"):',
        "        if False:",
        "each process of an unknown launcher trains alone, as rank 0",
    ),
    Fault(
        "job-has-own-port",
        SCRIPT,
        "    if job:  # a port",
        "    if False:  # a port",
        "two jobs on one node meet at the same port",
    ),
    Fault(
        "rank-below-world-size",
        SCRIPT,
        "    if not 0 <= rank < world_size:",
        "    if False:",
        "a rank that is out of range waits until the timeout",
    ),
    Fault(
        "set-python-wins",
        "tools/environment.sh",
        '    if [ -n "${PYTHON:-}" ]; then\n',
        "    if false; then\n",
        "PYTHON is ignored where another Python is active",
    ),
    Fault(
        "torch-2-6-taken",
        "tools/environment.sh",
        "numbers.groups())) < (2, 6)",
        "numbers.groups())) < (2, 7)",
        "PyTorch 2.6 is refused",
    ),
    Fault(
        "torch-compared-as-numbers",
        "tools/environment.sh",
        "tuple(map(int, numbers.groups())) < (2, 6)",
        'numbers.groups() < ("2", "6")',
        "PyTorch 2.10 and newer are refused as older than 2.6",
    ),
    Fault(
        "old-torch-refused",
        "tools/environment.sh",
        "elif numbers and tuple",
        "elif not version and tuple",
        "a torch that is too old is taken, and the script ends with a traceback",
    ),
    Fault(
        "small-package-named",
        "tools/environment.sh",
        '            [ -z "$lacks" ] || die "$active lacks',
        '            [ -z "$lacks" ] || say "$active lacks',
        "a missing package ends the script in place of a line with the command",
    ),
    Fault(
        "unfit-python-is-named",
        "tools/environment.sh",
        '|| say "$active $unfit: it',
        '|| true "$active $unfit: it',
        "another environment than the active one is used, and nobody is told",
    ),
    Fault(
        "unfinished-venv",
        "tools/environment.sh",
        '    [ ! -e "$venv/begun" ] && [ -z "$unfit$lacks" ]',
        '    [ -z "$unfit$lacks" ]',
        "an install that was cut short is used as if it were whole",
    ),
    Fault(
        "own-venv-kept",
        "tools/environment.sh",
        '    if [ ! -e "$venv/begun" ] && [ "$unfit"',
        '    if false && [ "$unfit"',
        "a .venv that was made by hand is deleted",
    ),
    Fault(
        "cpu-build-on-gpu-node",
        "tools/environment.sh",
        "    grep -q '^cuda[: ].*None' \"$torch/version.py\" 2>/dev/null || return 0\n",
        "    return 0\n",
        "a node with GPUs trains on its CPUs, because the torch is a build for CPUs",
    ),
    Fault(
        "rocm-build",
        "tools/environment.sh",
        '    ! grep -qE "^(hip|rocm)[: ].*\'" "$torch/version.py" || return 0\n',
        "",
        "a build for AMD's GPUs is refused as one for CPUs",
    ),
    Fault(
        "cpu-on-purpose",
        "tools/environment.sh",
        '|| [ "$(option --device "$@")" = cpu ]; then return; fi',
        "; then return; fi",
        "--device cpu is refused on a node with GPUs",
    ),
    Fault(
        "wrong-visible-devices",
        "tools/launcher/common.sh",
        '            check_first_gpu "${CUDA_VISIBLE_DEVICES%%,*}"\n',
        "            true\n",
        "a wrong CUDA_VISIBLE_DEVICES trains on the CPU",
    ),
    Fault(
        "torchruns-own-options",
        "tools/launcher/common.sh",
        '    grep -q -e "--$1\\"" "$torch/distributed/run.py"',
        "    true",
        "an older torchrun ends with an unknown option",
    ),
    Fault(
        "lock-stale",
        "tools/environment.sh",
        '&& ! is_alive "$process"; then',
        "&& false; then",
        "after an install that was killed each start waits for 30 minutes",
    ),
    Fault(
        "one-heir",
        "tools/environment.sh",
        "# NOTE: one heir at a time.",
        "",
        "two starts make one environment at once",
        untestable="two starts would have to look at one lock within a millisecond",
    ),
    Fault(
        "two-nodes-cleanup",
        "tools/two_nodes.sh",
        "trap remove_nodes EXIT\n",
        "",
        "namespaces and cables stay on the machine",
    ),
    Fault(
        "two-nodes-threads",
        "tools/two_nodes.sh",
        "threads=$((cores / (2 * GPUS_PER_NODE)))",
        "threads=$cores",
        "both nodes compute with a thread for each core, and a step takes many times as long",
    ),
    Fault(
        "cable-rate-stated",
        "tools/two_nodes.sh",
        "bits=$((rate * 8))",
        "bits=$rate",
        "a cable is judged by an eighth of its rate",
    ),
    Fault(
        "cables-are-networks",
        "tools/two_nodes.sh",
        'export NETWORKS="${networks% }" LINK_GBPS=',
        "export LINK_GBPS=",
        "the training goes over one cable alone",
    ),
    Fault(
        "loose-cable",
        "tools/launcher/networks.sh",
        '        [ "$(cat "$sysfs/class/net/$1/carrier" 2>/dev/null)" = 1 ] ||',
        "        true ||",
        "a run over a cable that is not plugged in waits until the timeout",
    ),
    Fault(
        "shares-are-whole",
        "launch_single.sh",
        '        [ "$((10#$global % number))" -eq 0 ] ||',
        "        true ||",
        "the last of several runs is refused after the others have trained",
    ),
    Fault(
        "more-than-gpus",
        "launch_single.sh",
        '        [ "$(option --backend "$@")" = gloo ] || die',
        '        [ "$(option --backend "$@")" = gloo ] || say',
        "the last of several runs fails for want of a GPU after the others have trained",
    ),
    Fault(
        "two-nodes-forwards",
        "tools/two_nodes.sh",
        '    [ "${#launchers[@]}" -eq 0 ] || kill "-$1"',
        '    true || kill "-$1"',
        "Ctrl-C ends neither node",
    ),
    Fault(
        "kept-value-is-said",
        "tools/launcher/common.sh",
        '        say "keeping your $1=',
        '        true "keeping your $1=',
        "NCCL's own traffic is not where the launcher was told, and no line says why",
    ),
    # ---- The lesson, the pages, the benchmark
    Fault(
        "page-option",
        "README.md",
        "--num_epochs 2 --checkpoint coco.pt",
        "--num_epochs 2 --save coco.pt",
        "a command of the README ends with: unrecognized arguments",
    ),
    Fault(
        "page-link",
        "README.md",
        "](docs/speed.md#a-slow-link)",
        "](docs/speed.md#slow-link)",
        "a link of the README leads to a section that is not there",
    ),
    Fault(
        "page-message",
        "demo_coco_resnet18.py",
        "this PyTorch has no code for this GPU",
        "this PyTorch cannot use this GPU",
        "a reader looks up an error message, and the page has another",
    ),
    Fault(
        "page-variable",
        "launch_multinode.sh",
        "#   CONNECT_TIMEOUT=300 ",
        "#   CONNECT_TIMEOUT=600 ",
        "the launcher and the page state different defaults",
    ),
    Fault(
        "page-map",
        "docs/development.md",
        "| `tools/nccl_log.py` | after a run: what NCCL's text means |\n",
        "",
        "the map leaves a tool out",
    ),
    Fault(
        "lesson-shares",
        "docs/lesson/ddp.py",
        "DistributedSampler(data, world_size, rank)",
        "DistributedSampler(data, 1, 0)",
        "all students' ranks train on the same images",
    ),
    Fault(
        "lesson-wrap",
        "docs/lesson/ddp.py",
        "ddp = DistributedDataParallel(model)",
        "ddp = model",
        "each rank trains a model of its own",
    ),
    Fault(
        "lesson-forward",
        "docs/lesson/ddp.py",
        "outputs = ddp(images)",
        "outputs = model(images)",
        "backward averages nothing, and no error message appears",
    ),
    Fault(
        "lesson-set-epoch",
        "docs/lesson/ddp.py",
        "    sampler.set_epoch(epoch)  # a different order in each epoch\n",
        "",
        "each epoch of the lesson repeats the first one's order",
    ),
    Fault(
        "lesson-sum",
        "docs/lesson/ddp.py",
        "    dist.all_reduce(results)\n",
        "",
        "the loss of all ranks is that of rank 0",
    ),
    Fault(
        "lesson-rank-0",
        "docs/lesson/ddp.py",
        '    if rank == 0:\n        say(f"epoch',
        '    if True:\n        say(f"epoch',
        "every rank prints the results of all ranks",
    ),
    Fault(
        "lesson-seed",
        "docs/lesson/ddp.py",
        "torch.manual_seed(0)  #",
        "#",
        "each run begins with other weights, and ends with others than plain.py",
    ),
    Fault(
        "lesson-plain",
        "docs/lesson/plain.py",
        "    sampler.generator.manual_seed(epoch)  # a different order in each epoch\n",
        "",
        "plain.py shuffles otherwise than ddp.py, and their losses differ",
    ),
    Fault(
        "lesson-threads",
        "docs/lesson/ddp.py",
        "del ddp, outputs, loss\n",
        "",
        "a thread of Gloo's may crash Python after all results",
    ),
    Fault(
        "lesson-notebook",
        "docs/lesson/lesson.ipynb",
        '!python plain.py"',
        '!python3 plain.py"',
        "the notebook is no longer the one that the programs and the page make",
    ),
    Fault(
        "benchmark-ratio",
        "tools/benchmark.py",
        "{medians[name] / medians[last]:.3f}",
        "{medians[last] / medians[name]:.3f}",
        "the benchmark calls the slower script the faster one",
    ),
    Fault(
        "benchmark-order",
        "tools/benchmark.py",
        "for name in list(cases)[:: -1 if number % 2 else 1]:",
        "for name in cases:",
        "in each round the same case runs last, on a machine that has become warm",
    ),
    Fault(
        "benchmark-median",
        "tools/benchmark.py",
        "statistics.median(rates) for name",
        "statistics.mean(rates) for name",
        "one disturbed round moves the benchmark's figure",
    ),
    Fault(
        "benchmark-variables",
        "tools/benchmark.py",
        "text = run(args, command, FASTER)",
        "text = run(args, command)",
        "the benchmark measures a step slower than the launchers run it",
    ),
    Fault(
        "benchmark-against",
        "tools/benchmark.py",
        "[sys.executable, script, *given]",
        "[sys.executable, SCRIPT, *given]",
        "the benchmark compares the script with itself, whatever --against names",
    ),
    Fault(
        "benchmark-start",
        "tools/benchmark.py",
        'longer = seconds["long"] - seconds["short"]',
        'longer = seconds["long"]',
        "a peer that starts slowly comes out as slow in training",
    ),
]


def copy_project(folder: Path) -> Path:
    """A copy of what git knows or would add, with the same neighbours."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    project = folder / "project"
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (project / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, project / name)
    if (ROOT.parent / "shared").is_dir():
        (folder / "shared").symlink_to(ROOT.parent / "shared")
    return project


def pytest(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs pytest on a copy; the long tests, too."""
    env = {**os.environ, "TEST_LONG": "1", "TMPDIR": str(project.parent), "PYTHONPATH": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(
        command,
        cwd=project,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=SECONDS,
    )


def find_guards(project: Path) -> dict[str, list[str]]:
    """The tests that guard against each fault, by their node ids."""
    file = project.parent / "guards.json"
    done = pytest(project, "--collect-only", f"--write-guards={file}")
    if done.returncode:
        raise SystemExit(f"the tests cannot be collected:\n{done.stdout}")
    return json.loads(file.read_text())


def pass_without_faults(guards: dict[str, list[str]]) -> None:
    """Ends the program unless all these tests pass: otherwise a failure would say nothing."""
    tests = sorted({test for found in guards.values() for test in found})
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        share = ["-n", str(os.cpu_count()), "--dist", "loadfile"]
        done = pytest(copy_project(Path(folder)), *share, "-rs", *tests)
    if done.returncode or re.search(r"^SKIPPED", done.stdout, re.MULTILINE):
        raise SystemExit(f"without a fault these tests fail, or skip:\n{done.stdout}")


def notice(fault: Fault, tests: list[str]) -> tuple[str, str, float]:
    """(what is wrong, or nothing; the first test that failed; seconds for all times)."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-", ignore_cleanup_errors=True) as folder:
        project = copy_project(Path(folder))
        fault.put_into(project)
        found = ""
        for number in range(1, TIMES + 1):
            try:
                done = pytest(project, "-x", "-rfE", "--tb=no", *tests)
            except subprocess.TimeoutExpired:
                return f"not over after {SECONDS} s", "", time.monotonic() - begin
            failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
            if done.returncode != 1 or not failed:
                end = done.stdout.strip().rpartition("\n")[2]
                return f"NOT NOTICED, run {number}: {end}", "", time.monotonic() - begin
            found = failed[1].removeprefix("tests/")
    return "", found, time.monotonic() - begin


def choose(names: Iterable[str]) -> list[Fault]:
    by_name = {fault.name: fault for fault in FAULTS}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise SystemExit(f"no such fault: {', '.join(unknown)}; --list shows their names")
    return [by_name[name] for name in names] or FAULTS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="FAULT", help="default: all of them")
    parser.add_argument(
        "--list", action="store_true", help="print their names, and what they show"
    )
    args = parser.parse_args()
    faults = choose(args.names)
    if args.list:
        for fault in faults:
            print(f"{fault.name:24} {fault.path:32} {fault.shows}")
        return 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        guards = find_guards(copy_project(Path(folder)))
    tried = [fault for fault in faults if not fault.untestable]
    pass_without_faults({fault.name: guards.get(fault.name, []) for fault in tried})

    def judge(fault: Fault) -> bool:
        problem, test, seconds = fault.problem(), "", 0.0
        if not problem and not fault.untestable:
            if fault.name in guards:
                problem, test, seconds = notice(fault, guards[fault.name])
            else:
                problem = "NOT NOTICED: no test is marked with it"
        verdict = problem or test or f"not testable here: {fault.untestable}"
        print(f"| {fault.name} | {fault.shows} | {verdict} | {seconds:.0f} s |", flush=True)
        return not problem

    begin = time.monotonic()
    print("| fault | what it shows | noticed by | time |\n|---|---|---|---|")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(judge, faults))
    count, minutes = results.count(False), (time.monotonic() - begin) / 60
    print(f"{len(faults)} faults, {count} not noticed, {minutes:.1f} minutes")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
