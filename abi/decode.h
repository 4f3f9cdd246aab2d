// The boundary: structs that a host passes become structs of the size this library was built with.
//
// What the rooms may rely on. Every struct they get is of the current size, its struct_size says
// so, fields that an older host does not know are zero, reserved fields are 0, and required
// pointers are there. The structs, nested ones and slabs included, are copies on the caller's
// stack, packed (slab_stride is sizeof(moxie_slab)), and gone when the call returns: a room copies
// what it keeps. Tensors keep pointing at the host's data, shape and strides; their meaning is the
// rooms' to check.
//
// Nothing here allocates.

#ifndef MOXIE_ABI_DECODE_H
#define MOXIE_ABI_DECODE_H

#include "plugin/status.h"

// As abi.h says. No struct comes near it: a larger struct_size is garbage, not a newer host.
#define DECODE_BYTES_MAX 4096

// A published struct, as decode_struct needs it.
struct decode_shape {
    const char *name;
    const char *list;  // the array that entries of it come in, "slabs"; NULL: it comes alone
    uint32_t v1_bytes; // the least a host may bring
    uint32_t bytes;    // what this library knows
    uint32_t reserved; // offset of a uint32_t that must be 0; 0: none
};

extern const struct decode_shape shape_request, shape_probe, shape_config_entry, shape_captured,
    shape_stats;

// Resets `error` (code, rank, text) and returns it; NULL when there is none, or when its
// struct_size cannot be one, so that the code is all the caller gets.
moxie_error *error_enter(moxie_error *error);

// Copies `from` over a zeroed `to` of shape->bytes. `what` names the argument in the error, with
// shape->list and `index` for an entry of an array.
int32_t decode_struct(void *to, const void *from, const struct decode_shape *shape,
                      const char *what, int64_t index, moxie_error *error);

// Copies the current struct `from` over the first bytes of `to`, as many as `to` declares. `to` has
// passed decode_struct.
void encode_struct(void *to, const void *from, const struct decode_shape *shape);

// An optional group of callbacks is complete or absent, required ones are there.
int32_t decode_host(moxie_host *to, const moxie_host *from, moxie_error *error);

// Stack room for a moxie_weights and what it points at.
struct decoded_weights {
    moxie_weights weights;
    moxie_matrix w1, w2;
};

int32_t decode_weights(struct decoded_weights *to, const moxie_weights *from, moxie_error *error);

// Stack room for a moxie_rows and its slabs.
struct decoded_rows {
    moxie_rows rows;
    moxie_slab slabs[MOXIE_RANKS_MAX];
};

int32_t decode_rows(struct decoded_rows *to, const moxie_rows *from, const char *what,
                    moxie_error *error);

int32_t decode_step(moxie_step *to, const moxie_step *from, moxie_error *error);
int32_t decode_batch(moxie_batch *to, const moxie_batch *from, moxie_error *error);
int32_t decode_call(moxie_call *to, const moxie_call *from, moxie_error *error);
int32_t decode_routing(moxie_routing *to, const moxie_routing *from, moxie_error *error);

#endif
