"""One layer on one device beside its peers, in one process: a JSON, a table and a plot.

    python3 bench/layer --plugin build/release/lib/libmoxie.so --out results

bench/README.md says what every number means and how peers are given. Progress goes to stderr. Exit
code 0: measured; 1: cannot measure here, or not Moxie; 2: usage; 3: a system computed wrong
numbers; 4: the anchors moved, so that nothing of the run counts.
"""

import argparse
import datetime
import json
import pathlib
import shlex
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(1, str(ROOT / "hosts" / "python"))

try:
    import torch
except ImportError:
    print("bench/layer needs torch", file=sys.stderr)
    sys.exit(1)

import moxie  # noqa: E402
from measure import cells, numbers, race, report  # noqa: E402
from measure.case import FORWARDS, ROUTINGS, Case  # noqa: E402
from measure.clocks import Clocks  # noqa: E402
from measure.command import (  # noqa: E402
    CannotRun, at_least, check_out, commit, counts, named_path, processor, say, words)
from measure.device import DEVICES, anchors  # noqa: E402
from peers import kinds, systems  # noqa: E402

ROOM_SHARE = 0.6  # of the free memory, for weights; the rest is for rows and what systems keep


def add_choices(parser):
    parser.add_argument("--device", choices=DEVICES, default="cuda", help="default: %(default)s")
    parser.add_argument("--format", choices=cells.NUMBERS, default="bf16",
                        help="of weights, and of rows if it has 16 bits; default: %(default)s")
    parser.add_argument("--shape", type=words(cells.SHAPES), help="default: all of the format's "
                        "table; on the CPU, tiny")
    parser.add_argument("--tokens", type=counts("tokens", 1), default=[],
                        help="default: those of the table")
    parser.add_argument("--routing", type=words(ROUTINGS), help="default: all; graphs are captured "
                        "at uniform routing whatever they are replayed with")
    names = [name for kind in kinds() for name in kind.names()]
    parser.add_argument("--systems", type=words(names), help="names with commas between; default: "
                        "all that there are")
    parser.add_argument("--quick", action="store_true",
                        help="four cells of q30b at uniform routing, unless told otherwise")
    parser.add_argument("--replays", type=at_least(1, most=10**6), default=numbers.REPLAYS_MIN,
                        help="of each routing and system; default: %(default)s, the fewest")
    parser.add_argument("--steady", type=at_least(0, float, 3600), default=2.0,
                        help="seconds of load before anchors, and before cells from "
                        f"{cells.STEADY_TOKENS} tokens; default: %(default)s")
    parser.add_argument("--drift", type=at_least(0, float, 100), help="most that an anchor may "
                        f"move; default: {numbers.DRIFT_MAX}, and {numbers.CPU_DRIFT_MAX} on the "
                        "CPU, whose memory other programs use, too")
    parser.add_argument("--memory-gb", type=at_least(0, float, 10**6), default=100.0,
                        help="most for weights; default: %(default)s")
    parser.add_argument("--seed", type=at_least(0, most=2**63 - 1), default=1,
                        help="of weights and rows")
    parser.add_argument("--threads", type=at_least(1, most=1024),
                        help="of torch and Moxie, on the CPU")


def parse(arguments):
    parser = argparse.ArgumentParser(prog="bench/layer", description=__doc__.splitlines()[0])
    add_choices(parser)
    parser.add_argument("--plugin", type=named_path,
                        help="libmoxie.so; default: MOXIE_PLUGIN of the environment")
    parser.add_argument("--other-plugin", type=named_path, metavar="PATH",
                        help="another build, to race it: the system moxie_other")
    parser.add_argument("--triton-fused-moe", type=named_path, metavar="PATH", help="a folder with "
                        "vllm or sglang, or a file that defines fused_experts")
    parser.add_argument("--triton-configs", type=named_path, metavar="DIR",
                        help="tile files for it")
    parser.add_argument("--deep-gemm", type=named_path, metavar="PATH",
                        help="a folder with deep_gemm")
    parser.add_argument("--out", default="layer", help="path of the results without its ending: "
                        ".json, .md and .png are added; default: %(default)s")
    options = parser.parse_args(arguments)
    if options.replays < numbers.REPLAYS_MIN and options.device != "cpu":
        parser.error(f"--replays is at least {numbers.REPLAYS_MIN}")
    check_out(parser, options.out)
    if options.shape is None:
        full = ["q30b"] if options.quick else list(cells.BARS[options.format])
        options.shape = ["tiny"] if options.device == "cpu" else full
    if options.drift is None:
        on_cpu = options.device == "cpu"
        options.drift = numbers.CPU_DRIFT_MAX if on_cpu else numbers.DRIFT_MAX
    if options.routing is None:
        options.routing = ["uniform"] if options.quick else list(ROUTINGS)
    return options


def choose(options, device):
    """(systems that can be had, what the JSON says of all). CannotRun where Moxie, or what an
    option names, is among those that were asked for and cannot be had."""
    usable, described = [], []
    for system in systems(options, device):
        if options.systems and not system.is_among(options.systems):
            continue
        absent = system.available()
        if absent and system.has_to_be_there():
            raise CannotRun(f"{system.name}: {absent}")
        described.append({"name": system.name, "what": system.what, "absent": absent,
                          "version": system.version})
        if absent is None:
            usable.append(system)
    for each in described:
        if each["absent"]:
            say(f"skipped: {each['name']}: {each['absent']}")
    return usable, described


def describe(options, device):
    settings = {"device": options.device, "format": options.format, "replays": options.replays,
                "steady": options.steady, "drift": options.drift, "forwards": FORWARDS,
                "seed": options.seed}
    return {"what": "one layer beside its peers", "version": report.VERSION,
            "command": shlex.join(["python3", "bench/layer", *sys.argv[1:]]),
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "machine": {"cpu": processor(), **device.describe()},
            "versions": {"torch": torch.__version__, "moxie": moxie.__version__,
                         "commit": commit()},
            "settings": settings, "complete": False, "skipped": [], "cells": []}


def make_case(options, device, shape):
    """The weights of a shape, in as many sets as fit, or why there are none."""
    sizes = cells.SHAPES[shape]
    free = min(device.free_bytes() * ROOM_SHARE, options.memory_gb * 1e9)
    one = cells.set_bytes(sizes, options.format)
    sets = cells.sets_that_fit(one, free, FORWARDS)
    if sets == 0:
        return None, f"{shape}: one weight set takes {one / 1e9:.3f} GB of {free / 1e9:.3f}"
    if sets < FORWARDS:
        say(f"{shape}: {sets} weight sets of {one / 1e9:.1f} GB instead of {FORWARDS}")
    return Case(device, sizes, options.format, sets, options.seed), None


def write(found, options):
    """All of it anew, so that a run that is cut off leaves what it had."""
    pathlib.Path(options.out + ".json").write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")
    pathlib.Path(options.out + ".md").write_text(report.table(found))


def measure(options, device, found, usable, clocks):
    found["clocks"] = clocks.reason
    say("anchors")
    before = anchors(device, options.format, options.steady)
    found["anchors"] = {"before": before, "after": before}
    for shape in options.shape:
        case, reason = make_case(options, device, shape)
        if case is None:
            say(reason)
            found["skipped"].append(reason)
            continue
        for cell in cells.select(options.format, [shape], options.tokens, options.quick):
            say(f"{cell.shape} {cell.tokens}")
            found["cells"].append(
                race.run_cell(cell, case, usable, device, options, clocks, say))
            report.judge(found)
            write(found, options)
        del case
        device.collect()
    say("anchors")
    found["anchors"]["after"] = anchors(device, options.format, options.steady)
    found["complete"] = bool(found["cells"])


def main(arguments):
    options = parse(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        say("torch sees no GPU; --device cpu runs a small version of this")
        return 1
    if options.threads:
        torch.set_num_threads(options.threads)
    device = DEVICES[options.device]()
    try:
        usable, described = choose(options, device)
    except CannotRun as error:
        say(str(error))
        return 1
    found = describe(options, device)
    found["systems"] = described
    clocks = Clocks(device.gpu())
    try:
        with torch.no_grad():
            measure(options, device, found, usable, clocks)
    finally:
        clocks.stop()
    report.judge(found)
    wrong = report.faults(found)
    assert not wrong, wrong
    write(found, options)
    reason = report.plot(found, options.out + ".png")
    if reason:
        say(f"no plot: {reason}")
    print(report.table(found), end="")
    for text in ([f"rejected: {found['rejected']}"] if found["rejected"] else []) + found["wrong"]:
        say(text)
    lack = report.lack(found)
    if lack:
        say(lack)
        return 1
    return 4 if found["rejected"] else 3 if found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
