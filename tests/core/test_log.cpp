// The log: levels and destinations from the environment, and the callback. One case a process,
// named by the first argument, because the environment is read once.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "flashmoe/flashmoe.h"

namespace {

struct Line {
  int32_t level;
  std::string text;
};

void collect(int32_t level, const char* line, void* user) {
  static_cast<std::vector<Line>*>(user)->push_back({level, line});
}

void fail_once() { CHECK(flashmoe_set_num_threads(-1) == FLASHMOE_ERROR_INVALID_ARGUMENT); }

// A call with the workspace that it needs, or with none.
flashmoe_status attend(bool with_workspace) {
  alignas(16) static const float ones[8] = {1, 1, 1, 1, 1, 1, 1, 1};
  alignas(16) static float result[8];
  const int64_t shape[4] = {1, 1, 1, 8};
  const auto view = [&shape](const float* data) {
    flashmoe_tensor tensor = {};
    tensor.data = const_cast<float*>(data);
    tensor.device = {FLASHMOE_DEVICE_CPU, 0};
    tensor.ndim = 4;
    tensor.dtype = {FLASHMOE_DTYPE_FLOAT, 32, 1};
    tensor.shape = shape;
    return tensor;
  };
  const flashmoe_tensor input = view(ones);
  const flashmoe_tensor output = view(result);
  flashmoe_attention_forward_params params = flashmoe_attention_forward_params_init();
  params.q = params.k = params.v = &input;
  params.out = &output;
  size_t bytes = 0;
  CHECK(flashmoe_attention_forward_workspace_size(&params, &bytes) == FLASHMOE_OK);
  std::vector<std::max_align_t> workspace(bytes / sizeof(std::max_align_t) + 1);
  CHECK(bytes > 0);
  const flashmoe_status status =
      with_workspace ? flashmoe_attention_forward(&params, workspace.data(), bytes, nullptr)
                     : flashmoe_attention_forward(&params, nullptr, 0, nullptr);
  CHECK(status != FLASHMOE_OK || (result[0] == 1.0f && result[7] == 1.0f));
  return status;
}

// A call that launches: one line at level INFO.
void attend_once() { CHECK(attend(true) == FLASHMOE_OK); }

std::string read_file(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// What the environment makes of a failing and a launching call.
std::string log_of_both_calls(const char* level) {
  const std::string path = "test_log." + std::to_string(getpid()) + ".txt";
  setenv("FLASHMOE_LOG_LEVEL", level, 1);
  setenv("FLASHMOE_LOG_FILE", "test_log.%i.txt", 1);
  std::remove(path.c_str());
  fail_once();
  attend_once();
  const std::string text = read_file(path);
  std::remove(path.c_str());
  return text;
}

bool contains(const std::string& text, const char* piece) {
  return text.find(piece) != std::string::npos;
}

void callback() {
  std::vector<Line> lines;
  CHECK(flashmoe_set_log(FLASHMOE_LOG_INFO, collect, &lines) == FLASHMOE_OK);
  fail_once();
  CHECK(lines.size() == 1);
  CHECK(lines[0].level == FLASHMOE_LOG_ERROR);
  CHECK(contains(lines[0].text, "FLASHMOE_ERROR_INVALID_ARGUMENT: n: got -1"));
  attend_once();
  CHECK(lines.size() == 2);
  CHECK(lines[1].level == FLASHMOE_LOG_INFO);
  CHECK(contains(lines[1].text, "attention_forward batch=1 seq_q=1 seq_k=1"));
  CHECK(contains(lines[1].text, "fp32") && !contains(lines[1].text, "\n"));

  // NULL keeps the destination, the level applies at once, a wrong level changes nothing.
  CHECK(flashmoe_set_log(FLASHMOE_LOG_OFF, nullptr, nullptr) == FLASHMOE_OK);
  fail_once();
  CHECK(lines.size() == 2);
  CHECK(flashmoe_set_log(FLASHMOE_LOG_ERROR, nullptr, nullptr) == FLASHMOE_OK);
  attend_once();
  CHECK(lines.size() == 2);
  CHECK(flashmoe_set_log(4, nullptr, nullptr) == FLASHMOE_ERROR_INVALID_ARGUMENT);
  CHECK(flashmoe_set_log(-1, nullptr, nullptr) == FLASHMOE_ERROR_INVALID_ARGUMENT);
  CHECK(lines.size() == 4);
  fail_once();
  CHECK(lines.size() == 5);
}

// Who launches without workspace, and then with what the call needs, has not failed.
void workspace_is_asked_for() {
  std::vector<Line> lines;
  CHECK(flashmoe_set_log(FLASHMOE_LOG_INFO, collect, &lines) == FLASHMOE_OK);
  CHECK(attend(false) == FLASHMOE_ERROR_WORKSPACE_TOO_SMALL);
  CHECK(lines.empty());
  CHECK(contains(flashmoe_last_error(), "workspace_size: got 0 bytes, this call needs "));
  CHECK(flashmoe_set_log(FLASHMOE_LOG_DEBUG, nullptr, nullptr) == FLASHMOE_OK);
  CHECK(attend(false) == FLASHMOE_ERROR_WORKSPACE_TOO_SMALL);
  CHECK(lines.size() == 1 && lines[0].level == FLASHMOE_LOG_DEBUG);
  CHECK(contains(lines[0].text, "FLASHMOE_ERROR_WORKSPACE_TOO_SMALL: workspace_size: got 0 bytes"));
}

void callback_reenters() {
  static int lines = 0;
  const auto reenter = [](int32_t, const char*, void*) {
    ++lines;  // of what fails in here there is no line: it would come here without end
    CHECK(contains(flashmoe_last_error(), "n: got -1"));
    CHECK(flashmoe_set_num_threads(-2) == FLASHMOE_ERROR_INVALID_ARGUMENT);
    CHECK(contains(flashmoe_last_error(), "n: got -2"));
  };
  CHECK(flashmoe_set_log(FLASHMOE_LOG_ERROR, reenter, nullptr) == FLASHMOE_OK);
  fail_once();
  CHECK(lines == 1);
  CHECK(contains(flashmoe_last_error(), "n: got -1"));  // of the call that has failed last
  fail_once();
  CHECK(lines == 2);
}

// Forks children, which log a line, while another thread logs.
template <class Check>
void fork_beside_a_thread_that_logs(const Check& check) {
  constexpr int kChildren = 100;
  constexpr unsigned kMostSeconds = 20;  // for a child that hangs
  std::atomic<bool> done{false};
  std::thread other([&done] {
    while (!done) fail_once();
  });
  for (int i = 0; i < kChildren; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(kMostSeconds);
      CHECK(flashmoe_set_num_threads(-3) == FLASHMOE_ERROR_INVALID_ARGUMENT);
      _exit(0);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(status == 0);
    check(child);
  }
  done = true;
  other.join();
}

constexpr char kOfChild[] =
    "flashmoe: FLASHMOE_ERROR_INVALID_ARGUMENT: n: got -3 threads, accepted are 0 to 4096\n";

void fork_file_with_pid() {
  setenv("FLASHMOE_LOG_LEVEL", "1", 1);
  setenv("FLASHMOE_LOG_FILE", "test_log.fork.%i.%i.txt", 1);
  const auto path_of = [](pid_t id) {
    const std::string number = std::to_string(id);
    return "test_log.fork." + number + "." + number + ".txt";
  };
  std::remove(path_of(getpid()).c_str());
  fork_beside_a_thread_that_logs([&path_of](pid_t child) {
    CHECK(read_file(path_of(child)) == kOfChild);
    std::remove(path_of(child).c_str());
  });
  CHECK(!contains(read_file(path_of(getpid())), "-3"));
  std::remove(path_of(getpid()).c_str());
}

void fork_shared_file() {
  const std::string path = "test_log.shared." + std::to_string(getpid()) + ".txt";
  setenv("FLASHMOE_LOG_LEVEL", "1", 1);
  setenv("FLASHMOE_LOG_FILE", path.c_str(), 1);
  std::remove(path.c_str());
  size_t of_children = 0;
  fork_beside_a_thread_that_logs([&of_children](pid_t) { ++of_children; });
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    line += '\n';
    if (line == kOfChild) --of_children;
    const size_t number = line.find("-3");
    if (number != std::string::npos) line[number + 1] = '1';
    CHECK(line ==
          "flashmoe: FLASHMOE_ERROR_INVALID_ARGUMENT: n: got -1 threads, accepted are 0 to 4096\n");
  }
  CHECK(of_children == 0);
  std::remove(path.c_str());
}

void file_with_pid() {
  const std::string text = log_of_both_calls("2");
  CHECK(contains(text, "FLASHMOE_ERROR_INVALID_ARGUMENT: n: got -1"));
  CHECK(contains(text, "attention_forward batch=1"));
}

void level_off() { CHECK(log_of_both_calls("0").empty()); }

void level_error() {
  const std::string text = log_of_both_calls("1");
  CHECK(contains(text, "n: got -1"));
  CHECK(!contains(text, "attention_forward batch=1"));
}

void level_debug() {
  setenv("FLASHMOE_LOG_LEVEL", "3", 1);
  CHECK(contains(log_of_both_calls("3"), "attention_forward batch=1"));
}

// A wrong value is reported, and the log stays off: a library does not end its host's process.
void level_wrong() { CHECK(log_of_both_calls("loud").empty()); }

void file_wrong() {
  setenv("FLASHMOE_LOG_LEVEL", "1", 1);
  setenv("FLASHMOE_LOG_FILE", "/no/such/directory/log.txt", 1);
  fail_once();
}

}  // namespace

int main(int argc, char** argv) {
  const std::string name = argc == 2 ? argv[1] : "";
  const struct {
    const char* name;
    void (*run)();
  } cases[] = {
      {"callback", callback},
      {"workspace_is_asked_for", workspace_is_asked_for},
      {"callback_reenters", callback_reenters},
      {"level_off", level_off},
      {"level_error", level_error},
      {"level_debug", level_debug},
      {"level_wrong", level_wrong},
      {"file_wrong", file_wrong},
      {"file_with_pid", file_with_pid},
      {"fork_shared_file", fork_shared_file},
      {"fork_file_with_pid", fork_file_with_pid},
  };
  for (const auto& c : cases) {
    if (name == c.name) return c.run(), 0;
  }
  std::fprintf(stderr, "usage: test_log CASE\n");
  return 2;
}
