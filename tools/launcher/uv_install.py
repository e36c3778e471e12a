"""Runs `uv pip install` with pip's settings, which uv does not read; started by python_env.sh.

    VENV/bin/python uv_install.py VENV [ARGUMENT ...]     ARGUMENT: of `uv pip install`

What the user has set for uv (UV_INDEX, UV_CACHE_DIR, ...) wins. Exit code: uv's own; UNLIKE where
pip has a setting that uv cannot follow, which is named on stderr.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

UNLIKE = 10
# Settings of pip that do not change what is installed.
HARMLESS = {
    "break-system-packages",
    "cache-dir",
    "compile",
    "config-file",
    "disable-pip-version-check",
    "log",
    "no-cache-dir",
    "no-color",
    "no-compile",
    "no-input",
    "no-warn-script-location",
    "progress-bar",
    "quiet",
    "require-virtualenv",
    "root-user-action",
    "verbose",
}
# Those that uv has under another name. What is in neither, pip has to follow.
SAME = {
    "build-constraint": "UV_BUILD_CONSTRAINT",
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "constraint": "UV_CONSTRAINT",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "retries": "UV_HTTP_RETRIES",
    "timeout": "UV_HTTP_TIMEOUT",
    "trusted-host": "UV_INSECURE_HOST",
}


def read_settings(listed: str) -> dict[str, str]:
    """What `pip config list` printed, put together as pip does: the environment wins over the
    command's own section, and that over the section for all commands.
    """
    found = re.findall(r"^(global|install|:env:)\.([\w-]+)=(.*)$", listed, re.MULTILINE)
    found.sort(key=lambda item: ("global", "install", ":env:").index(item[0]))
    return {name: ast.literal_eval(value) for _, name, value in found}


def url(place: str) -> str:
    """A folder as a URL: uv parts its lists at commas or spaces."""
    if re.match(r"[a-z+]+:", place):
        return place
    return Path(place).expanduser().absolute().as_uri()


def there(place: str) -> bool:
    """False for a folder that does not exist: pip passes it over, uv ends there."""
    return bool(re.match(r"[a-z+]+:", place)) or Path(place).expanduser().exists()


def translate(settings: dict[str, str]) -> tuple[dict[str, str], list[str], list[str]]:
    """pip's settings as variables for uv, options for uv, and names that uv knows nothing of."""
    variables, options, unlike = {}, [], []
    for name, value in settings.items():
        several = value.split()
        if name == "index-url":
            variables["UV_DEFAULT_INDEX"] = url(value)
        elif name == "extra-index-url":
            variables["UV_INDEX"] = " ".join(map(url, several))
        elif name == "find-links":
            variables["UV_FIND_LINKS"] = ",".join(url(place) for place in several if there(place))
        elif name in SAME:
            variables[SAME[name]] = value
        elif name in HARMLESS or value.lower() in ("", "0", "false", "no", "off"):
            continue
        elif name == "no-index":
            options.append("--no-index")
        else:
            unlike.append(name)
    return {name: value for name, value in variables.items() if value}, options, unlike


def environment(variables: dict[str, str], environ: dict[str, str], venv: str) -> dict[str, str]:
    """The environment for uv: what the user has set for uv, then pip's settings, then ours."""
    ours = {
        "UV_CACHE_DIR": f"{venv}/uv-cache",  # on .venv's file system: uv links, and copies nothing
        "UV_HTTP_RETRIES": "1",  # where an index is out of reach, to try again takes long
        "UV_INDEX_STRATEGY": "unsafe-best-match",  # as pip: the best of all indexes
        "UV_PYTHON_DOWNLOADS": "never",
    }
    theirs = {
        name: value for name, value in environ.items() if value or not name.startswith("UV_")
    }
    result = ours | variables | theirs
    # Older names of the same two; where one is set, so is the user's choice.
    for name, older in (("UV_DEFAULT_INDEX", "UV_INDEX_URL"), ("UV_INDEX", "UV_EXTRA_INDEX_URL")):
        if environ.get(older) and not environ.get(name):
            result.pop(name, None)
    for name in ("UV_SYSTEM_PYTHON", "UV_PYTHON"):  # it is to be .venv
        result.pop(name, None)
    if "REQUESTS_CA_BUNDLE" in environ:  # pip reads it
        result.setdefault("SSL_CERT_FILE", environ["REQUESTS_CA_BUNDLE"])
    return result


def main(venv: str, *arguments: str) -> int:
    uv, python = f"{venv}/bin/uv", f"{venv}/bin/python"
    listed = subprocess.run(
        [python, "-m", "pip", "config", "list"], stdout=subprocess.PIPE, text=True
    )
    if listed.returncode:
        print("python_env.sh: pip does not tell its settings", file=sys.stderr)
        return UNLIKE
    variables, options, unlike = translate(read_settings(listed.stdout))
    if unlike:
        names = " and ".join(unlike)
        print(f"python_env.sh: pip is told {names}, which uv does not know", file=sys.stderr)
        return UNLIKE
    env = environment(variables, dict(os.environ), venv)
    return os.execve(uv, [uv, "pip", "install", "--python", python, *options, *arguments], env)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
