"""A copy of the launchers beside stand-ins for what they start."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from support.nodes import NamespacePair
from support.processes import ROOT, WITH_STAND_IN, Started


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

    def env(self, node: int | None = None, **variables: object) -> dict[str, str]:
        """With torchrun's stand-in; of one of two nodes, if `node` says so."""
        env = {"PYTHON": sys.executable, **WITH_STAND_IN}
        if node is not None:
            env |= {"NNODES": 2, "NODE_RANK": node, "MASTER_ADDR": NamespacePair.addresses[0]}
            env |= {"CONNECT_TIMEOUT": 40, "GPUS_PER_NODE": 1}
        return {name: str(value) for name, value in (env | variables).items()}

    def start_on(
        self, nodes: NamespacePair, node: int, *arguments: object, **variables: object
    ) -> Started:
        """launch_multinode.sh on one of two nodes."""
        command = ["bash", self.path / "launch_multinode.sh", *arguments]
        env = self.env(node, **variables)
        return nodes.popen(node, command, env=env, cwd=self.path)
