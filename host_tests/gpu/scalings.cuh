// Whether what stands for the divisions of fp8's scales rounds as they do.

#ifndef MOXIE_HOST_TESTS_GPU_SCALINGS_CUH
#define MOXIE_HOST_TESTS_GPU_SCALINGS_CUH

#include "host_tests/gpu/twin.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/quantise.cuh"

#ifndef FLOATS_STEP
#define FLOATS_STEP 1u // from a float to the next that is tried
#endif

// Positive floats, infinity and some NaNs whose scalings are not the quotients that a division gives.
static __global__ void count_wrong_scalings(uint32_t *wrong)
{
    const uint32_t threads = gridDim.x * blockDim.x, step = threads * FLOATS_STEP;

    for (uint32_t bits = (blockIdx.x * blockDim.x + threadIdx.x) * FLOATS_STEP; bits < 0x7fc00000u; bits += step) {
        const float largest = __uint_as_float(bits);
        const bool has_scale = !(largest < FP8_SMALLEST);
        const fp8_scaling got = fp8_scaling_of(largest);
        const float scale = has_scale ? largest / FP8_LARGEST : 0.0f, inverse = has_scale ? FP8_LARGEST / largest : 0.0f;
        const bool is_nan = largest != largest, is_wrong = got.scale != scale || got.inverse != inverse;

        if (is_nan ? got.scale == got.scale || got.inverse == got.inverse : is_wrong) atomicAdd(wrong, 1u);
    }
}

// Whether a kernel that strides over what it tries counts nothing.
static inline int none_wrong(void (*count)(uint32_t *), const char *what)
{
    twin wrong(4);

    wrong.fill(0);
    CHECK(launch(count, {static_cast<unsigned>(8 * sm_count()), 256, 0, LAUNCH_AFTER}, NULL, wrong.on<uint32_t>(true)));
    CHECK(cudaDeviceSynchronize());
    return wrong.same(what);
}

static inline int try_scalings()
{
    return none_wrong(count_wrong_scalings, "scalings that are not quotients");
}

#endif
