// Kernels of the few-token family without code.
#include "cuda/host/made_up_moe.h"
#include "cuda/moe/sm89_few_tokens/entry.h"

namespace flashmoe::made_up {
int few_token_bytes_more = 0;
}

namespace flashmoe::moe::sm89_few_tokens {

static int bytes_of(const SharedShape& shape) {
  return 4096 * shape.stages + made_up::few_token_bytes_more;
}
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

}  // namespace flashmoe::moe::sm89_few_tokens
