// combine on CUDA: a row's pairs, weighted and summed in fp32 in slot order, into one result row.
//
// grid   a warp a row and 256 columns, 16 bytes a lane and pair
// bytes  every pair's row once, every result row once: bound by memory

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/number.cuh"
#include "kernels/cuda/ptx.cuh"

#include <cuda_runtime.h>

namespace {

constexpr int kThreads = 256;
constexpr int kColumns = 256; // of a warp: 8 a lane

struct args {
    out_slab slabs[KERNEL_RANKS_MAX];
    const unsigned char *pair_out;
    const int32_t *row_pair, *pair_row, *pairs_count;
    const float *pair_weight;
    int64_t pair_stride_bytes, pairs;
    int32_t slabs_count, rows_cap, hidden, top_k;
    float scale;
};

template <bool is_bf16>
__device__ void add_pair(const args &a, int32_t pair, int32_t column, float (&sum)[8])
{
    float weight = a.pair_weight == nullptr ? 1.0f : a.pair_weight[pair];
    uint4 packed = *reinterpret_cast<const uint4 *>(a.pair_out + pair * a.pair_stride_bytes + column * 2);
    uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};

#pragma unroll
    for (int32_t i = 0; i < 4; i++) {
        float2 two = number_unpack<is_bf16>(words[i]);

        sum[i * 2] += weight * two.x;
        sum[i * 2 + 1] += weight * two.y;
    }
}

// `column` is a multiple of 8 and hidden too; rows may lie anywhere, so they are written number by number unless aligned.
__device__ void store_row(const out_slab &to, int32_t row, int32_t column, const float (&sum)[8], float scale)
{
    unsigned char *at = static_cast<unsigned char *>(to.rows) + row * to.row_stride_bytes;
    uint4 packed;

    if (to.format != FORMAT_F32 && reinterpret_cast<uintptr_t>(at) % 16 == 0) {
        bool is_bf16 = to.format == FORMAT_BF16;
        uint32_t words[4];

#pragma unroll
        for (int32_t i = 0; i < 4; i++)
            words[i] = is_bf16 ? number_pack<true>(sum[i * 2] * scale, sum[i * 2 + 1] * scale)
                               : number_pack<false>(sum[i * 2] * scale, sum[i * 2 + 1] * scale);
        packed = make_uint4(words[0], words[1], words[2], words[3]);
        *reinterpret_cast<uint4 *>(at + column * 2) = packed;
        return;
    }
#pragma unroll
    for (int32_t i = 0; i < 8; i++)
        number_store(at, column + i, to.format, sum[i] * scale);
}

template <bool is_bf16> __global__ void __launch_bounds__(kThreads) combine_kernel(const __grid_constant__ args a)
{
    int64_t pieces = (a.hidden + kColumns - 1) / kColumns;
    int64_t warps = static_cast<int64_t>(gridDim.x) * (kThreads / 32);
    int64_t rows;

    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    rows = a.row_pair == nullptr ? min(static_cast<int64_t>(*a.pairs_count), a.pairs)
                                 : static_cast<int64_t>(a.slabs_count) * a.rows_cap;
    for (int64_t item = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32; item < rows * pieces; item += warps) {
        int64_t flat = item / pieces;
        int32_t column = static_cast<int32_t>(item % pieces) * kColumns + threadIdx.x % 32 * 8;
        int32_t index = 0, row = 0;
        float sum[8] = {};

        if (column >= a.hidden) continue;
        if (a.row_pair == nullptr) {
            row = a.pair_row[flat];
            if (row < 0 || row >= a.slabs[0].cap) continue;
            add_pair<is_bf16>(a, static_cast<int32_t>(flat), column, sum);
        } else {
            index = static_cast<int32_t>(flat / a.rows_cap);
            row = static_cast<int32_t>(flat % a.rows_cap);
            if (row >= a.slabs[index].cap || (a.slabs[index].count != nullptr && row >= *a.slabs[index].count)) continue;
            for (int32_t t = 0; t < a.top_k; t++) {
                int32_t pair = a.row_pair[flat * a.top_k + t];

                if (pair >= 0 && pair < a.pairs) add_pair<is_bf16>(a, pair, column, sum);
            }
        }
        store_row(a.slabs[index], row, column, sum, a.scale);
    }
}

} // namespace

extern "C" int32_t combine_cuda_load(void)
{
    cudaFuncAttributes attributes;
    cudaError_t st = cudaFuncGetAttributes(&attributes, combine_kernel<true>);

    return st != cudaSuccess ? st : cudaFuncGetAttributes(&attributes, combine_kernel<false>);
}

extern "C" int32_t combine_cuda(const struct combine_args *from, void *stream)
{
    cudaLaunchAttribute dependent = {};
    cudaLaunchConfig_t config = {};
    int64_t pieces = (from->hidden + kColumns - 1) / kColumns, blocks;
    args to = {};

    if (from->hidden % 8 != 0 || (from->pair_format != FORMAT_BF16 && from->pair_format != FORMAT_F16)) return cudaErrorInvalidValue;
    for (int32_t i = 0; i < from->slabs_count; i++)
        to.slabs[i] = from->slabs[i];
    to.pair_out = static_cast<const unsigned char *>(from->pair_out);
    to.row_pair = from->row_pair;
    to.pair_row = from->pair_row;
    to.pairs_count = from->pairs_count;
    to.pair_weight = from->pair_weight;
    to.pair_stride_bytes = from->pair_stride_bytes;
    to.pairs = from->pairs;
    to.slabs_count = from->slabs_count;
    to.rows_cap = from->rows_cap;
    to.hidden = from->hidden;
    to.top_k = from->top_k;
    to.scale = from->scale;
    // Counts live on the device: the grid covers the capacity, up to a few waves, and strides over the rest.
    blocks = (static_cast<int64_t>(from->slabs_count) * from->rows_cap * pieces + kThreads / 32 - 1) / (kThreads / 32);
    dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    dependent.val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = dim3(static_cast<unsigned>(blocks < 1 ? 1 : blocks > 132 * 16 ? 132 * 16 : blocks));
    config.blockDim = dim3(kThreads);
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = &dependent;
    config.numAttrs = 1;
    if (from->pair_format == FORMAT_BF16) return cudaLaunchKernelEx(&config, combine_kernel<true>, to);
    return cudaLaunchKernelEx(&config, combine_kernel<false>, to);
}
