// What the fuzzers share: values and memory made from an input of any bytes. An input that ends
// early goes on with zeros, so that every input is a whole one.

#ifndef MOXIE_HOST_TESTS_FUZZ_FUZZ_H
#define MOXIE_HOST_TESTS_FUZZ_FUZZ_H

#include <stddef.h>
#include <stdint.h>

struct fuzz_input {
    const uint8_t *at;
    size_t left;
};

// Ends the program, naming the property that an input broke. Also in builds without assertions.
#define PROPERTY(holds) ((holds) ? (void)0 : fuzz_broken(#holds, __FILE__, __LINE__))
_Noreturn void fuzz_broken(const char *property, const char *file, int line);

void fuzz_bytes(struct fuzz_input *input, void *to, size_t bytes);
uint8_t fuzz_u8(struct fuzz_input *input);
uint32_t fuzz_u32(struct fuzz_input *input);
uint64_t fuzz_u64(struct fuzz_input *input);
// 0..count - 1.
uint32_t fuzz_below(struct fuzz_input *input, uint32_t count);
// Mostly small; now and then an edge of a type, or any number at all.
int64_t fuzz_i64(struct fuzz_input *input);

// The sum and the product, or UINT64_MAX where they pass it: more than any memory.
uint64_t fuzz_add(uint64_t a, uint64_t b);
uint64_t fuzz_mul(uint64_t a, uint64_t b);

// ---- Memory ------------------------------------------------------------------------------------
// Pieces of one arena, each between bytes that may not be touched: under AddressSanitizer a read or
// write beside a piece ends the program. No allocation, so that an input costs little.

// Takes every piece back; an input starts with it.
void fuzz_reset(void);
// `bytes` bytes from `offset` (0..63) past a multiple of 64, undefined. 0 bytes: a pointer that
// may not be followed.
void *fuzz_place(size_t bytes, size_t offset);
// A piece at a multiple of 64, full of input.
void *fuzz_taken(struct fuzz_input *input, size_t bytes);
// At most `bytes` bytes of input and a NUL.
char *fuzz_text(struct fuzz_input *input, size_t bytes);
// Bytes that fuzz_place can still give, for pieces of unknown number.
size_t fuzz_room(void);

// The entry of libFuzzer, and of replay.c.
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#endif
