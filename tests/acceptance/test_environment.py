"""tools/environment.sh takes the active Python, or makes .venv once, or says what is wrong.

venv, pip and uv are the real ones; the packages are as small as packages can be, and lie in an
index of this machine. A GPU is a device file in a mount namespace.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
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
OLDER = "import sys; sys.version_info = (3, 9, 18)\n"


def package(name: str, version: str) -> dict[str, str]:
    """The files of a package that has nothing but its version."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{MODULES[name]}/__init__.py": f"__version__ = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": WHEEL,
    }
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
        self.python = path / "programs/python3"
        shutil.copytree(ROOT / "tools", path / "tools")
        for name in ("requirements.txt", "launch_single.sh", "demo_coco_resnet18.py"):
            shutil.copy(ROOT / name, path)
        self.python.parent.mkdir()
        self.set_python(f'exec "{BASE}" "$@"')

    def set_python(self, text: str) -> None:
        self.python.write_text(f"#!/bin/sh\n{text}\n")
        self.python.chmod(0o755)

    def environment(self, name: str, *packages: str, torch: str = "2.15.0") -> Path:
        """An environment with these packages; returns its folder."""
        prefix = self.path / name
        shutil.copytree(self.machine / "venv", prefix, symlinks=True)
        for each in packages:
            for file, text in package(each, torch if each == "torch" else "99").items():
                (site(prefix) / file).parent.mkdir(parents=True, exist_ok=True)
                (site(prefix) / file).write_text(text)
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
        programs = f"{self.python.parent}:{self.machine}/bin"
        env["PATH"] = f"{active}/bin:{programs}" if active else programs
        env = {name: None if value is None else str(value) for name, value in env.items()}
        program, *arguments = command.split()
        words = [*before, "bash", self.path / program, *arguments]
        return start(words, env=env, cwd=self.path, split=True)

    def run(self, active: Path | None = None, expect: int = 0, **variables: object) -> Run:
        return self.start(active, **variables).finish(60, expect)

    def refusal(self, active: Path | None = None, **variables: object) -> str:
        """The one line with which it refuses."""
        run = self.run(active, 2, **variables)
        (line,) = run.err.splitlines()
        assert run.out == "" and "error: " in line
        return line


def site(prefix: Path) -> Path:
    return next(prefix.glob("lib/python*/site-packages"))


def environment_of(run: Run, cwd: Path | None = None) -> Path:
    """That of the Python which was printed."""
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
    """A file in the current folder that is called like a module does no harm."""
    active, own = (checkout.environment(name, *NEEDED) for name in ("active", "own"))
    (checkout.path / "random.py").write_text("raise RuntimeError('of the user')\n")
    assert environment_of(checkout.run(active)) == active
    assert environment_of(checkout.run(active, PYTHON=own / "bin/python")) == own
    assert not checkout.venv.exists()


@pytest.mark.parametrize("version", ["2.6.0", "2.11.0a0+5228986c39.nv25.06", "3.0"])
def test_torch_from_2_6_on_is_taken(checkout, version):
    active = checkout.environment("active", *NEEDED, torch=version)
    assert environment_of(checkout.run(active)) == active


def test_a_missing_small_package_is_named_with_the_command(checkout):
    for lacks in ("pycocotools", "pillow", "pycocotools pillow"):
        names = [name for name in NEEDED if name not in lacks.split()]
        active = checkout.environment(f"no {lacks}", *names)
        line = checkout.refusal(active)
        assert f"{active}/bin/python3 -m pip install {lacks}," in line
        assert "requirements" not in line and not checkout.venv.exists()


UNFIT = {  # packages, version of torch, what the line says
    "no torch": (["pillow"], "", "has no torch:"),
    "no torchvision": (["torch", "pycocotools", "pillow"], "2.15.0", "has no torchvision:"),
    "old torch": (NEEDED, "2.5.1+cu121", r"has torch 2\.5\.1\+cu121"),
    "older torch": (NEEDED, "1.13.1", r"has torch 1\.13\.1"),
    "old python": (NEEDED, "2.15.0", "is older than Python 3.10"),
    "rest of torch": (["torchvision", "pillow"], "", "has no torch:"),
}


def test_active_python_that_is_unfit_is_left_alone_with_one_line(checkout):
    """Folders that are called like packages are not taken for them: they lie where the command is
    called, or are left of packages that were removed.
    """
    checkout.environment(".venv", *NEEDED)
    (checkout.path / "torch").mkdir()
    (checkout.path / "torch/__init__.py").touch()
    for case, (packages, version, words) in UNFIT.items():
        active = checkout.environment(case, *packages, torch=version)
        if case == "old python":
            # (Not in a sitecustomize.py: a system may have one, and it would win.)
            (site(active) / "older.pth").write_text(OLDER)
        if case == "rest of torch":
            (site(active) / "torch/lib").mkdir(parents=True)
        run = checkout.run(active)
        assert environment_of(run, cwd=checkout.machine) == checkout.venv
        (line,) = run.err.splitlines()
        assert f"{active}/bin/python3" in line and ".venv is used" in line
        assert re.search(words, line)
        assert re.search(words, checkout.refusal(PYTHON=active / "bin/python3"))
    run = checkout.run()  # that a system's Python has no torch is no news
    assert environment_of(run, cwd=checkout.machine) == checkout.venv and run.err == ""


def test_a_machine_without_a_python_that_is_new_enough_is_refused(checkout):
    (checkout.path / "other").mkdir()
    (checkout.path / "other/sitecustomize.py").write_text(OLDER)
    checkout.set_python(f'PYTHONPATH="{checkout.path}/other" exec "{BASE}" "$@"')
    for _ in ("too old", "none"):
        assert "Python 3.10 or newer" in checkout.refusal() and not checkout.venv.exists()
        checkout.python.unlink(missing_ok=True)


# --- A .venv that is there -----------------------------------------------------------------------

LACKS = {"pycocotools": "-m pip install pycocotools", "torch": "has no torch"}


def test_venv_that_cannot_be_used_is_named_and_stays(checkout):
    """It was made by hand, or is one of another machine that shares this folder."""
    for missing, words in LACKS.items():
        own = checkout.environment(".venv", *(name for name in NEEDED if name != missing))
        for active in (None, own):
            run = checkout.run(active, 2)
            assert words in run.err.splitlines()[-1] and f"remove {own}" in run.err
        shutil.move(own, checkout.path / missing)
    own = checkout.environment(".venv", *NEEDED)
    (own / "bin/python3").unlink()
    (own / "bin/python3").symlink_to("/nowhere/python3")
    line = checkout.refusal()
    assert "does not work" in line and f"remove {own}" in line
    assert (own / "bin/python3").is_symlink()


# --- .venv, made ------------------------------------------------------------------------------


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
def test_venv_that_was_cut_short_is_made_again_once(checkout, index):
    """By a signal, and by a kill. It is not taken as it is, also where no network is. Later starts
    take what was made, without one.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        with checkout.start(PIP_INDEX_URL=index) as started:
            wait_until((checkout.venv / "bin/python3").exists, 60, ".venv")
            if number == signal.SIGTERM:
                started.signal(number)
                assert started.finish(30, expect=None).returncode != 0
                shutil.rmtree(checkout.venv / "bin")  # for the next wait
            else:
                started.kill()
    run = checkout.run(None, 2)
    assert run.out == "" and "once, some minutes" in run.err
    both = [checkout.start(PIP_INDEX_URL=index) for _ in range(2)]
    runs = [started.finish(300) for started in both]
    assert [environment_of(run) for run in runs] == [checkout.venv] * 2
    assert any("waiting" in run.err for run in runs)
    assert sum("once, some minutes" in run.err for run in runs) == 1
    before = {path: path.stat().st_mtime_ns for path in checkout.venv.rglob("*")}
    again = checkout.run()
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


SINGLE = "launch_single.sh --annotation_path none"  # it makes no sample set
BUILDS = [(ENVIRONMENT, "", False), (SINGLE, "", True), (ENVIRONMENT, "nvidia0", True)]


@pytest.mark.slow
def test_uv_takes_pips_index_where_pytorchs_does_not_answer(checkout, index, wheels, tmp_path):
    """It asks once, or would not end in time. The command tools/environment.sh asks only where
    there is a GPU: a login node may have none, and share its folder with nodes that have.
    """
    settings = tmp_path / ".config" / "pip" / "pip.conf"
    settings.parent.mkdir(parents=True)
    settings.write_text(f"[global]\nindex-url = {index}\nfind-links = {wheels}\n")
    variables = {"HOME": tmp_path, "PIP_CONFIG_FILE": None}
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it takes connections, that is all
        variables["HTTPS_PROXY"] = f"http://127.0.0.1:{silent.getsockname()[1]}"
        for command, device, asks in BUILDS:
            shutil.rmtree(checkout.venv, ignore_errors=True)
            seen = with_device(device)
            run = checkout.start(None, command, seen, **variables).finish(90, expect=None)
            for name in [*NEEDED, "matplotlib"]:
                (installer,) = site(checkout.venv).glob(f"{name}-99.dist-info/INSTALLER")
                assert installer.read_text().strip() == "uv"
            assert ("cannot be had: installing the default one" in run.err) == asks


@pytest.mark.slow
@pytest.mark.parametrize("words", ["network", "UV_TORCH_BACKEND=cpu"])
def test_without_a_network_or_a_build_for_uv_the_last_line_says_so(checkout, index, words):
    """A build that uv is told to take is never replaced by pip's. That index has no uv."""
    variables = {"PIP_INDEX_URL": f"http://127.0.0.1:{free_port()}"}
    if words != "network":
        variables = {"PIP_INDEX_URL": index, "UV_TORCH_BACKEND": "cpu"}
    run = checkout.run(None, 2, **variables)
    last = run.err.splitlines()[-1]
    assert run.out == "" and "error: " in last and words in last
