// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// The judge is judged: each kind of fault that migr_verify is there to find is put into a stream of completions that is
// right otherwise, and must be found, as that kind and no other.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "../programs/verify/check.h"

namespace verify {
namespace {

constexpr std::uint32_t kQp = 3, kQpNum = 0x1234;

Shape shape_of(Mode m) {
  Shape s;
  s.mode = m;
  s.size = 256;
  s.depth = 8;
  s.seed = 42;
  return s;
}

/// A message as it would arrive: the completion, and the bytes of a SEND.
struct Arrival {
  std::uint64_t seq;
  WcOp op;
  std::uint32_t byte_len;
  bool has_imm;
  std::uint32_t imm;
  std::vector<std::uint8_t> payload;
};

class Receiving : public testing::TestWithParam<Mode> {
 protected:
  Receiving() : shape_(shape_of(GetParam())), stream_(shape_, stream_key(shape_.seed, kQp, true)) {}

  /// What the first `total` WRs bring; WRITEs are done to target_ when their mark is delivered.
  std::vector<Arrival> arrivals(std::uint64_t total) const {
    std::vector<Arrival> out;
    for (std::uint64_t n = 0; n < total; ++n) {
      const Op op = stream_.at(n);
      if (!consumes(op.kind)) continue;
      Arrival a{n, op.kind == Kind::kWriteImm ? WcOp::kRecvImm : WcOp::kRecv, op.len, has_imm(op.kind), op.imm,
                std::vector<std::uint8_t>(shape_.size)};
      pattern_fill(a.payload.data(), op.len, stream_.key(), n);
      out.push_back(std::move(a));
    }
    return out;
  }

  /// Hands the arrivals to a checker, as receives 0, 1, 2...; `damage` may change the completion and the memory.
  Faults deliver(const std::vector<Arrival>& list, std::uint64_t total,
                 const std::function<void(std::size_t, Done&, std::vector<std::uint8_t>&)>& damage = {}) {
    Faults faults;
    RecvChecker checker(kQp, kQpNum, stream_);
    target_.assign(static_cast<std::size_t>(shape_.window()) * shape_.size, 0);
    for (std::size_t i = 0; i < list.size() + 4; ++i) checker.post();
    std::uint64_t written = 0;
    for (std::size_t i = 0; i < list.size(); ++i) {
      for (; written <= list[i].seq; ++written)
        if (const Op op = stream_.at(written); writes(op.kind))
          pattern_fill(target_.data() + op.slot * shape_.size, op.len, stream_.key(), written);
      Done d{wr_id(kQp, true, i), list[i].op, list[i].byte_len, kQpNum, list[i].has_imm, list[i].imm};
      std::vector<std::uint8_t> payload = list[i].payload;
      if (damage) damage(i, d, payload);
      checker.complete(d, [&](std::uint64_t) { return payload.data(); }, target_.data(), faults);
    }
    checker.finish(total, faults);
    complete_ = checker.complete_up_to(total);
    return faults;
  }

  Shape shape_;
  Stream stream_;
  std::vector<std::uint8_t> target_;
  bool complete_ = false;
};

constexpr std::uint64_t kTotal = 400;
constexpr std::size_t kMiddle = 7;

void expect_only(const Faults& f, Fault kind, std::uint64_t count) {
  EXPECT_EQ(f.of(kind), count) << f.first();
  EXPECT_EQ(f.total(), count) << f.first();
}

TEST_P(Receiving, RightStreamHasNoFault) {
  const Faults f = deliver(arrivals(kTotal), kTotal);
  EXPECT_EQ(f.total(), 0u) << f.first();
  EXPECT_TRUE(complete_);
}

TEST_P(Receiving, LostMessageIsLost) {
  auto list = arrivals(kTotal);
  list.erase(list.begin() + kMiddle);
  expect_only(deliver(list, kTotal), Fault::kLost, 1);
}

TEST_P(Receiving, LostLastMessageIsLost) {
  auto list = arrivals(kTotal);
  list.pop_back();
  expect_only(deliver(list, kTotal), Fault::kLost, 1);
}

TEST_P(Receiving, MessageTwiceIsDuplicated) {
  auto list = arrivals(kTotal);
  list.insert(list.begin() + kMiddle, list[kMiddle]);
  expect_only(deliver(list, kTotal), Fault::kDuplicated, 1);
}

TEST_P(Receiving, SwappedMessagesAreReordered) {
  auto list = arrivals(kTotal);
  std::swap(list[kMiddle], list[kMiddle + 1]);
  const Faults f = deliver(list, kTotal);
  EXPECT_EQ(f.of(Fault::kReordered), 1u);
  EXPECT_EQ(f.of(Fault::kLost) + f.of(Fault::kDuplicated), 0u) << f.first();
}

TEST_P(Receiving, WrongByteIsCorrupted) {
  const Faults f = deliver(arrivals(kTotal), kTotal, [&](std::size_t i, Done& d, std::vector<std::uint8_t>& payload) {
    if (i != kMiddle) return;
    payload[d.byte_len - 1] ^= 1;
    for (auto& b : target_) b ^= 1;
  });
  EXPECT_GE(f.of(Fault::kCorrupted), 1u);
  EXPECT_EQ(f.of(Fault::kCorrupted), f.total());
}

TEST_P(Receiving, WrongFieldsAreCorrupted) {
  using Damage = std::function<void(Done&)>;
  const std::pair<const char*, Damage> cases[] = {
      {"byte_len", [](Done& d) { d.byte_len += 1; }},
      {"qp_num", [](Done& d) { d.qp_num ^= 1; }},
      {"opcode", [](Done& d) { d.op = WcOp::kSend; }},
      {"another queue's wr_id", [](Done& d) { d.wr_id = wr_id(kQp + 1, true, wr_id_number(d.wr_id)); }},
      {"a send's wr_id", [](Done& d) { d.wr_id = wr_id(kQp, false, wr_id_number(d.wr_id)); }},
      {"a wr_id never given out", [](Done& d) { d.wr_id += 1u << 20; }},
      {"immediate", [](Done& d) { d.has_imm ? void(d.imm ^= 0x80000000u) : void(d.has_imm = true); }},
  };
  for (const auto& [what, damage] : cases) {
    const Faults f = deliver(arrivals(kTotal), kTotal, [&](std::size_t i, Done& d, std::vector<std::uint8_t>&) {
      if (i == kMiddle) damage(d);
    });
    EXPECT_GE(f.of(Fault::kCorrupted), 1u) << what;
  }
}

TEST_P(Receiving, ReceiveUsedTwiceIsDuplicated) {
  const Faults f = deliver(arrivals(kTotal), kTotal, [&](std::size_t i, Done& d, std::vector<std::uint8_t>&) {
    if (i == kMiddle) d.wr_id -= 1;
  });
  EXPECT_EQ(f.of(Fault::kDuplicated), 1u) << f.first();
}

TEST_P(Receiving, ReceivesOutOfOrderAreReordered) {
  const Faults f = deliver(arrivals(kTotal), kTotal, [&](std::size_t i, Done& d, std::vector<std::uint8_t>&) {
    if (i == kMiddle) d.wr_id += 1;
    if (i == kMiddle + 1) d.wr_id -= 1;
  });
  expect_only(f, Fault::kReordered, 1);
}

INSTANTIATE_TEST_SUITE_P(Modes, Receiving,
                         testing::Values(Mode::kSend, Mode::kSendImm, Mode::kWrite, Mode::kWriteImm, Mode::kInline,
                                         Mode::kUnsignalled, Mode::kSg, Mode::kMixed),
                         [](const auto& i) { return std::string(kModeNames[static_cast<unsigned>(i.param)]); });

/// WRITEs up to their n-th mark, which comes, with or without those before it.
Faults write_up_to(std::uint64_t mark, const Shape& s, const std::function<void(std::vector<std::uint8_t>&, const Stream&)>& damage, bool only_this = false) {
  const Stream stream(s, 99);
  std::vector<std::uint8_t> target(static_cast<std::size_t>(s.window()) * s.size, 0);
  RecvChecker checker(kQp, kQpNum, stream);
  Faults f;
  std::uint64_t received = 0;
  for (std::uint64_t n = 0; n < mark * kMarkEvery; ++n) {
    const Op op = stream.at(n);
    const bool last = n == mark * kMarkEvery - 1;
    pattern_fill(target.data() + op.slot * s.size, op.len, 99, n);
    if (last) damage(target, stream);
    if (op.kind != Kind::kWriteImm || (only_this && !last)) continue;
    checker.post();
    checker.complete({wr_id(kQp, true, received++), WcOp::kRecvImm, op.len, kQpNum, true, op.imm}, [](std::uint64_t) { return nullptr; }, target.data(), f);
  }
  EXPECT_EQ(received, only_this ? 1 : mark);
  return f;
}

TEST(ReceivingWrites, DamagedWriteIsFoundByTheNextMark) {
  const Shape s = shape_of(Mode::kWrite);
  const Faults f = write_up_to(1, s, [&](auto& target, const Stream&) { target[5 * s.size + 3] ^= 4; });
  expect_only(f, Fault::kCorrupted, 1);
  EXPECT_NE(f.first().find("WRITE 5 "), std::string::npos) << f.first();
}

TEST(ReceivingWrites, OfUcAreComparedIfNothingGetsLost) {
  Shape s = shape_of(Mode::kWrite);
  s.transport = Transport::kUc;
  const auto damaged = [&](auto& target, const Stream&) { target[(kMarkEvery + 5) * s.size + 3] ^= 4; };
  EXPECT_EQ(write_up_to(2, s, damaged).total(), 0u);
  s.lossless = 1;
  const Faults f = write_up_to(2, s, damaged);
  expect_only(f, Fault::kCorrupted, 1);
  EXPECT_NE(f.first().find("WRITE 21 "), std::string::npos) << f.first();
  EXPECT_EQ(write_up_to(2, s, damaged, true).total(), 0u) << "the first mark was lost";
}

// The sender did not wait for the mark.
TEST(ReceivingWrites, OfUcMayBeOvertaken) {
  Shape s = shape_of(Mode::kWrite);
  s.transport = Transport::kUc;
  s.lossless = 1;
  const auto overtaken = [&](auto& target, const Stream& stream) {
    const Op later = stream.at(s.window() + 5);
    pattern_fill(target.data() + later.slot * s.size, later.len, 99, later.seq);
  };
  const Faults f = write_up_to(1, s, overtaken);
  EXPECT_EQ(f.total(), 0u) << f.first();
}

// --- the sender's side

class Sending : public testing::Test {
 protected:
  Sending() : stream_(shape_of(Mode::kMixed), 7), checker_(kQp, kQpNum) {
    for (std::uint64_t n = 0; n < kPosts; ++n) {
      const Op op = stream_.at(n);
      checker_.post(op);
      if (op.signalled) done_.push_back({wr_id(kQp, false, n), wc_op(op.kind), op.len, kQpNum});
    }
    while (!stream_.at(wr_id_number(done_.back().wr_id)).signalled) done_.pop_back();
  }
  Faults deliver() {
    Faults f;
    std::uint64_t next = 0;
    for (const Done& d : done_)
      checker_.complete(d, f, [&](const SendChecker::Posted& p) { EXPECT_EQ(p.number, next++); });
    checker_.finish(f);
    return f;
  }
  static constexpr std::uint64_t kPosts = 64;  // ends with a signalled one: depth / 4 divides it
  Stream stream_;
  SendChecker checker_;
  std::vector<Done> done_;
};

TEST_F(Sending, RightStreamHasNoFault) {
  const Faults f = deliver();
  EXPECT_EQ(f.total(), 0u) << f.first();
  EXPECT_EQ(checker_.retired(), kPosts);
}
TEST_F(Sending, LostCompletionIsLost) {
  done_.erase(done_.begin() + kMiddle);
  expect_only(deliver(), Fault::kLost, 1);
}
TEST_F(Sending, LostLastCompletionIsLost) {
  done_.pop_back();
  expect_only(deliver(), Fault::kLost, 1);
}
TEST_F(Sending, CompletionTwiceIsDuplicated) {
  done_.insert(done_.begin() + kMiddle, done_[kMiddle]);
  expect_only(deliver(), Fault::kDuplicated, 1);
}
TEST_F(Sending, SwappedCompletionsAreReordered) {
  std::swap(done_[kMiddle], done_[kMiddle + 1]);
  expect_only(deliver(), Fault::kReordered, 1);
}
TEST_F(Sending, CompletionOfUnsignalledIsDuplicated) {
  std::uint64_t n = 0;
  while (stream_.at(n).signalled) ++n;
  done_.insert(std::find_if(done_.begin(), done_.end(), [&](const Done& d) { return wr_id_number(d.wr_id) > n; }),
               Done{wr_id(kQp, false, n), wc_op(stream_.at(n).kind), stream_.at(n).len, kQpNum});
  EXPECT_GE(deliver().total(), 1u);
}
TEST_F(Sending, WrongOpcodeIsCorrupted) {
  done_[kMiddle].op = WcOp::kRecv;
  expect_only(deliver(), Fault::kCorrupted, 1);
}
TEST_F(Sending, PhysicalQpNumIsCorrupted) {
  done_[kMiddle].qp_num = 0x99;
  expect_only(deliver(), Fault::kCorrupted, 1);
}
TEST_F(Sending, WrIdNeverGivenOutIsCorrupted) {
  done_.push_back({wr_id(kQp, false, kPosts), WcOp::kSend, 0, kQpNum});
  expect_only(deliver(), Fault::kCorrupted, 1);
}
TEST_F(Sending, WrongByteLenOfReadIsCorrupted) {
  auto at = std::find_if(done_.begin(), done_.end(), [](const Done& d) { return d.op == WcOp::kRead; });
  ASSERT_NE(at, done_.end());
  at->byte_len -= 1;
  expect_only(deliver(), Fault::kCorrupted, 1);
}

// --- models

TEST(Stream, MixedHasEveryKindAndFlag) {
  const Stream s(shape_of(Mode::kMixed), 5);
  std::set<Kind> kinds;
  unsigned inlined = 0, unsignalled = 0, lists = 0;
  for (std::uint64_t n = 0; n < 1000; ++n) {
    const Op op = s.at(n);
    kinds.insert(op.kind);
    inlined += op.use_inline;
    unsignalled += !op.signalled;
    lists += op.sges > 1;
    EXPECT_GE(op.len, 8u);
    EXPECT_LE(op.len, s.shape().size);
    if (op.use_inline) {
      EXPECT_LE(op.len, s.shape().inline_max);
    }
  }
  EXPECT_EQ(kinds.size(), 7u);
  EXPECT_GT(inlined, 50u);
  EXPECT_GT(unsignalled, 100u);
  EXPECT_GT(lists, 100u);
}

TEST(Stream, WindowedStreamsShowProgressWithinEachMarkDistance) {
  for (Mode m : {Mode::kSend, Mode::kWrite, Mode::kInline, Mode::kSg, Mode::kUnsignalled, Mode::kMixed}) {
    const Stream s(shape_of(m), 5);
    for (std::uint64_t n = kMarkEvery - 1; n < 500; n += kMarkEvery) EXPECT_TRUE(consumes(s.at(n).kind)) << n;
  }
}

TEST(ExpectedTarget, EqualsWritesDoneInOrder) {
  for (Mode m : {Mode::kWrite, Mode::kMixed, Mode::kSg, Mode::kSend}) {
    const Shape shape = shape_of(m);
    const Stream s(shape, 77);
    std::vector<std::uint8_t> memory(static_cast<std::size_t>(shape.window()) * shape.size, 0);
    for (std::uint64_t n = 0; n < 333; ++n) {
      EXPECT_EQ(n % 37 ? memory : expected_target(s, n), memory) << n;
      if (const Op op = s.at(n); writes(op.kind)) pattern_fill(memory.data() + op.slot * shape.size, op.len, 77, n);
    }
    EXPECT_EQ(expected_target(s, 333), memory);
  }
}

TEST(AtomicModel, FailedSwapLeavesTheWord) {
  AtomicModel m;
  Op op{};
  op.kind = Kind::kCmpSwap;
  op.match = true;
  op.arg = 5;
  EXPECT_EQ(m.apply(op).returned, 0u);
  op.match = false;
  op.arg = 6;
  const AtomicModel::Step s = m.apply(op);
  EXPECT_EQ(s.returned, 5u);
  EXPECT_NE(s.compare, 5u);
  EXPECT_EQ(m.swap, 5u);
}

/// The words after the first `n` WRs.
AtomicModel after(const Stream& s, std::uint64_t n) {
  AtomicModel m;
  for (std::uint64_t i = 0; i < n; ++i) m.apply(s.at(i));
  return m;
}

TEST(ExecutedOf, WhatTheWordsTellIsWithinWhatWasCompletedAndPosted) {
  const Shape shape = shape_of(Mode::kAtomic);
  const Stream stream(shape, stream_key(shape.seed, kQp, true));
  for (std::uint64_t n = 0; n < 40; ++n) {
    const AtomicModel m = after(stream, n);
    const auto e = executed_of(stream, m.sum, m.swap, 0, 50);
    ASSERT_TRUE(e);
    EXPECT_TRUE(e->least <= n && n <= e->most) << n;
    EXPECT_EQ(executed_of(stream, m.sum, m.swap, 0, {})->least, e->least);
    EXPECT_EQ(e->shared_least, after(stream, e->least).shared);
    EXPECT_EQ(e->shared_most, after(stream, e->most).shared);
    EXPECT_EQ(executed_of(stream, m.sum, m.swap, n, n)->least, n);
    EXPECT_EQ(executed_of(stream, m.sum, m.swap, e->most + 1, 50), std::nullopt) << "more have completed than were executed";
    if (e->least) { EXPECT_EQ(executed_of(stream, m.sum, m.swap, 0, e->least - 1), std::nullopt) << "fewer were posted"; }
  }
  EXPECT_EQ(executed_of(stream, after(stream, 40).sum + 1, after(stream, 40).swap, 0, 50), std::nullopt);
}

TEST(EventChecker, EachArmingBringsOneEventAtMost) {
  EventChecker e;
  Faults faults;
  e.arm();
  e.event(0, faults);
  EXPECT_EQ(faults.total(), 0u) << "one with nothing to poll";
  EXPECT_FALSE(e.armed());
  e.event(0, faults);
  EXPECT_EQ(faults.of(Fault::kOther), 1u) << faults.first();
}

TEST(EventChecker, WhatComesToAnArmedCqThatWasEmptyBringsAnEvent) {
  EventChecker e;
  Faults faults;
  e.polled(1);
  e.arm();
  e.polled(1);
  EXPECT_FALSE(e.owes()) << "it may have come before the arming";
  e.polled(0);
  e.polled(2);
  EXPECT_TRUE(e.owes());
  e.polled(0);
  EXPECT_TRUE(e.owes());
  e.finish(0, faults);
  EXPECT_EQ(faults.of(Fault::kLost), 1u);
  EXPECT_FALSE(e.armed());
  e.arm();
  e.polled(0);
  e.polled(1);
  e.event(0, faults);
  e.finish(0, faults);
  EXPECT_EQ(faults.total(), 1u) << faults.first();
}

TEST(Pattern, MismatchNamesTheByte) {
  std::vector<std::uint8_t> p(101);
  pattern_fill(p.data(), p.size(), 1, 2);
  EXPECT_EQ(pattern_mismatch(p.data(), p.size(), 1, 2), std::nullopt);
  EXPECT_EQ(pattern_identify(p.data(), p.size(), 1), 2u);
  EXPECT_EQ(pattern_identify(p.data(), p.size(), 3), std::nullopt);
  p[100] ^= 1;
  EXPECT_EQ(pattern_mismatch(p.data(), p.size(), 1, 2), 100u);
  EXPECT_TRUE(pattern_mismatch(p.data(), 100, 1, 3).has_value());
}

TEST(SharedReceives, EachIsUsedOnceByWhoeverComes) {
  SharedReceives shared;
  Faults faults;
  EXPECT_EQ(wr_id_qp(shared.post(7)), SharedReceives::kQp);
  shared.post(8);
  EXPECT_EQ(shared.take(1, faults), 8u);
  EXPECT_EQ(shared.take(0, faults), 7u);
  EXPECT_EQ(shared.outstanding(), 0u);
  EXPECT_EQ(faults.total(), 0u);
  EXPECT_EQ(shared.take(1, faults), std::nullopt);
  EXPECT_EQ(faults.of(Fault::kDuplicated), 1u);
  EXPECT_EQ(shared.take(2, faults), std::nullopt);
  EXPECT_EQ(faults.of(Fault::kCorrupted), 1u);
}

TEST(SharedReceives, WhatOneQpUsesGoesUp) {
  const Shape shape = shape_of(Mode::kSend);
  const Stream stream(shape, stream_key(shape.seed, kQp, true));
  RecvChecker checker(kQp, kQpNum, stream);
  Faults faults;
  std::vector<std::uint8_t> payload(shape.size);
  const std::uint64_t used[] = {4, 9, 6};
  for (std::uint64_t n = 0; n < 3; ++n) {
    pattern_fill(payload.data(), stream.at(n).len, stream.key(), n);
    checker.complete_shared({wr_id(SharedReceives::kQp, true, used[n]), WcOp::kRecv, stream.at(n).len, kQpNum}, payload.data(),
                            nullptr, faults);
    EXPECT_EQ(faults.of(Fault::kReordered), n == 2 ? 1u : 0u) << faults.first();
  }
}

}  // namespace
}  // namespace verify
