// What this library offers.

#include "plugin/backends.h"

#include "kernels/cpu/cpu.h"
#include "kernels/types.h"
#include "plugin/device.h"
#include "plugin/plan.h"

#include <stdio.h>
#include <string.h>

#define FORMAT_BITS_16    (BACKEND_BIT(FORMAT_BF16) | BACKEND_BIT(FORMAT_F16))
#define FORMAT_BITS_16_32 (BACKEND_BIT(FORMAT_F32) | FORMAT_BITS_16)
#define FORMAT_BITS_FP8                                                                            \
    (BACKEND_BIT(FORMAT_FP8_TENSOR) | BACKEND_BIT(FORMAT_FP8_CHANNEL) |                            \
     BACKEND_BIT(FORMAT_FP8_BLOCK128))
#define FORMAT_BITS_PACKED                                                                         \
    (BACKEND_BIT(FORMAT_INT4_G32) | BACKEND_BIT(FORMAT_MXFP4) | BACKEND_BIT(FORMAT_NVFP4))
#define WIRE_BITS_GPU (FORMAT_BITS_16 | BACKEND_BIT(FORMAT_FP8_BLOCK128))
#define WIRE_BITS     (BACKEND_BIT(FORMAT_F32) | WIRE_BITS_GPU | BACKEND_BIT(FORMAT_NVFP4))
#define ACTIVATION_BITS                                                                            \
    (BACKEND_BIT(ACTIVATION_SILU) | BACKEND_BIT(ACTIVATION_GELU) |                                 \
     BACKEND_BIT(ACTIVATION_GELU_TANH) | BACKEND_BIT(ACTIVATION_SWIGLUOAI) |                       \
     BACKEND_BIT(ACTIVATION_RELU2))

// Rows of whole 16 bytes; of f32, or gate and up, bytes in 32 bits; as many experts as route
// counts.
#define SIZES_GPU .row_multiple_bytes = 16, .columns_max = 1 << 28, .experts_max = 1024

// On CPUs rows may lie anywhere, but those of f32, and scales of f32, at multiples of 4. Traits
// have one alignment for all formats: were it 4, a dispatcher would have to refuse an x of 16 bits
// at an odd address, which it hands over as it is.
const moxie_traits traits_runner_cpu = {
    .struct_size = sizeof(moxie_traits),
    .layouts = MOXIE_LAYOUT_BIT(MOXIE_LAYOUT_STANDARD) | MOXIE_LAYOUT_BIT(MOXIE_LAYOUT_RANK_MAJOR) |
               MOXIE_LAYOUT_BIT(MOXIE_LAYOUT_EXPERT_CONTIGUOUS) |
               MOXIE_LAYOUT_BIT(MOXIE_LAYOUT_EXPERT_MASKED),
    .id_spaces = 1u << MOXIE_IDS_GLOBAL | 1u << MOXIE_IDS_PHYSICAL | 1u << MOXIE_IDS_LOCAL,
    .no_expert_id = -1,
    .weights_applied_by = MOXIE_BY_RUNNER,
    .scaling_applied_by = MOXIE_BY_RUNNER,
    .formats = WIRE_BITS,
    .graph = MOXIE_GRAPH_EAGER_ONLY,
    .row_align_bytes = 1,
};

// The input is passed through; with ep_size above 1 it is the same on every rank and the host sums.
const moxie_traits traits_local = {
    .struct_size = sizeof(moxie_traits),
    .layouts = MOXIE_LAYOUT_BIT(MOXIE_LAYOUT_STANDARD),
    .id_spaces = 1u << MOXIE_IDS_GLOBAL | 1u << MOXIE_IDS_PHYSICAL | 1u << MOXIE_IDS_LOCAL,
    .no_expert_id = -1,
    .weights_applied_by = MOXIE_BY_RUNNER,
    .scaling_applied_by = MOXIE_BY_RUNNER,
    .formats = FORMAT_BITS_16_32,
    .graph = MOXIE_GRAPH_EAGER_ONLY,
    .row_align_bytes = 1,
};

const moxie_traits traits_runner_cuda = {
    .struct_size = sizeof(moxie_traits),
    .layouts = MOXIE_LAYOUT_BIT(MOXIE_LAYOUT_STANDARD) | MOXIE_LAYOUT_BIT(MOXIE_LAYOUT_RANK_MAJOR) |
               MOXIE_LAYOUT_BIT(MOXIE_LAYOUT_EXPERT_CONTIGUOUS) |
               MOXIE_LAYOUT_BIT(MOXIE_LAYOUT_EXPERT_MASKED),
    .id_spaces = 1u << MOXIE_IDS_GLOBAL | 1u << MOXIE_IDS_PHYSICAL | 1u << MOXIE_IDS_LOCAL,
    .no_expert_id = -1,
    .weights_applied_by = MOXIE_BY_RUNNER,
    .scaling_applied_by = MOXIE_BY_RUNNER,
    .formats = WIRE_BITS_GPU,
    .graph = MOXIE_GRAPH_CAPTURABLE,
    .row_align_bytes = 16,
};

const moxie_traits traits_local_cuda = {
    .struct_size = sizeof(moxie_traits),
    .layouts = MOXIE_LAYOUT_BIT(MOXIE_LAYOUT_STANDARD),
    .id_spaces = 1u << MOXIE_IDS_GLOBAL | 1u << MOXIE_IDS_PHYSICAL | 1u << MOXIE_IDS_LOCAL,
    .no_expert_id = -1,
    .weights_applied_by = MOXIE_BY_RUNNER,
    .scaling_applied_by = MOXIE_BY_RUNNER,
    .formats = FORMAT_BITS_16,
    .graph = MOXIE_GRAPH_CAPTURABLE,
    .row_align_bytes = 16,
};

// A peer's rows lie in a window, 128 bytes apart or a multiple of that. A rank's own stay where the
// host has them, so every row is aligned no better than the batch's x must be.
const moxie_traits traits_push = {
    .struct_size = sizeof(moxie_traits),
    .layouts = MOXIE_LAYOUT_BIT(MOXIE_LAYOUT_RANK_MAJOR),
    .id_spaces = 1u << MOXIE_IDS_PHYSICAL,
    .no_expert_id = -1,
    .weights_applied_by = MOXIE_BY_RUNNER,
    .scaling_applied_by = MOXIE_BY_RUNNER,
    .output_is_reduced = 1,
    .formats = WIRE_BITS,
    .graph = MOXIE_GRAPH_EAGER_ONLY,
    .row_align_bytes = 1,
};

const moxie_traits traits_push_cuda = {
    .struct_size = sizeof(moxie_traits),
    .layouts = MOXIE_LAYOUT_BIT(MOXIE_LAYOUT_RANK_MAJOR),
    .id_spaces = 1u << MOXIE_IDS_PHYSICAL,
    .no_expert_id = -1,
    .weights_applied_by = MOXIE_BY_RUNNER,
    .scaling_applied_by = MOXIE_BY_RUNNER,
    .output_is_reduced = 1,
    .formats = WIRE_BITS_GPU,
    .graph = MOXIE_GRAPH_CAPTURABLE,
    .row_align_bytes = 16,
};

const struct backend backends[] = {
    {
        .name = "moxie_cpu",
        .device = "cpu",
        .traits = &traits_runner_cpu,
        .kind = BACKEND_RUNNER,
        .weight_formats = FORMAT_BITS_16_32 | FORMAT_BITS_FP8 | FORMAT_BITS_PACKED,
        .activation_formats =
            FORMAT_BITS_16_32 | BACKEND_BIT(FORMAT_FP8) | BACKEND_BIT(FORMAT_NVFP4),
        .input_formats = FORMAT_BITS_16_32,
        .output_formats = FORMAT_BITS_16_32,
        .wire_formats = WIRE_BITS,
        .activations = ACTIVATION_BITS,
        .columns_max = INT32_MAX,
    },
    {
        .name = "moxie_cuda",
        .device = "sm_90",
        .traits = &traits_runner_cuda,
        .kind = BACKEND_RUNNER,
        .weight_formats = FORMAT_BITS_16 | FORMAT_BITS_FP8 | FORMAT_BITS_PACKED,
        .activation_formats = FORMAT_BITS_16 | BACKEND_BIT(FORMAT_FP8),
        .input_formats = FORMAT_BITS_16,
        .output_formats = FORMAT_BITS_16_32,
        .wire_formats = WIRE_BITS_GPU,
        .activations = ACTIVATION_BITS,
        SIZES_GPU,
        .one_format = 1,
    },
    {.name = "local",
     .device = "cpu",
     .traits = &traits_local,
     .kind = BACKEND_DISPATCHER,
     .id = DISPATCHER_LOCAL,
     .input_formats = FORMAT_BITS_16_32,
     .output_formats = FORMAT_BITS_16_32,
     .wire_formats = WIRE_BITS},
    {.name = "allgather",
     .device = "cpu",
     .traits = &traits_push,
     .kind = BACKEND_DISPATCHER,
     .id = DISPATCHER_ALLGATHER,
     .input_formats = FORMAT_BITS_16_32,
     .output_formats = FORMAT_BITS_16_32,
     .wire_formats = WIRE_BITS},
    {.name = "alltoall",
     .device = "cpu",
     .traits = &traits_push,
     .kind = BACKEND_DISPATCHER,
     .id = DISPATCHER_ALLTOALL,
     .input_formats = FORMAT_BITS_16_32,
     .output_formats = FORMAT_BITS_16_32,
     .wire_formats = WIRE_BITS},
    {.name = "local",
     .device = "sm_90",
     .traits = &traits_local_cuda,
     .kind = BACKEND_DISPATCHER,
     .id = DISPATCHER_LOCAL,
     .input_formats = FORMAT_BITS_16,
     .output_formats = FORMAT_BITS_16_32,
     .wire_formats = FORMAT_BITS_16},
    {.name = "allgather",
     .device = "sm_90",
     .traits = &traits_push_cuda,
     .kind = BACKEND_DISPATCHER,
     .id = DISPATCHER_ALLGATHER,
     .input_formats = FORMAT_BITS_16,
     .output_formats = FORMAT_BITS_16_32,
     .wire_formats = WIRE_BITS_GPU},
    {.name = "alltoall",
     .device = "sm_90",
     .traits = &traits_push_cuda,
     .kind = BACKEND_DISPATCHER,
     .id = DISPATCHER_ALLTOALL,
     .input_formats = FORMAT_BITS_16,
     .output_formats = FORMAT_BITS_16_32,
     .wire_formats = WIRE_BITS_GPU},
};

const uint32_t backends_count = sizeof backends / sizeof backends[0];

// They may take every format: whether they do is between them and the host. What moves rows, and
// expands them, has sizes that it cannot do.
#define EVERY_FORMAT                                                                               \
    .kind = BACKEND_RUNNER, .weight_formats = UINT32_MAX, .activation_formats = UINT32_MAX,        \
    .input_formats = UINT32_MAX, .output_formats = UINT32_MAX, .wire_formats = UINT32_MAX,         \
    .activations = UINT32_MAX
static const struct backend own_runners[] = {
    {.name = BACKEND_RUNNER_NONE, .device = "cpu", EVERY_FORMAT, .columns_max = INT32_MAX},
    {.name = BACKEND_RUNNER_NONE, .device = "sm_90", EVERY_FORMAT, SIZES_GPU},
};

static const struct backend *find_in(const struct backend *rows, uint32_t count,
                                     enum backend_kind kind, const char *name, const char *device)
{
    for (uint32_t i = 0; i < count; i++) {
        if (rows[i].kind == (int32_t)kind && strcmp(rows[i].name, name) == 0 &&
            strcmp(rows[i].device, device) == 0)
            return &rows[i];
    }
    return NULL;
}

const struct backend *backend_find(enum backend_kind kind, const char *name, const char *device)
{
    const struct backend *found = find_in(backends, backends_count, kind, name, device);

    if (found != NULL) return found;
    return find_in(own_runners, sizeof own_runners / sizeof own_runners[0], kind, name, device);
}

int32_t backend_operand_format(int32_t weight_format)
{
    if ((BACKEND_BIT(weight_format) & FORMAT_BITS_FP8) != 0) return FORMAT_FP8;
    return weight_format == FORMAT_F16 ? FORMAT_F16 : FORMAT_BF16;
}

int32_t backend_weight_bits(int32_t weight_format)
{
    if ((BACKEND_BIT(weight_format) & FORMAT_BITS_PACKED) != 0) return 4;
    if ((BACKEND_BIT(weight_format) & FORMAT_BITS_FP8) != 0) return 8;
    return weight_format == FORMAT_F32 ? 32 : 16;
}

int32_t backend_probe(const struct backend *backend, char reason[160])
{
    static const char *const isa_names[] = {"scalar", "avx2", "avx512"};
    enum cpu_isa isa = cpu_isa_best();

    if (strcmp(backend->device, "cpu") != 0) return device_probe(backend->device, reason);
    if (backend->kind == BACKEND_DISPATCHER) {
        (void)snprintf(reason, 160,
                       "processes of one host over shared memory, or threads of one process");
        return 10;
    }
    (void)snprintf(reason, 160, "CPU kernels, %s instructions", isa_names[isa]);
    return 10 * (1 + (int32_t)isa);
}
