// Number formats, decoded in double precision. Written from the formats' definitions: what a plugin
// computes is held against this, so it shares nothing with the library.

#ifndef MOXIE_HOSTS_CLI_CONFORM_NUMBERS_H
#define MOXIE_HOSTS_CLI_CONFORM_NUMBERS_H

#include "abi.h"

#include <stdint.h>

double decode_e4m3(uint8_t code); // NaN for 0x7f and 0xff
double decode_e2m1(uint8_t code); // the low nibble
double decode_e8m0(uint8_t code); // NaN for 255

// Arrays of f32, bf16 or f16; `format` is one of those MOXIE_FORMAT_*.
int64_t number_bytes(int32_t format);
double number_read(const void *numbers, int32_t format, int64_t index);
// Rounds to the nearest, ties to even. f16 takes what its normal numbers hold.
void number_write(void *numbers, int32_t format, int64_t index, double value);

moxie_dtype dtype_of(int32_t format);    // of the values of a MOXIE_FORMAT_*
const char *format_key(int32_t format);  // as the configuration spells it
int32_t format_called(const char *word); // MOXIE_FORMAT_AUTO when there is none

// Random numbers that are the same in every run.
struct dice {
    uint64_t state;
};

uint64_t dice_roll(struct dice *dice);
double dice_real(struct dice *dice); // -1..1
int64_t dice_below(struct dice *dice, int64_t bound);

#endif
