// The choice among kernel families (core/choose.h), on made-up ones. With an argument,
// FLASHMOE_ARCH names that family.
#include "core/choose.h"

#include <climits>
#include <cstring>
#include <string>

#include "check.h"
#include "core/status.h"
#include "flashmoe/flashmoe.h"

namespace flashmoe {
namespace {

constexpr char kPrefix[] = "toy_";

// What each of the families a, b and c says, as often as it fails, and how often it was asked.
struct Answer {
  flashmoe_status status;
  double microseconds;
  int asked;
  int failures = INT_MAX;
};

struct Toy {
  flashmoe_device device;
  KernelName kernel;
  Answer* answers;
};

template <int kIndex>
flashmoe_status plan(const Toy& toy, Plan* plan, const Reason& reason) {
  Answer& answer = toy.answers[kIndex];
  ++answer.asked;
  // A plan begins as zeros, whatever was planned before.
  CHECK(plan->info.launch_count == 0 && plan->info.microseconds == 0 && plan->detail == nullptr);
  constexpr char kName = static_cast<char>('a' + kIndex);
  const std::string kernel = std::string(kPrefix) + kName + "_k";
  plan->add_launch("toy_prepare_k", nullptr, toy.device, 1, 1);  // a call cannot name it
  plan->add_launch(kernel.c_str(), nullptr, toy.device, 1, 1);
  plan->info.microseconds = answer.microseconds;
  if (answer.status == FLASHMOE_OK || answer.asked > answer.failures) return FLASHMOE_OK;
  return reason.refuse(answer.status, "%c says no", kName);
}

flashmoe_status launch(const Toy&, const Plan&, void*, void*) { return FLASHMOE_OK; }

constexpr Family<Toy> kA = {"a", FLASHMOE_DEVICE_CUDA, plan<0>, launch};
constexpr Family<Toy> kB = {"b", FLASHMOE_DEVICE_CUDA, plan<1>, launch, "b_one b_two"};
constexpr Family<Toy> kC = {"c", FLASHMOE_DEVICE_CPU, plan<2>, launch};
constexpr const Family<Toy>* kFamilies[] = {&kA, &kB, &kC};

constexpr flashmoe_device kGpu = {FLASHMOE_DEVICE_CUDA, 0};
constexpr flashmoe_device kCpu = {FLASHMOE_DEVICE_CPU, 0};

struct Outcome {
  flashmoe_status status;
  std::string family, kernel, rejected, sentence;
  int asked;
};

Outcome choose(Answer a, Answer b, const char* kernel = "", flashmoe_device device = kGpu,
               bool explain = false) {
  Answer answers[] = {a, b, {FLASHMOE_OK, 0, 0}};
  Toy toy = {device, "", answers};
  copy_kernel_name(kernel, &toy.kernel);
  Choice choice(kFamilies, kPrefix, wanted_of(kFamilies, toy.kernel, device), toy);
  const Family<Toy>* family = nullptr;
  Plan plan;
  Outcome out;
  out.status = explain ? choice.choose_and_explain(&family, &plan) : choice.choose(&family, &plan);
  out.asked = answers[0].asked + answers[1].asked + answers[2].asked;
  if (out.status == FLASHMOE_OK) {
    out.family = family->name;
    out.kernel = plan.info.launches[1].kernel;
    out.rejected = plan.info.rejected;
    CHECK(plan.info.launch_count == 2);
    CHECK(plan.info.microseconds == answers[family->name[0] - 'a'].microseconds);
  } else {
    out.sentence = flashmoe_last_error();
  }
  return out;
}

Outcome explain(Answer a, Answer b, const char* kernel = "", flashmoe_device device = kGpu) {
  const Outcome plain = choose(a, b, kernel, device);
  const Outcome out = choose(a, b, kernel, device, true);
  CHECK(out.status == plain.status && out.family == plain.family && out.kernel == plain.kernel);
  CHECK(out.sentence == plain.sentence && plain.rejected.empty());
  return out;
}

Answer takes(double microseconds) { return {FLASHMOE_OK, microseconds, 0}; }
Answer no(flashmoe_status status = FLASHMOE_ERROR_UNSUPPORTED) { return {status, 1, 0}; }

const std::string kElsewhere = "c: the tensors are on cuda:0, it computes on the CPU\n";

void the_least_time_wins() {
  Outcome out = explain(takes(7), takes(5));
  CHECK(out.family == "b" && out.kernel == "toy_b_k");
  CHECK(out.rejected == "a: takes 7.0 us by its estimate, b 5.0 us\n" + kElsewhere);
  out = explain(takes(5), takes(7.25));
  CHECK(out.family == "a" && out.kernel == "toy_a_k");
  CHECK(out.rejected == "b: takes 7.2 us by its estimate, a 5.0 us\n" + kElsewhere);
  CHECK(choose(takes(5), takes(7)).asked == 2);
}

void ties_go_to_the_first() {
  CHECK(explain(takes(5), takes(5)).family == "a");
  CHECK(explain(takes(0), takes(0)).family == "a");
}

void who_refuses_has_no_time() {
  Outcome out = explain(no(), takes(1000));
  CHECK(out.family == "b" && out.rejected == "a: a says no\n" + kElsewhere);
  out = explain(takes(1000), no());
  CHECK(out.family == "a" && out.rejected == "b: b says no\n" + kElsewhere);
}

// In the words of the last family of the device.
void what_none_serves_is_explained() {
  Outcome out = explain(no(), no(FLASHMOE_ERROR_ARCH_NOT_BUILT));
  CHECK(out.status == FLASHMOE_ERROR_ARCH_NOT_BUILT && out.sentence == "b: b says no");
  out = explain(no(), no(), "a");
  CHECK(out.status == FLASHMOE_ERROR_UNSUPPORTED);
  CHECK(out.sentence == "kernel: cannot be served: a: a says no");
}

// What went wrong in one family is not for another to hide.
void cuda_errors_end_the_choice() {
  for (const Answer& other : {takes(1), no(FLASHMOE_ERROR_UNSUPPORTED)}) {
    Outcome out = explain(no(FLASHMOE_ERROR_CUDA), other);
    CHECK(out.status == FLASHMOE_ERROR_CUDA && out.sentence == "a: a says no");
    out = explain(other, no(FLASHMOE_ERROR_CUDA));
    CHECK(out.status == FLASHMOE_ERROR_CUDA && out.sentence == "b: b says no");
  }
  CHECK(explain(no(FLASHMOE_ERROR_CUDA), takes(1), "b").family == "b");
}

// A failure is one, though what is asked for its reason fails no more.
void failures_may_pass() {
  const std::string words = "a: it failed, and not when asked why";
  Outcome out = explain({FLASHMOE_ERROR_CUDA, 1, 0, 1}, takes(1));
  CHECK(out.status == FLASHMOE_ERROR_CUDA && out.sentence == words);
  out = explain({FLASHMOE_ERROR_NO_DEVICE, 1, 0, 1}, takes(1), "a");
  CHECK(out.status == FLASHMOE_ERROR_NO_DEVICE);
  CHECK(out.sentence == "kernel: cannot be served: " + words);
}

void families_of_another_device_are_not_asked() {
  const Outcome out = explain(takes(1), takes(1), "", kCpu);
  CHECK(out.family == "c");
  CHECK(out.rejected ==
        "a: the tensors are on the CPU, it computes on a GPU\n"
        "b: the tensors are on the CPU, it computes on a GPU\n");
  CHECK(choose(takes(1), takes(1), "", kCpu).asked == 1);
}

void a_name_is_served_or_fails() {
  Outcome out = explain(takes(1), takes(9), "b");
  CHECK(out.family == "b");
  CHECK(out.rejected == "a: kernel asks for b\nc: kernel asks for b\n");
  CHECK(explain(takes(1), takes(9), "toy_b_k").family == "b");
  out = explain(takes(1), takes(9), "toy_b_other");
  CHECK(out.status == FLASHMOE_ERROR_UNSUPPORTED);
  CHECK(out.sentence == "kernel: cannot be served: b: toy_b_k serves this call, not toy_b_other");
  out = explain(takes(1), takes(9), "c");
  CHECK(out.sentence ==
        "kernel: cannot be served: c: the tensors are on cuda:0, it computes on the CPU");
  for (const char* unknown :
       {"d", "toy_b", "toy_prepare_k", "toy_bb_k", "toy_", "b_k", "B", "b "}) {
    out = explain(takes(1), takes(9), unknown);
    CHECK(out.status == FLASHMOE_ERROR_INVALID_ARGUMENT);
    CHECK(out.sentence ==
          std::string("kernel: got \"") + unknown + "\", built in are a, b, b_one, b_two, c");
  }
}

void a_familys_schedules_have_names() {
  for (const char* schedule : {"b_one", "b_two"}) {
    const Outcome out = explain(takes(1), takes(9), schedule);
    CHECK(out.family == "b");
    const std::string asked = std::string("kernel asks for ") + schedule;
    CHECK(out.rejected == "a: " + asked + "\nc: " + asked + "\n");
  }
  for (const char* unknown : {"b_", "b_one b_two", "one", "a_one"}) {
    CHECK(explain(takes(1), takes(9), unknown).status == FLASHMOE_ERROR_INVALID_ARGUMENT);
  }
}

// A kernel is of the family with the longest name that its own begins with.
void names_of_families_may_begin_alike() {
  static constexpr Family<Toy> kLong = {"b_few", FLASHMOE_DEVICE_CUDA, plan<0>, launch};
  constexpr const Family<Toy>* kAlike[] = {&kLong, &kB};
  const auto asked_of = [&](const char* kernel) {
    Answer answers[] = {takes(1), takes(9), takes(0)};
    Toy toy = {kGpu, "", answers};
    copy_kernel_name(kernel, &toy.kernel);
    const Family<Toy>* family = nullptr;
    Plan plan;
    Choice(kAlike, kPrefix, wanted_of(kAlike, toy.kernel, kGpu), toy).choose(&family, &plan);
    return std::string(answers[0].asked > 0 ? "b_few" : "") + (answers[1].asked > 0 ? "b" : "");
  };
  CHECK(asked_of("toy_b_few_k") == "b_few" && asked_of("b_few") == "b_few");
  CHECK(asked_of("toy_b_k") == "b" && asked_of("b") == "b" && asked_of("b_one") == "b");
  CHECK(asked_of("") == "b_fewb");
}

// Without a prefix only families have names.
void names_of_kernels_are_known_by_their_prefix() {
  CHECK(names_family("a", "a", nullptr) && names_family("a", "a", kPrefix));
  CHECK(names_family("toy_a_k", "a", kPrefix) && names_family("toy_a_", "a", kPrefix));
  CHECK(!names_family("toy_a_k", "a", nullptr) && !names_family("toy_ab_k", "a", kPrefix));
  CHECK(!names_family("toy_a", "a", kPrefix) && !names_family("", "a", kPrefix));
  CHECK(is_family_name("sm89") && is_family_name("cpu"));
  CHECK(!is_family_name("sm8") && !is_family_name("") && !is_family_name("sm89 sm90"));
}

void names_that_do_not_fit_are_cut() {
  KernelName name;
  copy_kernel_name(nullptr, &name);
  CHECK(std::strcmp(name, "") == 0);
  const std::string longest(sizeof name - 1, 'x');
  copy_kernel_name((longest + "yz").c_str(), &name);
  CHECK(name == longest);
}

void long_reasons_are_cut() {
  char rejected[kRejectedBytes] = "";
  const std::string reason(300, 'r');
  append_rejection(rejected, "a", reason.c_str());
  CHECK(rejected == "a: " + reason + "\n");
  for (int i = 0; i < 3; ++i) append_rejection(rejected, "b", reason.c_str());
  CHECK(std::strlen(rejected) == sizeof rejected - 1);
  CHECK(std::string(rejected).find("a: " + reason + "\nb: rrr") == 0);

  char text[8];
  CHECK(Reason(text).refuse(FLASHMOE_ERROR_CUDA, "%d%d", 12345, 67890) == FLASHMOE_ERROR_CUDA);
  CHECK(std::strcmp(text, "1234567") == 0);
  CHECK(Reason().refuse(FLASHMOE_ERROR_UNSUPPORTED, "%d", 1) == FLASHMOE_ERROR_UNSUPPORTED);
}

// ---- FLASHMOE_ARCH
// -------------------------------------------------------------------------------

void the_environment_names_a_family_of_gpus() {
  Outcome out = explain(takes(1), takes(9));
  CHECK(out.family == "b");
  CHECK(out.rejected == "a: FLASHMOE_ARCH asks for b\nc: FLASHMOE_ARCH asks for b\n");
  CHECK(explain(takes(1), takes(9), "a").family == "a");  // a call's own word comes first
  CHECK(explain(takes(1), takes(9), "", kCpu).family == "c");
  out = explain(takes(1), no());
  CHECK(out.sentence == "FLASHMOE_ARCH: cannot be served: b: b says no");
}

// A family of another operation of this build is no wish of this one.
void the_environment_may_name_another_operations() {
  CHECK(explain(takes(1), takes(9)).family == "a");
}

void the_environment_names_nothing_that_is_built() {
  const Outcome out = explain(takes(1), takes(9));
  CHECK(out.status == FLASHMOE_ERROR_INVALID_ARGUMENT);
  CHECK(out.sentence == "FLASHMOE_ARCH: got \"sm1\", built in are a, b, c");
}

}  // namespace
}  // namespace flashmoe

int main(int argc, char** argv) {
  using namespace flashmoe;
  const std::string arch = argc > 1 ? argv[1] : "";
  if (arch == "b") the_environment_names_a_family_of_gpus();
  if (arch == "sm89_few_tokens") the_environment_may_name_another_operations();
  if (arch == "sm1") the_environment_names_nothing_that_is_built();
  if (!arch.empty()) return 0;
  the_least_time_wins();
  ties_go_to_the_first();
  who_refuses_has_no_time();
  what_none_serves_is_explained();
  cuda_errors_end_the_choice();
  failures_may_pass();
  families_of_another_device_are_not_asked();
  a_name_is_served_or_fails();
  a_familys_schedules_have_names();
  names_of_families_may_begin_alike();
  names_of_kernels_are_known_by_their_prefix();
  names_that_do_not_fit_are_cut();
  long_reasons_are_cut();
  return 0;
}
