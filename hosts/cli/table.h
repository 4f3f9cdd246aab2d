// Readable tables: columns as wide as their widest cell, two spaces apart.

#ifndef MOXIE_HOSTS_CLI_TABLE_H
#define MOXIE_HOSTS_CLI_TABLE_H

#include <stdint.h>

#define TABLE_COLUMNS_MAX 12

struct table {
    uint32_t columns;
    uint32_t right; // bit i: column i is aligned to the right
    uint64_t rows, rows_capacity;
    char **cells; // [rows, columns]
    int failed;   // out of memory; table_print says so
};

// The first row is the heading when `heading` is not NULL: `columns` words.
void table_init(struct table *table, uint32_t columns, uint32_t right, const char *const *heading);
void table_fini(struct table *table);

// `row` holds one text per column.
void table_row(struct table *table, const char *const *row);
// One cell of a new row (column 0) or of the current one, printed as by printf.
void table_cell(struct table *table, uint32_t column, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

// Writes the table to standard output, each line behind `indent` spaces.
void table_print(const struct table *table, int indent);

#define HUMAN_BYTES 16
// "896.0 MiB"; exact bytes below 1 KiB.
const char *human_bytes(uint64_t bytes, char buffer[HUMAN_BYTES]);

#endif
