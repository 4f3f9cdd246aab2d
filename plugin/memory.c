// The planned buffers of an instance.

#include "plugin/memory.h"

#include "plugin/log.h"

#include <inttypes.h>

static const moxie_buffer *plan_buffer(const struct plan *plan, enum buffer_id id)
{
    for (uint64_t i = 0; i < plan->buffers_count; i++) {
        if (plan->buffer_ids[i] == (int32_t)id) return &plan->buffers[i];
    }
    return NULL;
}

static moxie_allocation request_of(const moxie_buffer *buffer)
{
    return (moxie_allocation){.struct_size = sizeof(moxie_allocation),
                              .kind = buffer->kind,
                              .bytes = buffer->bytes,
                              .align = buffer->align,
                              .name = buffer->name};
}

static void say_misbehaving(const struct memory *memory, const moxie_buffer *buffer)
{
    log_line(memory->host, MOXIE_LOG_HOST_MISBEHAVING, "memory",
             "%s: the host's allocator answered 0, and gave no memory of this alignment",
             buffer->name);
}

// What was given, and zeros in it where the plan says so.
static int32_t check_made(const struct memory *memory, enum buffer_id id,
                          const moxie_buffer *buffer, void *base, moxie_error *error)
{
    if (((uintptr_t)base & (buffer->align - 1)) != 0) {
        say_misbehaving(memory, buffer);
        return fail_with(error, MOXIE_E_MEMORY,
                         "%s: the host's allocator gave %p; want alignment %" PRIu64, buffer->name,
                         base, buffer->align);
    }
    if ((BUFFERS_ZERO & 1u << id) == 0) return MOXIE_OK;
    return device_check(memory->device, memory->device->fill(base, 0, (int64_t)buffer->bytes),
                        buffer->name, error);
}

// What helps when there is no memory of this kind: the budget counts the device's alone, and the
// host's is what threads compute in.
static const char *remedy_for(int32_t kind)
{
    if (kind == MOXIE_MEMORY_DEVICE)
        return "; set device_memory_budget_bytes to what is free, and the refusal says which key "
               "to set to what";
    return kind == MOXIE_MEMORY_HOST ? "; set cpu_threads lower" : "; free page-locked memory";
}

// An allocator of the host's has reasons of its own.
static int32_t not_given(const struct memory *memory, const moxie_buffer *buffer, int32_t answer,
                         moxie_error *error)
{
    const int32_t st = answer == 0 ? MOXIE_E_MEMORY : memory->device->status(answer);

    if (memory->host->allocate != NULL)
        return fail_with(error, MOXIE_E_MEMORY,
                         "%s: the host's allocator could not give %" PRIu64 " bytes (answer %d%s)",
                         buffer->name, buffer->bytes, answer, answer == 0 ? ", and no memory" : "");
    return fail_with(error, st, "%s: the device could not give %" PRIu64 " bytes (%s)%s",
                     buffer->name, buffer->bytes, memory->device->error_text(answer),
                     st == MOXIE_E_MEMORY ? remedy_for(buffer->kind)
                                          : device_earlier(memory->device, st));
}

int32_t memory_make(struct memory *memory, enum buffer_id id, void **base, moxie_error *error)
{
    const moxie_buffer *buffer = plan_buffer(memory->plan, id);
    moxie_allocation request;
    int32_t answer, st;

    *base = NULL;
    if (buffer == NULL || buffer->bytes == 0) return MOXIE_OK;
    request = request_of(buffer);
    if (memory->host->allocate != NULL)
        answer = memory->host->allocate(memory->host->ctx, &request, base);
    else
        answer = memory->device->allocate(&request, base);
    if (memory->host->allocate == NULL && memory->device->status(answer) == MOXIE_E_CAPTURING)
        return fail_with(error, MOXIE_E_CAPTURING,
                         "%s: no memory can be taken while a graph is captured; create runners "
                         "and dispatchers before",
                         buffer->name);
    if (answer == 0 && *base == NULL && memory->host->allocate != NULL)
        say_misbehaving(memory, buffer);
    if (answer != 0 || *base == NULL) {
        *base = NULL;
        return not_given(memory, buffer, answer, error);
    }
    memory->bytes_held += buffer->bytes_mapped;
    st = check_made(memory, id, buffer, *base, error);
    if (st == MOXIE_OK) return MOXIE_OK;
    memory_unmake(memory, id, *base);
    *base = NULL;
    return st;
}

void memory_unmake(struct memory *memory, enum buffer_id id, void *base)
{
    const moxie_buffer *buffer = plan_buffer(memory->plan, id);
    moxie_allocation request;

    if (base == NULL || buffer == NULL) return;
    request = request_of(buffer);
    if (memory->host->allocate != NULL)
        memory->host->release(memory->host->ctx, &request, base);
    else
        memory->device->release(&request, base);
    memory->bytes_held -= buffer->bytes_mapped;
}

int32_t memory_take(struct memory *memory, uint32_t set, moxie_error *error)
{
    for (int32_t id = 0; id < BUFFER_COUNT; id++) {
        int32_t st;

        if ((set & 1u << id) == 0) continue;
        st = memory->buffers[id].users > 0
                 ? MOXIE_OK
                 : memory_make(memory, (enum buffer_id)id, &memory->buffers[id].base, error);
        memory->buffers[id].users++;
        if (st != MOXIE_OK) {
            memory_drop(memory, set & ((2u << id) - 1));
            return st;
        }
    }
    return MOXIE_OK;
}

void memory_drop(struct memory *memory, uint32_t set)
{
    for (int32_t id = 0; id < BUFFER_COUNT; id++) {
        if ((set & 1u << id) == 0 || --memory->buffers[id].users > 0) continue;
        memory_unmake(memory, (enum buffer_id)id, memory->buffers[id].base);
        memory->buffers[id].base = NULL;
    }
}

void *memory_slot(const struct memory *memory, enum buffer_id id, int32_t slot)
{
    unsigned char *base = memory->buffers[id].base;

    if (base == NULL) return NULL;
    return base + slot * memory->plan->slot_bytes[id];
}
