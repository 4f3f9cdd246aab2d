// hosts/cli/checkpoint.c and model_keys.c: folders whose config, index and shards hold any bytes.
// The files are links to files in memory.

#include "hosts/cli/model_keys.h"

#include "host_tests/fuzz/files.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PART_BYTES_MAX ((size_t)1 << 12)

enum part { PART_CONFIG, PART_INDEX, PART_SHARD, PART_SINGLE, PARTS_COUNT };

static const char *const names[PARTS_COUNT] = {"config.json", "model.safetensors.index.json",
                                               "a.safetensors", "model.safetensors"};

// Two folders over the same files: one has model.safetensors, the other an index and a shard.
struct world {
    char folders[2][PATH_MAX];
    struct fuzz_file files[PARTS_COUNT];
    int ready;
};

static struct world world;

static void link_part(const char *folder, enum part part)
{
    char path[PATH_MAX + 32];

    (void)snprintf(path, sizeof path, "%s/%s", folder, names[part]);
    PROPERTY(symlink(world.files[part].path, path) == 0);
}

static void world_end(void)
{
    char path[PATH_MAX + 32];

    for (int i = 0; i < 2; i++) {
        for (int part = 0; part < PARTS_COUNT; part++) {
            (void)snprintf(path, sizeof path, "%s/%s", world.folders[i], names[part]);
            (void)unlink(path);
        }
        (void)rmdir(world.folders[i]);
    }
}

static void world_begin(void)
{
    const char *base = getenv("TMPDIR") != NULL ? getenv("TMPDIR") : "/tmp";

    for (int i = 0; i < 2; i++) {
        (void)snprintf(world.folders[i], sizeof world.folders[i], "%s/moxie-fuzz-XXXXXX", base);
        PROPERTY(mkdtemp(world.folders[i]) != NULL);
    }
    for (int part = 0; part < PARTS_COUNT; part++)
        fuzz_file_init(&world.files[part]);
    link_part(world.folders[0], PART_CONFIG);
    link_part(world.folders[0], PART_SINGLE);
    link_part(world.folders[1], PART_CONFIG);
    link_part(world.folders[1], PART_INDEX);
    link_part(world.folders[1], PART_SHARD);
    (void)atexit(world_end);
    world.ready = 1;
}

// The parts of an input end with a byte 0xff, which no JSON has.
static size_t take_part(struct fuzz_input *input, uint8_t *bytes)
{
    size_t count = input->left < PART_BYTES_MAX ? input->left : PART_BYTES_MAX;
    const void *end = count > 0 ? memchr(input->at, 0xff, count) : NULL;

    if (end != NULL) count = (size_t)((const uint8_t *)end - input->at);
    fuzz_bytes(input, bytes, count);
    (void)fuzz_u8(input);
    return count;
}

// A shard is its header, with the length put before it and `data` zeros behind it.
static size_t take_shard(struct fuzz_input *input, uint8_t *bytes, uint8_t data)
{
    uint64_t header = take_part(input, bytes + sizeof header);

    memcpy(bytes, &header, sizeof header);
    memset(bytes + sizeof header + header, 0, data);
    return sizeof header + (size_t)header + data;
}

static void check_located(const struct located *located, const char *name)
{
    PROPERTY(located->file != NULL && located->tensor != NULL);
    PROPERTY(strcmp(located->tensor->name, name) == 0);
    PROPERTY(located->tensor->offset + located->tensor->bytes <= located->file->file_bytes);
}

static void ask(struct checkpoint *checkpoint, const char *name)
{
    struct fault fault = {.text = ""};
    struct located located;
    int promised = checkpoint_has(checkpoint, name);
    int st = checkpoint_find(checkpoint, name, &located, &fault);

    if (st == EXIT_OK) {
        PROPERTY(promised);
        check_located(&located, name);
    } else {
        PROPERTY(st == EXIT_TROUBLE && fault.text[0] != '\0');
    }
}

static void check_open(struct checkpoint *checkpoint)
{
    const char *name;
    json_t *value;

    PROPERTY(checkpoint->files != NULL && json_is_object(checkpoint->config));
    ask(checkpoint, "w");
    ask(checkpoint, "");
    json_object_foreach(checkpoint->shard_of, name, value)
    {
        ask(checkpoint, name);
    }
    if (checkpoint->shard_of != NULL) return;
    for (uint64_t i = 0; i < checkpoint->files[0].count; i++)
        ask(checkpoint, checkpoint->files[0].tensors[i].name);
}

// What `moxie plan --model` reads of the same folder.
static void check_keys(const char *folder)
{
    struct model_said said;
    struct fault fault = {.text = ""};
    int st = model_keys_read(folder, &said, &fault);

    PROPERTY((st == EXIT_OK) == (fault.text[0] == '\0'));
    for (int i = 0; i < MODEL_SIZES && st == EXIT_OK; i++) {
        const char *key = model_size_key((enum model_size)i);
        const json_t *value = json_object_get(said.keys, key),
                     *why = json_object_get(said.unread, key);

        PROPERTY((value != NULL) == (why == NULL));
        PROPERTY(value == NULL || json_integer_value(value) >= 1);
    }
    model_said_free(&said);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static uint8_t bytes[PART_BYTES_MAX + 512];
    struct fuzz_input input = {data, size};
    struct fault fault = {.text = ""};
    struct checkpoint checkpoint;
    uint8_t form = fuzz_u8(&input), zeros = fuzz_u8(&input);
    int sharded = form & 1, st;

    if (!world.ready) world_begin();
    // Most folders have a config that can be read.
    if ((form & 2) != 0)
        fuzz_file_write(&world.files[PART_CONFIG], bytes, take_part(&input, bytes));
    else
        fuzz_file_write(&world.files[PART_CONFIG], "{}", 2);
    if (sharded) fuzz_file_write(&world.files[PART_INDEX], bytes, take_part(&input, bytes));
    fuzz_file_write(&world.files[sharded ? PART_SHARD : PART_SINGLE], bytes,
                    take_shard(&input, bytes, zeros));
    st = checkpoint_open_folder(&checkpoint, world.folders[sharded], &fault);
    if (st == EXIT_OK)
        check_open(&checkpoint);
    else
        PROPERTY(st == EXIT_TROUBLE && fault.text[0] != '\0' && checkpoint.files == NULL);
    checkpoint_close(&checkpoint);
    check_keys(world.folders[sharded]);
    return 0;
}
