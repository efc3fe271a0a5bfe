// What the sm89 and sm90 families of layers and grouped products, and of their gradients, refuse,
// on a made-up CUDA with made-up kernels (made_up_moe.cpp, made_up_moe_backward.cpp): extents and
// strides that their 32-bit numbers and tensor maps do not hold, and layouts of weights that they
// have no kernel for. Each sentence names the argument.
#include <cstdint>
#include <string>

#include "check.h"
#include "core/backends.h"
#include "cuda/host/fake_cuda.h"
#include "flashmoe/flashmoe.h"

namespace flashmoe {
namespace {

constexpr int64_t kOne = 1;

// [experts, rows, columns], row-major or transposed, contiguous.
ExpertMatrix row_major(int64_t rows, int64_t columns) {
  return {nullptr, rows * columns, columns, 1, Dtype::kBFloat16, 0};
}
ExpertMatrix transposed(int64_t rows, int64_t columns) {
  return {nullptr, rows * columns, 1, rows, Dtype::kBFloat16, 0};
}

struct Layer : MoeForwardProblem {
  explicit Layer(int64_t tokens_ = 100, int64_t hidden_ = 256, int64_t inner_ = 128)
      : MoeForwardProblem{} {
    x.dtype = out.dtype = pre_activation.dtype = Dtype::kBFloat16;
    device = {FLASHMOE_DEVICE_CUDA, 0};
    tokens = tokens_;
    hidden = x.row_stride = out.row_stride = hidden_;
    inner = inner_;
    experts = 8;
    top_k = 2;
    gated = true;
    alpha = 1.0f;
    gate = up = row_major(inner, hidden);
    down = row_major(hidden, inner);
  }
};

struct Product : GroupedProductProblem {
  Product() : GroupedProductProblem{} {
    x.dtype = out.dtype = Dtype::kBFloat16;
    device = {FLASHMOE_DEVICE_CUDA, 0};
    experts = 8;
    rows = 1000;
    columns = x.row_stride = 256;
    out_columns = out.row_stride = 512;
    w = row_major(512, 256);
    offsets = reinterpret_cast<const int32_t*>(uintptr_t{4096});
  }
  void count(int64_t rows_of_each) {
    counts = reinterpret_cast<const int32_t*>(uintptr_t{4096});
    offsets = nullptr;
    rows = rows_of_each;
    x.expert_stride = rows * columns;
    out.expert_stride = rows * out_columns;
  }
};

// A family's sentence, "" where it serves the call.
template <class Problem>
std::string refusal_of(const Family<Problem>& family, const Problem& problem) {
  Plan plan = {};
  char reason[384] = "";
  const flashmoe_status status = family.plan(problem, &plan, Reason(reason));
  CHECK(status == FLASHMOE_OK || status == FLASHMOE_ERROR_UNSUPPORTED);
  CHECK((status == FLASHMOE_OK) == (reason[0] == '\0'));
  CHECK(status != FLASHMOE_OK || plan.info.microseconds > 0);
  return reason;
}
std::string refusal_by_sm89(const MoeForwardProblem& p) { return refusal_of(kSm89MoeForward, p); }
std::string refusal_by_sm90(const MoeForwardProblem& p) { return refusal_of(kSm90MoeForward, p); }
std::string refusal_by_sm89(const GroupedProductProblem& p) {
  return refusal_of(kSm89GroupedProduct, p);
}
std::string refusal_by_sm90(const GroupedProductProblem& p) {
  return refusal_of(kSm90GroupedProduct, p);
}

void check(const std::string& got, const char* wanted, int line) {
  if (got == wanted) return;
  std::fprintf(stderr, "line %d: wanted \"%s\"\n     got \"%s\"\n", line, wanted, got.c_str());
  std::exit(1);
}
#define EXPECT_SM89(problem, wanted) check(refusal_by_sm89(problem), wanted, __LINE__)
#define EXPECT_SM90(problem, wanted) check(refusal_by_sm90(problem), wanted, __LINE__)

// Every combination, of which a family has a kernel or says which it lacks. The strides say what is
// transposed, so that nothing is read otherwise than it lies.
void mixed_transposition() {
  for (const bool gated : {true, false}) {
    for (const bool gate_t : {false, true}) {
      for (const bool up_t : {false, true}) {
        for (const bool down_t : {false, true}) {
          Layer layer;
          layer.gated = gated;
          layer.gate =
              gate_t ? transposed(layer.inner, layer.hidden) : row_major(layer.inner, layer.hidden);
          layer.up =
              up_t ? transposed(layer.inner, layer.hidden) : row_major(layer.inner, layer.hidden);
          layer.down =
              down_t ? transposed(layer.hidden, layer.inner) : row_major(layer.hidden, layer.inner);
          const std::string sentence =
              !gated || gate_t == up_t ? ""
              : up_t ? "w_up: got transposed weights, and w_gate_up others, "
                       "accepted are both transposed or neither"
                     : "w_up: got row-major weights, and w_gate_up others, accepted are "
                       "both transposed or neither";
          EXPECT_SM89(layer, sentence.c_str());
          EXPECT_SM90(layer, sentence.c_str());
        }
      }
    }
  }
  // Gate and up interleaved.
  Layer interleaved;
  interleaved.gate = interleaved.up = {nullptr,
                                       2 * interleaved.inner * interleaved.hidden,
                                       2,
                                       2 * interleaved.inner,
                                       Dtype::kBFloat16,
                                       0};
  EXPECT_SM89(interleaved, "");
  EXPECT_SM90(interleaved, "");
  interleaved.gate = interleaved.up = {nullptr,
                                       2 * interleaved.inner * interleaved.hidden,
                                       2 * interleaved.hidden,
                                       1,
                                       Dtype::kBFloat16,
                                       0};
  EXPECT_SM89(interleaved, "");
  EXPECT_SM90(interleaved, "");
}

void strides_of_weights() {
  const int64_t most = (kOne << 39) - 8;  // elements, of tensor maps
  for (const int64_t stride : {int64_t{0}, int64_t{-32768}, kOne << 39}) {
    const std::string number = std::to_string(stride);
    Layer layer;
    layer.gate.expert_stride = stride;
    EXPECT_SM89(layer, "");
    EXPECT_SM90(layer, ("w_gate_up: got strides " + number +
                        ", 256 and 1, accepted are those above 0 and below 2^40 bytes")
                           .c_str());
    layer = Layer();
    layer.down.row_stride = stride;
    EXPECT_SM90(layer, ("w_down: got strides 32768, " + number +
                        " and 1, accepted are those above 0 and below 2^40 bytes")
                           .c_str());
    layer = Layer();
    layer.up.expert_stride = stride;
    layer.experts = 1;  // from which there is no step
    EXPECT_SM90(layer, "");
    Product product;
    product.w = {nullptr, stride, 1, 512, Dtype::kBFloat16, 0};
    EXPECT_SM90(product, ("w: got strides " + number +
                          ", 1 and 512, accepted are those above 0 and below 2^40 bytes")
                             .c_str());
  }
  Layer layer;
  layer.gate.expert_stride = layer.up.expert_stride = layer.down.row_stride = most;
  EXPECT_SM90(layer, "");
}

void rows_and_columns() {
  const int64_t limit = kOne << 30;
  for (const int64_t more : {0, 8}) {
    const std::string number = std::to_string(limit + more);
    Layer layer(1, 256, limit + more);
    const std::string up = more == 0
                               ? ""
                               : "w_gate_up: got " + number +
                                     " rows of 256 columns, accepted are at most 2^30 of each";
    EXPECT_SM89(layer, up.c_str());
    EXPECT_SM90(layer, up.c_str());
    Product product;
    product.columns = product.x.row_stride = limit + more;
    product.rows = 8;
    product.experts = 1;
    product.w = row_major(512, limit + more);
    const std::string wide =
        more == 0 ? ""
                  : "w: got 512 rows of " + number + " columns, accepted are at most 2^30 of each";
    EXPECT_SM89(product, wide.c_str());
    EXPECT_SM90(product, wide.c_str());

    Layer pairs(limit / 2 + more / 2, 8, 8);
    EXPECT_SM90(pairs, more == 0 ? ""
                                 : "weights: got 1073741832 pairs of a token and an expert, "
                                   "accepted are at most 2^30");
    product = Product();
    product.rows = limit + more;
    EXPECT_SM90(product, more == 0 ? "" : "x: got 1073741832 rows, accepted are at most 2^30");
  }
  // sm89 takes as many pairs as validation does.
  EXPECT_SM89(Layer((kOne << 30) - (kOne << 15), 8, 8), "");
}

void rows_of_x() {
  const int64_t pieces = kOne << 32;  // of 8 elements
  Layer layer(1 << 16);
  layer.x.row_stride = (pieces >> 16) * 8 - 8;
  EXPECT_SM89(layer, "");
  EXPECT_SM90(layer, "");
  layer.x.row_stride = (pieces >> 16) * 8;
  const char* const far =
      "x: got 65536 rows that are 524288 elements apart, accepted are strides of 0 or more and "
      "less "
      "than 64 GiB";
  EXPECT_SM89(layer, far);
  EXPECT_SM90(layer, far);
  layer.x.row_stride = -256;
  const char* const backwards =
      "x: got 65536 rows that are -256 elements apart, accepted are strides of 0 or more and less "
      "than 64 GiB";
  EXPECT_SM89(layer, backwards);
  EXPECT_SM90(layer, backwards);
  Product product;
  product.x.row_stride = -256;
  EXPECT_SM89(
      product,
      "x: got 1000 rows that are -256 elements apart, accepted are strides of 0 or more and "
      "less than 64 GiB");
  EXPECT_SM90(
      product,
      "x: got rows -256 elements apart, of experts 0, accepted are strides above 0 and below "
      "2^40 bytes");
  product = Product();
  product.out.row_stride = kOne << 39;
  EXPECT_SM89(product, "");
  EXPECT_SM90(
      product,
      "out: got rows 549755813888 elements apart, of experts 0, accepted are strides above 0 "
      "and below 2^40 bytes");
  layer = Layer();
  layer.pre_activation.data = reinterpret_cast<void*>(uintptr_t{4096});
  layer.pre_activation.row_stride = -256;
  EXPECT_SM89(layer, "");
  EXPECT_SM90(layer,
              "pre_activation: got rows -256 elements apart, of experts 0, accepted are strides "
              "above 0 and below 2^40 bytes");
}

// Batches of rows for every expert are numbered together.
void tiles() {
  Product product;
  product.experts = 1024;
  product.columns = product.x.row_stride = 8;
  product.w = row_major(512, 8);
  product.count((kOne << 27) - 128);
  EXPECT_SM89(product, "");
  product.count(kOne << 27);
  EXPECT_SM89(product,
              "x: got 134217728 rows for each of 1024 experts, accepted are at most 2^30 tiles of "
              "128 rows");
  product.out_columns = product.out.row_stride = 2048;
  product.w = row_major(2048, 8);
  product.count(kOne << 24);
  EXPECT_SM90(product, "");
  product.count(kOne << 25);
  EXPECT_SM90(
      product,
      "x: got 34359738368 rows, with 2048 rows of weights more than 2^30 tiles, accepted are "
      "fewer");
  Layer layer(kOne << 28, 8, 1 << 17);
  EXPECT_SM90(layer,
              "weights: got 536870912 rows, with 131072 rows of weights more than 2^30 tiles, "
              "accepted are fewer");
}

void rows_that_are_combined() {
  const int64_t most = 65535 * 64 * 8;  // blocks, threads of few tokens' blocks, elements of one
  EXPECT_SM89(Layer(1, most, 8), "");
  EXPECT_SM90(Layer(1, most, 8), "");
  const char* const sentence =
      "x: its hidden size is 33553928, accepted for 1 tokens are at most 33553920";
  EXPECT_SM89(Layer(1, most + 8, 8), sentence);
  EXPECT_SM90(Layer(1, most + 8, 8), sentence);
}

// Gradients of biases alone, of which no product refuses the columns.
void sums_of_columns() {
  const int64_t most = (kOne << 31) - 1 - 256;
  const auto check_both = [](const auto& p, const auto& sm89, const auto& sm90,
                             const char* wanted) {
    check(refusal_of(sm89, p), wanted, __LINE__);
    check(refusal_of(sm90, p), wanted, __LINE__);
  };
  static float memory[1];
  GroupedProductBackwardProblem product = {};
  product.device = {FLASHMOE_DEVICE_CUDA, 0};
  product.dout.dtype = product.x.dtype = product.w.dtype = Dtype::kBFloat16;
  product.experts = 2;
  product.rows = 3;
  product.out_columns = product.dout.row_stride = most / 8 * 8;
  product.dbias = {memory, most / 8 * 8, Dtype::kFloat32, 0};
  check_both(product, kSm89GroupedProductBackward, kSm90GroupedProductBackward, "");
  product.out_columns = product.dout.row_stride = kOne << 31;
  const char* const sentence =
      "gradients of biases: got 2147483648 columns, accepted are at most 2147483391";
  check_both(product, kSm89GroupedProductBackward, kSm90GroupedProductBackward, sentence);

  MoeBackwardProblem layer = {};
  layer.layer = Layer(3, kOne << 31, 8);
  layer.device = layer.layer.device;
  layer.gate_up = row_major(16, kOne << 31);
  layer.dout.dtype = Dtype::kBFloat16;
  layer.dout.row_stride = kOne << 31;
  layer.db_down = {memory, kOne << 31, Dtype::kFloat32, 0};
  check_both(layer, kSm89MoeBackward, kSm90MoeBackward, sentence);
}

// By which no second row is found: any number.
void stride_of_a_single_row() {
  alignas(16) static unsigned char memory[64];
  GroupedProductBackwardProblem product = {};
  product.device = {FLASHMOE_DEVICE_CUDA, 0};
  product.dout = {memory, 8, 0, Dtype::kBFloat16, 0};
  product.w = row_major(8, 8);
  product.w.data = memory;
  product.offsets = reinterpret_cast<const int32_t*>(memory);
  product.experts = 1;
  product.rows = 1;
  product.columns = product.out_columns = 8;
  product.dx = {memory, INT64_MIN, INT64_MIN, Dtype::kFloat32, 0};
  Plan plan = {};
  CHECK(kSm89GroupedProductBackward.plan(product, &plan, Reason()) == FLASHMOE_OK);
  CHECK(kSm89GroupedProductBackward.launch(product, plan, nullptr, nullptr) == FLASHMOE_OK);
}

}  // namespace
}  // namespace flashmoe

int main() {
  flashmoe::mixed_transposition();
  flashmoe::strides_of_weights();
  flashmoe::rows_and_columns();
  flashmoe::rows_of_x();
  flashmoe::tiles();
  flashmoe::rows_that_are_combined();
  flashmoe::sums_of_columns();
  flashmoe::stride_of_a_single_row();
  return 0;
}
