#include "cpu/processors.h"

#include <algorithm>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#ifdef __linux__

#include <dirent.h>
#include <dlfcn.h>
#include <strings.h>
#include <unistd.h>

namespace flashmoe::cpu {
namespace {

// ---- text

// The lines of a file. Each is valid until the next is read; an unreadable file has none.
class Lines {
 public:
  explicit Lines(const char* path) : file_(std::fopen(path, "re")) {}
  ~Lines() {
    std::free(line_);
    if (file_ != nullptr) std::fclose(file_);
  }
  Lines(const Lines&) = delete;
  Lines& operator=(const Lines&) = delete;

  // The next line without its end; nullptr after the last one.
  char* next() {
    if (file_ == nullptr) return nullptr;
    const ssize_t length = getline(&line_, &room_, file_);
    if (length <= 0) return nullptr;
    if (line_[length - 1] == '\n') line_[length - 1] = '\0';
    return line_;
  }

 private:
  std::FILE* file_;
  char* line_ = nullptr;
  size_t room_ = 0;
};

bool join(char (&path)[PATH_MAX], const char* first, const char* second, const char* third = "") {
  const int length = std::snprintf(path, sizeof path, "%s%s%s", first, second, third);
  return length >= 0 && static_cast<size_t>(length) < sizeof path;
}

// Cuts off the text up to a separator and moves on after it; nullptr when nothing is left.
char* cut(char** text, char separator) {
  char* const first = *text;
  if (first == nullptr) return nullptr;
  char* const end = std::strchr(first, separator);
  if (end != nullptr) *end = '\0';
  *text = end != nullptr ? end + 1 : nullptr;
  return first;
}

// Whether a comma-separated list has a word.
bool has_word(const char* list, const char* word) {
  const size_t length = std::strlen(word);
  for (const char* at = list; at != nullptr; at = std::strchr(at, ',')) {
    if (*at == ',') ++at;
    if (std::strncmp(at, word, length) == 0 && (at[length] == ',' || at[length] == '\0')) {
      return true;
    }
  }
  return false;
}

// Works in place: mountinfo escapes spaces, tabs, ends of lines and backslashes as \040 and the
// like.
void unescape(char* text) {
  const auto digit = [](char c) { return c >= '0' && c <= '7'; };
  char* to = text;
  for (const char* from = text; *from != '\0'; ++to) {
    if (from[0] == '\\' && digit(from[1]) && digit(from[2]) && digit(from[3])) {
      *to = static_cast<char>((from[1] - '0') * 64 + (from[2] - '0') * 8 + (from[3] - '0'));
      from += 4;
    } else {
      *to = *from++;
    }
  }
  *to = '\0';
}

// Reads a list such as "0-3,8"; false if it is empty.
bool read_list(const char* text, cpu_set_t* processors) {
  CPU_ZERO(processors);
  while (*text >= '0' && *text <= '9') {
    char* end = nullptr;
    const long first = std::strtol(text, &end, 10);
    const long last = *end == '-' ? std::strtol(end + 1, &end, 10) : first;
    for (long cpu = first; cpu <= last && cpu < CPU_SETSIZE; ++cpu) CPU_SET(cpu, processors);
    text = *end == ',' ? end + 1 : end;
  }
  return CPU_COUNT(processors) > 0;
}

// ---- control groups

enum class Version { kOne, kTwo };

bool starts_upwards(const char* path) {
  return std::strncmp(path, "/..", 3) == 0 && (path[3] == '/' || path[3] == '\0');
}

// The process's group as a path below the mounted group; nullptr if it is not there. Both are
// relative to the namespace's root, which may lie below the mounted group under unknown names. Then
// the mounted group is the only one that can be found.
const char* path_below(const char* mounted, const char* group) {
  while (starts_upwards(mounted) && starts_upwards(group)) {
    mounted += 3;
    group += 3;
  }
  if (starts_upwards(mounted)) {
    while (starts_upwards(mounted)) mounted += 3;
    return *mounted == '\0' ? mounted : nullptr;
  }
  if (starts_upwards(group)) return nullptr;
  const size_t length = std::strcmp(mounted, "/") == 0 ? 0 : std::strlen(mounted);
  if (std::strncmp(group, mounted, length) != 0) return nullptr;
  const char* const below = group + length;
  if (*below != '/' && *below != '\0') return nullptr;
  return std::strcmp(below, "/") == 0 ? "" : below;
}

// Finds the process's group in the hierarchy with the controller, or in version two.
bool find_group(const char* root, Version version, const char* controller,
                char (&group)[PATH_MAX]) {
  if (!join(group, root, "/proc/self/cgroup")) return false;
  Lines lines(group);
  while (char* line = lines.next()) {
    const char* const id = cut(&line, ':');
    const char* const controllers = cut(&line, ':');
    if (controllers == nullptr || line == nullptr) continue;
    const bool unified = std::strcmp(id, "0") == 0 && *controllers == '\0';
    if (version == Version::kTwo ? unified : has_word(controllers, controller)) {
      return join(group, line, "");
    }
  }
  return false;
}

// Calls visit(folder, version) for the process's groups that have the controller, inner groups
// first, until it returns true.
template <class Visit>
void visit_groups(const char* root, const char* controller, const Visit& visit) {
  char path[PATH_MAX];
  char group[PATH_MAX];
  if (!join(path, root, "/proc/self/mountinfo")) return;
  Lines lines(path);
  while (char* line = lines.next()) {
    // id, parent, device, root, place, options, optional fields, "-", type, source, options of the
    // type
    for (int i = 0; i < 3; ++i) cut(&line, ' ');
    char* const mounted = cut(&line, ' ');
    char* const place = cut(&line, ' ');
    const char* word = place;
    while (word != nullptr && std::strcmp(word, "-") != 0) word = cut(&line, ' ');
    const char* const type = cut(&line, ' ');
    cut(&line, ' ');
    const char* const options = cut(&line, ' ');
    if (options == nullptr) continue;
    const bool two = std::strcmp(type, "cgroup2") == 0;
    if (!two && (std::strcmp(type, "cgroup") != 0 || !has_word(options, controller))) continue;
    const Version version = two ? Version::kTwo : Version::kOne;
    unescape(mounted);
    unescape(place);
    if (!find_group(root, version, controller, group)) continue;
    const char* const below = path_below(mounted, group);
    if (below == nullptr || !join(path, root, place, below)) continue;
    const size_t top = std::strlen(root) + std::strlen(place);
    for (;;) {
      if (visit(path, version)) return;
      char* const end = std::strrchr(path, '/');
      if (end == nullptr || static_cast<size_t>(end - path) < top) break;
      *end = '\0';
    }
  }
}

// Calls read(text) with the first line of a group's file; false without one.
template <class Read>
bool read_file(const char* folder, const char* name, const Read& read) {
  char path[PATH_MAX];
  if (!join(path, folder, name)) return false;
  Lines lines(path);
  const char* const line = lines.next();
  return line != nullptr && read(line);
}

// Microseconds per period; false if the quota is "max" or, in version one, -1.
bool read_quota(const char* folder, Version version, long long* quota, long long* period) {
  if (version == Version::kTwo) {
    return read_file(folder, "/cpu.max", [&](const char* text) {
      return std::sscanf(text, "%lld %lld", quota, period) == 2;
    });
  }
  const auto read_into = [](long long* value) {
    return [value](const char* text) { return std::sscanf(text, "%lld", value) == 1; };
  };
  return read_file(folder, "/cpu.cfs_quota_us", read_into(quota)) &&
         read_file(folder, "/cpu.cfs_period_us", read_into(period));
}

// ---- OpenMP

bool is_word(const char* text, size_t length, const char* word) {
  return std::strlen(word) == length && strncasecmp(text, word, length) == 0;
}

// The processors of all places of the process's OpenMP runtime, if its functions are visible.
bool openmp_places(cpu_set_t* processors) {
  const auto count_places = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "omp_get_num_places"));
  const auto count_in_place =
      reinterpret_cast<int (*)(int)>(dlsym(RTLD_DEFAULT, "omp_get_place_num_procs"));
  const auto read_place =
      reinterpret_cast<void (*)(int, int*)>(dlsym(RTLD_DEFAULT, "omp_get_place_proc_ids"));
  if (count_places == nullptr || count_in_place == nullptr || read_place == nullptr) return false;
  CPU_ZERO(processors);
  const int places = count_places();
  for (int place = 0; place < places; ++place) {
    int ids[CPU_SETSIZE];
    const int count = count_in_place(place);
    if (count < 0 || count > CPU_SETSIZE) return false;
    read_place(place, ids);
    for (int i = 0; i < count; ++i) {
      if (ids[i] >= 0 && ids[i] < CPU_SETSIZE) CPU_SET(ids[i], processors);
    }
  }
  return CPU_COUNT(processors) > 0;
}

void add_processors_of_task(pid_t task, cpu_set_t* processors) {
  cpu_set_t more;
  if (sched_getaffinity(task, sizeof more, &more) == 0) CPU_OR(processors, processors, &more);
}

void add_processors_of_all_tasks(cpu_set_t* processors) {
  DIR* const tasks = opendir("/proc/self/task");
  if (tasks == nullptr) return;
  while (const dirent* entry = readdir(tasks)) {
    const long task = std::strtol(entry->d_name, nullptr, 10);
    if (task > 0) add_processors_of_task(static_cast<pid_t>(task), processors);
  }
  closedir(tasks);
}

// All processors that OpenMP may use if it binds threads: as it reports, else those its threads are
// bound to. Empty if it does not bind.
cpu_set_t processors_of_openmp() {
  cpu_set_t processors;
  CPU_ZERO(&processors);
  if (openmp_binds(std::getenv("OMP_PROC_BIND"), std::getenv("OMP_PLACES")) &&
      !openmp_places(&processors)) {
    add_processors_of_all_tasks(&processors);
  }
  return processors;
}

}  // namespace

bool openmp_binds(const char* proc_bind, const char* places) {
  // Without a valid OMP_PROC_BIND, OpenMP binds only if places are given.
  const bool by_default = places != nullptr && *places != '\0';
  if (proc_bind == nullptr) return by_default;
  bool alone = true;
  for (const char* at = proc_bind;; alone = false) {
    const char* const comma = std::strchr(at, ',');
    const char* end = comma != nullptr ? comma : at + std::strlen(at);
    while (at < end && (*at == ' ' || *at == '\t')) ++at;
    while (at < end && (end[-1] == ' ' || end[-1] == '\t')) --end;
    const auto is = [&](const char* word) {
      return is_word(at, static_cast<size_t>(end - at), word);
    };
    if (alone && comma == nullptr && is("false")) return false;
    if (alone && comma == nullptr && is("true")) return true;
    if (!is("primary") && !is("master") && !is("close") && !is("spread")) return by_default;
    if (comma == nullptr) return true;
    at = comma + 1;
  }
}

int32_t cgroup_quota(const char* root) {
  int64_t least = kNoQuota;
  visit_groups(root, "cpu", [&least](const char* folder, Version version) {
    long long quota = 0;
    long long period = 0;
    if (read_quota(folder, version, &quota, &period) && quota > 0 && period > 0) {
      least = std::min<int64_t>(least, (quota - 1) / period + 1);
    }
    return false;
  });
  return static_cast<int32_t>(least);
}

bool cgroup_processors(const char* root, cpu_set_t* processors) {
  bool found = false;
  visit_groups(root, "cpuset", [&](const char* folder, Version version) {
    const auto read = [processors](const char* text) { return read_list(text, processors); };
    found = version == Version::kTwo ? read_file(folder, "/cpuset.cpus.effective", read)
                                     : read_file(folder, "/cpuset.effective_cpus", read) ||
                                           read_file(folder, "/cpuset.cpus", read);
    return found;
  });
  return found;
}

cpu_set_t processors_of_process() {
  static const cpu_set_t of_openmp = processors_of_openmp();
  cpu_set_t processors = of_openmp;
  // The calling thread may be the only bound one, or the first thread may be.
  add_processors_of_task(0, &processors);
  add_processors_of_task(getpid(), &processors);
  return processors;
}

int32_t count_processors() {
  const cpu_set_t processors = processors_of_process();
  int count = CPU_COUNT(&processors);
  // An emulator of Linux may not have bound threads to their group's processors.
  cpu_set_t group;
  if (cgroup_processors("", &group)) {
    CPU_AND(&group, &group, &processors);
    if (CPU_COUNT(&group) > 0) count = CPU_COUNT(&group);
  }
  if (count == 0) count = static_cast<int>(std::thread::hardware_concurrency());
  return std::max(1, std::min(count, cgroup_quota("")));
}

}  // namespace flashmoe::cpu

#else

namespace flashmoe::cpu {

int32_t count_processors() {
  return std::max(1, static_cast<int32_t>(std::thread::hardware_concurrency()));
}

}  // namespace flashmoe::cpu

#endif
