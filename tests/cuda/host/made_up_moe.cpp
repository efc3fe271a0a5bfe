// Kernels of layers and grouped products, of sm89 and sm90, without code, and the combining ones.
#include "cuda/moe/combine/entry.h"
#include "cuda/moe/sm89/entry.h"
#include "cuda/moe/sm90/entry.h"

namespace flashmoe::moe::sm89 {

static LoadedKernel loaded[4][kMaxDevices];

static Entry entry_of(const char* name, bool gated, bool transposed, int index) {
  Entry entry = {};
  entry.name = name;
  entry.function = reinterpret_cast<const void*>(intptr_t{0x100} + index);
  entry.shared_bytes = 1024;
  entry.loaded = loaded[index];
  entry.dtype = Dtype::kBFloat16;
  entry.gated = gated;
  entry.transposed = transposed;
  entry.tile_rows = entry.tile_tokens = 128;
  entry.out_rows = gated ? 64 : 128;
  entry.stages = 4;
  entry.threads = 256;
  entry.blocks_per_sm = 1;
  return entry;
}

extern const Entry entry_bf16_gated, entry_bf16_gated_t, entry_bf16, entry_bf16_t;
const Entry entry_bf16_gated = entry_of("gated", true, false, 0);
const Entry entry_bf16_gated_t = entry_of("gated_t", true, true, 1);
const Entry entry_bf16 = entry_of("plain", false, false, 2);
const Entry entry_bf16_t = entry_of("plain_t", false, true, 3);

}  // namespace flashmoe::moe::sm89

namespace flashmoe::moe::sm90 {

static LoadedKernel loaded[13][kMaxDevices];

static Entry entry_of(const char* name, Use use, Major major, int index) {
  Entry entry = {};
  entry.name = name;
  entry.function = reinterpret_cast<const void*>(intptr_t{0x200} + index);
  entry.shared_bytes = 1024;
  entry.loaded = loaded[index];
  entry.dtype = Dtype::kBFloat16;
  entry.use = use;
  entry.major = major;
  entry.tile_rows = 256;
  entry.box_rows = 64;
  entry.out_rows = use == Use::kUp || use == Use::kDown || use == Use::kUpGradient ? 256 : 128;
  entry.tile_tokens = use == Use::kNarrowGatedUp ? 96 : 192;
  entry.columns_per_group = 4;
  entry.stages = 4;
  entry.threads = 384;
  return entry;
}

extern const Entry entry_bf16_gated_plain, entry_bf16_gated_narrow, entry_bf16_gated,
    entry_bf16_gated_t, entry_bf16_gated_interleaved, entry_bf16_up, entry_bf16_up_t,
    entry_bf16_down, entry_bf16_down_t, entry_bf16_down_short, entry_bf16_down_middle,
    entry_bf16_up_gradient, entry_bf16_up_gradient_t;
const Entry entry_bf16_gated_plain =
    entry_of("gated_plain", Use::kPlainGatedUp, Major::kColumns, 0);
const Entry entry_bf16_gated_narrow =
    entry_of("gated_narrow", Use::kNarrowGatedUp, Major::kColumns, 1);
const Entry entry_bf16_gated = entry_of("gated", Use::kGatedUp, Major::kColumns, 2);
const Entry entry_bf16_gated_t = entry_of("gated_t", Use::kGatedUp, Major::kRows, 3);
const Entry entry_bf16_up = entry_of("up", Use::kUp, Major::kColumns, 4);
const Entry entry_bf16_up_t = entry_of("up_t", Use::kUp, Major::kRows, 5);
const Entry entry_bf16_down = entry_of("down", Use::kDown, Major::kColumns, 6);
const Entry entry_bf16_down_t = entry_of("down_t", Use::kDown, Major::kRows, 7);
const Entry entry_bf16_gated_interleaved =
    entry_of("gated_interleaved", Use::kGatedUp, Major::kRowsInterleaved, 8);
const Entry entry_bf16_down_short = entry_of("down_short", Use::kShortDown, Major::kColumns, 9);
const Entry entry_bf16_down_middle = entry_of("down_middle", Use::kMiddleDown, Major::kColumns, 10);
const Entry entry_bf16_up_gradient = entry_of("up_gradient", Use::kUpGradient, Major::kColumns, 11);
const Entry entry_bf16_up_gradient_t =
    entry_of("up_gradient_t", Use::kUpGradient, Major::kRows, 12);

}  // namespace flashmoe::moe::sm90

namespace flashmoe::moe_combine {

static LoadedKernel loaded[kEntries][kMaxDevices];
static Entry entry_of(Dtype dtype, int batch, int index) {
  return {{"combine", reinterpret_cast<const void*>(intptr_t{0x300} + index), 0, loaded[index]},
          dtype,
          batch};
}
const Entry entries[kEntries] = {
    entry_of(Dtype::kFloat16, 2, 0),  entry_of(Dtype::kFloat16, 4, 1),
    entry_of(Dtype::kFloat16, 8, 2),  entry_of(Dtype::kBFloat16, 2, 3),
    entry_of(Dtype::kBFloat16, 4, 4), entry_of(Dtype::kBFloat16, 8, 5)};

}  // namespace flashmoe::moe_combine
