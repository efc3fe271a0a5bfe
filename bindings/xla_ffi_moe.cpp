// The mixture of experts as XLA custom calls, one for each operation of the C ABI. Which tensors a
// call has varies, so that attributes name them:
//
//   attributes: inputs, outputs (the C ABI's names in order, a space behind each), the options of
//               moe_numbers.h, and kernel ("" for the best) where the operation takes one
#include "bindings/xla_ffi_moe.h"

#include <iterator>
#include <string>

#include "bindings/moe_calls.h"
#include "bindings/moe_numbers.h"
#include "bindings/xla_ffi_call.h"

namespace flashmoe::xla {
namespace {

// Sets the tensors that `names` lists, of which there must be as many as values.
template <class Call, size_t kCount>
bool place(const Field<Call> (&fields)[kCount], Access access, const std::string& names,
           const Values& values, flashmoe_device device, flashmoe_tensor (&tensors)[kCount],
           typename Call::Params* params) {
  int64_t count = 0;
  size_t begin = 0;
  for (size_t end; (end = names.find(' ', begin)) != std::string::npos; begin = end + 1) {
    size_t at = 0;
    while (at < kCount && (fields[at].access != access ||
                           names.compare(begin, end - begin, fields[at].name) != 0)) {
      ++at;
    }
    if (at == kCount || count == values.size) return false;
    tensors[at] = view(values.values[count++], device);
    params->*fields[at].param = &tensors[at];
  }
  return begin == names.size() && count == values.size;
}

template <class Params>
bool read_options(const Attributes& attributes, Params* params, std::string* kernel) {
  bool complete = true;
  for_each_number(*params, [&](const auto& option) {
    complete = read(attributes, option.name, &(params->*option.member)) && complete;
  });
  const char** const name = kernel_of(params);
  if (name == nullptr) return complete;
  if (!read(attributes, "kernel", kernel)) return false;
  *name = kernel->empty() ? nullptr : kernel->c_str();
  return complete;
}

template <class Call, size_t kCount>
Error* call(const CallFrame& frame, flashmoe_device device, const Field<Call> (&fields)[kCount],
            typename Call::Params params) {
  flashmoe_tensor tensors[kCount];
  std::string inputs;
  std::string outputs;
  std::string kernel;
  if (!has_buffers_alone(frame) || !read(frame.attributes, "inputs", &inputs) ||
      !read(frame.attributes, "outputs", &outputs) ||
      !read_options(frame.attributes, &params, &kernel) ||
      !place(fields, Access::kRead, inputs, frame.arguments, device, tensors, &params) ||
      !place(fields, Access::kWrite, outputs, frame.results, device, tensors, &params)) {
    return fail_foreign(frame);
  }
  return run(frame, device, Call::kWorkspaceSize, Call::kRun, params);
}

}  // namespace

Error* moe_route(const CallFrame& frame, flashmoe_device device) {
  return call(frame, device, kRouteFields, flashmoe_moe_route_params_init());
}

Error* moe_forward(const CallFrame& frame, flashmoe_device device) {
  return call(frame, device, kForwardFields, flashmoe_moe_forward_params_init());
}

Error* grouped_product(const CallFrame& frame, flashmoe_device device) {
  return call(frame, device, kProductFields, flashmoe_grouped_product_params_init());
}

Error* fused_moe(const CallFrame& frame, flashmoe_device device) {
  return call(frame, device, kFusedFields, flashmoe_fused_moe_params_init());
}

}  // namespace flashmoe::xla
