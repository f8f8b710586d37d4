// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "process.h"

#include <fcntl.h>
#include <linux/nsfs.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>

#include "file_tree.h"
#include "mappings.h"

namespace migr {
namespace {

namespace fs = std::filesystem;

struct Stat {
  char state = 0;  // as in proc(5); 0: it has ended
  pid_t parent = 0;
  std::string began;  // clock ticks since the boot
};

Stat stat_of(pid_t pid) {
  const std::string line = first_line_of("/proc/" + std::to_string(pid) + "/stat");
  Stat s;
  // The name is in brackets and may hold anything.
  if (const auto end = line.rfind(')'); end != std::string::npos) {
    constexpr int kBetween = 17;  // fields
    std::istringstream fields(line.substr(end + 1));
    fields >> s.state >> s.parent;
    for (int i = 0; i < kBetween; i++) fields >> s.began;
    fields >> s.began;
  }
  return s;
}

// Of hugetlbfs. No filesystem is asked, for one of the process's may never answer; nor are its page tables, which may be large.
std::set<std::pair<unsigned, unsigned>> huge_devices(pid_t pid) {
  std::set<std::pair<unsigned, unsigned>> all;
  std::error_code ec;
  // Of each size there is one that is nowhere mounted, for MAP_HUGETLB, shmget() and memfds.
  for (const auto& size : fs::directory_iterator("/sys/kernel/mm/hugepages", ec)) {
    unsigned long kb = 0;
    if (std::sscanf(size.path().filename().c_str(), "hugepages-%lukB", &kb) != 1 || !kb) continue;
    const int fd = memfd_create("", MFD_CLOEXEC | MFD_HUGETLB | static_cast<unsigned>(std::countr_zero(kb << 10)) << MAP_HUGE_SHIFT);
    struct stat st;
    if (fd >= 0 && !fstat(fd, &st)) all.emplace(major(st.st_dev), minor(st.st_dev));
    if (fd >= 0) close(fd);
  }
  std::ifstream mounts("/proc/" + std::to_string(pid) + "/mountinfo");
  for (std::string line; std::getline(mounts, line);) {
    std::pair<unsigned, unsigned> device;
    if (line.find(" - hugetlbfs ") != std::string::npos && std::sscanf(line.c_str(), "%*d %*d %u:%u", &device.first, &device.second) == 2) all.insert(device);
  }
  return all;
}

// What it has touched: of whatever is mounted elsewhere, too.
std::uint64_t hugetlb_kb(pid_t pid) {
  std::uint64_t kb = 0;
  std::ifstream status("/proc/" + std::to_string(pid) + "/status");
  for (std::string line; std::getline(status, line);)
    if (std::sscanf(line.c_str(), "HugetlbPages: %lu kB", &kb) == 1) break;
  return kb;
}

}  // namespace

bool process_lives(pid_t pid) {
  const char state = stat_of(pid).state;
  return state && state != 'Z' && state != 'X';
}

bool process_stopped(pid_t pid) { return stat_of(pid).state == 'T'; }

std::vector<pid_t> processes_told(std::initializer_list<std::string_view> verbs, const std::string& text) {
  std::vector<pid_t> found;
  std::error_code ec;
  // Root of a container is root in /proc, and may call itself as it likes.
  const auto in_our_namespace = [](pid_t pid) {
    const auto container = container_namespace_of(pid);
    return container && !*container;
  };
  for (const auto& p : fs::directory_iterator("/proc", ec)) {
    const pid_t pid = std::atoi(p.path().filename().c_str());
    struct stat st {};
    if (pid <= 0 || pid == getpid() || stat(p.path().c_str(), &st) || st.st_uid != geteuid()) continue;
    const std::string line = text_of(p.path() / "cmdline");  // with a NUL behind each argument
    const auto told = [&](std::string_view verb) { return line.find('\0' + std::string(verb) + '\0') != std::string::npos; };
    if (line.find(text) != std::string::npos && std::any_of(verbs.begin(), verbs.end(), told) && process_lives(pid) && in_our_namespace(pid)) found.push_back(pid);
  }
  return found;
}

bool works_in(pid_t pid, const std::string& folder) {
  std::error_code ec;
  const std::string real = fs::weakly_canonical(folder, ec);  // as the kernel calls it
  return !real.empty() && (fs::read_symlink("/proc/" + std::to_string(pid) + "/cwd", ec).string() + "/").starts_with(real + "/");
}

std::string life_of(pid_t pid) {
  const std::string began = stat_of(pid).began;
  return began.empty() ? "" : boot_of_host() + " " + began;
}

Result<std::uint64_t> container_namespace_of(pid_t pid) {
  struct stat ours = {}, at = {};
  if (stat("/proc/self/ns/pid", &ours)) return 0;  // a kernel without
  const std::string path = "/proc/" + std::to_string(pid) + "/ns/pid";
  int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  std::uint64_t outermost = 0;
  while (fd >= 0 && !fstat(fd, &at) && at.st_ino != ours.st_ino) {
    outermost = at.st_ino;
    const int parent = ioctl(fd, NS_GET_PARENT);
    close(fd);
    fd = parent;
  }
  if (fd < 0) return sys_error(path);
  close(fd);
  return outermost;
}

std::vector<pid_t> numbers_in_namespaces(pid_t pid) {
  std::ifstream status("/proc/" + std::to_string(pid) + "/status");
  std::vector<pid_t> out;
  for (std::string line; out.empty() && std::getline(status, line);)
    if (line.starts_with("NSpid:")) {
      std::istringstream numbers(line.substr(line.find(':') + 1));
      for (pid_t n; numbers >> n;) out.push_back(n);
    }
  return out;
}

std::string boot_of_host() { return first_line_of("/proc/sys/kernel/random/boot_id"); }

std::vector<pid_t> tree_of(pid_t root) {
  std::multimap<pid_t, pid_t> children;
  std::error_code ec;
  for (const auto& p : fs::directory_iterator("/proc", ec))
    if (const pid_t pid = std::atoi(p.path().filename().c_str()); pid > 0) children.emplace(stat_of(pid).parent, pid);
  std::vector<pid_t> all;
  if (stat_of(root).state) all.push_back(root);
  for (std::size_t i = 0; i < all.size(); i++)
    for (auto [c, end] = children.equal_range(all[i]); c != end; c++) all.push_back(c->second);
  return all;
}

bool descends(pid_t pid, pid_t ancestor) {
  for (pid_t p = pid; p != ancestor; p = stat_of(p).parent)
    if (p <= 1) return !stat_of(pid).state;
  return true;
}

bool has_huge_pages(pid_t pid) {
  const auto huge = huge_devices(pid);
  bool found = hugetlb_kb(pid) > 0;
  if (!found) each_mapping(pid, [&](const Mapping& m) { return found = huge.contains({m.major, m.minor}); });
  return found;
}

void each_descriptor(pid_t pid, const std::function<void(int fd, const std::string& to)>& f) {
  std::error_code ec, ended;
  for (fs::directory_iterator fd("/proc/" + std::to_string(pid) + "/fd", ended), end; !ended && fd != end; fd.increment(ended)) {
    const std::string to = fs::read_symlink(fd->path(), ec);
    if (!ec) f(std::atoi(fd->path().filename().c_str()), to);
  }
}

std::optional<int> semaphore_of(pid_t pid) {
  std::optional<int> found;
  each_descriptor(pid, [&](int fd, const std::string& to) {
    if (found || to != "anon_inode:[eventfd]") return;
    std::ifstream info("/proc/" + std::to_string(pid) + "/fdinfo/" + std::to_string(fd));
    for (std::string line; std::getline(info, line);)
      if (int is = 0; std::sscanf(line.c_str(), "eventfd-semaphore: %d", &is) == 1 && is) found = fd;
  });
  return found;
}

std::string name_of(pid_t pid) { return first_line_of("/proc/" + std::to_string(pid) + "/comm"); }

std::vector<pid_t> numbers_of(pid_t pid) {
  std::vector<pid_t> out;
  std::error_code ec;
  for (const pid_t p : tree_of(pid))
    for (const auto& task : fs::directory_iterator("/proc/" + std::to_string(p) + "/task", ec)) out.push_back(std::atoi(task.path().filename().c_str()));
  return out;
}

bool number_taken(pid_t number) { return !access(("/proc/" + std::to_string(number)).c_str(), F_OK); }

std::optional<pid_t> counter_past(const std::vector<pid_t>& numbers, pid_t last, pid_t max) {
  const pid_t soon = max / 4, before = last;
  for (std::size_t i = 0; i < numbers.size(); i++) {
    pid_t farthest = 0;
    for (const pid_t n : numbers)
      if (const pid_t ahead = n > last ? n - last : n - last + max; ahead < soon) farthest = std::max(farthest, ahead);
    if (!farthest) break;
    last = (last + farthest) % max;
  }
  return last == before ? std::nullopt : std::optional(last);
}

Status pass_over(const std::vector<pid_t>& numbers) {
  constexpr char kLast[] = "/proc/sys/kernel/ns_last_pid";
  const auto to = counter_past(numbers, std::atoi(first_line_of(kLast).c_str()), std::atoi(first_line_of("/proc/sys/kernel/pid_max").c_str()));
  if (!to) return {};
  std::ofstream out(kLast);
  out << *to << std::flush;
  return out ? Status() : Status(sys_error(std::string("writing ") + kLast));
}

}  // namespace migr
