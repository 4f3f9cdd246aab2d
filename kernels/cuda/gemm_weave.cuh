// The order in which weights of four bits want the inputs that they are multiplied by, as bf16 or in pieces (pieces.cuh). Included by gemm.cu
// alone.
//
// Four lanes share a row of weights, and of each 32 inputs lane c has eight codes, 32 bits as they lie. Codes i and i + 4 of them become a
// word of two bf16, since both are at the same place of their 16 bits; words 0 and 1 of the four lanes go into one wgmma or mma, words 2
// and 3 into the next. So input 8 c + i + 4 h of 32 is woven to place 8 i + 2 c + h: rows of x are copied so, and mid is written so.

#ifndef MOXIE_KERNELS_CUDA_GEMM_WEAVE_CUH
#define MOXIE_KERNELS_CUDA_GEMM_WEAVE_CUH

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/packed.cuh"
#include "kernels/cuda/pieces.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/walk.cuh"
#include "kernels/cuda/warp.cuh"
#include "kernels/gemm.h"

#include <cuda_runtime.h>

namespace {

constexpr int32_t kWovenInputs = 32; // that change places among each other
constexpr int32_t kWovenBytes = kWovenInputs / 8 * 4; // between two words of a lane

struct weave_slab {
    const unsigned char *rows;
    const int32_t *count; // NULL: all are valid
    int64_t row_stride_bytes;
    int32_t cap;
};

struct weave_args {
    weave_slab slabs[KERNEL_RANKS_MAX];
    const int32_t *pair_row; // of rows by expert, each of which is a pair and becomes that row: which they are, pairs_count of them; NULL: all
                             // that are valid
    const int32_t *pairs_count;
    unsigned char *to;
    int64_t to_stride_bytes;
    int32_t slabs_count, rows_cap;
    int32_t groups; // of kWovenInputs, of a row
};

// 32 inputs of a slab's row, to a row of the copies.
__device__ __forceinline__ void weave(const weave_args &a, const weave_slab &slab, int64_t row, int64_t to_row, int32_t group)
{
    const uint4 *from = reinterpret_cast<const uint4 *>(slab.rows + row * slab.row_stride_bytes) + group * 4;
    uint4 *to = reinterpret_cast<uint4 *>(a.to + to_row * a.to_stride_bytes) + group * 4;
    uint32_t words[4][4];

    if (group >= a.groups) return;
#pragma unroll
    for (int32_t c = 0; c < 4; c++)
        woven_of(from[c], words[c]);
#pragma unroll
    for (int32_t i = 0; i < 4; i++)
        to[i] = {words[0][i], words[1][i], words[2][i], words[3][i]};
}

// The same in pieces, by a warp, which reads all of the row for its largest number.
__device__ __forceinline__ void weave_pieces(const weave_args &a, const weave_slab &slab, int64_t row, int64_t to_row, int32_t group)
{
    const uint4 *from = reinterpret_cast<const uint4 *>(slab.rows + row * slab.row_stride_bytes);
    unsigned char *to = a.to + to_row * a.to_stride_bytes;
    uint32_t largest = 0, even[4][2] = {}, odd[4][2] = {};

    for (int32_t i = threadIdx.x % 32; i < a.groups * 4; i += 32)
        largest = __vmaxu2(largest, largest_two(from[i]));
    const piece_scaling by = piece_scaling_of(__reduce_max_sync(~0u, max(largest & 0xffffu, largest >> 16)));

    if (group == 0) *reinterpret_cast<float *>(to + back_at(a.groups * kWovenInputs)) = by.back;
    if (group >= whole_pieces(a.groups * kWovenInputs) / kWovenInputs) return;
#pragma unroll
    for (int32_t c = 0; c < 4; c++)
        if (group < a.groups) cut_eight(from[group * 4 + c], by.times, even[c], odd[c]);
    to += group / 4 * 2 * kPieces + group % 4 * kWovenInputs;
#pragma unroll
    for (int32_t i = 0; i < 2; i++) {
        uint4 *piece = reinterpret_cast<uint4 *>(to + i * kPieces);

        piece[0] = {even[0][i], even[1][i], even[2][i], even[3][i]};
        piece[1] = {odd[0][i], odd[1][i], odd[2][i], odd[3][i]};
    }
}

template <bool in_pieces>
__device__ __forceinline__ void weave_row(const weave_args &a, const weave_slab &slab, int64_t row, int64_t to_row, int32_t group)
{
    if constexpr (in_pieces)
        weave_pieces(a, slab, row, to_row, group);
    else
        weave(a, slab, row, to_row, group);
}

// Warps that a row takes, with what lies behind it in whole pieces.
__host__ __device__ __forceinline__ int32_t warps_of_row(const weave_args &a)
{
    return (whole_pieces(a.groups * kWovenInputs) / kWovenInputs + 31) / 32;
}

// A lane has 32 inputs of each of its rows. x was there before route began, which had begun before this could; which of it are pairs was not.
template <bool in_pieces> __global__ void __launch_bounds__(kSharingThreads) weave_kernel(const __grid_constant__ weave_args a)
{
    const row_walk walk = walk_rows(warps_of_row(a));
    const int32_t group = walk.piece * 32 + static_cast<int32_t>(threadIdx.x % 32);

    griddepcontrol_launch_dependents();
    if (a.pair_row == nullptr) {
        for (int32_t s = 0; s < a.slabs_count; s++) {
            const weave_slab &slab = a.slabs[s];
            // Looked at once, since whoever changes it between two lanes would leave one waiting for the other.
            const uint32_t rows = uniform(slab.count != nullptr ? min(max(__ldcg(slab.count), 0), slab.cap) : slab.cap);

            for (uint32_t row = walk.first; row < rows; row += walk.step)
                weave_row<in_pieces>(a, slab, row, int64_t{s} * a.rows_cap + row, group);
        }
    }
    griddepcontrol_wait(); // for route, for which the products do not wait themselves
    if (a.pair_row != nullptr) {
        const uint32_t pairs = __ldcg(a.pairs_count);

        for (uint32_t pair = walk.first; pair < pairs; pair += walk.step) {
            const int32_t row = __ldcg(&a.pair_row[pair]), index = row / a.rows_cap;

            weave_row<in_pieces>(a, a.slabs[index], row - index * a.rows_cap, pair, group);
        }
    }
}

// Copies the rows of x; then they are `woven`, of which args tells the products.
cudaError_t weave_rows(gemms_args &args, row_slab &woven, bool in_pieces, void *stream)
{
    gate_up_args &own = args.gate_up;
    const bool by_expert = own.slabs_count > 0 && own.slabs[0].ids == nullptr;
    weave_args to = {};
    int64_t rows = 0, warps;

    if (args.x_woven == nullptr || own.hidden % kWovenInputs != 0 || args.x_woven_stride_bytes < gemms_woven_bytes(own.hidden))
        return cudaErrorInvalidValue;
    for (int32_t s = 0; s < own.slabs_count; s++) {
        const row_slab &slab = own.slabs[s];

        if (slab.format != FORMAT_BF16) return cudaErrorInvalidValue;
        to.slabs[s] = {static_cast<const unsigned char *>(slab.rows), slab.count, slab.row_stride_bytes, slab.cap};
        rows += slab.cap;
    }
    if (by_expert) {
        to.pair_row = own.pair_row;
        to.pairs_count = own.expert_offset + own.experts;
        own.pair_row = nullptr;
    }
    to.to = static_cast<unsigned char *>(args.x_woven);
    to.to_stride_bytes = args.x_woven_stride_bytes;
    to.slabs_count = own.slabs_count;
    to.rows_cap = own.rows_cap;
    to.groups = own.hidden / kWovenInputs;
    woven = {};
    woven.rows = args.x_woven;
    woven.row_stride_bytes = args.x_woven_stride_bytes;
    woven.cap = by_expert ? static_cast<int32_t>(args.down.pairs_max) : own.slabs_count * own.rows_cap;
    woven.format = FORMAT_BF16;
    own.slabs = &woven;
    own.slabs_count = 1;
    own.rows_cap = woven.cap;
    warps = warps_of_row(to);
    return launch(in_pieces ? weave_kernel<true> : weave_kernel<false>, shape_for(rows * warps, warps, kGridBlocksMax / kGridSms, 0), stream, to);
}

} // namespace

#endif
