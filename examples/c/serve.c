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
 * The model (toy_model.h) has a row of q, k and v for each token, and knows the next token by what
 * attention gave for the last. All outputs are held against plain loops over whole sequences, in
 * double precision; the program fails if they differ. */
#include <math.h>
#include <stdio.h>

#include "flashmoe/flashmoe.h"
#include "host.h"
#include "toy_model.h"

enum {
  kPageSize = 16,
  kPages = 40,                          /* for all requests that run */
  kMostPages = kMostTokens / kPageSize, /* of a request */
  kSlots = 6,                           /* requests that run at once */
  kRows = 64,                           /* tokens of a step */
  kChunk = (kRows - kSlots) / 2,        /* of a prompt in a step, so that two fit beside decoding */
  kRequests = 24
};

typedef struct {
  int prompt, length; /* tokens of the prompt, and of all in the end */
  int tokens[kMostTokens];
  int known;                     /* tokens that there are: the prompt's and those generated */
  int cached;                    /* of these, how many have their keys in pages */
  float out[kMostTokens][kRowQ]; /* what attention gave, to be checked */
} Request;

static Request requests[kRequests];

/* Arrays of this size begin on 16-byte boundaries, as the library asks. */
static float q[kRows][kRowQ], k[kRows][kRowKv], v[kRows][kRowKv], out[kRows][kRowQ];
static float k_pages[kPages][kPageSize][kRowKv], v_pages[kPages][kPageSize][kRowKv];
static int32_t first_row[kSlots + 1], cached[kSlots], keys[kSlots];
static int32_t page_table[kSlots][kMostPages];

static int free_pages[kPages], free_count = kPages;
static int slots[kSlots]; /* the request in each, or -1 */

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

int main(void) {
  const double tolerance = 1e-4;
  const flashmoe_tensor q_view = FLOATS(q, 1, kRows, kHeadsQ, kDim);
  const flashmoe_tensor k_view = FLOATS(k, 1, kRows, kHeadsKv, kDim);
  const flashmoe_tensor v_view = FLOATS(v, 1, kRows, kHeadsKv, kDim);
  const flashmoe_tensor out_view = FLOATS(out, 1, kRows, kHeadsQ, kDim);
  const flashmoe_tensor k_pages_view = FLOATS(k_pages, kPages, kPageSize, kHeadsKv, kDim);
  const flashmoe_tensor v_pages_view = FLOATS(v_pages, kPages, kPageSize, kHeadsKv, kDim);
  const flashmoe_tensor cosines_view = FLOATS(cosines, kMostTokens, kDim / 2);
  const flashmoe_tensor sines_view = FLOATS(sines, kMostTokens, kDim / 2);
  const flashmoe_tensor table_view = INTEGERS(page_table, kSlots, kMostPages);
  const flashmoe_tensor first_row_view = INTEGERS(first_row, kSlots + 1);
  const flashmoe_tensor cached_view = INTEGERS(cached, kSlots);
  const flashmoe_tensor keys_view = INTEGERS(keys, kSlots);
  flashmoe_kv_append_params append = flashmoe_kv_append_params_init();
  flashmoe_attention_sequences sequences = flashmoe_attention_sequences_init();
  flashmoe_attention_forward_params attend = flashmoe_attention_forward_params_init();
  flashmoe_launch launches[FLASHMOE_MAX_LAUNCHES];
  int32_t launched = 0;
  size_t workspace_size = 0;
  void* workspace;
  int steps = 0, mixed = 0, generated = 0, prompts = 0, next = 0, ended = 0, slot, r;
  double difference = 0;

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
  workspace = allocate(workspace_size); /* enough for any lengths */

  make_model();
  for (r = 0; r < kRequests; ++r) {
    requests[r].known = requests[r].prompt = random_prompt(requests[r].tokens);
    requests[r].length = requests[r].prompt + random_length();
  }
  for (r = 0; r < kPages; ++r) free_pages[r] = r;
  for (slot = 0; slot < kSlots; ++slot) slots[slot] = -1;
  for (; ended < kRequests; ++steps) {
    for (slot = 0; slot < kSlots; ++slot) {
      if (slots[slot] < 0 && next < kRequests && admit(slot, next)) ++next;
    }
    mixed += pack();
    check(flashmoe_kv_append(&append, NULL, 0, NULL), "kv_append");
    check(flashmoe_attention_forward(&attend, workspace, workspace_size, NULL), "forward");
    ended += take_over(&generated);
  }
  check(flashmoe_last_launches(launches, &launched), "last_launches");
  free(workspace);

  for (r = 0; r < kRequests; ++r) {
    difference = fmax(difference,
                      largest_difference(requests[r].tokens, requests[r].cached, requests[r].out));
    prompts += requests[r].prompt;
  }
  printf("%d requests in %d steps, %d of them mixed: %d tokens of prompts, %d generated\n",
         kRequests, steps, mixed, prompts, generated);
  printf("flashmoe %u: %s, largest difference %.1e\n", flashmoe_version(), launches[0].kernel,
         difference);
  if (!(difference <= tolerance) || free_count != kPages || mixed == 0) {
    fprintf(stderr, "the result is wrong: accepted are differences up to %.1e, and no page lost\n",
            tolerance);
    return 1;
  }
  return 0;
}
