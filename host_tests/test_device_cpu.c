// plugin/device_cpu.c: memory of the asked alignment, no streams, no graphs.

#include "plugin/device.h"

#include "host_tests/suite.h"

#include <errno.h>
#include <string.h>

START_TEST(memory_is_aligned)
{
    for (uint64_t align = 1; align <= 1 << 16; align *= 2) {
        moxie_allocation request = {
            .struct_size = sizeof request, .bytes = align + 3, .align = align, .name = "mid"};
        void *memory = NULL;

        ck_assert_int_eq(device_cpu.allocate(&request, &memory), 0);
        ck_assert_ptr_nonnull(memory);
        ck_assert_uint_eq((uintptr_t)memory % align, 0);
        memset(memory, 0xa5, (size_t)request.bytes);
        device_cpu.zero(memory, (int64_t)align, NULL);
        for (uint64_t i = 0; i < request.bytes; i++)
            ck_assert_int_eq(((unsigned char *)memory)[i], i < align ? 0 : 0xa5);
        device_cpu.release(&request, memory);
    }
}
END_TEST

START_TEST(too_much_memory_is_an_answer)
{
    moxie_allocation request = {
        .struct_size = sizeof request, .bytes = (uint64_t)1 << 61, .align = 64, .name = "mid"};
    void *memory = NULL;

    ck_assert_int_ne(device_cpu.allocate(&request, &memory), 0);
    ck_assert_ptr_null(memory);
}
END_TEST

START_TEST(it_is_the_cpu)
{
    unsigned char bytes[3] = {1, 1, 1}, fetched[3] = {2, 2, 2};

    ck_assert_str_eq(device_cpu.name, "cpu");
    ck_assert_int_eq(device_cpu.tensor_device, MOXIE_DEVICE_CPU);
    ck_assert_int_eq(device_cpu.ordinal(), 0);
    ck_assert_int_eq(device_cpu.fill(bytes, 0xff, 2), 0);
    ck_assert(bytes[0] == 0xff && bytes[1] == 0xff && bytes[2] == 1);
    ck_assert_int_eq(device_cpu.fetch(fetched, bytes, 2), 0);
    ck_assert(fetched[0] == 0xff && fetched[1] == 0xff && fetched[2] == 2);
    ck_assert_int_eq(device_cpu.status(0), MOXIE_OK);
    ck_assert_int_eq(device_cpu.status(ENOMEM), MOXIE_E_MEMORY);
    ck_assert_int_eq(device_cpu.status(900), MOXIE_E_DEVICE);
    ck_assert_str_ne(device_cpu.error_text(1), "");
    ck_assert_ptr_eq(device_cpu.kernels, &kernels_cpu);
    ck_assert_ptr_null(device_cpu.windows);
}
END_TEST

START_TEST(every_kernel_is_there)
{
    const struct kernels *kernels = device_cpu.kernels;

    ck_assert(kernels->record != NULL && kernels->route != NULL);
    ck_assert(kernels->dispatch != NULL && kernels->combine != NULL);
    ck_assert(kernels->gemms != NULL && kernels->sum != NULL);
    ck_assert(kernels->expand != NULL && kernels->quantise != NULL);
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_test(tests, memory_is_aligned);
    tcase_add_test(tests, too_much_memory_is_an_answer);
    tcase_add_test(tests, it_is_the_cpu);
    tcase_add_test(tests, every_kernel_is_there);
}

SUITE_MAIN("device_cpu", 10, add)
