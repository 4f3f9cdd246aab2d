"""What is generated from the ledger: each function below returns the text of one file or region."""

import json
import textwrap

from header import FROZEN, HeaderError

BEGIN, END = "---- generated", "---- end of what is generated"
COMMAND = "python3 abi/ledger"
MARK = f"Generated from abi.h by `{COMMAND}`; do not edit."


def rows_of(ledger):
    """(structure, field, offset, size) in the order of the library's self-report."""
    for struct in ledger["structs"]:
        yield struct["name"], "", 0, struct["bytes"]
        for field in struct["fields"]:
            yield struct["name"], field["name"], field["offset"], field["size"]


def digest(ledger):
    """FNV-1a, as layout_digest() in abi/layout.c."""
    value = 0xCBF29CE484222325
    for structure, field, offset, size in rows_of(ledger):
        row = f"{structure}\0{field}\0".encode()
        row += offset.to_bytes(4, "little") + size.to_bytes(4, "little")
        for byte in row:
            value = (value ^ byte) * 0x100000001B3 % 2**64
    return value


def wrap(words, first, rest, width=99):
    """The words, separated by ", ", in lines of at most `width` columns."""
    lines = textwrap.wrap(", ".join(word.replace(" ", "\1") for word in words), width,
                          initial_indent=first, subsequent_indent=rest,
                          break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace("\1", " ")


# ---- abi/ledger.json ----

def ledger_json(ledger):
    """One field or constant per line, so that a diff names what changed."""
    def lines(entries, indent):
        return ",\n".join(" " * indent + json.dumps(entry) for entry in entries)

    structs = []
    for struct in ledger["structs"]:
        head = {key: value for key, value in struct.items() if key != "fields"}
        structs.append(f"    {json.dumps(head)[:-1]}, \"fields\": [\n"
                       f"{lines(struct['fields'], 6)}\n    ]}}")
    return (f'{{\n  "about": {json.dumps(MARK)},\n'
            f'  "version": "{ledger["version"]}",\n'
            f'  "layout_digest": "0x{digest(ledger):016x}",\n'
            f'  "constants": [\n{lines(ledger["constants"], 4)}\n  ],\n'
            f'  "functions": [\n{lines(ledger["functions"], 4)}\n  ],\n'
            '  "structs": [\n' + ",\n".join(structs) + "\n  ]\n}\n")


# ---- abi/layout_table.h ----

def layout_table(ledger):
    rows = ["#define LAYOUT_TABLE(STRUCT, FIELD)"]
    for struct in ledger["structs"]:
        rows.append(f"    STRUCT({struct['name']}, {struct['published_bytes']}, {struct['bytes']})")
        rows += [f"    FIELD({struct['name']}, {field['name']}, {field['offset']}, {field['size']})"
                 for field in struct["fields"]]
    table = " \\\n".join(f"{row:<77}" for row in rows).rstrip()
    return f"""// The layout of abi.h on 64-bit machines.
// {MARK}

#ifndef MOXIE_ABI_LAYOUT_TABLE_H
#define MOXIE_ABI_LAYOUT_TABLE_H

// clang-format off
// STRUCT(name, bytes when first published, bytes now)   FIELD(struct, name, offset, bytes)
{table}
// clang-format on

// What layout_digest() of this table is; a constant, so that the build identity can be one.
#define LAYOUT_DIGEST 0x{digest(ledger):016x}ull

#endif
"""


# ---- The rows in abi/loader.c ----

def loader_rows(ledger):
    lines = []
    for struct in ledger["structs"]:
        name = struct["name"]
        words = [f"WHOLE({name})"] if name in FROZEN else []
        words += [f"FIELD({name}, {field['name']})" for field in struct["fields"]]
        lines.append(wrap(words, "    ", "    ") + ",")
    return "\n".join(lines) + "\n"


# ---- The mirror in hosts/python/moxie/abi.py ----

PYTHON_WORDS = {"uint8_t": "u8", "uint16_t": "u16", "int32_t": "i32", "uint32_t": "u32",
                "int64_t": "i64", "uint64_t": "u64", "double": "f64"}


def python_word(kind, structs):
    """The mirror's word for a C type: "i32", "*traits", "str", "ptr"."""
    base, _, stars = kind.replace("const ", "").partition(" ")
    if kind == "const char *":
        return "str"
    if "(" in kind:
        return "ptr"
    if base in PYTHON_WORDS:
        return stars + PYTHON_WORDS[base]
    if base in structs:
        return stars + base[len("moxie_"):]
    return stars[:-1] + "ptr"  # void, char to be written, a handle


def python_struct(struct, structs):
    name = struct["name"][len("moxie_"):]
    words = [f'"{name}"']
    run = []  # fields of one type, written as one string
    for field in struct["fields"] + [None]:
        plain = field is not None and "slot" not in field and "[" not in field["type"]
        word = python_word(field["type"], structs) if plain else None
        if run and (run[0] != word or len(" ".join(run)) > 60):
            words.append('"' + " ".join(run) + '"')
            run = []
        if plain:
            run = (run or [word]) + [field["name"]]
        elif field is not None and "slot" in field:
            types = [repr(python_word(each["type"], structs)).replace("'", '"')
                     for each in field["parameters"] if each["type"] != "void"]
            result = "None" if field["type"] == "void" else \
                f'"{python_word(field["type"], structs)}"'
            words.append(f'("{field["name"]}", function({", ".join([result] + types)}))')
        elif field is not None:
            count = field["type"].split("[")[1].rstrip("]")
            words.append(f'("{field["name"]}", ctypes.c_char * {count})')
    camel = "".join(part.capitalize() for part in name.split("_"))
    if any(word.startswith("(") for word in words):
        return f"{camel} = mirror(\n    " + ",\n    ".join(words) + ")\n"
    first = f"{camel} = mirror("
    return wrap(words, first, " " * len(first)) + ")\n"


def python_mirror(ledger):
    structs = {struct["name"]: struct for struct in ledger["structs"]}
    values = "".join(f"{each['name'][len('MOXIE_'):]} = {json.dumps(each['value'])}\n"
                     for each in ledger["constants"])
    written, order = set(), []

    def visit(name):  # a struct comes after those its fields speak of
        if name in written:
            return
        written.add(name)
        for field in structs[name]["fields"]:
            for each in [field] + field.get("parameters", []):
                base = each["type"].replace("const ", "").split(" ")[0]
                if base in structs:
                    visit(base)
        order.append(name)

    for name in structs:
        visit(name)
    return values + "\n" + "".join(python_struct(structs[name], structs) for name in order)


# ---- docs/abi.md ----

def signature(slot):
    parameters = []
    for each in slot["parameters"]:
        if "(*)" in each["type"]:
            parameters.append(each["type"].replace("(*)", f"(*{each['name']})"))
        else:
            gap = "" if each["type"].endswith("*") else " "
            parameters.append((each["type"] + gap + each["name"]).strip())
    return f"{slot['type']} ({', '.join(parameters)})"


def tags(slot):
    order = ", ".join(slot["order"])
    owner = slot["owner"] + (f", {slot['freed_by']}" if slot["freed_by"] else "")
    return f"{slot['thread']} | {order} | {slot['graph']} | {owner}"


DOCUMENT_HEAD = """# The ABI, field by field

{mark}

This lists where everything lies; what it means is in [abi.h](../abi.h). ABI {version} on 64-bit
machines, layout digest `0x{digest:016x}`. If a struct is larger than when it was first
published, both sizes are given: a host of that time passes the smaller one, and the library takes
the rest as zero.

Tags of a slot:

- *thread*: `any` (any thread, at any time), `init` (not during a step; may allocate), `serial` (one
  call at a time per instance);
- *order*: `stream` (enqueued on the given stream), `collective` (every active rank makes the same
  call in the same order);
- *graph*: whether it may be captured into a CUDA graph;
- *owner*: who frees what the call hands out, and with which slot.
"""


def document(ledger):
    parts = [DOCUMENT_HEAD.format(mark=MARK, version=ledger["version"], digest=digest(ledger)),
             "\n## The exported function\n\n",
             "| function | signature | thread | order | graph | owner | since |\n"
             "| --- | --- | --- | --- | --- | --- | --- |\n"]
    parts += [f"| `{each['name']}` | `{signature(each)}` | {tags(each['slot'])} | "
              f"{each['since']} |\n" for each in ledger["functions"]]
    for struct in ledger["structs"]:
        grown = "" if struct["published_bytes"] == struct["bytes"] else \
            f", {struct['published_bytes']} when first published"
        parts.append(f"\n## {struct['name']}\n\n{struct['bytes']} bytes{grown}, since "
                     f"{struct['since']}.\n\n")
        slots = [field for field in struct["fields"] if "slot" in field]
        parts.append("| offset | bytes | field | type | since |\n| --- | --- | --- | --- | --- |\n")
        parts += [f"| {field['offset']} | {field['size']} | `{field['name']}` | "
                  f"{'a slot' if 'slot' in field else '`' + field['type'] + '`'} | "
                  f"{field['since']} |\n" for field in struct["fields"]]
        if slots:
            parts.append("\n| slot | signature | thread | order | graph | owner |\n"
                         "| --- | --- | --- | --- | --- | --- |\n")
            parts += [f"| `{slot['name']}` | `{signature(slot)}` | {tags(slot['slot'])} |\n"
                      for slot in slots]
    parts.append("\n## Constants\n\n| name | value |\n| --- | --- |\n")
    parts += [f"| `{each['name']}` | `{json.dumps(each['value'])}` |\n"
              for each in ledger["constants"]]
    return "".join(parts)


# ---- host_tests/abi_slots.h ----

def slot_rows(ledger):
    """Every slot that the plugin fills, for the tests that walk them."""
    rows = []
    for struct in ledger["structs"]:
        for field in struct["fields"]:
            if "slot" not in field or struct["name"] == "moxie_host":
                continue
            thread = {"any": "0", "init": "MOXIE_THREAD_INIT",
                      "serial": "MOXIE_THREAD_INSTANCE_SERIAL"}[field["slot"]["thread"]]
            first = field["parameters"][0]["type"].replace("const ", "")
            handle = first in ("moxie_instance *", "moxie_runner *", "moxie_dispatcher *")
            rows.append(f'    {{"{struct["name"]}", "{field["name"]}", {thread}, {int(handle)}}},')
    return f"""// Every slot that a plugin fills, with the thread tag of its comment in abi.h.
// {MARK}

#ifndef MOXIE_HOST_TESTS_ABI_SLOTS_H
#define MOXIE_HOST_TESTS_ABI_SLOTS_H

#include "abi.h"

struct abi_slot {{
    const char *table, *slot;
    int32_t thread; // MOXIE_THREAD_*; 0: any
    int32_t handle; // 1: the first argument is an instance, a runner or a dispatcher
}};

// clang-format off
static const struct abi_slot abi_slots[] = {{
{chr(10).join(rows)}
}};
// clang-format on

#define ABI_SLOTS ((int)(sizeof abi_slots / sizeof abi_slots[0]))

#endif
"""


# ---- All of it ----

FILES = {
    "abi/ledger.json": ledger_json,
    "abi/layout_table.h": layout_table,
    "docs/abi.md": document,
    "host_tests/abi_slots.h": slot_rows,
}
# Files that people copy as one piece, and that are generated only between two marker lines.
REGIONS = {
    "abi/loader.c": loader_rows,
    "hosts/python/moxie/abi.py": python_mirror,
}


def splice(path, text, region):
    """`text` with everything between its marker lines replaced."""
    lines = text.splitlines(keepends=True)
    marks = [index for index, line in enumerate(lines) if BEGIN in line or END in line]
    if len(marks) != 2:
        raise HeaderError(f"{path}: wants one line with '{BEGIN}' and one with '{END}'")
    return "".join(lines[:marks[0] + 1]) + region + "".join(lines[marks[1]:])


def generate(ledger, root):
    """{path: text} of everything that is made from the ledger."""
    made = {path: make(ledger) for path, make in FILES.items()}
    for path, make in REGIONS.items():
        made[path] = splice(path, (root / path).read_text(), make(ledger))
    return made
