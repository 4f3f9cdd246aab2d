// Small statistics over measured times.

#include "hosts/cli/numbers.h"

#include <stdlib.h>

static int by_value(const void *left, const void *right)
{
    const double *a = left;
    const double *b = right;

    return (*a > *b) - (*a < *b);
}

void numbers_sort(double *numbers, int count)
{
    qsort(numbers, (size_t)count, sizeof *numbers, by_value);
}

double numbers_quantile(const double *sorted, int count, double share)
{
    return sorted[(int)(share * (count - 1) + 0.5)];
}
