// Which instruction set, see isa.h.

#include "kernels/cpu/isa.h"

#if defined(__x86_64__)
#include <cpuid.h>

#define LEAF1_FMA     (1u << 12)
#define LEAF1_OSXSAVE (1u << 27)
#define LEAF1_AVX     (1u << 28)
#define LEAF1_F16C    (1u << 29)
#define LEAF7_AVX2    (1u << 5)
#define LEAF7_AVX512  (1u << 16 | 1u << 17 | 1u << 30 | 1u << 31) // F, DQ, BW, VL
#define XCR0_AVX      0x06u // the operating system saves ymm registers
#define XCR0_AVX512   0xe6u // and zmm and mask registers

enum cpu_isa cpu_isa_best(void)
{
    const uint32_t leaf1 = LEAF1_FMA | LEAF1_OSXSAVE | LEAF1_AVX | LEAF1_F16C;
    uint32_t eax, ebx, ecx, edx, xcr0, high;

    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || (ecx & leaf1) != leaf1) return CPU_SCALAR;
    __asm__("xgetbv" : "=a"(xcr0), "=d"(high) : "c"(0));
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return CPU_SCALAR;
    if ((ebx & LEAF7_AVX2) == 0 || (xcr0 & XCR0_AVX) != XCR0_AVX) return CPU_SCALAR;
    if ((ebx & LEAF7_AVX512) != LEAF7_AVX512 || (xcr0 & XCR0_AVX512) != XCR0_AVX512)
        return CPU_AVX2;
    return CPU_AVX512;
}
#else
enum cpu_isa cpu_isa_best(void)
{
    return CPU_SCALAR;
}
#endif

const struct cpu_ops *cpu_ops_of(const struct cpu_stream *stream)
{
#if defined(__x86_64__)
    if (stream->isa == CPU_AVX512) return &cpu_ops_avx512;
    if (stream->isa == CPU_AVX2) return &cpu_ops_avx2;
#else
    (void)stream;
#endif
    return &cpu_ops_scalar;
}
