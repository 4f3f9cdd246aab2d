// Token bounds: pure functions of the snapshot, 64-bit, every product checked.

#ifndef MOXIE_PLUGIN_BOUNDS_H
#define MOXIE_PLUGIN_BOUNDS_H

#include "plugin/config.h"

#define EXPERTS_MAX (1 << 20) // physical experts of a layer: what the router's kernels sort

// Units are in the names' comments. -1: not computable, the reason is in the report.
struct bounds {
    int64_t tokens_per_request;
    int64_t chunk;             // tokens of one prefill chunk, 0: chunking off
    int64_t prefill, decode;   // tokens, one DP rank, one forward
    int64_t derived_tokens;    // forward_tokens without forward_tokens_max
    int64_t forward_tokens;    // tokens, one DP rank, one forward
    int64_t attn_tp;           // ranks that share a DP rank's tokens
    int64_t dispatch_required; // tokens per source (EP) rank, one forward
    int64_t dispatch_tokens;   // tokens per source rank, one round
    int64_t allgather_rows;    // rows that all DP ranks bring together
    int64_t gather_rows;       // rows the all-gather buffers hold: max(allgather_rows, ep_size *
                               // dispatch_required)
    int64_t alltoall_rows;     // rows one rank may receive in a round
    int64_t capture_rows;      // rows
    int64_t physical_experts;  // ids
    int32_t dominant;          // enum config_key, or KEY_COUNT for "minimum"
};

// Computes what it can and reports why the rest cannot be: overflows, tp_size not divisible by
// dp_size.
void bounds_compute(struct bounds *bounds, const struct config *config, struct report *report);

// The physical experts: logical, redundant and fused shared ones; -1 where that is not known. More
// than `limit` are refused by the key that says most of them: the reason is `before`, what they
// are, `after`, and the advice.
int64_t bounds_experts(const struct config *config, int64_t limit, const char *before,
                       const char *after, struct report *report);

// "minimum" or the key's name.
const char *bounds_dominant(const struct bounds *bounds);
// The keys that forward_tokens is derived from in this disaggregation mode: "max_prefill_tokens,
// chunked_prefill_size, ...".
void bounds_list_keys(const struct config *config, char *buffer, uint64_t capacity);
// "forward_tokens = 4096: decode_graph_max_batch 512 x speculative_draft_tokens 8", for capacity
// errors and logs.
void bounds_explain(const struct bounds *bounds, const struct config *config, char *buffer,
                    uint64_t capacity);

// The most forward_tokens whose rows and pairs every dispatcher can still count in 32 bits, at
// least 1.
int64_t bounds_tokens_countable(const struct config *config);
// What brings forward_tokens down to `tokens`, to follow "set": "max_prefill_tokens to 4096 or
// less". Returns the key.
enum config_key bounds_advise(const struct bounds *bounds, const struct config *config,
                              int64_t tokens, char *buffer, uint64_t capacity);

// The contiguous split of physical experts over ranks: the first `experts % ranks` ranks own one
// more. Returns the first id of `rank`; rank == ranks gives `experts`.
int64_t experts_first(int64_t experts, int64_t ranks, int64_t rank);

#endif
