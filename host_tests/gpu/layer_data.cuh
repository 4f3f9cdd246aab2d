// A layer's sizes, and random data for it. Included by layer_case.cuh alone.

#ifndef MOXIE_HOST_TESTS_LAYER_DATA_CUH
#define MOXIE_HOST_TESTS_LAYER_DATA_CUH

extern "C" {
#include "kernels/cpu/numbers.h"
#include "kernels/types.h"
}

#include <math.h>

#include <vector>

static uint64_t seed_state = 88172645463325252ull;
static double uniform() // 0..1
{
    seed_state ^= seed_state << 13;
    seed_state ^= seed_state >> 7;
    seed_state ^= seed_state << 17;
    return (double)(seed_state >> 11) / 9007199254740992.0;
}

struct layer_case {
    // skew: 0 none, 1 all pairs are of the first top_k experts, 2 ids without an expert and a map, 3 half of the pairs are of the first
    // rows_in: weights are [E, K, N]
    // one_scale: of fp8 by tensor and of nvfp4, gate and up have one; of mxfp4, theirs are 1: as small, 2: as large as a GPU has them
    int tokens, hidden, intermediate, experts, top_k, order, activation, skew, bias, weight_on_input, rows_in, format, one_scale;
};

static bool is_fp8(const layer_case &c)
{
    return c.format == FORMAT_FP8_BLOCK128 || c.format == FORMAT_FP8_CHANNEL || c.format == FORMAT_FP8_TENSOR;
}

static bool is_packed(const layer_case &c)
{
    return c.format == FORMAT_INT4_G32 || c.format == FORMAT_MXFP4 || c.format == FORMAT_NVFP4;
}

static double weight_bytes(const layer_case &c)
{
    return is_fp8(c) ? 1 : !is_packed(c) ? 2 : c.format == FORMAT_MXFP4 ? 17.0 / 32 : 9.0 / 16;
}

// Of x, biases and results, and of weights of 16 bits.
static int format_16(const layer_case &c)
{
    return c.format == FORMAT_F16 ? FORMAT_F16 : FORMAT_BF16;
}

struct layer {
    layer_case shape;
    std::vector<uint16_t> x, w1, w2, b1, b2;
    std::vector<uint8_t> q1, q2; // weights of fewer than 16 bits
    std::vector<float> s1, s2;   // and their scales; of nvfp4, those of experts
    std::vector<uint8_t> p1, p2; // scales by group of packed ones
    std::vector<int32_t> ids;
    std::vector<float> weights;
};

const size_t drawn_most = (1 << 20) - 3; // numbers that are drawn, and then used again

static void fill(std::vector<uint16_t> &to, size_t count, float scale, int format)
{
    to.resize(count);
    for (size_t i = 0; i < count && i < drawn_most; i++) {
        const float value = (float)(uniform() * 2 - 1) * scale;
        numbers_encode(format, &value, 1, &to[i]);
    }
    for (size_t i = drawn_most; i < count; i++)
        to[i] = to[i - drawn_most];
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

// By size, so that all are had.
static int scale_format_of(const layer_case &c)
{
    return c.hidden / 32 % 3 == 0 ? FORMAT_F32 : c.hidden / 32 % 3 == 1 ? FORMAT_BF16 : FORMAT_F16;
}

// Of a weight row, bytes of scales.
static int64_t packed_scales_bytes(const layer_case &c, int columns)
{
    if (c.format == FORMAT_NVFP4) return columns / 16;
    return columns / 32 * (c.format == FORMAT_MXFP4 ? 1 : scale_format_of(c) == FORMAT_F32 ? 4 : 2);
}

// Any codes, and any scales that make numbers of the size that 16 bits have above.
static void pack_weights(const layer_case &c, int64_t rows, int columns, int halves, std::vector<uint8_t> &codes, std::vector<uint8_t> &scales,
                         std::vector<float> &globals)
{
    const double size = 1.0 / sqrt((double)columns) / 2.5;
    const int bytes = c.format != FORMAT_INT4_G32 ? 1 : scale_format_of(c) == FORMAT_F32 ? 4 : 2;

    codes.resize((size_t)(rows * columns / 2));
    for (size_t i = 0; i < codes.size(); i++)
        codes[i] = i < drawn_most ? (uint8_t)(uniform() * 256) : codes[i - drawn_most];
    scales.resize((size_t)(rows * packed_scales_bytes(c, columns)));
    for (size_t i = 0; i < scales.size(); i += bytes) {
        const float scale = (float)(size * (0.5 + uniform()) / (c.format == FORMAT_INT4_G32 ? 2 : 1));

        if (c.format == FORMAT_MXFP4)
            scales[i] = (uint8_t)(127 + lrint(log2(size) + uniform() * 2 - 1));
        else if (c.format == FORMAT_NVFP4)
            scales[i] = (uint8_t)(0x40 + (int)(uniform() * 0x20) + (uniform() < 0.1) * 0x80); // 2 to 30, now and then below 0
        else
            numbers_encode(scale_format_of(c), &scale, 1, &scales[i]);
    }
    globals.resize(c.format == FORMAT_NVFP4 ? (size_t)c.experts * halves : 0);
    for (auto &global : globals)
        global = (float)(size * (0.5 + uniform()) / 12);
}

static void make(layer &l, const layer_case &c)
{
    int rows = c.order == ORDER_PLAIN ? c.intermediate : 2 * c.intermediate;
    l.shape = c;
    const int down = c.format != FORMAT_MXFP4 || c.one_scale == 0 ? 0 : c.one_scale == 1 ? 99 : -25;
    fill(l.x, (size_t)c.tokens * c.hidden, ldexpf(1.0f, down), format_16(c));
    if (!is_packed(c)) fill(l.w1, (size_t)c.experts * rows * c.hidden, 1.7f / sqrtf((float)c.hidden), format_16(c));
    if (!is_packed(c)) fill(l.w2, (size_t)c.experts * c.hidden * c.intermediate, 1.7f / sqrtf((float)c.intermediate), format_16(c));
    fill(l.b1, (size_t)c.experts * rows, 0.5f, format_16(c));
    fill(l.b2, (size_t)c.experts * c.hidden, 0.5f, format_16(c));
    if (is_fp8(c)) {
        quantise_weights(l.w1, c.experts, rows, c.hidden, c.order == ORDER_PLAIN ? 1 : 2, c.format, l.q1, l.s1);
        quantise_weights(l.w2, c.experts, c.hidden, c.intermediate, 1, c.format, l.q2, l.s2);
    }
    if (is_packed(c)) {
        pack_weights(c, (int64_t)c.experts * rows, c.hidden, c.one_scale || c.order == ORDER_PLAIN ? 1 : 2, l.q1, l.p1, l.s1);
        pack_weights(c, (int64_t)c.experts * c.hidden, c.intermediate, 1, l.q2, l.p2, l.s2);
        for (auto &code : l.p1)
            code = (uint8_t)(code - down);
    }
    l.ids.resize((size_t)c.tokens * c.top_k);
    l.weights.resize(l.ids.size());
    for (size_t i = 0; i < l.ids.size(); i++) {
        l.ids[i] = c.skew == 3 && i % 2 ? 0 : c.skew == 1 ? (int)(i % c.top_k) : (int)(uniform() * (c.experts + (c.skew == 2 ? 3 : 0)));
        l.weights[i] = (float)uniform();
    }
}

#endif
