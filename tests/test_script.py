"""The script's parts: shares of the images, pixels, gradients, errors and exit codes."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import sys
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torchvision
from PIL import Image

from support.datasets import COCO_IDS, instances, make_set, numbered, truncate, write_images
from support.forks import ForkedRun, load, run_forked
from support.launchers import FAST
from support.nodes import small_disk
from support.processes import LONG, SCRIPT, WITH_LONG, Run, run_demo, start

OPTIONS = ["--coco_image_path", "any", "--annotation_path", "any", "--workers", "0"]


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    """The script as a module."""
    return load(str(SCRIPT))


def arguments(demo, *more):
    return demo.parse_arguments([*OPTIONS, *map(str, more)])


def image_list(demo, count):
    labels = [n % 80 for n in range(count)]
    return demo.ImageList(numbered(count), labels, dict(enumerate(map(str, range(80)))), 0)


def keys(demo, rank, epoch=1, start=0, count=10, ranks=4):
    """What a rank's sampler gives of so many training images."""
    process = demo.ProcessInfo(rank=rank, world_size=ranks)
    loader = demo.make_train_loader(arguments(demo), process, image_list(demo, count))
    loader.sampler.set_epoch(epoch)
    loader.sampler.start = start
    return list(loader.sampler)


@pytest.fixture(scope="module")
def forked(tmp_path_factory) -> dict[str, Run]:
    """Runs of changed programs, by name. All share one start of Python."""
    folder = tmp_path_factory.mktemp("forked")

    def program(code: str) -> Path:
        path = folder / f"{len([*folder.glob('*.py')])}.py"
        path.write_text(code)
        return path

    runs: dict[str, ForkedRun] = {}
    step = program(ONE_STEP)
    for ranks, cases in ((1, ONE_PROCESS), (2, TWO_RANKS)):
        for number, options in enumerate(cases):
            words = [*OPTIONS, *FAST, "--num_epochs", 1, "--lr", 1, *options.split()]
            runs[options] = ranks, [folder / f"{ranks}-{number}.pt", *words], {}, step
    words = [*make_set(folder / "22", 22), *FAST, "--num_epochs", 2, "--log_every", 3]
    runs["two epochs"] = 0, words, {}, program(WITH_KEYS)
    for part in range(200):
        listed = folder / f"listed/{part // 20}/{part % 20}"
        listed.mkdir(parents=True)
        for number in range(100):
            (listed / f"{number}.jpg").touch()
    runs["look up"] = 0, [folder / "listed"], {}, program(LOOK_UP)
    if WITH_LONG:
        words = [*make_set(folder / "80", 8), *FAST, "--max_steps", 1]
        runs["80 classes"] = 0, [*words, "--checkpoint", folder / "80.pt"]
        words = [*make_set(folder / "3", 9), *FAST, "--max_steps", 1]
        content = instances(numbered(9), ids=[7, 5, 9])
        (folder / "3/instances.json").write_text(json.dumps(content))
        runs["other classes"] = 0, [*words, "--weights", folder / "80.pt"]
        words = [*make_set(folder / "16", 16), *FAST, "--max_steps", 1]
        runs["drift"] = 2, words, {}, program(DRIFT)
        failing = program(FAILING)
        runs |= {error: (0, [error], {}, failing) for error in LINES}
    codes = [int(name in LINES) for name in runs]
    return dict(zip(runs, run_forked([*runs.values()], expect=codes), strict=True))


# --- Shares of the images ----------------------------------------------------------------------


def test_shares_are_equally_long_and_complete_and_repeat_only_what_pads(demo):
    shares = [keys(demo, rank) for rank in range(4)]
    assert [len(share) for share in shares] == [3, 3, 3, 3]
    indices = sorted(index for share in shares for _, index in share)
    assert set(indices) == set(range(10))
    assert {epoch for share in shares for epoch, _ in share} == {1}


def test_shares_change_with_the_epoch(demo):
    first, second = ([index for _, index in keys(demo, 0, epoch)] for epoch in (1, 2))
    assert first != second


def test_share_can_begin_in_mid_epoch(demo):
    assert keys(demo, 1, start=2, count=40) == keys(demo, 1, count=40)[2:]


@pytest.mark.guards("validation-shares")
@pytest.mark.parametrize("count", [1, 10, 13])
def test_validation_gives_each_image_once(demo, count):
    found = []
    for rank in range(4):
        process = demo.ProcessInfo(rank=rank, world_size=4)
        loader = demo.make_val_loader(arguments(demo), process, image_list(demo, count))
        found += [index for _, index in loader.sampler]
    assert sorted(found) == list(range(count))


def test_workers_start_with_nothing_to_do(demo):
    """Otherwise they would decode images that nobody uses."""

    class Loader:
        def __iter__(self):
            given.append(list(self.sampler))
            return iter(())

    given, loader, process = [], Loader(), demo.ProcessInfo()
    plain = demo.make_train_loader(arguments(demo), process, image_list(demo, 10))
    loader.sampler = plain.sampler
    demo.start_workers(loader, None)
    assert given == [[]]
    assert len(list(loader.sampler)) == 10


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
    found = demo.read_image_list(folder.parent / "file.json", folder).names
    demo.check_images(folder, found)
    return found


def test_names_of_windows_are_read_with_slashes_unless_they_are_there_as_written(demo, tmp_path):
    folder = tmp_path / "images"
    write_images(folder / "part", ["1.jpg"])
    write_images(folder, ["odd\\2.jpg"])
    assert look_up(demo, folder, "part\\1.jpg", "odd\\2.jpg") == ["part/1.jpg", "odd\\2.jpg"]
    with pytest.raises(demo.UserError, match="leaves the image folder"):
        look_up(demo, folder, "part\\..\\..\\1.jpg")


def test_images_in_linked_folders_are_found_and_a_loop_of_links_ends(demo, tmp_path):
    write_images(tmp_path / "elsewhere", ["1.jpg"])
    (tmp_path / "images").mkdir()
    (tmp_path / "images/link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/loop").symlink_to(tmp_path / "images")
    names = ["link/1.jpg", "link/loop/link/1.jpg"]
    assert look_up(demo, tmp_path / "images", *names) == names


LOOK_UP = f"""
import sys
sys.path.insert(0, {str(SCRIPT.parent)!r})
import demo_coco_resnet18 as demo

run_and_exit = demo.run_and_exit

def main(process):
    opened = []
    calls = "os.listdir", "os.scandir", "open"
    sys.addaudithook(lambda event, found: opened.append(found[0]) if event in calls else None)
    names = [f"{{a}}/{{b}}/{{c}}.jpg" for a in range(10) for b in range(20) for c in range(100)]
    missing = demo.missing_images(sys.argv[1], [*names, "0/0/gone.jpg", "gone/1.jpg"])
    print(len(opened), len(set(opened)), missing)
"""


def test_each_folder_is_listed_once(forked):
    """Of 200 folders, and of one that is not there; of 20,000 images none is opened."""
    found = forked["look up"].lines()[0]
    assert found == "201 201 ['0/0/gone.jpg', 'gone/1.jpg']"


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


@pytest.mark.guards("crop-seed")
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


def picture() -> Image.Image:
    """A smooth one, in colour."""
    coarse = Image.frombytes("RGB", (3, 2), bytes(range(0, 252, 14)))
    return coarse.resize((60, 40), Image.Resampling.BILINEAR)


def grey(mode: str) -> Image.Image:
    """The picture in grey, in a mode of 16 or 32 bits."""
    values = picture().convert("L").convert("F").point(lambda value: value * 257 + 0)
    return values.convert("I").convert(mode) if mode.startswith("I") else values


def decoded(demo, path, capfd) -> torch.Tensor:
    found = dataset(demo, path.parent).load_image(path)
    assert not capfd.readouterr().out  # nothing is called damaged
    assert found.dtype == torch.uint8 and found.shape[0] == 3
    return found


def difference(found: torch.Tensor, image: Image.Image) -> float:
    """The mean over all pixels, of a value of 0 to 255."""
    expected = torchvision.transforms.functional.pil_to_tensor(image.convert("RGB"))
    return (found.float() - expected.float()).abs().mean().item()


KINDS = {"grey.jpg": "L", "cmyk.jpg": "CMYK", "palette.png": "P", "bit.png": "1"}
KINDS |= {"alpha.png": "RGBA", "grey_alpha.png": "LA", "bitmap.bmp": "RGB", "old.tiff": "L"}
KINDS |= {"colour.tiff": "RGB", "new.webp": "RGB", "ycc.jpg": "YCbCr", "bit.tiff": "1"}
KINDS |= {"cmyk.tiff": "CMYK", "new.avif": "RGB"}


@pytest.mark.guards("image-modes")
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_image_looks_as_pillow_shows_it(demo, tmp_path, name, capfd):
    path = tmp_path / name
    try:
        picture().convert(KINDS[name]).save(path)
    except (KeyError, OSError, ValueError) as error:
        pytest.skip(f"this Pillow cannot write it: {error}")
    assert difference(decoded(demo, path, capfd), Image.open(path)) == 0


@pytest.mark.guards("sixteen-bits")
@pytest.mark.parametrize("name", ["deep.png", "deep.tiff", "deep.pgm"])
def test_an_image_of_16_bits_looks_as_its_original_of_8(demo, tmp_path, name, capfd):
    grey("I;16" if name != "deep.pgm" else "I").save(tmp_path / name)
    assert difference(decoded(demo, tmp_path / name, capfd), picture().convert("L")) < 1


@pytest.mark.guards("deep-range")
@pytest.mark.parametrize(("mode", "name"), [("I", "a.tiff"), ("F", "a.tiff"), ("F", "a.pfm")])
def test_an_image_of_32_bits_is_scaled(demo, tmp_path, mode, name, capfd):
    grey(mode).save(tmp_path / name)
    found = decoded(demo, tmp_path / name, capfd)
    (low, high), original = picture().convert("L").getextrema(), picture().convert("L")
    assert (found.min(), found.max()) == (0, 255)
    stretched = original.point(lambda value: round(255 * (value - low) / (high - low)))
    assert difference(found, stretched) < 1


def test_an_image_of_32_bits_without_a_range_is_called_damaged(demo, tmp_path, capfd):
    Image.new("F", (20, 30), 7.5).save(tmp_path / "flat.tiff")
    assert not dataset(demo, tmp_path).load_image(tmp_path / "flat.tiff").any()
    assert "flat.tiff is damaged" in capfd.readouterr().out


def test_an_animated_gif_is_its_first_frame(demo, tmp_path, capfd):
    second = picture().transpose(Image.Transpose.ROTATE_180)
    picture().save(tmp_path / "two.gif", save_all=True, append_images=[second])
    assert difference(decoded(demo, tmp_path / "two.gif", capfd), picture()) < 10


def test_an_image_that_pillow_warns_of_is_not_damaged(demo, tmp_path, capfd):
    """Neither of a palette with transparent colours nor of more pixels than it allows."""
    clear = picture().convert("P")
    clear.info["transparency"] = bytes(range(250))
    clear.save(tmp_path / "clear.png")
    Image.new("1", (16_000, 12_000)).save(tmp_path / "huge.png")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = decoded(demo, tmp_path / "clear.png", capfd)
        assert demo.check_images(tmp_path, ["huge.png"]) == [(16_000, 12_000)]
    assert difference(found, clear.convert("RGBA")) == 0


@pytest.mark.guards("damaged-image")
def test_damaged_image_is_black_and_named_once(demo, tmp_path, capfd):
    make_set(tmp_path, 8)
    truncate(tmp_path / "images/0003.jpg")
    image, label = dataset(demo, tmp_path / "images")[1, 3]
    assert label == 3 and not image.any() and image.shape == (3, 40, 40)
    (line,) = capfd.readouterr().out.splitlines()
    assert line.startswith("[CPU 0] WARNING: ") and str(tmp_path / "images/0003.jpg") in line


def test_file_that_cannot_be_read_is_no_black_image(demo, images):
    with pytest.raises(OSError):
        dataset(demo, images / "gone")[1, 0]


# --- The machine ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "cores", "given", "expected"),
    [("cpu", 8, [], (1, 1)), ("cuda", 3, [], (2, 2)), ("cuda", 64, [], (16, 4))]
    + [("cuda", 1, [], (1, 1)), ("cuda", 64, ["--workers", 9], (9, 9))],
)
def test_default_number_of_loader_workers(demo, monkeypatch, kind, cores, given, expected):
    process = demo.ProcessInfo(device=torch.device(kind))
    monkeypatch.setattr(demo, "own_cores", lambda _: cores)
    monkeypatch.setattr(demo, "all_gather", lambda value: [value])  # alone in its group
    args = arguments(demo, "--precision", "fp32", *given)
    args.workers = args.val_workers = given[1] if given else None
    demo.fill_in_arguments(args, process, 10)
    assert (args.workers, args.val_workers) == expected


def test_windows_is_refused_in_one_line():
    code = "import multiprocessing, runpy, socket, sys, tempfile; sys.platform = 'win32'; "
    code += f"runpy.run_path({str(SCRIPT)!r})"
    with start([sys.executable, "-c", code]) as started:
        (line,) = started.finish(expect=1).lines()
    assert "WSL2" in line


@pytest.mark.parametrize(("node", "expected"), [*enumerate("2213")])
def test_tasks_of_a_node_in_slurms_list(demo, node, expected):
    env = {"SLURM_STEP_TASKS_PER_NODE": "2(x2),1,3", "SLURM_NODEID": str(node)}
    assert demo.tasks_of_this_node(env) == expected


# --- A run of one process ----------------------------------------------------------------------

# The script, which also prints the key of each image that it reads.
WITH_KEYS = f"""
import sys
sys.path.insert(0, {str(SCRIPT.parent)!r})
import demo_coco_resnet18 as demo

def read(dataset, key):
    print("KEY", *key, flush=True)
    return plain(dataset, key)

plain, demo.CocoFirstCategory.__getitem__ = demo.CocoFirstCategory.__getitem__, read
main, run_and_exit = demo.main, demo.run_and_exit
"""
# One rank changes a weight of its own.
DRIFT = (
    WITH_KEYS.partition("def read")[0]
    + """
def drifted(model):
    next(model.parameters()).data += demo.dist.get_rank()
    return plain(model)

plain, demo.digests_of_replicas = demo.digests_of_replicas, drifted
main, run_and_exit = demo.main, demo.run_and_exit
"""
)


@pytest.fixture(scope="module")
def two_epochs(forked) -> Run:
    return forked["two epochs"]


@pytest.mark.guards("set-epoch")
def test_each_epoch_has_each_image_once_in_another_order(two_epochs):
    keys = [tuple(map(int, found)) for found in re.findall(r"KEY (\d+) (\d+)", two_epochs.out)]
    first, second = ([index for epoch, index in keys if epoch == number] for number in (1, 2))
    assert sorted(first) == sorted(second) == list(range(22))
    assert first != second


def test_figures_of_a_run_agree(two_epochs):
    """22 images in batches of 4 are 6 steps an epoch."""
    summary = two_epochs.json_line("Summary")
    assert (summary["epochs"], summary["steps"]) == (2, 12)
    assert summary["img_per_s"] == pytest.approx(44 / summary["train_s"])
    (times,) = summary["ranks"]
    parts = times["data_ms"] + times["compute_ms"] + times["exposed_ms"]
    assert parts == pytest.approx(times["step_ms"])
    assert 0.1 < summary["step_ms"] / (1e3 * summary["train_s"] / 12) < 2  # the first one is slow
    assert [step for _, step, _ in two_epochs.steps()] == [1, 4, 7, 10, 12]
    for line in two_epochs.lines(0):
        if found := re.search(r"\| ([\d.]+) img/s \| data ([\d.]+) ms \| step ([\d.]+) ms", line):
            rate, data, step = map(float, found.groups())
            assert 0 < data < step
            assert 1 < rate * step / 1e3 < 4.1  # images in a step


@LONG
def test_a_stop_signal_saves_and_ends_with_75(tmp_path):
    words = [*make_set(tmp_path, 22), *FAST, "--num_epochs", 99, "--checkpoint", tmp_path / "c.pt"]
    with start([sys.executable, SCRIPT, *words]) as started:
        started.wait_for(r"\| Step 3 ")
        started.signal(signal.SIGUSR1)
        run = started.finish(expect=75)
    step = int(
        re.fullmatch(r"Stopped on SIGUSR1 \| step (\d+) \| exit code 75", run.lines(0)[-1])[1]
    )
    assert torch.load(tmp_path / "c.pt", weights_only=True)["step"] == step >= 3


@LONG
def test_a_full_disk_ends_the_run_and_leaves_the_older_checkpoint(tmp_path):
    """There is room for one checkpoint of 135 MB, but not for two."""
    words = [*make_set(tmp_path, 22), *FAST, "--checkpoint_every", 1]
    with small_disk(tmp_path / "disk", "200m") as disk:
        command = [sys.executable, SCRIPT, *words, "--checkpoint", disk / "c.pt"]
        with start(command) as started:
            run = started.finish(expect=2)
        assert torch.load(disk / "c.pt", weights_only=True)["step"] == 1
    assert re.match(rf"ERROR: .*{disk}/c\.pt not saved at step 2", run.lines(0)[-1])


@LONG
def test_classes_are_those_of_the_annotation_file_and_a_layer_of_others_is_left_out(forked):
    run = forked["other classes"]
    assert run.json_line("Run")["classes"] == 3
    assert re.search(r"the last layer, of 80 other classes, is left out: 3 classes here", run.out)


@LONG
def test_ranks_that_end_with_different_weights_are_reported(forked):
    run = forked["drift"]
    assert run.json_line("Summary")["replicas_identical"] is False
    assert "replicas identical: False" in run.out


@LONG
def test_a_cpu_without_bf16_instructions_trains_in_fp32(tmp_path):
    """Here they are hidden from PyTorch's libraries."""
    env = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    words = [*make_set(tmp_path, 8), *FAST, "--max_steps", 1, "--precision", "auto"]
    run = run_demo(words, launcher="python", env=env)
    assert run.json_line("Run")["precision"] == "fp32"


# --- Gradients ---------------------------------------------------------------------------------

# One optimizer step over fixed images. Batch norm is in eval mode: in training it would see the
# images of each rank alone.
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
    ddp, _ = demo.wrap_model(args, process, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    training = demo.Training(args, process, None, "", model, ddp, optimizer, None)
    model.eval()
    noise = torch.Generator().manual_seed(0)
    images = torch.randint(256, (16, 3, 40, 40), dtype=torch.uint8, generator=noise)
    labels = torch.randint(80, (16,), generator=noise)
    own = slice(process.rank, None, process.world_size)
    batches = zip(images[own].split(args.batch_size), labels[own].split(args.batch_size))
    sent = []
    if process.world_size > 1:
        ddp.register_comm_hook(sent, note)
    before = {{name: values.detach().clone() for name, values in model.named_parameters()}}
    demo.train_one_epoch(training, Loader(batches), 1)
    after = dict(model.named_parameters())
    if process.rank == 0:
        found = {{name: before[name] - after[name].detach() for name in before}}
        torch.save({{"gradients": found, "buckets": sent}}, sys.argv[1])

def note(sent, bucket):
    sent.append(bucket.index())
    return demo.default_hooks.allreduce_hook(None, bucket)

class Loader(list):
    sampler = SimpleNamespace(set_epoch=lambda epoch: None)
"""


ONE_PROCESS = ["--batch_size 16", "--batch_size 16 --warmup_steps 2"]
ONE_PROCESS += ["--batch_size 16 --lr_scaling linear"]
TWO_RANKS = ["--batch_size 8", "--batch_size 4 --accumulate_steps 2"]


@pytest.fixture(scope="module")
def one_step(forked) -> dict[str, dict]:
    """By options: what a step of SGD with a learning rate of 1 takes from the weights, and which
    of DDP's buckets were sent.
    """
    return {options: torch.load(forked[options].command[1]) for options in ONE_PROCESS + TWO_RANKS}


@pytest.mark.parametrize("options", TWO_RANKS)
def test_gradients_of_two_ranks_are_those_of_twice_the_batch(options, one_step):
    """And each bucket of them is sent once in a step."""
    found = one_step[options]
    assert sorted(found["buckets"]) == list(range(len(found["buckets"])))
    for name, expected in one_step[ONE_PROCESS[0]]["gradients"].items():
        difference = (found["gradients"][name] - expected).abs().max()
        assert difference <= 1e-3 * expected.abs().max(), name


@pytest.mark.parametrize(
    ("options", "factor"), [(ONE_PROCESS[1], 1 / 2), (ONE_PROCESS[2], 16 / 64)]
)
def test_learning_rate_warms_up_and_is_scaled(options, factor, one_step):
    """SGD's step is the gradient times the learning rate."""
    for name, expected in one_step[ONE_PROCESS[0]]["gradients"].items():
        found = one_step[options]["gradients"][name]
        assert torch.allclose(found, factor * expected, rtol=1e-4, atol=1e-6), name


# --- A stop during validation ------------------------------------------------------------------


@LONG
def test_a_stop_during_validation_ends_with_the_epoch_saved_and_is_validated_after(tmp_path):
    words = [*make_set(tmp_path, 8, val=200), *FAST, "--num_epochs", 1]
    words += ["--batch_size", 1, "--checkpoint", tmp_path / "c.pt", "--resume"]
    with start([sys.executable, SCRIPT, *words]) as started:
        started.wait_for(r"Epoch 1 complete")
        started.signal(signal.SIGTERM)
        run = started.finish(expect=75)
    assert run.lines(0)[-1] == "Stopped on SIGTERM | step 8 | exit code 75"
    assert not re.search(r" validation \| ", run.out)
    resumed = run_demo(words, launcher="python")
    assert re.search(r"Epoch 1 validation \| .* \| 200 images", resumed.out)
    assert not resumed.steps(0)


# --- On a GPU that is not there ----------------------------------------------------------------


@pytest.mark.skipif(
    torch.__version__ < "2.11", reason="fake tensors of a GPU need one before 2.11"
)
def test_steps_keep_to_the_gpu_and_wait_for_it_at_log_lines_alone(demo, monkeypatch):
    """In every fifth step, by fake tensors, which have a device and no data: each operation checks
    that all of its tensors are on one device. Backward and DDP need a real one.
    """
    from torch._subclasses import FakeTensorMode
    from torch.overrides import TorchFunctionMode

    class Copies(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            if function is torch.Tensor.to and args[0].device.type == "cpu":
                copies.append(kwargs.get("non_blocking"))
            assert function not in (torch.Tensor.cpu, torch.Tensor.tolist)
            if function is torch.Tensor.item:
                waits.append(training.step)
                return 1.0
            return function(*args, **kwargs)

    def autocast(kind, dtype, enabled):
        precision.append((kind, dtype, enabled))
        return contextlib.nullcontext()

    def scale(loss):
        losses.append(loss)
        return SimpleNamespace(backward=lambda: None)

    copies, precision, losses, inputs, waits, logged = [], [], [], [], [], []
    cuda = torch.device("cuda", 0)
    args = arguments(demo, "--precision", "bf16", "--accumulate_steps", 2)
    nothing = SimpleNamespace(step=lambda *_: None, update=lambda: None, zero_grad=lambda: None)
    nothing.param_groups, nothing.scale = [{}], scale
    timer = SimpleNamespace(mark=str, start_step=lambda: None, end_step=lambda images: None)
    timer.last_step_seconds = lambda: 1
    monkeypatch.setattr(demo, "agree_to_continue", lambda *_: 99)
    monkeypatch.setattr(demo, "log_epoch", lambda *_: None)
    monkeypatch.setattr(demo, "log_step", lambda found, *_: logged.append(found.step))
    monkeypatch.setattr(demo.torch, "autocast", autocast)
    with FakeTensorMode(), Copies():
        with cuda:
            model = demo.torchvision.models.resnet18(num_classes=80)
        model.no_sync = contextlib.nullcontext
        model.conv1.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
        batch = torch.zeros(4, 3, 40, 40, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64)
        training = SimpleNamespace(args=args, process=demo.ProcessInfo(device=cuda), step=0)
        training.model = training.ddp = model
        training.timer, training.scaler, training.optimizer = timer, nothing, nothing
        training.agree_at_step, training.profiler = 99, None
        training.mean, training.std = (torch.ones(3, 1, 1, device=cuda) for _ in range(2))
        args.steps_per_epoch, args.max_steps = 12, 99
        demo.train_one_epoch(training, Batches([batch] * 24), 1)
    assert logged == waits == [1, 6, 11]
    assert len(losses) == len(inputs) == 24
    assert {str(tensor.device) for tensor in [*losses, *inputs, training.loss_sum]} == {"cuda:0"}
    assert all(given.is_contiguous(memory_format=torch.channels_last) for given in inputs)
    assert copies == [True] * 2 * 24  # of images and labels
    assert set(precision) == {("cuda", torch.bfloat16, True)}


class Batches(list):
    sampler = SimpleNamespace(set_epoch=lambda epoch: None)


@pytest.mark.parametrize(("kind", "peak"), [("cuda", 3 * 2**30), ("cpu", None)])
def test_summary_has_the_peak_of_gpu_memory_where_there_is_a_gpu(
    demo, monkeypatch, kind, peak, capfd
):
    """Of the rank with the most. The other one has 1 GiB."""
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: peak)
    monkeypatch.setattr(
        demo, "all_gather", lambda own: [2**30, own] if peak and own == peak else [own]
    )
    training = SimpleNamespace(args=arguments(demo), model=torch.nn.Linear(1, 1), step=1)
    training.process = demo.ProcessInfo(device=torch.device(kind))
    training.timer = SimpleNamespace(step_times=[demo.StepTime(1, 1, 3, 4)])
    training.args.steps_per_epoch, training.powersgd = 1, None
    demo.log_summary(training, ["0f"])
    record, text = capfd.readouterr().out.splitlines()
    assert json.loads(record.partition("Summary ")[2])["peak_gpu_bytes"] == peak
    assert ("; at most 3.00 GiB of a GPU's memory; replicas" in text) == (kind == "cuda")
    assert text.endswith("replicas identical: True")


# --- Time --------------------------------------------------------------------------------------


def test_parts_of_a_step_are_told_by_its_moments(demo):
    timer = demo.StepTimer(torch.device("cpu"), torch.nn.Linear(1, 1))
    moments = {"begin": 0, "waiting for data": 1, "data arrived": 3}
    moments |= {"own gradients": 6, "gradients averaged": 10, "end": 15}
    timer.unread.append((moments, 4))
    timer.read()
    assert timer.step_times == [demo.StepTime(data=2, exposed=4, whole=15, images=4)]
    assert not timer.unread


def test_own_gradients_are_noted_when_the_first_layers_is_ready(demo):
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    timer = demo.StepTimer(torch.device("cpu"), model)
    model[1](torch.ones(1)).sum().backward()
    assert "own gradients" not in timer.moments
    model(torch.ones(1)).sum().backward()
    assert "own gradients" in timer.moments


# --- Errors ------------------------------------------------------------------------------------

LINES = {  # what one rank raises: words of its line, and whether that is called a bug
    "OSError(5, 'Input/output error', 'a.jpg')": (r"a\.jpg", False),
    "RuntimeError('CUDA out of memory. Tried to allocate 2 GiB')": ("--batch_size", False),
    "RuntimeError('CUDA error: no kernel image is available')": ("no code for this GPU", False),
    "RuntimeError('[/a/gloo/pair.cc:1] Connection closed by peer')": ("another rank", False),
    "EOFError()": ("EOFError", False),
    "TypeError('a slip')": ("TypeError: a slip", True),
    "RuntimeError('shapes cannot be multiplied')": ("shapes cannot be multiplied", True),
}
# Rank 7 raises what the argument says.
FAILING = (
    WITH_KEYS.partition("def read")[0]
    + """
run_and_exit = demo.run_and_exit

def main(process):
    process.rank = 7
    raise eval(sys.argv[1])
"""
)


@LONG
def test_error_of_one_rank_is_one_line_that_says_what_to_do(forked):
    """Its exit code is 1. Of a bug there is a traceback as well, with the rank in each line."""
    for error, (words, bug) in LINES.items():
        lines = forked[error].lines(7)
        assert len(lines) == len(forked[error].lines())
        assert re.fullmatch(rf"ERROR: .*{words}.*", lines[-1])
        assert (lines[0].startswith("Traceback")) == bug == (len(lines) > 1)


@LONG
def test_a_run_whose_output_nobody_reads_goes_on(tmp_path):
    words = [*make_set(tmp_path, 64), *FAST, "--max_steps", 20, "--checkpoint", tmp_path / "c.pt"]
    pipe = ["bash", "-c", '"$@" 2>&1 | head -n 1; exit "${PIPESTATUS[0]}"', "bash"]
    with start([*pipe, sys.executable, SCRIPT, *words]) as started:
        started.finish(60)
    assert torch.load(tmp_path / "c.pt", weights_only=True)["step"] == 20


def test_dashes_inside_a_name_are_accepted(demo):
    args = arguments(demo, "--batch-size", 3, "--lr_scaling=linear", "--image-size=50")
    assert (args.batch_size, args.lr_scaling, args.image_size) == (3, "linear", 50)


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
    "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 41000",
]
OF_THE_STORE = {
    "Timed out after 21 seconds waiting for clients. 1/2 clients joined.": "did all nodes start",
    "wait timeout after 5000ms, keys: /default_pg/0//cpu//0/1": "another rank does not connect",
}


def failed_start(demo, error, backend="nccl"):
    """The line for an error of init_process_group."""
    place = {"world_size": 2, "local_world_size": 1, "backend": backend}
    with (
        pytest.raises(demo.StartError) as found,
        demo.connecting_ranks(arguments(demo), demo.ProcessInfo(**place)),
    ):
        raise error
    (line,) = str(found.value).splitlines()
    return line


@pytest.mark.parametrize("words", OF_NCCL)
def test_what_nccl_says_at_the_start_is_shown_and_is_no_rendezvous(demo, words):
    text = NCCL.format(kind="unhandled system error", words=words)
    line = failed_start(demo, demo.dist.DistBackendError(text))
    assert words in line and "NCCL_SOCKET_IFNAME" in line and "rendezvous" not in line


@pytest.mark.parametrize("text", OF_THE_STORE)
def test_what_the_store_says_tells_a_rank_that_is_absent_from_one_that_differs(demo, text):
    line = failed_start(demo, demo.dist.DistStoreError(text), "gloo")
    assert OF_THE_STORE[text] in line and text in line
    assert ("rendezvous" in line) == ("clients joined" in text)
    if "keys" in text:
        assert "gloo on the cpu" in line


# --- The file ----------------------------------------------------------------------------------


def test_six_steps_stand_once_and_in_order():
    assert re.findall(r"# DDP (\d)/6", SCRIPT.read_text()) == list("123456")


def test_script_keeps_to_what_is_public():
    found = re.findall(r".*(?:\._[a-z]|ctypes|DEMO\w|/proc/|/sys/).*", SCRIPT.read_text())
    assert {line.strip() for line in found} == {"os._exit(code)"}
