// Whether the two pieces of inputs sum to them, whatever the largest of a row is.

#ifndef MOXIE_HOST_TESTS_GPU_CUTS_CUH
#define MOXIE_HOST_TESTS_GPU_CUTS_CUH

#include "host_tests/gpu/scalings.cuh"
#include "kernels/cuda/pieces.cuh"

#define CUT_LARGEST 0x7f80u // bf16 from there on is not finite

// The four inputs that two words are pieces of.
static __device__ void uncut(const uint32_t (&words)[2], float back, float (&to)[4])
{
    for (int32_t i = 0; i < 4; i++)
        to[i] = 0.0f;
    for (uint32_t word : words) {
        uint32_t low, high;

        e4m3_to_f16(word, low, high);
        const float2 first = number_unpack<false>(low), last = number_unpack<false>(high);
        const float codes[4] = {first.x, first.y, last.x, last.y};

        for (int32_t i = 0; i < 4; i++)
            to[i] += codes[i];
    }
    for (int32_t i = 0; i < 4; i++)
        to[i] *= back; // of a number alone it may be too large
}

// Eight inputs up to each magnitude, that one first: those that are off by more than 2^-17 of it, and magnitudes that are not finite but have sums.
static __global__ void count_wrong_cuts(uint32_t *wrong)
{
    const uint32_t threads = gridDim.x * blockDim.x;

    for (uint32_t largest = blockIdx.x * blockDim.x + threadIdx.x; largest < 0x8000u; largest += threads) {
        const piece_scaling by = piece_scaling_of(largest);
        uint32_t words[4], even[2], odd[2], seed = largest * 2654435761u + 1;
        float want[8], got[2][4];

        for (uint32_t i = 0; i < 8; i++, seed = seed * 1664525u + 1013904223u) {
            const uint32_t below = i == 0 ? largest : i < 5 ? seed % (largest + 1) : max(largest, 1700u) - seed % 1700u, bits = min(below, largest) | seed >> 31 << 15;

            words[i / 2] = i % 2 ? words[i / 2] | bits << 16 : bits;
            want[i] = __uint_as_float(bits << 16);
        }
        cut_eight({words[0], words[1], words[2], words[3]}, by.times, even, odd);
        uncut(even, by.back, got[0]);
        uncut(odd, by.back, got[1]);
        for (int32_t i = 0; i < 8; i++) {
            const float sum = got[i % 2][i / 2], most = fmaxf(__uint_as_float(largest << 16), 0x1p-119f) * 0x1p-17f;

            if (largest >= CUT_LARGEST ? sum == sum : !(fabsf(sum - want[i]) <= most)) atomicAdd(wrong, 1u);
        }
    }
}

static inline int try_cuts()
{
    return none_wrong(count_wrong_cuts, "inputs that their pieces do not sum to");
}

#endif
