// The published layout of abi.h, frozen: every struct with its size when ABI 0.N was published and
// now, every field with its offset and size, for 64-bit machines. layout.c holds the compiler to
// this table, and the self-report that a foreign-language mirror compares is this table too.
//
// The table is generated from abi.h, and a test compares it with what was published (README.md).

#ifndef MOXIE_ABI_LAYOUT_H
#define MOXIE_ABI_LAYOUT_H

#include "abi.h"
#include "abi/layout_table.h"

// V1_moxie_host and so on: what a host must bring at least.
#define LAYOUT_V1(name, v1_bytes, bytes) V1_##name = (v1_bytes),
#define LAYOUT_NO_FIELD(name, field, offset, bytes)
enum layout_v1 { LAYOUT_TABLE(LAYOUT_V1, LAYOUT_NO_FIELD) };

// The self-report: one row per field, and per struct one with field "" that gives its size.
const moxie_field *layout_rows(uint64_t *count);

// FNV-1a, 64 bits, over every row in order: structure and field with their NULs, then offset and
// size as four little-endian bytes each.
uint64_t layout_digest(const moxie_field *rows, uint64_t count);

#endif
