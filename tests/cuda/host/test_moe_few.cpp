// Which layers the few-token family serves, and by which of its kernels, on a made-up CUDA with
// made-up kernels (made_up_few_tokens.cpp).
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>

#include "check.h"
#include "core/backends.h"
#include "cuda/host/made_up_moe.h"
#include "cuda/moe/sm89_few_tokens/cost.h"
#include "flashmoe/flashmoe.h"

namespace flashmoe {
namespace {

MoeForwardProblem problem_of(int64_t tokens) {
  constexpr int64_t kHidden = 2048;
  constexpr int64_t kInner = 768;
  MoeForwardProblem p = {};
  p.x.dtype = Dtype::kBFloat16;
  p.device = {FLASHMOE_DEVICE_CUDA, 0};
  p.tokens = tokens;
  p.hidden = kHidden;
  p.inner = kInner;
  p.experts = 128;
  p.top_k = 8;
  p.gated = true;
  p.gate = p.up = {nullptr, kHidden * kInner, kHidden, 1, Dtype::kBFloat16, 0};
  p.down = {nullptr, kHidden * kInner, kInner, 1, Dtype::kBFloat16, 0};
  return p;
}

// The family's sentence, "" where it serves the call.
std::string refusal_of(const MoeForwardProblem& problem) {
  Plan plan = {};
  char reason[256] = "";
  const flashmoe_status status = kSm89FewTokensMoeForward.plan(problem, &plan, Reason(reason));
  CHECK(status == FLASHMOE_OK || status == FLASHMOE_ERROR_UNSUPPORTED);
  CHECK((status == FLASHMOE_OK) == (plan.info.launch_count == 2));
  CHECK((status == FLASHMOE_OK) == (plan.info.microseconds > 0));
  return reason;
}

// However long it takes beside others.
void it_serves_more_than_it_is_made_for() {
  using namespace moe::sm89_few_tokens;
  for (const int64_t tokens : {int64_t{0}, int64_t{1}, int64_t{32}, kMostTokensServed}) {
    CHECK(refusal_of(problem_of(tokens)) == "");
  }
  CHECK(refusal_of(problem_of(kMostTokensServed + 1)) ==
        "x: got 129 tokens, accepted are at most 128");
  MoeForwardProblem few_experts = problem_of(17);
  few_experts.experts = few_experts.top_k = 2;
  CHECK(refusal_of(few_experts) == "");
}

// Each names the argument, what it got and what is accepted.
void what_it_cannot_serve_it_names() {
  const ExpertMatrix transposed = {nullptr, 2048 * 768, 1, 768, Dtype::kBFloat16, 0};
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
  made_up::few_token_bytes_more = 1 << 20;
  CHECK(refusal_of(problem_of(4))
            .find("x: got 4 tokens with 8 experts each, accepted are as many "
                  "as fit in the ") == 0);
  made_up::few_token_bytes_more = 0;
}

void the_copy_engine_brings_long_rows_for_few_tokens() {
  const auto first_kernel = [](const MoeForwardProblem& problem) {
    Plan plan = {};
    char reason[256] = "";
    CHECK(kSm89FewTokensMoeForward.plan(problem, &plan, Reason(reason)) == FLASHMOE_OK);
    // Stages of either kernel that groups of warps take in turn.
    CHECK(plan.info.launches[0].stages >= 2 && plan.info.launches[1].stages >= 2);
    return std::string(plan.info.launches[0].kernel);
  };
  CHECK(first_kernel(problem_of(1)) == "up_bulk" && first_kernel(problem_of(8)) == "up_bulk");
  CHECK(first_kernel(problem_of(9)) == "up");
  MoeForwardProblem problem = problem_of(4);
  problem.inner = 256;
  problem.down.row_stride = 256;
  CHECK(first_kernel(problem) == "up");
}

// Beside every way in which tokens may take an expert or not.
void an_expert_is_read_as_often_as_expected() {
  using moe::sm89_few_tokens::expected_reads;
  for (const int room : {1, 3, 4, 16}) {
    for (const double probability : {0.01, 0.25, 0.9}) {
      for (const int64_t tokens : {1, 2, 5, 8, 12}) {
        double reads = 0;
        double taken = 0;
        for (uint32_t takers = 1; takers < 1u << tokens; ++takers) {
          int64_t count = 0;
          for (int64_t token = 0; token < tokens; ++token) count += takers >> token & 1;
          const double chance = std::pow(probability, static_cast<double>(count)) *
                                std::pow(1 - probability, static_cast<double>(tokens - count));
          taken += chance;
          reads += chance * static_cast<double>((count + room - 1) / room);
        }
        CHECK(std::abs(expected_reads(tokens, probability, room) - reads / taken) < 1e-9);
      }
    }
    // Every token takes it, or there is none.
    CHECK(expected_reads(8, 1.0, room) == static_cast<double>((8 + room - 1) / room));
    CHECK(expected_reads(0, 0.5, room) == 1.0);
  }
}

}  // namespace
}  // namespace flashmoe

int main() {
  flashmoe::an_expert_is_read_as_often_as_expected();
  flashmoe::it_serves_more_than_it_is_made_for();
  flashmoe::what_it_cannot_serve_it_names();
  flashmoe::the_copy_engine_brings_long_rows_for_few_tokens();
  return 0;
}
