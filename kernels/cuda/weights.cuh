// What the products know of their weights: which of them have code, and the scales of fp8.

#ifndef MOXIE_KERNELS_CUDA_WEIGHTS_CUH
#define MOXIE_KERNELS_CUDA_WEIGHTS_CUH

#include "kernels/gemm.h"
#include "kernels/types.h"

#include <cuda_runtime.h>

enum operand { OPERAND_BF16, OPERAND_F16, OPERAND_E4M3 };

static inline operand operand_of(int32_t format)
{
    return format == FORMAT_BF16 ? OPERAND_BF16 : format == FORMAT_F16 ? OPERAND_F16 : OPERAND_E4M3;
}

// 0 when there is no kernel.
static inline int32_t element_bytes_of(int32_t format)
{
    switch (format) {
    case FORMAT_BF16:
    case FORMAT_F16:
        return 2;
    case FORMAT_FP8_TENSOR:
    case FORMAT_FP8_CHANNEL:
    case FORMAT_FP8_BLOCK128:
        return 1;
    default:
        return 0;
    }
}

// What tensor maps and 16-byte copies need.
static inline bool fits(const weight_view &view)
{
    int32_t element_bytes = element_bytes_of(view.format);

    return element_bytes != 0 && !(element_bytes == 1 && view.rows_in) && view.block_offset == 0 && view.k * element_bytes % 16 == 0 &&
           view.n % (view.order == ORDER_PLAIN ? 8 : 16) == 0 && view.row_stride_bytes % 16 == 0 &&
           view.expert_stride_bytes % 16 == 0 && reinterpret_cast<uintptr_t>(view.values) % 16 == 0;
}

// The formats that belong to those of the weights: what the products multiply, and mid and pair_out.
static inline bool formats_meet(const weight_view &view, int32_t operand, int32_t out)
{
    if (element_bytes_of(view.format) == 1) return operand == FORMAT_FP8 && out == FORMAT_BF16;
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

// Scales of fp8 weights: by block of 128 x 128, by row, or one or two an expert.
struct weight_scales {
    const float *scales;
    int64_t expert_stride; // floats
    int32_t row_stride;
    int32_t format;
    int32_t second_block; // block row of the half that lies second in w1
    int32_t halves;       // scales an expert, FORMAT_FP8_TENSOR
};

static inline weight_scales scales_of(const weight_view &view)
{
    return {static_cast<const float *>(view.scales),
            view.scale_expert_stride_bytes / 4,
            static_cast<int32_t>(view.scale_row_stride_bytes / 4),
            view.format,
            static_cast<int32_t>((view.n / 2 + 127) / 128),
            view.global_stride};
}

#endif
