// Shapes that every kernel shares. Plain C, no ABI and no plugin types: the machine floor knows
// neither. One args struct per kernel serves the CPU and CUDA; `stream` is a cudaStream_t there and
// a struct cpu_stream (kernels/cpu/cpu.h) here. Launchers return 0 or the device's error code.
//
// Words: a *row* is one token as it arrived from one source (its slab); a *pair* is one (row, local
// expert); pairs are ordered by expert, then slab, row and position in the top-k, so that every sum
// has a fixed order. Flat row = slab * rows_cap + row.

#ifndef MOXIE_KERNELS_TYPES_H
#define MOXIE_KERNELS_TYPES_H

#include <stdint.h>

#define KERNEL_RANKS_MAX 64
#define KERNEL_TOP_K_MAX 32

// What gemms counts in: so many words, and one for each local expert. That of GEMM_PROGRESS_LAUNCH
// tells a launch from those before it.
#define GEMM_PROGRESS_WORDS  3
#define GEMM_PROGRESS_LAUNCH 0
#define GEMM_PROGRESS_TAKEN  1 // tiles that blocks have begun: 0 before they may

// Values equal abi.h's MOXIE_FORMAT_*; plugin/weights.c asserts it.
enum format {
    FORMAT_AUTO,
    FORMAT_F32,
    FORMAT_BF16,
    FORMAT_F16,
    FORMAT_FP8_TENSOR,
    FORMAT_FP8_CHANNEL,
    FORMAT_FP8_BLOCK128,
    FORMAT_INT4_G32,
    FORMAT_MXFP4,
    FORMAT_NVFP4,
    FORMAT_FP8,
    FORMAT_COUNT
};

#define NVFP4_GROUP 16 // numbers of a scale

enum activation {
    ACTIVATION_SILU,
    ACTIVATION_GELU,
    ACTIVATION_GELU_TANH,
    ACTIVATION_SWIGLUOAI,
    ACTIVATION_RELU2
};

// Values equal abi.h's MOXIE_ORDER_*.
enum row_order { ORDER_PLAIN, ORDER_GATE_UP, ORDER_UP_GATE, ORDER_INTERLEAVED };

// What a source says of a round at each destination.
struct round_count {
    int32_t rows;  // that it has sent there
    int32_t round; // of its layer
};

// Rows of one source, as a dispatcher delivers them. Device memory; a peer may still own the pages,
// so whoever reads counts and ids does so once, and checks them.
struct row_slab {
    const void *rows;     // [cap, hidden] of `format`
    const void *scales;   // FP8_BLOCK128: f32 [cap, ceil(hidden/128)]; NVFP4: per row one f32, then
                          // e4m3 [hidden/16]; else NULL
    const void *ids;      // [cap, top_k] int32 or int64; NULL when the layout is by expert
    const void *weights;  // [cap, top_k] of `weight_format` (by expert: [cap]); NULL: 1
    const int32_t *count; // valid rows, 0..cap; NULL: cap
    int64_t row_stride_bytes;
    int64_t scale_stride_bytes;
    int64_t group_stride_bytes;        // FP8_BLOCK128: between the scales of a row; 0: 4
    int64_t scale_expert_stride_bytes; // between those of experts, where expert_rows is not 0
    int64_t id_stride_bytes;
    int64_t weight_stride_bytes;
    int32_t cap;
    int32_t expert_rows;   // by expert, with scales that do not follow the last expert's: its rows
    int32_t format;        // F32, BF16, F16, FP8_BLOCK128 or NVFP4
    int32_t id_bytes;      // 4 or 8
    int32_t weight_format; // F32, BF16 or F16
};

// Where result rows go: local memory, or a peer's window.
struct out_slab {
    void *rows;           // [cap, hidden] of `format`
    const int32_t *count; // rows to write; NULL: cap
    int64_t row_stride_bytes;
    int32_t cap;
    int32_t format; // F32, BF16 or F16
};

// One projection of all local experts: N outputs, K inputs. Layouts of scales as in abi.h's
// moxie_matrix. Borrowed from the host.
struct weight_view {
    const void *values;
    const void *scales; // f32 (fp8_*), f32/bf16/f16 (int4), e8m0 bytes (mxfp4), e4m3 bytes (nvfp4)
    const float *globals; // nvfp4: f32 [experts, global_stride]; gate then up where that is 2
    const void *bias;     // [experts, n] of bias_format, in the order of the rows; NULL: none
    int64_t n, k;         // n counts gate and up
    int64_t expert_stride_bytes, row_stride_bytes; // of values
    int64_t scale_expert_stride_bytes, scale_row_stride_bytes;
    int64_t global_expert_stride_bytes, bias_expert_stride_bytes;
    int32_t format;        // enum format
    int32_t order;         // enum row_order
    int32_t rows_in;       // 0: values [experts, n, k], 1: values [experts, k, n]
    int32_t scale_format;  // int4: F32, BF16 or F16
    int32_t bias_format;   // F32, BF16 or F16
    int32_t global_stride; // nvfp4 and fp8_tensor: scales per expert, 1 or 2
    int32_t block_offset;  // fp8_block128: 0..127, intermediate units that another shard owns
    int32_t reserved;
};

#endif
