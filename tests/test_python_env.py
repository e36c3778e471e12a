"""python_env.sh: which Python it takes, what it says before it makes one, how it makes .venv.

The packages are as small as packages can be, and lie in a folder that pip and uv are told of.
venv, pip, uv and bash are the real ones.
"""

from __future__ import annotations

import contextlib
import hashlib
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
from support.processes import LONG, ROOT, long, require, wait_until

FILES = ("python_env.sh", "python_check.py", "uv_install.py")
REQUIRED = {"torch": "torch", "torchvision": "torchvision", "pycocotools": "pycocotools"}
REQUIRED |= {"pillow": "PIL", "matplotlib": "matplotlib"}
# What the machine happens to have set for pip, uv or an environment must not disturb a test.
FOREIGN = re.compile(
    r"(PIP|UV|CONDA)_.*|PYTHON.*|VIRTUAL_ENV|CDPATH|SSL_CERT_FILE|REQUESTS_CA_BUNDLE"
)


def wheel(folder: Path, name: str, *modules: str, version: str = "99", size: int = 0) -> None:
    """Writes a wheel with modules of `size` files each."""
    info = f"{name}-{version}.dist-info"
    members = {f"{module}/__init__.py": "" for module in modules}
    for module in modules:
        members |= {f"{module}/part{i}.py": f"NUMBER = {i}\n" for i in range(size)}
    members[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    members[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    members[f"{info}/RECORD"] = "".join(f"{member},,\n" for member in [*members, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        for member, text in members.items():
            file.writestr(member, text)


def put(prefix: Path, *names: str, versions: dict[str, str] | None = None, record=True) -> None:
    """Packages as pip leaves them in an environment; `record` False: without their metadata."""
    (site,) = prefix.glob("lib/python*/site-packages")
    for name in names:
        module = site / REQUIRED.get(name, name)
        module.mkdir(exist_ok=True)
        (module / "__init__.py").touch()
        version = (versions or {}).get(name, "99")
        if record:
            info = site / f"{name}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            )
            (info / "RECORD").write_text(f"{module.name}/__init__.py,,\n")


class Checkout:
    """A folder with the files under test, on a machine on which no Python on PATH has torch."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.venv = path / ".venv"
        self.own = str(self.venv / "bin/python")
        (path / "tools/launcher").mkdir(parents=True)
        for name in FILES:
            shutil.copy(ROOT / "tools/launcher" / name, path / "tools/launcher")
        shutil.copy(ROOT / "requirements.txt", path)
        self.wheels = path / "wheels"
        self.wheels.mkdir()
        self.programs = path / "programs"
        self.programs.mkdir()
        self.program("python3", f'exec "{sys.base_prefix}/bin/python3" "$@"')
        environ = {name: value for name, value in os.environ.items() if not FOREIGN.match(name)}
        self.environ = environ | {
            "PATH": f"{self.programs}:/usr/bin:/bin",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.wheels),
            "PIP_CONFIG_FILE": os.devnull,
        }

    def program(self, name: str, text: str) -> None:
        (self.programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (self.programs / name).chmod(0o755)

    def no_venv(self) -> None:
        """From now on python3 can make no environment: what would make one ends at once."""
        text = (self.programs / "python3").read_text().partition("\n")[2]
        self.program("python3", f'case "$*" in *ensurepip*) exit 1;; esac\n{text}')

    def fill_wheels(self, size: int = 0) -> None:
        for name, module in REQUIRED.items():
            wheel(self.wheels, name, module, size=size)
        wheel(self.wheels, "extra", "extra")

    def replace(self, old: str, new: str) -> None:
        path = self.path / "tools/launcher/python_env.sh"
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    def environment(self, name: str = ".venv", *options: str) -> Path:
        """An environment without pip, which takes no time."""
        base = f"{sys.base_prefix}/bin/python3"
        command = [base, "-m", "venv", "--without-pip", *options, self.path / name]
        subprocess.run(command, check=True)
        return self.path / name

    def start(self, *packages: str, before: tuple = (), **variables: object) -> subprocess.Popen:
        return subprocess.Popen(
            [*before, "bash", "tools/launcher/python_env.sh", *packages],
            cwd=self.path,
            env=self.environ | {name: str(value) for name, value in variables.items()},
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def run(self, *packages: str, timeout: float = 120, **options: object) -> tuple[int, str, str]:
        """Exit code, stdout and stderr."""
        process = self.start(*packages, **options)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        return process.returncode, out, err

    def picture(self) -> dict[str, str]:
        """Every file under the folder, with what identifies its content."""
        files = [path for path in self.path.rglob("*") if path.is_file() and not path.is_symlink()]
        return {str(path): hashlib.md5(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture
def checkout(tmp_path):
    made = Checkout(tmp_path / "checkout")
    bare = subprocess.run([made.programs / "python3", "-c", "import torch"], capture_output=True)
    require(bare.returncode, "the Python under this environment has torch itself")
    return made


def one_line(result: tuple[int, str, str]) -> str:
    """The only line of a start that ended with an error."""
    code, out, err = result
    assert (code, out) == (1, ""), err
    assert err.count("\n") == 1, err
    assert err.startswith("python_env.sh: error: ")
    return err


# ---- an active environment


def test_an_active_environment_is_used_as_it_is(checkout):
    active = checkout.environment("active")
    put(active, "torch", "torchvision", "pycocotools", "pillow", record=False)
    before = checkout.picture()
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        assert checkout.run(**{name: active}) == (0, f"{active}/bin/python\n", "")
    assert checkout.run(PYTHON=active / "bin/python") == (0, f"{active}/bin/python\n", "")
    assert checkout.picture() == before
    (site,) = active.glob("lib/python*/site-packages")
    (site / "torch/__init__.py").unlink()  # an empty folder named torch is not torch
    (checkout.path / "torch").mkdir()  # nor is one in the working directory
    (checkout.path / "torch/__init__.py").touch()
    checkout.no_venv()
    code, out, err = checkout.run(VIRTUAL_ENV=active)
    assert (code, out) == (1, "")
    assert f"{active} has no torch: it stays as it is" in err.splitlines()[0]
    assert "python3 cannot make virtual environments" in err.splitlines()[-1]


@pytest.mark.parametrize("name", ["VIRTUAL_ENV", "PYTHON", "PATH"])
def test_an_active_environment_that_lacks_something_is_named_before_anything_is_made(
    checkout, name
):
    active = checkout.environment("active")
    put(active, "torch", "torchvision", "pillow")
    value = {"VIRTUAL_ENV": active, "PYTHON": active / "bin/python"}
    value["PATH"] = f"{active}/bin:{checkout.environ['PATH']}"
    python = active / "bin" / ("python3" if name == "PATH" else "python")
    before = checkout.picture()
    line = one_line(checkout.run("extra", **{name: value[name]}))
    assert f"{python} has no pycocotools; no extra." in line
    assert f"({python} -m pip install pycocotools extra)" in line
    assert f"set PYTHON={checkout.own} (or deactivate" in line
    assert checkout.picture() == before and not checkout.venv.exists()


def test_torch_that_is_too_old_is_named_with_both_versions(checkout):
    active = checkout.environment("active")
    versions = {"torch": "2.8.0a0+5228986c39.nv25.06", "torchvision": "0.25.1"}
    put(active, "torch", "torchvision", "pycocotools", "pillow", versions=versions)
    line = one_line(checkout.run(VIRTUAL_ENV=active))
    assert f"torch {versions['torch']}, and 2.11 or newer is needed; torchvision 0.25.1" in line
    assert "pip install 'torch>=2.11' 'torchvision>=0.26')" in line


def test_versions_are_compared_as_numbers():
    assert python_check.release("2.8.0a0+5228986c39.nv25.06") == (2, 8)
    assert python_check.release("2.11.0+cu130") == python_check.release("2.11rc1") == (2, 11)
    assert python_check.release("2.9") < python_check.release("2.11") < python_check.release("3.0")
    required = python_check.read_requirements(ROOT / "requirements.txt")
    assert list(required) == list(REQUIRED)
    assert required["torch"] == "2.11" and required["torchvision"] == "0.26"


@LONG
def test_the_way_out_that_the_line_names_takes_dot_venv(checkout):
    active = checkout.environment("active")
    put(active, "torch")
    put(checkout.environment(), *REQUIRED)
    # A .venv that is there is used, and it is said why the active one is not.
    code, out, err = checkout.run(VIRTUAL_ENV=active)
    assert (code, out) == (0, checkout.own + "\n")
    assert f".venv is used, for {active}/bin/python has no torchvision; no pycoco" in err
    for own in (checkout.own, ".venv/bin/python"):
        assert checkout.run(VIRTUAL_ENV=active, PYTHON=own) == (0, checkout.own + "\n", "")
    # And where it is not there, it is made: here that ends at once.
    shutil.rmtree(checkout.venv)
    checkout.no_venv()
    for own in (checkout.own, ".venv/bin/python"):
        line = one_line(checkout.run(VIRTUAL_ENV=active, PYTHON=own))
        assert "python3 cannot make virtual environments" in line


def test_a_python_that_cannot_be_used_is_named(checkout):
    line = one_line(checkout.run(PYTHON="/nowhere/python"))
    assert "PYTHON is '/nowhere/python', which is no program" in line
    active = checkout.environment("active")
    line = one_line(checkout.run(PYTHON=active / "bin/python"))
    assert f"PYTHON is '{active}/bin/python', and {active} has no torch: it has to be" in line
    line = one_line(checkout.run(PYTHON="/bin/false"))
    assert "PYTHON is '/bin/false': it has to be Python 3.10 or newer" in line
    assert not checkout.venv.exists()


@pytest.mark.parametrize(
    ("program", "text"),
    [
        (
            'case "$*" in *version_info*) exit 1;; --version) echo Python 3.6;; *) exit 1;; esac',
            "no Python 3.10 or newer on PATH (python3 is Python 3.6)",
        ),
        (
            'case "$*" in *ensurepip*) exit 1;; *version_info*) exit 0;; *) exit 1;; esac',
            "install python3-venv",
        ),
    ],
)
def test_what_is_missing_to_make_one_is_said_in_one_line(checkout, program, text):
    for name in ("python3", "python", *(f"python3.{minor}" for minor in range(10, 15))):
        checkout.program(name, program if "venv" in text or name == "python3" else "exit 1")
    assert text in one_line(checkout.run())
    assert not checkout.venv.exists()


def test_an_exported_cdpath_changes_nothing(checkout):
    put(checkout.environment(), *REQUIRED)
    process = subprocess.run(
        ["bash", "tools/launcher/python_env.sh"],
        cwd=checkout.path,
        env=checkout.environ | {"CDPATH": ".:/tmp"},
        text=True,
        capture_output=True,
    )
    assert (process.returncode, process.stdout) == (0, checkout.own + "\n"), process.stderr


# ---- .venv: whole or not


def test_a_whole_dot_venv_is_used_and_nothing_is_written(checkout):
    put(checkout.environment(), *REQUIRED)
    for marker in (
        None,
        "".join(f"{name}\n" for name in REQUIRED),
    ):  # by an earlier version; by this
        if marker:
            (checkout.venv / "whole").write_text(marker)
        before = checkout.picture()
        assert checkout.run() == (0, checkout.own + "\n", "")
        assert checkout.picture() == before


def says(venv: Path, *command: str) -> tuple[int, str]:
    """What python_check.py says with .venv's own interpreter."""
    process = subprocess.run(
        [venv / "bin/python", ROOT / "tools/launcher/python_check.py", venv.parent, *command],
        capture_output=True,
        text=True,
    )
    return process.returncode, process.stdout.removeprefix(f"{venv}/bin/python ").strip()


def test_a_package_of_dot_venv_counts_with_its_record_and_in_the_marker(checkout):
    venv, marker = checkout.environment(), checkout.venv / "whole"
    assert says(venv, "check")[0] == python_check.OWN
    put(venv, *REQUIRED)
    assert says(venv, "check")[0] == 0
    (record,) = venv.glob("lib/python*/site-packages/torch-99.dist-info/RECORD")
    text = record.read_text()
    record.unlink()  # pip had not come to it
    assert says(venv, "check") == (python_check.OWN, "has no torch")
    record.write_text(text)
    # uv writes RECORD with the files: where there is a marker, what it does not name is not whole.
    marker.write_text("torch\npillow\n")
    missing = "has no whole torchvision; no whole pycocotools; no whole matplotlib"
    assert says(venv, "check") == (python_check.OWN, missing)
    # Before an install nothing of what belongs together counts any more, after it everything.
    says(venv, "begin")
    assert marker.read_text() == ""
    assert says(venv, "end")[0] == 0
    assert marker.read_text().split() == [*REQUIRED]
    assert says(venv, "check")[0] == 0
    # A further package, of which the others know nothing.
    assert says(venv, "check", "extra") == (python_check.FURTHER, "has no extra")
    put(venv, "extra")
    assert says(venv, "check", "extra") == (python_check.FURTHER, "has no whole extra")
    says(venv, "begin", "extra")
    assert marker.read_text().split() == [*REQUIRED]
    says(venv, "end", "extra")
    assert marker.read_text().split() == [*REQUIRED, "extra"]
    says(venv, "end")
    assert set(marker.read_text().split()) == {*REQUIRED, "extra"}


# ---- the lock


def owner(pid: int, host: str = "", user: str = "") -> str:
    user = user or subprocess.run(["id", "-un"], capture_output=True, text=True).stdout.strip()
    space = ""
    with contextlib.suppress(OSError):
        space = os.readlink("/proc/self/ns/pid")
    return f"{user}\n{host or f'{os.uname().nodename} {space}'}\n{pid}\n2026-01-01 00:00:00\n"


def locked(checkout: Checkout, text: str | None) -> Path:
    """A .venv that lacks everything, under a lock; its owner's text, None: it has none."""
    checkout.environment()
    lock = checkout.venv / "lock"
    lock.mkdir()
    if text is not None:
        (lock / "owner").write_text(text)
    return lock


@pytest.fixture
def installer():
    """A process that a lock can name: a shell that waits, as python_env.sh does."""
    command = ["bash", "-c", "read -r; :", "python_env.sh"]  # a child would outlive it
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("elsewhere", [True, *long(False)])
def test_a_second_start_waits_until_the_first_is_done(checkout, installer, elsewhere):
    pid, host = installer.pid, os.uname().nodename
    if elsewhere:  # its number says nothing here
        host = "node7"
        with subprocess.Popen(["true"]) as gone:
            pid = gone.pid
    lock = locked(checkout, owner(pid, host="node7" if elsewhere else ""))
    process = checkout.start()
    line = process.stderr.readline()
    assert f"waiting for process {pid} of " in line and f" on {host}, which" in line
    assert f"remove the folder {lock}" in line
    put(checkout.venv, *REQUIRED)  # what the first one does, and then
    shutil.rmtree(lock)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (0, checkout.own + "\n", "")
    assert not lock.exists()


def test_waiting_has_an_end(checkout, installer):
    checkout.replace("patience=3600", "patience=1")
    lock = locked(checkout, owner(installer.pid, host="node7"))
    code, out, err = checkout.run()
    assert (code, out, err.count("\n")) == (1, "", 2)
    last = err.splitlines()[-1]
    assert "after 1 s still waiting for process" in last
    assert last.endswith(f"remove the folder {lock}")
    assert lock.is_dir()


def lock_alone(checkout: Checkout) -> None:
    """Leaves the lock of python_env.sh alone: each start holds it for a moment, and says so. It is
    as slow as $NAMING, $TAKING and $HOLDING say, in seconds.
    """
    path = checkout.path / "tools/launcher/python_env.sh"
    text = path.read_text()
    for code, slower in (
        ("grace=10", "grace=${GRACE:-3}"),
        ("claim() {\n", 'claim() {\n    sleep "${NAMING:-0}"\n'),
        ('look_at "$1" # the', 'sleep "${TAKING:-0}"\n    look_at "$1" # the'),
    ):
        assert text.count(code) == 1, code
        text = text.replace(code, slower)
    hold = 'take_lock\necho in >>log\nsleep "${HOLDING:-0.2}"\necho out >>log\n'
    path.write_text(text[: text.index("# ---- which Python")] + "trap leave_lock EXIT\n" + hold)


@pytest.mark.parametrize(
    "killed", ["gone", "nameless", *long("taken by another program", "twice")]
)
def test_of_several_that_find_a_dead_lock_one_has_it_at_a_time(checkout, killed):
    gone = subprocess.Popen(["true"])
    gone.wait()
    pid = os.getpid() if killed == "taken by another program" else gone.pid
    lock = locked(checkout, owner(pid) if killed != "nameless" else None)
    if killed == "twice":  # who took it over was killed before it wrote its name
        (lock / "next").mkdir()
    lock_alone(checkout)
    started = [checkout.start() for _ in range(3)]
    lines = [process.communicate(timeout=60)[1] for process in started]
    assert [process.returncode for process in started] == [0] * 3, lines
    assert (checkout.path / "log").read_text() == "in\nout\n" * 3
    assert not [*checkout.venv.glob("lock*")]
    said = [
        re.search(f"process {pid} of .*is gone: going on in its place", line) for line in lines
    ]
    assert sum(map(bool, said)) == (killed in ("gone", "taken by another program")), lines


@pytest.mark.parametrize(
    "other",
    [{"HOLDING": 2}, *long({}, {"TAKING": 0.4}, {"TAKING": 1.5}, {"TAKING": 1.5, "NAMING": 1})],
    ids=str,
)
def test_lock_whose_maker_is_slow_to_name_itself_has_one_owner_at_a_time(checkout, other):
    """Another takes the maker for one that was killed; which of the two is first may differ."""
    checkout.environment()
    lock_alone(checkout)
    maker = checkout.start(NAMING=1)
    wait_until((checkout.venv / "lock").exists, 10, "the lock")
    both = [maker, checkout.start(GRACE=0, **other)]
    said = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert (checkout.path / "log").read_text() == "in\nout\n" * 2
    assert not [*checkout.venv.glob("lock*")]


# A file system that cannot be written, for this command alone.
READ_ONLY = 'mount --bind . "$0" && mount -o remount,bind,ro "$0" && cd "$0" && exec "$@"'


def test_a_checkout_that_cannot_be_written(checkout):
    active = checkout.environment("active")
    put(active, "torch", "torchvision", "pycocotools", "pillow")
    before = ()
    if os.geteuid() == 0:  # root may write where no other may
        before = ("unshare", "--mount", "bash", "-c", READ_ONLY, checkout.path)
        allowed = subprocess.run([*before, "true"], cwd=checkout.path, capture_output=True)
        require(allowed.returncode == 0, "needs mount namespaces, as root")
    checkout.path.chmod(0o555)
    try:
        python = active / "bin/python"
        assert checkout.run(before=before, PYTHON=python) == (0, f"{python}\n", "")
        line = one_line(checkout.run(before=before))
        assert f"cannot write to {checkout.venv}" in line and "set PYTHON" in line
    finally:
        checkout.path.chmod(0o755)


# ---- uv with pip's settings


LISTED = """\
:env:.find-links='/opt/wheels nowhere'
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
    assert options == ["--no-index"]
    assert unlike == []


def test_a_setting_of_pip_that_uv_does_not_know_is_named():
    settings = {"target": "/elsewhere", "prefer-binary": "false", "progress-bar": "off"}
    assert uv_install.translate(settings) == ({}, [], ["target"])


def test_what_is_set_for_uv_wins(tmp_path):
    variables = {
        "UV_INDEX": "https://pip.example",
        "UV_HTTP_RETRIES": "9",
        "HTTPS_PROXY": "http://p",
    }
    venv = str(tmp_path)
    env = uv_install.environment(variables, {"UV_TORCH_BACKEND": "", "HOME": "/h"}, venv)
    assert env["UV_CACHE_DIR"] == f"{venv}/uv-cache"
    assert env["UV_INDEX_STRATEGY"] == "unsafe-best-match"
    assert env["UV_HTTP_RETRIES"] == "9" and env["UV_INDEX"] == "https://pip.example"
    assert env["HOME"] == "/h" and "UV_TORCH_BACKEND" not in env  # empty, uv would not take it
    own = {
        "UV_CACHE_DIR": "/cache",
        "UV_EXTRA_INDEX_URL": "https://uv.example",
        "UV_PYTHON": "3.9",
    }
    own |= {"HTTPS_PROXY": "http://other", "UV_HTTP_RETRIES": "2"}
    env = uv_install.environment(variables, own, venv)
    assert env["UV_CACHE_DIR"] == "/cache" and env["UV_HTTP_RETRIES"] == "2"
    assert env["UV_EXTRA_INDEX_URL"] == "https://uv.example" and "UV_INDEX" not in env
    assert "UV_PYTHON" not in env  # it is to be .venv
    assert env["HTTPS_PROXY"] == "http://p"  # a variable of both: here pip's own setting wins


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


@pytest.fixture
def odd(tmp_path):
    """A checkout in a folder whose name has a space and an accent."""
    return Checkout(tmp_path / "a folder, é" / "checkout")


@LONG
def test_without_uv_pip_installs_and_says_why(checkout):
    checkout.fill_wheels()
    code, out, err = checkout.run()
    assert (code, out) == (0, checkout.own + "\n"), err
    assert "making" in err and "5.5 GB" in err
    assert "uv is not used (pip cannot get it: No matching distribution found for uv)" in err
    seen = Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi")
    assert bool(seen) == ("UV_TORCH_BACKEND=cpu set, it would be some 200 MB" not in err)
    assert (checkout.venv / "whole").read_text().split() == [*REQUIRED]
    assert not (checkout.venv / "begun").exists() and not (checkout.venv / "lock").exists()
    assert checkout.run() == (0, checkout.own + "\n", "")

    # An install by pip, in an environment of an earlier version, that was cut short.
    (checkout.venv / "whole").unlink()
    shutil.rmtree(site(checkout) / "torch-99.dist-info")
    code, _, err = checkout.run(PIP_FIND_LINKS="/nowhere")
    assert code == 1 and "pip failed" in err.splitlines()[-1]
    code, out, err = checkout.run()
    assert (code, out) == (0, checkout.own + "\n"), err
    assert "making" not in err and (site(checkout) / "torch-99.dist-info/RECORD").exists()

    shutil.rmtree(site(checkout) / "PIL")  # damage that pip does not see
    code, _, err = checkout.run()
    assert code == 1
    assert err.splitlines()[-1].endswith(f"remove {checkout.venv} and start again")


@LONG
def test_uv_makes_it_and_adds_to_it(odd, uv_wheel, tmp_path):
    odd.fill_wheels(size=20)
    # pip parts its list of folders at spaces: a link without one leads there.
    wheels = tmp_path / "wheels"
    wheels.symlink_to(odd.wheels)
    shutil.copy(uv_wheel, odd.wheels)
    home = tmp_path / "home"
    home.mkdir(mode=0o555)
    how = {"PIP_FIND_LINKS": wheels, "LC_ALL": "C", "HOME": home}
    code, out, err = odd.run(**how)
    assert (code, out) == (0, odd.own + "\n"), err
    assert "Installed 5 packages" in err and "uv is not used" not in err
    assert not (odd.venv / "uv-cache").exists()
    assert (site(odd) / "torch-99.dist-info/INSTALLER").read_text().strip() == "uv"
    assert list(home.iterdir()) == []

    code, out, err = odd.run("extra", **how)  # one package is added, and no other touched
    assert (code, out) == (0, odd.own + "\n"), err
    assert "Installed 1 package" in err and "torch" not in err
    assert set((odd.venv / "whole").read_text().split()) == {*REQUIRED, "extra"}

    # An index that uv cannot read: pip goes on, and it is said.
    wheel(odd.wheels, "further", "further")
    code, out, err = odd.run("further", **how, UV_FIND_LINKS="/nowhere")
    assert (code, out) == (0, odd.own + "\n"), err
    assert "uv is not used (see above): pip installs" in err
    wheel(odd.wheels, "another", "another")
    code, out, err = odd.run("another", **how, PIP_PREFER_BINARY=1)
    assert (code, out) == (0, odd.own + "\n"), err
    assert "pip is told prefer-binary, which uv does not know" in err


@LONG
def test_a_build_that_uv_is_told_to_take_is_not_replaced_by_pips(checkout, uv_wheel):
    checkout.fill_wheels()
    code, out, err = checkout.run(UV_TORCH_BACKEND="cpu")
    assert (code, out) == (1, "")
    last = err.splitlines()[-1]
    assert "UV_TORCH_BACKEND=cpu is for uv, which failed (pip cannot get it: No matching" in last
    shutil.copy(uv_wheel, checkout.wheels)
    code, out, err = checkout.run(UV_TORCH_BACKEND="no-such-build")
    assert (code, out) == (1, "")
    assert "with PyTorch's build for no-such-build" in err
    assert "UV_TORCH_BACKEND=no-such-build is for uv, which failed (see above)" in err
    assert not (site(checkout) / "torch").exists()


@LONG
def test_what_does_not_work_is_said_before_it_is_used(checkout, uv_wheel):
    checkout.fill_wheels()
    shutil.copy(uv_wheel, checkout.wheels)
    path = checkout.wheels / "torchvision-99-py3-none-any.whl"
    text = 'raise RuntimeError("operator torchvision::nms does not exist")\n'
    with zipfile.ZipFile(path) as old:
        members = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(path, "w") as new:
        for name, content in members.items():
            new.writestr(name, text if name == "torchvision/__init__.py" else content)
    code, out, err = checkout.run()
    assert (code, out) == (1, "")
    last = err.splitlines()[-1]
    assert "does not work (RuntimeError: operator torchvision::nms does not exist)" in last
    assert (checkout.venv / "whole").read_text() == ""


def site(checkout: Checkout) -> Path:
    return next(iter(checkout.venv.glob("lib/python*/site-packages")), checkout.venv / "none")


def moments(uv: bool) -> dict[str, object]:
    """Moments of an install in their order, each by what is there from then on."""
    by_uv = {
        "uv is half there": lambda c: (c.venv / "bin/uv").exists(),
        "uv has begun": lambda c: (c.venv / "uv-cache").exists(),
    }
    return {
        "the lock has no name": lambda c: (c.venv / "lock").exists(),
        "the lock has a name": lambda c: (c.venv / "lock/owner").exists(),
        "the environment is begun": lambda c: (c.venv / "begun").exists(),
        "pip is half there": lambda c: (site(c) / "pip").exists(),
        "the environment is made": lambda c: (c.venv / "whole").exists(),
        **(by_uv if uv else {}),
        "the first package is half there": lambda c: any(
            (site(c) / module).exists() for module in REQUIRED.values()
        ),
        "a package has metadata": lambda c: any(site(c).glob("[tmp]*-99.dist-info")),
        "all have metadata": lambda c: len([*site(c).glob("*-99.dist-info/RECORD")]) == 5,
        "all are marked": lambda c: "torch" in (c.venv / "whole").read_text(),
    }


@LONG
@pytest.mark.parametrize("tool", ["uv", "pip"])
def test_an_install_killed_at_any_moment_goes_on(checkout, uv_wheel, tool):
    """Killed at each of these moments, one after the other; each time the next start, in a copy
    of what the kill left, ends with everything that belongs there.
    """
    size = 300
    checkout.fill_wheels(size)
    checkout.replace("grace=10", "grace=3")
    if tool == "uv":
        shutil.copy(uv_wheel, checkout.wheels)
    names = []
    for name, reached in moments(tool == "uv").items():
        process = checkout.start()
        while process.poll() is None and not reached(checkout):
            time.sleep(0.001)
        if process.poll() is None:
            names.append(name)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        saved = checkout.path / "saved"
        shutil.copytree(checkout.venv, saved, symlinks=True)
        code, out, err = checkout.run()
        assert (code, out) == (0, checkout.own + "\n"), f"killed when {name}: {err}"
        for module in REQUIRED.values():
            parts = [*(site(checkout) / module).glob("part*.py")]
            assert len(parts) == size, f"killed when {name}: {module} has {len(parts)} files"
            assert all(part.stat().st_size for part in parts), f"killed when {name}: {module}"
        shutil.rmtree(checkout.venv)
        saved.rename(checkout.venv)
    assert len(names) >= 6, f"it was killed when {names} alone"


def parts(checkout: Checkout) -> list[int]:
    """How many files each required package has."""
    return [len([*(site(checkout) / name).glob("part*.py")]) for name in REQUIRED.values()]


@LONG
@pytest.mark.parametrize("begun", ["before the metadata", "after it, as where links keep times"])
def test_what_was_half_linked_is_linked_again(checkout, uv_wheel, begun):
    """As after a kill while uv links: a package's metadata is there, some of its files are not."""
    checkout.fill_wheels(20)
    shutil.copy(uv_wheel, checkout.wheels)
    assert checkout.run()[0] == 0
    (checkout.venv / "whole").write_text("pillow\n")
    (checkout.venv / "begun").touch()
    if begun == "before the metadata":
        os.utime(checkout.venv / "begun", (0, 0))
    for part in (*(site(checkout) / "torch").glob("part1*.py"), site(checkout) / "PIL/part1.py"):
        part.unlink()
    (site(checkout) / "torchvision-99.dist-info/RECORD").unlink()
    code, _, err = checkout.run()
    assert code == 0, err
    assert parts(checkout) == [20] * 5
    assert not (checkout.venv / "begun").exists() and not (checkout.venv / "lock").exists()


@LONG
def test_what_uv_left_half_is_installed_by_pip(checkout):
    """uv fails amid its links: of one package all metadata is there, of another a part."""
    checkout.fill_wheels(20)
    half = """#!/bin/sh
    [ "$1" = --version ] && exit 0
    cd "${0%/bin/uv}"/lib/python3*/site-packages
    for package in torch torchvision; do
        info=$package-99.dist-info
        mkdir "$package" "$info"
        touch "$package/__init__.py"
        printf 'Metadata-Version: 2.1\\nName: %s\\nVersion: 99\\n' "$package" >"$info/METADATA"
    done
    echo torch/__init__.py,, >torch-99.dist-info/RECORD
    touch -d 2001-01-01 torch-99.dist-info # a link or a clone may keep its time
    exit 1
    """
    uv = checkout.path / "half-uv"
    uv.write_text(half)
    uv.chmod(0o755)
    # what pip would get stands in .venv as soon as there is one
    checkout.replace("get_uv; then", f"cp '{uv}' \"$venv/bin/uv\" && get_uv; then")
    code, out, err = checkout.run()
    assert (code, out) == (0, checkout.own + "\n"), err
    assert "uv is not used (see above): pip installs" in err
    assert parts(checkout) == [20] * 5


def test_a_signal_ends_what_it_started_and_leaves_no_lock(checkout):
    text = (checkout.programs / "python3").read_text().partition("\n")[2]
    checkout.program("python3", f'case "$*" in "-m venv"*) exec sleep 99;; esac\n{text}')
    process = checkout.start()
    wait_until(lambda: (checkout.venv / "begun").exists(), 20, "the install")
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)  # to the shell alone
    _, err = process.communicate(timeout=30)
    assert process.returncode == 143, err
    assert not (checkout.venv / "lock").exists()


@pytest.fixture
def public():
    """A folder to which others may go: pytest's own is for its user alone."""
    folder = Path(tempfile.mkdtemp(prefix="demo-env-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@LONG
def test_another_user_without_a_home(public):
    require(os.geteuid() == 0 and shutil.which("setpriv"), "needs root, to become somebody else")
    made = Checkout(public / "checkout")
    made.fill_wheels()
    for path in (made.path, *made.path.rglob("*")):
        shutil.chown(path, 65534, 65534)
    # Somebody who may read everything, as this Python may lie in root's own folder.
    reads = "+dac_read_search"
    user = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    user += (f"--inh-caps={reads}", f"--ambient-caps={reads}")
    before = (*user, "bash", "-c", 'umask 077; exec "$@"', "bash")
    code, out, err = made.run(before=before, HOME="/nonexistent")
    assert (code, out) == (0, made.own + "\n"), err
    assert "cache" not in err and "WARNING" not in err
    assert made.venv.stat().st_uid == 65534 and made.venv.stat().st_mode & 0o077 == 0


@LONG
def test_two_starts_at_once_install_once(checkout):
    """With the pip of the Python underneath, so that no environment has to get one."""
    pip = subprocess.run([checkout.programs / "python3", "-m", "pip"], capture_output=True)
    require(pip.returncode == 0, "the Python under this environment has no pip")
    checkout.fill_wheels()
    checkout.environment(".venv", "--system-site-packages")
    started = [checkout.start() for _ in range(2)]
    results = [(*process.communicate(timeout=60), process.returncode) for process in started]
    assert [(out, code) for out, _, code in results] == [(checkout.own + "\n", 0)] * 2, results
    lines = [err for _, err, _ in results]
    assert sum("installing requirements.txt into" in err for err in lines) == 1, lines
    assert sum("waiting for process" in err for err in lines) == 1, lines
