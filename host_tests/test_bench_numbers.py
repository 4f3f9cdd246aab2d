"""bench/layer without torch: floors, verdicts, ties, order, drift, clocks, the JSON, the table."""

import copy
import os
import pathlib
import stat
import subprocess
import sys
import tempfile
import time
import unittest
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "bench" / "layer"))

from measure import cells, clocks, numbers, report  # noqa: E402


class Cells(unittest.TestCase):
    def floor(self, shape, tokens, hit, number="bf16"):
        return cells.Cell(shape, tokens, number, None, None).floor(hit)

    def test_floor_is_the_memory_s_or_the_product_s(self):
        # 8 experts of 3 * 2048 * 768 bf16 numbers at 4.5 TB/s.
        us, bound = self.floor("q30b", 1, 8)
        self.assertAlmostEqual(us, 16.777, places=2)
        self.assertEqual(bound, "memory")
        us, bound = self.floor("q30b", 16384, 128)
        self.assertAlmostEqual(us, 1565.7, places=0)
        self.assertEqual(bound, "compute")
        self.assertAlmostEqual(self.floor("mixtral", 4096, 8)[0], 3653, delta=1)
        self.assertAlmostEqual(self.floor("dsv3ep8", 1024, 32)[0], 626, delta=1)

    def test_floor_follows_the_draw(self):
        self.assertAlmostEqual(self.floor("q235b", 16, 80)[0] / self.floor("q235b", 16, 40)[0], 2)

    def test_floors_that_bars_were_set_for(self):
        """Of as many experts as a uniform draw hits: the draws themselves move them by 4%."""
        wanted = {
            "fp8": {"q30b": {1: 8, 16: 83, 64: 132, 256: 134, 1024: 135, 4096: 196, 16384: 783},
                    "q235b": {1: 34, 16: 359, 64: 530, 256: 537, 1024: 539, 4096: 783,
                              16384: 3132},
                    "dsv3ep8": {64: 274, 1024: 316, 4096: 326, 32768: 1827},
                    "mixtral": {1: 78, 64: 313, 1024: 457, 4096: 1827},
                    "dsv3tp8": {1: 10, 16: 125, 64: 272, 1024: 313, 16384: 913},
                    "qwen35tp8": {1: 3, 16: 48, 64: 128, 1024: 179, 16384: 326},
                    "qwen3next": {1: 7, 16: 97, 64: 257, 1024: 358, 16384: 652}},
            "bf16": {"q235btp8": {1: 8, 16: 86, 64: 132, 1024: 134, 16384: 783}}}
        for number, shapes in wanted.items():
            for shape, floors in shapes.items():
                self.assertEqual(list(floors), list(cells.BARS[number][shape]))
        wanted.update({
            "nvfp4": {"q30b": {1: 5, 16: 47, 64: 74}, "q235b": {1: 19, 16: 194, 64: 297},
                      "dsv3ep8": {64: 156, 1024: 178}},
            "mxfp4": {"gptoss120b": {1: 12, 16: 150, 64: 327, 1024: 376, 16384: 4128}},
            "int4_g32": {"kimik2tp8": {16: 76}}})
        for number, shapes in wanted.items():
            for shape, floors in shapes.items():
                sizes = cells.SHAPES[shape]
                for tokens, floor in floors.items():
                    missed = (1 - sizes.top_k / sizes.experts) ** tokens
                    us, _ = self.floor(shape, tokens, sizes.experts * (1 - missed), number)
                    self.assertLess(abs(us - floor), 0.5 + 0.045 * floor, (shape, tokens, us))

    def test_scales_are_read_too(self):
        exact = 8 * 3 * 2048 * 768 * (1 + 4 / 16384) / 4.5e6
        self.assertAlmostEqual(self.floor("q30b", 1, 8, "fp8")[0], exact, places=9)
        self.assertEqual(cells.set_bytes(cells.SHAPES["q30b"], "fp8"),
                         128 * 3 * (2048 * 768 + 4 * 16 * 6))

    def test_every_cell_with_a_bar(self):
        found = [cell for cell in cells.select("bf16", list(cells.BARS["bf16"])) if cell.bar]
        self.assertEqual(len(found), 22)
        for cell in found:
            self.assertLess(1, cell.stretch, cell)
            self.assertLess(cell.stretch, cell.bar, cell)
        self.assertIn(cells.Cell("dsv3ep8", 32768, "bf16", 1.136, 1.095), found)

    def test_every_cell_in_fp8(self):
        found = cells.select("fp8", list(cells.BARS["fp8"]))
        self.assertEqual(len(found), 22 + 15)
        self.assertEqual(sum(cell.bar is not None for cell in found), 22)
        for cell in found:
            self.assertLess(1, cell.bar or 2, cell)
            self.assertLess(cell.stretch or 0, cell.bar or 1, cell)
        # DeepGEMM's two products alone are 1.27 floors: less than the bar. At 4096 they are 1.62.
        self.assertIn(cells.Cell("q235b", 16384, "fp8", 1.39, 1.27), found)
        self.assertIn(cells.Cell("q235b", 4096, "fp8", 1.56, None), found)
        self.assertIn(cells.Cell("qwen35tp8", 64, "fp8", None, None), found)
        self.assertEqual([cell.tokens for cell in cells.select("fp8", ["q30b"], quick=True)],
                         [1, 64, 1024, 4096])

    def test_every_cell_of_4_bits(self):
        one_token_us = {"q30b": 14, "q235b": 30, "gptoss120b": 21}
        found = [cell for number in ("mxfp4", "nvfp4", "int4_g32")
                 for cell in cells.select(number, list(cells.BARS[number]))]
        self.assertEqual(len(found), 5 * 7 + 4 + 1)
        for cell in found:
            if cell.tokens == 1:
                floor_us, _ = cell.floor(cell.sizes().top_k)
                self.assertAlmostEqual(cell.bar * floor_us, one_token_us[cell.shape], delta=0.05)
                self.assertIsNone(cell.stretch)
            elif cell.tokens <= 1024:
                self.assertAlmostEqual(1 / cell.bar, 0.68, places=2)
                self.assertAlmostEqual(1 / cell.stretch, 0.80, places=2)
            else:
                self.assertEqual((cell.bar, cell.stretch), (None, None))

    def test_selection(self):
        self.assertEqual([cell.tokens for cell in cells.select("bf16", ["q30b"], quick=True)],
                         [1, 64, 1024, 4096])
        own, = cells.select("bf16", ["q30b"], [3])
        self.assertIsNone(own.bar)
        named, = cells.select("bf16", ["q30b"], [64], quick=True)
        self.assertEqual((named.tokens, named.bar), (64, 1.06))
        self.assertTrue(cells.select("bf16", ["tiny"]))

    def test_memory(self):
        one = cells.set_bytes(cells.SHAPES["q235b"], "bf16")
        self.assertEqual(one, 128 * 3 * 4096 * 1536 * 2)
        self.assertEqual(cells.sets_that_fit(one, 100e9, 8), 8)
        self.assertEqual(cells.sets_that_fit(one, 3.5 * one, 8), 3)
        self.assertEqual(cells.sets_that_fit(one, one - 1, 8), 0)
        # One token: 8 experts of each of 8 sets; with one set, 8 experts only.
        self.assertEqual(cells.bytes_before_reuse(cells.SHAPES["q30b"], "bf16", [8] * 16, 8),
                         8 * 8 * 3 * 2048 * 768 * 2)
        self.assertLess(cells.bytes_before_reuse(cells.SHAPES["q30b"], "bf16", [8] * 16, 1),
                        cells.REUSE_BYTES)

    def test_verdict(self):
        self.assertEqual(cells.verdict(1.2, 1.2, 1.1), "met")
        self.assertEqual(cells.verdict(1.2001, 1.2, 1.1), "missed")
        self.assertEqual(cells.verdict(1.1, 1.2, 1.1), "stretch")
        self.assertIsNone(cells.verdict(1.0, None, None))
        self.assertEqual(cells.verdict(1.0, 1.2, None), "met")
        self.assertEqual(cells.verdict(float("nan"), 1.2, 1.1), "missed")


class Statistics(unittest.TestCase):
    def test_quantiles(self):
        self.assertEqual(numbers.quantile([3, 1, 2], 0.5), 2)
        self.assertEqual(numbers.quantile([4, 1, 2, 3], 0.5), 2.5)
        self.assertAlmostEqual(numbers.quantile(list(range(11)), 0.9), 9)
        self.assertEqual(numbers.quantile([7], 0.1), 7)
        self.assertEqual(numbers.summary([1, 2, 3]),
                         {"median": 2, "p10": 1.2, "p90": 2.8, "count": 3})

    def test_right(self):
        self.assertTrue(numbers.is_right("bf16", 0.02, None))
        self.assertFalse(numbers.is_right("bf16", 0.021, 0.0))
        self.assertTrue(numbers.is_right("fp8", 0.005, None))
        self.assertFalse(numbers.is_right("fp8", 0.0051, None))
        self.assertTrue(numbers.is_right("fp8", 0.02, 0.06))
        self.assertFalse(numbers.is_right("fp8", 0.02, 0.061))
        self.assertFalse(numbers.is_right("fp8", float("inf"), float("inf")))

    def between(self, median, low, high):
        return {"median": median, "p10": low, "p90": high, "count": 30}

    def test_under_twice_the_spread_is_a_tie(self):
        ours = self.between(1.00, 0.99, 1.01)  # spread 0.01
        wide = self.between(1.05, 1.02, 1.08)  # spread 0.03, 0.05 apart
        self.assertEqual(numbers.compare(ours, wide), "tie")
        self.assertEqual(numbers.compare(wide, ours), "tie")
        far = self.between(1.07, 1.04, 1.10)
        self.assertEqual(numbers.compare(ours, far), "faster")
        self.assertEqual(numbers.compare(far, ours), "slower")

    def test_order(self):
        rounds = [numbers.turn("ABC", number) for number in range(4)]
        self.assertEqual(["".join(each) for each in rounds], ["ABC", "CBA", "ABC", "CBA"])

    def test_drift(self):
        drifts = numbers.drift({"product": 700.0, "read": 4.0}, {"product": 686.0, "read": 4.16})
        self.assertAlmostEqual(drifts["product"], 0.02)
        self.assertAlmostEqual(drifts["read"], 0.04)
        self.assertIn("read moved by 4.0%", numbers.rejection(drifts))
        self.assertNotIn("product", numbers.rejection(drifts))
        self.assertIsNone(numbers.rejection({"product": 0.03}))
        self.assertIsNotNone(numbers.rejection({"product": float("nan")}))


class ClockSamples(unittest.TestCase):
    def test_a_line(self):
        self.assertEqual(clocks.parse("1980, 612.35, 54, 0x0000000000000004\n"),
                         (1980.0, 612.35, 54.0, 4))
        for line in ("", "Field \"clocks\" is not valid", "[N/A], 1, 2, 0x0", "1, 2, 3"):
            self.assertIsNone(clocks.parse(line), line)

    def test_summary(self):
        found = clocks.summarise([(1980, 300, 40, 1), (1700, 690, 60, 0x5), (1750, 680, 61, 0x20)])
        self.assertEqual(found["sm_mhz"], {"least": 1700, "median": 1750, "most": 1980})
        self.assertEqual(found["held_back_by"], ["power_cap", "software_thermal"])
        self.assertIsNone(clocks.summarise([]))

    def program(self, body):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        path = pathlib.Path(folder.name) / "nvidia-smi"
        path.write_text("#!/bin/sh\n" + body)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return mock.patch.dict(os.environ, PATH=f"{folder.name}:{os.environ['PATH']}")

    def test_samples_in_the_background(self):
        # Knows the older of the two names only.
        body = ('case "$2" in *clocks_event*) echo "not a valid field"; exit 2;; esac\n'
                'echo "1980, 612, 54, 0x4"\n'
                'case "$4" in --loop*) exec sleep 60;; esac\n')
        with self.program(body):
            start = time.monotonic()
            found = clocks.Clocks("GPU-1")
            self.assertIsNone(found.reason)
            while not found.samples and time.monotonic() < start + 20:
                time.sleep(0.01)
            self.assertEqual(found.between(start, time.monotonic())["held_back_by"], ["power_cap"])
            self.assertIsNone(found.between(start - 2, start - 1))
            child = found.child
            found.stop()
            self.assertIsNotNone(child.returncode)

    def test_without(self):
        self.assertEqual(clocks.Clocks(None).reason, "no GPU")
        with self.program('echo "Unable to determine"; exit 9\n'):
            self.assertIn("Unable to determine", clocks.Clocks("GPU-1").reason)


def spread_of(median):
    return {"median": median, "p10": median - 0.01, "p90": median + 0.01, "count": 30}


def system_of(us, times):
    return {"us": spread_of(us), "times": spread_of(times), "error": 3e-3, "right": True}


def run_of(times=1.05, after=700e12):
    """A run of one compute-bound cell with two systems, as the program makes it before judge()."""
    rates = {"bf16_product_flops_per_s": 700e12, "read_bytes_per_s": 4.3e12}
    sizes = cells.SHAPES["q30b"]
    routing = {"routing": "uniform", "floor_us": spread_of(1566.0), "bound": "compute",
               "experts_hit": spread_of(128.0), "bytes_before_reuse": 9 * 10**9, "cold": True,
               "clocks": None, "systems": {"moxie": system_of(1566 * times, times),
                                           "peer": system_of(2000.0, 1.277)}}
    cell = {"shape": "q30b", "tokens": 16384, "format": "bf16", "bar": 1.19, "stretch": 1.16,
            "flops": sizes.flops(16384), "weight_sets": 8, "separators_us": 12.0, "absent": {},
            "routings": [routing],
            "host_us": {"moxie": {"call": 20.0, "below_python": 14.0}, "peer": {"call": 40.0}}}
    return {"what": "one layer beside its peers", "version": 1, "command": "python3 bench/layer",
            "date": "2026-11-20", "machine": {"cpu": "c", "gpu": "H200"},
            "versions": {"torch": "2", "moxie": "0.1.0"}, "clocks": None, "complete": True,
            "skipped": [],
            "settings": {"device": "cuda", "format": "bf16", "replays": 30, "steady": 2.0,
                         "drift": 0.03, "forwards": 8, "seed": 1},
            "systems": [{"name": "moxie", "what": "whole layer", "absent": None},
                        {"name": "peer", "what": "two products", "absent": None},
                        {"name": "other", "what": "two products", "absent": "not installed"}],
            "anchors": {"before": rates, "after": {**rates, "bf16_product_flops_per_s": after}},
            "cells": [cell]}


class Reports(unittest.TestCase):
    def judged(self, **more):
        found = run_of(**more)
        report.judge(found)
        return found

    def test_judgement(self):
        found = self.judged(times=1.17)
        routing = found["cells"][0]["routings"][0]
        self.assertEqual(routing["verdict"], "met")
        self.assertEqual(routing["against"], {"peer": "faster"})
        self.assertAlmostEqual(routing["systems"]["moxie"]["floor_share"], 1 / 1.17)
        # 790 / 1.17 TFLOP/s of 700.
        self.assertAlmostEqual(routing["systems"]["moxie"]["anchor_share"], 0.9645, places=3)
        self.assertEqual(routing["anchor_verdict"], "stretch")
        self.assertEqual(found["cells"][0]["host_verdict"], "met")
        self.assertIsNone(found["rejected"])
        self.assertEqual(self.judged(times=1.3)["cells"][0]["routings"][0]["verdict"], "missed")

    def test_fp8(self):
        """The anchor is the format's own, and each of the three may reject the run."""
        found = run_of(times=1.5)
        found["settings"]["format"] = found["cells"][0]["format"] = "fp8"
        found["cells"][0].update(bar=1.63, stretch=None)
        system = found["cells"][0]["routings"][0]["systems"]["moxie"]
        system.update(us=spread_of(783 * 1.5), error_unquantised=0.04)
        for rates in found["anchors"].values():
            rates["fp8_product_flops_per_s"] = 1400e12
        report.judge(found)
        self.assertEqual(report.faults(found), [])
        self.assertEqual(found["cells"][0]["routings"][0]["verdict"], "met")
        self.assertAlmostEqual(system["anchor_share"], 1580 / 1.5 / 1400, delta=1e-3)
        self.assertIn(", fp8, ", report.table(found))
        self.assertIn("| 1.63 |  | met |", report.table(found))
        found["anchors"]["after"]["fp8_product_flops_per_s"] = 1300e12
        report.judge(found)
        self.assertIn("fp8_product_flops_per_s moved by 7.1%", found["rejected"])

    def test_weights_of_4_bits(self):
        """Their anchor is the product of what they become."""
        found = run_of(times=1.5)
        found["settings"]["format"] = found["cells"][0]["format"] = "mxfp4"
        report.judge(found)
        system = found["cells"][0]["routings"][0]["systems"]["moxie"]
        self.assertAlmostEqual(system["anchor_share"], 790 / 1.5 / 700, delta=1e-3)
        self.assertIn(", mxfp4, ", report.table(found))

    def test_versions_of_peers(self):
        found = self.judged()
        found["systems"][0]["version"], found["systems"][1]["version"] = "abc", "2.6.1"
        first = report.table(found).splitlines()[0]
        self.assertIn("torch 2, peer 2.6.1, moxie 0.1.0 (abc)", first)
        self.assertNotIn("other", first)

    def test_bars_are_for_uniform_routing(self):
        found = run_of(times=1.5)
        found["cells"][0]["routings"][0]["routing"] = "zipf"
        report.judge(found)
        self.assertIsNone(found["cells"][0]["routings"][0]["verdict"])

    def test_drift_rejects(self):
        self.assertIsNone(self.judged(after=720e12)["rejected"])
        self.assertIn("4.3%", self.judged(after=730e12)["rejected"])

    def test_wrong_numbers_are_named(self):
        found = run_of()
        found["cells"][0]["routings"][0]["systems"]["peer"]["right"] = False
        report.judge(found)
        self.assertEqual(found["wrong"], ["peer at q30b 16384 uniform"])
        self.assertIn("wrong", report.table(found))

    def test_what_a_run_lacks(self):
        found = run_of()
        routing = found["cells"][0]["routings"][0]
        self.assertIsNone(report.lack(found))
        ours = routing["systems"].pop("moxie")
        self.assertEqual(report.lack(found), "moxie did not run in every cell")
        del found["systems"][0]
        self.assertIsNone(report.lack(found))
        routing["systems"].clear()
        self.assertEqual(report.lack(found), "no system ran")
        found.update(systems=[{"name": "moxie"}], cells=[])
        self.assertEqual(report.lack(found), "moxie did not run in every cell")
        found["cells"] = [{"routings": [{"systems": {"moxie": ours}}]}]
        self.assertIsNone(report.lack(found))

    def test_form(self):
        good = self.judged()
        self.assertEqual(report.faults(good), [])
        for change in (lambda run: run.pop("anchors"),
                       lambda run: run["cells"][0].pop("bar"),
                       lambda run: run["cells"][0].update(tokens="1"),
                       lambda run: run["cells"][0]["routings"][0]["floor_us"].pop("p90"),
                       lambda run: run["cells"][0]["routings"][0]["systems"]["peer"].pop("us"),
                       lambda run: run["systems"][0].update(absent=3),
                       lambda run: run.update(cells={})):
            bad = copy.deepcopy(good)
            change(bad)
            self.assertEqual(len(report.faults(bad)), 1, report.faults(bad))

    def test_table(self):
        text = report.table(self.judged(times=1.17, after=730e12))
        self.assertIn("| q30b | 16384 | uniform | 1566.0 | 1832.2 (1.170) | 2000.0 (1.277) | 1.19 "
                      "| 1.16 | met |", text)
        self.assertIn("**Rejected**", text)
        self.assertNotIn("not this GPU's", text)
        self.assertIn("Skipped: other (not installed)", text)
        found = run_of()
        found["cells"][0]["weight_sets"] = 3
        found["cells"][0]["routings"][0]["cold"] = False
        report.judge(found)
        self.assertIn("| 1566.0, 3 weight sets, warm |", report.table(found))
        found["machine"]["gpu"] = "NVIDIA H100 80GB HBM3"
        self.assertIn("not this GPU's", report.table(found))
        self.assertIn("| q30b | 16384 | moxie | 20.0 | 14.0 | met |", text)
        self.assertIn("; below Python, the bar is 15.\n", text)
        found["settings"]["device"] = "cpu"
        self.assertNotIn("the bar is 15", report.table(found))

    def test_curves(self):
        found = self.judged(times=1.25)
        self.assertEqual(report.curves(found)["q30b"]["moxie"], [(16384, 0.8)])

    def test_plot_tells_parts_from_layers(self):
        with mock.patch.object(report.chart, "draw") as draw:
            report.plot(self.judged(), "never.png")
        charts, _, _, dotted = draw.call_args.args
        self.assertEqual(list(charts["q30b bf16"]), ["moxie", "peer: two products"])
        self.assertEqual(list(dotted), ["peer: two products", "other: two products"])

    def test_no_plot_without_matplotlib(self):
        with mock.patch("importlib.util.find_spec", return_value=None):
            self.assertIn("matplotlib", report.plot(self.judged(), "never.png"))


class Command(unittest.TestCase):
    def test_without_torch_it_says_so(self):
        with tempfile.TemporaryDirectory() as folder:
            (pathlib.Path(folder) / "torch.py").write_text("raise ImportError\n")
            ran = subprocess.run([sys.executable, str(ROOT / "bench" / "layer")],
                                 capture_output=True, text=True, check=False,
                                 env={**os.environ, "PYTHONPATH": folder})
        self.assertEqual(ran.returncode, 1)
        self.assertIn("needs torch", ran.stderr)


if __name__ == "__main__":
    unittest.main()
