// One MoE layer on the GPU and on its CPU twin, same args structs, same random data: sizes, orders, activations, skew.
// With --time, the layer's time in a replayed graph instead, of many layers or of the one that --time TOKENS HIDDEN INTERMEDIATE
// EXPERTS TOP_K [WORD] names, where WORD is one of `timed` (bf16_in: weights [E, K, N]; gpt_oss: those interleaved, with that model's
// biases and activation); with --random SEED COUNT, random layers; with --part I N, every Nth case from the Ith.

#include "host_tests/gpu/layer_slabs.cuh"
#include "kernels/cuda/launch.cuh"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <set>

#ifndef PRODUCTS_MOST
#define PRODUCTS_MOST INFINITY // tokens x top-k x hidden x intermediate of a case; larger ones are left out
#endif
#ifndef PACKED_MOST
#define PACKED_MOST INFINITY // experts x hidden x intermediate of one with weights of 4 bits, the same
#endif

static bool is_too_large(const layer_case &c)
{
    const double expert = static_cast<double>(c.hidden) * c.intermediate;

    return c.tokens * expert * c.top_k > PRODUCTS_MOST || (is_packed(c) && c.experts * expert > PACKED_MOST);
}

static double relative_error(const std::vector<float> &got, const std::vector<float> &want)
{
    double difference = 0, norm = 0;

    for (size_t i = 0; i < got.size(); i++) {
        difference += ((double)got[i] - want[i]) * ((double)got[i] - want[i]);
        norm += (double)want[i] * want[i];
    }
    return sqrt(norm > 0 ? difference / norm : difference); // no id of an expert: all zeros
}

// Whether the first tokens get the same bits without the others, whose number decides how all are multiplied; is_bound: the host knows that
// there are no more, and may then multiply mxfp4 and int4 in pieces, with another rounding.
static int same_alone(gpu_layer &g, const layer_case &c, const std::vector<float> &all, bool is_bound)
{
    const int32_t tokens = c.tokens < 3 ? c.tokens : 3;
    std::vector<float> alone((size_t)tokens * c.hidden);
    int32_t *count = upload(std::vector<int32_t>(1, tokens));
    g.s.slab.count = count;
    if (is_bound) g.s.slab.cap = tokens;
    run_layer(g, alone);
    cudaFree(count);
    g.s.slab.count = NULL;
    g.s.slab.cap = c.tokens;
    if (is_bound && is_packed(c) && c.format != FORMAT_NVFP4 && g.s.turns == NULL) return relative_error(alone, all) <= 5e-3;
    return memcmp(alone.data(), all.data(), alone.size() * 4) == 0;
}

// Whether tokens get the same bits one place further to the front, where other tokens' numbers lie in what launches share; two launches,
// since they may use it in turns.
static int same_moved(gpu_layer &g, const layer_case &c, const std::vector<float> &all)
{
    const row_slab slab = g.s.slab;
    std::vector<float> moved((size_t)(c.tokens - 1) * c.hidden);
    int same = 1;
    if (c.tokens == 1 || c.tokens > LAYER_TOKENS) return 1; // few, which take no time
    g.s.slab.rows = (const char *)slab.rows + slab.row_stride_bytes;
    g.s.slab.ids = (const char *)slab.ids + slab.id_stride_bytes;
    g.s.slab.weights = (const char *)slab.weights + slab.weight_stride_bytes;
    g.s.slab.cap--;
    for (int i = 0; i < 2; i++) {
        run_layer(g, moved);
        same = same && memcmp(moved.data(), all.data() + c.hidden, moved.size() * 4) == 0;
    }
    g.s.slab = slab;
    return same;
}

// Whether down writes the same results as combine, where each is one pair's alone.
static int same_placed(gpu_layer &g, const layer_case &c)
{
    std::vector<uint16_t> results[2];
    const stages unplaced = g.s;
    if (c.top_k != 1) return 1;
    for (int placed = 0; placed < 2; placed++) {
        results[placed].resize((size_t)c.tokens * c.hidden);
        write_16(g.s, placed != 0);
        run_layer(g, results[placed]);
    }
    g.s = unplaced;
    return memcmp(results[0].data(), results[1].data(), results[0].size() * 2) == 0;
}

static bool is_zero(const void *memory, size_t bytes)
{
    std::vector<char> got(bytes);
    CHECK(cudaMemcpy(got.data(), memory, bytes, cudaMemcpyDeviceToHost));
    return std::all_of(got.begin(), got.end(), [](char byte) { return byte == 0; });
}

// Whether blocks that do both tiles of a couple, as where there are no places for halves or too few, give the bits of two that do one each,
// and leave the places alone.
static int same_together(gpu_layer &g, const layer_case &c, const std::vector<float> &all)
{
    std::vector<float> together(all.size());
    const stages apart = g.s;
    void *few = apart.gemms.halves == NULL ? NULL : upload(std::vector<char>(apart.gemms.halves_places * GEMMS_HALVES_PLACE_BYTES));
    int same = 1;
    for (void *halves : {(void *)NULL, few}) {
        g.s.gemms.halves = halves;
        g.s.gemms.halves_places = c.skew != 2 && apart.gemms.halves_places > 4 ? 4 : 0; // skew 2: ids of no expert, so that 4 may do
        run_layer(g, together);
        same = same && memcmp(together.data(), all.data(), all.size() * 4) == 0;
    }
    same = same && (few == NULL || is_zero(few, apart.gemms.halves_places * GEMMS_HALVES_PLACE_BYTES));
    g.s = apart;
    cudaFree(few);
    return same;
}

// What the layer's numbers should be: by exact sums, and fp8 by those of the tensor core, whose roundings make another code of mid here
// and there.
struct expected {
    std::vector<float> exact, tensor_core;
    std::vector<int64_t> load; // rows of each expert
};

static int same_load(const gpu_layer &g, const expected &want, int runs)
{
    std::vector<int64_t> load(want.load.size());
    CHECK(cudaMemcpy(load.data(), g.load, load.size() * sizeof(int64_t), cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < load.size(); i++)
        if (load[i] != runs * want.load[i]) return 0;
    return 1;
}

// Whether a launch has left the half of mid that the next one writes cleared. Nobody would notice otherwise where the blocks of a launch
// run one after the other.
static int half_is_clear(const gpu_layer &g)
{
    const size_t words = (size_t)g.s.mid_words_count;
    return is_zero(g.s.mid_words, words * sizeof(uint32_t)) || is_zero(g.s.mid_words + words, words * sizeof(uint32_t));
}

// `coded_max`: the most that fp8 in one launch may be off, which has no twin with its own roundings: of a layer with few numbers between
// its products two or three that get the next code are 6e-3.
static int compare_launched(gpu_layer &g, const layer_case &c, const expected &want, bool at_once, double coded_max)
{
    std::vector<float> got((size_t)c.tokens * c.hidden), again(got.size());
    g.s.turns = at_once ? g.turns : NULL;
    g.s.load = at_once ? g.load : NULL;
    run_layer(g, got);
    run_layer(g, again);
    int load = !at_once || same_load(g, want, 2);
    double exact_error = relative_error(got, want.exact);
    double error = g.s.fp8 && !at_once ? relative_error(got, want.tensor_core) : exact_error;
    int bits = memcmp(got.data(), again.data(), got.size() * 4) == 0;
    int alone = same_alone(g, c, got, false) && same_alone(g, c, got, true);
    int moved = same_moved(g, c, got);
    int placed = at_once || same_placed(g, c);
    int together = at_once || !g.s.fp8 || same_together(g, c, got);
    int in_slabs = at_once ? same_in_slabs(g, c, got) : same_in_a_run(g, c, got);
    int ends = !at_once || c.skew != 0 || c.tokens != 1 || ends_without_mates(g, got); // where it takes least time
    int clear = !at_once || half_is_clear(g);
    // int4 becomes bf16 with its scales, which rounds every weight.
    double error_max = c.format == FORMAT_F16 ? 1e-3 : c.format == FORMAT_INT4_G32 ? 1e-2 : at_once && g.s.fp8 ? coded_max : 5e-3;
    int ok = error <= error_max && exact_error <= 5e-2 && bits && alone && moved && placed && together && in_slabs && ends && clear && load;
    printf("%s tokens %d hidden %d intermediate %d experts %d top-k %d order %d activation %d skew %d bias %d on-input %d rows-in %d format %d%s: error %.2e, of exact sums %.2e%s\n",
           ok ? "ok  " : "FAIL", c.tokens, c.hidden, c.intermediate, c.experts, c.top_k, c.order, c.activation, c.skew, c.bias,
           c.weight_on_input, c.rows_in, c.format, at_once ? " at once" : "", error, exact_error,
           !bits ? ", bits differ between runs"
           : !alone ? ", bits differ without the other tokens"
           : !moved ? ", bits differ where tokens have another place"
           : !placed ? ", bits differ where down writes the results"
           : !together ? ", bits differ where a block does both halves"
           : !in_slabs ? ", bits differ where tokens are in several slabs"
           : !ends ? ", a launch without some tiles leaves its mark"
           : !clear ? ", what blocks tell each other is not cleared"
           : !load ? ", the load of its experts is miscounted"
                     : "");
    fflush(stdout);
    return !ok;
}

static int compare(const layer_case &c, double coded_max)
{
    layer l;
    gpu_layer g;
    expected want;
    struct kernels twin = kernels_cpu;
    int failed;
    make(l, c);
    upload_layer(g, l);
    want.load.resize(c.experts);
    for (int32_t expert : l.ids)
        if (expert < c.experts) want.load[expert]++;
    run_cpu(l, kernels_cpu, want.exact);
    twin.gemms = tensor_core_gemms;
    if (g.s.fp8) run_cpu(l, twin, want.tensor_core);
    failed = compare_launched(g, c, want, false, coded_max);
    if (fits_one_launch(g)) failed += compare_launched(g, c, want, true, coded_max);
    free_layer(g);
    return failed;
}

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
    case 1: {
        // As in a layer: what the products need, and when it is there.
        int st = kernels_cuda.route(&s.route, stream);
        if (st == 0 && s.fp8) st = kernels_cuda.quantise(&s.quantise_x, stream);
        return st != 0 ? st : kernels_cuda.gemms(&s.gemms, stream);
    }
    case 2:
        return kernels_cuda.combine(&s.combine, stream);
    case 3:
        return kernels_cuda.quantise(&s.quantise_x, stream);
    case 4:
        return run_stages(&kernels_cuda, s, stream);
    default:
        return 0;
    }
}

struct bell {
    float *rings;
};

// A kernel of other work, before which nothing of the next launch begins.
static __global__ void ring(bell of)
{
    if (threadIdx.x == 0) *of.rings += 1.0f;
}

// Microseconds of one stage, alone in a graph of 8 of them; each behind a plain kernel where there is a bell.
static float time_stage(std::vector<gpu_layer> &g, int stage, cudaStream_t stream, const bell *plain = NULL)
{
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaEvent_t begin, end;
    std::vector<float> times;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < 8; i++) {
        if (plain != NULL) CHECK(launch(ring, {1, 32, 0, LAUNCH_AFTER}, stream, *plain));
        CHECK(run_stage(g[i % g.size()].s, stage, stream));
    }
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    for (int i = 0; i < 35; i++) {
        float ms;
        CHECK(cudaGraphLaunch(exec, stream)); // until the next one is enqueued
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

// A layer as a model has it, behind other work whose own time is taken off.
static float time_behind(std::vector<gpu_layer> &g, cudaStream_t stream)
{
    const bell plain = {poison<float>(1)};
    const float alone = time_stage(g, 5, stream, &plain), both = time_stage(g, 4, stream, &plain);
    CHECK(cudaFree(plain.rings));
    return both - alone;
}

// How many copies of its weights a graph of 8 layers goes through. It matters far past the L2's 60 MB: one token in fp8 takes 13.9 us where
// 76 MB take turns, 14.5 of 151, and 15.9 of 302.
static int copies_of(const layer_case &c)
{
    const int choices = c.tokens * c.top_k, hit = choices < c.experts ? choices : c.experts;
    const double touched_mb = hit * weight_bytes(c) * 3e-6 * c.hidden * c.intermediate, copies = 600 / touched_mb + 1;
    return copies < 2 ? 2 : copies > 8 ? 8 : (int)copies;
}

// Graph of layers over distinct copies of weights, so that little stays in the L2.
static void time_layer(const layer_case &c)
{
    layer l;
    const int copies = copies_of(c);
    double experts = 0; // with a row, of a layer
    std::vector<gpu_layer> g;
    cudaStream_t stream;
    make(l, c);
    g.resize(copies);
    for (int i = 0; i < copies; i++) {
        for (auto &id : l.ids)
            id = (int)(uniform() * c.experts);
        upload_layer(g[i], l, i == 0 ? NULL : &g[0]);
        experts += (double)std::set<int>(l.ids.begin(), l.ids.end()).size() / copies;
        write_16(g[i].s, c.top_k == 1);
    }
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    for (int i = 0; i < copies; i++)
        CHECK(run_stages(&kernels_cuda, g[i].s, stream));
    CHECK(cudaStreamSynchronize(stream));
    bool fp8 = is_fp8(c);
    double memory = experts * weight_bytes(c) * 3.0 * c.hidden * c.intermediate / 4.5e6;
    double flops = 6.0 * c.tokens * c.top_k * c.hidden * c.intermediate / (fp8 ? 1580e6 : 790e6);
    double floor_us = memory > flops ? memory : flops;
    float us = time_stage(g, 4, stream);
    printf("%5d/%5d/%3d/%d tokens %5d: %8.1f us, floor %8.1f, x %.2f; route %.1f %s %.1f combine %.1f", c.hidden,
           c.intermediate, c.experts, c.top_k, c.tokens, us, floor_us, us / floor_us, time_stage(g, 0, stream),
           fp8 ? "with quantise and gemms" : "with gemms", time_stage(g, 1, stream), time_stage(g, 2, stream));
    if (fp8) printf("; quantise %.1f", time_stage(g, 3, stream));
    if (fits_one_launch(g[0])) {
        printf("; behind a plain kernel %.1f", time_behind(g, stream));
        for (auto &one : g)
            one.s.turns = one.turns;
        printf("; at once %.1f, behind a plain kernel %.1f", time_stage(g, 4, stream), time_behind(g, stream));
    }
    printf("\n");
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
    static const int formats[] = {FORMAT_BF16,       FORMAT_F16,      FORMAT_FP8_BLOCK128, FORMAT_FP8_CHANNEL,
                                  FORMAT_FP8_TENSOR, FORMAT_INT4_G32, FORMAT_MXFP4,        FORMAT_NVFP4};
    layer_case c = {};
    c.format = formats[below(8)];
    int multiple = is_packed(c) ? 32 : is_fp8(c) ? 16 : 8;
    c.tokens = 1 + below(below(3) ? 40 : 400);
    if (!below(3)) c.tokens = 1 + below(8); // one launch
    c.hidden = multiple * (1 + below(800 / multiple));
    c.intermediate = multiple * (1 + below(480 / multiple));
    c.experts = 1 + below(below(3) ? 12 : 200);
    c.top_k = 1 + below(c.experts < 6 ? c.experts : 6);
    c.order = orders[below(4)];
    c.activation = c.order == ORDER_PLAIN ? ACTIVATION_RELU2 : gated[below(4)];
    c.skew = below(3);
    c.bias = below(2);
    c.weight_on_input = below(4) == 0;
    c.rows_in = c.format == FORMAT_BF16 || c.format == FORMAT_F16 ? below(2) : 0;
    c.one_scale = c.format == FORMAT_FP8_TENSOR || c.format == FORMAT_NVFP4 ? below(2) : 0;
    return c;
}

static const layer_case cases[] = {
    {1, 128, 64, 4, 1, ORDER_GATE_UP, ACTIVATION_SILU, 0, 0, 0, 0, FORMAT_BF16},
    {7, 256, 128, 8, 2, ORDER_GATE_UP, ACTIVATION_SILU, 0, 0, 0, 0, FORMAT_BF16},
    {33, 128, 64, 16, 4, ORDER_UP_GATE, ACTIVATION_SILU, 2, 1, 0, 0, FORMAT_BF16},
    {64, 512, 192, 8, 4, ORDER_INTERLEAVED, ACTIVATION_SWIGLUOAI, 0, 1, 0, 0, FORMAT_BF16},
    {100, 264, 72, 8, 2, ORDER_GATE_UP, ACTIVATION_GELU, 0, 1, 0, 0, FORMAT_BF16},
    {100, 264, 72, 8, 2, ORDER_GATE_UP, ACTIVATION_GELU_TANH, 0, 0, 0, 0, FORMAT_BF16},
    {150, 256, 144, 8, 2, ORDER_PLAIN, ACTIVATION_RELU2, 0, 1, 0, 0, FORMAT_BF16},
    {21, 2880, 1440, 4, 2, ORDER_INTERLEAVED, ACTIVATION_SWIGLUOAI, 0, 1, 0, 0, FORMAT_BF16},
    {23, 64, 128, 8, 1, ORDER_GATE_UP, ACTIVATION_SILU, 0, 0, 1, 0, FORMAT_BF16},
    {300, 256, 256, 4, 2, ORDER_GATE_UP, ACTIVATION_SILU, 1, 0, 0, 0, FORMAT_BF16},
    {300, 264, 136, 2, 1, ORDER_GATE_UP, ACTIVATION_SILU, 0, 1, 0, 0, FORMAT_BF16}, // five stages of up to 176 tokens
    {600, 512, 192, 128, 8, ORDER_GATE_UP, ACTIVATION_SILU, 2, 0, 0, 0, FORMAT_BF16},
    {1000, 128, 96, 1, 1, ORDER_GATE_UP, ACTIVATION_SILU, 0, 0, 0, 0, FORMAT_BF16},
    {1700, 264, 8, 12, 4, ORDER_GATE_UP, ACTIVATION_SILU, 0, 0, 0, 0, FORMAT_BF16}, // more results than warps: pairs are spent
    {40, 128, 64, 1024, 32, ORDER_GATE_UP, ACTIVATION_SILU, 0, 0, 0, 0, FORMAT_BF16},
    {8, 264, 72, 2, 4, ORDER_INTERLEAVED, ACTIVATION_SWIGLUOAI, 0, 1, 0, 0, FORMAT_BF16}, // few tokens, an expert for one more than once
    {9, 1416, 1480, 3, 1, ORDER_UP_GATE, ACTIVATION_SILU, 2, 1, 1, 0, FORMAT_BF16},       // two rounds of their stages
    {3, 72, 136, 8, 1, ORDER_PLAIN, ACTIVATION_RELU2, 0, 1, 0, 0, FORMAT_BF16},
    {1, 128, 64, 4, 1, ORDER_GATE_UP, ACTIVATION_SILU, 0, 0, 0, 1, FORMAT_BF16},
    {33, 128, 64, 16, 4, ORDER_UP_GATE, ACTIVATION_SILU, 2, 1, 0, 1, FORMAT_BF16},
    {64, 512, 192, 8, 4, ORDER_INTERLEAVED, ACTIVATION_SWIGLUOAI, 0, 1, 0, 1, FORMAT_BF16},
    {100, 264, 72, 8, 2, ORDER_INTERLEAVED, ACTIVATION_SILU, 0, 1, 1, 1, FORMAT_BF16},
    {100, 264, 72, 8, 2, ORDER_GATE_UP, ACTIVATION_GELU, 0, 1, 1, 1, FORMAT_BF16},
    {150, 256, 144, 8, 2, ORDER_PLAIN, ACTIVATION_RELU2, 0, 1, 0, 1, FORMAT_BF16},
    {57, 360, 360, 4, 2, ORDER_INTERLEAVED, ACTIVATION_SWIGLUOAI, 0, 1, 0, 1, FORMAT_BF16},
    {300, 256, 256, 4, 2, ORDER_GATE_UP, ACTIVATION_SILU, 1, 0, 0, 1, FORMAT_BF16},
    {1000, 128, 96, 1, 1, ORDER_INTERLEAVED, ACTIVATION_SILU, 0, 0, 0, 1, FORMAT_BF16},
    {90, 136, 72, 1, 1, ORDER_GATE_UP, ACTIVATION_SILU, 0, 1, 0, 1, FORMAT_BF16}, // 96, 192 and 224 columns, half of them a warpgroup's
    {185, 136, 72, 1, 1, ORDER_INTERLEAVED, ACTIVATION_SWIGLUOAI, 0, 1, 0, 1, FORMAT_BF16},
    {440, 136, 72, 1, 1, ORDER_PLAIN, ACTIVATION_RELU2, 0, 1, 0, 1, FORMAT_F16},
    {1, 256, 128, 4, 2, ORDER_GATE_UP, ACTIVATION_SILU, 0, 0, 0, 0, FORMAT_FP8_BLOCK128},
    {33, 384, 192, 8, 4, ORDER_UP_GATE, ACTIVATION_SILU, 2, 1, 0, 0, FORMAT_FP8_BLOCK128},
    {64, 400, 208, 8, 2, ORDER_INTERLEAVED, ACTIVATION_SWIGLUOAI, 0, 1, 0, 0, FORMAT_FP8_BLOCK128},
    {300, 256, 320, 4, 2, ORDER_GATE_UP, ACTIVATION_GELU_TANH, 1, 0, 0, 0, FORMAT_FP8_BLOCK128},
    {70, 512, 144, 16, 4, ORDER_PLAIN, ACTIVATION_RELU2, 0, 1, 0, 0, FORMAT_FP8_BLOCK128},
    {50, 256, 160, 8, 2, ORDER_GATE_UP, ACTIVATION_SILU, 0, 1, 0, 0, FORMAT_FP8_CHANNEL},
    {50, 256, 160, 8, 2, ORDER_INTERLEAVED, ACTIVATION_SILU, 0, 0, 0, 0, FORMAT_FP8_CHANNEL},
    {50, 256, 160, 8, 2, ORDER_UP_GATE, ACTIVATION_SILU, 0, 1, 0, 0, FORMAT_FP8_TENSOR},
    {9, 256, 160, 8, 1, ORDER_PLAIN, ACTIVATION_RELU2, 0, 0, 1, 0, FORMAT_FP8_TENSOR},
    {4, 64, 1088, 2, 1, ORDER_GATE_UP, ACTIVATION_SILU, 0, 0, 0, 0, FORMAT_BF16}, // two rounds of down's stages
    {2, 5184, 64, 3, 2, ORDER_GATE_UP, ACTIVATION_SILU, 0, 1, 0, 0, FORMAT_BF16}, // one launch: a tile has more stages than the ring
    {40, 64, 3200, 8, 1, ORDER_GATE_UP, ACTIVATION_SILU, 0, 0, 0, 0, FORMAT_BF16}, // early tiles on every SM
    {40, 64, 6400, 8, 1, ORDER_GATE_UP, ACTIVATION_SILU, 0, 0, 0, 0, FORMAT_FP8_BLOCK128},
    {200, 272, 320, 2, 1, ORDER_UP_GATE, ACTIVATION_SILU, 0, 1, 1, 0, FORMAT_FP8_BLOCK128},
    {190, 256, 160, 2, 1, ORDER_INTERLEAVED, ACTIVATION_SWIGLUOAI, 0, 1, 0, 0, FORMAT_FP8_CHANNEL},
    {230, 384, 144, 2, 1, ORDER_PLAIN, ACTIVATION_RELU2, 0, 1, 0, 0, FORMAT_FP8_CHANNEL},
    {400, 256, 160, 2, 1, ORDER_UP_GATE, ACTIVATION_SILU, 0, 0, 0, 0, FORMAT_FP8_TENSOR},
    {90, 264, 72, 4, 1, ORDER_GATE_UP, ACTIVATION_SILU, 2, 1, 0, 1, FORMAT_BF16}, // top-1: rows without an expert
    {150, 272, 144, 5, 1, ORDER_GATE_UP, ACTIVATION_SILU, 2, 1, 0, 0, FORMAT_FP8_BLOCK128},
    {400, 896, 128, 8, 1, ORDER_GATE_UP, ACTIVATION_SILU, 3, 0, 0, 0, FORMAT_FP8_BLOCK128}, // seven steps in turns, four stages
    {2320, 16, 144, 1, 1, ORDER_GATE_UP, ACTIVATION_SILU, 0, 0, 0, 0, FORMAT_FP8_CHANNEL}, // tiles of tokens in two groups
    {5200, 264, 200, 2, 1, ORDER_GATE_UP, ACTIVATION_SILU, 3, 0, 0, 0, FORMAT_BF16},
    {64, 1168, 128, 40, 4, ORDER_GATE_UP, ACTIVATION_SILU, 0, 0, 0, 0, FORMAT_FP8_BLOCK128}, // tiles of down in lots, and a part of one
    {90, 1416, 64, 24, 4, ORDER_GATE_UP, ACTIVATION_SILU, 0, 1, 0, 0, FORMAT_BF16},
    {5, 264, 136, 8, 2, ORDER_GATE_UP, ACTIVATION_SILU, 0, 1, 0, 0, FORMAT_F16},
    {40, 264, 136, 8, 2, ORDER_UP_GATE, ACTIVATION_GELU, 2, 0, 0, 0, FORMAT_F16},
    {200, 128, 96, 4, 1, ORDER_INTERLEAVED, ACTIVATION_SWIGLUOAI, 0, 1, 1, 0, FORMAT_F16},
    {40, 264, 136, 8, 2, ORDER_GATE_UP, ACTIVATION_SILU, 0, 1, 0, 1, FORMAT_F16},
    {40, 264, 136, 8, 2, ORDER_PLAIN, ACTIVATION_RELU2, 0, 1, 0, 1, FORMAT_F16},
    {2, 1096, 568, 3, 2, ORDER_UP_GATE, ACTIVATION_SILU, 2, 1, 1, 0, FORMAT_BF16}, // at once, as are all of few tokens: rows of several stages
    {20, 3072, 128, 4, 3, ORDER_GATE_UP, ACTIVATION_SILU, 2, 0, 0, 0, FORMAT_FP8_BLOCK128}, // scales of 24 groups, spread
    {2, 1040, 272, 3, 2, ORDER_INTERLEAVED, ACTIVATION_SWIGLUOAI, 0, 1, 0, 0, FORMAT_FP8_BLOCK128},
    {2, 400, 1168, 3, 2, ORDER_INTERLEAVED, ACTIVATION_SWIGLUOAI, 0, 1, 0, 0, FORMAT_FP8_BLOCK128},
    {5, 256, 160, 4, 2, ORDER_UP_GATE, ACTIVATION_SILU, 2, 1, 1, 0, FORMAT_FP8_TENSOR},
    {5, 256, 160, 4, 2, ORDER_UP_GATE, ACTIVATION_SILU, 2, 1, 0, 0, FORMAT_FP8_TENSOR, 1},
    {50, 256, 160, 8, 2, ORDER_GATE_UP, ACTIVATION_SILU, 0, 0, 0, 0, FORMAT_FP8_TENSOR, 1},
    {3, 384, 144, 2, 4, ORDER_PLAIN, ACTIVATION_RELU2, 0, 1, 0, 0, FORMAT_FP8_CHANNEL},
    {5, 136, 72, 200, 8, ORDER_GATE_UP, ACTIVATION_SILU, 0, 1, 0, 0, FORMAT_BF16}, // more choices than a warp has lanes, parts of down than sums
    {8, 136, 528, 1, 4, ORDER_UP_GATE, ACTIVATION_SILU, 0, 0, 0, 0, FORMAT_BF16}, // fewer stages than warps
    {1, 128, 64, 4, 2, ORDER_GATE_UP, ACTIVATION_SILU, 0, 0, 0, 0, FORMAT_MXFP4},
    {7, 288, 96, 8, 2, ORDER_INTERLEAVED, ACTIVATION_SWIGLUOAI, 0, 1, 0, 0, FORMAT_MXFP4}, // scales of 9 bytes a row, at any address
    {33, 1376, 96, 4, 2, ORDER_UP_GATE, ACTIVATION_GELU, 2, 1, 0, 0, FORMAT_MXFP4},
    {300, 256, 96, 2, 1, ORDER_PLAIN, ACTIVATION_RELU2, 0, 1, 1, 0, FORMAT_MXFP4},
    {11, 160, 96, 4, 2, ORDER_GATE_UP, ACTIVATION_SILU, 0, 0, 0, 0, FORMAT_MXFP4, 1}, // e8m0 codes of 22 to 24
    {90, 160, 96, 1, 1, ORDER_GATE_UP, ACTIVATION_SILU, 0, 0, 0, 0, FORMAT_MXFP4, 1},
    {11, 160, 96, 4, 2, ORDER_GATE_UP, ACTIVATION_SILU, 0, 0, 0, 0, FORMAT_MXFP4, 2}, // of 146 to 148
    {90, 160, 96, 1, 1, ORDER_GATE_UP, ACTIVATION_SILU, 0, 0, 0, 0, FORMAT_MXFP4, 2},
    {9, 352, 128, 4, 2, ORDER_UP_GATE, ACTIVATION_SILU, 0, 1, 0, 0, FORMAT_NVFP4},
    {70, 608, 96, 4, 2, ORDER_GATE_UP, ACTIVATION_GELU_TANH, 2, 0, 0, 0, FORMAT_NVFP4, 1},
    {100, 1312, 96, 128, 4, ORDER_INTERLEAVED, ACTIVATION_SWIGLUOAI, 0, 1, 0, 0, FORMAT_MXFP4}, // wide tiles, of few tokens
    {64, 512, 800, 128, 4, ORDER_GATE_UP, ACTIVATION_SILU, 0, 0, 0, 0, FORMAT_MXFP4},
    {100, 1312, 160, 128, 4, ORDER_GATE_UP, ACTIVATION_SILU, 1, 0, 0, 0, FORMAT_NVFP4}, // of 32, and of 25 to an expert
    {60, 1408, 160, 128, 4, ORDER_UP_GATE, ACTIVATION_SILU, 2, 0, 1, 0, FORMAT_NVFP4},
    {12, 1312, 96, 8, 4, ORDER_INTERLEAVED, ACTIVATION_SWIGLUOAI, 0, 1, 0, 0, FORMAT_MXFP4}, // the same where few tiles may be wide
    {12, 512, 800, 8, 4, ORDER_GATE_UP, ACTIVATION_SILU, 0, 0, 0, 0, FORMAT_MXFP4},
    {32, 1312, 96, 8, 4, ORDER_GATE_UP, ACTIVATION_SILU, 1, 0, 0, 0, FORMAT_NVFP4},
    {12, 1408, 96, 8, 4, ORDER_UP_GATE, ACTIVATION_SILU, 2, 0, 1, 0, FORMAT_NVFP4},
    {2, 2880, 96, 4, 2, ORDER_INTERLEAVED, ACTIVATION_SWIGLUOAI, 0, 1, 0, 0, FORMAT_MXFP4}, // one launch: outputs of 24 to a block, or 16
    {1, 4352, 32, 4, 2, ORDER_UP_GATE, ACTIVATION_SILU, 0, 0, 0, 0, FORMAT_NVFP4, 1},       // of 40, or 32
    {3, 160, 1056, 4, 2, ORDER_GATE_UP, ACTIVATION_SILU, 2, 1, 1, 0, FORMAT_NVFP4}, // and their parts two of each job
    {5, 320, 96, 4, 2, ORDER_UP_GATE, ACTIVATION_SILU, 0, 1, 0, 0, FORMAT_INT4_G32},
    {5, 160, 64, 200, 8, ORDER_PLAIN, ACTIVATION_RELU2, 0, 1, 0, 0, FORMAT_INT4_G32}, // more parts than sums
    {3, 96, 64, 8, 1, ORDER_GATE_UP, ACTIVATION_SILU, 0, 0, 0, 0, FORMAT_INT4_G32}, // scales in f32, bf16 and f16
    {40, 224, 96, 8, 4, ORDER_GATE_UP, ACTIVATION_SILU, 0, 1, 1, 0, FORMAT_INT4_G32},
    {150, 160, 96, 1, 1, ORDER_INTERLEAVED, ACTIVATION_SILU, 0, 0, 0, 0, FORMAT_INT4_G32},
    {100, 1312, 96, 128, 4, ORDER_INTERLEAVED, ACTIVATION_SWIGLUOAI, 0, 1, 0, 0, FORMAT_INT4_G32}, // wide tiles: scales in f16
    {64, 512, 800, 128, 4, ORDER_GATE_UP, ACTIVATION_SILU, 1, 0, 0, 0, FORMAT_INT4_G32}, // in bf16
    {60, 1344, 96, 128, 4, ORDER_UP_GATE, ACTIVATION_SILU, 2, 0, 1, 0, FORMAT_INT4_G32}, // in f32
    {12, 1312, 96, 8, 4, ORDER_INTERLEAVED, ACTIVATION_SWIGLUOAI, 0, 1, 0, 0, FORMAT_INT4_G32}, // the same where few tiles may be wide
    {12, 512, 800, 8, 4, ORDER_GATE_UP, ACTIVATION_SILU, 1, 0, 0, 0, FORMAT_INT4_G32},
    {12, 1344, 96, 8, 4, ORDER_UP_GATE, ACTIVATION_SILU, 2, 0, 1, 0, FORMAT_INT4_G32},
    {300, 1312, 160, 64, 4, ORDER_INTERLEAVED, ACTIVATION_SWIGLUOAI, 0, 1, 0, 0, FORMAT_MXFP4}, // wide tiles of up to 80 tokens
    {420, 1056, 160, 128, 5, ORDER_GATE_UP, ACTIVATION_SILU, 3, 0, 0, 0, FORMAT_NVFP4},
    {420, 288, 160, 128, 5, ORDER_UP_GATE, ACTIVATION_SILU, 2, 1, 0, 0, FORMAT_INT4_G32},
    {80, 160, 96, 8, 2, ORDER_GATE_UP, ACTIVATION_SILU, 1, 0, 0, 0, FORMAT_MXFP4}, // the same where few tiles may be wide
    {81, 288, 96, 8, 2, ORDER_INTERLEAVED, ACTIVATION_SWIGLUOAI, 1, 1, 0, 0, FORMAT_NVFP4},
    {20, 640, 96, 4, 4, ORDER_UP_GATE, ACTIVATION_SILU, 3, 0, 1, 0, FORMAT_INT4_G32}, // scales in f16
    {20, 576, 96, 4, 4, ORDER_GATE_UP, ACTIVATION_SILU, 0, 1, 0, 0, FORMAT_INT4_G32}, // in f32
    {100, 160, 96, 2, 1, ORDER_PLAIN, ACTIVATION_RELU2, 0, 1, 1, 0, FORMAT_NVFP4}, // tiles of 128 tokens
    {9, 128, 64, 0, 2, ORDER_GATE_UP, ACTIVATION_SILU, 2, 0, 0, 0, FORMAT_BF16}, // a rank that owns no expert
    {9, 128, 64, 0, 1, ORDER_GATE_UP, ACTIVATION_SILU, 2, 0, 0, 0, FORMAT_BF16},
    {90, 256, 128, 0, 2, ORDER_GATE_UP, ACTIVATION_SILU, 2, 0, 0, 0, FORMAT_FP8_BLOCK128},
};

// What --time's last word asks for, of sizes that stand before it.
static const struct {
    const char *word;
    int order, activation, bias, rows_in, format;
} timed[] = {
    {"bf16", ORDER_GATE_UP, ACTIVATION_SILU, 0, 0, FORMAT_BF16},
    {"fp8", ORDER_GATE_UP, ACTIVATION_SILU, 0, 0, FORMAT_FP8_BLOCK128},
    {"fp8_channel", ORDER_GATE_UP, ACTIVATION_SILU, 0, 0, FORMAT_FP8_CHANNEL},
    {"f16", ORDER_GATE_UP, ACTIVATION_SILU, 0, 0, FORMAT_F16},
    {"bf16_in", ORDER_GATE_UP, ACTIVATION_SILU, 0, 1, FORMAT_BF16},
    {"gpt_oss", ORDER_INTERLEAVED, ACTIVATION_SWIGLUOAI, 1, 1, FORMAT_BF16},
    {"mxfp4", ORDER_GATE_UP, ACTIVATION_SILU, 0, 0, FORMAT_MXFP4},
    {"nvfp4", ORDER_GATE_UP, ACTIVATION_SILU, 0, 0, FORMAT_NVFP4},
    {"int4", ORDER_GATE_UP, ACTIVATION_SILU, 0, 0, FORMAT_INT4_G32},
    {"gpt_oss_mxfp4", ORDER_INTERLEAVED, ACTIVATION_SWIGLUOAI, 1, 0, FORMAT_MXFP4},
};

static int time_named(int argc, char **argv)
{
    const char *word = argc > 7 ? argv[7] : "bf16";

    for (const auto &one : timed)
        if (argc <= 8 && strcmp(word, one.word) == 0) {
            time_layer({atoi(argv[2]), atoi(argv[3]), atoi(argv[4]), atoi(argv[5]), atoi(argv[6]), one.order, one.activation, 0, one.bias, 0,
                        one.rows_in, one.format});
            return 0;
        }
    fprintf(stderr, "%s: after --time TOKENS H I E K wanted is ", argv[argc - 1]);
    for (const auto &one : timed)
        fprintf(stderr, "%s%s", &one == timed ? "" : ", ", one.word);
    fprintf(stderr, " or nothing\n");
    return 1;
}

int main(int argc, char **argv)
{
    int failed = 0, tried = 0, devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) return 77;
    CHECK(kernels_cuda_load());
    if (argc > 6 && strcmp(argv[1], "--time") == 0) return time_named(argc, argv);
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
            failed += compare(random_case(), 2e-2);
        return failed != 0;
    }
    const bool is_part = argc > 3 && strcmp(argv[1], "--part") == 0;
    const int part = is_part ? atoi(argv[2]) : 0, parts = is_part ? std::max(atoi(argv[3]), 1) : 1;
    int place = 0;
    for (const layer_case &c : cases) {
        if (is_too_large(c) || place++ % parts != part) continue;
        failed += compare(c, 5e-3);
        tried++;
    }
    printf("%d of %d cases failed\n", failed, tried);
    return failed != 0 || tried == 0;
}
