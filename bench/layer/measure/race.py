"""One cell: every system captured, then replayed on the same routings, in turns of A B and B A."""

import math
import time

from measure import cells, numbers
from measure.case import FORWARDS
from peers import Unfit

HOST_CALLS = 200
REASON_MAX = 300  # characters


class Contestant:
    """A system in one cell."""

    def __init__(self, system, device):
        self.system, self.device, self.replay, self.absent = system, device, None, None
        self.us, self.times, self.error, self.unquantised = [], [], None, None
        self.number = None

    def get_ready(self, case):
        """What cannot be prepared or captured takes no part, and the reason is kept."""
        self.number = case.number
        try:
            self.system.prepare(case)
            self.replay = self.device.capture(
                [lambda forward=forward: self.system.run(forward) for forward in range(FORWARDS)])
        except Unfit as error:
            self.give_up(str(error))
        except Exception as error:  # whatever somebody else's kernels raise
            self.give_up(f"{type(error).__name__}: {' '.join(str(error).split())}"[:REASON_MAX])

    def give_up(self, reason):
        self.absent = reason
        self.release()

    def release(self):
        if self.replay is not None:
            self.replay.reset()
            self.replay = None
        self.system.release()

    def race(self, separators_us, floor_us, name):
        us = (self.device.time(self.replay, name) - separators_us) / FORWARDS
        self.us.append(us)
        self.times.append(us / floor_us)

    def verify(self, answers, unquantised=None):
        """The worst forward of what the last replay wrote; poison left over makes it infinite."""
        def worst(wanted):
            errors = self.system.errors(wanted, self.replay.outputs)
            return max(error if math.isfinite(error) else math.inf for error in errors)

        self.error, self.unquantised = worst(answers), None
        if unquantised is not None and self.system.what == cells.WHOLE:
            self.unquantised = worst(unquantised)

    def result(self):
        """What was measured since the last call of this."""
        found = {"us": numbers.summary(self.us), "times": numbers.summary(self.times),
                 "error": numbers.finite(self.error),
                 "right": numbers.is_right(self.number, self.error, self.unquantised)}
        if self.unquantised is not None:
            found["error_unquantised"] = numbers.finite(self.unquantised)
        self.us, self.times, self.error, self.unquantised = [], [], None, None
        return found


def ready(systems, case, device, say):
    """(contestants that run, {name: why not} of the others)."""
    running, absent = [], {}
    for system in systems:
        contestant = Contestant(system, device)
        contestant.get_ready(case)
        if contestant.absent is None:
            running.append(contestant)
        else:
            absent[system.name] = contestant.absent
            say(f"  {system.name}: {contestant.absent}")
            device.collect()
    return running, absent


def warm(contestants, device, seconds):
    """Steady load, so that the clock is what such work leaves it at."""
    end = time.monotonic() + seconds
    while contestants and time.monotonic() < end:
        for contestant in contestants:
            contestant.replay.replay()
        device.synchronise()


def seed_of(cell, routing, number):
    """The same draws for the same cell in every run."""
    return hash_of(f"{cell.shape} {cell.tokens} {routing} {number}")


def hash_of(text):
    value = 1469598103934665603  # FNV-1a
    for byte in text.encode():
        value = (value ^ byte) * 1099511628211 % (1 << 64)
    return value >> 1


def answers_of(case):
    """Of every forward, and once more without quantising, or None where nothing is quantised."""
    found = [[case.answer(forward, case.some_tokens(), quantised) for forward in range(FORWARDS)]
             for quantised in ((True, False) if case.number == "fp8" else (True,))]
    return found if len(found) == 2 else (*found, None)


def replays(cell, routing, case, contestants, plan):
    """All replays of one routing; returns what the draws hit and allow."""
    hit_counts, floors = [], []
    for number in range(plan.replays):
        case.draw(seed_of(cell, routing, number), routing)
        for contestant in contestants:
            contestant.system.routed()
        hits = case.hits()
        floor_us = sum(cell.floor(hit)[0] for hit in hits) / len(hits)
        hit_counts += hits
        floors.append(floor_us)
        for contestant in numbers.turn(contestants, number):
            name = f"{contestant.system.name} {cell.shape} {cell.tokens} {routing}"
            contestant.race(plan.separators_us, floor_us, name)
            if number == plan.replays - 1:
                # Now, because systems share the tensor that they write.
                plan.device.synchronise()
                if plan.answers is None:
                    plan.answers = answers_of(case)
                contestant.verify(*plan.answers)
    plan.answers = None
    return hit_counts, floors


class Plan:
    """How a cell is measured; answers are those of the draw that is verified."""

    def __init__(self, device, count, separators_us):
        self.device, self.replays, self.separators_us = device, count, separators_us
        self.answers = None


def routing_result(cell, routing, case, contestants, plan, clocks):
    start = time.monotonic()
    hits, floors = replays(cell, routing, case, contestants, plan)
    found = {"routing": routing, "floor_us": numbers.summary(floors),
             "bound": cell.floor(numbers.quantile(hits, 0.5))[1],
             "experts_hit": numbers.summary(hits),
             "bytes_before_reuse": cells.bytes_before_reuse(case.sizes, case.number, hits,
                                                            case.sets),
             "clocks": clocks.between(start, time.monotonic()),
             "systems": {each.system.name: each.result() for each in contestants}}
    found["cold"] = found["bytes_before_reuse"] >= cells.REUSE_BYTES
    return found


def host_us(contestant, device):
    """Medians of the time after which a call returns, without a graph: in Python, and below."""
    def clock(call):
        found = []
        for _ in range(HOST_CALLS):
            start = time.perf_counter()
            call()
            found.append(1e6 * (time.perf_counter() - start))
            device.synchronise()  # or the queue fills, and a call waits for the GPU
        return numbers.quantile(found, 0.5)

    found = {"call": clock(lambda: contestant.system.run(0))}
    below = contestant.system.host_call()
    if below is not None:
        found["below_python"] = clock(below)
    return found


def run_cell(cell, case, systems, device, options, clocks, say):
    """Everything of one cell, as the JSON has it."""
    case.resize(cell.tokens)
    case.draw(seed_of(cell, "uniform", -1), "uniform")  # what the graphs are captured with
    device.synchronise()
    running, absent = ready(systems, case, device, say)
    plan = Plan(device, options.replays, device.separators(FORWARDS, numbers.REPLAYS_MIN))
    if cell.tokens >= cells.STEADY_TOKENS:
        warm(running, device, options.steady)
    found = {"shape": cell.shape, "tokens": cell.tokens, "format": cell.number, "bar": cell.bar,
             "stretch": cell.stretch, "flops": cell.sizes().flops(cell.tokens),
             "weight_sets": case.sets, "separators_us": plan.separators_us, "absent": absent,
             "routings": [routing_result(cell, routing, case, running, plan, clocks)
                          for routing in options.routing],
             "host_us": {each.system.name: host_us(each, device) for each in running}}
    device.synchronise()
    for contestant in running:
        contestant.release()
    device.collect()
    return found
