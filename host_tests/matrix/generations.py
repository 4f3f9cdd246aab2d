#!/usr/bin/env python3
"""Writes the files of another generation of Moxie, made from those of this one, into a folder.

    generations.py previous|future FOLDER

previous: the ABI version before this one, 0.(N-1). future: this 0.N after appends, one to every
struct that may grow: a slot at the end of each table of functions, which the library fills, and a
field named `later` at the end of every other struct. Nothing else of the tree is changed.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "abi" / "ledger"))

import outputs  # noqa: E402
from header import FROZEN, Header  # noqa: E402

# Where the tables are filled.
ENTRIES = ("abi/entry.c", "abi/entry_runner.c", "abi/entry_dispatcher.c")

LATER = """
#define MOXIE_LATER 1
// What stands in the appended slots.
static inline int32_t moxie_later(void) { return 7; }

"""


def renumber(text, part, step):
    """abi.h with MOXIE_VERSION_<part> changed by `step`."""
    def bump(match):
        return f"{match.group(1)}{int(match.group(2)) + step}"
    return re.sub(rf"(#define MOXIE_VERSION_{part} )(\d+)", bump, text)


def appended(struct, version):
    """What a later version adds to a struct, 8 bytes."""
    if struct.endswith("_api") or struct == "moxie_host":
        return (f"    // Answers 7. [any, eager; caller; {version}]\n"
                "    int32_t (*later)(void);")
    if struct.endswith("_info"):
        return f"    const char *later;  // [since {version}]"
    return f"    uint64_t later;  // [since {version}]"


def future_header(text):
    text = renumber(text, "PATCH", 1)
    header = Header(text)
    lines = text.splitlines()
    for struct, line in sorted(header.ends.items(), key=lambda end: -end[1]):
        if struct not in FROZEN:
            lines.insert(line, appended(struct, header.version))
    text = "\n".join(lines) + "\n"
    return text.replace("// ---- Status ---", LATER + "// ---- Status ---", 1)


def fill_tables(sources, ledger):
    """The library's tables with their appended slot, as whoever appends one would write it."""
    filled = set()

    def fill(match):
        filled.add(match.group(1))
        value = '""' if match.group(1).endswith("_info") else "moxie_later"
        return f"{match.group(0)} .later = {value},"

    for path, text in sources.items():
        sources[path] = re.sub(r"\.struct_size = sizeof\((moxie_(?:\w+_)?(?:api|info))\),", fill,
                               text)
    missing = {struct["name"] for struct in ledger["structs"]
               if struct["name"].endswith(("_api", "_info"))} - filled
    if missing:
        sys.exit(f"no initialiser of {', '.join(sorted(missing))} in {', '.join(sources)}")


def main(generation, folder):
    abi = (ROOT / "abi.h").read_text()
    sources = {path: (ROOT / path).read_text() for path in ENTRIES}
    if generation == "previous":
        ledger = Header(abi).ledger()
        abi = renumber(abi, "MINOR", -1)
    else:
        abi = future_header(abi)
        ledger = Header(abi).ledger()
        fill_tables(sources, ledger)
    made = {"abi.h": abi, "abi/layout_table.h": outputs.layout_table(ledger), **sources}
    loader = (ROOT / "abi/loader.c").read_text()
    made["abi/loader.c"] = outputs.splice("abi/loader.c", loader, outputs.loader_rows(ledger))
    for path, text in made.items():
        path = pathlib.Path(folder) / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("previous", "future"):
        sys.exit(__doc__)
    main(*sys.argv[1:])
