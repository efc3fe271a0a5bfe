#include "core/choose.h"

#include <cstdlib>

#include "core/backends.h"
#include "core/gpu_model.h"
#include "core/log.h"

namespace flashmoe {

void copy_kernel_name(const char* kernel, KernelName* name) {
  size_t length = kernel != nullptr ? std::strlen(kernel) : 0;
  if (length >= sizeof *name) length = sizeof *name - 1;
  if (length > 0) std::memcpy(*name, kernel, length);
  (*name)[length] = '\0';
}

bool names_family(const char* wanted, const char* family, const char* prefix) {
  if (std::strcmp(wanted, family) == 0) return true;
  if (prefix == nullptr) return false;
  const size_t prefix_length = std::strlen(prefix);
  const size_t length = std::strlen(family);
  return std::strncmp(wanted, prefix, prefix_length) == 0 &&
         std::strncmp(wanted + prefix_length, family, length) == 0 &&
         wanted[prefix_length + length] == '_';
}

bool is_word(const char* name, const char* words) {
  bool found = false;
  for_each_word(words, [&](const char* word, size_t length) {
    found = found || (std::strlen(name) == length && std::strncmp(word, name, length) == 0);
  });
  return found;
}

bool is_family_name(const char* name) { return is_word(name, kFamilyNames); }

const char* family_from_environment() {
  static const char* const family = [] {
    const char* text = std::getenv("FLASHMOE_ARCH");
    return text != nullptr && *text != '\0' ? text : nullptr;
  }();
  return family;
}

flashmoe_status check_family_device(int32_t device_type, flashmoe_device device,
                                    const Reason& reason) {
  if (device_type == device.device_type) return FLASHMOE_OK;
  if (device.device_type == FLASHMOE_DEVICE_CUDA) {
    return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED,
                         "the tensors are on %s, it computes on the CPU%s", DeviceName(device).text,
                         FLASHMOE_WITH_CUDA ? "" : "; this library was built without CUDA");
  }
  return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED,
                       "the tensors are on the CPU, it computes on a GPU");
}

void append_rejection(char (&rejected)[kRejectedBytes], const char* family, const char* reason) {
  const size_t used = std::strlen(rejected);
  std::snprintf(rejected + used, sizeof rejected - used, "%s: %s", family, reason);
  make_readable(rejected + used);
  const size_t end = std::strlen(rejected);
  std::snprintf(rejected + end, sizeof rejected - end, "\n");
}

}  // namespace flashmoe
