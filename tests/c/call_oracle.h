// An independent reading of flashmoe.h: is this attention call valid and, if not, which arguments
// may its sentence blame? It shares no code with the library, computes in 128 bits, and does not
// stop at the first fault, since the order of the checks is not part of the contract.
#pragma once

#include <set>
#include <string>

#include "flashmoe/flashmoe.h"

__extension__ typedef __int128 Wide;

enum class Verdict {
  kValid,
  kInvalid,
  kEither,  // the header leaves it open: either is right, a crash or a half-made result is not
};

struct Judgement {
  Verdict verdict = Verdict::kValid;
  std::set<std::string> blame;  // arguments that are wrong, or that may be held to be

  // For a call that is not invalid: whether outputs keep out of other tensors. Plans do not require
  // it.
  Verdict memory = Verdict::kValid;
  std::set<std::string> sharers;
  std::set<std::string> outsiders;  // whose strides leave the address space: launches may say so

  void invalid(const std::string& argument) {
    verdict = Verdict::kInvalid;
    blame.insert(argument);
  }
  void either(const std::string& argument) {
    if (verdict == Verdict::kValid) verdict = Verdict::kEither;
    blame.insert(argument);
  }
};

// Sizes that the struct has had, and those between.
bool known_struct_size(size_t size);

// What a caller whose struct is of a known size says: fields beyond it are 0.
flashmoe_attention_forward_params as_given(const flashmoe_attention_forward_params& params);

Judgement judge(const flashmoe_attention_forward_params* params);
Judgement judge(const flashmoe_attention_backward_params* params);

// Whether `sentence` blames one of these arguments: "k: its batch is 3, but ...".
bool blames(const std::set<std::string>& arguments, const std::string& sentence);
