"""hosts/python/moxie/transformers.py: whole models, their logits with moxie against eager; and
bench/transformers.py on a tiny one.

Wants what transformers_case.py wants.
"""

import contextlib
import copy
import io
import json
import tempfile
import unittest
from unittest import mock

from transformers_case import (
    BENCH, DEVICE, LAYERS, MODELS, ON_CPU, TINY_QWEN3, Case, adapter, logits, model_of, prompt,
    relative, routed_as, save_mxfp4_config)

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moxie import MoxieError, abi
from moxie.transformers_mxfp4 import Mxfp4Experts


class Models(Case):
    @unittest.skipUnless(ON_CPU, "the runner on this device has no f32")
    def test_f32(self):
        for name in MODELS:
            with self.subTest(name):
                model, ids = model_of(name), prompt()
                wanted = logits(model, "eager", ids)
                self.assertLess(relative(logits(model, "moxie", ids), wanted), 5e-6)

    def test_16_bit(self):
        """Nobody rounds like another, and a rounding can send a token elsewhere: with the routes of
        the f32 model, the logits are no farther from its logits than those of eager."""
        for name in MODELS:
            for dtype in (torch.bfloat16, torch.float16):
                with self.subTest(name, dtype=dtype):
                    model, ids, routes = model_of(name, dtype), prompt(), []
                    exact = copy.deepcopy(model).float()
                    with routed_as(exact, routes):
                        wanted = logits(exact, "eager", ids)
                    with routed_as(model, routes):
                        eager = logits(model, "eager", ids)
                        seen = logits(model, "moxie", ids)
                    self.assertEqual(seen.dtype, dtype)
                    self.assertLess(relative(seen, wanted), 1.3 * relative(eager, wanted))
                    self.assertLess(relative(seen, eager), 3 * torch.finfo(dtype).eps)

    @unittest.skipUnless(ON_CPU, "the runner on this device has no f32")
    def test_generate(self):
        """Prefill, then one token at a time with a cache."""
        for name in MODELS:
            with self.subTest(name):
                model, ids, out = model_of(name), prompt(tokens=9), {}
                for implementation in ("eager", "moxie"):
                    model.set_experts_implementation(implementation)
                    out[implementation] = model.generate(
                        ids, max_new_tokens=12, do_sample=False, pad_token_id=0,
                        output_logits=True, return_dict_in_generate=True)
                self.assertTrue(torch.equal(out["moxie"].sequences, out["eager"].sequences))
                for seen, wanted in zip(out["moxie"].logits, out["eager"].logits):
                    self.assertLess(relative(seen, wanted), 1e-5)

    @unittest.skipUnless(ON_CPU, "the runner on this device has no f32")
    def test_golden_checkpoint(self):
        golden = load_file(TINY_QWEN3 / "logits_golden.safetensors")
        model = AutoModelForCausalLM.from_pretrained(
            TINY_QWEN3, dtype=torch.float32, experts_implementation="moxie").eval()
        # The golden logits are of a model that was cast to bf16 with its rotary frequencies.
        rotary = model.model.rotary_emb
        rotary.inv_freq = rotary.inv_freq.bfloat16().float()
        with torch.no_grad():
            seen = model(golden["input_ids"].long()[None]).logits[0]
        self.assertLess(relative(seen, golden["logits"]), 5e-6)
        for module in adapter._experts_modules(model):
            self.assertIn(module, adapter._layers)

    def test_from_config(self):
        config = AutoConfig.for_model("mixtral", **MODELS["mixtral"])
        model = AutoModelForCausalLM.from_config(config, experts_implementation="moxie",
                                                 dtype=torch.bfloat16).to(DEVICE)
        with torch.no_grad():
            model(prompt())
        self.assertEqual(sum(module in adapter._layers for module in model.modules()), LAYERS)

    def test_compiled(self):
        model, ids = model_of("qwen3_moe", torch.bfloat16), prompt()
        wanted = logits(model, "moxie", ids)
        # torch 2.11 says so of whatever it compiles
        with torch.no_grad(), mock.patch.object(adapter, "_is_exporting", lambda: True), \
                mock.patch.object(adapter, "_opaque_forward",
                                  wraps=adapter._opaque_forward) as opaque:
            seen = torch.compile(model, backend="eager")(ids).logits
        self.assertTrue(torch.equal(seen, wanted))
        self.assertEqual(opaque.call_count, LAYERS)


@unittest.skipIf(ON_CPU, "wants a GPU")
class Enqueued(Case):
    def test_graph(self):
        """A step captured before any forward, and replayed on other tokens."""
        model, first, second = model_of("qwen3_moe", torch.bfloat16), prompt(), prompt().flip(0)
        wanted = [logits(model, "moxie", ids) for ids in (first, second)]
        adapter.release(model)
        adapter.prepare(model)
        ids, graph = first.clone(), torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            out = model(ids, use_cache=False).logits
        for given, want in zip((first, second), wanted):
            ids.copy_(given)
            graph.replay()
            self.assertLess(relative(out, want), 1e-2)

    def test_streams(self):
        """Two in turns, of which the last is at work when the buffers go back."""
        model, ids = model_of("mixtral", torch.bfloat16), prompt()
        wanted = logits(model, "moxie", ids)
        streams = torch.cuda.Stream(), torch.cuda.Stream()
        torch.cuda.synchronize()
        seen = []
        for stream in streams * 4:
            with torch.cuda.stream(stream):
                seen.append(logits(model, "moxie", ids))
        adapter.release(model)
        others = [torch.full((1 << 20,), 7, device=DEVICE) for _ in range(16)]
        torch.cuda.synchronize()
        for each in seen:
            self.assertTrue(torch.equal(each, wanted))
        del others


class Benchmark(Case):
    def main(self, *arguments):
        """(exit code, standard output)."""
        text = io.StringIO()
        self.said = io.StringIO()
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(self.said):
            code = BENCH["main"](["--layers", "1", "--prompt", "2", "--steps", "1", "--rounds", "1",
                                  "--against", "eager", "--device", DEVICE.type, *arguments])
        return code, text.getvalue()

    def test_a_run(self):
        code, text = self.main()
        self.assertEqual(code, 0)
        self.assertRegex(text, r"(?m)^moxie .*\n^eager ")
        self.assertEqual(self.main("--tolerance", "0")[0], 3)

    def test_packed_experts(self):
        """Of a configuration that says mxfp4."""
        config = AutoConfig.for_model("gpt_oss", **{**MODELS["gpt_oss"], "intermediate_size": 96})
        with tempfile.TemporaryDirectory() as folder:
            save_mxfp4_config(config, folder)
            with mock.patch.object(Mxfp4Experts, "_unpacked", autospec=True,
                                   side_effect=Mxfp4Experts._unpacked) as unpacked:
                self.assertEqual(self.main("--config", folder)[0], 0, self.said.getvalue())
        unpacked.assert_called()  # for eager

    def test_logits_that_are_no_numbers(self):
        logits_of = BENCH["Contestant"].logits
        for number in ("nan", "inf"):
            def logits_with(contestant, ids):
                found = logits_of(contestant, ids)
                return found * float(number) if contestant.name == "moxie" else found

            with mock.patch.object(BENCH["Contestant"], "logits", logits_with):
                code, text = self.main("--json", "--tolerance", "inf")
            found = json.loads(text, parse_constant=self.fail)
            self.assertEqual((code, found["logits"]["moxie"]),
                             (3, {"whole": None, "median_token": None}))
            self.assertEqual(found["logits"]["eager"]["whole"], 0)

    def test_a_library_that_is_none(self):
        """In words, and before a model is made."""
        refused = MoxieError(abi.E_VERSION, -1, "libc.so.6 is no libmoxie")
        made = AssertionError("a model is made")
        with mock.patch.object(AutoModelForCausalLM, "from_config", side_effect=made):
            with mock.patch("moxie.host.load", side_effect=refused), \
                    mock.patch.dict(adapter._libraries, clear=True):
                self.assertEqual(self.main(), (1, ""))
            self.assertIn("moxie: libc.so.6 is no libmoxie", self.said.getvalue())
            self.assertEqual(self.main("--plugin", "/nowhere/libmoxie.so"), (1, ""))
        self.assertIn("moxie: /nowhere/libmoxie.so cannot be loaded", self.said.getvalue())

    def test_usage(self):
        """In words, and before a model is made."""
        config = tempfile.NamedTemporaryFile(suffix=".json", mode="w")
        self.addCleanup(config.close)
        config.write('{"model_type": "no_such_model"}')
        config.flush()
        pictures = tempfile.NamedTemporaryFile(suffix=".json", mode="w")
        self.addCleanup(pictures.close)
        pictures.write('{"model_type": "qwen3_vl_moe"}')
        pictures.flush()
        for arguments, words in ((["--against", "egaer"], "egaer is none of "),
                                 (["--against", "moxie"], "moxie is none of "),
                                 (["--against", ","], "nothing is none of "),
                                 (["--config", "/nowhere"], "/nowhere: there is no such file"),
                                 (["--config", config.name], "no_such_model"),
                                 (["--config", pictures.name], "causal language model of Qwen3VL"),
                                 (["--shape", "tinny"], "tinny"),
                                 (["--layers", "-1"], "-1 is not 0 or more"),
                                 (["--batch", "0"], "0 is not 1 or more"),
                                 (["--prompt", "-3"], "-3 is not 1 or more"),
                                 (["--steps", "0"], "0 is not 1 or more"),
                                 (["--rounds", "0"], "0 is not 1 or more"),
                                 (["--threads", "-1"], "-1 is not 1 or more"),
                                 (["--threads", "1025"], "1025 is more than 1024"),
                                 (["--forward-tokens-max", "0"], "0 is not 1 or more"),
                                 (["--tolerance", "nan"], "nan is not 0 or more"),
                                 (["--device", "cpu", "--graph"], "--graph needs --device cuda"),
                                 (["--plugin", ""], "an empty path"),
                                 (["--batch", "two"], "two is no whole number")):
            made = AssertionError("a model is made")
            with self.subTest(arguments=arguments), self.assertRaises(SystemExit) as ended, \
                    mock.patch.object(AutoModelForCausalLM, "from_config", side_effect=made):
                self.main(*arguments)
            self.assertEqual(ended.exception.code, 2)
            self.assertIn(words, self.said.getvalue())

    def test_a_model_that_moxie_does_not_run(self):
        """Whose experts, where it has any, have one implementation under every name."""
        config = tempfile.NamedTemporaryFile(suffix=".json", mode="w")
        self.addCleanup(config.close)
        json.dump({"model_type": "llama", "hidden_size": 32, "intermediate_size": 32,
                   "num_attention_heads": 2, "vocab_size": 64}, config)
        config.flush()
        self.assertEqual(self.main("--config", config.name), (1, ""))
        self.assertIn("Moxie ran none or not all of this llama of 1 layers", self.said.getvalue())

    def test_an_implementation_that_is_not_installed(self):
        absent = ImportError("no kernels here")
        with mock.patch.dict(ALL_EXPERTS_FUNCTIONS, grouped_mm=mock.Mock(side_effect=absent)):
            self.assertEqual(self.main("--against", "grouped_mm"), (1, ""))
        self.assertIn("grouped_mm cannot run here: no kernels here", self.said.getvalue())

    def test_layers_are_those_that_ran(self):
        for given, wanted in (("0", 4), ("2", 2)):
            code, text = self.main("--json", "--layers", given)
            self.assertEqual((code, json.loads(text)["layers"]), (0, wanted))

    def test_another_gpu_is_refused(self):
        """Events, streams and synchronize() are of the current one."""
        for name in ("cuda:1", "cpu:0"):
            with self.assertRaises(SystemExit) as ended:
                self.main("--device", name)
            self.assertEqual(ended.exception.code, 2)


if __name__ == "__main__":
    unittest.main()
