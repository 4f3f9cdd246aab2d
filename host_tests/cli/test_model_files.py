"""The files of a model's folder as others write them: what moxie makes of config.json and its neighbours.

    MOXIE_COMMAND=build/dev/bin/moxie MOXIE_GOLDEN=host_tests/golden python3 test_model_files.py [GROUP]
"""

import json
import math
import os
import unittest

from case import GOLDEN, LAYER, MODELS, Case, model_arguments

SIZES = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}


class Words(Case):
    """Infinity, -Infinity and NaN, which Python's json writes, are null in a model's files."""

    def plan(self, text, code=0):
        self.write("config.json", text)
        return self.moxie("plan", "--model", self.folder, "--set", "forward_tokens_max=64", code=code)

    def test_numbers_that_json_has_not(self):
        config = {**SIZES, "time_step_limit": [0.0, math.inf, -math.inf, math.nan], "mlp_only_layers": math.nan,
                  "num_hidden_layers": math.nan, "nested": [{"a": [math.nan] * 9}]}
        wanted = self.plan(json.dumps(SIZES))
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
        trouble = self.plan(json.dumps({**SIZES, "model_type": word, "swiglu_limit": "Infinity \\\\\" -Infinity"}), 2)[1]
        self.assertIn('swiglu_limit is "Infinity \\\\\\\\\\\" -Infinity"', trouble)
        self.assertIn('"%s"' % word, trouble)

    def test_faults_keep_their_place(self):
        for ours, others in (('{"a": Infinity,\n "b": -Infinity, x}', '{"a": 12345678,\n "b": 123456789, x}'),
                             ('{"a": NaN,\n "b": Infinit}', '{"a": 123,\n "b": Infinit}'),
                             ('{"a": [NaN}', '{"a": [null}'), ("{Infinity: 1}", "{null    : 1}"), ("NaN", "null"),
                             ('{"a": 1NaN}', '{"a": 1null}'), ('{"a": "NaN\\', '{"a": "xxx\\')):
            with self.subTest(text=ours):
                trouble = [self.plan(text, 1)[1].replace("null", "").split("near")[0] for text in (ours, others)]
                self.assertEqual(*trouble)

    def test_of_a_configuration_they_are_refused(self):
        """Which is no model's file."""
        self.assertIn("malformed JSON", self.moxie("plan", self.write("x.json", json.dumps({**LAYER, "top_k": math.nan})), code=1)[1])


if __name__ == "__main__":
    unittest.main()
