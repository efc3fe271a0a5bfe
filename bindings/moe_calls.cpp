#include "bindings/moe_calls.h"

#include <algorithm>
#include <iterator>

#include "bindings/errors.h"

namespace flashmoe {
namespace {

// The sentence of top_k and the tokens, which the C ABI sees as extents of outputs only.
void check_pairs(const char* name, int64_t tokens, int64_t top_k) {
  if (tokens <= kMaxPairs / top_k) return;
  raise_value_error(std::string(name) + ": got " + std::to_string(tokens) + " tokens with " +
                    std::to_string(top_k) +
                    " experts each, accepted are at most 2^31 - 2^16 pairs");
}

bool is_word(char c) {
  return c == '_' || (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z');
}

}  // namespace

bool is_float(flashmoe_dtype dtype) {
  const bool half = dtype.bits == 16 &&
                    (dtype.code == FLASHMOE_DTYPE_FLOAT || dtype.code == FLASHMOE_DTYPE_BFLOAT);
  return (half || (dtype.bits == 32 && dtype.code == FLASHMOE_DTYPE_FLOAT)) && dtype.lanes == 1;
}

int64_t parse_top_k(nb::handle top_k) {
  return parse_integer("top_k", top_k, 1, kMaxTopK, "are 1 to 32, and no more than experts");
}

std::string renamed(std::string sentence, const Renames& renames) {
  static const std::string kBefore[] = {"but ", "memory with "};
  constexpr char kNull[] = "a null pointer";
  if (const size_t at = sentence.find(kNull); at != std::string::npos) {
    sentence.replace(at, sizeof kNull - 1, "None");
  }
  std::string made;
  for (size_t begin = 0; begin < sentence.size();) {
    size_t end = begin;
    while (end < sentence.size() && is_word(sentence[end])) ++end;
    std::string word = sentence.substr(begin, std::max<size_t>(end - begin, 1));
    const bool argument =
        begin == 0 || std::any_of(std::begin(kBefore), std::end(kBefore), [&](const auto& before) {
          return begin >= before.size() &&
                 sentence.compare(begin - before.size(), before.size(), before) == 0;
        });
    for (const Renamed& rename : renames) {
      if (word == rename.from && (argument || rename.everywhere)) {
        word = rename.to;
        break;
      }
    }
    made += word;
    begin = std::max(end, begin + 1);
  }
  return made;
}

void check_renamed(flashmoe_status status, const Renames& renames) {
  if (status != FLASHMOE_OK) raise_status(status, renamed(flashmoe_last_error(), renames));
}

// Outputs of a routing are parts of `out`, as far as the caller can be wrong about them.
const Renames& names_of(const RouteCall& call) {
  static const Renames of_logits = {
      {"ids", "out.ids", false},         {"weights", "out.weights", false},
      {"offsets", "out.offsets", false}, {"pairs", "out.pairs", false},
      {"slots", "out.slots", false},     {"lse", "out.lse", false}};
  static const Renames of_given = [] {
    Renames renames = of_logits;
    renames.push_back({"given_ids", "ids", true});
    renames.push_back({"given_weights", "weights", true});
    return renames;
  }();
  return call.logits.get() != nullptr ? of_logits : of_given;
}

const Renames& names_of(const ForwardCall&) {
  static const Renames renames = {{"weights", "routing.weights", false},
                                  {"offsets", "routing.offsets", false},
                                  {"pairs", "routing.pairs", false},
                                  {"slots", "routing.slots", false}};
  return renames;
}

const Renames& names_of(const ProductCall&) {
  static const Renames renames;
  return renames;
}

const Renames& names_of(const FusedCall&) {
  static const Renames renames;
  return renames;
}

bool extents_of_logits(const TensorView& logits, int64_t top_k, RouteExtents* extents) {
  if (logits.rank() != 2) return false;
  *extents = {logits.extent(0), logits.extent(1), top_k};
  if (extents->experts < 1 || extents->experts > kMaxExperts) return false;
  if (top_k > extents->experts) {
    raise_value_error("top_k: got " + std::to_string(top_k) +
                      ", accepted are 1 to 32, and no more "
                      "than the " +
                      std::to_string(extents->experts) + " experts");
  }
  check_pairs("logits", extents->tokens, top_k);
  return true;
}

bool extents_of_ids(const TensorView& ids, int64_t experts, RouteExtents* extents) {
  if (ids.rank() != 2) return false;
  *extents = {ids.extent(0), experts, ids.extent(1)};
  if (extents->top_k < 1 || extents->top_k > kMaxTopK) {
    raise_value_error("ids: got " + std::to_string(extents->top_k) +
                      " experts of a token, accepted are 1 to 32");
  }
  check_pairs("ids", extents->tokens, extents->top_k);
  return true;
}

void check_given_outputs(const RouteCall& call, const RouteExtents& extents) {
  const auto check_extent = [](const char* name, const char* argument, const TensorView& view,
                               int rank, int64_t wanted, int64_t got) {
    if (view.get() == nullptr || view.rank() != rank || view.extent(rank - 1) == wanted) return;
    raise_value_error(std::string(argument) + ": got " + std::to_string(got) + ", but " + name +
                      " has room for " + std::to_string(view.extent(rank - 1) + got - wanted));
  };
  check_extent("out.ids", call.logits.get() != nullptr ? "top_k" : "ids", call.ids, 2,
               extents.top_k, extents.top_k);
  if (call.logits.get() == nullptr) {
    check_extent("out.offsets", "num_experts", call.offsets, 1, extents.experts + 1,
                 extents.experts);
  }
}

}  // namespace flashmoe
