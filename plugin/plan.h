// The plan: limits that travel below (no key is known past this file), and every buffer with its
// reason. A pure function of the snapshot, the same on every machine and in every build.

#ifndef MOXIE_PLUGIN_PLAN_H
#define MOXIE_PLUGIN_PLAN_H

#include "plugin/bounds.h"

enum dispatcher_kind { DISPATCHER_LOCAL, DISPATCHER_ALLGATHER, DISPATCHER_ALLTOALL };

// Numbers that runner, dispatcher, forward and kernels work with. All within int32 where the type
// says so: validate refuses what is not.
struct limits {
    int64_t tokens_max;         // this rank's tokens in one dispatch() (a round)
    int64_t forward_tokens_max; // this rank's tokens in one forward()
    int64_t rows_cap;           // rows of one slab
    int64_t rows_max;           // rows of all slabs: what one run() may see
    int64_t pairs_max;          // rows_max * top_k
    int64_t experts_first;      // physical ids this rank owns
    int32_t hidden, intermediate, top_k, layers;
    int32_t physical_experts;
    int32_t experts_local;
    int32_t ranks, rank; // EP
    int32_t dp_size, attn_tp;
    int32_t slots; // forwards in flight
    int32_t threads;
    int32_t dispatcher; // enum dispatcher_kind
    int32_t computes;   // 0: the runner is the host's own. Then intermediate is 0, and nothing
                        // below is set that only Moxie's needs: mid, pairs, operands
    int32_t activation; // enum activation
    float alpha, beta, limit;
    float scaling_factor;
    int32_t weight_format, operand_format, input_format, output_format; // enum format
    int32_t mid_format, pair_format; // enum format: between the GEMMs, and of one row per pair
    int32_t wire_format;             // enum format: of pushed rows
    int32_t weight_on_input;         // router weights multiply the first product
    int32_t capture, expert_load;
    int32_t timeout_ms;   // clamped to INT32_MAX
    int32_t dispatch_sms; // of a GPU, that rows between ranks may take; 0: all
    int32_t staged; // 1: peers do not map windows; what goes to them is staged, and NCCL sends it
    int32_t x_fp8_groups, mid_fp8_groups; // of 128 numbers, where there are fp8_bytes of them
    int64_t capture_tokens;               // rows of one DP rank's slice of the capture, padding too
    int64_t row_bytes, scale_bytes, id_bytes, weight_bytes; // of one wire row, pitched
    int64_t result_bytes;                                   // of one result row, pitched
    int64_t mid_bytes, pair_bytes; // of one row of mid and pair_out, pitched
    int64_t x_woven_bytes; // of one row of x in the order in which a GPU decodes weights of 4 bits,
                           // pitched; of others 0
    // On a GPU with fp8 weights: of one row of x and of mid as e4m3, and of the scales of all pairs
    // for 128 of their numbers, pitched; else 0. There mid itself is nowhere: mid_bytes is 0.
    int64_t x_fp8_bytes, mid_fp8_bytes, fp8_group_bytes;
};

#define PLAN_ALIGN_BYTES 128 // of rows, slabs and pieces: what bulk copies on a GPU want

// Where everything lies inside a symmetric window, behind its control words (transport.h): one
// window per slot. Offsets from its base, in bytes. Slab of source s at destination d is index
// s < d ? s : s - 1 (a rank's own rows never enter a window).
struct window_layout {
    int64_t counts;                     // struct round_count [ranks - 1], 64 bytes apart
    int64_t state;                      // on a GPU: struct flag_state; own
    int64_t rows, scales, ids, weights; // dispatch slabs
    int64_t results;                    // combine slabs
    int64_t ll, ll_results;             // on a GPU: words of few rows and of their results (ll.h)
    int64_t rows_slab_bytes, scales_slab_bytes, ids_slab_bytes, weights_slab_bytes,
        results_slab_bytes, ll_slab_bytes, ll_results_slab_bytes;
    int64_t bytes;   // of the whole window
    int32_t ll_rows; // of a slab of words; 0: there are none
};

// What a buffer is for, so that its owner finds it.
enum buffer_id {
    BUFFER_EXPERT_OFFSET, // route: per slot
    BUFFER_GEMM_PROGRESS, // of the GEMMs' blocks: per slot
    BUFFER_GEMM_HALVES,   // what two of them have one each of: per slot
    BUFFER_LAYER_TURNS,   // of the blocks of whole layers: per slot
    BUFFER_LAYER_MID,     // what they tell each other: per slot
    BUFFER_PAIR_ROW,
    BUFFER_PAIR_WEIGHT,
    BUFFER_ROW_PAIR,
    BUFFER_ROUTE_SCRATCH, // where pair_out is not, which route works in else
    BUFFER_X_FP8,         // rows quantised, in the order of the pairs, per slot
    BUFFER_X_SCALES,
    BUFFER_X_WOVEN, // rows in the order in which weights of 4 bits are decoded, per slot
    BUFFER_MID,     // activations between the GEMMs, per slot
    BUFFER_MID_FP8, // the same quantised, per slot
    BUFFER_MID_SCALES,
    BUFFER_PAIR_OUT,    // one row per pair, per slot
    BUFFER_CPU_SCRATCH, // one piece per worker
    BUFFER_SEND_SLOT,   // dispatch: per slot
    BUFFER_OWN_IDS, // this rank's ids as physical ids int32 [tokens_max, top_k], and their weights
                    // f32: per slot
    BUFFER_OWN_WEIGHTS,
    BUFFER_FEW_IDS, // int32: how many rows each rank has [KERNEL_RANKS_MAX], then their ids where
                    // they are few [GEMMS_IDS_MAX]: per slot
    BUFFER_WINDOW,  // symmetric, per slot
    BUFFER_STAGING, // where rows are staged: laid out as a window, per slot
    BUFFER_REPORT,  // what waiting kernels tell the host: struct flag_report, and where rows are
                    // staged struct flag_state
    BUFFER_CAPTURE,
    BUFFER_EXPERT_LOAD,
    BUFFER_COUNT
};

// Buffers that are zero when they are made.
#define BUFFERS_ZERO (1u << BUFFER_GEMM_HALVES | 1u << BUFFER_LAYER_TURNS | 1u << BUFFER_LAYER_MID)

struct plan {
    struct limits limits;
    struct window_layout window;
    moxie_buffer buffers[BUFFER_COUNT]; // public rows, packed: the first buffers_count are in use
    int32_t buffer_ids[BUFFER_COUNT];   // enum buffer_id of each row
    int64_t slot_bytes[BUFFER_COUNT]; // by enum buffer_id: bytes of one slot's piece, 0: not needed
    uint64_t buffers_count;
    uint64_t device_bytes, symmetric_bytes, pinned_bytes, host_bytes; // sums of bytes_mapped
};

// For plan.c. 0 when a size passes 2^62.
int plan_window(struct window_layout *window, const struct limits *limits, int on_cpu);

// Rows of all slabs, which is what one run() may see: -1 when it cannot be computed or the
// dispatcher is unknown.
int64_t plan_rows_max(const struct config *config, const struct bounds *bounds);

// Fills `plan` from the snapshot; leaves it empty when the report has a reason against a key that
// sizes come from. A size that overflows becomes a reason and leaves no buffers.
void plan_make(struct plan *plan, const struct config *config, const struct bounds *bounds,
               struct report *report);

#endif
