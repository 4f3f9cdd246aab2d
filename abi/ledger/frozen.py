"""What was published stays: the ledger compared with abi/baseline/ledger-0.N.json, in words."""

from header import version_key

# The version itself is no promise of the version.
MOVING = ("MOXIE_VERSION_PATCH",)


def line_of(field):
    """What is frozen of a field or slot. Names of parameters may change, their types may not."""
    if "slot" not in field:
        return f"{field['type']}, {field['size']} bytes at offset {field['offset']}"
    slot = field["slot"]
    types = ", ".join(each["type"] for each in field["parameters"])
    tags = ", ".join([slot["thread"], *slot["order"], slot["graph"]])
    owner = slot["owner"] + (f", {slot['freed_by']}" if slot["freed_by"] else "")
    place = f" at offset {field['offset']}" if "offset" in field else ""
    return f"{field['type']} ({types}) [{tags}; {owner}; {field['since']}]{place}"


def changed_fields(name, before, after):
    """Complaints about the fields of one struct: each frozen one is where and what it was."""
    for index, field in enumerate(before["fields"]):
        place = f"{name}.{field['name']}"
        found = after["fields"][index] if index < len(after["fields"]) else None
        if found is None:
            yield f"{place} is gone"
        elif found["name"] != field["name"]:
            yield f"{place} stood where {found['name']} stands now"
        elif line_of(found) != line_of(field):
            yield f"{place} was {line_of(field)}, and is {line_of(found)}"
        elif found["since"] != field["since"]:
            yield f"{place} was there since {field['since']}, and says {found['since']} now"


def breaks(baseline, ledger):
    """Everything published that is no longer so."""
    now = {each["name"]: each for each in ledger["constants"]}
    for each in baseline["constants"]:
        found = now.get(each["name"], {"value": "gone"})["value"]
        if each["name"] not in MOVING and found != each["value"]:
            yield f"{each['name']} was {each['value']}, and is {found}"
    for before, after in zip(baseline["functions"], ledger["functions"]):
        if line_of(before) != line_of(after):
            yield f"{before['name']} was {line_of(before)}, and is {line_of(after)}"
    structs = {each["name"]: each for each in ledger["structs"]}
    for before in baseline["structs"]:
        if before["name"] not in structs:
            yield f"{before['name']} is gone"
        else:
            yield from changed_fields(before["name"], before, structs[before["name"]])


def unsigned_appends(baseline, ledger):
    """Appended fields and structs that do not say since when they are there."""
    structs = {each["name"]: each for each in baseline["structs"]}
    for struct in ledger["structs"]:
        before = structs.get(struct["name"], {"fields": []})["fields"]
        for field in struct["fields"][len(before):]:
            if version_key(field["since"]) <= version_key(baseline["version"]):
                yield f"{struct['name']}.{field['name']}"


def complaints(baseline, ledger):
    """Why abi.h may not stand as it is; empty when it may."""
    number = ".".join(baseline["version"].split(".")[:2])
    found = [f"abi.h breaks ABI {number}: {each}. Put it back and append at the end instead, or "
             f"bump MOXIE_VERSION_MINOR, so that hosts of {number} are refused in words."
             for each in breaks(baseline, ledger)]
    if found:
        return found
    return [f"abi.h: {each} is new since {baseline['version']}: bump MOXIE_VERSION_PATCH, and "
            "close its comment with that version, [since 0.N.P] (a slot: as the last of its tags)."
            for each in unsigned_appends(baseline, ledger)]
