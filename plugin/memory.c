// The planned buffers of an instance.

#include "plugin/memory.h"

#include <inttypes.h>
#include <string.h>

static const moxie_buffer *plan_buffer(const struct plan *plan, enum buffer_id id)
{
    for (uint64_t i = 0; i < plan->buffers_count; i++) {
        if (plan->buffer_ids[i] == (int32_t)id) return &plan->buffers[i];
    }
    return NULL;
}

static int32_t allocate(struct memory *memory, enum buffer_id id, moxie_error *error)
{
    const moxie_buffer *buffer = plan_buffer(memory->plan, id);
    moxie_allocation *request = &memory->buffers[id].request;
    void *base = NULL;
    int32_t answer;

    if (buffer == NULL || buffer->bytes == 0) return MOXIE_OK;
    *request = (moxie_allocation){.struct_size = sizeof *request,
                                  .kind = buffer->kind,
                                  .bytes = buffer->bytes,
                                  .align = buffer->align,
                                  .name = buffer->name};
    if (memory->host->allocate != NULL)
        answer = memory->host->allocate(memory->host->ctx, request, &base);
    else
        answer = memory->device->allocate(request, &base);
    if (memory->host->allocate == NULL && memory->device->is_capture_error(answer))
        return fail_with(error, MOXIE_E_CAPTURING,
                         "%s: no memory can be taken while a graph is captured; create runners "
                         "and dispatchers before",
                         buffer->name);
    if (answer != 0 || base == NULL)
        return fail_with(error, MOXIE_E_MEMORY,
                         "%s: the %s could not give %" PRIu64 " bytes (answer %d)", buffer->name,
                         memory->host->allocate != NULL ? "host's allocator" : "device",
                         buffer->bytes, answer);
    memory->buffers[id].base = base;
    memory->bytes_held += buffer->bytes_mapped;
    if (((uintptr_t)base & (buffer->align - 1)) != 0)
        return fail_with(error, MOXIE_E_MEMORY,
                         "%s: the host's allocator gave %p; want alignment %" PRIu64, buffer->name,
                         base, buffer->align);
    return MOXIE_OK;
}

static void release(struct memory *memory, enum buffer_id id)
{
    const moxie_buffer *buffer = plan_buffer(memory->plan, id);
    void *base = memory->buffers[id].base;

    if (base == NULL || buffer == NULL) return;
    if (memory->host->allocate != NULL)
        memory->host->release(memory->host->ctx, &memory->buffers[id].request, base);
    else
        memory->device->release(&memory->buffers[id].request, base);
    memory->buffers[id].base = NULL;
    memory->bytes_held -= buffer->bytes_mapped;
}

int32_t memory_take(struct memory *memory, uint32_t set, moxie_error *error)
{
    for (int32_t id = 0; id < BUFFER_COUNT; id++) {
        int32_t st;

        if ((set & 1u << id) == 0) continue;
        st = memory->buffers[id].users > 0 ? MOXIE_OK : allocate(memory, (enum buffer_id)id, error);
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
        if ((set & 1u << id) != 0 && --memory->buffers[id].users == 0)
            release(memory, (enum buffer_id)id);
    }
}

void *memory_slot(const struct memory *memory, enum buffer_id id, int32_t slot)
{
    unsigned char *base = memory->buffers[id].base;

    if (base == NULL) return NULL;
    return base + slot * memory->plan->slot_bytes[id];
}
