"""The script's parts: shares of the images, pixels, gradients, errors and exit codes."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pickle
import re
import shutil
import socket
import struct
import sys
import warnings
import zlib
from collections.abc import Callable
from time import process_time
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torchvision
from PIL import Image

import prepare_coco
from support.datasets import COCO_IDS, instances, make_set, numbered, truncate, write_images
from support.forks import QUICK, changed, load, run_forked
from support.launchers import FAST
from support.processes import (
    SCRIPT,
    Run,
    run_demo,
    start,
)

OPTIONS = ["--coco_image_path", "any", "--annotation_path", "any", "--workers", "0"]


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    """The script as a module."""
    return load(str(SCRIPT))


def arguments(demo, *more):
    return demo.parse_arguments([*OPTIONS, *map(str, more)])


def image_list(demo, count):
    labels = [n % 80 for n in range(count)]
    return demo.ImageSet(numbered(count), labels, dict(enumerate(map(str, range(80)))), 0)


def keys(demo, rank, start=0, seed=0, epoch=1):
    """What the sampler of one of four ranks gives of ten training images."""
    process = demo.ProcessInfo(rank=rank, world_size=4)
    args = arguments(demo, "--seed", seed)
    loader = demo.make_train_loader(args, process, image_list(demo, 10))
    loader.sampler.set_epoch(epoch)
    loader.sampler.start = start
    return list(loader.sampler)


# --- Shares of the images ----------------------------------------------------------------------


def test_shares_are_equally_long_and_complete_and_may_begin_later(demo):
    """Of ten images each of four ranks gets three; only what pads is repeated. Another seed makes
    other shares.
    """
    shares, others = ([keys(demo, rank, seed=seed) for rank in range(4)] for seed in (0, 1))
    for found in (shares, others):
        assert [len(share) for share in found] == [3, 3, 3, 3]
        assert {key for share in found for key in share} == {(1, index) for index in range(10)}
    assert shares != others
    assert keys(demo, 1, start=2) == shares[1][2:]


def test_the_second_epoch_of_a_seed_is_not_the_first_one_of_the_next_seed(demo):
    second = [index for rank in range(4) for _, index in keys(demo, rank, seed=0, epoch=2)]
    first = [index for rank in range(4) for _, index in keys(demo, rank, seed=1, epoch=1)]
    assert second != first


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


# --- Image lists -------------------------------------------------------------------------------


def test_label_is_the_category_of_the_first_annotation_in_the_file(demo, tmp_path):
    content = instances(["a.jpg", "b.jpg", "c.jpg"], [90, None, 1])
    more = {"id": 9, "image_id": 100, "category_id": 1, "iscrowd": 1, "bbox": [0.5] * 4}
    content["annotations"].insert(0, {**more, "category_id": 13})
    content["annotations"].append(more)
    (tmp_path / "file.json").write_text(json.dumps(content))
    found = demo.read_image_list(tmp_path / "file.json")
    assert found.names == ["a.jpg", "c.jpg"] and found.unlabelled == 1
    assert found.labels == [COCO_IDS.index(13), 0]
    assert list(found.categories) == COCO_IDS


def look_up(demo, folder, *names):
    """The names that a list with these images has, where the folder is looked at."""
    (folder.parent / "file.json").write_text(json.dumps(instances(names)))
    found = demo.read_image_list(folder.parent / "file.json").names
    demo.look_for_images(folder, found)
    return found


def test_images_in_linked_folders_are_found_and_a_loop_of_links_ends(demo, tmp_path):
    write_images(tmp_path / "elsewhere", ["1.jpg"])
    (tmp_path / "images").mkdir()
    (tmp_path / "images/link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/loop").symlink_to(tmp_path / "images")
    (tmp_path / "images/itself").symlink_to("itself")
    names = ["link/1.jpg", "link/loop/link/1.jpg"]
    assert look_up(demo, tmp_path / "images", *names) == names


LOOK_UP = """
def main(process):
    opened = []
    calls = "os.listdir", "os.scandir", "open"
    sys.addaudithook(lambda event, found: opened.append(found[0]) if event in calls else None)
    names = [f"{a}/{b}/{c}.jpg" for a in range(2) for b in range(5) for c in range(10)]
    missing = demo.missing_images(sys.argv[1], [*names, "0/0/gone.jpg", "gone/1.jpg"])
    print(len(opened), len(set(opened)), missing)
"""


def test_each_folder_is_listed_once(tmp_path):
    """Of ten folders, and of one that is not there; of 100 images none is opened."""
    for part in range(10):
        (tmp_path / f"{part // 5}/{part % 5}").mkdir(parents=True)
        for number in range(10):
            (tmp_path / f"{part // 5}/{part % 5}/{number}.jpg").touch()
    (run,) = run_forked([(0, [tmp_path])], program=changed(tmp_path / "look_up.py", LOOK_UP))
    assert run.lines()[0] == "11 11 ['0/0/gone.jpg', 'gone/1.jpg']"


# --- Pixels ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A folder with eight images."""
    folder = tmp_path_factory.mktemp("images")
    make_set(folder, 8)
    return folder / "images"


def dataset(demo, folder, seed=0, count=8):
    args = arguments(demo, "--seed", seed, "--image_size", 40, "--coco_image_path", folder)
    return demo.make_train_loader(args, demo.ProcessInfo(), image_list(demo, count)).dataset


def test_pixels_are_a_function_of_seed_epoch_and_index(demo, images):
    one, same = dataset(demo, images), dataset(demo, images)
    first = [one[1, index][0] for index in range(8)]
    again = [same[1, index][0] for index in reversed(range(8))]
    assert all(map(torch.equal, first, reversed(again)))
    for other in (
        [one[2, index][0] for index in range(8)],
        [dataset(demo, images, seed=1)[1, index][0] for index in range(8)],
    ):
        assert not any(map(torch.equal, first, other))


def test_the_model_gets_the_pixels_that_its_pretrained_weights_expect(demo, images, monkeypatch):
    pixels, *_ = dataset(demo, images)[1, 0]
    transforms = torchvision.models.ResNet18_Weights.DEFAULT.transforms()
    scaled = torchvision.transforms.functional.normalize(
        pixels.permute(2, 0, 1) / 255, transforms.mean, transforms.std
    )
    training = SimpleNamespace(args=arguments(demo, "--precision", "fp32"), mean=demo.MEAN)
    training.process, training.std = demo.ProcessInfo(), demo.STD
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    (found,) = demo.forward(training, torch.nn.Identity(), pixels[None])
    assert torch.allclose(found, scaled, atol=1e-5)


def picture() -> Image.Image:
    """A smooth one, in colour."""
    coarse = Image.frombytes("RGB", (3, 2), bytes(range(0, 252, 14)))
    return coarse.resize((60, 40), Image.Resampling.BILINEAR)


def decoded(demo, path, capfd) -> torch.Tensor:
    found = demo.load_image(path)
    assert not capfd.readouterr().out
    assert found.dtype == torch.uint8 and found.shape[2] == 3
    return found


def difference(found: torch.Tensor, image: Image.Image) -> float:
    """The mean over all pixels, of a value of 0 to 255."""
    expected = torchvision.transforms.functional.pil_to_tensor(image.convert("RGB"))
    return (found.permute(2, 0, 1).float() - expected.float()).abs().mean().item()


KINDS = {"grey.jpg": "L", "cmyk.jpg": "CMYK", "palette.png": "P", "bit.png": "1"}
KINDS |= {"alpha.png": "RGBA", "grey_alpha.png": "LA", "bitmap.bmp": "RGB", "old.tiff": "L"}
KINDS |= {"colour.tiff": "RGB", "new.webp": "RGB", "ycc.jpg": "YCbCr", "bit.tiff": "1"}
KINDS |= {"cmyk.tiff": "CMYK", "new.avif": "RGB"}


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_image_looks_as_pillow_shows_it(demo, tmp_path, name, capfd):
    path = tmp_path / name
    try:
        picture().convert(KINDS[name]).save(path)
    except (KeyError, OSError, ValueError) as error:
        pytest.skip(f"this Pillow cannot write it: {error}")
    assert difference(decoded(demo, path, capfd), Image.open(path)) == 0


@pytest.mark.parametrize(("mode", "name"), [("I;16", "1.png"), ("I", "1.tiff"), ("F", "1.tiff")])
def test_pixels_of_more_than_8_bits_are_refused_and_never_clipped(demo, tmp_path, mode, name):
    image = picture().convert("L").convert("I" if mode == "I;16" else mode)
    image.point(lambda value: value * 257 + 0).convert(mode).save(tmp_path / name)
    line = f"{name} cannot be decoded: its pixels have more than 8 bits"
    with pytest.raises(demo.LoneUserError, match=re.escape(line)):
        demo.load_image(tmp_path / name)


def test_an_animated_gif_is_its_first_frame(demo, tmp_path, capfd):
    second = picture().transpose(Image.Transpose.ROTATE_180)
    picture().save(tmp_path / "two.gif", save_all=True, append_images=[second])
    assert difference(decoded(demo, tmp_path / "two.gif", capfd), picture()) < 10


def test_an_image_that_pillow_warns_of_is_not_damaged(demo, tmp_path, capfd):
    """Neither of a palette with transparent colours nor of many pixels."""
    clear = picture().convert("P")
    clear.info["transparency"] = bytes(range(250))
    clear.save(tmp_path / "clear.png")
    Image.new("1", (12_000, 9_000)).save(tmp_path / "huge.png")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = decoded(demo, tmp_path / "clear.png", capfd)
        assert demo.load_image(tmp_path / "huge.png").shape == (9_000, 12_000, 3)
    assert difference(found, clear.convert("RGBA")) == 0


def png_of(width: int, height: int) -> bytes:
    """The file of a PNG that states this size, and has no pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    content = b"\x89PNG\r\n\x1a\n"
    for kind, data in ((b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")):
        part = kind + data
        content += struct.pack(">I", len(data)) + part + struct.pack(">I", zlib.crc32(part))
    return content


def test_an_image_of_too_many_pixels_is_called_too_large_and_not_damaged(tmp_path):
    words = [*make_set(tmp_path, 4), *FAST, "--max_steps", 1]
    (tmp_path / "images/0002.jpg").write_bytes(png_of(20_000, 20_000))
    (run,) = run_forked([(0, words)], program=QUICK, expect=None)
    (line,) = [line for line in run.lines() if "0002.jpg" in line]
    assert re.search(r"too (large|big|many pixels)", line) and "damaged" not in line


def test_a_damaged_image_is_named_with_the_reason_and_what_finds_all_of_them(demo, tmp_path):
    make_set(tmp_path, 8)
    truncate(tmp_path / "images/0003.jpg")
    with pytest.raises(demo.LoneUserError) as error:
        dataset(demo, tmp_path / "images")[1, 3]
    line = str(error.value)
    assert line.startswith(f"image {tmp_path}/images/0003.jpg cannot be decoded: ")
    assert "runcated" in line and "check_coco.py --decode" in line and "\n" not in line


def test_a_file_that_cannot_be_read_is_no_damaged_image(demo, images):
    with pytest.raises(OSError):
        dataset(demo, images / "gone")[1, 0]


@pytest.fixture(scope="module")
def packed(images, tmp_path_factory):
    """The eight images as they are, in a packed file."""
    target = tmp_path_factory.mktemp("packed")
    words = [str(images.parent), str(target), "--packed", "--shorter_side", "999"]
    args = prepare_coco.parse_arguments(words)
    prepare_coco.pack(args, images.name, numbered(8)[::-1])  # in an order of its own
    return target / "images.rgb"


def test_images_of_a_packed_file_are_those_of_the_folder(demo, images, packed):
    """Also in a worker that was not forked: it gets a copy of the dataset, and opens the file."""
    folder, file = dataset(demo, images), dataset(demo, packed)
    for index in (5, 0, 7):
        (image, label), (expected, same) = file[1, index], folder[1, index]
        assert torch.equal(image, expected) and label == same
        assert image.shape == (40, 40, 3)
        file = pickle.loads(pickle.dumps(dataset(demo, packed)))
    file.crop = lambda image, size: image.flip(2)
    expected = demo.decode((images / "0002.jpg").read_bytes()).flip(1)
    assert expected.shape == (40, 48, 3) and torch.equal(file[1, 2][0], expected)


@pytest.mark.slow
def test_an_image_of_a_packed_file_loads_more_than_twice_as_fast(demo, tmp_path):
    """Of COCO's size. A quiet machine shows 3 to 7 times, by the version of torchvision."""
    make_set(tmp_path, 8, size=(640, 480))
    words = [str(tmp_path), str(tmp_path / "packed"), "--packed"]
    (tmp_path / "packed").mkdir()
    prepare_coco.pack(prepare_coco.parse_arguments(words), "images", numbered(8))
    torch.set_num_threads(1)
    seconds = {"images": [], "packed/images.rgb": []}
    for _ in range(9):
        for folder, times in seconds.items():
            images = dataset(demo, tmp_path / folder)
            images.size = 224
            began = process_time()
            for index in range(8):
                images[1, index]
            times.append(process_time() - began)
    files, packed = map(min, seconds.values())
    assert files > 2 * packed


def test_crops_are_those_of_torchvision(demo, images):
    """Bit for bit, for the same state of the random generator."""
    v2 = demo.v2
    for own, transforms in (
        (demo.random_crop, [v2.RandomResizedCrop(28), v2.RandomHorizontalFlip()]),
        (demo.center_crop, [v2.Resize(32), v2.CenterCrop(28)]),
    ):
        for number, path in enumerate(sorted(images.iterdir())):
            image = demo.decode(path.read_bytes()).permute(2, 0, 1)
            torch.manual_seed(number)
            expected = v2.Compose(transforms)(image)
            torch.manual_seed(number)
            assert torch.equal(own(image, 28), expected)


@pytest.mark.parametrize("shape", [(3, 1, 60_000), (3, 60_000, 1)])
def test_a_long_thin_image_does_not_become_a_huge_one(demo, monkeypatch, shape):
    """Only the middle of it is used."""

    def limited(image, size, *rest, **options):
        height, width = image.shape[1:]
        if len(size) == 1:  # of the shorter side
            factor = size[0] / min(height, width)
            size = [round(factor * height), round(factor * width)]
        assert 3 * size[0] * size[1] < 100e6
        return resize(image, size, *rest, **options)

    resize = demo.resize
    monkeypatch.setattr(demo, "resize", limited)
    assert demo.center_crop(torch.zeros(shape, dtype=torch.uint8), 224).shape == (3, 224, 224)


def test_a_packed_file_that_lacks_something_is_one_line(demo, packed, tmp_path):
    def refuse(names, line):
        with pytest.raises(demo.UserError) as error:
            demo.look_for_images(str(tmp_path / "some.rgb"), names)
        assert line in str(error.value)

    size = packed.stat().st_size
    shutil.copy(packed, tmp_path / "some.rgb")
    refuse(numbered(8), "some.rgb.index, of tools/prepare_coco.py --packed, cannot be read: ")
    shutil.copy(f"{packed}.index", tmp_path / "some.rgb.index")
    line = "some.rgb lacks 2 of 10 listed images, the first is 0008.jpg"
    refuse(numbered(10), line)
    demo.look_for_images(str(packed), numbered(8))
    found = dataset(demo, tmp_path / "some.rgb")
    os.truncate(tmp_path / "some.rgb", size - 1)
    with pytest.raises(OSError, match=r"some\.rgb has become shorter"):
        found[1, 0]  # it is the last one in the file
    line = f"has {size - 1} bytes, but {tmp_path}/some.rgb.index is of a file with {size}"
    refuse(numbered(8), line)


# --- The machine -------------------------------------------------------------------------------


def test_model_and_batches_have_the_form_that_their_device_wants(demo, monkeypatch):
    monkeypatch.setattr(demo, "errors_end_all_ranks", contextlib.nullcontext)
    args = arguments(demo, "--sync_bn", "--weights", "none")
    model = demo.build_model(args, demo.ProcessInfo(), image_list(demo, 8))
    assert isinstance(model.bn1, torch.nn.SyncBatchNorm)
    weight = model.layer1[0].conv1.weight
    assert weight.is_contiguous(memory_format=torch.channels_last)
    places = [demo.ProcessInfo(device=torch.device(kind)) for kind in ("cpu", "cuda", "mps")]
    assert [place.memory_format == torch.channels_last for place in places] == [True, True, False]
    loaders = [demo.make_train_loader(args, place, image_list(demo, 8)) for place in places]
    assert [loader.pin_memory for loader in loaders] == [False, True, False]


def test_precision_and_kernels_are_those_of_the_hardware(demo, monkeypatch):
    place = demo.ProcessInfo(device=torch.device("cuda"))
    for has_bf16, capability, expected in (
        (True, (8, 0), "bf16"),
        (False, (7, 0), "fp16"),
        (False, (6, 1), "fp32"),
    ):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda own=has_bf16, **_: own)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda own=capability: own)
        assert demo.fast_precision(None, place) == expected
    cudnn = torch.backends.cudnn
    monkeypatch.setattr(cudnn, "allow_tf32", True)
    demo.prepare_hardware(arguments(demo), demo.ProcessInfo())
    assert not cudnn.allow_tf32


def test_convolutions_are_tried_out_for_whole_batches_alone(demo, monkeypatch):
    """An epoch's last batch is shorter: cuDNN would try out its convolutions in each epoch."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    args = arguments(demo, "--precision", "fp32", "--batch_size", 4)
    training = SimpleNamespace(args=args, process=demo.ProcessInfo(), mean=demo.MEAN, std=demo.STD)
    for count, expected in ((4, True), (3, False), (4, True)):
        batch = torch.zeros(count, 8, 8, 3, dtype=torch.uint8)
        demo.forward(training, torch.nn.Identity(), batch)
        assert torch.backends.cudnn.benchmark is expected


def test_compression_is_refused_where_ddp_is_not_used(demo, monkeypatch):
    monkeypatch.setattr(demo, "set_threads", lambda _: 1)
    monkeypatch.setattr(demo, "errors_end_all_ranks", contextlib.nullcontext)
    for kind in ("fp16", "bf16"):
        args = arguments(demo, "--device", "mps", "--grad_compression", kind)
        with pytest.raises(demo.UserError, match="--device mps does not use"):
            demo.fill_in_arguments(args, demo.ProcessInfo(), 8)


def test_srun_and_mpirun_may_show_each_process_one_gpu(demo, monkeypatch):
    monkeypatch.setattr(demo, "usable_gpus", lambda _: 1)
    for launcher in ("srun", "mpirun"):
        place = demo.ProcessInfo(launcher, local_world_size=4)
        assert demo.choose_backend(arguments(demo), place) == "nccl"
    with pytest.raises(demo.UserError, match="4 processes for 1 GPU"):
        demo.choose_backend(arguments(demo), demo.ProcessInfo("torchrun", local_world_size=4))


def test_processes_that_see_one_gpu_each_use_nccl_whoever_started_them(demo, monkeypatch):
    """As with torchrun --virtual-local-rank: LOCAL_RANK is 0 everywhere."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    place = demo.ProcessInfo("torchrun", rank=1, world_size=2, local_world_size=2)
    assert demo.choose_backend(arguments(demo), place) == "nccl"


ENDS = [  # an error, and the class and words of what ends the run
    (lambda: RuntimeError("DefaultCPUAllocator: can't allocate memory: you"), "LoneUserError"),
    (lambda: torch.OutOfMemoryError("CUDA out of memory. Tried"), "LoneUserError"),
    (lambda: MemoryError(), "LoneUserError"),
    (lambda: RuntimeError("Application timeout caused pair closure"), "PeerLost"),
    (
        lambda: RuntimeError("[/pytorch/gloo/transport/tcp/pair.cc:534] Connection reset"),
        "PeerLost",
    ),
    (lambda: torch.distributed.DistBackendError("NCCL error"), "PeerLost"),
    (lambda: RuntimeError("anything else"), "RuntimeError"),
]


@pytest.mark.parametrize(("error", "kind"), ENDS)
def test_errors_are_told_apart_by_who_can_help(demo, error, kind):
    """A full memory would be full again; a lost rank may come back; the rest is this rank's."""
    found = demo.classified(error())
    assert type(found).__name__ == kind
    assert ("--batch_size" in str(found)) == (kind == "LoneUserError")


def test_a_shared_memory_that_is_too_small_has_its_remedy_in_the_line(demo, capfd):
    error = RuntimeError("This might be caused by insufficient shared memory (shm).")
    demo.log_error(demo.ProcessInfo(), error)
    assert "enlarge /dev/shm" in capfd.readouterr().err.splitlines()[-1]


def test_a_run_that_is_resumed_keeps_its_precision(demo, monkeypatch):
    monkeypatch.setattr(demo, "set_threads", lambda _: 1)
    monkeypatch.setattr(demo, "all_gather", lambda value: [value])
    monkeypatch.setattr(demo, "errors_end_all_ranks", contextlib.nullcontext)
    monkeypatch.setattr(demo, "fast_precision", lambda *_: "bf16")
    for checkpoint, expected in ((None, "bf16"), ({"settings": {"--precision": "fp32"}}, "fp32")):
        args = arguments(demo, "--precision", "auto")
        demo.fill_in_arguments(args, demo.ProcessInfo(), 10, checkpoint)
        assert args.precision == expected


@pytest.mark.parametrize(
    ("kind", "cores", "given", "expected"),
    [("cpu", 8, [], 1), ("cuda", 4, [], 3), ("cuda", 5, [], 3), ("cuda", 64, [], 16)]
    + [("cuda", 1, [], 1), ("cuda", 64, ["--workers", 9], 9)],
)
def test_default_number_of_loader_workers(demo, monkeypatch, kind, cores, given, expected):
    process = demo.ProcessInfo(device=torch.device(kind))
    monkeypatch.setattr(demo, "set_threads", lambda _: cores)
    monkeypatch.setattr(demo, "errors_end_all_ranks", contextlib.nullcontext)
    args = arguments(demo, "--precision", "fp32", *given)
    args.workers = given[1] if given else None
    demo.fill_in_arguments(args, process, 10)
    assert args.workers == expected


# Each rank's node and cores, and with how many other ranks of its node it shares them.
ON_NODES = {
    "torchrun": ([("a", [0, 1, 2, 3])] * 2 + [("b", [0, 1, 2, 3])] * 2, [2, 2, 2, 2]),
    "bound": ([("a", [0, 1]), ("a", [2, 3])], [2, 2]),
    "srun, which gives all the same": ([("a", [4, 5, 6, 7])] * 2, [2, 2]),
    "more ranks than cores": ([("a", [0])] * 2, [1, 1]),
    "nodes of one name": ([("localhost", [0, 1, 2, 3])] * 4, [2, 2, 2, 2]),
}


@pytest.mark.parametrize(("ranks", "expected"), ON_NODES.values(), ids=ON_NODES)
def test_ranks_that_have_the_same_cores_share_them(demo, monkeypatch, ranks, expected):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # PyTorch's threads stay as they are
    monkeypatch.setattr(demo, "cpu_quota", lambda: sys.maxsize)
    monkeypatch.setattr(demo, "all_gather", lambda value: ranks)
    place, found = demo.ProcessInfo(local_world_size=2), []
    for host, cores in ranks:
        own = {*cores}
        monkeypatch.setattr(demo.os, "sched_getaffinity", lambda _, own=own: own, raising=False)
        monkeypatch.setattr(demo.socket, "gethostname", lambda own=host: own)
        found.append(demo.set_threads(place))
    assert found == expected
    monkeypatch.setattr(demo, "cpu_quota", lambda: 2)
    assert demo.set_threads(place) == 1


@pytest.mark.slow
def test_a_stop_signal_at_the_very_end_leaves_the_exit_code_as_it_is():
    """When the variables of the main module go, Python has taken its handlers away."""
    code = f"import os, signal, sys; sys.path.insert(0, {str(SCRIPT.parent)!r})\n"
    code += "import demo_coco_resnet18 as demo\n"
    code += "class AtEnd:\n"
    code += "    def __del__(self, kill=os.kill, me=os.getpid()): kill(me, 15)\n"
    code += "at_end = AtEnd()\n"
    code += "def main(process):\n"
    code += "    signal.signal(15, lambda *_: None)\n"
    code += "    raise demo.UserError('no')\n"
    code += "demo.run_and_exit(main)"
    with start([sys.executable, "-c", code]) as started:
        assert started.finish(expect=2).lines() == ["[CPU 0] ERROR: no"]


def test_windows_is_refused_in_one_line():
    code = "import multiprocessing, runpy, socket, sys, tempfile; sys.platform = 'win32'; "
    code += f"runpy.run_path({str(SCRIPT)!r})"
    with start([sys.executable, "-c", code]) as started:
        (line,) = started.finish(expect=1).lines()
    assert "WSL2" in line


@pytest.mark.slow
def test_a_cpu_without_bf16_instructions_trains_in_fp32(tmp_path):
    """Here they are hidden from PyTorch's libraries."""
    env = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    words = [*make_set(tmp_path, 8), *FAST, "--max_steps", 1, "--precision", "auto"]
    run = run_demo(words, launcher="python", env=env)
    assert run.json_line("Run")["precision"] == "fp32"


# --- Gradients ---------------------------------------------------------------------------------

# One optimizer step over fixed images. Batch norm is in eval mode: in training it would see the
# images of each rank alone. It takes rank 0's statistics, which DDP gives to all.
ONE_STEP = f"""
import sys
from types import SimpleNamespace
sys.path.insert(0, {str(SCRIPT.parent)!r})
import torch
import demo_coco_resnet18 as demo

run_and_exit = demo.run_and_exit

def main(process):
    args = demo.parse_arguments(sys.argv[2:])
    demo.read_environment(process)
    demo.join_process_group(args, process)
    demo.fill_in_arguments(args, process, 16)
    model = demo.build_model(args, process, SimpleNamespace(categories=range(80)))
    model.bn1.running_mean += process.rank
    ddp = demo.wrap_model(args, process, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    training = demo.Training(args, process, None, model, ddp, optimizer)
    model.eval()
    noise = torch.Generator().manual_seed(0)
    global images, own
    images = torch.randint(256, (16, 40, 40, 3), dtype=torch.uint8, generator=noise)
    labels = torch.randint(80, (16,), generator=noise)
    own = slice(process.rank, None, process.world_size)
    with torch.no_grad():
        logits = demo.forward(training, model, images[own]).cpu()
        demo.log(process, f"LOSS {{demo.cross_entropy(logits, labels[own]):.4f}}")
    parts = images[own], labels[own]
    batches = zip(*(part.split(args.batch_size) for part in parts))
    sent = []
    if process.world_size > 1:
        ddp.register_comm_hook(sent, note)
    before = {{name: values.detach().clone() for name, values in model.named_parameters()}}
    demo.train_one_epoch(training, Loader(batches), 1)
    after = dict(model.named_parameters())
    if process.rank == 0:
        found = {{name: before[name] - after[name].detach() for name in before}}
        cap = ddp.bucket_bytes_cap
        torch.save({{"gradients": found, "buckets": sent, "cap": cap}}, sys.argv[1])

def note(sent, bucket):
    sent.append(bucket.index())
    return demo.default_hooks.allreduce_hook(None, bucket)

class Sampler:
    def __len__(self):
        return len(images[own])

    def set_epoch(self, epoch):
        pass

class Loader(list):
    sampler = Sampler()
"""


@pytest.fixture(scope="module")
def one_step(tmp_path_factory) -> Callable[..., tuple[Run, dict]]:
    """Of a step of SGD with a learning rate of 1: its run; and what it took from the weights, and
    which of DDP's buckets were sent.
    """
    folder = tmp_path_factory.mktemp("one_step")
    program = changed(folder / "one_step.py", ONE_STEP)

    @functools.cache
    def step(ranks: int, options: str) -> tuple[Run, dict]:
        path = folder / f"{ranks} {options}.pt"
        words = [*OPTIONS, *FAST, "--num_epochs", 1, "--lr", 1, *options.split()]
        (run,) = run_forked([(ranks, [path, *words])], program=program)
        return run, torch.load(path)

    return step


REFERENCE = (1, "--batch_size 16")


def loss_before(run: Run, rank: int = 0) -> float:
    """Of a rank's own images, with the first weights."""
    return float(re.search(rf"\[CPU {rank}\] LOSS (.*)", run.out)[1])


def assert_equal_gradients(found: dict, expected: dict, factor: float = 1) -> None:
    for name, values in expected["gradients"].items():
        difference = (found["gradients"][name] - factor * values).abs().max()
        assert difference <= 1e-3 * factor * values.abs().max(), name


@pytest.mark.parametrize(
    "options",
    [
        pytest.param("--batch_size 8"),
        pytest.param(
            "--batch_size 4 --accumulate_steps 2",
        ),
        pytest.param(
            "--batch_size 3 --accumulate_steps 3 --bucket_cap_mb 5",
        ),
    ],
)
def test_gradients_of_two_ranks_are_those_of_twice_the_batch(options, one_step):
    """Each bucket of them is sent once, and each rank logs the loss of its own images. The last
    micro-batch may be shorter.
    """
    _, expected = one_step(*REFERENCE)
    run, found = one_step(2, options)
    assert sorted(found["buckets"]) == list(range(len(found["buckets"])))
    assert (found["cap"] == 5 * 2**20) == ("bucket" in options)
    assert_equal_gradients(found, expected)
    losses = [loss_before(run, rank) for rank in (0, 1)]
    assert losses[0] != losses[1]
    for rank, loss in enumerate(losses):
        assert run.steps(rank) == [(1, 1, pytest.approx(loss, abs=2e-4))]


@pytest.mark.parametrize(
    ("options", "factor"),
    [
        pytest.param("--warmup_steps 2", 1 / 2),
        pytest.param(
            "--accumulate_steps 4 --lr_scaling linear",
            16 / 64,
        ),
    ],
)
def test_learning_rate_warms_up_and_is_scaled(options, factor, one_step):
    """SGD's step is the gradient times the learning rate. It is scaled by the images of a step."""
    _, expected = one_step(*REFERENCE)
    _, found = one_step(1, f"--global_batch_size 16 {options}")
    assert_equal_gradients(found, expected, factor)


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_compressed_gradients_are_rounded_to_two_bytes(one_step, precision):
    """Here of a model with other first weights, by its seed."""
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[precision]
    run, found = one_step(1, f"--batch_size 16 --seed 1 --grad_compression {name}")

    def are_rounded(to: torch.dtype) -> bool:
        pairs = ((values, values.to(to).float()) for values in found["gradients"].values())
        return all(torch.allclose(*pair, rtol=0, atol=2e-7) for pair in pairs)

    assert are_rounded(precision)
    assert are_rounded(torch.bfloat16) == (name == "bf16")
    assert loss_before(run) != loss_before(one_step(*REFERENCE)[0])


# --- On a GPU that is not there ----------------------------------------------------------------


def test_what_ranks_exchange_lies_on_a_gpu_for_nccl_and_on_the_cpu_for_gloo(demo):
    """Neither takes the other's tensors."""
    gpu = torch.device("cuda", 1)
    places = [demo.ProcessInfo(device=gpu, backend=name) for name in ("nccl", "gloo")]
    assert [place.exchange_device for place in places] == [gpu, torch.device("cpu")]


def test_each_process_takes_the_gpu_of_its_local_rank(demo, monkeypatch):
    """One that is shown a single GPU takes that."""
    chosen = []
    monkeypatch.setattr(demo, "choose_backend", lambda *_: "gloo")
    monkeypatch.setattr(demo, "prepare_hardware", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(demo.dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(demo.dist, "all_reduce", lambda *_: None)
    for gpus in (4, 1):
        monkeypatch.setattr(torch.cuda, "device_count", lambda own=gpus: own)
        for local_rank in (0, 1):
            place = {"rank": 4 + local_rank, "world_size": 8, "local_rank": local_rank}
            process = demo.ProcessInfo(**place)
            demo.join_process_group(arguments(demo), process)
            assert process.device == chosen[-1]
    assert [device.index for device in chosen] == [0, 1, 0, 0]


def test_a_log_line_begins_with_the_kind_of_device_and_the_rank(demo):
    """A GPU's has the rank, not its own number."""
    kinds = [torch.device(kind) for kind in ("cuda:0", "cpu", "mps")]
    names = [demo.ProcessInfo(rank=3, device=device).name for device in kinds]
    assert names == ["[GPU 3]", "[CPU 3]", "[MPS 3]"]


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
@pytest.mark.skipif(
    torch.__version__ < "2.11", reason="fake tensors of a GPU need one before 2.11"
)
def test_steps_keep_to_the_gpu_and_wait_for_it_at_log_lines_alone(demo, monkeypatch, name, dtype):
    """In every fifth step, by fake tensors, which have a device and no data: each operation checks
    that all of its tensors are on one device. Backward and DDP need a real one.
    """
    from torch._subclasses import FakeTensorMode
    from torch.overrides import TorchFunctionMode

    class Copies(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            if function is torch.Tensor.to and args[1:] and args[0].device != args[1]:
                copies.append((args[1], kwargs.get("non_blocking")))
            assert function not in (torch.Tensor.cpu, torch.Tensor.tolist, torch.Tensor.item)
            return function(*args, **kwargs)

    def autocast(kind, dtype, enabled):
        precision.append((kind, dtype, enabled))
        return contextlib.nullcontext()

    def scale(loss):
        losses.append(loss)
        return SimpleNamespace(backward=lambda: None)

    def log_due_line(found):
        """A line is written in the step after its own, when the GPU has another to compute."""
        if found.due_line:
            logged.append((found.due_line.step, found.step))
            found.due_line = None

    copies, precision, losses, inputs, logged, waits, used = [], [], [], [], [], [], []
    cuda = torch.device("cuda", 0)
    args = arguments(demo, "--precision", name, "--accumulate_steps", 2, "--batch_size", 4)
    args.lr, args.warmup_steps, rates = 1, 4, []
    nothing = SimpleNamespace(update=lambda: None, zero_grad=lambda: None)
    nothing.param_groups, nothing.scale = [{}], scale
    nothing.step = lambda _: rates.append(nothing.param_groups[0]["lr"])
    timer = SimpleNamespace(start_step=lambda: None, end_step=lambda images: None)
    timer.wait_for_data = timer.data_arrived = timer.gradients_averaged = lambda: None
    timer.now = timer.last_step_seconds = lambda: 1
    monkeypatch.setattr(demo, "stop_together", lambda *_: None)
    monkeypatch.setattr(demo, "log_epoch", lambda *_: None)
    monkeypatch.setattr(demo, "log_due_line", log_due_line)
    stream = SimpleNamespace(wait_stream=lambda other: waits.append(other))
    monkeypatch.setattr(torch.cuda, "Stream", lambda: "copying")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda own, other: used.append(other))
    monkeypatch.setattr(demo.torch, "autocast", autocast)
    with FakeTensorMode(), Copies():
        with cuda:
            model = demo.torchvision.models.resnet18(num_classes=80)
        model.no_sync = contextlib.nullcontext
        model.conv1.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
        batch = torch.zeros(4, 40, 40, 3, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64)
        training = SimpleNamespace(args=args, process=demo.ProcessInfo(device=cuda), step=0)
        training.model = training.ddp = model
        training.timer, training.scaler, training.optimizer = timer, nothing, nothing
        training.agree_at_step, training.profiler, training.due_line = 99, None, None
        args.log_every, args.checkpoint_every = 5, 0
        training.mean, training.std = (torch.ones(3, 1, 1, device=cuda) for _ in range(2))
        args.steps_per_epoch, args.max_steps = 12, 99
        demo.train_one_epoch(training, Batches([batch] * 24), 1)
    assert logged == [(1, 2), (6, 7), (11, 12)]
    assert waits == ["copying"] * 24 and used == [stream] * 2 * 24
    assert len(losses) == len(inputs) == 24
    assert {str(tensor.device) for tensor in [*losses, *inputs, training.loss_sum]} == {"cuda:0"}
    assert all(given.is_contiguous(memory_format=torch.channels_last) for given in inputs)
    to_gpu = [how for where, how in copies if where == cuda]
    assert to_gpu == [True] * 2 * 24  # of images and labels
    assert copies.count(("cpu", True)) == 3  # of losses, for lines
    assert set(precision) == {("cuda", dtype, True)}
    assert rates == [0.25, 0.5, 0.75] + [1] * 9


class Sampler:
    def __len__(self):
        return 24 * 4

    def set_epoch(self, epoch):
        pass


class Batches(list):
    sampler = Sampler()


@pytest.mark.parametrize(("kind", "peak"), [("cuda", 3 * 2**30), ("cpu", None)])
def test_summary_leaves_slow_first_steps_out_and_has_the_peak_of_gpu_memory(
    demo, monkeypatch, kind, peak, capfd
):
    """Of the rank with the most. The other one has 1 GiB, and waits a second longer."""

    def of_two(own):
        other = own | {"peak": own["peak"] and 2**30, "exposed": [2] * len(own["exposed"])}
        return [other, own]

    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: peak)
    monkeypatch.setattr(demo, "all_gather", of_two)
    sends = "--grad_compression", "fp16" if peak else "none"
    args = arguments(demo, *sends)
    training = SimpleNamespace(args=args, model=torch.nn.Linear(1, 1), step=5)
    training.process = demo.ProcessInfo(device=torch.device(kind))
    training.process.world_size = 2
    training.timer = demo.StepTimer(
        demo.ProcessInfo(world_size=2), next(training.model.parameters())
    )
    for seconds, data, exposed in [(99, 9, 9)] * 3 + [(3, 1, 1), (3, 1, 1)]:
        step = demo.Moments(0, cpu=2, waits=[0], arrivals=[data], own_gradients=0)
        step.averaged, step.end = exposed, seconds
        training.timer.unread.append((step, 4))
    demo.log_summary(training)
    record, text = capfd.readouterr().out.splitlines()
    summary = json.loads(record.partition("Summary ")[2])
    assert summary["peak_gpu_bytes"] == peak
    parts = [summary[f"{name}_ms"] for name in ("data", "compute", "exposed", "step")]
    assert parts == [1000, 1000, 1000, 3000] and summary["measured_steps"] == 2
    assert summary["img_per_s"] == pytest.approx(2 * 4 / 3)
    assert summary["median_step_ms"] == summary["slowest_of_100_step_ms"] == 3000
    assert (summary["link_ms"], summary["wait_ms"]) == (1000, 500)
    assert summary["cpu_ms"] == 2000
    assert summary["wire_bytes_per_step"] == 2 * (2 if peak else 4)
    assert ("; at most 3.00 GiB of a GPU's memory; replicas" in text) == (kind == "cuda")
    assert text.endswith("replicas identical: True")


# --- Time --------------------------------------------------------------------------------------


def two_ranks(demo) -> ModuleType:
    return demo.ProcessInfo(world_size=2)


def test_parts_of_a_step_are_told_by_its_moments(demo):
    """Of two micro-batches both wait for data, and the last one's gradients are sent."""
    timer = demo.StepTimer(two_ranks(demo), torch.ones(1, requires_grad=True))
    step = demo.Moments(begin=0, cpu=7, waits=[1, 7], arrivals=[3, 8], own_gradients=11)
    step.averaged, step.end = 15, 20
    timer.unread.append((step, 4))
    timer.read()
    assert [*timer.times] == [demo.StepTime(data=3, exposed=4, whole=20, images=4, cpu=7)]
    assert not timer.unread


def test_own_gradients_are_noted_when_the_first_layers_is_ready(demo):
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    timer = demo.StepTimer(two_ranks(demo), next(model.parameters()))
    model[1](torch.ones(1)).sum().backward()
    assert timer.step.own_gradients is None
    model(torch.ones(1)).sum().backward()
    assert timer.step.own_gradients is not None


def pass_a_step(timer, images: int = 4) -> None:
    timer.wait_for_data()
    timer.data_arrived()
    timer.own_gradients(None)
    timer.gradients_averaged()
    timer.end_step(images)


def test_the_time_of_a_periodic_save_is_in_no_step(demo, monkeypatch):
    """By a made-up clock: a step takes a second, a save a minute."""
    now = [0]
    monkeypatch.setattr(demo, "perf_counter", lambda: now[0])
    timer = demo.StepTimer(two_ranks(demo), torch.ones(1, requires_grad=True))
    for _ in range(4):
        now[0] += 1
        pass_a_step(timer)
        now[0] += 60
        timer.start_step()  # as train_one_epoch does after a save
    timer.read()
    assert [step.whole for step in timer.new] == [1, 1, 1, 1]


def test_times_of_1000_steps_are_kept_and_those_of_the_first_three_are_in_no_average(demo):
    timer = demo.StepTimer(two_ranks(demo), torch.ones(1, requires_grad=True))
    for count, kept in ((3, 3), (1, 1), (1500, 1000)):
        for _ in range(count):
            pass_a_step(timer)
        timer.read()
        assert len(timer.times) == kept
    assert len(timer.new) == 1000 and timer.made == 1504


# --- Between steps -----------------------------------------------------------------------------


def test_ranks_with_quick_steps_agree_every_50_steps(demo, monkeypatch):
    monkeypatch.setattr(demo, "all_reduce_max", lambda *values: values)
    training = SimpleNamespace(process=demo.ProcessInfo(), loss_sum=0.0, step=9, interval=1)
    found = []
    for _ in range(8):
        assert demo.agree(training, 1e-4) == 0
        found.append(training.interval)
        assert training.agree_at_step == 9 + training.interval
    assert found == [2, 4, 8, 16, 32, 50, 50, 50]


def test_ranks_agree_about_once_a_second_in_a_validation_that_becomes_slow(demo, monkeypatch):
    """By a made-up clock: batches of 0.1 s, then of 2 s."""
    now, seconds = [0.0], []
    monkeypatch.setattr(demo, "perf_counter", lambda: now[0])
    monkeypatch.setattr(demo, "stop_together", lambda _, s: seconds.append(round(s, 3)))

    class Loader:
        dataset = range(8)

        def __iter__(self):
            for took in (0.1, 0.1, 2, 2):
                now[0] += took
                yield took

    args, process = arguments(demo, "--batch_size", 2), demo.ProcessInfo()
    training = SimpleNamespace(args=args, process=process, step=7)
    assert len([*demo.batches_until_stop(training, Loader())]) == 4
    assert seconds[:4] == [0.1, 0.1, 2, 2]


def test_weights_that_are_not_finite_are_not_saved(demo, monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "errors_end_all_ranks", contextlib.nullcontext)
    args = arguments(demo, "--checkpoint", tmp_path / "c.pt")
    training = SimpleNamespace(args=args, process=demo.ProcessInfo(), step=5)
    training.model = torch.nn.Linear(1, 1)
    training.model.bias.data[0] = float("inf")
    with pytest.raises(demo.UserError, match="weights not finite after step 5"):
        demo.save_checkpoint(training)


def test_a_checkpoint_is_on_the_disk_before_it_replaces_the_older_one(demo, monkeypatch, tmp_path):
    """So that one of both is whole after a power failure."""
    calls, state = [], SimpleNamespace(state_dict=dict)
    monkeypatch.setattr(demo, "settings_of", lambda _: {})
    monkeypatch.setattr(demo.os, "fsync", lambda _: calls.append("fsync"))
    monkeypatch.setattr(demo.os, "replace", lambda *_: calls.append("replace"))
    training = SimpleNamespace(model=state, optimizer=state, scaler=state, step=5)
    training.train_set = SimpleNamespace(categories={})
    demo.write_checkpoint(training, tmp_path / "c.pt")
    assert calls == ["fsync", "replace"]


def test_nodes_with_other_versions_of_pytorch_are_refused(demo, monkeypatch):
    monkeypatch.setattr(demo, "errors_end_all_ranks", contextlib.nullcontext)
    other = {"PyTorch": "2.6.0"}
    monkeypatch.setattr(demo, "from_rank_0", lambda read: read() | other)
    line = f"PyTorch is {torch.__version__} here, but 2.6.0 on rank 0"
    with pytest.raises(demo.UserError, match=re.escape(line)):
        demo.check_settings(arguments(demo))


# --- Log lines and arguments -------------------------------------------------------------------


def test_a_log_line_is_one_write_of_printable_characters_and_its_failure_ends_nothing(demo):
    """So that the lines of several ranks do not mix. Each write to this socket is a message."""
    reader, writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with reader, writer:
        demo.log(demo.ProcessInfo(rank=3), "Gerät\n\x1b[1m\udcff", to=writer.fileno())
        assert reader.recv(999).decode() == "[CPU 3] Gerät??[1m?\n"
        reader.close()
        demo.log(demo.ProcessInfo(), "nobody reads this", to=writer.fileno())


def test_a_line_of_which_a_pipe_takes_parts_is_whole(demo, monkeypatch, capfd):
    write = os.write
    monkeypatch.setattr(os, "write", lambda to, data: write(to, data[:99]))
    demo.log(demo.ProcessInfo(), "long" * 999)
    assert capfd.readouterr().out == f"[CPU 0] {'long' * 999}\n"


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
def test_full_memory_is_no_fault_of_the_file_that_is_loaded(demo, error):
    with pytest.raises(error), demo.as_user_error("c.pt is not one of this demo"):
        raise error("out of memory")


def test_only_the_download_of_weights_has_a_limit_in_seconds(demo, monkeypatch):
    limits = []
    kind = demo.torchvision.models.ResNet18_Weights.__mro__[1]
    monkeypatch.setattr(
        kind, "get_state_dict", lambda *_, **__: limits.append(socket.getdefaulttimeout())
    )
    demo.download_weights(arguments(demo), demo.ProcessInfo())
    assert limits == [20] and socket.getdefaulttimeout() is None


def test_dummy_takes_no_option_of_images_and_a_loader_does_not_wait_for_ever(demo, capsys):
    for more in (["--workers", "1"], ["--weights", "x.pt"]):
        with pytest.raises(SystemExit):
            demo.parse_arguments(["--dummy", *more])
        assert "--dummy loads no images and no weights" in capsys.readouterr().err
    args = arguments(demo, "--workers", 1, "--timeout", 3)
    assert demo.make_train_loader(args, demo.ProcessInfo(), image_list(demo, 8)).timeout == 3


def test_options_that_are_not_given_have_these_values(demo):
    args = arguments(demo)
    assert (args.image_size, args.batch_size) == (224, 64)
    assert (args.lr, args.seed, args.timeout) == (1e-3, 0, 300)
    args.global_batch_size = 64
    demo.set_steps(args, 640)
    assert (args.num_epochs, args.max_steps) == (2, 20)


@pytest.mark.parametrize(("kind", "steps"), [("cpu", 5), ("cuda", 50)])
def test_log_lines_are_five_steps_apart_on_a_cpu_and_fifty_on_a_gpu(
    demo, monkeypatch, kind, steps
):
    monkeypatch.setattr(demo, "set_threads", lambda _: 1)
    monkeypatch.setattr(demo, "errors_end_all_ranks", contextlib.nullcontext)
    for given, expected in (([], steps), (["--log_every", 3], 3)):
        args = arguments(demo, "--precision", "fp32", *given)
        demo.fill_in_arguments(args, demo.ProcessInfo(device=torch.device(kind)), 10)
        assert args.log_every == expected


def test_dummy_makes_100_steps_unless_steps_or_epochs_are_given(demo):
    for more, steps in (([], 100), (["--max_steps", "7"], 7), (["--num_epochs", "2"], 20)):
        args = demo.parse_arguments(["--dummy", *more])
        args.global_batch_size = 64
        demo.set_steps(args, 640)
        assert args.max_steps == steps


def test_dashes_inside_a_name_are_accepted(demo):
    args = arguments(demo, "--batch-size", 3, "--lr_scaling=linear", "--image-size=50")
    assert (args.batch_size, args.lr_scaling, args.image_size) == (3, "linear", 50)


@pytest.mark.parametrize("name", ["--checkpoint", "--profile"])
def test_an_empty_path_is_refused_in_one_line(demo, capsys, name):
    """As "$FILE" is where nobody has set it: the run would save nothing."""
    with pytest.raises(SystemExit) as end:
        arguments(demo, name, "")
    (line,) = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and f"error: {name} is empty" in line


def test_help_names_no_default_that_says_nothing(demo):
    text = " ".join(demo.make_parser().format_help().split())
    assert "(default: 64)" in text
    assert "(default: None)" not in text and "(default: False)" not in text


def test_help_says_that_the_loss_of_random_images_means_nothing(demo):
    (text,) = (action.help for action in demo.make_parser()._actions if action.dest == "dummy")
    assert "loss" in text


# --- A start that fails: by the texts of the store, and of NCCL ----------------------------------

NCCL = """NCCL error in: /pytorch/torch/csrc/c10d/NCCLUtils.cpp:94, {kind}, NCCL version 2.28.9
ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
Last error:
{words}"""
OF_NCCL = [
    "socketPollConnect: connect to 10.0.0.2<51000> failed: No route to host",
    "Call to ibv_reg_mr failed with error Cannot allocate memory",
    "Failed to initialize any NET plugin",
    "Bootstrap : no socket interface found",
    "NET/Plugin: Could not find: librccl-net.so",
]
OF_ONE_GPU = [
    "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 60",
    "Multiple Ranks are using the same GPU: rank 1 and rank 0 both on CUDA device 60",
]
OF_THE_STORE = [
    "Timed out after 21 seconds waiting for clients. 1/2 clients joined.",
    "wait timeout after 5000ms, keys: /default_pg/0//cpu//0/1",
]


class Now:
    """A timer that is over when it starts."""

    def __init__(self, end, words):
        self.start, self.cancel = lambda: end(*words), lambda: None


def failed_start(demo, error, backend="nccl"):
    """The line for an error of init_process_group."""
    place = {"world_size": 2, "local_world_size": 1, "backend": backend}
    with (
        pytest.raises((demo.NotConnected, demo.LoneUserError)) as found,
        demo.connecting_ranks(arguments(demo), demo.ProcessInfo(**place)),
    ):
        raise error
    (line,) = str(found.value).splitlines()
    return line


@pytest.mark.parametrize("words", OF_NCCL)
def test_what_nccl_says_at_the_start_is_shown_and_is_no_rendezvous(demo, words):
    text = NCCL.format(kind="unhandled system error", words=words)
    line = failed_start(demo, demo.dist.DistBackendError(text))
    assert line.startswith(words) and "NCCL_SOCKET_IFNAME" in line


@pytest.mark.parametrize("words", OF_ONE_GPU)
def test_two_ranks_on_one_gpu_are_told_so_and_not_started_again(demo, words):
    """By NCCL's words until version 2.29, and since."""
    text = NCCL.format(kind="invalid usage (run with NCCL_DEBUG=WARN)", words=words)
    place = demo.ProcessInfo(backend="nccl")
    with pytest.raises(demo.LoneUserError), demo.connecting_ranks(arguments(demo), place):
        raise demo.dist.DistBackendError(text)
    line = failed_start(demo, demo.dist.DistBackendError(text))
    assert line == f"{words}: two ranks have the same GPU: start one process for each GPU"


def test_ranks_that_do_not_connect_end_after_the_timeout_with_where_they_tried(demo, monkeypatch):
    said = []
    monkeypatch.setattr(demo, "end_process", lambda *words: said.append(words))
    monkeypatch.setattr(demo.threading, "Timer", lambda seconds, end, words: Now(end, words))
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "4711")
    place = demo.ProcessInfo(world_size=2, backend="gloo")
    with demo.connecting_ranks(arguments(demo), place):
        pass
    ((code, _, error),) = said
    assert code == demo.EXIT_FAILED and isinstance(error, demo.NotConnected)
    assert "10.0.0.1:4711" in str(error) and "GLOO_SOCKET_IFNAME" in str(error)


@pytest.mark.parametrize("text", OF_THE_STORE)
def test_what_the_store_says_stands_before_what_to_look_at(demo, text):
    line = failed_start(demo, demo.dist.DistStoreError(text), "gloo")
    assert line.startswith(text.rstrip(".")) and "gloo on its cpu" in line


# --- The file ----------------------------------------------------------------------------------


def test_six_steps_stand_once_and_in_order():
    assert re.findall(r"# DDP (\d)/6", SCRIPT.read_text()) == list("123456")


def test_script_keeps_to_what_is_public():
    found = re.findall(r".*(?:\._[a-z]|ctypes|DEMO\w|/proc/|/sys/).*", SCRIPT.read_text())
    quota = 'text += Path("/sys/fs/cgroup", name).read_text()'
    assert {line.strip() for line in found} == {"os._exit(code)", quota}
