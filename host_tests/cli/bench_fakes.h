// What the suites of the bench on a device start with, and how its driver fails them.

#ifndef MOXIE_HOST_TESTS_BENCH_FAKES_H
#define MOXIE_HOST_TESTS_BENCH_FAKES_H

#include "hosts/cli/fault.h"

#include "host_tests/cli/fake_cuda.h"
#include "host_tests/cli/fake_nvtx.h"

#include <stddef.h>

void bench_fakes_find(struct fake_cuda *fake, struct fake_nvtx *ranges);

// Runs the bench with a call of one of those functions failing, of each about `most` in turn, the
// first and the last among them: it says so, and leaves nothing.
void bench_break_calls(const struct fake_cuda *fake, const char *const *names, size_t names_count,
                       int most, int (*bench)(struct fault *fault));

#endif
