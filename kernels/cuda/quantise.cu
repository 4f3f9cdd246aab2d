// quantise on CUDA: rows of 16- or 32-bit numbers to e4m3 with an f32 scale per 128.
//
// grid   a warp 512 numbers of a row, four of each 128 a lane; the valid rows of all slabs, one after the other
// smem   the valid rows before each slab
// bytes  the rows once, half or a quarter of them written: bound by memory

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/number.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/quantise.cuh"
#include "kernels/cuda/search.cuh"

namespace {

constexpr int kThreads = 256;
constexpr int kBatch = 4; // groups of a warp under way at once

struct slab {
    const unsigned char *rows;
    const int32_t *count;
    int64_t row_stride_bytes;
    int32_t cap, format;
};

struct args {
    slab slabs[KERNEL_RANKS_MAX];
    const int32_t *x_row;
    unsigned char *rows, *scales;
    int64_t row_stride_bytes, scale_stride_bytes;
    int32_t slabs_count, rows_cap, columns;
};

// Two slabs a lane of the first warp.
static_assert(KERNEL_RANKS_MAX <= 64, "rows_before");

__device__ int32_t rows_valid(const args &a, int32_t index)
{
    const slab &s = a.slabs[index];

    if (index >= a.slabs_count) return 0;
    return s.count == nullptr ? s.cap : min(max(*s.count, 0), s.cap);
}

// rows_before[slab], and at its end the sum.
__device__ void sum_rows(const args &a, int32_t *rows_before)
{
    int32_t lane = threadIdx.x % 32;

    if (threadIdx.x < 32) {
        int32_t even = rows_valid(a, 2 * lane), sum = even + rows_valid(a, 2 * lane + 1), own = sum;

        for (int32_t step = 1; step < 32; step *= 2) {
            int32_t before = __shfl_up_sync(~0u, sum, step);

            if (lane >= step) sum += before;
        }
        rows_before[2 * lane] = sum - own;
        rows_before[2 * lane + 1] = sum - own + even;
        if (lane == 31) rows_before[KERNEL_RANKS_MAX] = sum;
    }
    __syncthreads();
}

// Groups from column `first` on, kBatch of them.
__device__ __forceinline__ void quantise_groups(const args &a, const slab &s, int64_t x_row, int64_t row, int32_t first)
{
    const unsigned char *from = s.rows + x_row * s.row_stride_bytes;
    unsigned char *to = a.rows + row * a.row_stride_bytes;
    float *scales = reinterpret_cast<float *>(a.scales + row * a.scale_stride_bytes);
    bool by_four = a.columns % 4 == 0 && is_aligned(from, s.format == FORMAT_F32 ? 16 : 8) && is_aligned(to, 4);
    int32_t lane = threadIdx.x % 32;
    float values[kBatch][4] = {};

    first += lane * 4;
#pragma unroll
    for (int32_t i = 0; i < kBatch; i++) {
        int32_t column = first + i * kFp8Group;

        if (by_four && column < a.columns) load_4(from, column, s.format, values[i]);
        for (int32_t j = 0; !by_four && j < 4; j++)
            if (column + j < a.columns) values[i][j] = number_load(from, column + j, s.format);
    }
#pragma unroll
    for (int32_t i = 0; i < kBatch; i++) {
        int32_t column = first + i * kFp8Group;
        float scale = fp8_scale(values[i]);
        uint32_t codes = fp8_codes(values[i], scale);

        if (by_four && column < a.columns) *reinterpret_cast<uint32_t *>(to + column) = codes;
        for (int32_t j = 0; !by_four && j < 4; j++)
            if (column + j < a.columns) to[column + j] = static_cast<unsigned char>(codes >> (8 * j));
        if (lane == 0 && column < a.columns) scales[column / kFp8Group] = scale;
    }
}

__global__ void __launch_bounds__(kThreads) quantise_kernel(const __grid_constant__ args a)
{
    __shared__ int32_t rows_before[KERNEL_RANKS_MAX + 1];
    int64_t pieces = (a.columns + kFp8Group * kBatch - 1) / (kFp8Group * kBatch);
    int64_t warps = static_cast<int64_t>(gridDim.x) * (kThreads / 32), items;

    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    sum_rows(a, rows_before);
    items = rows_before[KERNEL_RANKS_MAX] * pieces;
    for (int64_t item = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32; item < items; item += warps) {
        int32_t valid_row = static_cast<int32_t>(item / pieces), slab = last_at_most(rows_before, a.slabs_count, valid_row);
        int64_t row = valid_row - rows_before[slab], x_row = a.x_row != nullptr ? a.x_row[row] : row;

        row += static_cast<int64_t>(slab) * a.rows_cap;
        quantise_groups(a, a.slabs[slab], x_row, row, static_cast<int32_t>(item % pieces) * kFp8Group * kBatch);
    }
}

// The slabs that there are, those of e4m3 without rows; x is one. Returns how many rows there could be.
int64_t take_slabs(const quantise_args *from, args *to)
{
    int64_t rows = 0;

    to->slabs_count = from->slabs == nullptr ? 1 : from->slabs_count;
    to->slabs[0] = {static_cast<const unsigned char *>(from->x), from->count, from->x_stride_bytes, from->rows_count, from->x_format};
    for (int32_t i = 0; from->slabs != nullptr && i < from->slabs_count; i++) {
        const row_slab &s = from->slabs[i];

        to->slabs[i] = {static_cast<const unsigned char *>(s.rows), s.count, s.row_stride_bytes, s.cap, s.format};
        if (s.format == from->format) to->slabs[i] = {};
    }
    for (int32_t i = 0; i < to->slabs_count; i++)
        rows += to->slabs[i].cap;
    return rows;
}

} // namespace

extern "C" int32_t quantise_cuda_load(void)
{
    return load_kernel(quantise_kernel);
}

extern "C" int32_t quantise_cuda(const struct quantise_args *from, void *stream)
{
    int64_t pieces = (from->columns + kFp8Group * kBatch - 1) / (kFp8Group * kBatch);
    args to = {};
    int64_t rows = take_slabs(from, &to);

    if (from->format != FORMAT_FP8_BLOCK128) return cudaErrorInvalidValue;
    if (rows == 0) return cudaSuccess;
    to.x_row = from->slabs == nullptr ? from->x_row : nullptr;
    to.rows = static_cast<unsigned char *>(from->rows);
    to.scales = static_cast<unsigned char *>(from->scales);
    to.row_stride_bytes = from->row_stride_bytes;
    to.scale_stride_bytes = from->scale_stride_bytes;
    to.rows_cap = from->rows_cap;
    to.columns = from->columns;
    return launch(quantise_kernel, {grid_for(rows * pieces, kThreads / 32), kThreads, 0, LAUNCH_EARLY}, stream, to);
}
