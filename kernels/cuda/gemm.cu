// gate_up and down on sm_90a, bf16 and f16: c[128 weight rows x N tokens] += w . x^T, weights on wgmma's M, tokens on
// its N, so that one family serves one token and thousands.
//
// grid   one block an SM, persistent; tiles in the order expert, weight rows, tokens, so that the tiles which share a
//        piece of the weights run beside each other and read it from HBM once
// block  3 warpgroups: one loads, two multiply 64 weight rows each
// smem   4 stages of 128 weight rows and 256 token rows of 64 inputs (128 bytes, swizzled)
// N      8, 16, 32, 64, 128 or 256, chosen for each tile from the expert's real count: a captured graph replays with any
//
// Gate and up of eight units alternate in the weight tile (a 5-D tensor map; nothing is repacked), so a thread's
// accumulator rows r and r + 8 are gate and up of the same unit and the activation needs no exchange. Token rows are
// gathered by index with 16-byte copies; down reads its rows, which lie in pair order, by tensor map. A pair's sum runs
// over K in steps of 16 in a fixed order, so its bits do not depend on its batch mates.

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/number.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/tensor_map.cuh"

#include <cuda_runtime.h>

namespace {

constexpr int kRows = 128;    // weight rows of a tile
constexpr int kColumns = 256; // tokens of the largest tile
constexpr int kDepth = 64;    // inputs of a stage: 128 bytes
constexpr int kStages = 4;
constexpr int kManyTokens = 64; // token rows of the larger box
constexpr int kLag = 2; // stages between a gather's issue and its arrival
constexpr int kThreads = 384;
constexpr int kExpertsMax = 1024;

enum { kProducer, kConsumer0, kConsumer1 };

struct alignas(1024) gemm_smem {
    unsigned char weights[kStages][kRows * 128];
    unsigned char tokens[kStages][kColumns * 128];
    uint64_t full[kStages], empty[kStages];
    const unsigned char *token_row[kColumns]; // of the tile being loaded; NULL: zeros
    int32_t tile_first[kExpertsMax + 1];      // prefix sums
    int32_t expert_first[kExpertsMax + 1];    // pairs
};

struct gemm_slab {
    const unsigned char *rows;
    int64_t row_stride_bytes;
};

// What both products need on the device.
struct gemm_args {
    CUtensorMap weights;
    CUtensorMap tokens;      // down: boxes of 8 rows
    CUtensorMap many_tokens; // and of kManyTokens
    gemm_slab slabs[KERNEL_RANKS_MAX];
    const int32_t *expert_offset;
    const int32_t *pair_row;  // gate_up: gather
    const float *pair_weight; // gate_up: router weight on the input, or NULL
    const void *bias;
    int64_t bias_expert_stride_bytes;
    unsigned char *out;
    int64_t out_stride_bytes;
    int32_t bias_format;
    int32_t experts;
    int32_t depth;      // K
    int32_t outputs;    // columns of out: units, or hidden
    int32_t row_tiles;  // weight tiles of an expert
    int32_t rows_cap;
    int32_t order;      // enum row_order of w1
    int32_t activation;
    float alpha, beta, limit;
};

struct tile {
    int32_t expert;
    int32_t row_tile;
    int32_t pair;   // first
    int32_t tokens; // 1..kColumns
};

// ---- Tiles -------------------------------------------------------------------------------------

__device__ __forceinline__ int32_t token_tiles(int32_t pairs)
{
    return (pairs + kColumns - 1) / kColumns;
}

// Every block makes the same two tables. Ends with a block barrier.
__device__ __forceinline__ void make_tables(const gemm_args &args, gemm_smem &smem)
{
    for (int32_t e = threadIdx.x; e <= args.experts; e += kThreads)
        smem.expert_first[e] = args.expert_offset[e];
    __syncthreads();
    if (threadIdx.x < 32) {
        int32_t sum = 0;

        for (int32_t base = 0; base < args.experts; base += 32) {
            int32_t e = base + threadIdx.x;
            int32_t tiles = 0;

            if (e < args.experts)
                tiles = token_tiles(smem.expert_first[e + 1] - smem.expert_first[e]) * args.row_tiles;
            for (int32_t step = 1; step < 32; step *= 2) {
                int32_t before = __shfl_up_sync(~0u, tiles, step);

                if (static_cast<int32_t>(threadIdx.x) >= step) tiles += before;
            }
            if (e < args.experts) smem.tile_first[e + 1] = sum + tiles;
            sum += __shfl_sync(~0u, tiles, 31);
        }
        if (threadIdx.x == 0) smem.tile_first[0] = 0;
    }
    __syncthreads();
}

__device__ __forceinline__ tile find_tile(const gemm_args &args, const gemm_smem &smem, int32_t index)
{
    int32_t low = 0, high = args.experts - 1;
    int32_t columns, within;
    tile found;

    while (low < high) {
        int32_t middle = (low + high + 1) / 2;

        if (smem.tile_first[middle] <= index)
            low = middle;
        else
            high = middle - 1;
    }
    columns = token_tiles(smem.expert_first[low + 1] - smem.expert_first[low]);
    within = index - smem.tile_first[low];
    found.expert = low;
    found.row_tile = within / columns;
    found.pair = smem.expert_first[low] + within % columns * kColumns;
    found.tokens = min(kColumns, smem.expert_first[low + 1] - found.pair);
    return found;
}

// N of the wgmma that a tile takes.
__device__ __forceinline__ int32_t tile_columns(int32_t tokens)
{
    return tokens <= 8 ? 8 : tokens <= 16 ? 16 : tokens <= 32 ? 32 : tokens <= 64 ? 64 : tokens <= 128 ? 128 : 256;
}

// ---- Loading -----------------------------------------------------------------------------------

// The rows that a tile gathers, one address a token.
__device__ __forceinline__ void find_rows(const gemm_args &args, gemm_smem &smem, const tile &t, int32_t thread)
{
    bar_sync<1, 128>(); // the copies of the tile before have read their addresses
    for (int32_t n = thread; n < kColumns; n += 128) {
        const unsigned char *row = nullptr;

        if (n < t.tokens) {
            int32_t flat = args.pair_row[t.pair + n];
            const gemm_slab &slab = args.slabs[flat / args.rows_cap];

            row = slab.rows + flat % args.rows_cap * slab.row_stride_bytes;
        }
        smem.token_row[n] = row;
    }
    bar_sync<1, 128>();
}

// 64 inputs of every token row of the tile, swizzled as the copy engine would.
__device__ __forceinline__ void gather(const gemm_args &args, gemm_smem &smem, int32_t stage, int32_t k, int32_t columns, int32_t thread)
{
    int32_t chunk = thread % 8;
    int32_t left = (args.depth - k) * 2 - chunk * 16;
    uint32_t base = smem_address(smem.tokens[stage]);

    for (int32_t n = thread / 8; n < columns; n += 16) {
        const unsigned char *row = smem.token_row[n];
        uint32_t bytes = row != nullptr && left > 0 ? 16 : 0;
        const unsigned char *from = bytes != 0 ? row + k * 2 + chunk * 16 : args.slabs[0].rows;

        cp_async_16(base + n * 128 + ((chunk ^ (n & 7)) * 16), from, bytes);
    }
}

__device__ __forceinline__ void load_weights(const gemm_args &args, gemm_smem &smem, int32_t stage, const tile &t, int32_t k, bool gated)
{
    if (gated)
        cp_async_bulk_tensor_5d(smem.weights[stage], &args.weights, &smem.full[stage], k, 0, 0, t.row_tile * 8, t.expert);
    else
        cp_async_bulk_tensor_3d(smem.weights[stage], &args.weights, &smem.full[stage], k, t.row_tile * kRows, t.expert);
}

// As many token rows as the tile's wgmma reads. Rows past the tile's own belong to the next expert, or are zeros.
__device__ __forceinline__ void load_tokens(const gemm_args &args, gemm_smem &smem, int32_t stage, const tile &t, int32_t k,
                                            int32_t columns)
{
    const CUtensorMap *map = columns < kManyTokens ? &args.tokens : &args.many_tokens;
    int32_t box = columns < kManyTokens ? 8 : kManyTokens;

    for (int32_t n = 0; n < columns; n += box)
        cp_async_bulk_tensor_3d(smem.tokens[stage] + n * 128, map, &smem.full[stage], k, t.pair + n, 0);
}

template <bool gathers> __device__ __forceinline__ void producer_loop(const gemm_args &args, gemm_smem &smem)
{
    const int32_t thread = threadIdx.x % 128;
    const bool gated = args.order != ORDER_PLAIN;
    uint32_t step = 0; // of all tiles

    for (int32_t index = blockIdx.x; index < smem.tile_first[args.experts]; index += gridDim.x) {
        tile t = find_tile(args, smem, index);
        int32_t columns = tile_columns(t.tokens);

        if (gathers) find_rows(args, smem, t, thread);
        for (int32_t k = 0; k < args.depth; k += kDepth, step++) {
            uint32_t stage = step % kStages, round = step / kStages;

            mbarrier_wait(&smem.empty[stage], (round & 1) ^ 1);
            if (thread == 0) {
                uint32_t bytes = kRows * 128 + (gathers ? 0 : columns * 128);

                mbarrier_arrive_expect_tx(&smem.full[stage], bytes);
                load_weights(args, smem, stage, t, k, gated);
                if (!gathers) load_tokens(args, smem, stage, t, k, columns);
            }
            if (!gathers) continue;
            gather(args, smem, stage, k, columns, thread);
            cp_async_commit();
            if (step < kLag) continue;
            cp_async_wait<kLag>();
            fence_proxy_async();
            mbarrier_arrive(&smem.full[(step - kLag) % kStages]);
        }
    }
    if (!gathers) return;
    cp_async_wait<0>();
    fence_proxy_async();
    for (uint32_t late = step < kLag ? 0 : step - kLag; late < step; late++)
        mbarrier_arrive(&smem.full[late % kStages]);
}

// ---- Multiplying -------------------------------------------------------------------------------

template <int N, bool is_bf16>
__device__ __forceinline__ void multiply(const gemm_args &args, gemm_smem &smem, int32_t warpgroup, uint32_t &step,
                                         float (&c)[N / 2])
{
    const bool elected = threadIdx.x % 128 == 0;
    uint32_t first = step;

    for (int32_t k = 0; k < args.depth; k += kDepth, step++) {
        uint32_t stage = step % kStages;
        uint64_t a = wgmma_descriptor(smem.weights[stage] + warpgroup * 64 * 128);
        uint64_t b = wgmma_descriptor(smem.tokens[stage]);

        mbarrier_wait(&smem.full[stage], step / kStages & 1);
        wgmma_fence();
#pragma unroll
        for (int32_t part = 0; part < kDepth / 16; part++)
            wgmma<N, is_bf16>::run(c, a + part * 2, b + part * 2);
        wgmma_commit();
        if (step == first) continue;
        wgmma_wait<1>();
        if (elected) mbarrier_arrive(&smem.empty[(step - 1) % kStages]);
    }
    wgmma_wait<0>();
    if (elected) mbarrier_arrive(&smem.empty[(step - 1) % kStages]);
}

// erf to 1.5e-7 (Abramowitz and Stegun 7.1.26): far below 16-bit outputs, and short enough to inline everywhere.
__device__ __forceinline__ float erf_short(float x)
{
    float t = __fdividef(1.0f, 1.0f + 0.3275911f * fabsf(x));
    float poly = t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));

    return copysignf(1.0f - poly * __expf(-x * x), x);
}

// gate * slope(gate) * up, where the slope is what tells the functions apart.
__device__ __forceinline__ float activate(const gemm_args &args, float gate, float up)
{
    float slope, argument = gate;

    if (args.activation == ACTIVATION_RELU2) return gate > 0.0f ? gate * gate : 0.0f;
    if (args.activation == ACTIVATION_GELU) return gate * (0.5f + 0.5f * erf_short(gate * 0.70710678118654752f)) * up;
    if (args.activation == ACTIVATION_GELU_TANH) argument = 1.5957691216057308f * (gate + 0.044715f * gate * gate * gate);
    if (args.activation == ACTIVATION_SWIGLUOAI) {
        if (args.limit > 0.0f) {
            gate = fminf(gate, args.limit);
            up = fminf(fmaxf(up, -args.limit), args.limit);
        }
        argument = args.alpha * gate;
        up += args.beta;
    }
    slope = __fdividef(1.0f, 1.0f + __expf(-argument));
    return gate * slope * up;
}

// Four lanes hold the eight outputs of one token: 16 bytes of its row.
__device__ __forceinline__ void store_block(const gemm_args &args, const tile &t, int32_t block, int32_t output, uint32_t packed)
{
    int32_t lane = threadIdx.x % 32;
    int32_t n = block * 8 + lane / 4;

    if (n < t.tokens && output < args.outputs)
        *reinterpret_cast<uint32_t *>(args.out + (t.pair + n) * args.out_stride_bytes + (output + lane % 4 * 2) * 2) = packed;
}

__device__ __forceinline__ float bias_at(const gemm_args &args, int32_t expert, int64_t row)
{
    const unsigned char *bias = static_cast<const unsigned char *>(args.bias) + expert * args.bias_expert_stride_bytes;

    return number_load(bias, row, args.bias_format);
}

// Rows of the bias that belong to gate and up of a unit.
__device__ __forceinline__ void gate_up_bias(const gemm_args &args, int32_t expert, int32_t unit, float &gate, float &up)
{
    gate = up = 0.0f;
    if (args.bias == nullptr || unit >= args.outputs) return;
    if (args.order == ORDER_INTERLEAVED) {
        gate = bias_at(args, expert, 2 * static_cast<int64_t>(unit));
        up = bias_at(args, expert, 2 * static_cast<int64_t>(unit) + 1);
    } else {
        gate = bias_at(args, expert, unit + (args.order == ORDER_UP_GATE ? args.outputs : 0));
        up = bias_at(args, expert, unit + (args.order == ORDER_UP_GATE ? 0 : args.outputs));
    }
}

template <int N, bool is_bf16>
__device__ __forceinline__ void finish_gated(const gemm_args &args, const tile &t, int32_t warpgroup, const float (&c)[N / 2])
{
    int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    int32_t unit_first = t.row_tile * 64 + warpgroup * 32 + warp * 8;
    float gate_bias, up_bias;

    gate_up_bias(args, t.expert, unit_first + lane / 4, gate_bias, up_bias);
#pragma unroll
    for (int32_t block = 0; block < N / 8; block++) {
        int32_t n = block * 8 + lane % 4 * 2;
        float out[2];

#pragma unroll
        for (int32_t i = 0; i < 2; i++) {
            float gate = c[block * 4 + i], up = c[block * 4 + 2 + i];
            float weight = args.pair_weight != nullptr && n + i < t.tokens ? args.pair_weight[t.pair + n + i] : 1.0f;

            if (args.order == ORDER_UP_GATE) {
                float other = gate;
                gate = up;
                up = other;
            }
            out[i] = activate(args, gate * weight + gate_bias, up * weight + up_bias);
        }
        store_block(args, t, block, unit_first, movmatrix_trans(number_pack<is_bf16>(out[0], out[1])));
    }
}

// Without a gate, and down: rows r and r + 8 are two outputs.
template <int N, bool is_bf16, bool activates>
__device__ __forceinline__ void finish_plain(const gemm_args &args, const tile &t, int32_t warpgroup, const float (&c)[N / 2])
{
    int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    int32_t first = t.row_tile * kRows + warpgroup * 64 + warp * 16;

#pragma unroll
    for (int32_t half = 0; half < 2; half++) {
        int32_t output = first + half * 8 + lane / 4;
        float bias = args.bias != nullptr && output < args.outputs ? bias_at(args, t.expert, output) : 0.0f;

#pragma unroll
        for (int32_t block = 0; block < N / 8; block++) {
            int32_t n = block * 8 + lane % 4 * 2;
            float out[2];

#pragma unroll
            for (int32_t i = 0; i < 2; i++) {
                float weight = activates && args.pair_weight != nullptr && n + i < t.tokens ? args.pair_weight[t.pair + n + i]
                                                                                              : 1.0f;

                out[i] = c[block * 4 + half * 2 + i] * weight + bias;
                if (activates) out[i] = activate(args, out[i], 1.0f);
            }
            store_block(args, t, block, first + half * 8, movmatrix_trans(number_pack<is_bf16>(out[0], out[1])));
        }
    }
}

template <int N, bool is_bf16, bool is_gate_up>
__device__ __forceinline__ void consume(const gemm_args &args, gemm_smem &smem, const tile &t, int32_t warpgroup, uint32_t &step)
{
    float c[N / 2];

#pragma unroll
    for (int32_t i = 0; i < N / 2; i++)
        c[i] = 0.0f;
    multiply<N, is_bf16>(args, smem, warpgroup, step, c);
    if (is_gate_up && args.order != ORDER_PLAIN)
        finish_gated<N, is_bf16>(args, t, warpgroup, c);
    else
        finish_plain<N, is_bf16, is_gate_up>(args, t, warpgroup, c);
}

template <bool is_bf16, bool is_gate_up>
__device__ __forceinline__ void consumer_loop(const gemm_args &args, gemm_smem &smem, int32_t warpgroup)
{
    uint32_t step = 0;

    for (int32_t index = blockIdx.x; index < smem.tile_first[args.experts]; index += gridDim.x) {
        tile t = find_tile(args, smem, index);

        switch (tile_columns(t.tokens)) {
        case 8:
            consume<8, is_bf16, is_gate_up>(args, smem, t, warpgroup, step);
            break;
        case 16:
            consume<16, is_bf16, is_gate_up>(args, smem, t, warpgroup, step);
            break;
        case 32:
            consume<32, is_bf16, is_gate_up>(args, smem, t, warpgroup, step);
            break;
        case 64:
            consume<64, is_bf16, is_gate_up>(args, smem, t, warpgroup, step);
            break;
        case 128:
            consume<128, is_bf16, is_gate_up>(args, smem, t, warpgroup, step);
            break;
        default:
            consume<256, is_bf16, is_gate_up>(args, smem, t, warpgroup, step);
            break;
        }
    }
}

template <bool is_bf16, bool is_gate_up>
__global__ void __launch_bounds__(kThreads, 1) gemm_kernel(const __grid_constant__ gemm_args args)
{
    gemm_smem &smem = *dynamic_smem<gemm_smem>();
    int32_t warpgroup = threadIdx.x / 128;

    if (threadIdx.x == 0) {
        prefetch_tensormap(&args.weights);
        for (int32_t stage = 0; stage < kStages; stage++) {
            mbarrier_init(&smem.full[stage], is_gate_up ? 1 + 128 : 1);
            mbarrier_init(&smem.empty[stage], 2);
        }
        fence_mbarrier_init();
    }
    griddepcontrol_wait();
    make_tables(args, smem);
    griddepcontrol_launch_dependents();
    if (warpgroup == kProducer) {
        setmaxnreg_dec<56>();
        producer_loop<is_gate_up>(args, smem);
    } else {
        setmaxnreg_inc<224>();
        consumer_loop<is_bf16, is_gate_up>(args, smem, warpgroup - kConsumer0);
    }
}

// ---- Launching ---------------------------------------------------------------------------------

// The weights of all experts. Gated: (K, 8 units, gate | up, units / 8, expert), whatever the order of the rows.
tensor_map_shape weights_shape(const weight_view &view, int32_t experts)
{
    cuuint64_t row = view.row_stride_bytes, expert = view.expert_stride_bytes;
    cuuint64_t k = view.k, units = view.n / 2;

    if (experts == 1) expert = row * view.n;
    if (view.order == ORDER_PLAIN)
        return {3, {k, cuuint64_t(view.n), cuuint64_t(experts)}, {row, expert}, {kDepth, kRows, 1}};
    if (view.order == ORDER_INTERLEAVED)
        return {5, {k, 8, 2, units / 8, cuuint64_t(experts)}, {2 * row, row, 16 * row, expert}, {kDepth, 8, 2, 8, 1}};
    return {5, {k, 8, 2, units / 8, cuuint64_t(experts)}, {row, units * row, 8 * row, expert}, {kDepth, 8, 2, 8, 1}};
}

int32_t sm_count()
{
    int device = 0, count = 0;

    if (cudaGetDevice(&device) != cudaSuccess) return 1;
    if (cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) return 1;
    return count;
}

constexpr size_t kSmemBytes = sizeof(gemm_smem);

template <bool is_gate_up> cudaError_t launch(const gemm_args &args, bool is_bf16, void *stream)
{
    cudaLaunchAttribute dependent = {};
    cudaLaunchConfig_t config = {};

    dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    dependent.val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = dim3(sm_count());
    config.blockDim = dim3(kThreads);
    config.dynamicSmemBytes = kSmemBytes;
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = &dependent;
    config.numAttrs = 1;
    if (is_bf16) return cudaLaunchKernelEx(&config, gemm_kernel<true, is_gate_up>, args);
    return cudaLaunchKernelEx(&config, gemm_kernel<false, is_gate_up>, args);
}

void take_weights(gemm_args &to, const weight_view &view)
{
    to.bias = view.bias;
    to.bias_format = view.bias_format;
    to.bias_expert_stride_bytes = view.bias_expert_stride_bytes;
    to.order = view.order;
    to.depth = static_cast<int32_t>(view.k);
}

// What the tensor maps and 16-byte copies need.
bool fits(const weight_view &view)
{
    return (view.format == FORMAT_BF16 || view.format == FORMAT_F16) && !view.rows_in && view.k % 8 == 0 && view.n % (view.order == ORDER_PLAIN ? 8 : 16) == 0 &&
           view.row_stride_bytes % 16 == 0 && view.expert_stride_bytes % 16 == 0 &&
           reinterpret_cast<uintptr_t>(view.values) % 16 == 0;
}

template <bool is_bf16, bool is_gate_up> cudaError_t raise_limit()
{
    return cudaFuncSetAttribute(gemm_kernel<is_bf16, is_gate_up>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes);
}

} // namespace

extern "C" int32_t gemm_cuda_load(void)
{
    cudaError_t st = raise_limit<true, true>();

    if (st == cudaSuccess) st = raise_limit<true, false>();
    if (st == cudaSuccess) st = raise_limit<false, true>();
    if (st == cudaSuccess) st = raise_limit<false, false>();
    return st;
}

extern "C" int32_t gate_up_cuda(const struct gate_up_args *args, void *stream)
{
    bool is_bf16 = args->w1.format == FORMAT_BF16;
    gemm_args to = {};
    cudaError_t st;

    if (!fits(args->w1) || args->experts > kExpertsMax || args->mid_format != args->w1.format ||
        args->operand_format != args->w1.format)
        return cudaErrorInvalidValue;
    take_weights(to, args->w1);
    for (int32_t i = 0; i < args->slabs_count; i++) {
        if (args->slabs[i].format != args->w1.format) return cudaErrorInvalidValue;
        to.slabs[i].rows = static_cast<const unsigned char *>(args->slabs[i].rows);
        to.slabs[i].row_stride_bytes = args->slabs[i].row_stride_bytes;
    }
    to.expert_offset = args->expert_offset;
    to.pair_row = args->pair_row;
    to.pair_weight = args->pair_weight;
    to.out = static_cast<unsigned char *>(args->mid);
    to.out_stride_bytes = args->mid_stride_bytes;
    to.experts = args->experts;
    to.outputs = args->intermediate;
    to.row_tiles = args->w1.order == ORDER_PLAIN ? (args->intermediate + kRows - 1) / kRows : (args->intermediate + 63) / 64;
    to.rows_cap = args->rows_cap;
    to.activation = args->activation;
    to.alpha = args->alpha;
    to.beta = args->beta;
    to.limit = args->limit;
    st = tensor_map_make(&to.weights, args->w1.values, is_bf16, weights_shape(args->w1, args->experts));
    if (st != cudaSuccess) return st;
    return launch<true>(to, is_bf16, stream);
}

extern "C" int32_t down_cuda(const struct down_args *args, void *stream)
{
    bool is_bf16 = args->w2.format == FORMAT_BF16;
    cuuint64_t stride = args->mid_stride_bytes, pairs = args->pairs_max;
    tensor_map_shape mid = {3, {cuuint64_t(args->w2.k), pairs, 1}, {stride, stride * pairs}, {kDepth, 8, 1}};
    gemm_args to = {};
    cudaError_t st;

    if (!fits(args->w2) || args->experts > kExpertsMax || args->mid_format != args->w2.format ||
        args->pair_format != args->w2.format || args->operand_format != args->w2.format)
        return cudaErrorInvalidValue;
    take_weights(to, args->w2);
    to.expert_offset = args->expert_offset;
    to.out = static_cast<unsigned char *>(args->pair_out);
    to.out_stride_bytes = args->pair_stride_bytes;
    to.experts = args->experts;
    to.outputs = static_cast<int32_t>(args->w2.n);
    to.row_tiles = static_cast<int32_t>((args->w2.n + kRows - 1) / kRows);
    st = tensor_map_make(&to.weights, args->w2.values, is_bf16, weights_shape(args->w2, args->experts));
    if (st != cudaSuccess) return st;
    mid.box[1] = 8;
    st = tensor_map_make(&to.tokens, args->mid, is_bf16, mid);
    if (st != cudaSuccess) return st;
    mid.box[1] = kManyTokens;
    st = tensor_map_make(&to.many_tokens, args->mid, is_bf16, mid);
    if (st != cudaSuccess) return st;
    return launch<false>(to, is_bf16, stream);
}
