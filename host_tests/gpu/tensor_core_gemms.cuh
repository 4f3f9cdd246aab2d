// gemms of fp8 on the CPU with the sums of the tensor core: kernels_cpu's but for the roundings of 128 inputs, which decide between two
// codes of mid. Included by layer_case.cuh alone.

#ifndef MOXIE_HOST_TESTS_TENSOR_CORE_GEMMS_CUH
#define MOXIE_HOST_TESTS_TENSOR_CORE_GEMMS_CUH

extern "C" {
#include "kernels/cpu/activation.h"
#include "kernels/cpu/numbers.h"
#include "kernels/cpu/rows.h"
#include "kernels/cpu/weights.h"
}
#include "host_tests/tensor_core.h"
#include "kernels/kernels.h"

#include <math.h>

#include <algorithm>
#include <vector>

namespace {

// Rows of e4m3 by pair, with a scale for each 128 inputs.
struct e4m3_rows {
    const void *values, *scales;
    int64_t row_bytes, scale_bytes, group_bytes; // between them
};

// Codes along k, by TENSOR_CORE_TERMS.
std::vector<tensor_core_factors> factors_of(const float *row, int64_t k)
{
    std::vector<tensor_core_factors> to((k + TENSOR_CORE_TERMS - 1) / TENSOR_CORE_TERMS);

    for (size_t i = 0; i < to.size(); i++)
        tensor_core_read(row + i * TENSOR_CORE_TERMS, 1,
                         (int32_t)std::min<int64_t>(k - (int64_t)i * TENSOR_CORE_TERMS, TENSOR_CORE_TERMS), &to[i]);
    return to;
}

// The weights of units of one expert, as the tensor core and the sums after it want them.
struct e4m3_weights {
    std::vector<std::vector<tensor_core_factors>> units;
    std::vector<float> scales, factor, bias; // scales [units, groups of 128]
};

e4m3_weights read_weights(const weight_view &view, const weight_half &half, int64_t expert, int64_t units)
{
    const int64_t groups = (view.k + 127) / 128;
    weight_view codes = view; // whose rows are decoded without scales
    std::vector<float> row(view.k), scratch(PANEL_COLUMNS * PANEL_K);
    e4m3_weights to;

    codes.format = FORMAT_FP8_CHANNEL;
    to.scales.assign(units * groups, 1.0f);
    to.factor.resize(units);
    to.bias.resize(units);
    for (int64_t unit = 0; unit < units; unit++) {
        const unsigned char *scales = (const unsigned char *)view.scales + expert * view.scale_expert_stride_bytes +
                                      (half.block_first + unit / 128) * view.scale_row_stride_bytes;
        float factor[PANEL_COLUMNS], bias[PANEL_COLUMNS];
        panel of = {&codes, half, expert, unit, 1, 0, 0};

        for (of.k = 0; of.k < view.k; of.k += PANEL_K) {
            int64_t stride;

            of.k_count = std::min<int64_t>(view.k - of.k, PANEL_K);
            const float *from = panel_load(&of, &cpu_ops_scalar, scratch.data(), &stride);
            std::copy(from, from + of.k_count, row.begin() + of.k);
        }
        for (int64_t group = 0; group < groups && view.format == FORMAT_FP8_BLOCK128; group++)
            to.scales[unit * groups + group] = number_load(FORMAT_F32, scales, group);
        of.view = &view;
        panel_finish(&of, factor, bias);
        to.factor[unit] = factor[0];
        to.bias[unit] = bias[0];
        to.units.push_back(factors_of(row.data(), view.k));
    }
    return to;
}

// A pair's row, and its scale for each 128 inputs.
struct e4m3_row {
    std::vector<tensor_core_factors> factors;
    std::vector<float> scales;
};

e4m3_row read_row(const e4m3_rows &rows, int64_t pair, int64_t k)
{
    const unsigned char *values = (const unsigned char *)rows.values + pair * rows.row_bytes;
    const unsigned char *scales = (const unsigned char *)rows.scales + pair * rows.scale_bytes;
    std::vector<float> row(k);
    e4m3_row to;

    for (int64_t i = 0; i < k; i++)
        row[i] = e4m3_decode(values[i]);
    to.factors = factors_of(row.data(), k);
    for (int64_t group = 0; group < (k + 127) / 128; group++)
        to.scales.push_back(number_load(FORMAT_F32, scales + group * rows.group_bytes, 0));
    return to;
}

// A row times all units: 128 inputs in the tensor core, then f32 with the scales of both.
std::vector<float> multiply_row(const e4m3_row &row, const e4m3_weights &weights, float weight)
{
    const size_t groups = row.scales.size(), parts = 128 / TENSOR_CORE_TERMS;
    std::vector<float> sums(weights.units.size());

    for (size_t unit = 0; unit < sums.size(); unit++) {
        float sum = 0.0f;

        for (size_t group = 0; group < groups; group++) {
            float part = 0.0f;

            for (size_t i = group * parts; i < std::min(row.factors.size(), (group + 1) * parts); i++)
                part = tensor_core_sum(&row.factors[i], &weights.units[unit][i], part);
            sum = fmaf(part, row.scales[group] * weights.scales[unit * groups + group], sum);
        }
        sums[unit] = sum * weights.factor[unit] * weight + weights.bias[unit];
    }
    return sums;
}

void gate_up_e4m3(const gate_up_args &args, int64_t expert)
{
    const row_slab &slab = args.slabs[0];
    const e4m3_rows rows = {slab.rows, slab.scales, slab.row_stride_bytes, slab.scale_stride_bytes, slab.group_stride_bytes};
    const activation_args activation = {args.activation, args.alpha, args.beta, args.limit};
    const bool gated = args.w1.order != ORDER_PLAIN;
    const e4m3_weights gate = read_weights(args.w1, w1_half(&args.w1, args.intermediate, 0), expert, args.intermediate);
    const e4m3_weights up = gated ? read_weights(args.w1, w1_half(&args.w1, args.intermediate, 1), expert, args.intermediate) : e4m3_weights{};

    for (int64_t pair = args.expert_offset[expert]; pair < args.expert_offset[expert + 1]; pair++) {
        const float weight = args.pair_weight != NULL ? args.pair_weight[pair] : 1.0f;
        const e4m3_row row = read_row(rows, pair, args.hidden);
        std::vector<float> gates = multiply_row(row, gate, weight), ups = multiply_row(row, up, weight);

        activation_apply(&activation, &cpu_ops_scalar, gates.data(), gated ? ups.data() : NULL, args.intermediate);
        numbers_encode(args.mid_format, gates.data(), args.intermediate, (unsigned char *)args.mid + pair * args.mid_stride_bytes);
    }
}

void down_e4m3(const down_args &args, int64_t expert)
{
    const e4m3_rows rows = {args.mid, args.mid_scales, args.mid_stride_bytes, args.mid_scale_stride_bytes, args.mid_group_stride_bytes};
    const e4m3_weights weights = read_weights(args.w2, w2_half(&args.w2), expert, args.w2.n);

    for (int64_t pair = args.expert_offset[expert]; pair < args.expert_offset[expert + 1]; pair++) {
        std::vector<float> sums = multiply_row(read_row(rows, pair, args.w2.k), weights, 1.0f);

        numbers_encode(args.pair_format, sums.data(), args.w2.n, (unsigned char *)args.pair_out + pair * args.pair_stride_bytes);
    }
}

// The entry of a table; rows by pair, as quantise leaves them.
int32_t tensor_core_gemms(const gemms_args *args, void *stream)
{
    for (int64_t expert = 0; expert < args->gate_up.experts; expert++)
        gate_up_e4m3(args->gate_up, expert);
    int32_t st = kernels_cpu.quantise(&args->quantise, stream);
    for (int64_t expert = 0; expert < args->gate_up.experts && st == 0; expert++)
        down_e4m3(args->down, expert);
    return st;
}

} // namespace

#endif
