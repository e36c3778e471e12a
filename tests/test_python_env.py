"""python_env.sh: which Python it takes, what it says before it makes one, how it makes .venv.

The packages are as small as packages can be, and lie in a folder that pip and uv are told of.
venv, pip, uv and bash are the real ones.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import pytest

from launcher import python_check, uv_install
from support.processes import LONG, ROOT, Started, long, require, wait_until

FILES = ("python_env.sh", "python_check.py", "uv_install.py")
REQUIRED = {"torch": "torch", "torchvision": "torchvision", "pycocotools": "pycocotools"}
REQUIRED |= {"pillow": "PIL", "matplotlib": "matplotlib"}
WITHOUT_PLOTS = [*REQUIRED][:-1]  # what is asked of an environment of the user's own
# What the machine happens to have set for pip, uv or an environment must not disturb a test.
FOREIGN = re.compile(
    r"(PIP|UV|CONDA)_.*|PYTHON.*|VIRTUAL_ENV|CDPATH|SSL_CERT_FILE|REQUESTS_CA_BUNDLE"
)


def package(name: str, version: str = "99", size: int = 0, code: str = "") -> dict[str, str]:
    """The files of a package, whose module has `size` parts beside its own code."""
    module, info = REQUIRED.get(name, name), f"{name}-{version}.dist-info"
    files = {f"{module}/part{i}.py": f"NUMBER = {i}\n" for i in range(size)}
    files[f"{module}/__init__.py"] = code
    files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    files[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    return files | {
        f"{info}/RECORD": "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"])
    }


def put(prefix: Path, *names: str, **versions: str) -> None:
    """Packages as pip leaves them in an environment."""
    for name in names:
        for file, text in package(name, versions.get(name, "99")).items():
            path = site(prefix) / file
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)


def site(prefix: Path) -> Path:
    return next(prefix.glob("lib/python*/site-packages"), prefix / "none")


class Checkout:
    """A folder with the files under test, on a machine on which no Python on PATH has torch."""

    def __init__(self, path: Path) -> None:
        self.path, self.venv = path, path / ".venv"
        self.own = str(self.venv / "bin/python")
        self.lock, self.begun = self.venv / "lock", self.venv / "begun"
        (path / "tools/launcher").mkdir(parents=True)
        for name in FILES:
            shutil.copy(ROOT / "tools/launcher" / name, path / "tools/launcher")
        shutil.copy(ROOT / "requirements.txt", path)
        self.wheels, self.programs = path / "wheels", path / "programs"
        self.wheels.mkdir()
        self.programs.mkdir()
        self.program("python3", f'exec "{sys.base_prefix}/bin/python3" "$@"')
        self.environ = dict.fromkeys(["VIRTUAL_ENV", *filter(FOREIGN.match, os.environ)])
        self.environ |= {
            "PATH": f"{self.programs}:/usr/bin:/bin",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.wheels),
            "PIP_CONFIG_FILE": os.devnull,
        }

    def program(self, name: str, text: str) -> None:
        (self.programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (self.programs / name).chmod(0o755)

    def python3(self, case: str) -> None:
        """From now on python3 does something else in this case, of sh."""
        text = (self.programs / "python3").read_text().partition("\n")[2]
        self.program("python3", f'case "$*" in {case};; esac\n{text}')

    def no_venv(self) -> None:
        """From now on python3 can make no environment: what would make one ends at once."""
        self.python3("*ensurepip*) exit 1")

    def wheel(self, name: str, size: int = 0, code: str = "") -> None:
        with zipfile.ZipFile(self.wheels / f"{name}-99-py3-none-any.whl", "w") as file:
            for member, text in package(name, size=size, code=code).items():
                file.writestr(member, text)

    def fill_wheels(self, size: int = 0) -> None:
        for name in (*REQUIRED, "extra"):
            self.wheel(name, size)

    def replace(self, old: str, new: str) -> None:
        """In python_env.sh."""
        path = self.path / "tools/launcher/python_env.sh"
        text = path.read_text()
        assert text.count(old) == 1, old
        path.write_text(text.replace(old, new))

    def environment(self, name: str = ".venv", *packages: str, **versions: str) -> Path:
        """An environment without pip, which takes no time."""
        base = f"{sys.base_prefix}/bin/python3"
        command = [base, "-m", "venv", "--without-pip", self.path / name]
        subprocess.run(command, check=True)
        put(self.path / name, *packages, **versions)
        return self.path / name

    def start(self, *packages: str, before: tuple = (), split=False, **variables: object):
        command = [*before, "bash", "tools/launcher/python_env.sh", *packages]
        env = self.environ | {name: str(value) for name, value in variables.items()}
        return Started(command, env, self.path, split=split)

    def ends(self, code: int, out: object, *packages: str, **options: object) -> str:
        """What it says on stderr, where the code and stdout are these."""
        run = self.start(*packages, split=True, **options).finish(expect=None)
        assert (run.returncode, run.out) == (code, f"{out}\n" if out else ""), run.err
        return run.err

    def says(self, *packages: str, **options: object) -> str:
        """With .venv as the result."""
        return self.ends(0, self.own, *packages, **options)

    def fails(self, *packages: str, **options: object) -> list[str]:
        """The lines that it says then, the last one of which is the error."""
        lines = self.ends(1, "", *packages, **options).splitlines()
        assert lines[-1].startswith("python_env.sh: error: "), lines
        return lines

    def only_line(self, *packages: str, **options: object) -> str:
        (line,) = self.fails(*packages, **options)
        return line

    def parts(self) -> list[int]:
        """How many files with a content each required package has."""
        found = [(site(self.venv) / name).glob("part*.py") for name in REQUIRED.values()]
        return [sum(part.stat().st_size > 0 for part in parts) for parts in found]

    def picture(self) -> dict[Path, bytes]:
        """Every file under the folder."""
        files = [path for path in self.path.rglob("*") if path.is_file() and not path.is_symlink()]
        return {path: path.read_bytes() for path in files}


@pytest.fixture
def checkout(tmp_path):
    made = Checkout(tmp_path / "checkout")
    bare = subprocess.run([made.programs / "python3", "-c", "import torch"], capture_output=True)
    require(bare.returncode, "the Python under this environment has torch itself")
    return made


# ---- an active environment


def test_an_active_environment_is_used_as_it_is(checkout):
    versions = {"torch": "2.11rc1+cu130", "torchvision": "0.26.0"}
    active = checkout.environment("active", *WITHOUT_PLOTS, **versions)
    python, before = active / "bin/python", checkout.picture()
    for variable in ({"VIRTUAL_ENV": active}, {"CONDA_PREFIX": active}, {"PYTHON": python}):
        assert checkout.ends(0, python, **variable) == ""
    assert checkout.picture() == before
    for info in site(active).glob("*.dist-info"):  # some builds have none
        shutil.rmtree(info)
    assert checkout.ends(0, python, PYTHON=python) == ""
    (site(active) / "torch/__init__.py").unlink()  # an empty folder named torch is not torch
    (checkout.path / "torch").mkdir()  # nor is one in the working directory
    (checkout.path / "torch/__init__.py").touch()
    checkout.no_venv()
    first, *_, last = checkout.fails(VIRTUAL_ENV=active)
    assert f"{active} has no torch: it stays as it is" in first
    assert "python3 cannot make virtual environments" in last


@pytest.mark.parametrize("name", ["VIRTUAL_ENV", "PYTHON", "PATH"])
def test_an_active_environment_that_lacks_something_is_named_before_anything_is_made(
    checkout, name
):
    active = checkout.environment("active", "torch", "torchvision", "pillow")
    value = {"VIRTUAL_ENV": active, "PYTHON": active / "bin/python"}
    value["PATH"] = f"{active}/bin:{checkout.environ['PATH']}"
    python = active / "bin" / ("python3" if name == "PATH" else "python")
    before = checkout.picture()
    line = checkout.only_line("extra", **{name: value[name]})
    assert f"{python} has no pycocotools; no extra." in line
    assert f"({python} -m pip install pycocotools extra)" in line
    assert f"set PYTHON={checkout.own} (or deactivate" in line
    assert checkout.picture() == before and not checkout.venv.exists()


def test_torch_that_is_too_old_is_named_with_both_versions(checkout):
    """Compared as numbers: 2.8 comes before 2.11."""
    versions = {"torch": "2.8.0a0+5228986c39.nv25.06", "torchvision": "0.25.1"}
    active = checkout.environment("active", *WITHOUT_PLOTS, **versions)
    line = checkout.only_line(VIRTUAL_ENV=active)
    assert f"torch {versions['torch']}, and 2.11 or newer is needed; torchvision 0.25.1" in line
    assert "pip install 'torch>=2.11' 'torchvision>=0.26')" in line


@LONG
def test_the_way_out_that_the_line_names_takes_dot_venv(checkout):
    active = checkout.environment("active", "torch")
    checkout.environment(".venv", *REQUIRED)
    # A .venv that is there is used, and it is said why the active one is not.
    err = checkout.says(VIRTUAL_ENV=active)
    assert f".venv is used, for {active}/bin/python has no torchvision; no pycoco" in err
    for own in (checkout.own, ".venv/bin/python"):
        assert checkout.says(VIRTUAL_ENV=active, PYTHON=own) == ""
    # And where it is not there, it is made: here that ends at once.
    shutil.rmtree(checkout.venv)
    checkout.no_venv()
    for own in (checkout.own, ".venv/bin/python"):
        line = checkout.only_line(VIRTUAL_ENV=active, PYTHON=own)
        assert "python3 cannot make virtual environments" in line


def test_a_python_that_cannot_be_used_is_named(checkout):
    active = checkout.environment("active")
    for python, why in {
        "/nowhere/python": ", which is no program",
        f"{active}/bin/python": f", and {active} has no torch: it has to be",
        "/bin/false": ": it has to be Python 3.10 or newer",
    }.items():
        assert f"PYTHON is '{python}'{why}" in checkout.only_line(PYTHON=python)
    assert not checkout.venv.exists()


@pytest.mark.parametrize(
    ("cases", "text"),
    [
        (
            "--version) echo Python 3.6;; *) exit 1",
            "no Python 3.10 or newer on PATH (python3 is P",
        ),
        ("*version_info*) exit 0;; *) exit 1", "install python3-venv"),
    ],
)
def test_what_is_missing_to_make_one_is_said_in_one_line(checkout, cases, text):
    for name in ("python3", "python", *(f"python3.{minor}" for minor in range(10, 15))):
        checkout.program(name, f'case "$*" in {cases};; esac')
    assert text in checkout.only_line()
    assert not checkout.venv.exists()


# ---- .venv: whole or not


def test_a_whole_dot_venv_is_used_and_nothing_is_written(checkout):
    checkout.environment(".venv", *REQUIRED)
    before = checkout.picture()
    assert checkout.says() == ""
    assert checkout.says(CDPATH=".:/tmp") == ""  # with it, cd prints where it went
    assert checkout.picture() == before


def test_a_package_of_dot_venv_counts_with_its_record_when_its_install_has_ended(checkout):
    venv = checkout.environment()
    check = ROOT / "tools/launcher/python_check.py"

    def says(*further: str) -> tuple[int, str]:
        command = (venv / "bin/python", check, checkout.path, "check", *further)
        done = subprocess.run(command, capture_output=True, text=True)
        return done.returncode, done.stdout.removeprefix(checkout.own).strip()

    assert says()[0] == python_check.OWN
    put(venv, *REQUIRED)
    assert says() == (0, "")
    record = site(venv) / "torch-99.dist-info/RECORD"
    text = record.read_text()
    record.unlink()  # pip had not come to it
    assert says() == (python_check.OWN, "has no torch")
    record.write_text(text)
    checkout.begun.write_text("\n")  # uv writes RECORD with the files: nothing counts
    missing = "; ".join(f"no whole {name}" for name in REQUIRED)
    assert says() == (python_check.OWN, f"has {missing}")
    # A further package, of which the others know nothing.
    checkout.begun.write_text("extra\n")
    assert says() == (0, "")
    assert says("extra") == (python_check.FURTHER, "has no extra")
    put(venv, "extra")
    assert says("extra") == (python_check.FURTHER, "has no whole extra")
    checkout.begun.unlink()
    assert says("extra") == (0, "")


# ---- the lock


def gone() -> int:
    """The number of a process that is no longer there."""
    with subprocess.Popen(["true"]) as process:
        return process.pid


def locked(checkout: Checkout, pid: int, host: str = "") -> None:
    """A .venv that lacks everything, under the lock of such a process."""
    checkout.environment()
    user = subprocess.getoutput('user=$(id -un 2>/dev/null) || user=$(id -u); echo "$user"')
    space = subprocess.getoutput("readlink /proc/self/ns/pid 2>/dev/null")
    name = f"{pid}|{user} on {host or os.uname().nodename}|{space}|2026-01-01 00:00:00"
    checkout.lock.symlink_to(name)


@pytest.mark.parametrize("elsewhere", [True, *long(False)])
def test_a_second_start_waits_until_the_first_is_done(checkout, elsewhere):
    """And installs nothing then. On another node the number says nothing here."""
    with Started(["bash", "-c", "sleep 99; :", "python_env.sh"]) as first:
        pid, host = (gone(), "node7") if elsewhere else (first.pid, os.uname().nodename)
        locked(checkout, pid, host="node7" if elsewhere else "")
        second = checkout.start()
        line = second.wait_for("waiting for .*")[0]
        assert f"for process {pid} of " in line and f" on {host}, which" in line
        assert line.endswith(f"remove {checkout.lock}")
        put(checkout.venv, *REQUIRED)  # what the first one does, and then
        checkout.lock.unlink()
        assert second.finish(20).out == f"python_env.sh: {line}\n{checkout.own}\n"
    assert not checkout.lock.is_symlink()


def test_waiting_has_an_end(checkout):
    checkout.replace("patience=3600", "patience=1")
    locked(checkout, gone(), host="node7")
    _, last = checkout.fails()
    assert "after 1 s still waiting for process" in last
    assert last.endswith(f"remove {checkout.lock}") and checkout.lock.is_symlink()


def lock_alone(checkout: Checkout) -> None:
    """Leaves the lock of python_env.sh alone: each start holds it for a moment, and says so."""
    # As slow as it may be between seeing that an owner is gone and acting on it.
    checkout.replace('mkdir "$lock.next"', 'sleep 0.3 && mkdir "$lock.next"')
    hold = "take_lock\necho in >>log\nsleep 0.2\necho out >>log\nexit\n"
    place = "# ---- which Python"
    checkout.replace(place, f"trap leave_lock EXIT\n{hold}{place}")


@pytest.mark.parametrize("killed", ["gone", *long("taken by another program")])
def test_of_several_that_find_a_dead_lock_one_has_it_at_a_time(checkout, killed):
    pid = gone() if killed == "gone" else os.getpid()
    locked(checkout, pid)
    lock_alone(checkout)
    said = "".join(process.finish(60).out for process in [checkout.start() for _ in range(4)])
    assert (checkout.path / "log").read_text() == "in\nout\n" * 4, said
    assert not [*checkout.venv.glob("lock*")]
    assert len(re.findall(f"process {pid} of .*is gone: going on in its place", said)) == 1, said


def test_a_dot_venv_that_cannot_be_made_is_one_line(checkout):
    checkout.venv.touch()
    line = checkout.only_line()
    assert f"cannot write to {checkout.venv}" in line and "set PYTHON" in line


# ---- uv with pip's settings


LISTED = """\
:env:.find-links='/opt/wheels nowhere'
:env:.config-file='/dev/null'
:env:.disable-pip-version-check='1'
global.extra-index-url='file:///opt/a/simple https://user:word@host.example/simple'
global.find-links='/elsewhere'
global.cert='/etc/ssl/certs/ca.crt'
global.timeout='15'
install.timeout='180'
install.no-index='true'
global.constraint='/etc/constraints.txt'
global.trusted-host='host.example other.example:8080'
wheel.no-deps='true'
"""


def test_settings_of_pip_are_handed_to_uv(monkeypatch):
    monkeypatch.setattr(uv_install, "there", lambda place: place != "nowhere")
    settings = uv_install.read_settings(LISTED)
    assert settings["find-links"] == "/opt/wheels nowhere"  # the environment wins
    assert settings["timeout"] == "180"  # and then the command's own section
    variables, options, unlike = uv_install.translate(settings)
    assert variables == {
        "UV_INDEX": "file:///opt/a/simple https://user:word@host.example/simple",
        "UV_FIND_LINKS": "file:///opt/wheels",
        "SSL_CERT_FILE": "/etc/ssl/certs/ca.crt",
        "UV_HTTP_TIMEOUT": "180",
        "UV_CONSTRAINT": "/etc/constraints.txt",
        "UV_INSECURE_HOST": "host.example other.example:8080",
    }
    assert (options, unlike) == (["--no-index"], [])
    unknown = {"target": "/elsewhere", "prefer-binary": "false", "progress-bar": "off"}
    assert uv_install.translate(unknown) == ({}, [], ["target"])
    assert uv_install.translate({"proxy": "p", "no-index": "false"}) == ({}, [], ["proxy"])


def test_what_is_set_for_uv_wins():
    pips = {"UV_INDEX": "https://pip", "UV_HTTP_RETRIES": "9"}
    env = uv_install.environment(pips, {"UV_TORCH_BACKEND": "", "HOME": "/h"}, "/venv")
    assert env == pips | {
        "UV_CACHE_DIR": "/venv/uv-cache",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_PYTHON_DOWNLOADS": "never",
        "HOME": "/h",
    }  # without UV_TORCH_BACKEND: empty, uv would not take it
    own = {"UV_CACHE_DIR": "/cache", "UV_EXTRA_INDEX_URL": "https://uv", "UV_HTTP_RETRIES": "2"}
    env = uv_install.environment(pips, own | {"UV_PYTHON": "3"}, "/venv")
    assert own.items() <= env.items()
    assert "UV_INDEX" not in env  # it has another name, which the user has set
    assert "UV_PYTHON" not in env  # it is to be .venv


# ---- real installs


@pytest.fixture(scope="session")
def uv_wheel(tmp_path_factory) -> Path:
    """uv itself, as pip gets it on this machine."""
    folder = tmp_path_factory.mktemp("uv")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "uv", "-d", folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    require(done.returncode == 0, f"pip cannot get uv: {done.stderr[-200:]}")
    (path,) = folder.glob("uv-*.whl")
    return path


@LONG
def test_without_uv_pip_installs_and_says_why(checkout):
    checkout.fill_wheels()
    err = checkout.says()
    assert "making" in err and "5.5 GB" in err
    assert "uv is not used (pip cannot get it: No matching distribution found for uv)" in err
    seen = Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi")
    assert bool(seen) == ("UV_TORCH_BACKEND=cpu set, it would be some 200 MB" not in err)
    assert not checkout.begun.exists() and not checkout.lock.is_symlink()
    assert checkout.says() == ""

    # An install by hand that was cut short: what else is there stays.
    shutil.rmtree(site(checkout.venv) / "torch-99.dist-info")
    assert "pip failed" in checkout.fails(PIP_FIND_LINKS="/nowhere")[-1]
    assert "making" not in checkout.says()
    assert (site(checkout.venv) / "torch-99.dist-info/RECORD").exists()

    shutil.rmtree(site(checkout.venv) / "PIL")  # damage that pip does not see
    assert checkout.fails()[-1].endswith(f"remove {checkout.venv} and start again")


@LONG
def test_uv_makes_it_and_adds_to_it(uv_wheel, tmp_path):
    odd = Checkout(tmp_path / "a folder, é" / "checkout")
    odd.fill_wheels(size=20)
    # pip parts its list of folders at spaces: a link without one leads there.
    wheels = tmp_path / "wheels"
    wheels.symlink_to(odd.wheels)
    shutil.copy(uv_wheel, odd.wheels)
    home = tmp_path / "home"
    home.mkdir(mode=0o555)
    how = {"PIP_FIND_LINKS": wheels, "LC_ALL": "C", "HOME": home}
    err = odd.says(**how)
    assert "Installed 5 packages" in err and "uv is not used" not in err
    assert not (odd.venv / "uv-cache").exists()
    assert (site(odd.venv) / "torch-99.dist-info/INSTALLER").read_text().strip() == "uv"
    assert list(home.iterdir()) == []

    err = odd.says("extra", **how)  # one package is added, and no other touched
    assert "Installed 1 package" in err and "torch" not in err
    assert not odd.begun.exists()

    # An index that uv cannot read, a setting that it does not know: pip goes on, and it is said.
    odd.wheel("further")
    err = odd.says("further", **how, UV_FIND_LINKS="/nowhere")
    assert "uv is not used (see above): pip installs" in err
    odd.wheel("another")
    err = odd.says("another", **how, PIP_PREFER_BINARY=1)
    assert "pip is told prefer-binary, which uv does not know" in err


@LONG
def test_a_build_that_uv_is_told_to_take_is_not_replaced_by_pips(checkout, uv_wheel):
    checkout.fill_wheels()
    last = checkout.fails(UV_TORCH_BACKEND="cpu")[-1]
    assert "UV_TORCH_BACKEND=cpu is for uv, which failed (pip cannot get it: No matching" in last
    shutil.copy(uv_wheel, checkout.wheels)
    *lines, last = checkout.fails(UV_TORCH_BACKEND="no-such-build")
    assert "with PyTorch's build for no-such-build" in "".join(lines)
    assert "UV_TORCH_BACKEND=no-such-build is for uv, which failed (see above)" in last
    assert not (site(checkout.venv) / "torch").exists()


@LONG
def test_what_does_not_work_is_said_before_it_is_used(checkout, uv_wheel):
    checkout.fill_wheels()
    shutil.copy(uv_wheel, checkout.wheels)
    text = "operator torchvision::nms does not exist"
    checkout.wheel("torchvision", code=f"raise RuntimeError({text!r})\n")
    last = checkout.fails()[-1]
    assert f"does not work (RuntimeError: {text})" in last
    assert checkout.begun.exists()


# Moments of an install in their order, each by what is there from then on.
MOMENTS = {
    "the lock is taken": lambda c: c.lock.is_symlink(),
    "the environment is begun": lambda c: c.begun.exists(),
    "the environment is made": lambda c: (c.venv / "bin/pip").exists(),
    "uv is half there": lambda c: (c.venv / "bin/uv").exists(),
    "the first package is half there": lambda c: any(
        (site(c.venv) / module).exists() for module in REQUIRED.values()
    ),
    "a package has metadata": lambda c: any(site(c.venv).glob("[tmp]*-99.dist-info")),
    "all have metadata": lambda c: len([*site(c.venv).glob("*-99.dist-info/RECORD")]) == 5,
    "all have been tried": lambda c: not c.begun.exists(),
}


@LONG
@pytest.mark.parametrize("tool", ["uv", "pip"])
def test_an_install_killed_at_any_moment_goes_on(checkout, uv_wheel, tool):
    """Killed at each of these moments, one after the other; each time the next start, in a copy
    of what the kill left, ends with everything that belongs there.
    """
    checkout.fill_wheels(300)
    if tool == "uv":
        shutil.copy(uv_wheel, checkout.wheels)
    names = []
    for name, reached in MOMENTS.items():
        if tool == "pip" and name.startswith("uv "):
            continue
        with checkout.start() as started:
            while started.process.poll() is None and not reached(checkout):
                time.sleep(0.001)
            if started.process.poll() is None:
                names.append(name)
        saved = checkout.path / "saved"
        shutil.copytree(checkout.venv, saved, symlinks=True)
        checkout.says()
        assert checkout.parts() == [300] * 5, f"killed when {name}"
        shutil.rmtree(checkout.venv)
        saved.rename(checkout.venv)
    assert len(names) >= 6, f"it was killed when {names} alone"


@LONG
@pytest.mark.parametrize("tool", ["uv", "pip"])
def test_further_package_that_is_half_there_is_put_there_again_and_nothing_else(
    checkout, uv_wheel, tool
):
    """As after a kill: its metadata is there, or a part of that, some of its files are not."""
    checkout.fill_wheels(20)
    if tool == "uv":
        shutil.copy(uv_wheel, checkout.wheels)
    checkout.says("extra")
    packages, info = site(checkout.venv), "extra-99.dist-info"
    before = (packages / "torch/part1.py").stat().st_ino
    (packages / "extra/part1.py").unlink()
    if tool == "pip":
        (packages / info / "RECORD").unlink()
    checkout.begun.write_text("extra\n")
    assert checkout.says() == ""  # whoever does not need it is not held up
    assert "installing extra" in checkout.says("extra")
    assert (packages / "extra/part1.py").exists() and (packages / info / "RECORD").exists()
    assert (packages / "torch/part1.py").stat().st_ino == before
    assert not checkout.begun.exists()


@LONG
def test_what_uv_left_half_is_installed_by_pip(checkout):
    """uv fails amid its links: the environment is made anew, without it."""
    checkout.fill_wheels(20)
    half = checkout.path / "half/lib/python3/site-packages"
    half.mkdir(parents=True)
    put(checkout.path / "half", "torch", "torchvision")
    (half / "torchvision-99.dist-info/RECORD").unlink()
    uv = f"""[ "$1" = --version ] && exit 0
    cd "${{0%/bin/uv}}"/lib/python3*/site-packages
    cp -r '{half}/.' .
    exit 1"""
    checkout.program("half-uv", uv)
    # what pip would get stands in .venv as soon as there is one
    get = f"cp '{checkout.programs}/half-uv' \"$venv/bin/uv\""
    checkout.replace("get_uv || true", f"{get}; get_uv || true")
    assert "uv is not used (see above): pip installs" in checkout.says()
    assert checkout.parts() == [20] * 5


def test_a_signal_ends_what_it_started_and_leaves_no_lock(checkout):
    checkout.python3('"-m venv"*) exec sleep 99')
    with checkout.start() as started:
        wait_until(checkout.begun.exists, 20, "the install")
        time.sleep(0.2)
        started.signal(signal.SIGTERM)  # to the shell alone
        started.finish(30, expect=143)
    assert not checkout.lock.is_symlink()


@LONG
def test_another_user_without_a_home():
    require(os.geteuid() == 0 and shutil.which("setpriv"), "needs root, to become somebody else")
    # Somebody who may read everything, as this Python may lie in root's own folder.
    reads = "+dac_read_search"
    user = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    user += (f"--inh-caps={reads}", f"--ambient-caps={reads}")
    before = (*user, "bash", "-c", 'umask 077; exec "$@"', "bash")
    with tempfile.TemporaryDirectory(prefix="demo-env-") as folder:
        os.chmod(folder, 0o755)  # pytest's own is for its user alone
        made = Checkout(Path(folder, "checkout"))
        made.fill_wheels()
        for path in (made.path, *made.path.rglob("*")):
            shutil.chown(path, 65534, 65534)
        err = made.says(before=before, HOME="/nonexistent")
        assert "cache" not in err and "WARNING" not in err
        assert made.venv.stat().st_uid == 65534 and made.venv.stat().st_mode & 0o077 == 0
