// The host's allocator: every block is poisoned, stands between fences, and is remembered.

#include "hosts/cli/conform_memory.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FENCE_BYTES 4096
#define FENCE       0x5c
#define POISON      0xa5
#define BYTES_MAX   ((uint64_t)1 << 30) // of one block: nothing that a rule configures needs more

static void note(char to[ENGINE_NOTE_BYTES], const char *name, const char *what)
{
    if (to[0] == '\0') (void)snprintf(to, ENGINE_NOTE_BYTES, "%.60s: %.180s", name, what);
}

// Where a block is; NULL finds a free entry.
static struct block *block_of(struct engine *engine, const void *memory)
{
    for (int i = 0; i < ENGINE_BLOCKS_MAX; i++)
        if (engine->blocks[i].memory == memory) return &engine->blocks[i];
    return NULL;
}

static const char *name_of(const moxie_allocation *request)
{
    return request->name != NULL ? request->name : "a buffer without a name";
}

static int check_request(struct engine *engine, const moxie_allocation *request)
{
    const char *wrong = NULL;

    if (request->struct_size < sizeof *request)
        wrong = "struct_size of the request is too small";
    else if (request->bytes == 0)
        wrong = "0 bytes were asked for";
    else if (request->align == 0 || (request->align & (request->align - 1)) != 0)
        wrong = "the alignment asked for is no power of two";
    else if (request->kind == MOXIE_MEMORY_SYMMETRIC || request->kind < MOXIE_MEMORY_DEVICE ||
             request->kind > MOXIE_MEMORY_HOST)
        wrong = "the kind asked for is none that a host gives";
    else if (request->name == NULL)
        wrong = "the request has no name";
    else if (engine->closed)
        wrong = "asked for after close";
    if (wrong != NULL) note(engine->memory_note, name_of(request), wrong);
    return wrong == NULL && request->bytes <= BYTES_MAX;
}

static int32_t make_block(struct engine *engine, const moxie_allocation *request, void **memory)
{
    struct block *block = block_of(engine, NULL);
    uint64_t front =
        request->align > FENCE_BYTES ? request->align : FENCE_BYTES; // both powers of two
    void *base = NULL;

    if (block == NULL || posix_memalign(&base, front, front + request->bytes + FENCE_BYTES) != 0)
        return -1;
    memset(base, FENCE, front + request->bytes + FENCE_BYTES);
    *block = (struct block){.request = *request,
                            .base = base,
                            .memory = (unsigned char *)base + front,
                            .bytes = request->bytes};
    memset(block->memory, POISON, block->bytes);
    (void)snprintf(block->name, sizeof block->name, "%s", request->name);
    engine->bytes_live += block->bytes;
    *memory = block->memory;
    return 0;
}

int32_t memory_allocate(void *ctx, const moxie_allocation *request, void **memory)
{
    struct engine *engine = ctx;
    int32_t answer = -1;

    *memory = NULL;
    (void)pthread_mutex_lock(&engine->lock);
    engine->allocations++;
    if (check_request(engine, request) &&
        (engine->allocation_fails == 0 || engine->allocations < engine->allocation_fails))
        answer = make_block(engine, request, memory);
    (void)pthread_mutex_unlock(&engine->lock);
    return answer;
}

static void check_fence(struct engine *engine, const struct block *block)
{
    const unsigned char *end = block->memory + block->bytes;
    char text[160];

    for (int i = 0; i < FENCE_BYTES; i++) {
        long long at = end[i] != FENCE                  ? (long long)block->bytes + i
                       : block->memory[-1 - i] != FENCE ? -1 - i
                                                        : 0;

        if (at == 0) continue;
        (void)snprintf(text, sizeof text, "written at byte %lld of %llu", at,
                       (unsigned long long)block->bytes);
        note(engine->fence_note, block->name, text);
        return;
    }
}

void engine_check_fences(struct engine *engine)
{
    (void)pthread_mutex_lock(&engine->lock);
    for (int i = 0; i < ENGINE_BLOCKS_MAX; i++)
        if (engine->blocks[i].base != NULL) check_fence(engine, &engine->blocks[i]);
    (void)pthread_mutex_unlock(&engine->lock);
}

static int same_request(const struct block *block, const moxie_allocation *request)
{
    return request->bytes == block->request.bytes && request->align == block->request.align &&
           request->kind == block->request.kind && request->name != NULL &&
           strcmp(request->name, block->name) == 0;
}

void memory_release(void *ctx, const moxie_allocation *request, void *memory)
{
    struct engine *engine = ctx;
    struct block *block = NULL;

    (void)pthread_mutex_lock(&engine->lock);
    if (engine->closed) note(engine->memory_note, name_of(request), "released after close");
    if (memory != NULL) block = block_of(engine, memory);
    if (block == NULL) {
        note(engine->memory_note, name_of(request), "released, but not allocated");
    } else {
        if (!same_request(block, request))
            note(engine->memory_note, block->name, "released by another request than its own");
        check_fence(engine, block);
        engine->bytes_live -= block->bytes;
        free(block->base);
        *block = (struct block){0};
    }
    (void)pthread_mutex_unlock(&engine->lock);
}

void memory_drop(struct engine *engine)
{
    for (int i = 0; i < ENGINE_BLOCKS_MAX; i++)
        free(engine->blocks[i].base);
}
