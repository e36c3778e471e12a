"""Commands of the pages, called in a real notebook."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from support.launchers import FAST, NOTEBOOK
from support.processes import LONG, ROOT, base_env, kill_leftover, new_test_id, require

OPTIONS = " ".join(FAST).replace("--log_every 1", "--log_every 5")
DATA = '--coco_image_path "$sample/train2017" '
DATA += '--annotation_path "$sample/annotations/instances_train2017.json"'
CELLS = {
    "torchrun": f"""!torchrun --standalone --local-addr=127.0.0.1 --nproc_per_node=1 \
"$root/demo_coco_resnet18.py" {DATA} {OPTIONS} --max_steps 3; echo exit code $?""",
    "two ranks, and pictures of their run and their answers": f"""%%bash
cd "$folder"
GPUS=2 RUN_NAME=run "$root/launch_single.sh" {DATA} {OPTIONS} --max_steps 3 --checkpoint end.pt
echo exit code $?
python "$root/tools/compare_logs.py" logs/run --plot compare.png
echo exit code $?
python "$root/tools/show_results.py" end.pt --output answers.png {DATA}
echo exit code $?""",
}


@LONG
@pytest.mark.guards("notebook-backend", "notebook-results")
def test_a_notebook_trains_with_two_ranks_and_draws(sample, tmp_path, monkeypatch):
    missing = [name for name in ("nbclient", "ipykernel") if not importlib.util.find_spec(name)]
    require(not missing, f"a notebook needs {missing}")
    import nbclient
    import nbformat

    test_id = new_test_id()
    variables = {"folder": str(tmp_path), "root": str(ROOT), "sample": str(sample)}
    env = base_env(
        test_id, NOTEBOOK | variables | {"PYTHON": sys.executable, "PYTHONWARNINGS": ""}
    )
    cells = [nbformat.v4.new_code_cell(text) for text in CELLS.values()]
    notebook = nbformat.v4.new_notebook(cells=cells)
    try:
        nbclient.NotebookClient(notebook, timeout=300).execute(env=env, cwd=str(tmp_path))
    finally:
        kill_leftover(test_id)
    for name, cell in zip(CELLS, cells, strict=True):
        out = "".join(output.get("text", str(output)) for output in cell.outputs)
        assert "Traceback" not in out, (name, out)
        assert out.count("exit code 0") == cell.source.count("exit code"), (name, out)
        assert "replicas identical: True" in out, (name, out)
    assert (tmp_path / "compare.png").stat().st_size > 10_000
    assert (tmp_path / "answers.png").stat().st_size > 10_000
