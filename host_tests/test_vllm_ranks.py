"""moxie.vllm over several ranks, a process each: rows that Moxie takes to the ranks of their
experts, and those that vLLM gathers, against plain loops over all experts.

Two ranks, or MOXIE_TEST_RANKS = 4. Wants torch, or exits with 77; with MOXIE_TEST_DEVICE=cuda a
GPU for each rank. Of vLLM, or of what vllm_stand_in.py has of it, only the group of ranks is the tests' own.
"""

import functools
import os
import pathlib
import sys
import tempfile
import types
import unittest
from unittest import mock

from vllm_case import BLOCK, Case, adapter, fp8, modular_kernel, parallel, unquantized

import torch
import torch.distributed

import rank_processes
import torch_python
from experts_case import DEVICE, OFF_BY_MAX, ON_CPU, off_by
from moxie import Experts, MoxieError, abi

RANKS, SECONDS = int(os.environ.get("MOXIE_TEST_RANKS", "2")), 100
if not ON_CPU and torch.cuda.device_count() < RANKS:
    torch_python.skip(f"torch sees fewer than {RANKS} GPUs")


class Group:
    """vLLM's group of all ranks, over gloo."""

    world_size, internode = RANKS, False  # of its all2all_manager, too

    def __init__(self):
        self.cpu_group = torch.distributed.group.WORLD
        self.device_communicator = types.SimpleNamespace(all2all_manager=self)
        self.sizes = None  # rows of each rank, where the forward's context knows

    def forward_context(self):
        return types.SimpleNamespace(dp_metadata=types.SimpleNamespace(local_sizes=self.sizes))

    def dispatch(self, *mine, is_sequence_parallel, extra_tensors):
        assert not (is_sequence_parallel or extra_tensors)
        return tuple(map(self.gathered, mine))

    def gathered(self, mine):
        found = [torch.empty_like(mine, device="cpu") for _ in range(RANKS)]
        torch.distributed.all_gather(found, mine.cpu().contiguous())
        return torch.cat(found).to(mine.device)

    def allocate_combine_input(self, shape, dtype, device, is_sequence_parallel):
        assert not is_sequence_parallel
        return torch.full(shape, float("nan"), dtype=dtype, device=device)

    def combine_into_output(self, rows, output, is_sequence_parallel):
        return output.copy_(self.combine(rows, is_sequence_parallel))

    def combine(self, rows, is_sequence_parallel):
        assert not is_sequence_parallel
        whole = rows.float().cpu()
        torch.distributed.all_reduce(whole)
        return whole.chunk(RANKS)[torch.distributed.get_rank()].to(rows)

    def enter(self):
        """This process is one of the group from here on."""
        adapter._replace(adapter.get_ep_group, lambda: self)
        adapter.get_ep_group = lambda: self
        adapter.is_forward_context_available = lambda: True
        adapter.get_forward_context = self.forward_context


class Part:
    """A rank's part of a layer of all ranks: its experts, and as many rows as `shares` says."""

    def __init__(self, whole, rank, shares, **more):
        self.whole = whole
        own = whole.experts // RANKS
        mine = slice(rank * own, (rank + 1) * own)
        self.rows = slice(sum(shares[:rank]), sum(shares[:rank + 1]))
        self.moe = whole.moe(num_local_experts=own, moe_parallel_config=parallel(
            RANKS, rank, **{"dp_size": RANKS, "dp_rank": rank, **more}))
        part = Case(whole.activation, experts=own, scheme=whole.scheme)
        part.weights = [each[mine] for each in whole.weights]
        part.scales = [each[mine] if each is not None else None for each in whole.scales]
        part.moe, part.top_k = lambda: self.moe, whole.top_k
        self.part = part
        self.map = torch.full((whole.experts,), -1, dtype=torch.int32, device=DEVICE)
        self.map[mine] = torch.arange(own, dtype=torch.int32, device=DEVICE)

    def kernel(self):
        """As vLLM's methods make it: what is selected, and what is around it."""
        select, keys = {None: (unquantized.select_unquantized_moe_backend, ()),
                        "block": (fp8.select_fp8_moe_backend, BLOCK),
                        "mxfp4": (adapter.gpt_oss.select_mxfp4_moe_backend, ())}[self.whole.scheme]
        with mock.patch.object(adapter.MoxieExperts, "_supports_current_device", lambda: True), \
                mock.patch.object(adapter, "_device_here", lambda: DEVICE):
            _, experts = select(self.moe, *keys)
        assert issubclass(experts, adapter.MoxieExperts), experts
        return self.kernel_of(experts)

    def kernel_of(self, experts):
        around = fp8.maybe_make_prepare_finalize(self.moe, None, allow_new_interface=True)
        return modular_kernel.FusedMoEKernel(around, experts(self.moe, self.part.quant()))

    def run(self, kernel, sizes=None):
        self.part.x, self.part.ids, self.part.router = (
            each[self.rows] for each in (self.whole.x, self.whole.ids, self.whole.router))
        adapter.get_ep_group().sizes = sizes
        return self.part.run(kernel, expert_map=self.map)

    def check(self, kernel, sizes=None):
        apart = off_by(self.run(kernel, sizes), self.whole.wanted()[self.rows])
        assert apart < OFF_BY_MAX[self.whole.scheme], (self.whole.scheme, sizes, apart)


# ---- What each rank does -----------------------------------------------------------------------


def check_dispatched(rank):
    """Every rank has its own rows, and gets their whole sums."""
    for scheme, pair, more in ((None, (12, 4), {}), ("block", (7, 9), {}), ("mxfp4", (3, 13), {}),
                               (None, (16 // RANKS,) * 2, {"dp_size": 1, "sp_size": RANKS})):
        shares = pair * (RANKS // 2)
        whole = Case(tokens=sum(shares), scheme=scheme)
        whole.ids[2] = -1  # of a row that fills up a graph, with vLLM 0.33
        part = Part(whole, rank, shares, **more)
        kernel = part.kernel()
        around = kernel.prepare_finalize
        # Models that leave vLLM's sum over a tensor parallel group out assert that it is still to do.
        assert (around.num_dispatchers(), around.output_is_reduced()) == (RANKS, False)
        # A method that asked, and whose weights another computes with others' experts.
        others = part.kernel_of(adapter.MoxieExperts).prepare_finalize
        assert not isinstance(others, adapter.MoxieDispatch), others
        for sizes in (None, list(shares)):
            part.check(kernel, sizes)
        config = kernel.fused_experts.shared.experts.config
        assert config["forward_tokens_max"] == 16 // more.get("sp_size", 1), config
        assert (config["num_experts"], config["ep_size"]) == (whole.experts, RANKS), config
        if ON_CPU:
            assert config["dispatch_format"] == "input", config
        try:
            part.run(kernel, [17] * RANKS)
        except MoxieError as error:
            assert "step.rank_tokens" in error.text, error
        else:
            raise AssertionError("the library has not heard how many tokens each rank has")


def check_wire(rank):
    """Rows are fp8 on the way where a GPU multiplies them as fp8; a CPU does not."""
    moe = Part(Case(), rank, (8, 8)).moe
    with mock.patch.object(adapter, "keys_of", lambda *given: {}):
        for device, weights, wanted in (
                ("cuda", "fp8_block128", "fp8_block128"), ("cuda", "fp8_channel", "fp8_block128"),
                ("cuda", None, "input"), ("cuda", "mxfp4", "input"), ("cpu", "fp8_block128", "input"), ("cpu", None, "input")):
            keys = adapter._keys(moe, weights, torch.device(device), True)
            assert keys["dispatch_format"] == wanted, (device, weights, keys)


def check_gathered(rank):
    """Where Moxie leaves rows to vLLM, which gathers them, and its experts are a rank's own."""
    for changed in (mock.patch.dict(os.environ, MOXIE_EXCHANGE="vllm"),
                    mock.patch.object(adapter.get_ep_group(), "internode", True)):
        with changed:
            whole = Case(tokens=8 * RANKS)
            whole.ids[2] = -1
            part = Part(whole, rank, (8,) * RANKS)
            kernel = part.kernel()
            assert not isinstance(kernel.prepare_finalize, adapter.MoxieDispatch)
            part.check(kernel)
            assert "ep_size" not in kernel.fused_experts.shared.experts.config


def check_no_way(rank):
    """What keeps the ranks from each other comes with what to do."""
    def unreachable(group):
        def all_gather(data):
            raise OSError("no route")
        return all_gather
    with mock.patch.object(adapter.ranks, "all_gather_of", unreachable):
        part = Part(Case(tokens=16), rank, (8, 8))
        kernel = part.kernel()
    try:
        part.run(kernel)
    except MoxieError as error:
        assert error.code == abi.E_UNAVAILABLE, error
        assert error.text.endswith("MOXIE_EXCHANGE=vllm leaves rows to vLLM"), error
    else:
        raise AssertionError("ranks without a way to each other are taken")


def check_failures(rank):
    """Those of graphs, which nobody calls, are seen behind each step."""
    part = Part(Case(tokens=16), rank, (8, 8))
    part.run(part.kernel())
    worker = mock.Mock(spec_set=["_apply_mm_cache", "worker"])  # of a WorkerWrapperBase
    run = functools.partial(adapter.WorkerWrapperBase.execute_model, worker, "a step")
    run()
    failure = MoxieError(abi.E_PEER, 1, "rank 1 is gone")
    with mock.patch.object(Experts, "check", mock.Mock(side_effect=failure)) as check:
        try:
            run()
        except MoxieError as error:
            assert error is failure
        else:
            raise AssertionError("nobody has asked")
        check.assert_called_once_with()


def check_what_is_left(rank):
    """To vLLM: experts of which ranks have unequal numbers, ranks without tokens of their own, ranks
    that will be others."""
    for experts, more in ((4 * RANKS - 1, {}), (8, {"dp_size": 2 * RANKS}),
                          (8, {"all2all_backend": "deepep_high_throughput"})):
        moe = Part(Case(experts=experts), rank, (8, 8), **more).moe
        assert not adapter.dispatches(moe), more

    moe = Part(Case(), rank, (8, 8)).moe
    has_older_ray = hasattr(adapter.envs, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND")
    plain = {"enable_elastic_ep": False, "pipeline_parallel_size": 1, "use_ray": False}
    for more, ray_v2, is_taken in (
            ({}, False, True), ({"enable_elastic_ep": True}, True, False),
            ({"pipeline_parallel_size": 2}, True, False), ({"use_ray": True}, True, True),
            ({"use_ray": True}, False, False)):
        config = types.SimpleNamespace(parallel_config=types.SimpleNamespace(**{**plain, **more}))
        # Of vLLM 0.33 the newer executor is the only one, whatever a variable says.
        is_taken |= more == {"use_ray": True} and not has_older_ray
        with mock.patch.object(adapter, "get_current_vllm_config_or_none", lambda: config), \
                mock.patch.dict(os.environ, VLLM_USE_RAY_V2_EXECUTOR_BACKEND=str(int(ray_v2))):
            assert adapter.dispatches(moe) is is_taken, (more, ray_v2)


def run_rank(folder, rank):
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank,
                                         world_size=RANKS)
    if not ON_CPU:
        torch.cuda.set_device(DEVICE)
    adapter.register()
    Group().enter()
    for check in (check_no_way, check_dispatched, check_wire, check_gathered, check_failures,
                  check_what_is_left):
        check(rank)
    torch.distributed.destroy_process_group()


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
