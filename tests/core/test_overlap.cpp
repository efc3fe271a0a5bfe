// Whether what a call writes overlaps its other tensors (core/overlap.h), against a count of the
// bytes of random views.
#include "core/overlap.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "flashmoe/flashmoe.h"

namespace flashmoe {
namespace {

constexpr uintptr_t kData = uintptr_t{1} << 40;  // never read

struct View {
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;
  flashmoe_tensor tensor = {};

  View(std::vector<int64_t> extents, std::vector<int64_t> steps, int64_t offset, uint8_t bits = 16)
      : shape(std::move(extents)), strides(std::move(steps)) {
    tensor.ndim = static_cast<int32_t>(shape.size());
    tensor.dtype = {FLASHMOE_DTYPE_FLOAT, bits, 1};
    tensor.shape = shape.data();
    tensor.strides = strides.empty() ? nullptr : strides.data();
    tensor.data = reinterpret_cast<void*>(kData + static_cast<uintptr_t>(offset * (bits / 8)));
  }
  View(const View&) = delete;

  Region region() const { return Region::of(&tensor, Reach::of(&tensor)); }

  // Every byte of it, in order.
  std::vector<int64_t> bytes() const {
    std::vector<int64_t> offsets = {0};
    int64_t packed = 1;
    for (size_t axis = shape.size(); axis-- > 0;) {
      const int64_t stride = strides.empty() ? packed : strides[axis];
      packed *= shape[axis];
      std::vector<int64_t> next;
      for (int64_t i = 0; i < shape[axis]; ++i) {
        for (const int64_t offset : offsets) next.push_back(offset + i * stride);
      }
      offsets = next;
    }
    const int64_t width = tensor.dtype.bits / 8;
    const int64_t first = static_cast<int64_t>(reinterpret_cast<uintptr_t>(tensor.data)) -
                          static_cast<int64_t>(kData);
    std::vector<int64_t> made;
    for (const int64_t offset : offsets) {
      for (int64_t i = 0; i < width; ++i) made.push_back(first + offset * width + i);
    }
    std::sort(made.begin(), made.end());
    return made;
  }
};

bool share_bytes(const View& a, const View& b) {
  std::vector<int64_t> both;
  const std::vector<int64_t> of_a = a.bytes(), of_b = b.bytes();
  std::set_intersection(of_a.begin(), of_a.end(), of_b.begin(), of_b.end(),
                        std::back_inserter(both));
  return !both.empty();
}

bool accepted(const View& input, const View& output) {
  const Memory memory[] = {{"x", &input.tensor, input.region()},
                           {"out", &output.tensor, output.region()}};
  const bool apart = check_written_memory(memory, 2, 1) == FLASHMOE_OK;
  if (!apart) {
    CHECK(std::string(flashmoe_last_error()).find("out: it shares memory with x") == 0);
  }
  return apart;
}

void regions_are_what_a_view_reaches() {
  std::mt19937 random(0);
  const auto below = [&](int n) { return static_cast<int64_t>(random() % unsigned(n)); };
  for (int i = 0; i < 2000; ++i) {
    std::vector<int64_t> shape, strides;
    for (int64_t rank = 1 + below(4); rank > 0; --rank) {
      shape.push_back(below(5));
      strides.push_back(below(30) - 15);
    }
    if (below(4) == 0) strides.clear();
    const View view(shape, strides, 1000, below(2) == 0 ? 16 : 32);
    const std::vector<int64_t> bytes = view.bytes();
    const Region region = view.region();
    if (bytes.empty()) {
      CHECK(region.begin >= region.end);
      CHECK(!region.meets({0, UINTPTR_MAX}));
    } else {
      CHECK(region.begin == kData + static_cast<uintptr_t>(bytes.front()));
      CHECK(region.end == kData + static_cast<uintptr_t>(bytes.back()) + 1);
    }
  }
  CHECK(!Region::of(nullptr, Reach::of(nullptr)).meets({0, UINTPTR_MAX}));
  CHECK(!Region::of(static_cast<const void*>(nullptr), 100).meets({0, UINTPTR_MAX}));
}

// Also where no output meets it: what it would read or write is nobody's.
void strides_beyond_the_address_space_are_refused() {
  const int64_t shape[] = {2}, below[] = {-(int64_t{1} << 60)}, above[] = {int64_t{1} << 60};
  flashmoe_tensor tensor = {};
  tensor.ndim = 1;
  tensor.dtype = {FLASHMOE_DTYPE_FLOAT, 16, 1};
  tensor.shape = shape;
  for (const auto& [strides, address] :
       {std::pair{below, uintptr_t{1} << 40}, std::pair{above, ~uintptr_t{0} - (1 << 20)}}) {
    tensor.strides = strides;
    tensor.data = reinterpret_cast<void*>(address);
    const Region region = Region::of(&tensor, Reach::of(&tensor));
    CHECK(region.is_outside());
    const Memory memory[] = {{"x", &tensor, region}, {"out", nullptr, {64, 128}}};
    CHECK(check_written_memory(memory, 2, 1) == FLASHMOE_ERROR_INVALID_ARGUMENT);
    CHECK(std::strncmp(flashmoe_last_error(), "x: its strides reach beyond", 27) == 0);
  }
}

// 2^60 elements of eight bytes each.
void the_largest_tensors_are_counted_without_overflow() {
  const int64_t most = INT64_MAX / 8 + 1;
  for (const int64_t stride : {int64_t{1}, int64_t{-1}}) {
    const int64_t shape[] = {most}, strides[] = {stride};
    flashmoe_tensor tensor = {};
    tensor.ndim = 1;
    tensor.dtype = {FLASHMOE_DTYPE_FLOAT, 64, 1};
    tensor.shape = shape;
    tensor.strides = strides;
    const Reach reach = Reach::of(&tensor);
    const uint64_t all = uint64_t{1} << 63;
    CHECK(reach.below == (stride < 0 ? all - 8 : 0));
    CHECK(reach.above == (stride < 0 ? 8 : all));
  }
}

// The strides of an empty tensor may be any.
void an_empty_tensor_reaches_nowhere() {
  const int64_t shape[] = {0, 40}, strides[] = {1, INT64_MIN};
  flashmoe_tensor tensor = {};
  tensor.ndim = 2;
  tensor.dtype = {FLASHMOE_DTYPE_FLOAT, 16, 1};
  tensor.shape = shape;
  tensor.strides = strides;
  CHECK(Reach::of(&tensor).above == 0);
}

// What is accepted shares no byte. What is refused and shares none is interleaved.
void no_shared_byte_is_accepted() {
  std::mt19937 random(0);
  const auto below = [&](int n) { return static_cast<int64_t>(random() % unsigned(n)); };
  int shared = 0, interleaved = 0, refused = 0;
  for (int i = 0; i < 20000; ++i) {
    const auto view = [&] {
      std::vector<int64_t> shape, strides;
      const int64_t unit = 1 + below(4);
      for (int64_t rank = 1 + below(4); rank > 0; --rank) {
        shape.push_back(1 + below(4));
        strides.push_back(unit * (below(24) - 8));
      }
      return View(shape, strides, below(40), below(2) == 0 ? 16 : 32);
    };
    const View input = view(), output = view();
    const bool regions_meet = input.region().meets(output.region());
    const bool share = share_bytes(input, output);
    CHECK(regions_meet || !share);
    const bool apart = accepted(input, output);
    CHECK(!(share && apart));
    CHECK(apart || regions_meet);
    shared += share ? 1 : 0;
    interleaved += regions_meet && apart ? 1 : 0;
    refused += apart ? 0 : 1;
  }
  CHECK(shared > 5000 && interleaved > 300 && refused >= shared);
}

// q, k, v and out of one array, along any of its axes; and backwards.
void slices_of_one_array_are_apart() {
  const int64_t kExtents[] = {3, 5, 2, 8};
  for (size_t axis = 0; axis <= 4; ++axis) {
    for (const int64_t padding : {0, 8}) {  // of rows
      std::vector<int64_t> shape(kExtents, kExtents + 4), strides(4);
      int64_t step = 1, slice = 0;
      for (size_t i = 4; i-- > 0;) {
        if (axis == i + 1) slice = step, step *= 4;
        strides[i] = step;
        step *= shape[i];
        if (i == 3) step += padding;
      }
      if (axis == 0) slice = step;
      for (int64_t a = 0; a < 4; ++a) {
        for (int64_t b = 0; b < 4; ++b) {
          const View input(shape, strides, a * slice);
          std::vector<int64_t> backwards = strides;
          int64_t offset = b * slice;
          for (size_t i = 0; i < 2; ++i) {
            offset += (shape[i] - 1) * strides[i];
            backwards[i] = -strides[i];
          }
          const View output(shape, backwards, offset);
          CHECK(accepted(input, View(shape, strides, b * slice)) == (a != b));
          CHECK(accepted(input, output) == (a != b));
        }
      }
    }
  }
}

void a_workspace_is_one_run() {
  const View x({4, 8}, {16, 1}, 0);
  const auto beside = [&x](uintptr_t offset, uint64_t bytes) {
    const Memory memory[] = {
        {"x", &x.tensor, x.region()},
        {"workspace", nullptr, Region::of(reinterpret_cast<void*>(kData + offset), bytes)}};
    return check_written_memory(memory, 2, 1) == FLASHMOE_OK;
  };
  CHECK(beside(112, 1000) && beside(16, 16) && beside(48, 0));
  CHECK(!beside(15, 16) && !beside(16, 17) && !beside(111, 1) && !beside(0, 1000));
}

}  // namespace
}  // namespace flashmoe

int main() {
  flashmoe::regions_are_what_a_view_reaches();
  flashmoe::no_shared_byte_is_accepted();
  flashmoe::slices_of_one_array_are_apart();
  flashmoe::a_workspace_is_one_run();
  flashmoe::strides_beyond_the_address_space_are_refused();
  flashmoe::the_largest_tensors_are_counted_without_overflow();
  flashmoe::an_empty_tensor_reaches_nowhere();
  return 0;
}
