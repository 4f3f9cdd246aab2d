#!/usr/bin/env python3
"""The comment of every slot in abi.h, and of the exported function, ends in the tags that the header's
legend defines: [thread, order, graph; owner; since].
"""

import pathlib
import re
import sys

THREADS = {"any", "init", "serial"}
ORDERS = {"stream", "collective"}
GRAPHS = {"capturable", "eager"}
OWNER = re.compile(r"(host|plugin|caller)(, (destroy|close))?$")
SLOT = re.compile(r"^    [a-z][^/]*\(\*(\w+)\)\(|^int32_t (moxie_get_api_v1)\(")


def comment_above(lines, index):
    """The comment lines that end right above line `index`, attributes skipped, as one text."""
    while re.match(r"#|__attribute__", lines[index - 1]):
        index -= 1
    texts = []
    while index > 0 and lines[index - 1].lstrip().startswith("//"):
        index -= 1
        texts.insert(0, lines[index].lstrip()[2:].strip())
    return " ".join(texts)


def complaint(comment, version):
    """What is wrong with the comment's tags, or None."""
    match = re.search(r"\[([^\[\];]+); ([^\[\];]+); (\d+)\.(\d+)\]$", comment)
    if not match:
        return "the comment does not end in [thread, order, graph; owner; since]"
    words = match.group(1).split(", ")
    if len(words) < 2 or words[0] not in THREADS or words[-1] not in GRAPHS:
        return "thread tag first, graph tag last: " + match.group(1)
    if not set(words[1:-1]) <= ORDERS:
        return "unknown tag in: " + match.group(1)
    if not OWNER.match(match.group(2)):
        return "unknown owner: " + match.group(2)
    if (int(match.group(3)), int(match.group(4))) > version:
        return "since a version that is not there yet"
    return None


def main():
    text = pathlib.Path("abi.h").read_text()
    lines = text.splitlines()
    version = tuple(
        int(re.search(rf"#define MOXIE_VERSION_{part} (\d+)", text).group(1))
        for part in ("MAJOR", "MINOR")
    )
    slots = failed = 0
    for index, line in enumerate(lines):
        match = SLOT.match(line)
        if not match:
            continue
        slots += 1
        problem = complaint(comment_above(lines, index), version)
        if problem:
            print(f"abi.h:{index + 1}: {match.group(1) or match.group(2)}: {problem}")
            failed += 1
    pointers = len(re.findall(r"\(\*\w+\)\(", re.sub(r"//.*", "", text)))
    # one typedef and the callback inside parallel_for are no slots; the exported function is one
    if slots != pointers - 2 + 1:
        print(f"{pointers} function pointers in abi.h, and {slots} slots were understood")
        failed += 1
    return 1 if failed else 0


sys.exit(main())
