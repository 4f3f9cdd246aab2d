"""What the commands of the benchmarks take and say alike."""

import argparse
import json
import math
import os
import pathlib
import platform
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent.parent


class CannotRun(Exception):
    """Why there is nothing to measure."""


def say(text):
    print(text, file=sys.stderr, flush=True)


def show(found, as_json, report):
    """What was measured, on stdout: one JSON object, or as report prints it."""
    if as_json:
        print(json.dumps(found, indent=1, allow_nan=False))
    else:
        report(found)


def words(allowed):
    """An argparse type: a list with commas between, each of it once."""
    def split(text):
        found = [word for word in text.split(",") if word]
        unknown = [word for word in found if word not in allowed]
        if unknown or not found:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown) or 'nothing'} is none of "
                                             f"{', '.join(allowed)}")
        return list(dict.fromkeys(found))
    return split


def counts(what, least):
    """An argparse type: numbers with commas between, each once."""
    def split(text):
        found = [int(word) for word in text.split(",")]
        if min(found) < least:
            raise argparse.ArgumentTypeError(f"{what} are at least {least}")
        return list(dict.fromkeys(found))
    split.__name__ = what  # as argparse names what is no number
    return split


def at_least(least, kind=int, most=math.inf):
    """An argparse type: one number."""
    def read(text):
        try:
            value = kind(text)
        except ValueError:
            what = "whole number" if kind is int else "number"
            raise argparse.ArgumentTypeError(f"{text} is no {what}") from None
        if not value >= least:
            raise argparse.ArgumentTypeError(f"{text} is not {least} or more")
        if value > most:
            raise argparse.ArgumentTypeError(f"{text} is more than {most}")
        return value
    return read


def named_path(text):
    """An argparse type: a path that names something."""
    if not text:
        raise argparse.ArgumentTypeError("an empty path: name a file, or leave the option out")
    return text


def check_out(parser, path):
    """Ends in words where nothing can be written beside `path`, before anything is measured."""
    if not os.path.basename(path):
        parser.error(f"--out {path}: it ends with no name; .json and others are added to one")
    folder = pathlib.Path(path).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        parser.error(f"--out {path}: {error}")


def processor():
    """The name of this machine's, or its kind."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def commit():
    """Of this tree; None where git knows none."""
    try:
        told = subprocess.run(["git", "-C", str(ROOT), "describe", "--always", "--dirty"],
                              text=True, capture_output=True, check=False)
    except OSError:
        return None
    return told.stdout.strip() or None
