// The kernel table of sm_90a.

#include "kernels/cuda/cuda.h"

#include <cuda_runtime.h>

namespace {

// C++17 has no designated initialisers; a table in order would hide which kernel is missing.
constexpr struct kernels make_table()
{
    struct kernels table = {};

    table.record = record_cuda;
    table.layer = layer_cuda;
    table.route = route_cuda;
    table.tally = tally_cuda;
    table.gemms = gemms_cuda;
    table.gather_units = gather_units_cuda;
    table.dispatch = dispatch_cuda;
    table.combine = combine_cuda;
    table.sum = sum_cuda;
    table.expand = expand_cuda;
    table.quantise = quantise_cuda;
    table.signal = signal_cuda;
    table.await = await_cuda;
    table.regroup = regroup_cuda;
    table.dispatch_ll = dispatch_ll_cuda;
    table.sum_ll = sum_ll_cuda;
    return table;
}

} // namespace

extern const struct kernels kernels_cuda = make_table();

extern "C" int32_t kernels_cuda_load(void)
{
    int32_t (*const loads[])(void) = {record_cuda_load,  route_cuda_load, gemm_cuda_load,   dispatch_cuda_load,
                                      combine_cuda_load, sum_cuda_load,   expand_cuda_load, quantise_cuda_load,
                                      flags_cuda_load,   tally_cuda_load, layer_cuda_load,  ll_cuda_load};

    for (int32_t (*load)(void) : loads) {
        int32_t st = load();

        if (st != cudaSuccess) return st;
    }
    return cudaSuccess;
}
