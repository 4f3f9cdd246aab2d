"""The command moxie where it meets what is around it: outputs, other files, checkpoints, names, documents.

    MOXIE_COMMAND=build/dev/bin/moxie MOXIE_GOLDEN=host_tests/golden python3 test_edges.py [GROUP]
"""

import json
import math
import os
import random
import resource
import shutil
import signal
import stat
import struct
import subprocess
import time
import unittest

import safetensors_files as files
from case import COMMAND, GOLDEN, MODELS, TIMEOUT_S, Case, layer, model_arguments

DEEPSEEK = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../hosts/cli/examples/deepseek-v3-ep8.json")
MIXTRAL = ["--layer-file", layer("mixtral_a.safetensors")]


class Output(Case):
    """What is written, or cannot be."""

    def test_a_result_that_is_lost_is_a_failure(self):
        for arguments in (["--help"], ["--version"], ["info"], ["info", "--json"], ["plan", self.config()],
                          ["conform", "--list"], ["info", "--keys"]):
            with self.subTest(arguments=arguments), open(os.devnull, "rb") as nowhere:
                done = subprocess.run([COMMAND, *arguments], stdout=nowhere, stderr=subprocess.PIPE, text=True,
                                      timeout=TIMEOUT_S, check=False)
                self.assertEqual(done.returncode, 1, done.stderr)
                self.assertRegex(done.stderr, r"moxie[a-z ]*: [^\n]*output[^\n]*\n$")

    def test_ranks_print_beside_the_result(self):
        """What a rank's library prints is no part of it, and no signal is blocked in a rank."""
        with subprocess.Popen([COMMAND, "bench", "--shape", "512,512,16,4", "--tokens", "256,256", "--seconds", "60",
                               "--ranks", "2"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            self.addCleanup(process.kill)
            deadline = time.monotonic() + 30
            while not self.ranks_print_apart(process.pid):
                self.assertLess(time.monotonic(), deadline)
                time.sleep(0.1)
            process.kill()

    @staticmethod
    def ranks_print_apart(parent):
        """Whether both ranks are there, as programs of their own, write to stderr alone and block no signal."""
        with open("/proc/%d/task/%d/children" % (parent, parent), encoding="ascii") as file:
            pids = file.read().split()
        for pid in pids:
            with open("/proc/%s/status" % pid, encoding="ascii") as file:
                if "\nSigBlk:\t0000000000000000\n" not in file.read():
                    return False
            if os.readlink("/proc/%s/fd/1" % pid) != os.readlink("/proc/%s/fd/2" % pid):
                return False
        return len(pids) == 2

    def refuse(self, path, words):
        """Exit code 1, before anything is measured."""
        text, trouble = self.moxie("run", *MIXTRAL, "--output", path, code=1)
        self.assertEqual(text, "")
        self.assertIn(words, trouble)

    def test_only_regular_files_are_replaced(self):
        os.mkfifo(self.path("pipe"))
        os.mkdir(self.path("folder"))
        os.symlink(self.path("nothing"), self.path("dangling"))
        os.symlink(self.path("pipe"), self.path("link"))
        for name, words in (("pipe", "no regular file"), ("folder", "no regular file"), ("link", "no regular file"),
                            ("dangling", "symbolic link"), ("absent/out", "No such file")):
            self.refuse(self.path(name), words)
        self.assertTrue(stat.S_ISFIFO(os.stat(self.path("pipe")).st_mode))
        self.assertEqual(sorted(os.listdir(self.folder)), ["dangling", "folder", "link", "pipe"])

    def test_a_link_stays_and_its_file_is_written(self):
        self.write("file", "old")
        os.chmod(self.path("file"), 0o640)
        os.symlink("file", self.path("link"))
        self.write("link.part", "mine")
        self.moxie("run", *MIXTRAL, "--output", self.path("link"))
        self.assertEqual(os.readlink(self.path("link")), "file")
        self.assertEqual(list(files.read(self.path("file"))[0]), ["output"])
        self.assertEqual(stat.S_IMODE(os.stat(self.path("file")).st_mode), 0o640)
        self.assertEqual(sorted(os.listdir(self.folder)), ["file", "link", "link.part"])

    def test_inputs_are_not_replaced(self):
        shutil.copy(layer("mixtral_a.safetensors"), self.path("layer"))
        os.link(self.path("layer"), self.path("same"))
        for name in ("layer", "same"):
            _, trouble = self.moxie("run", "--layer-file", self.path("layer"), "-o", self.path(name), code=1)
            self.assertIn("are read", trouble)
        folder, number = MODELS[0]
        source = GOLDEN + "/models/" + folder
        tensors, metadata = files.read(source + "/model.safetensors")
        mine = {name for name in tensors if ".layers.%d." % number in name}
        for shard, names in (("a.safetensors", mine), ("b.safetensors", set(tensors) - mine)):
            files.write(self.path(shard), {name: tensors[name] for name in sorted(names)}, metadata)
        self.write("model.safetensors.index.json", json.dumps(
            {"weight_map": {name: "a.safetensors" if name in mine else "b.safetensors" for name in tensors}}))
        shutil.copy(source + "/config.json", self.path("config.json"))
        arguments = model_arguments(folder, number, self.folder)
        shutil.copy(arguments[-1], self.path("input"))
        arguments[-1] = self.path("input")
        # The layer is in the first shard alone: the second would not be opened.
        for name in ("a.safetensors", "b.safetensors", "input", "config.json", "model.safetensors.index.json"):
            _, trouble = self.moxie("run", *arguments, "-o", self.path(name), code=1)
            self.assertIn("are read", trouble)
        self.moxie("run", *arguments, "-o", self.path("out"))

    def test_programs_are_not_replaced(self):
        """The command's own copy is the one that runs, and the library the one that it loads, whatever it is called."""
        for source, name in ((COMMAND, "moxie"), (Paths.PLUGIN, "libmoxie.so.0.1")):
            shutil.copy(source, self.path(name))
        os.symlink(self.path("libmoxie.so.0.1"), self.path("link"))
        loader = {**os.environ, "LD_LIBRARY_PATH": self.folder, "MOXIE_PLUGIN": "libmoxie.so.0.1"}
        mixtral = os.path.abspath(layer("mixtral_a.safetensors"))
        for plugin, output, env in (("libmoxie.so.0.1", "libmoxie.so.0.1", None), ("link", "libmoxie.so.0.1", None),
                                    ("libmoxie.so.0.1", "link", None), ("libmoxie.so.0.1", "moxie", None),
                                    (None, self.path("link"), loader)):
            with self.subTest(plugin=plugin, output=output):
                done = subprocess.run([self.path("moxie"), "run", "--layer-file", mixtral, *(["--plugin", plugin] if plugin else []),
                                       "--output", output], capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
                                      cwd=self.folder if plugin else "/", env=env)
                self.assertEqual((done.returncode, done.stdout), (1, ""), done.stderr)
                self.assertIn("are read; --output would replace it", done.stderr)
        for source, name in ((COMMAND, "moxie"), (Paths.PLUGIN, "libmoxie.so.0.1")):
            with open(source, "rb") as wanted, open(self.path(name), "rb") as found:
                self.assertEqual(found.read(), wanted.read())
        self.assertEqual(sorted(os.listdir(self.folder)), ["libmoxie.so.0.1", "link", "moxie"])

    def test_a_result_that_cannot_be_kept_is_said(self):
        def limit():
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))
        done = subprocess.run([COMMAND, "run", *MIXTRAL, "-o", self.path("out"), "--json"], capture_output=True,
                              text=True, timeout=TIMEOUT_S, check=False, preexec_fn=limit)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertLess(json.loads(done.stdout)["relative_error"], 1e-5)
        self.assertIn("File too large", done.stderr)
        self.assertEqual(os.listdir(self.folder), [])

    def has_begun_to_write(self):
        try:
            return any(entry.name.endswith(".part") and entry.stat().st_size > 1 << 16 for entry in os.scandir(self.folder))
        except FileNotFoundError: # it has got its name meanwhile
            return False

    def test_an_interrupted_result_is_not_there(self):
        """And what was measured is said. Of rows of no expert, so that nothing but writing takes time."""
        tensors, metadata = files.read(layer("mixtral_a.safetensors"))
        hidden, top_k, tokens = int(metadata["hidden_size"]), int(metadata["top_k"]), 1 << 17
        del tensors["routed_output"]
        tensors["hidden_states"] = files.Tensor("BF16", [tokens, hidden], bytes(2 * tokens * hidden))
        tensors["topk_ids"] = files.Tensor("I32", [tokens, top_k], b"\xff" * (4 * tokens * top_k))
        tensors["topk_weights"] = files.Tensor("F32", [tokens, top_k], bytes(4 * tokens * top_k))
        files.write(self.path("layer"), tensors, metadata)
        for _ in range(10):
            with open(self.path("report"), "wb") as report, subprocess.Popen(
                    [COMMAND, "run", "--layer-file", self.path("layer"), "-o", self.path("out")], stdout=report) as process:
                while process.poll() is None:
                    if self.has_begun_to_write():
                        process.terminate()
                        break
                code = process.wait()
            if code == -signal.SIGTERM:
                break
            self.assertEqual(code, 0)
            os.remove(self.path("out"))
        self.assertEqual(code, -signal.SIGTERM)
        self.assertEqual(sorted(os.listdir(self.folder)), ["layer", "report"])
        with open(self.path("report"), encoding="ascii") as report:
            self.assertRegex(report.read(), r"(?s)^tokens +131072\n.*\ntime +[0-9.]+ ms\n$")

    def test_what_cannot_fit_is_refused(self):
        """Few weights and many tokens: their rows are in memory, in the file they are a hole."""
        tensors, metadata = files.read(layer("mixtral_a.safetensors"))
        hidden = tensors["hidden_states"].shape[1]
        kept = {name: tensors[name] for name in ("gate_up_proj", "down_proj", "router_weight")}
        kept["hidden_states"] = files.Tensor("BF16", [1 << 29, hidden], b"")
        files.write(self.path("layer"), kept, metadata)
        with open(self.path("layer"), "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
            data = file.read()
        header["hidden_states"]["data_offsets"] = [len(data), len(data) + (hidden << 30)]
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(self.path("layer"), "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text + data)
            file.truncate(8 + len(text) + len(data) + (hidden << 30))
        refused = self.moxie("run", "--layer-file", self.path("layer"), "--ranks", "2", code=2)[1]
        self.assertRegex(refused, r"this needs [\d.]+ [GT]iB, and [\d.]+ [KMGT]iB are free")


class Router(Case):
    """A router that is not known is not guessed, and experts whose ids are given need none. Nor is what experts compute."""

    def run_model(self, given, code, **keys):
        folder, number = MODELS[0]
        source = GOLDEN + "/models/" + folder
        with open(source + "/config.json", encoding="utf-8") as file:
            self.write("config.json", json.dumps({**json.load(file), **keys}))
        if not os.path.exists(self.path("model.safetensors")):
            os.symlink(source + "/model.safetensors", self.path("model.safetensors"))
        arguments = model_arguments(folder, number, self.folder)
        tensors, metadata = files.read(arguments[-1])
        if not given:
            del tensors["topk_ids"], tensors["topk_weights"]
        files.write(self.path("input"), tensors, metadata)
        return self.moxie("run", *arguments[:-1], self.path("input"), code=code)[1]

    def test_what_is_not_known_is_refused(self):
        for keys, words in (({"scoring_func": "sqrtsoftplus"}, ("scoring_func", '"sqrtsoftplus"', "softmax or sigmoid")),
                            ({"scoring_func": 1}, ("scoring_func", "is 1,")),
                            ({"model_type": "another", "scoring_func": "softmax"}, ("model_type", "another", "qwen3_moe")),
                            ({"topk_method": "best"}, ("topk_method", '"best"', "none")),
                            ({"norm_topk_prob": "false"}, ("norm_topk_prob", '"false"', "true or false")),
                            ({"model_type": "deepseek_v2", "topk_method": "group_limited_greedy"},
                             ("topk_method", "group_limited_greedy", "greedy")),
                            ({"model_type": "deepseek_v2", "n_group": 2, "topk_group": 1}, ("n_group", "is 2", "1 with")),
                            ({"model_type": "deepseek_v3", "scoring_func": "softmax"}, ("n_group", "is 8", "1 with")),
                            ({"model_type": "deepseek_v2", "norm_topk_prob": True}, ("norm_topk_prob", "is true", "only false")),
                            ({"model_type": "mixtral", "norm_topk_prob": False}, ("norm_topk_prob", "is false", "only true"))):
            with self.subTest(keys=keys):
                trouble = self.run_model(False, 2, **keys)
                for word in words:
                    self.assertIn(word, trouble)
                self.run_model(True, 0, **keys)

    def test_what_is_known_runs(self):
        for keys in ({"scoring_func": "softmax", "topk_method": None}, {"norm_topk_prob": None, "n_group": 1},
                     {"model_type": "deepseek_v2", "topk_method": "greedy", "norm_topk_prob": False}):
            self.run_model(False, 0, **keys)

    def test_activations_are_words(self):
        for value in (7, ["silu"], "swiglu"):
            trouble = self.run_model(True, 2, hidden_act=value)
            self.assertIn("hidden_act " + json.dumps(value), trouble)

    def test_long_values_are_cut(self):
        """What is wrong with them stands behind."""
        value = "x" * 5000
        for keys, given, words in (({"hidden_act": value}, True, "no kernel"), ({"scoring_func": value}, False, "softmax or"),
                                   ({"model_type": "another", "swiglu_limit": value}, True, "for gpt_oss")):
            with self.subTest(keys=list(keys)):
                self.assertRegex(self.run_model(given, 2, **keys), '"x{79}[ ,].*' + words)

    def test_gates_of_other_families(self):
        """Their weights are silu's, and what limits them is in their code."""
        for key, value in (("swiglu_limit", 10.0), ("swiglu_limits", [7]), ("swiglu_alpha", 1.5)):
            trouble = self.run_model(True, 2, model_type="another", **{key: value})
            self.assertIn("%s is %s, and what the family" % (key, json.dumps(value)), trouble)
        self.run_model(True, 0, model_type="another", swiglu_limit=None)

    def run_changed(self, folder, change, given, code):
        """A golden model whose tensors `change` changes, for which all after its layer's prefix stands."""
        number = dict(MODELS)[folder]
        source = GOLDEN + "/models/" + folder
        shutil.copy(source + "/config.json", self.path("config.json"))
        tensors, metadata = files.read(source + "/model.safetensors")
        prefix = "model.layers.%d.mlp." % number
        layer_tensors = {name[len(prefix):]: tensors.pop(name) for name in list(tensors) if name.startswith(prefix)}
        change(layer_tensors)
        tensors.update({prefix + name: tensor for name, tensor in layer_tensors.items()})
        files.write(self.path("model.safetensors"), tensors, metadata)
        tensors, _ = files.read("%s/layer%d_golden.safetensors" % (source, number))
        if not given:
            del tensors["topk_ids"], tensors["topk_weights"]
        files.write(self.path("input"), tensors)
        return self.moxie("run", "--model", self.folder, "--layer", str(number), "--input", self.path("input"), "--ranks", "2",
                          code=code)[1]

    def test_biases_of_single_experts(self):
        for projection in ("gate_proj", "up_proj", "down_proj"):
            def add(tensors):
                weight = tensors["experts.0.%s.weight" % projection]
                tensors["experts.0.%s.bias" % projection] = files.Tensor(weight.dtype, weight.shape[:1],
                                                                         bytes(2 * weight.shape[0]))
            self.assertIn("experts.0.%s.bias: " % projection, self.run_changed("tiny-qwen3-moe", add, True, 2))

    def test_fused_experts_have_both_biases(self):
        for projection in ("gate_up_proj", "down_proj"):
            trouble = self.run_changed("tiny-gpt-oss-mxfp4", lambda tensors: tensors.pop("experts.%s_bias" % projection), True, 1)
            self.assertRegex(trouble, "no tensor [a-z0-9.]*%s_bias" % projection)

    def test_experts_that_nobody_asked_for(self):
        for experts in (8, 15):
            trouble = self.run_model(True, 1, num_experts=experts, num_local_experts=experts)
            self.assertIn("experts.%d.gate_proj.weight is there, and the model's description has %d experts" % (experts, experts),
                          trouble)

    def test_routers_without_their_biases(self):
        for folder, name in (("tiny-gpt-oss-mxfp4", "router.bias"), ("tiny-deepseek-v3-fp8", "gate.e_score_correction_bias")):
            for given, code in ((False, 1), (True, 0)):
                trouble = self.run_changed(folder, lambda tensors: tensors.pop(name), given, code)
                self.assertEqual("no %s for this layer" % name.replace("gate.", "") in trouble, not given, trouble)
            self.run_changed(folder, lambda tensors: None, False, 0)

    def test_routers_of_another_shape(self):
        """Of as many bytes."""
        def turn(tensors):
            tensors["gate.weight"].shape.reverse()
        self.assertRegex(self.run_changed("tiny-qwen3-moe", turn, False, 1),
                         r"gate.weight is [BF1632]+ \[128, 16\]; wanted is BF16, F16 or F32 \[16, 128\]")
        self.run_changed("tiny-qwen3-moe", turn, True, 0)

    def test_scale_of_a_gate(self):
        """gpt-oss' own is 1.702."""
        folder, number = next(each for each in MODELS if "gpt-oss" in each[0])
        source = GOLDEN + "/models/" + folder
        os.symlink(source + "/model.safetensors", self.path("model.safetensors"))
        errors = []
        for keys in ({}, {"swiglu_alpha": 1.702}, {"swiglu_alpha": 1.0}):
            with open(source + "/config.json", encoding="utf-8") as file:
                self.write("config.json", json.dumps({**json.load(file), **keys}))
            errors.append(self.document("run", *model_arguments(folder, number, self.folder))["relative_error"])
        self.assertEqual(errors[0], errors[1])
        self.assertGreater(errors[2], 1e-3)


class NoExpert(Case):
    """Ids that name no expert are allowed, and may be a mistake: they are counted."""

    def test_they_are_counted(self):
        tensors, metadata = files.read(layer("mixtral_a.safetensors"))
        experts, whole = int(metadata["num_experts"]), tensors["topk_ids"]
        count = len(whole.data) // 4
        for changed in ({}, {0: -1, 1: experts}, {count - 1: 2 ** 31 - 1}, dict.fromkeys(range(count), -5)):
            ids = list(struct.unpack("<%di" % count, whole.data))
            for index, value in changed.items():
                ids[index] = value
            narrow = files.Tensor("I32", whole.shape, struct.pack("<%di" % count, *ids))
            for tensor in (narrow, narrow.as_i64()):
                files.write(self.path("layer"), {**tensors, "topk_ids": tensor}, metadata)
                arguments = ["run", "--layer-file", self.path("layer"), "--ranks", "2"]
                self.assertEqual(self.document(*arguments)["ids_of_no_expert"], len(changed))
                text, _ = self.moxie(*arguments)
                self.assertEqual("no expert       %d of %d ids\n" % (len(changed), count) in text, bool(changed), text)
                self.assertEqual("no expert" in text, bool(changed), text)

    def test_more_than_are_read_at_once(self):
        tensors, metadata = files.read(layer("mixtral_a.safetensors"))
        hidden, top_k = int(metadata["hidden_size"]), int(metadata["top_k"])
        tokens = 9000
        for name in ("hidden_states", "topk_ids", "topk_weights"):
            columns = hidden if name == "hidden_states" else top_k
            tensors[name] = files.Tensor(tensors[name].dtype, [tokens, columns],
                                         bytes(tokens * columns * files.BYTES[tensors[name].dtype]))
        del tensors["routed_output"]
        for data in (struct.pack("<i", -1), struct.pack("<q", -1)):
            tensors["topk_ids"] = files.Tensor("I%d" % (8 * len(data)), [tokens, top_k], data * tokens * top_k)
            files.write(self.path("layer"), tensors, metadata)
            self.assertEqual(self.document("run", "--layer-file", self.path("layer"))["ids_of_no_expert"], tokens * top_k)


class Ungated(Case):
    """relu2 has no gate: y = down * relu(up * x)^2."""

    HIDDEN, INTERMEDIATE, EXPERTS, TOKENS = 32, 16, 2, 5

    def setUp(self):
        super().setUp()
        chance = random.Random(3)
        self.ups, self.downs = ([[[chance.uniform(-1, 1) for _ in range(columns)] for _ in range(rows)]
                                 for _ in range(self.EXPERTS)]
                                for rows, columns in ((self.INTERMEDIATE, self.HIDDEN), (self.HIDDEN, self.INTERMEDIATE)))
        rows = [[chance.uniform(-1, 1) for _ in range(self.HIDDEN)] for _ in range(self.TOKENS)]
        ids = [token % self.EXPERTS for token in range(self.TOKENS)]
        wanted = [self.apply(self.downs[expert], [max(value, 0) ** 2 for value in self.apply(self.ups[expert], row)])
                  for row, expert in zip(rows, ids)]
        self.inputs = {"hidden_states": self.tensor(rows), "routed_output": self.tensor(wanted),
                       "topk_ids": files.Tensor("I32", [self.TOKENS, 1], struct.pack("<5i", *ids)),
                       "topk_weights": files.Tensor("F32", [self.TOKENS, 1], struct.pack("<5f", *[1] * 5))}

    @staticmethod
    def apply(matrix, row):
        return [sum(a * b for a, b in zip(line, row)) for line in matrix]

    @staticmethod
    def tensor(rows, *before):
        flat = [value for row in rows for value in row]
        return files.Tensor("F32", [*before, len(rows) // max(1, math.prod(before)), len(rows[0])],
                            struct.pack("<%df" % len(flat), *flat))

    def test_layer_file(self):
        turned = [list(zip(*up)) for up in self.ups], [list(zip(*down)) for down in self.downs]
        for name, (ups, downs) in (("[E,I,H]", (self.ups, self.downs)), ("[E,H,I]", turned)):
            metadata = {"hidden_size": str(self.HIDDEN), "intermediate_size": str(self.INTERMEDIATE),
                        "num_experts": str(self.EXPERTS), "top_k": "1", "activation": "relu2", "weight_layout": name}
            tensors = {"up_proj": self.tensor(sum(ups, []), self.EXPERTS),
                       "down_proj": self.tensor(sum(downs, []), self.EXPERTS)}
            files.write(self.path("layer"), {**self.inputs, **tensors}, metadata)
            self.run_layer("--layer-file", self.path("layer"), ranks=2)
            files.write(self.path("layer"), {**self.inputs, **tensors}, {**metadata, "weight_layout": "[E,2I,H] gate then up"})
            self.assertIn(name, self.moxie("run", "--layer-file", self.path("layer"), code=1)[1])

    def test_model(self):
        name = "model.layers.0.mlp.experts.%d.%s.weight"
        files.write(self.path("input"), self.inputs)
        files.write(self.path("model.safetensors"), {name % (expert, which): self.tensor(matrices[expert])
                    for which, matrices in (("up_proj", self.ups), ("down_proj", self.downs))
                    for expert in range(self.EXPERTS)})
        config = {"hidden_size": self.HIDDEN, "moe_intermediate_size": self.INTERMEDIATE, "num_experts": self.EXPERTS,
                  "num_experts_per_tok": 1, "hidden_act": "relu2"}
        self.write("config.json", json.dumps(config))
        arguments = ["--model", self.folder, "--layer", "0", "--input", self.path("input")]
        self.run_layer(*arguments, ranks=2)
        self.write("config.json", json.dumps({**config, "hidden_act": "silu"}))
        self.assertIn("0.gate_proj.weight", self.moxie("run", *arguments, code=1)[1])


class Paths(Case):
    """Of the library, as a user writes them."""

    PLUGIN = os.path.abspath(os.environ["MOXIE_PLUGIN"])

    def run_in(self, *arguments, env=None):
        """(exit code, standard output, standard error), in the folder of the test."""
        done = subprocess.run([os.path.abspath(COMMAND), *arguments], capture_output=True, timeout=TIMEOUT_S,
                              check=False, cwd=self.folder, env=env)
        return done.returncode, done.stdout.decode("utf-8"), done.stderr.decode("utf-8", "replace")

    def test_a_path_that_is_not_utf_8(self):
        os.symlink(self.PLUGIN, os.fsencode(self.folder) + b"/lib\xff\xc3\xa9.so")
        for arguments, key in ((["info"], "library"), (["conform", "--rule", "entry"], "plugin")):
            code, text, trouble = self.run_in(*arguments, "--json", "--plugin", b"./lib\xff\xc3\xa9.so")
            self.assertEqual(code, 0, trouble)
            self.assertEqual(json.loads(text)[key], "./lib\ufffd\u00e9.so")
        code, text, trouble = self.run_in("conform", "--rule", "entry", "--json", "--plugin", self.write("no\udcff", "no"))
        self.assertEqual(code, 2, trouble)
        self.assertEqual(json.loads(text)["rules"][0]["verdict"], "fail")

    def test_ranks_get_paths_that_are_not_utf_8(self):
        name = b"\x80\xc3\xa9\xff"
        shutil.copytree(GOLDEN + "/models/tiny-qwen3-moe", self.path(os.fsdecode(name)))
        shutil.copy(self.PLUGIN, os.fsencode(self.folder) + b"/lib" + name + b".so")
        for arguments in ((b"run", b"--model", name, b"--layer", b"1", b"--input", name + b"/layer1_golden.safetensors"),
                          (b"bench", b"--shape", b"64,32,8,2", b"--tokens", b"1", b"--seconds", b"0.01")):
            code, text, trouble = self.run_in(*arguments, b"--ranks", b"2", b"--json", b"--plugin", b"./lib" + name + b".so")
            self.assertEqual(code, 0, trouble)
            self.assertTrue(json.loads(text)["ok"])

    def test_a_file_of_the_current_folder(self):
        os.symlink(self.PLUGIN, self.path("libmine.so"))
        env = {**os.environ, "MOXIE_PLUGIN": "libmine.so"}
        for arguments, variables in ((["--plugin", "libmine.so"], None), ([], env)):
            code, text, trouble = self.run_in("info", "--json", *arguments, env=variables)
            self.assertEqual(code, 0, trouble)
            self.assertEqual(json.loads(text)["library"], "./libmine.so")
        for arguments, variables, words in ((["--plugin", "./no"], None, "moxie info: ./no cannot be loaded"),
                                            ([], {**env, "MOXIE_PLUGIN": "./no"}, "MOXIE_PLUGIN: ./no cannot")):
            code, text, trouble = self.run_in("info", *arguments, env=variables)
            self.assertEqual((code, text), (1, ""))
            self.assertIn(words, trouble)

    def test_an_empty_path_is_no_path(self):
        for command in ("info", "conform"):
            _, trouble = self.moxie(command, "--plugin", "", code=1)
            self.assertIn("--plugin: a path is wanted", trouble)
        given = {"--model": "x", "--layer": "0", "--input": "x"}
        for option in ("--model", "--input", "--layer-file", "--output"):
            others = [f"{name}={value}" for name, value in given.items() if name != option]
            _, trouble = self.moxie("run", *others, f"{option}=", code=1)
            self.assertIn(f"{option}: a path is wanted", trouble)
        for command in ("plan", "check"):
            _, trouble = self.moxie(command, "", code=1)
            self.assertIn("a configuration is wanted: a JSON file", trouble)


class Info(Case):
    def test_document(self):
        info = self.document("info")
        for key in ("library", "build", "abi", "devices", "backends", "limits"):
            self.assertIn(key, info)
        names = {(backend["kind"], backend["name"]) for backend in info["backends"]}
        self.assertLessEqual({("runner", "moxie_cpu"), ("dispatcher", "local"), ("dispatcher", "allgather"),
                              ("dispatcher", "alltoall")}, names)
        self.assertIn("cpu", info["devices"])

    def test_human_output(self):
        text, _ = self.moxie("info")
        self.assertIn("moxie_cpu", text)
        text, _ = self.moxie("info", "--keys")
        self.assertRegex(text, r"hidden_size +i64 +required")
        self.assertRegex(text, r"dispatch_rounds_max +i64 +1 ")


class Documents(Case):
    """With --json every answer is a document, a refusal too."""

    def test_every_refusal_is_a_document(self):
        tensors, metadata = files.read(layer("mixtral_a.safetensors"))
        del tensors["topk_ids"], tensors["topk_weights"]
        files.write(self.path("another"), tensors, {**metadata, "family": "another"})
        tiny = ["bench", "--shape", "64,32,8,2", "--tokens", "1"]
        for arguments, words in ((["run", *MIXTRAL, "--ranks", "2", "--dispatcher", "local"], "sum over ranks"),
                                 (["run", *MIXTRAL, "--runner", "nobody"], "nobody"),
                                 (["run", "--layer-file", self.path("another")], "model_type"),
                                 ([*tiny, "--op", "both"], "--op both"),
                                 ([*tiny, "--skew", "9", "--ranks", "2"], "--skew 9"),
                                 (["bench", "--shape", "100,100,8,1", "--tokens", "1", "--weight-format", "mxfp4"],
                                  "mxfp4"),
                                 (["bench", "--shape", "1048576,1048576,1024,8", "--tokens", "1"], "this needs"),
                                 (["plan", self.config(top_k=1000)], "top_k")):
            with self.subTest(arguments=arguments):
                refused = self.document(*arguments, code=2)
                self.assertEqual(list(refused)[:3], ["ok", "reasons", "warnings"])
                self.assertIs(refused["ok"], False)
                self.assertEqual(list(refused["reasons"][0]), ["code", "key", "message"])
                self.assertIn(words, "".join(reason["message"] for reason in refused["reasons"]))

    def test_a_configuration_without_a_bound(self):
        """Works, for a token at a time: said with the verdict."""
        for command in ("check", "plan"):
            warning, = self.document(command, self.config())["warnings"]
            self.assertEqual(warning["key"], "forward_tokens_max")
            self.assertEqual(self.document(command, self.config(context_length=64))["warnings"], [])
        self.assertIn("warning: forward_tokens_max: no key in effect says", self.moxie("check", self.config())[0])

    def test_a_deployment_on_gpus_is_planned_without_one(self):
        """The numbers that README.md and scripts/quickstart have, of the plan and of the weights beside it."""
        planned = self.document("plan", DEEPSEEK)
        self.assertEqual((planned["ok"], planned["warnings"]), (True, []))
        self.assertIn("x_fp8", [buffer["name"] for buffer in planned["buffers"]])
        self.assertIn("Total: device 5.8 GiB, symmetric 786.0 MiB,", self.moxie("plan", DEEPSEEK)[0])
        self.assertEqual(self.document("check", DEEPSEEK)["runner"], "moxie_cuda")
        with open(DEEPSEEK) as file:
            keys = json.load(file)
        numbers = 3 * keys["hidden_size"] * keys["intermediate_size"] * keys["num_experts"] // keys["ep_size"]
        self.assertEqual(planned["weights_bytes"], numbers * (1 + 4 / 128 ** 2) * keys["num_layers"])
        self.assertIn("weights of these experts, 76.1 GiB\n", self.moxie("plan", DEEPSEEK)[0])
        for activation, matrices in (("silu", 3), ("relu2", 2)):
            path = self.config(activation=activation, num_layers=5)
            self.assertEqual(self.document("plan", path)["weights_bytes"], matrices * 2048 * 768 * 128 * 2 * 5)
        self.assertNotIn("weights_bytes", self.document("plan", self.config(runner="none")))
        self.assertNotIn("Not in it", self.moxie("plan", self.config(runner="none"))[0])

    def test_only_what_was_given_is_refused(self):
        tiny = ["bench", "--shape", "64,32,8,2", "--tokens", "1"]
        for given, other in ((["--delay-us", "5"], "--op"), (["--op", "both"], "--delay-us")):
            refused = self.document(*tiny, *given, code=2)
            self.assertIn(" ".join(given), refused["reasons"][0]["message"])
            self.assertNotIn(other, refused["reasons"][0]["message"])

    def test_defaults_are_what_may_be_written(self):
        """Not what they became on this machine."""
        keys = {key["key"]: key["default"] for key in self.document("info", "--keys")["keys"]}
        for key in ("runner", "dispatcher", "activation_format", "transport"):
            self.assertEqual(keys[key], "auto")
        self.assertEqual([keys[key] for key in ("activation", "weight_format", "device", "speculative_algorithm")],
                         ["silu", "bf16", "cpu", "none"])
        self.assertRegex(self.moxie("info", "--keys")[0], r"\nrunner +str +auto ")
        self.assertRegex(self.moxie("info", "--keys")[0], r"\nactivation +str .*; one of silu, gelu, .*relu2\n")

    def test_a_value_of_another_type_is_said(self):
        for value in ("1GiB", 99.5, None, [8]):
            reason, = self.document("check", self.config(device_memory_budget_bytes=value), code=2)["reasons"]
            self.assertTrue(reason["message"].endswith(f" (it is {json.dumps(value)})"), reason)
        reason, = self.document("check", self.config(top_k=1000), code=2)["reasons"]
        self.assertNotIn("it is", reason["message"])

    def test_documents_say_what_the_text_says(self):
        self.assertEqual(self.document("run", *MIXTRAL)["weights"], "bf16")
        for tolerance, code in (("1", 0), ("1e-30", 3)):
            found = self.document("run", *MIXTRAL, "--tolerance", tolerance, code=code)
            self.assertEqual((found["ok"], found["tolerance"]), (code == 0, float(tolerance)))
        verdict = self.document("check", self.config())
        self.assertEqual((verdict["runner"], verdict["dispatcher"]), ("moxie_cpu", "local"))
        self.assertIsNone(self.document("check", self.config(top_k=0), code=2)["runner"])
        for keys, code in (({}, 0), ({"top_k": 1000}, 2)):
            path = self.config(max_prefil_tokens=64, max_running_requests=64, **keys)
            warning, = self.document("plan", path, code=code)["warnings"]
            self.assertIn("max_prefill_tokens", warning["message"])
            self.assertIn("did you mean max_prefill_tokens", self.moxie("plan", path, code=code)[1])
        bench = ["bench", "--shape", "64,32,8,2", "--tokens", "1", "--seconds", "0.01", "--row-format", "f16"]
        self.assertIn("bf16 weights, f16 rows", self.moxie(*bench)[0])
        self.assertIn("1000 repetitions", " ".join(self.moxie("bench", "--help")[0].split()))
        refused = self.document("run", *MIXTRAL, "--ranks", "2", "--dispatcher", "local", "--dispatch-sms", "3", code=2)
        self.assertIn("dispatch_sms", [warning["key"] for warning in refused["warnings"]])
        for command in (["run", *MIXTRAL], bench):
            self.assertEqual(self.document(*command)["warnings"], [])
            warning, = self.document(*command, "--dispatch-sms", "3")["warnings"]
            self.assertEqual(warning["key"], "dispatch_sms")
        found = self.document(*bench)
        self.assertEqual((found["ok"], found["row_format"], found.get("dispatch_format")), (True, "f16", None))
        over_ranks = [*bench, "--ranks", "2", "--skew", "1.5", "--dispatch-format", "fp8_block128"]
        self.assertIn(" threads, fp8_block128 between ranks, skew 1.5\n", self.moxie(*over_ranks)[0])
        found = self.document(*over_ranks)
        self.assertEqual((found["dispatch_format"], found["skew"]), ("fp8_block128", 1.5))
        self.assertEqual(self.document(*bench, "--ranks", "2")["dispatch_format"], "input")


if __name__ == "__main__":
    unittest.main()
