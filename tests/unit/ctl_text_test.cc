// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What migrctl prints: that it fits into 80 columns with the longest names, that nothing is cut which somebody has to type, and
// what programs get of the same.
#include "agent/ctl_text.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <pty.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <nlohmann/json.hpp>
#include <sstream>

#include "agent/doctor.h"
#include "agent/failover/links_text.h"
#include "agent/history.h"
#include "agent/phase_lines.h"
#include "agent/record_text.h"
#include "agent/text.h"

namespace migr::ctl_text_test {
namespace {

using Json = nlohmann::ordered_json;

void expect_fits(const std::string& text) {
  EXPECT_TRUE(text.ends_with("\n"));
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), kColumns) << line;
}
/// Whole, or on lines one after the other.
bool has(std::string text, const std::string& name) {
  std::erase_if(text, [](char c) { return c == '\n' || c == ' '; });
  return text.find(name) != std::string::npos;
}

// As long as they can be: TASK_COMM_LEN, IB_DEVICE_NAME_MAX, a DNS name, a name that runc takes.
const std::string kComm(15, 'c'), kDevice(63, 'd'), kHost(64, 'h'), kAddress = std::string(63, 'a') + ".example.net:65535", kContainer(255, 'n');

template <std::size_t N>
void put(char (&to)[N], const std::string& text) {
  std::memset(to, 0, N);
  std::memcpy(to, text.data(), std::min(text.size(), N));
}

/// Of a context with one of each and with the largest numbers.
ContextRecord largest() {
  ContextRecord c;
  auto& r = c.rec;
  r.ctx_id = r.nr_pd = r.nr_mr = r.nr_cq = r.nr_qp = r.nr_srq = r.nr_other = UINT32_MAX;
  r.pid = 4194304;
  r.mr_bytes = UINT64_MAX;
  r.flags = MIGR_CTX_HYDRATED;
  put(r.comm, kComm);
  put(r.ibdev, kDevice);
  const auto all_ones = [](auto& x) { std::memset(static_cast<void*>(&x), 0xff, sizeof x); };
  all_ones(c.pds.emplace_back()), all_ones(c.mrs.emplace_back()), all_ones(c.cqs.emplace_back()), all_ones(c.qps.emplace_back()), all_ones(c.srqs.emplace_back());
  c.others.emplace_back().type = MIGR_OBJ_XRCD;
  all_ones(c.others[0].rec);
  return c;
}

ContextRecord small() {
  ContextRecord c;
  c.rec.ctx_id = 3, c.rec.pid = 712, c.rec.nr_mr = 2, c.rec.nr_cq = 1, c.rec.nr_qp = 1, c.rec.mr_bytes = 1'234'567, c.rec.flags = MIGR_CTX_ATTACHED;
  put(c.rec.comm, "kv");
  put(c.rec.ibdev, "rxe0");
  auto& q = c.qps.emplace_back();
  q.handle = 5, q.qp_type = 2, q.qp_state = 3, q.vqpn = 0x12, q.pqpn = 0x34, q.pd_handle = 1, q.send_cq_handle = q.recv_cq_handle = 2, q.srq_handle = MIGR_NO_HANDLE;
  auto& m = c.mrs.emplace_back();
  m.handle = 6, m.pd_handle = 1, m.length = 4096, m.vlkey = 7, m.vrkey = 8;
  return c;
}

TEST(Ps, IsATableWithTheContainerToType) {
  const auto text = ps_text({small()}, [](pid_t) { return "web-1"; });
  EXPECT_EQ(text,
            "    PID COMMAND         DEVICE         MR    CQ    QP SRQ MEMORY LIB CONTAINER\n"
            "    712 kv              rxe0            2     1     1   0 1.2 MB yes web-1\n");
  EXPECT_NE(ps_text({small()}, [](pid_t) { return ""; }).find("yes -\n"), std::string::npos);
}

TEST(Ps, FitsWithTheLongestNamesAndCutsNoContainer) {
  const auto text = ps_text({largest(), small()}, [](pid_t pid) { return pid == 712 ? kContainer : std::string(12, 'x'); });
  expect_fits(text);
  EXPECT_TRUE(has(text, kContainer));
  EXPECT_NE(text.find("\n        xxxxxxxxxxxx\n"), std::string::npos) << "one column too long for the table: " << text;
  EXPECT_NE(text.find("record incomplete"), std::string::npos);
}

TEST(Ps, OfAProcessThatHasEndedHasNoNumber) {
  auto c = small();
  c.rec.pid = 0;
  const auto nobodys = [](pid_t) { return "web-1"; };
  const auto text = ps_text({c}, nobodys);
  expect_fits(text);
  EXPECT_NE(text.find("\n      - kv              rxe0 "), std::string::npos) << text;
  EXPECT_NE(text.find("yes -\n        its process has ended"), std::string::npos) << text;
  EXPECT_TRUE(ps_json({c}, nobodys)[0]["pid"].is_null());
  EXPECT_TRUE(ps_json({c}, nobodys)[0]["container"].is_null());
  EXPECT_TRUE(show_text({c}).starts_with("context 3 of a process that has ended (kv) on rxe0, libmigr: yes\n")) << show_text({c});
}

TEST(Ps, InJsonHasAllOfIt) {
  const auto j = ps_json({small(), largest()}, [](pid_t pid) { return pid == 712 ? "web-1" : ""; });
  ASSERT_EQ(j.size(), 2u);
  EXPECT_EQ(j[0].dump(), R"({"ctx_id":3,"pid":712,"comm":"kv","device":"rxe0","libmigr":true,"incomplete":false,"pd":0,"mr":2,"cq":1,"qp":1,"srq":0,"other":0,"mr_bytes":1234567,"container":"web-1"})");
  EXPECT_TRUE(j[1]["container"].is_null());
  EXPECT_TRUE(j[1]["incomplete"]);
  EXPECT_EQ(j[1]["device"], kDevice);
  EXPECT_EQ(j[1]["mr_bytes"], UINT64_MAX);
}

TEST(Show, SaysWhatEachObjectIs) {
  const auto text = show_text({small()});
  EXPECT_EQ(text.substr(0, text.find('\n')), "context 3 of process 712 (kv) on rxe0, libmigr: yes");
  EXPECT_TRUE(has(text, "QP5:RCRTS,number0x12(physical0x34),PD1,CQs2/2,SRQ-")) << text;
  EXPECT_TRUE(has(text, "MR6inPD1:4096bytes")) << text;
}

TEST(Show, FitsWithTheLargestNumbers) {
  const auto text = show_text({largest()});
  expect_fits(text);
  EXPECT_TRUE(has(text, "QP4294967295")) << text;
  EXPECT_TRUE(has(text, "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff")) << "GIDs are not cut: " << text;
  EXPECT_TRUE(has(text, "XRCD")) << text;
}

TEST(Show, InJsonHasAnArrayOfEachKind) {
  const auto j = show_json({small(), largest()});
  ASSERT_EQ(j.size(), 2u);
  EXPECT_EQ(j[0]["qps"][0]["vqpn"], 0x12);
  EXPECT_EQ(j[0]["qps"][0]["type"], "RC");
  EXPECT_EQ(j[0]["mrs"][0]["vrkey"], 8);
  for (const char* kind : {"pds", "mrs", "cqs", "qps", "srqs", "others"}) EXPECT_EQ(j[1][kind].size(), 1u) << kind;
}

TEST(PeersText, FitsAndSaysWhoAnswers) {
  wire::PeersReply r;
  auto* p = r.add_peers();
  p->set_name("dst"), p->set_address("10.0.0.2:7471"), p->set_answers(true);
  p->mutable_version()->set_release("0.1.0");
  auto* silent = r.add_peers();
  silent->set_name(kHost), silent->set_address(kAddress), silent->set_error("failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.3:7471");
  const auto text = peers_text(r);
  expect_fits(text);
  EXPECT_NE(text.find("dst              10.0.0.2:7471            ok, release 0.1.0, migr.ko not loaded\n"), std::string::npos) << text;
  EXPECT_TRUE(has(text, kHost) && has(text, kAddress)) << text;
  const auto j = peers_json(r);
  EXPECT_EQ(j[0].dump(), R"({"name":"dst","address":"10.0.0.2:7471","answers":true,"version":{"release":"0.1.0","wire":0,"abi":0,"proc":0}})");
  EXPECT_EQ(j[1]["answers"], false);
  EXPECT_TRUE(j[1]["error"].get<std::string>().starts_with("failed"));
}

TEST(OpenMigrations, FitAndHaveTheNumberThatRecoverTakes) {
  EXPECT_EQ(open_text({}), "no open migration\n");
  EXPECT_EQ(open_json({}).dump(), "[]");
  wire::RecoverReply r;
  auto* m = r.add_open();
  m->set_id(0xabc), m->set_role("source"), m->set_container(kContainer), m->set_source(kHost), m->set_destination(kHost), m->set_outcome(wire::COMMITTED);
  m->set_state("stands still: " + kHost + " was told to let it run and does not answer; is asked again and again");
  m->add_partners("p");
  const auto text = open_text(r);
  expect_fits(text);
  EXPECT_TRUE(text.starts_with("00000abc  source of")) << text;
  EXPECT_TRUE(has(text, kContainer)) << text;
  const auto j = open_json(r)[0];
  EXPECT_EQ(j["id"], "00000abc");
  EXPECT_EQ(j["migration"], "00000abc") << "as it was called before";
  EXPECT_EQ(j["outcome"], "COMMITTED");
  EXPECT_EQ(j["partners"].dump(), R"(["p"])");
  EXPECT_TRUE(j["phase"].is_null());
  m->set_phase("copy"), m->set_bytes(12), m->set_of_bytes(40);
  const auto k = open_json(r)[0];
  EXPECT_EQ(k["phase"], "copy");
  EXPECT_EQ(k["bytes"], 12);
  EXPECT_EQ(k["of_bytes"], 40);
}

TEST(CancelText, SaysWhereItRuns) {
  wire::CancelReply r;
  auto* m = r.mutable_migration();
  m->set_id(0xabc), m->set_container("web"), m->set_source("src"), m->set_destination("dst"), m->set_state("is being migrated to dst: rollback; it goes back: cancelled by the operator");
  EXPECT_EQ(cancel_text(r), "migration 00000abc of web to dst is cancelled, and not all of it is back yet: is being migrated to dst: rollback; it goes back: cancelled by the operator; see: migrctl recover");
  EXPECT_EQ(cancel_json(r)["state"], m->state());
  EXPECT_EQ(cancel_json(r)["ended"], false);
  r.set_ended(true);
  EXPECT_EQ(cancel_text(r), "migration 00000abc of web to dst is cancelled: web goes on running on src");
  EXPECT_EQ(cancel_json(r).dump(), R"({"id":"00000abc","container":"web","from":"src","to":"dst","ended":true,"state":null})");
  m->set_container("/srv/web"), m->set_destination("src");
  EXPECT_EQ(cancel_text(r), "migration 00000abc of /srv/web to src is cancelled") << "nothing ran";
}

wire::PlanReply plan() {
  wire::PlanReply p;
  auto* s = p.mutable_summary();
  s->set_id(0xabc), s->set_container(kContainer), s->set_from(kHost), s->set_to(kHost), s->add_partners(kHost), s->add_partners("p");
  s->mutable_resources()->set_qp(2);
  p.set_processes(1), p.set_connections(2), p.set_memory_bytes(50'000'000);
  return p;
}

TEST(PlanText, FitsAndSaysWhatWouldMove) {
  ExpectedStop stop;
  stop.estimated = true, stop.median_ms = 400, stop.least_ms = 100, stop.most_ms = 4000;
  const auto text = plan_text(plan(), stop);
  expect_fits(text);
  EXPECT_TRUE(has(text, kContainer + "wouldmovefrom" + kHost + "to" + kHost + ":1processwithRDMA")) << text;
  EXPECT_TRUE(has(text, "partners:" + kHost + ",p(migration00000abc)")) << text;
  EXPECT_TRUE(has(text, "expectedstop:about400ms,between100and4000:anestimate")) << text;
  const auto j = plan_json(plan(), stop);
  EXPECT_EQ(j["id"], "00000abc");
  EXPECT_EQ(j["would_move"], true);
  EXPECT_TRUE(j["refused_because"].is_null());
  EXPECT_EQ(j["expected_stop_ms"].dump(), R"({"median":400.0,"least":100.0,"most":4000.0,"moves":0,"same_container":false,"estimated":true})");
  auto refused = plan();
  refused.mutable_summary()->set_error("no");
  const auto why = with_error(plan_json(refused, {}), "no", 3);
  EXPECT_EQ(why["would_move"], false);
  EXPECT_TRUE(why["expected_stop_ms"].is_null());
  EXPECT_EQ(why["error"], "no");
  EXPECT_EQ(why["status"], 3);
}

TEST(SummaryText, FitsAndSaysWhatWasReplayedAndWhatIsGone) {
  wire::Summary s;
  s.set_container(kContainer), s.set_to(kHost), s.set_service_blackout_ms(12345.6), s.add_partners(kHost), s.set_gone(3);
  s.mutable_replayed()->set_replayed(7), s.mutable_replayed()->set_lost(1);
  const auto text = summary_text(s, "runs on", "are gone");
  expect_fits(text);
  for (const char* what : {"runson", "serviceblackout12345.6ms", "7workrequests", "1atomics", "3connectionstoothersaregone"}) EXPECT_TRUE(has(text, what)) << what << text;
  EXPECT_TRUE(has(text, "partners:" + kHost)) << text;
  s.add_partners("p"), s.set_id(0xabc);
  EXPECT_TRUE(has(summary_text(s, "runs on", "are gone"), "partners:" + kHost + ",p(migration00000abc)"));
  s.clear_replayed(), s.clear_gone();
  EXPECT_FALSE(has(summary_text(s, "runs on", "are gone"), "replayed"));
}

TEST(SummaryText, OfAFailureNamesWhereThereIsMore) {
  wire::Summary s;
  EXPECT_EQ(named_migration(s), "");
  s.set_id(0xabc), s.set_from("src"), s.set_to("dst"), s.add_partners("dst"), s.add_partners("peer");
  EXPECT_EQ(named_migration(s), " (migration 00000abc)");
  EXPECT_EQ(more_text(s), "more: migrctl report 00000abc; on src, dst, peer: journalctl -u migrd -g migration=00000abc");
  s.set_to("/srv/checkpoint"), s.clear_partners();
  EXPECT_NE(more_text(s).find("; on src: "), std::string::npos) << more_text(s);
}

TEST(SummaryText, SaysWhatWasRolledBack) {
  wire::Summary s;
  EXPECT_EQ(rolled_back_text(s), "");
  s.add_rolled_back("destination dst");
  EXPECT_EQ(rolled_back_text(s), "rolled back: destination dst");
  s.add_rolled_back("checkpoint"), s.add_rolled_back("partner p");
  EXPECT_EQ(rolled_back_text(s), "rolled back: destination dst, checkpoint, partner p");
}

TEST(OrderText, SaysHowManyAndInJsonWhatIsLeft) {
  wire::LinkOrderReply r;
  EXPECT_EQ(order_text(r, "", "no link is preferred"), "no link is preferred\n");
  r.set_processes(1);
  EXPECT_EQ(order_text(r, "rxe0", "is down"), "rxe0 is down; 1 process there\n");
  expect_fits(order_text(r, kDevice + "/255", "may be used"));
  EXPECT_EQ(order_json(r).dump(), R"({"done":true,"processes":1,"left":[]})");
  r.add_left("process 7: no backup");
  EXPECT_EQ(order_json(r).dump(), R"({"done":false,"processes":1,"left":["process 7: no backup"]})");
}

TEST(ErrorJson, HasTheSentenceAndTheStatus) { EXPECT_EQ(error_json("no", 3).dump(), R"({"error":"no","status":3})"); }

TEST(Text, OfOthersIsWithoutControlCharacters) {
  EXPECT_EQ(printable("a\033[2J\r\n\tb\x7f"), "a?[2J???b?");
  EXPECT_EQ(printable("\x9b"
                      "2J and \xc2\x9b"
                      "2J"),
            "?2J and \xc2?2J")
      << "CSI in one byte, and of UTF-8";
  const std::string letters = "\xc3\x80\xc3\x9b \xe2\x82\xac \xf0\x9f\x98\x80 \xc2\xa0";
  EXPECT_EQ(printable(letters), letters);
}

// As any user can name a process, and any process with a library what it tells.
const std::string kEvil = "x\033[2J\n\r\x7f\x9b!";
void expect_harmless(const std::string& text) {
  EXPECT_NE(text.find(std::string("x?[2J") + "??" + "??" + "!"), std::string::npos) << text;
  for (const char c : text) EXPECT_TRUE(c == '\n' || (static_cast<unsigned char>(c) >= ' ' && static_cast<unsigned char>(c) < 0x7f)) << static_cast<int>(c) << " in " << text;
  EXPECT_EQ(("\n" + text).find("\n!"), std::string::npos) << text;
}

TEST(Text, NamesOfOthersSteerNoTerminal) {
  auto c = small();
  put(c.rec.comm, kEvil);
  expect_harmless(ps_text({c}, [](pid_t) { return "web-1"; }));
  expect_harmless(show_text({c}));
  expect_harmless(ps_text({small()}, [](pid_t) { return kEvil; }));
  wire::LinksReply r;
  auto* p = r.add_processes();
  p->set_comm(kEvil);
  expect_harmless(links_text(r));
  p->set_comm("kv"), p->add_links()->set_device(kEvil);
  expect_harmless(links_text(r));
  p->clear_links(), p->add_links()->set_why(kEvil);
  expect_harmless(links_text(r));
  p->clear_links(), p->add_without()->set_why(kEvil);
  expect_harmless(links_text(r));
  r.clear_processes(), r.add_ports()->set_netdev(kEvil);
  expect_harmless(links_text(r));
  wire::PeersReply peers;
  peers.add_peers()->set_error(kEvil);
  expect_harmless(peers_text(peers));
  peers.mutable_peers(0)->set_answers(true), peers.mutable_peers(0)->mutable_version()->set_release(kEvil);
  expect_harmless(peers_text(peers));
  for (int field = 0; field < 4; field++) {
    const auto of = [&](int n) { return n == field ? kEvil : "x"; };
    expect_harmless(doctor_text({{"src", "root", Health::kOk, "x", ""}, {of(0), of(1), Health::kFailed, of(2), of(3)}}, false));
  }
  wire::RecoverReply open;
  open.add_open()->set_state(kEvil);
  expect_harmless(open_text(open));
  auto moves = plan();
  moves.mutable_summary()->set_container(kEvil);
  expect_harmless(plan_text(moves, {}));
  expect_harmless(summary_text(moves.summary(), "runs on", "are gone"));
  expect_harmless(order_text({}, kEvil, "is down"));
  Json past = {{"migration", 1}, {"container", kEvil}, {"from", "a"}, {"to", "b"}, {"begun_ms", 0}, {"migrated", false}, {"undecided", false}, {"service_blackout_ms", 0.0}, {"rollback_reason", nullptr}};
  expect_harmless(history_text({past}));
  past["container"] = "c", past["rollback_reason"] = kEvil;
  expect_harmless(history_text({past}));
}

// A comm may be cut in the middle of a character.
TEST(Text, NamesMayBeOfAnyBytes) {
  wire::LinksReply r, read;
  auto* p = r.add_processes();
  p->set_comm("caf\xc3");
  p->add_without()->set_why("of caf\xe9");
  ASSERT_TRUE(read.ParseFromString(r.SerializeAsString()));
  EXPECT_NE(links_text(read).find("(caf\xc3)"), std::string::npos);
  EXPECT_NE(links_json(read).dump(-1, ' ', false, Json::error_handler_t::replace).find("\"comm\":\"caf\xef\xbf\xbd\""), std::string::npos);
}

TEST(Text, CountsAndBytesFitIntoTheirColumns) {
  EXPECT_EQ(short_count(99'999), "99999");
  EXPECT_EQ(short_count(100'000), "100k");
  EXPECT_EQ(short_count(UINT32_MAX), "4294M");
  EXPECT_EQ(short_bytes(0), "0 B");
  EXPECT_EQ(short_bytes(999), "999 B");
  EXPECT_EQ(short_bytes(1000), "1.0 kB");
  EXPECT_EQ(short_bytes(9'960), "10 kB");
  EXPECT_EQ(short_bytes(999'499'999), "999 MB");
  EXPECT_EQ(short_bytes(999'500'000), "1.0 GB");
  EXPECT_EQ(short_bytes(UINT64_MAX), "18 EB");
}

// ---- colour

TEST(Colour, IsForTerminalsOnlyAndNotAgainstNoColor) {
  int terminal[2], pipes[2];
  ASSERT_EQ(openpty(&terminal[0], &terminal[1], nullptr, nullptr, nullptr), 0);
  ASSERT_EQ(pipe(pipes), 0);
  const int file = open("/dev/null", O_WRONLY | O_CLOEXEC);
  unsetenv("NO_COLOR");
  EXPECT_TRUE(may_colour(terminal[1]));
  EXPECT_FALSE(may_colour(pipes[1]));
  EXPECT_FALSE(may_colour(file));
  setenv("NO_COLOR", "", 1);
  EXPECT_TRUE(may_colour(terminal[1])) << "empty is not set";
  setenv("NO_COLOR", "1", 1);
  EXPECT_FALSE(may_colour(terminal[1]));
  unsetenv("NO_COLOR");
  for (const int fd : {terminal[0], terminal[1], pipes[0], pipes[1], file}) close(fd);
}

TEST(Rewriting, IsForTerminalsThatCanDoIt) {
  int terminal[2], pipes[2];
  ASSERT_EQ(openpty(&terminal[0], &terminal[1], nullptr, nullptr, nullptr), 0);
  ASSERT_EQ(pipe(pipes), 0);
  for (const char* term : {"xterm", "dumb", ""}) {
    setenv("TERM", term, 1);
    EXPECT_EQ(may_rewrite(terminal[1]), std::string(term) != "dumb") << term;
    EXPECT_FALSE(may_rewrite(pipes[1]));
  }
  unsetenv("TERM");
  EXPECT_TRUE(may_rewrite(terminal[1])) << "nothing is known of it";
  for (const int fd : {terminal[0], terminal[1], pipes[0], pipes[1]}) close(fd);
}

// ---- progress

struct Printed {
  explicit Printed(bool live) : out(open_memstream(&text, &size)), lines(std::in_place, out, live) {}
  ~Printed() {
    lines.reset();
    fclose(out);
    free(text);
  }
  std::string said() {
    fflush(out);
    return {text, size};
  }
  void phase(const char* name) {
    wire::Progress p;
    p.set_phase(name);
    lines->show(p, {});
  }
  void end(const char* name, double ms) {
    wire::Progress p;
    p.mutable_end()->set_phase(name), p.mutable_end()->set_ms(ms);
    lines->show(p, {});
  }
  void going(const char* name, double ms) {
    wire::Progress p;
    p.mutable_going()->set_phase(name), p.mutable_going()->set_ms(ms);
    lines->show(p, 4000.0);
  }
  void note(const char* what) {
    wire::Progress p;
    p.set_note(what);
    lines->show(p, {});
  }
  char* text = nullptr;
  std::size_t size = 0;
  FILE* out;
  std::optional<PhaseLines> lines;
};

TEST(PhaseLines, ArePrintedOneAfterTheOther) {
  Printed p(false);
  p.phase("check");
  EXPECT_EQ(p.said(), "check      ") << "what begins is seen";
  p.end("check", 12.34);
  p.phase("copy");
  p.end("copy", 1234.5);
  EXPECT_EQ(p.said(), "check           12.3 ms\ncopy          1234.5 ms\n");
}

TEST(PhaseLines, ElsewhereThanOnATerminalALongPhaseSaysSomethingEachTenSeconds) {
  Printed p(false);
  p.phase("copy");
  for (int s = 1; s <= 25; s++) p.going("copy", s * 1000);
  p.end("copy", 25'500);
  p.phase("ready");
  p.going("ready", 9'000);
  p.end("ready", 9'500);
  EXPECT_EQ(p.said(),
            "copy       10 s; stop: about 4 s\n"
            "copy       20 s; stop: about 4 s\n"
            "copy         25500.0 ms\n"
            "ready         9500.0 ms\n");
  EXPECT_EQ(p.said().find('\033'), std::string::npos);
}

TEST(PhaseLines, OnATerminalALineIsBroughtUpToDate) {
  Printed p(true);
  p.phase("copy");
  p.going("copy", 1000);
  p.going("copy", 2000);
  p.end("copy", 2500);
  EXPECT_EQ(p.said(), "\rcopy       \rcopy       1 s; stop: about 4 s\033[K\rcopy       2 s; stop: about 4 s\033[K\rcopy          2500.0 ms\033[K\n");
}

// What is longer than a line goes on in the next one, and is not written over there.
TEST(PhaseLines, OnANarrowTerminalALineIsCut) {
  int terminal[2];
  winsize narrow{};
  narrow.ws_row = 24, narrow.ws_col = 40;
  ASSERT_EQ(openpty(&terminal[0], &terminal[1], nullptr, nullptr, &narrow), 0);
  EXPECT_EQ(columns_of(terminal[1]), 40u);
  FILE* out = fdopen(terminal[1], "w");
  ASSERT_NE(out, nullptr);
  wire::Progress p;
  auto* g = p.mutable_going();
  g->set_phase("copy"), g->set_ms(4200), g->set_bytes(412'000'000), g->set_of_bytes(2048'000'000), g->set_bytes_per_s(95'100'000);
  PhaseLines(out, true).show(p, 3400.0);
  char said[256] = "";
  EXPECT_GT(read(terminal[0], said, sizeof said - 1), 0);
  EXPECT_EQ(std::string(said).substr(0, 40 + 3), "\rcopy       412 of 2048 MB, 95.1 MB/s,..\033[K");
  narrow.ws_col = 0;
  ASSERT_EQ(ioctl(terminal[0], TIOCSWINSZ, &narrow), 0);
  EXPECT_EQ(columns_of(terminal[1]), kColumns) << "it does not say";
  narrow.ws_col = 3;  // less than a name has
  ASSERT_EQ(ioctl(terminal[0], TIOCSWINSZ, &narrow), 0);
  PhaseLines(out, true).show(p, 3400.0);
  fclose(out);
  close(terminal[0]);
}

TEST(PhaseLines, ANoteInTheMiddleHasALineOfItsOwn) {
  Printed p(false), live(true);
  for (auto* x : {&p, &live}) {
    x->phase("check");
    x->note("waiting");
    x->end("check", 1);
    x->note("between");
  }
  EXPECT_EQ(p.said(), "check      waiting\ncheck            1.0 ms\nbetween\n");
  EXPECT_EQ(live.said(), "\rcheck      \r\033[Kwaiting\n\rcheck            1.0 ms\033[K\n\r\033[Kbetween\n");
  Printed evil(false);
  evil.note(kEvil.c_str());
  expect_harmless(evil.said());
}

TEST(PhaseLines, ThatEndInTheMiddleLeaveTheLineToWhatFollows) {
  for (const bool live : {false, true}) {
    Printed p(live);
    p.phase("copy");
    p.lines.reset();
    EXPECT_TRUE(p.said().ends_with(live ? "\r\033[K" : "copy       \n")) << p.said();
  }
}

}  // namespace
}  // namespace migr::ctl_text_test
