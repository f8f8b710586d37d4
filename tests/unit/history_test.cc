// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What is kept of past migrations, and the page about one of them.
#include "agent/history.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "agent/estimate.h"
#include "agent/report.h"
#include "agent/summary.h"
#include "temp_folder.h"

namespace migr::history_test {
namespace {

using Json = nlohmann::ordered_json;

wire::Summary summary(std::uint32_t id, double stop_ms = 100, const std::string& container = "c", const std::string& to = "dst") {
  wire::Summary s;
  s.set_id(id), s.set_container(container), s.set_from("src"), s.set_to(to), s.set_migrated(true), s.set_service_blackout_ms(stop_ms);
  s.set_begun_ms(1'800'000'000'000 + id);
  const auto add = [](wire::PhaseEnd& p, const char* name, double start, double ms) { p.set_phase(name), p.set_start_ms(start), p.set_ms(ms); };
  add(*s.add_phases(), "check", 0, 50);
  add(*s.add_phases(), "freeze", 50, 700);
  add(*s.add_steps(), "freeze.rdma", 60, 300);
  return s;
}
Json json_of(std::uint32_t id, double stop_ms = 100, const std::string& container = "c", const std::string& to = "dst") { return summary_json(summary(id, stop_ms, container, to)); }

struct HistoryFile : ::testing::Test {
  std::string file() const { return dir + "/history.jsonl"; }
  const TempFolder temp;
  const std::string dir = temp.path;
};

TEST_F(HistoryFile, GivesBackExactlyWhatItWasGiven) {
  ASSERT_TRUE(History(dir).add(json_of(7)));
  ASSERT_TRUE(History(dir).add(json_of(8)));
  const auto past = History(dir).read();
  ASSERT_TRUE(past);
  ASSERT_EQ(past->entries.size(), 2u);
  EXPECT_EQ(past->entries[0].dump(), json_of(7).dump());
  EXPECT_EQ(past->entries[1].dump(), json_of(8).dump());
  EXPECT_TRUE(past->warnings.empty());
}

TEST_F(HistoryFile, IsForItsOwnerOnly) {
  ASSERT_TRUE(History(dir).add(json_of(7)));
  struct stat st {};
  ASSERT_EQ(stat(file().c_str(), &st), 0);
  EXPECT_EQ(st.st_mode & 07777, 0600u);
}

TEST_F(HistoryFile, TheOldestGoWhenThereAreTooMany) {
  for (std::uint32_t i = 1; i <= 7; i++) ASSERT_TRUE(History(dir, 3).add(json_of(i)));
  const auto past = History(dir).read();
  ASSERT_EQ(past->entries.size(), 3u);
  EXPECT_EQ(past->entries[0]["migration"], 5);
  EXPECT_EQ(past->entries[2]["migration"], 7);
}

TEST_F(HistoryFile, NoneIsNoError) {
  const auto past = History(dir).read();
  ASSERT_TRUE(past);
  EXPECT_TRUE(past->entries.empty());
}

TEST_F(HistoryFile, LinesThatAreNoSummaryArePassedOverWithAWarning) {
  Json no_stop = json_of(2), bad_phase = json_of(3), text_id = json_of(4);
  no_stop.erase("service_blackout_ms");
  bad_phase["timeline"][0]["ms"] = "long";
  text_id["migration"] = "4";
  std::ofstream(file()) << json_of(1).dump() << "\n{\"container\": \n[]\n\n"
                        << no_stop.dump() << "\n"
                        << bad_phase.dump() << "\n"
                        << text_id.dump() << "\n"
                        << json_of(9).dump();
  const auto past = History(dir).read();
  ASSERT_TRUE(past);
  ASSERT_EQ(past->entries.size(), 2u);
  EXPECT_EQ(past->entries[1]["migration"], 9);
  ASSERT_EQ(past->warnings.size(), 6u);
  EXPECT_NE(past->warnings[0].find("history.jsonl line 2"), std::string::npos) << past->warnings[0];
  // And they do not come between later ones.
  ASSERT_TRUE(History(dir).add(json_of(10)));
  EXPECT_EQ(History(dir).read()->entries.size(), 3u);
  EXPECT_TRUE(History(dir).read()->warnings.empty());
}

TEST_F(HistoryFile, SaysHowAnUndecidedOneEnded) {
  auto s = summary(7, 123);
  s.set_migrated(false), s.set_undecided(true), s.set_error("outcome not known");
  wire::Summary end = summary(7, 0);
  for (const bool before : {true, false}) {  // the other word may come first
    std::filesystem::remove(file());
    ASSERT_TRUE(before ? History(dir).settle(summary_json(end)) : History(dir).add(summary_json(s)));
    ASSERT_TRUE(before ? History(dir).add(summary_json(s)) : History(dir).settle(summary_json(end)));
    const auto past = History(dir).read();
    ASSERT_EQ(past->entries.size(), 1u);
    EXPECT_EQ(outcome_of(past->entries[0]), "moved");
    EXPECT_TRUE(past->entries[0]["rollback_reason"].is_null());
    EXPECT_EQ(past->entries[0]["service_blackout_ms"], 123.0) << "figures stay";
  }
}

TEST_F(HistoryFile, KeepsTheReasonOfOneThatWentBackAndWasTidiedUpLater) {
  auto s = summary(7), end = summary(7);
  s.set_migrated(false), s.set_error("the reason");
  end.set_migrated(false), end.set_error("by itself");
  ASSERT_TRUE(History(dir).add(summary_json(s)));
  ASSERT_TRUE(History(dir).settle(summary_json(end)));
  EXPECT_EQ(History(dir).read()->entries.at(0)["rollback_reason"], "the reason");
}

TEST_F(HistoryFile, TrafficOfPartnersIsThereOrNot) {
  auto j = json_of(1);
  j["partner_figures"] = Json::array({{{"host", "p"}, {"blackout_ms", 1}, {"suspended_ms", 1}, {"replayed_sends", 0}, {"replayed_recvs", 0}}});
  const auto kept = [&] {
    std::ofstream(file()) << j.dump() << "\n";
    return History(dir).read()->entries.size();
  };
  EXPECT_EQ(kept(), 1u) << "written by an older migrd";
  for (const char* good : {"null", R"({"at_ms":[1],"rx_mbps":[2],"tx_mbps":[3]})", R"({"at_ms":[],"rx_mbps":[],"tx_mbps":[]})"}) {
    j["partner_figures"][0]["traffic"] = Json::parse(good);
    EXPECT_EQ(kept(), 1u) << good;
  }
  for (const char* bad : {R"({"at_ms":[1],"rx_mbps":[],"tx_mbps":[3]})", R"({"rx_mbps":[2],"tx_mbps":[3]})", "[]", R"({"at_ms":["<b>"],"rx_mbps":[2],"tx_mbps":[3]})"}) {
    j["partner_figures"][0]["traffic"] = Json::parse(bad);
    EXPECT_EQ(kept(), 0u) << bad;
  }
}

TEST_F(HistoryFile, WhatWasRolledBackIsWordsOrNotThere) {
  auto j = json_of(1);
  const auto kept = [&] {
    std::ofstream(file()) << j.dump() << "\n";
    return History(dir).read()->entries.size();
  };
  j["rolled_back"] = {"network"};
  EXPECT_EQ(kept(), 1u);
  for (const Json& bad : {Json("network"), Json{1}, Json(nullptr)}) {
    j["rolled_back"] = bad;
    EXPECT_EQ(kept(), 0u) << bad;
  }
  j.erase("rolled_back");
  EXPECT_EQ(kept(), 1u) << "written by an older migrd";
}

TEST_F(HistoryFile, TakesAnErrorThatIsNoUtf8) {
  auto s = summary(7);
  s.set_error("CRIU said \xff\xfe");
  ASSERT_TRUE(History(dir).add(summary_json(s)));
  EXPECT_EQ(History(dir).read()->entries.size(), 1u);
}

TEST_F(HistoryFile, ThatCannotBeWrittenIsAnError) { EXPECT_FALSE(History(dir + "/none").add(json_of(7))); }

TEST(PastMigrations, AreFoundByNumberTheLastFirst) {
  const std::vector<Json> all = {json_of(7, 1), json_of(8, 2), json_of(7, 3)};
  ASSERT_TRUE(find_migration(all, 7));
  EXPECT_EQ((*find_migration(all, 7))["service_blackout_ms"], 3.0);
  EXPECT_FALSE(find_migration(all, 9));
}

TEST(PastMigrations, SayWhereOneWentLast) {
  auto back = summary(4, 1, "c", "third");
  back.set_migrated(false);
  const std::vector<Json> all = {json_of(1, 1, "c", "first"), json_of(2, 1, "c", "second"), json_of(3, 1, "other", "third"), summary_json(back)};
  ASSERT_TRUE(last_move(all, "c"));
  EXPECT_EQ((*last_move(all, "c"))["to"], "second");
  EXPECT_FALSE(last_move(all, "nobody"));
  EXPECT_FALSE(last_move({json_of(5, 1, "c", "src")}, "c")) << "restored here";
}

TEST(PastMigrations, SayHowTheyEnded) {
  auto s = summary(7);
  EXPECT_EQ(outcome_of(summary_json(s)), "moved");
  s.set_migrated(false);
  EXPECT_EQ(outcome_of(summary_json(s)), "went back");
  s.set_undecided(true);
  EXPECT_EQ(outcome_of(summary_json(s)), "undecided");
}

TEST(PastMigrations, TextFitsIntoEightyColumns) {
  const auto text = history_text({json_of(7, 1234567.8, std::string(100, 'x'), std::string(100, 'y')), json_of(0xabcdef12)});
  EXPECT_NE(text.find("00000007"), std::string::npos);
  EXPECT_NE(text.find("src -> dst"), std::string::npos);
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 80u) << line;
}

TEST(PastMigrations, WhatIsCutInATableIsWholeBelow) {
  const std::string what(20, 'x'), to(15, 'y');
  auto back = summary(8);
  back.set_migrated(false), back.set_error("hostB: " + std::string(30, 'r') + " " + std::string(60, 's'));
  std::istringstream lines(history_text({json_of(7, 1, what), json_of(7, 1, "c", to), summary_json(back), json_of(9)}));
  std::vector<std::string> all;
  for (std::string line; std::getline(lines, line);) all.push_back(line);
  ASSERT_EQ(all.size(), 9u);
  EXPECT_NE(all[1].find(std::string(12, 'x') + ".. "), std::string::npos) << all[1];
  EXPECT_EQ(all[2], "         " + what + ": src -> dst");
  EXPECT_EQ(all[4], "         c: src -> " + to);
  EXPECT_NE(all[5].find("went back"), std::string::npos) << all[5];
  EXPECT_EQ(all[6], "         hostB: " + std::string(30, 'r'));
  EXPECT_EQ(all[7], "         " + std::string(60, 's'));
  EXPECT_TRUE(all[8].starts_with("00000009")) << all[8];
}

TEST(ExpectedStop, IsTheMedianOfTheSameContainersMoves) {
  const auto e = expected_stop({json_of(1, 10), json_of(2, 900, "other"), json_of(3, 30), json_of(4, 20)}, "c");
  ASSERT_TRUE(e);
  EXPECT_TRUE(e->same);
  EXPECT_EQ(e->moves, 3u);
  EXPECT_EQ(e->median_ms, 20);
  EXPECT_EQ(e->least_ms, 10);
  EXPECT_EQ(e->most_ms, 30);
}

TEST(ExpectedStop, IsThatOfOthersIfThereAreNone) {
  const auto e = expected_stop({json_of(1, 10, "a"), json_of(2, 20, "b")}, "c");
  ASSERT_TRUE(e);
  EXPECT_FALSE(e->same);
  EXPECT_EQ(e->median_ms, 15);
}

TEST(ExpectedStop, DoesNotGoByWhatWentBackOrIsAFolder) {
  auto back = summary(1);
  back.set_migrated(false);
  EXPECT_FALSE(expected_stop({summary_json(back), json_of(2, 10, "c", "/var/checkpoint")}, "c"));
  EXPECT_FALSE(expected_stop({json_of(3, 0)}, "c")) << "not known";
  EXPECT_FALSE(expected_stop({}, "c"));
}

TEST_F(HistoryFile, GivesEachEntryTheNumberThatLogsHave) {
  auto old = json_of(0xabc);
  old.erase("id");
  std::ofstream(file()) << old.dump() << "\n";
  EXPECT_EQ(History(dir).read()->entries.at(0)["id"], "00000abc");
  EXPECT_EQ(json_of(0x0a1b2c3d)["id"], "0a1b2c3d");
  EXPECT_EQ(json_of(0x0a1b2c3d)["migration"], 0x0a1b2c3d) << "the same as it was before";
}

// ---- where nothing was moved yet

StopParts parts(std::uint64_t memory, bool pre_copy = false, std::uint32_t qps = 2) { return {memory, pre_copy, qps, 0}; }

TEST(EstimatedStop, IsMarkedAndHasBoundsAroundIt) {
  for (const auto& p : {parts(0, false, 0), parts(10 << 20), parts(4ull << 30, true, 4096)}) {
    const auto e = estimated_stop(p);
    EXPECT_TRUE(e.estimated);
    EXPECT_EQ(e.moves, 0u);
    EXPECT_GT(e.least_ms, 0);
    EXPECT_LT(e.least_ms, e.median_ms);
    EXPECT_LT(e.median_ms, e.most_ms);
  }
}

TEST(EstimatedStop, HoldsWhatWasMeasuredBetweenEmulatedHosts) {
  // bench/README.md: 16 and 1024 QPs, some MB of memory.
  for (const auto& [qps, measured_ms] : {std::pair{16u, 3971.0}, {1024u, 8600.0}}) {
    const auto e = estimated_stop(parts(20'000'000, false, qps));
    EXPECT_GT(measured_ms, e.median_ms) << "hardware is faster";
    EXPECT_LT(measured_ms, e.most_ms * 1.1);
  }
}

TEST(EstimatedStop, GrowsWithMemoryAndQps) {
  const auto some = estimated_stop(parts(1 << 30)), more = estimated_stop(parts(2u << 30)), qps = estimated_stop(parts(1 << 30, false, 1024));
  EXPECT_GT(more.least_ms, some.least_ms);
  EXPECT_GT(more.median_ms, some.median_ms);
  EXPECT_GT(qps.median_ms, some.median_ms);
}

TEST(EstimatedStop, OfACopyAheadIsReadBackOnly) {
  const auto whole = estimated_stop(parts(4ull << 30)), ahead = estimated_stop(parts(4ull << 30, true)), more = estimated_stop(parts(8ull << 30, true));
  EXPECT_LT(ahead.median_ms, whole.median_ms);
  EXPECT_LT(ahead.median_ms, more.median_ms);
  EXPECT_EQ(ahead.most_ms, whole.most_ms) << "all of it may change";
}

TEST(EstimatedStop, IsNoFasterThanTheLink) {
  auto p = parts(1'000'000'000);
  const auto unknown = estimated_stop(p);
  p.link_bytes_per_s = 1e9 / 8;  // 1 Gbit/s: 8 s
  const auto slow = estimated_stop(p);
  EXPECT_GT(slow.least_ms, 8000);
  EXPECT_LT(slow.least_ms, 8000 + unknown.least_ms);
  p.link_bytes_per_s = 1e12;
  EXPECT_EQ(estimated_stop(p).median_ms, unknown.median_ms);
}

TEST(EstimatedStop, GivesWayToWhatOthersTookUnlessThereIsMuchMoreToMove) {
  const auto others = expected_stop({json_of(1, 4000, "a"), json_of(2, 1000, "b")}, "c");
  const auto little = likely_stop(others, estimated_stop(parts(1 << 20))), much = likely_stop(others, estimated_stop(parts(64ull << 30)));
  EXPECT_FALSE(little.estimated);
  EXPECT_EQ(little.median_ms, 2500);
  EXPECT_TRUE(much.estimated);
  EXPECT_GT(much.median_ms, 4000);
  EXPECT_TRUE(likely_stop(std::nullopt, estimated_stop(parts(1 << 20))).estimated) << "there are none";
}

TEST(EstimatedStop, SaysThatItIsOne) {
  const auto text = expected_text(estimated_stop(parts(1 << 20)));
  EXPECT_NE(text.find("an estimate"), std::string::npos) << text;
  EXPECT_NE(text.find("nothing like it was moved"), std::string::npos) << text;
  EXPECT_TRUE(expected_json(estimated_stop(parts(1 << 20)))["estimated"]);
  const auto known = *expected_stop({json_of(1, 10)}, "c");
  EXPECT_EQ(expected_text(known), "expected stop: 10 ms (10 to 10 in 1 move of it)");
  EXPECT_FALSE(expected_json(known)["estimated"]);
}

TEST(LinkRate, IsOfTheNetdevThatLeadsThere) {
  EXPECT_EQ(link_rate("127.0.0.1:7471"), 0) << "lo says none";
  for (const char* bad : {"", "no-port", "no.such.host.invalid:1", "[::1]:7471"}) EXPECT_EQ(link_rate(bad), 0) << bad;
}

TEST(GoingText, SaysRateAndRest) {
  wire::Going g;
  g.set_ms(4200);
  EXPECT_EQ(going_text(g, {}), "4 s");
  EXPECT_EQ(going_text(g, 3400), "4 s; stop: about 4 s");
  g.set_of_bytes(2048'000'000);
  EXPECT_EQ(going_text(g, {}), "0.0 of 2048 MB");
  EXPECT_EQ(sent_text(12'000'000, 2'048'000'000), "12.0 of 2048 MB");
  g.set_bytes(412'000'000);
  g.set_bytes_per_s(95'100'000);
  EXPECT_EQ(going_text(g, 3400), "412 of 2048 MB, 95.1 MB/s, 18 s left; stop: about 4 s");
  g.set_stopped_ms(2000);
  EXPECT_EQ(going_text(g, 3400), "412 of 2048 MB, 95.1 MB/s, 18 s left; stopped 2 s of about 4 s");
  EXPECT_EQ(going_text(g, {}), "412 of 2048 MB, 95.1 MB/s, 18 s left; stopped 2 s");
  g.set_stop_over(true), g.set_stopped_ms(0);
  EXPECT_EQ(going_text(g, 3400), "412 of 2048 MB, 95.1 MB/s, 18 s left");
  g.set_stopped_ms(2000);
  g.set_bytes(2100'000'000);  // more than was thought
  EXPECT_EQ(going_text(g, {}), "2100 of 2100 MB, 95.1 MB/s, 0 s left; stopped 2 s");
  g.set_of_bytes(99'999'000'000), g.set_bytes(12'345'000'000), g.set_bytes_per_s(1'000'000'000), g.set_stopped_ms(12'000);
  EXPECT_LE(11 + going_text(g, 40'000).size(), 80u);
}

TEST(Report, HasPhasesPartsAndPartners) {
  auto s = summary(0x1a2b);
  auto* f = s.add_partner_figures();
  f->set_host("peer"), f->set_blackout_ms(123.4), f->set_replayed_sends(17);
  const auto html = report_html(summary_json(s));
  for (const char* what : {"<svg", "00001a2b", ">check</text>", ">freeze</text>", ">freeze.rdma</text>", "700.0 ms", "<td>peer</td><td>123.4 ms</td>", "<td>17</td>", "moved"})
    EXPECT_NE(html.find(what), std::string::npos) << what;
}

TEST(Report, SaysWhatWasRolledBack) {
  auto s = summary(7);
  EXPECT_EQ(report_html(summary_json(s)).find("rolled back"), std::string::npos);
  s.add_rolled_back("destination <i>"), s.add_rolled_back("network");
  EXPECT_NE(report_html(summary_json(s)).find("<th>rolled back</th><td>destination &lt;i&gt;, network</td>"), std::string::npos);
  auto older = summary_json(s);
  older.erase("rolled_back");
  EXPECT_EQ(report_html(older).find("rolled back"), std::string::npos);
}

TEST(Report, DrawsBarsWhereTheyWere) {
  const auto html = report_html(json_of(7));
  // 750 ms are all of 700 px behind 170 px of names.
  EXPECT_NE(html.find("<rect x=\"216.7\" y=\"53\" width=\"653.3\""), std::string::npos) << html;
}

TEST(Report, DrawsWhatPartnersHadOfIt) {
  auto s = summary(7);
  auto* f = s.add_partner_figures();
  f->set_host("peer");
  EXPECT_EQ(report_html(summary_json(s)).find("carried"), std::string::npos) << "not known";
  for (const auto& [at_ms, bytes] : {std::pair{100u, 1'000'000u}, {200u, 0u}, {300u, 500'000u}}) {
    auto* sample = f->mutable_traffic()->add_samples();
    sample->set_at_ms(at_ms), sample->set_length_us(100'000), sample->set_rx_bytes(bytes);
  }
  const auto json = summary_json(s);
  EXPECT_EQ(json["partner_figures"][0]["traffic"]["rx_mbps"], (Json{80, 0, 40}));
  const auto html = report_html(json);
  EXPECT_NE(html.find("ports of peer carried"), std::string::npos);
  EXPECT_NE(html.find(">80 Mbit/s<"), std::string::npos) << html;
  // 750 ms are 700 px behind 170 px of names, 80 Mbit/s 120 px below 30.
  EXPECT_NE(html.find("M170.0,30.0 H263.3 L263.3,150.0 H356.7 L356.7,90.0 H450.0"), std::string::npos) << html;
}

TEST(Report, DrawsNothingOfWhatWasBeforeTheFirstSampleThatIsKept) {
  auto s = summary(7);
  s.mutable_phases(1)->set_ms(99'950);  // 100 s are 700 px
  auto* f = s.add_partner_figures();
  for (const std::uint32_t at_ms : {40'000u, 50'000u, 60'000u}) {
    auto* sample = f->mutable_traffic()->add_samples();
    sample->set_at_ms(at_ms), sample->set_length_us(10'000'000), sample->set_rx_bytes(100'000'000);
  }
  const auto html = report_html(summary_json(s));
  EXPECT_NE(html.find("M380.0,30.0 H450.0 L450.0,30.0 H520.0"), std::string::npos) << html;
  f->mutable_traffic()->mutable_samples()->DeleteSubrange(1, 2);
  EXPECT_NE(report_html(summary_json(s)).find("M443.0,30.0 H450.0"), std::string::npos) << "one of when nothing happened";
}

TEST(Report, LoadsNothing) {
  const auto html = report_html(json_of(7));
  for (const char* what : {"http:", "https:", "src=", "<script", "<link", "@import", "url("}) EXPECT_EQ(html.find(what), std::string::npos) << what;
}

TEST(Report, EscapesWhatOthersHaveNamed) {
  auto s = summary(7, 1, "<script>alert('x')</script>");
  s.set_migrated(false), s.set_error("a < b & \"c\"");
  s.mutable_phases(0)->set_phase("<b>");
  s.add_partner_figures()->set_host("<i>");
  const auto html = report_html(summary_json(s));
  for (const char* what : {"<script>", "<b>", "<i>", "a < b"}) EXPECT_EQ(html.find(what), std::string::npos) << what;
  for (const char* what : {"&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;", "&lt;b&gt;", "<td>&lt;i&gt;</td>", "a &lt; b &amp; &quot;c&quot;"})
    EXPECT_NE(html.find(what), std::string::npos) << what;
}

}  // namespace
}  // namespace migr::history_test
