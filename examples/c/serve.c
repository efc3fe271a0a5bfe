/* Continuous batching through the C ABI, on the CPU: requests arrive, get pages for their keys and
 * values, prefill in chunks beside others that decode, finish, and give their pages back.
 *
 * A step is two calls for the whole batch, whoever is in it:
 *
 *   flashmoe_kv_append           new keys into their pages, rotated, and the queries with them
 *   flashmoe_attention_forward   packed queries over those pages
 *
 * Both are described once: from step to step only the numbers in their tables change, as a CUDA
 * graph would have it. Rows behind the last token, and slots without a request, cost nothing.
 *
 * The model is one layer of attention of random weights: its embedding and projections are folded
 * into a row of q, k and v for each token, and the next token is the one whose row of `head` fits
 * the output best. All outputs are held against plain loops over whole sequences, in double
 * precision; the program fails if they differ. */
#define _POSIX_C_SOURCE 199309L /* clock_gettime */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "flashmoe/flashmoe.h"
#include "host.h"

enum {
  kVocabulary = 101,
  kHeadsQ = 8,
  kHeadsKv = 2,
  kDim = 64,
  kPageSize = 16,
  kPages = 40,                          /* for all requests that run */
  kMostTokens = 160,                    /* of a request */
  kMostPages = kMostTokens / kPageSize, /* of a request */
  kSlots = 6,                           /* requests that run at once */
  kRows = 64,                           /* tokens of a step */
  kChunk = (kRows - kSlots) / 2,        /* of a prompt in a step, so that two fit beside decoding */
  kRequests = 24,
  kRowQ = kHeadsQ * kDim,
  kRowKv = kHeadsKv * kDim
};

typedef struct {
  int prompt, length; /* tokens of the prompt, and of all in the end */
  int tokens[kMostTokens];
  int known;                     /* tokens that there are: the prompt's and those generated */
  int cached;                    /* of these, how many have their keys in pages */
  float out[kMostTokens][kRowQ]; /* what attention gave, to be checked */
} Request;

static Request requests[kRequests];
static float q_of[kVocabulary][kRowQ], k_of[kVocabulary][kRowKv], v_of[kVocabulary][kRowKv];
static float head[kVocabulary][kRowQ];
static float cosines[kMostTokens][kDim / 2], sines[kMostTokens][kDim / 2];

/* What the library reads begins on 16-byte boundaries, as arrays of this size do on 64-bit systems.
 */
static float q[kRows][kRowQ], k[kRows][kRowKv], v[kRows][kRowKv], out[kRows][kRowQ];
static float k_pages[kPages][kPageSize][kRowKv], v_pages[kPages][kPageSize][kRowKv];
static int32_t first_row[kSlots + 1], cached[kSlots], keys[kSlots];
static int32_t page_table[kSlots][kMostPages];

static int free_pages[kPages], free_count = kPages;
static int slots[kSlots]; /* the request in each, or -1 */

static uint32_t random_bits(void) { /* the same on every machine */
  static uint32_t seed = 1;
  seed = seed * 1664525u + 1013904223u;
  return seed >> 8;
}

static void fill_random(float* values, size_t count) {
  while (count-- > 0) *values++ = (float)random_bits() / 8388608.0f - 1.0f;
}

static void make_model_and_requests(void) {
  int r, t, i;
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
  for (r = 0; r < kRequests; ++r) {
    Request* request = &requests[r];
    request->prompt = 1 + (int)(random_bits() % (kMostTokens / 2));
    request->length = request->prompt + 1 + (int)(random_bits() % (kMostTokens / 2));
    request->known = request->prompt;
    for (t = 0; t < request->prompt; ++t) {
      request->tokens[t] = (int)(random_bits() % kVocabulary);
    }
  }
}

/* Gives a free slot to a request, if there are pages for all the tokens that it may have. */
static int admit(int slot, int request) {
  const int pages = (requests[request].length + kPageSize - 1) / kPageSize;
  int i;
  if (pages > free_count) return 0;
  for (i = 0; i < kMostPages; ++i) {
    page_table[slot][i] = i < pages ? free_pages[--free_count] : -1; /* -1 names no page */
  }
  slots[slot] = request;
  return 1;
}

static void finish(int slot) {
  int i;
  for (i = 0; i < kMostPages; ++i) {
    if (page_table[slot][i] >= 0) free_pages[free_count++] = page_table[slot][i];
  }
  slots[slot] = -1;
}

/* Packs the next tokens of all that run, and says in the tables whose they are. Returns whether
 * some are of prompts and others decode. */
static int pack(void) {
  int slot, n, rows = 0, prefilling = 0, decoding = 0;
  for (slot = 0; slot < kSlots; ++slot) {
    Request* request = slots[slot] < 0 ? NULL : &requests[slots[slot]];
    const int others = kSlots - 1 - slot; /* of which each gets a row, if it wants one */
    int count = request == NULL ? 0 : request->known - request->cached;
    if (count > kChunk) count = kChunk;
    if (count > kRows - rows - others) count = kRows - rows - others;
    if (count > 0) *(request->cached < request->prompt ? &prefilling : &decoding) += 1;
    first_row[slot] = rows;
    cached[slot] = request == NULL ? 0 : request->cached;
    keys[slot] = cached[slot] + count;
    for (n = 0; n < count; ++n, ++rows) {
      const int token = request->tokens[request->cached + n];
      memcpy(q[rows], q_of[token], sizeof q[rows]);
      memcpy(k[rows], k_of[token], sizeof k[rows]);
      memcpy(v[rows], v_of[token], sizeof v[rows]);
    }
  }
  first_row[kSlots] = rows;
  return prefilling > 0 && decoding > 0;
}

static int best_token(const float* row) {
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

/* Takes over what a step gave. Returns how many requests ended. */
static int take_over(int* generated) {
  int slot, ended = 0;
  for (slot = 0; slot < kSlots; ++slot) {
    const int count = first_row[slot + 1] - first_row[slot];
    Request* request;
    if (count == 0) continue;
    request = &requests[slots[slot]];
    memcpy(request->out[request->cached], out[first_row[slot]], (size_t)count * sizeof out[0]);
    request->cached += count;
    if (request->cached < request->known) continue; /* there is more of the prompt */
    request->tokens[request->known++] = best_token(out[first_row[slot + 1] - 1]);
    ++*generated;
    if (request->known == request->length) {
      finish(slot);
      ++ended;
    }
  }
  return ended;
}

static double rotated(const float* row, int d, int position) { /* number d of a head, by NeoX */
  const double angle = position * pow(10000.0, -2.0 * (d % (kDim / 2)) / kDim);
  const double other = d < kDim / 2 ? -(double)row[d + kDim / 2] : (double)row[d - kDim / 2];
  return (double)row[d] * cos(angle) + other * sin(angle);
}

/* The largest difference of a request's outputs from the definition, token by token. */
static double largest_difference(const Request* request) {
  static double turned[kMostTokens][kRowKv];
  double largest = 0;
  int i, j, h, d;
  for (j = 0; j < request->cached; ++j) {
    for (h = 0; h < kHeadsKv; ++h) {
      for (d = 0; d < kDim; ++d) {
        turned[j][h * kDim + d] = rotated(k_of[request->tokens[j]] + h * kDim, d, j);
      }
    }
  }
  for (i = 0; i < request->cached; ++i) {
    for (h = 0; h < kHeadsQ; ++h) {
      const int g = h / (kHeadsQ / kHeadsKv) * kDim;
      double query[kDim], expected[kDim] = {0}, sum = 0;
      for (d = 0; d < kDim; ++d) query[d] = rotated(q_of[request->tokens[i]] + h * kDim, d, i);
      for (j = 0; j <= i; ++j) {
        double logit = 0, weight;
        for (d = 0; d < kDim; ++d) logit += query[d] * turned[j][g + d];
        weight = exp(logit / sqrt((double)kDim));
        sum += weight;
        for (d = 0; d < kDim; ++d) expected[d] += weight * (double)v_of[request->tokens[j]][g + d];
      }
      for (d = 0; d < kDim; ++d) {
        const double got = (double)request->out[i][h * kDim + d];
        largest = fmax(largest, fabs(got - expected[d] / sum));
      }
    }
  }
  return largest;
}

static double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

int main(void) {
  const double tolerance = 1e-4;
  const int64_t q_shape[4] = {1, kRows, kHeadsQ, kDim}, kv_shape[4] = {1, kRows, kHeadsKv, kDim};
  const int64_t pages_shape[4] = {kPages, kPageSize, kHeadsKv, kDim};
  const int64_t rotary_shape[2] = {kMostTokens, kDim / 2}, table_shape[2] = {kSlots, kMostPages};
  const int64_t offsets_shape[1] = {kSlots + 1}, lengths_shape[1] = {kSlots};
  const flashmoe_tensor q_view = view(q, FLASHMOE_DTYPE_FLOAT, 4, q_shape);
  const flashmoe_tensor k_view = view(k, FLASHMOE_DTYPE_FLOAT, 4, kv_shape);
  const flashmoe_tensor v_view = view(v, FLASHMOE_DTYPE_FLOAT, 4, kv_shape);
  const flashmoe_tensor out_view = view(out, FLASHMOE_DTYPE_FLOAT, 4, q_shape);
  const flashmoe_tensor k_pages_view = view(k_pages, FLASHMOE_DTYPE_FLOAT, 4, pages_shape);
  const flashmoe_tensor v_pages_view = view(v_pages, FLASHMOE_DTYPE_FLOAT, 4, pages_shape);
  const flashmoe_tensor cosines_view = view(cosines, FLASHMOE_DTYPE_FLOAT, 2, rotary_shape);
  const flashmoe_tensor sines_view = view(sines, FLASHMOE_DTYPE_FLOAT, 2, rotary_shape);
  const flashmoe_tensor table_view = view(page_table, FLASHMOE_DTYPE_INT, 2, table_shape);
  const flashmoe_tensor first_row_view = view(first_row, FLASHMOE_DTYPE_INT, 1, offsets_shape);
  const flashmoe_tensor cached_view = view(cached, FLASHMOE_DTYPE_INT, 1, lengths_shape);
  const flashmoe_tensor keys_view = view(keys, FLASHMOE_DTYPE_INT, 1, lengths_shape);
  flashmoe_kv_append_params append = flashmoe_kv_append_params_init();
  flashmoe_attention_sequences sequences = flashmoe_attention_sequences_init();
  flashmoe_attention_forward_params attend = flashmoe_attention_forward_params_init();
  flashmoe_launch launches[FLASHMOE_MAX_LAUNCHES];
  int32_t launched = 0;
  size_t workspace_size = 0;
  void* workspace;
  int steps = 0, mixed = 0, generated = 0, prompts = 0, next = 0, ended = 0, slot, r;
  double begin, elapsed, difference = 0;

  append.k = &k_view;
  append.v = &v_view;
  append.k_cache = &k_pages_view;
  append.v_cache = &v_pages_view;
  append.cu_seqlens = &first_row_view; /* sequence b has the rows first_row[b] to first_row[b+1] */
  append.cache_seqlens = &cached_view; /* and goes behind its first cached[b] keys */
  append.page_table = &table_view;
  append.rotary_cos = &cosines_view;
  append.rotary_sin = &sines_view;
  append.q = &q_view;
  append.q_out = &q_view; /* in place */

  sequences.cu_seqlens_q = &first_row_view;
  sequences.seqused_k = &keys_view;
  sequences.page_table = &table_view;
  attend.q = &q_view;
  attend.k = &k_pages_view;
  attend.v = &v_pages_view;
  attend.out = &out_view;
  attend.causal = FLASHMOE_CAUSAL_BOTTOM_RIGHT; /* a sequence's last query sees its last key */
  attend.sequences = &sequences;

  check(flashmoe_attention_forward_workspace_size(&attend, &workspace_size), "workspace_size");
  workspace = malloc(workspace_size > 0 ? workspace_size : 1); /* enough for any lengths */
  if (workspace == NULL) return 1;

  make_model_and_requests();
  for (r = 0; r < kPages; ++r) free_pages[r] = r;
  for (slot = 0; slot < kSlots; ++slot) slots[slot] = -1;
  begin = seconds();
  for (; ended < kRequests; ++steps) {
    for (slot = 0; slot < kSlots; ++slot) {
      if (slots[slot] < 0 && next < kRequests && admit(slot, next)) ++next;
    }
    mixed += pack();
    check(flashmoe_kv_append(&append, NULL, 0, NULL), "kv_append");
    check(flashmoe_attention_forward(&attend, workspace, workspace_size, NULL), "forward");
    ended += take_over(&generated);
  }
  elapsed = seconds() - begin;
  check(flashmoe_last_launches(launches, &launched), "last_launches");
  free(workspace);

  for (r = 0; r < kRequests; ++r) {
    difference = fmax(difference, largest_difference(&requests[r]));
    prompts += requests[r].prompt;
  }
  printf(
      "%d requests in %d steps, %d of them mixed: %d tokens of prompts, %d generated, "
      "%.0f tokens per second\n",
      kRequests, steps, mixed, prompts, generated, (prompts + generated) / elapsed);
  printf("flashmoe %u: %s, largest difference %.1e\n", flashmoe_version(), launches[0].kernel,
         difference);
  if (!(difference <= tolerance) || free_count != kPages || mixed == 0) {
    fprintf(stderr, "the result is wrong: accepted are differences up to %.1e, and no page lost\n",
            tolerance);
    return 1;
  }
  return 0;
}
