// The runner's table.

#include "abi/entry.h"

#include "abi/decode.h"
#include "plugin/backends.h"
#include "plugin/runner.h"

static int32_t slot_create(moxie_instance *handle, int32_t layer, const moxie_weights *weights,
                           moxie_runner **out, moxie_error *error)
{
    struct decoded_weights decoded = {0};
    moxie_instance *instance;
    int32_t st = MOXIE_OK;

    error = error_enter(error);
    TRY(check_pointer(out, "out", error));
    *out = NULL;
    TRY(enter_instance(handle, MOXIE_THREAD_INIT, &instance, error));
    if (runner_takes_weights(instance))
        TRY(decode_weights(&decoded, weights, error));
    else if (weights != NULL)
        TRY(fail_with(
            error, MOXIE_E_INVALID,
            "weights: given, and the key runner is none, so that nothing would read them: "
            "pass NULL, or set runner to auto"));
    TRY(instance_begin_create(instance, error));
    st = runner_create(instance, layer, &decoded.weights, out, error);
    instance_end_create(instance);
out:
    return st;
}

static int32_t slot_run(moxie_runner *runner, const moxie_call *call, const moxie_rows *in,
                        const moxie_rows *out, moxie_error *error)
{
    moxie_call decoded_call;
    struct decoded_rows decoded_in, decoded_out;
    int32_t st = MOXIE_OK;

    error = error_enter(error);
    TRY(enter_runner(runner, ENTER_STEP, error));
    TRY(decode_call(&decoded_call, call, error));
    TRY(decode_rows(&decoded_in, in, "in", error));
    TRY(decode_rows(&decoded_out, out, "out", error));
    TRY(runner_run(runner, &decoded_call, &decoded_in.rows, &decoded_out.rows, error));
out:
    return st;
}

static int32_t slot_weights_updated(moxie_runner *runner, const int32_t *experts, uint64_t count,
                                    moxie_error *error)
{
    int32_t st = MOXIE_OK;

    error = error_enter(error);
    TRY(enter_runner(runner, MOXIE_THREAD_INSTANCE_SERIAL, error));
    if (experts == NULL && count != 0)
        TRY(fail_with(error, MOXIE_E_INVALID,
                      "ids is NULL, which means all experts, and count is %llu; set it to 0",
                      (unsigned long long)count));
    TRY(runner_weights_updated(runner, experts, count, error));
out:
    return st;
}

static void slot_destroy(moxie_runner *runner)
{
    moxie_instance *instance;

    if (runner == NULL || enter_runner(runner, MOXIE_THREAD_INIT, NULL) != MOXIE_OK) return;
    instance = runner_instance(runner);
    if (instance_begin_create(instance, NULL) != MOXIE_OK) return;
    runner_destroy(runner);
    instance_end_create(instance);
}

static const moxie_runner_api runner_api = {
    .struct_size = sizeof(moxie_runner_api),
    .create = slot_create,
    .run = slot_run,
    .weights_updated = slot_weights_updated,
    .destroy = slot_destroy,
};

const moxie_runner_info runner_infos[] = {
    {.struct_size = sizeof(moxie_runner_info),
     .name = "moxie_cpu",
     .device = "cpu",
     .traits = &traits_runner_cpu,
     .api = &runner_api},
    {.struct_size = sizeof(moxie_runner_info),
     .name = "moxie_cuda",
     .device = "sm_90",
     .traits = &traits_runner_cuda,
     .api = &runner_api},
};

const uint32_t runner_infos_count = sizeof runner_infos / sizeof runner_infos[0];

// The extension moxie.expand/1.

static int32_t slot_expand(moxie_runner *runner, const moxie_call *call, const moxie_rows *in,
                           const moxie_rows *out, const moxie_tensor *row_index, moxie_error *error)
{
    moxie_call decoded_call;
    struct decoded_rows decoded_in, decoded_out;
    int32_t st = MOXIE_OK;

    error = error_enter(error);
    TRY(enter_runner(runner, ENTER_STEP, error));
    TRY(decode_call(&decoded_call, call, error));
    TRY(decode_rows(&decoded_in, in, "in", error));
    TRY(decode_rows(&decoded_out, out, "out", error));
    TRY(check_pointer(row_index, "row_index", error));
    TRY(runner_expand(runner, &decoded_call, &decoded_in.rows, &decoded_out.rows, row_index,
                      error));
out:
    return st;
}

static int32_t slot_fold(moxie_runner *runner, const moxie_call *call, const moxie_rows *expanded,
                         const moxie_tensor *row_index, const moxie_rows *out, moxie_error *error)
{
    moxie_call decoded_call;
    struct decoded_rows decoded_in, decoded_out;
    int32_t st = MOXIE_OK;

    error = error_enter(error);
    TRY(enter_runner(runner, ENTER_STEP, error));
    TRY(decode_call(&decoded_call, call, error));
    TRY(decode_rows(&decoded_in, expanded, "expanded", error));
    TRY(check_pointer(row_index, "row_index", error));
    TRY(decode_rows(&decoded_out, out, "out", error));
    TRY(runner_fold(runner, &decoded_call, &decoded_in.rows, row_index, &decoded_out.rows, error));
out:
    return st;
}

const moxie_expand_api expand_api = {
    .struct_size = sizeof(moxie_expand_api),
    .expand = slot_expand,
    .fold = slot_fold,
};
