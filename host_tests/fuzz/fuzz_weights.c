// plugin/weights.c, and the scales' checks and the products behind it: matrices of any shape,
// stride, type and bytes, in every format, read by both GEMMs over rows of any bytes.

#include "kernels/cpu/cpu.h"
#include "kernels/kernels.h"
#include "plugin/weights_scales.h"

#include "host_tests/fuzz/tensors.h"

#include <string.h>

#define HIDDEN       32
#define INTERMEDIATE 32
#define EXPERTS      2
#define PAIRS        3

static void run_here(void *ctx, uint64_t tasks, void (*task)(void *arg, uint64_t index), void *arg)
{
    (void)ctx;
    for (uint64_t i = 0; i < tasks; i++)
        task(arg, i);
}

// ---- Matrices ----------------------------------------------------------------------------------

static enum type values_type(int32_t format)
{
    switch (format) {
    case FORMAT_F32:
        return F32;
    case FORMAT_BF16:
        return BF16;
    case FORMAT_F16:
        return F16;
    case FORMAT_FP8_TENSOR:
    case FORMAT_FP8_CHANNEL:
    case FORMAT_FP8_BLOCK128:
        return E4M3;
    default:
        return U8;
    }
}

static moxie_tensor take_scales(struct maker *maker, int32_t format, int64_t rows, int64_t columns,
                                int64_t halves)
{
    static const enum type floats[] = {F32, BF16, F16};
    const int64_t each[2] = {EXPERTS, halves};
    const int64_t block[3] = {EXPERTS, halves, 1};
    const int64_t channel[3] = {EXPERTS, rows, columns / (format == FORMAT_NVFP4 ? 16 : 32)};

    switch (format) {
    case FORMAT_FP8_TENSOR:
        return take_tensor(maker, each, 1 + (fuzz_u8(maker->input) & 1), F32);
    case FORMAT_FP8_CHANNEL:
        return take_tensor(maker, channel, 2, F32);
    case FORMAT_FP8_BLOCK128:
        return take_tensor(maker, block, 3, F32);
    case FORMAT_INT4_G32:
        return take_tensor(maker, channel, 3, floats[fuzz_below(maker->input, 3)]);
    case FORMAT_MXFP4:
        return take_tensor(maker, channel, 3, U8);
    case FORMAT_NVFP4:
        return take_tensor(maker, channel, 3, fuzz_u8(maker->input) < 128 ? E4M3 : U8);
    default:
        return fuzz_u8(maker->input) == 0xff ? take_tensor(maker, each, 1, F32) : no_tensor();
    }
}

static moxie_matrix take_matrix(struct maker *maker, int32_t format, int64_t rows, int64_t halves)
{
    static const enum type floats[] = {F32, BF16, F16};
    struct fuzz_input *input = maker->input;
    uint8_t form = fuzz_u8(input);
    int64_t columns = HIDDEN; // of either matrix
    int64_t values[3] = {EXPERTS, rows, format >= FORMAT_INT4_G32 ? columns / 2 : columns};
    const int64_t globals[2] = {EXPERTS, halves}, bias[2] = {EXPERTS, rows};
    moxie_matrix matrix = {.struct_size = sizeof matrix, .format = format};

    if ((form & 1) != 0) {
        matrix.orientation = MOXIE_ROWS_IN;
        values[1] = columns;
        values[2] = rows;
    }
    matrix.order = halves == 2 ? MOXIE_ORDER_GATE_UP + (form >> 1) % 3 : MOXIE_ORDER_PLAIN;
    if ((form & 0x70) == 0x70) {
        matrix.order = (int32_t)fuzz_i64(input);
        matrix.orientation = (int32_t)fuzz_i64(input);
        matrix.format = (int32_t)fuzz_below(input, FORMAT_COUNT + 1);
    }
    matrix.values = take_tensor(maker, values, 3, values_type(format));
    matrix.scales = take_scales(maker, format, rows, columns, halves);
    if (format == FORMAT_NVFP4 || fuzz_u8(input) == 0xff)
        matrix.global_scales = take_tensor(maker, globals, 1 + (form >> 7), F32);
    if ((form & 8) != 0) matrix.bias = take_tensor(maker, bias, 2, floats[fuzz_below(input, 3)]);
    return matrix;
}

// ---- Products ----------------------------------------------------------------------------------

// Offsets and rows as route would make them: both experts, one row of each slab more than once.
static const int32_t offsets[EXPERTS + 1] = {0, 2, PAIRS};
static const int32_t pair_rows[PAIRS] = {0, 1, 0};

static void multiply(struct fuzz_input *input, const struct limits *limits,
                     const struct layer_weights *weights)
{
    static _Alignas(64) unsigned char scratch[CPU_SCRATCH_BYTES];
    static const int32_t operands[] = {FORMAT_F32, FORMAT_BF16, FORMAT_F16, FORMAT_FP8,
                                       FORMAT_NVFP4};
    int32_t best = (int32_t)cpu_isa_best();
    struct cpu_stream stream = {.parallel_for = run_here,
                                .scratch = scratch,
                                .workers = 1,
                                .isa = (int32_t)fuzz_below(input, (uint32_t)best + 1)};
    const int64_t mid_bytes = (int64_t)INTERMEDIATE * 4, out_bytes = (int64_t)HIDDEN * 4;
    struct row_slab slab = {.rows = fuzz_taken(input, 2 * HIDDEN * 4),
                            .row_stride_bytes = (int64_t)HIDDEN * 4,
                            .cap = 2,
                            .format = FORMAT_F32};
    struct gate_up_args gate_up = {
        .slabs = &slab,
        .expert_offset = offsets,
        .pair_row = pair_rows,
        .pair_weight = fuzz_u8(input) < 128 ? NULL : fuzz_taken(input, PAIRS * sizeof(float)),
        .w1 = weights->w1,
        .mid = fuzz_place(PAIRS * (size_t)mid_bytes, 0),
        .mid_stride_bytes = mid_bytes,
        .mid_format = FORMAT_F32,
        .experts = EXPERTS,
        .slabs_count = 1,
        .rows_cap = 2,
        .hidden = HIDDEN,
        .intermediate = INTERMEDIATE,
        .activation = limits->activation,
        .operand_format = operands[fuzz_below(input, 5)],
        .alpha = 1.702f,
        .beta = 1.0f,
        .limit = (float)fuzz_below(input, 8),
    };
    struct down_args down = {
        .expert_offset = offsets,
        .mid = gate_up.mid,
        .mid_stride_bytes = mid_bytes,
        .w2 = weights->w2,
        .pair_out = fuzz_place(PAIRS * (size_t)out_bytes, 0),
        .pair_stride_bytes = out_bytes,
        .mid_format = FORMAT_F32,
        .pair_format = FORMAT_F32,
        .experts = EXPERTS,
        .operand_format = gate_up.operand_format,
    };

    PROPERTY(gate_up_cpu(&gate_up, &stream) == 0);
    PROPERTY(down_cpu(&down, &stream) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct fuzz_input input = {data, size};
    struct maker maker = {.input = &input};
    struct limits limits = {
        .hidden = HIDDEN, .intermediate = INTERMEDIATE, .experts_local = EXPERTS, .top_k = 1};
    struct layer_weights read;
    moxie_matrix w1, w2;
    moxie_weights weights = {.struct_size = sizeof weights, .w1 = &w1, .w2 = &w2};
    char text[128] = "";
    moxie_error error = {.struct_size = sizeof error, .text_bytes = sizeof text, .text = text};
    int64_t halves;
    int32_t st;
    uint8_t odd;

    fuzz_reset();
    // Often one tensor alone is odd: two that must both be let through are seldom.
    odd = fuzz_u8(&input);
    if (odd < 224) maker.plain = ~(1u << odd % 8);
    limits.weight_format = FORMAT_F32 + (int32_t)fuzz_below(&input, FORMAT_NVFP4);
    limits.activation = (int32_t)fuzz_below(&input, ACTIVATION_RELU2 + 1);
    halves = limits.activation == ACTIVATION_RELU2 ? 1 : 2;
    w1 = take_matrix(&maker, limits.weight_format, INTERMEDIATE * halves, halves);
    w2 = take_matrix(&maker, limits.weight_format, HIDDEN, 1);
    w1.block_offset = fuzz_u8(&input) < 192 ? 0 : (int32_t)fuzz_i64(&input);
    w2.block_offset = fuzz_u8(&input) < 240 ? w1.block_offset : (int32_t)fuzz_i64(&input);
    if (maker.absent && limits.weight_format >= FORMAT_MXFP4) return 0; // the scales are looked at
    st = weights_read(&weights, &limits, (moxie_device){MOXIE_DEVICE_CPU, 0}, &read, &error);
    if (st == MOXIE_OK) st = weights_check_scales(&read, 0, EXPERTS, &device_cpu, &error);
    PROPERTY(st >= MOXIE_OK && st < MOXIE_E_INTERNAL);
    PROPERTY(st == MOXIE_OK || (error.code == st && text[0] != '\0'));
    // The products cost most of an input's time, and those of right tensors are all alike.
    if (st == MOXIE_OK && !maker.absent && (maker.odd > 0 || (fuzz_u8(&input) & 7) == 0))
        multiply(&input, &limits, &read);
    return 0;
}
