// How what computes here rounds: to nearest even, subnormals kept, and nothing traps. A host's
// thread may have it otherwise, and a worker has it as the thread that made it had. The exceptions
// that the host's thread has seen stay what they were.

#ifndef MOXIE_KERNELS_CPU_FP_MODE_H
#define MOXIE_KERNELS_CPU_FP_MODE_H

#if defined(__x86_64__)

#include <xmmintrin.h>

#define FP_MODE_DEFAULT 0x1f80u // of MXCSR

typedef unsigned int fp_mode;

// fesetenv, which sets what nothing here uses as well, takes ten times as long.
static inline fp_mode fp_mode_begin(void)
{
    fp_mode before = _mm_getcsr();

    _mm_setcsr(FP_MODE_DEFAULT);
    return before;
}

static inline void fp_mode_end(fp_mode before)
{
    _mm_setcsr(before);
}

#else

#include <fenv.h>

typedef fenv_t fp_mode;

static inline fp_mode fp_mode_begin(void)
{
    fp_mode before;

    (void)fegetenv(&before);
    (void)fesetenv(FE_DFL_ENV);
    return before;
}

static inline void fp_mode_end(fp_mode before)
{
    (void)fesetenv(&before);
}

#endif

#endif
