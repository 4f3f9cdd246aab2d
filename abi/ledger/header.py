"""Reads abi.h into the ledger: constants, structs, fields, slots and their tags.

abi.h is written in a regular way, and only that way is understood; anything else ends in a
HeaderError that names the line. Offsets are computed for 64-bit machines and not believed: the
assertions generated from them (abi/layout_table.h) have the compiler check each one, and a field
that this parser lost shifts or shortens its struct.
"""

import re

# Name in C -> (bytes, alignment).
SCALARS = {"char": (1, 1), "uint8_t": (1, 1), "uint16_t": (2, 2), "int32_t": (4, 4),
           "uint32_t": (4, 4), "int64_t": (8, 8), "uint64_t": (8, 8), "double": (8, 8)}
POINTER = (8, 8)

# DLPack's: without struct_size, frozen as a whole.
FROZEN = ("moxie_device", "moxie_dtype", "moxie_tensor")
ENTRY = "moxie_get_api_v1"

THREADS = ("any", "init", "serial")
ORDERS = ("stream", "collective")
GRAPHS = ("capturable", "eager")
TAGS = re.compile(r"\[([^\[\];]+); ([^\[\];]+); (\d+\.\d+(?:\.\d+)?)\]$")
OWNER = re.compile(r"(host|plugin|caller)(?:, (destroy|close))?$")
SINCE = re.compile(r"\[since (\d+\.\d+(?:\.\d+)?)\]$")
FIRST_VERSION = "0.1"


class HeaderError(Exception):
    """abi.h is not as it should be; the text names the line."""


def version_key(version):
    """"0.1" and "0.1.0" are the same version."""
    numbers = [int(number) for number in version.split(".")]
    return tuple(numbers + [0] * (3 - len(numbers)))


class Header:
    """The text of abi.h and what was read from it."""

    def __init__(self, text):
        self.lines = text.splitlines()
        self.constants = []
        self.structs = []
        self.functions = []
        self.ends = {}  # struct name -> index of the line that closes it
        self.version = ".".join(self._number(f"MOXIE_VERSION_{part}")
                                for part in ("MAJOR", "MINOR", "PATCH"))
        self._read()

    def ledger(self):
        return {"version": self.version, "constants": self.constants,
                "functions": self.functions, "structs": self.structs}

    def _number(self, name):
        for line in self.lines:
            match = re.match(rf"#define {name} (\d+)$", line)
            if match:
                return match.group(1)
        raise HeaderError(f"abi.h: no #define {name}")

    def _read(self):
        index = 0
        while index < len(self.lines):
            line = self.lines[index]
            constant = re.match(r'#define (MOXIE_\w+) (\d+|"[^"]*")\s*(?://.*)?$', line)
            struct = re.match(r"(?:typedef )?struct (moxie_\w+) \{", line)
            if constant:
                self._add_constant(*constant.groups())
            elif struct:
                index = self._read_struct(index, struct.group(1))
            elif line.startswith(f"int32_t {ENTRY}("):
                slot, _ = self._slot(index, re.sub(r"^int32_t (\w+)\(", r"int32_t (*\1)(", line))
                self.functions.append(slot)
            elif re.match(r"#define MOXIE_\w+ [^(]*$", line):
                raise self._error(index, "neither a number nor a text, nor in parentheses")
            elif re.match(r"    [a-z]", line):
                raise self._error(index, "a field outside of a struct")
            index += 1
        if len(self.functions) != 1:
            raise HeaderError(f"abi.h: {ENTRY} was not found")

    def _error(self, index, what):
        return HeaderError(f"abi.h:{index + 1}: {what}: {self.lines[index].strip()}")

    def _add_constant(self, name, value):
        self.constants.append({"name": name, "value": value.strip('"') if '"' in value
                               else int(value)})

    # ---- Structs ----

    def _read_struct(self, index, name):
        """Appends the struct that opens on line `index`; the index of its last line."""
        fields, about = [], self._comment_above(index)
        first = index
        index += 1
        while not self.lines[index].startswith("}"):
            line = self.lines[index].strip()
            if line and not line.startswith("//"):
                read, index = self._fields(index)
                fields += read
            index += 1
        self.ends[name] = index
        since = SINCE.search(about)
        struct = {"name": name, "since": since.group(1) if since else FIRST_VERSION}
        for field in fields:
            field["since"] = field["since"] or struct["since"]
            if version_key(field["since"]) > version_key(self.version):
                raise self._error(first, f"{name}.{field['name']}: since a version to come")
        self._lay_out(struct, fields, first)
        self.structs.append(struct)
        return index

    def _lay_out(self, struct, fields, index):
        """Offsets and sizes by the rules of 64-bit C; no struct may need padding."""
        published = max(version_key(struct["since"]), version_key(self.version)[:2] + (0,))
        offset, widest = 0, 1
        struct["published_bytes"] = None
        for field in fields:
            field["size"], align = self._size(field, index)
            if offset % align != 0:
                raise self._error(index, f"padding before {field['name']}: name it reserved")
            late = version_key(field["since"]) > published
            if not late and struct["published_bytes"] is not None:
                raise self._error(index, f"{field['name']} stands after newer fields")
            if late and struct["published_bytes"] is None:
                struct["published_bytes"] = offset
            field["offset"] = offset
            offset += field["size"]
            widest = max(widest, align)
        if offset % widest != 0:
            raise self._error(index, "padding at the end: name it reserved")
        if struct["published_bytes"] is None:
            struct["published_bytes"] = offset
        sized = bool(fields) and (fields[0]["name"], fields[0]["type"]) == ("struct_size",
                                                                           "uint32_t")
        if sized == (struct["name"] in FROZEN):
            raise self._error(index, "every struct but DLPack's starts with struct_size")
        struct["bytes"] = offset
        struct["align"] = widest
        struct["fields"] = fields

    def _size(self, field, index):
        """(bytes, alignment) of a field."""
        if "slot" in field or field["type"].endswith("*"):
            return POINTER
        base, count = re.match(r"(\w+)(?:\[(\d+)\])?$", field["type"]).groups()
        sizes = {struct["name"]: (struct["bytes"], struct["align"]) for struct in self.structs}
        sizes.update(SCALARS)
        if base not in sizes:
            raise self._error(index, f"unknown type {base} of {field['name']}")
        return sizes[base][0] * int(count or 1), sizes[base][1]

    def _fields(self, index):
        """The fields declared from line `index` on, and the index of the last line of it."""
        line = self.lines[index]
        if "(*" in line:
            field, index = self._slot(index, line.strip())
            return [field], index
        match = re.match(r"\s+((?:const )?\w+) ([^;]+);\s*(?://\s*(.*))?$", line)
        if not match:
            raise self._error(index, "not understood")
        base, names, about = match.groups()
        since = SINCE.search(about or "")
        fields = []
        for declared in names.split(","):
            match = re.match(r"\s*(\**)(\w+)(?:\[(\d+)\])?$", declared)
            if not match:
                raise self._error(index, "not understood")
            stars, name, count = match.groups()
            kind = base + (" " + stars if stars else "") + (f"[{count}]" if count else "")
            fields.append({"name": name, "type": kind,
                           "since": since.group(1) if since else None})
        return fields, index

    # ---- Slots ----

    def _slot(self, index, line):
        """The function pointer that starts on line `index`, with its tags."""
        comment = self._comment_above(index)
        while not re.search(r"\);$", line):
            index += 1
            line += " " + self.lines[index].strip()
        match = re.match(r"((?:const )?\w+ ?\**) ?\(\*(\w+)\)\((.*)\);$", line)
        if not match:
            raise self._error(index, "not understood")
        result, name, parameters = match.groups()
        slot = self._tags(index, comment)
        since = slot.pop("since")
        return {"name": name, "type": result.strip(), "since": since,
                "parameters": [self._parameter(index, each)
                               for each in re.split(r", (?![^(]*\))", parameters)],
                "slot": slot}, index

    def _parameter(self, index, text):
        function = re.match(r"void \(\*(\w+)\)\((.*)\)$", text)
        if function:
            types = [self._parameter(index, each)["type"] for each in function.group(2).split(", ")]
            return {"name": function.group(1), "type": f"void (*)({', '.join(types)})"}
        match = re.match(r"((?:const )?\w+) ?(\**)(\w*)$", text)
        if not match:
            raise self._error(index, f"parameter {text} not understood")
        base, stars, name = match.groups()
        return {"name": name, "type": base + (" " + stars if stars else "")}

    def _tags(self, index, comment):
        """[thread, order, graph; owner; since], as the legend of abi.h defines it."""
        match = TAGS.search(comment)
        if not match:
            raise self._error(index, "no [thread, order, graph; owner; since] above")
        words, since = match.group(1).split(", "), match.group(3)
        owner = OWNER.match(match.group(2))
        if len(words) < 2 or words[0] not in THREADS or words[-1] not in GRAPHS:
            raise self._error(index, f"thread tag first, graph tag last, not {match.group(1)}")
        if not set(words[1:-1]) <= set(ORDERS):
            raise self._error(index, f"unknown tag in {match.group(1)}")
        if not owner:
            raise self._error(index, f"unknown owner {match.group(2)}")
        if version_key(since) > version_key(self.version):
            raise self._error(index, f"since {since}, and abi.h is {self.version}")
        return {"thread": words[0], "order": words[1:-1], "graph": words[-1],
                "owner": owner.group(1), "freed_by": owner.group(2), "since": since}

    def _comment_above(self, index):
        """The comment that ends right above line `index`, attributes skipped, as one text."""
        while re.match(r"#|__attribute__", self.lines[index - 1]):
            index -= 1
        texts = []
        while index > 0 and self.lines[index - 1].lstrip().startswith("//"):
            index -= 1
            texts.insert(0, self.lines[index].lstrip()[2:].strip())
        return " ".join(texts)
