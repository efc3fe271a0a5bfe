#include "bindings/calls.h"

#include <cstring>
#include <iterator>

#include "bindings/errors.h"

namespace flashmoe {
namespace {

bool is_word(char c) {
  return c == '_' || (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z');
}

}  // namespace

bool is_float(flashmoe_dtype dtype) {
  const bool half = dtype.bits == 16 &&
                    (dtype.code == FLASHMOE_DTYPE_FLOAT || dtype.code == FLASHMOE_DTYPE_BFLOAT);
  return (half || (dtype.bits == 32 && dtype.code == FLASHMOE_DTYPE_FLOAT)) && dtype.lanes == 1;
}

const char* name_of_dtype(flashmoe_dtype dtype) {
  if (dtype.code == dlpack::kInt) return "int32";
  if (dtype.code == FLASHMOE_DTYPE_BFLOAT) return "bfloat16";
  return dtype.bits == 16 ? "float16" : dtype.bits == 32 ? "float32" : "float64";
}

bool parse_float_dtype(nb::handle given, flashmoe_dtype* dtype) {
  if (given.is_none()) return false;
  const nb::str name(given);
  for (const flashmoe_dtype each : {flashmoe_dtype{FLASHMOE_DTYPE_FLOAT, 16, 1},
                                    flashmoe_dtype{FLASHMOE_DTYPE_BFLOAT, 16, 1}, kFloat32}) {
    if (std::strcmp(name.c_str(), name_of_dtype(each)) == 0) return *dtype = each, true;
  }
  return false;
}

std::string renamed(std::string sentence, const Renames& renames) {
  static const std::string kBefore[] = {"but ", "memory with "};
  constexpr char kNull[] = "a null pointer";
  constexpr char kMemory[] = "data is a null pointer";  // of a tensor that is there
  if (const size_t at = sentence.find(kNull);
      at != std::string::npos && sentence.find(kMemory) == std::string::npos) {
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

}  // namespace flashmoe
