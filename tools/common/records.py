"""The formats of all lines and records that script and launchers write, read in this one place."""

import json
import re

ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\r\n]*(?:\x07|\x1b\\)?)")
PREFIX = re.compile(r"\[(GPU|CPU|MPS) (\d{1,6})\] ")
# Fixed numbers of decimals tell a whole number from one that was cut off.
LOSS = r"(-?inf|nan|-?\d{1,12}\.\d{4}(?!\d))"
STEP = re.compile(
    r"Epoch (\d{1,9}) \| Step (\d{1,9}) \| Loss: " + LOSS + r"(?: \| (\d{1,12}\.\d) img/s)?"
    r"(?: \| data (\d{1,12}\.\d) ms \| step (\d{1,12}\.\d) ms)?"
)
EPOCH = re.compile(r"Epoch (\d{1,9}) complete \| Avg loss: " + LOSS)
VALIDATION = re.compile(
    r"Epoch \d{1,9} validation \| Top-1: (\d{1,3}\.\d\d)%"
    r"(?: .*\| baseline (\d{1,3}\.\d\d)%)?"
)
END = re.compile(r"Cleanup complete\. Total wall time: [\dhms. ]*\((\d{1,12}\.\d{3})s\)")
STOP = re.compile(r"(Stopped\b.*|ERROR: .*)")
RECORD = re.compile(r"(Run|Probe|Summary) (\{.*)")
COUNTERS = re.compile(r"(?:^|\s)Counters (\{.*)")  # as tools/counters.py prints it
OURS = re.compile(  # not in the original demo's logs: records, rates, a launcher's start
    r"\] (Run|Probe|Summary)(:| \{)|\d img/s|\.(?:sh|py): \d{4}-\d\d-\d\d [\d:]{8} "
)
# A launcher's own lines: in old logs its record; a start; how it ended where it did not end well.
LAUNCHER = re.compile(
    r"(?:^|\s)[\w./-]+\.(?:sh|py): (?:Node (?P<node>\{.*)|(?P<start>\d{4}-\d\d-\d\d [\d:]{8}) "
    r"|failed\b.*; root cause:\s*(?P<cause>.*)|error: (?P<error>.+))"
)

# Fields of the records that no tool here reads, and why they are there.
FOR_PEOPLE = {
    "Run": {
        **dict.fromkeys(
            ("coco_image_path", "annotation_path", "val_image_path", "val_annotation_path"),
            "which data it was",
        ),
        **dict.fromkeys(("checkpoint", "timeout", "device"), "to start it so again"),
        "resume": "the same; logs.py alone reads it, to tell a restart from another run",
        **dict.fromkeys(("batch_size", "steps_per_epoch"), "parts of what is compared"),
        "powersgd_rank": "compared where the compression is powersgd",
        **dict.fromkeys(("versions.torch", "versions.cuda", "versions.nccl"), "compared as one"),
        "started": "when it was",
        "launcher": "who started the processes",
        "classes": "of the last layer: compared by the number of parameters",
        "images_without_annotations": "which images are left out, and",
        "padding": "which come twice: both change with the data set alone",
    },
    "Summary": {
        **dict.fromkeys(("epochs", "steps", "train_s"), "what the rate is of; for benchmark.py"),
        "ranks.step_ms": "the sum of a rank's parts",
        "weights_sha256": "whether two runs have learnt the same, bit for bit",
    },
    "Probe": {
        **dict.fromkeys(
            ("sizes", "sizes.bytes", "sizes.ms", "sizes.algbw_GBps", "sizes.busbw_GBps"),
            "the whole table, as nccl-tests has it",
        ),
        **dict.fromkeys(("algbw_GBps", "busbw_GBps"), "of the gradients' size, to compare"),
        **dict.fromkeys(
            ("nodes.interfaces.tx_bytes", "nodes.interfaces.rx_bytes"), "what wire_Gbps is from"
        ),
    },
    "Node": {
        "seconds": "how long the run took on this node",
        **dict.fromkeys(
            [f"interfaces.{name}" for name in ("kind", "speed_Gbps", "tx_bytes", "rx_bytes")],
            "what the run has sent and received; for benchmark.py",
        ),
    },
}


def decode(text):
    """The JSON object that a text begins with; an empty one where it is torn."""
    try:
        found = json.JSONDecoder().raw_decode(text)[0]
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def get(record, key, kind=float):
    """record[key] where it is of this kind, a number also finite and not below 0.

    Else None for a number, and an empty value of any other kind: damage can leave anything.
    """
    value = record.get(key)
    if kind not in (int, float):
        return value if isinstance(value, kind) else kind()
    good = type(value) in (int, float) and 0 <= value < 1e18
    return kind(value) if good and kind(value) == value else None


def objects(record, key):
    return [item for item in get(record, key, list) if isinstance(item, dict)]
