// What this library offers: every runner and dispatcher with its traits and the formats it has
// kernels for. Plain tables without a device, so that a laptop judges and plans for a machine it is
// not.

#ifndef MOXIE_PLUGIN_BACKENDS_H
#define MOXIE_PLUGIN_BACKENDS_H

#include "plugin/status.h"

enum backend_kind { BACKEND_RUNNER, BACKEND_DISPATCHER };

#define BACKEND_BIT(number) (1u << (number))

struct backend {
    const char *name;            // the word of the keys `runner` and `dispatcher`
    const char *device;          // the word of the key `device`
    const moxie_traits *traits;  // NULL: the host's own runner, of which nothing is known
    int32_t kind;                // enum backend_kind
    int32_t id;                  // dispatchers: enum dispatcher_kind
    uint32_t weight_formats;     // BACKEND_BIT(MOXIE_FORMAT_*) sets
    uint32_t activation_formats; // what the GEMMs can multiply
    uint32_t input_formats, output_formats;
    uint32_t wire_formats;      // bits of the rows' formats that it pushes, or takes
    uint32_t activations;       // BACKEND_BIT(enum activation)
    int32_t row_multiple_bytes; // runners: of a row of weights, hidden_size and intermediate_size
                                // long; 0: any
    int32_t columns_max;        // runners: hidden_size and intermediate_size
    int32_t experts_max;        // runners: that one rank can own; 0: any number
    int32_t one_format; // runners: x, the weights and the GEMMs' operands are of one format; with
                        // fp8 weights the operands are fp8, and x of 16 bits is quantised; with
                        // weights of 4 bits x and the operands are bf16
};

// By name, for the door's constant tables.
extern const moxie_traits traits_runner_cpu, traits_runner_cuda, traits_local, traits_local_cuda,
    traits_push, traits_push_cuda;

extern const struct backend backends[];
extern const uint32_t backends_count;

// The word for the host's own runner, on every device. It is no row of `backends`: nobody registers
// it, and `auto` never means it.
#define BACKEND_RUNNER_NONE "none"

// The backend of this kind, name and device word; NULL when there is none.
const struct backend *backend_find(enum backend_kind kind, const char *name, const char *device);

// What a one_format runner multiplies for weights of that format: FORMAT_FP8, _F16 or _BF16.
int32_t backend_operand_format(int32_t weight_format);

// Of a weight, without its scales: 4, 8, 16 or 32.
int32_t backend_weight_bits(int32_t weight_format);

// How well it would run on this machine: 0 cannot, higher is better. Always fills `reason` (160
// bytes). No side effects.
int32_t backend_probe(const struct backend *backend, char reason[160]);

#endif
