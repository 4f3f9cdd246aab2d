"""bench/ranks without GPUs: cells, bars, verdicts, table, JSON; one run on the emulated GPU.

MOXIE_COMMAND and MOXIE_EMULATED name the command and the library for that run.
"""

import contextlib
import io
import json
import os
import pathlib
import runpy
import stat
import sys
import tempfile
import unittest
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench" / "ranks"), str(ROOT / "bench" / "layer")]

import grid  # noqa: E402
import tables  # noqa: E402

MAIN = runpy.run_path(str(ROOT / "bench" / "ranks" / "__main__.py"), run_name="bench_ranks")


def told_cell(tokens, median_us):
    return {"tokens": tokens, "replays": 30, "median_us": median_us, "p10_us": median_us - 1,
            "p90_us": median_us + 1, "floor_us": 20.0, "floor_by": "wire", "times_floor": 1.5,
            "reuse_mb": 1.0, "relative_error": 0.001, "spread_us": 2.0, "rows_per_rank": 600.0,
            "rows_sent_most": 610.0, "rows_received_most": 620.0, "wire_bytes": 7e6,
            "wire_gb_per_s": 200.0, "logical_gb_per_s": 300.0, "wire_floor_us": 20.0,
            "wire_share": 0.7, "nccl": {"dispatch_all_to_all": {"median_us": 74.0}}}


def told(ranks, cells, drift=0.01):
    return {"ranks": ranks, "weight_format": "fp8_block128", "row_format": "bf16",
            "runner": "moxie_cuda", "dispatcher": "alltoall", "device": "a GPU",
            "forwards_per_graph": 8, "weight_sets": 1, "no_nccl": None,
            "row_bytes": {"dispatch": 7456, "result": 14336}, "anchors": {"drift": drift},
            "cells": cells}


class Grid(unittest.TestCase):
    def test_bars_are_for_eight_even_ranks(self):
        group = grid.EVEN[0]
        self.assertEqual((group.op, group.tokens), ("dispatch", (128, 1024, 4096)))
        self.assertEqual(grid.wanted(group, 8, 128)[:2], (35, 25))
        self.assertIsNone(grid.wanted(group, 4, 128))
        self.assertIsNone(grid.wanted(group, 8, 64))
        self.assertIsNone(grid.wanted(group._replace(skew=1.5), 8, 128))
        self.assertIsNone(grid.wanted(group._replace(delay_us=20.0), 8, 128))
        self.assertEqual(grid.wanted(group._replace(sms=24), 8, 4096)[:2], (475, 455))
        self.assertIsNone(grid.wanted(group._replace(sms=16), 8, 4096))
        for bars in [*grid.BARS.values(), *grid.BARS_ON_SMS[24].values()]:
            for wanted in bars.values():
                self.assertLess(wanted.stretch_us, wanted.bar_us)

    def test_what_the_machine_lacks_is_said(self):
        self.assertEqual(grid.ranks_that_fit(4), ([2, 4], ["8 ranks: 4 GPUs are visible"]))
        self.assertEqual(grid.ranks_that_fit(1)[0], [])

    def test_arguments(self):
        group = grid.Group("both", "dsv3", "input", (1, 8), skew=1.5, delay_us=20.0, sms=24)
        self.assertEqual(" ".join(group.arguments(4)), "--op both --shape dsv3 --ranks 4 --tokens "
                         "1,8 --weight-format fp8_block128 --dispatch-format input --skew 1.5 "
                         "--delay-us 20 --dispatch-sms 24")
        self.assertEqual({group.skew for group in grid.select()}, {0.0, 1.5, 2.0})
        self.assertEqual({group.op for group in grid.select(["both"])}, {"both"})

    def groups(self, *arguments):
        return MAIN["groups_of"](MAIN["parse"](["--moxie", "moxie", *arguments]))

    def test_no_cell_is_measured_twice(self):
        self.assertEqual(self.groups(), grid.select())
        one, = self.groups("--quick", "--op", "layer", "--shape", "q30b", "--tokens", "64,8,64")
        self.assertEqual(one, grid.Group("layer", "q30b", grid.FP8, (8, 64)))
        for more in ([], ["--tokens", "64"]):
            found = self.groups("--shape", "q30b", *more)
            cells = [group._replace(tokens=tokens) for group in found for tokens in group.tokens]
            self.assertEqual(len(cells), len(set(cells)))
            self.assertEqual(len(found), len(grid.select()) - 1)  # both shapes of layers are one

        self.assertEqual(self.groups("--op", "both,both"), grid.select(["both"]))
        self.assertEqual(MAIN["parse"](["--moxie", "moxie", "--ranks", "4,2,4"]).ranks, [4, 2])

    def test_usage(self):
        for arguments in (["--tokens", "abc"], ["--tokens", "8,0"], ["--ranks", "1"],
                          ["--drift", "nan"], ["--replays", "-4"], ["--seconds", "nan"],
                          ["--plugin", ""], ["--out", "/proc/x/ranks"], ["--out", "new/"]):
            with self.assertRaises(SystemExit) as ended, \
                    contextlib.redirect_stderr(io.StringIO()):
                self.groups(*arguments)
            self.assertEqual(ended.exception.code, 2)


class Tables(unittest.TestCase):
    def found(self, median_us, drift=0.01, group=grid.EVEN[0]):
        cells = tables.cells_of(group, told(8, [told_cell(128, median_us)], drift), None)
        return {"what": "", "version": 1, "command": "the command", "date": "a day",
                "machine": {"gpus": 8, "gpu": "a GPU"}, "versions": {"commit": None},
                "settings": {"replays": 30, "seconds": 2.0, "drift": 0.03, "dispatcher": None},
                "complete": True, "skipped": [], "failed": [],
                "rejected": tables.rejections(cells), "clocks": None, "cells": cells}

    def test_verdicts(self):
        for median_us, verdict in ((24.0, "stretch"), (30.0, "met"), (36.0, "missed")):
            self.assertEqual(self.found(median_us)["cells"][0]["verdict"], verdict)
        uneven = self.found(24.0, group=grid.UNEVEN[0])
        self.assertIsNone(uneven["cells"][0]["verdict"])

    def test_form_and_table(self):
        found = self.found(30.0)
        self.assertEqual(tables.faults(found), [])
        text = tables.table(found)
        for words in ("a GPU x 8", "| 30.0 |", "DeepEP 63", "dispatch_all_to_all 74", "| met |",
                      "are an H200's (4.5 TB/s, bf16 790 TFLOP/s, fp8 1580 TFLOP/s), not this GPU's"):
            self.assertIn(words, text)
        found["machine"]["gpu"] = "NVIDIA H200"
        self.assertNotIn("not this GPU's", tables.table(found))
        self.assertIn("| dispatch, 24 SMs |", tables.table(self.found(30.0, group=grid.FEW_SMS[0])))
        del found["cells"][0]["spread_us"]
        self.assertEqual(tables.faults(found), ["run.cells[0] has no spread_us"])

    def test_a_device_that_changed(self):
        self.assertEqual(self.found(30.0)["rejected"], [])
        reason, = self.found(30.0, drift=0.05)["rejected"]
        self.assertIn("moved by 5.0%", reason)

    def test_a_later_run_does_not_hide_a_device_that_changed(self):
        for drifts in ((0.05, 0.04, 0.01), (0.01, 0.04, 0.05)):
            cells = [cell for drift in drifts for cell in self.found(30.0, drift)["cells"]]
            reason, = tables.rejections(cells)
            self.assertIn("moved by 5.0%", reason)
        self.assertIn("nan", tables.rejections(self.found(30.0, float("nan"))["cells"])[0])

    def test_curves(self):
        chart = tables.curves(self.found(40.0))["dispatch dsv3 fp8_block128"]
        self.assertEqual(chart["moxie, 8 GPUs"], [(128, 0.5)])
        self.assertAlmostEqual(chart["NCCL all_to_all, 8 GPUs"][0][1], 20 / 74)
        self.assertAlmostEqual(chart["bar"][0][1], 20 / 35)
        self.assertEqual(tables.curves(self.found(40.0, group=grid.UNEVEN[0])), {})


class Program(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="moxie-test-")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def command(self, text):
        path = self.folder / "moxie"
        path.write_text("#!/bin/sh\n" + text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)

    def main(self, *arguments):
        """(exit code, standard output, the JSON)."""
        out = self.folder / "deep" / "found"
        text = io.StringIO()
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(io.StringIO()):
            code = MAIN["main"]([*arguments, "--out", str(out)])
        path = out.with_suffix(".json")
        return code, text.getvalue(), json.loads(path.read_text()) if path.exists() else None

    def test_a_run(self):
        (self.folder / "told.json").write_text(json.dumps(told(2, [told_cell(128, 30.0)])))
        moxie = self.command(
            "if [ \"$1\" = info ]; then\n"
            "    echo '{\"build\": {\"version\": \"9.8.7\", \"source_id\": \"abc\"}}'; exit\nfi\n"
            f"echo \"$@\" >>{self.folder}/log\ncat {self.folder}/told.json\n")
        code, text, found = self.main("--moxie", moxie, "--gpus", "3", "--quick", "--op", "both")
        self.assertEqual(code, 0)
        self.assertEqual(tables.faults(found), [])
        self.assertTrue(found["complete"])
        self.assertEqual(len(found["cells"]), 1)
        self.assertEqual(found["skipped"][:2], ["4 ranks: 3 GPUs are visible",
                                                "8 ranks: 3 GPUs are visible"])
        self.assertIn("Skipped: 8 ranks", text)
        self.assertIn(", moxie 9.8.7 abc, ", text)
        self.assertEqual((self.folder / "log").read_text(), "bench --runner moxie_cuda --op both "
                         "--shape dsv3 --ranks 2 --tokens 8 --weight-format fp8_block128 "
                         "--dispatch-format input --replays 30 --seconds 2 --json\n")

    def test_a_run_that_fails_is_said(self):
        moxie = self.command("if [ \"$1\" = info ]; then echo '{}'; exit; fi\n"
                             "echo no such thing >&2; exit 2\n")
        code, text, found = self.main("--moxie", moxie, "--gpus", "2", "--quick", "--op",
                                      "layer,both")
        self.assertEqual((code, found["cells"], len(found["failed"])), (1, [], 2))
        self.assertIn("**Failed**: both dsv3 input over 2 GPUs: no such thing", text)

    def test_a_command_that_is_not_moxie(self):
        for text, words in ((None, "/nowhere/moxie"), ("exit 0\n", "printed no JSON"),
                            ("echo no libmoxie >&2; exit 1\n", "no libmoxie")):
            moxie, said = self.command(text) if text else "/nowhere/moxie", []
            with self.subTest(words), mock.patch.dict(MAIN["main"].__globals__, say=said.append):
                self.assertEqual(self.main("--moxie", moxie, "--gpus", "2")[::2], (1, None))
                self.assertIn(words, said[0])

    def test_a_device_that_changed(self):
        (self.folder / "told.json").write_text(json.dumps(told(2, [told_cell(128, 30.0)], 0.5)))
        moxie = self.command(f"cat {self.folder}/told.json\n")
        self.assertEqual(self.main("--moxie", moxie, "--gpus", "2", "--quick")[0], 4)

    def test_too_few_gpus(self):
        self.assertEqual(self.main("--moxie", "moxie", "--gpus", "1")[0], 1)

    @unittest.skipUnless("MOXIE_EMULATED" in os.environ, "no emulated GPU")
    def test_on_the_emulated_gpu(self):
        with mock.patch.dict(os.environ, MOXIE_EMULATOR_DEVICES="2"):
            code, _, found = self.main(
                "--moxie", os.environ["MOXIE_COMMAND"], "--plugin", os.environ["MOXIE_EMULATED"],
                "--gpus", "2", "--quick", "--op", "dispatch", "--shape", "128,128,8,2", "--tokens",
                "2", "--replays", "1", "--seconds", "0", "--drift", "100")
        self.assertEqual(code, 0)
        self.assertEqual(tables.faults(found), [])
        self.assertEqual(found["cells"][0]["row_bytes"], {"dispatch": 148, "result": 256})


if __name__ == "__main__":
    unittest.main()
