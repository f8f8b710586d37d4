// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What every target has, in its one file: the seeds that it writes when it is started with --seeds FOLDER, and inputs of
// several parts.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <string>
#include <string_view>
#include <vector>

/// Inputs that are taken whole: so mutations begin where parsers end.
std::vector<std::string> seeds();

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  if (*argc != 3 || std::strcmp((*argv)[1], "--seeds") != 0) return 0;
  int n = 0;
  for (const std::string& s : seeds()) std::ofstream(std::string((*argv)[2]) + "/seed-" + std::to_string(n++), std::ios::binary) << s;
  std::exit(n ? 0 : 1);
}

/// What must not be, whatever the input was.
inline void always(bool holds, const char* what) {
  if (holds) return;
  std::cerr << "not so: " << what << "\n";
  std::abort();
}

/// A folder of its own in $TMPDIR, which scripts/fuzz removes: what an input has made of it may be nobody's to remove here.
inline std::string own_folder() {
  const char* const above = getenv("TMPDIR");
  std::string name = std::string(above ? above : "/dev/shm") + "/fuzz.XXXXXX";
  always(mkdtemp(name.data()), "there is room for a folder");
  return name;
}

/// Parts of an input, each with its length in two bytes before it.
inline std::string part(std::string_view text) {
  std::string out{static_cast<char>(text.size() & 0xff), static_cast<char>(text.size() >> 8)};
  return out.append(text);
}
inline std::vector<std::string_view> parts(const std::uint8_t* data, std::size_t size) {
  std::vector<std::string_view> out;
  for (std::string_view left(reinterpret_cast<const char*>(data), size); left.size() >= 2;) {
    const std::size_t n = static_cast<std::uint8_t>(left[0]) | static_cast<std::size_t>(static_cast<std::uint8_t>(left[1])) << 8;
    out.push_back(left.substr(2, n));
    left.remove_prefix(std::min(left.size(), 2 + n));
  }
  return out;
}

/// The bytes of a record.
template <class T>
std::string bytes_of(const T& record) {
  return {reinterpret_cast<const char*>(&record), sizeof record};
}
