// The options of an attention call from Python objects to the C ABI's values. Each failure is a
// ValueError or TypeError that names the option, what it got and what is accepted.
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

// None, or a tuple or list of two: each None or an int. Sets the window's fields of params.
void parse_window(nb::handle window, flashmoe_attention_forward_params* params);

// None -> false. Else an int, or an object with __cuda_stream__(), cuda_stream or ptr.
bool parse_stream(nb::handle stream, void** parsed);

}  // namespace flashmoe
