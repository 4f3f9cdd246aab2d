// Small statistics over measured times.

#ifndef MOXIE_HOSTS_CLI_NUMBERS_H
#define MOXIE_HOSTS_CLI_NUMBERS_H

// Ascending.
void numbers_sort(double *numbers, int count);
// The nearest of `count` >= 1 sorted numbers: share 0.5 is the median.
double numbers_quantile(const double *sorted, int count, double share);

#endif
