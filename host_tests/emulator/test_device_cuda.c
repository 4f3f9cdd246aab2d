// plugin/device_cuda.c where an emulated GPU can be what a real one is not: what its
// answers are to a host, and which devices a machine has.

#include "plugin/device.h"

#include "host_tests/suite.h"

#include <string.h>

START_TEST(answers_have_a_status)
{
    static const struct {
        int32_t answer, status;
    } answers[] = {
        {0, MOXIE_OK},              // cudaSuccess
        {1, MOXIE_E_DEVICE},        // cudaErrorInvalidValue
        {2, MOXIE_E_MEMORY},        // cudaErrorMemoryAllocation
        {700, MOXIE_E_DEVICE},      // cudaErrorIllegalAddress
        {719, MOXIE_E_DEVICE},      // cudaErrorLaunchFailure
        {800, MOXIE_E_UNAVAILABLE}, // cudaErrorNotPermitted
        {801, MOXIE_E_UNAVAILABLE}, // cudaErrorNotSupported
        {900, MOXIE_E_CAPTURING},   // cudaErrorStreamCaptureUnsupported
        {901, MOXIE_E_CAPTURING},   // cudaErrorStreamCaptureInvalidated
        {907, MOXIE_E_CAPTURING},   // cudaErrorCapturedEvent
    };

    for (size_t i = 0; i < sizeof answers / sizeof answers[0]; i++) {
        const int32_t status = device_cuda.status(answers[i].answer);

        ck_assert_msg(status == answers[i].status, "%d: %d", answers[i].answer, status);
        ck_assert_int_eq(device_earlier(&device_cuda, status)[0] != 0, status == MOXIE_E_DEVICE);
    }
}
END_TEST

START_TEST(host_memory_is_wanted_as_the_devices_is)
{
    const moxie_allocation request = {.struct_size = sizeof request,
                                      .kind = MOXIE_MEMORY_HOST,
                                      .bytes = (uint64_t)1 << 61,
                                      .align = 64,
                                      .name = "mid"};
    void *memory = NULL;

    ck_assert_int_eq(device_cuda.status(device_cuda.allocate(&request, &memory)), MOXIE_E_MEMORY);
    ck_assert_ptr_null(memory);
}
END_TEST

START_TEST(another_device_that_would_do_is_named)
{
    static const struct {
        const char *capabilities, *text;
    } machines[] = {
        {"8.6,9.0",
         "device 0 has compute capability 8.6; the kernels are for 9.0; device 1 is one: "
         "make it current, or set CUDA_VISIBLE_DEVICES"},
        {"8.6,10.0", "device 0 has compute capability 8.6; the kernels are for 9.0; set device to "
                     "cpu"},
    };
    char text[256];
    moxie_error error = {.struct_size = sizeof error, .text = text, .text_bytes = sizeof text};

    ck_assert_int_eq(setenv("MOXIE_EMULATOR_CAPABILITY", machines[_i].capabilities, 1), 0);
    ck_assert_int_eq(device_cuda.prepare(&error), MOXIE_E_UNAVAILABLE);
    ck_assert_str_eq(text, machines[_i].text);
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_test(tests, answers_have_a_status);
    tcase_add_loop_test(tests, another_device_that_would_do_is_named, 0, 2);
    tcase_add_test(tests, host_memory_is_wanted_as_the_devices_is);
}

SUITE_MAIN("device_cuda", 30, add)
