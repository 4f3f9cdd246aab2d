// A stage of weights of four bits of a whole layer in one launch, multiplied as bf16. Included by layer_multiply.cuh alone.
//
// A stage has 512 bytes of each weight row, 1024 inputs, and its scales as they are, which the warp that multiplies the stage first makes what
// codes are multiplied by. The operand rows are woven.

#ifndef MOXIE_KERNELS_CUDA_LAYER_PACKED_CUH
#define MOXIE_KERNELS_CUDA_LAYER_PACKED_CUH

#include "kernels/cuda/layer_jobs.cuh"
#include "kernels/cuda/layer_load.cuh"
#include "kernels/cuda/packed.cuh"

namespace {

// What a lane does beside multiplying.
struct packed_work {
    int32_t scale_format;
    int32_t scales_low;            // where the scales begin, of 16 bytes, of the row for which it makes what codes are multiplied by
    bool has_high;                 // rows, whose codes want to be decoded
    float low_factor, high_factor; // of its sums of both rows
};

template <class P>
__device__ __forceinline__ packed_work packed_work_of(const layer_product &by, int32_t expert, const tile_rows &rows, int32_t stage)
{
    const int32_t row = threadIdx.x % 32 / 2;
    const unsigned char *scales = packed_row(by, expert, rows, row) + stage * P::units * by.packed.step_bytes;
    packed_work to = {by.packed.scale_format, static_cast<int32_t>(reinterpret_cast<uintptr_t>(scales) & 15), rows.high >= 0, 1.0f, 1.0f};

    if (P::type == OPERAND_MXFP4) to.low_factor = to.high_factor = kE8m0Rest;
    if (P::type == OPERAND_NVFP4) {
        const float *globals = by.scales.scales + expert * by.scales.expert_stride;

        to.low_factor = globals[0] * kE4m3Rest;
        to.high_factor = globals[scale_of_half(by, true)] * kE4m3Rest;
    }
    return to;
}

// 64 inputs of 16 rows, or of the first eight: of each, 32 bytes, and what they are multiplied by.
template <class P, bool has_high>
__device__ __forceinline__ void multiply_part(const packed_codes &by, uint32_t codes, const unsigned char *scales, const uint4 *inputs, float (&even)[4],
                                              float (&odd)[4])
{
    packed_part<P> read;
    uint32_t weights[4][4];

    load_matrices(read.codes, codes);
#pragma unroll
    for (int32_t i = 0; i < 2; i++)
#pragma unroll
        for (int32_t word = 0; word < read.words_count; word++)
            read.scales[i][word] = reinterpret_cast<const uint32_t *>(scales + i * kHalf * P::scale_pitch_bytes)[word];
    decode_part<P, has_high>(by, read, weights);
#pragma unroll
    for (int32_t block = 0; block < 2; block++) {
        const uint4 b = inputs[block * 4];

        mma<true>(even, weights[block * 2], b.x, b.y);
        mma<true>(odd, weights[block * 2 + 1], b.z, b.w);
    }
}

// A stage's units: two sums in turns, so that products need not wait for each other.
template <class P, bool has_high>
__device__ __forceinline__ void multiply_units(uint32_t rows, const unsigned char *scales, const uint4 *inputs, int32_t units, float (&even)[4],
                                               float (&odd)[4])
{
    constexpr int32_t parts = kUnitBytes / 32, scales_bytes = packed_part<P>::words_count * 4;
    const int32_t lane = threadIdx.x % 32;
    const packed_codes by = codes_of();

#pragma unroll 1
    for (int32_t unit = 0; unit < units; unit++)
#pragma unroll
        for (int32_t part = 0; part < parts; part++)
            multiply_part<P, has_high>(by, rows + unit * kHalfUnitBytes + ((part * 2 + lane / kRows) ^ lane % kHalf) * 16,
                                       scales + (unit * parts + part) * scales_bytes, inputs + unit * P::pieces + part * 8, even, odd);
}

template <class P>
__device__ __forceinline__ void multiply_packed(unsigned char *stage, int32_t units, const uint4 *inputs, const packed_work &work, float (&even)[4],
                                                float (&odd)[4])
{
    const int32_t lane = threadIdx.x % 32;
    const uint32_t rows = smem_address(stage) + lane % kRows / kHalf * P::half_bytes + lane % kHalf * kUnitBytes;
    unsigned char *scales = stage + 2 * P::half_bytes;

    prepare_row<P::type, P::units>(work.scale_format, scales + lane / 2 * P::scale_pitch_bytes, work.scales_low);
    scales += lane / 4 * P::scale_pitch_bytes;
    if (work.has_high)
        multiply_units<P, true>(rows, scales, inputs, units, even, odd);
    else
        multiply_units<P, false>(rows, scales, inputs, units, even, odd);
}

} // namespace

#endif
