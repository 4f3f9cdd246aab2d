"""moxie.sglang over several ranks, a process each: rows that Moxie takes to the ranks of their
experts, through SGLang's MoeRunner and the dispatcher around it, against plain loops over all
experts; where SGLang is installed, through its FusedMoE, too. And what becomes of a server's
arguments, which nothing starts.

Two ranks, or MOXIE_TEST_RANKS = 4. Wants torch, or exits with 77; with MOXIE_TEST_DEVICE=cuda a
GPU for each rank. sglang_case.py says what else.
"""

import contextlib
import functools
import json
import os
import pathlib
import sys
import tempfile
import types
import unittest
from unittest import mock

from sglang_case import FEATURES, REAL, Case, adapter

import torch
import torch.distributed

import rank_processes
import torch_python
from experts_case import DEVICE, OFF_BY_MAX, ON_CPU, off_by
from moxie import Experts, MoxieError, abi
from sglang.srt.layers.moe.fused_moe_triton import layer as fused_moe
from sglang.srt.layers.moe.moe_runner.runner import MoeRunner
from sglang.srt.layers.moe.utils import MoeA2ABackend, MoeRunnerBackend
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.runtime_context import get_flags
from sglang.srt.server_args import ServerArgs

RANKS, SECONDS, TOKENS_MAX = int(os.environ.get("MOXIE_TEST_RANKS", "2")), 100, 16
MODEL = {"model_type": "qwen3_moe", "hidden_size": 64, "intermediate_size": 128,
         "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2,
         "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 16, "vocab_size": 128, "max_position_embeddings": 512,
         "torch_dtype": "bfloat16"}
if not ON_CPU and torch.cuda.device_count() < RANKS:
    torch_python.skip(f"torch sees fewer than {RANKS} GPUs")


class Part:
    """A rank's part of a layer of all ranks: its experts, and as many rows as `shares` says."""

    def __init__(self, whole, rank, shares, **more):
        self.whole, own = whole, whole.experts // RANKS
        self.rows = slice(sum(shares[:rank]), sum(shares[:rank + 1]))
        self.part = Case(scheme=whole.scheme, experts=own)
        mine = slice(rank * own, (rank + 1) * own)
        self.part.weights = [each[mine] for each in whole.weights]
        self.part.scales = [each[mine] if each is not None else None for each in whole.scales]
        self.part.x, self.part.ids, self.part.router = (
            each[self.rows] for each in (whole.x, whole.ids, whole.router))
        self.config = whole.config(num_local_experts=own, **more)

    def make(self, backend=MoeRunnerBackend.TRITON):
        """As SGLang's FusedMoE does it: the runner, then what is around it."""
        self.runner = MoeRunner(backend, self.config)
        self.config.runner_backend, self.method = backend, types.SimpleNamespace()
        self.around = fused_moe.create_moe_dispatcher(self.config, quant_method=self.method)
        return self

    def run(self, tokens=None, **quant):
        """tokens: of each DP rank, where SGLang knows them."""
        rows = self.part.rows()
        with mock.patch.object(adapter, "get_dp_global_num_tokens", lambda: tokens):
            sent = self.around.dispatch(hidden_states=rows.hidden_states,
                                        topk_output=rows.topk_output)
            summed = self.runner.run(sent, self.part.quant(**quant))
            return self.around.combine(combine_input=summed)

    def check(self, seen):
        wanted = self.whole.wanted()[self.rows]
        assert seen.shape == wanted.shape, (seen.shape, wanted.shape)
        if len(wanted):
            apart = off_by(seen, wanted)
            assert apart < OFF_BY_MAX[self.whole.scheme], (self.whole.scheme, apart)


def refused(do, *words):
    try:
        do()
    except MoxieError as error:
        assert all(word in error.text for word in words), error
        return error
    raise AssertionError(f"{words} is not refused")


# ---- What each rank does -----------------------------------------------------------------------


def check_dispatched(rank):
    """Every rank has its own rows, or none, and gets their whole sums."""
    for scheme, pair in ((None, (12, 4)), ("block", (7, 9)), ("channel", (3, 5)),
                         ("tensor", (8, 8)), (None, (0, 6)), (None, (0, 0))):
        shares = pair * (RANKS // 2)
        whole = Case(tokens=sum(shares), scheme=scheme)
        part = Part(whole, rank, shares).make()
        assert isinstance(part.around, adapter.MoxieDispatcher), part.around
        for tokens in (None, list(shares)):
            part.check(part.run(tokens))
        config = part.runner.fused_func.shared.experts.config
        assert (config["num_experts"], config["ep_size"]) == (whole.experts, RANKS), config
        assert (config["ep_rank"], config["forward_tokens_max"]) == (rank, TOKENS_MAX), config
        refused(lambda: part.run([TOKENS_MAX + 1] + [0] * (RANKS - 1)),
                f"forward of {TOKENS_MAX + 1} tokens on one", f"room for {TOKENS_MAX}",
                "SGLANG_FLASHINFER_NUM_MAX_DISPATCH_TOKENS_PER_RANK")


def check_scaling(rank):
    """The router's weights have it; what SGLang does for models that scale sums is off."""
    part = Part(Case(), rank, (3, 2), routed_scaling_factor=2.5).make()
    part.check(part.run())
    assert part.method.fuse_routed_scaling_factor_in_topk is True


def check_failures(rank):
    """Those of graphs, which nobody calls, are seen behind each forward."""
    part = Part(Case(), rank, (3, 2)).make()
    part.run()
    asked, failure = [], MoxieError(abi.E_PEER, 1, "rank 1 is gone")

    def check(experts):
        asked.append(experts.ranks)
        raise failure
    if REAL:  # which nothing makes one of here
        assert hasattr(ModelRunner.forward, "__wrapped__")
    forward = adapter._forwarded if REAL else lambda: ModelRunner().forward(None)
    with mock.patch.object(Experts, "check", check):
        assert refused(forward, "rank 1 is gone") is failure
    assert asked == [RANKS], asked
    forward()


def layer_of(part, **quant):
    """As much of SGLang's FusedMoE as is there when its runner is made."""
    return types.SimpleNamespace(quant_method=types.SimpleNamespace(
        get_triton_quant_info=lambda module: part.part.quant(**quant)))


def check_buffers(rank):
    """Are there when SGLang has made the layer."""
    part = Part(Case(), rank, (3, 2))
    part.config.layer = layer_of(part)
    with mock.patch.object(adapter, "LAYERS_MAX", 3):  # an instance of its own
        shared = part.make().runner.fused_func.shared
        assert shared is not None
        held = set(shared.allocator.held)
        part.check(part.run())
    assert part.runner.fused_func.shared is shared and set(shared.allocator.held) == held
    with mock.patch.object(FEATURES, "enable_memory_saver", True):
        assert part.make().runner.fused_func.shared is None


def check_wire(rank):
    """Rows are fp8 on the way where a GPU multiplies them as fp8; a CPU does not."""
    for scheme in (None, "block", "channel", "tensor"):
        part = Part(Case(scheme=scheme), rank, (3, 2)).make()
        on_gpu = "input" if scheme is None else "fp8_block128"
        for device, wanted in (("cuda", on_gpu), ("cpu", "input")):
            weight = mock.Mock(wraps=part.part.weights[0], is_cuda=device == "cuda",
                               __len__=lambda self: len(part.part.weights[0]))
            quant = part.part.quant()
            described = adapter.describe(part.config, quant, torch.bfloat16, 2)
            quant.w13_weight = weight
            with mock.patch.object(adapter, "describe", lambda *given: described):
                keys, _, _ = part.runner.fused_func._describe(quant, torch.bfloat16, 2)
            assert keys["dispatch_format"] == wanted, (scheme, device, keys)


def check_what_is_refused(rank):
    """SGLang has nothing for these layers: what Moxie does not take ends with what to do."""
    advice = "--moe-a2a-backend none leaves rows to SGLang"
    part = Part(Case(), rank, (3, 2)).make()
    for _ in range(2):
        refused(lambda: part.run(use_int4_w4a16=True), "use_int4_w4a16", advice)
    part.check(part.run())
    part = Part(Case(), rank, (3, 2), num_experts=9).make()
    refused(part.run, f"{8 // RANKS} of 9 experts on one of {RANKS} ranks", advice)

    def unreachable(group):
        def all_gather(data):
            raise OSError("no route")
        return all_gather
    with mock.patch.object(adapter.ranks, "all_gather_of", unreachable):
        part = Part(Case(), rank, (3, 2)).make()
        assert refused(part.run, advice).code == abi.E_UNAVAILABLE
        part.config.layer = layer_of(part)
        assert refused(part.make, advice).code == abi.E_UNAVAILABLE
    part.config.layer = layer_of(part, use_int4_w4a16=True)
    assert part.make().runner.fused_func.shared is None  # which may change
    part.config.layer.reduce_results = True
    refused(part.make, "adds up the results of all ranks", advice)
    part.config.layer.reduce_results = False
    refused(lambda: part.make(MoeRunnerBackend.DEEP_GEMM), "SimpleNamespace", "DEEP_GEMM", advice)


def check_what_is_left(rank):
    """To SGLang: other runners, other ways of rows."""
    moe = get_flags().moe
    for a2a, backend in ((MoeA2ABackend.NONE, MoeRunnerBackend.TRITON),
                         (MoeA2ABackend.FLASHINFER, MoeRunnerBackend.DEEP_GEMM)):
        with mock.patch.multiple(moe, a2a_backend=a2a, runner_backend=backend):
            assert not adapter.moves_rows(), (a2a, backend)
            made = adapter._dispatcher(lambda config, quant_method: "SGLang's", None, None)
            assert made == "SGLang's"


def check_module(rank):
    """SGLang's FusedMoE, which makes both, and nothing sums what it gives again."""
    whole = Case(tokens=9)
    part = Part(whole, rank, (5, 4))
    module = fused_moe.FusedMoE(
        num_experts=whole.experts, hidden_size=whole.hidden, intermediate_size=whole.inner,
        layer_id=0, top_k=whole.top_k, params_dtype=torch.bfloat16).to(DEVICE)
    assert isinstance(module.dispatcher, adapter.MoxieDispatcher), module.dispatcher
    assert isinstance(module.runner.fused_func, adapter.ExchangingExperts), module.runner.fused_func
    assert module.runner.fused_func.shared is not None
    for name, given in zip(("w13_weight", "w2_weight"), part.part.weights):
        getattr(module, name).data.copy_(given)
    module.quant_method.process_weights_after_loading(module)
    method = type(module.quant_method)
    way = (mock.patch.object(method, "apply", method.forward_cuda) if ON_CPU
           else contextlib.nullcontext())  # on a CPU SGLang has another
    with torch.no_grad(), way:
        part.check(module(part.part.x.clone(), part.part.rows().topk_output))


# ---- The ranks ---------------------------------------------------------------------------------


def begin(folder, rank):
    """This process is a rank of SGLang's from here on."""
    if not ON_CPU:
        torch.cuda.set_device(DEVICE)
    if REAL:
        from sglang.srt import runtime_context
        from sglang.srt.distributed import parallel_state
        from sglang.srt.server_args import ServerArgs
        parallel_state.init_distributed_environment(
            world_size=RANKS, rank=rank, local_rank=DEVICE.index, backend="gloo",
            distributed_init_method=f"file://{folder}/store")
        runtime_context.publish(
            ServerArgs(model_path="dummy", tp_size=RANKS, ep_size=RANKS, dp_size=RANKS,
                       enable_dp_attention=True, moe_a2a_backend="flashinfer"),
            role="test", ranks=runtime_context.SpawnRanks(world_rank=rank))
        runtime_context.get_parallel().override_permanently(world_group=parallel_state._WORLD)
        plain = functools.partial(parallel_state.init_model_parallel_group, use_pynccl=not ON_CPU,
                                  use_custom_allreduce=False)
        with mock.patch.object(parallel_state, "init_model_parallel_group", plain):
            parallel_state.initialize_model_parallel(backend="gloo")
        adapter.get_parallel = runtime_context.get_parallel
    else:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store",
                                             rank=rank, world_size=RANKS)
        parallel = types.SimpleNamespace(
            attn_dp_size=RANKS, moe_ep_size=RANKS, moe_ep_rank=rank,
            tp_group=types.SimpleNamespace(cpu_group=torch.distributed.group.WORLD))
        adapter.get_parallel = lambda: parallel
    adapter.max_prefill_buffer_tokens = lambda: TOKENS_MAX
    adapter.flashinfer_a2a_max_dispatch_tokens_per_rank = lambda tokens: tokens
    moe = get_flags().moe
    moe.a2a_backend, moe.runner_backend = MoeA2ABackend.FLASHINFER, MoeRunnerBackend.TRITON
    adapter.register()
    HookRegistry.apply_hooks()


def run_rank(folder, rank):
    begin(folder, rank)
    checks = [check_dispatched, check_scaling, check_failures, check_buffers, check_wire,
              check_what_is_refused, check_what_is_left]
    for check in checks + [check_module] * REAL:
        check(rank)
    torch.distributed.destroy_process_group()


class Arguments(unittest.TestCase):
    """Of a server, as SGLang resolves them before it starts anything."""

    model = "Qwen3MoeForCausalLM"

    def resolved(self, **more):
        given = dict(tp_size=2, dp_size=2, enable_dp_attention=True, moe_a2a_backend="flashinfer",
                     moe_runner_backend="triton", device="cuda", load_format="dummy",
                     skip_tokenizer_init=True)
        with tempfile.TemporaryDirectory() as folder:
            (pathlib.Path(folder) / "config.json").write_text(json.dumps(
                {**MODEL, "architectures": [self.model]}))
            args = ServerArgs(model_path=folder, **{**given, **more})
            args.resolve_once()
            return adapter.resolved_view(args)

    @classmethod
    def setUpClass(cls):
        adapter.register()

    def test_what_runs(self):
        args = self.resolved()
        self.assertEqual((args.moe_a2a_backend, args.moe_runner_backend), ("flashinfer", "triton"))
        if REAL:  # else a rank's experts would be one more than its part of all
            self.assertTrue(args.disable_shared_experts_fusion)
        args = self.resolved(moe_runner_backend="deep_gemm")
        self.assertEqual(args.moe_runner_backend, "deep_gemm")
        args = self.resolved(moe_a2a_backend="none")
        self.assertEqual((args.moe_a2a_backend, args.moe_runner_backend), ("none", "triton"))

    def test_what_sglang_refuses(self):
        with self.assertRaisesRegex(AssertionError, "attn-dp-size"):
            self.resolved(dp_size=1, enable_dp_attention=False)

    def test_what_is_refused(self):
        for more, text in (({"enable_lora": True}, "with --enable-lora; --moe-a2a"),
                           ({"enable_torch_compile": True}, "--enable-torch-compile"),
                           ({"model_impl": "transformers"}, "with --model-impl transformers; --"),
                           ({"nnodes": 2, "enable_two_batch_overlap": True},
                            "with --enable-two-batch-overlap; nor with --nnodes 2"),
                           ({"ep_num_redundant_experts": 2}, "--ep-num-redundant-experts 2")):
            with self.subTest(more=more):
                refused(lambda: self.resolved(**more), text, "none leaves rows to SGLang")
        self.model = "OlmoeForCausalLM"
        refused(self.resolved, "a model of OlmoeForCausalLM (but with ", "Qwen3MoeForCausalLM")

    def test_each_is_refused(self):
        """Where it is something."""
        plain = {**dict.fromkeys(adapter.APART), **{
            name: values[-1] for name, values in adapter.ALLOWED.items()}}
        with mock.patch.object(adapter, "model_config_of", lambda args: types.SimpleNamespace(
                hf_config=types.SimpleNamespace(architectures=[self.model]))):
            self.assertEqual(adapter._reasons(types.SimpleNamespace(**plain)), [])
            for name in plain:
                said = adapter._reasons(types.SimpleNamespace(**{**plain, name: 2}))
                self.assertEqual(said, [f"--{name.replace('_', '-')} 2"])


class Ranks(unittest.TestCase):
    def test_all(self):
        with tempfile.TemporaryDirectory() as folder:
            rank_processes.run(self, __file__, folder, RANKS, SECONDS, lambda rank: {
                "MOXIE_TEST_INDEX": "0" if ON_CPU else str(rank)})


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        run_rank(pathlib.Path(sys.argv[2]), int(sys.argv[3]))
    else:
        unittest.main()
