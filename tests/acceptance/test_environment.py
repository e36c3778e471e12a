"""tools/environment.sh takes the active Python, or makes .venv once, or says what is wrong.

venv, pip and uv are the real ones; the packages are as small as packages can be, and lie in an
index of this machine.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.processes import LONG, ROOT, Run, Started, free_port, require, start, wait_until

pytestmark = pytest.mark.skipif(
    not (ROOT / "tools" / "environment.sh").exists(), reason="there is no tools/environment.sh"
)
MODULES = {"torch": "torch", "torchvision": "torchvision", "pycocotools": "pycocotools"}
MODULES |= {"pillow": "PIL", "matplotlib": "matplotlib"}
NEEDED = [name for name in MODULES if name != "matplotlib"]
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
    return files | {f"{info}/RECORD": "".join(f"{x},,\n" for x in [*files, f"{info}/RECORD"])}


class Checkout:
    """A copy of the project on a machine that has one Python, without torch."""

    def __init__(self, path: Path) -> None:
        self.path, self.venv, self.programs = path, path / ".venv", path / "programs"
        shutil.copytree(ROOT / "tools", path / "tools")
        shutil.copy(ROOT / "requirements.txt", path)
        self.programs.mkdir()
        for program in Path("/usr/bin").iterdir():
            if not program.name.startswith(("python", "pip", "uv")):
                (self.programs / program.name).symlink_to(program)
        self.python3(f'exec "{BASE}" "$@"')

    def python3(self, text: str) -> None:
        (self.programs / "python3").write_text(f"#!/bin/sh\n{text}\n")
        (self.programs / "python3").chmod(0o755)

    def environment(self, name: str, *packages: str, torch: str = "2.15.0") -> Path:
        """An environment with these packages; returns its folder."""
        prefix = self.path / name
        subprocess.run([BASE, "-m", "venv", "--without-pip", prefix], check=True)
        (site,) = prefix.glob("lib/python*/site-packages")
        for each in packages:
            for file, text in package(each, torch if each == "torch" else "99").items():
                (site / file).parent.mkdir(exist_ok=True)
                (site / file).write_text(text)
        return prefix

    def start(self, active: Path | None = None, **variables: object) -> Started:
        """With this environment active, or none."""
        env: dict = dict.fromkeys(name for name in os.environ if FOREIGN.fullmatch(name))
        env |= {"VIRTUAL_ENV": active, "PIP_CONFIG_FILE": os.devnull, **NO_NETWORK, **variables}
        env["PATH"] = f"{active}/bin:{self.programs}" if active else self.programs
        env = {name: None if value is None else str(value) for name, value in env.items()}
        command = ["bash", self.path / "tools" / "environment.sh"]
        return start(command, env=env, cwd=self.path, split=True)

    def chosen(self, active: Path | None = None, **variables: object) -> Path:
        """The environment of the Python that it prints."""
        return environment_of(self.start(active, **variables).finish(300))

    def refusal(self, active: Path | None = None) -> str:
        """The one line with which it refuses, before it makes anything."""
        run = self.start(active).finish(60, expect=None)
        assert run.returncode != 0 and run.out == "" and not self.venv.exists(), run.tail()
        (line,) = run.err.splitlines()
        assert "error: " in line
        return line


def environment_of(run: Run) -> Path:
    (python,) = run.out.splitlines()
    code = "import sys, torch, torchvision, pycocotools, PIL; print(sys.prefix)"
    return Path(subprocess.check_output([python, "-c", code], text=True).strip())


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    bare = subprocess.run([BASE, "-c", "import torch"], capture_output=True)
    require(bare.returncode, "the Python under this environment has torch itself")
    return Checkout(tmp_path / "mein Gerät")


# --- The Python that is there ----------------------------------------------------------------


def test_active_python_is_taken_unless_another_one_is_set(checkout):
    active, own = (checkout.environment(name, *NEEDED) for name in ("active", "own"))
    assert checkout.chosen(active) == active
    assert checkout.chosen(active, PYTHON=own / "bin/python") == own
    assert not checkout.venv.exists()


def test_active_torch_without_the_rest_is_refused_with_the_command_that_installs_it(checkout):
    active = checkout.environment("active", "torch", "torchvision", "pillow")
    line = checkout.refusal(active)
    assert "pycocotools" in line and "pip install" in line and f"{active}/bin/python" in line


@pytest.mark.parametrize("version", ["1.13.1", "2.9.0a0+5228986c39.nv25.06"])
def test_torch_that_is_too_old_is_refused(checkout, version):
    line = checkout.refusal(checkout.environment("active", *NEEDED, torch=version))
    assert "torch" in line and version in line


def test_machine_without_python_is_refused(checkout):
    (checkout.programs / "python3").unlink()
    assert "Python 3.10 or newer" in checkout.refusal()


# Too old; and as Debian has it without the package python3-venv.
UNFIT = [
    ("sitecustomize", "import sys; sys.version_info = (3, 9, 18)", "Python 3.10 or newer"),
    ("ensurepip", "raise ModuleNotFoundError(name='ensurepip')", "python3-venv"),
]


@pytest.mark.parametrize(("module", "code", "words"), UNFIT)
def test_python_that_cannot_make_the_environment_is_refused(checkout, module, code, words):
    """By a module that python3 finds in place of its own."""
    (checkout.path / "other").mkdir()
    (checkout.path / "other" / f"{module}.py").write_text(code)
    checkout.python3(f'PYTHONPATH="{checkout.path}/other" exec "{BASE}" "$@"')
    assert words in checkout.refusal()


# --- .venv, made ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> Iterator[str]:
    """The address of a package index that has what requirements.txt asks for, and no uv."""
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


@LONG
def test_venv_is_made_once(checkout, index):
    """Another start waits meanwhile; later ones take it as it is, also without a network."""
    both = [checkout.start(PIP_INDEX_URL=index) for _ in range(2)]
    runs = [started.finish(300) for started in both]
    assert [environment_of(run) for run in runs] == [checkout.venv] * 2
    assert sorted("waiting" in run.err for run in runs) == [False, True]
    assert sum("once, some minutes" in run.err for run in runs) == 1
    before = {path: path.stat().st_mtime_ns for path in checkout.venv.rglob("*")}
    again = checkout.start().finish(60)
    assert environment_of(again) == checkout.venv and again.err == ""
    assert {path: path.stat().st_mtime_ns for path in before} == before


@LONG
def test_uv_installs_from_the_index_of_pips_own_settings(checkout, index, tmp_path):
    """uv itself comes from the usual index, as a wheel that pip finds beside the others."""
    get = ["download", "--quiet", "--no-deps", "uv", "--dest", tmp_path / "wheels"]
    done = subprocess.run([sys.executable, "-m", "pip", *get], capture_output=True, text=True)
    require(done.returncode == 0, f"pip cannot get uv: {done.stderr[-200:]}")
    settings = tmp_path / ".config" / "pip" / "pip.conf"
    settings.parent.mkdir(parents=True)
    settings.write_text(f"[global]\nindex-url = {index}\nfind-links = {tmp_path}/wheels\n")
    assert checkout.chosen(HOME=tmp_path, PIP_CONFIG_FILE=None) == checkout.venv
    for name in MODULES:
        (installer,) = checkout.venv.glob(f"lib/*/site-packages/{name}-99.dist-info/INSTALLER")
        assert installer.read_text().strip() == "uv"


@LONG
def test_venv_that_a_signal_left_half_made_is_made_again(checkout, index):
    with checkout.start(PIP_INDEX_URL=index) as started:
        wait_until((checkout.venv / "bin/python3").exists, 60, ".venv")
        started.signal(signal.SIGTERM)
        assert started.finish(30, expect=None).returncode != 0
    assert checkout.chosen(PIP_INDEX_URL=index) == checkout.venv


@LONG
def test_without_a_network_it_ends_with_a_line_that_says_so(checkout):
    started = checkout.start(PIP_INDEX_URL=f"http://127.0.0.1:{free_port()}")
    run = started.finish(60, expect=None)
    assert run.returncode != 0 and run.out == ""
    last = run.err.splitlines()[-1]
    assert "error: " in last and "network" in last


@LONG
def test_build_that_uv_is_told_to_take_is_never_replaced_by_pips(checkout, index):
    started = checkout.start(PIP_INDEX_URL=index, UV_TORCH_BACKEND="cpu")
    run = started.finish(120, expect=None)
    assert run.returncode != 0 and run.out == ""
    last = run.err.splitlines()[-1]
    assert "error: " in last and "UV_TORCH_BACKEND=cpu" in last
    assert not [*checkout.venv.glob("lib/*/site-packages/torch")]
