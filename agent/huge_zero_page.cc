// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "huge_zero_page.h"

#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <filesystem>
#include <utility>

#include "fd.h"
#include "file_tree.h"
#include "process.h"

namespace migr {
namespace {

namespace fs = std::filesystem;

Status set_switch(const std::string& path, char to) {
  const Fd fd(open(path.c_str(), O_WRONLY | O_TRUNC | O_CLOEXEC));
  return fd.n >= 0 && write(fd.n, &to, 1) == 1 ? Status() : Status(sys_error(std::string("writing ") + to + " to " + path));
}

// Memory of no size may be huge by itself: "always madvise [never]".
bool huge_pages_are_off(const std::string& folder) {
  const auto off = [](const std::string& path) {
    const std::string said = first_line_of(path);
    return said.find("[never]") != said.npos || said.find("[inherit]") != said.npos;
  };
  std::error_code ec;
  for (const auto& size : fs::directory_iterator(folder, ec))
    if (size.path().filename().string().starts_with("hugepages-") && fs::exists(size.path() / "enabled") && !off(size.path() / "enabled")) return false;
  return off(folder + "/enabled");
}

}  // namespace

HugeZeroPage::HugeZeroPage(std::string note, std::string folder) : note_(std::move(note)), folder_(std::move(folder)), switch_(folder_ + "/use_zero_page") {
  const std::string boot = first_line_of(note_);
  if (boot == boot_of_host()) allow();
  else if (!boot.empty()) unlink(note_.c_str());
}

Result<std::shared_ptr<void>> HugeZeroPage::keep_out() {
  std::lock_guard lock(mutex_);
  if (!users_)
    if (auto s = forbid(); !s) return s.error();
  users_++;
  return std::shared_ptr<void>(this, [](void* of) {
    auto& self = *static_cast<HugeZeroPage*>(of);
    std::lock_guard lock(self.mutex_);
    if (!--self.users_ && std::exchange(self.changed_, false)) self.allow();
  });
}

Status HugeZeroPage::forbid() {
  std::error_code ec;
  if (!fs::exists(folder_, ec) || first_line_of(switch_) == "0") return {};
  // Before it is done: a migrd that dies takes it back when it is started again.
  if (auto s = write_whole(note_, boot_of_host() + "\n"); !s) return s;
  const Status s = set_switch(switch_, '0');
  changed_ = bool(s);
  if (s) return {};
  unlink(note_.c_str());
  return huge_pages_are_off(folder_) ? Status() : Error{s.error().code, "a huge page of zeros could be taken for older data: " + s.error().text};
}

void HugeZeroPage::allow() {
  if (auto s = set_switch(switch_, '1'); !s) return spdlog::error("{}", s.error().text);
  unlink(note_.c_str());
}

}  // namespace migr
