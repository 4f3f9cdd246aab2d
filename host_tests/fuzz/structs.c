// The structs of abi.h as hosts that get everything wrong would pass them.

#include "host_tests/fuzz/structs.h"

#include "abi/decode.h"
#include "abi/layout.h"

#include <string.h>

void *take_struct(struct fuzz_input *input, uint32_t bytes)
{
    uint8_t form = fuzz_u8(input);
    uint32_t declared = bytes, there = sizeof declared;
    unsigned char *at;

    if (form == 0xff) return NULL;
    if ((form & 3) == 1) declared = bytes + fuzz_u8(input);
    if ((form & 3) == 2) declared = bytes - fuzz_below(input, bytes);
    if ((form & 3) == 3) declared = fuzz_u32(input);
    if (declared >= sizeof declared && declared <= DECODE_BYTES_MAX) there = declared;
    at = fuzz_place(there, form >> 2 & 7);
    memset(at, 0, there);
    fuzz_bytes(input, at, there < bytes ? there : bytes);
    if ((form & 0x20) != 0) at[there - 1] = fuzz_u8(input);
    memcpy(at, &declared, sizeof declared);
    return at;
}

void set_field(void *at, size_t offset, const void *value, size_t bytes)
{
    uint32_t declared;

    if (at == NULL) return;
    memcpy(&declared, at, sizeof declared);
    if (declared > DECODE_BYTES_MAX || declared < offset + bytes) return;
    memcpy((unsigned char *)at + offset, value, bytes);
}

void set_pointer(void *at, size_t offset, const void *pointer)
{
    set_field(at, offset, &pointer, sizeof pointer);
}

void set_i32(void *at, size_t offset, int32_t value)
{
    set_field(at, offset, &value, sizeof value);
}

moxie_rows *take_rows(struct fuzz_input *input)
{
    moxie_rows *rows = take_struct(input, sizeof(moxie_rows));
    uint8_t form = fuzz_u8(input);
    uint32_t count = form & 0x3f, stride = sizeof(moxie_slab);
    unsigned char *slabs;

    if ((form & 0x40) != 0) stride = V1_moxie_slab + fuzz_u8(input);
    if (count > 6) count = 1; // an input is too short for many slabs
    slabs = fuzz_place((size_t)count * stride, fuzz_u8(input) & 7);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t declared = stride, lie;

        memset(slabs + (size_t)i * stride, 0, stride);
        fuzz_bytes(input, slabs + (size_t)i * stride, sizeof(moxie_slab) / 4);
        lie = fuzz_u8(input) & 7;
        if (lie == 6) declared = stride + fuzz_u8(input);
        if (lie == 7) declared = fuzz_u32(input);
        memcpy(slabs + (size_t)i * stride, &declared, sizeof declared);
    }
    if ((form & 0x80) == 0) {
        set_i32(rows, offsetof(moxie_rows, layout), (int32_t)(fuzz_below(input, 6)));
        set_i32(rows, offsetof(moxie_rows, id_space), (int32_t)(fuzz_below(input, 5)));
        set_i32(rows, offsetof(moxie_rows, reserved0), 0);
    }
    // What is not there cannot be promised: the count is true, or refused for what it is.
    set_i32(rows, offsetof(moxie_rows, slabs_count), form == 0x3f ? 65 : (int32_t)count);
    set_i32(rows, offsetof(moxie_rows, slab_stride), (int32_t)stride);
    set_pointer(rows, offsetof(moxie_rows, slabs), form == 0xbf ? NULL : slabs);
    return rows;
}

moxie_call *take_call(struct fuzz_input *input)
{
    moxie_call *call = take_struct(input, sizeof(moxie_call));

    if (fuzz_u8(input) < 192) {
        set_i32(call, offsetof(moxie_call, slot), (int32_t)fuzz_below(input, 5));
        set_i32(call, offsetof(moxie_call, layer), (int32_t)fuzz_below(input, 64));
        set_i32(call, offsetof(moxie_call, reserved0), 0);
    }
    return call;
}

moxie_batch *take_batch(struct fuzz_input *input)
{
    moxie_batch *batch = take_struct(input, sizeof(moxie_batch));

    if (fuzz_u8(input) < 192) {
        set_i32(batch, offsetof(moxie_batch, slot), (int32_t)fuzz_below(input, 5));
        set_i32(batch, offsetof(moxie_batch, layer), (int32_t)fuzz_below(input, 64));
        set_i32(batch, offsetof(moxie_batch, id_space), (int32_t)fuzz_below(input, 5));
    }
    return batch;
}
