// The boundary: structs that a host passes become structs of the size this library was built with.

#include "abi/decode.h"

#include "abi/layout.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>

#define SHAPE(type)    .name = #type, .v1_bytes = V1_##type, .bytes = sizeof(type)
#define RESERVED(type) .reserved = offsetof(type, reserved0)

const struct decode_shape shape_request = {SHAPE(moxie_request), RESERVED(moxie_request)};
// The library fills these: what they hold on entry, reserved fields included, is not read.
const struct decode_shape shape_probe = {SHAPE(moxie_probe), .list = "entries"};
const struct decode_shape shape_config_entry = {SHAPE(moxie_config_entry)};
const struct decode_shape shape_captured = {SHAPE(moxie_captured)};
const struct decode_shape shape_stats = {SHAPE(moxie_stats)};

static const struct decode_shape shape_host = {SHAPE(moxie_host)};
static const struct decode_shape shape_step = {SHAPE(moxie_step)};
static const struct decode_shape shape_batch = {SHAPE(moxie_batch)};
static const struct decode_shape shape_call = {SHAPE(moxie_call), RESERVED(moxie_call)};
static const struct decode_shape shape_routing = {SHAPE(moxie_routing), RESERVED(moxie_routing)};
static const struct decode_shape shape_weights = {SHAPE(moxie_weights), RESERVED(moxie_weights)};
static const struct decode_shape shape_matrix = {SHAPE(moxie_matrix), RESERVED(moxie_matrix)};
static const struct decode_shape shape_rows = {SHAPE(moxie_rows), RESERVED(moxie_rows)};
static const struct decode_shape shape_slab = {SHAPE(moxie_slab), RESERVED(moxie_slab),
                                               .list = "slabs"};

// memcpy, because a host in another language may not align what it passes.
static uint32_t read_u32(const void *bytes, uint32_t offset)
{
    uint32_t value;

    memcpy(&value, (const unsigned char *)bytes + offset, sizeof value);
    return value;
}

moxie_error *error_enter(moxie_error *error)
{
    if (error == NULL || error->struct_size < V1_moxie_error ||
        error->struct_size > DECODE_BYTES_MAX)
        return NULL;
    error->code = MOXIE_OK;
    error->rank = -1;
    if (error->text != NULL && error->text_bytes > 0) error->text[0] = '\0';
    return error;
}

// "in.slabs[3]", or `what` alone.
static const char *print_place(char place[64], const struct decode_shape *shape, const char *what,
                               int64_t index)
{
    if (shape->list == NULL) return what;
    (void)snprintf(place, 64, "%s.%s[%lld]", what, shape->list, (long long)index);
    return place;
}

// The offset of the first byte of [begin, end) that is not zero; `end` when all are.
static uint32_t find_nonzero(const void *bytes, uint32_t begin, uint32_t end)
{
    const unsigned char *at = bytes;

    while (begin < end && at[begin] == 0)
        begin++;
    return begin;
}

int32_t decode_struct(void *to, const void *from, const struct decode_shape *shape,
                      const char *what, int64_t index, moxie_error *error)
{
    char place[64];
    uint32_t declared, known, tail;

    memset(to, 0, shape->bytes);
    if (from == NULL)
        return fail_with(error, MOXIE_E_INVALID, "%s is NULL; pass a %s",
                         print_place(place, shape, what, index), shape->name);
    declared = read_u32(from, 0);
    if (declared < shape->v1_bytes || declared > DECODE_BYTES_MAX)
        return fail_with(error, MOXIE_E_INVALID,
                         "%s: struct_size is %u, a %s has %u to %d bytes; set it to sizeof(%s)",
                         print_place(place, shape, what, index), declared, shape->name,
                         shape->v1_bytes, DECODE_BYTES_MAX, shape->name);
    tail = find_nonzero(from, shape->bytes, declared);
    if (tail < declared)
        return fail_with(error, MOXIE_E_UNSUPPORTED,
                         "%s: %s is not zero at offset %u, and this library knows %u bytes of it; "
                         "leave the newer field zero, or load a newer libmoxie",
                         print_place(place, shape, what, index), shape->name, tail, shape->bytes);
    known = declared < shape->bytes ? declared : shape->bytes;
    if (shape->reserved != 0 && read_u32(from, shape->reserved) != 0)
        return fail_with(error, MOXIE_E_INVALID,
                         "%s: the reserved field of %s at offset %u is not 0",
                         print_place(place, shape, what, index), shape->name, shape->reserved);
    memcpy(to, from, known);
    memcpy(to, &shape->bytes, sizeof shape->bytes);
    return MOXIE_OK;
}

// The size has passed decode_struct, and another thread of the host's may have written it since.
void encode_struct(void *to, const void *from, const struct decode_shape *shape)
{
    uint32_t declared = read_u32(to, 0);
    uint32_t known = declared < shape->bytes ? declared : shape->bytes;

    if (known < shape->v1_bytes) known = shape->v1_bytes;
    memcpy((unsigned char *)to + sizeof declared, (const unsigned char *)from + sizeof declared,
           known - sizeof declared);
}

int32_t decode_host(moxie_host *to, const moxie_host *from, moxie_error *error)
{
    int32_t st = MOXIE_OK;

    TRY(decode_struct(to, from, &shape_host, "host", 0, error));
    if (to->abi_version != MOXIE_ABI_VERSION)
        TRY(fail_with(error, MOXIE_E_VERSION,
                      "host.abi_version is %u.%u, and %u.%u was agreed; copy api->abi_version",
                      to->abi_version >> 16, to->abi_version & 0xffff, MOXIE_VERSION_MAJOR,
                      MOXIE_VERSION_MINOR));
    if (to->get_i64 == NULL || to->get_f64 == NULL || to->get_str == NULL)
        TRY(fail_with(error, MOXIE_E_INVALID, "host.get_i64, get_f64 and get_str: %s is NULL",
                      to->get_i64 == NULL   ? "get_i64"
                      : to->get_f64 == NULL ? "get_f64"
                                            : "get_str"));
    if (to->register_runner == NULL || to->register_dispatcher == NULL)
        TRY(fail_with(error, MOXIE_E_INVALID, "host.%s is NULL; the tables are handed over there",
                      to->register_runner == NULL ? "register_runner" : "register_dispatcher"));
    if ((to->allocate == NULL) != (to->release == NULL))
        TRY(fail_with(error, MOXIE_E_INVALID,
                      "host.allocate and host.release: set both or neither, %s is NULL",
                      to->allocate == NULL ? "allocate" : "release"));
    if ((to->all_gather == NULL) != (to->barrier == NULL))
        TRY(fail_with(error, MOXIE_E_INVALID,
                      "host.all_gather and host.barrier: set both or neither, %s is NULL",
                      to->all_gather == NULL ? "all_gather" : "barrier"));
out:
    return st;
}

// A field whose range the header fixes.
static int32_t check_range(int64_t value, int64_t least, int64_t most, const char *what,
                           const char *field, moxie_error *error)
{
    if (value >= least && value <= most) return MOXIE_OK;
    return fail_with(error, MOXIE_E_INVALID, "%s.%s is %lld, wants %lld..%lld", what, field,
                     (long long)value, (long long)least, (long long)most);
}

int32_t decode_weights(struct decoded_weights *to, const moxie_weights *from, moxie_error *error)
{
    int32_t st = MOXIE_OK;

    TRY(decode_struct(&to->weights, from, &shape_weights, "weights", 0, error));
    TRY(decode_struct(&to->w1, to->weights.w1, &shape_matrix, "weights.w1", 0, error));
    TRY(decode_struct(&to->w2, to->weights.w2, &shape_matrix, "weights.w2", 0, error));
    to->weights.w1 = &to->w1;
    to->weights.w2 = &to->w2;
out:
    return st;
}

static int32_t decode_slabs(struct decoded_rows *to, const char *what, moxie_error *error)
{
    const unsigned char *at = (const unsigned char *)to->rows.slabs;
    const uint32_t stride = to->rows.slab_stride;

    if (at == NULL)
        return fail_with(error, MOXIE_E_INVALID, "%s.slabs is NULL, and slabs_count is %u", what,
                         to->rows.slabs_count);
    for (uint32_t i = 0; i < to->rows.slabs_count; i++, at += stride) {
        int32_t st;

        if (read_u32(at, 0) > stride)
            return fail_with(error, MOXIE_E_INVALID,
                             "%s.slabs[%u]: struct_size is %u, and slab_stride only %u", what, i,
                             read_u32(at, 0), stride);
        st = decode_struct(&to->slabs[i], at, &shape_slab, what, i, error);
        if (st != MOXIE_OK) return st;
    }
    to->rows.slabs = to->slabs;
    to->rows.slab_stride = sizeof(moxie_slab);
    return MOXIE_OK;
}

int32_t decode_rows(struct decoded_rows *to, const moxie_rows *from, const char *what,
                    moxie_error *error)
{
    moxie_rows *rows = &to->rows;
    int32_t st = MOXIE_OK;

    TRY(decode_struct(rows, from, &shape_rows, what, 0, error));
    TRY(check_range(rows->layout, MOXIE_LAYOUT_STANDARD, MOXIE_LAYOUT_EXPERT_MASKED, what, "layout",
                    error));
    TRY(check_range(rows->id_space, MOXIE_IDS_GLOBAL, MOXIE_IDS_LOCAL, what, "id_space", error));
    TRY(check_range(rows->slabs_count, 1, MOXIE_RANKS_MAX, what, "slabs_count", error));
    TRY(check_range(rows->slab_stride, V1_moxie_slab, DECODE_BYTES_MAX, what, "slab_stride",
                    error));
    TRY(decode_slabs(to, what, error));
out:
    return st;
}

int32_t decode_step(moxie_step *to, const moxie_step *from, moxie_error *error)
{
    int32_t st = MOXIE_OK;

    TRY(decode_struct(to, from, &shape_step, "step", 0, error));
    TRY(check_range(to->slot, 0, MOXIE_SLOTS_MAX - 1, "step", "slot", error));
    TRY(check_range(to->tokens, 0, INT64_MAX, "step", "tokens", error));
    TRY(check_range(to->padding, MOXIE_PADDING_NONE, MOXIE_PADDING_SUM_LEN, "step", "padding",
                    error));
    TRY(check_range(to->phase, MOXIE_PHASE_MIXED, MOXIE_PHASE_IDLE, "step", "phase", error));
    TRY(check_range(to->capture_row, 0, INT64_MAX, "step", "capture_row", error));
out:
    return st;
}

int32_t decode_batch(moxie_batch *to, const moxie_batch *from, moxie_error *error)
{
    int32_t st = MOXIE_OK;

    TRY(decode_struct(to, from, &shape_batch, "batch", 0, error));
    TRY(check_range(to->slot, 0, MOXIE_SLOTS_MAX - 1, "batch", "slot", error));
    TRY(check_range(to->layer, 0, INT32_MAX, "batch", "layer", error));
    TRY(check_range(to->id_space, MOXIE_IDS_GLOBAL, MOXIE_IDS_LOCAL, "batch", "id_space", error));
out:
    return st;
}

int32_t decode_call(moxie_call *to, const moxie_call *from, moxie_error *error)
{
    int32_t st = MOXIE_OK;

    TRY(decode_struct(to, from, &shape_call, "call", 0, error));
    TRY(check_range(to->slot, 0, MOXIE_SLOTS_MAX - 1, "call", "slot", error));
    TRY(check_range(to->layer, 0, INT32_MAX, "call", "layer", error));
out:
    return st;
}

int32_t decode_routing(moxie_routing *to, const moxie_routing *from, moxie_error *error)
{
    int32_t st = MOXIE_OK;

    TRY(decode_struct(to, from, &shape_routing, "routing", 0, error));
    TRY(check_range(to->scoring, MOXIE_SCORING_SOFTMAX, MOXIE_SCORING_SIGMOID, "routing", "scoring",
                    error));
    TRY(check_range(to->renormalize, 0, 1, "routing", "renormalize", error));
out:
    return st;
}
