// quantise on CUDA: rows of 16- or 32-bit numbers to e4m3 with an f32 scale per 128.
//
// grid   a warp up to 1024 numbers of a row, the same ones of each of its rows; the valid rows of all slabs, one after the other
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
constexpr int kBatch = 4; // loads of a lane under way at once
constexpr int32_t kPiece = kBatch * kFp8Warp;

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

// kPiece numbers of a row from column `first` on, or as many as there are.
__device__ __forceinline__ void quantise_piece(const args &a, const slab &s, int64_t x_row, int64_t row, int32_t first)
{
    const unsigned char *from = s.rows + x_row * s.row_stride_bytes;
    unsigned char *to = a.rows + row * a.row_stride_bytes;
    float *scales = reinterpret_cast<float *>(a.scales + row * a.scale_stride_bytes);
    bool by_eight = a.columns % kFp8Lane == 0 && is_aligned(from, 16) && is_aligned(to, 8);
    int32_t lane = threadIdx.x % 32, batches = min(kBatch, (a.columns - first + kFp8Warp - 1) / kFp8Warp);
    float values[kBatch][kFp8Lane] = {};

    first += lane * kFp8Lane;
#pragma unroll
    for (int32_t i = 0; i < kBatch; i++) {
        int32_t column = first + i * kFp8Warp;

        if (by_eight && column < a.columns) load_8(from, column, s.format, values[i]);
        for (int32_t j = 0; !by_eight && j < kFp8Lane; j++)
            if (column + j < a.columns) values[i][j] = number_load(from, column + j, s.format);
    }
#pragma unroll
    for (int32_t i = 0; i < kBatch; i++) {
        int32_t column = first + i * kFp8Warp;
        float scale;
        uint2 codes;

        if (i >= batches) break;
        scale = fp8_scale(values[i]);
        codes = fp8_codes(values[i], scale);
        if (by_eight && column < a.columns) *reinterpret_cast<uint2 *>(to + column) = codes;
        for (int32_t j = 0; !by_eight && j < kFp8Lane; j++)
            if (column + j < a.columns) to[column + j] = static_cast<unsigned char>((j < 4 ? codes.x : codes.y) >> (8 * (j % 4)));
        if (column % kFp8Group == 0 && column < a.columns) scales[column / kFp8Group] = scale;
    }
}

__global__ void __launch_bounds__(kThreads) quantise_kernel(const __grid_constant__ args a)
{
    __shared__ int32_t rows_before[KERNEL_RANKS_MAX + 1];
    int32_t warp = static_cast<int32_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
    int32_t pieces = (a.columns + kPiece - 1) / kPiece, rows_at_once = static_cast<int32_t>(gridDim.x) * (kThreads / 32) / pieces;

    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    sum_rows(a, rows_before);
    for (int32_t valid_row = warp / pieces; warp < rows_at_once * pieces && valid_row < rows_before[KERNEL_RANKS_MAX];
         valid_row += rows_at_once) {
        int32_t slab = last_at_most(rows_before, a.slabs_count, valid_row);
        int64_t row = valid_row - rows_before[slab], x_row = a.x_row != nullptr ? a.x_row[row] : row;

        row += static_cast<int64_t>(slab) * a.rows_cap;
        quantise_piece(a, a.slabs[slab], x_row, row, warp % pieces * kPiece);
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
    int64_t pieces = (from->columns + kPiece - 1) / kPiece;
    args to = {};
    int64_t rows = take_slabs(from, &to);

    // A grid has a warp for each piece of a row at least.
    if (from->format != FORMAT_FP8_BLOCK128 || pieces > kGridBlocksMax * (kThreads / 32)) return cudaErrorInvalidValue;
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
