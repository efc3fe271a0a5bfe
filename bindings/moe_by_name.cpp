// The mixture of experts on tensors of any kind, given by the C ABI's names in a dict: for frameworks
// without the DLPack exchange API, and for plans.
#include <nanobind/stl/string.h>

#include <string>
#include <type_traits>
#include <vector>

#include "bindings/errors.h"
#include "bindings/fields.h"
#include "bindings/moe.h"
#include "bindings/moe_calls.h"
#include "bindings/moe_numbers.h"
#include "bindings/plan.h"

namespace flashmoe {
namespace {

nb::object item(const nb::dict& dict, const char* name) {
  return nb::borrow<nb::object>(dict.attr("get")(name));
}

flashmoe_device device_of(nb::handle pair) {
  return {nb::cast<int32_t>(pair[0]), nb::cast<int32_t>(pair[1])};
}

int32_t integers(nb::handle sequence, int64_t* values) {
  const size_t count = nb::len(sequence);
  for (size_t i = 0; i < count && i < TensorView::kMaxRank; ++i) {
    values[i] = nb::cast<int64_t>(sequence[i]);
  }
  return static_cast<int32_t>(count);
}

// A tensor, or a tuple (shape, dtype's code and bits, device's type and id, strides or None) of one
// that need not exist.
void view_argument(const char* name, nb::handle object, Access access, TensorView* view) {
  if (!PyTuple_Check(object.ptr())) return view->borrow(name, object, access);
  int64_t shape[TensorView::kMaxRank];
  int64_t strides[TensorView::kMaxRank];
  const int32_t rank = integers(object[0], shape);
  const nb::object dtype = object[1];
  const nb::object given = object[3];
  if (!given.is_none()) integers(given, strides);
  view->describe(shape, rank, {nb::cast<uint8_t>(dtype[0]), nb::cast<uint8_t>(dtype[1]), 1},
                 device_of(object[2]), given.is_none() ? nullptr : strides);
}

template <class Call>
void view_arguments(const nb::dict& tensors, Call* call) {
  for (const Field<Call>& field : fields_of(*call)) {
    const nb::object tensor = item(tensors, field.name);
    if (tensor.is_none()) continue;
    const std::string name = renamed(field.name, names_of(*call));
    view_argument(name.c_str(), tensor, field.access, &(call->*field.view));
  }
}

// What options hold alive: `call` keeps no more than handles of them.
struct RouteObjects {
  nb::object scoring, renormalize, num_groups, top_groups, scale;

  explicit RouteObjects(const nb::dict& options)
      : scoring(item(options, "scoring")),
        renormalize(item(options, "renormalize")),
        num_groups(item(options, "num_groups")),
        top_groups(item(options, "top_groups")),
        scale(item(options, "scale")) {}

  RouteOptions get() const { return {scoring, renormalize, num_groups, top_groups, scale}; }
};

struct ForwardObjects {
  nb::object gate, activation, alpha, limit, up_offset, weight_on_input, kernel;

  explicit ForwardObjects(const nb::dict& options)
      : gate(item(options, "gate")),
        activation(item(options, "activation")),
        alpha(item(options, "alpha")),
        limit(item(options, "limit")),
        up_offset(item(options, "up_offset")),
        weight_on_input(item(options, "weight_on_input")),
        kernel(item(options, "kernel")) {}

  ForwardOptions get() const {
    return {gate, activation, alpha, limit, up_offset, weight_on_input, kernel};
  }
};

// The kernel's name stays that of the string in `options`.
void parse_options(const nb::dict& options, RouteCall* call) {
  const RouteObjects objects(options);
  if (item(options, "num_experts").is_none()) {
    call->parse(objects.get());
  } else {
    call->parse_weights(objects.renormalize, objects.scale);
  }
}

void parse_options(const nb::dict& options, ForwardCall* call) {
  call->parse(ForwardObjects(options).get());
}

void parse_options(const nb::dict& options, ProductCall* call) {
  call->params.kernel = parse_kernel(item(options, "kernel"));
}

void parse_options(const nb::dict& options, FusedCall* call) {
  const RouteObjects route(options);
  const ForwardObjects forward(options);
  call->parse(parse_top_k(item(options, "top_k")), route.get(), forward.get());
}

bool wants(const nb::dict& options, const char* name) {
  const nb::object flag = item(options, name);
  return !flag.is_none() && parse_flag(name, flag);
}

// Has `make` make the outputs that are not given.
template <class Make>
void make_outputs(const nb::dict& options, RouteCall* call, const Make& make) {
  RouteExtents extents;
  const nb::object experts = item(options, "num_experts");
  const bool known =
      experts.is_none()
          ? extents_of_logits(call->logits, parse_top_k(item(options, "top_k")), &extents)
          : extents_of_ids(call->given_ids, nb::cast<int64_t>(experts), &extents);
  if (!known) return;
  check_given_outputs(*call, extents);
  call->make_outputs(extents, wants(options, "return_lse"), make);
}

template <class Make>
void make_outputs(const nb::dict& options, ForwardCall* call, const Make& make) {
  call->make_outputs(wants(options, "return_pre_activation"), make);
}

template <class Make>
void make_outputs(const nb::dict&, ProductCall* call, const Make& make) {
  call->make_outputs(make);
}

template <class Make>
void make_outputs(const nb::dict&, FusedCall* call, const Make& make) {
  call->make_outputs(make);
}

// Does `work` with an empty call of the operation of that name.
template <class Work>
auto with_operation(const std::string& operation, const Work& work) {
  if (operation == "route") return work(RouteCall());
  if (operation == "forward") return work(ForwardCall());
  if (operation == "grouped_product") return work(ProductCall());
  if (operation == "fused") return work(FusedCall());
  raise_value_error("operation: got '" + operation +
                    "', accepted are 'route', 'forward', 'grouped_product' and 'fused'");
}

using Named = nb::typed<nb::dict, nb::str, nb::any>;

const char* name_of_dtype(flashmoe_dtype dtype) {
  if (dtype.code == dlpack::kInt) return "int32";
  if (dtype.code == FLASHMOE_DTYPE_BFLOAT) return "bfloat16";
  return dtype.bits == 16 ? "float16" : "float32";
}

void moe_call(const std::string& operation, Named tensors, Named options, nb::object allocate,
              nb::handle stream) {
  const auto work = [&](auto&& call) {
    using Call = std::decay_t<decltype(call)>;
    parse_options(options, &call);
    view_arguments(tensors, &call);
    std::vector<nb::object> kept;
    const auto make = [&](const char* name, const char* dtype, int rank, const int64_t* shape,
                          TensorView* view) {
      nb::list extents;
      for (int axis = 0; axis < rank; ++axis) extents.append(nb::int_(shape[axis]));
      kept.push_back(allocate(name, nb::tuple(extents), dtype));
      view->borrow(name, kept.back(), Access::kWrite);
    };
    if (call.first().get() != nullptr) {
      make_outputs(
          options, &call,
          [&](const char* name, TensorView* view, flashmoe_dtype dtype, int rank,
              const int64_t* shape) { make(name, name_of_dtype(dtype), rank, shape, view); });
    }
    ready(&call);
    void* handle = nullptr;
    parse_stream(stream, &handle);
    const Renames& renames = names_of(call);
    TensorView scratch;
    size_t bytes = 0;
    if (call.first().get() != nullptr &&
        call.first().device().device_type == FLASHMOE_DEVICE_CUDA) {
      check_renamed(Call::kWorkspaceSize(&call.params, &bytes), renames);
      const int64_t shape[] = {static_cast<int64_t>(bytes)};
      if (bytes > 0) make("workspace", "uint8", 1, shape, &scratch);
    }
    check_renamed(run(call, scratch.tensor().data, bytes, handle), renames);
  };
  with_operation(operation, work);
}

Fields moe_plan(const std::string& operation, Named tensors, Named options) {
  const auto work = [&](auto&& call) -> Fields {
    using Call = std::decay_t<decltype(call)>;
    parse_options(options, &call);
    view_arguments(tensors, &call);
    if (call.first().get() != nullptr) {
      const flashmoe_device device = call.first().device();
      make_outputs(options, &call,
                   [&](const char*, TensorView* view, flashmoe_dtype dtype, int rank,
                       const int64_t* shape) { view->describe(shape, rank, dtype, device); });
    }
    flashmoe_plan made = flashmoe_plan_init();
    check_renamed(Call::kPlan(&ready(&call), &made), names_of(call));
    return describe(made);
  };
  return with_operation(operation, work);
}

Fields moe_option_numbers(const std::string& operation, Named options) {
  return with_operation(operation, [&](auto&& call) {
    parse_options(options, &call);
    Fields numbers;
    for_each_number(call.params, [&](const auto& option) {
      numbers[option.name] = nb::cast(call.params.*option.member);
    });
    if (const char** const kernel = kernel_of(&call.params)) {
      numbers["kernel"] = nb::str(*kernel != nullptr ? *kernel : "");
    }
    return numbers;
  });
}

}  // namespace

void define_moe_by_name(nb::module_& module) {
  module.def(
      "moe_call", &moe_call, nb::arg("operation"), nb::arg("tensors"), nb::arg("options"),
      nb::arg("allocate"), nb::arg("stream").none(),
      "An operation of the C ABI, 'route', 'forward', 'grouped_product' or 'fused', on tensors "
      "of any kind by the C ABI's names. Outputs that are not among them, and a GPU's "
      "workspace, are what allocate(name, shape, name of dtype) returns.");
  module.def("moe_plan", &moe_plan, nb::arg("operation"), nb::arg("tensors"), nb::arg("options"),
             "The fields of flashmoe_plan for these tensors. Outputs may be absent, and in "
             "place of a tensor a tuple (shape, dtype's code and bits, device's type and id, "
             "strides or None) will do.");
  module.def("moe_option_numbers", &moe_option_numbers, nb::arg("operation"), nb::arg("options"),
             "The options as the C ABI has them: ints and floats, and kernel \"\" for the best. "
             "Absent options are None.");
}

}  // namespace flashmoe
