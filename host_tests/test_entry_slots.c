// abi/entry*.c: what every slot refuses before a room hears of it, and what it hands on.

#include "abi/entry.h"

#include "host_tests/abi_slots.h"
#include "host_tests/fake/rooms.h"
#include "host_tests/suite.h"

#include <string.h>

static char text[512];
static moxie_error error;
static const moxie_api *api;

static moxie_instance *instance;
static moxie_runner *live_runner;
static moxie_dispatcher *dispatcher;

static void setup(void)
{
    const moxie_request request = {
        .struct_size = sizeof request, .abi_min = MOXIE_ABI_VERSION, .abi_max = MOXIE_ABI_VERSION};

    memset(&fake, 0, sizeof fake);
    memset(text, 'x', sizeof text);
    error = (moxie_error){.struct_size = sizeof error, .text = text, .text_bytes = sizeof text};
    instance = fake_instances[0];
    live_runner = fake_runners[0];
    dispatcher = fake_dispatchers[0];
    ck_assert_int_eq(moxie_get_api_v1(&request, &api, &error), MOXIE_OK);
}

// ---- Handles, threads and out pointers, over every slot ----

static moxie_matrix matrix = {.struct_size = sizeof matrix};
static const moxie_weights weights = {.struct_size = sizeof weights, .w1 = &matrix, .w2 = &matrix};
static const moxie_call call = {.struct_size = sizeof call, .slot = 1, .layer = 2};
static const moxie_step step = {.struct_size = sizeof step, .tokens = 5};
static const moxie_batch batch = {
    .struct_size = sizeof batch, .slot = 3, .layer = 4, .id_space = MOXIE_IDS_GLOBAL};
static const moxie_slab slab = {.struct_size = sizeof slab};
static const moxie_rows rows = {.struct_size = sizeof rows,
                                .layout = MOXIE_LAYOUT_STANDARD,
                                .id_space = MOXIE_IDS_GLOBAL,
                                .slabs_count = 1,
                                .slab_stride = sizeof slab,
                                .slabs = &slab};
static const moxie_rows masked = {.struct_size = sizeof masked,
                                  .layout = MOXIE_LAYOUT_EXPERT_MASKED,
                                  .id_space = MOXIE_IDS_GLOBAL,
                                  .slabs_count = 1,
                                  .slab_stride = sizeof slab,
                                  .slabs = &slab};
static const moxie_tensor tensor;
static const uint8_t active[MOXIE_RANKS_MAX];
static const moxie_rows *rows_in, *rows_out;

static int32_t call_create_runner(void)
{
    moxie_runner *out = fake_runners[1];
    int32_t st = runner_infos[0].api->create(instance, 9, &weights, &out, &error);

    ck_assert(st == MOXIE_OK || out == NULL);
    return st;
}

static int32_t call_run(void)
{
    return runner_infos[0].api->run(live_runner, &call, &rows, &masked, &error);
}

static int32_t call_weights_updated(void)
{
    return runner_infos[0].api->weights_updated(live_runner, NULL, 0, &error);
}

static int32_t call_destroy_runner(void)
{
    runner_infos[0].api->destroy(live_runner);
    return strstr(fake.trail, "runner_destroy") != NULL ? MOXIE_OK : MOXIE_E_INVALID;
}

static int32_t call_expand(void)
{
    const moxie_expand_api *expand = api->get_extension(MOXIE_EXPAND_EXTENSION);

    return expand->expand(live_runner, &call, &rows, &masked, &tensor, &error);
}

static int32_t call_fold(void)
{
    const moxie_expand_api *expand = api->get_extension(MOXIE_EXPAND_EXTENSION);

    return expand->fold(live_runner, &call, &masked, &tensor, &rows, &error);
}

static int32_t call_create_dispatcher(void)
{
    moxie_dispatcher *out = fake_dispatchers[1];
    int32_t st = dispatcher_infos[0].api->create(instance, &out, &error);

    ck_assert(st == MOXIE_OK || out == NULL);
    return st;
}

static int32_t call_begin_forward(void)
{
    return dispatcher_infos[0].api->begin_forward(dispatcher, &step, &error);
}

static int32_t call_dispatch(void)
{
    int32_t st;

    rows_in = rows_out = &rows;
    st = dispatcher_infos[0].api->dispatch(dispatcher, &batch, &rows_in, &rows_out, &error);
    ck_assert(st == MOXIE_OK || (rows_in == NULL && rows_out == NULL));
    return st;
}

static int32_t call_dispatch_recv(void)
{
    int32_t st;

    rows_in = rows_out = &rows;
    st = dispatcher_infos[0].api->dispatch_recv(dispatcher, &batch, &rows_in, &rows_out, &error);
    ck_assert(st == MOXIE_OK || (rows_in == NULL && rows_out == NULL));
    return st;
}

static int32_t call_dispatch_send(void)
{
    return dispatcher_infos[0].api->dispatch_send(dispatcher, &batch, &error);
}

static int32_t call_combine(void)
{
    return dispatcher_infos[0].api->combine(dispatcher, &batch, &error);
}

static int32_t call_combine_send(void)
{
    return dispatcher_infos[0].api->combine_send(dispatcher, &batch, &error);
}

static int32_t call_combine_recv(void)
{
    return dispatcher_infos[0].api->combine_recv(dispatcher, &batch, &error);
}

static int32_t call_poll_error(void)
{
    return dispatcher_infos[0].api->poll_error(dispatcher, &error);
}

static int32_t call_set_active_ranks(void)
{
    return dispatcher_infos[0].api->set_active_ranks(dispatcher, active, &error);
}

static int32_t call_destroy_dispatcher(void)
{
    dispatcher_infos[0].api->destroy(dispatcher);
    return strstr(fake.trail, "dispatcher_destroy") != NULL ? MOXIE_OK : MOXIE_E_INVALID;
}

static int32_t call_config(void)
{
    moxie_config_entry entry = {.struct_size = sizeof entry};

    return api->config(instance, 0, &entry);
}

static int32_t call_validate(void)
{
    const moxie_report *report = (const moxie_report *)&tensor;
    int32_t st = api->validate(instance, &report, &error);

    ck_assert(st == MOXIE_OK || report == NULL);
    return st;
}

static int32_t call_plan(void)
{
    const moxie_plan *plan = (const moxie_plan *)&tensor;
    int32_t st = api->plan(instance, &plan, &error);

    ck_assert(st == MOXIE_OK || plan == NULL);
    return st;
}

static int32_t call_forward(void)
{
    return api->forward(dispatcher, live_runner, &batch, &error);
}

static int32_t call_captured(void)
{
    moxie_captured captured = {.struct_size = sizeof captured, .dp_rank = 2};

    return api->captured(instance, &captured, &error);
}

static int32_t call_stats(void)
{
    moxie_stats stats = {.struct_size = sizeof stats};

    return api->stats(instance, &stats, &error);
}

// No room behind these two: the door answers itself.
static int32_t call_suspend(void)
{
    int32_t st = api->suspend(instance, &error);

    return st == MOXIE_E_UNSUPPORTED ? MOXIE_OK : st;
}

static int32_t call_resume(void)
{
    int32_t st = api->resume(instance, &error);

    return st == MOXIE_E_UNSUPPORTED ? MOXIE_OK : st;
}

static int32_t call_close(void)
{
    return api->close(instance, &error);
}

static const struct {
    const char *table, *slot;
    int32_t (*call)(void);
    const char *trail;  // the rooms it enters
    int32_t null_is_ok; // destroy and close
} slots[] = {
    {"moxie_runner_api", "create", call_create_runner, "runner_create ", 0},
    {"moxie_runner_api", "run", call_run, "runner_run ", 0},
    {"moxie_runner_api", "weights_updated", call_weights_updated, "runner_weights_updated ", 0},
    {"moxie_runner_api", "destroy", call_destroy_runner, "runner_destroy ", 1},
    {"moxie_dispatcher_api", "create", call_create_dispatcher, "dispatcher_create ", 0},
    {"moxie_dispatcher_api", "begin_forward", call_begin_forward, "dispatcher_begin_forward ", 0},
    {"moxie_dispatcher_api", "dispatch", call_dispatch,
     "dispatcher_dispatch_send dispatcher_dispatch_recv ", 0},
    {"moxie_dispatcher_api", "combine", call_combine,
     "dispatcher_combine_send dispatcher_combine_recv ", 0},
    {"moxie_dispatcher_api", "dispatch_send", call_dispatch_send, "dispatcher_dispatch_send ", 0},
    {"moxie_dispatcher_api", "dispatch_recv", call_dispatch_recv, "dispatcher_dispatch_recv ", 0},
    {"moxie_dispatcher_api", "combine_send", call_combine_send, "dispatcher_combine_send ", 0},
    {"moxie_dispatcher_api", "combine_recv", call_combine_recv, "dispatcher_combine_recv ", 0},
    {"moxie_dispatcher_api", "poll_error", call_poll_error, "dispatcher_poll_error ", 0},
    {"moxie_dispatcher_api", "set_active_ranks", call_set_active_ranks,
     "dispatcher_set_active_ranks ", 0},
    {"moxie_dispatcher_api", "destroy", call_destroy_dispatcher, "dispatcher_destroy ", 1},
    {"moxie_api", "config", call_config, "instance_config ", 0},
    {"moxie_api", "validate", call_validate, "instance_validate ", 0},
    {"moxie_api", "plan", call_plan, "instance_plan ", 0},
    {"moxie_api", "forward", call_forward, "forward_run ", 0},
    {"moxie_api", "captured", call_captured, "instance_captured ", 0},
    {"moxie_api", "stats", call_stats, "instance_stats ", 0},
    {"moxie_api", "suspend", call_suspend, "", 0},
    {"moxie_api", "resume", call_resume, "", 0},
    {"moxie_api", "close", call_close, "instance_close ", 1},
    {"moxie_expand_api", "expand", call_expand, "runner_expand ", 0},
    {"moxie_expand_api", "fold", call_fold, "runner_fold ", 0},
};

#define SLOTS ((int)(sizeof slots / sizeof slots[0]))

// The tag in abi.h of a row of `slots`.
static int32_t thread_tag(int row)
{
    for (int i = 0; i < ABI_SLOTS; i++)
        if (strcmp(abi_slots[i].table, slots[row].table) == 0 &&
            strcmp(abi_slots[i].slot, slots[row].slot) == 0)
            return abi_slots[i].thread;
    ck_abort_msg("abi.h has no %s.%s", slots[row].table, slots[row].slot);
    return -1;
}

START_TEST(every_slot_with_a_handle_is_walked)
{
    int row = 0;

    for (int i = 0; i < ABI_SLOTS; i++) {
        if (!abi_slots[i].handle) continue;
        ck_assert_msg(row < SLOTS && strcmp(slots[row].table, abi_slots[i].table) == 0 &&
                          strcmp(slots[row].slot, abi_slots[i].slot) == 0,
                      "%s.%s is not row %d of slots", abi_slots[i].table, abi_slots[i].slot, row);
        row++;
    }
    ck_assert_int_eq(row, SLOTS);
}
END_TEST

START_TEST(slot_enters_its_room)
{
    ck_assert_msg(slots[_i].call() == MOXIE_OK, "%s: %s", slots[_i].slot, text);
    ck_assert_str_eq(fake.trail, slots[_i].trail);
    ck_assert_int_eq(fake.thread_tag, thread_tag(_i));
    ck_assert_int_eq(fake.out_of_turn, 0);
    ck_assert_int_eq(fake.creating, 0);
}
END_TEST

START_TEST(slot_refuses_null)
{
    instance = NULL;
    live_runner = NULL;
    dispatcher = NULL;
    if (slots[_i].null_is_ok)
        (void)slots[_i].call();
    else
        ck_assert_int_eq(slots[_i].call(), MOXIE_E_INVALID);
    ck_assert_str_eq(fake.trail, "");
}
END_TEST

START_TEST(slot_refuses_the_dead)
{
    fake.dead = 1;
    ck_assert_int_eq(slots[_i].call(), MOXIE_E_INVALID);
    ck_assert_str_eq(fake.trail, "");
}
END_TEST

START_TEST(slot_refuses_the_wrong_thread)
{
    fake.thread_answer = MOXIE_E_INVALID;
    if (thread_tag(_i) == ENTER_ANY) {
        ck_assert_int_eq(slots[_i].call(), MOXIE_OK);
        return;
    }
    ck_assert_int_eq(slots[_i].call(), MOXIE_E_INVALID);
    ck_assert_str_eq(fake.trail, "");
}
END_TEST

// Those that launch, which a stream or set_active_ranks says.
START_TEST(slot_refuses_another_device)
{
    static const char *const elsewhere[] = {"captured", "stats", "weights_updated",
                                            "begin_forward"};
    int steps = thread_tag(_i) == MOXIE_THREAD_INSTANCE_SERIAL;

    for (size_t i = 0; i < sizeof elsewhere / sizeof elsewhere[0]; i++)
        if (strcmp(slots[_i].slot, elsewhere[i]) == 0) steps = 0;
    fake.current_answer = MOXIE_E_INVALID;
    ck_assert_int_eq(slots[_i].call(), steps ? MOXIE_E_INVALID : MOXIE_OK);
    ck_assert_str_eq(fake.trail, steps ? "" : slots[_i].trail);
}
END_TEST

// The room's code and text reach the caller, and no out pointer does.
START_TEST(slot_passes_failures_up)
{
    int32_t st;

    fake.answer = MOXIE_E_PEER;
    st = slots[_i].call();
    if (strcmp(slots[_i].slot, "stats") == 0 || strcmp(slots[_i].slot, "destroy") == 0) return;
    if (slots[_i].trail[0] == '\0') return;
    ck_assert_int_eq(st, MOXIE_E_PEER);
    ck_assert_ptr_nonnull(strstr(slots[_i].trail, fake.trail));
}
END_TEST

// ---- Single slots ----

START_TEST(structs_reach_the_rooms)
{
    const int32_t experts[] = {4};

    matrix.format = MOXIE_FORMAT_MXFP4;
    ck_assert_int_eq(call_create_runner(), MOXIE_OK);
    ck_assert_int_eq(fake.layer, 9);
    ck_assert_int_eq(fake.w2.format, MOXIE_FORMAT_MXFP4);
    ck_assert_int_eq(call_run(), MOXIE_OK);
    ck_assert_int_eq(fake.call.layer, 2);
    ck_assert_uint_eq(fake.in_slabs[0].struct_size, sizeof slab);
    ck_assert_int_eq(fake.out.layout, MOXIE_LAYOUT_EXPERT_MASKED);
    ck_assert_int_eq(call_begin_forward(), MOXIE_OK);
    ck_assert_int_eq(fake.step.tokens, 5);
    ck_assert_int_eq(call_dispatch(), MOXIE_OK);
    ck_assert_ptr_eq(rows_in, &fake.in);
    ck_assert_ptr_eq(rows_out, &fake.out);
    ck_assert_int_eq(call_forward(), MOXIE_OK);
    ck_assert_int_eq(fake.batch.layer, 4);
    ck_assert_int_eq(call_expand(), MOXIE_OK);
    ck_assert_ptr_eq(fake.pointer, &tensor);
    ck_assert_int_eq(fake.in.layout, MOXIE_LAYOUT_STANDARD);
    ck_assert_int_eq(fake.out.layout, MOXIE_LAYOUT_EXPERT_MASKED);
    ck_assert_int_eq(call_fold(), MOXIE_OK);
    ck_assert_int_eq(fake.in.layout, MOXIE_LAYOUT_EXPERT_MASKED);
    ck_assert_int_eq(fake.out.layout, MOXIE_LAYOUT_STANDARD);
    ck_assert_int_eq(call_set_active_ranks(), MOXIE_OK);
    ck_assert_ptr_eq(fake.pointer, active);
    ck_assert_int_eq(runner_infos[0].api->weights_updated(live_runner, experts, 1, &error),
                     MOXIE_OK);
    ck_assert_ptr_eq(fake.pointer, experts);
    ck_assert_uint_eq(fake.count, 1);
}
END_TEST

START_TEST(null_arguments)
{
    const moxie_runner_api *runs = runner_infos[0].api;
    const moxie_dispatcher_api *moves = dispatcher_infos[0].api;
    const moxie_routing_api *routes = api->get_extension(MOXIE_ROUTING_EXTENSION);
    const moxie_expand_api *expands = api->get_extension(MOXIE_EXPAND_EXTENSION);
    const moxie_routing routing = {.struct_size = sizeof routing, .scoring = 1};

#define REFUSED(expression, name)                                                                  \
    do {                                                                                           \
        ck_assert_int_eq(expression, MOXIE_E_INVALID);                                             \
        ck_assert_msg(strncmp(text, name " is NULL", strlen(name " is NULL")) == 0, "%s", text);   \
    } while (0)

    REFUSED(runs->create(instance, 0, NULL, &live_runner, &error), "weights");
    fake.no_weights = 1;
    ck_assert_int_eq(runs->create(instance, 0, NULL, &live_runner, &error), MOXIE_OK);
    ck_assert_str_eq(fake.trail, "runner_create ");
    fake.trail[0] = '\0';
    // What no room would look at: even its size is not read.
    ck_assert_int_eq(
        runs->create(instance, 0, (const moxie_weights *)(const void *)text, &live_runner, &error),
        MOXIE_E_INVALID);
    ck_assert_str_eq(text, "weights: given, and the key runner is none, so that nothing would read "
                           "them: pass NULL, or set runner to auto");
    ck_assert_str_eq(fake.trail, "");
    fake.no_weights = 0;
    live_runner = fake_runners[0];
    REFUSED(runs->create(instance, 0, &weights, NULL, &error), "out");
    REFUSED(runs->run(live_runner, NULL, &rows, &rows, &error), "call");
    REFUSED(runs->run(live_runner, &call, NULL, &rows, &error), "in");
    REFUSED(runs->run(live_runner, &call, &rows, NULL, &error), "out");
    REFUSED(runs->weights_updated(live_runner, NULL, 3, &error), "ids");
    REFUSED(expands->expand(live_runner, &call, &rows, &rows, NULL, &error), "row_index");
    REFUSED(expands->fold(live_runner, &call, NULL, &tensor, &rows, &error), "expanded");
    REFUSED(expands->fold(live_runner, &call, &rows, NULL, &rows, &error), "row_index");
    REFUSED(moves->create(instance, NULL, &error), "out");
    REFUSED(moves->begin_forward(dispatcher, NULL, &error), "step");
    REFUSED(moves->dispatch(dispatcher, NULL, &rows_in, &rows_out, &error), "batch");
    REFUSED(moves->dispatch(dispatcher, &batch, NULL, &rows_out, &error), "in");
    REFUSED(moves->dispatch_recv(dispatcher, &batch, &rows_in, NULL, &error), "out");
    REFUSED(moves->combine(dispatcher, NULL, &error), "batch");
    REFUSED(moves->set_active_ranks(dispatcher, NULL, &error), "active");
    REFUSED(api->open(NULL, &instance, &error), "host");
    instance = fake_instances[0];
    REFUSED(api->validate(instance, NULL, &error), "report");
    REFUSED(api->plan(instance, NULL, &error), "plan");
    REFUSED(api->forward(dispatcher, live_runner, NULL, &error), "batch");
    REFUSED(api->captured(instance, NULL, &error), "captured");
    REFUSED(api->stats(instance, NULL, &error), "stats");
    REFUSED(routes->route(NULL, &tensor, &tensor, &tensor, NULL, &error), "routing");
    REFUSED(routes->route(&routing, NULL, &tensor, &tensor, NULL, &error), "logits");
    REFUSED(routes->route(&routing, &tensor, NULL, &tensor, NULL, &error), "ids");
    REFUSED(routes->route(&routing, &tensor, &tensor, NULL, NULL, &error), "weights");
    ck_assert_int_eq(api->config(instance, 0, NULL), MOXIE_E_INVALID);
    ck_assert_str_eq(fake.trail, "");
    ck_assert_int_eq(routes->route(&routing, &tensor, &tensor, &tensor, &error, &error), MOXIE_OK);
    ck_assert_ptr_eq(fake.pointer, &error);
    ck_assert_int_eq(fake.routing.scoring, 1);
}
END_TEST

START_TEST(a_failing_half_stops_the_whole)
{
    fake.answer = MOXIE_E_CAPACITY;
    ck_assert_int_eq(call_dispatch(), MOXIE_E_CAPACITY);
    ck_assert_str_eq(fake.trail, "dispatcher_dispatch_send ");
    fake.trail[0] = '\0';
    ck_assert_int_eq(call_combine(), MOXIE_E_CAPACITY);
    ck_assert_str_eq(fake.trail, "dispatcher_combine_send ");
}
END_TEST

START_TEST(two_instances_do_not_mix)
{
    live_runner = fake_runners[1];
    ck_assert_int_eq(call_forward(), MOXIE_E_INVALID);
    ck_assert_ptr_nonnull(strstr(text, "two instances"));
    dispatcher = fake_dispatchers[1];
    ck_assert_int_eq(call_forward(), MOXIE_OK);
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_checked_fixture(tests, setup, NULL);
    tcase_add_test(tests, every_slot_with_a_handle_is_walked);
    tcase_add_loop_test(tests, slot_enters_its_room, 0, SLOTS);
    tcase_add_loop_test(tests, slot_refuses_null, 0, SLOTS);
    tcase_add_loop_test(tests, slot_refuses_the_dead, 0, SLOTS);
    tcase_add_loop_test(tests, slot_refuses_the_wrong_thread, 0, SLOTS);
    tcase_add_loop_test(tests, slot_refuses_another_device, 0, SLOTS);
    tcase_add_loop_test(tests, slot_passes_failures_up, 0, SLOTS);
    tcase_add_test(tests, structs_reach_the_rooms);
    tcase_add_test(tests, null_arguments);
    tcase_add_test(tests, a_failing_half_stops_the_whole);
    tcase_add_test(tests, two_instances_do_not_mix);
}

SUITE_MAIN("entry_slots", 30, add)
