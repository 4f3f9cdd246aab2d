"""bench/layer with torch: draws, peers, the program on the CPU, its CUDA half on a pretended GPU.

Wants torch, of the interpreter that runs it or of build/torch (scripts/test makes that); without it
the exit code is 77.
"""

import contextlib
import importlib.util
import io
import json
import os
import pathlib
import runpy
import shutil
import sys
import tempfile
import types
import unittest
from unittest import mock

import torch_python

torch_python.require(importlib.util.find_spec("torch"), "torch is")
ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench" / "layer"), str(ROOT / "hosts" / "python")]

import torch  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

import peers  # noqa: E402
from measure import cells, device, numbers, race, report  # noqa: E402
from measure.case import FORWARDS, Case, off_by  # noqa: E402
from peers import deep_gemm, grouped_mm, moxie, triton  # noqa: E402
from pretended_gpu import PretendedCuda, PretendedGraph, pretend  # noqa: E402

# No test reads a speed.
device.Cpu.matrix, device.Cpu.read_bytes = 64, 1 << 20
numbers.REPLAYS_MIN = race.HOST_CALLS = 4
TINY = cells.SHAPES["tiny"]
MAIN = runpy.run_path(str(ROOT / "bench" / "layer" / "__main__.py"), run_name="bench_layer")


def options(**more):
    return types.SimpleNamespace(**{
        "format": "bf16", "plugin": None, "other_plugin": None, "triton_fused_moe": None,
        "triton_configs": None, "deep_gemm": None, "replays": 3, "steady": 0.0,
        "routing": ["uniform", "zipf", "one"], **more})


def case_of(tokens, sets=2, sizes=TINY, where=None, number="bf16"):
    case = Case(where or device.Cpu(), sizes, number, sets, 1)
    case.resize(tokens)
    return case


class Draws(unittest.TestCase):
    def test_different_experts_of_a_token(self):
        case = case_of(50)
        for routing in ("uniform", "zipf", "one"):
            case.draw(3, routing)
            ids = case.ids.long()
            self.assertGreaterEqual(ids.min().item(), 0)
            self.assertLess(ids.max().item(), TINY.experts)
            self.assertTrue((ids.sort(-1)[0].diff(dim=-1) > 0).all(), routing)

    def test_in_place_and_by_the_seed(self):
        case = case_of(20)
        address, ends = case.ids.data_ptr(), case.ends.data_ptr()
        case.draw(3, "uniform")
        first = case.ids.clone()
        case.draw(4, "uniform")
        self.assertFalse(torch.equal(case.ids, first))
        case.draw(3, "uniform")
        self.assertTrue(torch.equal(case.ids, first))
        self.assertEqual((address, ends), (case.ids.data_ptr(), case.ends.data_ptr()))
        self.assertFalse(torch.equal(first[0], first[1]))

    def test_counts_are_those_of_the_ids(self):
        case = case_of(20)
        case.draw(3, "zipf")
        for forward in range(FORWARDS):
            wanted = torch.bincount(case.ids[forward].view(-1), minlength=TINY.experts)
            self.assertTrue(torch.equal(case.counts[forward].long(), wanted))
            self.assertTrue(torch.equal(case.ends[forward].long(), wanted.cumsum(0)))
            self.assertEqual(case.hits()[forward], (wanted > 0).sum().item())

    def test_skew(self):
        case = case_of(400)
        most = {}
        for routing in ("uniform", "zipf", "one"):
            case.draw(5, routing)
            most[routing] = (case.counts.max(1)[0].float() / 400).mean().item()
        self.assertEqual(most["one"], 1.0)
        self.assertAlmostEqual(most["uniform"], TINY.top_k / TINY.experts, delta=0.06)
        self.assertGreater(most["zipf"], 1.5 * most["uniform"])
        self.assertGreater(1.0, most["zipf"])
        # The favourites of two forwards differ.
        self.assertGreater(case.counts.argmax(1).unique().numel(), 1)

    def test_seeds_differ_by_cell_routing_and_replay(self):
        cell = cells.select("bf16", ["q30b"])[0]
        seeds = {race.seed_of(each, routing, number) for each in (cell, cell._replace(tokens=2))
                 for routing in ("uniform", "one") for number in range(30)}
        self.assertEqual(len(seeds), 120)
        self.assertLess(max(seeds), 1 << 63)


class Answers(unittest.TestCase):
    def test_against_plain_loops(self):
        case = case_of(3)
        case.draw(3, "uniform")
        found = case.answer(3, [0, 2])
        w1, w2 = (each[1].double() for each in (case.w1, case.w2))  # 3 % 2 sets
        for row, token in enumerate((0, 2)):
            wanted = torch.zeros(TINY.hidden, dtype=torch.double)
            for slot in range(TINY.top_k):
                expert = case.ids[3, token, slot]
                both = w1[expert] @ case.x[3, token].double()
                gate, up = both[:TINY.intermediate], both[TINY.intermediate:]
                middle = gate / (1 + torch.exp(-gate)) * up
                wanted += case.router[3, token, slot].double() * (w2[expert] @ middle)
            self.assertLess(off_by(found[row], wanted), 1e-5)


@contextlib.contextmanager
def fake_deep_gemm(contiguous, masked, kind="fp8"):
    fake = types.ModuleType("deep_gemm")
    fake.__spec__ = importlib.util.spec_from_loader("deep_gemm", None)
    setattr(fake, f"m_grouped_{kind}_gemm_nt_contiguous", contiguous)
    setattr(fake, f"m_grouped_{kind}_gemm_nt_masked", masked)
    sys.modules["deep_gemm"] = fake
    try:
        yield
    finally:  # alone: what torch imported meanwhile stays, because some of it cannot be again
        del sys.modules["deep_gemm"]


class Peer(unittest.TestCase):
    def errors(self, system, tokens, routing="uniform", sizes=TINY):
        case = case_of(tokens, sizes=sizes, where=system.device, number=system.options.format)
        case.draw(3, "uniform")
        self.assertIsNone(system.available())
        system.prepare(case)
        replay = device.Cpu().capture([lambda forward=forward: system.run(forward)
                                       for forward in range(FORWARDS)])
        case.draw(4, routing)
        system.routed()
        replay.poison()
        replay.replay()
        answers = [case.answer(forward, case.some_tokens()) for forward in range(FORWARDS)]
        found = system.errors(answers, replay.outputs)
        system.release()
        return max(found)

    def check(self, make, tokens=(1, 5, 40), most=numbers.OFF_BY_MAX):
        for count in tokens:
            for routing in ("uniform", "zipf", "one"):
                error = self.errors(make(), count, routing)
                self.assertLess(error, most, (count, routing))


class Peers(Peer):
    def test_moxie(self):
        self.check(lambda: moxie.Moxie(options(), device.Cpu()))

    def test_moxie_s_own_call(self):
        system, case = moxie.Moxie(options(), device.Cpu()), case_of(5)
        case.draw(3, "uniform")
        self.assertIsNone(system.available())
        system.prepare(case)
        call = system.host_call()
        case.y.fill_(float("nan"))
        self.assertEqual(call(), 0)
        tokens = case.some_tokens()
        self.assertLess(off_by(case.y[0, tokens], case.answer(0, tokens)), numbers.OFF_BY_MAX)
        system.release()

    def test_grouped_mm(self):
        self.check(lambda: grouped_mm.Layer(options(), device.Cpu()))
        self.check(lambda: grouped_mm.Products(options(), device.Cpu()))

    def test_one_expert_a_token(self):
        sizes = cells.Shape(128, 64, 8, 1)
        for kind in (moxie.Moxie, grouped_mm.Layer, grouped_mm.Products):
            self.assertLess(self.errors(kind(options(), device.Cpu()), 9, sizes=sizes),
                            numbers.OFF_BY_MAX)

    def test_deep_gemm_s_layouts(self):
        def contiguous(a, b, d, layout):
            for row, expert in enumerate(layout.tolist()):
                if expert >= 0:
                    d[row] = b[expert] @ a[row]
            # What its kernels rely on: a block of rows is one expert's.
            for block in layout.view(-1, 128).tolist():
                assert len(set(block) - {-1}) <= 1 and (block[0] >= 0 or set(block) == {-1})

        def masked(a, b, d, counts, expected):
            for expert, count in enumerate(counts.tolist()):
                d[expert, :count] = a[expert, :count] @ b[expert].T

        with fake_deep_gemm(contiguous, masked, "bf16"):
            self.check(lambda: deep_gemm.Contiguous(options(), device.Cpu()))
            self.check(lambda: deep_gemm.Masked(options(), device.Cpu()))
            with self.assertRaises(peers.Unfit):
                system = deep_gemm.Masked(options(), device.Cpu())
                system.available()
                system.prepare(case_of(257))

    def test_as_many_rows_as_pairs(self):
        system = deep_gemm.Contiguous(options(), device.Cpu())
        system.module, case = types.SimpleNamespace(), case_of(40)
        case.draw(3, "zipf")
        system.prepare(case)
        self.assertEqual((system.layout >= 0).sum(1).tolist(), [case.pairs] * FORWARDS)

    def test_what_is_absent_says_why(self):
        with mock.patch.dict(os.environ, MOXIE_PLUGIN="/nowhere/libmoxie.so"):
            self.assertIn("/nowhere", moxie.Moxie(options(), device.Cpu()).available())
        for system in peers.systems(options(), device.Cpu())[3:]:
            self.assertTrue(system.available(), system.name)

    def chosen(self, names, *installed):
        """What is chosen on a machine with a GPU and these engines: {name: why not}."""
        given = MAIN["parse"](["--systems", names])
        where = types.SimpleNamespace(kind="cuda")
        engines = {name: lambda: None for name in triton.ENGINES}
        found_spec = mock.patch("importlib.util.find_spec", lambda name: name in installed or None)
        with found_spec, mock.patch.dict(triton.ENGINES, engines), \
                contextlib.redirect_stderr(io.StringIO()):
            return {each["name"]: each["absent"] for each in MAIN["choose"](given, where)[1]}

    def test_names(self):
        """A peer's own name and that of the engine that it finds; of an unknown one, all."""
        name, both = "triton_fused_moe", ("vllm", "sglang")
        self.assertEqual(self.chosen(name, *both), {name + "_vllm": None})
        self.assertEqual(self.chosen(name + "_sglang", *both), {name + "_sglang": None})
        self.assertEqual(self.chosen(f"{name}_sglang,{name}_vllm", "sglang"),
                         {name + "_sglang": None})
        self.assertIn("no vllm is installed", self.chosen(name + "_vllm", "sglang")[name])
        self.assertEqual(list(self.chosen("torch_grouped_mm,moxie")), ["moxie", "torch_grouped_mm"])
        said = io.StringIO()
        with self.assertRaises(SystemExit), contextlib.redirect_stderr(said):
            self.chosen("mxoie")
        self.assertIn(f"mxoie is none of moxie, torch_grouped_mm, torch_grouped_mm_products, {name}"
                      f", {name}_vllm, {name}_sglang, deep_gemm_vllm, deep_gemm, ", said.getvalue())

    def test_versions_of_engines(self):
        engines = {"vllm": lambda: None}
        found_spec = mock.patch("importlib.util.find_spec", lambda name: name == "vllm" or None)
        vllm = types.SimpleNamespace(__version__="9.8.7")
        with found_spec, mock.patch.dict(triton.ENGINES, engines), \
                mock.patch.dict(sys.modules, vllm=vllm):
            system = triton.Triton(options(), types.SimpleNamespace(kind="cuda"))
            self.assertIsNone(system.available())
        self.assertEqual(system.version, "9.8.7")

    def test_a_library_that_is_no_moxie(self):
        system = moxie.Moxie(options(plugin="libc.so.6"), device.Cpu())
        self.assertRegex(system.available(), "^libc.so.6 has no symbol .*with --plugin")

    def test_folders_that_options_name(self):
        """Where one is named, no other is measured: neither of two packages is anywhere else."""
        with tempfile.TemporaryDirectory() as folder, mock.patch.object(sys, "path", [*sys.path]):
            (pathlib.Path(folder) / "sglang.py").write_text("__version__ = '9'\n")
            gpu = types.SimpleNamespace(kind="cuda")
            engines = {name: lambda: None for name in triton.ENGINES}
            for where, name, absent in (
                    (folder, "triton_fused_moe_sglang", None),
                    ("/nowhere", "triton_fused_moe", "no package vllm or sglang in /nowhere; ")):
                with mock.patch.dict(triton.ENGINES, engines), \
                        mock.patch("importlib.util.find_spec", return_value=True):
                    system = triton.Triton(options(triton_fused_moe=where), gpu)
                    self.assertRegex(str(system.available()), f"^{absent}")
                self.assertEqual(system.name, name)
            with fake_deep_gemm(None, None, "bf16"):
                system = deep_gemm.Masked(options(deep_gemm=folder), gpu)
                self.assertEqual(system.available(), f"no package deep_gemm in {folder}; "
                                 "--deep-gemm names a folder that has it")

    def test_errors_are_seen(self):
        system = grouped_mm.Products(options(), device.Cpu())
        case = case_of(5)
        case.draw(3, "uniform")
        system.prepare(case)
        outputs = [system.run(forward) for forward in range(FORWARDS)]
        self.assertLess(max(system.errors(None, outputs)), numbers.OFF_BY_MAX)
        outputs[6] = outputs[5]
        self.assertGreater(max(system.errors(None, outputs)), 0.5)


# ---- The CUDA half -----------------------------------------------------------------------------

class CudaHalf(unittest.TestCase):
    def setUp(self):
        self.addCleanup(pretend().close)
        PretendedGraph.made.clear()
        self.device = PretendedCuda()

    def test_replays_follow_the_draw(self):
        """A graph captured at uniform routing is right at every other one: nothing is baked in."""
        for kind in (grouped_mm.Layer, grouped_mm.Products):
            case = case_of(6, where=self.device)
            case.draw(1, "uniform")
            system = kind(options(), self.device)
            contestant = race.Contestant(system, self.device)
            contestant.get_ready(case)
            self.assertIsNone(contestant.absent)
            for routing in ("zipf", "one", "uniform"):
                case.draw(2, routing)
                contestant.race(0.0, 1.0, "x")
                contestant.verify([case.answer(forward, case.some_tokens())
                                   for forward in range(FORWARDS)])
                self.assertLess(contestant.error, numbers.OFF_BY_MAX, (kind, routing))

    def test_a_replay_that_does_nothing_leaves_poison(self):
        case = case_of(6, where=self.device)
        case.draw(1, "uniform")
        contestant = race.Contestant(grouped_mm.Layer(options(), self.device), self.device)
        contestant.get_ready(case)
        PretendedGraph.made[-1].calls = []
        contestant.race(0.0, 1.0, "x")
        contestant.verify([case.answer(forward, case.some_tokens())
                           for forward in range(FORWARDS)])
        found = contestant.result()
        self.assertFalse(found["right"])
        self.assertIsNone(found["error"])

    def test_what_waits_for_the_gpu_is_absent(self):
        class Waits(grouped_mm.Layer):
            def run(self, forward):
                self.case.counts.sum().item()
                return super().run(forward)

        case = case_of(6, where=self.device)
        case.draw(1, "uniform")
        contestant = race.Contestant(Waits(options(), self.device), self.device)
        contestant.get_ready(case)
        self.assertIn("in a capture", contestant.absent)

    def test_a_separator_before_each_forward(self):
        forwards = [lambda: None] * FORWARDS
        self.device.capture(forwards)
        graph = PretendedGraph.made[-1]
        bells = [call for call in graph.calls if call[1] and call[1][0] is self.device.bell]
        self.assertEqual(len(bells), FORWARDS)
        self.assertEqual(self.device.separators(FORWARDS, 3), 100.0)

    def test_one_untimed_replay_then_poison_then_the_timed_one(self):
        order = []
        replay = types.SimpleNamespace(replay=lambda: order.append("replay"),
                                       poison=lambda: order.append("poison"))
        self.device.before.record.side_effect = lambda: order.append("record")
        self.device.time(replay, "x")
        self.assertEqual(order, ["replay", "poison", "record", "replay", "record"])

    def test_the_whole_program(self):
        with tempfile.TemporaryDirectory() as folder:
            out = str(pathlib.Path(folder) / "r")
            with mock.patch.dict(device.DEVICES, cuda=PretendedCuda), \
                    mock.patch("torch.cuda.is_available", return_value=True), \
                    contextlib.redirect_stdout(io.StringIO()), \
                    contextlib.redirect_stderr(io.StringIO()):
                status = MAIN["main"](["--shape", "tiny", "--tokens", "1,5", "--steady", "0",
                                       "--drift", "9", "--out", out, "--systems",
                                       "torch_grouped_mm,torch_grouped_mm_products"])
            found = json.loads(pathlib.Path(out + ".json").read_text())
        self.assertEqual(status, 0)
        self.assertEqual(found["machine"]["gpu"], "pretended")
        for cell in found["cells"]:
            self.assertEqual(cell["separators_us"], 100.0)
            for routing in cell["routings"]:
                for system in routing["systems"].values():
                    self.assertEqual(system["us"], {"median": 50.0, "p10": 50.0, "p90": 50.0,
                                                    "count": numbers.REPLAYS_MIN})


@contextlib.contextmanager
def no_numbers():
    """Without a GPU there are no generators of one, nor draws that need their numbers."""
    with mock.patch.object(torch, "Generator", return_value=torch.Generator()), \
            mock.patch.object(torch.Tensor, "exponential_", lambda each, generator: each):
        yield


class WithoutNumbers(unittest.TestCase):
    """What is enqueued on a GPU, at real sizes, in tensors without numbers: types and devices."""

    def case(self, shape, tokens, number="bf16"):
        where = device.Cpu()
        where.torch_device = torch.device("cuda", 0)
        with no_numbers():
            case = Case(where, cells.SHAPES[shape], number, 8, 1)
            case.resize(tokens)
            case.draw(3, "zipf")
        return case


class OnAGpu(WithoutNumbers):
    def test_draws_and_products(self):
        for shape, tokens in (("q30b", 64), ("q235b", 16384), ("dsv3ep8", 32768), ("mixtral", 1)):
            with FakeTensorMode():
                case = self.case(shape, tokens)
                for kind in (grouped_mm.Layer, grouped_mm.Products):
                    system = kind(options(), case.device)
                    system.prepare(case)
                    y = system.run(7)
                    self.assertEqual(y.device.type, "cuda")
                    self.assertEqual(y.shape[-1], case.sizes.hidden)
                    self.assertEqual(y.dtype, torch.bfloat16)
                device.Replay(None, [case.y[0], y], None).poison()

    def test_layouts(self):
        seen = []
        fake = types.SimpleNamespace(get_m_alignment_for_contiguous_layout=lambda: 128)
        for kind in (deep_gemm.Contiguous, deep_gemm.Masked):
            with FakeTensorMode():
                case = self.case("q30b", 256)
                system = kind(options(), case.device)
                system.module, system.multiply = fake, lambda *given: seen.append(given)
                system.prepare(case)
                system.routed()
                system.run(7)
                for a, b, out, layout, *_ in seen[-2:]:
                    self.assertEqual({each.device.type for each in (a, b, out, layout)}, {"cuda"})
                    self.assertEqual(layout.dtype, torch.int32)
                    self.assertEqual((a.shape[-1], b.shape[1]), (b.shape[2], out.shape[-1]))
                    self.assertEqual(a.shape[:-1], out.shape[:-1])
                    self.assertTrue(all(each.is_contiguous() for each in (a, b, out, layout)))


# ---- The program on the CPU --------------------------------------------------------------------

RIGHT = """
import torch

def fused_experts(hidden_states, w1, w2, topk_weights, topk_ids):
    gates = torch.einsum("th,tkih->tki", hidden_states.float(), w1[topk_ids].float())
    gate, up = gates.chunk(2, -1)
    out = torch.einsum("tki,tkhi->tkh", torch.nn.functional.silu(gate) * up, w2[topk_ids].float())
    return (out * topk_weights[..., None]).sum(1).to(hidden_states.dtype)
"""
WRONG = RIGHT.replace("silu(gate)", "gelu(gate)")
LAZY = RIGHT.replace("def fused_experts", "kept = {}\n\n\ndef once") + """
def fused_experts(hidden_states, **more):
    key = hidden_states.data_ptr()
    if key not in kept:
        kept[key] = once(hidden_states, **more)
    return kept[key]
"""


class Program(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def run_main(self, *arguments):
        said = io.StringIO()
        with contextlib.redirect_stdout(io.StringIO()) as printed, \
                contextlib.redirect_stderr(said):
            status = MAIN["main"](["--device", "cpu", "--replays", "4", "--tokens", "1,7",
                                   "--out", str(self.folder / "r"), *arguments])
        self.said = said.getvalue()
        found = json.loads((self.folder / "r.json").read_text())
        self.assertEqual((self.folder / "r.md").read_text(), printed.getvalue())
        return status, found

    def refused(self, *arguments):
        """What a run says that ends at once."""
        measured = mock.Mock(side_effect=AssertionError("anchors were measured"))
        with contextlib.redirect_stderr(io.StringIO()) as said, \
                mock.patch.dict(MAIN["measure"].__globals__, anchors=measured):
            self.assertEqual(MAIN["main"](["--device", "cpu", "--out", str(self.folder / "r"),
                                           *arguments]), 1)
        self.assertEqual(list(self.folder.glob("r*")), [])
        return said.getvalue()

    def peer(self, text):
        path = self.folder / "given.py"
        path.write_text(text)
        return "--triton-fused-moe", str(path)


class Programs(Program):
    def test_all_systems(self):
        status, found = self.run_main("--drift", "9", *self.peer(RIGHT))
        self.assertEqual(status, 0)
        self.assertEqual(report.faults(found), [])
        self.assertEqual(len(found["cells"]), 2)
        for cell in found["cells"]:
            self.assertEqual(len(cell["routings"]), 3)
            for routing in cell["routings"]:
                self.assertEqual(list(routing["systems"]), [
                    "moxie", "torch_grouped_mm", "torch_grouped_mm_products", "triton_fused_moe"])
                for system in routing["systems"].values():
                    self.assertEqual(system["times"]["count"], 4)
                    self.assertLess(system["error"], numbers.OFF_BY_MAX)
            self.assertIn("below_python", cell["host_us"]["moxie"])
        self.assertEqual(found["cells"][0]["routings"][0]["experts_hit"]["median"], TINY.top_k)
        self.assertIn("deep_gemm is not installed", self.said)
        has_plot = importlib.util.find_spec("matplotlib") is not None
        self.assertEqual((self.folder / "r.png").exists(), has_plot)

    def test_two_builds(self):
        other = str(self.folder / "other.so")
        shutil.copy(os.environ["MOXIE_PLUGIN"], other)
        status, found = self.run_main("--drift", "9", "--routing", "uniform", "--systems",
                                      "moxie,moxie_other", "--other-plugin", other)
        self.assertEqual(status, 0)
        for cell in found["cells"]:
            self.assertEqual(list(cell["routings"][0]["systems"]), ["moxie", "moxie_other"])
        self.assertEqual(*(each["version"] for each in found["systems"]))

    def test_wrong_numbers(self):
        status, found = self.run_main("--drift", "9", "--routing", "uniform", *self.peer(WRONG))
        self.assertEqual(status, 3)
        self.assertEqual(found["wrong"], ["triton_fused_moe at tiny 1 uniform",
                                          "triton_fused_moe at tiny 7 uniform"])

    def test_numbers_of_before(self):
        status, found = self.run_main("--drift", "9", "--routing", "uniform", *self.peer(LAZY))
        self.assertEqual(status, 3)
        self.assertIsNone(found["cells"][0]["routings"][0]["systems"]["triton_fused_moe"]["error"])

    def test_a_peer_that_fails_takes_no_part(self):
        text = "def fused_experts(**all):\n    raise RuntimeError('no such tile\\nmore')\n"
        status, found = self.run_main("--drift", "9", "--routing", "uniform", *self.peer(text))
        self.assertEqual(status, 0)
        self.assertEqual(found["cells"][0]["absent"],
                         {"triton_fused_moe": "RuntimeError: no such tile more"})

    def test_what_has_to_be_there_and_is_not_ends_the_run_at_once(self):
        """Moxie, and what an option names."""
        with mock.patch.dict(os.environ, MOXIE_PLUGIN="/nowhere/libmoxie.so"):
            self.assertRegex(self.refused(), "^moxie: /nowhere/libmoxie.so cannot .* --plugin")
        nowhere, fused = "/nowhere", self.peer("no python")[1]
        for arguments, said in (
                (["--plugin", nowhere], "moxie: /nowhere cannot be loaded"),
                (["--other-plugin", nowhere], "moxie_other: /nowhere .* --other-plugin"),
                (["--deep-gemm", nowhere], "deep_gemm: no package deep_gemm in /nowhere; --deep"),
                (["--deep-gemm", nowhere, "--format", "fp8"], "deep_gemm: no package deep_gemm in"),
                (["--format", "fp8", "--systems", "deep_gemm_vllm", "--triton-fused-moe", nowhere],
                 "deep_gemm_vllm: no package vllm in /nowhere; --triton"),
                (["--triton-fused-moe", nowhere], "triton_fused_moe: no package vllm or sglang in"),
                (["--triton-fused-moe", fused], f"triton_fused_moe: {fused}: SyntaxError"),
                (["--triton-configs", nowhere], "triton_fused_moe: no folder /nowhere; --triton-c"),
                (["--triton-configs", str(self.folder)], "triton_fused_moe: needs a GPU")):
            with self.subTest(arguments), mock.patch.object(sys, "path", [*sys.path]):
                self.assertRegex(self.refused(*arguments), f"^{said}[^\n]*\n$")

    def test_what_nobody_asked_for_need_not_be_there(self):
        status, _ = self.run_main("--drift", "9", "--routing", "uniform", "--plugin",
                                  "/nowhere/libmoxie.so", "--deep-gemm", "/nowhere", "--systems",
                                  "torch_grouped_mm")
        self.assertEqual(status, 0)
        self.assertNotIn("/nowhere", self.said)

    def test_anchors_that_moved(self):
        status, found = self.run_main("--drift", "0", "--routing", "uniform", "--systems", "moxie")
        self.assertEqual(status, 4)
        self.assertIn("read_bytes_per_s moved", found["rejected"])
        self.assertIn("Rejected", (self.folder / "r.md").read_text())

    def test_too_little_memory(self):
        one = cells.set_bytes(TINY, "bf16") / 1e9
        status, found = self.run_main("--drift", "9", "--routing", "uniform", "--systems", "moxie",
                                      "--memory-gb", str(2.5 * one))
        self.assertEqual((status, found["cells"][0]["weight_sets"], found["complete"]), (0, 2, True))
        self.assertIn("2 weight sets", self.said)
        status, found = self.run_main("--drift", "9", "--memory-gb", str(0.5 * one))
        self.assertEqual((status, found["cells"], found["complete"]), (1, [], False))
        self.assertIn("tiny: one weight set takes 0.003 GB", found["skipped"][0])
        table = (self.folder / "r.md").read_text()
        self.assertIn("Skipped: tiny", table)
        self.assertIn("**Incomplete**: no cell was measured.", table)

    def test_usage(self):
        for arguments in (["--replays", "3"], ["--shape", "q31b"], ["--tokens", "0"],
                          ["--systems", "moxie,mxoie"], ["--systems", ","], ["--plugin", ""],
                          ["--deep-gemm", ""], ["--triton-fused-moe", ""],
                          ["--device", "cpu", "--replays", "0"], ["--threads", "-1"],
                          ["--memory-gb", "-5"], ["--seed", "99999999999999999999999"],
                          ["--drift", "nan"], ["--steady", "nan"], ["--steady", "inf"],
                          ["--out", "/proc/x/layer"], ["--out", "new/"], ["--out", ""]):
            with self.assertRaises(SystemExit) as ended, \
                    contextlib.redirect_stderr(io.StringIO()):
                MAIN["parse"](arguments)
            self.assertEqual(ended.exception.code, 2)
        self.assertEqual(MAIN["parse"](["--quick"]).shape, ["q30b"])
        self.assertEqual(len(MAIN["parse"]([]).shape), 5)
        for arguments, most in (([], 0.03), (["--device", "cpu"], 0.25), (["--drift", "1"], 1)):
            self.assertEqual(MAIN["parse"](arguments).drift, most)
        self.assertEqual(len(MAIN["parse"](["--format", "fp8"]).shape), 7)


if __name__ == "__main__":
    unittest.main()
