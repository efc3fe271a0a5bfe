// Converts options from Python objects to the C ABI's values. Each failure is a ValueError or
// TypeError that names the option, what it got and what is accepted.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

#include "flashmoe/flashmoe.h"

namespace flashmoe {

namespace nb = nanobind;

bool parse_flag(const char* name, nb::handle flag);
int32_t parse_layout(nb::handle layout);      // "bshd", "bhsd"
int32_t parse_causal(nb::handle causal);      // bool, "bottom_right", "top_left"
float parse_scale(nb::handle scale);          // None, number
float parse_softcap(nb::handle softcap);      // None, number
const char* parse_kernel(nb::handle kernel);  // None, str; lives as long as the object

// A window as in the C ABI.
struct Window {
  uint32_t ends;  // bits of flashmoe_window
  int64_t left;
  int64_t right;
};
// Parses None, or a tuple or list of two: each None or an int; with a causal mask the right one is
// None or 0.
Window parse_window(nb::handle window, bool causal);

// Options of the mixture of experts.
int32_t parse_scoring(nb::handle scoring);        // "softmax", "topk_softmax", "sigmoid"
int32_t parse_gate(nb::handle gate);              // "gate_up", "up_gate", "interleaved", ...
int32_t parse_activation(nb::handle activation);  // "silu", "gelu", "gelu_tanh", "relu", "relu2"
float parse_limit(nb::handle limit);              // None, number
float parse_number(const char* name, nb::handle number);
// Parses a number other than 0, for an option whose 0 means 1 in the C ABI.
float parse_factor(const char* name, nb::handle factor);
// Parses an int from low to high; `accepted` says so in words.
int64_t parse_integer(const char* name, nb::handle integer, int64_t low, int64_t high,
                      const char* accepted);

// None -> false. Else an int, or an object with __cuda_stream__(), cuda_stream or ptr.
bool parse_stream(nb::handle stream, void** parsed);

}  // namespace flashmoe
