"""hosts/python/moxie/transformers.py under transformers' own tensor and expert parallelism: two
processes over gloo, each with its part of a tiny model, whose logits are those of eager in one.

Wants torch, transformers and accelerate (host_tests/torch.txt); without them it exits 77.
"""

import importlib.util
import json
import os
import pathlib
import sys
import tempfile
import unittest

import rank_processes
import torch_python
from transformers_case import (
    LAYERS, adapter, logits, model_of, prompt, relative, save_mxfp4)

torch_python.require(importlib.util.find_spec("accelerate"), "accelerate is")

import torch  # noqa: E402
import torch.distributed  # noqa: E402
from transformers import AutoModelForCausalLM, Mxfp4Config  # noqa: E402
from transformers.distributed import DistributedConfig  # noqa: E402

RANKS, SECONDS = 2, 100
PARALLEL = {"tensor": {"tp_size": RANKS}, "expert": {"tp_size": RANKS, "ep_size": RANKS}}


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def run_rank(folder, rank):
    """One process of those that share each model; leaves what it saw in a file of its own."""
    seen = []
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank,
                                         world_size=RANKS)
    adapter.configure(plugin=os.environ["MOXIE_PLUGIN"], cpu_threads=1)
    for model_folder in sorted(each for each in pathlib.Path(folder).iterdir() if each.is_dir()):
        wanted = torch.load(model_folder / "logits.pt")
        for kind, sizes in PARALLEL.items():
            model = AutoModelForCausalLM.from_pretrained(
                model_folder, dtype=torch.float32, experts_implementation="moxie",
                distributed_config=DistributedConfig(**sizes)).eval()
            apart = relative(whole(logits(model, "moxie", prompt())), wanted)
            layers = [adapter._layers[each] for each in adapter._experts_modules(model)]
            config = layers[0].shared.experts.config
            seen.append((model_folder.name, kind, apart, len(layers), config["num_experts"],
                         config["intermediate_size"]))
    pathlib.Path(folder, f"{rank}.json").write_text(json.dumps(seen))
    torch.distributed.destroy_process_group()


class Ranks(unittest.TestCase):
    def test_parts_of_a_model(self):
        """Also of a model with fewer experts on a rank than a token chooses."""
        shapes = {"mixtral-few": ("mixtral", {"num_local_experts": 2}), "mixtral": ("mixtral", {}),
                  "qwen3": ("qwen3_moe", {})}
        with tempfile.TemporaryDirectory() as folder:
            for name, (kind, sizes) in shapes.items():
                model = model_of(kind, **sizes)
                model.save_pretrained(pathlib.Path(folder) / name)
                torch.save(logits(model, "eager", prompt()),
                           pathlib.Path(folder) / name / "logits.pt")
            save_mxfp4(mxfp4 := pathlib.Path(folder) / "mxfp4")
            model = AutoModelForCausalLM.from_pretrained(
                mxfp4, dtype=torch.bfloat16, quantization_config=Mxfp4Config(dequantize=True))
            torch.save(logits(model.float(), "eager", prompt()), mxfp4 / "logits.pt")
            rank_processes.run(self, __file__, folder, RANKS, SECONDS, lambda rank: {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)})
            found = [json.loads(pathlib.Path(folder, f"{rank}.json").read_text())
                     for rank in range(RANKS)]
        for seen in found:
            self.assertEqual(len(seen), (len(shapes) + 1) * len(PARALLEL))
            for name, kind, apart, ran, experts, intermediate in seen:
                with self.subTest(name, parallel=kind):
                    self.assertLess(apart, 5e-6)
                    self.assertEqual(ran, LAYERS)
                    all_experts = 2 if name == "mixtral-few" else 8
                    wanted = {"expert": (all_experts // RANKS, 48),
                              "tensor": (all_experts, 48 // RANKS)}
                    if name == "mxfp4":  # of gpt-oss transformers parts no expert
                        wanted = {"expert": (all_experts // RANKS, 96), "tensor": (8, 96)}
                    self.assertEqual((experts, intermediate), wanted[kind])


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        run_rank(sys.argv[2], int(sys.argv[3]))
    else:
        unittest.main()
