#!/usr/bin/env python3
"""Hosts of three generations on libraries of three generations: what works, what is refused, how.

    matrix.py DOCUMENT HOST HOST HOST PLUGIN PLUGIN PLUGIN [--write]

Hosts and plugins come in the order previous, current, future (see generations.py). What is seen is
compared with what is expected below, and printed as docs/compatibility.md, with which DOCUMENT is
compared; --write writes it instead.
"""

import json
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
GENERATIONS = ("previous", "current", "future")
OK, E_INVALID, E_UNSUPPORTED, E_VERSION = 0, 1, 2, 4
APPENDED = 8  # bytes that generations.py appends to a struct

# Pairs that work, with what the host says of the slot that future appends to moxie_api.
WORKS = {("previous", "previous"): "unknown", ("current", "current"): "unknown",
         ("current", "future"): "unseen", ("future", "current"): "absent",
         ("future", "future"): "7"}
WORDS = {"unknown": "works", "unseen": "works; what was appended stays unseen",
         "absent": "works; appended slots are absent, appended fields must be 0",
         "7": "works, with what was appended"}

failures = []


def expect(condition, what):
    if not condition:
        failures.append(what)


def run(host, *arguments):
    """{word: value} that a host printed."""
    done = subprocess.run([host, *arguments], capture_output=True, text=True, timeout=60)
    expect(done.returncode == 0, f"{host} {' '.join(arguments)}: exit {done.returncode}\n"
           f"{done.stdout}{done.stderr}")
    lines = (line.partition(" ") for line in done.stdout.splitlines())
    return {"code": "?", "step": "?", "text": "", **{word: value for word, _, value in lines}}


def version_of(ledger, generation):
    major, minor, patch = map(int, ledger["version"].split("."))
    return {"previous": (major, minor - 1, patch), "current": (major, minor, patch),
            "future": (major, minor, patch + 1)}[generation]


def dotted(numbers):
    return ".".join(map(str, numbers))


# ---- Versions that meet ----

def check_refusal(ledger, host, plugin, seen):
    """The refusal names both ranges and both builds; it comes back without what varies."""
    ours, theirs = (dotted(version_of(ledger, each)[:2]) for each in (host, plugin))
    match = re.search(r"(no common ABI: the host \((matrix-host \(\w+\))\) speaks (\S+) to (\S+), "
                      r"libmoxie \((\S+), )(\S+), [^)]+(\) speaks (\S+) to ([^;]+);.*)",
                      seen["text"])
    expect((seen["code"], seen["step"]) == (str(E_VERSION), "load") and match,
           f"{host} on {plugin}: not refused in words: {seen}")
    if not match:
        return seen["text"]
    named = (match[2], match[3], match[4], match[5], match[8], match[9])
    expect(named == (f"matrix-host ({host})", ours, ours, dotted(version_of(ledger, plugin)),
                     theirs, theirs), f"{host} on {plugin}: {seen['text']}")
    return f"{match[1]}COMMIT, COMPILER{match[7]}"


def versions_table(ledger, hosts, plugins):
    titles = {each: f"{each} {dotted(version_of(ledger, each))}" for each in GENERATIONS}
    lines = ["| host \\ library | " + " | ".join(titles.values()) + " |", "| --- " * 4 + "|"]
    refusals = []
    for host in GENERATIONS:
        cells = []
        for plugin in GENERATIONS:
            seen = run(hosts[host], plugins[plugin])
            later = WORKS.get((host, plugin))
            if later is None:
                refusals.append(check_refusal(ledger, host, plugin, seen))
                cells.append(f"refused, `MOXIE_E_VERSION` ({len(refusals)})")
                continue
            expect((seen["code"], seen["step"], seen.get("later")) == (str(OK), "end", later),
                   f"{host} on {plugin}: {seen}")
            expect(seen.get("plugin") == dotted(version_of(ledger, plugin)),
                   f"{host} on {plugin}: {seen}")
            cells.append(WORDS.get(seen.get("later"), "?"))
        lines.append(f"| {titles[host]} | " + " | ".join(cells) + " |")
    words = [f"{number}. {text}" for number, text in enumerate(refusals, 1)]
    return "\n".join(lines) + "\n", "\n".join(words) + "\n"


# ---- Structs of another size ----

def structs_of_a_host(ledger):
    """Every struct that a host fills or sizes, in the order of the ledger: the arguments of what a
    plugin offers, and what those point at."""
    structs = {each["name"]: each for each in ledger["structs"]
               if each["fields"][0]["name"] == "struct_size"}
    slots = ledger["functions"] + [field for name, struct in structs.items()
                                   if name.endswith("_api") for field in struct["fields"]
                                   if "slot" in field]
    types = [each["type"] for slot in slots for each in slot["parameters"]]
    found = set()
    while types:
        base, _, stars = types.pop().replace("const ", "").partition(" ")
        if stars == "*" and base in structs and base not in found:
            found.add(base)
            types += [field["type"] for field in structs[base]["fields"] if "slot" not in field]
    return [name for name in structs if name in found]


def refused(seen, name, code, words):
    """A refusal by `code` whose text holds all `words`; config has nowhere to write a text."""
    expect(seen["code"] == str(code) and seen["step"] != "load", f"{name}: {seen}")
    expect(name == "moxie_config_entry" or all(word in seen["text"] for word in words),
           f"{name}: {seen}, wanted {words}")
    printed = {E_INVALID: "MOXIE_E_INVALID", E_UNSUPPORTED: "MOXIE_E_UNSUPPORTED"}[code]
    return f"`{printed}` by `{seen['step']}`"


def works(seen, what):
    expect((seen["code"], seen["step"]) == (str(OK), "end"), f"{what}: {seen}")
    return "works"


def size_row(struct, hosts, plugins):
    name, size, published = struct["name"], struct["bytes"], struct["published_bytes"]
    offset = size + APPENDED - 1
    yield works(run(hosts["future"], plugins["future"], "short", name), f"older {name}")
    yield works(run(hosts["future"], plugins["current"]), f"newer {name}")
    yield refused(run(hosts["future"], plugins["current"], "tail", name), name, E_UNSUPPORTED,
                  [name, f"not zero at offset {offset}", f"knows {size} bytes"]) + f" at {offset}"
    yield works(run(hosts["future"], plugins["future"], "tail", name), f"known tail of {name}")
    short = run(hosts["current"], plugins["current"], "short", name)
    if size - APPENDED < published:
        yield refused(short, name, E_INVALID,
                      [f"struct_size is {size - APPENDED}", f"has {published} to 4096 bytes"])
    else:
        yield works(short, f"short {name}")


def error_row(struct, hosts, plugins):
    """It is written and not read: it never makes a call fail, at worst it gets no text."""
    older = run(hosts["future"], plugins["previous"], "short", struct["name"])
    expect("no common ABI" in older["text"], f"older moxie_error: {older}")
    short = run(hosts["current"], plugins["previous"], "short", struct["name"])
    expect((short["code"], short["text"]) == (str(E_VERSION), ""), f"short moxie_error: {short}")
    yield works(run(hosts["future"], plugins["future"], "short", struct["name"]), "older error")
    yield works(run(hosts["future"], plugins["current"]), "newer error")
    yield works(run(hosts["future"], plugins["current"], "tail", struct["name"]), "newer error")
    yield works(run(hosts["future"], plugins["future"], "tail", struct["name"]), "known tail")
    yield works(run(hosts["current"], plugins["current"], "short", struct["name"]),
                "short error") + ", without text"


def sizes_table(ledger, hosts, plugins):
    lines = ["| struct | published | older, shorter | newer, tail 0 | newer, tail not 0 | "
             "not 0, library as new | too short |", "| --- " * 7 + "|"]
    inbound = structs_of_a_host(ledger)
    walked = subprocess.run([hosts["current"], "structs"], capture_output=True, text=True,
                            timeout=60).stdout.split()
    expect(sorted(walked) == sorted(inbound), f"host.c walks {walked}, a host fills {inbound}")
    sizes = {each["name"]: each for each in ledger["structs"]}
    for name in inbound:
        row = error_row if name == "moxie_error" else size_row
        lines.append(f"| `{name}` | {sizes[name]['published_bytes']} | " +
                     " | ".join(row(sizes[name], hosts, plugins)) + " |")
    return "\n".join(lines) + "\n"


DOCUMENT = """# Compatibility

Written by the test `matrix`, which ran each cell; do not edit. To write it anew: `cmake --build
--preset dev --target compatibility`.

Hosts and libraries of three generations are built from this tree. *Current* is the tree.
*Previous* is ABI 0.(N-1), the same tree with another number: the number alone has to be refused.
*Future* is the same 0.N after appends: one slot at the end of every table of functions and one
field at the end of every other struct but DLPack's. *Works* means that the host went from load to
close, with a forward whose result was compared.

## Versions that meet

{versions}
The refusals, which name both ranges and both builds:

{refusals}
## Structs of another size

For every struct that a host hands over or sizes:

- *published*: its bytes in the first version of this 0.N, the least that is accepted;
- *older, shorter*: a library after the appends, and a host that passes the size before them;
- *newer*: a library before the appends, and a host that passes the size after them; with the
  appended bytes 0, with one that is not 0, and with one that is not 0 where the library knows it;
- *too short*: 8 bytes fewer than this tree's size, which works where a struct has grown.

A refusal's text names the offset of the byte, or both sizes (`config` has nowhere to write one). A
`moxie_error` is written and not read; one that is too short gets no text.

{sizes}"""


def main(arguments):
    write = arguments[-1:] == ["--write"]
    document, *files = arguments[:-1] if write else arguments
    hosts, plugins = dict(zip(GENERATIONS, files[:3])), dict(zip(GENERATIONS, files[3:]))
    ledger = json.loads((ROOT / "abi/ledger.json").read_text())
    versions, refusals = versions_table(ledger, hosts, plugins)
    made = DOCUMENT.format(versions=versions, refusals=refusals,
                           sizes=sizes_table(ledger, hosts, plugins))
    if write:
        pathlib.Path(document).write_text(made)
    seen = pathlib.Path(document).read_text() if pathlib.Path(document).exists() else ""
    if seen != made:
        pairs = zip(seen.splitlines() + [""], made.splitlines() + [""])
        line = next((number for number, (a, b) in enumerate(pairs, 1) if a != b), 1)
        failures.append(f"{document}:{line}: differs from what was seen: "
                        f"{made.splitlines()[line - 1]}\nwrite it again: cmake --build --preset dev"
                        " --target compatibility")
    print("\n".join(failures))
    return 1 if failures else 0


if __name__ == "__main__":
    if len(sys.argv) not in (8, 9):
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1:]))
