// Stand-ins for the rooms behind the door.

#include "host_tests/fake/rooms.h"

#include "plugin/forward.h"
#include "plugin/routing.h"
#include "plugin/runner.h"

#include <stdio.h>
#include <string.h>

struct moxie_runner {
    moxie_instance *instance;
};

struct moxie_dispatcher {
    moxie_instance *instance;
};

static moxie_instance instances[2];
static moxie_runner runners[2] = {{&instances[0]}, {&instances[1]}};
static moxie_dispatcher dispatchers[2] = {{&instances[0]}, {&instances[1]}};

struct fake_rooms fake;
moxie_instance *const fake_instances[2] = {&instances[0], &instances[1]};
moxie_runner *const fake_runners[2] = {&runners[0], &runners[1]};
moxie_dispatcher *const fake_dispatchers[2] = {&dispatchers[0], &dispatchers[1]};

static int32_t enter(const char *name, moxie_error *error)
{
    size_t used = strlen(fake.trail);

    (void)snprintf(fake.trail + used, sizeof fake.trail - used, "%s ", name);
    if (strstr(name, "er_create") != NULL || strstr(name, "er_destroy") != NULL)
        fake.out_of_turn += fake.creating != 1;
    if (fake.answer != MOXIE_OK) return fail_with(error, fake.answer, "%s was told to fail", name);
    return MOXIE_OK;
}

static void keep_rows(moxie_rows *rows, moxie_slab *slabs, const moxie_rows *from)
{
    *rows = *from;
    for (uint32_t i = 0; i < from->slabs_count; i++) {
        const unsigned char *at = (const unsigned char *)from->slabs;

        memcpy(&slabs[i], at + (size_t)i * from->slab_stride, sizeof slabs[i]);
    }
}

int32_t instance_open(const moxie_host *host, const struct registry *registry, moxie_instance **out,
                      moxie_error *error)
{
    int32_t st = enter("instance_open", error);

    fake.host = *host;
    if (st != MOXIE_OK) return st;
    for (uint32_t i = 0; i < registry->runners_count; i++)
        (void)host->register_runner(host->ctx, &registry->runners[i]);
    for (uint32_t i = 0; i < registry->dispatchers_count; i++)
        (void)host->register_dispatcher(host->ctx, &registry->dispatchers[i]);
    *out = fake_instances[0];
    return MOXIE_OK;
}

int32_t instance_close(moxie_instance *instance, moxie_error *error)
{
    (void)instance;
    return enter("instance_close", error);
}

// Handles are the instances themselves.
moxie_instance *instance_handle(const moxie_instance *instance)
{
    return fake_instances[instance == &instances[1]];
}

moxie_instance *instance_of(const moxie_instance *handle)
{
    if (fake.dead || (handle != &instances[0] && handle != &instances[1])) return NULL;
    return fake_instances[handle == &instances[1]];
}

int32_t instance_check_thread(const moxie_instance *instance, int32_t tag, moxie_error *error)
{
    (void)instance;
    fake.thread_tag = tag;
    if (fake.thread_answer != MOXIE_OK) return fail_with(error, fake.thread_answer, "wrong thread");
    return MOXIE_OK;
}

int32_t instance_check_current(const moxie_instance *instance, moxie_error *error)
{
    (void)instance;
    if (fake.current_answer != MOXIE_OK)
        return fail_with(error, fake.current_answer, "wrong device");
    return MOXIE_OK;
}

int32_t instance_begin_create(moxie_instance *instance, moxie_error *error)
{
    (void)instance;
    (void)error;
    fake.creating++;
    return MOXIE_OK;
}

void instance_end_create(moxie_instance *instance)
{
    (void)instance;
    fake.creating--;
}

// Two keys: one that the host may set, and a word.
int32_t instance_config(const moxie_instance *instance, uint64_t index, moxie_config_entry *entry)
{
    int64_t hidden = 0;

    (void)instance;
    if (index > 1) return MOXIE_E_INVALID;
    entry->key = index == 0 ? "hidden_size" : "runner";
    entry->type = index == 0 ? "i64" : "str";
    entry->value = index == 0 ? "0" : "moxie_cpu";
    entry->help = "a key";
    if (index == 0 && fake.host.get_i64 != NULL)
        entry->found = fake.host.get_i64(fake.host.ctx, "hidden_size", &hidden) == 0;
    return enter("instance_config", NULL);
}

int32_t instance_validate(const moxie_instance *instance, const moxie_report **report)
{
    static const moxie_report accepted = {.struct_size = sizeof accepted,
                                          .reason_stride = sizeof(moxie_reason)};
    int32_t st = enter("instance_validate", NULL);

    (void)instance;
    if (st == MOXIE_OK) *report = &accepted;
    return st;
}

// As the real one, a refused configuration still has a plan with bounds.
int32_t instance_plan(const moxie_instance *instance, const moxie_plan **plan, moxie_error *error)
{
    static const moxie_bounds bounds = {.struct_size = sizeof bounds, .forward_tokens = 17};
    static const moxie_plan empty = {
        .struct_size = sizeof empty, .buffer_stride = sizeof(moxie_buffer), .bounds = &bounds};
    int32_t st = enter("instance_plan", error);

    (void)instance;
    if (st == MOXIE_OK || st == MOXIE_E_CONFIG) *plan = &empty;
    return st;
}

int32_t instance_captured(const moxie_instance *instance, moxie_captured *captured,
                          moxie_error *error)
{
    int32_t st = enter("instance_captured", error);

    (void)instance;
    fake.captured = *captured;
    captured->ids.ndim = 3;
    return st;
}

void instance_stats(const moxie_instance *instance, moxie_stats *stats)
{
    (void)instance;
    (void)enter("instance_stats", NULL);
    stats->forwards = 7;
    stats->bytes_allocated = 1024;
}

int32_t runner_create(moxie_instance *instance, int32_t layer, const moxie_weights *weights,
                      moxie_runner **out, moxie_error *error)
{
    int32_t st = enter("runner_create", error);

    (void)instance;
    fake.layer = layer;
    if (!fake.no_weights) {
        fake.w1 = *weights->w1;
        fake.w2 = *weights->w2;
    }
    if (st == MOXIE_OK) *out = fake_runners[0];
    return st;
}

int32_t runner_run(moxie_runner *runner, const moxie_call *call, const moxie_rows *in,
                   const moxie_rows *out, moxie_error *error)
{
    (void)runner;
    fake.call = *call;
    keep_rows(&fake.in, fake.in_slabs, in);
    keep_rows(&fake.out, fake.out_slabs, out);
    return enter("runner_run", error);
}

int32_t runner_weights_updated(moxie_runner *runner, const int32_t *experts, uint64_t count,
                               moxie_error *error)
{
    (void)runner;
    fake.pointer = experts;
    fake.count = count;
    return enter("runner_weights_updated", error);
}

int runner_takes_weights(const moxie_instance *instance)
{
    (void)instance;
    return !fake.no_weights;
}

void runner_destroy(moxie_runner *runner)
{
    (void)runner;
    (void)enter("runner_destroy", NULL);
}

int32_t runner_expand(moxie_runner *runner, const moxie_call *call, const moxie_rows *in,
                      const moxie_rows *out, const moxie_tensor *row_index, moxie_error *error)
{
    (void)runner;
    fake.call = *call;
    fake.pointer = row_index;
    keep_rows(&fake.in, fake.in_slabs, in);
    keep_rows(&fake.out, fake.out_slabs, out);
    return enter("runner_expand", error);
}

int32_t runner_fold(moxie_runner *runner, const moxie_call *call, const moxie_rows *expanded,
                    const moxie_tensor *row_index, const moxie_rows *out, moxie_error *error)
{
    (void)runner;
    fake.call = *call;
    fake.pointer = row_index;
    keep_rows(&fake.in, fake.in_slabs, expanded);
    keep_rows(&fake.out, fake.out_slabs, out);
    return enter("runner_fold", error);
}

int runner_is_live(const moxie_runner *runner)
{
    return !fake.dead && (runner == &runners[0] || runner == &runners[1]);
}

moxie_instance *runner_instance(const moxie_runner *runner)
{
    return runner->instance;
}

int32_t dispatcher_create(moxie_instance *instance, enum dispatcher_kind kind,
                          moxie_dispatcher **out, moxie_error *error)
{
    int32_t st = enter("dispatcher_create", error);

    (void)instance;
    fake.kind = (int32_t)kind;
    if (st == MOXIE_OK) *out = fake_dispatchers[0];
    return st;
}

int32_t dispatcher_begin_forward(moxie_dispatcher *dispatcher, const moxie_step *step,
                                 moxie_error *error)
{
    (void)dispatcher;
    fake.step = *step;
    return enter("dispatcher_begin_forward", error);
}

int32_t dispatcher_dispatch_send(moxie_dispatcher *dispatcher, const moxie_batch *batch,
                                 moxie_error *error)
{
    (void)dispatcher;
    fake.batch = *batch;
    return enter("dispatcher_dispatch_send", error);
}

int32_t dispatcher_dispatch_recv(moxie_dispatcher *dispatcher, const moxie_batch *batch,
                                 const moxie_rows **in, const moxie_rows **out, moxie_error *error)
{
    int32_t st = enter("dispatcher_dispatch_recv", error);

    (void)dispatcher;
    fake.batch = *batch;
    if (st == MOXIE_OK) {
        *in = &fake.in;
        *out = &fake.out;
    }
    return st;
}

int32_t dispatcher_combine_send(moxie_dispatcher *dispatcher, const moxie_batch *batch,
                                moxie_error *error)
{
    (void)dispatcher;
    fake.batch = *batch;
    return enter("dispatcher_combine_send", error);
}

int32_t dispatcher_combine_recv(moxie_dispatcher *dispatcher, const moxie_batch *batch,
                                moxie_error *error)
{
    (void)dispatcher;
    fake.batch = *batch;
    return enter("dispatcher_combine_recv", error);
}

int32_t dispatcher_poll_error(moxie_dispatcher *dispatcher, moxie_error *error)
{
    (void)dispatcher;
    return enter("dispatcher_poll_error", error);
}

int32_t dispatcher_set_active_ranks(moxie_dispatcher *dispatcher, const uint8_t *active,
                                    moxie_error *error)
{
    (void)dispatcher;
    fake.pointer = active;
    return enter("dispatcher_set_active_ranks", error);
}

void dispatcher_destroy(moxie_dispatcher *dispatcher)
{
    (void)dispatcher;
    (void)enter("dispatcher_destroy", NULL);
}

int dispatcher_is_live(const moxie_dispatcher *dispatcher)
{
    return !fake.dead && (dispatcher == &dispatchers[0] || dispatcher == &dispatchers[1]);
}

moxie_instance *dispatcher_instance(const moxie_dispatcher *dispatcher)
{
    return dispatcher->instance;
}

int32_t forward_run(moxie_dispatcher *dispatcher, moxie_runner *runner, const moxie_batch *batch,
                    moxie_error *error)
{
    (void)dispatcher;
    (void)runner;
    fake.batch = *batch;
    return enter("forward_run", error);
}

int32_t routing_route(const moxie_routing *routing, const moxie_tensor *logits,
                      const moxie_tensor *ids, const moxie_tensor *weights, void *stream,
                      moxie_error *error)
{
    (void)logits;
    (void)ids;
    (void)weights;
    fake.routing = *routing;
    fake.pointer = stream;
    return enter("routing_route", error);
}
