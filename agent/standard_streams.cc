// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "standard_streams.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "criu_files.pb.h"
#include "criu_image.h"
#include "file_tree.h"
#include "json.h"
#include "process.h"

namespace migr {
namespace {

constexpr std::uint32_t kFilesMagic = 0x56303138, kDescriptorsMagic = 0x56213732;
constexpr std::uint32_t kRegular = 1, kPipe = 2;  // type of a File

/// Each message, which `change` may change. The image is written anew if it has changed one.
template <class Message, class Change>
Status change_image(const std::string& path, std::uint32_t magic, const Change& change) {
  CriuImage image(path);
  if (!image.is(magic)) return damaged_image(path);
  NewCriuImage changed(magic);
  bool any = false;
  while (!image.at_end()) {
    Message m;
    if (!image.next(m)) return damaged_image(path);
    any = change(m) || any;
    changed.add(m);
  }
  return any ? changed.replace(path) : Status();
}

/// Each pipe that a process has open.
/// @param f  takes pipe:[N], the descriptor, and what it may do with it
template <class F>
void each_pipe(pid_t pid, const F& f) {
  each_descriptor(pid, [&](int fd, const std::string& to) {
    std::error_code ec;
    if (to.starts_with("pipe:[")) f(to, fd, std::filesystem::symlink_status(fmt::format("/proc/{}/fd/{}", pid, fd), ec).permissions());
  });
}

constexpr char kOwnTerminal[] = "/dev/tty";  // of whoever opens it

/// Not what others have hung up, which is "(deleted)", nor the console and virtual ones: CRIU opens the same ones.
bool is_terminal(const std::string& name) {
  unsigned n = 0;
  int end = 0;
  if (std::sscanf(name.c_str(), "/dev/pts/%u%n", &n, &end) == 1) return name.size() == static_cast<std::size_t>(end);
  return name == kOwnTerminal || name.starts_with("/dev/ttyS");
}

/// Of the master of a terminal: what the other end is called. Empty: it has ended.
std::string slave_of(pid_t pid, int fd) {
  std::ifstream info(fmt::format("/proc/{}/fdinfo/{}", pid, fd));
  for (std::string line; std::getline(info, line);)
    if (unsigned n = 0; std::sscanf(line.c_str(), "tty-index: %u", &n) == 1) return fmt::format("/dev/pts/{}", n);
  return {};
}

}  // namespace

bool PipeElsewhere::standard() const { return fd <= STDERR_FILENO; }

std::vector<PipeElsewhere> pipes_elsewhere(const std::vector<pid_t>& pids) {
  using std::filesystem::perms;
  struct Ends {
    bool read = false, written = false;
    PipeElsewhere pipe;
  };
  std::map<std::string, Ends> all;
  for (const pid_t pid : pids)
    each_pipe(pid, [&](const std::string& name, int fd, perms may) {
      auto& e = all[name];
      if (e.pipe.name.empty() || fd < e.pipe.fd) e.pipe = {name, pid, fd, 0};
      e.read = e.read || (may & perms::owner_read) != perms::none;
      e.written = e.written || (may & perms::owner_write) != perms::none;
    });
  std::erase_if(all, [](const auto& e) { return e.second.read && e.second.written; });
  std::vector<PipeElsewhere> out;
  if (all.empty()) return out;
  std::error_code ec;
  for (const auto& p : std::filesystem::directory_iterator("/proc", ec))
    if (const pid_t pid = std::atoi(p.path().filename().c_str()); pid > 0 && std::find(pids.begin(), pids.end(), pid) == pids.end())
      each_pipe(pid, [&](const std::string& name, int, perms) {
        if (const auto e = all.find(name); e != all.end()) e->second.pipe.other = pid;
      });
  for (const auto& [name, e] : all)
    if (e.pipe.other) out.push_back(e.pipe);
  return out;
}

std::optional<TerminalElsewhere> terminal_elsewhere(const std::vector<pid_t>& pids) {
  std::map<std::string, TerminalElsewhere> all;
  std::set<std::string> held;
  for (const pid_t pid : pids)
    each_descriptor(pid, [&](int fd, const std::string& to) {
      if (to.ends_with("/ptmx")) held.insert({slave_of(pid, fd), kOwnTerminal});
      if (is_terminal(to)) all.try_emplace(to, TerminalElsewhere{to, pid, fd});
    });
  const auto t = std::find_if(all.begin(), all.end(), [&](const auto& x) { return !held.contains(x.first); });
  return t == all.end() ? std::nullopt : std::optional(t->second);
}

Status write_streams(const std::vector<pid_t>& pids, const std::string& images) {
  Json streams = Json::array();
  for (const auto& p : pipes_elsewhere(pids)) streams.push_back(p.name);
  return write_whole(images + "/descriptors.json", streams.dump() + "\n");
}

std::vector<std::uint32_t> pipes_in(const std::vector<std::string>& streams) {
  std::vector<std::uint32_t> pipes;
  for (const auto& s : streams)
    if (std::uint32_t n = 0; std::sscanf(s.c_str(), "pipe:[%u]", &n) == 1) pipes.push_back(n);
  return pipes;
}

Status pipes_to_null(const std::string& images) {
  const auto j = Json::parse(text_of(images + "/descriptors.json"), nullptr, false);
  std::vector<std::string> streams;
  for (const auto& s : j.is_array() ? j : Json())
    if (s.is_string()) streams.push_back(s);
  const auto pipes = pipes_in(streams);
  if (pipes.empty()) return {};
  std::set<std::uint32_t> files;
  const auto to_null = [&](criu::File& f) {
    if (f.type() != kPipe || std::find(pipes.begin(), pipes.end(), f.pipe().pipe_id()) == pipes.end()) return false;
    files.insert(f.id());
    f.set_type(kRegular);
    auto& r = *f.mutable_regular();
    r.set_id(f.id());
    r.set_flags(f.pipe().flags() & ~static_cast<std::uint32_t>(O_DIRECT));  // of packets: no device can be opened for them
    r.set_pos(0);
    r.set_owner(f.pipe().owner());
    r.set_name("/dev/null");
    f.clear_pipe();
    return true;
  };
  if (auto s = change_image<criu::File>(images + "/files.img", kFilesMagic, to_null); !s) return s;
  const auto follow = [&](criu::Descriptor& d) {
    if (d.type() != kPipe || !files.contains(d.id())) return false;
    d.set_type(kRegular);
    return true;
  };
  std::error_code ec;
  std::vector<std::string> all;
  for (const auto& f : std::filesystem::directory_iterator(images, ec))
    if (f.path().filename().string().starts_with("fdinfo-")) all.push_back(f.path());
  for (const auto& path : all)
    if (auto s = change_image<criu::Descriptor>(path, kDescriptorsMagic, follow); !s) return s;
  return ec ? Status(Error{ec.value(), "reading " + images + ": " + ec.message()}) : Status();
}

}  // namespace migr
