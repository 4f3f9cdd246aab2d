// One MoE layer on the GPU and on its CPU twin, same args structs, same random data: sizes, orders, activations, skew.
// With --time, the layer's time in a replayed graph instead; with --random SEED COUNT, random layers.

extern "C" {
#include "kernels/cpu/cpu.h"
}
#include "kernels/cuda/cuda.h"

#include <cuda_bf16.h>
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

static uint64_t seed_state = 88172645463325252ull;
static double uniform() // 0..1
{
    seed_state ^= seed_state << 13;
    seed_state ^= seed_state >> 7;
    seed_state ^= seed_state << 17;
    return (double)(seed_state >> 11) / 9007199254740992.0;
}

static uint16_t bf16(float value)
{
    __nv_bfloat16 narrow = __float2bfloat16_rn(value);
    uint16_t bits;
    memcpy(&bits, &narrow, 2);
    return bits;
}

struct layer_case {
    int tokens, hidden, intermediate, experts, top_k, order, activation, skew, bias, weight_on_input, rows_in, format;
};

struct layer {
    layer_case shape;
    std::vector<uint16_t> x, w1, w2, b1, b2;
    std::vector<uint8_t> q1, q2; // fp8 weights
    std::vector<float> s1, s2;   // and their scales
    std::vector<int32_t> ids;
    std::vector<float> weights;
};

static void fill(std::vector<uint16_t> &to, size_t count, float scale)
{
    size_t drawn = count < ((size_t)1 << 20) ? count : ((size_t)1 << 20) - 3;

    to.resize(count);
    for (size_t i = 0; i < drawn; i++)
        to[i] = bf16((float)(uniform() * 2 - 1) * scale);
    for (size_t i = drawn; i < count; i++)
        to[i] = to[i - drawn];
}

// Codes that need not be the nearest: what is compared is one product of the same codes. Each half of a matrix has block rows
// of its own.
static void quantise_weights(const std::vector<uint16_t> &from, int experts, int rows, int columns, int halves, int format,
                             std::vector<uint8_t> &codes, std::vector<float> &scales)
{
    size_t blocks = halves * ((rows / halves + 127) / 128), block_columns = (columns + 127) / 128;
    size_t count = format == FORMAT_FP8_BLOCK128  ? blocks * block_columns
                   : format == FORMAT_FP8_CHANNEL ? rows
                                                  : halves;

    codes.resize(from.size());
    for (size_t i = 0; i < codes.size(); i++)
        codes[i] = (uint8_t)((from[i] >> 8 & 0x80) | (from[i] * 37u >> 3 & 0x7f) % 0x60);
    scales.resize(experts * count);
    for (auto &scale : scales)
        scale = (float)(0.5 + uniform()) / sqrtf((float)columns) / 4;
}

static void make(layer &l, const layer_case &c)
{
    int rows = c.order == ORDER_PLAIN ? c.intermediate : 2 * c.intermediate;
    l.shape = c;
    fill(l.x, (size_t)c.tokens * c.hidden, 1.0f);
    fill(l.w1, (size_t)c.experts * rows * c.hidden, 1.7f / sqrtf((float)c.hidden));
    fill(l.w2, (size_t)c.experts * c.hidden * c.intermediate, 1.7f / sqrtf((float)c.intermediate));
    fill(l.b1, (size_t)c.experts * rows, 0.5f);
    fill(l.b2, (size_t)c.experts * c.hidden, 0.5f);
    if (c.format != FORMAT_BF16) {
        quantise_weights(l.w1, c.experts, rows, c.hidden, c.order == ORDER_PLAIN ? 1 : 2, c.format, l.q1, l.s1);
        quantise_weights(l.w2, c.experts, c.hidden, c.intermediate, 1, c.format, l.q2, l.s2);
    }
    l.ids.resize((size_t)c.tokens * c.top_k);
    l.weights.resize(l.ids.size());
    for (size_t i = 0; i < l.ids.size(); i++) {
        l.ids[i] = c.skew == 1 ? (int)(i % c.top_k) : (int)(uniform() * (c.experts + (c.skew == 2 ? 3 : 0)));
        l.weights[i] = (float)uniform();
    }
}

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
    quantise_args quantise_x, quantise_mid; // fp8
    bool fp8;
    out_slab out;
    route_args route;
    gate_up_args gate_up;
    down_args down;
    combine_args combine;
};

static weight_view fp8_view_of(const void *values, const void *scales, const void *bias, int64_t n, int64_t k, int order, int format)
{
    weight_view v = {};
    int64_t halves = order == ORDER_PLAIN ? 1 : 2, block_rows = halves * ((n / halves + 127) / 128), columns = (k + 127) / 128;
    v.values = values;
    v.scales = scales;
    v.bias = bias;
    v.n = n;
    v.k = k;
    v.row_stride_bytes = k;
    v.expert_stride_bytes = n * k;
    v.scale_row_stride_bytes = format == FORMAT_FP8_BLOCK128 ? columns * 4 : 4;
    v.scale_expert_stride_bytes = (format == FORMAT_FP8_BLOCK128  ? block_rows * columns
                                   : format == FORMAT_FP8_CHANNEL ? n
                                                                  : halves) *
                                  4;
    v.global_stride = format == FORMAT_FP8_TENSOR ? (int32_t)halves : 0;
    v.bias_expert_stride_bytes = n * 2;
    v.format = format;
    v.order = order;
    v.bias_format = FORMAT_BF16;
    return v;
}

// [E, N, K], or [E, K, N] where rows_in.
static weight_view view_of(const void *values, const void *bias, int64_t n, int64_t k, int order, int rows_in)
{
    weight_view v = {};
    v.values = values;
    v.bias = bias;
    v.n = n;
    v.k = k;
    v.row_stride_bytes = (rows_in ? n : k) * 2;
    v.rows_in = rows_in;
    v.expert_stride_bytes = n * k * 2;
    v.bias_expert_stride_bytes = n * 2;
    v.format = FORMAT_BF16;
    v.order = order;
    v.bias_format = FORMAT_BF16;
    return v;
}

static void make_last_stages(stages &s, const layer_case &c, const weight_view &w2, int mid_format, void *buffers[])
{
    int64_t pairs = (int64_t)c.tokens * c.top_k;
    int bytes = mid_format == FORMAT_F32 ? 4 : 2;
    s.down.expert_offset = s.route.expert_offset;
    s.down.mid = buffers[4];
    s.down.mid_stride_bytes = s.gate_up.mid_stride_bytes;
    s.down.w2 = w2;
    s.down.pair_out = buffers[5];
    s.down.pair_stride_bytes = ((int64_t)c.hidden * bytes + 127) / 128 * 128;
    s.down.pairs_max = pairs;
    s.down.mid_format = mid_format;
    s.down.pair_format = mid_format;
    s.down.experts = c.experts;
    s.down.operand_format = FORMAT_BF16;
    s.combine.pair_out = buffers[5];
    s.combine.pair_stride_bytes = s.down.pair_stride_bytes;
    s.combine.pairs = pairs;
    s.combine.row_pair = s.route.row_pair;
    s.combine.pair_weight = c.weight_on_input ? NULL : s.route.pair_weight;
    s.combine.slabs = &s.out;
    s.combine.pair_format = mid_format;
    s.combine.slabs_count = 1;
    s.combine.rows_cap = c.tokens;
    s.combine.hidden = c.hidden;
    s.combine.top_k = c.top_k;
    s.combine.scale = 1.0f;
}

// x and mid, each quantised before it is multiplied: buffers 6 to 9.
static void make_fp8_stages(stages &s, const layer_case &c, void *buffers[])
{
    s.fp8 = true;
    s.quantise_x.x = s.slab.rows;
    s.quantise_x.rows = buffers[6];
    s.quantise_x.scales = buffers[7];
    s.quantise_x.x_stride_bytes = c.hidden * 2;
    s.quantise_x.row_stride_bytes = (c.hidden + 127) / 128 * 128;
    s.quantise_x.scale_stride_bytes = (c.hidden + 127) / 128 * 4;
    s.quantise_x.x_format = FORMAT_BF16;
    s.quantise_x.format = FORMAT_FP8_BLOCK128;
    s.quantise_x.rows_count = c.tokens;
    s.quantise_x.columns = c.hidden;
    s.quantised_slab = s.slab;
    s.quantised_slab.rows = buffers[6];
    s.quantised_slab.scales = buffers[7];
    s.quantised_slab.row_stride_bytes = s.quantise_x.row_stride_bytes;
    s.quantised_slab.scale_stride_bytes = s.quantise_x.scale_stride_bytes;
    s.quantised_slab.format = FORMAT_FP8_BLOCK128;
    s.gate_up.slabs = &s.quantised_slab;
    s.gate_up.operand_format = FORMAT_FP8;
    s.quantise_mid = s.quantise_x;
    s.quantise_mid.x = buffers[4];
    s.quantise_mid.rows = buffers[8];
    s.quantise_mid.scales = buffers[9];
    s.quantise_mid.count = s.route.expert_offset + c.experts;
    s.quantise_mid.x_stride_bytes = s.gate_up.mid_stride_bytes;
    s.quantise_mid.row_stride_bytes = (c.intermediate + 127) / 128 * 128;
    s.quantise_mid.scale_stride_bytes = (c.intermediate + 127) / 128 * 4;
    s.quantise_mid.x_format = s.gate_up.mid_format;
    s.quantise_mid.rows_count = c.tokens * c.top_k;
    s.quantise_mid.columns = c.intermediate;
    s.down.mid = buffers[8];
    s.down.mid_stride_bytes = s.quantise_mid.row_stride_bytes;
    s.down.mid_scales = buffers[9];
    s.down.mid_scale_stride_bytes = s.quantise_mid.scale_stride_bytes;
    s.down.mid_format = FORMAT_FP8_BLOCK128;
    s.down.operand_format = FORMAT_FP8;
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
    s.slab.format = FORMAT_BF16;
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
    s.route.pairs_max = pairs;
    s.route.experts = c.experts;
    s.route.slabs_count = 1;
    s.route.rows_cap = c.tokens;
    s.route.top_k = c.top_k;
    s.gate_up.slabs = &s.slab;
    s.gate_up.expert_offset = s.route.expert_offset;
    s.gate_up.pair_row = s.route.pair_row;
    s.gate_up.pair_weight = c.weight_on_input ? s.route.pair_weight : NULL;
    s.gate_up.w1 = w1;
    s.gate_up.mid = buffers[4];
    s.gate_up.mid_stride_bytes = ((int64_t)c.intermediate * bytes + 127) / 128 * 128;
    s.gate_up.mid_format = mid_format;
    s.gate_up.experts = c.experts;
    s.gate_up.slabs_count = 1;
    s.gate_up.rows_cap = c.tokens;
    s.gate_up.hidden = c.hidden;
    s.gate_up.intermediate = c.intermediate;
    s.gate_up.activation = c.activation;
    s.gate_up.operand_format = FORMAT_BF16;
    s.gate_up.alpha = 1.702f;
    s.gate_up.beta = 1.0f;
    s.gate_up.limit = 2.0f;
    make_last_stages(s, c, w2, mid_format, buffers);
    if (c.format != FORMAT_BF16) make_fp8_stages(s, c, buffers);
}

static int run_stages(const struct kernels *kernels, const stages &s, void *stream)
{
    int st = kernels->route(&s.route, stream);
    if (st == 0 && s.fp8) st = kernels->quantise(&s.quantise_x, stream);
    if (st == 0) st = kernels->gate_up(&s.gate_up, stream);
    if (st == 0 && s.fp8) st = kernels->quantise(&s.quantise_mid, stream);
    if (st == 0) st = kernels->down(&s.down, stream);
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
    sizes[6] = (size_t)c.tokens * ((c.hidden + 127) / 128 * 128);
    sizes[7] = (size_t)c.tokens * ((c.hidden + 127) / 128 * 4);
    sizes[8] = pairs * ((c.intermediate + 127) / 128 * 128);
    sizes[9] = pairs * ((c.intermediate + 127) / 128 * 4);
}

struct gpu_layer {
    stages s;
    void *memory[BUFFERS + 9];
    float *y;
};

static void upload_layer(gpu_layer &g, const layer &l)
{
    const layer_case &c = l.shape;
    int rows = c.order == ORDER_PLAIN ? c.intermediate : 2 * c.intermediate;
    size_t sizes[BUFFERS];
    void *buffers[BUFFERS], **m = g.memory + BUFFERS;
    bool fp8 = c.format != FORMAT_BF16;
    buffers_for(c, sizes);
    for (int i = 0; i < BUFFERS; i++)
        g.memory[i] = buffers[i] = poison<char>(sizes[i]);
    m[0] = upload(l.x);
    m[1] = upload(l.ids);
    m[2] = upload(l.weights);
    m[3] = fp8 ? (void *)upload(l.q1) : upload(l.w1);
    m[4] = fp8 ? (void *)upload(l.q2) : upload(l.w2);
    m[5] = c.bias ? upload(l.b1) : NULL;
    m[6] = c.bias ? upload(l.b2) : NULL;
    m[7] = fp8 ? upload(l.s1) : NULL;
    m[8] = fp8 ? upload(l.s2) : NULL;
    g.y = poison<float>((size_t)c.tokens * c.hidden);
    weight_view w1 = view_of(m[3], m[5], rows, c.hidden, c.order, c.rows_in);
    weight_view w2 = view_of(m[4], m[6], c.hidden, c.intermediate, ORDER_PLAIN, c.rows_in);
    if (fp8) {
        w1 = fp8_view_of(m[3], m[7], m[5], rows, c.hidden, c.order, c.format);
        w2 = fp8_view_of(m[4], m[8], m[6], c.hidden, c.intermediate, ORDER_PLAIN, c.format);
    }
    make_stages(g.s, c, m[0], m[1], m[2], w1, w2, FORMAT_BF16, buffers, g.y);
    g.s.route.slabs = &g.s.slab;
    g.s.gate_up.slabs = fp8 ? &g.s.quantised_slab : &g.s.slab;
    g.s.combine.slabs = &g.s.out;
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

static void run_cpu(const layer &l, std::vector<float> &y)
{
    const layer_case &c = l.shape;
    int rows = c.order == ORDER_PLAIN ? c.intermediate : 2 * c.intermediate;
    size_t sizes[BUFFERS];
    void *buffers[BUFFERS], *scratch;
    bool fp8 = c.format != FORMAT_BF16;
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
    weight_view w1 = view_of(l.w1.data(), b1, rows, c.hidden, c.order, c.rows_in);
    weight_view w2 = view_of(l.w2.data(), b2, c.hidden, c.intermediate, ORDER_PLAIN, c.rows_in);
    if (fp8) {
        w1 = fp8_view_of(l.q1.data(), l.s1.data(), b1, rows, c.hidden, c.order, c.format);
        w2 = fp8_view_of(l.q2.data(), l.s2.data(), b2, c.hidden, c.intermediate, ORDER_PLAIN, c.format);
    }
    // mid rounds as on the device, so that both quantise the same numbers.
    make_stages(s, c, l.x.data(), l.ids.data(), l.weights.data(), w1, w2, fp8 ? FORMAT_BF16 : FORMAT_F32, buffers, y.data());
    if (run_stages(&kernels_cpu, s, &stream) != 0) exit(2);
    for (int i = 0; i < BUFFERS; i++)
        free(buffers[i]);
    free(scratch);
}

static int compare(const layer_case &c)
{
    layer l;
    gpu_layer g;
    std::vector<float> want, got((size_t)c.tokens * c.hidden), again(got.size());
    double difference = 0, norm = 0;
    make(l, c);
    upload_layer(g, l);
    CHECK(run_stages(&kernels_cuda, g.s, NULL));
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaMemcpy(got.data(), g.y, got.size() * 4, cudaMemcpyDeviceToHost));
    CHECK(run_stages(&kernels_cuda, g.s, NULL));
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaMemcpy(again.data(), g.y, got.size() * 4, cudaMemcpyDeviceToHost));
    run_cpu(l, want);
    for (size_t i = 0; i < got.size(); i++) {
        difference += ((double)got[i] - want[i]) * ((double)got[i] - want[i]);
        norm += (double)want[i] * want[i];
    }
    double error = sqrt(norm > 0 ? difference / norm : difference); // no id of an expert: all zeros
    int bits = memcmp(got.data(), again.data(), got.size() * 4) == 0;
    int ok = error <= 5e-3 && bits;
    printf("%s tokens %d hidden %d intermediate %d experts %d top-k %d order %d activation %d skew %d bias %d on-input %d rows-in %d format %d: error %.2e%s\n",
           ok ? "ok  " : "FAIL", c.tokens, c.hidden, c.intermediate, c.experts, c.top_k, c.order, c.activation, c.skew, c.bias,
           c.weight_on_input, c.rows_in, c.format, error, bits ? "" : ", bits differ between runs");
    fflush(stdout);
    free_layer(g);
    return !ok;
}

// Microseconds of one stage, alone in a graph of 8.
static float time_stage(std::vector<gpu_layer> &g, int stage, cudaStream_t stream);

static float median(std::vector<float> v)
{
    for (size_t i = 0; i < v.size(); i++)
        for (size_t j = i + 1; j < v.size(); j++)
            if (v[j] < v[i]) std::swap(v[i], v[j]);
    return v[v.size() / 2];
}

static int run_stage(const stages &s, int stage, void *stream)
{
    switch (stage) {
    case 0:
        return kernels_cuda.route(&s.route, stream);
    case 1:
        return kernels_cuda.gate_up(&s.gate_up, stream);
    case 2:
        return kernels_cuda.down(&s.down, stream);
    case 3:
        return kernels_cuda.combine(&s.combine, stream);
    default:
        return run_stages(&kernels_cuda, s, stream);
    }
}

static float time_stage(std::vector<gpu_layer> &g, int stage, cudaStream_t stream)
{
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaEvent_t begin, end;
    std::vector<float> times;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < 8; i++)
        CHECK(run_stage(g[i % g.size()].s, stage, stream));
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    for (int i = 0; i < 35; i++) {
        float ms;
        CHECK(cudaEventRecord(begin, stream));
        CHECK(cudaGraphLaunch(exec, stream));
        CHECK(cudaEventRecord(end, stream));
        CHECK(cudaStreamSynchronize(stream));
        CHECK(cudaEventElapsedTime(&ms, begin, end));
        if (i >= 5) times.push_back(ms * 1000 / 8);
    }
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));
    return median(times);
}

// Graph of layers over distinct copies of weights, so that nothing stays in L2.
static void time_layer(const layer_case &c)
{
    layer l;
    size_t bytes;
    int copies;
    std::vector<gpu_layer> g;
    cudaStream_t stream;
    make(l, c);
    bytes = (l.w1.size() + l.w2.size()) * 2;
    copies = bytes > (size_t)400 << 20 ? 2 : (int)(((size_t)400 << 20) / bytes) + 1;
    if (copies > 8) copies = 8;
    g.resize(copies);
    for (int i = 0; i < copies; i++) {
        for (auto &id : l.ids)
            id = (int)(uniform() * c.experts);
        upload_layer(g[i], l);
        g[i].s.out.format = FORMAT_BF16;
        g[i].s.out.row_stride_bytes = c.hidden * 2;
    }
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    for (int i = 0; i < copies; i++)
        CHECK(run_stages(&kernels_cuda, g[i].s, stream));
    CHECK(cudaStreamSynchronize(stream));
    std::vector<char> hit(c.experts, 0);
    for (int id : l.ids)
        hit[id] = 1;
    double experts = 0;
    for (char h : hit)
        experts += h;
    double memory = experts * 6.0 * c.hidden * c.intermediate / 4.5e6;
    double flops = 6.0 * c.tokens * c.top_k * c.hidden * c.intermediate / 790e6;
    double floor_us = memory > flops ? memory : flops;
    float us = time_stage(g, 4, stream);
    printf("%5d/%5d/%3d/%d tokens %5d: %8.1f us, floor %8.1f, x %.2f; route %.1f gate_up %.1f down %.1f combine %.1f\n", c.hidden,
           c.intermediate, c.experts, c.top_k, c.tokens, us, floor_us, us / floor_us, time_stage(g, 0, stream),
           time_stage(g, 1, stream), time_stage(g, 2, stream), time_stage(g, 3, stream));
    fflush(stdout);
    for (auto &one : g)
        free_layer(one);
    cudaStreamDestroy(stream);
}

static int below(int limit)
{
    return (int)(uniform() * limit);
}

// Any layer that the library takes, small.
static layer_case random_case()
{
    static const int orders[] = {ORDER_GATE_UP, ORDER_UP_GATE, ORDER_INTERLEAVED, ORDER_PLAIN};
    static const int gated[] = {ACTIVATION_SILU, ACTIVATION_GELU, ACTIVATION_GELU_TANH, ACTIVATION_SWIGLUOAI};
    static const int formats[] = {FORMAT_BF16, FORMAT_BF16, FORMAT_FP8_BLOCK128, FORMAT_FP8_CHANNEL, FORMAT_FP8_TENSOR};
    layer_case c = {};
    c.format = formats[below(5)];
    int multiple = c.format == FORMAT_BF16 ? 8 : 16;
    c.tokens = 1 + below(below(3) ? 40 : 400);
    c.hidden = multiple * (1 + below(50));
    c.intermediate = multiple * (1 + below(30));
    c.experts = 1 + below(below(3) ? 12 : 200);
    c.top_k = 1 + below(c.experts < 6 ? c.experts : 6);
    c.order = orders[below(4)];
    c.activation = c.order == ORDER_PLAIN ? ACTIVATION_RELU2 : gated[below(4)];
    c.skew = below(3);
    c.bias = below(2);
    c.weight_on_input = below(4) == 0;
    c.rows_in = c.format == FORMAT_BF16 && below(2);
    return c;
}

int main(int argc, char **argv)
{
    static const layer_case cases[] = {
        {1, 128, 64, 4, 1, ORDER_GATE_UP, ACTIVATION_SILU, 0, 0, 0, 0, FORMAT_BF16},
        {7, 256, 128, 8, 2, ORDER_GATE_UP, ACTIVATION_SILU, 0, 0, 0, 0, FORMAT_BF16},
        {33, 128, 64, 16, 4, ORDER_UP_GATE, ACTIVATION_SILU, 2, 1, 0, 0, FORMAT_BF16},
        {64, 512, 192, 8, 4, ORDER_INTERLEAVED, ACTIVATION_SWIGLUOAI, 0, 1, 0, 0, FORMAT_BF16},
        {100, 264, 72, 8, 2, ORDER_GATE_UP, ACTIVATION_GELU, 0, 1, 0, 0, FORMAT_BF16},
        {100, 264, 72, 8, 2, ORDER_GATE_UP, ACTIVATION_GELU_TANH, 0, 0, 0, 0, FORMAT_BF16},
        {150, 256, 144, 8, 2, ORDER_PLAIN, ACTIVATION_RELU2, 0, 1, 0, 0, FORMAT_BF16},
        {57, 2880, 1440, 4, 2, ORDER_INTERLEAVED, ACTIVATION_SWIGLUOAI, 0, 1, 0, 0, FORMAT_BF16},
        {23, 64, 128, 8, 1, ORDER_GATE_UP, ACTIVATION_SILU, 0, 0, 1, 0, FORMAT_BF16},
        {300, 256, 256, 4, 2, ORDER_GATE_UP, ACTIVATION_SILU, 1, 0, 0, 0, FORMAT_BF16},
        {600, 512, 192, 128, 8, ORDER_GATE_UP, ACTIVATION_SILU, 2, 0, 0, 0, FORMAT_BF16},
        {1000, 128, 96, 1, 1, ORDER_GATE_UP, ACTIVATION_SILU, 0, 0, 0, 0, FORMAT_BF16},
        {40, 128, 64, 1024, 32, ORDER_GATE_UP, ACTIVATION_SILU, 0, 0, 0, 0, FORMAT_BF16},
        {1, 128, 64, 4, 1, ORDER_GATE_UP, ACTIVATION_SILU, 0, 0, 0, 1, FORMAT_BF16},
        {33, 128, 64, 16, 4, ORDER_UP_GATE, ACTIVATION_SILU, 2, 1, 0, 1, FORMAT_BF16},
        {64, 512, 192, 8, 4, ORDER_INTERLEAVED, ACTIVATION_SWIGLUOAI, 0, 1, 0, 1, FORMAT_BF16},
        {100, 264, 72, 8, 2, ORDER_INTERLEAVED, ACTIVATION_SILU, 0, 1, 1, 1, FORMAT_BF16},
        {100, 264, 72, 8, 2, ORDER_GATE_UP, ACTIVATION_GELU, 0, 1, 1, 1, FORMAT_BF16},
        {150, 256, 144, 8, 2, ORDER_PLAIN, ACTIVATION_RELU2, 0, 1, 0, 1, FORMAT_BF16},
        {57, 360, 360, 4, 2, ORDER_INTERLEAVED, ACTIVATION_SWIGLUOAI, 0, 1, 0, 1, FORMAT_BF16},
        {300, 256, 256, 4, 2, ORDER_GATE_UP, ACTIVATION_SILU, 1, 0, 0, 1, FORMAT_BF16},
        {1000, 128, 96, 1, 1, ORDER_INTERLEAVED, ACTIVATION_SILU, 0, 0, 0, 1, FORMAT_BF16},
        {1, 256, 128, 4, 2, ORDER_GATE_UP, ACTIVATION_SILU, 0, 0, 0, 0, FORMAT_FP8_BLOCK128},
        {33, 384, 192, 8, 4, ORDER_UP_GATE, ACTIVATION_SILU, 2, 1, 0, 0, FORMAT_FP8_BLOCK128},
        {64, 400, 208, 8, 2, ORDER_INTERLEAVED, ACTIVATION_SWIGLUOAI, 0, 1, 0, 0, FORMAT_FP8_BLOCK128},
        {300, 256, 320, 4, 2, ORDER_GATE_UP, ACTIVATION_GELU_TANH, 1, 0, 0, 0, FORMAT_FP8_BLOCK128},
        {70, 512, 144, 16, 4, ORDER_PLAIN, ACTIVATION_RELU2, 0, 1, 0, 0, FORMAT_FP8_BLOCK128},
        {50, 256, 160, 8, 2, ORDER_GATE_UP, ACTIVATION_SILU, 0, 1, 0, 0, FORMAT_FP8_CHANNEL},
        {50, 256, 160, 8, 2, ORDER_INTERLEAVED, ACTIVATION_SILU, 0, 0, 0, 0, FORMAT_FP8_CHANNEL},
        {50, 256, 160, 8, 2, ORDER_UP_GATE, ACTIVATION_SILU, 0, 1, 0, 0, FORMAT_FP8_TENSOR},
        {9, 256, 160, 8, 1, ORDER_PLAIN, ACTIVATION_RELU2, 0, 0, 1, 0, FORMAT_FP8_TENSOR},
    };
    int failed = 0, devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) return 77;
    CHECK(kernels_cuda_load());
    if (argc > 1 && strcmp(argv[1], "--time") == 0) {
        const int tokens[] = {1, 16, 64, 256, 1024, 4096, 16384};
        for (int t : tokens)
            time_layer({t, 2048, 768, 128, 8, ORDER_GATE_UP, ACTIVATION_SILU, 0, 0, 0, 0, FORMAT_BF16});
        for (int t : tokens)
            time_layer({t, 4096, 1536, 128, 8, ORDER_GATE_UP, ACTIVATION_SILU, 0, 0, 0, 0, FORMAT_BF16});
        for (int t : {64, 1024, 4096, 32768})
            time_layer({t, 7168, 2048, 32, 1, ORDER_GATE_UP, ACTIVATION_SILU, 0, 0, 0, 0, FORMAT_BF16});
        for (int t : {1, 64, 1024, 4096})
            time_layer({t, 4096, 14336, 8, 2, ORDER_GATE_UP, ACTIVATION_SILU, 0, 0, 0, 0, FORMAT_BF16});
        return 0;
    }
    if (argc > 3 && strcmp(argv[1], "--random") == 0) {
        seed_state += strtoull(argv[2], NULL, 10) * 0x9e3779b97f4a7c15u;
        for (int i = atoi(argv[3]); i > 0; i--)
            failed += compare(random_case());
        return failed != 0;
    }
    for (const layer_case &c : cases)
        failed += compare(c);
    printf("%d of %d cases failed\n", failed, (int)(sizeof cases / sizeof cases[0]));
    return failed != 0;
}
