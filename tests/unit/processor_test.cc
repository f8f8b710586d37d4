// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "agent/processor.h"

#include <gtest/gtest.h>

#include <fstream>

#include "wire.pb.h"

namespace migr::processor_test {
namespace {

class Processor : public ::testing::Test {
 protected:
  ~Processor() override { unlink(path_.c_str()); }
  const std::string& cpuinfo(const std::string& text) {
    std::ofstream(path_) << text;
    return path_;
  }
  static wire::CheckRequest needing(const std::vector<std::string>& all) {
    wire::CheckRequest r;
    for (const auto& i : all) r.add_instructions(i);
    return r;
  }

 private:
  const std::string path_ = ::testing::TempDir() + "processor_test." + std::to_string(getpid());
};

TEST_F(Processor, HasWhatProgramsUse) {
  const auto& path = cpuinfo("processor\t: 0\nvendor_id\t: X\nflags\t\t: fpu vme avx2 rep_good sse2 ibrs\nbugs\t\t: avx512f\n\nprocessor\t: 1\nflags\t\t: sse4_2\n");
  EXPECT_EQ(instructions_here(path), (std::vector<std::string>{"avx2", "sse2"}));
  EXPECT_EQ(instructions_here(cpuinfo("processor\t: 0\nFeatures\t: fp asimd sve\n")), (std::vector<std::string>{"asimd", "fp", "sve"}));
  EXPECT_FALSE(instructions_here().empty()) << "of this machine";
}

TEST_F(Processor, LacksWhatOneHasAndTheOtherHasNot) {
  const auto& path = cpuinfo("flags\t\t: sse2 avx2 sse4_2\n");
  EXPECT_TRUE(instructions_fit(needing({"avx2", "sse2"}).instructions(), path));
  EXPECT_TRUE(instructions_fit(needing({}).instructions(), path)) << "of an older source";
  const auto s = instructions_fit(needing({"avx2", "avx512bw", "avx512f"}).instructions(), path);
  ASSERT_FALSE(s);
  EXPECT_EQ(s.error().code, EBUSY);
  EXPECT_NE(s.error().text.find(": avx512bw avx512f;"), std::string::npos) << s.error().text;
}

}  // namespace
}  // namespace migr::processor_test
