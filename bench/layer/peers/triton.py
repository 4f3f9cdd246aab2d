"""The Triton fused_moe that vLLM and SGLang ship, as the user has it installed: the whole layer.

--triton-fused-moe is a folder that holds the package vllm or sglang, or a file that defines
fused_experts(hidden_states, w1, w2, topk_weights, topk_ids). --triton-configs is a folder of tile
files, which both engines are told of before they are imported.
"""

import importlib
import importlib.util
import os
import pathlib
import sys

from peers import System


def from_file(path):
    spec = importlib.util.spec_from_file_location("given_fused_moe", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.fused_experts


def from_vllm():
    return importlib.import_module("vllm.model_executor.layers.fused_moe").fused_experts


def from_sglang():
    """SGLang takes ids and weights as one object, and its settings from the scheduler's."""
    moe = "sglang.srt.layers.moe."
    fused = importlib.import_module(moe + "fused_moe_triton.fused_moe").fused_experts
    choice = importlib.import_module(moe + "topk").StandardTopKOutput
    settings = importlib.import_module(moe + "moe_runner").MoeRunnerConfig(inplace=False)
    server = importlib.import_module("sglang.srt.server_args")
    if hasattr(server, "set_global_server_args_for_scheduler"):
        server.set_global_server_args_for_scheduler(server.ServerArgs(model_path="dummy"))

    def fused_experts(hidden_states, w1, w2, topk_weights, topk_ids):
        return fused(hidden_states, w1, w2, choice(topk_weights, topk_ids, None), settings)
    return fused_experts


ENGINES = {"vllm": from_vllm, "sglang": from_sglang}


class Triton(System):
    name = "triton_fused_moe"

    def available(self):
        given = self.options.triton_fused_moe
        if self.options.triton_configs:
            folder = str(pathlib.Path(self.options.triton_configs).resolve())
            os.environ["VLLM_TUNED_CONFIG_FOLDER"] = folder
            os.environ["SGLANG_MOE_CONFIG_DIR"] = folder
        try:
            if given and pathlib.Path(given).is_file():
                self.fused_experts = from_file(given)
                return None
        except Exception as error:  # whatever a user's file raises
            return f"{given}: {type(error).__name__}: {error}"
        if self.device.kind == "cpu":
            return "needs a GPU"
        if given:
            sys.path.insert(0, str(pathlib.Path(given).resolve()))
        return self._engine()

    def _engine(self):
        reasons = []
        for engine, find in ENGINES.items():
            if importlib.util.find_spec(engine) is None:
                continue
            try:
                self.fused_experts = find()
                self.name = f"{type(self).name}_{engine}"
                return None
            except Exception as error:  # whatever an engine raises where it does not fit
                reasons.append(f"{engine}: {type(error).__name__}: {error}")
        return "; ".join(reasons) or "neither vllm nor sglang is installed; --triton-fused-moe PATH"

    def run(self, forward):
        case = self.case
        w1, w2 = case.weights(forward)
        return self.fused_experts(hidden_states=case.x[forward], w1=w1, w2=w2,
                                  topk_weights=case.router[forward], topk_ids=case.ids[forward])
