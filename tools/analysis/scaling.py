"""Runs with different numbers of processes: how much faster, and what eats the rest.

    speed-up    images/s / the base's; of repeats, see repeats.py, the medians, with the range that
                the slowest and the fastest runs of both give
    efficiency  speed-up x the base's processes / processes
    strong      the same global batch in all runs, however it is accumulated
    weak        the same images per process and step in all runs
    base        the fewest processes, of complete runs: the first over the run's own network, else
                the first
    ideal step  the base's step (weak), or that x the base's processes / processes (strong). Both
                are the base's step x images per process / the base's images per process
    lost        step - ideal step; and so for each part, which may also be shorter than ideal

No law is fitted.
"""

from dataclasses import dataclass, field

from analysis.repeats import values
from analysis.words import digits, ms, with_range

PARTS = {"compute": "compute_s", "data wait": "data_s", "exposed communication": "exposed_s"}
NETWORK_VARIABLES = ("NCCL_NET", "NCCL_IB_HCA", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
NAMED = 0.1  # a part with a smaller share of what is lost or saved is not named


@dataclass
class Scaled:
    """One run beside its base."""

    base: str
    speed_up: float
    between: tuple  # the lowest and highest speed-up of repeats
    efficiency: float
    ideal_s: float  # seconds of a step
    lost_s: dict = field(default_factory=dict)  # part of a step -> seconds; empty: not split
    says: str = ""

    @property
    def shown_speed_up(self):
        return with_range("{:.2f}".format, self.speed_up, self.between)


@dataclass
class Scaling:
    kind: str  # strong, weak, or empty: neither
    base: str = ""
    says: list = field(default_factory=list)  # about all runs
    runs: dict = field(default_factory=dict)  # name -> Scaled


def is_scaling(runs):
    return len({run.processes for run in runs if run.processes}) > 1


def scale(runs):
    """The Scaling of runs that differ in their number of processes."""
    able = [run for run in runs if run.complete and run.processes and run.img_per_s]
    fewest = min((run.processes for run in able), default=0)
    first = [run for run in able if run.processes == fewest]
    found = Scaling(kind_of(runs))
    if not is_scaling(able):
        text = "No speed-up: that needs complete runs, with a Summary, of two numbers of processes"
        found.says.append(f"{text}.")
        return found
    found.base = first[0].name
    for run in able:
        own = [other for other in first if network_of(other) == network_of(run)]
        base = (own or first)[0]
        scaled = beside(base, run)
        scaled.says = say_run(found.kind, base, run, scaled)
        found.runs[run.name] = scaled
    found.says = [*say_threads(able), say_kind(found.kind, able[0]), say_base(first[0], found)]
    if not any(run.repeats for run in able):
        found.says.append("One run each: how much such runs differ is not known.")
    left_out = [f"{run.name} ({run.status})" for run in runs if run not in able]
    if left_out:
        found.says.append(f"Without a speed-up: {', '.join(left_out)}.")
    return found


def kind_of(runs):
    """strong, weak, or empty."""
    known = [run for run in runs if run.processes and run.global_batch]
    if len({run.global_batch for run in known}) == 1:
        return "strong"
    return "weak" if len({run.global_batch / run.processes for run in known}) == 1 else ""


def differences(runs):
    """Why these runs are neither strong nor weak scaling: one text, or none."""
    known = [run for run in runs if run.processes and run.global_batch]
    if kind_of(runs) or not known:
        return []
    batches = ", ".join(f"{run.global_batch:,} in {run.name}" for run in known)
    each = ", ".join(f"{digits(run.global_batch / run.processes)} in {run.name}" for run in known)
    return [f"global batch differs: {batches}, and so do images per process and step: {each}"]


def same_training(runs):
    """Whether all complete runs train as many images with the same global batch."""
    return len({(run.global_batch, run.steps) for run in runs if run.complete}) < 2


def network_of(run):
    """What tells networks apart: what carried node 0's probe, else the variables that name it."""
    if run.nodes == 1:
        return ()
    if run.networks:
        return (run.networks[0].transport, *run.networks[0].names)
    return tuple(map(run.env, NETWORK_VARIABLES))


def beside(base, run):
    slow, fast = values(base, "img_per_s"), values(run, "img_per_s")
    between = min(fast) / max(slow), max(fast) / min(slow)
    speed_up = run.img_per_s / base.img_per_s
    efficiency = speed_up * base.processes / run.processes
    share = (run.global_batch / run.processes) / (base.global_batch / base.processes)
    found = Scaled(base.name, speed_up, between, efficiency, share * base.step_s)
    if base.has_split and run.has_split:
        found.lost_s = {
            # Without a minus before a zero.
            part: round(getattr(run, name) - share * getattr(base, name), 7) + 0.0
            for part, name in PARTS.items()
        }
    return found


# --- Sentences -----------------------------------------------------------------------------------


def say_threads(runs):
    """On CPUs first: other threads per process change the speed by themselves."""
    threads = {run.name: run.setting("threads", int) for run in runs if run.on_cpu}
    if len({count for count in threads.values() if count}) < 2:
        return []
    text = ", ".join(f"{count or '?'} in {name}" for name, count in threads.items())
    text = f"Threads per process differ: {text}. So a part of the differences comes from the "
    return [f"{text}threads, not from the number of processes. OMP_NUM_THREADS sets them."]


def say_kind(kind, run):
    if kind == "strong":
        text = f"Strong scaling: a step has {run.global_batch:,} images in every run, so each "
        return text + "process gets fewer of them."
    if kind == "weak":
        text = f"Weak scaling: each process has {digits(run.global_batch / run.processes)} images "
        text += "in a step in every run. The global batch grows, so the models train differently; "
        return text + "only the speed is compared."
    return "Neither strong nor weak scaling: only images/s are compared."


def say_base(first, found):
    bases = dict.fromkeys(scaled.base for scaled in found.runs.values())
    counted = f"{first.processes} process{'es' if first.processes > 1 else ''}"
    if len(bases) > 1:
        text = "Each network, and one node by itself, has its own base"
        return f"{text}, with {counted}: {', '.join(bases)}."
    return f"The base is {found.base}, with {counted}."


def say_run(kind, base, run, scaled):
    """How much faster, and what eats the rest."""
    if run is base:
        return ""
    if run.processes == base.processes:
        text = f"as many processes as {base.name}, with {scaled.shown_speed_up} times its images/s"
        return f"{text}."
    slower = ", slower than its base" if max(scaled.between) < 0.995 else ""
    times = f"{digits(run.processes / base.processes)} times the processes"
    text = f"{scaled.shown_speed_up} times the images/s of {base.name} with {times}{slower}: "
    text += f"an efficiency of {scaled.efficiency:.0%}. "
    if f"{scaled.efficiency:.0%}" == "100%":
        return f"{text}A step takes as long as is ideal."
    if not scaled.lost_s:
        return f"{text}The logs do not split a step: what eats the rest cannot be told."
    longer = {part: seconds for part, seconds in scaled.lost_s.items() if seconds > 0}
    shorter = {part: -seconds for part, seconds in scaled.lost_s.items() if seconds < 0}
    if not (shorter if scaled.efficiency > 1 else longer):  # a record is damaged
        return f"{text}Its images/s and its step times contradict each other."
    off_by = f"{ms(abs(run.step_s - scaled.ideal_s))} {{}} than the ideal {ms(scaled.ideal_s)}"
    if scaled.efficiency > 1:
        against = but("longer", longer, shorter)
        text += f"A step is {off_by.format('shorter')}. What is saved: "
        text += f"{shares(shorter, not against)}{against}"
        text += ". An efficiency above 100% usually means that something held up "
        return f"{text}{base.name}, here its {max(shorter, key=shorter.get)}."
    words = names_of_loss(kind, base, run)
    against = but("shorter", shorter, longer)
    text += f"A step is {off_by.format('longer')}. What eats the rest: "
    text += shares({words[part]: seconds for part, seconds in longer.items()}, not against)
    return f"{text}{against}.{say_accumulation(base, run)}"


def names_of_loss(kind, base, run):
    """What each part is called where it takes longer than ideal."""
    threads = [each.setting("threads", int) for each in (base, run)]
    if run.on_cpu and None not in threads and threads[0] != threads[1]:
        compute = f"compute, with {threads[1]} in place of {threads[0]} threads per process"
    elif kind == "strong":
        cores = ", or cores that other processes use" if run.on_cpu else ""
        compute = "compute that does not shrink with the batch (a step's fixed work, small "
        compute += f"batches{cores}, for example)"
    else:
        cores = " (processes share cores and memory, for example)" if run.on_cpu else ""
        compute = f"compute, which takes longer for the same images{cores}"
    exposed = run.exposed_name
    if kind == "strong" and abs(run.exposed_s - base.exposed_s) <= NAMED * base.exposed_s:
        exposed += " that does not shrink with the batch"
    if run.straggler is not None:
        exposed += f", a part of it waiting for rank {run.straggler}"
    return {"compute": compute, "data wait": "data wait", "exposed communication": exposed}


def say_accumulation(base, run):
    """With fewer batches a step, more of its backward passes send gradients."""
    steps = [each.setting("accumulate_steps", int) for each in (base, run)]
    if None in steps or steps[0] == steps[1]:
        return ""
    return f" (accumulate_steps is {steps[0]} in {base.name} and {steps[1]} here.)"


def shares(seconds, as_shares):
    """80% (16.0 ms) is exposed communication, 20% (4.0 ms) is data wait; without small parts.

    Without shares where other parts go against the sum: 16.0 ms is exposed communication.
    """
    total = sum(seconds.values())
    found = []
    for part in sorted(seconds, key=seconds.get, reverse=True):
        share = seconds[part] / total
        size = f"{share:.0%} ({ms(seconds[part])})" if as_shares else ms(seconds[part])
        if share >= NAMED:
            found.append(f"{size} is {part}")
    return ", ".join(found)


def but(how, seconds, beside):
    """What goes against the sum, where it counts."""
    least = NAMED * sum(beside.values())
    large = [part for part in seconds if seconds[part] >= least]
    return "".join(f"; {part} is {ms(seconds[part])} {how} than ideal" for part in large)
