"""One layer over the GPUs of a machine, and its halves: a JSON, a table and a plot.

    python3 bench/ranks --moxie build/release/bin/moxie --out results/ranks

Every cell is a run of `moxie bench`; bench/README.md says what the numbers mean. Progress goes to
stderr. Exit code 0: measured; 1: cannot measure here, or a run failed; 2: usage; 4: a device was
not the same before and after a run, so that this run does not count.
"""

import argparse
import datetime
import json
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(1, str(ROOT / "bench" / "layer"))

import grid  # noqa: E402
import tables  # noqa: E402
from measure import numbers  # noqa: E402
from measure.clocks import Clocks  # noqa: E402
from measure.command import (  # noqa: E402
    at_least, check_out, commit, counts, named_path, say, words)

OPS = ("layer", "dispatch", "combine", "both")


def parse(arguments):
    parser = argparse.ArgumentParser(prog="bench/ranks", description=__doc__.splitlines()[0])
    parser.add_argument("--moxie", default=shutil.which("moxie"), help="the command; default: "
                        "that of the path")
    parser.add_argument("--plugin", type=named_path,
                        help="libmoxie.so; default: the command's own choice")
    parser.add_argument("--ranks", type=counts("ranks", 2), default=list(grid.RANKS),
                        help="default: 2,4,8, as far as there are GPUs")
    parser.add_argument("--gpus", type=at_least(0, most=1024),
                        help="how many there are; default: what nvidia-smi and "
                        "CUDA_VISIBLE_DEVICES say")
    parser.add_argument("--op", type=words(OPS), default=[], help="default: all")
    parser.add_argument("--dispatcher", help="default: that of the library")
    parser.add_argument("--quick", action="store_true", help="four cells")
    parser.add_argument("--shape", help="in the place of every shape, without bars")
    parser.add_argument("--tokens", type=counts("tokens", 1), default=[],
                        help="in the place of every list of tokens")
    parser.add_argument("--replays", type=at_least(1, most=10**6), default=numbers.REPLAYS_MIN,
                        help="of each cell, at least; default: %(default)s")
    parser.add_argument("--seconds", type=at_least(0, float, 3600), default=2.0,
                        help="of each cell")
    parser.add_argument("--drift", type=at_least(0, float, 100), default=numbers.DRIFT_MAX,
                        help="most that a device's rates may move; default: %(default)s")
    parser.add_argument("--out", default="ranks", help="path of the results without its ending: "
                        ".json, .md and .png are added; default: %(default)s")
    options = parser.parse_args(arguments)
    if options.moxie is None:
        parser.error("no command moxie in the path: name it by --moxie")
    check_out(parser, options.out)
    return options


def visible_gpus():
    """(how many, the name of the first, and what nvidia-smi calls it)."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0, None, None
    told = subprocess.run([program, "--query-gpu=name", "--format=csv,noheader"], text=True,
                          capture_output=True, check=False)
    names = told.stdout.split("\n")[:-1] if told.returncode == 0 else []
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = len(names) if shown is None else len([word for word in shown.split(",") if word])
    if not names:
        return 0, None, None
    first = shown.split(",")[0].strip() if shown else "0"  # a number or a UUID
    told = subprocess.run([program, f"--id={first}", "--query-gpu=name", "--format=csv,noheader"],
                          text=True, capture_output=True, check=False)
    name = told.stdout.strip() if told.returncode == 0 else names[0]
    return min(count, len(names)), name, first


def groups_of(options):
    """Those that differ in their tokens alone, as some do in one shape, are one."""
    tokens = {}
    for group in grid.select(options.op, options.quick):
        same = group._replace(shape=options.shape or group.shape, tokens=())
        tokens.setdefault(same, set()).update(options.tokens or group.tokens)
    return [group._replace(tokens=tuple(sorted(each))) for group, each in tokens.items()]


def command_of(group, ranks, options):
    command = [options.moxie, "bench", "--runner", "moxie_cuda", *group.arguments(ranks),
               "--replays", str(options.replays), "--seconds", f"{options.seconds:g}", "--json"]
    if options.dispatcher:
        command += ["--dispatcher", options.dispatcher]
    return command + (["--plugin", options.plugin] if options.plugin else [])


def run(command):
    """(the JSON of one run, why there is none)."""
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as trouble:
        return None, str(trouble)
    if told.returncode != 0:
        return None, told.stderr.strip() or f"exit code {told.returncode}"
    try:
        return json.loads(told.stdout), None
    except ValueError:
        return None, f"{command[0]} printed no JSON: is it moxie?"


def library_of(options):
    """(version and source of the library that is measured, why there is none)."""
    command = [options.moxie, "info", "--json"]
    told, trouble = run(command + (["--plugin", options.plugin] if options.plugin else []))
    build = {} if trouble else told.get("build", {})
    return " ".join(filter(None, (build.get("version"), build.get("source_id")))) or None, trouble


def write(found, options):
    found["rejected"] = tables.rejections(found["cells"], options.drift)
    for ending, text in ((".json", json.dumps(found, indent=1, allow_nan=False) + "\n"),
                         (".md", tables.table(found))):
        pathlib.Path(options.out + ending).write_text(text)


def describe(options, library, gpus, name, clocks):
    return {"what": "one layer over the GPUs of a machine", "version": tables.VERSION,
            "command": shlex.join(["python3", "bench/ranks", *sys.argv[1:]]),
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "machine": {"gpus": gpus, "gpu": name},
            "versions": {"commit": commit(), "library": library},
            "settings": {"replays": options.replays, "seconds": options.seconds,
                         "drift": options.drift, "dispatcher": options.dispatcher},
            "complete": False, "skipped": [], "failed": [], "rejected": [],
            "clocks": clocks.reason, "cells": []}


def measure(found, options, all_ranks, clocks):
    for ranks in all_ranks:
        for group in groups_of(options):
            what = f"{group.title()} over {ranks} GPUs"
            say(what)
            start = time.monotonic()
            document, trouble = run(command_of(group, ranks, options))
            if trouble is None:
                found["cells"] += tables.cells_of(group, document,
                                                  clocks.between(start, time.monotonic()))
            else:
                found["failed"].append(f"{what}: {trouble}")
                say(trouble)
            write(found, options)


def main(arguments):
    options = parse(arguments)
    gpus, name, first = visible_gpus()
    gpus = gpus if options.gpus is None else options.gpus
    all_ranks, skipped = grid.ranks_that_fit(gpus, options.ranks)
    if not all_ranks:
        say("; ".join(skipped))
        return 1
    library, trouble = library_of(options)
    if trouble:
        say(trouble)
        return 1
    clocks = Clocks(first)
    found = describe(options, library, gpus, name, clocks)
    found["skipped"] = skipped
    try:
        measure(found, options, all_ranks, clocks)
        found["complete"] = True
    finally:
        clocks.stop()
        write(found, options)
    absent = tables.plot(found, options.out + ".png")
    if absent:
        say(f"no plot: {absent}")
    print(tables.table(found), end="")
    if found["failed"]:
        return 1
    return 4 if found["rejected"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
