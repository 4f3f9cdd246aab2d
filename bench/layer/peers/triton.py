"""The Triton fused_moe that vLLM and SGLang ship, as the user has it installed: the whole layer.

--triton-fused-moe is a folder that holds the package vllm or sglang, or a file that defines
fused_experts(hidden_states, w1, w2, topk_weights, topk_ids), in fp8 with w1_scale, w2_scale and
block_shape, too. --triton-configs is a folder of tile files, which both engines are told of before
they are imported.
"""

import importlib
import importlib.util
import inspect
import os
import pathlib
import sys

from measure import fp8
from measure.case import FORWARDS
from peers import System, check_blocks, lacks, lacks_format, not_in

OPTION = "--triton-fused-moe"


def folder_of(options):
    """That --triton-fused-moe names, or None: it may name a file."""
    given = options.triton_fused_moe
    return None if given is None or pathlib.Path(given).is_file() else given


def tell_configs(folder):
    """Both engines of a folder of tile files, or says why there is none."""
    if folder and not pathlib.Path(folder).is_dir():
        return f"no folder {folder}; --triton-configs names one with tile files"
    if folder:
        for name in ("VLLM_TUNED_CONFIG_FOLDER", "SGLANG_MOE_CONFIG_DIR"):
            os.environ[name] = str(pathlib.Path(folder).resolve())
    return None


def from_file(path):
    spec = importlib.util.spec_from_file_location("given_fused_moe", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.fused_experts


def keep_scales():
    """If vLLM finds DeepGEMM, as --deep-gemm makes it do, it otherwise rounds the scales of rows to
    powers of two, though it multiplies with Triton."""
    os.environ.setdefault("VLLM_USE_DEEP_GEMM", "0")


def from_vllm():
    """vLLM takes scales within a description of the format, and by themselves before there was
    one."""
    keep_scales()
    folder = "vllm.model_executor.layers.fused_moe"
    fused = importlib.import_module(folder).fused_experts
    if "use_fp8_w8a8" in inspect.signature(fused).parameters:
        return with_flag(fused)

    def fused_experts(w1_scale=None, w2_scale=None, block_shape=None, **given):
        if w1_scale is None:
            return fused(**given)
        describe = importlib.import_module(folder + ".config").fp8_w8a8_moe_quant_config
        return fused(**given, quant_config=describe(w1_scale=w1_scale, w2_scale=w2_scale,
                                                    block_shape=block_shape))
    return fused_experts


def with_flag(fused):
    """Of a function that wants to be told that there are scales."""
    def fused_experts(**given):
        return fused(**given, **({"use_fp8_w8a8": True} if "w1_scale" in given else {}))
    return fused_experts


def from_sglang():
    """SGLang takes ids and weights as one object, and its settings from the scheduler's."""
    moe = "sglang.srt.layers.moe."
    fused = importlib.import_module(moe + "fused_moe_triton.fused_moe").fused_experts
    choice = importlib.import_module(moe + "topk").StandardTopKOutput
    settings = importlib.import_module(moe + "moe_runner").MoeRunnerConfig(inplace=False)
    server = importlib.import_module("sglang.srt.server_args")
    if hasattr(server, "set_global_server_args_for_scheduler"):
        server.set_global_server_args_for_scheduler(server.ServerArgs(model_path="dummy"))

    def fused_experts(hidden_states, w1, w2, topk_weights, topk_ids, **scales):
        return fused(hidden_states, w1, w2, choice(topk_weights, topk_ids, None), settings,
                     **scales)
    return with_flag(fused_experts)


SCALES = ("w1_scale", "w2_scale", "block_shape")
ENGINES = {"vllm": from_vllm, "sglang": from_sglang}


class Triton(System):
    name = "triton_fused_moe"
    engines = tuple(ENGINES)  # that are looked for

    @classmethod
    def names(cls):
        return (cls.name, *(f"{cls.name}_{engine}" for engine in ENGINES))

    def is_among(self, names):
        """Who names engines wants no other."""
        if self.name not in names:
            self.engines = [each for each in ENGINES if f"{self.name}_{each}" in names]
        return bool(self.engines)

    def has_to_be_there(self):
        return bool(self.options.triton_fused_moe or self.options.triton_configs)

    def available(self):
        given, folder = self.options.triton_fused_moe, folder_of(self.options)
        absent = (lacks_format(self.options.format, "bf16", "fp8")
                  or tell_configs(self.options.triton_configs))
        if absent:
            return absent
        try:
            if given and not folder:
                self.fused_experts = from_file(given)
                return self._lacks_scales(given)
        except Exception as error:  # whatever a user's file raises
            return f"{given}: {type(error).__name__}: {error}"
        absent = not_in(folder, OPTION, *self.engines) if folder else None
        if absent is None and self.device.kind == "cpu":
            absent = "needs a GPU"
        return absent or self._engine(folder)

    def _lacks_scales(self, given):
        parameters = inspect.signature(self.fused_experts).parameters
        takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        if self.options.format == "bf16" or takes_all or {*SCALES} <= parameters.keys():
            return None
        return f"{given}: its fused_experts has no {', '.join(SCALES)}, which fp8 wants"

    def _engine(self, folder):
        reasons = []
        for engine in self.engines:
            if lacks(engine, folder, OPTION):
                continue
            try:
                self.fused_experts = ENGINES[engine]()
                self.name = f"{type(self).name}_{engine}"
                self.version = getattr(sys.modules.get(engine), "__version__", None)
                return None
            except Exception as error:  # whatever an engine raises where it does not fit
                reasons.append(f"{engine}: {type(error).__name__}: {error}")
        return "; ".join(reasons) or (f"no {' or '.join(self.engines)} is installed; "
                                      f"{OPTION} PATH")

    def prepare(self, case):
        super().prepare(case)
        check_blocks(case)
        self.scales = [{}] * FORWARDS
        if case.number == "fp8":
            self.scales = [dict(zip(SCALES, (*case.scales(forward), [fp8.BLOCK, fp8.BLOCK])))
                           for forward in range(FORWARDS)]

    def run(self, forward):
        case = self.case
        w1, w2 = case.weights(forward)
        return self.fused_experts(hidden_states=case.x[forward], w1=w1, w2=w2,
                                  topk_weights=case.router[forward], topk_ids=case.ids[forward],
                                  **self.scales[forward])

    def release(self):
        self.scales = []
        super().release()
