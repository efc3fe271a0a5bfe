// Which layers with few tokens the stream family takes, on a made-up CUDA, with made-up kernels, and
// beside an sm90 that serves them or does not.
#include <cstring>
#include <string>

#include "check.h"
#include "core/backends.h"
#include "cuda/host/fake_cuda.h"
#include "cuda/moe/stream/cost.h"
#include "cuda/moe/stream/entry.h"
#include "flashmoe/flashmoe.h"

// ---- made-up kernels -----------------------------------------------------------------------------

namespace flashmoe::moe::stream {

static int bytes_more = 0;
static int bytes_of(const SharedShape& shape) { return 4096 * shape.stages + bytes_more; }
static LoadedKernel loaded[6][kMaxDevices];

static Entry entry_of(int tiles, int tokens, bool bulk, int first) {
  const auto kernel = [first](const char* name, int index) {
    return Kernel{name, reinterpret_cast<const void*>(intptr_t{0x11} + first + index),
                  kLeastSharedBytes, loaded[first + index]};
  };
  Entry entry = {};
  entry.up = kernel(bulk ? "up_bulk" : "up", 0);
  entry.down = kernel(bulk ? "down_bulk" : "down", 1);
  entry.dtype = Dtype::kBFloat16;
  entry.bulk = bulk;
  entry.tiles = tiles;
  entry.tokens = tokens;
  entry.threads = 256;
  entry.max_stages = 4;
  entry.max_columns = 1024;
  entry.up_bytes = entry.down_bytes = &bytes_of;
  return entry;
}

extern const Entry entry_bf16_t1_n8;
extern const Entry entry_bf16_t2_n16;
extern const Entry entry_bf16_bulk;
const Entry entry_bf16_t1_n8 = entry_of(1, 8, false, 0);
const Entry entry_bf16_t2_n16 = entry_of(2, 16, false, 2);
const Entry entry_bf16_bulk = entry_of(1, 8, true, 4);

}  // namespace flashmoe::moe::stream

namespace flashmoe {
namespace {

flashmoe_status sm90_says = FLASHMOE_OK;
int sm90_asked = 0;

flashmoe_status plan_by_sm90(const MoeForwardProblem&, MoePlan*, const Reason& reason) {
  ++sm90_asked;
  return sm90_says == FLASHMOE_OK ? sm90_says : reason.refuse(sm90_says, "no");
}

}  // namespace

const MoeFamily kSm90Moe = {
    "sm90", FLASHMOE_DEVICE_CUDA, {nullptr, nullptr}, {&plan_by_sm90, nullptr}, {nullptr, nullptr},
};

namespace {

MoeForwardProblem problem_of(int64_t tokens) {
  constexpr int64_t kHidden = 2048;
  constexpr int64_t kInner = 768;
  MoeForwardProblem p = {};
  p.dtype = Dtype::kBFloat16;
  p.device = {FLASHMOE_DEVICE_CUDA, 0};
  p.tokens = tokens;
  p.hidden = kHidden;
  p.inner = kInner;
  p.experts = 128;
  p.top_k = 8;
  p.gated = true;
  p.gate = p.up = {nullptr, kHidden * kInner, kHidden, 1};
  p.down = {nullptr, kHidden * kInner, kInner, 1};
  return p;
}

// The family's sentence, "" where it serves the call.
std::string refusal_of(const MoeForwardProblem& problem) {
  MoePlan plan = {};
  char reason[256] = "";
  const flashmoe_status status = kStreamMoe.forward.plan(problem, &plan, Reason(reason));
  CHECK(status == FLASHMOE_OK || status == FLASHMOE_ERROR_UNSUPPORTED);
  CHECK((status == FLASHMOE_OK) == (plan.info.launches == 2));
  return reason;
}

// Why it yields to others, "" where it does not.
std::string yields(const MoeForwardProblem& problem) {
  sm90_asked = 0;
  const char* const why = kStreamMoe.forward.yields(problem);
  return why != nullptr ? why : "";
}

const std::string kSm90IsFaster = "many tokens, for which sm90 is faster (named, it serves them)";
const std::string kTilesAreFaster =
    "many tokens, for which tiles of more tokens are faster (named, it serves them)";

void sm90_comes_first_where_it_serves() {
  using namespace moe::stream;
  for (int64_t tokens = 1; tokens <= kMostTokens + 1; ++tokens) {
    const MoeForwardProblem problem = problem_of(tokens);
    const std::string many = tokens > kMostTokens ? kTilesAreFaster : "";
    const std::string beside_sm90 = tokens > kMostTokensBesideSm90 ? kSm90IsFaster : "";
    sm90_says = FLASHMOE_OK;
    CHECK(yields(problem) == (many.empty() ? beside_sm90 : many));
    // What sm90 says of so few tokens, or so many, makes no difference.
    CHECK(sm90_asked == (tokens > kMostTokensBesideSm90 && tokens <= kMostTokens ? 1 : 0));
    sm90_says = FLASHMOE_ERROR_UNSUPPORTED;
    CHECK(yields(problem) == many);
    sm90_says = FLASHMOE_ERROR_CUDA;  // which is for the caller to know
    CHECK(yields(problem) == (many.empty() ? beside_sm90 : many));
  }
}

// Whatever it yields to others, it has a kernel for.
void it_serves_more_than_it_is_made_for() {
  using namespace moe::stream;
  sm90_says = FLASHMOE_OK;
  sm90_asked = 0;
  for (const int64_t tokens : {int64_t{0}, int64_t{1}, kMostTokens, kMostTokensServed}) {
    CHECK(refusal_of(problem_of(tokens)) == "" && sm90_asked == 0);
  }
  CHECK(refusal_of(problem_of(kMostTokensServed + 1)) ==
        "x: got 129 tokens, accepted are at most 128");
}

void few_tokens_an_expert() {
  sm90_says = FLASHMOE_ERROR_UNSUPPORTED;
  MoeForwardProblem problem = problem_of(17);
  problem.experts = problem.top_k = 2;
  CHECK(yields(problem) == kTilesAreFaster && refusal_of(problem) == "");
  problem.tokens = 8;
  CHECK(yields(problem) == "" && refusal_of(problem) == "");
}

// Each names the argument, what it got and what is accepted.
void what_it_cannot_serve_it_names() {
  const ExpertMatrix transposed = {nullptr, 2048 * 768, 1, 768};
  const std::string sentence = ": got transposed weights, with last stride 768, accepted is 1";
  MoeForwardProblem problem = problem_of(4);
  problem.gate = transposed;
  CHECK(refusal_of(problem) == "w_gate_up" + sentence);
  problem = problem_of(4);
  problem.up = transposed;
  CHECK(refusal_of(problem) == "w_up" + sentence);
  problem.gated = false;
  CHECK(refusal_of(problem) == "w_gate_up" + sentence);
  problem = problem_of(4);
  problem.down = transposed;
  CHECK(refusal_of(problem) == "w_down" + sentence);
  problem = problem_of(4);
  problem.hidden = (int64_t{1} << 24) + 8;
  CHECK(refusal_of(problem) == "x: its hidden size is 16777224, accepted are at most 16777216");
  problem = problem_of(4);
  problem.inner = (int64_t{1} << 24) + 8;
  CHECK(refusal_of(problem) ==
        "w_down: its number of columns is 16777224, accepted are at most 16777216");
  moe::stream::bytes_more = 1 << 20;
  CHECK(refusal_of(problem_of(4))
            .find("x: got 4 tokens with 8 experts each, accepted are as many "
                  "as fit in the ") == 0);
  moe::stream::bytes_more = 0;
}

void the_copy_engine_brings_long_rows_for_few_tokens() {
  const auto first_kernel = [](const MoeForwardProblem& problem) {
    MoePlan plan = {};
    char reason[256] = "";
    CHECK(kStreamMoe.forward.plan(problem, &plan, Reason(reason)) == FLASHMOE_OK);
    // Stages of either kernel that groups of warps take in turn.
    CHECK(plan.info.stage[0].stages >= 2 && plan.info.stage[1].stages >= 2);
    return std::string(plan.info.stage[0].kernel);
  };
  sm90_says = FLASHMOE_ERROR_UNSUPPORTED;
  CHECK(first_kernel(problem_of(1)) == "up_bulk" && first_kernel(problem_of(8)) == "up_bulk");
  CHECK(first_kernel(problem_of(9)) == "up");
  MoeForwardProblem problem = problem_of(4);
  problem.inner = 256;
  problem.down.row_stride = 256;
  CHECK(first_kernel(problem) == "up");
}

void sm90_takes_many_tokens_of_an_expert() {
  sm90_says = FLASHMOE_OK;
  MoeForwardProblem problem = problem_of(8);
  problem.experts = 8;
  problem.top_k = 2;
  CHECK(yields(problem) == kSm90IsFaster);
  problem.tokens = 6;
  CHECK(yields(problem) == "");
  problem.inner = 256;
  CHECK(yields(problem) == kSm90IsFaster);
}

}  // namespace
}  // namespace flashmoe

int main() {
  flashmoe::sm90_comes_first_where_it_serves();
  flashmoe::it_serves_more_than_it_is_made_for();
  flashmoe::few_tokens_an_expert();
  flashmoe::what_it_cannot_serve_it_names();
  flashmoe::the_copy_engine_brings_long_rows_for_few_tokens();
  flashmoe::sm90_takes_many_tokens_of_an_expert();
  return 0;
}
