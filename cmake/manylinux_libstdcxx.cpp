// For a build with FLASHMOE_MANYLINUX: what libstdc++'s headers call that GCC 8's library does not
// have.

#include <new>

namespace std {

// Of GCC 11, GLIBCXX_3.4.29: what std::vector and its like end in for a size that no array can
// have.
[[noreturn, gnu::visibility("hidden")]] void __throw_bad_array_new_length() {
  throw bad_array_new_length();
}

}  // namespace std
