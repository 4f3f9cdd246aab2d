// Readable tables.

#include "hosts/cli/table.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void table_init(struct table *table, uint32_t columns, uint32_t right, const char *const *heading)
{
    *table = (struct table){.columns = columns, .right = right};
    if (heading != NULL) table_row(table, heading);
}

void table_fini(struct table *table)
{
    for (uint64_t i = 0; i < table->rows * table->columns; i++)
        free(table->cells[i]);
    free(table->cells);
    *table = (struct table){0};
}

static int add_row(struct table *table)
{
    if (table->rows == table->rows_capacity) {
        uint64_t capacity = table->rows_capacity == 0 ? 16 : 2 * table->rows_capacity;
        char **cells = realloc(table->cells, capacity * table->columns * sizeof *cells);

        if (cells == NULL) return 0;
        table->cells = cells;
        table->rows_capacity = capacity;
    }
    memset(table->cells + table->rows * table->columns, 0, table->columns * sizeof(char *));
    table->rows++;
    return 1;
}

void table_cell(struct table *table, uint32_t column, const char *format, ...)
{
    char *text = NULL;
    va_list args;

    if (column == 0 && !table->failed) table->failed = !add_row(table);
    if (table->failed) return;
    va_start(args, format);
    if (vasprintf(&text, format, args) < 0) text = NULL;
    va_end(args);
    table->failed = text == NULL;
    table->cells[(table->rows - 1) * table->columns + column] = text;
}

void table_row(struct table *table, const char *const *row)
{
    for (uint32_t i = 0; i < table->columns; i++)
        table_cell(table, i, "%s", row[i]);
}

static const char *cell_text(const struct table *table, uint64_t row, uint32_t column)
{
    const char *text = table->cells[row * table->columns + column];

    return text != NULL ? text : "";
}

void table_print(const struct table *table, int indent)
{
    int widths[TABLE_COLUMNS_MAX] = {0};

    for (uint64_t i = 0; i < table->rows; i++)
        for (uint32_t j = 0; j < table->columns; j++) {
            int width = (int)strlen(cell_text(table, i, j));

            if (width > widths[j]) widths[j] = width;
        }
    for (uint64_t i = 0; i < table->rows; i++) {
        (void)printf("%*s", indent, "");
        for (uint32_t j = 0; j < table->columns; j++) {
            int last = j + 1 == table->columns;
            int right = (table->right >> j & 1u) != 0;
            int width = last && !right ? 0 : widths[j];

            (void)printf("%*s%s", right ? width : -width, cell_text(table, i, j),
                         last ? "\n" : "  ");
        }
    }
    if (table->failed) (void)printf("%*s(cut: out of memory)\n", indent, "");
}

const char *human_bytes(uint64_t bytes, char buffer[HUMAN_BYTES])
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    double value = (double)bytes;
    unsigned unit = 0;

    while (value >= 1023.95 && unit + 1 < sizeof units / sizeof units[0]) {
        value /= 1024;
        unit++;
    }
    (void)snprintf(buffer, HUMAN_BYTES, unit == 0 ? "%.0f %s" : "%.1f %s", value, units[unit]);
    return buffer;
}
