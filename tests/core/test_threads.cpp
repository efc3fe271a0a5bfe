// The limits of flashmoe_set_num_threads, and its default: test_threads [expected default].
#include <cstdlib>
#include <cstring>
#include <initializer_list>

#include "check.h"
#include "flashmoe/flashmoe.h"

int main(int argc, char** argv) {
  const int32_t by_default = flashmoe_get_num_threads();
  CHECK(by_default >= 1);
  if (argc == 2) CHECK(by_default == std::atoi(argv[1]));

  for (const int32_t n : {1, 2, 3, 64, 4096}) {
    CHECK(flashmoe_set_num_threads(n) == FLASHMOE_OK);
    CHECK(flashmoe_get_num_threads() == n);
  }
  CHECK(flashmoe_set_num_threads(3) == FLASHMOE_OK);
  for (const int32_t n : {-1, 4097, INT32_MIN, INT32_MAX}) {
    CHECK(flashmoe_set_num_threads(n) == FLASHMOE_ERROR_INVALID_ARGUMENT);
    CHECK(std::strstr(flashmoe_last_error(), "n: got") != nullptr);
    CHECK(flashmoe_get_num_threads() == 3);
  }
  CHECK(flashmoe_set_num_threads(0) == FLASHMOE_OK);
  CHECK(flashmoe_get_num_threads() == by_default);
  return 0;
}
