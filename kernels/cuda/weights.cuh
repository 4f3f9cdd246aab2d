// What the products know of their weights: which of them have code, and the scales of fp8.

#ifndef MOXIE_KERNELS_CUDA_WEIGHTS_CUH
#define MOXIE_KERNELS_CUDA_WEIGHTS_CUH

#include "kernels/gemm.h"
#include "kernels/types.h"

#include <cuda_runtime.h>

// From INT4 on packed: weights of four bits, which are bf16 once they are in registers.
enum operand { OPERAND_BF16, OPERAND_F16, OPERAND_E4M3, OPERAND_INT4, OPERAND_MXFP4, OPERAND_NVFP4, OPERANDS };

// Of a weight in memory; 0 when there is no kernel.
static inline int32_t weight_bits_of(int32_t format)
{
    switch (format) {
    case FORMAT_BF16:
    case FORMAT_F16:
        return 16;
    case FORMAT_FP8_TENSOR:
    case FORMAT_FP8_CHANNEL:
    case FORMAT_FP8_BLOCK128:
        return 8;
    case FORMAT_INT4_G32:
    case FORMAT_MXFP4:
    case FORMAT_NVFP4:
        return 4;
    default:
        return 0;
    }
}

static inline bool is_packed(int32_t format)
{
    return weight_bits_of(format) == 4;
}

static inline operand operand_of(int32_t format)
{
    switch (format) {
    case FORMAT_BF16:
        return OPERAND_BF16;
    case FORMAT_F16:
        return OPERAND_F16;
    case FORMAT_INT4_G32:
        return OPERAND_INT4;
    case FORMAT_MXFP4:
        return OPERAND_MXFP4;
    case FORMAT_NVFP4:
        return OPERAND_NVFP4;
    default:
        return OPERAND_E4M3;
    }
}

// Of what is multiplied, with weights of the format.
static inline int32_t element_bytes_of(int32_t format)
{
    return weight_bits_of(format) == 8 ? 1 : 2;
}

// What tensor maps and 16-byte copies need.
static inline bool fits(const weight_view &view)
{
    int32_t bits = weight_bits_of(view.format);

    return bits != 0 && !(bits < 16 && view.rows_in) && view.block_offset == 0 && view.k * bits % 128 == 0 &&
           view.n % (view.order == ORDER_PLAIN ? 8 : 16) == 0 && view.row_stride_bytes % 16 == 0 &&
           view.expert_stride_bytes % 16 == 0 && reinterpret_cast<uintptr_t>(view.values) % 16 == 0;
}

// The formats that belong to those of the weights: what the products multiply, and mid and pair_out.
static inline bool formats_meet(const weight_view &view, int32_t operand, int32_t out)
{
    if (element_bytes_of(view.format) == 1) return operand == FORMAT_FP8 && out == FORMAT_BF16;
    if (is_packed(view.format)) return operand == FORMAT_BF16 && out == FORMAT_BF16;
    return operand == view.format && out == view.format;
}

// Whether there is code for a product's weights, with what it multiplies and makes.
static inline bool has_code(const gate_up_args &from)
{
    return fits(from.w1) && formats_meet(from.w1, from.operand_format, from.mid_format) &&
           (from.w1.order == ORDER_PLAIN) == (from.activation == ACTIVATION_RELU2);
}

static inline bool has_code(const down_args &from)
{
    return fits(from.w2) && formats_meet(from.w2, from.operand_format, from.pair_format);
}

// Scales of fp8 weights: by block of 128 x 128, by row, or one or two an expert. Of nvfp4, those by expert.
struct weight_scales {
    const float *scales;
    int64_t expert_stride; // floats
    int32_t row_stride;
    int32_t format;
    int32_t second_block; // block row of the half that lies second in w1
    int32_t halves;       // scales an expert, FORMAT_FP8_TENSOR and FORMAT_NVFP4
};

// Scales of packed weights, by row and group of inputs.
struct packed_scales {
    const unsigned char *scales;
    int64_t expert_stride_bytes, row_stride_bytes;
    int32_t scale_format; // FORMAT_INT4_G32: F32, BF16 or F16
    int32_t step_bytes;   // of a row, for 256 inputs
    int32_t row_bytes;    // for all
};

static inline weight_scales scales_of(const weight_view &view)
{
    if (view.format == FORMAT_NVFP4) return {view.globals, view.global_expert_stride_bytes / 4, 0, view.format, 0, view.global_stride};
    return {static_cast<const float *>(view.scales),
            view.scale_expert_stride_bytes / 4,
            static_cast<int32_t>(view.scale_row_stride_bytes / 4),
            view.format,
            static_cast<int32_t>((view.n / 2 + 127) / 128),
            view.global_stride};
}

static inline packed_scales packed_scales_of(const weight_view &view)
{
    const int32_t group = view.format == FORMAT_NVFP4 ? 16 : 32;
    const int32_t bytes = view.format != FORMAT_INT4_G32 ? 1 : view.scale_format == FORMAT_F32 ? 4 : 2;

    return {static_cast<const unsigned char *>(view.scales),
            view.scale_expert_stride_bytes,
            view.scale_row_stride_bytes,
            view.scale_format,
            256 / group * bytes,
            static_cast<int32_t>(view.k / group) * bytes};
}

#endif
