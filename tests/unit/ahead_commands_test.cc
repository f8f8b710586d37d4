/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
// What the library leaves for the plugin that registers its memory ahead of the commit, and what of it it adopts.
#include "../../libmigr/switchover/ahead.h"

#include <errno.h>
#include <gtest/gtest.h>
#include <string.h>

#include <array>
#include <vector>

#include "../../libmigr/kernel_link.h"
#include "../../libmigr/provider/provider.h"

namespace migr {

Registry& Registry::get() {
  static auto* registry = new Registry;
  return *registry;
}

namespace provider {
void prepare_reg_mr(const ibv_context* context, std::uint32_t pd_handle, const void* addr, std::uint64_t length,
                    std::uint64_t iova, int access, migr_ahead_mr& command) {
  command.fd = context->cmd_fd;
  command.in = {reinterpret_cast<std::uintptr_t>(&command.out), reinterpret_cast<std::uintptr_t>(addr), length, iova,
                pd_handle, static_cast<std::uint32_t>(access)};
}
}  // namespace provider

namespace switchover {
namespace {

class AheadCommands : public testing::Test {
 protected:
  AheadCommands() {
    verbs_.cmd_fd = 41;
    context_.real = &verbs_;
    pd_.handle = 6;
    for (unsigned i = 0; i < 3; i++) {
      real_[i].pd = &pd_;
      mrs_[i].real = &real_[i];
      mrs_[i].context = &context_;
      mrs_[i].app.addr = buffer_ + i;
      mrs_[i].app.length = 10 + i;
      mrs_[i].app.lkey = 0x700 + i;
      mrs_[i].iova = 0x10000 + i;
      mrs_[i].access = static_cast<int>(i);
      Registry::get().mrs.add(&mrs_[i]);
    }
    std::vector<migr_fd_desc> fds;
    ahead::describe(instance_, fds);
    EXPECT_EQ(fds.size(), 1u);
    fd_ = fds.at(0);
    header_ = reinterpret_cast<migr_ahead*>(fd_.addr);
  }
  ~AheadCommands() override {
    ahead::forget();
    for (MrShadow& mr : mrs_) Registry::get().mrs.remove(&mr);
  }
  migr_ahead_mr* commands() { return reinterpret_cast<migr_ahead_mr*>(header_->mrs); }

  const std::array<std::uint8_t, 16> instance_{1, 2, 3};
  char buffer_[64];
  ibv_context verbs_{};
  Context context_{};
  ibv_pd pd_{};
  ibv_mr real_[3]{};
  MrShadow mrs_[3]{};
  migr_fd_desc fd_{};
  migr_ahead* header_ = nullptr;
};

TEST_F(AheadCommands, DescribeSaysWhereTheyWillBe) {
  EXPECT_EQ(fd_.kind, static_cast<std::uint32_t>(MIGR_FD_AHEAD));
  EXPECT_EQ(fd_.fd, -1);
  EXPECT_EQ(fd_.bytes, sizeof(migr_ahead));
  EXPECT_EQ(header_->magic, MIGR_AHEAD_MAGIC);
  EXPECT_EQ(header_->version, MIGR_AHEAD_VERSION);
  EXPECT_EQ(header_->mr_bytes, sizeof(migr_ahead_mr));
  EXPECT_EQ(memcmp(header_->instance, instance_.data(), 16), 0);
  EXPECT_EQ(header_->nr_mrs, 0u) << "before FREEZE there is nothing to register";
}

#ifdef __x86_64__
TEST_F(AheadCommands, FreezeLeavesOneForEachMr) {
  ahead::leave();
  ASSERT_EQ(header_->nr_mrs, 3u);
  for (unsigned i = 0; i < 3; i++) {
    const migr_ahead_mr& c = commands()[i];
    EXPECT_EQ(c.fd, 41);
    EXPECT_EQ(c.status, MIGR_AHEAD_OPEN);
    EXPECT_EQ(c.vlkey, 0x700 + i);
    EXPECT_EQ(c.in.start, reinterpret_cast<std::uintptr_t>(buffer_ + i));
    EXPECT_EQ(c.in.length, 10 + i);
    EXPECT_EQ(c.in.hca_va, 0x10000 + i);
    EXPECT_EQ(c.in.pd_handle, 6u);
    EXPECT_EQ(c.in.access_flags, i);
    EXPECT_EQ(c.in.response, reinterpret_cast<std::uintptr_t>(&c.out)) << "it points to where it was laid out";
  }
}

TEST_F(AheadCommands, OnlyWhatWasRegisteredIsAdopted) {
  ahead::leave();
  EXPECT_EQ(ahead::done(0, mrs_[0]), nullptr) << "nobody has tried";
  commands()[0].status = 0;
  commands()[0].out = {1, 2, 3};
  commands()[1].status = -ENOMEM;
  ASSERT_NE(ahead::done(0, mrs_[0]), nullptr);
  EXPECT_EQ(ahead::done(0, mrs_[0])->out.rkey, 3u);
  EXPECT_EQ(ahead::done(1, mrs_[1]), nullptr);
  EXPECT_EQ(ahead::done(2, mrs_[2]), nullptr);
  EXPECT_EQ(ahead::done(0, mrs_[1]), nullptr) << "it is another MR's";
  EXPECT_EQ(ahead::done(3, mrs_[2]), nullptr);
}

TEST_F(AheadCommands, AfterARollbackNothingIsLeft) {
  ahead::leave();
  commands()[0].status = 0;
  ahead::forget();
  EXPECT_EQ(header_->nr_mrs, 0u);
  EXPECT_EQ(ahead::done(0, mrs_[0]), nullptr);
}

TEST_F(AheadCommands, ASecondFreezeBeginsAnew) {
  ahead::leave();
  commands()[0].status = 0;
  ahead::leave();
  EXPECT_EQ(header_->nr_mrs, 3u);
  EXPECT_EQ(commands()[0].status, MIGR_AHEAD_OPEN);
}
#endif

}  // namespace
}  // namespace switchover
}  // namespace migr
