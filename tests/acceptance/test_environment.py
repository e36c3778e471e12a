"""tools/environment.sh takes the active Python, or makes .venv once, or says what is wrong.

venv, pip and uv are the real ones; the packages are as small as packages can be, and lie in an
index of this machine. A GPU is a device file in a mount namespace.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from support.nodes import with_device
from support.pages import PAGES
from support.processes import ROOT, Run, Started, free_port, require, start, wait_until

ENVIRONMENT = "tools/environment.sh"
MODULES = {"torch": "torch", "torchvision": "torchvision", "pycocotools": "pycocotools"}
MODULES |= {"pillow": "PIL", "matplotlib": "matplotlib", "numpy": "numpy"}
NEEDED = [name for name in MODULES if name not in ("matplotlib", "numpy")]
WHEEL = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
BASE = f"{sys.base_prefix}/bin/python3"
# What the machine has set for pip, uv or an environment must not disturb a test.
FOREIGN = re.compile(r"(PIP|UV|CONDA|PYTHON)\w*|VIRTUAL_ENV")
NO_NETWORK = {"HTTPS_PROXY": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9"}
NO_NETWORK |= {"NO_PROXY": "127.0.0.1"}


def package(name: str, version: str) -> dict[str, str]:
    """The files of a package that has nothing but its version."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{MODULES[name]}/__init__.py": f"__version__ = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": WHEEL,
    }
    if name == "torch":
        files["torch/distributed/run.py"] = ""
    return files | {f"{info}/RECORD": "".join(f"{x},,\n" for x in [*files, f"{info}/RECORD"])}


@pytest.fixture(scope="session")
def machine(tmp_path_factory) -> Path:
    """The programs of a machine without Python in `bin`, and an empty environment in `venv`."""
    folder = tmp_path_factory.mktemp("machine")
    (folder / "bin").mkdir()
    for program in Path("/usr/bin").iterdir():
        if not program.name.startswith(("python", "pip", "uv")):
            (folder / "bin" / program.name).symlink_to(program)
    subprocess.run([BASE, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    return folder


class Checkout:
    """A copy of the project on a machine that has one Python, without torch."""

    def __init__(self, path: Path, machine: Path) -> None:
        self.path, self.venv, self.machine = path, path / ".venv", machine
        self.programs = path / "programs"
        shutil.copytree(ROOT / "tools", path / "tools")
        for name in ("requirements.txt", "launch_single.sh", "demo_coco_resnet18.py"):
            shutil.copy(ROOT / name, path)
        self.programs.mkdir()
        self.program("python3", f'exec "{BASE}" "$@"')

    def program(self, name: str, text: str) -> None:
        (self.programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (self.programs / name).chmod(0o755)

    def environment(self, name: str, *packages: str, torch: str = "2.15.0") -> Path:
        """An environment with these packages; returns its folder."""
        prefix = self.path / name
        shutil.copytree(self.machine / "venv", prefix, symlinks=True)
        (site,) = prefix.glob("lib/python*/site-packages")
        for each in packages:
            for file, text in package(each, torch if each == "torch" else "99").items():
                (site / file).parent.mkdir(parents=True, exist_ok=True)
                (site / file).write_text(text)
        return prefix

    def start(
        self,
        active: Path | None = None,
        command: str = ENVIRONMENT,
        before: Sequence[str] = (),
        **variables: object,
    ) -> Started:
        """With this environment active, or none; `before` starts the command."""
        env: dict = dict.fromkeys(name for name in os.environ if FOREIGN.fullmatch(name))
        env["PYTHONWARNINGS"] = None  # older versions of pip warn of a package that is their own
        env |= {"VIRTUAL_ENV": active, "PIP_CONFIG_FILE": os.devnull, **NO_NETWORK, **variables}
        programs = f"{self.programs}:{self.machine}/bin"
        env["PATH"] = f"{active}/bin:{programs}" if active else programs
        env = {name: None if value is None else str(value) for name, value in env.items()}
        program, *arguments = command.split()
        words = [*before, "bash", self.path / program, *arguments]
        return start(words, env=env, cwd=self.path, split=True)

    def chosen(self, active: Path | None = None, **variables: object) -> Path:
        """The environment of the Python that it prints."""
        return environment_of(self.start(active, **variables).finish(300))

    def refusal(self, active: Path | None = None, **variables: object) -> str:
        """The one line with which it refuses, before it makes anything."""
        run = self.start(active, **variables).finish(60, expect=None)
        assert run.returncode == 2 and run.out == "" and not self.venv.exists(), run.tail()
        (line,) = run.err.splitlines()
        assert "error: " in line
        return line


def environment_of(run: Run, cwd: Path | None = None) -> Path:
    (python,) = run.out.splitlines()
    code = "import sys, torch, torchvision, pycocotools, PIL; print(sys.prefix)"
    return Path(subprocess.check_output([python, "-c", code], text=True, cwd=cwd).strip())


@pytest.fixture
def checkout(tmp_path: Path, machine: Path) -> Checkout:
    find = "import importlib.util, sys; sys.exit(bool(importlib.util.find_spec('torch')))"
    bare = subprocess.run([BASE, "-c", find])
    require(bare.returncode == 0, "the Python under this environment has torch itself")
    return Checkout(tmp_path / "mein Gerät", machine)


# --- The Python that is there ----------------------------------------------------------------


def test_active_python_is_taken_unless_another_one_is_set(checkout):
    active, own = (checkout.environment(name, *NEEDED) for name in ("active", "own"))
    assert checkout.chosen(active) == active
    assert checkout.chosen(active, PYTHON=own / "bin/python") == own
    assert not checkout.venv.exists()


VERSIONS = [
    "2.6.0",
    "2.11.0a0+5228986c39.nv25.06",
    "3.0",
]


@pytest.mark.parametrize("version", VERSIONS)
def test_torch_from_2_6_on_is_taken(checkout, version):
    active = checkout.environment("active", *NEEDED, torch=version)
    assert checkout.chosen(active) == active


def test_active_torch_without_a_small_package_is_refused_with_the_command_for_just_that(checkout):
    for missing in ("pycocotools", "pillow"):
        names = [name for name in NEEDED if name != missing]
        line = checkout.refusal(active := checkout.environment(f"no {missing}", *names))
        command = f"{active}/bin/python3 -m pip install {missing},"
        assert command in line and "requirements" not in line
    line = checkout.refusal(checkout.environment("two", "torch", "torchvision"))
    assert "-m pip install pycocotools pillow," in line


UNFIT = {  # packages, version of torch, what the line says
    "no torch": (["pillow"], "", "has no torch:"),
    "no torchvision": (["torch", "pycocotools", "pillow"], "2.15.0", "has no torchvision:"),
    "old torch": (NEEDED, "2.5.1+cu121", r"has torch 2\.5\.1\+cu121"),
    "older torch": (NEEDED, "1.13.1", r"has torch 1\.13\.1"),
    "old python": (NEEDED, "2.15.0", "is older than Python 3.10"),
}


def test_active_python_that_is_unfit_is_left_alone_with_one_line(checkout):
    checkout.environment(".venv", *NEEDED)
    for case, (packages, version, words) in UNFIT.items():
        active = checkout.environment(case, *packages, torch=version)
        if case == "old python":
            (site,) = active.glob("lib/python*/site-packages")
            # (Not in a sitecustomize.py: a system may have one, and it would win.)
            (site / "older.pth").write_text("import sys; sys.version_info = (3, 9, 18)\n")
        run = checkout.start(active).finish(60)
        assert environment_of(run) == checkout.venv
        (line,) = run.err.splitlines()
        assert f"{active}/bin/python3" in line and ".venv is used" in line
        assert re.search(words, line)
        (line,) = checkout.start(PYTHON=active / "bin/python3").finish(60, 2).err.splitlines()
        assert "error: " in line and re.search(words, line)


def test_folders_that_are_called_like_packages_are_not_taken_for_them(checkout):
    """They lie where the command is called, or are left of packages that were removed."""
    checkout.environment(".venv", *NEEDED)
    active = checkout.environment("active", "torchvision")
    for name, files in (("torch", ["__init__.py"]), ("pycocotools", [])):
        (checkout.path / name).mkdir()
        for file in files:
            (checkout.path / name / file).touch()
    run = checkout.start(active).finish(60)
    assert environment_of(run, cwd=checkout.machine) == checkout.venv
    assert "has no torch" in run.err
    (left,) = checkout.environment("left", "torchvision", "pillow").glob(
        "lib/python*/site-packages"
    )
    (left / "torch/lib").mkdir(parents=True)
    line = checkout.start(PYTHON=f"{checkout.path}/left/bin/python3").finish(60, 2).err
    assert "has no torch" in line


def test_python_without_an_environment_and_torch_is_no_news(checkout):
    checkout.environment(".venv", *NEEDED)
    run = checkout.start().finish(60)
    assert environment_of(run) == checkout.venv and run.err == ""


def test_machine_without_python_is_refused(checkout):
    (checkout.programs / "python3").unlink()
    assert "Python 3.10 or newer" in checkout.refusal()


def test_python_that_is_too_old_for_the_environment_is_refused(checkout):
    (checkout.path / "other").mkdir()
    older = "import sys; sys.version_info = (3, 9, 18)"
    (checkout.path / "other/sitecustomize.py").write_text(older)
    checkout.program("python3", f'PYTHONPATH="{checkout.path}/other" exec "{BASE}" "$@"')
    assert "Python 3.10 or newer" in checkout.refusal()


@pytest.mark.slow
def test_venv_of_an_install_that_was_cut_short_is_not_taken(checkout):
    """Here it cannot be made again, for want of a network."""
    (checkout.environment(".venv", *NEEDED) / "begun").touch()
    run = checkout.start().finish(60, expect=2)
    assert run.out == "" and "once, some minutes" in run.err


@pytest.mark.slow
def test_an_nvidia_smi_that_hangs_does_not_hold_it_up(checkout):
    """It never returns where a GPU fell off its bus."""
    checkout.program("nvidia-smi", "exec sleep 500")
    active = checkout.environment("active", *NEEDED)
    with checkout.start(active) as started:
        assert environment_of(started.finish(30)) == active


# --- A .venv that is there -----------------------------------------------------------------------

LACKS = {"pycocotools": "-m pip install pycocotools", "torch": "has no torch"}


@pytest.mark.parametrize("missing", LACKS)
def test_venv_that_was_made_by_hand_is_not_removed(checkout, missing):
    own = checkout.environment(".venv", *(name for name in NEEDED if name != missing))
    for active in (None, own):
        run = checkout.start(active).finish(60, expect=2)
        assert LACKS[missing] in run.err.splitlines()[-1] and f"remove {own}" in run.err
        assert (own / "bin/python3").exists()


def test_a_file_in_the_current_folder_that_is_called_like_a_module_does_no_harm(checkout):
    active = checkout.environment("active", *NEEDED)
    (checkout.path / "random.py").write_text("raise RuntimeError('of the user')\n")
    assert environment_of(checkout.start(active).finish(60)) == active


def test_venv_whose_python_has_gone_is_named_and_stays(checkout):
    """It may be one of another machine that shares this folder."""
    own = checkout.environment(".venv", *NEEDED)
    (own / "bin/python3").unlink()
    (own / "bin/python3").symlink_to("/nowhere/python3")
    run = checkout.start().finish(60, expect=2)
    assert "does not work" in run.err.splitlines()[-1] and f"remove {own}" in run.err
    assert (own / "bin/python3").is_symlink()


# What bash 3.2, which macOS has, does not know, as far as it might be used here.
NEWER = (
    r"\b(mapfile|readarray|coproc|BASHPID|EPOCHSECONDS|EPOCHREALTIME|globstar|lastpipe)\b",
    r"\$\{\w+(\[[^]]*\])?(,|\^|@[A-Za-z])",  # ${x,,} ${x^} ${x@Q}
    r"\b(declare|local|typeset|readonly) -\w*[Ang]",
    r"printf -v \"?\w+\[",
    r"\bwait -\w*[nfp]",
    r"\|&|&>>|;&|;;&",
    r"(\[\[|\btest|\[) -v\b",
    r"\$\{\w+: -\d|\$\{\w+\[-\d",
    r"\{\w+\.\.\w+\.\.\w+\}",
    r"\$'[^']*\\u",
)


def test_what_a_mac_starts_keeps_to_bash_3_2():
    names = ["launch_single.sh", "tools/environment.sh"]  # which source no other file
    text = "\n".join((ROOT / name).read_text() for name in names)
    text = re.sub(r"(^|\s)#.*", "", text)
    assert "source " not in text
    for pattern in NEWER:
        assert not re.search(pattern, text), pattern
    # There an empty array is unbound under set -u.
    for name in set(re.findall(r'(?<!\+)"\$\{(\w+)\[[@*]\]\}"', text)):
        assert re.search(rf"\b{name}=\([^)]", text) and f"{name}=()" not in text, name


# --- .venv, made ------------------------------------------------------------------------------


SINGLE = "launch_single.sh --annotation_path none"  # it makes no sample set


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> Iterator[str]:
    """The address of a package index that has what both requirements.txt ask for, and no uv."""
    folder = tmp_path_factory.mktemp("index")
    for name in MODULES:
        (folder / name).mkdir()
        with zipfile.ZipFile(folder / name / f"{name}-99-py3-none-any.whl", "w") as wheel:
            for file, text in package(name, "99").items():
                wheel.writestr(file, text)
    port = free_port()
    serve = ["-m", "http.server", port, "--bind", "127.0.0.1", "--directory", folder]
    with start([sys.executable, "-u", *serve]) as server:
        server.wait_for("Serving")
        yield f"http://127.0.0.1:{port}"


@pytest.mark.slow
def test_the_lessons_set_up_makes_an_environment(index, tmp_path):
    """With packages of this machine in place of PyTorch's."""
    (block,) = (text for text in PAGES["docs/lesson/README.md"].commands if "lesson-env" in text)
    block, count = re.subn(r"(--index-url) \S+", rf"\1 {index}", block)
    code = "import sys, torch, numpy; print(sys.prefix, torch.__version__)"
    command = ["bash", "-ec", f"{block}\npython -c '{code}'"]
    own = {name: None for name in os.environ if FOREIGN.fullmatch(name)}
    own |= {"PYTHONWARNINGS": None, "PIP_CONFIG_FILE": os.devnull}
    with start(command, cwd=tmp_path, env=own) as started:
        run = started.finish(120)
    assert count == 1 and run.lines()[-1] == f"{tmp_path}/lesson-env 99"


@pytest.mark.slow
def test_venv_that_was_cut_short_is_made_again_once_while_another_start_waits(checkout, index):
    """By a signal, and by a kill. Later starts take it as it is, also without a network."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with checkout.start(PIP_INDEX_URL=index) as started:
            wait_until((checkout.venv / "bin/python3").exists, 60, ".venv")
            if number == signal.SIGTERM:
                started.signal(number)
                assert started.finish(30, expect=None).returncode != 0
                shutil.rmtree(checkout.venv / "bin")  # for the next wait
            else:
                started.kill()
    both = [checkout.start(PIP_INDEX_URL=index) for _ in range(2)]
    runs = [started.finish(300) for started in both]
    assert [environment_of(run) for run in runs] == [checkout.venv] * 2
    assert any("waiting" in run.err for run in runs)
    assert sum("once, some minutes" in run.err for run in runs) == 1
    before = {path: path.stat().st_mtime_ns for path in checkout.venv.rglob("*")}
    again = checkout.start().finish(60)
    assert environment_of(again) == checkout.venv and again.err == ""
    assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> Path:
    """A folder with uv itself, which comes from the usual index."""
    folder = tmp_path_factory.mktemp("wheels")
    get = ["download", "--quiet", "--no-deps", "uv", "--dest", folder]
    done = subprocess.run([sys.executable, "-m", "pip", *get], capture_output=True, text=True)
    require(done.returncode == 0, f"pip cannot get uv: {done.stderr[-200:]}")
    return folder


@pytest.mark.slow
def test_uv_takes_pips_index_and_the_default_build_where_pytorchs_index_does_not_answer(
    checkout, index, wheels, tmp_path
):
    """It asks once. The command tools/environment.sh asks only where there is a GPU: a login node
    may have none, and share its folder with nodes that have.
    """
    settings = tmp_path / ".config" / "pip" / "pip.conf"
    settings.parent.mkdir(parents=True)
    settings.write_text(f"[global]\nindex-url = {index}\nfind-links = {wheels}\n")
    asked = 0

    def listen(server: socket.socket) -> None:
        nonlocal asked
        kept = []
        with contextlib.suppress(OSError):  # it is closed
            while True:
                kept.append(server.accept())
                asked += 1

    with socket.create_server(("127.0.0.1", 0)) as silent:
        threading.Thread(target=listen, args=[silent], daemon=True).start()
        variables = {"HOME": tmp_path, "PIP_CONFIG_FILE": None}
        variables["HTTPS_PROXY"] = f"http://127.0.0.1:{silent.getsockname()[1]}"
        for command, device, asks in (
            (ENVIRONMENT, "", False),
            (SINGLE, "", True),
            (ENVIRONMENT, "nvidia0", True),
        ):
            shutil.rmtree(checkout.venv, ignore_errors=True)
            before = asked
            seen = with_device(device)
            run = checkout.start(None, command, seen, **variables).finish(90, expect=None)
            for name in [*NEEDED, "matplotlib"]:
                pattern = f"lib/*/site-packages/{name}-99.dist-info/INSTALLER"
                (installer,) = checkout.venv.glob(pattern)
                assert installer.read_text().strip() == "uv"
            assert ("cannot be had: installing the default one" in run.err) == asks
            assert 1 <= asked - before <= 3 if asks else asked == 0  # torch, torchvision
        silent.shutdown(socket.SHUT_RDWR)


@pytest.mark.slow
@pytest.mark.parametrize("words", ["network", "UV_TORCH_BACKEND=cpu"])
def test_without_a_network_or_a_build_for_uv_it_ends_with_a_line_that_says_so(
    checkout, index, words
):
    """A build that uv is told to take is never replaced by pip's. That index has no uv."""
    variables = {"PIP_INDEX_URL": f"http://127.0.0.1:{free_port()}"}
    if words != "network":
        variables = {"PIP_INDEX_URL": index, "UV_TORCH_BACKEND": "cpu"}
    run = checkout.start(**variables).finish(60, expect=None)
    last = run.err.splitlines()[-1]
    assert run.returncode != 0 and run.out == "" and "error: " in last and words in last
