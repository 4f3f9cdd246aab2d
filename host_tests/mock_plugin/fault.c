// The fault of this library, which alone is compiled for each.

#include "host_tests/mock_plugin/fault.h"

const enum mock_fault mock_fault = MOCK_FAULT;
