// Files from strangers: every length, offset, dtype and shape that is not right is refused, in
// words.

#include "hosts/cli/safetensors.h"
#include "hosts/cli/target.h"

#include "host_tests/cli/files.h"
#include "host_tests/suite.h"

#include <dirent.h>
#include <malloc.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static const char good_header[] =
    "{\"__metadata__\":{\"family\":\"mixtral\"},"
    "\"a\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24]},"
    "\"b\":{\"dtype\":\"U8\",\"shape\":[5],\"data_offsets\":[24,29]},"
    "\"empty\":{\"dtype\":\"BF16\",\"shape\":[0,7],\"data_offsets\":[29,29]},"
    "\"odd\":{\"dtype\":\"F6_E2M3\",\"shape\":[4],\"data_offsets\":[29,32]}}";
#define GOOD_DATA_BYTES 32

static int opens(const char *path)
{
    struct safetensors file;
    struct fault fault = {.code = EXIT_OK};
    int st = safetensors_open(&file, path, &fault);

    if (st == EXIT_OK) {
        safetensors_close(&file);
        return 1;
    }
    ck_assert_int_eq(st, EXIT_TROUBLE);
    ck_assert_int_eq(fault.code, EXIT_TROUBLE);
    ck_assert_msg(strstr(fault.text, path) == fault.text, "no path in: %s", fault.text);
    return 0;
}

START_TEST(reads_what_is_there)
{
    const char *path = file_write_safetensors("good", good_header, GOOD_DATA_BYTES);
    struct safetensors file;
    struct fault fault;
    const struct tensor *b = NULL;
    uint8_t bytes[3];
    char text[64];

    ck_assert_int_eq(safetensors_open(&file, path, &fault), EXIT_OK);
    ck_assert_uint_eq(file.count, 4);
    ck_assert_str_eq(safetensors_metadata(&file, "family"), "mixtral");
    ck_assert_ptr_null(safetensors_metadata(&file, "absent"));
    ck_assert_ptr_null(safetensors_find(&file, "c"));
    tensor_print(safetensors_find(&file, "a"), text, sizeof text);
    ck_assert_str_eq(text, "F32 [2, 3]");
    ck_assert_int_eq(safetensors_find(&file, "odd")->word, WORD_UNKNOWN);
    ck_assert_uint_eq(safetensors_find(&file, "empty")->bytes, 0);
    b = safetensors_find(&file, "b");
    ck_assert_int_eq(safetensors_read(&file, b, 1, 3, bytes, &fault), EXIT_OK);
    ck_assert_uint_eq(bytes[0], 25);
    ck_assert_uint_eq(bytes[2], 27);
    ck_assert_int_eq(safetensors_read(&file, b, 3, 3, bytes, &fault), EXIT_TROUBLE);
    ck_assert_int_eq(safetensors_read(&file, b, UINT64_MAX, 2, bytes, &fault), EXIT_TROUBLE);
    safetensors_close(&file);
}
END_TEST

START_TEST(cut_anywhere_is_refused)
{
    const char *path = file_write_safetensors("good", good_header, GOOD_DATA_BYTES);
    uint64_t count = 0;
    uint8_t *bytes = file_read(path, &count);

    ck_assert_int_eq(opens(path), 1);
    for (uint64_t kept = 0; kept < count; kept++) {
        struct safetensors file;
        struct fault fault;

        path = file_write("cut", bytes, kept);
        ck_assert_int_eq(opens(path), 0);
        ck_assert_int_eq(safetensors_open(&file, path, &fault), EXIT_TROUBLE);
        ck_assert_msg(kept < 8 || strstr(fault.text, "cut off") != NULL, "%s", fault.text);
    }
    free(bytes);
}
END_TEST

START_TEST(a_longer_file_is_refused)
{
    ck_assert_int_eq(opens(file_write_safetensors("long", good_header, GOOD_DATA_BYTES + 1)), 0);
}
END_TEST

// No flipped bit may lead to a read outside the file: whatever opens has every tensor inside.
START_TEST(flipped_bits_stay_inside)
{
    const char *path = file_write_safetensors("good", good_header, GOOD_DATA_BYTES);
    uint64_t count = 0;
    uint8_t *bytes = file_read(path, &count);
    uint8_t buffer[GOOD_DATA_BYTES];
    struct safetensors file;
    struct fault fault;

    for (uint64_t bit = 0; bit < 8 * (count - GOOD_DATA_BYTES); bit++) {
        bytes[bit / 8] ^= (uint8_t)(1u << bit % 8);
        path = file_write("flipped", bytes, count);
        bytes[bit / 8] ^= (uint8_t)(1u << bit % 8);
        if (safetensors_open(&file, path, &fault) != EXIT_OK) continue;
        for (uint64_t i = 0; i < file.count; i++) {
            const struct tensor *tensor = &file.tensors[i];

            ck_assert_uint_le(tensor->bytes, GOOD_DATA_BYTES);
            ck_assert_int_eq(safetensors_read(&file, tensor, 0, tensor->bytes, buffer, &fault),
                             EXIT_OK);
        }
        safetensors_close(&file);
    }
    free(bytes);
}
END_TEST

START_TEST(hostile_lengths_are_refused)
{
    static const uint64_t lengths[] = {
        0, 1, UINT64_MAX, UINT64_MAX - 7, (uint64_t)1 << 62, (uint64_t)1 << 63, 100000001, 1000,
    };
    uint8_t bytes[64] = "........{}";

    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        memcpy(bytes, &lengths[i], sizeof lengths[i]);
        ck_assert_int_eq(opens(file_write("length", bytes, sizeof bytes)), 0);
    }
}
END_TEST

// A header of more than the limit, in a file that has room for it, is not even read.
START_TEST(long_headers_are_refused)
{
    const uint64_t length = SAFETENSORS_HEADER_BYTES_MAX + 1;
    const char *path = file_write("long", &length, sizeof length);
    struct safetensors file;
    struct fault fault;

    ck_assert_int_eq(truncate(path, (off_t)length + 100), 0);
    ck_assert_int_eq(safetensors_open(&file, path, &fault), EXIT_TROUBLE);
    ck_assert_ptr_nonnull(strstr(fault.text, "claims"));
}
END_TEST

static const char *const bad_headers[] = {
    "[]",
    "7",
    "{",
    "{\"a\":7}",
    "{\"a\":{}}",
    "{\"a\":{\"dtype\":7,\"shape\":[8],\"data_offsets\":[0,8]}}",
    "{\"a\":{\"dtype\":\"U8\",\"data_offsets\":[0,8]}}",
    "{\"a\":{\"dtype\":\"U8\",\"shape\":8,\"data_offsets\":[0,8]}}",
    "{\"a\":{\"dtype\":\"U8\",\"shape\":[-8],\"data_offsets\":[0,8]}}",
    "{\"a\":{\"dtype\":\"U8\",\"shape\":[8.0],\"data_offsets\":[0,8]}}",
    "{\"a\":{\"dtype\":\"U8\",\"shape\":[true],\"data_offsets\":[0,8]}}",
    "{\"a\":{\"dtype\":\"U8\",\"shape\":[8]}}",
    "{\"a\":{\"dtype\":\"U8\",\"shape\":[8],\"data_offsets\":[0]}}",
    "{\"a\":{\"dtype\":\"U8\",\"shape\":[8],\"data_offsets\":[0,8,9]}}",
    "{\"a\":{\"dtype\":\"U8\",\"shape\":[8],\"data_offsets\":[8,0]}}",
    "{\"a\":{\"dtype\":\"U8\",\"shape\":[8],\"data_offsets\":[-8,0]}}",
    "{\"a\":{\"dtype\":\"U8\",\"shape\":[8],\"data_offsets\":[0,9]}}",
    "{\"a\":{\"dtype\":\"U8\",\"shape\":[8],\"data_offsets\":[\"0\",\"8\"]}}",
    "{\"a\":{\"dtype\":\"U8\",\"shape\":[8],\"data_offsets\":[0,4611686018427387904]}}",
    "{\"a\":{\"dtype\":\"U8\",\"shape\":[8],\"data_offsets\":[9223372036854775807,"
    "9223372036854775807]}}",
    "{\"a\":{\"dtype\":\"U8\",\"shape\":[7],\"data_offsets\":[0,8]}}",
    "{\"a\":{\"dtype\":\"F32\",\"shape\":[8],\"data_offsets\":[0,8]}}",
    "{\"a\":{\"dtype\":\"F32\",\"shape\":[4611686018427387904],\"data_offsets\":[0,8]}}",
    "{\"a\":{\"dtype\":\"U8\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,8]}}",
    "{\"a\":{\"dtype\":\"U8\",\"shape\":[4294967296,4294967296,4294967296,0],\"data_offsets\":[0,8]"
    "}}",
    "{\"a\":{\"dtype\":\"U8\",\"shape\":[1,1,1,1,1,1,1,1,8],\"data_offsets\":[0,8]}}",
    // more than a tensor has
    "{\"a\":{\"dtype\":\"U8\",\"shape\":[8],\"data_offsets\":[0,8],\"x\":[[],[]]}}",
    "{\"a\":{\"x\":{},\"dtype\":\"U8\",\"shape\":[8],\"data_offsets\":[0,8]}}",
    // sizes that are none, beside a tensor that covers the data
    "{\"a\":{\"dtype\":\"U8\",\"shape\":[true],\"data_offsets\":[0,0]},"
    "\"b\":{\"dtype\":\"U8\",\"shape\":[8],\"data_offsets\":[0,8]}}",
    // an overlap as long as the hole after it, a hole as long as the overlap after it
    "{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},"
    "\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[2,6]}}",
    "{\"a\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[1,4]},"
    "\"b\":{\"dtype\":\"U8\",\"shape\":[5],\"data_offsets\":[3,8]}}",
    // an overlap, a hole, a name twice, metadata that is none
    "{\"a\":{\"dtype\":\"U8\",\"shape\":[8],\"data_offsets\":[0,8]},"
    "\"a\":{\"dtype\":\"U8\",\"shape\":[8],\"data_offsets\":[0,8]}}",
    "{\"a\":{\"dtype\":\"U8\",\"shape\":[5],\"data_offsets\":[0,5]},"
    "\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[4,8]}}",
    "{\"a\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[0,3]},"
    "\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[4,8]}}",
    "{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},"
    "\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[4,8]}}",
    "{\"__metadata__\":7,\"a\":{\"dtype\":\"U8\",\"shape\":[8],\"data_offsets\":[0,8]}}",
    "{\"__metadata__\":{\"x\":7},\"a\":{\"dtype\":\"U8\",\"shape\":[8],\"data_offsets\":[0,8]}}",
};

START_TEST(bad_headers_are_refused)
{
    ck_assert_msg(!opens(file_write_safetensors("bad", bad_headers[_i], 8)), "accepted: %s",
                  bad_headers[_i]);
}
END_TEST

// Each rank holds one: an entry is a row and its name, and not the JSON that it was.
START_TEST(headers_are_not_kept)
{
    enum { COUNT = 20000, ENTRY = 128 };
    char *header = malloc(COUNT * ENTRY);
    size_t used = 0;
    struct safetensors file;
    struct fault fault = {.text = ""};
    struct mallinfo2 before;

    ck_assert_ptr_nonnull(header);
    for (int i = 0; i < COUNT; i++)
        used += (size_t)snprintf(
            header + used, ENTRY,
            "%c\"t%d\":{\"dtype\":\"U8\",\"shape\":[1,1,1,1,1,1,1,1],\"data_offsets\":[%d,%d]}",
            i == 0 ? '{' : ',', i, i, i + 1);
    (void)snprintf(header + used, ENTRY, "}");
    (void)file_write_safetensors("many", header, COUNT);
    free(header);
    before = mallinfo2(); // nothing where another allocator stands in for it
    ck_assert_msg(safetensors_open(&file, file_path("many"), &fault) == EXIT_OK, "%s", fault.text);
    ck_assert_uint_le(mallinfo2().uordblks + mallinfo2().hblkhd - before.uordblks - before.hblkhd,
                      COUNT * (sizeof *file.tensors + 16));
    ck_assert_uint_eq(safetensors_find(&file, "t19999")->offset % COUNT,
                      (safetensors_find(&file, "t0")->offset + 19999) % COUNT);
    safetensors_close(&file);
}
END_TEST

START_TEST(deep_headers_are_refused)
{
    enum { DEPTH = 100000 };
    char *header = malloc(DEPTH + 1);

    ck_assert_ptr_nonnull(header);
    memset(header, '[', DEPTH);
    header[DEPTH] = '\0';
    ck_assert_int_eq(opens(file_write_safetensors("deep", header, 8)), 0);
    free(header);
}
END_TEST

START_TEST(a_file_that_shrinks_is_an_error)
{
    const char *path = file_write_safetensors("good", good_header, GOOD_DATA_BYTES);
    struct safetensors file;
    struct fault fault;
    uint8_t bytes[24];

    ck_assert_int_eq(safetensors_open(&file, path, &fault), EXIT_OK);
    ck_assert_int_eq(truncate(path, 100), 0);
    ck_assert_int_eq(safetensors_read(&file, safetensors_find(&file, "a"), 0, 24, bytes, &fault),
                     EXIT_TROUBLE);
    ck_assert_ptr_nonnull(strstr(fault.text, "shrank"));
    safetensors_close(&file);
}
END_TEST

START_TEST(only_regular_files)
{
    struct safetensors file;
    struct fault fault;

    ck_assert_int_eq(mkfifo(file_path("fifo"), 0600), 0);
    ck_assert_int_eq(safetensors_open(&file, file_path("fifo"), &fault), EXIT_TROUBLE);
    ck_assert_ptr_nonnull(strstr(fault.text, "not a regular file"));
    ck_assert_int_eq(safetensors_open(&file, file_folder(), &fault), EXIT_TROUBLE);
    ck_assert_ptr_nonnull(strstr(fault.text, "not a regular file"));
    ck_assert_int_eq(opens("/nowhere/at/all"), 0);
}
END_TEST

START_TEST(what_is_written_can_be_read)
{
    static const float values[6] = {1, -2, 3.5f, 0, 1e30f, -1e-30f};
    const struct tensor_out out = {"output", WORD_F32, 2, {3, 2}, values};
    struct safetensors file;
    struct fault fault;
    float read[6];
    char path[128];

    (void)snprintf(path, sizeof path, "%s", file_path("written"));
    ck_assert_int_eq(safetensors_write(path, &out, &fault), EXIT_OK);
    ck_assert_int_eq(safetensors_open(&file, path, &fault), EXIT_OK);
    ck_assert_uint_eq(safetensors_find(&file, "output")->offset % 8, 0);
    ck_assert_int_eq(
        safetensors_read(&file, safetensors_find(&file, "output"), 0, sizeof read, read, &fault),
        EXIT_OK);
    ck_assert_mem_eq(read, values, sizeof read);
    safetensors_close(&file);
    ck_assert_int_eq(safetensors_write("/nowhere/at/all", &out, &fault), EXIT_TROUBLE);
}
END_TEST

// A process of its own writes, is sent the signal between two writes, and ends as the signal has
// it.
static int written_and_sent(int number, const char *path)
{
    pid_t pid = fork();
    int ended = 0;

    ck_assert_int_ge(pid, 0);
    if (pid == 0) {
        struct target target;
        struct fault fault;
        int st = EXIT_OK;

        if (signal(number, SIG_DFL) == SIG_IGN) (void)signal(number, SIG_IGN); // or the suite's
        st = target_open(&target, path, &fault);
        if (st == EXIT_OK) st = target_write(&target, "abc", 3, &fault);
        if (raise(number) != 0) _exit(99);
        if (st == EXIT_OK) st = target_write(&target, "def", 3, &fault);
        st = target_close(&target, st, &fault);
        _exit(st);
    }
    ck_assert_int_eq(waitpid(pid, &ended, 0), pid);
    return WIFSIGNALED(ended) ? WTERMSIG(ended) : -WEXITSTATUS(ended);
}

static int files_in_folder(void)
{
    DIR *folder = opendir(file_folder());
    int count = 0;

    ck_assert_ptr_nonnull(folder);
    while (readdir(folder) != NULL)
        count++;
    (void)closedir(folder);
    return count - 2; // itself and its parent
}

START_TEST(interrupted_is_not_there)
{
    static const int ends[] = {SIGINT, SIGTERM, SIGHUP};
    char path[128];
    uint64_t count = 0;

    (void)snprintf(path, sizeof path, "%s", file_path("out"));
    for (size_t i = 0; i < sizeof ends / sizeof ends[0]; i++) {
        ck_assert_int_eq(written_and_sent(ends[i], path), ends[i]);
        ck_assert_int_eq(files_in_folder(), 0);
    }
    // As nohup has it.
    ck_assert(signal(SIGHUP, SIG_IGN) != SIG_ERR);
    ck_assert_int_eq(written_and_sent(SIGHUP, path), EXIT_OK);
    ck_assert_int_eq(files_in_folder(), 1);
    free(file_read(path, &count));
    ck_assert_uint_eq(count, 6);
}
END_TEST

static void add_tests(TCase *tests)
{
    tcase_add_test(tests, reads_what_is_there);
    tcase_add_test(tests, cut_anywhere_is_refused);
    tcase_add_test(tests, a_longer_file_is_refused);
    tcase_add_test(tests, flipped_bits_stay_inside);
    tcase_add_test(tests, hostile_lengths_are_refused);
    tcase_add_test(tests, long_headers_are_refused);
    tcase_add_loop_test(tests, bad_headers_are_refused, 0,
                        (int)(sizeof bad_headers / sizeof bad_headers[0]));
    tcase_add_test(tests, headers_are_not_kept);
    tcase_add_test(tests, deep_headers_are_refused);
    tcase_add_test(tests, a_file_that_shrinks_is_an_error);
    tcase_add_test(tests, only_regular_files);
    tcase_add_test(tests, what_is_written_can_be_read);
    tcase_add_test(tests, interrupted_is_not_there);
}

SUITE_MAIN("cli_safetensors", 60, add_tests)
