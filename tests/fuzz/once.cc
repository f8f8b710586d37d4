// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// In the place of libFuzzer: the seeds of a target, each once, and cut short.
#include <stdlib.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

std::vector<std::string> seeds();  // seeds.h
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

constexpr std::size_t kCuts = 32;

/// In memory of its own, whose end is the input's.
void once(const std::string& seed, std::size_t size) {
  const std::vector<std::uint8_t> input(seed.begin(), seed.begin() + static_cast<std::ptrdiff_t>(size));
  LLVMFuzzerTestOneInput(input.data(), input.size());
}

}  // namespace

int main() {
  std::string folder = "/dev/shm/seeds.XXXXXX";  // what targets make is in there
  if (!mkdtemp(folder.data()) || setenv("TMPDIR", folder.c_str(), 1)) return 1;
  const auto all = seeds();
  for (const std::string& seed : all) {
    once(seed, seed.size());
    for (std::size_t n = 0; n < kCuts; ++n) once(seed, seed.size() * n / kCuts);
  }
  std::filesystem::remove_all(folder);
  return all.empty();
}
