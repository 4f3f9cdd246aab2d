// The faults of this library. This file alone is compiled for each.

#include "host_tests/mock_plugin/fault.h"

const enum mock_fault mock_fault = MOCK_FAULT, mock_fault_last = MOCK_FAULT_LAST;
