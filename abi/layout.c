// Holds the compiler to the published layout, and reports it.

#include "abi/layout.h"

#include <stddef.h>

// NOLINTBEGIN(bugprone-sizeof-expression): of a pointer, the pointer's size is meant
#define CHECK_STRUCT(name, v1_bytes, bytes)                                                        \
    _Static_assert(sizeof(name) == (bytes) && (v1_bytes) <= (bytes), #name " changed its size");
#define CHECK_FIELD(name, field, offset, bytes)                                                    \
    _Static_assert(offsetof(name, field) == (offset), #name "." #field " moved");                  \
    _Static_assert(sizeof(((name *)0)->field) == (bytes), #name "." #field " changed its size");

LAYOUT_TABLE(CHECK_STRUCT, CHECK_FIELD)
// NOLINTEND(bugprone-sizeof-expression)

#define ROW(structure_, field_, offset_, size_)                                                    \
    {.struct_size = sizeof(moxie_field),                                                           \
     .offset = (offset_),                                                                          \
     .size = (size_),                                                                              \
     .structure = (structure_),                                                                    \
     .field = (field_)},
#define STRUCT_ROW(name, v1_bytes, bytes)     ROW(#name, "", 0, bytes)
#define FIELD_ROW(name, field, offset, bytes) ROW(#name, #field, offset, bytes)

static const moxie_field rows[] = {LAYOUT_TABLE(STRUCT_ROW, FIELD_ROW)};

const moxie_field *layout_rows(uint64_t *count)
{
    *count = sizeof rows / sizeof rows[0];
    return rows;
}

static uint64_t hash_byte(uint64_t hash, unsigned char byte)
{
    return (hash ^ byte) * 0x100000001b3ull;
}

static uint64_t hash_text(uint64_t hash, const char *text)
{
    for (; *text != '\0'; text++)
        hash = hash_byte(hash, (unsigned char)*text);
    return hash_byte(hash, 0);
}

static uint64_t hash_u32(uint64_t hash, uint32_t value)
{
    for (int shift = 0; shift < 32; shift += 8)
        hash = hash_byte(hash, (unsigned char)(value >> shift & 0xff));
    return hash;
}

uint64_t layout_digest(const moxie_field *fields, uint64_t count)
{
    uint64_t hash = 0xcbf29ce484222325ull;

    for (uint64_t i = 0; i < count; i++) {
        hash = hash_text(hash, fields[i].structure);
        hash = hash_text(hash, fields[i].field);
        hash = hash_u32(hash, fields[i].offset);
        hash = hash_u32(hash, fields[i].size);
    }
    return hash;
}
