// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// In the place of libFuzzer: the seeds of a target, each once.
#include <cstdint>
#include <string>
#include <vector>

std::vector<std::string> seeds();  // seeds.h
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

int main() {
  const auto all = seeds();
  for (const std::string& s : all) LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(s.data()), s.size());
  return all.empty();
}
