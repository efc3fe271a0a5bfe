// Continuous batching in C++, on the CPU: requests arrive while others run, get pages for their
// keys and values, prefill in chunks beside others that decode, finish, and give their pages back.
//
// A step is two calls for the whole batch, whoever is in it: KvAppend writes new keys to their
// pages and rotates them and the queries, AttentionForward lets the packed queries see those pages.
// Both are made once: from step to step only the numbers in their tables change.
//
// The model (toy_model.hpp) has a row of q, k and v for each token, and knows the next token by
// what attention gave for the last. What each request got is held against one dense call on its
// whole sequence, which knows neither chunks nor pages nor the other requests.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <exception>
#include <random>
#include <string>
#include <vector>

#include "flashmoe/flashmoe.hpp"
#include "toy_model.hpp"

namespace {

constexpr int64_t kPageSize = 16;
constexpr int64_t kPages = 40;  // for all requests that run
constexpr int64_t kMostPages = kMostTokens / kPageSize;
constexpr int64_t kSlots = 6;   // requests that run at once
constexpr int64_t kRows = 64;   // tokens of a step
constexpr int64_t kChunk = 29;  // tokens of a prompt in a step
constexpr int64_t kRequests = 24;
constexpr float kTolerance = 1e-5f;

struct Request {
  int64_t prompt = 0;           // its tokens
  int64_t length = 0;           // all tokens in the end
  std::vector<int64_t> tokens;  // those that there are
  int64_t cached = 0;           // of these, how many have their keys in pages
  std::vector<int32_t> pages;
  Numbers out;  // what attention gave for each token, to be checked

  bool prefills() const { return cached < prompt; }
  bool finished() const { return static_cast<int64_t>(tokens.size()) == length; }
  size_t pages_needed() const { return static_cast<size_t>((length + kPageSize - 1) / kPageSize); }
};

class Server {
 public:
  explicit Server(const Model& model) : model_(model) {
    for (int32_t page = 0; page < kPages; ++page) free_pages_.push_back(page);
    append_.k = {k_.data(), {1, kRows, kHeadsKv, kDim}};
    append_.v = {v_.data(), {1, kRows, kHeadsKv, kDim}};
    append_.k_cache = {k_pages_.data(), {kPages, kPageSize, kHeadsKv, kDim}};
    append_.v_cache = {v_pages_.data(), {kPages, kPageSize, kHeadsKv, kDim}};
    append_.cu_seqlens = {first_row_.data(), {kSlots + 1}};
    append_.cache_seqlens = {cached_.data(), {kSlots}};
    append_.page_table = {page_table_.data(), {kSlots, kMostPages}};
    append_.q_out = {q_.data(), {1, kRows, kHeadsQ, kDim}};
    append_.q = append_.q_out;  // in place
    model.rotate_by(append_);

    attend_.q = append_.q;
    attend_.k = append_.k_cache;
    attend_.v = append_.v_cache;
    attend_.out = {out_.data(), {1, kRows, kHeadsQ, kDim}};
    attend_.causal = flashmoe::Causal::bottom_right;  // a sequence's last query sees its last key
    attend_.sequences.emplace();
    attend_.sequences->cu_seqlens_q = append_.cu_seqlens;
    attend_.sequences->seqused_k = {keys_.data(), {kSlots}};
    attend_.sequences->page_table = append_.page_table;
  }

  // Takes a request, if there are a slot and pages for all the tokens that it may have.
  bool admit(Request& request) {
    const auto slot = std::find(slots_.begin(), slots_.end(), nullptr);
    if (slot == slots_.end() || request.pages_needed() > free_pages_.size()) return false;
    request.pages.assign(free_pages_.end() - static_cast<int64_t>(request.pages_needed()),
                         free_pages_.end());
    free_pages_.resize(free_pages_.size() - request.pages.size());
    std::copy(request.pages.begin(), request.pages.end(),
              page_table_.begin() + (slot - slots_.begin()) * kMostPages);
    *slot = &request;
    return true;
  }

  // Computes the next tokens of all that run. Returns how many tokens were generated.
  int64_t step() {
    pack();
    flashmoe::run(append_, workspace_);
    flashmoe::run(attend_, workspace_);
    int64_t generated = 0;
    for (size_t slot = 0; slot < kSlots; ++slot) {
      const int64_t rows = first_row_[slot + 1] - first_row_[slot];
      if (rows > 0) generated += take_over(slots_[slot], first_row_[slot], rows);
    }
    return generated;
  }

  bool idle() const { return free_pages_.size() == kPages; }
  bool mixed() const { return mixed_; }  // the last step had some of a prompt and some decoding

 private:
  // Lays the tokens one behind the other, and says in the tables whose they are.
  void pack() {
    int64_t row = 0;
    bool prefill = false, decode = false;
    for (size_t slot = 0; slot < kSlots; ++slot) {
      const Request* request = slots_[slot];
      const int64_t others =
          kSlots - 1 - static_cast<int64_t>(slot);  // each has a row, if it wants
      int64_t rows = 0;
      if (request != nullptr) {
        rows = std::min({static_cast<int64_t>(request->tokens.size()) - request->cached, kChunk,
                         kRows - row - others});
        (request->prefills() ? prefill : decode) = true;
      }
      first_row_[slot] = static_cast<int32_t>(row);
      cached_[slot] = request == nullptr ? 0 : static_cast<int32_t>(request->cached);
      keys_[slot] = cached_[slot] + static_cast<int32_t>(rows);
      for (int64_t i = 0; i < rows; ++i, ++row) {
        const int64_t token = request->tokens[static_cast<size_t>(request->cached + i)];
        copy_row(model_.q, token, q_, row, kRowQ);
        copy_row(model_.k, token, k_, row, kRowKv);
        copy_row(model_.v, token, v_, row, kRowKv);
      }
    }
    first_row_[kSlots] = static_cast<int32_t>(row);
    mixed_ = prefill && decode;
  }

  int64_t take_over(Request*& slot, int64_t row, int64_t rows) {
    Request& request = *slot;
    const auto out = out_.begin() + row * kRowQ;
    request.out.insert(request.out.end(), out, out + rows * kRowQ);
    request.cached += rows;
    if (request.prefills()) return 0;
    request.tokens.push_back(model_.best_token(&out_[at(row + rows - 1, kRowQ)]));
    if (request.finished()) {
      free_pages_.insert(free_pages_.end(), request.pages.begin(), request.pages.end());
      slot = nullptr;
    }
    return 1;
  }

  const Model& model_;
  Numbers q_ = Numbers(kRows * kRowQ), out_ = q_;
  Numbers k_ = Numbers(kRows * kRowKv), v_ = k_;
  Numbers k_pages_ = Numbers(kPages * kPageSize * kRowKv), v_pages_ = k_pages_;
  std::vector<int32_t> first_row_ = std::vector<int32_t>(kSlots + 1);
  std::vector<int32_t> cached_ = std::vector<int32_t>(kSlots), keys_ = cached_;
  std::vector<int32_t> page_table_ = std::vector<int32_t>(kSlots * kMostPages);
  std::vector<int32_t> free_pages_;
  std::vector<Request*> slots_ = std::vector<Request*>(kSlots);
  bool mixed_ = false;
  flashmoe::KvAppend append_;
  flashmoe::AttentionForward attend_;
  flashmoe::Workspace workspace_;
};

int run() {
  const Model model;
  std::mt19937 generator(5);
  std::vector<Request> requests(kRequests);
  for (Request& request : requests) {
    request.prompt = 1 + static_cast<int64_t>(generator() % (kMostTokens / 2));
    request.length = request.prompt + 1 + static_cast<int64_t>(generator() % (kMostTokens / 2));
    for (int64_t i = 0; i < request.prompt; ++i) {
      request.tokens.push_back(static_cast<int64_t>(generator() % kVocabulary));
    }
  }

  Server server(model);
  std::deque<Request*> waiting;
  size_t arrived = 0;
  int64_t steps = 0, mixed = 0, generated = 0, prompts = 0;
  const auto begin = std::chrono::steady_clock::now();
  do {
    if (steps % 4 == 0 && arrived < kRequests) waiting.push_back(&requests[arrived++]);
    while (!waiting.empty() && server.admit(*waiting.front())) waiting.pop_front();
    generated += server.step();
    mixed += server.mixed();
    ++steps;
  } while (arrived < kRequests || !waiting.empty() || !server.idle());
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
  const std::string kernel = flashmoe::last_launches()[0].kernel;

  float largest = 0;
  bool complete = true;
  for (const Request& request : requests) {
    prompts += request.prompt;
    complete = complete && request.finished();
    largest = std::max(largest, difference_from_dense(model, request.tokens, request.out));
  }
  std::printf(
      "%d requests in %d steps, %d of them mixed: %d tokens of prompts, %d generated, %.0f "
      "tokens per second\n",
      static_cast<int>(kRequests), static_cast<int>(steps), static_cast<int>(mixed),
      static_cast<int>(prompts), static_cast<int>(generated),
      static_cast<double>(prompts + generated) / elapsed.count());
  std::printf("flashmoe %u: %s, largest difference %.1e from dense calls\n", flashmoe::version(),
              kernel.c_str(), static_cast<double>(largest));
  if (!(largest <= kTolerance) || !complete || mixed == 0) {
    std::fprintf(stderr, "the result is wrong: accepted are differences up to %.1e\n",
                 static_cast<double>(kTolerance));
    return 1;
  }
  return 0;
}

}  // namespace

int main() {
  try {
    return run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
