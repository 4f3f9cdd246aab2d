"""bench/vllm.py with a stand-in for vLLM's engine: what it asks for, compares and refuses.

Wants torch, as moxie.vllm does. No test reads a speed.
"""

import argparse
import contextlib
import importlib.util
import io
import json
import math
import pathlib
import runpy
import tempfile
import types
import unittest
from unittest import mock

import torch_python

torch_python.require(importlib.util.find_spec("torch"), "torch is")
import torch  # noqa: E402
from bench_engine import HERE, EngineProgram, measure  # noqa: E402

ENGINE = f"""
import os, sys, time, types
from importlib.metadata import entry_points
OURS = "MOXIE_PLUGIN" in os.environ
__version__ = "0.26.0"
sys.path.append({str(HERE)!r})
import stand_in
SHIFT, LAYERS, FAULT = (os.environ.get(name, "") for name in ("SHIFT", "LAYERS", "FAULT"))
# Moxie's adapter is itself, which wants torch, where nothing is to go wrong.
ADAPTER = OURS and not (SHIFT or LAYERS or FAULT)


class SamplingParams(types.SimpleNamespace):
    pass


class LLM:
    def __init__(self, **given):
        assert given["model"] == "somewhere" and given["skip_tokenizer_init"]
        assert given["quantization"] == "fp8_per_block" and given["enforce_eager"] is True
        assert given["max_model_len"] >= 1000 + 8
        ranks, rank = (int(os.environ.get("VLLM_DP_" + name, least))
                       for name, least in (("SIZE", 1), ("RANK", 0)))
        assert given["enable_expert_parallel"] == (ranks > 1)
        assert ranks == 1 or 0 < int(os.environ["VLLM_DP_MASTER_PORT"]) < 1 << 16
        if FAULT and (ranks > 1 or not OURS):
            if rank == ranks - 1 and FAULT != "hangs":
                raise SystemExit("vLLM's own engine is broken")
            time.sleep(600)  # for the other
        if ADAPTER:
            import vllm_stand_in
            vllm_stand_in.install()
        else:
            stand_in.install_torch()
            if OURS:
                stand_in.install_adapter("vllm")
        found = entry_points(group="vllm.general_plugins")
        assert [each.name for each in found] == ["moxie"]
        for each in found:
            each.load()()
        if OURS:
            import moxie.vllm
            moxie.vllm.layers_made = lambda: int(LAYERS or 4) if rank == 0 or not LAYERS else 0
            print("INFO Moxie was seen")

    def collective_rpc(self, call):
        return [call(self)]

    def generate(self, prompts, sampling, use_tqdm):
        assert sampling.temperature == 0 and sampling.ignore_eos and not use_tqdm
        return [self.answer(prompt["prompt_token_ids"], sampling) for prompt in prompts]

    def answer(self, prompt, sampling):
        tokens = [sum(prompt) % 97 + step for step in range(sampling.max_tokens)]
        shift = float(SHIFT or 0.01) if OURS else 0.0
        if OURS and len(prompt) == 37:
            tokens[3] += 1000  # from here on what is said is of another text
        entries = [{{each: types.SimpleNamespace(logprob=-1.0 - each + shift + (
            5.0 if each >= 1000 else 0.0)) for each in (token, token + 1)}} for token in tokens]
        return types.SimpleNamespace(outputs=[types.SimpleNamespace(token_ids=tokens,
                                                                    logprobs=entries)])
"""


class Program(EngineProgram, unittest.TestCase):
    engine, stand_in = "vllm", ENGINE
    arguments = ("--quantization", "fp8_per_block", "--engine", '{"enforce_eager": true}')

    def test_what_is_measured(self):
        self.expect_measured(self.run_main("--json"))

    def test_ranks(self):
        ran = self.run_main("--json", "--ranks", "2", "--rounds", "1")
        self.assertEqual(ran.returncode, 0, ran.stderr)
        found = json.loads(ran.stdout)
        # Four prompts of 8 tokens, and three of 16.
        self.assertEqual((found["ranks"], {name: each["tokens"] for name, each in
                                           found["logprobs"].items()}),
                         (2, {"moxie": 80, "moxie-experts": 80}))
        self.assertEqual([run["contestant"] for run in found["runs"]],
                         ["moxie", "vllm", "moxie-experts"])
        run = found["runs"][0]["prefill"]
        self.assertAlmostEqual(found["results"]["moxie"]["prefill"]["tokens_per_second"],
                               2 * 600 / sorted(run["seconds"])[1], delta=0.1)
        self.assertIn("moxie-experts: 2 engines start", ran.stderr)
        for environment, text in (({"LAYERS": "4"}, "computed no layer"),
                                  ({"FAULT": "1"}, "vLLM's own engine is broken"),
                                  ({"FAULT": "hangs"}, "had not ended after 20 s (--timeout-s)")):
            ran = self.run_main("--ranks", "2", "--rounds", "1", "--timeout-s", "20", **environment)
            self.assertEqual(ran.returncode, 1)
            self.assertIn(text, ran.stderr)
        self.assertEqual(ran.stderr.count("in make_engine"), 2)  # where both hung

    def test_dummies_grow(self):
        grow = runpy.run_path(str(Program.bench()), run_name="bench_vllm")["grow_dummies"]
        model = torch.nn.ModuleDict({"experts": torch.nn.Linear(2, 2, bias=False),
                                     "gate": torch.nn.Linear(2, 2, bias=False),
                                     "norm": torch.nn.LayerNorm(2, bias=False)})
        for weight in model.parameters():
            weight.data.fill_(0.001)
        model["codes"] = torch.nn.Linear(2, 2, bias=False)
        codes = torch.full((2, 2), 3.0).to(torch.float8_e4m3fn)
        model["codes"].weight = torch.nn.Parameter(codes, requires_grad=False)
        grow(types.SimpleNamespace(get_model=lambda: model), 2)
        for name, value in (("experts", 0.001 * 35 * 1.25), ("gate", 0.035), ("norm", 1),
                            ("codes", 3)):
            self.assertAlmostEqual(model[name].weight.flatten()[0].item(), value, places=6)

    def test_another_answer(self):
        ran = self.run_main("--rounds", "1", SHIFT="0.5")
        self.assertEqual(ran.returncode, 3)
        for text in ("fp8_per_block", "prefill of 600", "decode, 1 ", "decode, 2 ",
                     "at most 0.5, 27 of 32 tokens"):
            self.assertIn(text, ran.stdout)

    def test_what_cannot_be_measured(self):
        ran = self.run_main(LAYERS="0")
        self.assertEqual((ran.returncode, ran.stdout), (1, ""))
        self.assertIn("computed no layer", ran.stderr)
        self.assertIn("Moxie was seen", ran.stderr)
        ran = self.run_main(FAULT="1")
        self.assertEqual(ran.returncode, 1)
        self.assertIn("vllm: its engine ended with 1:\nvLLM's own engine is broken", ran.stderr)
        self.expect_refused_at_once()

    def test_usage(self):
        self.expect_shapes()
        for more, text in ((("--engine", "[1]"), "[1] is no JSON object"),
                           (("--engine", "{x"), "{x is no JSON object, as {"),
                           (("--batch", "0"), "at least 1"), (("--plugin", ""), "empty path")):
            ran = self.run_main(*more)
            self.assertEqual(ran.returncode, 2)
            self.assertIn(text, ran.stderr)
        ran = self.run_main(MOXIE_PLUGIN="")
        self.assertEqual(ran.returncode, 2)
        self.assertIn("--plugin, or MOXIE_PLUGIN", ran.stderr)


class Answers(unittest.TestCase):
    """What both programs make of what their engines have said, without engines."""

    def setUp(self):
        self.engines = measure("engines")

    def verdict(self, shift=0.0, moved=0, tolerance=0.25):
        """The exit code, what logprobs are in the JSON, and the text, where Moxie's engine is off by
        shift, and says other tokens from the moved-th on."""
        def run(shift, moved):
            tokens = [[each + 500 * (each >= moved) for each in range(8)] for _ in range(4)]
            one = {"seconds": [1.0], "busy_s": 0.0}
            return {"version": "1", "moxie": "here", "moxie_layers": 4, "ready_s": 1.0,
                    "said": [[[token, {token: -1.0 + shift}] for token in each] for each in tokens],
                    "prefill": one, "decode": {"1": one}}
        bench = self.engines.Bench(str(Program.bench()), "vllm", "vLLM")
        options = argparse.Namespace(
            contestant=None, plugin="here", no_gpu=True, json=False, batch=[1],
            prompt=600, steps=3, tolerance=tolerance, model="somewhere", quantization="none",
            shape=None)
        found = self.engines.measured(bench, options, [], {"moxie": [run(shift, moved)],
                                                           "vllm": [run(0.0, 8)]})
        with contextlib.redirect_stdout(io.StringIO()) as text, \
                mock.patch.object(self.engines, "check_here"):
            code = self.engines.main(bench, options, lambda options: found, None)
        return code, found["logprobs"]["moxie"], text.getvalue()

    def test_what_is_said(self):
        for given, code, most, same, text in (
                ({"moved": 8}, 0, 0.0, 32, "differ by at most 0.0, 32 of 32 tokens"),
                ({"shift": 0.5, "moved": 8}, 3, 0.5, 32, "differ by at most 0.5, 32 of"),
                ({"shift": 0.5, "moved": 8, "tolerance": 0.6}, 0, 0.5, 32, "at most 0.5"),
                ({"moved": 3}, 0, 0.0, 12, "at most 0.0, 12 of 32"),
                ({"shift": math.nan, "moved": 8}, 3, None, 32, "by more than can be said, 32 of"),
                ({"moved": 0}, 3, None, 0, "by more than can be said, 0 of 32")):
            with self.subTest(**given):
                said = self.verdict(**given)
                self.assertEqual(said[:2], (code, {"most": most, "same_tokens": same,
                                                   "tokens": 32}))
                self.assertIn(text, said[2])

    def test_plugin_that_the_loader_finds(self):
        with tempfile.TemporaryDirectory() as folder:
            for named, wanted in (("libmoxie.so", "libmoxie.so"), ("/a/../b.so", "/b.so"),
                                  ("./b.so", str(pathlib.Path("b.so").resolve()))):
                found = self.engines.environment_of(True, argparse.Namespace(plugin=named), folder,
                                                    "")
                self.assertEqual(found["MOXIE_PLUGIN"], wanted)

    def test_what_spans_cover(self):
        self.assertEqual(self.engines.union([(0, 4), (1, 2), (3, 6), (8, 9), (9, 10)]), 8)
        self.assertEqual(self.engines.union([]), 0)


if __name__ == "__main__":
    unittest.main()
