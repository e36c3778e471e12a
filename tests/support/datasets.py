"""Small data sets in COCO's layout, and the script's options for them."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from PIL import Image

# Of the script, where no file is looked at.
OPTIONS = ["--coco_image_path", "any", "--annotation_path", "any", "--workers", "0"]
COCO_IDS = [i for i in range(1, 91) if i not in (12, 26, 29, 30, 45, 66, 68, 69, 71, 83)]


def instances(
    names: Sequence[str], labels: Sequence[int] | None = None, ids: Sequence[int] = COCO_IDS
) -> dict:
    """A COCO instances file's content: image i has the category `labels[i]`, of 1..90 (None: no
    annotation at all).
    """
    labels = [ids[i % len(ids)] for i in range(len(names))] if labels is None else labels
    size = {"height": 40, "width": 48}
    return {
        "images": [{"id": 100 + i, "file_name": n, **size} for i, n in enumerate(names)],
        "annotations": [
            {"id": i + 1, "image_id": 100 + i, "category_id": c, "bbox": [1, 1, 9, 9], "area": 81}
            for i, c in enumerate(labels)
            if c is not None
        ],
        "categories": [{"id": i, "name": f"category {i}"} for i in ids],
    }


def write_images(
    folder: Path, names: Iterable[str], seed: int = 0, size: tuple[int, int] = (48, 40)
) -> None:
    """Small JPEG files, no two alike."""
    folder.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed)
    for name in names:
        coarse = noise.integers(0, 256, (5, 6, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize(size).save(folder / name, "JPEG", quality=90)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def met_by(rank: int, count: int) -> str:
    """An image that, of two ranks, this one alone meets in the first epoch, in its third batch of
    four, of so many images.
    """
    from torch.utils.data import DistributedSampler

    sampler = DistributedSampler(range(count), 2, rank, seed=0)
    sampler.set_epoch(1)
    return numbered(count)[[*sampler][9]]


def numbered(count: int) -> list[str]:
    return [f"{i:04d}.jpg" for i in range(count)]


class Payload:
    """What a malicious file holds: unpickled, it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def make_set(
    folder: Path, count: int, val: int = 0, size: tuple[int, int] = (48, 40)
) -> list[str]:
    """A data set of labelled images; returns the script's options for it."""
    options = []
    for part, number in (("", count), ("val_", val)):
        if number:
            write_images(folder / f"{part}images", numbered(number), number, size)
            (folder / f"{part}instances.json").write_text(json.dumps(instances(numbered(number))))
            options += [f"--{part or 'coco_'}image_path", str(folder / f"{part}images")]
            options += [f"--{part}annotation_path", str(folder / f"{part}instances.json")]
    return options


def arguments(demo: ModuleType, *more: object) -> argparse.Namespace:
    """The script's arguments for OPTIONS and these."""
    return demo.parse_arguments([*OPTIONS, *map(str, more)])


def image_list(demo: ModuleType, count: int) -> Any:
    """What the script knows of so many images of 80 classes."""
    labels = [n % 80 for n in range(count)]
    return demo.ImageSet(numbered(count), labels, dict(enumerate(map(str, range(80)))), 0)


def data_args(folder: Path, val: bool = False) -> list[str]:
    """The script's options for a data set laid out as COCO's: FOLDER/train2017,
    FOLDER/annotations, ...
    """
    notes = folder / "annotations"
    args = ["--coco_image_path", folder / "train2017"]
    args += ["--annotation_path", notes / "instances_train2017.json"]
    if val:
        args += ["--val_image_path", folder / "val2017"]
        args += ["--val_annotation_path", notes / "instances_val2017.json"]
    return [str(arg) for arg in args]


def read_coco(folder: Path, split: str):
    """The instances file of a split, as pycocotools reads it."""
    from pycocotools.coco import COCO

    with contextlib.redirect_stdout(io.StringIO()):
        return COCO(str(folder / "annotations" / f"instances_{split}.json"))


def digests(folder: Path) -> dict[str, str]:
    """Of each file, and of each folder its existence."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        if path.is_file()
        else "folder"
        for path in sorted(folder.rglob("*"))
    }
