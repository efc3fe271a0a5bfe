// What control groups and OpenMP's environment say of the processors that a process may use: on
// made-up systems, in a folder of the test's own.
#include "cpu/processors.h"

#include <stdio.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <string>
#include <tuple>
#include <utility>

#include "check.h"
#include "flashmoe/flashmoe.h"

namespace flashmoe::cpu {
namespace {

// Files by their paths.
class System {
 public:
  System(std::initializer_list<std::pair<const char*, const char*>> files) {
    char name[] = "/tmp/flashmoe-processors-XXXXXX";
    CHECK(mkdtemp(name) != nullptr);
    root_ = name;
    for (const auto& [path, text] : files) {
      const std::string file = root_ + path;
      std::filesystem::create_directories(std::filesystem::path(file).parent_path());
      std::ofstream(file) << text;
    }
  }
  ~System() { std::filesystem::remove_all(root_); }
  System(const System&) = delete;
  System& operator=(const System&) = delete;

  int32_t quota() const { return cgroup_quota(root_.c_str()); }

  // "0 2 3", or "none".
  std::string processors() const {
    cpu_set_t set;
    if (!cgroup_processors(root_.c_str(), &set)) return "none";
    std::string text;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (CPU_ISSET(cpu, &set)) text += (text.empty() ? "" : " ") + std::to_string(cpu);
    }
    return text;
  }

 private:
  std::string root_;
};

constexpr char kGroup[] = "/proc/self/cgroup";
constexpr char kMounts[] = "/proc/self/mountinfo";
constexpr char kTwo[] =
    "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
    "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";

int32_t quota_of(const char* text) {
  return System({{kGroup, "0::/a\n"}, {kMounts, kTwo}, {"/sys/fs/cgroup/a/cpu.max", text}}).quota();
}

void a_quota_is_rounded_up() {
  CHECK(quota_of("200000 100000\n") == 2);
  CHECK(quota_of("200001 100000\n") == 3);
  CHECK(quota_of("150000 100000\n") == 2);
  CHECK(quota_of("50000 100000\n") == 1);
  CHECK(quota_of("1000 1000000\n") == 1);
  CHECK(quota_of("800000 50000\n") == 16);
  CHECK(quota_of("9223372036854775807 1\n") == kNoQuota);
}

void what_is_no_quota_limits_nothing() {
  for (const char* text :
       {"max 100000\n", "", "\n", "100000", "x 100000", "0 100000", "-1 100000", "5 0"})
    CHECK(quota_of(text) == kNoQuota);
  CHECK(System({}).quota() == kNoQuota);
  CHECK(System({{kGroup, "0::/a\n"}}).quota() == kNoQuota);
  CHECK(System({{kMounts, kTwo}, {"/sys/fs/cgroup/cpu.max", "100000 100000"}}).quota() == kNoQuota);
  CHECK(System({{kGroup, "junk\n\n0:\n"}, {kMounts, "junk\n\n1 2 3 4 5 6 -\n"}}).quota() ==
        kNoQuota);
}

void the_tightest_of_nested_groups_counts() {
  for (const auto& [outer, middle, inner] :
       {std::tuple("300000 100000", "max 100000", "800000 100000"),
        std::tuple("max 100000", "300000 100000", "max 100000"),
        std::tuple("400000 100000", "700000 100000", "300000 100000")}) {
    const System system({{kGroup, "0::/a.slice/b/c\n"},
                         {kMounts, kTwo},
                         {"/sys/fs/cgroup/a.slice/cpu.max", outer},
                         {"/sys/fs/cgroup/a.slice/b/cpu.max", middle},
                         {"/sys/fs/cgroup/a.slice/b/c/cpu.max", inner},
                         {"/sys/fs/cgroup/a.slice/other/cpu.max", "100000 100000"},
                         {"/sys/fs/cpu.max", "100000 100000"}});
    CHECK(system.quota() == 3);
  }
  // A group without the controller has no such file.
  CHECK(System(
            {{kGroup, "0::/a/b\n"}, {kMounts, kTwo}, {"/sys/fs/cgroup/a/cpu.max", "100000 100000"}})
            .quota() == 1);
  CHECK(System({{kGroup, "0::/\n"}, {kMounts, kTwo}, {"/sys/fs/cgroup/cpu.max", "500000 100000"}})
            .quota() == 5);
}

void version_one_has_files_and_hierarchies_of_its_own() {
  const char* const mounts =
      "31 23 0:28 / /sys/fs/cgroup ro - tmpfs tmpfs ro,mode=755\n"
      "33 31 0:30 / /sys/fs/cgroup/cpuset rw shared:9 - cgroup cgroup rw,cpuset\n"
      "34 31 0:31 / /sys/fs/cgroup/cpu,cpuacct rw shared:10 - cgroup cgroup rw,cpuacct,cpu\n";
  const char* const group = "4:cpuset:/x\n3:cpuacct,cpu:/a/b\n1:name=systemd:/init.scope\n";
  const System system({{kGroup, group},
                       {kMounts, mounts},
                       {"/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n"},
                       {"/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n"},
                       {"/sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us", "250000\n"},
                       {"/sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us", "100000\n"},
                       {"/sys/fs/cgroup/cpu,cpuacct/a/b/cpu.cfs_quota_us", "-1\n"},
                       {"/sys/fs/cgroup/cpu,cpuacct/a/b/cpu.cfs_period_us", "50000\n"},
                       {"/sys/fs/cgroup/cpuset/x/cpu.cfs_quota_us", "1000\n"},
                       {"/sys/fs/cgroup/cpuset/x/cpu.cfs_period_us", "1000\n"},
                       {"/sys/fs/cgroup/cpuset/x/cpuset.cpus", "0-3,8,10-11\n"}});
  CHECK(system.quota() == 3);
  CHECK(system.processors() == "0 1 2 3 8 10 11");
}

// The second version beside the first, with or without controllers of its own.
void hybrid_hierarchies_are_both_read() {
  const char* const mounts =
      "34 31 0:31 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
      "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
  const char* const group = "3:cpu:/a\n0::/u\n";
  for (const auto& [one, two, want] :
       {std::tuple("400000", "max 100000", 4), std::tuple("-1", "200000 100000", 2),
        std::tuple("400000", "200000 100000", 2)}) {
    const System system({{kGroup, group},
                         {kMounts, mounts},
                         {"/sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", one},
                         {"/sys/fs/cgroup/cpu/a/cpu.cfs_period_us", "100000"},
                         {"/sys/fs/cgroup/unified/u/cpu.max", two}});
    CHECK(system.quota() == want);
  }
}

void mount_points_are_unescaped() {
  const System system({{kGroup, "0::/a b\\c\n"},
                       {kMounts, "30 23 0:26 / /my\\040control\\134groups rw - cgroup2 none rw\n"},
                       {"/my control\\groups/a b\\c/cpu.max", "100000 100000\n"}});
  CHECK(system.quota() == 1);
}

std::string mount_of(const char* root) {
  return "30 23 0:26 " + std::string(root) + " /cg rw shared:4 master:2 - cgroup2 cgroup rw\n";
}

int32_t quota_at(const char* root, const char* group, const char* folder) {
  return System({{kGroup, ("0::" + std::string(group) + "\n").c_str()},
                 {kMounts, mount_of(root).c_str()},
                 {("/cg" + std::string(folder) + "/cpu.max").c_str(), "100000 100000"}})
      .quota();
}

// What is mounted need not be the hierarchy's root, nor the namespace's.
void a_group_is_found_below_what_is_mounted() {
  CHECK(quota_at("/docker/abc", "/docker/abc", "") == 1);
  CHECK(quota_at("/docker/abc", "/docker/abc/x", "/x") == 1);
  CHECK(quota_at("/docker/abc", "/docker/abcd", "d") == kNoQuota);
  CHECK(quota_at("/docker/abc", "/elsewhere", "") == kNoQuota);
  CHECK(quota_at("/a\\040b", "/a b/x", "/x") == 1);
  // The namespace's root lies two groups below the mounted one, by names that are not told.
  CHECK(quota_at("/../..", "/", "") == 1);
  CHECK(quota_at("/../..", "/x", "") == 1);
  CHECK(quota_at("/../..", "/../../x", "/x") == 1);
  CHECK(quota_at("/../../x", "/../../x/y", "/y") == 1);
  CHECK(quota_at("/../../x", "/", "") == kNoQuota);
  CHECK(quota_at("/..", "/../x", "/x") == 1);
  // The process has been moved out of the namespace.
  CHECK(quota_at("/", "/../x", "") == kNoQuota);
  CHECK(quota_at("/..", "/../../x", "") == kNoQuota);
  // No group goes upwards by a name of its own.
  CHECK(quota_at("/", "/..x", "/..x") == 1);
}

void the_innermost_group_tells_its_processors() {
  const System system({{kGroup, "0::/a/b\n"},
                       {kMounts, kTwo},
                       {"/sys/fs/cgroup/cpuset.cpus.effective", "0-7\n"},
                       {"/sys/fs/cgroup/a/cpuset.cpus.effective", "2,4-5\n"},
                       {"/sys/fs/cgroup/a/cpuset.cpus", "1\n"}});
  CHECK(system.processors() == "2 4 5");
  CHECK(System({{kGroup, "0::/a\n"}, {kMounts, kTwo}}).processors() == "none");
  CHECK(
      System(
          {{kGroup, "0::/a\n"}, {kMounts, kTwo}, {"/sys/fs/cgroup/a/cpuset.cpus.effective", "\n"}})
          .processors() == "none");
}

void openmp_binds_as_its_environment_says() {
  for (const char* text : {"true", "TRUE", " True ", "primary", "master", "close", "spread",
                           "Spread,close", " spread , close,primary\t", "MASTER,master"}) {
    CHECK(openmp_binds(text, nullptr) && openmp_binds(text, "cores"));
  }
  for (const char* text : {"false", "FALSE", "  False\t"}) {
    CHECK(!openmp_binds(text, nullptr) && !openmp_binds(text, "cores"));
  }
  // Those that OpenMP ignores too.
  for (const char* text : {"", " ", "yes", "1", "closer", "close,", ",close", "close,true",
                           "true,close", "false,false", "close spread"}) {
    CHECK(!openmp_binds(text, nullptr) && !openmp_binds(text, "") && openmp_binds(text, "cores"));
  }
  CHECK(!openmp_binds(nullptr, nullptr) && !openmp_binds(nullptr, "") &&
        openmp_binds(nullptr, "{0:4}"));
}

}  // namespace
}  // namespace flashmoe::cpu

int main() {
  using namespace flashmoe::cpu;
  a_quota_is_rounded_up();
  what_is_no_quota_limits_nothing();
  the_tightest_of_nested_groups_counts();
  version_one_has_files_and_hierarchies_of_its_own();
  hybrid_hierarchies_are_both_read();
  mount_points_are_unescaped();
  a_group_is_found_below_what_is_mounted();
  the_innermost_group_tells_its_processors();
  openmp_binds_as_its_environment_says();
  return 0;
}
