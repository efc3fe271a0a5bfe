// Converts the sequences of a ragged, padded or paged batch from Python objects to the C ABI's
// flashmoe_attention_sequences. An attention call has them besides its own tensors and options.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "bindings/caller.h"
#include "bindings/tensor.h"
#include "flashmoe/flashmoe.h"

namespace flashmoe {

namespace nb = nanobind;

struct Sequences {
  struct Table {
    const char* name;
    const flashmoe_tensor* flashmoe_attention_sequences::* param;
  };
  struct Bound {
    const char* name;
    int64_t flashmoe_attention_sequences::* param;
    const char* accepted;
  };
  static constexpr char kOfLengths[] =
      "is a number of 0 or more, or None for what the tensors have room for";
  static constexpr char kOfChunks[] =
      "is a number of 0 or more, or None for equal shares of all keys";
  static constexpr Table kTables[] = {
      {"cu_seqlens_q", &flashmoe_attention_sequences::cu_seqlens_q},
      {"cu_seqlens_k", &flashmoe_attention_sequences::cu_seqlens_k},
      {"seqused_q", &flashmoe_attention_sequences::seqused_q},
      {"seqused_k", &flashmoe_attention_sequences::seqused_k},
      {"k_begin", &flashmoe_attention_sequences::k_begin},
      {"batch_index", &flashmoe_attention_sequences::batch_index},
      {"page_table", &flashmoe_attention_sequences::page_table},
      {"q_offset", &flashmoe_attention_sequences::q_offset},
  };
  static constexpr Bound kBounds[] = {
      {"max_seqlen_q", &flashmoe_attention_sequences::max_seqlen_q, kOfLengths},
      {"max_seqlen_k", &flashmoe_attention_sequences::max_seqlen_k, kOfLengths},
      {"split_size", &flashmoe_attention_sequences::split_size, kOfChunks},
  };
  static constexpr size_t kTableCount = sizeof kTables / sizeof kTables[0];
  static constexpr size_t kScales = 2;  // k_scale and v_scale
  static constexpr size_t kCount = kTableCount + sizeof kBounds / sizeof kBounds[0];

  flashmoe_attention_sequences params = flashmoe_attention_sequences_init();
  TensorView views[kTableCount];

  // Calls borrow(name, tensor, view) for each table and bound in this order, tables first; absent
  // ones are None.
  template <class Borrow>
  void read(const nb::handle (&each)[kCount], const Borrow& borrow) {
    for (size_t i = 0; i < kCount; ++i) {
      if (each[i].is_none()) continue;
      if (i < kTableCount) {
        borrow(kTables[i].name, each[i], &views[i]);
      } else {
        set_bound(kBounds[i - kTableCount], each[i]);
      }
    }
  }
  // The same by name: absent entries become None. Returns false if all are absent.
  static bool find(const nb::dict& tables, const nb::dict& bounds, nb::handle (&each)[kCount]);
  // The same for what flash_attention passes: None, or a tuple of all. Between tables and bounds
  // the tuple has the scales of keys and values, which are tensors of the call itself.
  static bool find(nb::handle sequences, nb::handle (&each)[kCount], nb::handle (&scales)[kScales]);

  // Reads the bounds from XLA's attribute: numbers in order, each followed by a space; false if it
  // is malformed.
  static bool unpack_bounds(const std::string& packed, flashmoe_attention_sequences* params);

  const flashmoe_attention_sequences* ready() {
    for (size_t i = 0; i < kTableCount; ++i) params.*kTables[i].param = views[i].get();
    return &params;
  }

 private:
  void set_bound(const Bound& bound, nb::handle given);
};

// Borrows what flash_attention and related functions pass: None, or a tuple of everything.
inline void borrow_sequences(nb::handle given, Caller* caller, std::optional<Sequences>* sequences,
                             nb::handle (&scales)[Sequences::kScales]) {
  nb::handle each[Sequences::kCount];
  if (!Sequences::find(given, each, scales)) return;
  sequences->emplace().read(each, [caller](const char* name, nb::handle tensor, TensorView* view) {
    caller->borrow(name, tensor, view);
  });
}

// Refuses scales for a call that takes none: backward.
void refuse_scales(nb::handle k_scale, nb::handle v_scale);

}  // namespace flashmoe
