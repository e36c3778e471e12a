"""A copy of the launchers beside stand-ins for what they start."""

from __future__ import annotations

import shutil
from pathlib import Path

from support.processes import ROOT


class LauncherFolder:
    """A copy of the launchers and of tools/, with stand_in/script.py in the script's place."""

    def __init__(self, path: Path) -> None:
        self.path = path
        ignored = shutil.ignore_patterns("__pycache__", "probe_link.py")
        shutil.copytree(ROOT / "tools", path / "tools", ignore=ignored)
        for name in ("launch_single.sh", "launch_multinode.sh", "requirements.txt"):
            shutil.copy(ROOT / name, path)
        stand_in = ROOT / "tests" / "support" / "stand_in" / "script.py"
        shutil.copy(stand_in, path / "demo_coco_resnet18.py")
        self.plan("done")

    def plan(self, *actions: str) -> None:
        """What the script does: see its first lines."""
        (self.path / "plan").write_text(" ".join(actions))
