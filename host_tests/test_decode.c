// abi/decode.c: every size a host may bring, and every byte it may not.

#include "abi/decode.h"

#include "abi/layout.h"

#include "host_tests/suite.h"

#include <stdio.h>
#include <string.h>

static char text[256];
static moxie_error error;

static void reset(void)
{
    memset(text, 'x', sizeof text);
    error = (moxie_error){.struct_size = sizeof error, .text = text, .text_bytes = sizeof text};
}

// A struct that grew once: 16 bytes when first published, 24 now.
struct grown {
    uint32_t struct_size, reserved0;
    uint64_t old;
    uint64_t added;
};

static const struct decode_shape shape_grown = {
    .name = "grown", .v1_bytes = 16, .bytes = 24, .reserved = 4};

// Every declared size from 0 to well past ours, in a buffer of exactly that many bytes.
START_TEST(every_size)
{
    const uint32_t declared = (uint32_t)_i;
    const struct grown whole = {.struct_size = declared, .old = 0x1111, .added = 0x2222};
    unsigned char *bytes = calloc(1, declared < 4 ? 4 : declared);
    struct grown to;
    int32_t st;

    ck_assert_ptr_nonnull(bytes);
    reset();
    memcpy(bytes, &declared, 4);
    memcpy(bytes, &whole, declared < sizeof whole ? (declared < 4 ? 4 : declared) : sizeof whole);
    memset(&to, 0xaa, sizeof to);
    st = decode_struct(&to, bytes, &shape_grown, "argument", 0, &error);
    if (declared < 16) {
        ck_assert_int_eq(st, MOXIE_E_INVALID);
        ck_assert_ptr_nonnull(strstr(text, "argument: struct_size is"));
    } else {
        uint64_t added = 0;

        memcpy(&added, &whole.added, declared >= 24 ? 8 : declared - 16);
        ck_assert_int_eq(st, MOXIE_OK);
        ck_assert_uint_eq(to.struct_size, 24);
        ck_assert_uint_eq(to.old, 0x1111);
        ck_assert_uint_eq(to.added, added);
    }
    free(bytes);
}
END_TEST

// One non-zero byte past what is known is named by its offset, wherever it is.
START_TEST(every_tail_byte)
{
    const uint32_t offset = 24 + (uint32_t)_i;
    unsigned char bytes[64] = {0};
    const uint32_t declared = sizeof bytes;
    char wanted[32];
    struct grown to;

    reset();
    memcpy(bytes, &declared, 4);
    ck_assert_int_eq(decode_struct(&to, bytes, &shape_grown, "argument", 0, &error), MOXIE_OK);
    bytes[offset] = 1;
    ck_assert_int_eq(decode_struct(&to, bytes, &shape_grown, "argument", 0, &error),
                     MOXIE_E_UNSUPPORTED);
    (void)snprintf(wanted, sizeof wanted, "at offset %u,", offset);
    ck_assert_ptr_nonnull(strstr(text, wanted));
    ck_assert_ptr_nonnull(strstr(text, "grown"));
}
END_TEST

START_TEST(refusals)
{
    struct grown from = {.struct_size = sizeof from}, to;

    reset();
    ck_assert_int_eq(decode_struct(&to, NULL, &shape_grown, "argument", 0, &error),
                     MOXIE_E_INVALID);
    ck_assert_str_eq(text, "argument is NULL; pass a grown");
    from.reserved0 = 1;
    ck_assert_int_eq(decode_struct(&to, &from, &shape_grown, "argument", 0, &error),
                     MOXIE_E_INVALID);
    ck_assert_ptr_nonnull(strstr(text, "reserved"));
    from.reserved0 = 0;
    from.struct_size = DECODE_BYTES_MAX + 1; // nothing past the struct is read
    ck_assert_int_eq(decode_struct(&to, &from, &shape_grown, "argument", 0, &error),
                     MOXIE_E_INVALID);
    ck_assert_str_eq(text, "argument: struct_size is 4097, a grown has 16 to 4096 bytes; set it "
                           "to sizeof(grown)");
    from.struct_size = UINT32_MAX;
    ck_assert_int_eq(decode_struct(&to, &from, &shape_grown, "argument", 0, NULL), MOXIE_E_INVALID);
}
END_TEST

START_TEST(unaligned)
{
    unsigned char bytes[sizeof(struct grown) + 1];
    const struct grown from = {.struct_size = sizeof from, .old = 5, .added = 6};
    struct grown to;

    memcpy(bytes + 1, &from, sizeof from);
    ck_assert_int_eq(decode_struct(&to, bytes + 1, &shape_grown, "argument", 0, NULL), MOXIE_OK);
    ck_assert_uint_eq(to.old, 5);
    ck_assert_uint_eq(to.added, 6);
}
END_TEST

// What goes back fills what the caller declared, no more, and keeps its struct_size.
START_TEST(encoding)
{
    const struct grown from = {.struct_size = sizeof from, .old = 5, .added = 6};
    struct grown older = {.struct_size = 16, .added = 99}, newer[2];

    encode_struct(&older, &from, &shape_grown);
    ck_assert_uint_eq(older.struct_size, 16);
    ck_assert_uint_eq(older.old, 5);
    ck_assert_uint_eq(older.added, 99);
    memset(newer, 0x55, sizeof newer);
    newer[0].struct_size = sizeof newer;
    encode_struct(newer, &from, &shape_grown);
    ck_assert_uint_eq(newer[0].struct_size, sizeof newer);
    ck_assert_uint_eq(newer[0].added, 6);
    ck_assert_uint_eq(newer[1].struct_size, 0x55555555);
    // As another thread left it after the struct had passed: what was first published is there.
    for (uint32_t declared = 0; declared < 16; declared++) {
        older = (struct grown){.struct_size = declared, .added = 99};
        encode_struct(&older, &from, &shape_grown);
        ck_assert_uint_eq(older.old, 5);
        ck_assert_uint_eq(older.added, 99);
    }
}
END_TEST

START_TEST(errors_are_reset)
{
    reset();
    error.code = 77;
    error.rank = 3;
    ck_assert_ptr_eq(error_enter(&error), &error);
    ck_assert_int_eq(error.code, MOXIE_OK);
    ck_assert_int_eq(error.rank, -1);
    ck_assert_str_eq(text, "");
    ck_assert_ptr_null(error_enter(NULL));
    error.code = 77;
    error.struct_size = V1_moxie_error - 1;
    ck_assert_ptr_null(error_enter(&error));
    error.struct_size = DECODE_BYTES_MAX + 1;
    ck_assert_ptr_null(error_enter(&error));
    ck_assert_int_eq(error.code, 77);
    error = (moxie_error){.struct_size = sizeof error, .text_bytes = 9};
    ck_assert_ptr_eq(error_enter(&error), &error);
    error = (moxie_error){.struct_size = sizeof error, .text = text};
    text[0] = 'x';
    ck_assert_ptr_eq(error_enter(&error), &error);
    ck_assert_int_eq(text[0], 'x');
}
END_TEST

START_TEST(weights)
{
    moxie_matrix w1 = {.struct_size = sizeof w1, .format = MOXIE_FORMAT_BF16};
    moxie_matrix w2 = {.struct_size = sizeof w2, .format = MOXIE_FORMAT_F16};
    moxie_weights from = {.struct_size = sizeof from, .w1 = &w1, .w2 = &w2};
    struct decoded_weights to;

    reset();
    ck_assert_int_eq(decode_weights(&to, &from, &error), MOXIE_OK);
    ck_assert_ptr_eq(to.weights.w1, &to.w1);
    ck_assert_ptr_eq(to.weights.w2, &to.w2);
    ck_assert_int_eq(to.w1.format, MOXIE_FORMAT_BF16);
    ck_assert_int_eq(to.w2.format, MOXIE_FORMAT_F16);
    w2.reserved0 = 1;
    ck_assert_int_eq(decode_weights(&to, &from, &error), MOXIE_E_INVALID);
    ck_assert_ptr_nonnull(strstr(text, "weights.w2"));
    w2.reserved0 = 0;
    from.w1 = NULL;
    ck_assert_int_eq(decode_weights(&to, &from, &error), MOXIE_E_INVALID);
    ck_assert_ptr_nonnull(strstr(text, "weights.w1 is NULL"));
    from.w1 = &w1;
    w1.struct_size = 8;
    ck_assert_int_eq(decode_weights(&to, &from, &error), MOXIE_E_INVALID);
}
END_TEST

// Slabs of a newer host are wider apart than ours; the copies are packed.
struct wide_slab {
    moxie_slab slab;
    uint64_t newer[2];
};

static void make_slabs(struct wide_slab *slabs, uint32_t count)
{
    memset(slabs, 0, count * sizeof *slabs);
    for (uint32_t i = 0; i < count; i++) {
        slabs[i].slab.struct_size = sizeof *slabs;
        slabs[i].slab.rows.ndim = (int32_t)i;
    }
}

START_TEST(rows)
{
    static struct wide_slab slabs[MOXIE_RANKS_MAX];
    static struct decoded_rows to;
    moxie_rows from = {.struct_size = sizeof from,
                       .layout = MOXIE_LAYOUT_RANK_MAJOR,
                       .id_space = MOXIE_IDS_PHYSICAL,
                       .slabs_count = MOXIE_RANKS_MAX,
                       .slab_stride = sizeof slabs[0],
                       .slabs = &slabs[0].slab};

    reset();
    make_slabs(slabs, MOXIE_RANKS_MAX);
    ck_assert_int_eq(decode_rows(&to, &from, "in", &error), MOXIE_OK);
    ck_assert_ptr_eq(to.rows.slabs, to.slabs);
    ck_assert_uint_eq(to.rows.slab_stride, sizeof(moxie_slab));
    for (int32_t i = 0; i < MOXIE_RANKS_MAX; i++)
        ck_assert_int_eq(to.slabs[i].rows.ndim, i);
    slabs[63].newer[1] = 1;
    ck_assert_int_eq(decode_rows(&to, &from, "in", &error), MOXIE_E_UNSUPPORTED);
    ck_assert_ptr_nonnull(strstr(text, "in.slabs[63]: moxie_slab is not zero at offset 208,"));
    slabs[63].newer[1] = 0;
    slabs[3].slab.reserved0 = 1;
    ck_assert_int_eq(decode_rows(&to, &from, "in", &error), MOXIE_E_INVALID);
    ck_assert_ptr_nonnull(strstr(text, "in.slabs[3]"));
    slabs[3].slab.reserved0 = 0;
    slabs[5].slab.struct_size++;
    ck_assert_int_eq(decode_rows(&to, &from, "in", &error), MOXIE_E_INVALID);
    ck_assert_ptr_nonnull(strstr(text, "slab_stride only"));
}
END_TEST

START_TEST(rows_fields)
{
    static struct wide_slab slabs[MOXIE_RANKS_MAX];
    static struct decoded_rows to;
    moxie_rows from;
    const moxie_rows good = {.struct_size = sizeof good,
                             .layout = MOXIE_LAYOUT_STANDARD,
                             .id_space = MOXIE_IDS_GLOBAL,
                             .slabs_count = 1,
                             .slab_stride = sizeof slabs[0],
                             .slabs = &slabs[0].slab};
    static const struct {
        const char *words;
        size_t offset;
        uint32_t value;
    } bad[] = {
        {"out.layout is", offsetof(moxie_rows, layout), 0},
        {"out.layout is", offsetof(moxie_rows, layout), 5},
        {"out.id_space is", offsetof(moxie_rows, id_space), 0},
        {"out.id_space is", offsetof(moxie_rows, id_space), 4},
        {"out.slabs_count is", offsetof(moxie_rows, slabs_count), 0},
        {"out.slabs_count is", offsetof(moxie_rows, slabs_count), MOXIE_RANKS_MAX + 1},
        {"out.slab_stride is", offsetof(moxie_rows, slab_stride), sizeof(moxie_slab) - 1},
        {"out.slab_stride is", offsetof(moxie_rows, slab_stride), UINT32_MAX},
        {"reserved", offsetof(moxie_rows, reserved0), 1},
    };

    reset();
    make_slabs(slabs, 1);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        from = good;
        ck_assert_int_eq(decode_rows(&to, &from, "out", &error), MOXIE_OK);
        memcpy((char *)&from + bad[i].offset, &bad[i].value, sizeof bad[i].value);
        ck_assert_int_eq(decode_rows(&to, &from, "out", &error), MOXIE_E_INVALID);
        ck_assert_msg(strstr(text, bad[i].words) != NULL, "%s", text);
    }
    from = good;
    from.slabs = NULL;
    ck_assert_int_eq(decode_rows(&to, &from, "out", &error), MOXIE_E_INVALID);
    ck_assert_ptr_nonnull(strstr(text, "out.slabs is NULL"));
}
END_TEST

START_TEST(ranges)
{
    moxie_step step = {.struct_size = sizeof step}, step_to;
    moxie_batch batch = {.struct_size = sizeof batch, .id_space = MOXIE_IDS_LOCAL}, batch_to;
    moxie_call call = {.struct_size = sizeof call}, call_to;
    moxie_routing routing = {.struct_size = sizeof routing, .scoring = 1}, routing_to;

#define REFUSED(decode, object, field, bad_value)                                                  \
    do {                                                                                           \
        ck_assert_int_eq(decode(&object##_to, &object, &error), MOXIE_OK);                         \
        object.field = (bad_value);                                                                \
        ck_assert_int_eq(decode(&object##_to, &object, &error), MOXIE_E_INVALID);                  \
        ck_assert_ptr_nonnull(strstr(text, #object "." #field " is "));                            \
        object.field = 1;                                                                          \
    } while (0)

    reset();
    REFUSED(decode_step, step, slot, -1);
    REFUSED(decode_step, step, slot, MOXIE_SLOTS_MAX);
    REFUSED(decode_step, step, tokens, -1);
    REFUSED(decode_step, step, padding, 3);
    REFUSED(decode_step, step, padding, -1);
    REFUSED(decode_step, step, phase, 4);
    REFUSED(decode_step, step, capture_row, INT64_MIN);
    REFUSED(decode_batch, batch, slot, MOXIE_SLOTS_MAX);
    REFUSED(decode_batch, batch, layer, -1);
    REFUSED(decode_batch, batch, id_space, 0);
    REFUSED(decode_batch, batch, id_space, 4);
    REFUSED(decode_call, call, slot, -1);
    REFUSED(decode_call, call, layer, -1);
    REFUSED(decode_routing, routing, scoring, 0);
    REFUSED(decode_routing, routing, scoring, 4);
    REFUSED(decode_routing, routing, renormalize, 2);
    call.reserved0 = 1;
    ck_assert_int_eq(decode_call(&call_to, &call, &error), MOXIE_E_INVALID);
    routing.reserved0 = 1;
    ck_assert_int_eq(decode_routing(&routing_to, &routing, &error), MOXIE_E_INVALID);
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_loop_test(tests, every_size, 0, 65);
    tcase_add_loop_test(tests, every_tail_byte, 0, 40);
    tcase_add_test(tests, refusals);
    tcase_add_test(tests, unaligned);
    tcase_add_test(tests, encoding);
    tcase_add_test(tests, errors_are_reset);
    tcase_add_test(tests, weights);
    tcase_add_test(tests, rows);
    tcase_add_test(tests, rows_fields);
    tcase_add_test(tests, ranges);
}

SUITE_MAIN("decode", 30, add)
