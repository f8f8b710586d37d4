// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "processor.h"

#include <algorithm>
#include <fstream>
#include <iterator>
#include <sstream>

namespace migr {
namespace {

// x86: /proc/cpuinfo has much beside these that depends on the kernel, or is the kernel's alone.
constexpr const char* kOfPrograms[] = {
    "3dnow", "3dnowext", "3dnowprefetch", "abm", "adx", "aes", "amx_bf16", "amx_complex", "amx_fp16", "amx_int8", "amx_tile", "avx", "avx10", "avx2",
    "avx512_4fmaps", "avx512_4vnniw", "avx512_bf16", "avx512_bitalg", "avx512_fp16", "avx512_vbmi2", "avx512_vnni", "avx512_vp2intersect",
    "avx512_vpopcntdq", "avx512bw", "avx512cd", "avx512dq", "avx512er", "avx512f", "avx512ifma", "avx512pf", "avx512vbmi", "avx512vl", "avx_ifma",
    "avx_ne_convert", "avx_vnni", "avx_vnni_int16", "avx_vnni_int8", "bmi1", "bmi2", "cldemote", "clflush", "clflushopt", "clwb", "clzero", "cmov",
    "cmpccxadd", "cx16", "cx8", "enqcmd", "f16c", "fma", "fma4", "fsgsbase", "fxsr", "gfni", "hle", "lahf_lm", "misalignsse", "mmx", "mmxext", "movbe",
    "movdir64b", "movdiri", "mwaitx", "ospke", "pclmulqdq", "pni", "popcnt", "prefetchi", "ptwrite", "rdpid", "rdrand", "rdseed", "rdtscp", "rtm",
    "serialize", "sha512", "sha_ni", "sm3", "sm4", "sse", "sse2", "sse4_1", "sse4_2", "sse4a", "ssse3", "syscall", "tbm", "tsxldtrk", "user_shstk", "vaes",
    "vpclmulqdq", "waitpkg", "xop", "xgetbv1", "xsave", "xsavec", "xsaveopt"};

bool is_of_programs(const std::string& flag) {
  return std::any_of(std::begin(kOfPrograms), std::end(kOfPrograms), [&](const char* known) { return flag == known; });
}

}  // namespace

std::vector<std::string> instructions_here(const std::string& cpuinfo) {
  std::ifstream in(cpuinfo);
  std::vector<std::string> found;
  for (std::string line; found.empty() && std::getline(in, line);) {
    const auto colon = line.find(':');
    const std::string key = line.substr(0, line.find_first_of("\t :"));
    if (colon == line.npos || (key != "flags" && key != "Features")) continue;  // Features: of arm64, all of them are for programs
    std::istringstream flags(line.substr(colon + 1));
    std::copy_if(std::istream_iterator<std::string>(flags), {}, std::back_inserter(found), [&](const auto& f) { return key == "Features" || is_of_programs(f); });
  }
  std::sort(found.begin(), found.end());
  return found;
}

Status instructions_fit(const google::protobuf::RepeatedPtrField<std::string>& needed, const std::string& cpuinfo) {
  if (needed.empty()) return {};
  const auto here = instructions_here(cpuinfo);
  std::string lacks;
  for (const auto& n : needed)
    if (!std::binary_search(here.begin(), here.end(), n)) lacks += (lacks.empty() ? "" : " ") + n;
  if (lacks.empty()) return {};
  return Error{EBUSY, "its processor lacks what programs may have found where they run now: " + lacks +
                          "; one that uses it would be ended by SIGILL (migrd.json: \"processor\": \"any\", if none does)"};
}

}  // namespace migr
