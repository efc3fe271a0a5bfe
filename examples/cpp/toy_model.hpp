// A model to serve: one layer of attention of random weights, whose embedding and projections are
// folded into a row of q, k and v for each token. The next token is the one whose row of `head`
// fits the output best.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "flashmoe/flashmoe.hpp"

constexpr int64_t kVocabulary = 101;
constexpr int64_t kHeadsQ = 8;
constexpr int64_t kHeadsKv = 2;
constexpr int64_t kDim = 64;
constexpr int64_t kRowQ = kHeadsQ * kDim;
constexpr int64_t kRowKv = kHeadsKv * kDim;
constexpr int64_t kMostTokens = 160;  // of a sequence

using Numbers = std::vector<float>;

inline size_t at(int64_t row, int64_t length) { return static_cast<size_t>(row * length); }

inline Numbers random_numbers(int64_t count, unsigned seed) {
  Numbers values(static_cast<size_t>(count));
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  for (float& value : values) value = normal(generator);
  return values;
}

struct Model {
  Numbers q = random_numbers(kVocabulary * kRowQ, 1);  // a row for each token
  Numbers k = random_numbers(kVocabulary * kRowKv, 2);
  Numbers v = random_numbers(kVocabulary * kRowKv, 3);
  Numbers head = random_numbers(kVocabulary * kRowQ, 4);
  Numbers cosines = Numbers(kMostTokens * kDim / 2);
  Numbers sines = Numbers(kMostTokens * kDim / 2);

  Model() {
    for (int64_t position = 0; position < kMostTokens; ++position) {
      for (int64_t i = 0; i < kDim / 2; ++i) {
        const double angle =
            static_cast<double>(position) * std::pow(1e4, -2.0 * static_cast<double>(i) / kDim);
        cosines[at(position, kDim / 2) + static_cast<size_t>(i)] = static_cast<float>(cos(angle));
        sines[at(position, kDim / 2) + static_cast<size_t>(i)] = static_cast<float>(sin(angle));
      }
    }
  }

  void rotate_by(flashmoe::KvAppend& call) const {
    call.rotary_cos = {cosines.data(), {kMostTokens, kDim / 2}};
    call.rotary_sin = {sines.data(), {kMostTokens, kDim / 2}};
  }

  int64_t best_token(const float* out) const {
    int64_t best = 0;
    float most = -INFINITY;
    for (int64_t token = 0; token < kVocabulary; ++token) {
      float logit = 0;
      for (size_t i = 0; i < kRowQ; ++i) logit += head[at(token, kRowQ) + i] * out[i];
      if (logit > most) most = logit, best = token;
    }
    return best;
  }
};

// Copies the rows of one token.
inline void copy_row(const Numbers& from, int64_t token, Numbers& to, int64_t row, int64_t length) {
  std::copy_n(from.begin() + token * length, length, to.begin() + row * length);
}

// How far what attention gave for a sequence's first tokens is from a dense causal call on them.
inline float difference_from_dense(const Model& model, const std::vector<int64_t>& tokens,
                                   const Numbers& given) {
  const auto length = static_cast<int64_t>(given.size() / kRowQ);
  Numbers q(at(length, kRowQ)), out(q), k(at(length, kRowKv)), v(k), k_turned(k), v_same(v);
  for (int64_t i = 0; i < length; ++i) {
    const int64_t token = tokens[static_cast<size_t>(i)];
    copy_row(model.q, token, q, i, kRowQ);
    copy_row(model.k, token, k, i, kRowKv);
    copy_row(model.v, token, v, i, kRowKv);
  }
  flashmoe::Workspace workspace;
  flashmoe::KvAppend turn;  // to a cache of one sequence, which is empty
  turn.k = {k.data(), {1, length, kHeadsKv, kDim}};
  turn.v = {v.data(), {1, length, kHeadsKv, kDim}};
  turn.k_cache = {k_turned.data(), {1, length, kHeadsKv, kDim}};
  turn.v_cache = {v_same.data(), {1, length, kHeadsKv, kDim}};
  turn.q_out = {q.data(), {1, length, kHeadsQ, kDim}};
  turn.q = turn.q_out;
  model.rotate_by(turn);
  flashmoe::run(turn, workspace);
  flashmoe::AttentionForward attend;
  attend.q = turn.q;
  attend.k = turn.k_cache;
  attend.v = turn.v_cache;
  attend.out = {out.data(), {1, length, kHeadsQ, kDim}};
  attend.causal = flashmoe::Causal::bottom_right;
  flashmoe::run(attend, workspace);
  float largest = 0;
  for (size_t i = 0; i < out.size(); ++i) {
    largest = std::max(largest, std::fabs(out[i] - given[i]));
  }
  return largest;
}
