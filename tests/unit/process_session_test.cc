// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// migrd's side of proc_wire.h against a thread that plays a library.
#include "agent/process_session.h"

#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <optional>
#include <set>
#include <sstream>

#include "agent/file_tree.h"
#include "agent/limits.h"
#include "pid_namespace.h"
#include "temp_folder.h"

namespace migr::process_session_test {
namespace {

unsigned inheritable = 0;  // descriptors of folders
int entries_left = -1;     // that are read before the disk fails; < 0: it does not

}  // namespace

// What readdir() is called in the agent, whose file offsets have 64 bits by name.
extern "C" dirent64* readdir64(DIR* folder) {
  static const auto next = reinterpret_cast<dirent64* (*)(DIR*)>(dlsym(RTLD_NEXT, "readdir64"));
  if (!entries_left) return errno = EIO, nullptr;
  if (entries_left > 0) entries_left--;
  return next(folder);
}

// glibc's sets the flag: what was without it until then is seen here only.
extern "C" DIR* fdopendir(int fd) {
  static const auto next = reinterpret_cast<DIR* (*)(int)>(dlsym(RTLD_NEXT, "fdopendir"));
  inheritable += !(fcntl(fd, F_GETFD) & FD_CLOEXEC);
  return next(fd);
}

namespace {

migr_msg hello(std::uint8_t who = 1) {
  migr_msg h{};
  h.version = MIGR_PROC_VERSION;
  h.type = MIGR_MSG_HELLO;
  h.instance[0] = who;
  return h;
}

void send_packet(int fd, migr_msg h, const void* records = nullptr, std::size_t bytes = 0) {
  std::vector<char> buf(sizeof h + bytes);
  std::memcpy(buf.data(), &h, sizeof h);
  if (bytes) std::memcpy(buf.data() + sizeof h, records, bytes);
  ASSERT_EQ(send(fd, buf.data(), buf.size(), MSG_NOSIGNAL), static_cast<ssize_t>(buf.size()));
}

class Session : public ::testing::Test {
 protected:
  void SetUp() override {
    int sv[2];
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, sv), 0);
    ours_ = Fd(sv[0]);
    theirs_ = Fd(sv[1]);
  }
  std::shared_ptr<ProcessSession> greet() {
    send_packet(theirs_.n, hello());
    auto s = ProcessSession::greet(std::move(ours_), 1000);
    EXPECT_TRUE(s) << s.error().text;
    return *s;
  }
  // Plays the library for one request: gets it, answers what `answer` makes of it.
  std::thread library(std::function<void(migr_msg request, std::vector<char> records)> answer) {
    return std::thread([this, answer] {
      std::vector<char> buf(1 << 20);
      const ssize_t n = recv(theirs_.n, buf.data(), buf.size(), 0);
      ASSERT_GE(n, static_cast<ssize_t>(sizeof(migr_msg)));
      migr_msg m;
      std::memcpy(&m, buf.data(), sizeof m);
      answer(m, {buf.begin() + sizeof m, buf.begin() + n});
    });
  }
  Fd ours_, theirs_;
};

TEST_F(Session, HelloNamesTheProcess) {
  auto s = greet();
  EXPECT_EQ(s->pid(), getpid());
  EXPECT_EQ(s->instance()[0], 1);
  EXPECT_EQ(s->state(), std::uint32_t{MIGR_PROC_RUNNING});
}

TEST_F(Session, MalformedHellosAreEPROTO) {
  std::vector<std::function<void(migr_msg&)>> bad = {
      [](migr_msg& h) { h.version = MIGR_PROC_VERSION + 1; },
      [](migr_msg& h) { h.type = MIGR_MSG_DESCRIBE; },
      [](migr_msg& h) { h.count = 1, h.record_size = sizeof(migr_text_range); },  // but none follows
      [](migr_msg& h) { h.count = MIGR_PROC_MAX_RECORDS + 1; },
      [](migr_msg& h) { h.state = 9; },
      [](migr_msg& h) { h.flags = MIGR_MORE; },
      [](migr_msg& h) { std::memset(h.text, 'x', sizeof h.text); }};
  for (std::size_t i = 0; i < bad.size(); i++) {
    SetUp();
    migr_msg h = hello();
    bad[i](h);
    send_packet(theirs_.n, h);
    auto s = ProcessSession::greet(std::move(ours_), 1000);
    ASSERT_FALSE(s) << i;
    EXPECT_EQ(s.error().code, EPROTO) << i << " " << s.error().text;
  }
}

TEST_F(Session, ShortPacketIsEPROTO) {
  ASSERT_EQ(send(theirs_.n, "hello", 5, 0), 5);
  auto s = ProcessSession::greet(std::move(ours_), 1000);
  ASSERT_FALSE(s);
  EXPECT_EQ(s.error().code, EPROTO);
}

TEST_F(Session, SilentProcessIsETIMEDOUT) {
  auto s = ProcessSession::greet(std::move(ours_), 50);
  ASSERT_FALSE(s);
  EXPECT_EQ(s.error().code, ETIMEDOUT);
}

TEST_F(Session, RequestAndReplyCarryRecords) {
  auto s = greet();
  const migr_qp_ref refs[] = {{1, 2, 3, 0}, {4, 5, 6, 0}};
  auto lib = library([&](migr_msg m, std::vector<char> records) {
    EXPECT_EQ(m.type, MIGR_MSG_QP_CREATE);
    EXPECT_EQ(m.migration, 77u);
    EXPECT_EQ(m.count, 2u);
    EXPECT_EQ(std::memcmp(records.data(), refs, sizeof refs), 0);
    m.type |= MIGR_REPLY;
    // In two packets.
    const migr_qp_spare spares[] = {{1, 2, 10, 11}, {4, 5, 12, 13}};
    m.count = 1, m.record_size = sizeof(migr_qp_spare), m.flags = MIGR_MORE;
    send_packet(theirs_.n, m, &spares[0], sizeof spares[0]);
    m.flags = 0;
    send_packet(theirs_.n, m, &spares[1], sizeof spares[1]);
  });
  auto r = s->ask<migr_qp_spare, migr_qp_ref>(MIGR_MSG_QP_CREATE, 77, refs, 1000);
  lib.join();
  ASSERT_TRUE(r) << r.error().text;
  ASSERT_EQ(r->size(), 2u);
  EXPECT_EQ((*r)[1].pqpn, 12u);
}

TEST_F(Session, StatusAndTextComeBackAndTheSessionStays) {
  auto s = greet();
  auto refuse = [&](migr_msg m, std::vector<char>) {
    m.type |= MIGR_REPLY;
    m.status = EBUSY;
    std::strcpy(m.text, "cannot be suspended now");
    send_packet(theirs_.n, m);
  };
  auto lib = library(refuse);
  auto r = s->tell(MIGR_MSG_SUSPEND, 1, 1000);
  lib.join();
  ASSERT_FALSE(r);
  EXPECT_EQ(r.error().code, EBUSY);
  EXPECT_NE(r.error().text.find("SUSPEND: cannot be suspended now"), std::string::npos) << r.error().text;
  EXPECT_EQ(s->state(), std::uint32_t{MIGR_PROC_RUNNING});
  auto lib2 = library([&](migr_msg m, std::vector<char>) {
    m.type |= MIGR_REPLY;
    send_packet(theirs_.n, m);
  });
  EXPECT_TRUE(s->tell(MIGR_MSG_SUSPEND, 1, 1000));
  lib2.join();
  EXPECT_EQ(s->state(), std::uint32_t{MIGR_PROC_SUSPENDED});
}

// An older library says so where all of its QPs that had switched are destroyed.
TEST_F(Session, WhoHasNoQpForKeysHoldsUpNobody) {
  auto s = greet();
  for (const int status : {EBUSY, EINVAL}) {
    auto lib = library([&](migr_msg m, std::vector<char>) {
      m.type |= MIGR_REPLY;
      m.count = m.record_size = 0;
      m.status = status;
      send_packet(theirs_.n, m);
    });
    const Status told = tell_keys(*s, 77, {});
    lib.join();
    EXPECT_EQ(bool(told), status == EBUSY);
  }
}

TEST_F(Session, AnswersThatDoNotFitEndTheSession) {
  std::vector<std::function<void(migr_msg&)>> bad = {[](migr_msg& m) { m.seq++; }, [](migr_msg& m) { m.type = MIGR_MSG_DRAIN | MIGR_REPLY; },
                                                    [](migr_msg& m) { m.version = 7; }, [](migr_msg& m) { m.count = 1; }};
  for (std::size_t i = 0; i < bad.size(); i++) {
    SetUp();
    auto s = greet();
    auto lib = library([&](migr_msg m, std::vector<char>) {
      m.type |= MIGR_REPLY;
      bad[i](m);
      send_packet(theirs_.n, m);
    });
    auto r = s->tell(MIGR_MSG_SUSPEND, 1, 1000);
    lib.join();
    ASSERT_FALSE(r) << i;
    EXPECT_EQ(r.error().code, EPROTO) << i;
    char c;
    EXPECT_EQ(recv(theirs_.n, &c, 1, MSG_DONTWAIT), 0) << "the connection is closed";
  }
}

// In packets of what a process sends, who may be anybody: not more than that is kept of it.
migr_msg one_of_many(std::uint16_t type, std::uint32_t seq) {
  migr_msg m{};
  m.version = MIGR_PROC_VERSION;
  m.type = type;
  m.seq = seq;
  m.flags = MIGR_MORE;
  m.count = 8;
  m.record_size = 4096;
  return m;
}
const std::vector<char> kManyBytes(8 * 4096);

TEST_F(Session, AnAnswerWithoutEndEndsTheSession) {
  auto s = greet();
  auto lib = library([&](migr_msg m, std::vector<char>) {
    std::vector<char> packet(sizeof m + kManyBytes.size());
    const migr_msg head = one_of_many(m.type | MIGR_REPLY, m.seq);
    std::memcpy(packet.data(), &head, sizeof head);
    while (send(theirs_.n, packet.data(), packet.size(), MSG_NOSIGNAL) > 0) {
    }
  });
  auto r = s->tell(MIGR_MSG_SUSPEND, 1, 60'000);
  lib.join();
  ASSERT_FALSE(r);
  EXPECT_EQ(r.error().code, EMSGSIZE) << r.error().text;
}

TEST_F(Session, LimitRunsOutAndALateAnswerIsNotTaken) {
  auto s = greet();
  auto r = s->tell(MIGR_MSG_DRAIN, 1, 50);
  ASSERT_FALSE(r);
  EXPECT_EQ(r.error().code, ETIMEDOUT);
  EXPECT_FALSE(s->tell(MIGR_MSG_RESUME, 1, 50));
}

TEST_F(Session, ProcessThatEndsIsECONNRESET) {
  auto s = greet();
  auto lib = library([&](migr_msg, std::vector<char>) { shutdown(theirs_.n, SHUT_RDWR); });
  auto r = s->tell(MIGR_MSG_FREEZE, 1, 1000);
  lib.join();
  ASSERT_FALSE(r);
  EXPECT_EQ(r.error().code, ECONNRESET);
}

class Table : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(table_.start(dir_ + "/proc.sock", {}, [this](const Question& q) { return answer_(q); }));
  }
  void TearDown() override {
    table_.stop();
  }
  Fd connect() {
    Fd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    sockaddr_un a{};
    a.sun_family = AF_UNIX;
    std::strcpy(a.sun_path, (dir_ + "/proc.sock").c_str());
    EXPECT_EQ(::connect(fd.n, reinterpret_cast<sockaddr*>(&a), sizeof a), 0);
    return fd;
  }
  /// A question in as many packets as it has records. @return the head of the answer
  migr_msg ask(std::uint16_t type, std::vector<migr_qp_address> records, std::vector<migr_qp_address>& out) {
    const Fd fd = connect();
    for (std::size_t i = 0; i < records.size(); i++) {
      migr_msg head{};
      head.version = MIGR_PROC_VERSION;
      head.type = type;
      head.seq = 9;
      head.arg = 17;
      head.count = 1;
      head.record_size = sizeof records[i];
      head.flags = i + 1 < records.size() ? MIGR_MORE : 0;
      std::vector<std::byte> packet(sizeof head + sizeof records[i]);
      std::memcpy(packet.data(), &head, sizeof head);
      std::memcpy(packet.data() + sizeof head, &records[i], sizeof records[i]);
      EXPECT_EQ(send(fd.n, packet.data(), packet.size(), 0), static_cast<ssize_t>(packet.size()));
    }
    std::vector<std::byte> packet(1 << 16);
    const timeval limit{5, 0};
    setsockopt(fd.n, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    const ssize_t n = recv(fd.n, packet.data(), packet.size(), 0);
    migr_msg head{};
    if (n < static_cast<ssize_t>(sizeof head)) return head;
    std::memcpy(&head, packet.data(), sizeof head);
    out.resize(head.count);
    if (head.count) std::memcpy(out.data(), packet.data() + sizeof head, head.count * sizeof out[0]);
    return head;
  }
  std::function<Result<Answer>(const Question&)> answer_ = [](const Question&) { return Result<Answer>(Error{ENOENT, "nobody"}); };
  const TempFolder temp_;
  const std::string dir_ = temp_.path;
  SessionTable table_;
};

TEST_F(Table, AQuestionIsAnsweredOnAConnectionOfItsOwn) {
  answer_ = [](const Question& q) {
    EXPECT_EQ(q.who.pid, getpid());
    EXPECT_EQ(q.arg, 17u);
    const auto records = q.records_as<migr_qp_address>();
    EXPECT_TRUE(records);
    EXPECT_FALSE(q.records_as<migr_key_map>());
    Answer a;
    a.record_size = sizeof(migr_qp_address);
    const migr_qp_address found{{7}, static_cast<std::uint32_t>(records->size())};
    a.records.resize(sizeof found);
    std::memcpy(a.records.data(), &found, sizeof found);
    return Result<Answer>(a);
  };
  std::vector<migr_qp_address> out;
  const migr_msg head = ask(MIGR_MSG_WHERE, {{{1}, 30}, {{1}, 31}, {{1}, 32}}, out);
  EXPECT_EQ(head.type, MIGR_MSG_WHERE | MIGR_REPLY);
  EXPECT_EQ(head.seq, 9u);
  EXPECT_EQ(head.status, 0);
  ASSERT_EQ(out.size(), 1u);
  EXPECT_EQ(out[0].qpn, 3u);
  EXPECT_TRUE(table_.all().empty()) << "it is no session";
}

TEST_F(Table, WhatCannotBeAnsweredIsSaid) {
  std::vector<migr_qp_address> out;
  const migr_msg head = ask(MIGR_MSG_INTRODUCE, {{{1}, 30}}, out);
  EXPECT_EQ(head.status, ENOENT);
  EXPECT_STREQ(head.text, "nobody");
}

TEST_F(Table, WhoAsksWhenAllAreAskingGetsItsTurn) {
  std::atomic<unsigned> at_once = 0, most = 0;
  answer_ = [&](const Question&) {
    const unsigned n = ++at_once;
    for (unsigned m = most; n > m && !most.compare_exchange_weak(m, n);) {
    }
    usleep(100'000);
    --at_once;
    return Result<Answer>(Error{ENOENT, "nobody"});
  };
  std::atomic<int> answered = 0;
  std::vector<std::thread> askers;
  constexpr int kAskers = kQuestions + 8;
  for (int i = 0; i < kAskers; i++)
    askers.emplace_back([&] {
      std::vector<migr_qp_address> out;
      answered += ask(MIGR_MSG_WHERE, {{{1}, 30}}, out).status == ENOENT;
    });
  for (auto& a : askers) a.join();
  EXPECT_EQ(answered, kAskers);
  EXPECT_LE(most, static_cast<unsigned>(kQuestions));
}

TEST_F(Table, AQuestionWithoutEndIsNotTakenWhole) {
  const Fd fd = connect();
  std::vector<char> packet(sizeof(migr_msg) + kManyBytes.size());
  const migr_msg head = one_of_many(MIGR_MSG_WHERE, 1);
  std::memcpy(packet.data(), &head, sizeof head);
  const std::size_t most = 2 * kQuestionBytes / kManyBytes.size();
  std::size_t sent = 0;
  while (sent < most && send(fd.n, packet.data(), packet.size(), MSG_NOSIGNAL) > 0) sent++;
  EXPECT_LT(sent, most);
}

TEST_F(Table, ProcessesComeAndGo) {
  Fd fd = connect();
  send_packet(fd.n, hello(3));
  auto s = table_.wait_for(Instance{3}, {}, 2000);
  ASSERT_TRUE(s) << s.error().text;
  EXPECT_EQ(table_.by_pid(getpid()), *s);
  std::thread later([&] { usleep(50'000); shutdown(fd.n, SHUT_RDWR); });
  EXPECT_TRUE(table_.wait_closed(*s, 2000));
  later.join();
  EXPECT_EQ(table_.by_pid(getpid()), nullptr);
}

TEST_F(Table, NonsenseIsDroppedAndOthersGoOn) {
  Fd bad = connect(), good = connect();
  ASSERT_EQ(send(bad.n, "x", 1, 0), 1);
  send_packet(good.n, hello(4));
  EXPECT_TRUE(table_.wait_for(Instance{4}, {}, 2000));
  char c;
  EXPECT_EQ(recv(bad.n, &c, 1, 0), 0);
}

/// What is said while one lives.
class Said {
 public:
  Said() { spdlog::set_default_logger(std::make_shared<spdlog::logger>("test", std::make_shared<spdlog::sinks::ostream_sink_mt>(all_))); }
  ~Said() { spdlog::set_default_logger(before_); }
  /// Once nobody says anything any more.
  std::size_t times(const std::string& what) const {
    std::size_t n = 0;
    const std::string text = all_.str();
    for (auto at = text.find(what); at != text.npos; at = text.find(what, at + 1)) n++;
    return n;
  }

 private:
  const std::shared_ptr<spdlog::logger> before_ = spdlog::default_logger();
  std::ostringstream all_;
};

TEST_F(Table, WhoIsRefusedIsRememberedWithTheReasonAndSaidOnce) {
  const Said said;
  EXPECT_EQ(table_.refusal(getpid()), "");
  for (int i = 0; i < 3; i++) {
    Fd fd = connect();
    migr_msg other = hello(4);
    other.version = static_cast<std::uint16_t>(MIGR_PROC_VERSION + 1 + i);
    send_packet(fd.n, other);
    char c;
    EXPECT_EQ(recv(fd.n, &c, 1, 0), 0);
  }
  { Fd looks = connect(); }
  Fd fd = connect();
  send_packet(fd.n, hello(3));  // after them
  ASSERT_TRUE(table_.wait_for(Instance{3}, {}, 2000));
  EXPECT_EQ(table_.refusal(getpid()), "") << "it was let in";
  table_.stop();
  EXPECT_EQ(said.times("speaks version "), 1u);
}

TEST_F(Table, WhoComesAndGoesAllTheTimeIsSaidOnce) {
  const Said said;
  for (std::uint8_t i = 1; i <= 20; i++) {
    Fd fd = connect();
    send_packet(fd.n, hello(i));
    ASSERT_TRUE(table_.wait_for(Instance{i}, {}, 2000));
    fd = Fd();
    for (int ms = 0; table_.by_pid(getpid()) && ms < 2000; ms++) usleep(1000);
  }
  table_.stop();
  EXPECT_EQ(said.times("connected: instance"), 1u);
  EXPECT_EQ(said.times("disconnected"), 1u);
}

TEST_F(Table, WhatOneWasRefusedForIsNotForgottenBecauseItLooks) {
  {
    Fd fd = connect();
    send_packet(fd.n, one_of_many(MIGR_MSG_HELLO, 1));
    char c;
    EXPECT_EQ(recv(fd.n, &c, 1, 0), 0);
  }
  for (int i = 0; i < 200 && table_.refusal(getpid()).empty(); i++) usleep(10'000);
  const std::string why = table_.refusal(getpid());
  EXPECT_NE(why.find("HELLO: packet length does not fit"), why.npos) << why;
  { Fd looks = connect(); }
  Fd later = connect();
  send_packet(later.n, one_of_many(MIGR_MSG_HELLO, 1));
  char c;
  EXPECT_EQ(recv(later.n, &c, 1, 0), 0);
  EXPECT_EQ(table_.refusal(getpid()), why);
}

TEST_F(Table, WithoutDescriptorsWhoConnectsWaits) {
  const Said said;
  const Fd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit full{static_cast<rlim_t>(fd.n) + 1, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &full), 0);
  std::vector<Fd> rest;
  for (int n; (n = dup(fd.n)) >= 0;) rest.emplace_back(n);
  sockaddr_un a{};
  a.sun_family = AF_UNIX;
  std::strcpy(a.sun_path, (dir_ + "/proc.sock").c_str());
  EXPECT_EQ(::connect(fd.n, reinterpret_cast<sockaddr*>(&a), sizeof a), 0);
  send_packet(fd.n, hello(7));
  EXPECT_FALSE(table_.wait_for(Instance{7}, {}, 100));
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  rest.clear();
  EXPECT_TRUE(table_.wait_for(Instance{7}, {}, 2000));
  table_.stop();
  EXPECT_EQ(said.times("processes that connect have to wait: Too many open files"), 1u);
}

TEST_F(Table, WaitForSomebodyElseIsETIMEDOUT) {
  Fd fd = connect();
  send_packet(fd.n, hello(5));
  ASSERT_TRUE(table_.wait_for(Instance{5}, {}, 2000));
  auto s = table_.wait_for(Instance{5}, [](const ProcessSession& p) { return p.pid() != getpid(); }, 50);
  ASSERT_FALSE(s);
  EXPECT_EQ(s.error().code, ETIMEDOUT);
}

// As long as the process lives.
int connect_to(const std::string& path) {
  const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  sockaddr_un a{};
  a.sun_family = AF_UNIX;
  std::strcpy(a.sun_path, path.c_str());
  return ::connect(fd, reinterpret_cast<sockaddr*>(&a), sizeof a) ? -1 : fd;
}

// Another process, as a user without rights where that can be tried. It ends when it is told.
class Stranger {
 public:
  static constexpr uid_t kNobodyUid = 65534;
  explicit Stranger(const std::function<void()>& work, uid_t uid = kNobodyUid) {
    int sv[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, sv), 0);
    ours_ = Fd(sv[0]);
    Fd theirs(sv[1]);
    if ((pid = fork())) {
      theirs = Fd();  // one that fails is at its end
      char c;
      EXPECT_EQ(read(ours_.n, &c, 1), 1);
      return;
    }
    if (!geteuid() && (setgid(uid) || setuid(uid))) _exit(1);
    work();
    char c = 1;
    if (write(theirs.n, &c, 1) == 1 && read(theirs.n, &c, 1) >= 0) _exit(0);
    _exit(1);
  }
  ~Stranger() {
    shutdown(ours_.n, SHUT_RDWR);
    waitpid(pid, nullptr, 0);
  }
  pid_t pid = -1;

 private:
  Fd ours_;
};

// Says HELLO with instance 6, and keeps its connection open until it ends.
std::unique_ptr<Stranger> one_of_instance_6(const std::string& path, std::uint32_t state = MIGR_PROC_RUNNING) {
  return std::make_unique<Stranger>([&] {
    migr_msg h = hello(6);
    h.state = state;
    send_packet(connect_to(path), h);
  });
}

TEST_F(Table, AnInstanceIsOneProcesssWhileThatLives) {
  chmod(dir_.c_str(), 0755);
  auto has = one_of_instance_6(dir_ + "/proc.sock");
  const auto first = table_.wait_for(Instance{6}, {}, 2000);
  ASSERT_TRUE(first);
  const auto claims = one_of_instance_6(dir_ + "/proc.sock", MIGR_PROC_FROZEN);
  for (int i = 0; i < 200 && table_.refusal(claims->pid).empty(); i++) usleep(10'000);
  const std::string why = table_.refusal(claims->pid);
  EXPECT_NE(why.find("which is that of process " + std::to_string(has->pid)), why.npos) << why;
  EXPECT_EQ(table_.by_pid(claims->pid), nullptr);
  EXPECT_EQ(table_.by_pid(has->pid), *first);
  EXPECT_FALSE(table_.may_have(Instance{6}, claims->pid));
  EXPECT_TRUE(table_.may_have(Instance{6}, has->pid));
  has.reset();
  EXPECT_TRUE(table_.may_have(Instance{6}, claims->pid)) << "it may have been restored";
}

TEST_F(Table, OfAnInstanceThatIsMigratedTheMigrationKnowsWhoseItIs) {
  chmod(dir_.c_str(), 0755);
  table_.stop();
  const pid_t its = getpid();
  SessionTable table;
  table.set_known([its](const Instance& i, pid_t pid) { return i == Instance{6} ? std::optional(pid == its) : std::nullopt; });
  ASSERT_TRUE(table.start(dir_ + "/proc.sock", {}));
  const auto stranger = one_of_instance_6(dir_ + "/proc.sock", MIGR_PROC_FROZEN);
  for (int i = 0; i < 200 && table.refusal(stranger->pid).empty(); i++) usleep(10'000);
  EXPECT_NE(table.refusal(stranger->pid), "") << "it was the first";
  EXPECT_TRUE(table.all().empty());
  const Fd fd = connect();
  send_packet(fd.n, hello(6));
  EXPECT_TRUE(table.wait_for(Instance{6}, {}, 2000));
  table.stop();
}

TEST_F(Table, WhoWasFirstWithAnothersInstanceGivesWay) {
  chmod(dir_.c_str(), 0755);
  table_.stop();
  std::atomic<bool> is_known = false;
  SessionTable table;
  table.set_known([&, its = getpid()](const Instance&, pid_t pid) { return is_known ? std::optional(pid == its) : std::nullopt; });
  ASSERT_TRUE(table.start(dir_ + "/proc.sock", {}));
  const auto stranger = one_of_instance_6(dir_ + "/proc.sock");
  ASSERT_TRUE(table.wait_for(Instance{6}, {}, 2000));
  is_known = true;
  const Fd fd = connect();
  send_packet(fd.n, hello(6));
  for (int i = 0; i < 200 && !table.by_pid(getpid()); i++) usleep(10'000);
  EXPECT_NE(table.by_pid(getpid()), nullptr);
  EXPECT_EQ(table.by_pid(stranger->pid), nullptr);
  table.stop();
}

// Its number may be another's by then.
TEST_F(Table, AChildDoesNotSpeakForAParentThatHasEnded) {
  int sv[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, sv), 0);
  Fd ours(sv[0]);
  std::optional<Fd> theirs{Fd(sv[1])};
  const pid_t parent = fork();
  if (!parent) {
    const Fd fd = connect();
    if (fork()) _exit(0);
    char c;
    if (read(theirs->n, &c, 1) != 1) _exit(1);
    send_packet(fd.n, hello(7));
    _exit(recv(fd.n, &c, 1, 0) <= 0 && write(theirs->n, &c, 1) == 1 ? 0 : 1);
  }
  theirs.reset();
  ASSERT_EQ(waitpid(parent, nullptr, 0), parent);
  char c = 1;
  ASSERT_EQ(write(ours.n, &c, 1), 1);
  EXPECT_EQ(read(ours.n, &c, 1), 1) << "the connection is closed";
  EXPECT_FALSE(table_.wait_for(Instance{7}, {}, 0));
}

// Whose processes `make` makes have two of four sessions, and others have room.
void expect_half_of_the_sessions(const std::function<std::unique_ptr<Stranger>(const std::function<void()>& work)>& make) {
  char t[] = "/tmp/migr-run-XXXXXX";
  ASSERT_NE(mkdtemp(t), nullptr);
  chmod(t, 0755);
  const std::string path = std::string(t) + "/proc.sock";
  SessionTable table(4);
  ASSERT_TRUE(table.start(path, {}));
  const auto s = make([&] {
    for (int i = 0; i < 2; i++) connect_to(path);
    pollfd third{connect_to(path), POLLIN, 0};
    if (poll(&third, 1, kHelloMs / 2) != 1) _exit(1);  // is closed at once, and not because it says nothing
  });
  const Fd root(connect_to(path));
  migr_msg h = hello(8);
  send_packet(root.n, h);
  EXPECT_TRUE(table.wait_for(Instance{8}, {}, 2000)) << "there is room for others";
  table.stop();
  std::filesystem::remove_all(t);
}

TEST(Limits, AUserHasHalfOfTheSessions) {
  if (geteuid()) GTEST_SKIP() << "not root: cannot be another user";
  expect_half_of_the_sessions([](const auto& work) { return std::make_unique<Stranger>(work); });
}

TEST(Limits, AndSoHasAContainer) {
  const PidNamespace container;
  if (!container.made()) GTEST_SKIP() << "cannot make a PID namespace";
  expect_half_of_the_sessions([&](const auto& work) { return container.born_in([&] { return std::make_unique<Stranger>(work, 0); }); });
}

TEST_F(Table, WhoConnectsAgainAndAgainHasOneSession) {
  constexpr std::uint8_t kTimes = 8;
  std::vector<Fd> all;
  std::future<Status> told;
  for (std::uint8_t i = 1; i <= kTimes; i++) {
    all.push_back(connect());
    send_packet(all.back().n, hello(i));
    const auto s = table_.wait_for(Instance{i}, {}, 2000);
    ASSERT_TRUE(s) << s.error().text;
    if (i == 1) told = std::async(std::launch::async, [s = *s] { return s->tell(MIGR_MSG_ROLLBACK, 0, 60'000); });
  }
  ASSERT_EQ(told.wait_for(std::chrono::seconds(5)), std::future_status::ready) << "who waits for an answer on the first goes on";
  EXPECT_EQ(told.get().error().code, ECONNRESET);
  for (std::uint8_t i = 0; i < kTimes; i++) {
    std::byte packet[sizeof(migr_msg)];
    ssize_t n;
    while ((n = recv(all[i].n, packet, sizeof packet, MSG_DONTWAIT)) > 0) continue;
    EXPECT_EQ(n, i + 1 < kTimes ? 0 : -1) << "the newest alone is open: " << int{i};
  }
  EXPECT_EQ(table_.all().size(), 1u);
}

TEST_F(Session, OfWhatFollowsAConnectionTheNewestWaitsForItsTurn) {
  const auto s = greet();
  Turns turns;
  std::promise<void> began, goes_on, last;
  std::atomic<int> others = 0;
  turns.run(s, [&] { began.set_value(), goes_on.get_future().wait(); });
  ASSERT_EQ(began.get_future().wait_for(std::chrono::seconds(5)), std::future_status::ready);
  for (int i = 0; i < 50; i++) turns.run(s, [&] { others++; });
  turns.run(s, [&] { last.set_value(); });
  auto done = last.get_future();
  EXPECT_EQ(done.wait_for(std::chrono::milliseconds(50)), std::future_status::timeout) << "one at a time";
  goes_on.set_value();
  ASSERT_EQ(done.wait_for(std::chrono::seconds(5)), std::future_status::ready);
  EXPECT_EQ(others, 0);
}

// ---- who has connected

class Speakers : public ::testing::Test {
 protected:
  void SetUp() override {
    char t[] = "/tmp/migr-run-XXXXXX";
    ASSERT_NE(mkdtemp(t), nullptr);
    chmod(t, 0755);
    path_ = std::string(t) + "/proc.sock";
    auto listener = listen_to_processes(path_);
    ASSERT_TRUE(listener);
    listener_ = std::move(*listener);
  }
  void TearDown() override { std::filesystem::remove_all(std::filesystem::path(path_).parent_path()); }
  Result<Speaker> next() {
    pollfd p{listener_.n, POLLIN, 0};
    EXPECT_EQ(poll(&p, 1, 5000), 1);
    return speaker_of(Fd(accept(listener_.n, nullptr, nullptr)).n);
  }
  std::unique_ptr<Stranger> process(uid_t uid, const std::function<void()>& then = [] {}) const {
    const auto work = [&] {
      connect_to(path_);
      then();
    };
    return std::make_unique<Stranger>(work, uid);
  }
  std::string path_;
  Fd listener_;
};

TEST_F(Speakers, WhoHasEndedIsESRCH) {
  process(0).reset();
  const auto who = next();
  ASSERT_FALSE(who);
  EXPECT_EQ(who.error().code, ESRCH) << who.error().text;
}

TEST_F(Speakers, RootOfAContainerIsNotRootOfTheHost) {
  const auto of_host = process(0);
  const auto host = next();
  const PidNamespace one, other;
  if (!one.made() || !other.made()) GTEST_SKIP() << "cannot make a PID namespace";
  const auto of_one = one.born_in([&] { return process(0); });
  const auto in_one = next();
  const auto of_other = other.born_in([&] { return process(0); });
  const auto in_other = next();
  ASSERT_TRUE(host && in_one && in_other);
  EXPECT_FALSE(host->user.counts_with(host->user));
  EXPECT_TRUE(in_one->user.counts_with(in_one->user));
  EXPECT_FALSE(in_one->user.counts_with(host->user));
  EXPECT_FALSE(in_one->user.counts_with(in_other->user));
}

TEST_F(Speakers, AContainerIsOneWhateverItsUsers) {
  const PidNamespace container;
  if (!container.made()) GTEST_SKIP() << "cannot make a PID namespace";
  const auto a = container.born_in([&] { return process(0); }), b = container.born_in([&] { return process(Stranger::kNobodyUid); });
  const auto root = next(), nobody = next();
  ASSERT_TRUE(root && nobody);
  EXPECT_NE(root->user.uid, nobody->user.uid);
  EXPECT_TRUE(root->user.counts_with(nobody->user));
}

TEST_F(Speakers, AUserIsOneWhateverHisContainers) {
  const PidNamespace container;
  if (!container.made()) GTEST_SKIP() << "cannot make a PID namespace";
  const auto a = container.born_in([&] { return process(Stranger::kNobodyUid); }), b = process(Stranger::kNobodyUid);
  const auto inside = next(), outside = next();
  ASSERT_TRUE(inside && outside);
  EXPECT_NE(inside->user.container, outside->user.container);
  EXPECT_TRUE(inside->user.counts_with(outside->user));
}

TEST_F(Speakers, AContainerInAContainerIsNoOther) {
  const PidNamespace container;
  if (!container.made()) GTEST_SKIP() << "cannot make a PID namespace";
  const auto inner = [this] {
    if (unshare(CLONE_NEWPID)) _exit(1);
    if (fork()) return;
    connect_to(path_);
    for (;;) pause();  // until its container ends
  };
  const auto s = container.born_in([&] { return process(0, inner); });
  const auto outside = next(), inside = next();
  ASSERT_TRUE(outside && inside);
  EXPECT_NE(outside->pid, inside->pid);
  EXPECT_TRUE(outside->user.counts_with(inside->user));
}

TEST_F(Table, GateIsAFileBesideTheSocket) {
  Instance i{};
  i[0] = 0xab;
  ASSERT_TRUE(open_gate(dir_, i));
  EXPECT_EQ(access((dir_ + "/gate-ab" + std::string(30, '0')).c_str(), F_OK), 0);
  close_gate(dir_, i);
  EXPECT_NE(access((dir_ + "/gate-ab" + std::string(30, '0')).c_str(), F_OK), 0);
}

class Tree : public ::testing::Test {
 protected:
  void SetUp() override {
    std::filesystem::create_directories(dir_ + "/from/sub");
    std::filesystem::create_directories(dir_ + "/to");
  }
  void file(const std::string& name, const std::string& data) {
    FILE* f = fopen((dir_ + "/" + name).c_str(), "w");
    ASSERT_NE(f, nullptr);
    fwrite(data.data(), 1, data.size(), f);
    fclose(f);
  }
  const TempFolder temp_;
  const std::string dir_ = temp_.path;
};

TEST_F(Tree, ArrivesAsItWas) {
  file("from/empty", "");
  file("from/sub/big", std::string(2 * kChunkBytes + 17, 'x'));
  ASSERT_EQ(symlink("sub/big", (dir_ + "/from/link").c_str()), 0);
  ASSERT_EQ(chmod((dir_ + "/from/empty").c_str(), 0751), 0);
  TreeWriter w(dir_ + "/to");
  auto s = send_tree(dir_ + "/from", wire::FileChunk::IMAGES, 1 << 30, [&](const wire::FileChunk& c) {
    auto r = w.write(c);
    EXPECT_TRUE(r) << r.error().text;
    return bool(r);
  });
  ASSERT_TRUE(s) << s.error().text;
  ASSERT_TRUE(w.finish());
  EXPECT_EQ(w.files(), 2u);
  EXPECT_EQ(system(("diff -r " + dir_ + "/from " + dir_ + "/to").c_str()), 0);
  EXPECT_EQ(std::filesystem::status(dir_ + "/to/empty").permissions(), std::filesystem::perms{0751});
  EXPECT_TRUE(std::filesystem::is_symlink(dir_ + "/to/link"));
}

// Another thread may start a program at any moment.
TEST_F(Tree, OpensNothingThatAProgramWouldInherit) {
  file("from/sub/file", "x");
  inheritable = 0;
  EXPECT_TRUE(send_tree(dir_ + "/from", wire::FileChunk::IMAGES, 1 << 30, [](const wire::FileChunk&) { return true; }));
  EXPECT_TRUE(names_below(dir_ + "/from"));
  EXPECT_EQ(inheritable, 0u);
}

// Else what comes behind it would not be sent, and what is at the other end would be removed.
TEST_F(Tree, AFolderThatCannotBeReadToItsEndIsNotTakenForWhole) {
  for (const char* name : {"from/a", "from/b", "from/c", "to/a", "to/b", "to/c"}) file(name, "x");
  const auto names = names_below(dir_ + "/from");
  ASSERT_TRUE(names);
  const auto fails_on_the_way = [](const auto& call) {
    entries_left = 4;
    const auto s = call();
    entries_left = -1;
    return !s && s.error().code == EIO;
  };
  EXPECT_TRUE(fails_on_the_way([&] { return send_tree(dir_ + "/from", wire::FileChunk::IMAGES, 1 << 30, [](const wire::FileChunk&) { return true; }); }));
  EXPECT_TRUE(fails_on_the_way([&] { return names_below(dir_ + "/from"); }));
  EXPECT_TRUE(fails_on_the_way([&] { return remove_others(dir_ + "/to", *names); }));
}

// As a dump writes: memory is appended to, one file after the other; what describes it may change to the end.
TEST_F(Tree, MemoryIsSentWhileItIsWritten) {
  const std::string mb(1 << 20, 'm');
  std::filesystem::create_directories(dir_ + "/from");
  int looks = 0;
  std::uint64_t ahead = 0;
  bool whole = false;
  auto append = [&](const char* name, const std::string& data) {
    std::ofstream(dir_ + "/from/" + name, std::ios::app | std::ios::binary) << data;
  };
  const Written written = [&]() -> Result<bool> {
    switch (looks++) {
      case 0: append("core-1.img", "early"); break;
      case 1: append("pages-1.img", mb + "a"); break;
      case 3: append("pages-1.img", std::string(1 << 20, 0) + "b"); break;
      case 5: append("pages-2.img", "c"); append("pages-10.img", mb); break;
      case 9: append("pages-10.img", "d"); append("core-1.img", "late"); return whole = true;
    }
    return false;
  };
  TreeWriter w(dir_ + "/to");
  auto s = send_tree(dir_ + "/from", wire::FileChunk::IMAGES, 1 << 30, [&](const wire::FileChunk& c) {
    auto r = w.write(c);
    EXPECT_TRUE(r) << r.error().text;
    if (!whole) ahead += c.data().size() + c.zeros();
    return bool(r);
  }, written);
  ASSERT_TRUE(s) << s.error().text;
  ASSERT_TRUE(w.finish());
  EXPECT_EQ(ahead, (3u << 20) + 3);  // but the last byte
  EXPECT_EQ(w.files(), 4u);
  EXPECT_EQ(system(("diff -r " + dir_ + "/from " + dir_ + "/to").c_str()), 0);
}

// Who writes in another order than CRIU's must not have memory left out in silence.
TEST_F(Tree, MemoryThatGrowsBehindALaterFileIsNotTakenForWhole) {
  file("from/pages-2.img", "x");
  file("from/pages-3.img", "y");
  int looks = 0;
  auto s = send_tree(dir_ + "/from", wire::FileChunk::IMAGES, 1 << 30, [](const wire::FileChunk&) { return true; }, [&]() -> Result<bool> {
    if (looks++ == 3) file("from/pages-2.img", "xx");
    return looks > 3;
  });
  ASSERT_FALSE(s);
  EXPECT_NE(s.error().text.find("pages-2.img was written to when"), std::string::npos) << s.error().text;
}

TEST_F(Tree, ADumpThatFailsEndsTheSending) {
  file("from/pages-1.img", "x");
  int looks = 0;
  auto s = send_tree(dir_ + "/from", wire::FileChunk::IMAGES, 1 << 30, [](const wire::FileChunk&) { return true; },
                     [&]() -> Result<bool> { return looks++ < 3 ? Result<bool>(false) : Result<bool>(Error{ECANCELED, "it failed"}); });
  ASSERT_FALSE(s);
  EXPECT_EQ(s.error().code, ECANCELED);
}

TEST_F(Tree, WhoEndsItNeedNotWaitForTheEndOfALargeFile) {
  file("from/pages-1.img", std::string(8 * kChunkBytes, 'x'));
  int sent = 0;
  auto s = send_tree(dir_ + "/from", wire::FileChunk::IMAGES, 1 << 30, [&](const wire::FileChunk&) { return ++sent > 0; },
                     [&]() -> Result<bool> { return sent < 2 ? Result<bool>(true) : Result<bool>(Error{ECANCELED, "enough"}); });
  ASSERT_FALSE(s);
  EXPECT_EQ(s.error().code, ECANCELED);
  EXPECT_EQ(sent, 2);
}

TEST_F(Tree, NamesThatLeaveTheFolderAreEINVAL) {
  TreeWriter w(dir_ + "/to");
  for (const char* n : {"../x", "/x", "a/../../x", "", "a//b", "."}) {
    wire::FileChunk c;
    c.set_name(n);
    c.set_mode(S_IFREG | 0644);
    auto s = w.write(c);
    ASSERT_FALSE(s) << n;
    EXPECT_EQ(s.error().code, EINVAL) << n;
  }
}

TEST_F(Tree, LinksAreNotFollowed) {
  std::filesystem::create_directories(dir_ + "/elsewhere");
  ASSERT_EQ(symlink((dir_ + "/elsewhere").c_str(), (dir_ + "/to/out").c_str()), 0);
  TreeWriter w(dir_ + "/to");
  wire::FileChunk c;
  c.set_name("out/x");
  c.set_mode(S_IFREG | 0644);
  EXPECT_FALSE(w.write(c));
  EXPECT_TRUE(std::filesystem::is_empty(dir_ + "/elsewhere"));
}

TEST_F(Tree, MayBeDeep) {
  std::string deepest;
  for (int level = 0; level < 100; level++) deepest += "/d";
  std::filesystem::create_directories(dir_ + "/from" + deepest);
  file("from" + deepest + "/f", "x");
  TreeWriter w(dir_ + "/to");
  const auto s = send_tree(dir_ + "/from", wire::FileChunk::BUNDLE, 1 << 30, [&](const wire::FileChunk& c) { return bool(w.write(c)); });
  ASSERT_TRUE(s && w.finish()) << s.error().text;
  EXPECT_EQ(text_of(dir_ + "/to" + deepest + "/f"), "x");
  const auto names = names_below(dir_ + "/to");
  ASSERT_TRUE(names) << names.error().text;
  EXPECT_TRUE(names->contains(deepest.substr(1) + "/f"));
  std::filesystem::remove_all(dir_ + "/from/d/d");
  EXPECT_TRUE(remove_others(dir_ + "/to", *names_below(dir_ + "/from")));
  EXPECT_FALSE(std::filesystem::exists(dir_ + "/to/d/d"));
  std::filesystem::create_directories(dir_ + "/to" + deepest);
  EXPECT_TRUE(remove_folder(dir_ + "/to"));
  EXPECT_FALSE(std::filesystem::exists(dir_ + "/to"));
}

// As where a container comes back to the bundle that it has left there.
TEST_F(Tree, WhatIsOfAnotherTypeGivesWay) {
  std::filesystem::create_directories(dir_ + "/elsewhere/kept");
  for (const char* n : {"from/was_file", "from/was_link", "to/now_file/sub", "to/now_link/sub"}) std::filesystem::create_directories(dir_ + "/" + n);
  for (const char* n : {"from/was_file/x", "from/was_link/x", "from/now_file", "to/was_file", "to/now_file/sub/x", "to/now_link/sub/x"}) file(n, n);
  ASSERT_EQ(symlink("now_file", (dir_ + "/from/now_link").c_str()), 0);
  ASSERT_EQ(symlink((dir_ + "/elsewhere").c_str(), (dir_ + "/to/was_link").c_str()), 0);
  ASSERT_EQ(symlink((dir_ + "/elsewhere").c_str(), (dir_ + "/to/now_link/sub/link").c_str()), 0);
  TreeWriter w(dir_ + "/to");
  auto s = send_tree(dir_ + "/from", wire::FileChunk::BUNDLE, 1 << 30, [&](const wire::FileChunk& c) {
    auto r = w.write(c);
    EXPECT_TRUE(r) << r.error().text;
    return bool(r);
  });
  ASSERT_TRUE(s) << s.error().text;
  ASSERT_TRUE(w.finish());
  EXPECT_EQ(system(("diff -r --no-dereference " + dir_ + "/from " + dir_ + "/to").c_str()), 0);
  EXPECT_TRUE(std::filesystem::exists(dir_ + "/elsewhere/kept"));
  EXPECT_FALSE(std::filesystem::exists(dir_ + "/elsewhere/x"));
}

// Whatever the container calls its files.
TEST_F(Tree, WhatIsOnItsWayTakesNoName) {
  const std::string longest(NAME_MAX, 'n');
  for (const std::string& n : {std::string("X"), longest}) file("from/" + n, n);
  for (const std::string& n : {std::string("X.migr-part"), longest.substr(0, NAME_MAX - 10) + ".migr-part"}) file("to/" + n, n);
  TreeWriter w(dir_ + "/to");
  ASSERT_TRUE(send_tree(dir_ + "/from", wire::FileChunk::BUNDLE, 1 << 30, [&](const wire::FileChunk& c) {
    auto r = w.write(c);
    EXPECT_TRUE(r) << r.error().text;
    return bool(r);
  }));
  ASSERT_TRUE(w.finish());
  EXPECT_EQ(text_of(dir_ + "/to/X.migr-part"), "X.migr-part");
  EXPECT_EQ(text_of(dir_ + "/to/X"), "X");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(dir_ + "/to"), {}), 5) << "nothing is left of the way";
}

TEST_F(Tree, ChangedDataIsEIOAndLeavesNoFile) {
  file("from/f", "data");
  {
    TreeWriter w(dir_ + "/to");
    Status seen;
    ASSERT_TRUE(send_tree(dir_ + "/from", wire::FileChunk::IMAGES, 1 << 30, [&](wire::FileChunk c) {
      if (!c.data().empty()) (*c.mutable_data())[0] ^= 1;
      return bool(seen = w.write(c));
    }));
    ASSERT_FALSE(seen);
    EXPECT_EQ(seen.error().code, EIO);
  }
  EXPECT_FALSE(std::filesystem::exists(dir_ + "/to/f"));
}

TEST_F(Tree, LargerThanTheLimitIsEFBIG) {
  file("from/f", std::string(100, 'x'));
  auto s = send_tree(dir_ + "/from", wire::FileChunk::BUNDLE, 99, [](const wire::FileChunk&) { return true; });
  ASSERT_FALSE(s);
  EXPECT_EQ(s.error().code, EFBIG);
}

TEST_F(Tree, WhatCannotBeReadIsEmpty) {
  std::ofstream(dir_ + "/text") << "two\nlines\n";
  EXPECT_EQ(text_of(dir_ + "/text"), "two\nlines\n");
  EXPECT_EQ(text_of(dir_ + "/none"), "");
  EXPECT_EQ(text_of(dir_), "") << "opens, and each read fails, as with a process that has ended";
}

TEST_F(Tree, WhatIsMountedInAFolderStays) {
  std::filesystem::create_directories(dir_ + "/outside");
  std::filesystem::create_directories(dir_ + "/from/mounted");
  file("outside/f", "data");
  if (mount((dir_ + "/outside").c_str(), (dir_ + "/from/mounted").c_str(), nullptr, MS_BIND, nullptr)) GTEST_SKIP() << "no right to mount";
  auto s = remove_folder(dir_ + "/from");
  EXPECT_TRUE(s) << s.error().text;
  EXPECT_FALSE(std::filesystem::exists(dir_ + "/from"));
  EXPECT_TRUE(std::filesystem::exists(dir_ + "/outside/f"));
  EXPECT_TRUE(remove_folder(dir_ + "/from"));
}

TEST_F(Tree, WhatIsMountedStaysWhicheverWayTheFolderIsNamed) {
  std::filesystem::create_directories(dir_ + "/outside");
  file("outside/f", "data");
  std::filesystem::create_directory_symlink(dir_ + "/real", dir_ + "/link");
  for (const std::string name : {"/link/from", "/real/from/", "/real/../real/from"}) {
    std::filesystem::create_directories(dir_ + "/real/from/mounted");
    if (mount((dir_ + "/outside").c_str(), (dir_ + "/real/from/mounted").c_str(), nullptr, MS_BIND, nullptr)) GTEST_SKIP() << "no right to mount";
    auto s = remove_folder(dir_ + name);
    EXPECT_TRUE(s) << s.error().text;
    EXPECT_FALSE(std::filesystem::exists(dir_ + "/real/from")) << name;
    EXPECT_TRUE(std::filesystem::exists(dir_ + "/outside/f")) << name;
  }
}

// ---- a folder that changes after it was sent

class Changing : public Tree {
 protected:
  /// @param names  of what arrives
  Status send(const std::string& in, std::set<std::string>* names = nullptr) {
    TreeWriter w(dir_ + "/to/" + in);
    Status arrived;
    auto s = send_changes(dir_ + "/from/" + in, wire::FileChunk::BUNDLE, 1 << 30, [&](const wire::FileChunk& c) {
      if (names) names->insert(c.name());
      return bool(arrived = w.write(c));
    }, sent_, in);
    return s ? arrived ? w.finish() : arrived : s;
  }
  /// All of `from` first, then what has changed of its sub.
  void send_first() {
    ASSERT_TRUE(sent_.begin(dir_ + "/from"));
    const auto s = send("");
    ASSERT_TRUE(s) << s.error().text;
  }
  void send_again(std::set<std::string>* names = nullptr) {
    const auto all = names_below(dir_ + "/from/sub");
    ASSERT_TRUE(all) << all.error().text;
    auto s = remove_others(dir_ + "/to/sub", *all);
    ASSERT_TRUE(s) << s.error().text;
    s = send("sub/", names);
    ASSERT_TRUE(s) << s.error().text;
    EXPECT_EQ(system(("diff -r --no-dereference " + dir_ + "/from " + dir_ + "/to").c_str()), 0);
  }
  std::string at(const std::string& name) const { return dir_ + "/from/sub/" + name; }
  void folder(const std::string& name) const { std::filesystem::create_directories(at(name)); }
  SentFiles sent_;
};

TEST_F(Changing, WhatWasWrittenRemovedAndMadeArrives) {
  for (const char* name : {"log", "gone", "empty", "becomes-folder", "becomes-link"}) file(std::string("from/sub/") + name, "before");
  for (const char* name : {"old/deep", "becomes-file/deep"}) folder(name);
  file("from/sub/old/deep/f", "x");
  file("from/sub/becomes-file/deep/f", "x");
  send_first();
  file("from/sub/log", "after");
  for (const char* name : {"gone", "becomes-folder", "becomes-link"}) std::filesystem::remove(at(name));
  std::filesystem::remove_all(at("becomes-file"));
  file("from/sub/becomes-file", "now");
  folder("becomes-folder/deep");
  std::filesystem::create_symlink("/etc", at("becomes-link"));
  folder("new");
  file("from/sub/new/f", std::string(kChunkBytes + 1, 'n'));
  ASSERT_EQ(chmod(at("empty").c_str(), 0600), 0);
  send_again();
  EXPECT_EQ(std::filesystem::status(dir_ + "/to/sub/empty").permissions(), std::filesystem::perms{0600});
}

TEST_F(Changing, FifosArriveAndSocketsAreLeftOutAndNamedOnce) {
  ASSERT_EQ(mkfifo(at("fifo").c_str(), 0600), 0);
  ASSERT_EQ(chmod(at("fifo").c_str(), 0622), 0);
  ASSERT_EQ(chown(at("fifo").c_str(), geteuid() ? geteuid() : 17, static_cast<gid_t>(-1)), 0);
  for (const char* name : {"socket", "socket-2"}) {
    const Fd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_un address{AF_UNIX, {}};
    ASSERT_LT(at(name).copy(address.sun_path, sizeof address.sun_path), sizeof address.sun_path);
    ASSERT_EQ(bind(fd.n, reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  }
  std::ostringstream said;
  const auto before = spdlog::default_logger();
  spdlog::set_default_logger(std::make_shared<spdlog::logger>("test", std::make_shared<spdlog::sinks::ostream_sink_mt>(said)));
  send_first();
  const auto first = said.str();
  said.str("");
  for (const char* name : {"socket", "socket-2"}) std::filesystem::remove(at(name));
  ASSERT_EQ(mkfifo(at("later").c_str(), 0600), 0);
  std::set<std::string> names;
  const auto all = names_below(dir_ + "/from/sub");
  ASSERT_TRUE(all && remove_others(dir_ + "/to/sub", *all));
  ASSERT_TRUE(send("sub/", &names));
  spdlog::set_default_logger(before);
  EXPECT_NE(first.find("/from//sub/socket is a socket or a device, which is not copied; nor are 1 more"), std::string::npos) << first;
  EXPECT_EQ(said.str(), "");
  EXPECT_TRUE(names.contains("later"));
  for (const char* name : {"fifo", "later"}) {
    struct stat from, to;
    ASSERT_EQ(lstat(at(name).c_str(), &from), 0);
    ASSERT_EQ(lstat((dir_ + "/to/sub/" + name).c_str(), &to), 0) << name;
    EXPECT_EQ(from.st_mode, to.st_mode) << name;
    EXPECT_EQ(from.st_uid, to.st_uid) << name;
  }
  EXPECT_FALSE(std::filesystem::exists(std::filesystem::symlink_status(dir_ + "/to/sub/socket")));
  EXPECT_EQ(text_of(at("fifo")), "") << "nobody waits for who writes to it";
  TreeWriter images(dir_ + "/to");
  wire::FileChunk c;
  c.set_tree(wire::FileChunk::IMAGES);
  c.set_name("x");
  c.set_mode(S_IFIFO | 0600);
  EXPECT_EQ(images.write(c).error().code, EINVAL) << "CRIU would wait";
}

TEST_F(Changing, OnlyThatIsSentAgain) {
  folder("moved/deep");
  for (const char* name : {"same", "log", "moved/deep/f"}) file(std::string("from/sub/") + name, "before");
  sleep(3);  // what was changed just before it is sent might change again without a sign
  send_first();
  file("from/sub/log", "after");
  std::filesystem::rename(at("moved"), at("here"));  // what is in it has not changed, but its name
  std::set<std::string> names;
  send_again(&names);
  EXPECT_EQ(names, (std::set<std::string>{"log", "here", "here/deep", "here/deep/f"}));
}

TEST_F(Changing, WritesToAMappedFileAreSeen) {
  file("from/sub/mapped", std::string(4096, 'a'));
  const Fd fd(open(at("mapped").c_str(), O_RDWR | O_CLOEXEC));
  void* const p = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd.n, 0);
  ASSERT_NE(p, MAP_FAILED);
  static_cast<char*>(p)[0] = 'b';  // from here on its page can be written to without a fault
  sleep(3);
  send_first();
  static_cast<char*>(p)[1] = 'b';
  send_again();
  munmap(p, 4096);
}

TEST_F(Changing, LinksAreNotFollowedByWhatIsRemoved) {
  std::filesystem::create_directories(dir_ + "/outside");
  file("outside/f", "data");
  send_first();
  std::filesystem::create_directory_symlink(dir_ + "/outside", dir_ + "/to/sub/out");
  send_again();
  EXPECT_TRUE(std::filesystem::exists(dir_ + "/outside/f"));
  EXPECT_FALSE(std::filesystem::is_symlink(dir_ + "/to/sub/out"));
  // Nor where a folder of that name is expected.
  std::filesystem::create_directory_symlink(dir_ + "/outside", dir_ + "/to/sub/out");
  folder("out");
  send_again();
  EXPECT_TRUE(std::filesystem::exists(dir_ + "/outside/f"));
}

TEST_F(Changing, WhatIsMountedThereStays) {
  std::filesystem::create_directories(dir_ + "/outside");
  file("outside/f", "data");
  folder("data");
  send_first();
  const std::string at = dir_ + "/to/sub/data";
  if (mount((dir_ + "/outside").c_str(), at.c_str(), nullptr, MS_BIND, nullptr)) GTEST_SKIP() << "no right to mount";
  auto all = names_below(dir_ + "/from/sub");
  auto s = remove_others(dir_ + "/to/sub", *all);
  EXPECT_TRUE(s) << s.error().text;
  all->erase("data");
  s = remove_others(dir_ + "/to/sub", *all);
  umount(at.c_str());
  ASSERT_FALSE(s);
  EXPECT_EQ(s.error().code, EBUSY);
  EXPECT_TRUE(std::filesystem::exists(dir_ + "/outside/f"));
}

TEST_F(Changing, OfAMountOnlyTheFolderIsCompared) {
  folder("data");
  send_first();
  file("to/sub/data/f", "what is mounted there, of the source's");
  if (mount("none", at("data").c_str(), "tmpfs", 0, nullptr)) GTEST_SKIP() << "no right to mount";
  const auto all = names_below(dir_ + "/from/sub");
  umount(at("data").c_str());
  ASSERT_TRUE(all);
  EXPECT_TRUE(remove_others(dir_ + "/to/sub", *all));
  EXPECT_TRUE(std::filesystem::exists(dir_ + "/to/sub/data/f"));
}

TEST_F(Changing, WhichFolderThatIs) {
  const std::string bundle = dir_ + "/from";
  const auto root = [&](const std::string& config) {
    std::ofstream(bundle + "/config.json") << config;
    return writable_root(bundle);
  };
  std::filesystem::create_directory_symlink("sub", bundle + "/link");
  EXPECT_EQ(*root(R"({"root": {"path": "sub"}})"), "sub");
  EXPECT_EQ(*root(R"({"root": {"path": "./sub/", "readonly": false}})"), "sub");
  EXPECT_EQ(*root(R"({"root": {"path": ")" + bundle + R"(/sub"}})"), "sub");
  EXPECT_EQ(*root(R"({"root": {"path": "sub", "readonly": true}})"), "");
  EXPECT_EQ(*root(R"({"root": {"path": "/"}})"), "");
  EXPECT_EQ(*root(R"({"root": {"path": "../to"}})"), "");
  EXPECT_EQ(*root(R"({"root": {"path": "link"}})"), "");
  EXPECT_EQ(*root("{}"), "");
  EXPECT_EQ(root(R"({"root": {"path": "."}})").error().code, EOPNOTSUPP);
  EXPECT_EQ(root("{").error().code, EINVAL);
  EXPECT_EQ(*writable_root(""), "");
}

}  // namespace
}  // namespace migr::process_session_test
