// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "born.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <mutex>
#include <nlohmann/json.hpp>

#include "kernel_record.h"

namespace migr {
namespace {

using Json = nlohmann::json;

std::mutex book_mutex;

std::string path_of(const Config& config) { return config.state_dir + "/born.json"; }

BornBook read_book(const Config& config) {
  std::ifstream in(path_of(config));
  return BornBook({std::istreambuf_iterator<char>(in), {}});
}

// Whole or not there, and on the disk.
Status write_book(const Config& config, const BornBook& book) {
  const std::string path = path_of(config), tmp = path + ".new", text = book.text();
  FILE* f = std::fopen(tmp.c_str(), "we");
  if (!f) return sys_error("writing " + tmp);
  const bool ok = std::fwrite(text.data(), 1, text.size(), f) == text.size() && !std::fflush(f) && !fsync(fileno(f));
  const int err = errno;
  std::fclose(f);
  if (!ok || std::rename(tmp.c_str(), path.c_str())) return sys_error("writing " + path, ok ? errno : err);
  return {};
}

}  // namespace

BornBook::BornBook(const std::string& text) {
  const Json j = Json::parse(text, nullptr, false);
  if (!j.is_object()) return;
  for (const auto& [who, e] : j.items()) {
    if (!e.is_object()) continue;
    try {
      all_[who] = {e.value("born", std::set<std::uint32_t>()), e.value("foreign", std::set<std::uint32_t>()), e.value("away", false)};
    } catch (const Json::exception&) {
      all_.erase(who);
    }
  }
}

std::string BornBook::text() const {
  Json j = Json::object();
  for (const auto& [who, e] : all_) j[who] = {{"born", e.born}, {"foreign", e.foreign}, {"away", e.away}};
  return j.dump(1);
}

std::vector<std::uint32_t> BornBook::leave(const std::vector<Instance>& who, const std::vector<std::uint32_t>& vqpns, bool first_life) {
  std::set<std::uint32_t> out;
  for (const auto& i : who) {
    Entry& e = all_[hex(i)];
    std::set<std::uint32_t> born;
    for (const auto v : vqpns)
      if (first_life || e.born.contains(v) || !e.foreign.contains(v)) born.insert(v);
    e = {born, {}, true};
    out.insert(born.begin(), born.end());
    if (born.empty()) all_.erase(hex(i));
  }
  return {out.begin(), out.end()};
}

std::vector<std::uint32_t> BornBook::arrive(const std::vector<Instance>& who, const std::vector<std::uint32_t>& vqpns) {
  std::set<std::uint32_t> out;
  for (const auto& i : who) {
    Entry& e = all_[hex(i)];
    if (e.away) out.insert(e.born.begin(), e.born.end());
    e.away = false;
    e.foreign.clear();
    for (const auto v : vqpns)
      if (!e.born.contains(v)) e.foreign.insert(v);
  }
  for (const auto& [id, e] : all_)
    if (e.away)
      for (const auto v : e.born) out.erase(v);
  return {out.begin(), out.end()};
}

Status reserve_born(const Config& config, const std::vector<Instance>& who, const std::vector<std::uint32_t>& vqpns, bool first_life) {
  std::lock_guard lock(book_mutex);
  BornBook book = read_book(config);
  const auto born = book.leave(who, vqpns, first_life);
  if (auto s = write_book(config, book); !s || born.empty()) return s;
  auto k = KernelRecord::open();
  if (!k) return k.error();
  for (const auto v : born)
    if (auto s = k->reserve_qpn(v); !s) return s;
  return {};
}

Status release_born(const Config& config, const std::vector<Instance>& who, const std::vector<std::uint32_t>& vqpns) {
  std::lock_guard lock(book_mutex);
  BornBook book = read_book(config);
  const auto back = book.arrive(who, vqpns);
  if (auto s = write_book(config, book); !s || back.empty()) return s;
  auto k = KernelRecord::open();
  if (!k) return k.error();
  for (const auto v : back)
    if (auto s = k->release_qpn(v); !s) return s;
  return {};
}

}  // namespace migr
