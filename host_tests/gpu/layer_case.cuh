// A layer of layer_data.cuh, as args of the kernels in device memory and in the CPU's. Included by layer_twin.cu alone.

#ifndef MOXIE_HOST_TESTS_LAYER_CASE_CUH
#define MOXIE_HOST_TESTS_LAYER_CASE_CUH

extern "C" {
#include "kernels/cpu/cpu.h"
}
#include "host_tests/gpu/layer_data.cuh"
#include "host_tests/gpu/tensor_core_gemms.cuh"
#include "kernels/cuda/cuda.h"

#include <cuda_runtime.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <vector>

#define CHECK(call)                                                                                \
    do {                                                                                           \
        int status_ = (int)(call);                                                                 \
        if (status_ != 0) {                                                                        \
            printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #call,                                   \
                   cudaGetErrorString((cudaError_t)status_));                                      \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

template <class T> static T *upload(const std::vector<T> &from)
{
    T *to;
    CHECK(cudaMalloc(&to, from.size() * sizeof(T) + 16));
    CHECK(cudaMemcpy(to, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice));
    return to;
}

template <class T> static T *poison(size_t count)
{
    T *to;
    CHECK(cudaMalloc(&to, count * sizeof(T) + 256));
    CHECK(cudaMemset(to, 0xff, count * sizeof(T) + 256));
    return to;
}

struct stages {
    row_slab slab, quantised_slab;
    quantise_args quantise_x; // fp8
    bool fp8;
    out_slab out;
    route_args route;
    gemms_args gemms;
    combine_args combine;
    uint64_t *turns; // NULL: stages one by one
    uint32_t *mid_words;
    int64_t mid_words_count;
    int64_t *load;   // with turns, [experts]; NULL: not counted
};

static void take_packed(weight_view &v, const layer_case &c, const void *by_group, int64_t globals_each)
{
    v.row_stride_bytes = v.k / 2;
    v.expert_stride_bytes = v.n * v.k / 2;
    v.globals = (const float *)v.scales;
    v.scales = by_group;
    v.scale_row_stride_bytes = packed_scales_bytes(c, (int)v.k);
    v.scale_expert_stride_bytes = v.n * v.scale_row_stride_bytes;
    v.scale_format = c.format == FORMAT_INT4_G32 ? scale_format_of(c) : 0;
    v.global_stride = c.format == FORMAT_NVFP4 ? (int32_t)globals_each : 0;
    v.global_expert_stride_bytes = globals_each * 4;
}

// Of one product: [E, N, K], or [E, K, N] where rows_in; scales of fewer than 16 bits alone.
static weight_view view_of(const layer_case &c, bool is_down, const void *values, const void *scales, const void *by_group, const void *bias)
{
    weight_view v = {};
    int order = is_down ? ORDER_PLAIN : c.order, bytes = is_fp8(c) ? 1 : 2;
    int64_t halves = order == ORDER_PLAIN ? 1 : 2, n = is_down ? c.hidden : halves * c.intermediate;
    int64_t k = is_down ? c.intermediate : c.hidden, block_rows = halves * ((n / halves + 127) / 128), columns = (k + 127) / 128;
    int64_t scales_each = c.one_scale ? 1 : halves;
    v.values = values;
    v.bias = bias;
    v.n = n;
    v.k = k;
    v.row_stride_bytes = (c.rows_in ? n : k) * bytes;
    v.rows_in = c.rows_in;
    v.expert_stride_bytes = n * k * bytes;
    v.bias_expert_stride_bytes = n * 2;
    v.format = c.format;
    v.order = order;
    v.bias_format = format_16(c);
    v.scales = scales;
    if (is_packed(c)) take_packed(v, c, by_group, scales_each);
    if (!is_fp8(c)) return v;
    v.scale_row_stride_bytes = c.format == FORMAT_FP8_BLOCK128 ? columns * 4 : 4;
    v.scale_expert_stride_bytes = (c.format == FORMAT_FP8_BLOCK128  ? block_rows * columns
                                   : c.format == FORMAT_FP8_CHANNEL ? n
                                                                    : scales_each) *
                                  4;
    v.global_stride = c.format == FORMAT_FP8_TENSOR ? (int32_t)scales_each : 0;
    return v;
}

static void make_last_stages(stages &s, const layer_case &c, const weight_view &w2, int mid_format, void *buffers[])
{
    int64_t pairs = (int64_t)c.tokens * c.top_k;
    int bytes = mid_format == FORMAT_F32 ? 4 : 2;
    s.gemms.top_k = c.top_k;
    s.gemms.down.expert_offset = s.route.expert_offset;
    s.gemms.down.mid = buffers[4];
    s.gemms.down.mid_stride_bytes = s.gemms.gate_up.mid_stride_bytes;
    s.gemms.down.w2 = w2;
    s.gemms.down.pair_out = buffers[5];
    s.gemms.down.pair_stride_bytes = ((int64_t)c.hidden * bytes + 127) / 128 * 128;
    s.gemms.down.pairs_max = pairs;
    s.gemms.down.mid_format = mid_format;
    s.gemms.down.pair_format = mid_format;
    s.gemms.down.experts = c.experts;
    s.gemms.down.operand_format = format_16(c);
    s.combine.pair_out = buffers[5];
    s.combine.pair_stride_bytes = s.gemms.down.pair_stride_bytes;
    s.combine.pairs = pairs;
    s.combine.row_pair = s.route.row_pair;
    s.combine.pair_weight = c.weight_on_input ? NULL : s.route.pair_weight;
    s.combine.slabs = &s.out;
    s.combine.pair_format = mid_format;
    s.combine.slabs_count = 1;
    s.combine.rows_cap = c.tokens;
    s.combine.hidden = c.hidden;
    s.combine.top_k = c.top_k;
    s.combine.routed = c.experts > 0;
    s.combine.spends = 1;
    s.combine.scale = 1.5f;
}

// Between the scales of a row, which lie by group.
static int64_t group_bytes(const layer_case &c)
{
    return ((int64_t)c.tokens * c.top_k * 4 + 15) / 16 * 16;
}

// As for many rows; and for some sizes that nobody times.
static bool spreads_scales(const layer_case &c)
{
    return (int64_t)c.tokens * c.top_k * c.hidden >= QUANTISE_MANY_BYTES || c.hidden / 16 % 3 == 0;
}

// Rows of x that become fp8 once, whatever their experts: as the library has it, and for some sizes that nobody times.
static bool gathers_fp8(const layer_case &c)
{
    if (c.hidden < 2048) return c.hidden / 16 % 2 == 0;
    return c.top_k > 1 && (int64_t)c.tokens * c.top_k > GEMMS_GATHER_IDS && c.intermediate <= kernels_cuda.gather_units();
}

// x and mid, each quantised before it is multiplied: buffers 6 to 9.
static void make_fp8_stages(stages &s, const layer_case &c, void *buffers[])
{
    s.fp8 = true;
    s.quantise_x.slabs = &s.slab;
    s.quantise_x.row_pair = s.route.row_pair;
    s.quantise_x.rows = buffers[6];
    s.quantise_x.scales = buffers[7];
    s.quantise_x.row_stride_bytes = (c.hidden + 127) / 128 * 128;
    s.quantise_x.scale_stride_bytes = 4;
    s.quantise_x.group_stride_bytes = group_bytes(c);
    s.quantise_x.format = FORMAT_FP8_BLOCK128;
    s.quantise_x.slabs_count = 1;
    s.quantise_x.ahead = &s.gemms.gate_up.w1;
    s.quantise_x.ahead_experts = s.quantise_x.ahead_choices = c.experts;
    s.quantise_x.rows_cap = c.tokens;
    s.quantise_x.rows_count = c.tokens * c.top_k;
    s.quantise_x.top_k = c.top_k;
    s.quantise_x.columns = c.hidden;
    s.quantised_slab.rows = buffers[6];
    s.quantised_slab.scales = buffers[7];
    s.quantised_slab.row_stride_bytes = s.quantise_x.row_stride_bytes;
    s.quantised_slab.scale_stride_bytes = s.quantise_x.scale_stride_bytes;
    s.quantised_slab.group_stride_bytes = s.quantise_x.group_stride_bytes;
    s.quantised_slab.cap = c.tokens * c.top_k;
    s.quantised_slab.format = FORMAT_FP8_BLOCK128;
    s.gemms.gate_up.slabs = &s.quantised_slab;
    s.gemms.gate_up.pair_row = NULL;
    s.gemms.gate_up.rows_cap = s.quantised_slab.cap;
    s.gemms.gate_up.operand_format = FORMAT_FP8;
    s.gemms.quantise = s.quantise_x;
    s.gemms.quantise.slabs = NULL;
    s.gemms.quantise.row_pair = NULL;
    s.gemms.quantise.x = buffers[4];
    s.gemms.quantise.rows = buffers[8];
    s.gemms.quantise.scales = buffers[9];
    s.gemms.quantise.count = s.route.expert_offset + c.experts;
    s.gemms.quantise.x_stride_bytes = s.gemms.gate_up.mid_stride_bytes;
    s.gemms.quantise.row_stride_bytes = (c.intermediate + 127) / 128 * 128;
    s.gemms.quantise.x_format = s.gemms.gate_up.mid_format;
    s.gemms.quantise.rows_count = c.tokens * c.top_k;
    s.gemms.quantise.columns = c.intermediate;
    if (spreads_scales(c)) {
        s.quantise_x.x_row = s.route.pair_row;
        s.quantise_x.count = s.route.expert_offset + c.experts;
        s.quantise_x.row_scales = (float *)buffers[8];
    }
    if (gathers_fp8(c)) {
        s.quantise_x.rows_once = 1;
        s.gemms.gate_up.pair_row = s.route.pair_row;
        s.gemms.gate_up.rows_cap = c.tokens;
    }
    s.gemms.down.mid = buffers[8];
    s.gemms.down.mid_stride_bytes = s.gemms.quantise.row_stride_bytes;
    s.gemms.down.mid_scales = buffers[9];
    s.gemms.down.mid_scale_stride_bytes = s.gemms.quantise.scale_stride_bytes;
    s.gemms.down.mid_group_stride_bytes = s.gemms.quantise.group_stride_bytes;
    s.gemms.down.mid_format = FORMAT_FP8_BLOCK128;
    s.gemms.down.operand_format = FORMAT_FP8;
}

// As the plan has it.
static int64_t woven_pitch(const layer_case &c)
{
    return (gemms_woven_bytes(c.hidden) + 127) / 128 * 128;
}

static void make_stages(stages &s, const layer_case &c, const void *x, const void *ids, const void *weights, const weight_view &w1,
                        const weight_view &w2, int mid_format, void *buffers[], void *y)
{
    int64_t pairs = (int64_t)c.tokens * c.top_k;
    int bytes = mid_format == FORMAT_F32 ? 4 : 2;
    memset(&s, 0, sizeof s);
    s.slab.rows = x;
    s.slab.ids = ids;
    s.slab.weights = weights;
    s.slab.row_stride_bytes = c.hidden * 2;
    s.slab.id_stride_bytes = c.top_k * 4;
    s.slab.weight_stride_bytes = c.top_k * 4;
    s.slab.cap = c.tokens;
    s.slab.format = format_16(c);
    s.slab.id_bytes = 4;
    s.slab.weight_format = FORMAT_F32;
    s.out.rows = y;
    s.out.row_stride_bytes = c.hidden * 4;
    s.out.cap = c.tokens;
    s.out.format = FORMAT_F32;
    s.route.slabs = &s.slab;
    s.route.expert_offset = (int32_t *)buffers[0];
    s.route.pair_row = (int32_t *)buffers[1];
    s.route.pair_weight = (float *)buffers[2];
    s.route.row_pair = (int32_t *)buffers[3];
    s.route.scratch = buffers[4];
    s.route.scratch_bytes = pairs * (((int64_t)c.intermediate * 4 + 127) / 128 * 128);
    s.route.pairs_max = pairs;
    s.route.experts = c.experts;
    s.route.slabs_count = 1;
    s.route.rows_cap = c.tokens;
    s.route.top_k = c.top_k;
    s.gemms.gate_up.slabs = &s.slab;
    s.gemms.gate_up.expert_offset = s.route.expert_offset;
    s.gemms.gate_up.pair_row = s.route.pair_row;
    s.gemms.gate_up.pair_weight = c.weight_on_input ? s.route.pair_weight : NULL;
    s.gemms.gate_up.w1 = w1;
    s.gemms.gate_up.mid = buffers[4];
    s.gemms.gate_up.mid_stride_bytes = ((int64_t)c.intermediate * bytes + 127) / 128 * 128;
    s.gemms.gate_up.mid_format = mid_format;
    s.gemms.gate_up.experts = c.experts;
    s.gemms.gate_up.slabs_count = 1;
    s.gemms.gate_up.rows_cap = c.tokens;
    s.gemms.gate_up.hidden = c.hidden;
    s.gemms.gate_up.intermediate = c.intermediate;
    s.gemms.gate_up.activation = c.activation;
    s.gemms.gate_up.operand_format = format_16(c);
    s.gemms.gate_up.alpha = 1.702f;
    s.gemms.gate_up.beta = 1.0f;
    s.gemms.gate_up.limit = 2.0f;
    make_last_stages(s, c, w2, mid_format, buffers);
    s.gemms.x_woven = buffers[6];
    s.gemms.x_woven_stride_bytes = woven_pitch(c);
    if (is_fp8(c)) make_fp8_stages(s, c, buffers);
}

// Results in 16 bits, and where a row has one pair, written by down.
static void write_16(stages &s, bool placed)
{
    s.out.format = s.gemms.down.pair_format;
    s.out.row_stride_bytes = s.combine.hidden * 2;
    if (!placed) return;
    s.gemms.down.pair_out = s.out.rows;
    s.gemms.down.pair_stride_bytes = s.out.row_stride_bytes;
    s.gemms.down.result_row = s.route.pair_row;
    s.gemms.down.result_weight = s.combine.pair_weight;
    s.gemms.down.result_scale = s.combine.scale;
    s.combine.placed = 1;
}

static layer_args at_once(const stages &s)
{
    layer_args args = {};
    args.route = s.route;
    args.tally = {s.route.expert_offset, s.load, s.route.experts, 0};
    if (s.fp8) args.quantise = s.quantise_x;
    args.gemms = s.gemms;
    args.combine = s.combine;
    args.turns = s.turns;
    args.mid = s.mid_words;
    args.mid_words = s.mid_words_count;
    return args;
}

// In one launch, where `turns` are given and the device has one; else one by one.
static int run_stages(const struct kernels *kernels, const stages &s, void *stream)
{
    int st = LAYER_UNFIT;
    if (s.turns != NULL) {
        const layer_args args = at_once(s);
        st = kernels->layer(&args, stream);
    }
    if (st != LAYER_UNFIT) return st;
    st = kernels->route(&s.route, stream);
    if (st == 0 && s.fp8) st = kernels->quantise(&s.quantise_x, stream);
    if (st == 0) st = kernels->gemms(&s.gemms, stream);
    return st == 0 ? kernels->combine(&s.combine, stream) : st;
}

#define BUFFERS 10

static void buffers_for(const layer_case &c, size_t sizes[BUFFERS])
{
    size_t pairs = (size_t)c.tokens * c.top_k;
    sizes[0] = (c.experts + 1) * 4;
    sizes[1] = sizes[2] = sizes[3] = pairs * 4;
    sizes[4] = pairs * (((size_t)c.intermediate * 4 + 127) / 128 * 128);
    sizes[5] = pairs * (((size_t)c.hidden * 4 + 127) / 128 * 128);
    sizes[6] = is_packed(c) ? (size_t)(c.tokens * woven_pitch(c)) : pairs * ((c.hidden + 127) / 128 * 128);
    sizes[7] = group_bytes(c) * ((c.hidden + 127) / 128);
    sizes[8] = pairs * ((c.intermediate + 127) / 128 * 128);
    sizes[9] = group_bytes(c) * ((c.intermediate + 127) / 128);
}

struct gpu_layer {
    stages s;
    void *memory[BUFFERS + 17];
    uint64_t *turns;
    int64_t *load;
    float *y;
};

// The same experts by other ids: int64, through a map; some stand for none.
static void upload_mapped(gpu_layer &g, const layer &l, void *&ids, void *&map)
{
    const int64_t none = 1ll << 40;
    std::vector<int32_t> expert(l.shape.experts);
    std::vector<int64_t> id;
    for (int e = 0; e < l.shape.experts; e++)
        expert[(e + 3) % l.shape.experts] = e;
    for (int32_t e : l.ids)
        id.push_back(e < l.shape.experts ? (e + 3) % l.shape.experts : none + e);
    ids = upload(id);
    map = upload(expert);
    g.s.slab.ids = ids;
    g.s.slab.id_bytes = 8;
    g.s.slab.id_stride_bytes = l.shape.top_k * 8;
    g.s.route.expert_map = (const int32_t *)map;
    g.s.route.map_count = l.shape.experts;
}

// `first`: a layer of the same shape, which lends its buffers, as those of one engine share them.
static void upload_layer(gpu_layer &g, const layer &l, const gpu_layer *first = NULL)
{
    const layer_case &c = l.shape;
    size_t sizes[BUFFERS];
    void *buffers[BUFFERS], **m = g.memory + BUFFERS;
    bool fp8 = is_fp8(c);
    buffers_for(c, sizes);
    for (int i = 0; i < BUFFERS; i++) {
        g.memory[i] = first == NULL ? poison<char>(sizes[i]) : NULL;
        buffers[i] = first == NULL ? g.memory[i] : first->memory[i];
    }
    m[0] = upload(l.x);
    m[1] = m[10] = m[14] = m[15] = m[16] = NULL;
    if (c.skew != 2) m[1] = upload(l.ids);
    m[2] = upload(l.weights);
    m[3] = !l.q1.empty() ? (void *)upload(l.q1) : upload(l.w1);
    m[4] = !l.q2.empty() ? (void *)upload(l.q2) : upload(l.w2);
    m[5] = c.bias ? upload(l.b1) : NULL;
    m[6] = c.bias ? upload(l.b2) : NULL;
    m[7] = !l.s1.empty() ? upload(l.s1) : NULL;
    m[8] = !l.s2.empty() ? upload(l.s2) : NULL;
    if (is_packed(c)) {
        m[15] = upload(l.p1);
        m[16] = upload(l.p2);
    }
    m[9] = poison<uint32_t>(GEMM_PROGRESS_WORDS + c.experts);
    m[11] = upload(std::vector<uint64_t>(LAYER_TURNS));
    g.turns = (uint64_t *)m[11];
    int64_t words = (int64_t)c.tokens * c.top_k * c.intermediate / 2;
    m[13] = upload(std::vector<uint32_t>(2 * words));
    m[12] = upload(std::vector<int64_t>(c.experts));
    g.load = (int64_t *)m[12];
    g.y = poison<float>((size_t)c.tokens * c.hidden);
    weight_view w1 = view_of(c, false, m[3], m[7], m[15], m[5]), w2 = view_of(c, true, m[4], m[8], m[16], m[6]);
    make_stages(g.s, c, m[0], m[1], m[2], w1, w2, format_16(c), buffers, g.y);
    if (fp8) {
        g.s.gemms.halves_places = gemms_halves_places(c.intermediate, (int64_t)c.tokens * c.top_k);
        g.s.gemms.halves = m[14] = upload(std::vector<unsigned char>(g.s.gemms.halves_places * GEMMS_HALVES_PLACE_BYTES));
    }
    if (c.skew == 2) upload_mapped(g, l, m[1], m[10]);
    g.s.mid_words = (uint32_t *)m[13];
    g.s.mid_words_count = words;
    g.s.route.slabs = g.s.quantise_x.slabs = &g.s.slab;
    g.s.gemms.gate_up.slabs = fp8 ? &g.s.quantised_slab : &g.s.slab;
    g.s.combine.slabs = &g.s.out;
    g.s.route.progress = g.s.gemms.progress = (uint32_t *)m[9];
    g.s.quantise_x.early = c.tokens * c.top_k <= GEMMS_IDS_MAX;
    g.s.gemms.route = g.s.quantise_x.early ? &g.s.route : NULL;
}

static void free_layer(gpu_layer &g)
{
    for (void *memory : g.memory)
        cudaFree(memory);
    cudaFree(g.y);
}

static void inline_tasks(void *ctx, uint64_t tasks, void (*task)(void *, uint64_t), void *arg)
{
    (void)ctx;
    for (uint64_t i = 0; i < tasks; i++)
        task(arg, i);
}

// By kernels_cpu, or by those with products of their own.
static void run_cpu(const layer &l, const struct kernels &kernels, std::vector<float> &y)
{
    const layer_case &c = l.shape;
    size_t sizes[BUFFERS];
    void *buffers[BUFFERS], *scratch;
    bool fp8 = is_fp8(c);
    stages s;
    cpu_stream stream = {};
    buffers_for(c, sizes);
    for (int i = 0; i < BUFFERS; i++)
        buffers[i] = calloc(1, sizes[i] + 128);
    scratch = aligned_alloc(64, CPU_SCRATCH_BYTES);
    stream.parallel_for = inline_tasks;
    stream.scratch = (unsigned char *)scratch;
    stream.workers = 1;
    stream.isa = cpu_isa_best();
    y.assign((size_t)c.tokens * c.hidden, NAN);
    const void *b1 = c.bias ? l.b1.data() : NULL, *b2 = c.bias ? l.b2.data() : NULL;
    weight_view w1 = view_of(c, false, !l.q1.empty() ? (const void *)l.q1.data() : l.w1.data(), l.s1.data(), l.p1.data(), b1);
    weight_view w2 = view_of(c, true, !l.q2.empty() ? (const void *)l.q2.data() : l.w2.data(), l.s2.data(), l.p2.data(), b2);
    // mid rounds as on the device, so that both quantise the same numbers.
    make_stages(s, c, l.x.data(), l.ids.data(), l.weights.data(), w1, w2, fp8 ? FORMAT_BF16 : FORMAT_F32, buffers, y.data());
    if (fp8) {
        s.gemms.gate_up.pair_row = NULL;
        s.gemms.gate_up.rows_cap = s.quantised_slab.cap;
        s.quantise_x.row_scales = NULL;
        s.quantise_x.rows_once = 0;
    }
    if (run_stages(&kernels, s, &stream) != 0) exit(2);
    for (int i = 0; i < BUFFERS; i++)
        free(buffers[i]);
    free(scratch);
}

#endif
