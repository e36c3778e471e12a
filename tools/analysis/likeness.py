"""Whether runs may be compared."""

# Settings of the Run record that must be the same,
MUST_MATCH = {
    "precision": "precision",
    "image_size": "image size",
    "dummy": "use of random images (--dummy)",
    "grad_compression": "compression",
}
# and those that may explain a difference but do not forbid the comparison.
OTHER_SETTINGS = ["backend", "seed", "weights", "lr", "compile", "workers", "threads"]
OTHER_SETTINGS += ["accumulate_steps", "checkpoint_every", "log_every", "lr_scaling", "sync_bn"]
OTHER_SETTINGS += ["warmup_steps", "bucket_cap_mb", "val_images", "versions", "devices"]
OF_CPUS = ("MALLOC_", "GOMP_", "OMP_WAIT")  # variables that change the speed of a CPU


def differences(base, run, scaling=False):
    """What keeps `run` from being compared with `base`, one text each.

    `scaling`: they may train other numbers of images, in other global batches.
    """
    facts = [one.record("Run") for one in (base, run)]
    pairs = [(MUST_MATCH.get(key, key), *(fact.get(key) for fact in facts)) for key in MUST_MATCH]
    own = {"images": "image count", "parameters": "model (parameters)"}
    if not scaling:
        own |= {"epochs": "epoch count", "global_batch": "global batch"}
        own |= {"steps": "number of steps", "processes": "number of processes"}
    pairs += [(text, getattr(base, name), getattr(run, name)) for name, text in own.items()]
    return [
        f"{text} differs: {a} in {base.name}, {b} in {run.name}"
        for text, a, b in pairs
        if None not in (a, b) and a != b
    ]


def other_settings(base, run):
    one, two = base.record("Run"), run.record("Run")
    found = [key for key in OTHER_SETTINGS if key in one and key in two and one[key] != two[key]]
    if base.processes != run.processes and "devices" in found:  # a list of them: of each rank
        kinds = [{str(device) for device in each.setting("devices", [])} for each in (base, run)]
        if kinds[0] == kinds[1]:
            found.remove("devices")
    if "env" in one and "env" in two:
        names = sorted({*one.get("env", {}), *two.get("env", {})})
        found += [n for n in names if n.startswith(OF_CPUS) and base.env(n) != run.env(n)]
    return found
