"""The command moxie from outside, on real and on hostile input.

    MOXIE_COMMAND=build/dev/bin/moxie MOXIE_GOLDEN=host_tests/golden python3 test_cli.py [GROUP]

MOXIE_PLUGIN names the library when it is not beside the command or in ../lib, and MOXIE_RUNNER what its runner is
called when that is not moxie_cpu: a host swaps plugins by path, so Golden and Routing hold for every plugin.
"""

import json
import math
import os
import signal
import subprocess
import time
import unittest

import safetensors_files as files
from case import BOUNDS, COMMAND, GOLDEN, LAYER, LAYERS, MODELS, RUNNER, TIMEOUT_S, Case, layer, model_arguments


class Golden(Case):
    """Every golden layer and model, over 1, 2, 3, 4 and 7 ranks, with both dispatchers; another library than ours over 1 and 3."""

    RANKS = (1, 2, 3, 4, 7) if RUNNER == "moxie_cpu" else (1, 3)

    def check(self, name, arguments):
        exact = 2e-6 if "gpt" in name else 1e-6
        for ranks in self.RANKS:
            for dispatcher in ("allgather", "alltoall"):
                with self.subTest(name=name, ranks=ranks, dispatcher=dispatcher):
                    self.run_layer(*arguments, bound=exact if ranks == 1 else 2e-6, ranks=ranks,
                                   dispatcher=dispatcher)
        with self.subTest(name=name, dispatcher="auto"):
            self.run_layer(*arguments, bound=exact)

    def test_layers(self):
        self.assertEqual(len(LAYERS), 8)
        for name in LAYERS:
            self.check(name, ["--layer-file", layer(name)])

    def test_models(self):
        for folder, number in MODELS:
            self.check(folder, model_arguments(folder, number))

    def test_output_file(self):
        for ranks in (1, 3):
            self.moxie("run", "--layer-file", layer("mixtral_a.safetensors"), "--ranks", str(ranks), "--output",
                       self.path("out"))
            tensors, _ = files.read(self.path("out"))
            self.assertEqual(list(tensors), ["output"])
            golden, _ = files.read(layer("mixtral_a.safetensors"))
            self.assertEqual(tensors["output"].shape, golden["routed_output"].shape)
            pairs = list(zip(tensors["output"].floats(), golden["routed_output"].floats()))
            self.assertLess(math.dist(*zip(*pairs)), 2e-6 * math.hypot(*(b for _, b in pairs)))

    def test_human_output(self):
        text, trouble = self.moxie("run", "--layer-file", layer("mixtral_a.safetensors"))
        self.assertRegex(text, r"relative error +\d\.\d+e[-+]\d+")
        self.assertEqual(trouble, "")

    def test_int64_ids(self):
        tensors, metadata = files.read(layer("mixtral_a.safetensors"))
        tensors["topk_ids"] = tensors["topk_ids"].as_i64()
        files.write(self.path("layer"), tensors, metadata)
        self.run_layer("--layer-file", self.path("layer"), ranks=2)


class Routing(Case):
    """Without ids the model's router chooses; and checkpoints under their other names."""

    def test_layers(self):
        for name in LAYERS:
            tensors, metadata = files.read(layer(name))
            del tensors["topk_ids"], tensors["topk_weights"]
            files.write(self.path(name), tensors, metadata)
            for ranks in (1, 3):
                with self.subTest(name=name, ranks=ranks):
                    self.run_layer("--layer-file", self.path(name), ranks=ranks)

    def test_models(self):
        for folder, number in MODELS:
            arguments = model_arguments(folder, number)
            tensors, metadata = files.read(arguments[-1])
            del tensors["topk_ids"], tensors["topk_weights"]
            files.write(self.path("input"), tensors, metadata)
            with self.subTest(folder=folder):
                weights, _ = files.read(arguments[1] + "/model.safetensors")
                if any(name.endswith((".gate.weight", ".router.weight")) for name in weights):
                    self.run_layer(*arguments[:-1], self.path("input"), ranks=2)
                else:
                    _, trouble = self.moxie("run", *arguments[:-1], self.path("input"), code=1)
                    self.assertIn("no router", trouble)

    def test_families_that_route_as_others(self):
        for name, families in (("deepseek_v3_a", ("kimi_k2", "glm4_moe")), ("qwen3_moe_a", ("qwen3_next",))):
            tensors, metadata = files.read(layer(name + ".safetensors"))
            del tensors["topk_ids"], tensors["topk_weights"]
            for family in families:
                files.write(self.path(family), tensors, {**metadata, "family": family})
                with self.subTest(family=family):
                    self.run_layer("--layer-file", self.path(family))

    def test_unknown_family(self):
        tensors, metadata = files.read(layer("mixtral_a.safetensors"))
        metadata["family"] = "another"
        files.write(self.path("given"), tensors, metadata)
        self.run_layer("--layer-file", self.path("given"))
        del tensors["topk_ids"], tensors["topk_weights"]
        files.write(self.path("routed"), tensors, metadata)
        _, trouble = self.moxie("run", "--layer-file", self.path("routed"), code=2)
        self.assertIn("topk_ids", trouble)

    def test_shards(self):
        folder, number = MODELS[0]
        tensors, metadata = files.read("%s/models/%s/model.safetensors" % (GOLDEN, folder))
        names = sorted(tensors)
        halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
        for shard, members in halves.items():
            files.write(self.path(shard), {name: tensors[name] for name in members}, metadata)
        weight_map = {name: shard for shard, members in halves.items() for name in members}
        self.write("model.safetensors.index.json", json.dumps({"metadata": {}, "weight_map": weight_map}))
        with open("%s/models/%s/config.json" % (GOLDEN, folder), encoding="utf-8") as file:
            self.write("config.json", file.read())
        self.run_layer(*model_arguments(folder, number, self.folder), ranks=3)
        os.unlink(self.path("model-00002-of-00002.safetensors"))
        _, trouble = self.moxie("run", *model_arguments(folder, number, self.folder), code=1)
        self.assertIn("model-00002-of-00002", trouble)

    def checkpoint(self, name, config, rename):
        """A checkpoint folder made of a golden layer file, whose tensors `rename` names."""
        tensors, metadata = files.read(layer(name))
        files.write(self.path("model.safetensors"), rename(tensors))
        sizes = {"hidden_size": int(metadata["hidden_size"]), "intermediate_size": int(metadata["intermediate_size"]),
                 "num_local_experts": int(metadata["num_experts"]), "num_experts_per_tok": int(metadata["top_k"])}
        self.write("config.json", json.dumps({**sizes, **config}))
        for given in (True, False):
            kept = ["hidden_states", "routed_output"] + ["topk_ids", "topk_weights"] * given
            files.write(self.path("input"), {key: tensors[key] for key in kept})
            self.run_layer("--model", self.folder, "--layer", "5", "--input", self.path("input"), ranks=3)

    def test_mixtral_names(self):
        def rename(tensors):
            prefix = "model.layers.5.block_sparse_moe."
            named = {prefix + "gate.weight": tensors["router_weight"]}
            for expert in range(tensors["down_proj"].shape[0]):
                both = tensors["gate_up_proj"].part(expert)
                half = both.shape[0] // 2
                named["%sexperts.%d.w1.weight" % (prefix, expert)] = both.rows(0, half)
                named["%sexperts.%d.w3.weight" % (prefix, expert)] = both.rows(half, 2 * half)
                named["%sexperts.%d.w2.weight" % (prefix, expert)] = tensors["down_proj"].part(expert)
            return named
        self.checkpoint("mixtral_a.safetensors", {"model_type": "mixtral"}, rename)

    def test_fused_experts_lie_as_their_shapes_say(self):
        """As Qwen3-VL's do, [E, K, N], of which no key tells."""
        def rename(tensors):
            prefix = "model.language_model.layers.5.mlp."
            return {prefix + "gate.weight": tensors["router_weight"],
                    **{prefix + "experts." + name: tensors[name].turned() for name in ("gate_up_proj", "down_proj")}}
        self.checkpoint("mixtral_a.safetensors", {"model_type": "mixtral"}, rename)

    def test_gpt_oss_bf16_names(self):
        def rename(tensors):
            prefix = "model.layers.5.mlp."
            experts = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
            return {**{prefix + "experts." + name: tensors[name] for name in experts},
                    prefix + "router.weight": tensors["router_weight"], prefix + "router.bias": tensors["router_bias"]}
        self.checkpoint("gpt_oss_a.safetensors", {"model_type": "gpt_oss", "swiglu_limit": 7.0}, rename)

    def test_deepseek_v3_without_what_is_default(self):
        """8 groups of which 4, and a scale of 2.5."""
        def rename(tensors):
            prefix = "model.layers.5.mlp."
            return {**{prefix + "experts." + name: tensors[name] for name in ("gate_up_proj", "down_proj")},
                    prefix + "gate.weight": tensors["router_weight"],
                    prefix + "gate.e_score_correction_bias": tensors["e_score_correction_bias"]}
        self.checkpoint("deepseek_v3_a.safetensors", {"model_type": "deepseek_v3"}, rename)

    def test_llama4_names(self):
        def rename(tensors):
            prefix = "language_model.model.layers.5.feed_forward."
            return {prefix + "experts.gate_up_proj": tensors["gate_up_proj"],
                    prefix + "experts.down_proj": tensors["down_proj"],
                    prefix + "router.weight": tensors["router_weight"]}
        self.checkpoint("llama4_a.safetensors", {"model_type": "llama4_text"}, rename)


class Plan(Case):
    def bounds(self, code=0, **keys):
        return self.document("plan", self.config(**keys), code=code)["bounds"]

    def test_shape(self):
        plan = self.document("plan", self.config(max_prefill_tokens=4096, dp_size=8, tp_size=8, ep_size=8))
        self.assertEqual(list(plan), ["ok", "bounds", "buffers", "total_bytes", "weights_bytes", "warnings"])
        self.assertIs(plan["ok"], True)
        self.assertEqual(sorted(plan["bounds"]), sorted(BOUNDS))
        self.assertGreater(len(plan["buffers"]), 0)
        totals = dict.fromkeys(("device", "symmetric", "pinned", "host"), 0)
        for buffer in plan["buffers"]:
            self.assertEqual(list(buffer), ["name", "kind", "bytes", "bytes_mapped", "align", "why"])
            self.assertGreaterEqual(buffer["bytes_mapped"], buffer["bytes"])
            totals[buffer["kind"]] += buffer["bytes_mapped"]
        self.assertEqual(plan["total_bytes"], totals)

    def test_vector_1(self):
        bounds = self.bounds(max_prefill_tokens=16384, prefill_graph_max_tokens=2048, decode_graph_max_batch=512)
        self.assertEqual((bounds["forward_tokens"], bounds["dominant"]), (16384, "max_prefill_tokens"))

    def test_vector_5(self):
        keys = {"max_prefill_tokens": 16384, "prefill_graph_max_tokens": 2048, "decode_graph_max_batch": 512,
                "dp_size": 4, "tp_size": 4, "ep_size": 4, "dispatcher": "alltoall",
                "max_dispatch_tokens_per_rank": 4096}
        refused = self.document("plan", self.config(**keys), code=2)
        self.assertEqual(list(refused), ["ok", "reasons", "warnings", "bounds"])
        self.assertIs(refused["ok"], False)
        self.assertIn("16384", refused["reasons"][0]["message"])
        self.assertEqual(refused["bounds"]["allgather_rows"], 65536)
        self.assertEqual(self.bounds(**keys, dispatch_rounds_max=4)["alltoall_rows"], 16384)

    def test_ceiling(self):
        """Eight ranks of 4096 tokens, hidden 7168, top-8, bf16 both ways: under FlashInfer's one-sided all-to-all."""
        total = self.document("plan", self.config(
            hidden_size=7168, intermediate_size=2048, num_experts=256, forward_tokens_max=4096, dp_size=8, tp_size=8,
            ep_size=8, dispatcher="alltoall", input_format="bf16", output_format="bf16"))["total_bytes"]
        self.assertLess(total["symmetric"], 942342528)
        self.assertGreaterEqual(total["symmetric"], 7 * 4096 * 7168 * 2)

    def test_refused_bounds_are_those_computable(self):
        refused = self.document("plan", self.config(tp_size=3, dp_size=2, max_prefill_tokens=100), code=2)
        self.assertTrue(all(isinstance(value, str) or value >= 0 for value in refused["bounds"].values()))

    def test_human_output(self):
        text, _ = self.moxie("plan", self.config(max_prefill_tokens=4096))
        self.assertIn("from max_prefill_tokens", text)
        self.assertRegex(text, r"Total: device \d")
        text, trouble = self.moxie("plan", self.config(top_k=1000), code=2)
        self.assertEqual(text, "")
        self.assertIn("top_k", trouble)

    SIZES = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
             "num_hidden_layers": 1}
    SAID = {**LAYER, "num_layers": 1}
    BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}

    @staticmethod
    def compressed(bits, kind, strategy, groups=1, **more):
        weights = {"num_bits": bits, "type": kind, "strategy": strategy, **more}
        return {"quant_method": "compressed-tensors",
                "config_groups": {f"group_{number}": {"weights": weights} for number in range(groups)}}

    def said(self, code=0, **model):
        """What plan takes from a model's config.json, and standard error."""
        self.write("config.json", json.dumps({**self.SIZES, **model}))
        text, trouble = self.moxie("plan", "--model", self.folder, "--set", "forward_tokens_max=64", code=code)
        words = text.partition("config.json: ")[2].partition("\n")[0]
        return {key: json.loads(value) for key, value in (each.split(" ", 1) for each in words.split(", "))}, trouble

    def test_models(self):
        for folder, formats in (("tiny-qwen3-moe", "bf16"), ("tiny-deepseek-v3-fp8", "fp8_block128"),
                                ("tiny-gpt-oss-mxfp4", "mxfp4")):
            with self.subTest(folder=folder):
                text, _ = self.moxie("plan", "--model", "%s/models/%s" % (GOLDEN, folder), "--set",
                                     "forward_tokens_max=8")
                self.assertIn('weight_format "%s"' % formats, text.splitlines()[0])

    def test_model_says(self):
        for quantised, word in ((None, "f16"), (self.BLOCKS, "fp8_block128"), ({"quant_method": "fp8"}, "fp8_tensor"),
                                ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
                                ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8_tensor"),
                                ({"quant_method": "mxfp4"}, "mxfp4"),
                                (self.compressed(8, "float", "channel"), "fp8_channel"),
                                (self.compressed(8, "float", "tensor"), "fp8_tensor"),
                                (self.compressed(8, "float", "block", block_structure=[128, 128]), "fp8_block128"),
                                (self.compressed(4, "float", "tensor_group", group_size=16), "nvfp4"),
                                (self.compressed(4, "int", "group", group_size=32), "int4_g32")):
            with self.subTest(word=word):
                keys, _ = self.said(dtype="float16", num_hidden_layers=61, first_k_dense_replace=3,
                                    quantization_config=quantised)
                self.assertEqual(keys, {**LAYER, "num_layers": 58, "weight_format": word, "input_format": "f16",
                                        "output_format": "f16"})
        self.assertEqual(self.said()[0], self.SAID)
        inner = {**self.SIZES, "model_type": "qwen3_moe", "torch_dtype": "bfloat16"}
        self.write("config.json", json.dumps({"text_config": inner, "quantization_config": self.BLOCKS}))
        text, _ = self.moxie("plan", "--model", self.folder, "--set", "forward_tokens_max=64")
        self.assertIn('weight_format "fp8_block128", input_format "bf16"', text)

    def test_modelopt_says_it_in_a_file_of_its_own(self):
        for algorithm, word in (("NVFP4", "nvfp4"), ("FP8", "fp8_tensor")):
            self.write("hf_quant_config.json", json.dumps({"quantization": {"quant_algo": algorithm}}))
            self.assertEqual(self.said(dtype="bfloat16")[0]["weight_format"], word)
            self.assertEqual(self.said(quantization_config=self.BLOCKS)[0]["weight_format"], "fp8_block128")
        self.write("hf_quant_config.json", json.dumps({"quantization": {"quant_algo": "W4A8"}}))
        self.assertIn("--set weight_format=", self.said(code=2)[1])
        self.write("hf_quant_config.json", "[")
        self.assertIn("hf_quant_config.json", self.moxie("plan", "--model", self.folder, code=1)[1])

    def test_unknown_quantisation_wants_a_word(self):
        for quantised in ("fp8", [], {"quant_method": "awq"}, {"quant_method": "fp8", "weight_block_size": [64, 64]},
                          self.compressed(4, "float", "tensor_group", group_size=32),
                          self.compressed(8, "int", "channel"), self.compressed(8, "float", "channel", groups=2),
                          self.compressed(4, "int", "group", group_size=128), self.compressed(8, "float", "group"),
                          self.compressed(8, "float", "block", block_structure=[64, 128]),
                          {"quant_method": "compressed-tensors"}):
            self.write("config.json", json.dumps({**self.SIZES, "quantization_config": quantised}))
            model = ["--model", self.folder, "--set", "forward_tokens_max=64"]
            self.assertIn("--set weight_format=", self.moxie("plan", *model, code=2)[1])
            reason, = self.document("check", *model, code=2)["reasons"]
            self.assertIn("--set weight_format=", reason["message"])
            self.assertTrue(self.document("check", *model, "--set", "weight_format=int4_g32")["ok"])

    def test_what_is_over_what(self):
        """--set over the file, the file over the model."""
        model = self.write("config.json", json.dumps(self.SIZES))
        file = self.write("file.json", json.dumps({"max_prefill_tokens": 4096, "hidden_size": 1024}))
        both = ["--model", os.path.dirname(model), file, "--set", "max_prefill_tokens=512", "--set", "runner=moxie_cpu"]
        wanted = {**self.SAID, "hidden_size": 1024, "max_prefill_tokens": 512, "runner": "moxie_cpu", "activation": "silu"}
        found = self.document("plan", *both)
        self.assertEqual(found.pop("model"), self.SAID)
        self.assertEqual(self.document("check", *both)["model"], self.SAID)
        self.assertEqual(found, self.document("plan", self.write("whole.json", json.dumps(wanted))))
        self.assertEqual(self.document("plan", *(f"--set={key}={value}" for key, value in wanted.items())),
                         self.document("plan", self.path("whole.json")))

    def test_names_that_families_have(self):
        for key, common, *names in (
                ("num_experts", "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
                ("top_k", "num_experts_per_tok", "moe_topk", "moe_top_k", "moe_k", "top_k_experts",
                 "num_experts_per_token", "num_selected_experts"),
                ("intermediate_size", "moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")):
            for name in names:
                with self.subTest(name=name):
                    self.assertEqual(self.said(**{common: None, name: [7, 7]})[0], {**self.SAID, key: 7})
        for name in ("hidden_act", "mlp_hidden_act", "hidden_activation", "activation_function"):
            self.assertEqual(self.said(**{name: "relu2"})[0], {**self.SAID, "activation": "relu2"})
        self.assertEqual(self.said(model_type="llama4_text", num_experts_per_tok=1)[0],
                         {**self.SAID, "top_k": 1, "apply_router_weight_on_input": 1})
        for outer in ("text_config", "language_config", "llm_config", "thinker_config"):
            inner = {"text_config": self.SIZES} if outer == "thinker_config" else self.SIZES
            self.write("config.json", json.dumps({"num_experts": 3, outer: inner}))
            self.assertEqual(self.document("check", "--model", self.folder, "--set", "forward_tokens_max=64")["model"],
                             self.SAID)

    def test_set_says_what_the_model_does_not(self):
        self.write("config.json", json.dumps({"hidden_size": LAYER["hidden_size"], "hidden_act": "gelu_new",
                                              "moe_intermediate_size": [8, 16], "torch_dtype": "float8_e4m3fn",
                                              "num_hidden_layers": [2]}))
        model = ["--model", self.folder, "--set", "forward_tokens_max=64"]
        keys = {**self.SAID, "activation": "silu", "weight_format": "bf16"}
        trouble = self.moxie("plan", *model, code=1)[1]
        for key in keys:
            self.assertEqual("--set %s=" % key in trouble, key != "hidden_size", trouble)
        given = [f"--set={key}={value}" for key, value in keys.items()]
        self.assertEqual(self.document("plan", *model, *given)["model"], {"hidden_size": LAYER["hidden_size"]})
        self.assertIn("float8_e4m3fn", self.moxie("plan", *model, *given[:-1], code=2)[1])
        self.assertTrue(self.document("plan", self.write("file.json", json.dumps(keys)), *model)["ok"])
        # A name that is cut within a character.
        trouble = self.said(code=2, model_type="x" * 30 + "é" * 20, swiglu_limit=7.0)[1]
        self.assertIn("--set activation=", trouble)

    def test_no_configuration(self):
        for arguments, words in (((), "--model or --set"), (("--set", "top_k"), "KEY=VALUE"),
                                 (("--set", "=1"), "KEY=VALUE"), (("--model", ""), "--model"),
                                 (("--model", self.folder), "No such file")):
            with self.subTest(arguments=arguments):
                self.assertIn(words, self.moxie("plan", *arguments, code=1)[1])


class Check(Case):
    def check(self, ok, **keys):
        verdict = self.document("check", self.config(**keys), code=0 if ok else 2)
        self.assertEqual(list(verdict), ["ok", "runner", "dispatcher", "reasons", "warnings"])
        self.assertIs(verdict["ok"], ok)
        self.assertEqual(bool(verdict["reasons"]), not ok)
        for reason in verdict["reasons"]:
            self.assertEqual(list(reason), ["code", "key", "message"])
        for warning in verdict["warnings"]:
            self.assertEqual(list(warning), ["key", "message"])
        return verdict

    def test_vector_5(self):
        keys = {"max_prefill_tokens": 16384, "dp_size": 4, "tp_size": 4, "ep_size": 4, "dispatcher": "alltoall",
                "max_dispatch_tokens_per_rank": 4096}
        reasons = self.check(False, **keys)["reasons"]
        self.assertEqual([reason["key"] for reason in reasons], ["max_dispatch_tokens_per_rank"])
        self.assertIn("16384", reasons[0]["message"])
        self.check(True, **{**keys, "dispatch_rounds_max": 4})
        text, _ = self.moxie("check", self.config(**keys), code=2)
        self.assertIn("dispatch_rounds_max", text)

    def test_vector_11(self):
        reasons = self.check(False, speculative_algorithm="EAGLE")["reasons"]
        self.assertIn("speculative_draft_tokens", [reason["key"] for reason in reasons])
        self.check(True, speculative_algorithm="EAGLE", speculative_draft_tokens=4)

    def test_unknown_keys_warn(self):
        warnings = self.check(True, max_prefil_tokens=4096, quux=1)["warnings"]
        messages = {warning["key"]: warning["message"] for warning in warnings}
        self.assertIn("max_prefill_tokens", messages["max_prefil_tokens"])
        self.assertIn("quux", messages)

    def test_booleans_are_no_numbers(self):
        self.assertEqual([reason["key"] for reason in self.check(False, deterministic=True)["reasons"]],
                         ["deterministic"])

    def test_every_key_of_every_wrong_type(self):
        keys = self.document("info", "--keys")["keys"]
        self.assertGreater(len(keys), 40)
        wrong = {"i64": ["1", 1.5, True, None, [], {}], "f64": ["1", True, None, [], {}],
                 "str": [1, 1.5, True, None, [], {}]}
        for index in range(6):
            values = {key["key"]: wrong[key["type"]][index % len(wrong[key["type"]])] for key in keys}
            path = self.write("wrong.json", json.dumps(values))
            verdict = self.document("check", path, code=2)
            self.assertEqual({reason["key"] for reason in verdict["reasons"]} & set(values), set(values))
            self.moxie("plan", path, "--json", code=2)

    def test_extreme_sizes(self):
        for key in self.document("info", "--keys")["keys"]:
            for value in (2 ** 62, 2 ** 63 - 1, -2 ** 63, 0, -1):
                if key["type"] == "i64":
                    path = self.config(**{key["key"]: value})
                    self.moxie("check", path, code=[0, 2])
                    self.moxie("plan", path, "--json", code=[0, 2])


class Bench(Case):
    TINY = ["bench", "--shape", "64,32,8,2", "--seconds", "0.02"]

    def test_document(self):
        result = self.document(*self.TINY, "--tokens", "1,5")
        self.assertEqual([cell["tokens"] for cell in result["cells"]], [1, 5])
        for cell in result["cells"]:
            self.assertLessEqual(cell["p10_us"], cell["median_us"])
            self.assertLessEqual(cell["median_us"], cell["p90_us"])
            self.assertGreater(cell["share_of_floor"], 0)
            self.assertIn(cell["floor_by"], ("bytes", "flops"))
            self.assertGreaterEqual(cell["repetitions"], 3)
        self.assertGreater(result["anchors"]["read_gb_per_s"], 0)
        self.assertGreater(result["anchors"]["f32_gflops"], 0)
        build = self.document("info")["build"]
        self.assertEqual(result["build"], {key: build[key] for key in ("version", "source_id")})

    def test_formats_and_ranks(self):
        for word in ("f32", "bf16", "f16", "fp8_tensor", "fp8_channel", "fp8_block128", "int4_g32", "mxfp4", "nvfp4"):
            with self.subTest(word=word):
                result = self.document(*self.TINY, "--tokens", "3", "--weight-format", word, "--ranks", "2")
                self.assertEqual((result["weight_format"], result["ranks"]), (word, 2))

    def test_too_large_is_refused(self):
        for shape in ("1048576,1048576,1024,8", "1099511627776,1099511627776,8,1", "2048,768,128,8"):
            tokens = "4294967296" if shape.startswith("2048") else "1"
            _, trouble = self.moxie("bench", "--shape", shape, "--tokens", tokens, code=2)
            self.assertNotEqual(trouble, "")

    def test_experts_that_the_host_computes_are_not_computed(self):
        for command in (self.TINY + ["--tokens", "1"], ["run", "--layer-file", layer("mixtral_a.safetensors")]):
            self.assertIn("this command computes them: name another runner, or auto",
                          self.moxie(*command, "--runner", "none", code=2)[1])

    def test_usage(self):
        for arguments in (["--shape", "1,2,3", "--tokens", "1"], ["--shape", "q30b"], ["--tokens", "1"],
                          ["--shape", "q30b", "--tokens", "1,,2"], ["--shape", "q30b", "--tokens", "0"],
                          ["--shape", "q30b", "--tokens", "1", "--weight-format", "int3"],
                          ["--shape", "q30b", "--tokens", "1", "--row-format", "f32"],
                          ["--shape", "q30b", "--tokens", "1", "--op", "all"],
                          ["--shape", "q30b", "--tokens", "1", "--skew", "0.5"],
                          ["--shape", "q30b", "--tokens", "1", "--delay-us", "1001"],
                          ["--shape", "q30b", "--tokens", "1", "--replays", "0"]):
            self.moxie("bench", *arguments, code=1)

    def test_the_bound_that_was_passed(self):
        """And none that holds."""
        for shape, tokens, words in (("64,64,8,9", "1", "wanted is TOP_K at most EXPERTS"),
                                     ("64,64,64,33", "1", "wanted is TOP_K at most 32"),
                                     ("64,64,8,2", "0", "--tokens 0: 0 is not from 1 to 4294967296"),
                                     ("64,64,8,2", "1,4294967297", "4294967297 is not from 1 to 4294967296"),
                                     ("64,64,8,2", "99999999999999999999", "is not from 1 to 4294967296"),
                                     ("64,64,8,2", "1,-4,2", "-4 is not from 1 to"),
                                     ("64,64,8,2", "1,,2", "wanted is a list like 1,16,256"),
                                     ("64,64,8,2", "two", "wanted is a list like 1,16,256")):
            with self.subTest(shape=shape, tokens=tokens):
                self.assertIn(words, self.moxie("bench", "--shape", shape, "--tokens", tokens, code=1)[1])

    def test_replays_are_of_graphs(self):
        """Which a CPU has not: no number of repetitions can be asked for."""
        for more in ([], ["--ranks", "2"]):
            _, trouble = self.moxie(*self.TINY, "--tokens", "1", "--replays", "5", *more, code=2)
            self.assertIn("--replays 5 is of graphs", trouble)


class Ranks(Case):
    """Processes: idle ones, dying ones, interrupted ones."""

    LONG = ["bench", "--shape", "512,512,16,4", "--tokens", "256,256,256", "--seconds", "60"]

    def children(self, parent):
        with open("/proc/%d/task/%d/children" % (parent, parent), encoding="ascii") as file:
            return [int(pid) for pid in file.read().split()]

    def start(self, *arguments, ranks=3, preexec_fn=None):
        """A long bench whose ranks are running."""
        process = subprocess.Popen([COMMAND, *self.LONG, *arguments, "--ranks", str(ranks)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                   text=True, preexec_fn=preexec_fn)
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.stderr.close)
        self.addCleanup(process.kill)
        deadline = time.monotonic() + 60
        while len(self.children(process.pid)) < ranks and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.3)
        pids = self.children(process.pid)
        self.assertEqual(len(pids), ranks)
        return process, pids

    def assert_gone(self, pids):
        deadline = time.monotonic() + 10
        while any(os.path.exists("/proc/%d" % pid) for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.01)
        self.assertFalse([pid for pid in pids if os.path.exists("/proc/%d" % pid)])

    def test_a_rank_that_dies_ends_the_run(self):
        """Also where the shell ignores the death of children, which a program inherits."""
        for index, before in ((0, None), (2, lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN))):
            process, pids = self.start(preexec_fn=before)
            os.kill(pids[index], signal.SIGKILL)
            _, trouble = process.communicate(timeout=TIMEOUT_S)
            self.assertEqual(process.returncode, 1)
            self.assertRegex(trouble, r"moxie bench: rank \d died of signal 9")
            self.assert_gone(pids)

    def test_an_interrupt_ends_the_ranks(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            process, pids = self.start()
            process.send_signal(number)
            process.communicate(timeout=TIMEOUT_S)
            self.assertEqual(process.returncode, -number)
            self.assert_gone(pids)

    def test_an_ignored_hangup_stays_ignored(self):
        process, pids = self.start(preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
        process.send_signal(signal.SIGHUP)
        time.sleep(0.3)
        self.assertIsNone(process.poll())
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=TIMEOUT_S)
        self.assertEqual(process.returncode, -signal.SIGTERM)
        self.assert_gone(pids)

    def test_no_rank_outlives_the_command(self):
        process, pids = self.start()
        process.kill()
        process.communicate(timeout=TIMEOUT_S)
        self.assert_gone(pids)

    def stop_and_wait(self, *indices, ranks=3):
        # Forwards that are short beside the timeout, under a sanitizer too: what a rank computes before it waits counts
        # as its silence.
        process, pids = self.start("--timeout", "3", "--tokens", "32,32,32,32,32", ranks=ranks)
        for index in indices:
            os.kill(pids[index], signal.SIGSTOP)
        _, trouble = process.communicate(timeout=TIMEOUT_S)
        self.assertEqual(process.returncode, 1)
        self.assert_gone(pids)
        return trouble

    def test_a_silent_rank_is_named(self):
        """By its peers, who waited for it, or by the command that hears nothing from it; no other rank is."""
        self.assertRegex(self.stop_and_wait(1), r"(?m)^moxie bench: (rank [02]: [^\n]*\b[Rr]ank 1\b|rank 1 has been silent)")

    def test_silence_ends_the_run(self):
        # Together is within a second, which a busy machine may take between the last words of two ranks.
        said = (self.stop_and_wait(0, 1, 2) for _ in range(6))
        self.assertTrue(any("ranks 0, 1 and 2 have been silent for 5 s" in trouble for trouble in said))

    def test_one_rank_may_be_silent_as_long(self):
        self.assertIn("rank 0 has been silent for 5 s", self.stop_and_wait(0, ranks=1))

    def test_fewer_tokens_than_ranks(self):
        for ranks in (2, 5, 16):
            for dispatcher in ("allgather", "alltoall"):
                self.run_layer("--layer-file", layer("qwen3_moe_t1.safetensors"), ranks=ranks, dispatcher=dispatcher)

    def test_no_tokens(self):
        tensors, metadata = files.read(layer("mixtral_a.safetensors"))
        for name in ("hidden_states", "topk_ids", "topk_weights", "routed_output"):
            tensors[name] = files.Tensor(tensors[name].dtype, [0, tensors[name].shape[1]], b"")
        files.write(self.path("layer"), tensors, metadata)
        for ranks in (1, 3):
            result = self.run_layer("--layer-file", self.path("layer"), ranks=ranks)
            self.assertEqual((result["tokens"], result["relative_error"]), (0, 0))

    def test_more_ranks_than_experts(self):
        self.run_layer("--layer-file", layer("mixtral_a.safetensors"), ranks=11)


if __name__ == "__main__":
    unittest.main()
