/* CHECK for the C and C++ tests: says what failed and where, and ends the program. */
#ifndef FLASHMOE_TESTS_CHECK_H_
#define FLASHMOE_TESTS_CHECK_H_

#include <stdio.h>
#include <stdlib.h>

#define CHECK(condition)                                                                       \
  do {                                                                                         \
    if (!(condition)) {                                                                        \
      fprintf(stderr, "%s:%d: failed: %s\n  last error: %s\n", __FILE__, __LINE__, #condition, \
              flashmoe_last_error());                                                          \
      exit(1);                                                                                 \
    }                                                                                          \
  } while (0)

#endif /* FLASHMOE_TESTS_CHECK_H_ */
