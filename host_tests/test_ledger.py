"""abi/ledger: what it reads from abi.h, and what it refuses, on changed copies of abi.h."""

import json
import pathlib
import re
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "abi" / "ledger"))

import frozen  # noqa: E402
import outputs  # noqa: E402
from header import Header, HeaderError  # noqa: E402

ABI = (ROOT / "abi.h").read_text()


def line_of(code):
    """Of abi.h, with its comment."""
    return next(line for line in ABI.splitlines(keepends=True) if line.strip().startswith(code))


PHASE, LAST = line_of("int32_t padding, phase;"), line_of("int64_t capture_row;")
CLOSE = "    int32_t (*close)(moxie_instance *, moxie_error *);\n"


def ledger_of(*changes):
    """The ledger of abi.h after replacing each (before, after)."""
    text = ABI
    for before, after in changes:
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    return Header(text).ledger()


def struct_of(ledger, name):
    return next(each for each in ledger["structs"] if each["name"] == name)


PUBLISHED = ledger_of()
PATCH = ("#define MOXIE_VERSION_PATCH 1", "#define MOXIE_VERSION_PATCH 2")
MINOR = ("#define MOXIE_VERSION_MINOR 1", "#define MOXIE_VERSION_MINOR 2")


class Reads(unittest.TestCase):
    def test_everything_is_there(self):
        code = re.sub(r"//.*", "", ABI)
        slots = [field for struct in PUBLISHED["structs"] for field in struct["fields"]
                 if "slot" in field]
        # one typedef and the callback inside parallel_for are no slots
        self.assertEqual(len(slots), len(re.findall(r"\(\*\w+\)\(", code)) - 2)
        self.assertEqual([struct["name"] for struct in PUBLISHED["structs"]],
                         re.findall(r"^(?:typedef )?struct (\w+) \{", code, re.M))

    def test_a_slot(self):
        slot = next(field for field in struct_of(PUBLISHED, "moxie_dispatcher_api")["fields"]
                    if field["name"] == "dispatch_recv")
        self.assertEqual(slot["slot"], {"thread": "serial", "order": ["collective", "stream"],
                                        "graph": "capturable", "owner": "plugin",
                                        "freed_by": None})
        self.assertEqual([each["type"] for each in slot["parameters"]],
                         ["moxie_dispatcher *", "const moxie_batch *", "const moxie_rows **",
                          "const moxie_rows **", "moxie_error *"])

    def test_published_size(self):
        grown = ledger_of(PATCH, (LAST, LAST + "    int64_t later;  // [since 0.1.2]\n"))
        step = struct_of(grown, "moxie_step")
        self.assertEqual((step["published_bytes"], step["bytes"]), (48, 56))
        self.assertEqual(step["fields"][-1]["since"], "0.1.2")
        bumped = ledger_of(MINOR, (LAST, LAST + "    int64_t later;  // [since 0.1.2]\n"))
        self.assertEqual(struct_of(bumped, "moxie_step")["published_bytes"], 56)


class Refuses(unittest.TestCase):
    def refused(self, words, *changes):
        with self.assertRaises(HeaderError) as caught:
            ledger_of(*changes)
        self.assertIn(words, str(caught.exception))

    def test_padding(self):
        self.refused("padding at the end", (LAST, LAST + "    int32_t later;\n"))
        self.refused("padding before w1",
                     ("    uint32_t struct_size, reserved0;\n    const moxie_matrix",
                      "    uint32_t struct_size;\n    const moxie_matrix"))

    def test_tags(self):
        closing = "    // NULL is a no-op. [init, eager; plugin; 0.1]\n" + CLOSE
        for tags, words in (("", "no [thread"), ("[eager, init; plugin; 0.1]", "thread tag first"),
                            ("[init, wet, eager; plugin; 0.1]", "unknown tag"),
                            ("[init, eager; nobody; 0.1]", "unknown owner"),
                            ("[init, eager; plugin; 0.9]", "since 0.9")):
            with self.subTest(tags=tags):
                self.refused(words, (closing, f"    // NULL is a no-op. {tags}\n{CLOSE}"))

    def test_what_it_does_not_understand(self):
        self.refused("not understood", (LAST, LAST + "    int64_t later : 3;\n"))
        self.refused("unknown type", (LAST, LAST + "    size_t later;\n"))
        self.refused("starts with struct_size", ("typedef struct moxie_call {\n"
                                                 "    uint32_t struct_size;",
                                                 "typedef struct moxie_call {\n"
                                                 "    uint32_t bytes;"))

    def test_a_version_to_come(self):
        self.refused("a version to come", (LAST, LAST + "    int64_t later;  // [since 0.1.2]\n"))


class Frozen(unittest.TestCase):
    def complaints(self, *changes):
        return frozen.complaints(PUBLISHED, ledger_of(*changes))

    def test_nothing_changed(self):
        self.assertEqual(self.complaints(), [])

    def test_breaks_are_named(self):
        for words, change in (
                ("moxie_step.padding stood where phase stands now",
                 (PHASE, PHASE.replace("padding, phase", "phase, padding"))),
                ("moxie_step.padding was int32_t, 4 bytes at offset 24, and is uint32_t",
                 (PHASE, PHASE.replace("int32_t", "uint32_t"))),
                ("moxie_step.capture_row is gone", (LAST, "")),
                ("MOXIE_E_PEER was 10, and is 14",
                 ("#define MOXIE_E_PEER 10 ", "#define MOXIE_E_PEER 14 ")),
                ("MOXIE_RANKS_MAX was 64, and is 128",
                 ("MOXIE_RANKS_MAX 64", "MOXIE_RANKS_MAX 128")),
                ("moxie_api.stats was int32_t (const moxie_instance *, moxie_stats *, moxie_error "
                 "*) [serial, eager; caller; 0.1] at offset 88, and is int32_t (const "
                 "moxie_instance *, moxie_stats *, moxie_error *) [any, eager; caller; 0.1] at",
                 ("Counters since open. [serial", "Counters since open. [any"))):
            with self.subTest(words=words):
                found = self.complaints(change)
                self.assertIn(f"abi.h breaks ABI 0.1: {words}", found[0])
                self.assertIn("bump MOXIE_VERSION_MINOR", found[0])

    def test_appends(self):
        later = LAST + "    int64_t later;{}\n"
        self.assertIn("moxie_step.later is new since 0.1.1: bump MOXIE_VERSION_PATCH",
                      self.complaints((LAST, later.format("")))[0])
        self.assertEqual(self.complaints(PATCH, (LAST, later.format("  // [since 0.1.2]"))), [])
        slot = CLOSE + "    // Not yet. [any, eager; caller; 0.1{}]\n    void (*later)(void);\n"
        self.assertIn("moxie_api.later is new", self.complaints(PATCH, (CLOSE, slot.format("")))[0])
        self.assertEqual(self.complaints(PATCH, (CLOSE, slot.format(".2"))), [])

    def test_names_of_parameters_are_free(self):
        self.assertEqual(self.complaints(("(*get_i64)(void *ctx, const char *key",
                                          "(*get_i64)(void *self, const char *key")), [])


class Generates(unittest.TestCase):
    def test_json_is_the_ledger(self):
        read = json.loads(outputs.ledger_json(PUBLISHED))
        self.assertEqual({key: read[key] for key in PUBLISHED}, PUBLISHED)
        self.assertEqual(int(read["layout_digest"], 16), outputs.digest(PUBLISHED))


if __name__ == "__main__":
    unittest.main()
