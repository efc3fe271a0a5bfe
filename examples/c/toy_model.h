/* A model to serve: one layer of attention of random weights. Its embedding and projections are
 * folded into a row of q, k and v for each token, and the next token is the one whose row of `head`
 * fits the output best. */
#ifndef FLASHMOE_EXAMPLES_TOY_MODEL_H
#define FLASHMOE_EXAMPLES_TOY_MODEL_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>

enum {
  kVocabulary = 101,
  kHeadsQ = 8,
  kHeadsKv = 2,
  kDim = 64,
  kMostTokens = 160, /* of a sequence */
  kRowQ = kHeadsQ * kDim,
  kRowKv = kHeadsKv * kDim
};

static float q_of[kVocabulary][kRowQ], k_of[kVocabulary][kRowKv], v_of[kVocabulary][kRowKv];
static float head[kVocabulary][kRowQ];
static float cosines[kMostTokens][kDim / 2], sines[kMostTokens][kDim / 2];

static inline uint32_t random_bits(void) { /* the same on every machine */
  static uint32_t seed = 1;
  seed = seed * 1664525u + 1013904223u;
  return seed >> 8;
}

static inline void fill_random(float* values, size_t count) {
  while (count-- > 0) *values++ = (float)random_bits() / 8388608.0f - 1.0f;
}

/* The length of a prompt, or of what is generated after it. */
static inline int random_length(void) { return 1 + (int)(random_bits() % (kMostTokens / 2)); }

/* Returns how many tokens the prompt has. */
static inline int random_prompt(int* tokens) {
  const int length = random_length();
  int t;
  for (t = 0; t < length; ++t) tokens[t] = (int)(random_bits() % kVocabulary);
  return length;
}

static inline void make_model(void) {
  int t, i;
  fill_random(&q_of[0][0], sizeof q_of / sizeof(float));
  fill_random(&k_of[0][0], sizeof k_of / sizeof(float));
  fill_random(&v_of[0][0], sizeof v_of / sizeof(float));
  fill_random(&head[0][0], sizeof head / sizeof(float));
  for (t = 0; t < kMostTokens; ++t) {
    for (i = 0; i < kDim / 2; ++i) {
      const double angle = t * pow(10000.0, -2.0 * i / kDim);
      cosines[t][i] = (float)cos(angle);
      sines[t][i] = (float)sin(angle);
    }
  }
}

static inline int best_token(const float* row) {
  int token, best = 0, i;
  double most = -HUGE_VAL;
  for (token = 0; token < kVocabulary; ++token) {
    double logit = 0;
    for (i = 0; i < kRowQ; ++i) logit += (double)head[token][i] * (double)row[i];
    if (logit > most) {
      most = logit;
      best = token;
    }
  }
  return best;
}

static inline double rotated(const float* row, int d,
                             int position) { /* number d of a head, by NeoX */
  const double angle = position * pow(10000.0, -2.0 * (d % (kDim / 2)) / kDim);
  const double other = d < kDim / 2 ? -(double)row[d + kDim / 2] : (double)row[d - kDim / 2];
  return (double)row[d] * cos(angle) + other * sin(angle);
}

/* The largest difference of what attention gave for a sequence's tokens from the definition. */
static inline double largest_difference(const int* tokens, int count, float out[][kRowQ]) {
  static double turned[kMostTokens][kRowKv];
  double largest = 0;
  int i, j, h, d;
  for (j = 0; j < count; ++j) {
    for (h = 0; h < kHeadsKv; ++h) {
      for (d = 0; d < kDim; ++d) {
        turned[j][h * kDim + d] = rotated(k_of[tokens[j]] + h * kDim, d, j);
      }
    }
  }
  for (i = 0; i < count; ++i) {
    for (h = 0; h < kHeadsQ; ++h) {
      const int g = h / (kHeadsQ / kHeadsKv) * kDim;
      double query[kDim], expected[kDim] = {0}, sum = 0;
      for (d = 0; d < kDim; ++d) query[d] = rotated(q_of[tokens[i]] + h * kDim, d, i);
      for (j = 0; j <= i; ++j) {
        double logit = 0, weight;
        for (d = 0; d < kDim; ++d) logit += query[d] * turned[j][g + d];
        weight = exp(logit / sqrt((double)kDim));
        sum += weight;
        for (d = 0; d < kDim; ++d) expected[d] += weight * (double)v_of[tokens[j]][g + d];
      }
      for (d = 0; d < kDim; ++d) {
        const double got = (double)out[i][h * kDim + d];
        largest = fmax(largest, fabs(got - expected[d] / sum));
      }
    }
  }
  return largest;
}

#endif
