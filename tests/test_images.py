"""The script's images: which ones a rank gets, and their pixels, from files and packed."""

from __future__ import annotations

import os
import pickle
import re
import shutil
from time import process_time
from types import SimpleNamespace

import pytest
import torch
import torchvision
from PIL import Image

import prepare_coco
from support.datasets import arguments, image_list, make_set, numbered, truncate, write_images

# --- Shares of the images ----------------------------------------------------------------------


def shares(demo, seed=0, epoch=1, start=0):
    """What the samplers of four ranks give of ten training images."""
    found = []
    for rank in range(4):
        process = demo.ProcessInfo(rank=rank, world_size=4)
        args = arguments(demo, "--seed", seed)
        sampler = demo.make_train_loader(args, process, image_list(demo, 10)).sampler
        sampler.set_epoch(epoch)
        sampler.start = start
        found.append([*sampler])
    return found


def test_shares_are_equally_long_complete_and_by_the_seed(demo):
    """Only what pads is repeated. Epoch 2 of a seed is not epoch 1 of the next."""
    for seed, epoch in ((0, 1), (1, 1), (0, 2)):
        found = shares(demo, seed, epoch)
        assert [len(share) for share in found] == [3, 3, 3, 3]
        assert {key for share in found for key in share} == {(epoch, n) for n in range(10)}
    orders = [
        [index for share in shares(demo, *how) for _, index in share]
        for how in ((0, 1), (1, 1), (0, 2))
    ]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert shares(demo, start=2) == [share[2:] for share in shares(demo)]


@pytest.mark.parametrize("count", [1, 10, 13])
def test_validation_gives_each_image_once(demo, count):
    found = []
    for rank in range(4):
        process = demo.ProcessInfo(rank=rank, world_size=4)
        val = "--val_image_path", "any", "--val_annotation_path", "any"
        loader = demo.make_val_loader(arguments(demo, *val), process, image_list(demo, count))
        found += [index for _, index in loader.sampler]
        assert loader.dataset.crop is demo.center_crop
    assert sorted(found) == list(range(count))


# --- Folders -----------------------------------------------------------------------------------


def test_each_folder_is_listed_once_also_through_links(demo, tmp_path, monkeypatch):
    """And no image is looked at by itself: COCO has 118,287."""
    listed, scandir = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: listed.append(path) or scandir(path))
    write_images(tmp_path / "elsewhere", numbered(9))
    (tmp_path / "images").mkdir()
    (tmp_path / "images/link").symlink_to(tmp_path / "elsewhere")
    names = [f"link/{name}" for name in numbered(9)]
    missing = ["link/gone.jpg", "gone/1.jpg", "3\0.jpg"]
    assert demo.missing_images(tmp_path / "images", [*names, *missing]) == missing
    assert len(listed) == 3  # "", link and gone
    line = f"the folder of images {tmp_path}/images lacks 3 of 12 listed images, the first is "
    with pytest.raises(demo.UserError, match=f"{line}{missing[0]} .*check_coco.py"):
        demo.look_for_images(tmp_path / "images", [*names, *missing])


# --- Pixels ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A folder with eight images."""
    folder = tmp_path_factory.mktemp("images")
    make_set(folder, 8)
    return folder / "images"


def dataset(demo, folder, seed=0, size=40):
    args = arguments(demo, "--seed", seed, "--image_size", size, "--coco_image_path", folder)
    return demo.make_train_loader(args, demo.ProcessInfo(), image_list(demo, 8)).dataset


def test_pixels_are_a_function_of_seed_epoch_and_index(demo, images):
    one, same = dataset(demo, images), dataset(demo, images)
    first = [one[1, index][0] for index in range(8)]
    again = [same[1, index][0] for index in reversed(range(8))]
    assert all(map(torch.equal, first, reversed(again)))
    for other, epoch in ((one, 2), (dataset(demo, images, seed=1), 1)):
        assert not any(map(torch.equal, first, [other[epoch, index][0] for index in range(8)]))


def test_the_model_gets_the_pixels_that_imagenets_weights_expect(demo, images, monkeypatch):
    """cuDNN tries out its convolutions for whole batches, and not for an epoch's last one."""
    pixels, *_ = dataset(demo, images)[1, 0]
    transforms = torchvision.models.ResNet18_Weights.DEFAULT.transforms()
    expected = torchvision.transforms.functional.normalize(
        pixels.permute(2, 0, 1) / 255, transforms.mean, transforms.std
    )
    args = arguments(demo, "--precision", "fp32", "--batch_size", 4)
    training = SimpleNamespace(args=args, process=demo.ProcessInfo(), mean=demo.MEAN, std=demo.STD)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    for count in (4, 3):
        found = demo.forward(training, torch.nn.Identity(), torch.stack([pixels] * count))
        torch.testing.assert_close(found, expected.expand_as(found), rtol=0, atol=1e-5)
        assert torch.backends.cudnn.benchmark == (count == 4)


def test_crops_are_those_of_torchvision(demo, images):
    """Bit for bit, for the same state of the random generator."""
    v2 = demo.v2
    for own, transforms in (
        (demo.random_crop, [v2.RandomResizedCrop(28), v2.RandomHorizontalFlip()]),
        (demo.center_crop, [v2.Resize(32), v2.CenterCrop(28)]),
    ):
        for number, path in enumerate(sorted(images.iterdir())):
            image = demo.load_image(path).permute(2, 0, 1)
            torch.manual_seed(number)
            expected = v2.Compose(transforms)(image)
            torch.manual_seed(number)
            assert torch.equal(own(image, 28), expected)


def test_of_a_long_thin_image_only_the_middle_is_resized(demo, monkeypatch):
    """As a whole it could fill the memory."""
    sizes, resize = [], demo.resize
    monkeypatch.setattr(demo, "resize", lambda i, size: sizes.append(i.shape) or resize(i, size))
    for shape in ((3, 1, 60_000), (3, 60_000, 1)):
        image = torch.zeros(shape, dtype=torch.uint8)
        assert demo.center_crop(image, 224).shape == (3, 224, 224)
    assert sizes == [(3, 1, 8), (3, 8, 1)]


def smooth() -> Image.Image:
    """An image in colour."""
    coarse = Image.frombytes("RGB", (3, 2), bytes(range(0, 252, 14)))
    return coarse.resize((60, 40), Image.Resampling.BILINEAR)


KINDS = {"grey.jpg": "L", "cmyk.jpg": "CMYK", "ycc.jpg": "YCbCr", "palette.png": "P"}
KINDS |= {"bit.png": "1", "alpha.png": "RGBA", "grey_alpha.png": "LA", "bitmap.bmp": "RGB"}
KINDS |= {"colour.tiff": "RGB", "cmyk.tiff": "CMYK", "new.webp": "RGB", "first.gif": "P"}


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_image_looks_as_pillow_shows_it(demo, tmp_path, name):
    second = smooth().transpose(Image.Transpose.ROTATE_180)  # which a GIF shows later
    animated = {"save_all": True, "append_images": [second]} if name == "first.gif" else {}
    smooth().convert(KINDS[name]).save(tmp_path / name, **animated)
    found = demo.load_image(tmp_path / name)
    expected = Image.open(tmp_path / name).convert("RGB")
    expected = torchvision.transforms.functional.pil_to_tensor(expected).permute(1, 2, 0)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("mode", "name"), [("I;16", "1.png"), ("I", "1.tiff"), ("F", "1.tiff")])
def test_pixels_of_more_than_8_bits_are_refused_and_never_clipped(demo, tmp_path, mode, name):
    image = smooth().convert("L").convert("I" if mode == "I;16" else mode)
    image.point(lambda value: value * 257 + 0).convert(mode).save(tmp_path / name)
    line = f"{name} cannot be decoded: its pixels have more than 8 bits"
    with pytest.raises(demo.LoneUserError, match=re.escape(line)):
        demo.load_image(tmp_path / name)


def test_damaged_and_too_large_images_and_lost_files_differ(demo, tmp_path, monkeypatch):
    """A file that cannot be read is no damaged image: another start may read it."""
    image = tmp_path / "1.jpg"
    smooth().save(image)
    for most, why in ((1000, "it is too large"), (10**6, "[Tt]runcated")):
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", most)
        with pytest.raises(demo.LoneUserError) as error:
            demo.load_image(image)
        words = rf"image {image} cannot be decoded: .*{why}.*check_coco\.py --decode"
        assert re.match(words, str(error.value)) and "\n" not in str(error.value)
        truncate(image)
    with pytest.raises(OSError):
        demo.load_image(tmp_path / "gone.jpg")


# --- A packed file -----------------------------------------------------------------------------


def pack(source, target, *options):
    args = prepare_coco.parse_arguments([str(source), str(target), "--packed", *options])
    prepare_coco.pack(args, "images", numbered(8)[::-1])  # in an order of its own
    return target / "images.rgb"


@pytest.fixture(scope="module")
def packed(images, tmp_path_factory):
    """The eight images as they are, in a packed file."""
    return pack(images.parent, tmp_path_factory.mktemp("packed"), "--shorter_side", "999")


def test_images_of_a_packed_file_are_those_of_the_folder(demo, images, packed):
    """Also in a worker that was not forked: it gets a copy of the dataset, and opens the file."""
    folder, file = dataset(demo, images), dataset(demo, packed)
    for index in (5, 0, 7):
        (image, label), (expected, same) = file[1, index], folder[1, index]
        assert torch.equal(image, expected) and label == same
        assert image.shape == (40, 40, 3)
        file = pickle.loads(pickle.dumps(dataset(demo, packed)))
    file.crop = lambda image, size: image
    assert torch.equal(file[1, 2][0], demo.load_image(images / "0002.jpg"))


@pytest.mark.slow
def test_an_image_of_a_packed_file_loads_more_than_twice_as_fast(demo, tmp_path):
    """Of COCO's size. A quiet machine shows 3 to 7 times, by the version of torchvision."""
    make_set(tmp_path, 8, size=(640, 480))
    (tmp_path / "packed").mkdir()
    pack(tmp_path, tmp_path / "packed")
    torch.set_num_threads(1)
    seconds = {"images": [], "packed/images.rgb": []}
    for _ in range(9):
        for folder, times in seconds.items():
            found = dataset(demo, tmp_path / folder, size=224)
            began = process_time()
            for index in range(8):
                found[1, index]
            times.append(process_time() - began)
    files, packed = map(min, seconds.values())
    assert files > 2 * packed


def test_a_packed_file_that_lacks_something_is_one_line(demo, packed, tmp_path):
    def assert_refused(names, line):
        with pytest.raises(demo.UserError, match=re.escape(line)):
            demo.look_for_images(str(tmp_path / "some.rgb"), names)

    size = packed.stat().st_size
    shutil.copy(packed, tmp_path / "some.rgb")
    index = "some.rgb.index"
    assert_refused(numbered(8), f"{index}, of tools/prepare_coco.py --packed, cannot be read: ")
    shutil.copy(f"{packed}.index", tmp_path / index)
    demo.look_for_images(str(tmp_path / "some.rgb"), numbered(8))
    line = "some.rgb lacks 2 of 10 listed images, the first is 0008.jpg"
    assert_refused(numbered(10), line)
    found = dataset(demo, tmp_path / "some.rgb")
    os.truncate(tmp_path / "some.rgb", size - 1)
    with pytest.raises(OSError, match=r"some\.rgb has become shorter"):
        found[1, 0]  # it is the last one in the file
    line = f"has {size - 1} bytes, but {tmp_path}/{index} is of a file with {size}"
    assert_refused(numbered(8), line)
