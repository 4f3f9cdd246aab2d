// Rules of memory: the plan tells every byte, create takes them, a forward takes nothing, and
// destroy and close give all of it back.

#include "hosts/cli/conform_malloc.h"
#include "hosts/cli/conform_stage.h"
#include "hosts/cli/fault.h"

#include <errno.h>
#include <inttypes.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

static const moxie_buffer *buffer_at(const moxie_plan *plan, uint64_t index)
{
    const unsigned char *first = (const unsigned char *)plan->buffers;

    return (const moxie_buffer *)(const void *)(first + index * plan->buffer_stride);
}

// ---- The plan ----------------------------------------------------------------------------------

static int check_buffers(struct check *check, const moxie_plan *plan)
{
    uint64_t sums[MOXIE_MEMORY_HOST + 1] = {0};

    for (uint64_t i = 0; i < plan->buffers_count; i++) {
        const moxie_buffer *buffer = buffer_at(plan, i);

        if (buffer->name == NULL || buffer->why == NULL)
            return broken(check, "buffer %d has no name or no why", (int)i);
        if (buffer->kind < MOXIE_MEMORY_DEVICE || buffer->kind > MOXIE_MEMORY_HOST)
            return broken(check, "%.60s: kind %d", buffer->name, buffer->kind);
        if (buffer->bytes_mapped < buffer->bytes)
            return broken(check, "%.60s: takes fewer bytes than it asks for", buffer->name);
        if (buffer->align == 0 || (buffer->align & (buffer->align - 1)) != 0)
            return broken(check, "%.60s: align %" PRIu64 " is no power of two", buffer->name,
                          buffer->align);
        sums[buffer->kind] += buffer->bytes_mapped;
    }
    if (sums[MOXIE_MEMORY_DEVICE] != plan->device_bytes ||
        sums[MOXIE_MEMORY_SYMMETRIC] != plan->symmetric_bytes ||
        sums[MOXIE_MEMORY_PINNED] != plan->pinned_bytes ||
        sums[MOXIE_MEMORY_HOST] != plan->host_bytes)
        return broken(check, "the sums by kind are not those of the buffers");
    return VERDICT_PASS;
}

// How many of the live blocks are this buffer, alike in everything.
static int count_blocks(const struct engine *engine, const moxie_buffer *buffer)
{
    int count = 0;

    for (int i = 0; i < ENGINE_BLOCKS_MAX; i++) {
        const struct block *block = &engine->blocks[i];

        if (block->base == NULL || strcmp(block->name, buffer->name) != 0) continue;
        count += block->bytes == buffer->bytes && block->request.align == buffer->align &&
                         block->request.kind == buffer->kind
                     ? 1
                     : 1000;
    }
    return count;
}

int rule_memory_planned(struct check *check)
{
    struct stage stage;
    struct engine *engine = &stage.engine;
    uint64_t planned = 0;
    int blocks = 0;
    int st = VERDICT_PASS;

    TRY(stage_open(&stage, check));
    check_at(check, "plan");
    TRY(check_buffers(check, engine->plan));
    for (uint64_t i = 0; i < engine->plan->buffers_count; i++) {
        const moxie_buffer *buffer = buffer_at(engine->plan, i);
        int count = count_blocks(engine, buffer);

        if (buffer->kind == MOXIE_MEMORY_SYMMETRIC || buffer->bytes == 0) continue;
        planned++;
        check_at(check, "buffer %.60s", buffer->name);
        if (count == 0)
            TRY(broken(check, "planned with %" PRIu64 " bytes, and create did not ask for it",
                       buffer->bytes));
        if (count > 1)
            TRY(broken(check,
                       "planned once, as kind %d, %" PRIu64 " bytes, align %" PRIu64
                       "; asked for otherwise, or twice",
                       buffer->kind, buffer->bytes, buffer->align));
    }
    for (int i = 0; i < ENGINE_BLOCKS_MAX; i++)
        blocks += engine->blocks[i].base != NULL;
    check_at(check, "create");
    if ((uint64_t)blocks != planned)
        TRY(broken(check, "%d buffers were asked for, %d are planned", blocks, (int)planned));
    if (engine->memory_note[0] != '\0') TRY(broken(check, "%s", engine->memory_note));
out:
    stage_fini(&stage);
    return st;
}

int rule_memory_fences(struct check *check)
{
    struct stage stage;
    struct engine *engine = &stage.engine;
    const int64_t counts[] = {1, 5, BASE_TOKENS_MAX};
    int st = VERDICT_PASS;

    TRY(stage_open(&stage, check));
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        stage.tokens_spec.count = counts[i];
        TRY(tokens_make(&stage.tokens, &stage.tokens_spec, check));
        // All to one expert: the fullest that a tile can be.
        for (int64_t token = 0; i == 2 && token < counts[i]; token++)
            tokens_set(&stage.tokens, token, 0, 1, 1);
        TRY(engine_forward(engine, &stage.tokens));
        engine_check_fences(engine);
        check_at(check, "forward of %lld tokens", (long long)counts[i]);
        if (engine->fence_note[0] != '\0') TRY(broken(check, "%s", engine->fence_note));
    }
    engine_destroy(engine);
    check_at(check, "destroy");
    if (engine->fence_note[0] != '\0') TRY(broken(check, "%s", engine->fence_note));
out:
    stage_fini(&stage);
    return st;
}

static const char *name_of_live(const struct engine *engine)
{
    for (int i = 0; i < ENGINE_BLOCKS_MAX; i++)
        if (engine->blocks[i].base != NULL) return engine->blocks[i].name;
    return "";
}

int rule_memory_freed(struct check *check)
{
    struct stage stage;
    struct engine *engine = &stage.engine;
    uint64_t held = 0;
    int st = VERDICT_PASS;

    TRY(stage_open(&stage, check));
    held = engine->bytes_live;
    TRY(engine_forward(engine, &stage.tokens));
    for (int round = 0; round < 2; round++) {
        engine_destroy(engine);
        TRY(engine_create(engine, &stage.layer, 1));
        check_at(check, "destroy and create again, round %d", round + 1);
        if (engine->bytes_live != held)
            TRY(broken(check, "holds %" PRIu64 " bytes, and %" PRIu64 " at first",
                       engine->bytes_live, held));
    }
    engine_destroy(engine);
    check_at(check, "destroy of the runner and the dispatcher");
    if (engine->bytes_live != 0)
        TRY(broken(check, "%" PRIu64 " bytes are still held, of %.60s", engine->bytes_live,
                   name_of_live(engine)));
    TRY(expect_status(check, engine_close(engine), MOXIE_OK, engine->text));
    check_at(check, "open and close after that");
    TRY(expect_status(check, engine_try_open(engine), MOXIE_OK, engine->text));
    TRY(expect_status(check, engine_close(engine), MOXIE_OK, engine->text));
    if (engine->bytes_live != 0 || engine->memory_note[0] != '\0')
        TRY(broken(check, "%.60s%s", name_of_live(engine), engine->memory_note));
out:
    stage_fini(&stage);
    return st;
}

int rule_memory_failure(struct check *check)
{
    struct stage stage;
    struct engine *engine = &stage.engine;
    uint64_t fails = 1;
    int st = VERDICT_PASS;

    TRY(stage_init(&stage, check));
    TRY(layer_make(&stage.layer, &stage.layer_spec, check));
    TRY(tokens_make(&stage.tokens, &stage.tokens_spec, check));
    for (int made = 0; !made && fails < 64; fails++) {
        struct check quiet = {.plugin = check->plugin};
        int created = 0;

        TRY(engine_open(engine));
        engine->allocations = 0;
        engine->allocation_fails = fails;
        engine->check = &quiet;
        created = engine_create(engine, &stage.layer, 1) == VERDICT_PASS;
        engine->check = check;
        check_at(check, "create, when allocation %d fails", (int)fails);
        made = engine->allocations < fails;
        if (!made && (created || engine->error.code != MOXIE_E_MEMORY))
            TRY(broken(check, "%s; want MOXIE_E_MEMORY: %.300s",
                       created ? "goes on" : "fails otherwise", engine->text));
        if (made) TRY(expect_status(check, engine->error.code, MOXIE_OK, engine->text));
        engine->allocation_fails = 0;
        engine_destroy(engine);
        if (engine->bytes_live != 0)
            TRY(broken(check, "%" PRIu64 " bytes are held after the failure, of %.60s",
                       engine->bytes_live, name_of_live(engine)));
        TRY(expect_status(check, engine_close(engine), MOXIE_OK, engine->text));
    }
out:
    stage_fini(&stage);
    return st;
}

int rule_forward_allocates_nothing(struct check *check)
{
    struct stage stage;
    struct engine *engine = &stage.engine;
    const int64_t counts[] = {5, 1, BASE_TOKENS_MAX};
    int st = VERDICT_PASS;

    TRY(stage_open(&stage, check));
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        const moxie_step step = {.struct_size = sizeof step, .tokens = counts[i]};
        uint64_t before = engine->allocations, calls = 0;
        int32_t status = MOXIE_OK;

        stage.tokens_spec.count = counts[i];
        TRY(tokens_make(&stage.tokens, &stage.tokens_spec, check));
        // A plugin may warm up in its first forward of all, of what belongs to the process.
        if (i == 0) TRY(engine_forward(engine, &stage.tokens));
        malloc_count_begin();
        status = engine_begin(engine, &step);
        if (status == MOXIE_OK) status = engine_run(engine, &stage.tokens);
        calls = malloc_count_end();
        TRY(expect_status(check, status, MOXIE_OK, engine->text));
        if (engine->allocations != before)
            TRY(broken(check, "called the host's allocator %d times",
                       (int)(engine->allocations - before)));
        if (calls != 0) TRY(broken(check, "called malloc or its like %d times", (int)calls));
    }
out:
    stage_fini(&stage);
    return st;
}

// ---- Purity ------------------------------------------------------------------------------------

// The text of the base configuration's plan.
static int plan_text(struct check *check, struct engine *engine, char *text)
{
    int st = VERDICT_PASS;

    TRY(engine_open(engine));
    engine_print_plan(engine, text, PLAN_TEXT_BYTES);
    TRY(expect_status(check, engine_close(engine), MOXIE_OK, engine->text));
out:
    return st;
}

int conform_plan(struct check *check, char text[PLAN_TEXT_BYTES])
{
    struct stage stage;
    int st = VERDICT_PASS;

    TRY(stage_init(&stage, check));
    TRY(plan_text(check, &stage.engine, text));
out:
    stage_fini(&stage);
    return st;
}

// What this command prints of the plan when it runs anew, with this environment.
static int plan_elsewhere(struct check *check, char *const environment[], char *text)
{
    char *argv[] = {program_invocation_name,  (char[]){"conform"},
                    (char[]){"--plugin"},     NULL,
                    (char[]){"--print-plan"}, NULL};
    posix_spawn_file_actions_t actions;
    FILE *file = tmpfile();
    pid_t pid = 0;
    int failed = 0, status = 0;

    if (file == NULL) return skipped(check, "no temporary file: %s", strerror(errno));
    argv[3] = (char *)(uintptr_t)check->plugin;
    failed = posix_spawn_file_actions_init(&actions);
    if (failed == 0) {
        failed = posix_spawn_file_actions_adddup2(&actions, fileno(file), STDOUT_FILENO);
        if (failed == 0)
            failed = posix_spawn(&pid, "/proc/self/exe", &actions, NULL, argv, environment);
        (void)posix_spawn_file_actions_destroy(&actions);
    }
    if (failed == 0 && waitpid(pid, &status, 0) == pid) {
        rewind(file);
        text[fread(text, 1, PLAN_TEXT_BYTES - 1, file)] = '\0';
    }
    (void)fclose(file);
    if (failed != 0) return skipped(check, "no process: %s", strerror(failed));
    if (status != 0) return broken(check, "the other process ended with status %d", status);
    return VERDICT_PASS;
}

int rule_plan_pure(struct check *check)
{
    char *const other[] = {(char[]){"HOME=/"},        (char[]){"LANG=tr_TR.UTF-8"},
                           (char[]){"LC_ALL=C"},      (char[]){"OMP_NUM_THREADS=1"},
                           (char[]){"TZ=Asia/Tokyo"}, (char[]){"CUDA_VISIBLE_DEVICES="},
                           (char[]){"MOXIE_DEBUG=1"}, NULL};
    static char first[PLAN_TEXT_BYTES], second[PLAN_TEXT_BYTES];
    struct stage stage;
    int st = VERDICT_PASS;

    TRY(stage_init(&stage, check));
    TRY(engine_open(&stage.engine));
    engine_print_plan(&stage.engine, first, PLAN_TEXT_BYTES);
    check_at(check, "plan of the same instance");
    TRY(expect_status(check,
                      stage.engine.api->plan(stage.engine.instance, &stage.engine.plan,
                                             engine_error(&stage.engine)),
                      MOXIE_OK, stage.engine.text));
    engine_print_plan(&stage.engine, second, PLAN_TEXT_BYTES);
    if (strcmp(first, second) != 0) TRY(broken(check, "differs the second time"));
    TRY(expect_status(check, engine_close(&stage.engine), MOXIE_OK, stage.engine.text));
    TRY(plan_text(check, &stage.engine, second));
    check_at(check, "plan of a second instance");
    if (strcmp(first, second) != 0) TRY(broken(check, "differs from that of the first"));
    check_at(check, "plan in another process");
    TRY(plan_elsewhere(check, environ, second));
    if (strcmp(first, second) != 0) TRY(broken(check, "differs"));
    check_at(check, "plan in another environment");
    TRY(plan_elsewhere(check, other, second));
    if (strcmp(first, second) != 0) TRY(broken(check, "differs"));
    if (stage.engine.allocations != 0) TRY(broken(check, "allocated memory of the host"));
out:
    stage_fini(&stage);
    return st;
}

// ---- Silence -----------------------------------------------------------------------------------

// A whole life, with errors.
static int live(struct stage *stage)
{
    struct engine *engine = &stage->engine;
    int st = VERDICT_PASS;

    TRY(stage_start(stage));
    TRY(engine_forward(engine, &stage->tokens));
    (void)engine->api->forward(engine->dispatcher, engine->runners_made[0], NULL,
                               engine_error(engine));
    engine_destroy(engine);
    TRY(expect_status(stage->check, engine_close(engine), MOXIE_OK, engine->text));
out:
    return st;
}

int rule_silence(struct check *check)
{
    int kept[2] = {-1, -1}, trace = check->trace;
    int heard = memfd_create("heard", MFD_CLOEXEC);
    struct stage stage = {.check = NULL};
    off_t bytes = 0;
    int st = VERDICT_PASS;

    if (heard < 0) TRY(skipped(check, "no memory file: %s", strerror(errno)));
    check_at(check, "load to unload");
    check->trace = 0; // it writes to standard error
    (void)fflush(NULL);
    for (int i = 0; i < 2; i++) {
        kept[i] = dup(STDOUT_FILENO + i);
        (void)dup2(heard, STDOUT_FILENO + i);
    }
    st = stage_init(&stage, check);
    if (st == VERDICT_PASS) st = live(&stage);
    stage_fini(&stage);
    (void)fflush(NULL);
    for (int i = 0; i < 2; i++) {
        (void)dup2(kept[i], STDOUT_FILENO + i);
        (void)close(kept[i]);
    }
    check->trace = trace;
    bytes = lseek(heard, 0, SEEK_END);
    check_at(check, "load to unload");
    if (st == VERDICT_PASS && bytes > 0)
        TRY(broken(check, "printed %lld bytes; what it says goes to the host's log",
                   (long long)bytes));
out:
    if (heard >= 0) (void)close(heard);
    return st;
}

int rule_log_lines(struct check *check)
{
    struct stage stage;
    struct engine *engine = &stage.engine;
    int st = VERDICT_PASS;

    TRY(stage_init(&stage, check));
    TRY(live(&stage));
    engine_set_str(engine, "activation", "a\nb");
    engine_set_i64(engine, "num_layers", -1);
    TRY(expect_status(check, engine_try_open(engine), MOXIE_OK, engine->text));
    TRY(expect_status(check, engine_close(engine), MOXIE_OK, engine->text));
    check_at(check, "log");
    if (engine->log_note[0] != '\0') TRY(broken(check, "%s", engine->log_note));
out:
    stage_fini(&stage);
    return st;
}
