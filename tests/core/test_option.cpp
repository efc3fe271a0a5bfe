// What an operation's list of options (core/option.h) makes of itself: checks of ranges, in their
// words, and the log's line.
#include "core/option.h"

#include <cmath>
#include <cstring>
#include <string>

#include "check.h"
#include "flashmoe/flashmoe.h"

namespace flashmoe {
namespace {

struct Params {
  int32_t layout;
  int32_t renormalize;
  float softcap;
  float alpha;
  uint32_t reserved;
};

constexpr const char* kLayouts[] = {"bshd", "bhsd", "other"};
constexpr const char* kOneWord[] = {"only"};

constexpr Option<Params> kOptions[] = {
    Option<Params>::choice("layout", &Params::layout, kLayouts),
    Option<Params>::flag("renormalize", &Params::renormalize),
    Option<Params>::positive("softcap", &Params::softcap, "none"),
    Option<Params>::finite("alpha", &Params::alpha),
    Option<Params>::reserved("reserved", &Params::reserved),
};

void accepted(const Params& params) { CHECK(check_options(kOptions, params) == FLASHMOE_OK); }

void refused(const Params& params, const std::string& sentence) {
  CHECK(check_options(kOptions, params) == FLASHMOE_ERROR_INVALID_ARGUMENT);
  CHECK(flashmoe_last_error() == sentence);
}

void values_are_accepted_from_end_to_end() {
  accepted({});
  accepted({2, 1, 1e-45f, -3.4e38f, 0});
  accepted({1, 0, 3.4e38f, 3.4e38f, 0});
}

void others_are_refused_in_words() {
  const std::string layouts = ", accepted are 0 (bshd), 1 (bhsd) and 2 (other)";
  refused({3, 0, 0, 0, 0}, "layout: got 3" + layouts);
  refused({-1, 0, 0, 0, 0}, "layout: got -1" + layouts);
  refused({0, 2, 0, 0, 0}, "renormalize: got 2, accepted are 0 and 1");
  refused({0, -1, 0, 0, 0}, "renormalize: got -1, accepted are 0 and 1");
  const std::string positive = ", accepted is a finite positive number, or 0 for none";
  refused({0, 0, -1, 0, 0}, "softcap: got -1" + positive);
  refused({0, 0, HUGE_VALF, 0, 0}, "softcap: got inf" + positive);
  refused({0, 0, -HUGE_VALF, 0, 0}, "softcap: got -inf" + positive);
  refused({0, 0, std::nanf(""), 0, 0}, "softcap: got nan" + positive);
  refused({0, 0, 0, HUGE_VALF, 0}, "alpha: got inf, accepted is a finite number");
  refused({0, 0, 0, std::nanf(""), 0}, "alpha: got nan, accepted is a finite number");
  refused({0, 0, 0, 0, 7}, "reserved: got 7, accepted is 0");
  refused({0, 2, -1, 0, 7}, "renormalize: got 2, accepted are 0 and 1");  // in the list's order

  const Option<Params> one = Option<Params>::choice("layout", &Params::layout, kOneWord);
  CHECK(one.check({1, 0, 0, 0, 0}) == FLASHMOE_ERROR_INVALID_ARGUMENT);
  CHECK(std::strcmp(flashmoe_last_error(), "layout: got 1, accepted are 0 (only)") == 0);
}

void options_are_printed_in_order() {
  char text[128];
  print_options(kOptions, {1, 1, 30, -0.5f, 0}, text, sizeof text);
  CHECK(std::strcmp(text, " layout=bhsd renormalize=1 softcap=30 alpha=-0.5") == 0);
  // What does not fit is cut.
  char few[20];
  std::memset(few, 'x', sizeof few);
  print_options(kOptions, {1, 1, 30, -0.5f, 0}, few, sizeof few - 1);
  CHECK(std::strcmp(few, " layout=bhsd renor") == 0 && few[19] == 'x');
}

}  // namespace
}  // namespace flashmoe

int main() {
  flashmoe::values_are_accepted_from_end_to_end();
  flashmoe::others_are_refused_in_words();
  flashmoe::options_are_printed_in_order();
  return 0;
}
