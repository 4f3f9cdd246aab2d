// The command's devices. The GPU is the fake of fake_cuda.h: every function of the driver fails
// once, at each of its calls, and nothing may be left. With FAKE_CUDA set to `none` or `old` the
// test looks at what is said when there is no driver, or one without a function.

#include "hosts/cli/device.h"

#include "host_tests/cli/fake_cuda.h"
#include "host_tests/suite.h"

#include <stdio.h>
#include <string.h>

static struct fake_cuda fake;

// What the device's functions go by in the driver's library, and in a fault's text.
static const struct {
    const char *name, *said;
    int late; // a release: what it was to release stays, and other releases go on
} functions[] = {
    {"cuInit", "cuInit", 0},
    {"cuDeviceGetCount", "cuDeviceGetCount", 0},
    {"cuDeviceGet", "cuDeviceGet", 0},
    {"cuDeviceGetName", "cuDeviceGetName", 0},
    {"cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRetain", 0},
    {"cuStreamCreate", "cuStreamCreate", 0},
    {"cuMemGetInfo_v2", "cuMemGetInfo", 0},
    {"cuMemAlloc_v2", "cuMemAlloc", 0},
    {"cuMemFree_v2", "cuMemFree", 1},
    {"cuMemAllocHost_v2", "cuMemAllocHost", 0},
    {"cuMemFreeHost", "cuMemFreeHost", 1},
    {"cuMemcpyHtoD_v2", "cuMemcpyHtoD", 0},
    {"cuMemcpyDtoH_v2", "cuMemcpyDtoH", 0},
    {"cuMemcpyDtoDAsync_v2", "cuMemcpyDtoDAsync", 0},
    {"cuMemsetD8Async", "cuMemsetD8Async", 0},
    {"cuStreamSynchronize", "cuStreamSynchronize", 0},
    {"cuStreamBeginCapture_v2", "cuStreamBeginCapture", 0},
    {"cuStreamEndCapture", "cuStreamEndCapture", 0},
    {"cuGraphInstantiateWithFlags", "cuGraphInstantiate", 0},
    {"cuGraphLaunch", "cuGraphLaunch", 0},
    {"cuGraphExecDestroy", "cuGraphExecDestroy", 1},
    {"cuEventCreate", "cuEventCreate", 0},
    {"cuEventRecord", "cuEventRecord", 0},
    {"cuEventElapsedTime", "cuEventElapsedTime", 0},
    {"cuEventDestroy_v2", "cuEventDestroy", 1},
};

#define FUNCTIONS ((int)(sizeof functions / sizeof functions[0]))

static int runs;

static void count_run(const void *arg)
{
    runs += *(const int *)arg;
}

static const moxie_allocation pinned_request = {.struct_size = sizeof pinned_request,
                                                .kind = MOXIE_MEMORY_PINNED,
                                                .bytes = 64,
                                                .align = 64,
                                                .name = "flags"};

static int play_graph(struct device *device, struct fault *fault)
{
    const struct device_table *table = device->table;
    void *graph = NULL;
    void *events[2] = {NULL, NULL};
    double us = 0;
    const int one = 1;
    int st = EXIT_OK;

    table->range_begin(device, "nothing, without a library of ranges");
    TRY(table->event_create(device, &events[0], fault));
    TRY(table->event_create(device, &events[1], fault));
    TRY(table->capture_begin(device, fault));
    fake.launch(count_run, &one, sizeof one);
    TRY(table->capture_end(device, &graph, fault));
    TRY(table->event_record(device, events[0], fault));
    TRY(table->graph_launch(device, graph, fault));
    TRY(table->graph_launch(device, graph, fault));
    TRY(table->event_record(device, events[1], fault));
    TRY(table->synchronise(device, fault));
    TRY(table->elapsed_us(device, events[0], events[1], &us, fault));
    ck_assert_int_eq(runs, 2);
    ck_assert_double_eq_tol(us, 200000, 1);
out:
    table->range_end(device);
    device_graph_destroy(device, graph);
    device_event_destroy(device, events[0]);
    device_event_destroy(device, events[1]);
    return st;
}

static int play_memory(struct device *device, struct fault *fault)
{
    static const char text[] = "sixteen letters.";
    const struct device_table *table = device->table;
    struct memory a = {NULL, 0};
    struct memory b = {NULL, 0};
    void *pinned = NULL;
    char seen[sizeof text] = "";
    uint64_t available = 0;
    int st = EXIT_OK;

    TRY(memory_from(&a, device, text, sizeof text, "a text", fault));
    TRY(memory_init(&b, device, sizeof text, "a copy", fault));
    TRY(device_take(device, &pinned_request, &pinned, fault));
    ck_assert_uint_eq(device->bytes_held, 2 * sizeof text + pinned_request.bytes);
    TRY(table->copy(device, b.at, a.at, sizeof text, fault));
    TRY(table->fill(device, b.at, 'x', 3, fault));
    TRY(table->copy_out(device, seen, b.at, sizeof seen, fault));
    ck_assert_str_eq(seen, "xxxteen letters.");
    TRY(table->free_bytes(device, &available, fault));
    ck_assert_uint_eq(available, (uint64_t)8 << 20);
out:
    if (pinned != NULL) device_drop(device, &pinned_request, pinned);
    memory_fini(&a, device);
    memory_fini(&b, device);
    return st;
}

// Everything a device can do, and what is left afterwards.
static int play(struct fault *fault)
{
    struct device device = {.table = NULL};
    int st = EXIT_OK;

    runs = 0;
    TRY(device_open(&device, "sm_90", 0, fault));
    ck_assert_str_eq(device.name, "a fake GPU");
    ck_assert_int_eq(device.place.type, MOXIE_DEVICE_CUDA);
    TRY(play_memory(&device, fault));
    TRY(play_graph(&device, fault));
out:
    return device_finish(&device, st, fault);
}

START_TEST(nothing_is_left_after_success)
{
    struct fault fault;

    ck_assert_int_eq(play(&fault), EXIT_OK);
    ck_assert_int_eq(fake.live(), 0);
    for (int i = 0; i < FUNCTIONS; i++)
        ck_assert_msg(fake.calls(functions[i].name) > 0, "%s is not called", functions[i].name);
}
END_TEST

START_TEST(every_call_may_fail)
{
    struct fault fault;
    int calls = 0;

    ck_assert_int_eq(play(&fault), EXIT_OK);
    calls = fake.calls(functions[_i].name);
    for (int nth = 1; nth <= calls; nth++) {
        fake.reset();
        fake.break_call(functions[_i].name, nth, 719);
        ck_assert_int_eq(play(&fault), EXIT_TROUBLE);
        ck_assert_msg(strstr(fault.text, functions[_i].said) == fault.text, "%s", fault.text);
        ck_assert_ptr_nonnull(strstr(fault.text, "the words of the driver (CUDA error 719): a "));
        ck_assert_int_eq(fake.live(), functions[_i].late);
    }
}
END_TEST

START_TEST(closing_goes_on_after_a_failure)
{
    static const char *const names[] = {"cuCtxSetCurrent", "cuDevicePrimaryCtxRelease_v2",
                                        "cuStreamDestroy_v2", "cuGraphDestroy", "cuGetErrorString"};
    struct fault fault;

    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        fake.reset();
        fake.break_call(names[i], 1, 1);
        (void)play(&fault);
        ck_assert_int_le(fake.live(), 1);
    }
}
END_TEST

START_TEST(faults_say_what_to_change)
{
    static const struct {
        const char *name, *said;
        int result, code;
    } rows[] = {
        {"cuInit", "CUDA_VISIBLE_DEVICES", 100, EXIT_REFUSED},
        {"cuInit", "install a driver", 803, EXIT_TROUBLE},
        {"cuInit", "nvidia-smi", 999, EXIT_TROUBLE},
        {"cuInit", "stub", 34, EXIT_TROUBLE},
        {"cuInit", "fabricmanager", 802, EXIT_TROUBLE},
        {"cuInit", "no words for", 77, EXIT_TROUBLE},
        {"cuDevicePrimaryCtxRetain", "another process", 46, EXIT_TROUBLE},
        {"cuStreamEndCapture", "a graph cannot hold", 900, EXIT_TROUBLE},
        {"cuMemAlloc_v2", "17 B for a text, and 8.0 MiB of the 16.0 MiB of a fake GPU are free", 2,
         EXIT_TROUBLE},
        {"cuStreamCreate", "the documentation", 1, EXIT_TROUBLE},
    };
    struct fault fault;

    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        fake.reset();
        fake.break_call(rows[i].name, 1, rows[i].result);
        ck_assert_int_eq(play(&fault), rows[i].code);
        ck_assert_msg(strstr(fault.text, rows[i].said) != NULL, "%s", fault.text);
        ck_assert_int_eq(fake.live(), 0);
    }
}
END_TEST

START_TEST(no_gpu_is_a_refusal)
{
    struct fault fault;

    fake.break_call("", -1, 0);
    ck_assert_int_eq(play(&fault), EXIT_REFUSED);
    ck_assert_ptr_nonnull(strstr(fault.text, "--device cpu"));
    ck_assert_int_eq(fake.live(), 0);
}
END_TEST

START_TEST(what_is_not_released_is_a_fault)
{
    struct device device;
    struct memory memory;
    struct fault fault;
    const char *const words[] = {"cpu", "sm_90"};

    for (int i = 0; i < 2; i++) {
        ck_assert_int_eq(device_open(&device, words[i], 0, &fault), EXIT_OK);
        ck_assert_int_eq(memory_init(&memory, &device, 5, "a word", &fault), EXIT_OK);
        ck_assert_int_eq(device_finish(&device, EXIT_OK, &fault), EXIT_TROUBLE);
        ck_assert_ptr_nonnull(strstr(fault.text, "5 B of"));
        free(memory.at); // RAM, of the fake as well
    }
    ck_assert_int_eq(device_finish(&device, EXIT_REFUSED, &fault), EXIT_REFUSED);
    ck_assert_int_eq(device_open(&device, "tpu", 0, &fault), EXIT_REFUSED);
    ck_assert_ptr_nonnull(strstr(fault.text, "tpu"));
}
END_TEST

START_TEST(ram_is_a_device)
{
    struct device device;
    struct memory memory;
    struct fault fault;
    char seen[4] = "";

    ck_assert_int_eq(device_open(&device, "cpu", 0, &fault), EXIT_OK);
    ck_assert_int_eq(memory_from(&memory, &device, "abc", 4, "a word", &fault), EXIT_OK);
    ck_assert_int_eq(device.table->copy_out(&device, seen, memory.at, 4, &fault), EXIT_OK);
    ck_assert_str_eq(seen, "abc");
    ck_assert_int_eq(device.table->synchronise(&device, &fault), EXIT_OK);
    ck_assert(device.table->capture_begin == NULL);
    ck_assert_uint_eq(device.bytes_held, 4);
    memory_fini(&memory, &device);
    ck_assert_uint_eq(device.bytes_held, 0);
    ck_assert_int_eq(memory_init(&memory, &device, 0, "nothing", &fault), EXIT_OK);
    memory_fini(&memory, &device);
    ck_assert_int_eq(device_finish(&device, EXIT_OK, &fault), EXIT_OK);
}
END_TEST

// No driver, or one without a function.
static int refused(const char *said)
{
    struct fault fault = {.text = ""};
    struct device device;
    int st = device_open(&device, "sm_90", 0, &fault);

    (void)printf("%s\n", fault.text);
    return st == EXIT_REFUSED && strstr(fault.text, said) != NULL &&
                   strstr(fault.text, "--device cpu") != NULL
               ? EXIT_SUCCESS
               : EXIT_FAILURE;
}

static void add_tests(TCase *tests)
{
    tcase_add_test(tests, nothing_is_left_after_success);
    tcase_add_loop_test(tests, every_call_may_fail, 0, FUNCTIONS);
    tcase_add_test(tests, closing_goes_on_after_a_failure);
    tcase_add_test(tests, faults_say_what_to_change);
    tcase_add_test(tests, no_gpu_is_a_refusal);
    tcase_add_test(tests, what_is_not_released_is_a_fault);
    tcase_add_test(tests, ram_is_a_device);
}

int main(void)
{
    const char *which = getenv("FAKE_CUDA");
    Suite *suite = NULL;
    TCase *tests = NULL;
    SRunner *runner = NULL;
    int failed = 0;

    if (which != NULL && strcmp(which, "none") == 0) return refused("no CUDA driver can be loaded");
    if (which != NULL && strcmp(which, "old") == 0) return refused("cuGraphInstantiateWithFlags");
    if (!fake_cuda_find(&fake)) {
        (void)printf("LD_LIBRARY_PATH leads to no fake driver\n");
        return EXIT_FAILURE;
    }
    suite = suite_create("cli_device");
    tests = tcase_create("cli_device");
    add_tests(tests);
    suite_add_tcase(suite, tests);
    runner = srunner_create(suite);
    srunner_run_all(runner, CK_ENV);
    failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
