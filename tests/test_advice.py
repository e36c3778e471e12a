"""What tools/compare_logs.py advises: it fits the run, and nothing that the run has already."""

import pytest

from test_compare_logs import FREE, GIGABIT, as_text, compared, one_run

LINK = GIGABIT | {"stated_gbps": 1}  # a link that delivers what it states, and bounds the run
INPUT = {"data_ms": 300, "exposed_ms": 20}
OVERLAP = {"exposed_ms": 300.0}


def advice(options, kind, nodes=2, world=2, **facts):
    text = as_text(one_run(facts=facts, nodes=nodes, world=world, **options), kind)
    return "\n".join(compared(text)["verdicts"]["run0"].checks)


@pytest.mark.parametrize(
    ("options", "kind", "facts", "said", "not_said"),
    [
        (
            FREE,
            "GPU",
            {"precision": "fp32"},
            "--precision bf16 or fp16|--compile|--batch_size",
            "",
        ),
        (FREE, "GPU", {"precision": "bf16"}, "--compile", "--precision|avx512"),
        (FREE, "GPU", {"precision": "fp16", "compile": True}, "", "--precision|--compile"),
        # a CPU does not get fuller with a batch, and processes beside it would share its cores
        (FREE, "CPU", {"precision": "fp32"}, "avx512_bf16|more machines", "fp16|--batch_size"),
        (FREE, "CPU", {"precision": "bf16"}, "--compile", "--precision"),
        (FREE, "MPS", {"precision": "fp32"}, "bf16 or fp16", "avx512"),
        (LINK, "GPU", {}, "--grad_compression bf16 (half the bytes) or powersgd", "cores"),
        (LINK, "GPU", {"grad_compression": "bf16"}, "powersgd (a small part", "half the bytes"),
        (LINK, "GPU", {"grad_compression": "powersgd"}, "--accumulate_steps", "compression"),
        (LINK, "GPU", {"accumulate_steps": 4}, "--accumulate_steps 8 in place of 4", ""),
        (OVERLAP, "CPU", {}, "OMP_NUM_THREADS|a slow rank", ""),
        (OVERLAP, "GPU", {"grad_compression": "fp16"}, "powersgd", "OMP_NUM|half the bytes"),
        (INPUT, "GPU", {"workers": 2}, "--workers (now 2)|tools/prepare_coco.py", ""),
        (INPUT, "CPU", {}, "--workers, up to", "now"),
    ],
)
def test_advice_fits_the_run(options, kind, facts, said, not_said):
    found = advice(options, kind, **facts)
    assert all(words in found for words in said.split("|")), found
    assert not any(words in found for words in filter(None, not_said.split("|"))), found


@pytest.mark.parametrize(
    ("kind", "said", "not_said"),
    [("GPU", "nvidia-smi topo -m", "cores"), ("CPU", "fewer processes", "nvidia")],
)
def test_communication_inside_a_node(kind, said, not_said):
    found = advice(GIGABIT, kind, nodes=1)
    assert said in found and not_said not in found and "a faster link" not in found


def test_a_rank_that_is_waited_for_comes_first():
    """140 * 1.4 + 1 and 140 + 1 ms; what is exposed beyond the wait has causes of its own."""
    options = {"exposed_ms": 300.0, "busy": [1.4, 1]}
    found = advice(options, "CPU")
    assert found.startswith("rank 0 on n0: what else runs on its cores")
    assert "cores shared" in found and "compare compute times by rank" not in found
    assert advice(options, "GPU").startswith("rank 0 on n0: heat, clock and other load of its GPU")


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_what_keeps_nccl_from_adapters_is_said_of_nccl_alone(backend):
    """NETWORK=ethernet sets it, also where Gloo runs."""
    found = advice(LINK, "CPU", backend=backend, env={"NCCL_IB_DISABLE": "1"})
    assert ("without NCCL_IB_DISABLE=1" in found) == (backend == "nccl")


def test_a_rank_that_waits_for_images_is_sent_to_its_disk():
    ranks = [
        {"rank": rank, "data_ms": data, "compute_ms": 60.0, "exposed_ms": 1.0}
        for rank, data in enumerate((200.0, 1.0))
    ]
    summary = {"ranks": ranks, "data_ms": 100, "compute_ms": 60, "exposed_ms": 100, "step_ms": 260}
    assert advice({"summary": summary}, "GPU") == (
        "rank 0 on n0: it waits for images; its disk and load (`iostat -x 5`, `top`)"
    )


def test_exposed_communication_of_a_run_that_something_else_bounds():
    options = {"compute_ms": 140.0, "exposed_ms": 101.0, "probe_ms": 101.0}
    assert "the exposed communication: --grad_compression bf16" in advice(options, "CPU")
    found = advice(options, "CPU", grad_compression="powersgd")
    assert "exposed" not in found
