// Libraries that are wrong in one way each, for the loader to refuse. BROKEN says how.

#include "abi/layout.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum broken {
    NOT_A_PLUGIN,
    REFUSES,
    NO_TABLE,
    SHORT_TABLE,
    NULL_SLOT,
    OTHER_VERSION,
    NO_LAYOUT,
    MOVED,
    OLDER
};

#if BROKEN == 0

int not_a_plugin(void);

__attribute__((visibility("default"))) int not_a_plugin(void)
{
    return 0;
}

#else

static moxie_field fields[512];
static uint64_t fields_count;

static void layout(const moxie_field **rows, uint64_t *count, uint32_t *stride)
{
    *rows = BROKEN == NO_LAYOUT ? NULL : fields;
    *count = BROKEN == NO_LAYOUT ? 0 : fields_count;
    *stride = sizeof fields[0];
}

// Stands in every slot that the loader does not call.
static void nothing(void)
{
}

static const moxie_build build = {.struct_size = sizeof build,
                                  .version = "0.1.9",
                                  .source_id = "broken",
                                  .compiler = "x",
                                  .cuda = "x"};
static moxie_api table;

// MOVED: the row whose number MOVED_ROW gives is another. OLDER: moxie_stats lacks its last field,
// which is no mistake.
static void fill_fields(void)
{
    const moxie_field *rows = layout_rows(&fields_count);
    const char *moved = getenv("MOVED_ROW");

    memcpy(fields, rows, fields_count * sizeof *rows);
    for (uint64_t i = 0; i < fields_count; i++) {
        moxie_field *row = &fields[i];

        if (BROKEN == MOVED && moved != NULL && i == strtoull(moved, NULL, 10)) row->size++;
        if (BROKEN == OLDER && strcmp(row->structure, "moxie_stats") == 0) {
            if (row->field[0] == '\0') row->size -= 8;
            if (strcmp(row->field, "bytes_allocated") == 0) row->structure = "moxie_nothing";
        }
    }
}

static void fill_table(void)
{
    static void (*const slot)(void) = nothing;

    for (size_t at = offsetof(moxie_api, build); at < sizeof table; at += sizeof slot)
        memcpy((char *)&table + at, &slot, sizeof slot);
    table.struct_size = BROKEN == SHORT_TABLE ? 64 : sizeof table;
    table.abi_version = BROKEN == OTHER_VERSION ? MOXIE_ABI(0, 9) : MOXIE_ABI_VERSION;
    table.build = &build;
    table.layout = layout;
    if (BROKEN == NULL_SLOT) table.stats = NULL;
}

int32_t moxie_get_api_v1(const moxie_request *request, const moxie_api **api, moxie_error *error)
{
    if (BROKEN == REFUSES) {
        (void)snprintf(error->text, error->text_bytes, "%s",
                       request->host_build == NULL ? "nobody" : request->host_build);
        return MOXIE_E_VERSION;
    }
    fill_fields();
    fill_table();
    *api = BROKEN == NO_TABLE ? NULL : &table;
    return MOXIE_OK;
}

#endif
