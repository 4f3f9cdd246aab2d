"""The files of a model's folder as others write them: what moxie makes of config.json and its neighbours.

    MOXIE_COMMAND=build/dev/bin/moxie MOXIE_GOLDEN=host_tests/golden python3 test_model_files.py [GROUP]
"""

import json
import math
import os
import resource
import unittest

from case import GOLDEN, LAYER, MODELS, Case, model_arguments

SIZES = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}


class Words(Case):
    """Infinity, -Infinity and NaN, which Python's json writes, are null in a model's files."""

    def plan(self, text, code=0):
        self.write("config.json", text)
        return self.moxie("plan", "--model", self.folder, "--set", "forward_tokens_max=64", code=code)

    def test_numbers_that_json_has_not(self):
        config = {**SIZES, "num_hidden_layers": 2, "time_step_limit": [0.0, math.inf, -math.inf, math.nan], "mlp_only_layers": math.nan,
                  "num_layers": math.nan, "nested": [{"a": [math.nan] * 9}]}
        wanted = self.plan(json.dumps({**SIZES, "num_hidden_layers": 2}))
        for form in ({}, {"indent": 1}, {"separators": (",", ":")}):
            text = json.dumps(config, **form)
            self.assertIn("-Infinity", text)
            self.assertEqual(self.plan(text), wanted)
        source = GOLDEN + "/models/" + MODELS[0][0]
        with open(source + "/config.json", encoding="utf-8") as file:
            self.write("config.json", json.dumps({**json.load(file), "time_step_limit": [0.0, math.inf]}))
        os.symlink(source + "/model.safetensors", self.path("a.safetensors"))
        self.write("model.safetensors.index.json", '{"metadata": {"total_size": NaN}, "weight_map": %s}' % json.dumps(
            dict.fromkeys(self.names(source + "/model.safetensors"), "a.safetensors")))
        self.run_layer(*model_arguments(*MODELS[0], self.folder))

    @staticmethod
    def names(path):
        with open(path, "rb") as file:
            return [name for name in json.loads(file.read(int.from_bytes(file.read(8), "little"))) if name[0] != "_"]

    def test_strings_stay(self):
        word = 'a "NaN" \\'
        trouble = self.plan(json.dumps({**SIZES, "num_layers": 1, "model_type": word, "swiglu_limit": "Infinity \\\\\" -Infinity"}), 2)[1]
        self.assertIn('swiglu_limit is "Infinity \\\\\\\\\\\" -Infinity"', trouble)
        self.assertIn('"%s"' % word, trouble)

    def test_faults_keep_their_place(self):
        for ours, others in (('{"a": Infinity,\n "b": -Infinity, x}', '{"a": 12345678,\n "b": 123456789, x}'),
                             ('{"a": NaN,\n "b": Infinix}', '{"a": 123,\n "b": Infinix}'),
                             ('{"a": [NaN}', '{"a": [null}'), ("{Infinity: 1}", "{null    : 1}"), ("NaN", "null"),
                             ('{"a": 1NaN}', '{"a": 1null}'), ('{"a": "NaN\\', '{"a": "xxx\\')):
            with self.subTest(text=ours):
                trouble = [self.plan(text, 1)[1].replace("null", "").split("near")[0] for text in (ours, others)]
                self.assertEqual(*trouble)

    def test_of_a_configuration_they_are_refused(self):
        """Which is no model's file."""
        self.assertIn("malformed JSON", self.moxie("plan", self.write("x.json", json.dumps({**LAYER, "top_k": math.nan})), code=1)[1])


class Layers(Case):
    """How many layers have experts, of all that a config.json may say of it."""

    def said(self, code=0, without=(), **keys):
        """The count, or why there is none."""
        keys = {key: value for key, value in {**SIZES, **keys}.items() if key not in without}
        self.write("config.json", json.dumps(keys))
        arguments = ["plan", "--model", self.folder, "--set", "forward_tokens_max=64"]
        if code != 0:
            return self.moxie(*arguments, code=code)[1]
        return self.document(*arguments)["model"]["num_layers"]

    def test_layers_with_experts(self):
        for said, layers in (({}, 12), ({"first_k_dense_replace": 3}, 9), ({"num_dense_layers": 2}, 10),
                             ({"moe_layer_num_skipped": 1}, 11), ({"moe_layer_freq": 2}, 6),
                             ({"moe_layer_freq": [0, 1, 1, 0, 1]}, 3), ({"mlp_only_layers": [0, 5, 40]}, 10),
                             ({"decoder_sparse_step": 2, "mlp_only_layers": [1, 2]}, 5),
                             ({"interleave_moe_layer_step": 4}, 3), ({"moe_layers": [1, 3, 5, 7]}, 4),
                             ({"moe_layers": None, "interleave_moe_layer_step": 2}, 6),
                             ({"expert_layer_period": 3, "expert_layer_offset": 1}, 4),
                             ({"moe_layer_start_index": 1, "moe_layer_end_index": 8, "moe_layer_interval": 2}, 4),
                             ({"hybrid_override_pattern": "MEM*EMEM*EME"}, 5), ({"first_k_dense_replace": 40}, 12),
                             ({"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 10, "first_k_dense_replace": 3}, 10),
                             ({"mlp_layer_types": ["hash_moe"] * 3 + ["moe"] * 8 + ["dense"]}, 11),
                             ({"mlp_layer_types": None, "num_layers": 7, "layers_block_type": []}, 12),
                             ({"layers_block_type": ["mamba", "moe", "attention", "mlp"] * 3}, 3),
                             ({"layers_block_type": ["mamba", "attention"] * 6}, 12)):
            with self.subTest(said=said):
                self.assertEqual(self.said(num_hidden_layers=12, **said), layers)

    def test_who_counts_layers(self):
        """A list counts them, too, and LongCat-Flash has a name of its own for their number."""
        for said, layers in (({"num_layers": 28}, 28), ({"mlp_layer_types": ["dense", "sparse"] * 3}, 3),
                             ({"layers_block_type": ["mamba", "moe"] * 26}, 26),
                             ({"layers_block_type": ["moe"] * 4, "num_hidden_layers": 52}, 4)):
            with self.subTest(said=said):
                self.assertEqual(self.said(**said), layers)
                self.assertEqual(self.said(text_config={**SIZES, **said}, num_layers=5, without=SIZES), layers)

    def test_a_count_that_is_none(self):
        """Is not one layer."""
        for wrong in ("48", -4, 0, 5000, [12]):
            self.assertIn("num_hidden_layers is", self.said(num_hidden_layers=wrong, code=1))
            self.assertIn("num_layers is", self.said(num_layers=wrong, code=1))
        self.assertIn("mlp_layer_types is", self.said(mlp_layer_types=["sparse"] * 5000, code=1))
        self.assertRegex(self.said(code=1), "no count of layers .*: --set num_layers=VALUE")


class Incomplete(Case):
    """What a download that was cut short leaves, and a clone without its large files."""

    def setUp(self):
        super().setUp()
        source = GOLDEN + "/models/" + MODELS[0][0]
        for name in ("config.json", "model.safetensors"):
            os.symlink(source + "/" + name, self.path(name))
        self.arguments = ["run", *model_arguments(*MODELS[0], self.folder)]

    def test_links_that_lead_nowhere(self):
        for name in ("model.safetensors", "config.json"):
            os.remove(self.path(name))
            os.symlink("../blobs/absent", self.path(name))
            trouble = self.moxie(*self.arguments, code=1)[1]
            self.assertIn(name + ": where the symbolic link leads: No such file", trouble)
        self.assertIn("config.json: where the symbolic link leads", self.moxie("plan", "--model", self.folder, code=1)[1])

    def test_shards_that_are_links(self):
        os.rename(self.path("model.safetensors"), self.path("a.safetensors"))
        names = dict.fromkeys(Words.names(self.path("a.safetensors")), "a.safetensors")
        self.write("model.safetensors.index.json", json.dumps({"weight_map": names}))
        self.moxie(*self.arguments)
        os.remove(self.path("a.safetensors"))
        os.symlink("../blobs/absent", self.path("a.safetensors"))
        self.assertIn("a.safetensors: where the symbolic link leads: No such file", self.moxie(*self.arguments, code=1)[1])

    def test_pointers(self):
        os.remove(self.path("model.safetensors"))
        pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize 16060522904\n" % ("a5" * 32)
        for text in (pointer, pointer[:23]):
            self.write("model.safetensors", text)
            self.assertRegex(self.moxie(*self.arguments, code=1)[1], "model.safetensors: a pointer of Git LFS .*`git lfs pull`")
        self.write("model.safetensors", pointer[:22])
        self.assertIn("the header claims", self.moxie(*self.arguments, code=1)[1])


class Sizes(Case):
    """What is larger than any model's is not read: in memory JSON takes many times its bytes."""

    def test_files_have_bounds(self):
        config = json.dumps({**SIZES, "num_layers": 1})
        for name, bound in (("config.json", 16), ("hf_quant_config.json", 16), ("model.safetensors.index.json", 64)):
            self.write("config.json", config)
            arguments = ["plan", "--model", self.folder, "--set", "forward_tokens_max=64"]
            if "index" in name:
                arguments = ["run", *model_arguments(*MODELS[0], self.folder)]
            text = (config[:-1] if name == "config.json" else "{")
            for padding, code in ((bound << 20, 0), ((bound << 20) + 1, 1)):
                end = ', "x": 1}' if name == "config.json" else '"weight_map": {}}'
                self.write(name, text + " " * (padding - len(text) - len(end)) + end)
                with self.subTest(name=name, code=code):
                    trouble = self.moxie(*arguments, code=1 if "index" in name else code)[1]
                    self.assertEqual("%s: more than %d MiB" % (name, bound) in trouble, code == 1, trouble)
            os.remove(self.path(name))

    def test_long_patterns_are_counted_once(self):
        """Up to the most layers that a model may have."""
        self.write("config.json", json.dumps({**SIZES, "num_hidden_layers": 4096,
                                              "hybrid_override_pattern": "ME" * (7 << 20)}))
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        model = self.document("plan", "--model", self.folder, "--set", "forward_tokens_max=64")["model"]
        self.assertEqual(model["num_layers"], 2048)
        self.assertLess(resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before, 2)


if __name__ == "__main__":
    unittest.main()
