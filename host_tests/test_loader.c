// abi/loader.c: it loads what is right, and says what is wrong with the rest.

#include "abi/loader.h"

#include "abi/layout.h"

#include "host_tests/suite.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

static char text[512];
static moxie_error error;
static moxie_library library;

static void setup(void)
{
    memset(text, 'x', sizeof text);
    error = (moxie_error){.struct_size = sizeof error, .text = text, .text_bytes = sizeof text};
    library = (moxie_library){.handle = &library};
}

START_TEST(loads_and_loads_again)
{
    const moxie_api *first;

    for (int round = 0; round < 3; round++) {
        ck_assert_msg(moxie_load(DOOR_LIBRARY, "engine 7", &library, &error) == MOXIE_OK, "%s",
                      text);
        first = library.api;
        ck_assert_uint_eq(first->abi_version, MOXIE_ABI_VERSION);
        ck_assert_str_eq(first->build->version, "0.1.1");
        ck_assert_ptr_null(first->get_extension("nobody.knows/1"));
        moxie_unload(&library);
        ck_assert_ptr_null(library.api);
        ck_assert_ptr_null(library.handle);
        moxie_unload(&library);
    }
    moxie_unload(NULL);
}
END_TEST

START_TEST(loads_twice)
{
    moxie_library second;

    ck_assert_int_eq(moxie_load(DOOR_LIBRARY, "engine 7", &library, &error), MOXIE_OK);
    ck_assert_int_eq(moxie_load(DOOR_LIBRARY, NULL, &second, NULL), MOXIE_OK);
    ck_assert_ptr_eq(library.api, second.api);
    moxie_unload(&second);
    ck_assert_uint_eq(library.api->struct_size, sizeof *library.api);
    moxie_unload(&library);
}
END_TEST

START_TEST(its_code_stays_mapped)
{
    ck_assert_int_eq(moxie_load(DOOR_LIBRARY, "engine 7", &library, &error), MOXIE_OK);
    moxie_unload(&library);
    ck_assert_ptr_nonnull(dlopen(DOOR_LIBRARY, RTLD_NOW | RTLD_NOLOAD));
}
END_TEST

START_TEST(keeps_its_symbols_to_itself)
{
    ck_assert_int_eq(moxie_load(DOOR_LIBRARY, "engine 7", &library, &error), MOXIE_OK);
    ck_assert_ptr_null(dlsym(RTLD_DEFAULT, "moxie_get_api_v1"));
    ck_assert_ptr_null(dlsym(library.handle, "fail_with"));
    moxie_unload(&library);
}
END_TEST

static const struct {
    const char *path;
    int32_t code;
    const char *words[3];
} broken[] = {
    {"/nowhere/libmoxie.so", MOXIE_E_UNAVAILABLE, {"/nowhere/libmoxie.so", "check the path", ""}},
    {BROKEN_PREFIX "0.so", MOXIE_E_UNSUPPORTED, {"0.so", "moxie_get_api_v1", "no Moxie plugin"}},
    {BROKEN_PREFIX "1.so", MOXIE_E_VERSION, {"1.so: engine 7", "", ""}},
    {BROKEN_PREFIX "2.so", MOXIE_E_INTERNAL, {"2.so: no moxie_api", "", ""}},
    {BROKEN_PREFIX "3.so", MOXIE_E_INTERNAL, {"3.so: moxie_api has 64 bytes", "120", ""}},
    {BROKEN_PREFIX "4.so", MOXIE_E_INTERNAL, {"4.so: moxie_api.stats is NULL", "", ""}},
    {BROKEN_PREFIX "5.so", MOXIE_E_VERSION, {"5.so answered with ABI 0.9", "0.1", ""}},
    {BROKEN_PREFIX "6.so", MOXIE_E_INTERNAL, {"6.so", "reports no layout", ""}},
};

START_TEST(says_what_is_broken)
{
    ck_assert_int_eq(moxie_load(broken[_i].path, "engine 7", &library, &error), broken[_i].code);
    ck_assert_int_eq(error.code, broken[_i].code);
    for (int word = 0; word < 3; word++)
        ck_assert_msg(strstr(text, broken[_i].words[word]) != NULL, "%s", text);
    ck_assert_ptr_null(library.handle);
    ck_assert_ptr_null(library.api);
    ck_assert_int_eq(moxie_load(broken[_i].path, NULL, &library, NULL), broken[_i].code);
    ck_assert_ptr_null(dlopen(broken[_i].path, RTLD_NOW | RTLD_NOLOAD)); // nothing stays loaded
}
END_TEST

// The loader knows every field of every struct: each in turn lies elsewhere in the library.
START_TEST(every_field_is_compared)
{
    uint64_t count;
    const moxie_field *rows = layout_rows(&count);

    for (uint64_t i = 0; i < count; i++) {
        int frozen = strcmp(rows[i].structure, "moxie_tensor") == 0 ||
                     strcmp(rows[i].structure, "moxie_device") == 0 ||
                     strcmp(rows[i].structure, "moxie_dtype") == 0;
        char row[32], wanted[160];

        (void)snprintf(row, sizeof row, "%llu", (unsigned long long)i);
        ck_assert_int_eq(setenv("MOVED_ROW", row, 1), 0);
        if (rows[i].field[0] == '\0' && !frozen) { // a struct may grow
            ck_assert_int_eq(moxie_load(BROKEN_PREFIX "7.so", "", &library, &error), MOXIE_OK);
            moxie_unload(&library);
            continue;
        }
        ck_assert_int_eq(moxie_load(BROKEN_PREFIX "7.so", "", &library, &error), MOXIE_E_VERSION);
        (void)snprintf(wanted, sizeof wanted, "7.so: %s.%s is %u bytes at offset %u",
                       rows[i].structure, rows[i].field, rows[i].size, rows[i].offset);
        ck_assert_msg(strstr(text, wanted) != NULL, "%s", text);
        ck_assert_ptr_nonnull(strstr(text, "0 more"));
    }
}
END_TEST

START_TEST(an_older_library_is_not_broken)
{
    ck_assert_msg(moxie_load(BROKEN_PREFIX "8.so", "engine 7", &library, &error) == MOXIE_OK, "%s",
                  text);
    moxie_unload(&library);
}
END_TEST

START_TEST(bad_arguments)
{
    ck_assert_int_eq(moxie_load(DOOR_LIBRARY, "engine 7", NULL, &error), MOXIE_E_INVALID);
    ck_assert_int_eq(moxie_load("", "engine 7", &library, &error), MOXIE_E_INVALID);
    ck_assert_ptr_nonnull(strstr(text, "path is empty"));
    ck_assert_int_eq(moxie_load(NULL, "engine 7", &library, &error), MOXIE_E_INVALID);
    ck_assert_ptr_null(library.handle);
    ck_assert_int_eq(moxie_load(DOOR_LIBRARY, "engine 7", &library, &error), MOXIE_OK);
    ck_assert_int_eq(error.code, MOXIE_OK); // not what was said before
    ck_assert_str_eq(text, "");
    moxie_unload(&library);
    error.struct_size = 4;
    text[0] = 'x';
    ck_assert_int_eq(moxie_load(NULL, "engine 7", &library, &error), MOXIE_E_INVALID);
    ck_assert_int_eq(text[0], 'x');
}
END_TEST

// ---- Registered tables ----

static void slot(void)
{
}

// Every pointer of a table from byte 8 on.
static void fill(void *table, size_t bytes)
{
    void (*const pointer)(void) = slot;

    for (size_t at = 8; at < bytes; at += sizeof pointer)
        memcpy((char *)table + at, &pointer, sizeof pointer);
}

START_TEST(verifies_registered_tables)
{
    const moxie_traits traits = {.struct_size = sizeof traits};
    moxie_runner_api runner_api = {.struct_size = sizeof runner_api};
    moxie_dispatcher_api dispatcher_api = {.struct_size = sizeof dispatcher_api};
    moxie_runner_info runner_info = {sizeof runner_info, 0, "fast", "cpu", &traits, &runner_api};
    moxie_dispatcher_info dispatcher_info = {sizeof dispatcher_info, 0, "wide", "cpu", &traits,
                                             &dispatcher_api};

    fill(&runner_api, sizeof runner_api);
    fill(&dispatcher_api, sizeof dispatcher_api);
    ck_assert_int_eq(moxie_verify_runner(&runner_info, &error), MOXIE_OK);
    ck_assert_int_eq(moxie_verify_dispatcher(&dispatcher_info, &error), MOXIE_OK);
    runner_api.run = NULL;
    ck_assert_int_eq(moxie_verify_runner(&runner_info, &error), MOXIE_E_INTERNAL);
    ck_assert_ptr_nonnull(strstr(text, "fast: moxie_runner_api.run is NULL"));
    runner_info.name = NULL;
    ck_assert_int_eq(moxie_verify_runner(&runner_info, &error), MOXIE_E_INTERNAL);
    ck_assert_ptr_nonnull(strstr(text, "moxie_runner_info.name is NULL"));
    ck_assert_int_eq(moxie_verify_runner(NULL, &error), MOXIE_E_INTERNAL);
    dispatcher_api.struct_size -= 8;
    ck_assert_int_eq(moxie_verify_dispatcher(&dispatcher_info, &error), MOXIE_E_INTERNAL);
    ck_assert_ptr_nonnull(strstr(text, "wide: moxie_dispatcher_api has 88 bytes"));
    ck_assert_int_eq(moxie_verify_dispatcher(NULL, &error), MOXIE_E_INTERNAL);
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_checked_fixture(tests, setup, NULL);
    tcase_add_test(tests, loads_and_loads_again);
    tcase_add_test(tests, loads_twice);
    tcase_add_test(tests, its_code_stays_mapped);
    tcase_add_test(tests, keeps_its_symbols_to_itself);
    tcase_add_loop_test(tests, says_what_is_broken, 0, (int)(sizeof broken / sizeof broken[0]));
    tcase_add_test(tests, every_field_is_compared);
    tcase_add_test(tests, an_older_library_is_not_broken);
    tcase_add_test(tests, bad_arguments);
    tcase_add_test(tests, verifies_registered_tables);
}

SUITE_MAIN("loader", 30, add)
