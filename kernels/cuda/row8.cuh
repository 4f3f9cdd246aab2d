// Rows of 16- or 32-bit numbers, eight at a time. Columns are multiples of 8, and so is the length of a row.

#ifndef MOXIE_KERNELS_CUDA_ROW8_CUH
#define MOXIE_KERNELS_CUDA_ROW8_CUH

#include "kernels/cuda/number.cuh"
#include "kernels/cuda/ptx.cuh"

// As they are in memory: loads can be under way together only while nothing looks at what they bring.
template <int32_t format> struct eight {
    uint32_t words[format == FORMAT_F32 ? 8 : 4];
};

// Of a row at a multiple of 16 bytes; `last`, if nobody reads it again.
template <int32_t format, bool last = false> __device__ __forceinline__ eight<format> load_8(const unsigned char *row, int32_t column)
{
    constexpr int32_t words = sizeof(eight<format>) / 4;
    const uint4 *from = reinterpret_cast<const uint4 *>(row + column * (words / 2));
    eight<format> to;

#pragma unroll
    for (int32_t i = 0; i < words / 4; i++) {
        uint4 four = last ? load_evict_first(from + i) : from[i];

        to.words[i * 4] = four.x;
        to.words[i * 4 + 1] = four.y;
        to.words[i * 4 + 2] = four.z;
        to.words[i * 4 + 3] = four.w;
    }
    return to;
}

// Of a row at a multiple of its numbers.
template <int32_t format> __device__ __forceinline__ eight<format> load_8_anywhere(const unsigned char *row, int32_t column)
{
    constexpr int32_t words = sizeof(eight<format>) / 4;
    eight<format> to;

#pragma unroll
    for (int32_t i = 0; i < words; i++) {
        if constexpr (format == FORMAT_F32) {
            to.words[i] = reinterpret_cast<const uint32_t *>(row)[column + i];
        } else {
            const uint16_t *two = reinterpret_cast<const uint16_t *>(row) + column + i * 2;

            to.words[i] = two[0] | static_cast<uint32_t>(two[1]) << 16;
        }
    }
    return to;
}

template <int32_t format> __device__ __forceinline__ void unpack_8(const eight<format> &from, float (&to)[8])
{
#pragma unroll
    for (int32_t i = 0; i < 8; i++) {
        if constexpr (format == FORMAT_F32) {
            memcpy(&to[i], &from.words[i], sizeof to[i]);
        } else {
            float2 two = number_unpack<format == FORMAT_BF16>(from.words[i / 2]);

            to[i] = i % 2 == 0 ? two.x : two.y;
        }
    }
}

// sum += weight * row; a weight of 1 leaves the bits of a plain sum.
template <int32_t format> __device__ __forceinline__ void add_8(const eight<format> &row, float weight, float (&sum)[8])
{
    float values[8];

    unpack_8(row, values);
#pragma unroll
    for (int32_t i = 0; i < 8; i++)
        sum[i] += weight * values[i];
}

// Rows may lie anywhere, so they are written number by number unless aligned.
__device__ __forceinline__ void store_8(unsigned char *row, int32_t format, int32_t column, const float (&values)[8])
{
    uint4 packed;

    if (format != FORMAT_F32 && is_aligned(row, 16)) {
        bool is_bf16 = format == FORMAT_BF16;
        uint32_t words[4];

#pragma unroll
        for (int32_t i = 0; i < 4; i++)
            words[i] = is_bf16 ? number_pack<true>(values[i * 2], values[i * 2 + 1])
                               : number_pack<false>(values[i * 2], values[i * 2 + 1]);
        packed = make_uint4(words[0], words[1], words[2], words[3]);
        *reinterpret_cast<uint4 *>(row + column * 2) = packed;
        return;
    }
#pragma unroll
    for (int32_t i = 0; i < 8; i++)
        number_store(row, column + i, format, values[i]);
}

#endif
