// CHECK(condition) counts and prints what fails; a test program ends with `return CheckResult();`.
#pragma once

#include <stdio.h>

inline int failures = 0;

#define CHECK(condition)                                             \
  do {                                                               \
    if (!(condition)) {                                              \
      ++failures;                                                    \
      printf("%s:%d: failed: %s\n", __FILE__, __LINE__, #condition); \
    }                                                                \
  } while (false)

inline int CheckResult() {
  if (failures == 0) {
    printf("all passed\n");
  } else {
    printf("%d checks failed\n", failures);
  }
  return failures == 0 ? 0 : 1;
}
