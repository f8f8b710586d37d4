// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "born.h"

#include <algorithm>
#include <fstream>
#include <iterator>
#include <mutex>
#include <nlohmann/json.hpp>

#include "file_tree.h"
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

// Tells migr.ko of each of them, by reserve_qpn or release_qpn.
Status tell_kernel(const std::vector<std::uint32_t>& vqpns, Status (KernelRecord::*call)(std::uint32_t)) {
  if (vqpns.empty()) return {};
  auto k = KernelRecord::open();
  if (!k) return k.error();
  for (const auto v : vqpns)
    if (auto s = ((*k).*call)(v); !s) return s;
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
  if (auto s = write_whole(path_of(config), book.text()); !s) return s;
  return tell_kernel(born, &KernelRecord::reserve_qpn);
}

Status release_born(const Config& config, const std::vector<Instance>& who, const std::vector<std::uint32_t>& vqpns) {
  std::lock_guard lock(book_mutex);
  BornBook book = read_book(config);
  const auto back = book.arrive(who, vqpns);
  if (auto s = write_whole(path_of(config), book.text()); !s) return s;
  return tell_kernel(back, &KernelRecord::release_qpn);
}

}  // namespace migr
